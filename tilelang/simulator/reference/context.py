"""The state that the handlers of the reference interpreter share while a program is compiled."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilelang.ir import Func
from tilelang.ir.evaluate import Closure
from tilelang.target.shared_space import SharedSpace

from .block import WarpRole
from .divergence import Divergence
from .memory import TileMemory
from ..context import Context, Handlers, LaunchScope
from ..ranks import Ranks


@dataclass
class TileLaunch(LaunchScope):
    """The launch being compiled.

    safe: values of global buffers outside their shape, by id of the buffer.  warp_roles: its warp roles, [] where nothing
    distinguishes its warps.  divergence: where its threads may diverge.  space: addresses of its shared memory.
    """

    safe: dict[int, Closure] = field(default_factory=dict)
    warp_roles: list[WarpRole] = field(default_factory=list)
    divergence: Divergence = field(default_factory=Divergence)
    space: SharedSpace = SharedSpace(())


class TileContext(Context):
    """Compiles a tile program.  Slots of `data` variables hold Storages.

    members: numbers of the warp roles that reach the statement being compiled.  gathered: whether they have already
    synchronised in front of an enclosing statement.
    """

    memory: TileMemory
    launch: TileLaunch

    def __init__(self, func: Func, check: bool, handlers: Handlers, ranks: Ranks | None = None) -> None:
        super().__init__(func, check, handlers, ranks)
        self.memory, self.launch = TileMemory(self), TileLaunch()
        self.members: tuple[int, ...] = ()
        self.gathered = False
