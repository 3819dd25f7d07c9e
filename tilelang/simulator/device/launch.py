"""Runs a launch on the device simulator: blocks in sequence, those of a cluster (or of a grid with a barrier) concurrently."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np

from tilelang.ir import Alloc, Call, Const, Launch, numpy_dtype, walk, BARRIER
from tilelang.target.cluster import cluster_of
from tilelang.target.warp_groups import cuts_groups
from tilelang.target.thread_calls import WARP

from .async_copy import AsyncCopies
from .asynchronous import GROUP, Asynchronous, Proxy
from .block import Block, Global, Shared
from .cluster import CLUSTER_OPS, Cluster
from .context import DeviceContext
from .mbarrier import MBARRIER_OPS
from .races import AccessTable
from .warp_roles import WarpRoles, unit_frames
from .tma import TMA_OPS
from .wgmma import WGMMA_OPS
from ..boxes import launch_maps
from ..context import LaunchScope
from ..faults import fault
from ..host import clusters
from ..lanes import Action, LaneFrame, contains
from ..memory import geometry, span_of
from ..ranks import Flags, Section

HOPPER_OPS = {**MBARRIER_OPS, **TMA_OPS, **WGMMA_OPS, **CLUSTER_OPS}
Placement = Callable[[LaneFrame], tuple[int, list[tuple[int, int]]]]

SIGNALS = ("wait_signal", "rank_barrier", "pe_barrier")  # calls that wait for other blocks
ALIGN = 128  # alignment of shared buffers that no pass has placed
MOST_BLOCKS = 64  # maximum number of blocks that run concurrently


class DeviceLaunch:
    """A compiled launch."""

    def __init__(self, c: DeviceContext, s: Launch) -> None:
        c.launch = LaunchScope(s.num_threads, s.plan.import_source, launch_maps(s))
        self.c, self.span, self.place = c, s.span, placement(c, s)
        self.grid = [c.expr(g) for g in s.grid]
        self.workspaces: list[Action] = []
        c.workspaces = self.workspaces
        self.body = c.stmt(s.body)
        c.workspaces = None
        self.dims, self.mates = cluster_of(s), math.prod(cluster_of(s) or (1,))
        # All blocks run concurrently, in the order of their clusters: those of all ranks.
        self.meets = c.ranks.size > 1 or contains(s.body, (), ("sync_grid", *SIGNALS))
        self.size = math.prod(whole_grid(s)) * c.ranks.size if self.meets else self.mates
        self.hopper = self.size > 1 or contains(s.body, (), tuple(HOPPER_OPS))
        self.warp_roles = self.hopper or contains(s.body, (), ("named_barrier", "named_barrier_arrive", *SIGNALS))
        self.single_warps = cuts_groups(walk(s.body, Call))
        self.barriers = self.size * sum(math.prod(n.buffer.shape) for n in walk(s.body)
                                        if isinstance(n, Alloc) and n.buffer.scope() == BARRIER)
        self.raised = max((n.options.n for n in walk(s.body)
                           if isinstance(n, Call) and n.op == "set_max_nreg" and n.options.inc), default=None)
        self._threads(s)

    def _threads(self, s: Launch) -> None:
        """Set the number of lanes of the blocks that run concurrently, and the values of their thread variables."""
        self.threads, (x, y, _) = s.num_threads, s.threads
        whole = GROUP if self.size > 1 else self.c.warp
        self.lanes = -(-self.threads // whole) * whole  # lanes of one block
        # Single warps synchronise, so reads of global memory must be recorded by warp.
        self.group = WARP if self.warp_roles or contains(s.body, (), ("sync_warp",)) else self.lanes
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
        self.c.ranks.flags = Flags(self.c.ranks.random)  # earlier launches have ended on every rank
        hosts = self.c.ranks.frames(f)
        for g in hosts:
            for make in self.workspaces:
                make(g)
        tables = self.tables(hosts)
        groups = clusters(extents, self.dims, self.span)
        for number, at in enumerate([[index for mate in groups for index in mate]] if self.meets else groups):
            self.blocks(self.frames(hosts, number, at, arena, offsets, tables), tables)

    def tables(self, hosts: list[LaneFrame]) -> list[AccessTable]:
        """New access tables of the global tensors that the program writes."""
        tables: list[AccessTable] = []
        written = self.c.written_slots()
        for at, held in ((at, held) for f in hosts for at, held in enumerate(f.slots)):
            memory = held.memory if isinstance(held, Section) else held
            if isinstance(memory, Global) and self.c.check and (at in written or memory is not held) and not any(
                    memory.table is t for t in tables):
                n = memory.store.nbytes // memory.store.granule
                table = AccessTable(n, self.size * self.lanes, self.group, self.c.accesses.sites,
                                    f"global tensor {memory.store.name}", many_blocks=True)
                memory.table = table
                memory.proxy = Proxy(table, memory is not held) if self.hopper else None
                tables.append(table)
        return tables

    def frames(self, hosts: list[LaneFrame], number: int, at: Any, arena: int, offsets: list[tuple[int, int]],
               tables: list[AccessTable]) -> list[LaneFrame]:
        """The frames of the blocks at these indices on every rank, which run concurrently.  number: how many such sets ran
        before."""
        c, size, lanes = self.c, self.size, self.lanes
        places = [(device, index) for device in range(len(hosts)) for index in at]
        of = " of rank {}".format if len(hosts) > 1 else lambda device: ""
        names = [f"({', '.join(map(str, index))}){of(device)}" for device, index in places]
        cluster = Cluster(size, lanes, arena, names, self.mates, len(at)) if size > 1 else None
        block = Block(size * lanes, self.threads, c.accesses.counters, c.printer, names[0], self.agents, c.warp)
        block.shared = Shared(arena * size, c.shared_granule, size * lanes, c.accesses.sites)
        block.copies, block.cluster = AsyncCopies(size * lanes), cluster
        for table in (block.shared.table, *tables):
            table.block, table.each = number, lanes
            if cluster is not None:
                table.thread = cluster.thread
        frames = []
        for rank, (device, index) in enumerate(places):
            own = copy(block)
            own.where, own.rank, own.first, own.base, own.device = names[rank], rank, rank * lanes, rank * arena, device
            g = LaneFrame(list(hosts[device].slots), size * lanes, self.mask, own)
            for slot, offset in offsets:
                g.slots[slot] = offset + own.base
            for (slot, dt), v in zip(self.block_slots, index):
                g.slots[slot] = dt(v)
            for slot, values in self.thread_values:
                g.slots[slot] = values
            frames.append(g)
        return frames

    def launches(self, f: LaneFrame) -> None:
        """Run the kernel as often as asked.  The blocks of a rank start a launch when all of them have ended the one before."""
        for k in range(self.c.ranks.repeats):
            if k:
                f.mask, f.exited = f.own, None
                f.block.cluster.grid.arrive(f, False, self.span)
                f.block.cluster.grid.wait(f, self.span)
            self.body(f)

    def blocks(self, frames: list[LaneFrame], tables: list[AccessTable]) -> None:
        """Run one block, or blocks that run concurrently."""
        if not self.warp_roles:
            return self.body(frames[0])
        unit = GROUP if self.hopper and not self.c.split and not self.single_warps else WARP
        coroutines = [p for g in frames for p in unit_frames(g, g.slots, self.threads, unit)]
        if not self.hopper:
            return WarpRoles(coroutines, self.launches, random=self.c.ranks.random).run()
        block = frames[0].block
        assert block.shared is not None, "a Hopper launch has an arena of shared memory"
        work = Asynchronous(block, self.threads, self.size * self.lanes, self.barriers, [block.shared.table, *tables],
                            self.raised)
        block.shared.proxy = Proxy(block.shared.table)
        for g in frames:
            g.block.asynchronous = work
        WarpRoles(coroutines, self.launches, unit, work, self.c.ranks.random).run()
        if self.c.check:
            work.finish()
        for table in tables:
            table.agent_reads.clear()  # the block has ended, and all its agents with it
        return None


def placement(c: DeviceContext, s: Launch) -> Placement:
    """f(frame) -> (bytes of the arena, byte offset by slot).

    Buffers are placed as planned (shared_offsets, shared_bytes); unplanned ones follow one after another.
    """
    planned = {id(b.data): (b, at) for b, at in s.plan.shared_offsets}
    total: Any = s.plan.shared_bytes
    total = 0 if total is None else total
    allocs = [n.buffer for n in walk(s.body) if isinstance(n, Alloc) and n.buffer.scope().startswith("shared")]
    sizes = {id(b.data): (geometry(c, b), numpy_dtype(b.dtype).itemsize * b.dtype.lanes, b) for b in allocs}
    boxes = bool(c.launch.maps)  # TMA fills buffers in swizzles of 1024 bytes
    number = c.expr(total) if not isinstance(total, int) else None

    def place(f: LaneFrame) -> tuple[int, list[tuple[int, int]]]:
        room = int(number(f)) if number is not None else total
        end, out = 0 if not planned else room, []
        for key, (geo, item, b) in sizes.items():
            nbytes = c.memory.shared_sizes[key] = span_of(*geo(f)) * item
            if key in planned:
                at = planned[key][1]
                at = at if isinstance(at, int) else int(c.expr(at)(f))
                if at + nbytes > room:
                    raise fault("sim-out-of-bounds", f"{b.name} is placed at bytes {at} to ‹{at + nbytes}› of {room} bytes of "
                                "shared memory", expected=f"at most {room} bytes", span=b.span,
                                hint="the memory plan is too small")
            else:
                align = max(ALIGN, b.facts.align, 1024 if boxes else 0)
                at = -(-end // align) * align
                end = at + nbytes
            out.append((c.slot(b.data), at))
        return max(end, room), out

    return place


def whole_grid(s: Launch) -> tuple[int, int, int]:
    """The grid as the extents of one cluster.  Raises sim-unsupported for grids that are not small and static."""
    extents = [e.value if isinstance(e, Const) else 0 for e in s.grid]
    x, y, z = (*extents, 1, 1)[:3]
    if not 1 <= x * y * z <= MOST_BLOCKS:
        found = f"({', '.join(map(repr, s.grid))})"
        raise fault("sim-unsupported", f"the simulator runs grid barriers in static grids of at most {MOST_BLOCKS} blocks, "
                    f"this one is {found}", expected=f"a static grid of at most {MOST_BLOCKS} blocks", found=found, span=s.span)
    return x, y, z
