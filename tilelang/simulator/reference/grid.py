"""Blocks that meet at a grid barrier (`sync_grid`) in the reference interpreter: each is a coroutine."""

from __future__ import annotations

from typing import Any

from ..coroutines import Coroutine, Scheduler
from ..faults import fault
from ..lanes import Action, LaneFrame


class GridScheduler(Scheduler):
    """Runs the coroutines of all blocks of a grid, which meet at the grid barrier."""

    def __init__(self, coroutines: list[Coroutine]) -> None:
        super().__init__(coroutines)
        self.come: dict[int, int] = {}  # by id of a coroutine: how often it has arrived at the barrier
        for p in coroutines:
            p.frame.block.grid = self

    def meet(self, span: Any) -> None:
        """The running coroutine waits until all others have arrived as often as it has."""
        me = id(self.now)
        self.come[me] = n = self.come.get(me, 0) + 1
        self.wait(lambda: all(p.done or self.come.get(id(p), 0) >= n for p in self.coroutines),
                  lambda: "at the barrier of the grid", span)
        early = next((p for p in self.coroutines if p.done and self.come.get(id(p), 0) < n), None)
        if early is not None:
            raise fault("sim-barrier", f"{early.name} ends without coming to this barrier of the grid",
                        expected="all blocks at the barrier", found=f"{early.name} at its end", span=span,
                        hint="every thread of every block reaches T.sync_grid() equally often")


class TileGrid(GridScheduler):
    """Runs the blocks of a tile program concurrently."""

    def __init__(self, frames: list[LaneFrame], body: Action) -> None:
        super().__init__([Coroutine(i, f"block {f.block.where}", f, body) for i, f in enumerate(frames)])

    def deadlock(self, left: list[Coroutine]) -> Exception:
        return fault("sim-barrier", "blocks wait for ever at the barrier of the grid",
                     expected="barriers that all blocks reach", found="blocks that wait for ever", span=left[0].place)
