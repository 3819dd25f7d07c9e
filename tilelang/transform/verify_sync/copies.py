"""Rules of the synchronisation model for copies and MMAs: TMA, bulk copies, wgmma, cp.async."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, Expr, GLOBAL
from tilelang.target.wgmma import WGMMA_ROWS, encode_descriptor, operand_addresses

from .memory import Site
from .sync_fault import Fault, Found, Undecided
from tilelang.layout.distinct import distinct

from .events import EVENT_RULES as EVENT_RULES, enter, event, event_of, finished, initialised, peers
from .stream_state import StreamState
from .touches import granules
from .values import Descriptor

# ---- the async proxy ----------------------------------------------------------------------------------------------------


@event
def _fence_proxy_async(st: StreamState, c: Call, span: Any) -> None:
    for b in initialised(st):
        b.fenced = True
    for w, lanes in st.active:
        w.fence(lanes)


def _box(st: StreamState, c: Call) -> tuple[int, int]:
    """(bytes of shared memory that a TMA box takes, bytes that it counts at the mbarrier)."""
    m = st.plan.maps.get(c.options.map)
    if m is None:
        raise Undecided(f"there is no tensor map `{c.options.map}`")
    size = m.buffer.dtype.bits // 8
    rows = m.box_bytes // (m.box[0] * size)
    return rows * max(m.box[0] * size, m.swizzle), m.box_bytes


def _start(st: StreamState, a: Expr) -> int:
    if not isinstance(a, AddressOf):
        raise Undecided("a copy's shared tile is not given as an element of a buffer")
    at = st.values.address(a.buffer, a.indices, st)
    if isinstance(at, np.ndarray) and st.mask is not None:
        at = np.broadcast_to(at, st.n)[st.mask]
    if at is None or isinstance(at, np.ndarray) and (at != at.flat[0]).any():
        raise Undecided(f"where a copy lies in `{a.buffer.name}` is known only at run time")
    return int(at.flat[0]) if isinstance(at, np.ndarray) else int(at)


def _arrives(st: StreamState, lo: int, taken: int, counted: int, bar_at: Expr, span: Any, block: Any = None,
             source: int | None = None) -> None:
    """A copy by each active thread to shared bytes lo .. lo+taken-1 of a block, which signals an mbarrier there.

    source: bytes of the block's own shared memory that it reads.
    """
    block = block or st.block
    for bar, active in st.each_barrier(bar_at, span, block):
        for w, lanes in active:
            for _ in range(lanes.bit_count()):
                enter(block, st, w, lanes, span, True)
                seen, fenced = w.mine(lanes)
                t = bar.copy(seen, counted, span)
                block.memory.tile("w", lo, lo + taken, (seen, fenced), (bar.copies, t), span, (w, lanes))
                if source is not None:
                    st.block.memory.tile("r", source, source + taken, (seen, fenced), (bar.copies, t), span, (w, lanes))
                    st.block.remote.append((bar.copies, t, span))
        bar.settle(span)


@event
def _tma_load(st: StreamState, c: Call, span: Any) -> None:
    taken, counted = _box(st, c)
    blocks = [st.block]
    if c.options.multicast:
        mask = st.uniform(c.args[-1], "the mask of a multicast")
        if not 0 < mask < 1 << len(st.block.model.blocks):
            raise Found(Fault(f"a multicast to the blocks of mask {mask:#x} in a cluster of {len(st.block.model.blocks)}",
                              span, None))
        blocks = [b for b in st.block.model.blocks if mask >> b.rank & 1]
    for b in blocks:
        _arrives(st, _start(st, c.args[0]), taken, counted, c.args[1], span, b)


@event
def _bulk_load(st: StreamState, c: Call, span: Any) -> None:
    n = st.uniform(c.args[2], "the size of a copy")
    _arrives(st, _start(st, c.args[0]), n, n, c.args[3], span)


class _Stores:
    """Bulk stores of one thread: component, time of the last one, of the committed groups, and of those waited for."""

    def __init__(self, component: int) -> None:
        self.component, self.time, self.finished, self.span = component, 1, 1, None
        self.groups: list[int] = []


def _leaves(st: StreamState, lo: int, taken: int, span: Any) -> None:
    """A copy from shared memory by each active thread."""
    for w, lanes in st.active:
        own = st.bulk.get((w, lanes))
        if own is None:
            own = st.bulk[w, lanes] = _Stores(st.block.clocks.new())
        known = w.mine(lanes)
        own.time += 1
        own.span = span
        st.block.memory.tile("r", lo, lo + taken, known, (own.component, own.time), span, (w, lanes))


@event_of("tma_store", "tma_reduce_add")
def _tma_out(st: StreamState, c: Call, span: Any) -> None:
    _leaves(st, _start(st, c.args[0]), _box(st, c)[0], span)


@event
def _bulk_store(st: StreamState, c: Call, span: Any) -> None:
    shared = next(a for a in c.args if isinstance(a, AddressOf) and a.buffer.scope_name != GLOBAL)
    _leaves(st, _start(st, shared), st.uniform(c.args[2], "the size of a copy"), span)


@event
def _bulk_commit(st: StreamState, c: Call, span: Any) -> None:
    for _, own in _issuers(st):
        own.groups.append(own.time)


def _issuers(st: StreamState) -> list[tuple[tuple[Any, int], _Stores]]:
    """The active threads that have issued bulk stores."""
    return [(key, own) for key, own in st.bulk.items() for w, lanes in st.active if key[0] is w and not key[1] & ~lanes]


@event
def _bulk_wait(st: StreamState, c: Call, span: Any) -> None:
    for (w, lanes), own in _issuers(st):
        done = finished(own.groups, c.options.n)
        if done:
            own.finished = done[-1]
            w.learn_times(lanes, {own.component: own.finished})


# ---- MMA instructions ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _lines(start: int, lbo: int, sbo: int, swizzle: int, major: str, extent: int, size: int) -> tuple[tuple[int, int], ...]:
    """Intervals of 128-byte lines that an operand touches, relative to the line that its descriptor points to."""
    lines = distinct(operand_addresses(encode_descriptor(start, lbo, sbo, swizzle), major, extent, size) >> 7)
    cuts = np.flatnonzero(np.diff(lines) > 1)
    first, last = lines[np.r_[0, cuts + 1]], lines[np.r_[cuts, len(lines) - 1]]
    return tuple((int(a) << 7, int(b) + 1 << 7) for a, b in zip(first, last))


@event
def _wgmma(st: StreamState, c: Call, span: Any) -> None:
    row = WGMMA_ROWS[c.options.row]
    st.partial("a wgmma", span)
    if st.block.streams_are_groups and len(st.active) != 4:
        raise Found(Fault(f"a wgmma is reached by {len(st.active)} warps, not by whole warp groups", span, kind="barrier"))
    uses = []
    st.registers.time += 1
    for k, a in enumerate(c.args[:3]):
        if isinstance(a, AddressOf):
            first = st.uniform(a.indices[0], "a register") if k < 2 else 0
            n = (row.c if k == 0 else row.a).registers
            uses.append((a.buffer.data, first, first + n, k == 0))
            continue
        d = st.values(a, st)
        if not isinstance(d, Descriptor):
            raise Undecided("a matrix descriptor is known only at run time")
        extent, dt = (64, row.a_dtype) if k == 1 else (row.shape[1], row.b_dtype)
        base = d.address // 128 * 128
        major = c.options.a_major if k == 1 else c.options.b_major
        for lo, hi in _lines(d.address - base, d.lbo, d.sbo, d.swizzle, major, extent, -(-dt.bits // 8)):
            st.block.memory.group_reads(base + lo, base + hi, st.active, st.wgmmas, st.registers.time, span)
    st.registers.issue(uses, span)


@event
def _wgmma_fence(st: StreamState, c: Call, span: Any) -> None:
    st.registers.fence()
    for w, lanes in st.active:
        w.aligned(lanes)


@event
def _wgmma_commit(st: StreamState, c: Call, span: Any) -> None:
    st.registers.commit({w.control: st.block.clocks.now[w.control] for w, _ in st.active})
    for w, lanes in st.active:
        w.aligned(lanes)


@event
def _wgmma_wait(st: StreamState, c: Call, span: Any) -> None:
    st.registers.wait(c.options.n)
    for w, lanes in st.active:
        w.learn_times(lanes, {st.wgmmas: st.registers.finished, **st.registers.waits})
        w.aligned(lanes)


# ---- cp.async -----------------------------------------------------------------------------------------------------------


@event
def _cp_async(st: StreamState, c: Call, span: Any) -> None:
    a = c.args[0]
    if not isinstance(a, AddressOf):
        raise Undecided("a copy's shared place is not given as an element of a buffer")
    g, t, exact = granules(st, a.buffer, a.indices, max(1, c.options.bytes // a.buffer.dtype.bytes))
    if len(g):
        site = Site(span, exact, None, st.independent)
        st.open_copies.append((g, t, list(st.active), site))
        st.block.memory.fly(g, t, st.active, site)


@event
def _cp_async_commit(st: StreamState, c: Call, span: Any) -> None:
    st.copy_groups.append(st.open_copies)
    st.open_copies = []


@event
def _cp_async_wait(st: StreamState, c: Call, span: Any) -> None:
    for g, t, active, site in (x for group in finished(st.copy_groups, c.options.n) for x in group):
        st.block.memory.land(g)
        st.block.memory.threads("w", g, t, active, site)


@event
def _cp_async_mbarrier_arrive(st: StreamState, c: Call, span: Any) -> None:
    raise Undecided("copies of cp.async signal an mbarrier")


@event
def _bulk_copy_cluster(st: StreamState, c: Call, span: Any) -> None:
    n = st.uniform(c.args[2], "the size of a copy")
    for block in peers(st, c.args[4], span):
        _arrives(st, _start(st, c.args[0]), n, n, c.args[3], span, block, _start(st, c.args[1]))
