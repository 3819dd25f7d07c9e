"""Remove T.assume for backends that prove nothing with it."""

from __future__ import annotations

from tilelang.ir import EMPTY, Evaluate, Func, Stmt, rewrite

from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE)
def drop_assumptions(func: Func, cx: PassContext) -> Func:
    """The program without T.assume, which only proofs of the GPU passes use.  The host checks what it can evaluate.

        T.assume(n % 8 == 0)
        T.copy(A, s)            ->   T.copy(A, s)
    """
    def drop(s: Evaluate) -> Stmt | None:
        return EMPTY if s.call.op == "assume" else None

    out: Func = rewrite(func, drop, Evaluate)
    return out
