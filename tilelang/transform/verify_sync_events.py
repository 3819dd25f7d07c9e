"""What each synchronising or asynchronous call does in the synchronisation model.

A rule gets the stream that executes the call, the call and its span.  The rules of waits are generators that yield
what they wait for until they may go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from tilelang.ir import Expr
from tilelang.ir.expr import AddressOf, Call
from tilelang.target.wgmma import WGMMA_ROWS, encode_descriptor, operand_addresses

from .sync_fault import Fault, Found, Undecided
from .verify_sync_clocks import MBarrier
from .verify_sync_values import Descriptor

Rule = Callable[[Any, Call, Any], None]
EVENT_RULES: dict[str, Rule] = {}
WAIT_RULES: dict[str, Callable[[Any, Any, Any], Iterator[Any]]] = {}


def _event(fn: Rule) -> Rule:
    EVENT_RULES[fn.__name__.strip("_")] = fn
    return fn


def _lanes(n: int) -> int:
    return bin(n).count("1")


# ---- block and named barriers -------------------------------------------------------------------------------------------


def _turn(st: Any, number: int, count: int, span: Any) -> Any:
    bar = st.block.named(number)
    st.partial(bar.name if number else "a block barrier", span)
    turn = bar.arrive(st.active, st.count(), count, span)
    st.block.model.progress += 1
    return bar, turn


def _wait_turn(st: Any, number: int, count: int, span: Any) -> Iterator[Any]:
    active = list(st.active)
    bar, turn = _turn(st, number, count, span)
    while turn not in bar.done:
        yield span, bar, f"at {bar.name}"
    bar.pass_(active, turn)
    st.block.model.progress += 1


def _sync_threads(st: Any, c: Any, span: Any) -> Iterator[Any]:
    return _wait_turn(st, 0, st.plan.launch.num_threads, span)


def _named_barrier(st: Any, c: Any, span: Any) -> Iterator[Any]:
    number = st.uniform(c.args[0], "the number of a barrier")
    return _wait_turn(st, number, st.uniform(c.args[1], "the count of a barrier"), span)


@_event
def _named_barrier_arrive(st: Any, c: Call, span: Any) -> None:
    _turn(st, st.uniform(c.args[0], "the number of a barrier"), st.uniform(c.args[1], "the count of a barrier"), span)


@_event
def _sync_warp(st: Any, c: Call, span: Any) -> None:
    for w, lanes in st.active:
        w.converge(lanes)


# ---- mbarriers ----------------------------------------------------------------------------------------------------------


@_event
def _mbarrier_init(st: Any, c: Call, span: Any) -> None:
    a = c.args[0]
    if not isinstance(a, AddressOf) or st.count() != 1:
        raise Undecided("an mbarrier is not initialised by one thread")
    (w, lanes), = st.active
    mine = w.component(lanes)
    at = int(st.values.address(a.buffer, a.indices, st))
    name = st.block.element(a.buffer, at)
    count = st.uniform(c.args[1], f"the count of {name}")
    st.block.barriers[at] = MBarrier(name, count, st.block.clocks, (mine, st.block.clocks.now[mine]), span)


@_event
def _fence_mbarrier_init(st: Any, c: Call, span: Any) -> None:
    mine = {w.component(lanes) for w, lanes in st.active}
    for b in st.block.barriers.values():
        b.fenced = b.fenced or b.made[0] in mine


def _arrivals(st: Any, c: Call, span: Any, arrive: bool, announce: bool) -> None:
    nbytes = st.uniform(c.args[1], "the bytes announced") if announce else 0
    for bar, active in st.each_barrier(c.args[0], span):
        for w, lanes in active:
            n = _lanes(lanes)
            bar.arrive(w, lanes, n if arrive else 0, nbytes * n, span)


@_event
def _mbarrier_arrive(st: Any, c: Call, span: Any) -> None:
    _arrivals(st, c, span, True, False)


@_event
def _mbarrier_expect_tx(st: Any, c: Call, span: Any) -> None:
    _arrivals(st, c, span, False, True)


@_event
def _mbarrier_arrive_expect_tx(st: Any, c: Call, span: Any) -> None:
    _arrivals(st, c, span, True, True)


def _mbarrier_wait(st: Any, c: Any, span: Any) -> Iterator[Any]:
    parity = st.uniform(c.args[1], "the parity of a wait")
    for bar, active in list(st.each_barrier(c.args[0], span)):
        waiting = []
        for w, lanes in active:
            seen, _ = w.known(lanes)
            bar.check_made(w.mine(lanes)[0], False, span)
            waiting.append((w, lanes, bar.target(seen, parity)))
        last = max(t for _, _, t in waiting)
        while len(bar.done) < last:
            yield span, bar, f"for parity {parity} of {bar.name}"
        for w, lanes, target in waiting:
            bar.wait(w, lanes, target, span)
        st.block.model.progress += 1


class _Registers:
    def __init__(self, block: Any, short: int) -> None:
        self.block, self.short = block, short

    def state(self) -> str:
        return f"{self.block.spare} registers given back, {self.short} needed"


def _set_max_nreg(st: Any, c: Any, span: Any) -> Iterator[Any]:
    n, threads = int(c.attr("n")), st.count()
    more = (n - st.nreg) * threads
    while more > max(0, st.block.spare):
        yield span, _Registers(st.block, more), f"for {n} registers a thread"
    st.block.spare -= more
    st.nreg = n
    st.block.model.progress += 1


# ---- clusters -----------------------------------------------------------------------------------------------------------


def _enter(block: Any, st: Any, w: Any, lanes: int, span: Any, copies: bool = False) -> None:
    """An access of another block's shared memory.  Raises Found when that block may not have started."""
    if block is st.block:
        return
    seen, _ = w.mine(lanes)
    if seen.get(st.block.model.cluster.component, 1) < 2:
        raise Found(Fault(f"shared memory of block {block.rank} of the cluster is accessed, which may not have started",
                          span, None))
    if not copies:  # the end of a copy is told by its mbarrier
        c = w.component(lanes)
        block.remote.append((c, st.block.clocks.now[c], span))


def _peer(st: Any, e: Expr, span: Any) -> Any:
    rank = st.uniform(e, "the rank of a block")
    if not 0 <= rank < len(st.block.model.blocks):
        raise Found(Fault(f"no block of this cluster has rank {rank}: it has {len(st.block.model.blocks)}", span, None))
    return st.block.model.blocks[rank]


def _cluster_turn(st: Any, relaxed: bool, span: Any) -> int:
    st.partial("the cluster barrier", span)
    model = st.block.model
    made = {b.made[0]: b.made[1] for b in st.block.barriers.values() if b.fenced} if relaxed else None
    turn = model.cluster.arrive(st.active, st.count(), len(model.blocks) * st.plan.launch.num_threads, span, made)
    model.progress += 1
    return int(turn)


@_event
def _cluster_arrive(st: Any, c: Call, span: Any) -> None:
    if st.cluster_turn is not None:
        raise Found(Fault("threads arrive again at the cluster barrier before they wait for it", span, None))
    st.cluster_turn = _cluster_turn(st, bool(c.attr("relaxed")), span)


def _cluster_wait(st: Any, c: Any, span: Any) -> Iterator[Any]:
    if st.cluster_turn is None:
        raise Found(Fault("threads wait for the cluster barrier without having arrived at it", span, None))
    bar, active = st.block.model.cluster, list(st.active)
    while st.cluster_turn not in bar.done:
        yield span, bar, f"at {bar.name}"
    bar.pass_(active, st.cluster_turn)
    st.cluster_turn = None
    st.block.model.progress += 1


def _cluster_sync(st: Any, c: Any, span: Any) -> Iterator[Any]:
    st.cluster_turn = _cluster_turn(st, False, span)
    return _cluster_wait(st, c, span)


@_event
def _mbarrier_arrive_remote(st: Any, c: Call, span: Any) -> None:
    block = _peer(st, c.args[1], span)
    for bar, active in st.each_barrier(c.args[0], span, block):
        for w, lanes in active:
            _enter(block, st, w, lanes, span)
            bar.arrive(w, lanes, _lanes(lanes), 0, span)


def _cluster_access(st: Any, c: Call, span: Any) -> None:
    a = c.args[0]
    if not isinstance(a, AddressOf):
        raise Undecided("shared memory of another block is not given as an element of a buffer")
    block = _peer(st, c.args[1], span)
    for w, lanes in st.active:
        _enter(block, st, w, lanes, span)
    st.touch("w" if c.op == "cluster_store" else "r", a.buffer, a.indices, 1, c, block.memory)


EVENT_RULES["cluster_load"] = EVENT_RULES["cluster_store"] = _cluster_access


@_event
def _bulk_copy_cluster(st: Any, c: Call, span: Any) -> None:
    block, n = _peer(st, c.args[4], span), st.uniform(c.args[2], "the size of a copy")
    _arrives(st, _start(st, c.args[0]), n, n, c.args[3], span, block, _start(st, c.args[1]))


# ---- the async proxy ----------------------------------------------------------------------------------------------------


@_event
def _fence_proxy_async(st: Any, c: Call, span: Any) -> None:
    for w, lanes in st.active:
        w.fence(lanes)


def _box(st: Any, c: Call) -> tuple[int, int]:
    """(bytes of shared memory a box takes, bytes it counts)."""
    m = st.plan.maps.get(c.attr("map"))
    if m is None:
        raise Undecided(f"there is no tensor map `{c.attr('map')}`")
    size = m.buffer.dtype.bits // 8
    rows = m.box_bytes // (m.box[0] * size)
    return rows * max(m.box[0] * size, m.swizzle), m.box_bytes


def _start(st: Any, a: Expr) -> int:
    if not isinstance(a, AddressOf):
        raise Undecided("a copy's shared tile is not given as an element of a buffer")
    at = st.values.address(a.buffer, a.indices, st)
    if isinstance(at, np.ndarray) and st.mask is not None:
        at = np.broadcast_to(at, st.n)[st.mask]
    if at is None or isinstance(at, np.ndarray) and (at != at.flat[0]).any():
        raise Undecided(f"where a copy lies in `{a.buffer.name}` is known only at run time")
    return int(at.flat[0]) if isinstance(at, np.ndarray) else int(at)


def _arrives(st: Any, lo: int, taken: int, counted: int, bar_at: Expr, span: Any, block: Any = None,
             source: int | None = None) -> None:
    """A copy to shared bytes lo .. lo+taken-1 of a block that signals an mbarrier there, by each active thread.

    source: bytes of the own shared memory that it reads.
    """
    block = block or st.block
    for bar, active in st.each_barrier(bar_at, span, block):
        for w, lanes in active:
            for _ in range(_lanes(lanes)):
                _enter(block, st, w, lanes, span, True)
                seen, fenced = w.mine(lanes)
                t = bar.copy(seen, counted, span)
                block.memory.tile("w", lo, lo + taken, seen, fenced, bar.copies, t, span, (w, lanes))
                if source is not None:
                    st.block.memory.tile("r", source, source + taken, seen, fenced, bar.copies, t, span, (w, lanes))
                    st.block.remote.append((bar.copies, t, span))
        bar.settle(span)


@_event
def _tma_load(st: Any, c: Call, span: Any) -> None:
    taken, counted = _box(st, c)
    blocks = [st.block]
    if c.attr("multicast"):
        mask = st.uniform(c.args[-1], "the mask of a multicast")
        if not 0 < mask < 1 << len(st.block.model.blocks):
            raise Found(Fault(f"a multicast to the blocks of mask {mask:#x} in a cluster of {len(st.block.model.blocks)}",
                              span, None))
        blocks = [b for b in st.block.model.blocks if mask >> b.rank & 1]
    for b in blocks:
        _arrives(st, _start(st, c.args[0]), taken, counted, c.args[1], span, b)


@_event
def _bulk_load(st: Any, c: Call, span: Any) -> None:
    n = st.uniform(c.args[2], "the size of a copy")
    _arrives(st, _start(st, c.args[0]), n, n, c.args[3], span)


class _Stores:
    """Bulk stores of one thread: component, time of the last one, of the committed groups, of those waited for."""

    def __init__(self, component: int) -> None:
        self.component, self.time, self.finished, self.span = component, 1, 1, None
        self.groups: list[int] = []


def _leaves(st: Any, lo: int, taken: int, span: Any) -> None:
    """A copy from shared memory by each active thread."""
    for w, lanes in st.active:
        own = st.bulk.get((w, lanes))
        if own is None:
            own = st.bulk[w, lanes] = _Stores(st.block.clocks.new(f"bulk stores of {w.name}"))
        seen, fenced = w.mine(lanes)
        own.time += 1
        own.span = span
        st.block.memory.tile("r", lo, lo + taken, seen, fenced, own.component, own.time, span, (w, lanes))


def _tma_out(st: Any, c: Call, span: Any) -> None:
    _leaves(st, _start(st, c.args[0]), _box(st, c)[0], span)


EVENT_RULES["tma_store"] = EVENT_RULES["tma_reduce_add"] = _tma_out


@_event
def _bulk_store(st: Any, c: Call, span: Any) -> None:
    shared = next(a for a in c.args if isinstance(a, AddressOf) and a.buffer.scope_name != "global")
    _leaves(st, _start(st, shared), st.uniform(c.args[2], "the size of a copy"), span)


@_event
def _bulk_commit(st: Any, c: Call, span: Any) -> None:
    for key in st.active:
        if key in st.bulk:
            st.bulk[key].groups.append(st.bulk[key].time)


@_event
def _bulk_wait(st: Any, c: Call, span: Any) -> None:
    for w, lanes in st.active:
        own = st.bulk.get((w, lanes))
        keep = int(c.attr("n", 0))
        done = own.groups[: max(0, len(own.groups) - keep)] if own is not None else []
        if own is not None and done:
            own.groups = own.groups[len(done):]
            own.finished = done[-1]
            w.learn(lanes, {own.component: done[-1]})


# ---- matrix instructions ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _lines(start: int, lbo: int, sbo: int, swizzle: int, major: str, extent: int, size: int) -> tuple[tuple[int, int], ...]:
    """Intervals of 128-byte lines that an operand touches, from the line its descriptor points into."""
    lines = np.unique(operand_addresses(encode_descriptor(start, lbo, sbo, swizzle), major, extent, size) >> 7)
    cuts = np.flatnonzero(np.diff(lines) > 1)
    first, last = lines[np.r_[0, cuts + 1]], lines[np.r_[cuts, len(lines) - 1]]
    return tuple((int(a) << 7, int(b) + 1 << 7) for a, b in zip(first, last))


@_event
def _wgmma(st: Any, c: Call, span: Any) -> None:
    row = WGMMA_ROWS[c.attr("row")]
    st.partial("a wgmma", span)
    if st.block.streams_are_groups and len(st.active) != 4:
        raise Found(Fault(f"a wgmma is reached by {len(st.active)} warps, not by whole warp groups", span, None))
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
        for lo, hi in _lines(d.address - base, d.lbo, d.sbo, d.swizzle, c.attr("a_major" if k == 1 else "b_major"), extent,
                             -(-dt.bits // 8)):
            st.block.memory.group_reads(base + lo, base + hi, st.active, st.products, st.registers.time, span)
    st.registers.issue(uses, span)


@_event
def _wgmma_fence(st: Any, c: Call, span: Any) -> None:
    st.registers.fence()
    for w, lanes in st.active:
        w.aligned(lanes)


@_event
def _wgmma_commit(st: Any, c: Call, span: Any) -> None:
    st.registers.commit({w.control: st.block.clocks.now[w.control] for w, _ in st.active})
    for w, lanes in st.active:
        w.aligned(lanes)


@_event
def _wgmma_wait(st: Any, c: Call, span: Any) -> None:
    st.registers.wait(int(c.attr("n", 0)))
    for w, lanes in st.active:
        w.learn(lanes, {st.products: st.registers.finished, **st.registers.waits})
        w.aligned(lanes)


# ---- cp.async -----------------------------------------------------------------------------------------------------------


@_event
def _cp_async(st: Any, c: Call, span: Any) -> None:
    a = c.args[0]
    if not isinstance(a, AddressOf):
        raise Undecided("a copy's shared place is not given as an element of a buffer")
    g, t, exact = st.granules(a.buffer, a.indices, max(1, int(c.attr("bytes", 16)) // a.buffer.dtype.bytes))
    st.block.accesses += 1
    st.open_copies.append((g, t, exact, list(st.active), span, bool(st.independent)))
    st.block.memory.fly(g, t, st.active, span, exact, bool(st.independent))


@_event
def _cp_async_commit(st: Any, c: Call, span: Any) -> None:
    st.copy_groups.append(st.open_copies)
    st.open_copies = []


@_event
def _cp_async_wait(st: Any, c: Call, span: Any) -> None:
    keep = int(c.attr("n", 0))
    done = st.copy_groups[: max(0, len(st.copy_groups) - keep)]
    st.copy_groups = st.copy_groups[len(done):]
    for g, t, exact, active, where, alone in (x for group in done for x in group):
        st.block.memory.land(g)
        st.block.memory.threads("w", g, t, active, where, exact, alone)


@_event
def _thread_return(st: Any, c: Call, span: Any) -> None:
    raise Undecided("threads leave the kernel early")


WAIT_RULES.update(sync_threads=_sync_threads, named_barrier=_named_barrier, mbarrier_wait=_mbarrier_wait,
                  set_max_nreg=_set_max_nreg, cluster_wait=_cluster_wait, cluster_sync=_cluster_sync)

__all__ = ["EVENT_RULES", "WAIT_RULES"]
