"""TMA on the device simulator: boxes between global and shared memory, 1-D bulk copies, bulk groups, proxy fences.

Out-of-bounds elements of a load are filled and count as bytes; those of a store are dropped.  Sources: PTX ISA,
"cp.async.bulk.tensor", "Tensor copy and layout"; CUDA Driver API, "Tensor Map Object Management".
"""

# mypy: disable-error-code="attr-defined"
# The verifier ensures that memory operands of these calls are AddressOf; Call.args is typed as Expr.

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tilelang.ir import Call, numpy_dtype
from tilelang.ir.evaluate import Closure
from tilelang.ir.numbers import round_tf32
from tilelang.target.tensor_map import REDUCE_ADD

from .context import DeviceContext
from .counters import count_warps
from .mbarrier import Barrier
from ..boxes import UNIT, TensorBox, box_of, coordinates, tensor_memory
from ..faults import fault
from ..lane_ops import effects, nothing, spread
from ..lanes import Action, LaneFrame
from ..memory import shared_operand
from ..ranks import Section

U8 = np.dtype(np.uint8)


def _threads(f: LaneFrame) -> list[int]:
    """The threads that issue an instruction."""
    return np.flatnonzero(f.active()).tolist()  # type: ignore[no-any-return]


def _shared(c: DeviceContext, operand: Any, e: Call, what: str) -> Callable[[LaneFrame], np.ndarray]:
    """Byte addresses (lanes,) of an operand in shared memory."""
    a = shared_operand(e, operand)
    return c.memory.reach(a.buffer, a.indices, numpy_dtype(a.buffer.dtype).itemsize, e.span, what)


def _box_at(c: DeviceContext, f: LaneFrame, m: TensorBox, start: int, b: Any, span: Any) -> np.ndarray:
    """16-byte units of a box at byte `start` of shared memory.  Raises sim-tma, sim-out-of-bounds."""
    return m.units(start, *c.memory.extent_of(b, f), b, 128, span)


def _granules(f: LaneFrame, units: np.ndarray) -> np.ndarray:
    k = UNIT // f.block.shared.granule
    return (units.reshape(-1, 1) * k + np.arange(k)).reshape(-1)


class Arrival(NamedTuple):
    """A load into shared memory.  buffer: the destination.  site: of the access.  what: its name in messages."""

    buffer: Any
    site: int
    span: Any
    what: str


def _arriving(c: DeviceContext, f: LaneFrame, load: Arrival, units: np.ndarray, bar: Any, data: np.ndarray, t: int) -> None:
    """Thread t starts a load of `data` (units, 16 bytes) into shared-memory units."""
    b, site, span, what = load
    block, shared = f.block, f.block.shared
    if not bar.fenced:
        raise fault("sim-mbarrier", f"a copy signals {bar.name}, whose initialisation it may not see",
                    expected="fence_mbarrier_init and a block barrier before it", found="none", span=span,
                    hint="the thread that initialises it executes fence_mbarrier_init, then a block barrier")
    flat = units.reshape(-1)
    if c.check:
        g = _granules(f, units)
        shared.table.agent_writes(block.clocks, g, t, bar.agent, site, partial(shared.proxy.overwrite, what=what))
        shared.owner[g] = c.slot(b.data)
        shared.proxy.dirty[g] = False
        shared.proxy.stamp[g] = 0

    def land() -> None:
        shared.store.flat(U8).reshape(-1, UNIT)[flat] = data

    block.asynchronous.begin(bar, data.size, land, span, b.name)
    block.counters.bytes["tma.load"] += data.size


def _load(c: DeviceContext, e: Call) -> Action:
    m, dst = box_of(c, e), e.args[0]
    to, at = _shared(c, dst, e, "TMA load into"), Barrier(c, e.args[1], e.span)
    site = c.accesses.site(dst.buffer.name, e.span, "TMA load")
    source = c.accesses.site(m.map.buffer.name, e.span, "TMA load")
    multicast = e.options.multicast
    coords = coordinates(c, e, m, e.args[2:-1] if multicast else e.args[2:])
    mask = c.expr(e.args[-1]) if multicast else None

    def run(f: LaneFrame) -> None:
        for t in _threads(f):
            lanes = np.arange(f.lanes) == t
            units = _box_at(c, f, m, int(to(f)[t]), dst.buffer, e.span)
            memory, inside, place, g = m.window(f, coords(f, t))
            box = m.fill()
            box[place] = round_tf32(inside) if m.map.tf32 else inside
            if c.check and g.size:
                _read_global(f, memory, m, g, t, lanes, source, e.span)
            data = box.reshape(-1).view(U8).reshape(-1, UNIT)
            for shift in [0] if mask is None else _targets(f, lanes, int(spread(mask(f), f.lanes)[t]), e.span):
                bar = at.get(f, int(at.reach(f)[t]) + shift, lanes)
                _arriving(c, f, Arrival(dst.buffer, site, e.span, "TMA"), units + shift // UNIT, bar, data, t)

    return run


def _targets(f: LaneFrame, lanes: np.ndarray, mask: int, span: Any) -> list[int]:
    """Byte distance from the frame's shared memory to that of each CTA of a multicast mask.  Raises sim-cluster."""
    cluster = f.block.cluster
    size = 1 if cluster is None else cluster.mates
    if mask <= 0 or mask >> size:
        raise fault("sim-cluster", f"a multicast to the blocks of ‹mask {mask:#x}› in a cluster of {size}",
                    expected=f"ranks below {size}", span=span, hint="bit r of the mask is the block of rank r")
    if cluster is None:
        return [0]
    ranks = [r for r in range(size) if mask >> r & 1]
    for r in ranks:
        cluster.enter(f, lanes, r, span, copies=True)
    return [cluster.shift(f, r) for r in ranks]


def _read_global(f: LaneFrame, memory: Any, m: TensorBox, g: np.ndarray, t: int, lanes: np.ndarray, site: int,
                 span: Any) -> None:
    if memory.store.known is not None and not memory.store.known[0, g].all():
        raise fault("sim-uninitialized", f"{m.map.buffer.name} (global) is read by TMA before it is written",
                    found=f"`{m.map.buffer.name}`, which nothing has written", span=span)
    if memory.table is not None:
        memory.table.read(f.block.clocks, g[None], np.array([t]), site)
        memory.proxy.require(f.block.clocks, g, lanes, site, "TMA")


def _leaving(c: DeviceContext, f: LaneFrame, units: np.ndarray, t: int, b: Any, site: int, span: Any) -> np.ndarray:
    """Thread t starts a store from shared-memory units; returns their bytes (units, 16)."""
    block, shared = f.block, f.block.shared
    storer = block.asynchronous.storer(t)
    storer.last, storer.span = int(block.clocks.now[storer.reads]), span
    if c.check:
        g, lanes = _granules(f, units), np.arange(f.lanes) == t
        if not (shared.owner[g] == c.slot(b.data)).all():
            raise fault("sim-uninitialized", f"{b.name} ({b.scope()}) is stored by TMA before it is written, in block "
                        f"{block.where}", found=f"{b.name}, which nothing has written", span=span)
        shared.table.agent_reads_of(block.clocks, g, lanes, storer.reads, site)
        shared.proxy.require(block.clocks, g, lanes, site, "the bulk store")
    block.counters.bytes["tma.store"] += units.size * UNIT
    return shared.store.flat(U8).reshape(-1, UNIT)[units.reshape(-1)]


def _store(c: DeviceContext, e: Call) -> Action:
    """tma_store and tma_reduce_add."""
    m, src = box_of(c, e), e.args[0]
    adds = e.op == "tma_reduce_add"
    if adds and str(m.map.buffer.dtype) not in REDUCE_ADD:
        raise fault("sim-tma", f"TMA cannot add elements of ‹{m.map.buffer.dtype}›", expected="elements that TMA adds",
                    span=e.span)
    frm, site = _shared(c, src, e, "TMA store of"), c.accesses.site(src.buffer.name, e.span, "TMA store")
    target = c.accesses.site(m.map.buffer.name, e.span, "TMA store")
    coords = coordinates(c, e, m, e.args[1:])

    def run(f: LaneFrame) -> None:
        for t in _threads(f):
            units = _box_at(c, f, m, int(frm(f)[t]), src.buffer, e.span)
            data = _leaving(c, f, units, t, src.buffer, site, e.span)
            memory, inside, place, g = m.window(f, coords(f, t))
            box = data.reshape(-1).view(m.dt).reshape(m.box)[place]
            if c.check and g.size:
                _write_global(f, memory, g, t, target, adds)
            inside[...] = inside + box if adds else box

    return run


def _write_global(f: LaneFrame, memory: Any, g: np.ndarray, t: int, site: int, adds: bool) -> None:
    clocks = f.block.clocks
    if adds:
        memory.table.atomic(clocks, g[None], np.array([t]), site)
        return
    memory.table.agent_writes(clocks, g, t, f.block.asynchronous.storer(t).writes, site)
    memory.proxy.dirty[g] = False
    memory.proxy.stamp[g] = 0
    if memory.store.known is not None:
        memory.store.known[0, g] = True


class _Bulk:
    """A 1-D copy (dst, src, bytes, …) between shared memory and a tensor, or shared memory of another block.

    Addresses and size are multiples of 16 bytes.  dst, src: the operands.  sites: of their accesses.
    """

    def __init__(self, c: DeviceContext, e: Call, tensor: int | None) -> None:
        """tensor: which operand is a global tensor, None where both are in shared memory."""
        self.c, self.span, (self.dst, self.src) = c, e.span, e.args[:2]
        self.sites = [c.accesses.site(x.buffer.name, e.span, "bulk copy") for x in e.args[:2]]
        what = "bulk copy into", "bulk copy from" if tensor == 1 else "bulk copy of"
        self.starts = [c.memory.reach(x.buffer, x.indices, UNIT, e.span, text) if k == tensor else _shared(c, x, e, text)
                       for k, (x, text) in enumerate(zip(e.args[:2], what))]
        self.nbytes = c.expr(e.args[2])

    def each(self, f: LaneFrame) -> Iterator[tuple[int, int, int, int]]:
        """(thread, first byte of dst, of src, bytes) of each copy."""
        for t in _threads(f):
            to, frm = (int(start(f)[t]) for start in self.starts)
            yield t, to, frm, int(spread(self.nbytes(f), f.lanes)[t])

    def units(self, f: LaneFrame, operand: Any, start: int, other: int, n: int) -> np.ndarray:
        """The 16-byte units of n bytes of shared memory.  other: first byte of the other side.  Raises sim-tma,
        sim-out-of-bounds."""
        b, low, high = operand.buffer, *self.c.memory.extent_of(operand.buffer, f)
        if start % UNIT or other % UNIT or n % UNIT or n <= 0:
            raise fault("sim-tma", f"a bulk copy of {n} bytes between byte {start} of {b.name}'s shared memory and byte "
                        f"{other} of a tensor: all must be multiples of 16",
                        expected="addresses and sizes that are multiples of 16 bytes",
                        found=f"{n} bytes from {start} to {other}", span=self.span)
        if not low <= start <= start + n <= high:
            raise fault("sim-out-of-bounds", f"a bulk copy of ‹{n} bytes at byte {start - low}› leaves {b.name}",
                        expected=f"a copy inside {b.name}", span=self.span)
        return np.arange(start // UNIT, (start + n) // UNIT)

    def tensor(self, f: LaneFrame, operand: Any, first: int, n: int) -> tuple[Any, np.ndarray]:
        """(the memory of a global tensor, the granules of n bytes of it).  Raises sim-out-of-bounds."""
        b = operand.buffer
        held = f.slots[self.c.slot(b.data)]
        memory = tensor_memory(held.memory if isinstance(held, Section) else held, b, self.span)
        if first + n > memory.store.nbytes:
            raise fault("sim-out-of-bounds", f"a bulk copy of ‹{n} bytes at byte {first}› leaves {b.name}",
                        expected=f"a copy inside {b.name}", span=self.span)
        return memory, np.arange(first // memory.store.granule, (first + n) // memory.store.granule)


def _bulk_load(c: DeviceContext, e: Call) -> Action:
    """bulk_load(dst, src, bytes, bar)."""
    copy, at = _Bulk(c, e, 1), Barrier(c, e.args[3], e.span)
    load = Arrival(copy.dst.buffer, copy.sites[0], e.span, "the bulk copy")

    def run(f: LaneFrame) -> None:
        for t, start, first, n in copy.each(f):
            lanes = np.arange(f.lanes) == t
            units = copy.units(f, copy.dst, start, first, n)
            memory, g = copy.tensor(f, copy.src, first, n)
            if c.check and memory.table is not None:
                memory.table.read(f.block.clocks, g[None], np.array([t]), copy.sites[1])
                memory.proxy.require(f.block.clocks, g, lanes, copy.sites[1], "the bulk copy")
            data = memory.store.flat(U8)[first:first + n].reshape(-1, UNIT).copy()
            _arriving(c, f, load, units, at.get(f, int(at.reach(f)[t]), lanes), data, t)

    return run


def _bulk_store(c: DeviceContext, e: Call) -> Action:
    """bulk_store(dst, src, bytes)."""
    copy = _Bulk(c, e, 0)

    def run(f: LaneFrame) -> None:
        for t, first, start, n in copy.each(f):
            units = copy.units(f, copy.src, start, first, n)
            memory, g = copy.tensor(f, copy.dst, first, n)
            data = _leaving(c, f, units, t, copy.src.buffer, copy.sites[1], e.span)
            if c.check:
                _write_global(f, memory, g, t, copy.sites[0], False)
            memory.store.flat(U8)[first:first + n] = data.reshape(-1)

    return run


def _bulk_copy_cluster(c: DeviceContext, e: Call) -> Action:
    """bulk_copy_cluster(dst, src, bytes, bar, cta): dst and bar refer to the shared memory of that CTA."""
    copy, at, cta = _Bulk(c, e, None), Barrier(c, e.args[3], e.span), c.expr(e.args[4])
    load, src = Arrival(copy.dst.buffer, copy.sites[0], e.span, "the bulk copy"), copy.src.buffer

    def run(f: LaneFrame) -> None:
        block, shared = f.block, f.block.shared
        for t, first, start, n in copy.each(f):
            lanes = np.arange(f.lanes) == t
            units, there = copy.units(f, copy.src, start, first, n), copy.units(f, copy.dst, first, start, n)
            rank = int(spread(cta(f), f.lanes)[t])
            if block.cluster is None:
                raise fault("sim-cluster", f"{e.op} in a launch without clusters",
                            expected="a launch with clusters", found="one without", span=e.span)
            block.cluster.enter(f, lanes, rank, e.span, copies=True)
            shift = block.cluster.shift(f, rank)
            bar = at.get(f, int(at.reach(f)[t]) + shift, lanes)
            block.cluster.sources[block.rank].append((bar.agent, int(block.clocks.now[bar.agent]), e.span))
            if c.check:  # the source is in use until the copy has arrived
                g = _granules(f, units)
                if not (shared.owner[g] == c.slot(src.data)).all():
                    raise fault("sim-uninitialized", f"{src.name} is copied to another block before it is written, in block "
                                f"{block.where}", found=f"{src.name}, which nothing has written", span=e.span)
                shared.table.agent_reads_of(block.clocks, g, lanes, bar.agent, copy.sites[1])
                shared.proxy.require(block.clocks, g, lanes, copy.sites[1], "the bulk copy")
            data = shared.store.flat(U8).reshape(-1, UNIT)[units.reshape(-1)].copy()
            _arriving(c, f, load, there + shift // UNIT, bar, data, t)

    return run


def _commit(c: DeviceContext, e: Call) -> Action:
    def run(f: LaneFrame) -> None:
        for t in _threads(f):
            s = f.block.asynchronous.storers.get(t)
            if s is not None:
                f.block.clocks.now[[s.reads, s.writes]] += 1

    return run


def _wait(c: DeviceContext, e: Call) -> Action:
    pending, read = e.options.n, e.options.read

    def run(f: LaneFrame) -> None:
        clocks = f.block.clocks
        for t in _threads(f):
            s = f.block.asynchronous.storers.get(t)
            if s is not None:
                done, lanes = int(clocks.now[s.reads]) - 1 - pending, np.arange(f.lanes) == t
                clocks.learn(lanes, s.reads, done)
                if not read:
                    clocks.learn(lanes, s.writes, done)

    return run


def _fence(c: DeviceContext, e: Call) -> Action:
    """fence_proxy_async (shared memory), fence_proxy_async_global."""
    everywhere = e.op == "fence_proxy_async_global"

    def run(f: LaneFrame) -> None:
        active, block = f.active(), f.block
        if everywhere:
            for held in f.slots:
                memory = held.memory if isinstance(held, Section) else held
                if getattr(memory, "proxy", None) is not None:
                    memory.proxy.fence(block.clocks, active)
        else:
            block.shared.proxy.fence(block.clocks, active)
            for bar in block.asynchronous.barriers.values():
                bar.fenced = bar.fenced or bool(active[bar.maker])
        block.clocks.advance(np.flatnonzero(active))

    return run


TMA_OPS: dict[str, Callable[[DeviceContext, Call], Closure]] = {
    "tma_prefetch": nothing,
    **effects({"tma_load": _load, "tma_store": _store, "tma_reduce_add": _store, "bulk_load": _bulk_load,
               "bulk_store": _bulk_store, "bulk_copy_cluster": _bulk_copy_cluster, "bulk_commit": _commit, "bulk_wait": _wait,
               "fence_proxy_async": _fence, "fence_proxy_async_global": _fence}, count_warps)}
