"""What a tile's loads take: which blocks make clusters, at what rates boxes come from L2, what those at an edge add.

Cycles and bytes are those of one stage and one SM; rates were measured on an H200 (benchmarks/results/notes.md).
"""

from __future__ import annotations

from math import ceil, gcd, log2, prod

from tilelang.transform.schedule.cluster_pairs import (LARGER, LINE, SECTOR, Load, at_once, larger_in_one_wave, paired_cycles,
                                                       pairs, pays_for_many, pays_in_one_wave, saved_in_one_wave)

from .tile import Chip, Tile, TileProblem, swapped
from .tile_candidates import side_by_side

# Loads of one wave for each doubling of its iterations beyond 16: blocks drift, and less of what they load is the same.
_DRIFT, _DRIFT_ACROSS = 0.098, 0.076  # and where rows lie across sectors
_DRIFT_TOGETHER = 0.27  # of these, in clusters
# An operand whose k is outermost and whose rows are short lies in few lines, which all SMs that load a tile of it ask for at
# the same time.  Cycles more of 128 bytes of k for each of them, or cluster, where rows do not start at lines and have up to so
# many bytes, of longer ones less; power of what a box has of 128 bytes.  (104x3832x480 TT 4.5 us, 3.5 in clusters of 4 that
# load A once; 5632x8x728 TN 4.8, 3.85; 15704x8x736 TN by 16 columns alone 9.6, by 8 in pairs 7.3.)
_HOT, _HOT_ROW, _HOT_BOX = 5.0, 160, 0.3
# How much sooner what only one SM asks for is there, of rows across sectors where k is outermost and the other operand is
# not in few lines: 64x12776x1248 NN by 64x128 9.0 us, in clusters that share A 9.9; 14040x24x1152 TT by 128x24 7.7, 8.2.
_ONE_ASKS = 1.2
_CROWDED = 0.38  # power of the part of the SMs that load, by which each has less
_OWN = 64.3  # bytes a cycle from L2 of what one SM asks for, with all SMs loading; of s SMs s ** (1 / 3) as many
# From three waves on neighbours' loads are no longer the same at the same time.  Rows across sectors then: bytes a cycle of a
# SM without a cluster, what such rows count, and where k is outermost; of what arrives at an SM of a cluster and, one after
# the other, of what it takes of such rows.  Others in clusters: part of the time in one wave.
_LONG, _DRIFTED_FROM, _LONG_SECTORS, _LONG_OUTERMOST = 106.4, 3, 3.38, 1.34
_LONG_ARRIVING, _LONG_ASKED, _LONG_PAIRED = 64.4, 286.2, 0.7
# Of one wave: what counts of the time that an SM of a cluster would take alone for what it asks for itself, where rows lie
# across sectors, in two lines, elsewhere; behind it, bytes a cycle that arrive at it, its own and its neighbours', in such rows
# and elsewhere; power of what 128 bytes are of a box's row, by which narrow ones count more of these; of tiles of 256 rows.
_ASKED_ACROSS, _ASKED_ACROSS_OUTERMOST, _ASKED_MIDDLE, _ASKED_MIDDLE_OUTERMOST, _ASKED = 0.885, 0.774, 0.967, 0.897, 1.26
_ARRIVING_ACROSS, _ARRIVING, _NARROW_ARRIVING, _HIGH = 184.0, 171.0, 0.4, 1.12
# Bytes a cycle of the parts of boxes outside their tensor, which TMA fills with zeros: of one SM, of all together.
_OUTSIDE, _OUTSIDE_ALL = 31.2, 1550.0
_OUTSIDE_LONG = 22.7  # over several waves
_FEWER = 1.39  # of what a tile has less inside its tensor, what its loads take less
# What more the rows of boxes cost where k is outermost: of boxes of 64, 32, 16 bytes; of rows across sectors.
_NARROW, _OUTERMOST = {64: 1.28, 32: 1.87, 16: 3.4}, 1.19
# What 128 bytes of a row take of L2 that begin in the middle of a line, at another sector, and so where k is outermost.
_MIDDLE, _ACROSS, _ACROSS_OUTERMOST = 1.15, 1.47, 1.34
_OVERLAPPING = 1.05  # of overlapping tiles, where all rows start at lines
_TALL = 1.6  # of tiles of more than 256 rows, which are two boxes: measured, not understood


def _loads(p: TileProblem, t: Tile, spans: tuple[int, ...], rows: int, columns: int, form: bool = False) -> tuple[Load, Load]:
    """A stage's loads of so many rows of A and columns of B; the tiles of a row of a cluster load A once, of a column B.

    form: with what k outermost costs, which estimates have from _boxes and _lines.
    """
    row = t.bk * p.bits / 8
    return (Load(rows * row, p.a_rows, spans[0], p.a_k or not form), Load(columns * row, p.b_rows, spans[1], p.b_k or not form))


def clusters(chip: Chip, p: TileProblem, t: Tile, matrix: float) -> tuple[int, ...]:
    """Tiles of a cluster side by side and one below the other: those asked for, else as the compiler makes them
    (transform/schedule/cluster_pairs.py)."""
    if t.cluster:
        return (*t.cluster, 1)
    found: tuple[int, ...] = (1, 1, 1)
    if chip.kind != "wgmma":
        return found
    grid = ceil(p.n / t.bn), ceil(p.m / t.bm), p.batch * t.splits
    depth, one_wave = ceil(ceil(p.k / t.bk) / t.splits), prod(grid) <= chip.sms
    for spans, count in (((2, 1, 1), grid[0]), ((1, 2, 1), 1 if p.ragged else grid[1])):  # whose rows have no common B
        loads = _loads(p, t, spans, t.bm, t.loaded, True)
        if (pays_in_one_wave(loads, matrix, depth) if one_wave else pays_for_many(loads, matrix)) and (
                pairs(count, prod(grid) // count, chip.sms)) and (prod(found) == 1 or loads[1].cost > loads[0].cost):
            found = spans
    if not one_wave or p.open_rows or p.two_level:  # the compiler knows no grid, or not what an iteration takes
        return found

    def saved(spans: tuple[int, ...]) -> float:
        return saved_in_one_wave(_loads(p, t, spans, t.bm, t.loaded, True), matrix, depth, prod(spans))

    return larger_in_one_wave(grid, (True, True, False), saved, chip.sms, found)


def cluster_sizes(chip: Chip, p: TileProblem, t: Tile) -> list[tuple[int, int]]:
    """Clusters, side by side and one below the other, that a launch of one wave of these tiles may have."""
    q = swapped(p, t.staged) if t.swap_ab else p
    grid = ceil(q.n / t.bn), ceil(q.m / t.bm)
    # Where no rows lie across sectors small clusters lose what large ones gain: 64x128 takes 15.2 us at 1000x1000x4000 NT, 18.0
    # in pairs; 64x96 at 752x736x2928 NT 11.4, 11.0 in 2 x 2, 9.3 in 2 x 4.
    least = 1 if q.a_rows % SECTOR or q.b_rows % SECTOR else 8
    sizes = [x for x in ((2, 1), (1, 2), *LARGER) if prod(x) >= least]
    return [(x, y) for x, y in sizes if x <= grid[0] and y <= grid[1] and
            ceil(grid[0] / x) * x * ceil(grid[1] / y) * y * q.batch * t.splits <= at_once(chip.sms, x * y)]


def _boxes(p: TileProblem, k_inner: bool, extent: int, load: Load) -> float:
    """What more an operand's load costs because of the form of its boxes."""
    cost = _TALL if extent > 256 else 1.0
    if not k_inner:
        cost *= _NARROW.get(gcd(extent * p.bits // 8, 128), 1.0) * (_OUTERMOST if load.row % SECTOR else 1.0)
    return cost


def load_cycles(chip: Chip, p: TileProblem, t: Tile, spans: tuple[int, ...], busy: float) -> float:
    """Cycles until a stage is loaded: what many SMs ask for at the same time comes at the rate of L2, what one has for
    itself at less than half of it."""
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
    ask = max(1.0, columns / spans[0]), max(1.0, rows / spans[1])  # SMs or clusters that ask for a tile of A, of B
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
    loads = (_longer(loads[0], boxes[0]), _longer(loads[1], boxes[1]))
    if waves == 1:
        arriving = sum(x.size * _narrow_boxes(p, k, extent) for x, k, extent in zip(loads, inner, (t.bm, t.loaded)))
        return (asked + arriving / (_ARRIVING_ACROSS if across else _ARRIVING)) * (_HIGH if t.bm == 256 else 1.0)
    if across:
        return max(alone, sum(x.size for x in loads) / _LONG_ARRIVING +
                   sum(x.taken for x in loads if x.row % SECTOR) / _LONG_ASKED)
    return max(alone, paired_cycles(loads, 0, prod(spans)) * (1.0 if p.ragged else _LONG_PAIRED))


def _hot(p: TileProblem, t: Tile, n: int, extent: int, x: Load, sms: float) -> float:
    """Cycles of a stage more for an operand of n rows or columns, in tiles of `extent`, of which k is outermost, that so many
    SMs load at once."""
    if x.row % LINE == 0:
        return 0.0
    box = min(1.0, extent * p.bits / 8 / LINE)
    return _HOT * sms * t.bk * p.bits / 1024 * box**_HOT_BOX * min(1.0, 8 * _HOT_ROW / (n * p.bits))


def _requested_fraction(k_inner: bool, load: Load) -> float:
    """What counts of the time of a load that an SM of a cluster asks for."""
    if load.row % SECTOR:
        return _ASKED_ACROSS if k_inner else _ASKED_ACROSS_OUTERMOST
    if load.row % LINE:
        return _ASKED_MIDDLE if k_inner else _ASKED_MIDDLE_OUTERMOST
    return _ASKED


def _narrow_boxes(p: TileProblem, k_inner: bool, extent: int) -> float:
    """What more the boxes of an operand count that arrive at an SM of a cluster: narrow ones are many."""
    return 1.0 if k_inner else (LINE / gcd(extent * p.bits // 8, LINE)) ** _NARROW_ARRIVING


def _placed(p: TileProblem, t: Tile, loads: tuple[Load, Load]) -> tuple[Load, Load]:
    """The loads, where k is outermost with what tiles make of their rows, which begin where tiles do."""
    a, b = (x.row if inner or count <= 1 else gcd(x.row, extent * p.bits // 8) for x, inner, count, extent in zip(
        loads, (p.a_k, p.b_k), (p.m / t.bm, p.n / t.bn), (t.bm, t.bn)))
    return Load(loads[0].size, a, loads[0].saved, loads[0].inner), Load(loads[1].size, b, loads[1].saved, loads[1].inner)


def _longer(x: Load, by: float) -> Load:
    """A load of boxes that take so much longer."""
    return Load(x.size * by, x.row, x.saved, x.inner)


def _lines(k_inner: bool, load: Load) -> float:
    """What more of L2 rows take that lie in two lines; those across sectors: Load.cost."""
    if load.row % LINE == 0 or load.row % SECTOR:
        return 1.0
    return _ACROSS_OUTERMOST if not k_inner else _ACROSS if load.row % (LINE // 2) else _MIDDLE


def outside_cycles(chip: Chip, p: TileProblem, t: Tile) -> tuple[int, float]:
    """(tiles that reach outside, cycles a stage that the zeros of the farthest of them take)."""
    rows, columns = ceil(p.m / t.bm), ceil(p.n / t.bn)
    below, beside = (0 if t.overlapping and n > 1 else n * x - of for n, x, of in ((rows, t.bm, p.m), (columns, t.bn, p.n)))
    beside += t.loaded - t.bn
    if chip.kind != "wgmma" or not (below or beside):
        return 0, 0.0
    tiles = (rows * columns - (rows - (below > 0)) * (columns - (beside > 0))) * p.batch * t.splits
    several = rows * columns * p.batch * t.splits > chip.sms
    rate = min(_OUTSIDE_LONG if several else _OUTSIDE, _OUTSIDE_ALL / min(tiles, chip.sms))
    return tiles, max(below, beside) * t.bk * p.bits / 8 / rate


def inside(p: TileProblem, t: Tile) -> float:
    """Of a whole tile's load, what that of the farthest one takes, which lies in part outside."""
    if t.overlapping:
        return 1.0
    return max(0.0, 1 - _FEWER * max(-p.m % t.bm, -p.n % t.bn) / (t.bm + t.bn))


__all__ = ["cluster_sizes", "clusters", "inside", "load_cycles", "outside_cycles"]
