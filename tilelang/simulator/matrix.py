"""Matrix instructions of a warp: ldmatrix, stmatrix, and mma for the rows of target/instructions.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, numpy_dtype, SHARED
from tilelang.ir.evaluate import Closure, Value
from tilelang.target.instructions import MMA_ROWS

from .faults import fault
from .lane_ops import WARP
from .lanes import LaneFrame
from .memory import Access

U8, U16 = np.dtype(np.uint8), np.dtype(np.uint16)


def whole_warps(f: LaneFrame, what: str, span: Any) -> np.ndarray | None:
    """Numbers of the active warps, None for all.  Raises sim-warp-divergence when a warp is only partly active."""
    if f.mask is None:
        return None
    by_warp = f.mask.reshape(-1, WARP)
    some, every = by_warp.any(1), by_warp.all(1)
    if (some != every).any():
        w = int(np.flatnonzero(some != every)[0])
        raise fault("sim-warp-divergence", f"{what} needs all 32 lanes of a warp, warp {w} has "
                    f"{int(by_warp[w].sum())} active",
                    found=f"{int(by_warp[w].sum())} of warp {w}", span=span,
                    hint="matrix instructions must not stand under a condition that differs within a warp")
    return None if every.all() else np.flatnonzero(every)


class Registers:
    """Consecutive elements of a per-thread array, from AddressOf(array, first) on; read and written for whole warps.

    count: elements of the buffer's type for each lane.  Element numbers must be the same in all lanes.
    """

    def __init__(self, c: Any, a: Any, nbytes: int, span: Any) -> None:
        if not isinstance(a, AddressOf) or not a.buffer.scope().startswith("local"):
            raise fault("sim-unsupported", "a matrix instruction takes the address of a per-thread array",
                        expected="the address of a per-thread array", found="another operand", span=span)
        self.buffer, self.span, self.nbytes, self.check = a.buffer, span, nbytes, c.check
        self.item = numpy_dtype(a.buffer.dtype).itemsize * a.buffer.dtype.lanes
        self.where = c.elements(a.buffer, a.indices, max(1, nbytes // self.item), span, "matrix operand")
        self.slot, self.granule = c.slot(a.buffer.data), c.granules[id(a.buffer.data)]

    def _bytes(self, f: LaneFrame) -> tuple[Any, slice, slice]:
        k = self.where(f)
        if k.ndim:
            on = k if f.mask is None else k[f.mask]
            if (on != on[0]).any():
                raise fault("sim-unsupported", f"registers of {self.buffer.name} chosen by a run-time index",
                            expected="a register known while compiling", found=f"a run-time index into {self.buffer.name}",
                            span=self.span, hint="registers have no addresses: the index must be the same in all lanes")
            k = on[0]
        start = int(k) * self.item
        return (f.slots[self.slot], slice(start, start + self.nbytes),
                slice(start // self.granule, (start + self.nbytes) // self.granule))

    def guarded(self, f: LaneFrame) -> tuple[Any, slice]:
        """(the array's registers.Guard or None, granules)."""
        store, _, cells = self._bytes(f)
        return (store.guard if self.check else None), cells

    def read(self, f: LaneFrame, warps: np.ndarray | None, dt: np.dtype, written: bool = True) -> np.ndarray:
        """The elements as dt, shape (warps, 32 * elements).  written: they must have been written before."""
        store, at, known = self._bytes(f)
        if written and self.check and store.known is not None:
            k = store.known[:, known]
            if not k.all() and not (f.mask is not None and k[f.mask].all()):
                raise fault("sim-uninitialized", f"{self.buffer.name} is an operand of a matrix instruction before it "
                            "is written",
                            found=f"{self.buffer.name}, which nothing has written",
                            span=self.span, hint="clear the accumulator, or load the operand first")
        x = np.ascontiguousarray(store.raw[:, at]).view(dt).reshape(f.lanes // WARP, -1)
        return x if warps is None else x[warps]

    def touch(self, f: LaneFrame, writes: bool) -> Registers:
        """Record a use by an instruction other than wgmma."""
        guard, cells = self.guarded(f)
        if guard is not None:
            guard.touch(f, cells, writes, self.span)
        return self

    def write(self, f: LaneFrame, warps: np.ndarray | None, x: np.ndarray) -> None:
        """Store elements, shape (warps, 32 * elements)."""
        store, at, known = self._bytes(f)
        raw = np.ascontiguousarray(x).view(U8)
        if warps is None:
            store.raw[:, at] = raw.reshape(f.lanes, -1)
            if store.known is not None:
                store.known[:, known] = True
        else:
            lanes = (warps[:, None] * WARP + np.arange(WARP)).ravel()
            store.raw[lanes, at] = raw.reshape(len(lanes), -1)
            if store.known is not None:
                store.known[lanes, known] = True


def _order(fragment: Any) -> np.ndarray:
    """Position lane * registers + register of each element of an instruction operand, in row-major element order."""
    owner, register = fragment.owners()[0], fragment.register_table()
    return (owner * fragment.registers + register).ravel()


def _mma(c: Any, e: Call) -> Closure:
    row = MMA_ROWS.get(e.options.row)
    if row is None:
        raise fault("sim-unsupported", f"no matrix instruction is called {e.options.row}",
                    expected="a matrix instruction", found=f"{e.options.row}", span=e.span)
    m, n, k = row.shape
    parts = []
    for arg, frag, dt in zip(e.args, (row.c, row.a, row.b), (row.c_dtype, row.a_dtype, row.b_dtype)):
        np_dt = numpy_dtype(dt)
        parts.append((Registers(c, arg, frag.registers * np_dt.itemsize, e.span), np_dt, _order(frag)))
    (rc, tc, oc), (ra, ta, oa), (rb, tb, ob) = parts
    back = np.empty(32 * row.c.registers, np.int64)
    back[oc] = np.arange(len(oc))
    if len(oc) != len(back):
        raise fault("sim-unsupported", f"{row.name}: its accumulator does not fill its registers",
                    expected="an accumulator that fills its registers", found=f"{len(oc)} of {len(back)}", span=e.span)

    def run(f: LaneFrame) -> Value:
        warps = whole_warps(f, row.name, e.span)
        f.block.counters.count(f"mma {row.name}", f.lanes // WARP if warps is None else len(warps))
        a = ra.touch(f, False).read(f, warps, ta)[:, oa].reshape(-1, m, k)
        b = rb.touch(f, False).read(f, warps, tb)[:, ob].reshape(-1, k, n)
        acc = rc.touch(f, True).read(f, warps, tc)[:, oc].reshape(-1, m, n)
        rc.write(f, warps, row.meaning(a, b, acc).reshape(len(acc), -1)[:, back])
        return np.int32(0)

    return run


def _rows_of(c: Any, e: Call, shared: Any, what: str, text: str) -> Any:
    """f(frame, warps) -> byte addresses (warps, num, 8) of the rows that the lanes give; records the accesses."""
    num = e.options.num
    if not isinstance(shared, AddressOf) or shared.buffer.scope() not in SHARED:
        raise fault("sim-unsupported", f"{e.op} needs the address of a shared row",
                    expected="the address of a shared row", found=f"another operand of {e.op}", span=e.span)
    reach = c.reach(shared.buffer, shared.indices, 16, e.span, what)
    mode, slot = text, c.slot(shared.buffer.data)
    access = Access(shared.buffer, 16, c.site(shared.buffer, e.span, text), mode, e.op)

    def run(f: LaneFrame, warps: np.ndarray | None) -> np.ndarray:
        old = f.mask
        # Only the first 8*num lanes give addresses.
        giving = np.tile(np.arange(WARP) < 8 * num, f.lanes // WARP)
        f.mask = giving if old is None else giving & old
        try:
            address = reach(f)
            memory = f.slots[slot]
            # Each matrix is one pass of 8 rows of 16 bytes, which is counted as a 16-byte access.
            c.touch(f, memory, address, access, None if mode == "read" else np.ones(int(f.mask.sum()), bool))
        finally:
            f.mask = old
        rows = address.reshape(-1, 4, 8)[:, :num]
        return rows if warps is None else rows[warps]

    return run


def _ldmatrix(c: Any, e: Call) -> Closure:
    num, trans = e.options.num, e.options.trans
    into = Registers(c, e.args[0], 4 * num, e.span)
    rows = _rows_of(c, e, e.args[1], "ldmatrix of", "read")

    def run(f: LaneFrame) -> Value:
        warps = whole_warps(f, "ldmatrix", e.span)
        at = rows(f, warps)
        x = f.block.shared.store.flat(U16)[(at // 2)[..., None] + np.arange(8)]  # (warps, num, 8, 8)
        if trans:
            x = x.swapaxes(2, 3)
        # Lane 4*r + q holds elements 2q, 2q+1 of row r of each matrix.
        x = x.reshape(len(at), num, WARP, 2).swapaxes(1, 2)
        into.touch(f, True).write(f, warps, x.reshape(len(at), -1))
        return np.int32(0)

    return run


def _stmatrix(c: Any, e: Call) -> Closure:
    num, trans = e.options.num, e.options.trans
    target, source = e.args
    if isinstance(target, AddressOf) and target.buffer.scope().startswith("local"):
        target, source = source, target
    out = Registers(c, source, 4 * num, e.span)
    rows = _rows_of(c, e, target, "stmatrix to", "write")

    def run(f: LaneFrame) -> Value:
        warps = whole_warps(f, "stmatrix", e.span)
        x = out.touch(f, False).read(f, warps, U16).reshape(-1, WARP, num, 2).swapaxes(1, 2).reshape(-1, num, 8, 8)
        if trans:
            x = x.swapaxes(2, 3)
        at = rows(f, warps)
        f.block.shared.store.flat(U16)[(at // 2)[..., None] + np.arange(8)] = x
        return np.int32(0)

    return run


def register_order(fragment: Any) -> np.ndarray:
    """[row, column] -> thread * registers + register."""
    return fragment.owners()[0] * fragment.registers + fragment.register_table()


MATRIX_OPS = {"mma": _mma, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix}

__all__ = ["MATRIX_OPS", "Registers", "register_order", "whole_warps"]
