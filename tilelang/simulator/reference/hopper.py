"""Explicit wgmma, descriptor and TMA operations in the reference interpreter.

The interpreter stores tiles row by row.  Buffers that a launch names by address get the addresses that they have on the
device (target/shared_space.py).  A descriptor is therefore the same number as on the device except for its address field,
and names the same bytes.  Copies and wgmma complete when they are issued; operations issued too early or waited for too
late are found by the device simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from tilelang.ir import Call, Launch
from tilelang.ir.evaluate import Closure, Value
from tilelang.target.shared_space import Placed, SharedSpace, shared_space
from tilelang.target.warp_groups import GROUP
from tilelang.target.wgmma import decode_descriptor, operand_addresses

from .barriers import TileBarrier
from .context import TileContext
from ..boxes import UNIT, box_of, coordinates
from ..faults import fault
from ..lane_ops import effects
from ..lanes import Action, LaneFrame, only
from ..matrix import U8
from ..memory import geometry, linear_index, out_of_bounds, shared_operand, uninitialized
from ..wgmma import DescribedOperand, WgmmaRegisters, descriptor, wgmma_row

_BOX_ALIGN = 128  # alignment of a box in shared memory


def space_of(launch: Launch) -> SharedSpace:
    """The shared-memory addresses of a launch's buffers.  Raises sim-unsupported."""
    return shared_space(launch, lambda why, span: fault(
        "sim-unsupported", f"{why} (a descriptor or a box names it)",
        expected="shared buffers of constant shape, and layouts of what was allocated", found=why, span=span))


def _address(c: TileContext, operand: Any, e: Call, what: str) -> tuple[Placed, Callable[[LaneFrame], Value]]:
    """The buffer that an operand names, and a function for its address, one number or one for each lane."""
    a = shared_operand(e, operand)
    held, b = c.launch.space.of(a.buffer.data), a.buffer
    fns, geo, address = [c.expr(i) for i in a.indices], geometry(c, b), c.expr(held.address(b, a.indices))

    def run(f: LaneFrame) -> Value:
        shape, strides, offset = geo(f)
        idx = [np.asarray(fn(f)).astype(np.int64) for fn in fns]
        _, bad = linear_index(idx, shape, strides, offset)
        hit = bad if f.mask is None else bad & f.mask
        if hit.any():
            raise out_of_bounds(b, idx, shape, hit, e.span, what)
        return np.asarray(address(f)).astype(np.int64)

    return held, run


def _bytes_of(held: Placed, offsets: np.ndarray, what: str, span: Any) -> np.ndarray:
    """Positions in the storage of bytes of the tile in its device layout.  Raises sim-out-of-bounds."""
    if offsets.size and (offsets.min() < 0 or offsets.max() >= held.nbytes):
        far = int(offsets.min() if offsets.min() < 0 else offsets.max())
        raise fault("sim-out-of-bounds", f"{what} reaches ‹byte {far}› of `{held.buffer.name}`, which has {held.nbytes}",
                    expected=f"bytes 0 to {held.nbytes - 1}", span=span,
                    hint="check the address and the strides (lbo, sbo) of its descriptor")
    at = held.rows(offsets)
    if (at < 0).any():
        far = int(offsets[at < 0][0])
        raise fault("sim-out-of-bounds", f"{what} reaches ‹byte {far}› of `{held.buffer.name}`, where its layout puts no "
                    "element", expected="bytes of elements", span=span,
                    hint="a layout that descriptors and TMA use has no gaps")
    return at


# ---- descriptors ------------------------------------------------------------------------------------------------------


def _descriptor(c: TileContext, e: Call) -> Closure:
    return descriptor(c, e, _address(c, e.args[0], e, "wgmma operand")[1])


@lru_cache(maxsize=1024)
def _operand_bytes(descriptor: int, major: str, extent: int, item: int) -> np.ndarray:
    """Addresses of the bytes of an operand, shape [extent, k * item]."""
    at = operand_addresses(descriptor, major, extent, item)
    return (at[..., None] + np.arange(item)).reshape(extent, -1)


class _SharedOperand(DescribedOperand):
    """An operand that is named by a descriptor."""

    def read(self, f: LaneFrame, space: SharedSpace) -> np.ndarray:
        """Elements [extent, k], for the active lanes."""
        descriptor = self.descriptor(f)
        held = space.holding(decode_descriptor(descriptor)[0])
        if held is None:
            raise fault("sim-out-of-bounds", f"a wgmma descriptor names byte {decode_descriptor(descriptor)[0]:#x}, where no "
                        "shared buffer lies", expected="a descriptor of a shared buffer", found=f"{descriptor:#x}",
                        span=self.span, hint="T.initialize_wgmma_descriptor comes first, and its offsets stay in the buffer")
        offsets = _operand_bytes(descriptor, self.major, self.extent, self.dt.itemsize) - held.start
        at = _bytes_of(held, offsets, "a wgmma operand", self.span)
        store = f.slots[self.c.slot(held.buffer.data)]
        if self.c.check and not store.knows(at, 1):
            raise uninitialized(held.buffer, self.span)
        return np.ascontiguousarray(store.flat(U8)[at]).view(self.dt)


# ---- wgmma ----------------------------------------------------------------------------------------------------------------


def _groups(f: LaneFrame, what: str, span: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """(lane mask, warp numbers) of each warp group that executes.  Raises sim-warp-divergence unless it is complete."""
    active, out = f.active(), []
    for g in np.unique(np.flatnonzero(active) // GROUP):
        own = np.arange(f.lanes) // GROUP == g
        if (active & own).sum() != GROUP:
            raise fault("sim-warp-divergence", f"{what} needs «all 128 threads of a warp group», found "
                        f"‹{int((active & own).sum())}› of warp group {g}", span=span,
                        hint="a warp group is 4 warps whose first thread is a multiple of 128")
        out.append((own, np.arange(4) + 4 * g))
    return out


def _wgmma(c: TileContext, e: Call) -> Action:
    row, space = wgmma_row(e), c.launch.space
    registers, b = WgmmaRegisters(c, e, row), _SharedOperand(c, e, 2, row)
    a = None if registers.a is not None else _SharedOperand(c, e, 1, row)

    def run(f: LaneFrame) -> None:
        for own, warps in _groups(f, row.name, e.span):
            with only(f, own):
                keep = registers.keeps(f)
                x = a.read(f, space) if a is not None else registers.read_a(f, warps)
                registers.multiply(f, warps, x, b.read(f, space).T, keep)

    return run


# ---- TMA boxes ------------------------------------------------------------------------------------------------------------


def _load(c: TileContext, e: Call) -> Action:
    """tma_load(address, barrier, coordinates), for each lane that executes it; the box and its bytes arrive at once."""
    if e.options.multicast:
        raise fault("sim-unsupported", "a box for several blocks of a cluster in a tile program",
                    expected="T.tma_copy(cluster_mask=)", found="tma_load with a mask of blocks", span=e.span)
    m, dst = box_of(c, e), e.args[0]
    held, to = _address(c, dst, e, "TMA load into")
    bar, coords = TileBarrier.of(c, e.args[1], e.span), coordinates(c, e, m, e.args[2:])
    slot = c.slot(held.buffer.data)

    def one(f: LaneFrame, t: int, start: int) -> None:
        units = m.units(start, held.start, held.end, held.buffer, _BOX_ALIGN, e.span)
        memory, inside, place, g = m.window(f, coords(f, t))
        if c.check and memory.known is not None and not memory.known[0, g].all():
            raise uninitialized(m.map.buffer, e.span)
        box = m.fill()
        box[place] = inside
        offsets = (units.reshape(-1, 1) * UNIT + np.arange(UNIT)).reshape(-1) - held.start
        at, store = _bytes_of(held, offsets, "a box", e.span), f.slots[slot]
        store.flat(U8)[at] = box.reshape(-1).view(U8)
        store.wrote(at, 1)
        bar.get(f).receive(offsets.size)

    def run(f: LaneFrame) -> None:
        starts = np.broadcast_to(to(f), (f.lanes,))
        for t in np.flatnonzero(f.active()).tolist():
            with only(f, np.arange(f.lanes) == t):
                one(f, t, int(starts[t]))

    return run


TILE_HOPPER_OPS: dict[str, Callable[[TileContext, Call], Closure]] = {
    **effects({"wgmma": _wgmma, "tma_load": _load}), "wgmma_descriptor": _descriptor}
