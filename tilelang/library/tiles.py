"""Tile shapes of matrix products from a cost model: what the matrix unit, the caches and the memory take, in cycles.

    time = rounds of tiles * (main loop + what is not hidden) + start + reduction of split sums
    main loop = max(matrix instructions, tile bytes / rate from L2, promotion of partial sums), and the whole at least
                the bytes moved / rate from memory

All candidates of a machine are priced and the cheapest is taken; nothing is looked up by shape.  Rates are those of
one processor (SM) in its clock cycles, measured on an H200 (wgmma), by the data sheet for sm_80 and others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, gcd, log2, prod

from tilelang.transform.pairing import (LINE, SECTOR, Load, at_once, larger_in_one_round, paired_cycles, pairs, pays_for_many,
                                        pays_in_one_round, saved_in_one_round)

from .tile_facts import Chip, Problem, Tile, chip_of, turned, without_wgmma
from .tile_shapes import by_rows, candidates, column_parts, shared_bytes, side_by_side

_ISSUE = {1: 1.275, 2: 1.255, 3: 1.28}  # by warp groups that compute: cycles for one of the matrix unit
# Cycles of an iteration over 128 bytes of k, however narrow its tile: 64 rows by 16, 24, 32 columns take 173 to 185.
_LEAST = 170.0
_NORM = 12  # of loads and products that take about as long: one waits now and then for the other
_BOTH = 5  # of a tile's own work and memory
# Loads of one round for each doubling of its iterations beyond 16: blocks drift apart, and less of what they load is the same.
_DRIFT, _DRIFT_ACROSS = 0.07, 0.02  # and where rows lie across sectors
# From three rounds on neighbours' loads are no longer the same at the same time: bytes a cycle from L2 that a unit gets, and
# part of the time that pairs of units take in one round (192x96, 256x96, 128x128 at 4608x4608x2048: 45 alone, 54 in pairs).
_LONG, _APART_FROM, _LONG_PAIRED = 51.0, 3, 0.82
_LONG_LINES, _LONG_SECTORS = 1.1, 1.5  # of rows across lines, across sectors
_WAITING = 28.0  # cycles for 128 bytes of k, where a stage is free only when all blocks of a cluster have used it
_CROWDED = 0.25  # power of the part of the units that load, by which each has less
_OWN = 60.0  # bytes a cycle from L2 of what one unit asks for, with all units loading; of s units s ** (1 / 3) as many
# Bytes a cycle of the parts of boxes outside their tensor, which TMA fills with zeros: of one unit, of all together.
_OUTSIDE, _OUTSIDE_ALL = 27.5, 1550.0
_OUTSIDE_LONG, _FELT_LONG = 25.0, 0.3  # over several rounds; what is felt of them in four rounds and more
# What more the rows of boxes cost where k is outermost: of panels of 64, 32, 16 bytes; of rows across sectors.
_NARROW, _OUTERMOST = {64: 1.53, 32: 2.25, 16: 3.5}, 1.13
# What 128 bytes of a row take of L2 that begin in the middle of a line, at another sector, and so where k is outermost.
_MIDDLE, _ACROSS, _ACROSS_OUTERMOST = 1.2, 1.48, 1.6
_TALL = 1.6  # of tiles of more than 256 rows, which are two boxes: measured, not understood
_SHARED_ROWS = 1.14, 1.02  # what neighbours share takes longer from memory: 128 bytes of a row a stage, 256 of them
# Cycles more of clusters of 4 and 8 than of two: 128x72 tiles at 1000 cubed take 7.8 us in clusters of 2 x 2, 7.3 of
# 2 x 4.  Where neighbours share the larger operand: 192x104 at 10000x200x1000 take 10.9 in 2 x 1, 11.1 in 2 x 2 and 2 x 4.
_TOGETHER, _TOGETHER_NEAR = 400, 300
# Cycles more for an element of a tile that leaves: through shared memory, in whole vectors or not; of a turned one, by
# stmatrix and without; of sums whose tiles are turned or moved; in rows that TMA cannot store.
_STAGED, _STAGED_APART, _BY_MATRICES, _TURNED, _SUMS, _APART = 0.03, 0.2, 0.02, 0.28, 0.05, 0.12
# Cycles of each round but the last, part of a tile's stores that a round adds, what they cost in rows across sectors.
_ROUND, _STORED, _STORED_ACROSS = 800, 0.65, 1.6
# Of what a tile costs beside its loop, where one group computes 64 rows, 128: what each round but the first adds.
_LONE, _LONE_TALL = 0.5, 0.75
_MOVED = 1.06  # loads of tiles that are moved
_TURNED_LONG = 1.02  # turned tiles in several rounds (22 of them at 17 shapes; not understood)
_ALIKE, _ALIKE_ONCE = 1.01, 1.005  # prices that are not told apart; of one round
# Iterations over 128 bytes of k of a unit's tiles, of one, up to which it may start soon; where rows lie across sectors, on
# so many of the units (79 tiles of 128x208 at 10000x200x1000 13.9 us, then 16.4; 120 of 128x72 at 1000x1048x328 5.1, 4.4).
_SOON, _SOON_ONCE, _NEARLY = 16, 40, 0.85
_WARM, _KEPT = 1.78, 0.7  # how much faster what L2 keeps is there again, up to what part of it


def matrix_cycles(chip: Chip, p: Problem, bm: int, bn: int) -> float:
    """Cycles of a unit's matrix instructions for 32 bytes of k of a tile.

    wgmma with both operands in shared memory: max(N/2, 16 + N/4) for 64 rows, whatever the type.
    """
    if chip.kind == "wgmma":
        return bm / 64 * max(bn / 2, 16 + bn / 4)
    rate = chip.flops * {"half": 1.0, "tf32": 0.5, "fp8": 1.0, "int8": 2.0, "float": 0.0625}[p.kind]
    small = 1 + 8 / bm + 8 / bn  # fragments are fetched once for fewer products
    return 2 * bm * bn * (256 / p.bits) / rate * small


def price(chip: Chip, p: Problem, t: Tile) -> float:
    """Seconds the model expects of a tile."""
    return _price(chip, p, t)[0]


def _price(chip: Chip, p: Problem, t: Tile, across: bool = False) -> tuple[float, float]:
    """(seconds, seconds if memory were free).  across: the tile is turned, which p and t no longer say."""
    if t.turned:
        found = _price(chip, turned(p, t.staged), replace(t, turned=False), True)
        return found if chip.kind != "wgmma" or _once(chip, p, t) else (found[0] * _TURNED_LONG, found[1] * _TURNED_LONG)
    size = p.bits / 8
    rows, columns = ceil(p.m / t.bm), ceil(p.n / t.bn)
    depth = ceil(ceil(p.k / t.bk) / t.parts)  # stages of a block
    tiles = rows * columns * p.batch * t.parts
    resident = _resident(chip, p, t)
    rounds = ceil(tiles / chip.units)  # of a unit, one after another or side by side
    busy = min(1.0, tiles / chip.units)
    matrix = t.bk * size / 32 * matrix_cycles(chip, p, t.bm, t.bn)
    spans = _clusters(chip, p, t, matrix)
    if prod(spans) > 1:  # the last ones may lack a tile
        padded = ceil(columns / spans[0]) * spans[0] * ceil(rows / spans[1]) * spans[1] * p.batch * t.parts
        rounds = ceil(padded / (chip.units if rounds == 1 else at_once(chip.units, prod(spans))))
    load = _load(chip, p, t, spans, busy)
    matrix *= _issue(chip, t, (t.bm + t.loaded) * t.bk * size / matrix)
    matrix += _WAITING * t.bk * size / 128 if prod(spans) > 1 else 0.0
    if chip.kind == "wgmma":  # L2 as well is slower when power limits
        power = (0.1 if rounds == 1 else 0.2) if p.a_rows % SECTOR or p.b_rows % SECTOR else 0.08
        load *= 1 + power * _long(rounds * depth * max(matrix, load) / chip.clock + chip.around)
    promoted = p.two_level and chip.kind == "wgmma"
    stage = _stage(chip, t, rounds, matrix, 0.0 if promoted else load, t.bk * size)
    if promoted:  # loads run on under the sums
        stage = max(load, _promoted(chip, p, t, stage))
    edges, zeros = _at_edges(chip, p, t, spans)
    # One of a block's tiles lies at an edge, unless all do; where there are many, it is felt less.
    felt = 0.0 if not edges else 1.0 if edges == tiles else 1 / rounds
    felt = _FELT_LONG * max(felt, edges / tiles) if rounds >= 4 and edges != tiles else felt
    late = felt * max(0.0, load * _inside(p, t) + zeros - stage)
    out_bytes = 4 if t.parts > 1 else p.out_bits / 8
    leaving = t.bm * t.bn * _leaving(chip, p, t, across, out_bytes)
    stores = t.bm * t.bn * out_bytes / chip.store * _stored(chip, p, t, across, out_bytes)
    outside = 1665 + stores * busy + leaving
    if chip.kind != "cpu":
        ring = t.stages if chip.kind != "wgmma" or depth >= t.stages else 4
        stage *= {1: 2.0, 2: 1.68 if chip.kind == "wgmma" else 1.15, 3: 1.05}.get(ring, 1.0)  # a late load is felt sooner
    if chip.kind == "mma" and resident == 1:  # nothing runs while its warps wait for each other
        stage *= 1.12
    if chip.kind == "wgmma" and t.threads > 128:  # the loads of the next tile and one group's products hide the rest
        outside += (rounds - 1) * (_ROUND + _STORED * stores + leaving)
    elif chip.kind == "wgmma":
        outside *= 1 + (rounds - 1) * (_LONE if t.bm == 64 else _LONE_TALL)
    else:
        outside *= ceil(rounds / resident)
    cycles = rounds * depth * (stage + late) + outside
    if prod(spans) > 2:
        cycles += _TOGETHER_NEAR if side_by_side(chip, p, t.bm, t.bn, t.parts) else _TOGETHER
    if chip.kind == "wgmma":  # where power limits, units that are done early leave theirs to the others
        idle = (1 - tiles / chip.units / rounds) * depth * stage * rounds
        cycles -= 0.5 * _long(cycles / chip.clock + chip.around) * idle
    own, moved, more = _seconds(chip, cycles), _memory(chip, p, t), chip.start
    near = side_by_side(chip, p, t.bm, t.bn, t.parts) if moved > chip.cache else ""
    moved /= chip.memory * (_WARM if chip.kind == "wgmma" and moved < _KEPT * chip.cache else 1.0)
    if near and (columns if near == "a" else rows) > 1:
        moved *= _SHARED_ROWS[t.bk * size > 128]
    if t.parts > 1:
        more += chip.start + p.batch * p.m * p.n * (4 * t.parts + p.out_bits / 8) / (1.5 * chip.memory)
    if chip.kind != "wgmma":
        return max(own, moved) + more, own + more
    return (own**_BOTH + moved**_BOTH) ** (1 / _BOTH) + more, own + more


def _stage(chip: Chip, t: Tile, rounds: int, matrix: float, load: float, depth: float) -> float:
    """Cycles of a stage of so many bytes of k."""
    if chip.kind != "wgmma":
        return max(matrix, load)
    least = _LEAST * depth / 128
    if rounds > 1:
        return max(matrix, load, least)
    return float((matrix**_NORM + load**_NORM + least**_NORM) ** (1 / _NORM))


def _leaving(chip: Chip, p: Problem, t: Tile, across: bool, out_bytes: float) -> float:
    """Cycles that an element of a tile takes to leave, beyond its bytes.  across: see _price."""
    if chip.kind != "wgmma":
        return _STAGED if t.staged or p.staged else 0.0
    whole, halves = (p.m if across else p.n) * out_bytes % 16 == 0, p.out_bits == 16
    if t.parts > 1:
        return _SUMS if across or t.moved else 0.0 if whole else _APART
    if t.moved or across and p.staged and not halves:
        return _STAGED if whole else _STAGED_APART
    if across:
        return (_BY_MATRICES if whole else _APART) if halves else _TURNED
    return 0.0 if whole else _APART


def _stored(chip: Chip, p: Problem, t: Tile, across: bool, out_bytes: float) -> float:
    """What more a tile's stores cost whose rows do not start at multiples of a sector."""
    apart = chip.kind == "wgmma" and (p.m if across else p.n) * out_bytes % SECTOR
    direct = t.staged or t.parts == 1 and (p.staged or (not across or p.out_bits == 16) and (
        p.m if across else p.n) * out_bytes % 16 == 0)
    return _STORED_ACROSS if apart and direct else 1.0


def _promoted(chip: Chip, p: Problem, t: Tile, stage: float) -> float:
    """Cycles of a stage whose sums are added to totals.

    Whole parts: 1.5 cycles an accumulator to add, 280 to wait and start again: half of it under the products of other
    groups, and again half where a second part runs meanwhile.  Parts of the columns in turn: 1.2 cycles and 170, what
    is longer than the other groups' products shows; A is read again for each of them, and shared memory moves 128 bytes a
    cycle for instructions and loads together.
    """
    groups, pieces = t.threads // 128, column_parts(t)
    sums = t.bm * t.bn / t.threads
    if pieces == 1:
        return stage + (1.5 * sums + 280) / (4 if 3 * sums + 32 <= {1: 255, 2: 240}.get(groups, 160) else 2)
    n, steps = t.bn / pieces, t.bk * p.bits / 256
    one = t.bm / groups / 64 * steps * max(n / 2, 16 + n / 4)
    read = t.bm / 64 * steps * pieces * (2048 + 32 * n)
    moved = (read + (t.bm + t.bn) * t.bk * p.bits / 8) / 128
    return max(stage, moved * _ISSUE[groups]) + pieces * max(0.0, 1.2 * sums / pieces + 170 - (groups - 1) * one)


def _issue(chip: Chip, t: Tile, traffic: float) -> float:
    """Cycles of a main loop for one of its matrix instructions, with all loads in time: measured on an H200.

    traffic: bytes of tiles for a cycle of them; 128 x 256 has 48.
    """
    if chip.kind != "wgmma":
        return 1.0
    return _ISSUE[t.threads // 128] * (1 + 0.065 * max(0.0, traffic / 48 - 1))


def _seconds(chip: Chip, cycles: float) -> float:
    """Kernels that run long are slowed down by the power limit: to 0.94 of the clock from 100 us on."""
    seconds = cycles / chip.clock
    return seconds * (1 + 0.065 * _long(seconds + chip.around))


def _long(seconds: float) -> float:
    """How much of a kernel's time is spent at the power limit: from 40 us on, all that counts from 100 us on."""
    return min(1.0, max(0.0, (seconds - 4e-5) / 6e-5))


def _loads(p: Problem, t: Tile, spans: tuple[int, ...], rows: int, columns: int, form: bool = False) -> tuple[Load, Load]:
    """A stage's loads of so many rows of A and columns of B; the tiles of a row of a cluster load A once, of a column B.

    form: with what k outermost costs, which prices have from _boxes and _lines.
    """
    row = t.bk * p.bits / 8
    return (Load(rows * row, p.a_rows, spans[0], p.a_k or not form), Load(columns * row, p.b_rows, spans[1], p.b_k or not form))


def _clusters(chip: Chip, p: Problem, t: Tile, matrix: float) -> tuple[int, ...]:
    """Tiles of a cluster side by side and one below the other, as the compiler makes them (transform/pairing.py)."""
    found: tuple[int, ...] = (1, 1, 1)
    if chip.kind != "wgmma":
        return found
    grid = ceil(p.n / t.bn), ceil(p.m / t.bm), p.batch * t.parts
    depth, one_round = ceil(ceil(p.k / t.bk) / t.parts), prod(grid) <= chip.units
    for spans, count in (((2, 1, 1), grid[0]), ((1, 2, 1), grid[1])):
        loads = _loads(p, t, spans, t.bm, t.loaded, True)
        if (pays_in_one_round(loads, matrix, depth) if one_round else pays_for_many(loads, matrix)) and (
                pairs(count, prod(grid) // count, chip.units)) and (prod(found) == 1 or loads[1].cost > loads[0].cost):
            found = spans
    if not one_round or p.open_rows or p.two_level:  # the compiler knows no grid, or not what an iteration takes
        return found

    def saved(spans: tuple[int, ...]) -> float:
        return saved_in_one_round(_loads(p, t, spans, t.bm, t.loaded, True), matrix, depth, prod(spans))

    return larger_in_one_round(grid, (True, True, False), saved, chip.units, found)


def _boxes(p: Problem, k_inner: bool, extent: int, load: Load) -> float:
    """What more an operand's load costs because of the form of its boxes."""
    cost = _TALL if extent > 256 else 1.0
    if not k_inner:
        cost *= _NARROW.get(gcd(extent * p.bits // 8, 128), 1.0) * (_OUTERMOST if load.row % SECTOR else 1.0)
    return cost


def _load(chip: Chip, p: Problem, t: Tile, spans: tuple[int, ...], busy: float) -> float:
    """Cycles until a stage is loaded: what many units ask for at the same time comes at the rate of L2, what one has for
    itself at less than half of it."""
    loads = _loads(p, t, spans, min(t.bm, p.m), min(t.loaded, p.n))
    a, b = (x.taken for x in loads)
    a *= _boxes(p, p.a_k, t.bm, loads[0])
    b *= _boxes(p, p.b_k, t.loaded, loads[1])
    rate = min(chip.alone, chip.l2 / busy ** (_CROWDED if chip.kind == "wgmma" else 1)) / (_MOVED if t.moved else 1)
    if chip.kind != "wgmma":
        return (a + b) / rate
    a, b = a * _lines(p.a_k, loads[0]), b * _lines(p.b_k, loads[1])
    columns, rows, drift = ceil(p.n / t.bn), ceil(p.m / t.bm), 1.0
    if columns * rows * p.batch * t.parts <= chip.units:
        across = p.a_rows % SECTOR or p.b_rows % SECTOR
        drift += (_DRIFT_ACROSS if across else _DRIFT) * log2(max(1.0, p.k / t.parts * p.bits / 16384))
        rate /= drift
    own, near = _OWN / busy**0.5 / drift, side_by_side(chip, p, t.bm, t.bn, t.parts)
    ask = max(1.0, columns / spans[0]), max(1.0, rows / spans[1])  # units or clusters that ask for a tile of A, of B
    alone = a / (rate if near == "a" and ask[0] > 1 else min(rate, own * ask[0] ** (1 / 3)))
    alone += b / (rate if near == "b" and ask[1] > 1 else min(rate, own * ask[1] ** (1 / 3)))
    rounds = ceil(columns * rows * p.batch * t.parts / chip.units)
    if prod(spans) == 1:
        return alone if rounds < _APART_FROM else max(alone, sum(
            x.size * (_LONG_SECTORS if x.row % SECTOR else _LONG_LINES if x.row % LINE else 1.0) for x in loads) / _LONG)
    return max(alone, paired_cycles(loads, 0, prod(spans), rounds == 1) * (_LONG_PAIRED if rounds > 1 else 1.0))


def _lines(k_inner: bool, load: Load) -> float:
    """What more of L2 rows take that lie in two lines; those across sectors: Load.cost."""
    if load.row % LINE == 0 or load.row % SECTOR:
        return 1.0
    return _ACROSS_OUTERMOST if not k_inner else _ACROSS if load.row % (LINE // 2) else _MIDDLE


def _at_edges(chip: Chip, p: Problem, t: Tile, spans: tuple[int, ...]) -> tuple[int, float]:
    """(tiles that reach outside, cycles a stage that the zeros of the farthest of them take)."""
    rows, columns = ceil(p.m / t.bm), ceil(p.n / t.bn)
    below, beside = (0 if t.moved and n > 1 else n * x - of for n, x, of in ((rows, t.bm, p.m), (columns, t.bn, p.n)))
    beside += t.loaded - t.bn
    if chip.kind != "wgmma" or not (below or beside):
        return 0, 0.0
    tiles = (rows * columns - (rows - (below > 0)) * (columns - (beside > 0))) * p.batch * t.parts
    several = rows * columns * p.batch * t.parts > chip.units
    rate = min(_OUTSIDE_LONG if several else _OUTSIDE, _OUTSIDE_ALL / min(tiles, chip.units))
    return tiles, max(below / spans[0] ** 0.5, beside / spans[1] ** 0.5) * t.bk * p.bits / 8 / rate


def _inside(p: Problem, t: Tile) -> float:
    """What the farthest tile has inside, of a whole one's rows and columns."""
    if t.moved:
        return 1.0
    return 1 - max(-p.m % t.bm, -p.n % t.bn) / (t.bm + t.bn)


def _resident(chip: Chip, p: Problem, t: Tile) -> int:
    """Blocks a unit holds at a time."""
    if chip.kind != "mma":
        return 1
    registers = min(255, t.bm * t.bn // t.threads + 76)  # accumulators, fragments of the operands, addresses
    return max(1, min(65536 // (registers * t.threads), chip.shared_unit // (shared_bytes(p, t) + 1024)))


def _memory(chip: Chip, p: Problem, t: Tile) -> float:
    """Bytes from and to memory: operands once where L2 holds a wave's share of them, else once a wave."""
    size, out = p.bits / 8, p.batch * p.m * p.n * p.out_bits / 8
    once = p.batch * (p.m + p.n) * p.k * size
    rows, columns = ceil(p.m / t.bm), ceil(p.n / t.bn)
    waves = ceil(rows * columns * p.batch / chip.units)
    high = min(rows, t.panel)
    wide = min(columns, ceil(chip.units / high))
    wave = (high * t.bm + wide * t.bn) * p.k * size
    return out + (once if once < chip.cache / 2 else max(once, waves * min(wave, once)))


def _once(chip: Chip, p: Problem, t: Tile) -> bool:
    """Whether there is a unit for each tile."""
    down, across = (p.n, p.m) if t.turned else (p.m, p.n)
    return chip.kind == "wgmma" and ceil(down / t.bm) * ceil(across / t.bn) * p.batch * t.parts <= chip.units


def finished(chip: Chip, p: Problem, t: Tile) -> Tile:
    """The tile with what its size and place decide: the order in which blocks take them, whether they are set up soon."""
    t = by_rows(chip, p, t)
    return replace(t, soon=starts_soon(chip, p, t))


def starts_soon(chip: Chip, p: Problem, t: Tile) -> bool:
    """Whether a launch gains by being set up while the one before it ends, some 0.7 us of 2 to 15 (docs/performance.md).

    Blocks then begin in the order in which units become free: those that wait for their neighbours anyway, or have little to
    load, feel nothing of it; in long loops loads of neighbours come apart (128x4096x14336 by 64x64 34.7 us, then 41.4).
    """
    if chip.kind != "wgmma" or p.kind != "half" or p.two_level or p.open_rows:
        return False
    q = turned(p, t.staged) if t.turned else p
    steps = ceil(ceil(q.k / t.bk) / t.parts) * t.bk * q.bits / 1024
    if not _once(chip, p, t):
        return ceil(ceil(q.m / t.bm) * ceil(q.n / t.bn) * q.batch * t.parts / chip.units) * steps <= _SOON
    if prod(_clusters(chip, q, replace(t, turned=False), t.bk * q.bits / 256 * matrix_cycles(chip, q, t.bm, t.bn))) > 1:
        return True
    if q.a_rows % SECTOR or q.b_rows % SECTOR:
        return steps <= _SOON and ceil(q.m / t.bm) * ceil(q.n / t.bn) * q.batch * t.parts >= _NEARLY * chip.units
    return steps <= _SOON_ONCE


@lru_cache(maxsize=1024)
def choose_tile(chip: Chip, p: Problem) -> Tile:
    """Of the candidates within 1 % of the cheapest, half of that in one round, the one of the fewest parts, then the one that
    moves the fewest bytes a product; where memory is what limits, the one whose own work takes the least.  Of equals the
    one of shorter stages, then one that is moved, which loads no zeros, then the one of more warp groups (128x96 of two
    6.5 us, of one 6.7 at 495x2971x720).

    Raises ValueError where no tile fits (column_block).
    """
    priced = [(*_price(chip, p, t), t) for t in candidates(chip, p)]
    if not priced:
        raise ValueError(f"no tile of {chip.kind} suits {p}")
    best, own, cheapest = min(priced, key=lambda x: x[:2])
    parts = cheapest.parts
    memory = best > own * 2 ** (1 / _BOTH)  # is what takes longer
    near = [(t.parts, x if memory else (t.bm + t.bn) / (t.bm * t.bn), t.bk, not t.moved, -t.threads, seconds, k)
            for k, (seconds, x, t) in enumerate(priced)
            if seconds <= (_ALIKE_ONCE if t.parts == parts and _once(chip, p, t) else _ALIKE) * best]
    seconds, _, t = priced[min(near)[-1]]
    return replace(finished(chip, p, t), seconds=seconds)


__all__ = ["Chip", "Problem", "Tile", "candidates", "chip_of", "choose_tile", "column_parts", "finished", "matrix_cycles",
           "price", "shared_bytes", "starts_soon", "turned", "without_wgmma"]
