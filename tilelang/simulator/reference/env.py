"""The environment of a tile op's `reference`: regions as NumPy tiles, expressions as scalars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tilelang.ir import Broadcast, Buffer, Expr, Node, Region, TileOp, children, const, fields_of, numpy_dtype, rebuild, GLOBAL
from tilelang.ops import Copy, Fill

from .context import TileContext
from ..addresses import Addresses, Followed
from ..faults import fault
from ..lanes import LaneFrame, is_address, uniform
from ..memory import geometry, strided, uninitialized, without_storage
from ..ranks import Section


def scalar_elements(op: TileOp) -> TileOp:
    """A copy or fill of vectors as one of scalars: each region gets the lanes as an additional dimension."""
    def visit(v: Any) -> Any:
        if isinstance(v, Broadcast):
            return v.value
        if not isinstance(v, Region) or v.buffer.dtype.lanes == 1:
            return v
        b, n = v.buffer, v.buffer.dtype.lanes
        whole = Buffer(b.name, (*b.shape, n), b.dtype.scalar, b.scope_name, (*(s * n for s in b.strides), 1), b.offset * n,
                       b.data, b.facts, span=b.span)
        return Region(whole, (*v.mins, const(0)), (*v.extents, n), span=v.span)

    vectors = isinstance(op, (Copy, Fill)) and any(isinstance(n, Region) and n.buffer.dtype.lanes > 1 for n in children(op))
    return rebuild(op, visit) if vectors else op  # type: ignore[return-value]


class TileEnv:
    """The environment of one execution of one tile op.

    lane: the thread whose private arrays and values are used, None for the whole block.
    """

    def __init__(self, sites: dict[int, Any], check: bool, f: LaneFrame, lane: int | None, span: Any,
                 addresses: Addresses) -> None:
        self._addresses = addresses
        self._sites, self._check, self._frame, self._lane, self.span = sites, check, f, lane, span

    @staticmethod
    def compile(c: TileContext, op: TileOp) -> Callable[[LaneFrame, int | None], TileEnv]:
        """A function that creates environments for op, with the expressions of all operands compiled."""
        sites: dict[int, Any] = {}

        def visit(v: Any) -> None:
            if isinstance(v, Region):
                sites[id(v)] = _RegionSite(c, v)
            elif isinstance(v, Expr):
                sites[id(v)] = c.expr(v)
            elif isinstance(v, tuple):
                for x in v:
                    visit(x)

        for name in fields_of(type(op)):
            if name != "attrs":
                visit(getattr(op, name))
        return lambda f, lane: TileEnv(sites, c.check, f, lane, op.span, c.addresses)

    def eval(self, e: Any) -> Any:
        """The scalar value of an expression (or Python number), in the expression's dtype."""
        if not isinstance(e, Node):
            return np.asarray(e)
        return self._scalar(self._sites[id(e)])

    def _scalar(self, fn: Callable[[LaneFrame], Any]) -> Any:
        x = np.asarray(fn(self._frame))
        if x.ndim and self._lane is not None:
            return x[self._lane]
        return uniform(x, self._frame, "an operand of a tile operation", self.span)

    def shape(self, r: Region) -> tuple[int, ...]:
        """Extents of a region, including unit dimensions; 0 where a run-time end lies before its start."""
        return tuple(max(int(self._scalar(e)), 0) if callable(e) else e for e in self._sites[id(r)].extents)

    def read(self, r: Region) -> np.ndarray:
        """A copy of a region with shape `shape(r)`; out-of-range elements of a global buffer have the safe value."""
        box = self._box(r)
        if box.tensor[box.source].shape == box.shape:
            out = box.tensor[box.source].copy()
        else:
            safe = self._sites[id(r)].safe
            fill = np.zeros((), box.tensor.dtype) if safe is None else np.asarray(self._scalar(safe)).astype(box.tensor.dtype)
            out = np.full(box.shape, fill, box.tensor.dtype)
            out[box.target] = box.tensor[box.source]
        if self._check and box.known is not None and not box.known[box.source].all():
            raise uninitialized(r.buffer, self.span)
        return out

    def write(self, r: Region, tile: Any) -> None:
        """Store a tile of the buffer's dtype and of shape `shape(r)`; global elements out of range are skipped."""
        box = self._box(r, True)
        tile = np.broadcast_to(np.asarray(tile, box.tensor.dtype), box.shape)
        box.tensor[box.source] = tile[box.target]
        if box.known is not None:
            box.known[box.source] = True

    def _box(self, r: Region, write: bool = False) -> _Box:
        site = self._sites[id(r)]
        f, b = self._frame, r.buffer
        store = f.slots[site.slot]
        if isinstance(store, Section):
            store = store.of[int(self._scalar(lambda f, held=store: held.rank))]  # type: ignore[misc]
        if store is None:
            raise without_storage(b, self.span)
        shape, strides, offset = site.geometry(f)
        mins = [int(self._scalar(m)) for m in site.mins]
        ext = self.shape(r)
        low = [max(m, 0) for m in mins]
        high = [max(lo, min(m + e, n)) for m, e, n, lo in zip(mins, ext, shape, low)]
        if b.scope() != GLOBAL and all(ext) and any(m < 0 or m + e > n for m, e, n in zip(mins, ext, shape)):
            ranges = ", ".join(f"{m}:{m + e}" for m, e in zip(mins, ext))
            raise fault("sim-out-of-bounds", f"{b.name}‹[{ranges}]› is outside its shape ({', '.join(map(str, shape))})",
                        expected=f"a region of ({', '.join(map(str, shape))})", span=r.span or self.span,
                        hint="check the start and extents of the region")
        source = tuple(slice(lo, hi) for lo, hi in zip(low, high))
        target = tuple(slice(lo - m, hi - m) for lo, hi, m in zip(low, high, mins))
        if is_address(store):
            at = np.full((), offset, np.int64)
            for lo, hi, s in zip(low, high, strides):
                at = at[..., None] + np.arange(lo, hi) * s
            pointer = self._scalar(lambda f: store)
            where = Followed(b, write, self.span)
            window, number = self._addresses.follow(pointer, at, np.ones(at.shape, bool), False, 1, where)
            return _Box(_Picked(window.flat(numpy_dtype(b.dtype)), number), None, (slice(None),) * len(low), target, ext)
        row = 0 if self._lane is None or store.lanes == 1 else self._lane
        flat = store.view(numpy_dtype(b.dtype))[row]
        tensor = strided(flat, offset, shape, strides)
        known = None
        if store.known is not None:
            flags = store.known[row]
            k = flat.itemsize // store.granule
            known = strided(flags, offset * k, (*shape, k), (*(s * k for s in strides), 1))
        return _Box(tensor, known, source, target, ext)


class _Picked:
    """Array-like view of memory elements, given by an array of their numbers; it is read and written as a whole."""

    def __init__(self, flat: np.ndarray, number: np.ndarray) -> None:
        self.flat, self.number, self.dtype = flat, number, flat.dtype

    def __getitem__(self, key: Any) -> np.ndarray:
        return self.flat[self.number]

    def __setitem__(self, key: Any, values: np.ndarray) -> None:
        self.flat[self.number] = values


class _Box(NamedTuple):
    """A region at run time: the buffer as an array, its written-flags by granule of each element (None: all written), the
    slices of it inside the shape (source), their slices of the tile."""

    tensor: Any
    known: Any
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    shape: tuple[int, ...]


class _RegionSite:
    """The compiled expressions of a region."""

    def __init__(self, c: TileContext, r: Region) -> None:
        b: Buffer = r.buffer
        if b.dtype.lanes > 1:
            raise fault("sim-unsupported", f"{b.name}: a tile operation on vectors (‹{b.dtype}›)", expected="scalar elements",
                        span=r.span, hint="view the buffer with a scalar element type")
        self.slot = c.slot(b.data)
        self.geometry = geometry(c, b)
        self.mins = [c.expr(m) for m in r.mins]
        self.extents = [c.expr(e) if isinstance(e, Expr) else e for e in r.extents]
        self.safe = c.launch.safe.get(id(b))
