"""The state that the handlers of the device simulator share while a program is compiled."""

from __future__ import annotations

from tilelang.ir import Call, Func, walk

from .access_facts import access_granules, written
from .accesses import Accesses
from .memory import DeviceMemory
from ..context import Context, Handlers
from ..lane_ops import Printer
from ..lanes import Action


class DeviceContext(Context):
    """Compiles a lowered program.

    globals: slots that hold Globals.  workspaces: inside a launch, actions that allocate its buffers in global memory.
    split: whether the warps of a warp group run independently.  guards_registers: whether wgmma may use registers while other
    code runs.
    """

    memory: DeviceMemory

    def __init__(self, func: Func, check: bool, handlers: Handlers, split: bool) -> None:
        super().__init__(func, check, handlers)
        self.accesses = Accesses(check)
        self.memory = DeviceMemory(self, self.accesses)
        self.split, self.printer = split, Printer()
        self.shared_granule, widths = access_granules(func)
        self.granules.update(widths)
        self.guards_registers = any(isinstance(n, Call) and n.op == "wgmma" for n in walk(func))
        self.globals: list[int] = []
        self.workspaces: list[Action] | None = None
        self._written = written(func)

    def written_slots(self) -> set[int]:
        """Slots of the buffers that the program writes, as far as known by now."""
        slots = self.exprs.slot_of
        return {slots[v] for v in self._written if v in slots}
