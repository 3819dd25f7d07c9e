"""Barriers between threads on the device simulator: of a warp, a block, a grid, and named barriers; votes of a block.

Where the warps of a block run independently (warp_roles.py), a barrier makes them wait; otherwise all threads are in step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import Call, numpy_dtype
from tilelang.ir.evaluate import Closure, Value
from tilelang.target.atomics import Atomic, family
from tilelang.target.thread_calls import WARP

from ..rank_ops import COMPARE, why_waits
from ..ranks import Section
from ..releases import learn
from .context import DeviceContext
from .counters import count_warps
from .warp_roles import BLOCK_BARRIER
from ..faults import fault
from ..lane_ops import VOTES_OF_BLOCKS, effects, spread
from ..lanes import Action, LaneFrame, uniform


def _running(f: LaneFrame) -> np.ndarray:
    """Threads of the block that have not returned."""
    out = np.arange(f.lanes) < f.block.threads
    return out if f.exited is None else out & ~f.exited


def _sync_threads(c: DeviceContext, e: Call) -> Action:
    def run(f: LaneFrame) -> None:
        block = f.block
        if block.warp_roles is not None:
            return block.warp_roles.wait_named(f, BLOCK_BARRIER, None, e.span)
        if f.mask is not None:
            missing = _running(f) & ~f.mask
            if missing.any():
                raise fault("sim-barrier", f"‹{int(f.mask.sum())} of {int(_running(f).sum())} threads› reach this block "
                            f"barrier in block {block.where}; thread {int(missing.argmax())} does not", span=e.span)
        return block.clocks.barrier()

    return run


def _block_vote(c: DeviceContext, e: Call) -> Closure:
    """syncthreads_count, _and, _or: warps that run independently add their votes one after another, up to the barrier."""
    barrier, value, combine = _sync_threads(c, e), c.expr(e.args[0]), VOTES_OF_BLOCKS[e.op]

    def run(f: LaneFrame) -> Value:
        given = spread(value(f), f.lanes)[f.active()] != 0
        votes = [] if f.block.warp_roles is None or not f.any_active() else f.block.warp_roles.votes(f)
        votes.append(given)
        count_warps(f, "sync_threads")
        if f.any_active():
            barrier(f)
        return np.int32(combine(np.concatenate(votes)))

    return run


def _sync_warp(c: DeviceContext, e: Call) -> Action:
    def run(f: LaneFrame) -> None:
        active = f.active().reshape(-1, WARP)
        for w in np.flatnonzero(active.any(1)):
            members = np.zeros(f.lanes, bool)
            members[w * WARP:(w + 1) * WARP] = active[w]
            f.block.clocks.barrier(members)

    return run


def _named_barrier(c: DeviceContext, e: Call) -> Action:
    """named_barrier and named_barrier_arrive: id, number of threads."""
    number, count = c.expr(e.args[0]), c.expr(e.args[1])
    waits = e.op == "named_barrier"

    def run(f: LaneFrame) -> None:
        which, need = (int(uniform(x(f), f, "a barrier's number", e.span)) for x in (number, count))
        warp_roles = f.block.warp_roles
        (warp_roles.wait_named if waits else warp_roles.signal)(f, which, need, e.span)

    return run


def _sync_grid(c: DeviceContext, e: Call) -> Action:
    """The grid barrier.  In a grid of one block it is the block barrier."""
    block_barrier = _sync_threads(c, e)

    def run(f: LaneFrame) -> None:
        cluster = f.block.cluster
        if cluster is None:
            count_warps(f, "sync_threads")
            return block_barrier(f)
        cluster.grid.arrive(f, False, e.span)
        cluster.grid.wait(f, e.span)
        return _all_came(f, cluster.grid, e.span)

    return run


def _all_came(f: LaneFrame, barrier: Any, span: Any) -> None:
    """Raises sim-barrier if a block has ended without arriving: on a device the other blocks would wait forever."""
    now = int(barrier.waits[f.active()][0])
    for p in f.block.warp_roles.coroutines:
        lanes = p.frame.own
        if p.done and p.frame.block.device == f.block.device and (barrier.arrivals[lanes] < now).any():
            raise fault("sim-barrier", f"block {p.frame.block.where} ends without coming to this barrier of the grid",
                        expected="all blocks at the barrier", found=f"block {p.frame.block.where} at its end",
                        span=span, hint="every thread of every block reaches T.sync_grid() equally often")


BARRIER_OPS: dict[str, Callable[[DeviceContext, Call], Closure]] = {
    **effects({"sync_threads": _sync_threads, "sync_warp": _sync_warp, "named_barrier": _named_barrier,
               "named_barrier_arrive": _named_barrier}, count_warps),
    **effects({"sync_grid": _sync_grid}), **dict.fromkeys(VOTES_OF_BLOCKS, _block_vote)}


# ---- flags and signals -----------------------------------------------------------------------------------------------

def _wait(c: DeviceContext, e: Call) -> Callable[[LaneFrame], np.ndarray]:
    """wait_signal, of whole warps or some of their lanes: the value of each lane's flag once it compares so."""
    place: Any = e.args[0]
    b, dt, compare = place.buffer, numpy_dtype(place.buffer.dtype), COMPARE[e.options.compare]
    address, at = c.memory.reach(b, place.indices, dt.itemsize, e.span, "a wait for", True), c.slot(b.data)
    access = c.memory.access(b, dt.itemsize, e.span, "atomic", "ld.acquire", "a wait", Atomic(family("atomic_load"), True))
    value = c.expr(e.args[1])

    def run(f: LaneFrame) -> np.ndarray:
        a, want = address(f), spread(value(f), f.lanes).astype(dt)
        memory, device = c.memory.behind(f, at), f.block.device
        flat, cells, lanes = memory.store.flat(dt), a // dt.itemsize, [int(t) for t in np.flatnonzero(f.active())]
        weak, clocks, flags = isinstance(f.slots[at], Section), f.block.clocks, c.ranks.flags

        def seen(t: int) -> list[Any]:
            """The values that thread t may see and that end its wait."""
            if not weak:
                return [flat[cells[t]]] if compare(flat[cells[t]], want[t]) else []
            return [m for m in flags.choices(clocks, t, flags.history(flat, int(cells[t]))) if compare(m.value, want[t])]

        f.block.warp_roles.wait(lambda: all(map(seen, lanes)), lambda: why_waits(
            e, device, flat[cells[lanes[0]]], want[lanes[0]]), e.span)
        found = np.zeros(f.lanes, dt)
        for t in lanes:
            ends = seen(t)
            found[t] = flat[cells[t]]
            if weak:
                found[t] = flags.take(f, t, c.ranks.random.choice(ends) if c.ranks.random else ends[0], True, True)
            elif memory.table is not None and (left := memory.table.released.get(int(a[t] // memory.store.granule))):
                learn(clocks, t, left, memory.table.block)
        c.accesses.touch(f, memory, a, access)
        return found

    return run


def _fence(c: DeviceContext, e: Call) -> Action:
    return lambda f: c.ranks.flags.fence(f)


SIGNAL_OPS: dict[str, Callable[[DeviceContext, Call], Closure]] = effects({"wait_signal": _wait, "fence_sys": _fence})
