"""Simplifies quotients in unrolled loops that are equal in all lanes, or that split into two simpler quotients.

    j0 = tx % 8 * 8                                   j0 = tx % 8 * 8
    for v in unroll(8):                               for v in unroll(8):
        j = j0 + v                          ->            j = j0 + v
        P[v] = W[j // 2] * scale[j // 32]                 P[v] = W[tx % 8 * 4 + v // 2] * scale[tx // 4 % 2]

CUDA's compiler does not see that `j0 + v` carries nothing into the bits of j0.  It would compute the address of a group's
scale, and load the scale, for each element of the group.
"""

from __future__ import annotations

from tilelang.arith import LaunchFacts
from tilelang.ir import (Binary, Bind, Call, Const, Expr, For, Func, Launch, Load, Var, contains, free_vars, is_large, rewrite,
                         rewrite_launches, substitute, walk)

from ..framework.pass_ import DEVICE, PassContext, pass_


@pass_(needs=DEVICE)
def lane_quotients(func: Func, cx: PassContext) -> Func:
    """Rewrite (b + v) // c and (b + v) % c in unrolled loops over v, where what is bound in b shows that they split."""
    return rewrite_launches(func, _parted)


def _parted(launch: Launch) -> Launch:
    facts, values = LaunchFacts(launch, free_vars(launch)), dict[Var, Expr]()
    lanes: set[Var] = set()
    for s in walk(launch.body, For, Bind):
        if isinstance(s, For):
            facts.enter_loop(s)
            lanes |= {s.var} if s.kind in ("unroll", "vectorized") else set()
            continue
        facts.enter_bind(s)
        value = substitute(s.value, values) if s.var.dtype.is_int and s.var.dtype.lanes == 1 else s.value
        if value.dtype.is_int and not contains(value, Load, Call) and not is_large(value):
            values[s.var] = value  # what is computed again at the place of use must not have changed in between

    def mixes(x: Expr) -> bool:
        """Whether the dividend of a quotient is a sum with a lane."""
        return _divides(x) and not lanes.isdisjoint(used := free_vars(x)) and not used <= lanes

    def parted(x: Binary) -> Expr | None:
        if not _divides(x) or lanes.isdisjoint(free_vars(whole := substitute(x, values))) or not mixes(whole):
            return None
        out = facts.analyzer.simplify(whole)
        return None if any(map(mixes, walk(out, Binary))) else out

    return rewrite(launch, parted, Binary) if lanes else launch  # type: ignore[no-any-return]


def _divides(x: Expr) -> bool:
    return isinstance(x, Binary) and x.op in ("floordiv", "floormod") and isinstance(x.b, Const) and x.b.value > 0
