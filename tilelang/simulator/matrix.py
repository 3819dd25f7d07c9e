"""Operands of matrix instructions in registers, and what both simulators do with them.

mma runs on the rows of target/instructions.py.  ldmatrix, stmatrix and wgmma add the shared operands of each simulator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, numpy_dtype
from tilelang.target.mma import row as row_of
from tilelang.target.thread_calls import WARP

from .context import Context
from .faults import fault
from .lanes import Action, LaneFrame

U8, U16 = np.dtype(np.uint8), np.dtype(np.uint16)


def whole_warps(f: LaneFrame, what: str, span: Any) -> np.ndarray | None:
    """Numbers of the active warps, None for all.  Raises sim-warp-divergence when a warp is only partly active."""
    if f.mask is None:
        return None
    by_warp = f.mask.reshape(-1, f.warp)
    some, every = by_warp.any(1), by_warp.all(1)
    if (some != every).any():
        w = int(np.flatnonzero(some != every)[0])
        count = int(by_warp[w].sum())
        raise fault("sim-warp-divergence", f"{what} needs all {f.warp} lanes of a warp, warp {w} has {count} active",
                    found=f"{count} of warp {w}", span=span,
                    hint="matrix instructions must not stand under a condition that differs within a warp")
    return None if every.all() else np.flatnonzero(every)


class Registers:
    """Consecutive elements of a per-thread array, from AddressOf(array, first) on; read and written for whole warps.

    count: elements of the buffer's type for each lane.  Element numbers must be the same in all lanes.
    """

    def __init__(self, c: Context, a: Any, nbytes: int, span: Any) -> None:
        if not isinstance(a, AddressOf) or not a.buffer.scope().startswith("local"):
            raise fault("sim-unsupported", "a matrix instruction takes «the address of a per-thread array»",
                        found="another operand", span=span)
        self.buffer, self.span, self.nbytes, self.check = a.buffer, span, nbytes, c.check
        self.item = numpy_dtype(a.buffer.dtype).itemsize * a.buffer.dtype.lanes
        self.where = c.memory.elements(a.buffer, a.indices, max(1, nbytes // self.item), span, "matrix operand")
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
        """The elements as dt, shape (warps, lanes * elements).  written: they must have been written before."""
        store, at, known = self._bytes(f)
        if written and self.check and store.known is not None:
            k = store.known[:, known]
            if not k.all() and not (f.mask is not None and k[f.mask].all()):
                raise fault("sim-uninitialized", f"{self.buffer.name} is an operand of a matrix instruction before it is "
                            "written", found=f"{self.buffer.name}, which nothing has written", span=self.span,
                            hint="clear the accumulator, or load the operand first")
        x = np.ascontiguousarray(store.raw[:, at]).view(dt).reshape(f.lanes // f.warp, -1)
        return x if warps is None else x[warps]

    def touch(self, f: LaneFrame, writes: bool) -> Registers:
        """Record a use by an instruction other than wgmma."""
        guard, cells = self.guarded(f)
        if guard is not None:
            guard.touch(f, cells, writes, self.span)
        return self

    def write(self, f: LaneFrame, warps: np.ndarray | None, x: np.ndarray) -> None:
        """Store elements, shape (warps, lanes * elements)."""
        store, at, known = self._bytes(f)
        raw = np.ascontiguousarray(x).view(U8)
        if warps is None:
            store.raw[:, at] = raw.reshape(f.lanes, -1)
            if store.known is not None:
                store.known[:, known] = True
        else:
            lanes = (warps[:, None] * f.warp + np.arange(f.warp)).ravel()
            store.raw[lanes, at] = raw.reshape(len(lanes), -1)
            if store.known is not None:
                store.known[lanes, known] = True


class MatrixRegisters:
    """The register operand of ldmatrix and stmatrix: `num` matrices of 8 x 8 elements of 16 bits.

    Lane 4*r + q holds elements 2q, 2q+1 of row r of each matrix.  shared: the other operand.
    """

    def __init__(self, c: Context, e: Call) -> None:
        self.num, self.trans, self.bytes = e.options.num, e.options.trans, e.options.bytes
        first, self.shared = e.args[:2]
        if e.op == "stmatrix" and not (isinstance(first, AddressOf) and first.buffer.scope().startswith("local")):
            first, self.shared = self.shared, first
        self.registers = Registers(c, first, 4 * self.num, e.span)

    def write(self, f: LaneFrame, warps: np.ndarray | None, x: np.ndarray) -> None:
        """Store matrices, shape (warps, num, 8, 8)."""
        x = x.swapaxes(2, 3) if self.trans else x
        x = x.reshape(len(x), self.num, WARP, 2).swapaxes(1, 2)
        x = _columns_of_bytes(x) if self.bytes else x
        self.registers.touch(f, True).write(f, warps, x.reshape(len(x), -1))

    def read(self, f: LaneFrame, warps: np.ndarray | None) -> np.ndarray:
        """The matrices, shape (warps, num, 8, 8)."""
        x = self.registers.touch(f, False).read(f, warps, U16).reshape(-1, WARP, self.num, 2)
        if self.bytes:
            x[:, 16:] = x[:, 16:, [1, 0, 3, 2]]
        x = x.swapaxes(1, 2).reshape(-1, self.num, 8, 8)
        return x.swapaxes(2, 3) if self.trans else x

    def giving(self, f: LaneFrame) -> np.ndarray:
        """The lanes that give the addresses of rows: 8 for each matrix, from lane 0 on."""
        return np.tile(np.arange(WARP) < 8 * self.num, f.lanes // WARP)


def _columns_of_bytes(x: np.ndarray) -> np.ndarray:
    """The bytes of four matrices, shape (warps, 32 lanes, 4 matrices, 2 elements), as a lane needs them for two columns."""
    y = np.ascontiguousarray(x).view(U8).reshape(len(x), WARP, 2, 2, 2, 2)  # (…, half of k, pair of rows, row, column)
    late = np.arange(WARP) % 4 >= 2
    y[:, late] = y[:, late][:, :, :, ::-1]
    return np.ascontiguousarray(y.transpose(0, 1, 2, 5, 3, 4)).reshape(len(x), WARP, -1)


def mma(c: Context, e: Call) -> Action:
    """mma: accumulator, a, b."""
    row = row_of(e.options.row)
    if row is None or row.lanes != c.warp:
        raise fault("sim-unsupported", f"no matrix instruction of warps of {c.warp} lanes is called ‹{e.options.row}›",
                    expected="a matrix instruction", span=e.span)
    m, n, k = row.shape
    coroutines = []
    for arg, frag, dt in zip(e.args, (row.c, row.a, row.b), (row.c_dtype, row.a_dtype, row.b_dtype)):
        np_dt = numpy_dtype(dt)
        coroutines.append((Registers(c, arg, frag.registers * np_dt.itemsize, e.span), np_dt, register_order(frag).ravel()))
    (rc, tc, oc), (ra, ta, oa), (rb, tb, ob) = coroutines
    back = np.empty(row.lanes * row.c.registers, np.int64)
    back[oc] = np.arange(len(oc))
    if len(oc) != len(back):
        raise fault("sim-unsupported", f"{row.name}: its accumulator does not fill its registers",
                    expected="an accumulator that fills its registers", found=f"{len(oc)} of {len(back)}", span=e.span)

    def run(f: LaneFrame) -> None:
        warps = whole_warps(f, row.name, e.span)
        f.block.counters.count(f"mma {row.name}", f.lanes // f.warp if warps is None else len(warps))
        a = ra.touch(f, False).read(f, warps, ta)[:, oa].reshape(-1, m, k)
        b = rb.touch(f, False).read(f, warps, tb)[:, ob].reshape(-1, k, n)
        acc = rc.touch(f, True).read(f, warps, tc)[:, oc].reshape(-1, m, n)
        rc.write(f, warps, row.reference(a, b, acc).reshape(len(acc), -1)[:, back])

    return run


def register_order(fragment: Any) -> np.ndarray:
    """[row, column] of an instruction operand -> thread * registers + register."""
    return fragment.owners()[0] * fragment.registers + fragment.register_table()
