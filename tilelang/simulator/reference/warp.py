"""Explicit warp instructions and asynchronous copies in the reference interpreter: mma, ldmatrix, stmatrix, cp.async.

Shared buffers are stored row by row, as the program indexes them.  Copies complete at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, numpy_dtype
from tilelang.ir.evaluate import Closure, Value

from ..faults import fault
from ..lane_ops import WARP, spread
from ..lanes import LaneFrame
from ..matrix import MATRIX_OPS, U8, U16, Registers, whole_warps
from ..memory import out_of_bounds

ROW = 16  # bytes of an ldmatrix row


class Bytes:
    """Consecutive bytes of a buffer from AddressOf(buffer, indices) on; each lane has its own indices."""

    def __init__(self, c: Any, a: Any, nbytes: int, what: str, write: bool, span: Any) -> None:
        if not isinstance(a, AddressOf):
            raise fault("sim-unsupported", f"{what} a raw pointer", expected="the address of a buffer element",
                        found="another operand", span=span)
        self.c, self.b, self.what, self.span, self.dt = c, a.buffer, what, span, numpy_dtype(a.buffer.dtype)
        self.count = max(1, nbytes // (self.dt.itemsize * a.buffer.dtype.lanes))
        self.where = c.locate(a.buffer, a.indices, self.count, span, write)

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
        if store.known is not None and self.c.check and not store.known.reshape(-1)[
                self.c.cells_known(store, at, self.dt.itemsize)].all():
            raise self.c.unwritten(self.b, self.span)
        return np.ascontiguousarray(store.flat(self.dt)[at]).view(U8)

    def write(self, f: LaneFrame, x: np.ndarray) -> None:
        """Store rows of bytes, one for each active lane."""
        store, at = self._cells(f)
        store.flat(self.dt)[at] = np.ascontiguousarray(x).view(self.dt)
        if store.known is not None:
            store.known.reshape(-1)[self.c.cells_known(store, at, self.dt.itemsize)] = True


class _Only:
    """Context manager: only some of the active lanes are active."""

    def __init__(self, f: LaneFrame, which: np.ndarray) -> None:
        self.f, self.which = f, which

    def __enter__(self) -> None:
        self.old = self.f.mask
        self.f.mask = self.which if self.old is None else self.which & self.old

    def __exit__(self, *_: Any) -> None:
        self.f.mask = self.old


def _giving(f: LaneFrame, num: int) -> np.ndarray:
    """The lanes that give row addresses: 8 for each matrix, from lane 0 on."""
    return np.tile(np.arange(WARP) < 8 * num, f.lanes // WARP)


def _ldmatrix(c: Any, e: Call) -> Closure:
    num, trans = e.options.num, e.options.trans
    into, rows = Registers(c, e.args[0], 4 * num, e.span), Bytes(c, e.args[1], ROW, "ldmatrix of", False, e.span)

    def run(f: LaneFrame) -> Value:
        warps = whole_warps(f, "ldmatrix", e.span)
        with _Only(f, _giving(f, num)):
            x = rows.read(f).view(U16).reshape(-1, num, 8, 8)
        x = x.swapaxes(2, 3) if trans else x
        # Lane 4*r + q holds elements 2q, 2q+1 of row r of each matrix.
        into.write(f, warps, x.reshape(len(x), num, WARP, 2).swapaxes(1, 2).reshape(len(x), -1))
        return np.int32(0)

    return run


def _stmatrix(c: Any, e: Call) -> Closure:
    num, trans = e.options.num, e.options.trans
    target, source = e.args
    if isinstance(target, AddressOf) and target.buffer.scope().startswith("local"):
        target, source = source, target
    out, rows = Registers(c, source, 4 * num, e.span), Bytes(c, target, ROW, "stmatrix to", True, e.span)

    def run(f: LaneFrame) -> Value:
        warps = whole_warps(f, "stmatrix", e.span)
        x = out.read(f, warps, U16).reshape(-1, WARP, num, 2).swapaxes(1, 2).reshape(-1, num, 8, 8)
        with _Only(f, _giving(f, num)):
            rows.write(f, (x.swapaxes(2, 3) if trans else x).reshape(-1, 8))
        return np.int32(0)

    return run


def _cp_async(c: Any, e: Call) -> Closure:
    """cp_async(dst, src [, pred]): a false predicate writes zeros."""
    nbytes = e.options.bytes
    to, frm = (Bytes(c, a, nbytes, what, write, e.span) for a, what, write in
               ((e.args[0], "asynchronous copy into", True), (e.args[1], "asynchronous copy from", False)))
    pred = c.expr(e.args[2]) if len(e.args) > 2 else None

    def run(f: LaneFrame) -> Value:
        if not f.any_active():
            return np.int32(0)
        data = np.zeros((f.lanes, nbytes), np.uint8)
        wanted = f.active() if pred is None else f.active() & spread(pred(f), f.lanes).astype(bool)
        if wanted.any():
            with _Only(f, wanted):
                data[wanted] = frm.read(f)
        to.write(f, data[f.active()])
        return np.int32(0)

    return run


WARP_OPS: dict[str, Callable[[Any, Call], Closure]] = {
    "mma": MATRIX_OPS["mma"], "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "cp_async": _cp_async}

__all__ = ["Bytes", "WARP_OPS"]
