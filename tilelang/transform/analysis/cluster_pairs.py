"""Decides when blocks that load the same tile form a cluster, in which the tile is loaded once (TMA multicast).

This rule has two users: persistent.py, which forms the clusters, and library/gemm/tile_cost.py, which estimates the cost of
tiles with and without them.  The constants were measured on an H200 (benchmarks/results/notes.md).  Bytes and cycles are
those of one SM in one iteration of its main loop.

A row of a tile is 128 bytes of a row of the tensor.  If rows do not start at multiples of 128 bytes, it lies in two cache
lines.  If they do not start at multiples of 32 bytes either, it lies in five sectors instead of four, and the load costs
more than twice as much.  With 16-bit elements, a GEMM with rows of 1000 elements took 8.8 us (1024: 5.4 us), one with rows
of 1200 elements 10.1 us (1280: 9.3 us).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, gcd, log2, prod
from typing import Any

from tilelang.ir import Const, convert, free_vars
from tilelang.ir.record import record

LINE, SECTOR = 128, 32  # bytes
L2 = 80.0  # bytes that L2 delivers to each SM per cycle while all SMs load
# If a main loop needs at most so many bytes per cycle, it keeps the tensor cores busy without multicast.  128x256x64 tiles
# of 16-bit types need 48 and lose 1 % in clusters; if rows lie in two cache lines they need more, and clusters gain 14 to 16 %.
RATE = 68.0
OFF_LINES = 1.6  # compared with RATE: cost of a 128-byte row that lies in two cache lines, relative to an aligned one
OFF_SECTORS = 2.5  # time of a 128-byte row that lies in five sectors, relative to an aligned one
# With k as the outermost dimension: additional factor for rows in five sectors; factor for rows in two cache lines.
OUTERMOST, OUTERMOST_LINES = 1.13, 1.6
# Time of a loop relative to its MMA cycles: if all loads arrive in time; in a cluster, where two blocks must release a stage.
ISSUED, WAITING = 1.15, 1.17
# Bytes per cycle and SM if one of a block's loads is multicast, by the number of blocks in the cluster: 128x72x64 tiles
# at 1000 cubed took 8.2, 7.8, 7.3 us in clusters of 1 x 4, 2 x 2 and 2 x 4, 9.2 alone.
MULTICAST = {2: 45.0, 4: 60.0, 8: 72.0}
# For rows that cross sectors, in a launch of one wave: bytes per cycle of everything that arrives at a block, and of what the
# block requests itself.  The two times add.  128x72 tiles at 1000 cubed take 813 cycles per iteration alone, 701 in 2 x 1,
# 590 in 2 x 2, 510 in 2 x 4 clusters, where a block requests at most 200,
# 136, 100 and 82 rows; 64x72 tiles at 408x1240x10584 take 338 cycles in 2 x 4.
ARRIVING, ASKED = 87.0, 122.0
# Clusters of more than two blocks that a launch of one wave may use: blocks along the first two dimensions of the grid.
LARGER = ((2, 2), (4, 1), (1, 4), (4, 2), (2, 4))
# Without clusters, blocks drift and their loads take longer in long loops: by this fraction for each doubling beyond
# 16 iterations.  256x160 tiles at 3320x1584x10680 took 163 us without clusters, 152 in pairs.
DRIFT = 0.07
# In several waves: the fraction of the time that pairs save for the fraction of loads that they save.  An empty tile of a pair
# takes EMPTY of a tile's time, and 1 / EMPTY_STEPS more for each iteration, at most all of it.  74 tiles in pairs along one or
# the other dimension and without: 616x1680x72, 107 of them, by 128x192 takes 89 us alone, 78 in five pairs for nine tiles;
# 624x1552x1552, 29 of them, by 128x176 139 and 152.
SAVED_BY_PAIRS, EMPTY, EMPTY_STEPS = 0.3, 0.2, 20
# Cycles that the blocks of a cluster need to start and to end together: two blocks; more than two.  128x176 tiles at
# 680x4000x1720 take 19.1 us alone, 16.9 in pairs.
START, START_LARGER = 2200, 3500


@record
class Load:
    """One TMA load of an iteration.

    size: bytes.  row: the rows of the tensor start at multiples of this number of bytes.  saved: the number of blocks that
    load it together, or True for two.  inner: k is the contiguous dimension.
    """

    size: float
    row: int
    saved: int = False
    inner: bool = True

    @property
    def cost(self) -> float:
        """The number of bytes in aligned rows that would take the same time."""
        if self.row % SECTOR:
            return self.size * OFF_SECTORS * (1 if self.inner else OUTERMOST)
        return self.size * (OUTERMOST_LINES if self.row % LINE and not self.inner else 1)

    @property
    def taken(self) -> float:
        """The cost of the fraction that one block of the cluster requests."""
        return self.cost / (2 if self.saved is True else self.saved or 1)


def rows_of(op: Any, at: tuple[Any, ...], step: Any) -> tuple[int, bool]:
    """(alignment of a load's source rows in bytes, whether the loop variable `step` runs along the rows).

    The alignment is what is known from static strides, at most one cache line.  at: the indices where the load begins.
    """
    b = op.src.buffer
    strides = [convert(s) for s in b.strides[:-1]]
    start = gcd(LINE, *(s.value * b.dtype.bits // 8 for s in strides if isinstance(s, Const)))
    return start, not any(step in free_vars(x) for x in at[:-1])


def pays_for_many(loads: tuple[Load, ...], cycles: float) -> bool:
    """Whether pairs are faster for blocks that compute several tiles: without them the MMAs (`cycles`) would wait for loads."""
    return bool(cycles) and sum(x.size * (1 if x.row % LINE == 0 else OFF_LINES) for x in loads) > RATE * cycles


def gain_for_many(loads: tuple[Load, ...], count: int, others: int, blocks: int, steps: float) -> float:
    """What pairs along a dimension of `count` tiles, repeated in `others` rows, gain on `blocks` blocks that compute several
    tiles each, relative to the launch's time.

    An odd count leaves one tile of the last pairs empty.  steps: iterations of a tile.
    """
    costs = [x.cost if x.row % SECTOR else x.size * (OFF_LINES if x.row % LINE else 1) for x in loads]
    saved = sum(c * (1 - x.taken / x.cost) for c, x in zip(costs, loads)) / sum(costs)
    more = ceil((count + count % 2) * others / blocks) / ceil(count * others / blocks) - 1
    return SAVED_BY_PAIRS * saved - more * felt(steps)


def felt(steps: float) -> float:
    """The fraction that an empty tile of a pair takes of another tile's time, where loops have so many iterations."""
    return min(1.0, EMPTY + steps / EMPTY_STEPS)


def pays_in_one_wave(loads: tuple[Load, ...], cycles: float, steps: int) -> bool:
    """Whether pairs are faster with one tile a block and `steps` iterations.

    The blocks of a pair wait for each other at the start and at the end, and load at a lower rate.
    """
    return saved_in_one_wave(loads, cycles, steps) > START


def saved_in_one_wave(loads: tuple[Load, ...], cycles: float, steps: int, blocks: int = 2) -> float:
    """Cycles that clusters of `blocks` blocks save in a loop of `steps` iterations; 0 if its MMA cycles are not known."""
    alone = max(cycles * ISSUED, sum(x.cost for x in loads) / L2 * (1 + DRIFT * max(0.0, log2(max(1, steps) / 16))))
    return (alone - paired_cycles(loads, cycles, blocks)) * steps if cycles else 0.0


def larger_in_one_wave(sizes: tuple[int, ...], shared: tuple[bool, ...], saved: Callable[[tuple[int, ...]], float],
                        sm_count: int, found: tuple[int, ...]) -> tuple[int, ...]:
    """The best cluster of more than two blocks for a launch of one wave; `found` if none of them saves more cycles.

    sizes: of the grid.  shared: for each dimension, whether some load is the same for all blocks along it and the loop has
    the same length.  saved: function from the blocks of a cluster along each dimension to the cycles that it saves.
    """
    best, most = found, max(START_LARGER, 1.05 * saved(found)) if prod(found) > 1 else START_LARGER
    for pair in LARGER if len(sizes) > 1 else ():
        spans = (*pair, *[1] * (len(sizes) - 2))
        if not all(n == 1 or n <= size and ok for n, size, ok in zip(spans, sizes, shared)) or prod(
                -(-size // n) * n for size, n in zip(sizes, spans)) > at_once(sm_count, prod(pair)):
            continue
        if saved(spans) > most:
            best, most = spans, 1.05 * saved(spans)
    return best


def paired_cycles(loads: tuple[Load, ...], cycles: float, blocks: int = 2, one_wave: bool = True) -> float:
    """Cycles of an iteration in a cluster of `blocks` blocks."""
    size, across = sum(x.size for x in loads), sum(x.taken for x in loads if x.row % SECTOR)
    asked = size / ARRIVING + across / ASKED if across and one_wave else sum(x.taken for x in loads) / L2
    return max(cycles * WAITING, asked, size / MULTICAST[blocks])


def at_once(sm_count: int, blocks: int) -> int:
    """How many blocks run at the same time in clusters of `blocks` blocks, with one block on each SM.

    A cluster lies in one GPC.  132 SMs lie in GPCs of 16, 18 or fewer SMs, so clusters of 4 or 8 blocks leave some SMs
    unused (128 blocks took two waves, 120 one).
    """
    return sm_count if blocks <= 2 else sm_count * 10 // 11
