"""Fold conditions and values that the number of threads of the block decides.

    with T.Kernel(1, threads=64):             F[3] = 1
        if tx < 64: F[3] = 1           ->     for i in T.Parallel(8): O[i] = A[i]
        for i in T.Parallel(8):
            O[i] = A[i + tx // 64]

Only expressions of thread numbers are folded. A branch that no thread takes is removed with its statements. Runs before
the passes that ask which threads reach a statement.
"""

from __future__ import annotations

from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (Bind, Buffer, Call, Const, Expr, For, If, Launch, Load, Node, Parallel, Seq, Stmt, Store, TileOp, Var,
                         While, contains, rebuild, replace, seq, walk, with_inner, EMPTY, LOCAL, VARIABLE)
from tilelang.ir.visitor import mapped
from tilelang.target.thread_calls import COUNTS_THREADS, PER_THREAD
from tilelang.target.warp_groups import WARP_LANES, warps_of

from ..analysis.guards import with_ranges
from ..framework.pass_ import TILE, PassContext, pass_


_OF_THREADS = COUNTS_THREADS | PER_THREAD


@pass_(needs=TILE, of=Launch)
def fold_thread_count(n: Launch, cx: PassContext) -> Any:
    """Fold branches that all threads or none take, and values in block-wide work that are the same for all threads.

    Applies to every target. `tx < 64` holds in a block of 64 threads; `tx // 128` is 1 in warp group 1. A block with a GEMM, of
    fewer threads than a warp of the target has, gets a whole warp where nothing in its body is run by single threads.
    """
    named = _names_threads(n.body, set(n.thread_vars))
    warp = getattr(cx.target, "warp_size", 0)
    if not named and n.num_threads < warp > WARP_LANES and _for_blocks(n.body):
        return replace(n, threads=(warp, 1, 1))
    return with_inner(n, lambda s: _Settled(n).stmt(s, with_ranges(Analyzer(), n))) if named else None


def _for_blocks(n: Node) -> bool:
    """Whether a GEMM is below n, and nothing there counts threads or is done once by each of them."""
    here = [x for x in walk(n, TileOp, Call, Store) if not isinstance(x, Store) or x.buffer.scope_name not in (LOCAL, VARIABLE)]
    inside = {id(x) for p in walk(n, Parallel) for x in walk(p, Call, Store)}
    return any(isinstance(x, TileOp) and x.op_name == "gemm" for x in here) and not any(
        isinstance(x, Store) or isinstance(x, Call) and x.op in _OF_THREADS for x in here if id(x) not in inside)


def _names_threads(n: Node, of: set[Var]) -> bool:
    """Whether a value that depends on these variables may decide something below n."""
    return any(v in of for v in walk(n, Var))


class _Settled:
    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.of_threads: set[Var] = set(launch.thread_vars)

    def stmt(self, s: Stmt, a: Analyzer) -> Stmt:
        """s with the decided conditions folded. a: what is known of the threads that reach s."""
        match s:
            case Seq():
                new: list[Stmt] = []
                for x in s.stmts:
                    new.append(self.stmt(x, a))
                    if isinstance(x, Bind) and _names_threads(x.value, self.of_threads):
                        self.of_threads.add(x.var)
                        if x.var.dtype.is_int and x.var.dtype.lanes == 1 and not contains(x.value, Load, Call):
                            a = a.bind(x.var, *a.interval(x.value))
                return s if all(x is y for x, y in zip(new, s.stmts)) else seq(*new, span=s.span)
            case For() | While():
                return with_inner(s, lambda x: self.stmt(x, a))  # type: ignore[no-any-return]
            case If():
                return self.branch(s, a)
            case Parallel() | TileOp():
                return self.work(s, a) if _names_threads(s, self.of_threads) else s  # type: ignore[no-any-return]
        return s

    def branch(self, s: If, a: Analyzer) -> Stmt:
        of_threads = _names_threads(s.cond, self.of_threads)
        if of_threads and not contains(s.cond, Load, Call):
            cond = a.simplify(s.cond)
            if isinstance(cond, Const):
                part = s.then if cond.value else s.orelse
                return EMPTY if part is None else self.stmt(part, a)
        yes, no = (a.assuming(s.cond), a.assuming(s.cond, False)) if of_threads else (self._groups(s.cond, a), a)
        return with_inner(s, lambda x: self.stmt(x, yes if x is s.then else no))  # type: ignore[no-any-return]

    def _groups(self, cond: Expr, a: Analyzer) -> Analyzer:
        """The known facts about the threads inside a branch by warp group."""
        if (warps := warps_of(cond)) is not None and self.launch.threads[1:] == (1, 1):
            tx, (first, count) = self.launch.thread_vars[0], warps
            low, high = a.interval(tx)
            if low is not None and high is not None:
                return a.bind(tx, max(low, first * WARP_LANES), min(high, (first + count) * WARP_LANES - 1))
        return a

    def work(self, n: Any, a: Analyzer) -> Any:
        """Block-wide work with each thread-dependent value that is the same for all threads replaced by that constant."""
        if isinstance(n, tuple):
            return mapped(lambda x: self.work(x, a), n)
        if not isinstance(n, Node) or isinstance(n, (Buffer, Const)) or not _names_threads(n, self.of_threads):
            return n
        if isinstance(n, Expr) and n.dtype.is_int and n.dtype.lanes == 1 and not contains(n, Load, Call):
            low, high = a.interval(n)
            if low is not None and low == high:
                return Const(low, n.dtype, span=n.span)
        return rebuild(n, lambda x: self.work(x, a))
