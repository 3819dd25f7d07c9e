"""Loads, stores and allocations on the device simulator: of shared memory and global tensors, with all checks.

Accesses to per-thread arrays are in private_arrays.py.
"""

from __future__ import annotations

import numpy as np

from tilelang.arith import lane_of
from tilelang.ir import Alloc, Buffer, Load, Store, numpy_dtype, BARRIER, GLOBAL, SHARED
from tilelang.ir.evaluate import Closure, Value

from . import private_arrays
from .context import DeviceContext, vector_base
from .block import Global
from ..faults import fault
from ..lane_ops import spread
from ..lanes import Action, LaneFrame
from ..memory import geometry, new_storage, span_of


def load(c: DeviceContext, e: Load) -> Closure:
    """A load from any memory."""
    return private_arrays.load(c, e) if e.buffer.scope().startswith("local") else _load(c, e)


def store(c: DeviceContext, s: Store) -> Action:
    """A store to any memory."""
    return private_arrays.store(c, s) if s.buffer.scope().startswith("local") else _store(c, s)


def allocate(c: DeviceContext, s: Alloc) -> Action:
    """The buffer of any memory.  Shared memory is placed by the launch (launch.py)."""
    scope = s.buffer.scope()
    if scope.startswith("local"):
        return private_arrays.allocate(c, s)
    if scope == GLOBAL:
        return _workspace(c, s)
    if scope == BARRIER:
        return lambda f: None
    if scope not in SHARED:
        raise fault("sim-unsupported", f"‹{scope}› buffers are not simulated", expected="shared or private memory", span=s.span)
    return _shared(c, s)


def _workspace(c: DeviceContext, s: Alloc) -> Action:
    """A buffer in global memory.  Inside a launch there is one for all blocks, which the launch allocates."""
    at, storage = c.slot(s.buffer.data), new_storage(c, s, False)

    def make(f: LaneFrame) -> None:
        f.slots[at] = Global(storage(f))

    if c.workspaces is None:
        return make
    c.workspaces.append(make)
    return lambda f: None


def _shared(c: DeviceContext, s: Alloc) -> Action:
    """Bytes of the block's shared memory, which hold nothing of this buffer yet."""
    b, at, geo = s.buffer, c.slot(s.buffer.data), geometry(c, s.buffer)
    item = numpy_dtype(b.dtype).itemsize * b.dtype.lanes

    def run(f: LaneFrame) -> None:
        memory, start = f.block.shared, f.slots[at]
        if f.block.warp_roles is not None:
            return  # warps reach this place at different times
        g = memory.granule
        # Only this buffer: it may be declared before the last use of another one in the same bytes.
        owner = memory.owner[start // g:-(-(start + span_of(*geo(f)) * item) // g)]
        owner[owner == at] = -1
        memory.table.changed()

    return run


def _space(b: Buffer) -> str:
    return b.scope().split(".")[0]


def _load(c: DeviceContext, e: Load) -> Closure:
    b, dt = e.buffer, numpy_dtype(e.buffer.dtype)
    base, n = vector_base(e.indices)
    if n == 0:
        return _gathered_load(c, e)
    n *= b.dtype.lanes
    width = n * dt.itemsize
    address = c.memory.reach(b, base, width, e.span, "load of")
    at, steps = c.slot(b.data), np.arange(n)
    access = c.memory.access(b, width, e.span, "read", f"ld.{_space(b)}")
    memory, accesses = c.memory, c.accesses

    def run(f: LaneFrame) -> Value:
        a = address(f)
        store = accesses.touch(f, memory.behind(f, at), a, access)
        first = a // dt.itemsize
        x = store.flat(dt)
        if f.mask is not None:
            first = np.where(f.mask, first, 0)
        return x[first] if n == 1 else x[first[:, None] + steps]

    return run


def _gathered_load(c: DeviceContext, e: Load) -> Closure:
    """Load a vector of elements that are not contiguous: one access for each element."""
    ramp, b = e.indices[-1], e.buffer
    picks = [lane_of(ramp, k) for k in range(ramp.dtype.lanes)]
    coroutines = [c.expr(Load(b, (*e.indices[:-1], p), b.dtype, span=e.span)) for p in picks]
    return lambda f: np.stack([spread(p(f), f.lanes) for p in coroutines], axis=-1)


def _store(c: DeviceContext, s: Store) -> Action:
    b, dt = s.buffer, numpy_dtype(s.buffer.dtype)
    base, n = vector_base(s.indices)
    if n == 0:
        raise fault("sim-unsupported", f"strided vector store to {b.name}",
                    expected="contiguous lanes", found=f"a stride in a store to {b.name}", span=s.span)
    n *= b.dtype.lanes
    width = n * dt.itemsize
    address, value = c.memory.reach(b, base, width, s.span, "store to", True), c.expr(s.value)
    at, steps = c.slot(b.data), np.arange(n)
    access = c.memory.access(b, width, s.span, "write", f"st.{_space(b)}")
    memory, accesses = c.memory, c.accesses

    def run(f: LaneFrame) -> None:
        v, a = spread(value(f), f.lanes, n > 1), address(f)
        held = memory.behind(f, at)
        store = held.store if isinstance(held, Global) else f.block.shared.store
        cells = (a // dt.itemsize)[:, None] + steps
        v = v[:, None] if n == 1 else v
        on = slice(None) if f.mask is None else f.mask
        flat = store.flat(dt)
        flat[cells[on]] = v[on]
        now = flat[cells[on]]
        same = ((now == v[on]) | (now != now)).all(1)
        accesses.touch(f, held, a, access, same)

    return run
