"""Chooses GEMM tiles by a cost model: cycles of the tensor cores, the caches and the memory.

    time = waves of tiles * (main loop + what is not hidden) + start + reduction of partial sums
    main loop = max(MMAs, tile bytes / rate from L2, promotion of accumulators), and the whole at least
                the bytes moved / rate from memory

The cost of all candidates of a machine is estimated and the best one chosen; no shape is looked up. Rates are those of one SM
in its clock cycles, measured on an H200 (wgmma), or from the data sheet (sm_80 and others).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, log2, prod

from tilelang.target.tile_order import rasterisation_rows
from tilelang.transform.analysis.cluster_pairs import LINE, SECTOR, at_once

from .load_cost import cluster_sizes, clusters, inside, load_cycles, outside_cycles
from .tile import Chip, Tile, TileProblem, swapped
from .tile_candidates import candidates, column_chunks, ordered, shared_bytes, side_by_side

_ISSUE = {1: 1.275, 2: 1.255, 3: 1.28}  # cycles for one cycle of the tensor cores, by the number of consumer warp groups
# Least cycles of an iteration over 128 bytes of k, however narrow its tile: 64 rows by 16, 24, 32 columns take 173 to 185.
_LEAST = 181.0
# Exponent for loads and MMAs of about equal time, which sometimes wait for each other; second: in several waves.
_NORM, _NORM_LONG = 12, 7
_BOTH = 5  # the same for a tile's own work and memory
# Cycles of a stage for each doubling of a cluster, because a stage is free only when all blocks have read it; second: in one
# wave.
_WAITING, _WAITING_ONCE = 28.3, 19.0
_FELT_LONG = 0.6  # in four waves and more, the factor of the cost of edge tiles
_SPREAD = 0.5  # of the number of row tiles of groups of random sizes, for each root of their number
_SHARED_ROWS = 1.14, 1.02  # factors for memory traffic of shared tiles: stages with 128-byte rows, with 256-byte rows
# Additional cycles of clusters of 4 and 8 over clusters of two: 128x72 tiles at 1000 cubed take 7.8 us in clusters of 2 x 2,
# 7.3 in 2 x 4. Where neighbours share the larger operand: 192x104 at 10000x200x1000 take 10.9 in 2 x 1, 11.1 in 2 x 2 and 2 x
# 4.
_TOGETHER, _TOGETHER_NEAR, _TOGETHER_PAIR, _TOGETHER_EIGHT = 507, 332, 756, 1084
# Additional cycles to store an element of a tile: through shared memory, in whole vectors or not; of a swap-AB tile, by
# stmatrix and without; of partial sums of swap-AB or overlapping tiles; in rows that TMA cannot store.
_STAGED, _STAGED_UNALIGNED, _BY_MATRICES, _SWAPPED, _PARTIALS, _UNALIGNED = 0.0098, 0.2, 0.0067, 0.28, 0.058, 0.1
# Cycles of each wave but the last; the fraction of a tile's stores that is not hidden in it; the fraction of the next tile's
# loop that hides others; cycles of a wave of tiles of more than 256 rows.
_WAVE, _STORED, _UNDER, _TALL_WAVE = 428, 0.66, 0.41, 433
# Factor of stores to rows across sectors; fraction that the missing part of their last TMA box counts (128 bytes of a row).
_STORED_ACROSS, _BOX = 1.4, 0.36
# Factor of results that L2 does not hold and whose rows are across sectors: 168 times 984x328x48 store 108 MB at 1.6 to 2.2
# TB/s, 17104x6920x208 237 MB at 2.0, 1608x800x144, 123 of them, with rows at sectors 316 MB at 3.0.
_PARTLY = 1.9
# The fraction of a tile's cost beside its loop that each wave but the first adds, where one group computes 64 rows, 128 rows.
_LONE, _LONE_TALL = 0.58, 0.74
_FOLLOWING = 0.3  # ragged GEMMs: additional fraction of the time of one group's tiles that follow others
# Not hidden: the fraction of the last stage's loads that k does not fill (_PARTIAL). Factors of a stage where a ring has three
# (_RING_OF_THREE), or for each 256 bytes of k (_DEEP). _IDLE: of the time that SMs are idle at the end, the fraction that the
# others gain where the power limit applies.
_PARTIAL, _RING_OF_THREE, _DEEP, _IDLE = 0.67, 1.09, 1.05, 0.3
# By how much more bytes a cycle slow kernels, and seconds from which and up to which that grows: 2240x4480x6016 by 128x152 (59
# bytes) takes 161.7 us, by 128x208 (52) 149.3; 1024x1024x16384 by 128x128 (64) 53.0, by 128x256 (48) 50.7.
_POWER_OF_LOADS, _LOADS_FELT, _LOADS_WHOLE = 0.24, 2e-5, 4.5e-5
# Cycles of a stage whose left operand goes through registers, and per element of a thread.
_FETCHED, _FETCH = 250, 14
# Split-K: the fraction that each further split costs, and by which tiles of 64 rows are faster with rows across sectors.
_EACH_SPLIT, _LONE_SPLITS = 0.005, 0.03
_MORE_WORK = 1.1  # 64x512x65536 takes 23.6 us by 64x64 in 13 splits, by 64x32 in 8 25.5
_ALIKE, _ALIKE_ONCE = 1.0075, 1.005  # ratios of costs that count as equal; second: in one wave
# Most iterations over 128 bytes of k of an SM's tiles, and of one tile, with which a launch may start early (PDL). _NEARLY:
# with rows across sectors, the least fraction of SMs in use, or tiles of 64 rows (79 tiles of 128x208 at 10000x200x1000 13.9
# us, with PDL 16.4; 120 of 128x72 at 1000x1048x328 5.1, 4.4; 102 of 128x192 at 4184x536x408 8.9, 9.9; 102 of 64x96 at
# 2120x288x488 4.5, 4.0).
PDL, PDL_ONCE, _NEARLY = 16, 40, 0.85
# Elements of a tile from which PDL loses in loops of more iterations, where 128 bytes of a row lie in two lines: blocks that do
# not start in their order have fewer lines in common (128x160 at 2560x976x1840 TT 15.3 us, with PDL 18.5; 64x128 at
# 304x3328x2032 TN 10.1, 10.8; 128x176 at 2112x1312x752 NN, 12 iterations, 8.7, 8.3; 64x40 at 576x512x1904 TT 5.4, 4.7).
_LARGE, _PDL_LARGE = 64 * 112, 12
# Fractions of L2 that operands and result take where PDL loses outside clusters, unless the next launch's blocks fit beside: L2
# keeps data near the SMs that read it, and blocks that start wherever an SM is free find it far (7x11008x2048, 45 MB, by 128x8
# 9.0 us, with PDL 16.0; 59 MB 16.6, 17.3; 84 MB 22.2, 21.9; 12x6144x3072, 38 MB, by 64x16, which fit, 8.7, with PDL 7.2).
FILLS_L2 = 0.56, 1.1
# Seconds that PDL saves, and what it saves more where the next launch's blocks fit beside those that run.
PDL_SAVES, _SAVED_BESIDE = 0.68e-6, 0.06e-6
# The best tiles, at most _TRIED, of at most _FAR times the least cost, are tried in other clusters. Their costs count _SURE
# times, because the best of many estimates is too low (51 shapes: 3.3 % over the best timed, without 3.9 %, without clusters
# 5.3 %).
_TRIED, _FAR, _SURE = 32, 1.25, 1.04
# Seconds from a load of memory until it arrives, while much is loaded: 16x4096x16384 by 64x16 takes 40.4 us in 8 stages of 64,
# which are 4.2 MB in flight, and 34.1 in stages of 128; 32x4096x14336 36.5 and 31.0; 48x5120x13824 (5.3 MB) 40.7 and 40.0.
_LATENCY = 1.27e-6
_WARM, _KEPT = 1.78, 0.7  # factor of the rate of data that is still in L2; the fraction of L2 that keeps data


def matrix_cycles(chip: Chip, p: TileProblem, bm: int, bn: int) -> float:
    """Cycles of an SM's tensor cores for 32 bytes of k of a tile.

    wgmma with both operands in shared memory: max(N/2, 16 + N/4) for 64 rows, for any type.
    """
    if chip.kind == "wgmma":
        return bm / 64 * max(bn / 2, 16 + bn / 4)
    rate = chip.flops * {"half": 1.0, "tf32": 0.5, "fp8": 1.0, "int8": 2.0, "float": 0.0625}[p.kind]
    small = 1 + 8 / bm + 8 / bn  # larger tiles load fragments for more MMAs
    return 2 * bm * bn * (256 / p.bits) / rate * small


def estimate_seconds(chip: Chip, p: TileProblem, t: Tile) -> float:
    """Estimated seconds of a tile."""
    return _estimate(chip, p, t)[0]


def _estimate(chip: Chip, p: TileProblem, t: Tile, across: bool = False) -> tuple[float, float]:
    """(seconds, seconds if memory took no time). across: the tile is a swap-AB tile, which p and t no longer show."""
    if t.swap_ab:
        return _estimate(chip, swapped(p, t.staged), replace(t, swap_ab=False), True)
    size = p.bits / 8
    rows, columns = ceil(p.m / t.bm), ceil(p.n / t.bn)
    depth = ceil(ceil(p.k / t.bk) / t.splits)  # stages of a block
    tiles = p.row_tiles(t.bm) * columns * t.splits
    waves = _waves(p, t, (1, 1), chip.sms)
    busy = min(1.0, tiles / chip.sms)
    matrix = t.bk * size / 32 * matrix_cycles(chip, p, t.bm, t.bn)
    spans = clusters(chip, p, t, matrix)
    if prod(spans) > 1:
        filled = _waves(p, t, spans, chip.sms if waves == 1 else at_once(chip.sms, prod(spans)))
        # Pairs with empty tiles are made where they gain. Tiles are compared without that gain: counted, it took 12 % more at
        # 528x2000x160 TN, 99 of them, and saved 13 % at 1296x272x384 TN.
        waves, spans = (waves, (1, 1, 1)) if prod(spans) == 2 and filled > waves > 1 else (filled, spans)
    load = load_cycles(chip, p, t, spans, busy)
    traffic = (t.bm + t.loaded) * t.bk * size / matrix  # bytes for a cycle of the MMAs
    matrix *= _issue(chip, t, traffic)
    waiting = (_WAITING_ONCE if waves == 1 else _WAITING) * log2(prod(spans))
    if chip.kind == "wgmma":  # the rate of L2 falls too under the power limit
        power = (0.1 if waves == 1 else 0.2) if p.a_rows % SECTOR or p.b_rows % SECTOR else 0.08
        load *= 1 + power * _long(waves * depth * max(matrix, load) / chip.clock)
    promoted = p.two_level and chip.kind == "wgmma"
    if chip.kind != "wgmma" or promoted:
        traffic = 48.0
    elif load > matrix or prod(spans) > 1:  # loads slow the loop already, or several blocks get them at once
        traffic = min(48.0, traffic)
    stage = _stage(chip, t, waves, matrix, 0.0 if promoted else load, t.bk * size, waiting)
    if t.from_registers:  # a group loads, multiplies and waits while others multiply
        stage = max(stage, _FETCHED + t.bm * t.bk / t.threads * _FETCH + matrix / (t.threads // 128))
    if promoted:  # loads continue during the promotion
        stage = max(load, _promoted(chip, p, t, stage))
    late = _late(chip, p, t, waves, tiles, load, stage - waiting)
    stage *= _ring(chip, p, t, depth)
    outside = _ends(chip, p, t, across, waves, depth * stage, busy)
    cycles = waves * depth * (stage + late) + outside
    if chip.kind == "wgmma":  # the last stage loads only what k has; nothing hides the first load
        cycles += min(matrix, load) - (1 - _PARTIAL) * waves * (depth - p.k / t.bk / t.splits) * max(0.0, stage - matrix)
    if prod(spans) == 2 and waves == 1:
        cycles += _TOGETHER_PAIR
    elif prod(spans) > 2:
        near = side_by_side(chip, p, t.bm, t.bn, t.splits)
        cycles += _TOGETHER_NEAR if near else _TOGETHER if prod(spans) <= 4 else _TOGETHER_EIGHT
    if chip.kind == "wgmma":  # under the power limit, idle SMs leave their power to the others
        idle = (1 - tiles / chip.sms / waves) * depth * stage * waves
        cycles -= _IDLE * _long(cycles / chip.clock) * idle
    own, moved, more = _seconds(chip, cycles, traffic, waves * depth * stage), _memory(chip, p, t, across), chip.start
    if _pdl(chip, p, t, spans):
        more -= PDL_SAVES + (_SAVED_BESIDE if _beside(chip, p, t) else 0.0)
    near = side_by_side(chip, p, t.bm, t.bn, t.splits) if moved > chip.cache else ""
    late_loads = 0.0
    if chip.kind == "wgmma" and moved >= _KEPT * chip.cache and waves == 1:
        flying = (min(p.m, rows * t.bm) + min(p.n, columns * t.bn)) * t.bk * size * t.stages * t.splits * p.batch
        late_loads = moved / flying * _LATENCY
    moved /= chip.memory * (_WARM if chip.kind == "wgmma" and moved < _KEPT * chip.cache else 1.0)
    if near and (columns if near == "a" else rows) > 1:
        moved *= _SHARED_ROWS[t.bk * size > 128]
    if t.splits > 1:
        more += chip.start + p.batch * p.m * p.n * (4 * t.splits + p.out_bits / 8) / (1.5 * chip.memory)
    if t.splits > 1:
        lone = t.bm == 64 and (p.a_rows % SECTOR or p.b_rows % SECTOR)
        more_splits = 1 + _EACH_SPLIT * (t.splits - 1) - (_LONE_SPLITS if lone else 0.0)
        own, moved, more = own * more_splits, moved * more_splits, more * more_splits
    if p.ragged and t.threads == 128:
        own, moved = (x * (1 + _FOLLOWING * (1 - p.batch / p.row_tiles(t.bm))) for x in (own, moved))
    if chip.kind != "wgmma":
        return max(own, moved) + more, own + more
    return max((own**_BOTH + moved**_BOTH) ** (1 / _BOTH), late_loads) + more, own + more


def _waves(p: TileProblem, t: Tile, spans: tuple[int, ...], sms: int) -> float:
    """The tiles of an SM, one after another or side by side. The last clusters may have fewer tiles."""
    wide = ceil(ceil(p.n / t.bn) / spans[0]) * spans[0] * t.splits
    equal = ceil(wide * ceil(ceil(p.m / t.bm) / spans[1]) * spans[1] * p.batch / sms)
    if not p.ragged:
        return equal
    # Sizes that differ are twice as likely as equal ones.
    mean, spread = p.row_tiles(t.bm), _SPREAD * p.batch**0.5
    return (2 * sum(ceil(wide * x / sms) for x in (mean - spread, mean, mean + spread)) / 3 + equal) / 3


def _late(chip: Chip, p: TileProblem, t: Tile, waves: float, tiles: int, load: float, stage: float) -> float:
    """Additional cycles of a stage because of edge tiles, whose zeros arrive in addition to the data."""
    edges, zeros = outside_cycles(chip, p, t)
    # One of a block's tiles lies at an edge, unless all do; with many tiles the effect is smaller.
    felt = 0.0 if not edges else 1.0 if edges == tiles else 1 / waves
    felt = _FELT_LONG * max(felt, edges / tiles) if waves >= 4 and edges != tiles else felt
    return felt * max(0.0, load * inside(p, t) + zeros - stage)


def _ring(chip: Chip, p: TileProblem, t: Tile, depth: int) -> float:
    """The factor of a stage's time in short rings, where a late load delays the loop sooner."""
    if chip.kind == "wgmma":
        more = {1: 2.0, 2: 1.68, 3: _RING_OF_THREE}.get(t.stages if depth >= t.stages else 4, 1.0)
        return more * (_DEEP if t.bk * p.bits > 1024 else 1.0)
    if chip.kind == "mma":  # with one block on an SM, nothing runs while its warps wait for each other, unless they load ahead
        # 8192 cubed on an H200 by 128x256: 444 TFLOP/s in steps of 32, 468 of 64; by 128x128x32, not ahead, 427.
        if t.threads > 128 and _loads_ahead(p, t):
            return {1: 2.0, 2: 1.15}.get(t.stages, 1.0) * (0.93 if t.bk * p.bits > 512 else 0.97)
        return {1: 2.0, 2: 1.15, 3: 1.05}.get(t.stages, 1.0) * (1.12 if _resident(chip, p, t) == 1 else 1.0)
    return 1.0


def _loads_ahead(p: TileProblem, t: Tile) -> bool:
    """Whether warps of 64 x 64 load an iteration's first operands under the MMAs before it: see registers/fetch_ahead.py."""
    by_matrices = (p.bits == 16 or p.a_k and p.b_k and p.bits == 8) and (p.a_rows | p.b_rows) % 16 == 0
    return by_matrices and t.bk * p.bits * t.threads > 2 * 128 * 256 and 128 <= t.bm * t.bn // t.threads <= 160


def _ends(chip: Chip, p: TileProblem, t: Tile, across: bool, waves: float, loop: float, busy: float) -> float:
    """Cycles of an SM beside its loops of `loop` cycles each: the start, and the stores of tiles. across: see _estimate."""
    out_bytes = 4 if t.splits > 1 else p.out_bits / 8
    storing = t.bm * t.bn * _store_cycles(chip, p, t, across, out_bytes)
    row = t.bn * out_bytes / 128  # columns in units of boxes
    boxes = 1.0 if across or t.splits > 1 or chip.kind != "wgmma" else 1 + _BOX * (ceil(row) / row - 1)
    stores = t.bm * t.bn * boxes * out_bytes / chip.store * _stored(chip, p, t, across, out_bytes)
    first = 1665 + stores * busy + storing
    if chip.kind != "wgmma":
        return first * ceil(waves / _resident(chip, p, t))
    tall = waves * _TALL_WAVE * (t.bm > 256)
    if t.threads > 128:  # the loads of the next tile and the other group's MMAs hide the rest
        return first + tall + (waves - 1) * (_WAVE + max(_STORED * stores, stores - _UNDER * loop) + storing)
    return first * (1 + (waves - 1) * (_LONE if t.bm == 64 else _LONE_TALL)) + tall


def _stage(chip: Chip, t: Tile, waves: float, matrix: float, load: float, depth: float, waiting: float = 0.0) -> float:
    """Cycles of a stage of this many bytes of k."""
    if chip.kind != "wgmma":
        return max(matrix, load)
    least = _LEAST * depth / 128
    norm = _NORM if waves == 1 else _NORM_LONG
    return float((matrix**norm + load**norm + least**norm) ** (1 / norm)) + waiting


def _store_cycles(chip: Chip, p: TileProblem, t: Tile, across: bool, out_bytes: float) -> float:
    """Cycles to store an element of a tile, in addition to its bytes. across: see _estimate."""
    if chip.kind != "wgmma":
        return _STAGED if t.staged or p.staged else 0.0
    whole, halves = (p.m if across else p.n) * out_bytes % 16 == 0, p.out_bits == 16
    if t.splits > 1:
        return _PARTIALS if across or t.overlapping else 0.0 if whole else _UNALIGNED
    if t.overlapping or across and p.staged and not halves:
        return _STAGED if whole else _STAGED_UNALIGNED
    if across:
        return (_BY_MATRICES if whole else _UNALIGNED) if halves else _SWAPPED
    return 0.0 if whole else _UNALIGNED


def _stored(chip: Chip, p: TileProblem, t: Tile, across: bool, out_bytes: float) -> float:
    """The factor of a tile's stores whose rows do not start at multiples of a sector."""
    row = (p.m if across else p.n) * out_bytes
    unaligned = chip.kind == "wgmma" and (
        row % SECTOR or t.splits == 1 and not across and p.n > t.bn and t.bn * out_bytes % SECTOR)
    direct = t.staged or t.splits == 1 and (p.staged or (not across or p.out_bits == 16) and (
        p.m if across else p.n) * out_bytes % 16 == 0)
    return _STORED_ACROSS if unaligned and direct else 1.0


def _promoted(chip: Chip, p: TileProblem, t: Tile, stage: float) -> float:
    """Cycles of a stage whose accumulator is promoted, that is, added to a second one.

    Whole tiles: 1.5 cycles per accumulator to add, 280 to wait and start again; half of it is hidden by the MMAs of other
    groups, and half of the rest where a second block runs. Column chunks one after another: 1.2 cycles and 170; what exceeds
    the other groups' MMAs counts. A is read again for each chunk, and shared memory moves 128 bytes per cycle for instructions
    and loads together.
    """
    groups, pieces = t.threads // 128, column_chunks(t)
    sums = t.bm * t.bn / t.threads
    if pieces == 1:
        return stage + (1.5 * sums + 280) / (4 if 3 * sums + 32 <= {1: 255, 2: 240}.get(groups, 160) else 2)
    n, steps = t.bn / pieces, t.bk * p.bits / 256
    one = t.bm / groups / 64 * steps * max(n / 2, 16 + n / 4)
    read = t.bm / 64 * steps * pieces * (2048 + 32 * n)
    moved = (read + (t.bm + t.bn) * t.bk * p.bits / 8) / 128
    return max(stage, moved * _ISSUE[groups]) + pieces * max(0.0, 1.2 * sums / pieces + 170 - (groups - 1) * one)


def _issue(chip: Chip, t: Tile, traffic: float) -> float:
    """Cycles of a main loop for one cycle of its MMAs, with all loads in time; measured on an H200.

    traffic: bytes of tiles per cycle; 128 x 256 has 48.
    """
    if chip.kind != "wgmma":
        return 1.0
    return _ISSUE[t.threads // 128] * (1 + 0.065 * max(0.0, traffic / 48 - 1))


def _seconds(chip: Chip, cycles: float, traffic: float, loop: float) -> float:
    """Seconds of these cycles, `loop` of them in main loops. The power limit slows long kernels down, to 0.94 of the clock from
    100 us on; loads take power too.

    traffic: bytes that are loaded in a cycle of the MMAs.
    """
    seconds = cycles / chip.clock
    loads = _POWER_OF_LOADS * (traffic / 48 - 1) * loop / cycles * _long(seconds, _LOADS_FELT, _LOADS_WHOLE)
    return seconds * (1 + 0.065 * _long(seconds) + loads)


def _long(seconds: float, first: float = 4e-5, last: float = 1e-4) -> float:
    """The fraction of a kernel's time at the power limit: it rises from 0 at `first` to 1 at `last`."""
    return min(1.0, max(0.0, (seconds - first) / (last - first)))


def _resident(chip: Chip, p: TileProblem, t: Tile) -> int:
    """Blocks that an SM holds at a time."""
    if chip.kind != "mma":
        return 1
    registers = min(255, t.bm * t.bn // t.threads + 76)  # accumulators, fragments of the operands, addresses
    return max(1, min(65536 // (registers * t.threads), chip.shared_sm // (shared_bytes(p, t) + 1024)))


def _memory(chip: Chip, p: TileProblem, t: Tile, across: bool = False) -> float:
    """Bytes from and to memory: operands count once where L2 holds a wave's tiles of them, else once per wave."""
    size, out = p.bits / 8, p.batch * p.m * p.n * p.out_bits / 8
    if chip.kind == "wgmma" and out > chip.cache and (p.m if across else p.n) * p.out_bits // 8 % SECTOR:
        out *= _PARTLY
    once = p.batch * (p.m + p.n) * p.k * size
    rows, columns = ceil(p.m / t.bm), ceil(p.n / t.bn)
    waves = ceil(rows * columns * p.batch / chip.sms)
    high = min(rows, rasterisation_rows(chip.sms, t.bm, t.bn) if chip.kind == "wgmma" else max(1, 2048 // t.bm))
    wide = min(columns, ceil(chip.sms / high))
    wave = (high * t.bm + wide * t.bn) * p.k * size
    return out + (once if once < chip.cache / 2 else max(once, waves * min(wave, once)))


def _once(chip: Chip, p: TileProblem, t: Tile) -> bool:
    """Whether there is an SM for each tile."""
    down, across = (p.n, p.m) if t.swap_ab else (p.m, p.n)
    return chip.kind == "wgmma" and ceil(down / t.bm) * ceil(across / t.bn) * p.batch * t.splits <= chip.sms


def finished(chip: Chip, p: TileProblem, t: Tile) -> Tile:
    """The tile with the choices that its size and place decide: rasterisation and PDL."""
    spans = _spans(chip, p, t)
    t = ordered(chip, p, t, spans)
    q = swapped(p, t.staged) if t.swap_ab else p
    return replace(t, pdl=_pdl(chip, q, replace(t, swap_ab=False), spans))


def uses_pdl(chip: Chip, p: TileProblem, t: Tile) -> bool:
    """Whether a launch gains by PDL, which saves about 0.7 us of 2 to 15 (benchmarks/results/notes.md).

    With PDL, blocks begin in the order in which SMs become free. Blocks that wait for their neighbours anyway, or have little
    to load, lose nothing. In long loops the loads of neighbours drift apart from each other (128x4096x14336 by 64x64 34.7 us,
    with PDL 41.4).
    """
    q = swapped(p, t.staged) if t.swap_ab else p
    return _pdl(chip, q, replace(t, swap_ab=False), _spans(chip, p, t))


def _spans(chip: Chip, p: TileProblem, t: Tile) -> tuple[int, ...]:
    """The tiles of a cluster, as `clusters` gives them."""
    q, t = (swapped(p, t.staged), replace(t, swap_ab=False)) if t.swap_ab else (p, t)
    return clusters(chip, q, t, t.bk * q.bits / 256 * matrix_cycles(chip, q, t.bm, t.bn))


def _beside(chip: Chip, p: TileProblem, t: Tile) -> bool:
    """Whether an SM holds two blocks."""
    return 2 * (shared_bytes(p, t) + 9216) <= chip.shared


def _pdl(chip: Chip, p: TileProblem, t: Tile, spans: tuple[int, ...]) -> bool:
    """uses_pdl for a tile without swap-AB, in these clusters."""
    taken = p.batch * ((p.m + p.n) * p.k * p.bits + p.m * p.n * p.out_bits) / 8 / chip.cache
    if chip.kind != "wgmma" or p.open_rows or prod(spans) == 1 and not _beside(
            chip, p, t) and FILLS_L2[0] < taken < FILLS_L2[1]:
        return False
    steps = ceil(ceil(p.k / t.bk) / t.splits) * t.bk * p.bits / 1024
    tiles = ceil(p.m / t.bm) * ceil(p.n / t.bn) * p.batch * t.splits
    if tiles > chip.sms:
        return ceil(tiles / chip.sms) * steps <= PDL
    if prod(spans) > 1:
        return True
    if p.a_rows % SECTOR or p.b_rows % SECTOR:
        return steps <= PDL and (tiles >= _NEARLY * chip.sms or t.bm == 64)
    if (p.a_rows % (LINE // 2) or p.b_rows % (LINE // 2)) and t.bm * t.bn >= _LARGE:
        return steps <= _PDL_LARGE
    return steps <= PDL_ONCE


def _in_clusters(chip: Chip, p: TileProblem, estimated: list[tuple[float, float, Tile]]) -> list[tuple[float, float, Tile]]:
    """The best tiles of one wave in other cluster sizes than the compiler's rule gives, where these are faster."""
    if chip.kind != "wgmma" or p.kind != "half" or p.two_level or p.open_rows:
        return []
    first = sorted(estimated, key=lambda x: x[0])[:_TRIED]
    found = []
    for seconds, _, t in first:
        if seconds > _FAR * first[0][0] or not _once(chip, p, t):
            continue
        others = [(*_estimate(chip, p, x), x) for x in (replace(t, cluster=spans) for spans in cluster_sizes(chip, p, t))]
        least = min(others, key=lambda x: x[:2], default=None)
        if least and least[0] * _SURE < seconds:
            found.append((least[0] * _SURE, least[1] * _SURE, least[2]))
    return found


@lru_cache(maxsize=1024)
def choose_tile(chip: Chip, p: TileProblem) -> Tile:
    """The chosen tile among the candidates within 1 % of the least cost (half of that in one wave).

    The order of preference: where memory limits, at most a tenth more work of its own than the least; fewest splits; fewest
    bytes moved per GEMM, or where memory limits, least work of its own; shorter stages; overlapping tiles, which load no zeros;
    in one wave fewer warp groups (of ten pairs, one group of 128 rows took 0.94 to 1.00 of the time of two), otherwise more
    (128x160 at 3760x1320x3904 64 us, 67).

    Raises ValueError where no tile fits (column_block).
    """
    estimated = [(*_estimate(chip, p, t), t) for t in candidates(chip, p)]
    if not estimated:
        raise ValueError(f"no tile of {chip.kind} suits {p}")
    estimated += _in_clusters(chip, p, estimated)
    best, own, fastest = min(estimated, key=lambda x: x[:2])
    memory = best > own * 2 ** (1 / _BOTH)  # memory limits
    least = _MORE_WORK * min(x for seconds, x, _ in estimated if seconds <= _ALIKE * best)
    near = [(memory and x > least, t.splits, x if memory else (t.bm + t.bn) / (t.bm * t.bn), t.bk, not t.overlapping,
             t.threads if _once(chip, p, t) else -t.threads, seconds, k)
            for k, (seconds, x, t) in enumerate(estimated)
            if seconds <= (_ALIKE_ONCE if t.splits == fastest.splits and _once(chip, p, t) else _ALIKE) * best]
    seconds, _, t = estimated[min(near)[-1]]
    return replace(finished(chip, p, t), seconds=seconds)
