"""The cost of a tile's loads: which blocks form clusters, at what rates boxes arrive from L2, and what edge tiles add.

Cycles and bytes are those of one stage and one SM. Rates were measured on an H200 (benchmarks/results/notes.md). In the
comments, a row "across sectors" does not start at a multiple of 32 bytes, and "k is outermost" means that k is not the
contiguous dimension.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, gcd, log2, prod

from tilelang.transform.analysis.cluster_pairs import (LARGER, LINE, SECTOR, Load, at_once, gain_for_many, larger_in_one_wave,
                                                       paired_cycles, pays_for_many, pays_in_one_wave, saved_in_one_wave)

from .tile import Chip, Tile, TileProblem, swapped
from .tile_candidates import side_by_side

# Additional loads of one wave for each doubling of its iterations beyond 16: blocks drift apart from each other, and fewer of
# their loads coincide.
_DRIFT, _DRIFT_ACROSS = 0.098, 0.076  # second: where rows lie across sectors
_DRIFT_TOGETHER = 0.27  # the fraction of these in clusters
# An operand with k outermost and short rows lies in few cache lines, which all SMs that load a tile of it request at the same
# time. _HOT: additional cycles per 128 bytes of k for each such SM or cluster, where rows do not start at lines and have at
# most _HOT_ROW bytes; fewer for longer rows. _HOT_BOX: power of the fraction that a box has of 128 bytes. (104x3832x480 TT 4.5
# us, 3.5 in clusters of 4 that load A once; 5632x8x728 TN 4.8, 3.85; 15704x8x736 TN by 16 columns without clusters 9.6, by 8 in
# pairs 7.3.)
_HOT, _HOT_ROW, _HOT_BOX = 5.0, 160, 0.3
# The speed-up of data that only one SM requests, with rows across sectors where k is outermost and the other operand is not in
# few lines: 64x12776x1248 NN by 64x128 9.0 us, in clusters that share A 9.9; 14040x24x1152 TT by 128x24 7.7, 8.2.
_ONE_ASKS = 1.2
_CROWDED = 0.38  # power of the fraction of SMs that load, by which the rate of each falls
_OWN = 64.3  # bytes per cycle from L2 of data that one SM requests, all SMs loading; of s SMs s ** (1 / 3) times as many
# From _DRIFTED_FROM waves on, loads of neighbours no longer coincide. Rates for rows across sectors: bytes per cycle of an SM
# without a cluster (_LONG); the factor of such rows, and of those with k outermost; of an SM in a cluster, bytes per cycle that
# arrive at it and, in series, that it requests itself. _LONG_PAIRED: for other rows in clusters, the fraction of the time in
# one wave.
_LONG, _DRIFTED_FROM, _LONG_SECTORS, _LONG_OUTERMOST = 106.4, 3, 3.38, 1.34
_LONG_ARRIVING, _LONG_ASKED, _LONG_PAIRED = 64.4, 286.2, 0.85
# Rates within one wave. _ASKED...: the fraction of the time an SM alone would take for what an SM of a cluster requests itself,
# with rows across sectors, in two lines, and elsewhere. _ARRIVING...: bytes per cycle that arrive at it, from its own and its
# neighbours' requests. _NARROW_ARRIVING: power of the fraction that a box's row has of 128 bytes, which makes narrow boxes
# slower. _HIGH: for tiles of 256 rows.
_ASKED_ACROSS, _ASKED_ACROSS_OUTERMOST, _ASKED_MIDDLE, _ASKED_MIDDLE_OUTERMOST, _ASKED = 0.885, 0.774, 0.967, 0.897, 1.26
_ARRIVING_ACROSS, _ARRIVING, _NARROW_ARRIVING, _HIGH = 184.0, 171.0, 0.4, 1.12
# Bytes per cycle of the parts of boxes outside their tensor, which TMA fills with zeros: of one SM, of all SMs.
_OUTSIDE, _OUTSIDE_ALL = 31.2, 1550.0
_OUTSIDE_LONG = 22.7  # over several waves
# Waves whose tiles, all at edges, wait for those that reach farthest outside: 19x1304x912 NT, 154 of them, by 128x32 93 us in
# 13 waves, by 192x32 103 in 9; 15x1376x40 NN, 107 of them, by 128x16 4.8 us in 9, by 256x16 6.0 in 5.
_FELT_AFAR = 3
_FEWER = 1.39  # factor of the time that an edge tile's loads save for what lies outside its tensor
# Factors of the time of box rows where k is outermost: of boxes of 64, 32, 16 bytes; of rows across sectors.
_NARROW, _OUTERMOST = {64: 1.28, 32: 1.87, 16: 3.4}, 1.19
# Factors of the L2 time of 128 bytes of a row: begun in the middle of a line; at another sector; so with k outermost.
_MIDDLE, _ACROSS, _ACROSS_OUTERMOST = 1.15, 1.47, 1.34
_OVERLAPPING = 1.05  # for overlapping tiles where all rows start at lines
_TALL = 1.6  # for tiles of more than 256 rows, which are two boxes; measured, the cause is unknown


def _loads(p: TileProblem, t: Tile, spans: tuple[int, ...], rows: int, columns: int, form: bool = False) -> tuple[Load, Load]:
    """The loads of a stage: rows of A and columns of B. The tiles of a row of a cluster load A once, those of a column B.

    form: includes what k outermost costs, computed by _boxes and _lines.
    """
    row = t.bk * p.bits / 8
    return (Load(rows * row, p.a_rows, spans[0], p.a_k or not form), Load(columns * row, p.b_rows, spans[1], p.b_k or not form))


def clusters(chip: Chip, p: TileProblem, t: Tile, matrix: float) -> tuple[int, ...]:
    """The tiles of a cluster, (side by side, one below the other): as requested, or as the compiler chooses them.

    The compiler's rule is in transform/analysis/cluster_pairs.py.
    """
    if t.cluster:
        return (*t.cluster, 1)
    found: tuple[int, ...] = (1, 1, 1)
    if chip.kind != "wgmma":
        return found
    grid = ceil(p.n / t.bn), ceil(p.m / t.bm), p.batch * t.splits
    if p.ragged:
        grid = grid[0], p.launched_rows(t.bm), 1
    depth, one_wave = ceil(ceil(p.k / t.bk) / t.splits), prod(grid) <= chip.sms
    most, kinds = 0.0, (((2, 1, 1), grid[0]), ((1, 2, 1), grid[1]))
    for k, (spans, count) in enumerate(kinds[:1 if p.ragged else 2]):  # grouped rows have no common B
        loads = _loads(p, t, spans, t.bm, t.loaded, True)
        if one_wave:
            gain = loads[k].cost if count % 2 == 0 and pays_in_one_wave(loads, matrix, depth) else 0.0
        else:
            gain = gain_for_many(loads, count, prod(grid) // count, chip.sms, depth) if pays_for_many(loads, matrix) else 0.0
        if gain > most:
            found, most = spans, gain
    if not one_wave or p.open_rows or p.two_level:  # the compiler does not know the grid, or not the time of an iteration
        return found

    def saved(spans: tuple[int, ...]) -> float:
        return saved_in_one_wave(_loads(p, t, spans, t.bm, t.loaded, True), matrix, depth, prod(spans))

    return larger_in_one_wave(grid, (True, True, False), saved, chip.sms, found)


def cluster_sizes(chip: Chip, p: TileProblem, t: Tile) -> list[tuple[int, int]]:
    """The sizes of clusters, (side by side, one below the other), that a launch of one wave of these tiles may have."""
    q = swapped(p, t.staged) if t.swap_ab else p
    grid = ceil(q.n / t.bn), ceil(q.m / t.bm)
    # Without rows across sectors, small clusters lose what large ones gain: 64x128 takes 15.2 us at 1000x1000x4000 NT, 18.0 in
    # pairs; 64x96 at 752x736x2928 NT 11.4, 11.0 in 2 x 2, 9.3 in 2 x 4.
    least = 1 if q.a_rows % SECTOR or q.b_rows % SECTOR else 8
    sizes = [x for x in ((2, 1), (1, 2), *LARGER) if prod(x) >= least]
    return [(x, y) for x, y in sizes if x <= grid[0] and y <= grid[1] and
            ceil(grid[0] / x) * x * ceil(grid[1] / y) * y * q.batch * t.splits <= at_once(chip.sms, x * y)]


def _boxes(p: TileProblem, k_inner: bool, extent: int, load: Load) -> float:
    """The factor of an operand's load that the form of its boxes causes."""
    cost = _TALL if extent > 256 else 1.0
    if not k_inner:
        cost *= _NARROW.get(gcd(extent * p.bits // 8, 128), 1.0) * (_OUTERMOST if load.row % SECTOR else 1.0)
    return cost


def load_cycles(chip: Chip, p: TileProblem, t: Tile, spans: tuple[int, ...], busy: float) -> float:
    """Cycles until a stage is loaded.

    Data that many SMs request at the same time arrives at the rate of L2; data that one SM alone requests, at less than half of
    it.
    """
    loads = _placed(p, t, _loads(p, t, spans, min(t.bm, p.m), min(t.loaded, p.n)))
    boxes = _boxes(p, p.a_k, t.bm, loads[0]), _boxes(p, p.b_k, t.loaded, loads[1])
    a, b = (x.taken * more for x, more in zip(loads, boxes))
    rate = min(chip.alone, chip.l2 / busy ** (_CROWDED if chip.kind == "wgmma" else 1))
    if t.overlapping and not (loads[0].row % LINE or loads[1].row % LINE):
        rate /= _OVERLAPPING
    if chip.kind != "wgmma":
        return (a + b) / rate
    a, b = a * _lines(p.a_k, loads[0]), b * _lines(p.b_k, loads[1])
    columns, rows, drift, inner = ceil(p.n / t.bn), ceil(p.m / t.bm), 1.0, (p.a_k, p.b_k)
    waves = ceil(columns * rows * p.batch * t.splits / chip.sms)
    across = [x for x in loads if x.row % SECTOR]
    if waves == 1:
        drift += (_DRIFT_ACROSS if across else _DRIFT) * log2(max(1.0, p.k / t.splits * p.bits / 16384)) * (
            _DRIFT_TOGETHER if prod(spans) > 1 else 1.0)
        rate /= drift
    own, near = _OWN / busy**0.5 / drift, side_by_side(chip, p, t.bm, t.bn, t.splits)
    ask = max(1.0, columns / spans[0]), max(1.0, rows / spans[1])  # SMs or clusters that request a tile of A, of B
    each = (a / (rate * drift if near == "a" and ask[0] > 1 else min(rate, own * ask[0] ** (1 / 3))),
            b / (rate * drift if near == "b" and ask[1] > 1 else min(rate, own * ask[1] ** (1 / 3))))
    asked = sum(x * _requested_fraction(k, y) for x, k, y in zip(each, inner, loads))
    hot = sum(_hot(p, t, n, extent, x, min(sms, chip.sms) / span) for k, n, extent, x, sms, span in zip(
        inner, (p.m, p.n), (t.bm, t.loaded), loads, (columns, rows), spans) if not k)
    sooner = _ONE_ASKS if waves == 1 and t.splits == 1 and hot < 1 else 1.0
    alone = hot + sum(x / (sooner if n <= 1 and not k and y.row % SECTOR else 1.0)
                      for x, n, k, y in zip(each, ask, inner, loads))
    asked += hot
    if prod(spans) == 1:
        if waves < _DRIFTED_FROM or not across:
            return alone
        return max(alone, sum(x.size * (_LONG_SECTORS * (1 if k else _LONG_OUTERMOST) if x.row % SECTOR else 1.0)
                              for x, k in zip(loads, (p.a_k, p.b_k))) / _LONG)
    loads = replace(loads[0], size=loads[0].size * boxes[0]), replace(loads[1], size=loads[1].size * boxes[1])
    if waves == 1:
        arriving = sum(x.size * _narrow_boxes(p, k, extent) for x, k, extent in zip(loads, inner, (t.bm, t.loaded)))
        return (asked + arriving / (_ARRIVING_ACROSS if across else _ARRIVING)) * (_HIGH if t.bm == 256 else 1.0)
    if across:
        return max(alone, sum(x.size for x in loads) / _LONG_ARRIVING +
                   sum(x.taken for x in loads if x.row % SECTOR) / _LONG_ASKED)
    return max(alone, paired_cycles(loads, 0, prod(spans)) * (1.0 if p.ragged else _LONG_PAIRED))


def _hot(p: TileProblem, t: Tile, n: int, extent: int, x: Load, sms: float) -> float:
    """Additional cycles of a stage for an operand of n rows or columns, in tiles of `extent`, with k outermost, that many SMs
    load."""
    if x.row % LINE == 0:
        return 0.0
    box = min(1.0, extent * p.bits / 8 / LINE)
    return _HOT * sms * t.bk * p.bits / 1024 * box**_HOT_BOX * min(1.0, 8 * _HOT_ROW / (n * p.bits))


def _requested_fraction(k_inner: bool, load: Load) -> float:
    """The fraction of the time of a load that counts for the requests of an SM in a cluster."""
    if load.row % SECTOR:
        return _ASKED_ACROSS if k_inner else _ASKED_ACROSS_OUTERMOST
    if load.row % LINE:
        return _ASKED_MIDDLE if k_inner else _ASKED_MIDDLE_OUTERMOST
    return _ASKED


def _narrow_boxes(p: TileProblem, k_inner: bool, extent: int) -> float:
    """The factor for narrow boxes of an operand that arrive at an SM of a cluster."""
    return 1.0 if k_inner else (LINE / gcd(extent * p.bits // 8, LINE)) ** _NARROW_ARRIVING


def _placed(p: TileProblem, t: Tile, loads: tuple[Load, Load]) -> tuple[Load, Load]:
    """The loads where k is outermost, with the cost of rows that begin where tiles do."""
    a, b = (x if inner or count <= 1 else replace(x, row=gcd(x.row, extent * p.bits // 8)) for x, inner, count, extent in zip(
        loads, (p.a_k, p.b_k), (p.m / t.bm, p.n / t.bn), (t.bm, t.bn)))
    return a, b


def _lines(k_inner: bool, load: Load) -> float:
    """The factor of the L2 time of rows that lie in two lines. For rows across sectors see Load.cost."""
    if load.row % LINE == 0 or load.row % SECTOR:
        return 1.0
    return _ACROSS_OUTERMOST if not k_inner else _ACROSS if load.row % (LINE // 2) else _MIDDLE


def outside_cycles(chip: Chip, p: TileProblem, t: Tile) -> tuple[int, float]:
    """(number of tiles that reach outside, cycles per stage that the zeros of the farthest of them take).

    Where all tiles do, because they are one row or column, the farthest ones are felt in three waves.
    """
    rows, columns = ceil(p.m / t.bm), ceil(p.n / t.bn)
    below, beside = (0 if t.overlapping and n > 1 else n * x - of for n, x, of in ((rows, t.bm, p.m), (columns, t.bn, p.n)))
    beside += t.loaded - t.bn
    if chip.kind != "wgmma" or not (below or beside):
        return 0, 0.0
    tiles = (rows * columns - (rows - (below > 0)) * (columns - (beside > 0))) * p.batch * t.splits
    waves, most = rows * columns * p.batch * t.splits / chip.sms, max(below, beside)
    rate = min(_OUTSIDE_LONG if waves > 1 else _OUTSIDE, _OUTSIDE_ALL / min(tiles, chip.sms))
    if tiles == rows * columns * p.batch * t.splits:
        common = beside if columns == 1 else below
        most = common + (most - common) * min(1.0, _FELT_AFAR / waves)
    return tiles, most * t.bk * p.bits / 8 / rate


def inside(p: TileProblem, t: Tile) -> float:
    """The fraction of a whole tile's load that the farthest edge tile takes."""
    if t.overlapping:
        return 1.0
    return max(0.0, 1 - _FEWER * max(-p.m % t.bm, -p.n % t.bn) / (t.bm + t.bn))
