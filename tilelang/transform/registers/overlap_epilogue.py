"""Sums that are final are stored while the last product of others runs.

    wgmma(part, …); wgmma_commit                    wgmma(part, …); wgmma_commit
    wgmma_wait; arrive(empty)                       panel = C[0:32]; tma_store(panel)
    for r: C[64 + r] += part[r] * s         ->      wgmma_wait; arrive(empty)
    panel = C[0:32]; tma_store(panel)               for r: C[64 + r] += part[r] * s
    panel = C[64:96]; tma_store(panel)              panel = C[64:96]; tma_store(panel)

Where a tile's columns are multiplied in parts (split_accumulators.py), those of all parts but the last are done when the last
one is started: what a warp group then stores, panel by panel (ops/tma_store.py), takes a product's time that it would
have waited.  Nothing else is there to hide it: both groups come to the end of a tile at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (Alloc, Const, Evaluate, Expr, For, Func, If, Launch, Ramp, Seq, Stmt, Var, replace, rewrite_launches,
                         rewrite_stmts, seq, statements, LOCAL)
from tilelang.ir.expr import Call
from tilelang.ir.record import record

from ..analysis.effects import Effect, effects
from ..framework.pass_ import DEVICE, PassContext, pass_

# Of what stands between a product and the stores: what they may be moved in front of, the start of another one included.
_PASSED = frozenset(("wgmma_wait", "wgmma_pin", "sync_warp", "mbarrier_arrive", "wgmma_fence", "wgmma", "wgmma_commit",
                     "wgmma_descriptor"))
_OF_STORES = frozenset(("bulk_wait", "named_barrier", "stmatrix", "fence_proxy_async", "tma_store", "bulk_commit"))


@pass_(needs=DEVICE)
def overlap_epilogue(func: Func, cx: PassContext) -> Func:
    """Moves panels that read none of the last product's sums in front of the wait for it.

    Keeps: the order of the panels, of everything else, and what each reads.  Their memory is no operand of the product.
    """
    return rewrite_launches(func, _moved)


def _moved(launch: Launch) -> Launch:
    if not any(isinstance(e.node, Call) and e.node.op == "tma_store" for e in effects(launch.body)):
        return launch
    places = _Places(launch)
    body = rewrite_stmts(launch.body, lambda x: _in_order(x, places) if isinstance(x, Seq) else None)
    return launch if body is launch.body else replace(launch, body=body)


@record
class _Access:
    """Of a register or an element: storage, whether it is written, first and last element (None: any)."""

    storage: Var
    writes: bool
    span: tuple[int, int] | None

    def meets(self, other: _Access) -> bool:
        """Whether the two may not change places."""
        if self.storage is not other.storage or not (self.writes or other.writes):
            return False
        a, b = self.span, other.span
        return a is None or b is None or a[0] <= b[1] and b[0] <= a[1]


class _Places:
    """Where shared buffers lie: two of them may have bytes in common."""

    def __init__(self, launch: Launch) -> None:
        self.bytes: dict[Var, tuple[int, int] | None] = {}
        for b, at in launch.plan.shared_offsets:
            known = isinstance(at, int) and b.is_static
            self.bytes[b.data] = (at, at + b.size * b.dtype.bits // 8) if known else None

    def apart(self, one: Var, other: Var) -> bool:
        """Whether two storages are different memory."""
        if one is other:
            return False
        a, b = self.bytes.get(one, (0, 0)), self.bytes.get(other, (0, 0))
        return a is not None and b is not None and (a[1] <= b[0] or b[1] <= a[0])


def _in_order(s: Seq, places: _Places) -> Stmt | None:
    """The statements with panels moved; None where none may be."""
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
                not places.apart(v, other) for v in written for other in running):
            break
        end = step.stop
    if end == first:
        return None
    made = [x for x in stmts[wait:first] if isinstance(x, Alloc)]
    return seq(*stmts[:wait], *made, *stmts[first:end], *passed, *stmts[end:], span=s.span)


def _steps(stmts: Sequence[Stmt], first: int) -> Iterator[range]:
    """The stores of panels from there on, one behind the other."""
    begin = first
    for n in range(first, len(stmts)):
        if n > begin and _begins(stmts[n]) or any(x not in _OF_STORES for x in _ops(stmts[n])) or isinstance(stmts[n], Alloc):
            return
        if "bulk_commit" in _ops(stmts[n]):
            yield range(begin, n + 1)
            begin = n + 1


def _begins(s: Stmt) -> bool:
    """Whether a statement is the wait in front of a panel."""
    return isinstance(s, If) and _ops(s) == ["bulk_wait"]


def _may_be_passed(s: Stmt) -> bool:
    return all(x in _PASSED for x in _ops(s)) and all(
        e.buffer.scope_name == LOCAL or isinstance(e.node, Call) and e.node.op in _PASSED for e in effects(s))


def _op(s: Stmt) -> str:
    return s.call.op if isinstance(s, Evaluate) and isinstance(s.call, Call) else ""


def _ops(s: Stmt) -> list[str]:
    """The operations below a statement that are no values."""
    return [x.call.op for x in statements(s) if isinstance(x, Evaluate) and isinstance(x.call, Call)]


def _accesses(s: Stmt) -> Iterator[_Access]:
    analyzer = Analyzer()
    for x in statements(s):
        if isinstance(x, For) and isinstance(x.start, Const) and isinstance(x.extent, Const) and x.extent.value > 0:
            analyzer = analyzer.bind(x.var, int(x.start.value), int(x.start.value + x.extent.value) - 1)
    for e in effects(s):
        yield _Access(e.storage, e.writes, _span(e, analyzer))


def _span(e: Effect, analyzer: Analyzer) -> tuple[int, int] | None:
    """The elements of a register array that an access may be of; None: any of them."""
    if e.buffer.scope_name != LOCAL or isinstance(e.node, Call) or e.indices is None or len(e.indices) != 1:
        return None
    at: Any = e.indices[0]
    last: Expr = at
    if isinstance(at, Ramp):
        at, last = at.base, at.base + at.stride * (at.lanes - 1)
    (low, _), (_, high) = analyzer.interval(at), analyzer.interval(last)
    return None if low is None or high is None else (low, high)


__all__ = ["overlap_epilogue"]
