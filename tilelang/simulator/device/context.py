"""The state that the handlers of the device simulator share while a program is compiled, and static facts about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import (GLOBAL, SHARED, AddressOf, Buffer, Call, Const, Expr, Func, Launch, Load, Ramp, Store, Var,
                         numpy_dtype, walk)
from tilelang.ir.evaluate import Value
from tilelang.target.atomics import Atomic
from tilelang.target.instructions import written_storages
from tilelang.target.tensor_map import tensor_maps_of

from ..addresses import Followed
from ..context import Context, Handlers
from ..faults import fault
from ..lane_ops import Printer, spread
from ..lanes import Action, LaneFrame, is_address
from ..memory import Memory
from ..ranks import Ranks, Section
from ..releases import Releases
from .accesses import Access, Accesses
from .block import Global

# ---- memory ----------------------------------------------------------------------------------------------------------

# Elements lie in arrays of threads, shared memory or global tensors.  Lanes are the threads of one block, padded to whole
# warps.  Shared memory is one arena of bytes for each block, so that buffers to which the memory planner assigned the same
# bytes really alias.

class DeviceMemory(Memory):
    """Compiles the addresses of accesses.

    The slot of a `data` variable holds a Storage (local), an int (byte offset in shared memory) or a Global.  windows: by slot,
    the memory behind an address, for the access in progress.  shared_sizes: bytes of a shared buffer, by id of its data.
    """

    named_block = True

    def __init__(self, c: Context, accesses: Accesses) -> None:
        super().__init__(c)
        self.accesses = accesses
        self.windows: dict[int, Global] = {}
        self.shared_sizes: dict[int, int] = {}

    def access(self, b: Buffer, width: int, span: Any, mode: str, op: str, text: str = "",
               atomic: Atomic | None = None) -> Access:
        """An access of `width` bytes for each lane, at a site of its own.  text: what it does there, in messages."""
        site = self.accesses.site(b.name, span, text or mode, atomic)
        return Access(b, self.c.slot(b.data), width, site, mode, op)

    def elements(self, b: Buffer, indices: tuple[Expr, ...], count: int, span: Any, what: str,
                 write: bool = False) -> Callable[..., Any]:
        """As of Memory; a tensor made of an address gets a window of the memory that the access needs."""
        where, at, lanes = super().elements(b, indices, count, span, what), self.c.slot(b.data), b.dtype.lanes
        if b.scope() != GLOBAL:
            return where

        def run(f: LaneFrame) -> np.ndarray:
            linear: np.ndarray = where(f)
            held = f.slots[at]
            if isinstance(held, Section):
                self.windows[at] = held.memory
                out: np.ndarray = linear + held.shift(numpy_dtype(b.dtype).itemsize * lanes, count == 0)
                return out
            if not is_address(held):
                return linear
            need = np.True_ if f.mask is None else f.mask if count else f.mask[:, None]
            window, linear = self.c.addresses.follow(f.slots[at], linear * lanes, need, count == 0, max(count, 1) * lanes,
                                                     Followed(b, write, span))
            self.windows[at] = Global(window)
            return linear // lanes

        return run

    def behind(self, f: LaneFrame, at: int) -> Any:
        """What the slot of a buffer's data holds.  For a tensor made of an address: the memory of the access in progress, whose
        element numbers have just been computed."""
        held = f.slots[at]
        return self.windows[at] if is_address(held) or isinstance(held, Section) else held

    def start_of(self, f: LaneFrame, v: Var, held: Any) -> Value:
        """The address of what the slot of v holds.  From then on all bytes of a shared buffer count as written."""
        if isinstance(held, Global):
            held = held.store
        elif isinstance(held, int):  # an offset in shared memory
            shared = f.block.shared
            end = held + self.shared_sizes.get(id(v), 0)
            shared.owner[held // shared.granule:-(-end // shared.granule)] = self.c.slot(v)
            shared.table.changed()
            return self.c.addresses.of(shared.store) + held
        return super().start_of(f, v, held)

    def reach(self, b: Buffer, indices: tuple[Expr, ...], width: int, span: Any, what: str,
              write: bool = False) -> Callable[..., Any]:
        """f(frame) -> byte addresses (lanes,) of accesses of `width` bytes, inside b and aligned.  Inactive lanes: any."""
        item = numpy_dtype(b.dtype).itemsize * b.dtype.lanes
        where = self.elements(b, indices, width // item if width >= item else 1, span, what, write)
        shared, at = b.scope() != GLOBAL, self.c.slot(b.data)
        align = min(width & -width, 16)

        def run(f: LaneFrame) -> np.ndarray:
            address = where(f) * item
            if shared:
                address = address + f.slots[at]
            address = spread(address, f.lanes)
            if align > item or width > item:
                off = address % align
                if off.any() and (off if f.mask is None else off[f.mask]).any():
                    t = int(np.flatnonzero(off if f.mask is None else off * f.mask)[0])
                    raise fault("sim-misaligned", f"{what} {b.name}: {width} bytes at ‹byte {int(address[t])}›, not a multiple "
                                f"of {align} (thread {t})", expected=f"a multiple of {align} bytes", span=span)
            return address

        return run

    def cells(self, e: AddressOf, count: int, what: str, order: Releases | None = None,
              atomic: Atomic | None = None) -> Callable[[LaneFrame], Any]:
        b, dt, span = e.buffer, numpy_dtype(e.buffer.dtype), e.span or self.c.place
        width = count * dt.itemsize
        address = self.reach(b, e.indices, width, span, what, True)
        at, steps = self.c.slot(b.data), np.arange(count)
        access = self.access(b, width, span, "atomic", f"atom.{b.scope().split('.')[0]}", "atomic access", atomic)

        def run(f: LaneFrame) -> Any:
            flag = isinstance(f.slots[at], Section) and order is not None and count == 1
            if flag and f.block.warp_roles is not None:
                f.block.warp_roles.pause()
            a = address(f)
            memory = self.behind(f, at)
            if flag and order is not None:
                self.accesses.touch(f, memory, a, access)
                return self.c.ranks.flags.cells(f, memory.store.flat(dt), a // dt.itemsize, order)
            table = memory.table if isinstance(memory, Global) and order is not None and order.concerns else None
            if table is not None and order is not None:
                flags = a // memory.store.granule
                order.before(f, table, flags)
            store = self.accesses.touch(f, memory, a, access)
            if table is not None and order is not None:
                order.after(f, table, flags)
            at_ = (a // dt.itemsize)[:, None] + steps
            ok = np.broadcast_to(f.active()[:, None], at_.shape)
            return store.flat(dt), np.where(ok, at_, 0), ok

        return run

    def extent_of(self, b: Buffer, f: LaneFrame) -> tuple[int, int]:
        """First byte and end of a shared buffer's storage."""
        start = int(f.slots[self.c.slot(b.data)])
        return start, start + self.shared_sizes[id(b.data)]


# Calls whose shared operands are accessed in units of 16 bytes.
UNITS_OF_16 = ("ldmatrix", "stmatrix", "tma_load", "tma_store", "tma_reduce_add", "bulk_load", "bulk_store",
               "bulk_copy_cluster", "wgmma_descriptor")


def vector_base(indices: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], int]:
    """(indices of the first element, number of elements) of a contiguous access.

    (indices, 0) when the last index is a general vector, (indices, 1) for a scalar.
    """
    if not indices or indices[-1].dtype.lanes == 1:
        return indices, 1
    last = indices[-1]
    if isinstance(last, Ramp) and isinstance(last.stride, Const) and last.stride.value == 1:
        return (*indices[:-1], last.base), last.lanes
    return indices, 0


def access_granules(func: Func) -> tuple[int, dict[int, int]]:
    """(largest unit that divides all shared accesses, the same by id of a global tensor's data), in bytes.

    Accesses are aligned to their size, so recording them in this unit is exact and keeps the tables small.
    """
    shared = 16
    others: dict[int, int] = {}
    for launch in (n for n in walk(func) if isinstance(n, Launch)):
        others.update({id(m.buffer.data): numpy_dtype(m.buffer.dtype).itemsize for m in tensor_maps_of(launch)})

    def enter(b: Buffer, width: int) -> None:
        nonlocal shared
        if b.scope() == GLOBAL:
            others[id(b.data)] = math.gcd(others.get(id(b.data), 16), width)
        elif b.scope() in SHARED:
            shared = math.gcd(shared, width)

    for n in walk(func):
        if isinstance(n, (Load, Store)):
            item = numpy_dtype(n.buffer.dtype).itemsize * n.buffer.dtype.lanes
            _, count = vector_base(n.indices)
            enter(n.buffer, item * max(count, 1))
        elif isinstance(n, Call):
            width = n.options.bytes if n.op == "cp_async" else 16 if n.op in UNITS_OF_16 else None
            for a in n.args:
                if isinstance(a, AddressOf):
                    enter(a.buffer, width or numpy_dtype(a.buffer.dtype).itemsize)
    return shared, others


class DeviceContext(Context):
    """Compiles a lowered program.

    workspaces: inside a launch, actions that allocate its buffers in global memory.  split: whether the warps of a warp group
    run independently.  guards_registers: whether wgmma may use registers while other code runs.
    """

    memory: DeviceMemory

    def __init__(self, func: Func, check: bool, handlers: Handlers, split: bool, ranks: Ranks | None = None) -> None:
        super().__init__(func, check, handlers, ranks)
        self.accesses = Accesses(check, self.chip)
        self.memory = DeviceMemory(self, self.accesses)
        self.split, self.printer = split, Printer()
        self.shared_granule, widths = access_granules(func)
        self.granules.update(widths)
        self.guards_registers = any(isinstance(n, Call) and n.op == "wgmma" for n in walk(func))
        self.workspaces: list[Action] | None = None
        self._written = {id(v) for v in written_storages(func)}

    def written_slots(self) -> set[int]:
        """Slots of the buffers that the program writes, as far as known by now."""
        slots = self.slot_of
        return {slots[v] for v in self._written if v in slots}
