"""Where the elements of a buffer lie on the device simulator: in per-thread arrays, shared memory or global tensors.

Lanes are the threads of one block, padded to whole warps.  Shared memory is one arena of bytes for each block, so that
buffers to which the memory planner assigned the same bytes really alias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Buffer, Expr, Var, numpy_dtype, GLOBAL
from tilelang.ir.evaluate import Value
from tilelang.target.atomics import Atomic

from .accesses import Access, Accesses
from .block import Global
from ..addresses import Followed
from ..context import Context
from ..faults import fault
from ..lane_ops import spread
from ..lanes import LaneFrame, is_address
from ..memory import Memory
from ..ranks import Section
from ..releases import Releases


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
                    raise fault("sim-misaligned", f"{what} {b.name}: {width} bytes at byte {int(address[t])}, not a "
                                f"multiple of {align} (thread {t})",
                                expected=f"a multiple of {align} bytes", found=f"byte {int(address[t])}", span=span)
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
