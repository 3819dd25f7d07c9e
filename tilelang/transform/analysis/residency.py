"""How many blocks an SM runs at once while a loop runs, by shared memory and registers as far as known before layouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from tilelang.ir import Const, Launch, Stmt, Var, convert, FRAGMENT, SHARED
from tilelang.target.machine import REGISTERS

from .effects import effects


def resident_blocks(launch: Launch, loop: Stmt, body: Collection[Stmt], versions: Mapping[Var, int], target: Any,
                    more: int = 0) -> int:
    """Blocks of an SM, at least 1; no more than the grid has for each.

    body: the statements of the loop, with fragments of tiles in flight.  versions: storage of shared tiles -> how many of it.
    Tiles that only the code around the loop uses share their bytes.  more: registers of a thread.
    """
    inside = {e.storage: e.buffer for s in body for e in effects(s)}
    outside = {e.storage: e.buffer for e in effects(launch.body) if e.buffer.is_static and e.storage not in inside}
    used = sum(int(b.size) * b.dtype.bits // 8 * versions.get(b.data, 1) for b in inside.values()
               if b.is_static and b.scope_name in SHARED)
    other = sum(int(b.size) * b.dtype.bits // 8 for b in outside.values() if b.scope_name in SHARED)
    held = outside | inside
    registers = more + REGISTERS.plain_loop + sum(int(b.size) * b.dtype.bits // 32 for b in held.values(
        ) if b.is_static and b.scope_name == FRAGMENT and b.ndim > 1) // launch.num_threads
    grid = [g.value for g in map(convert, launch.grid) if isinstance(g, Const)]
    most = -(-prod(grid) // max(1, target.limits.sm_count)) if len(grid) == len(launch.grid) else target.limits.blocks_per_sm
    return max(1, min(target.limits.shared_per_sm // max(1, used, other), most, target.blocks_by_registers(
        registers, launch.num_threads)))
