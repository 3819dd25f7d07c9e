"""Explicit warp instructions and asynchronous copies in the reference interpreter: mma, ldmatrix, stmatrix, cp.async.

Shared buffers are stored row by row, as the program indexes them.  Copies complete at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, numpy_dtype

from .context import TileContext
from ..faults import fault
from ..lane_ops import effects, spread
from ..lanes import Action, LaneFrame, only
from ..matrix import U8, U16, MatrixRegisters, mma, whole_warps
from ..memory import out_of_bounds, uninitialized

ROW = 16  # bytes of an ldmatrix row


class Bytes:
    """Consecutive bytes of a buffer from AddressOf(buffer, indices) on; each lane has its own indices."""

    def __init__(self, c: TileContext, a: Any, nbytes: int, what: str, write: bool, span: Any) -> None:
        if not isinstance(a, AddressOf):
            raise fault("sim-unsupported", f"{what} a raw pointer", expected="the address of a buffer element",
                        found="another operand", span=span)
        self.c, self.b, self.what, self.span, self.dt = c, a.buffer, what, span, numpy_dtype(a.buffer.dtype)
        self.count = max(1, nbytes // (self.dt.itemsize * a.buffer.dtype.lanes))
        self.where = c.memory.locate(a.buffer, a.indices, self.count, span, write)

    def _cells(self, f: LaneFrame) -> tuple[Any, np.ndarray]:
        """(storage, element numbers of the active lanes)."""
        store, idx, shape, linear, bad = self.where(f)
        on = f.active()
        vector = self.count > 1 or self.b.dtype.lanes > 1
        rows, outside = (spread(x, f.lanes, vector).reshape(f.lanes, -1) for x in (linear, bad))
        if outside[on].any():
            at = [np.broadcast_to(i, (*i.shape[:-1], self.count) if vector else i.shape) for i in idx]
            raise out_of_bounds(self.b, at, shape, bad & (on[:, None] if vector else on), self.span, self.what)
        return store, rows[on]

    def read(self, f: LaneFrame) -> np.ndarray:
        """The bytes of the active lanes, one row each."""
        store, at = self._cells(f)
        if self.c.check and not store.knows(at, self.dt.itemsize):
            raise uninitialized(self.b, self.span)
        return np.ascontiguousarray(store.flat(self.dt)[at]).view(U8)

    def write(self, f: LaneFrame, x: np.ndarray) -> None:
        """Store rows of bytes, one for each active lane."""
        store, at = self._cells(f)
        store.flat(self.dt)[at] = np.ascontiguousarray(x).view(self.dt)
        store.wrote(at, self.dt.itemsize)


def _ldmatrix(c: TileContext, e: Call) -> Action:
    into = MatrixRegisters(c, e)
    rows = Bytes(c, into.shared, ROW, "ldmatrix of", False, e.span)

    def run(f: LaneFrame) -> None:
        warps = whole_warps(f, e.op, e.span)
        with only(f, into.giving(f)):
            x = rows.read(f).view(U16).reshape(-1, into.num, 8, 8)
        into.write(f, warps, x)

    return run


def _stmatrix(c: TileContext, e: Call) -> Action:
    out = MatrixRegisters(c, e)
    rows = Bytes(c, out.shared, ROW, "stmatrix to", True, e.span)

    def run(f: LaneFrame) -> None:
        x = out.read(f, whole_warps(f, e.op, e.span))
        with only(f, out.giving(f)):
            rows.write(f, x.reshape(-1, 8))

    return run


def _cp_async(c: TileContext, e: Call) -> Action:
    """cp_async(dst, src [, pred]): a false predicate writes zeros."""
    nbytes = e.options.bytes
    to, frm = (Bytes(c, a, nbytes, what, write, e.span) for a, what, write in
               ((e.args[0], "asynchronous copy into", True), (e.args[1], "asynchronous copy from", False)))
    pred = c.expr(e.args[2]) if len(e.args) > 2 else None

    def run(f: LaneFrame) -> None:
        data = np.zeros((f.lanes, nbytes), np.uint8)
        wanted = f.active() if pred is None else f.active() & spread(pred(f), f.lanes).astype(bool)
        if wanted.any():
            with only(f, wanted):
                data[wanted] = frm.read(f)
        to.write(f, data[f.active()])

    return run


WARP_OPS = effects({"mma": mma, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "cp_async": _cp_async})
