"""Loads, stores and allocations in the reference interpreter.

Outside of a global tensor a load gives its safe value and a store has no effect; outside of other buffers both are errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import Alloc, Buffer, Load, Store, numpy_dtype, BARRIER, DYNAMIC, GLOBAL, PRIVATE
from tilelang.ir.evaluate import Closure, Value

from .barriers import barriers_of
from .context import TileContext
from .watch import changes
from ..faults import fault
from ..lanes import Action, LaneFrame
from ..memory import Storage, new_storage, out_of_bounds, uninitialized


def _skip(b: Buffer, f: LaneFrame, linear: np.ndarray, bad: np.ndarray, vector: bool,
          error_of: Callable[[np.ndarray], Exception]) -> np.ndarray | None:
    """Lanes (of the broadcast access) to skip, inactive or out of range; None for none.  Raises outside global memory."""
    m = f.mask
    if m is not None and vector:
        m = m[:, None]
    if bad.any():
        if b.scope() != GLOBAL:
            hit = bad if m is None else bad & m
            if hit.any():
                raise error_of(hit)
        return bad if m is None else bad | ~m
    return None if m is None else ~m


def load(c: TileContext, e: Load) -> Closure:
    """A load of one element or of a vector, for each lane."""
    b, dt, vector = e.buffer, numpy_dtype(e.buffer.dtype), e.dtype.lanes > 1
    where, shared = c.memory.locate(b, e.indices, 1, e.span), b.scope_name not in PRIVATE
    safe = c.launch.safe.get(id(b))

    def run(f: LaneFrame) -> Value:
        store, idx, shape, linear, bad = where(f)
        skip = _skip(b, f, linear, bad, vector,
                     lambda hit: out_of_bounds(b, idx, shape, hit, e.span, "load of"))
        at = linear if skip is None else np.where(skip, 0, linear)
        x = store.flat(dt)[at]
        if shared and f.warp_role is not None and f.warp_role.watch is not None:
            seen = at if skip is None else at[np.broadcast_to(~skip, at.shape)]
            f.warp_role.watch.load(f.warp_role.number, store, store.granules_of(seen, dt.itemsize), e.span)
        if store.known is not None and c.check:
            known = store.known.reshape(-1)[store.granules_of(at, dt.itemsize)]
            known = known if known.ndim == at.ndim else known.all(-1)
            if not (known if skip is None else known | skip).all():
                raise uninitialized(b, e.span)
        if skip is None:
            return x
        return np.where(skip, np.zeros((), dt) if safe is None else np.asarray(safe(f)).astype(dt), x)

    return run


def store(c: TileContext, s: Store) -> Action:
    """A store of one element or of a vector, for each lane."""
    b, dt, vector = s.buffer, numpy_dtype(s.buffer.dtype), s.value.dtype.lanes > 1
    where, value = c.memory.locate(b, s.indices, 1, s.span, True), c.expr(s.value)
    shared = b.scope_name not in PRIVATE

    def run(f: LaneFrame) -> None:
        x = np.asarray(value(f))
        store, idx, shape, linear, bad = where(f)
        skip = _skip(b, f, linear, bad, vector,
                     lambda hit: out_of_bounds(b, idx, shape, hit, s.span, "store to"))
        linear, x = np.broadcast_arrays(linear, x)
        if skip is not None:
            linear, x, keep = np.broadcast_arrays(linear, x, ~skip)
            linear, x = linear[keep], x[keep]
        if shared and f.warp_role is not None and f.warp_role.watch is not None:
            f.warp_role.watch.store(f.warp_role.number, store, store.granules_of(linear, dt.itemsize),
                                    changes(store.flat(dt)[linear], x), s.span)
        store.flat(dt)[linear] = x
        store.wrote(linear, dt.itemsize)

    return run


def allocate(c: TileContext, s: Alloc) -> Action:
    """The storage of a buffer.  A per-thread buffer has a row for each lane; all others are common to the warp roles."""
    b, scope = s.buffer, s.buffer.scope()
    if scope == BARRIER:
        return _once(c, s, lambda f: barriers_of(f.block, b, s.span))
    if scope.startswith("shared.") and scope != DYNAMIC:
        raise fault("sim-unsupported", f"‹{scope}› buffers are not simulated", expected="shared or private memory", span=s.span)
    at, make = c.slot(b.data), new_storage(c, s, b.scope_name in PRIVATE)

    def private(f: LaneFrame) -> None:
        f.slots[at] = make(f)

    def shared(f: LaneFrame) -> Storage:
        """The block's buffer; in a cluster another block may have created it first."""
        f.block.makers[id(b.data)] = make
        got = f.block.stores.get(id(b.data)) if f.block.cluster is not None else None
        if got is None:
            got = f.block.stores[id(b.data)] = make(f)
        return got

    launched: dict[int, Storage] = {}  # by rank

    def workspace(f: LaneFrame) -> Storage:
        """The launch's buffer: its first block creates it.  Outside of a kernel it is created each time."""
        where, device = getattr(f.block, "where", "").partition(" of ")[0], getattr(f.block, "device", 0)
        if device not in launched or not any(digit in "123456789" for digit in where):
            launched[device] = make(f)
        return launched[device]

    if b.scope_name in PRIVATE:
        return private
    return _once(c, s, workspace if scope == GLOBAL else shared if scope.startswith("shared") else make)


def _once(c: TileContext, s: Alloc, make: Callable[[LaneFrame], Any]) -> Action:
    """An allocation whose storage is created once for all warp roles that reach it."""
    at, common = c.slot(s.buffer.data), len(c.members) > 1

    def run(f: LaneFrame) -> None:
        f.slots[at] = f.block.once(id(s), f.warp_role, lambda: make(f)) if common else make(f)

    return run
