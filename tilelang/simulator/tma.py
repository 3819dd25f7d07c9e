"""TMA: boxes of global tensors to and from shared memory, 1-D bulk copies, bulk groups, proxy fences.

A box lies in shared memory row after row, the innermost dimension first; under a swizzle of W bytes rows have a pitch
of W and bits 4.. of the address are xored with bits 7...  Out-of-bounds elements of a load are filled and count as
bytes, those of a store are dropped.  Sources: PTX ISA, "cp.async.bulk.tensor", "Tensor copy and layout"; CUDA Driver API,
"Tensor Map Object Management".
"""

# mypy: disable-error-code="attr-defined"
# Memory operands of these calls are AddressOf by the verifier, Expr by the type of Call.args.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, Launch, numpy_dtype
from tilelang.ir.evaluate import Closure, Value
from tilelang.target.mma import round_tf32
from tilelang.target.tensor_map import REDUCE_ADD, STRIDE_ALIGN, TensorMap, tensor_maps_of

from .faults import fault
from .lane_ops import WARP, spread
from .lanes import LaneFrame, is_address
from .mbarrier import Barrier
from .memory import geometry, strided

U8, UNIT = np.dtype(np.uint8), 16
_NAN = {2: 0x7FF7, 4: 0x7FF77FF7}


def box_chunks(start: int, rows: int, row_bytes: int, swizzle: int) -> np.ndarray:
    """Numbers of the 16-byte units of shared memory that a box at byte `start` covers, shape (rows, row_bytes / 16)."""
    at = start + np.arange(rows)[:, None] * (swizzle or row_bytes) + np.arange(0, row_bytes, UNIT)
    if swizzle:
        at = at ^ ((at >> 7 & swizzle // UNIT - 1) << 4)
    return at // UNIT


def _tensor(held: Any, b: Any, span: Any) -> Any:
    """The Global of a tensor that TMA reads or writes."""
    if is_address(held):
        raise fault("sim-address", f"TMA of {b.name}, which is made of the null pointer or of an address that only the kernel "
                    "knows", expected="a tensor that the host can describe to TMA", found=f"`{b.name}` at an address",
                    span=span, hint="pass the tensor, or a pointer to a tensor whose shape the parameters give")
    return held


class _Map:
    """A tensor map at run time."""

    def __init__(self, c: Any, m: TensorMap, span: Any) -> None:
        m.check()
        self.map, self.span = m, span
        self.dt = numpy_dtype(m.buffer.dtype)
        self.slot, self.geometry = c.slot(m.buffer.data), geometry(c, m.buffer)
        self.box = tuple(reversed(m.box))  # outermost first
        self.row_bytes = m.box[0] * self.dt.itemsize
        self.rows = int(np.prod(self.box[:-1]))
        self.granule = c.granules[id(m.buffer.data)]

    def window(self, f: LaneFrame, start: tuple[int, ...]) -> tuple[Any, np.ndarray, tuple[slice, ...], np.ndarray]:
        """(the Global, its part inside the box, where that lies in the box, granules of that part).

        start: coordinates, outermost first.
        """
        memory = _tensor(f.slots[self.slot], self.map.buffer, self.span)
        shape, strides, offset = self.geometry(f)
        item = self.dt.itemsize
        if strides[-1] != 1 or any(s * item % UNIT for s in strides[:-1]) or offset * item % UNIT:
            raise fault("sim-tma", f"{self.map.buffer.name}: strides {strides} from element {offset} do not suit a "
                        "tensor map",
                        expected="a stride of 1 element and others of multiples of 16 bytes",
                        found=f"strides {strides} from element {offset}",
                        span=self.span, hint="the innermost stride is 1 element, others are multiples of "
                        "16 bytes")
        low = [min(max(s, 0), n) for s, n in zip(start, shape)]
        high = [min(max(s + b, lo), n) for s, b, n, lo in zip(start, self.box, shape, low)]
        tensor = strided(memory.store.flat(self.dt), offset, shape, strides)
        inside = tensor[tuple(slice(lo, hi) for lo, hi in zip(low, high))]
        place = tuple(slice(lo - s, hi - s) for lo, hi, s in zip(low, high, start))
        at = np.zeros((), np.int64) + offset
        for lo, hi, s in zip(low, high, strides):
            at = at[..., None] + np.arange(lo, hi) * s
        k = item // self.granule
        g = at.reshape(-1) if k == 1 else (at.reshape(-1, 1) * k + np.arange(k)).reshape(-1)
        return memory, inside, place, g

    def fill(self) -> np.ndarray:
        """A box of what lies outside the tensor."""
        if self.map.fill == "zero":
            return np.zeros(self.box, self.dt)
        bits = np.full(self.box, _NAN[self.dt.itemsize], np.dtype(f"u{self.dt.itemsize}"))
        return bits.view(self.dt)


def _issue(c: Any, f: LaneFrame, op: str) -> np.ndarray:
    f.block.counters.count(op, int(f.active().reshape(-1, WARP).any(1).sum()))
    return np.flatnonzero(f.active())


def _map_of(c: Any, e: Call) -> _Map:
    name = e.attr("map")
    if name not in c.maps:
        raise fault("sim-tma", f"no tensor map is called {name}: this launch has {', '.join(c.maps) or 'none'}",
                    expected=f"one of {', '.join(c.maps) or 'none'}", found=str(name),
                    span=e.span)
    return _Map(c, c.maps[name], e.span)


def _shared(c: Any, a: Any, e: Call, what: str) -> Callable[[LaneFrame], np.ndarray]:
    """Byte addresses (lanes,) of an operand in shared memory."""
    if not isinstance(a, AddressOf) or a.buffer.scope() not in ("shared", "shared.dyn"):
        raise fault("sim-unsupported", f"{e.op} needs the address of a shared element",
                    expected="the address of a shared element", found=f"another operand of {e.op}", span=e.span)
    return c.reach(a.buffer, a.indices, numpy_dtype(a.buffer.dtype).itemsize, e.span, what)


def _box_at(c: Any, f: LaneFrame, m: _Map, start: int, b: Any, align: int, span: Any) -> np.ndarray:
    """Units of a box at this byte.  Raises sim-tma, sim-out-of-bounds."""
    if start % align:
        raise fault("sim-tma", f"a box in {b.name} starts at byte {start} of shared memory, not a multiple of {align}",
                    expected=f"a multiple of {align} bytes", found=f"byte {start}",
                    span=span, hint="align buffers that TMA fills: 1024 bytes under a 128-byte swizzle")
    units = box_chunks(start, m.rows, m.row_bytes, m.map.swizzle)
    first, end = (x // UNIT for x in c.extent_of(b, f))
    if units.max() >= end or units.min() < first:
        raise fault("sim-out-of-bounds", f"a box of {m.map.box} elements at byte {start - first * UNIT} of {b.name} "
                    f"leaves it: it has {(end - first) * UNIT} bytes",
                    expected=f"a box inside {b.name}", found=f"a box of {m.map.box} at byte {start - first * UNIT}", span=span)
    return units


def _granules(f: LaneFrame, units: np.ndarray) -> np.ndarray:
    k = UNIT // f.block.shared.granule
    return (units.reshape(-1, 1) * k + np.arange(k)).reshape(-1)


def _arriving(c: Any, f: LaneFrame, units: np.ndarray, bar: Any, data: np.ndarray, t: int, b: Any, site: int,
              span: Any, what: str) -> None:
    """Thread t starts a load of bytes `data` (units, 16) into shared units.  what: it is, for messages."""
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


def _load(c: Any, e: Call) -> Closure:
    m, dst = _map_of(c, e), e.args[0]
    to, at = _shared(c, dst, e, "TMA load into"), Barrier(c, e.args[1], e.span)
    site = c.site(dst.buffer, e.span, "TMA load")
    source = c.site(m.map.buffer, e.span, "TMA load")
    multicast = bool(e.attr("multicast"))
    coords = _coordinates(c, e, m, e.args[2:-1] if multicast else e.args[2:])
    mask = c.expr(e.args[-1]) if multicast else None

    def run(f: LaneFrame) -> Value:
        for t in _issue(c, f, e.op):
            lanes = np.arange(f.lanes) == t
            units = _box_at(c, f, m, int(to(f)[t]), dst.buffer, 128, e.span)
            memory, inside, place, g = m.window(f, coords(f, t))
            box = m.fill()
            box[place] = round_tf32(inside) if m.map.tf32 else inside
            if c.check and g.size:
                _read_global(f, memory, m, g, t, lanes, source, e.span)
            data = box.reshape(-1).view(U8).reshape(-1, UNIT)
            for shift in [0] if mask is None else _targets(f, lanes, int(spread(mask(f), f.lanes)[t]), e.span):
                bar = at.get(f, int(at.reach(f)[t]) + shift, lanes)
                _arriving(c, f, units + shift // UNIT, bar, data, int(t), dst.buffer, site, e.span, "TMA")
        return np.int32(0)

    return run


def _targets(f: LaneFrame, lanes: np.ndarray, mask: int, span: Any) -> list[int]:
    """Bytes from the frame's own shared memory to that of each CTA of a multicast mask.  Raises sim-cluster."""
    cluster = f.block.cluster
    size = 1 if cluster is None else cluster.mates
    if mask <= 0 or mask >> size:
        raise fault("sim-cluster", f"a multicast to the blocks of mask {mask:#x} in a cluster of {size}",
                    expected=f"ranks below {size}", found=f"mask {mask:#x}", span=span,
                    hint="bit r of the mask is the block of rank r")
    if cluster is None:
        return [0]
    ranks = [r for r in range(size) if mask >> r & 1]
    for r in ranks:
        cluster.enter(f, lanes, r, span, copies=True)
    return [cluster.shift(f, r) for r in ranks]


def _read_global(f: LaneFrame, memory: Any, m: _Map, g: np.ndarray, t: int, lanes: np.ndarray, site: int,
                 span: Any) -> None:
    if memory.store.known is not None and not memory.store.known[0, g].all():
        raise fault("sim-uninitialized", f"{m.map.buffer.name} (global) is read by TMA before it is written",
                    found=f"`{m.map.buffer.name}`, which nothing has written", span=span)
    if memory.table is not None:
        memory.table.read(f.block.clocks, g[None], np.array([t]), site)
        memory.proxy.require(f.block.clocks, g, lanes, site, "TMA")


def _coordinates(c: Any, e: Call, m: _Map, args: tuple[Any, ...]) -> Callable[[LaneFrame, int], tuple[int, ...]]:
    """f(frame, thread) -> coordinates, outermost first."""
    if len(args) != len(m.map.box):
        raise fault("sim-tma", f"{e.op}: {len(args)} coordinates for a map of {len(m.map.box)} dimensions",
                    expected=f"{len(m.map.box)} coordinates", found=str(len(args)), span=e.span)
    fns = [c.expr(a) for a in args]
    bits = m.map.buffer.dtype.bits

    def at(f: LaneFrame, t: int) -> tuple[int, ...]:
        out = tuple(int(spread(fn(f), f.lanes)[t]) for fn in reversed(fns))
        if out[-1] * bits % (STRIDE_ALIGN * 8):  # seen on an H200: "illegal instruction", for loads and stores
            raise fault("sim-tma", f"{e.op} of {m.map.buffer.name} at column {out[-1]}: boxes start at multiples of "
                        f"{STRIDE_ALIGN} bytes",
                        expected=f"a column at a multiple of {STRIDE_ALIGN} bytes", found=f"column {out[-1]}", span=e.span)
        return out

    return at


def _leaving(c: Any, f: LaneFrame, units: np.ndarray, t: int, b: Any, site: int, span: Any) -> np.ndarray:
    """Thread t starts a store of shared units: their bytes (units, 16)."""
    block, shared = f.block, f.block.shared
    storer = block.asynchronous.storer(t)
    storer.last, storer.span = int(block.clocks.now[storer.reads]), span
    if c.check:
        g, lanes = _granules(f, units), np.arange(f.lanes) == t
        if not (shared.owner[g] == c.slot(b.data)).all():
            raise fault("sim-uninitialized", f"{b.name} ({b.scope()}) is stored by TMA before it is written, in block "
                        f"{block.where}",
                        found=f"{b.name}, which nothing has written", span=span)
        shared.table.agent_reads_of(block.clocks, g, lanes, storer.reads, site)
        shared.proxy.require(block.clocks, g, lanes, site, "the bulk store")
    block.counters.bytes["tma.store"] += units.size * UNIT
    return shared.store.flat(U8).reshape(-1, UNIT)[units.reshape(-1)]


def _store(c: Any, e: Call) -> Closure:
    """tma_store and tma_reduce_add."""
    m, src = _map_of(c, e), e.args[0]
    adds = e.op == "tma_reduce_add"
    if adds and str(m.map.buffer.dtype) not in REDUCE_ADD:
        raise fault("sim-tma", f"TMA cannot add elements of {m.map.buffer.dtype}",
                    expected="elements that TMA adds", found=str(m.map.buffer.dtype), span=e.span)
    frm, site = _shared(c, src, e, "TMA store of"), c.site(src.buffer, e.span, "TMA store")
    target = c.site(m.map.buffer, e.span, "TMA store")
    coords = _coordinates(c, e, m, e.args[1:])

    def run(f: LaneFrame) -> Value:
        for t in map(int, _issue(c, f, e.op)):
            units = _box_at(c, f, m, int(frm(f)[t]), src.buffer, 128, e.span)
            data = _leaving(c, f, units, t, src.buffer, site, e.span)
            memory, inside, place, g = m.window(f, coords(f, t))
            box = data.reshape(-1).view(m.dt).reshape(m.box)[place]
            if c.check and g.size:
                _write_global(f, memory, g, t, target, adds)
            inside[...] = inside + box if adds else box
        return np.int32(0)

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


def _bulk_load(c: Any, e: Call) -> Closure:
    """bulk_load(dst, src, bytes, bar): 1-D, all multiples of 16 bytes."""
    dst, src = e.args[:2]
    to, frm = _shared(c, dst, e, "bulk copy into"), c.reach(src.buffer, src.indices, UNIT, e.span, "bulk copy from")
    nbytes, at = c.expr(e.args[2]), Barrier(c, e.args[3], e.span)
    site, source, slot = c.site(dst.buffer, e.span, "bulk copy"), c.site(src.buffer, e.span, "bulk copy"), \
        c.slot(src.buffer.data)

    def run(f: LaneFrame) -> Value:
        for t in map(int, _issue(c, f, e.op)):
            lanes = np.arange(f.lanes) == t
            start, first, n = int(to(f)[t]), int(frm(f)[t]), int(spread(nbytes(f), f.lanes)[t])
            units = _bulk_units(c, f, start, first, n, dst.buffer, e.span)
            memory = _tensor(f.slots[slot], src.buffer, e.span)
            _bulk_bounds(memory, first, n, src.buffer, e.span)
            if c.check and memory.table is not None:
                g = np.arange(first // memory.store.granule, (first + n) // memory.store.granule)
                memory.table.read(f.block.clocks, g[None], np.array([t]), source)
                memory.proxy.require(f.block.clocks, g, lanes, source, "the bulk copy")
            data = memory.store.flat(U8)[first:first + n].reshape(-1, UNIT).copy()
            bar = at.get(f, int(at.reach(f)[t]), lanes)
            _arriving(c, f, units, bar, data, t, dst.buffer, site, e.span, "the bulk copy")
        return np.int32(0)

    return run


def _bulk_store(c: Any, e: Call) -> Closure:
    """bulk_store(dst, src, bytes): 1-D, all multiples of 16 bytes."""
    dst, src = e.args[:2]
    to, frm = c.reach(dst.buffer, dst.indices, UNIT, e.span, "bulk copy into"), _shared(c, src, e, "bulk copy of")
    nbytes, site, target = c.expr(e.args[2]), c.site(src.buffer, e.span, "bulk copy"), \
        c.site(dst.buffer, e.span, "bulk copy")
    slot = c.slot(dst.buffer.data)

    def run(f: LaneFrame) -> Value:
        for t in map(int, _issue(c, f, e.op)):
            start, first, n = int(frm(f)[t]), int(to(f)[t]), int(spread(nbytes(f), f.lanes)[t])
            units = _bulk_units(c, f, start, first, n, src.buffer, e.span)
            memory = _tensor(f.slots[slot], dst.buffer, e.span)
            _bulk_bounds(memory, first, n, dst.buffer, e.span)
            data = _leaving(c, f, units, t, src.buffer, site, e.span)
            if c.check:
                g = np.arange(first // memory.store.granule, (first + n) // memory.store.granule)
                _write_global(f, memory, g, t, target, False)
            memory.store.flat(U8)[first:first + n] = data.reshape(-1)
        return np.int32(0)

    return run


def _bulk_copy_cluster(c: Any, e: Call) -> Closure:
    """bulk_copy_cluster(dst, src, bytes, bar, cta): dst and bar mean their places in the shared memory of that CTA."""
    dst, src = e.args[:2]
    to, frm = _shared(c, dst, e, "bulk copy into"), _shared(c, src, e, "bulk copy of")
    nbytes, at, cta = c.expr(e.args[2]), Barrier(c, e.args[3], e.span), c.expr(e.args[4])
    site, source = c.site(dst.buffer, e.span, "bulk copy"), c.site(src.buffer, e.span, "bulk copy")

    def run(f: LaneFrame) -> Value:
        block, shared = f.block, f.block.shared
        for t in map(int, _issue(c, f, e.op)):
            lanes = np.arange(f.lanes) == t
            start, first, n = int(frm(f)[t]), int(to(f)[t]), int(spread(nbytes(f), f.lanes)[t])
            units = _bulk_units(c, f, start, first, n, src.buffer, e.span)
            there = _bulk_units(c, f, first, start, n, dst.buffer, e.span)
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
                if not (shared.owner[g] == c.slot(src.buffer.data)).all():
                    raise fault("sim-uninitialized", f"{src.buffer.name} is copied to another block before it is written, in "
                                f"block {block.where}",
                                found=f"{src.buffer.name}, which nothing has written", span=e.span)
                shared.table.agent_reads_of(block.clocks, g, lanes, bar.agent, source)
                shared.proxy.require(block.clocks, g, lanes, source, "the bulk copy")
            data = shared.store.flat(U8).reshape(-1, UNIT)[units.reshape(-1)].copy()
            _arriving(c, f, there + shift // UNIT, bar, data, t, dst.buffer, site, e.span, "the bulk copy")
        return np.int32(0)

    return run


def _bulk_units(c: Any, f: LaneFrame, start: int, first: int, n: int, b: Any, span: Any) -> np.ndarray:
    if start % UNIT or first % UNIT or n % UNIT or n <= 0:
        raise fault("sim-tma", f"a bulk copy of {n} bytes between byte {start} of {b.name}'s shared memory and byte "
                    f"{first} of a tensor: all must be multiples of 16",
                    expected="addresses and sizes that are multiples of 16 bytes", found=f"{n} bytes from {start} to {first}",
                    span=span)
    low, high = c.extent_of(b, f)
    if not low <= start <= start + n <= high:
        raise fault("sim-out-of-bounds", f"a bulk copy of {n} bytes at byte {start - low} leaves {b.name}",
                    expected=f"a copy inside {b.name}", found=f"{n} bytes at byte {start - low}", span=span)
    return np.arange(start // UNIT, (start + n) // UNIT)


def _bulk_bounds(memory: Any, first: int, n: int, b: Any, span: Any) -> None:
    if first + n > memory.store.nbytes:
        raise fault("sim-out-of-bounds", f"a bulk copy of {n} bytes at byte {first} leaves {b.name}",
                    expected=f"a copy inside {b.name}", found=f"{n} bytes at byte {first}", span=span)


def _commit(c: Any, e: Call) -> Closure:
    def run(f: LaneFrame) -> Value:
        for t in map(int, _issue(c, f, e.op)):
            s = f.block.asynchronous.storers.get(t)
            if s is not None:
                f.block.clocks.now[[s.reads, s.writes]] += 1
        return np.int32(0)

    return run


def _wait(c: Any, e: Call) -> Closure:
    pending, read = int(e.attr("n", 0)), bool(e.attr("read"))

    def run(f: LaneFrame) -> Value:
        clocks = f.block.clocks
        for t in map(int, _issue(c, f, e.op)):
            s = f.block.asynchronous.storers.get(t)
            if s is not None:
                done, lanes = int(clocks.now[s.reads]) - 1 - pending, np.arange(f.lanes) == t
                clocks.learn(lanes, s.reads, done)
                if not read:
                    clocks.learn(lanes, s.writes, done)
        return np.int32(0)

    return run


def _fence(c: Any, e: Call) -> Closure:
    """fence_proxy_async (shared memory), fence_proxy_async_global."""
    everywhere = e.op == "fence_proxy_async_global"

    def run(f: LaneFrame) -> Value:
        _issue(c, f, e.op)
        active, block = f.active(), f.block
        if everywhere:
            for memory in f.slots:
                if getattr(memory, "proxy", None) is not None:
                    memory.proxy.fence(block.clocks, active)
        else:
            block.shared.proxy.fence(block.clocks, active)
            for bar in block.asynchronous.barriers.values():
                bar.fenced = bar.fenced or bool(active[bar.maker])
        block.clocks.advance(np.flatnonzero(active))
        return np.int32(0)

    return run


def _prefetch(c: Any, e: Call) -> Closure:
    return lambda f: np.int32(0)


def launch_maps(s: Launch) -> dict[str, TensorMap]:
    """The tensor maps of a launch by name."""
    return {m.name: m for m in tensor_maps_of(s)}


TMA_OPS: dict[str, Callable[[Any, Call], Closure]] = {
    "tma_load": _load, "tma_store": _store, "tma_reduce_add": _store, "tma_prefetch": _prefetch,
    "bulk_load": _bulk_load, "bulk_store": _bulk_store, "bulk_copy_cluster": _bulk_copy_cluster,
    "bulk_commit": _commit, "bulk_wait": _wait,
    "fence_proxy_async": _fence, "fence_proxy_async_global": _fence,
}  # fmt: skip

__all__ = ["TMA_OPS", "box_chunks", "launch_maps"]
