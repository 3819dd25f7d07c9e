"""The GEMM tiles that a machine can hold: sizes, stages and places. tile_cost.py estimates their cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, gcd

from tilelang.transform.analysis.cluster_pairs import SECTOR
from tilelang.target.tile_order import rasterisation_rows, rows_of_waves, tile_order

from .tile import Chip, Tile, TileProblem, swapped

_OUTPUT_STAGING = 32 * 1024  # shared bytes reserved to store a tile through shared memory
_ENOUGH = 4  # stages; blocks with more of them come out of step (192x144 at 2032x1696x6000: with 4 stages 56.5 us, with 5 59.3)
_BARRIER_BYTES = 1024
_TILES_AHEAD = 3  # that are loaded under stores (1008x1448x32 TN, 158 of them, by 256x128: 285 us, 305 with 6)
_REGISTERS = 200  # registers of a thread for accumulators and the left operand, as loaded and as multiplied
_ACCUMULATORS = {1: 168, 2: 192, 3: 128}  # registers of a thread for both accumulators of two levels
# (rows of a tile, warp groups that compute it, registers of a thread for its accumulators). 192 rows in two groups, each with
# half of the columns of all rows, were not faster than in three groups.
_GROUPS = ((64, 1, 168), (128, 1, 168), (128, 2, 168), (256, 2, 168), (192, 3, 96), (384, 3, 96))
_FAR_LARGER = 8  # ratio of the operands from which neighbours share tiles of the larger
_OVERLAP_STEPS = 12  # iterations from which overlapping tiles pay
# The least fraction of SMs that tiles must fill, for sizes that are tried only then; second: with split-K. (5696x40x1752 NT by
# 64x40, 89 tiles; 4520x88x600 TT by 64x88, 71 tiles.)
_FILLED, _FILLED_SPLIT = 0.5, 0.75
# Ratio of results to operands from which rasterisation panels have one row, where L2 does not hold the results: 12656x13240x136
# 191 us, with 12 rows 207; 11328x9448x88 106, 115; at a ratio of 4.4, 7352x11784x1024 takes as long.
_RESULTS = 8
_FEW_WAVES, _WELL = 6, 0.85  # up to this many waves; least use of several waves
_FEW_ROWS = 128  # rows up to which swap-AB tiles are tried


def candidates(chip: Chip, p: TileProblem) -> Iterator[Tile]:
    """The tiles that the machine can hold, whatever their cost."""
    wgmma, few = chip.kind == "wgmma" and p.kind != "float", p.m <= _FEW_ROWS
    registers = chip.kind == "wgmma" and p.kind == "tf32" and not p.a_k
    if wgmma and p.may_swap_ab and few:  # first, because they are 3 % faster at equal cost
        yield from (replace(t, swap_ab=True) for t in candidates(chip, swapped(p)))
    if wgmma and p.kind == "tf32" and not p.b_k:  # only the left operand can be read from registers
        shapes = []
    elif wgmma:
        shapes = list(_warp_group_tiles(chip, p))
    elif chip.kind == "cpu":
        shapes = [(bm, bn, 1024 // p.bits if p.two_level else 32, 1) for bm in (16, 32, 64, 128) for bn in (16, 32, 64, 128)]
    else:
        depths = (1024 // p.bits,) if p.two_level else (max(16, 512 // p.bits), max(32, 1024 // p.bits))
        shapes = [(bm, bn, bk, threads) for bm in (32, 64, 128, 256) for bn in (32, 64, 128, 256) for bk in depths
                  for threads in (128, 256) if 16 <= bm * bn // threads <= (64 if p.kind == "float" else 128)]
    for bm, bn, bk, threads in shapes:
        if p.column_block and bn > p.column_block + gcd(bn, p.column_block) or p.two_level and bk * p.bits != 1024 or (
                p.row_block % bm) or registers and bm * (bn + 2 * bk) // threads > _REGISTERS:
            continue
        for wide in _widths(chip, p, bm, bn):
            yield from _with_splits(chip, p, Tile(bm, bn, bk, 0, threads, wide=wide, from_registers=registers))
    if wgmma and p.may_swap_ab and not few:
        staged = p.kind != "tf32" or p.b_k  # with 4-byte elements, staging a whole tile would take half of the ring
        yield from (replace(t, swap_ab=True) for t in candidates(chip, swapped(p, staged)))


def _widths(chip: Chip, p: TileProblem, bm: int, bn: int) -> tuple[int, ...]:
    """The numbers of columns that a stage may load of the right operand, where they are more than bn (else 0).

    Boxes narrower than 128 bytes are many and small, at 0.3 of the speed, so whole boxes are loaded. Boxes of 64 bytes are
    tried where all tiles run at once: 64x160 at 7320x160x496 NN 4.4 us, 4.6 with three whole boxes; 192x96 at 280x1440x18536 TN
    38.0, 38.5; over two waves 128x160 at 320x14456x1648 TN 32.5, 31.5.
    """
    size = bn * p.bits // 8
    if chip.kind != "wgmma" or p.b_k or size <= 128 or size % 128 == 0:
        return (0,)
    whole = -(-size // 128) * 1024 // p.bits
    if size % 64:  # boxes that begin inside a sector are slow again (128x104 at 1280^3: 13.8 us where 128x128 takes 9.3)
        return () if p.b_rows % SECTOR == 0 else (whole,)
    return (whole, 0) if p.may_overlap and ceil(p.m / bm) * ceil(p.n / bn) * p.batch <= chip.sms else (whole,)


def _with_splits(chip: Chip, p: TileProblem, t: Tile) -> Iterator[Tile]:
    """The tile with each number of splits, way to end and number of stages that is possible."""
    room, stage = chip.shared - _BARRIER_BYTES, (t.bm + t.loaded) * t.bk * p.bits // 8
    out = t.bm * t.bn * p.out_bits // 8
    narrow = not p.b_k and t.bn * p.bits > 1024 and t.bn * p.bits % 1024
    most = {"wgmma": 8, "mma": 4, "cpu": 1}[chip.kind]
    slow = t.bk * p.bits < 1024 and p.batch * p.m * p.n * p.out_bits / 8 > chip.cache  # memory limits stores
    ahead = min(most, _TILES_AHEAD * ceil(p.k / t.bk)) if slow else most
    for splits in _splits(chip, p, t.bm, t.bn, t.bk):
        blocks = ceil(p.m / t.bm) * ceil(p.n / t.bn) * p.batch * splits
        waves, filled = (_FEW_WAVES, _FILLED) if splits == 1 else (1, _FILLED_SPLIT)
        full = filled * chip.sms <= blocks <= waves * chip.sms
        if (narrow or p.staged or t.bn % 16 and t.bn > 8) and not full or t.wide and blocks > chip.sms and t.bn % 16:
            continue
        may_overlap = blocks <= chip.sms and not t.from_registers and _may_overlap(p, t.bm, t.bn, t.bk * splits)
        # Partial sums are stored as tiles compute them, so overlapping tiles need no shared memory for that.
        for overlapping in (False, True) if may_overlap and splits == 1 else (may_overlap,):
            staged = splits == 1 and (p.staged or overlapping)
            whole = staged and (overlapping or p.out_bits != 16)  # otherwise only some of its boxes are staged at a time
            left = room - (out if whole else min(_OUTPUT_STAGING, out) if chip.kind == "wgmma" else 0)
            stages = min(left // stage, most, ceil(p.k / t.bk) + 1)
            if chip.kind == "wgmma" and blocks <= chip.sms and not (
                    whole or p.open_rows or p.a_rows % SECTOR or p.b_rows % SECTOR):  # results are staged where operands were
                stages = max(stages, min(room // stage, _ENOUGH, ceil(p.k / t.bk) + 1))
            if chip.kind == "wgmma" and blocks > chip.sms:  # the next tiles' stages too, beside a tile that is being stored
                stages = max(stages, min((room - out) // stage, ahead))
            if stages > (chip.kind != "cpu"):
                yield replace(t, stages=stages, splits=splits, overlapping=overlapping, staged=staged)


def shared_bytes(p: TileProblem, t: Tile) -> int:
    """Shared memory of the stages of a tile, in bytes."""
    return t.stages * (t.bm + t.loaded) * t.bk * p.bits // 8


def column_chunks(t: Tile) -> int:
    """The number of column chunks of a tile with which one chunk's accumulator fits beside the second one; 0 for none.

    See transform/layout/split_accumulators.py.
    """
    most, sums = _ACCUMULATORS[t.threads // 128], t.bm * t.bn // t.threads
    return next((s for s in range(1, max(1, t.bn // 64) + 1) if t.bn % s == 0 and t.bn // s % 8 == 0 and
                 sums + sums // s <= most), 0)


def side_by_side(chip: Chip, p: TileProblem, bm: int, bn: int, splits: int) -> str:
    """The operand whose tiles neighbouring blocks both load, "a" or "b"; "" where both are."""
    one_wave = ceil(p.m / bm) * ceil(p.n / bn) * p.batch * splits <= chip.sms
    return "" if not one_wave else "a" if p.m >= _FAR_LARGER * p.n else "b" if p.n >= _FAR_LARGER * p.m else ""


def _warp_group_tiles(chip: Chip, p: TileProblem) -> Iterator[tuple[int, int, int, int]]:
    """The tuples (bm, bn, bk, threads) of _GROUPS. Accumulators leave registers for addresses and the epilogue.

    Columns go in steps of 8. Steps of a whole box, where that is wider, are used only for tiles in few waves that fill the
    machine. wgmma has no odd multiples of 8 columns for 8-bit types. Where k is outermost in both operands, a stage has as many
    rows of 16 as divide k best (1608x800x144 TN, 123 of them, by 128x256 in steps of 64 150 us, of 48 133).
    """
    row = 1024 // p.bits  # columns of k in 128 bytes
    fitted = row if p.a_k or p.b_k else ceil(p.k / ceil(p.k / row) / 16) * 16
    for rows, groups, most in _GROUPS:
        threads = 128 * groups
        for bn in range(8 if p.n <= 8 and p.kind == "half" and p.may_overlap else 16, 257, 16 if p.kind == "int8" else 8):
            narrow = not p.b_k and bn * p.bits > 1024 and bn * p.bits % 1024
            if (bn % 16 and bn > 8 or narrow or p.staged) and not (p.may_overlap and _fills(chip, p, rows, bn)):
                continue
            if column_chunks(Tile(rows, bn, 0, 0, threads)) if p.two_level else rows * bn // threads <= most:
                yield rows, bn, fitted, threads
                if not p.two_level:
                    yield rows, bn, 2 * row, threads


def _fills(chip: Chip, p: TileProblem, bm: int, bn: int) -> bool:
    """Whether the tiles, with or without split-K, are nearly as many as the SMs, or fill a few waves of them."""
    tiles = ceil(p.m / bm) * ceil(p.n / bn) * p.batch
    if tiles > chip.sms:
        waves = ceil(tiles / chip.sms)
        return waves <= _FEW_WAVES and p.m * p.n * p.batch >= _WELL * bm * bn * waves * chip.sms
    return tiles >= _FILLED * chip.sms or chip.sms // tiles * tiles >= _FILLED_SPLIT * chip.sms


def _splits(chip: Chip, p: TileProblem, bm: int, bn: int, bk: int) -> tuple[int, ...]:
    """The numbers of splits of k. More than one is tried where tiles leave SMs idle."""
    tiles = ceil(p.m / bm) * ceil(p.n / bn) * p.batch
    if not p.may_split or chip.kind == "cpu" or tiles * 3 > chip.sms * 2:
        return (1,)
    steps = ceil(p.k / bk)
    depths = {ceil(steps / x): x for x in range(min(16, steps // 4), 1, -1) if tiles * x <= chip.sms * 2}
    worth = sorted(depths.values())  # the fewest splits of equal depth
    return (1, *(x for x in worth if tiles * x * 2 >= chip.sms or x == worth[-1]))


def _may_overlap(p: TileProblem, bm: int, bn: int, deep: int) -> bool:
    """Whether the last tiles may overlap their neighbours. deep: columns of k per iteration; the loop must be long enough to
    gain."""
    ragged = p.m > bm and p.m % bm > 0 or p.n > bn and p.n % bn > 0
    return p.may_overlap and ragged and p.k >= _OVERLAP_STEPS * deep


def ordered(chip: Chip, p: TileProblem, t: Tile, spans: tuple[int, ...]) -> Tile:
    """The tile with its order of rasterisation. spans: the tiles of a cluster."""
    if chip.kind != "wgmma":
        return replace(t, panel_size=max(1, 2048 // t.bm))
    q = swapped(p) if t.swap_ab else p
    rows, columns, row = ceil(q.m / t.bm), ceil(q.n / t.bn), q.k * q.bits / 8
    beside, below = spans[:2]
    results, operands = q.m * q.n * q.out_bits / 8, (q.m + q.n) * q.k * q.bits / 8
    if results > max(_RESULTS * operands, chip.cache):
        return replace(t, panel_size=1)
    if beside * below == 1:
        size, order = tile_order((rows, columns, q.batch * t.splits), (t.bm * row, t.bn * row), chip.sms, chip.cache,
                                 either=not q.ragged)
        return replace(t, panel_size=size, order=order)
    # Tiles of a cluster are loaded once for all of their blocks.
    near = side_by_side(chip, q, t.bm, t.bn, t.splits)
    if rows * columns * q.batch * t.splits > chip.sms:
        size = below * rows_of_waves(ceil(rows / below), ceil(columns / beside), (below * t.bm, beside * t.bn),
                                     chip.sms // (beside * below))
    elif near:
        size = rows if near == "b" else 1
    else:
        size = 1 if t.splits > 1 else rasterisation_rows(chip.sms, t.bm, t.bn)
    return replace(t, panel_size=size)
