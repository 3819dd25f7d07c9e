"""Per-thread arrays and variables on the device simulator: loads, stores and allocations, for all lanes at once.

Reads of elements that nothing has written are found, and so are accesses to registers that a wgmma in flight uses.
Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: wgmma.fence, wgmma.wait_group".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import Alloc, Buffer, Expr, Load, Store, numpy_dtype
from tilelang.ir.evaluate import Closure, Value

from ..faults import fault
from ..lane_ops import spread
from ..lanes import Action, LaneFrame
from ..memory import new_storage, uninitialized, without_storage
from .context import DeviceContext, vector_base


class Issued:
    """wgmma state of the lanes of one frame.

    fences: number of wgmma_fence executed.  commits: number of groups committed.  guards: arrays whose registers are in use.
    """

    def __init__(self) -> None:
        self.fences = self.commits = 0
        self.guards: set[Guard] = set()


class Guard:
    """State of the registers of one per-thread array.

    busy: for each granule, number of the wgmma group that uses it, 0 for none.  stamp: number of fences executed when ordinary
    code last wrote it, -1 for never.  accumulator: whether it is an accumulator of that group.
    """

    def __init__(self, name: str, granules: int) -> None:
        self.name = name
        self.busy = np.zeros(granules, np.int32)
        self.stamp = np.full(granules, -1, np.int32)
        self.accumulator = np.zeros(granules, bool)

    def touch(self, f: LaneFrame, cells: Any, writes: bool, span: Any) -> None:
        """Ordinary code reads or writes granules.  Raises sim-wgmma when a wgmma in flight uses them."""
        if self.busy[cells].any():
            raise fault("sim-wgmma", f"{self.name} is {'written' if writes else 'read'} while the wgmma that uses its "
                        "registers is under way", found=f"{self.name} {'written' if writes else 'read'} before wgmma_wait",
                        span=span, hint="wgmma_commit, then wgmma_wait for the group of that instruction first")
        if writes:
            self.stamp[cells] = f.matrix.fences if f.matrix is not None else 0


def matrix_of(f: LaneFrame) -> Issued:
    """The wgmma state of a frame."""
    if f.matrix is None:
        f.matrix = Issued()
    return f.matrix


def allocate(c: DeviceContext, s: Alloc) -> Action:
    """A per-thread array: one row for each lane."""
    at, make, guards = c.slot(s.buffer.data), new_storage(c, s, True), c.guards_registers and c.check

    def run(f: LaneFrame) -> None:
        store = f.slots[at] = make(f)
        if guards:
            store.guard = Guard(store.name, store.nbytes // store.granule)

    return run


def load(c: DeviceContext, e: Load) -> Closure:
    """A load of consecutive elements of a per-thread array."""
    b, dt, check = e.buffer, numpy_dtype(e.buffer.dtype), c.check
    base, n = _consecutive(e)
    where, at = c.memory.elements(b, base, n // b.dtype.lanes, e.span, "load of"), c.slot(b.data)
    bl, ratio = b.dtype.lanes, dt.itemsize // c.granules[id(b.data)]
    steps = np.arange(n)

    def run(f: LaneFrame) -> Value:
        k, store = where(f), f.slots[at]
        if store is None:
            raise without_storage(b, e.span)
        x = store.view(dt)
        if store.guard is not None:
            store.guard.touch(f, _cells(k, bl, n, ratio), False, e.span)
        if k.ndim == 0:
            i = int(k) * bl
            if check and store.known is not None:
                _require(store.known[:, i * ratio:(i + n) * ratio], f, b, e.span)
            return x[:, i].copy() if n == 1 else x[:, i:i + n].copy()
        cols = k[:, None] * bl + steps
        rows = np.arange(f.lanes)[:, None]
        if check and store.known is not None:
            fine = cols if ratio == 1 else (cols[..., None] * ratio + np.arange(ratio)).reshape(f.lanes, -1)
            _require(store.known[rows, fine], f, b, e.span)
        return x[rows, cols][:, 0] if n == 1 else x[rows, cols]

    return run


def store(c: DeviceContext, s: Store) -> Action:
    """A store of consecutive elements of a per-thread array."""
    b, dt = s.buffer, numpy_dtype(s.buffer.dtype)
    base, n = _consecutive(s)
    where, at, value = c.memory.elements(b, base, n // b.dtype.lanes, s.span, "store to"), c.slot(b.data), \
        c.expr(s.value)
    bl, ratio = b.dtype.lanes, dt.itemsize // c.granules[id(b.data)]
    steps = np.arange(n)

    def run(f: LaneFrame) -> None:
        v, k, store, m = np.asarray(value(f)), where(f), f.slots[at], f.mask
        if store is None:
            raise without_storage(b, s.span)
        x = store.view(dt)
        if store.guard is not None and (m is None or m.any()):
            store.guard.touch(f, _cells(k, bl, n, ratio), True, s.span)
        if k.ndim == 0:
            i = int(k) * bl
            cols = x[:, i] if n == 1 else x[:, i:i + n]
            if m is None:
                cols[...] = v
            else:
                np.copyto(cols, v, where=m if n == 1 else m[:, None])
            if store.known is not None:
                known = store.known[:, i * ratio:(i + n) * ratio]
                if m is None:
                    known[...] = True
                else:
                    known[m] = True
            return
        rows = np.arange(f.lanes)
        if n == 1:
            v = spread(v, f.lanes)[:, None]
        else:
            v = spread(v, f.lanes, vector=True)
        cols = k[:, None] * bl + steps
        if m is not None:
            rows, cols, v = rows[m], cols[m], v[m]
        x[rows[:, None], cols] = v
        if store.known is not None:
            for r in range(ratio):
                store.known[rows[:, None], cols * ratio + r] = True

    return run


def _consecutive(x: Load | Store) -> tuple[tuple[Expr, ...], int]:
    """(indices of the first element, number of scalars) of an access.  Raises sim-unsupported for a stride."""
    b, (base, n) = x.buffer, vector_base(x.indices)
    n = n * b.dtype.lanes
    if n == 0 or (b.dtype.lanes > 1 and n != b.dtype.lanes):
        raise fault("sim-unsupported", f"strided vector access to {b.name}",
                    expected="contiguous lanes", found=f"a stride in an access to {b.name}", span=x.span)
    return base, n


def _cells(k: np.ndarray, vector: int, n: int, ratio: int) -> Any:
    """Granules of n elements from vector number k on, in any lane."""
    if k.ndim == 0:
        i = int(k) * vector
        return slice(i * ratio, (i + n) * ratio)
    return (np.unique(k)[:, None] * (vector * ratio) + np.arange(n * ratio)).ravel()


def _require(known: np.ndarray, f: LaneFrame, b: Buffer, span: Any) -> None:
    if not known.all() and not (f.mask is not None and known[f.mask].all()):
        raise uninitialized(b, span, f", in block {f.block.where}")
