"""Flags and signals on the device simulator: atomics on symmetric tensors, waits, fences of system scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import Call, numpy_dtype
from tilelang.ir.evaluate import Closure
from tilelang.target.atomics import Atomic, family

from .context import DeviceContext
from ..lane_ops import effects, spread
from ..lanes import Action, LaneFrame
from ..rank_ops import COMPARE, why_waits
from ..ranks import Section
from ..releases import learn


def _wait(c: DeviceContext, e: Call) -> Action:
    """wait_signal: whole warps, or some of their lanes, until the value of each lane's flag compares so."""
    place: Any = e.args[0]
    b, dt, compare = place.buffer, numpy_dtype(place.buffer.dtype), COMPARE[e.options.compare]
    address, at = c.memory.reach(b, place.indices, dt.itemsize, e.span, "a wait for", True), c.slot(b.data)
    access = c.memory.access(b, dt.itemsize, e.span, "atomic", "ld.acquire", "a wait", Atomic(family("atomic_load"), True))
    value = c.expr(e.args[1])

    def run(f: LaneFrame) -> None:
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
        for t in lanes:
            ends = seen(t)
            if weak:
                flags.take(f, t, c.ranks.random.choice(ends) if c.ranks.random else ends[0], True, True)
            elif memory.table is not None and (left := memory.table.released.get(int(a[t] // memory.store.granule))):
                learn(clocks, t, left, memory.table.block)
        c.accesses.touch(f, memory, a, access)

    return run


def _fence(c: DeviceContext, e: Call) -> Action:
    return lambda f: c.ranks.flags.fence(f)


SIGNAL_OPS: dict[str, Callable[[DeviceContext, Call], Closure]] = effects({"wait_signal": _wait, "fence_sys": _fence})
