"""TMA boxes at run time: their elements in the tensor and in shared memory.  Both simulators use it.

A box is stored in shared memory row after row, with the innermost dimension contiguous.  Under a swizzle of W bytes rows
have a pitch of W bytes, and address bits 4.. are XORed with bits 7...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import Call, Launch, numpy_dtype
from tilelang.target.im2col import Im2col
from tilelang.target.tensor_map import NAN_BITS, STRIDE_ALIGN, TensorMap, tensor_maps_of

from .context import Context
from .faults import fault
from .lane_ops import spread
from .lanes import LaneFrame, is_address
from .memory import Storage, geometry, strided


UNIT = 16


def box_chunks(start: int, rows: int, row_bytes: int, swizzle: int) -> np.ndarray:
    """Numbers of the 16-byte units of shared memory that a box at byte `start` covers, shape (rows, row_bytes / 16)."""
    at = start + np.arange(rows)[:, None] * (swizzle or row_bytes) + np.arange(0, row_bytes, UNIT)
    if swizzle:
        at = at ^ ((at >> 7 & swizzle // UNIT - 1) << 4)
    return at // UNIT


def tensor_memory(held: Any, b: Any, span: Any) -> Any:
    """The memory of a tensor that TMA reads or writes."""
    if is_address(held):
        raise fault("sim-address", f"TMA of {b.name}, which is made of the null pointer or of an address that only the kernel "
                    "knows", expected="a tensor that the host can describe to TMA", found=f"`{b.name}` at an address",
                    span=span, hint="pass the tensor, or a pointer to a tensor whose shape the parameters give")
    return held


class TensorBox:
    """A tensor map at run time."""

    def __init__(self, c: Context, m: TensorMap, span: Any) -> None:
        m.check()
        self.map, self.span = m, span
        self.dt = numpy_dtype(m.buffer.dtype)
        self.slot, self.geometry = c.slot(m.buffer.data), geometry(c, m.buffer)
        self.box = tuple(reversed(m.box))  # outermost first
        self.row_bytes = m.box[0] * self.dt.itemsize
        self.rows = int(np.prod(self.box[:-1]))
        self.granule = c.granules[id(m.buffer.data)]

    def window(self, f: LaneFrame, start: tuple[int, ...]) -> tuple[Any, np.ndarray, tuple[Any, ...], np.ndarray]:
        """(the memory, the tensor elements inside the box, their slices or places in the box, their granules).

        start: coordinates, outermost first.  The memory is what the tensor's slot holds: a Storage, or an object that has one.
        """
        memory = tensor_memory(f.slots[self.slot], self.map.buffer, self.span)
        store = memory if isinstance(memory, Storage) else memory.store
        shape, strides, offset = self.geometry(f)
        item = self.dt.itemsize
        if self.map.im2col is not None:
            places, at = self._columns(self.map.im2col, start, shape[0])
            return memory, store.flat(self.dt)[at], places, self._granules(at)
        if strides[-1] != 1 or any(s * item % UNIT for s in strides[:-1]) or offset * item % UNIT:
            raise fault("sim-tma", f"{self.map.buffer.name}: ‹strides {strides} from element {offset}› do not suit a tensor "
                        "map", expected="a stride of 1 element and others of multiples of 16 bytes", span=self.span,
                        hint="the innermost stride is 1 element, others are multiples of 16 bytes")
        low = [min(max(s, 0), n) for s, n in zip(start, shape)]
        high = [min(max(s + b, lo), n) for s, b, n, lo in zip(start, self.box, shape, low)]
        tensor = strided(store.flat(self.dt), offset, shape, strides)
        inside = tensor[tuple(slice(lo, hi) for lo, hi in zip(low, high))]
        place = tuple(slice(lo - s, hi - s) for lo, hi, s in zip(low, high, start))
        at = np.zeros((), np.int64) + offset
        for lo, hi, s in zip(low, high, strides):
            at = at[..., None] + np.arange(lo, hi) * s
        return memory, inside, place, self._granules(at)

    def _granules(self, at: np.ndarray) -> np.ndarray:
        k = self.dt.itemsize // self.granule
        return at.reshape(-1) if k == 1 else (at.reshape(-1, 1) * k + np.arange(k)).reshape(-1)

    def _columns(self, m: Im2col, start: tuple[int, ...], rows: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """(the places in an im2col box of elements inside the image, their numbers).  Pixels follow one another along w inside
        the bounding box, then along h, then from image to image."""
        (off_h, off_w, n, h, w, c), (oh, ow) = start, m.out
        first = (n * oh + (h - m.low[0]) // m.stride[0]) * ow + (w - m.low[1]) // m.stride[1]
        pixel = first + np.arange(self.box[0])
        at_h, at_w = (p * m.stride[d] + m.low[d] + off for d, p, off in (
            (0, pixel // ow % oh, off_h), (1, pixel % ow, off_w)))
        image, (height, width, channels) = pixel // (oh * ow), m.image
        column = c + np.arange(self.box[1])
        there = (image >= 0) & (image < rows // (oh * ow)) & (at_h >= 0) & (at_h < height) & (at_w >= 0) & (at_w < width)
        place = np.nonzero(there[:, None] & (column < channels))
        at = (((image * height + at_h) * width + at_w) * channels)[:, None] + column
        return place, at[place]

    def units(self, start: int, first: int, end: int, b: Any, align: int, span: Any) -> np.ndarray:
        """16-byte units of a box at byte `start` of b, whose bytes are `first` to `end`.  Raises sim-tma, sim-out-of-bounds."""
        if start % align:
            raise fault("sim-tma", f"a box in {b.name} starts at ‹byte {start}› of shared memory, not a multiple of {align}",
                        expected=f"a multiple of {align} bytes", span=span,
                        hint="align buffers that TMA fills: 1024 bytes under a 128-byte swizzle")
        units = box_chunks(start, self.rows, self.row_bytes, self.map.swizzle)
        if units.max() >= end // UNIT or units.min() < first // UNIT:
            raise fault("sim-out-of-bounds", f"a box of {self.map.box} elements at byte {start - first} of {b.name} "
                        f"leaves it: it has {end - first} bytes",
                        expected=f"a box inside {b.name}", found=f"a box of {self.map.box} at byte {start - first}", span=span)
        return units

    def fill(self) -> np.ndarray:
        """A box filled with the value of elements outside the tensor."""
        if self.map.fill == "zero":
            return np.zeros(self.box, self.dt)
        bits = np.full(self.box, NAN_BITS[self.dt.itemsize], np.dtype(f"u{self.dt.itemsize}"))
        return bits.view(self.dt)


def box_of(c: Context, e: Call) -> TensorBox:
    """The box of a call (attr `map`).  Raises sim-tma for a map that its launch does not define."""
    name = e.options.map
    if name not in c.launch.maps:
        raise fault("sim-tma", f"no tensor map is called ‹{name}›: this launch has {', '.join(c.launch.maps) or 'none'}",
                    expected=f"one of {', '.join(c.launch.maps) or 'none'}", span=e.span)
    return TensorBox(c, c.launch.maps[name], e.span)


def coordinates(c: Context, e: Call, m: TensorBox, args: tuple[Any, ...]) -> Callable[[LaneFrame, int], tuple[int, ...]]:
    """f(frame, thread) -> coordinates, outermost first."""
    if len(args) != m.map.coordinates:
        raise fault("sim-tma", f"{e.op}: ‹{len(args)}› coordinates for a map of {m.map.coordinates}",
                    expected=f"{m.map.coordinates} coordinates", span=e.span)
    fns = [c.expr(a) for a in args]
    bits = m.map.buffer.dtype.bits

    def at(f: LaneFrame, t: int) -> tuple[int, ...]:
        out = tuple(int(spread(fn(f), f.lanes)[t]) for fn in reversed(fns))
        if out[-1] * bits % (STRIDE_ALIGN * 8):  # an H200 reports "illegal instruction" for such loads and stores
            raise fault("sim-tma", f"{e.op} of {m.map.buffer.name} at ‹column {out[-1]}›: boxes start at multiples of "
                        f"{STRIDE_ALIGN} bytes", expected=f"a column at a multiple of {STRIDE_ALIGN} bytes", span=e.span)
        return out

    return at


def launch_maps(s: Launch) -> dict[str, TensorMap]:
    """The tensor maps of a launch by name."""
    return {m.name: m for m in tensor_maps_of(s)}
