"""When two blocks that load the same tile make a cluster, in which it is loaded once: the one rule of persist.py, which
makes clusters, and of library/gemm/tile_cost.py, which prices tiles with and without them.  Measured on an H200
(benchmarks/results/notes.md); bytes and cycles are those of one multiprocessor and one iteration of its main loop.

A row of a tile is 128 bytes of a tensor's row.  Where rows do not start at multiples of 128 bytes it lies in two cache
lines, where they do not even start at multiples of 32, in five sectors instead of four: those cost more than twice as
much (1000 of 16 bits and 1200 of them: 8.8 us of 5.4 for the product of 1024, 10.1 of 9.3 for 1280).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, log2, prod
from typing import Any

from tilelang.ir import Const, convert, free_vars
from tilelang.ir.record import record

LINE, SECTOR = 128, 32  # bytes
L2 = 80.0  # bytes a cycle and multiprocessor from L2, all loading
# Bytes a cycle up to which a main loop keeps the matrix unit busy without sharing its loads.  128x256x64 tiles of 16-bit
# types take 48 and lose 1 % in clusters; with rows across lines they take more, and clusters gain 14 to 16 %.
RATE = 68.0
OFF_LINES = 1.6  # what 128 bytes count for RATE that lie in two cache lines
OFF_SECTORS = 2.5  # what 128 bytes take that lie in five sectors
OUTERMOST, OUTERMOST_LINES = 1.13, 1.6  # what more they take where k is outermost; what others do there that lie in two lines
# Of the matrix unit's cycles: what a loop takes with all loads in time; with a stage free only when two blocks have used it.
ISSUED, WAITING = 1.15, 1.17
# Bytes a cycle and multiprocessor where one of its loads is another's as well, by the blocks of a cluster: 128x72x64 tiles
# at 1000 cubed took 8.2, 7.8, 7.3 us in clusters of 1 x 4, 2 x 2 and 2 x 4, 9.2 alone.
MULTICAST = {2: 45.0, 4: 60.0, 8: 72.0}
# Rows across sectors, in one round: bytes a cycle of what arrives and, one after the other, of what a block asks for itself.
# 128x72 tiles at 1000 cubed take 813 cycles an iteration alone, 701 in 2 x 1, 590 in 2 x 2, 510 in 2 x 4, where at most 200,
# 136, 100 and 82 rows are asked for; 64x72 at 408x1240x10584 338 in 2 x 4.
ARRIVING, ASKED = 87.0, 122.0
# Clusters of more than two, blocks along the first two dimensions of a grid, of which launches of one round may be made.
LARGER = ((2, 2), (4, 1), (1, 4), (4, 2), (2, 4))
# Loads of blocks that do not wait for each other take longer in long loops, for each doubling beyond 16 iterations: 256x160
# tiles at 3320x1584x10680 took 163 us alone, 152 in pairs.
DRIFT = 0.07
# Cycles that blocks take to start and to end together, two of them, more: 128x176 tiles at 680x4000x1720, 19.1 us alone, take
# 16.9 in pairs.
START, START_LARGER = 2200, 3500


@record
class Load:
    """size: bytes.  row: rows of the tensor start at multiples of so many bytes.  saved: whether two blocks load it
    once; or how many do.  inner: k lies along the rows."""

    size: float
    row: int
    saved: int = False
    inner: bool = True

    @property
    def cost(self) -> float:
        """Bytes of whole rows that take as long."""
        if self.row % SECTOR:
            return self.size * OFF_SECTORS * (1 if self.inner else OUTERMOST)
        return self.size * (OUTERMOST_LINES if self.row % LINE and not self.inner else 1)

    @property
    def taken(self) -> float:
        """What a block of a cluster takes of it."""
        return self.cost / (2 if self.saved is True else self.saved or 1)


def rows_of(op: Any, at: tuple[Any, ...], step: Any) -> tuple[int, bool]:
    """(what rows of a load's source start at multiples of, in bytes, as far as it is known, at most a cache line; whether the
    loop's variable `step` goes along them).  at: where the load begins."""
    b = op.src.buffer
    strides = [convert(s) for s in b.strides[:-1]]
    start = gcd(LINE, *(s.value * b.dtype.bits // 8 for s in strides if isinstance(s, Const)))
    return start, not any(step in free_vars(x) for x in at[:-1])


def pays_for_many(loads: tuple[Load, ...], cycles: float) -> bool:
    """Blocks that compute several tiles: where loads would keep the matrix unit, busy for so many cycles, waiting."""
    return bool(cycles) and sum(x.size * (1 if x.row % LINE == 0 else OFF_LINES) for x in loads) > RATE * cycles


def pairs(count: int, others: int, blocks: int) -> bool:
    """Whether `count` tiles along a dimension, in each of `others` rows of them, make pairs for so many blocks: an even number,
    or one whose last pairs lack a tile without taking a round more."""
    return count % 2 == 0 or blocks % 2 == 0 and -(-(count + 1) * others // blocks) == -(-count * others // blocks) > 1


def pays_in_one_wave(loads: tuple[Load, ...], cycles: float, steps: int) -> bool:
    """One tile a block, `steps` iterations: blocks wait for each other at both ends and load at a lower rate."""
    return saved_in_one_wave(loads, cycles, steps) > START


def saved_in_one_wave(loads: tuple[Load, ...], cycles: float, steps: int, blocks: int = 2) -> float:
    """Cycles that clusters of so many blocks save in the loop of `steps` iterations; 0 where its work is not known."""
    alone = max(cycles * ISSUED, sum(x.cost for x in loads) / L2 * (1 + DRIFT * max(0.0, log2(max(1, steps) / 16))))
    return (alone - paired_cycles(loads, cycles, blocks)) * steps if cycles else 0.0


def larger_in_one_wave(sizes: tuple[int, ...], shared: tuple[bool, ...], saved: Callable[[tuple[int, ...]], float],
                        sm_count: int, found: tuple[int, ...]) -> tuple[int, ...]:
    """Clusters of more than two for a launch of one round, where they save more than those found; else those.

    sizes: of the grid.  shared: along which of its dimensions some load is the same, and as long.  saved: cycles that
    clusters of so many blocks along each dimension save.
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
    """An iteration in a cluster of so many blocks."""
    size, across = sum(x.size for x in loads), sum(x.taken for x in loads if x.row % SECTOR)
    asked = size / ARRIVING + across / ASKED if across and one_wave else sum(x.taken for x in loads) / L2
    return max(cycles * WAITING, asked, size / MULTICAST[blocks])


def at_once(sm_count: int, blocks: int) -> int:
    """How many blocks, one a multiprocessor, run at the same time in clusters of so many: of 132 sm_count, in groups of
    16 or 18 and fewer, some are in no cluster of 4 or 8 (128 blocks took two rounds, 120 one)."""
    return sm_count if blocks <= 2 else sm_count * 10 // 11


__all__ = ["ARRIVING", "ASKED", "DRIFT", "ISSUED", "LARGER", "LINE", "MULTICAST", "OUTERMOST", "OUTERMOST_LINES", "SECTOR",
           "START", "START_LARGER", "Load", "at_once", "larger_in_one_wave", "paired_cycles", "pairs", "pays_for_many",
           "pays_in_one_wave", "rows_of", "saved_in_one_wave"]
