"""The state that the handlers of the device simulator share while a program is compiled, and static facts about it."""

from __future__ import annotations

import math

from tilelang.ir import GLOBAL, SHARED, AddressOf, Buffer, Call, Const, Expr, Func, Launch, Load, Ramp, Store, numpy_dtype, walk
from tilelang.target.instructions import written_storages
from tilelang.target.tensor_map import tensor_maps_of

from ..context import Context, Handlers
from ..lane_ops import Printer
from ..lanes import Action
from ..ranks import Ranks
from .accesses import Accesses
from .memory import DeviceMemory

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
