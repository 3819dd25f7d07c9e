"""Runs a launch on the device simulator: blocks in sequence, those of a cluster (or of a grid with a barrier) concurrently."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np

from tilelang.ir import Alloc, Call, Launch, numpy_dtype, walk, BARRIER
from tilelang.target.cluster import cluster_of

from .async_copy import AsyncCopies
from .asynchronous import GROUP, Asynchronous, Proxy
from ..boxes import launch_maps
from .block import Block, Global, Shared
from .cluster import CLUSTER_OPS, Cluster
from ..grid import has_grid_barrier, whole_grid
from ..host import clusters
from ..lane_ops import WARP
from ..lanes import Action, LaneFrame, contains
from ..mbarrier import MBARRIER_OPS
from .races import AccessTable
from .warp_roles import WarpRoles, unit_frames
from .tma import TMA_OPS
from .wgmma import WGMMA_OPS

HOPPER_OPS = {**MBARRIER_OPS, **TMA_OPS, **WGMMA_OPS, **CLUSTER_OPS}
Placement = Callable[[LaneFrame], tuple[int, list[tuple[int, int]]]]


class DeviceLaunch:
    """A launch compiled by a DeviceCompiler.

    place: function of a frame that returns (bytes of shared memory, byte offset by slot).
    """

    def __init__(self, c: Any, s: Launch, place: Placement) -> None:
        self.c, self.span, self.place = c, s.span, place
        c.maps = launch_maps(s)
        self.grid = [c.expr(g) for g in s.grid]
        c.workspaces = self.workspaces = list[Action]()
        self.body = c.stmt(s.body)
        c.workspaces = None
        self.dims, self.mates = cluster_of(s), math.prod(cluster_of(s) or (1,))
        self.meets = has_grid_barrier(s)  # grid barrier: all blocks run concurrently, in the order of their clusters
        self.size = math.prod(whole_grid(s)) if self.meets else self.mates
        self.hopper = self.size > 1 or contains(s.body, (), tuple(HOPPER_OPS))
        self.roles = self.hopper or contains(s.body, (), ("named_barrier", "named_barrier_arrive"))
        self.barriers = self.size * sum(math.prod(n.buffer.shape) for n in walk(s.body)
                                        if isinstance(n, Alloc) and n.buffer.scope() == BARRIER)
        self.raised = max((n.options.n for n in walk(s.body)
                           if isinstance(n, Call) and n.op == "set_max_nreg" and n.options.inc), default=None)
        self._threads(s)

    def _threads(self, s: Launch) -> None:
        """Set the number of lanes of the blocks that run concurrently, and the values of their thread variables."""
        self.threads, (x, y, _) = s.num_threads, s.threads
        whole = GROUP if self.size > 1 else WARP
        self.lanes = -(-self.threads // whole) * whole  # lanes of one block
        # Single warps synchronise, so reads of global memory must be recorded by warp.
        self.group = WARP if self.roles or contains(s.body, (), ("sync_warp",)) else self.lanes
        self.agents = Asynchronous.agents(self.size * self.lanes, self.barriers) if self.hopper else 0
        t = np.arange(self.size * self.lanes) % self.lanes
        self.mask = None if self.lanes == self.threads else t < self.threads
        self.block_slots = [(self.c.slot(v), numpy_dtype(v.dtype).type) for v in s.block_vars]
        self.thread_values = [(self.c.slot(v), own.astype(np.int32))
                              for v, own in zip(s.thread_vars, (t % x, t // x % y, t // (x * y)))]

    def run(self, f: LaneFrame) -> None:
        """Run all blocks: one after another, except those that run concurrently."""
        extents = [int(g(f)) for g in self.grid]
        nbytes, offsets = self.place(f)
        arena = nbytes if self.size == 1 else -(-max(nbytes, 1) // 1024) * 1024
        for make in self.workspaces:
            make(f)
        tables = self.tables(f)
        groups = clusters(extents, self.dims, self.span)
        for number, at in enumerate([[index for mate in groups for index in mate]] if self.meets else groups):
            self.blocks(self.frames(f, number, at, arena, offsets, tables), tables)

    def tables(self, f: LaneFrame) -> list[AccessTable]:
        """New access tables of the global tensors that the program writes."""
        tables, written = [], self.c.written_slots()
        for at in self.c.globals:
            memory = f.slots[at]
            if isinstance(memory, Global) and self.c.check and at in written:
                n = memory.store.nbytes // memory.store.granule
                table = AccessTable(n, self.size * self.lanes, self.group, self.c.sites, f"global tensor {memory.store.name}",
                                    many_blocks=True)
                memory.table = table
                memory.proxy = Proxy(table) if self.hopper else None
                tables.append(table)
        return tables

    def frames(self, f: LaneFrame, number: int, at: Any, arena: int, offsets: list[tuple[int, int]],
               tables: list[AccessTable]) -> list[LaneFrame]:
        """Frames of the blocks at these indices, which run concurrently.  number: how many such sets ran before."""
        c, size, lanes = self.c, self.size, self.lanes
        names = [f"({', '.join(map(str, index))})" for index in at]
        cluster = Cluster(size, lanes, arena, names, self.mates) if size > 1 else None
        block = Block(size * lanes, self.threads, c.counters, c.printer, names[0], self.agents)
        block.shared = Shared(arena * size, c.shared_granule, size * lanes, c.sites)
        block.copies, block.cluster = AsyncCopies(size * lanes), cluster
        for table in (block.shared.table, *tables):
            table.block, table.each = number, lanes
            if cluster is not None:
                table.thread = cluster.thread
        frames = []
        for rank, index in enumerate(at):
            own = copy(block)
            own.where, own.rank, own.first, own.base = names[rank], rank, rank * lanes, rank * arena
            g = LaneFrame(list(f.slots), size * lanes, self.mask, own)
            for slot, offset in offsets:
                g.slots[slot] = offset + own.base
            for (slot, dt), v in zip(self.block_slots, index):
                g.slots[slot] = dt(v)
            for slot, values in self.thread_values:
                g.slots[slot] = values
            frames.append(g)
        return frames

    def blocks(self, frames: list[LaneFrame], tables: list[AccessTable]) -> None:
        """Run one block, or blocks that run concurrently."""
        if not self.roles:
            return self.body(frames[0])
        unit = GROUP if self.hopper and not self.c.split else WARP
        parts = [p for g in frames for p in unit_frames(g, g.slots, self.threads, unit)]
        if not self.hopper:
            return WarpRoles(parts, self.body).run()
        block = frames[0].block
        assert block.shared is not None, "a Hopper launch has an arena of shared memory"
        work = Asynchronous(block, self.threads, self.size * self.lanes, self.barriers, [block.shared.table, *tables],
                            self.raised)
        block.shared.proxy = Proxy(block.shared.table)
        for g in frames:
            g.block.asynchronous = work
        WarpRoles(parts, self.body, unit, work).run()
        if self.c.check:
            work.finish()
        for table in tables:
            table.forget_agents()
        return None


__all__ = ["HOPPER_OPS", "DeviceLaunch"]
