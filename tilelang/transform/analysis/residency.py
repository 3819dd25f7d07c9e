"""How many blocks an SM runs at once while a loop runs, by shared memory and registers as far as known before layouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from tilelang.ir import Const, Launch, Stmt, Var, convert, FRAGMENT, SHARED
from tilelang.ops import Gemm
from tilelang.target.machine import REGISTERS

from .effects import effects, fills_whole
from .pipeline_schedule import Item


def resident_blocks(launch: Launch, loop: Stmt, body: Collection[Stmt], live: tuple[int, int], target: Any) -> int:
    """Blocks of an SM, at least 1; no more than the grid has for each.

    body: the statements of the loop, with fragments of tiles in flight.  live: what it needs at once (live_at_once).  Tiles
    that only the code around the loop uses share their bytes.
    """
    inside = {e.storage for s in body for e in effects(s)}
    outside = {e.storage: e.buffer for e in effects(launch.body) if e.buffer.is_static and e.storage not in inside}
    other = sum(int(b.size) * b.dtype.bits // 8 for b in outside.values() if b.scope_name in SHARED)
    registers = REGISTERS.plain_loop + live[1] + sum(int(b.size) * b.dtype.bits // 32 for b in outside.values(
        ) if b.scope_name == FRAGMENT and b.ndim > 1) // launch.num_threads
    grid = [g.value for g in map(convert, launch.grid) if isinstance(g, Const)]
    most = -(-prod(grid) // max(1, target.limits.sm_count)) if len(grid) == len(launch.grid) else target.limits.blocks_per_sm
    return max(1, min(target.limits.shared_per_sm // max(1, live[0], other), most, target.blocks_by_registers(
        registers, launch.num_threads)))


def live_at_once(items: Sequence[Item], stage: Sequence[int], order: Sequence[int], versions: Mapping[Var, int],
                 threads: int) -> tuple[int, int]:
    """(bytes of shared tiles, registers of a thread for fragments of two dimensions and more) that a steady iteration needs.

    versions: storage of tiles that are copied ahead -> how many of it.  Fragments, and such tiles, that an item replaces whole
    before others read them are live from there to the last of these; all else always is.
    """
    size = len(items)
    most = [0.0] * size, [0.0] * size
    for storage, b in {e.storage: e.buffer for x in items for e in x.effects}.items():
        shared = b.scope_name in SHARED
        if not b.is_static or not shared and (b.scope_name != FRAGMENT or b.ndim < 2):
            continue
        users = sorted((stage[i], order[i], i) for i, x in enumerate(items) if x.touches(storage))
        (late, begin, i), (last, end, _) = users[0], users[-1]
        made = not any(e.reads and e.storage is storage for e in items[i].effects) and (
            fills_whole(items[i].stmt) or isinstance(items[i].stmt, Gemm) or shared) and (
                not shared or versions.get(storage) == 1)
        lasts = min(size, (last - late) * size + end - begin + 1) if made else size
        each = int(b.size) * b.dtype.bits / (8 / versions.get(storage, 1) if shared else 32 * threads)
        for n in range(begin, begin + lasts):
            most[not shared][n % size] += each
    return int(max(most[0], default=0)), int(max(most[1], default=0))
