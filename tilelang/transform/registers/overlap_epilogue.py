"""Stores accumulator columns that are final while the last wgmma of the other columns runs.

    wgmma(last, …); wgmma_commit                    wgmma(last, …); wgmma_commit
    wgmma_wait; arrive(empty)                       stage = C[0:32]; tma_store(stage)
    for r: C[64 + r] += last[r] * s         ->      wgmma_wait; arrive(empty)
    stage = C[0:32]; tma_store(stage)               for r: C[64 + r] += last[r] * s
    stage = C[64:96]; tma_store(stage)              stage = C[64:96]; tma_store(stage)

Where the columns of a tile are computed in chunks (split_accumulators.py), all chunks but the last are final when the last
wgmma is issued.  A warp group stores them, one TMA box after another (ops/tma_store.py), in the time that it would
otherwise wait for this wgmma.  Nothing else can hide that time, because both warp groups reach the end of a tile together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (Alloc, Const, Evaluate, Expr, For, Func, If, Launch, Ramp, Seq, Stmt, Var, rewrite_launches,
                         rewrite_stmts, seq, statements, LOCAL)
from tilelang.ir.expr import Call
from tilelang.ir.record import record

from ..analysis.effects import Effect, effects
from ..framework.pass_ import DEVICE, PassContext, pass_

# Operations that may lie between a wgmma and the stores, and that stores may be moved in front of; the start of another wgmma
# is one of them.
_PASSED = frozenset(("wgmma_wait", "wgmma_pin", "sync_warp", "mbarrier_arrive", "wgmma_fence", "wgmma", "wgmma_commit",
                     "wgmma_descriptor"))
_OF_STORES = frozenset(("bulk_wait", "named_barrier", "stmatrix", "fence_proxy_async", "tma_store", "bulk_commit"))


@pass_(needs=DEVICE)
def overlap_epilogue(func: Func, cx: PassContext) -> Func:
    """Move stores that do not read the last wgmma's accumulator in front of the wait for it.

    Keeps: the order of the stores, of everything else, and what each reads.  The staging memory is no operand of the wgmma.
    """
    return rewrite_launches(func, _moved)


def _moved(launch: Launch) -> Launch:
    if not any(isinstance(e.node, Call) and e.node.op == "tma_store" for e in effects(launch.body)):
        return launch
    places = _Places(launch)
    return rewrite_stmts(launch, lambda x: _in_order(x, places) if isinstance(x, Seq) else None)  # type: ignore[no-any-return]


@record
class _Access:
    """An access of a register or an element: storage, whether it is written, first and last element (None: any)."""

    storage: Var
    writes: bool
    span: tuple[int, int] | None

    def meets(self, other: _Access) -> bool:
        """Whether the two accesses must keep their order."""
        if self.storage is not other.storage or not (self.writes or other.writes):
            return False
        a, b = self.span, other.span
        return a is None or b is None or a[0] <= b[1] and b[0] <= a[1]


class _Places:
    """Byte ranges of the shared buffers; two buffers may overlap."""

    def __init__(self, launch: Launch) -> None:
        self.bytes: dict[Var, tuple[int, int] | None] = {}
        for b, at in launch.plan.shared_offsets:
            known = isinstance(at, int) and b.is_static
            self.bytes[b.data] = (at, at + b.size * b.dtype.bits // 8) if known else None

    def disjoint(self, one: Var, other: Var) -> bool:
        """Whether two storages have disjoint memory."""
        if one is other:
            return False
        a, b = self.bytes.get(one, (0, 0)), self.bytes.get(other, (0, 0))
        return a is not None and b is not None and (a[1] <= b[0] or b[1] <= a[0])


def _in_order(s: Seq, places: _Places) -> Stmt | None:
    """The statements with stores moved; None where no store may move."""
    stmts = list(s.stmts)
    waits = [n for n, x in enumerate(stmts) if _op(x) == "wgmma_wait" and x.call.options.n == 0]  # type: ignore[attr-defined]
    if not waits:
        return None
    wait = waits[-1]
    start = next((n for n in range(wait) if _op(stmts[n]) == "wgmma" and not any(
        _op(x) == "wgmma_wait" for x in stmts[n:wait])), None)
    first = next((n for n in range(wait, len(stmts)) if _begins(stmts[n])), None)
    if start is None or first is None:
        return None
    passed = [x for x in stmts[wait:first] if not isinstance(x, Alloc)]
    if not all(map(_may_be_passed, passed)):
        return None
    running = {e.storage for x in (*stmts[start:wait], *passed) for e in effects(x)}
    blocked = [a for x in passed for a in _accesses(x)]
    end = first
    for step in _steps(stmts, first):
        found = [a for x in stmts[step.start:step.stop] for a in _accesses(x)]
        written = {a.storage for a in found if a.writes}
        if any(a.meets(b) for a in found for b in blocked) or any(
                not places.disjoint(v, other) for v in written for other in running):
            break
        end = step.stop
    if end == first:
        return None
    made = [x for x in stmts[wait:first] if isinstance(x, Alloc)]
    return seq(*stmts[:wait], *made, *stmts[first:end], *passed, *stmts[end:], span=s.span)


def _steps(stmts: Sequence[Stmt], first: int) -> Iterator[range]:
    """The ranges of statements that each store one TMA box, from `first` on, one directly after another."""
    begin = first
    for n in range(first, len(stmts)):
        if n > begin and _begins(stmts[n]) or any(x not in _OF_STORES for x in _ops(stmts[n])) or isinstance(stmts[n], Alloc):
            return
        if "bulk_commit" in _ops(stmts[n]):
            yield range(begin, n + 1)
            begin = n + 1


def _begins(s: Stmt) -> bool:
    """Whether a statement is the wait in front of a TMA box's store."""
    return isinstance(s, If) and _ops(s) == ["bulk_wait"]


def _may_be_passed(s: Stmt) -> bool:
    return all(x in _PASSED for x in _ops(s)) and all(
        e.buffer.scope_name == LOCAL or isinstance(e.node, Call) and e.node.op in _PASSED for e in effects(s))


def _op(s: Stmt) -> str:
    return s.call.op if isinstance(s, Evaluate) and isinstance(s.call, Call) else ""


def _ops(s: Stmt) -> list[str]:
    """The operations of the call statements inside a statement."""
    return [x.call.op for x in statements(s) if isinstance(x, Evaluate) and isinstance(x.call, Call)]


def _accesses(s: Stmt) -> Iterator[_Access]:
    analyzer = Analyzer()
    for x in statements(s):
        if isinstance(x, For) and isinstance(x.start, Const) and isinstance(x.extent, Const) and x.extent.value > 0:
            analyzer = analyzer.bind(x.var, int(x.start.value), int(x.start.value + x.extent.value) - 1)
    for e in effects(s):
        yield _Access(e.storage, e.writes, _span(e, analyzer))


def _span(e: Effect, analyzer: Analyzer) -> tuple[int, int] | None:
    """The elements of a register array that an access may touch; None: any of them."""
    if e.buffer.scope_name != LOCAL or isinstance(e.node, Call) or e.indices is None or len(e.indices) != 1:
        return None
    at: Any = e.indices[0]
    last: Expr = at
    if isinstance(at, Ramp):
        at, last = at.base, at.base + at.stride * (at.lanes - 1)
    (low, _), (_, high) = analyzer.interval(at), analyzer.interval(last)
    return None if low is None or high is None else (low, high)


__all__ = ["overlap_epilogue"]
