"""The grid barrier (`sync_grid`): the blocks of a launch run concurrently, and each waits until all have arrived.

On the device simulator all blocks of such a launch form one Cluster (cluster.py), whose barrier orders global memory
between them.  In the reference interpreter each block is a coroutine that waits for the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import Call, Const, Launch
from tilelang.ir.evaluate import Closure, Value

from .coroutines import Coroutine, Scheduler
from .faults import fault
from .lanes import Action, LaneFrame, contains

MOST = 64  # maximum number of blocks that run concurrently


def has_grid_barrier(s: Launch) -> bool:
    """Whether a launch uses the grid barrier."""
    return contains(s.body, (), ("sync_grid",))


def whole_grid(s: Launch) -> tuple[int, int, int]:
    """The grid as the extents of one cluster.  Raises sim-unsupported for grids that are not small and static."""
    extents = [e.value if isinstance(e, Const) else 0 for e in s.grid]
    x, y, z = (*extents, 1, 1)[:3]
    if not 1 <= x * y * z <= MOST:
        raise fault("sim-unsupported", f"the simulator runs grid barriers in static grids of at most {MOST} blocks, this one "
                    f"is ({', '.join(map(repr, s.grid))})",
                    expected=f"a static grid of at most {MOST} blocks", found=f"({', '.join(map(repr, s.grid))})", span=s.span)
    return x, y, z


def grid_barrier(c: Any, e: Call, block_barrier: Closure) -> Closure:
    """sync_grid on the device simulator; in a grid of one block it is the block barrier."""

    def run(f: LaneFrame) -> Value:
        cluster = f.block.cluster
        if cluster is None:
            return block_barrier(f)
        if f.any_active():
            cluster.grid.arrive(f, False, e.span)
            cluster.grid.wait(f, e.span)
            _all_came(f, cluster.grid, e.span)
        return np.int32(0)

    return run


def _all_came(f: LaneFrame, barrier: Any, span: Any) -> None:
    """Raises sim-barrier if a block has ended without arriving: on a device the other blocks would wait forever."""
    now = int(barrier.waits[f.active()][0])
    for p in f.block.roles.parts:
        lanes = p.frame.own
        if p.done and (barrier.arrivals[lanes] < now).any():
            raise fault("sim-barrier", f"block {p.frame.block.where} ends without coming to this barrier of the grid",
                        expected="all blocks at the barrier", found=f"block {p.frame.block.where} at its end",
                        span=span, hint="every thread of every block reaches T.sync_grid() equally often")


class GridScheduler(Scheduler):
    """Runs the coroutines of all blocks of a grid, which meet at the grid barrier."""

    def __init__(self, parts: list[Coroutine]) -> None:
        super().__init__(parts)
        self.come: dict[int, int] = {}  # by id of a coroutine: how often it has arrived at the barrier
        for p in parts:
            p.frame.block.grid = self

    def meet(self, span: Any) -> None:
        """The running coroutine waits until all others have arrived as often as it has."""
        me = id(self.now)
        self.come[me] = n = self.come.get(me, 0) + 1
        self.wait(lambda: all(p.done or self.come.get(id(p), 0) >= n for p in self.parts),
                  lambda: "at the barrier of the grid", span)
        early = next((p for p in self.parts if p.done and self.come.get(id(p), 0) < n), None)
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


def tile_grid_barrier(c: Any, e: Call) -> Closure:
    """sync_grid in a tile program, where all threads of a block execute it together."""

    def run(f: LaneFrame) -> Value:
        grid = getattr(f.block, "grid", None)
        if grid is None or not f.any_active():
            return np.int32(0)
        if f.mask is not None and not f.active().all() and f.lanes > 1:
            gone = 0 if f.exited is None else int(f.exited.sum())
            if int(f.active().sum()) < f.role.threads - gone:
                came = f"{int(f.active().sum())} of {f.role.threads - gone} threads"
                raise fault("sim-barrier", f"{came} reach this barrier of the grid",
                            found=came, span=e.span,
                            hint="a barrier must not stand under a condition that differs between threads")
        grid.meet(e.span)
        return np.int32(0)

    return run


__all__ = ["MOST", "GridScheduler", "TileGrid", "grid_barrier", "has_grid_barrier", "tile_grid_barrier", "whole_grid"]
