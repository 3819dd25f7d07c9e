"""Tile shapes of matrix products from a cost model: what the matrix unit, the caches and the memory take, in cycles.

    time = rounds of tiles * (main loop + what is not hidden) + start + reduction of split sums
    main loop = max(matrix instructions, tile bytes / rate from L2, promotion of partial sums), and the whole at least
                the bytes moved / rate from memory

All candidates of a machine are priced and the cheapest is taken; nothing is looked up by shape.  Rates are those of
one processor (SM) in its clock cycles, measured on an H200 (wgmma), by the data sheet for sm_80 and others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil, gcd, log2, prod

from tilelang.transform.deal_tiles import panel_rows
from tilelang.transform.pairing import (LINE, SECTOR, WAITING, Load, larger_in_one_round, paired_cycles, pays_for_many,
                                        pays_in_one_round, saved_in_one_round)

from .tile_facts import Chip, Problem, Tile, chip_of, turned, without_wgmma

_OUTPUT_STAGING = 32 * 1024  # shared bytes left to the copy of a tile out through shared memory
_BARRIER_BYTES = 1024
_ISSUE = {1: 1.28, 2: 1.25, 3: 1.29}  # by warp groups that compute: cycles for one of the matrix unit
# Cycles of an iteration over 128 bytes of k, however narrow its tile: 64 rows by 16, 24, 32 columns take 173 to 185.
_LEAST = 170.0
_NORM = 12  # of loads and products that take about as long: one waits now and then for the other
# Loads of one round for each doubling of its iterations beyond 16: blocks drift apart, and less of what they load is the same.
_DRIFT = 0.06
_CROWDED = 0.25  # power of the part of the units that load, by which each has less
_SUMS = {1: 168, 2: 192, 3: 128}  # registers of a thread for totals and sums of a part
_OWN = 60.0  # bytes a cycle from L2 of what one unit asks for, with all units loading; of s units s ** (1 / 3) as many
# Bytes a cycle of the parts of boxes outside their tensor, which TMA fills with zeros: of one unit, of all together.
_OUTSIDE, _OUTSIDE_ALL = 27.5, 1550.0
# What more the rows of boxes cost where k is outermost: of boxes narrower than 128 bytes, of rows across sectors.
_NARROW, _OUTERMOST = 2.4, 1.15
# What 128 bytes of a row take of L2 that begin in the middle of a line, at another sector, and so where k is outermost.
_MIDDLE, _ACROSS, _ACROSS_OUTERMOST = 1.15, 1.35, 1.55
_TALL = 1.6  # of tiles of more than 256 rows, which are two boxes: measured, not understood
_SHARED_ROWS = 1.14, 1.02  # what neighbours share takes longer from memory: 128 bytes of a row a stage, 256 of them
# Cycles more of clusters of 4 and 8 than of two: 128x72 tiles at 1000 cubed take 7.8 us in clusters of 2 x 2, 7.3 of
# 2 x 4.  Not where neighbours share the larger operand: 192x104 at 10000x200x1000 take 11.1 in 2 x 2, 11.0 in 2 x 4.
_TOGETHER = 2400
_FAR_LARGER = 8  # operand than the other: neighbours share its tiles
# Cycles more for an element of a tile that leaves: through shared memory, in whole vectors or not; of a turned one, and its
# sums; of moved sums; in rows that TMA cannot store.
_STAGED, _STAGED_APART, _TURNED, _TURNED_SUMS, _MOVED_SUMS, _APART = 0.06, 0.3, 0.28, 0.25, 0.54, 0.12
_MOVED, _MOVED_STEPS = 1.06, 12  # loads of tiles that are moved; iterations from which on that pays
_WARM, _KEPT = 1.78, 0.7  # how much faster what L2 keeps is there again, up to what part of it
_FILLED = 0.75  # of the units that tiles must have to do, for sizes that are tried only then
_FEW_ROWS = 128  # rows up to which turned tiles are thought of


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
        return _price(chip, turned(p, t.staged), replace(t, turned=False), True)
    size = p.bits / 8
    rows, columns = ceil(p.m / t.bm), ceil(p.n / t.bn)
    depth = ceil(ceil(p.k / t.bk) / t.parts)  # stages of a block
    tiles = rows * columns * p.batch * t.parts
    resident = _resident(chip, p, t)
    rounds = ceil(tiles / chip.units)  # of a unit, one after another or side by side
    busy = min(1.0, tiles / chip.units)
    matrix = t.bk * size / 32 * matrix_cycles(chip, p, t.bm, t.bn)
    spans = _clusters(chip, p, t, matrix)
    load = _load(chip, p, t, spans, busy)
    matrix *= WAITING if prod(spans) > 1 else 1.0
    matrix *= _issue(chip, t, (t.bm + t.loaded) * t.bk * size / matrix)
    if chip.kind == "wgmma":  # L2 as well is slower when power limits
        power = 0.2 if p.a_rows % SECTOR or p.b_rows % SECTOR else 0.08
        load *= 1 + power * _long(rounds * depth * max(matrix, load) / chip.clock + chip.around)
    stage = _stage(chip, t, rounds, matrix, load, t.bk * size)
    edges, zeros = _at_edges(chip, p, t)
    # One of a block's tiles lies at an edge, unless all do; where there are many, it is not felt.
    felt = 0.0 if not edges else 1.0 if edges == tiles else 1 / rounds if rounds < 4 else 0.0
    late = felt * max(0.0, load * _inside(p, t) + zeros - stage)
    if p.two_level and chip.kind == "wgmma":
        stage = _promoted(chip, p, t, stage)
    out_bytes = 4 if t.parts > 1 else p.out_bits / 8
    leaving = t.bm * t.bn * _leaving(chip, p, t, across, out_bytes)
    outside = 1750 + t.bm * t.bn * out_bytes / chip.store * busy + leaving
    if chip.kind != "cpu":
        stage *= {1: 2.0, 2: 1.68 if chip.kind == "wgmma" else 1.15, 3: 1.04}.get(t.stages, 1.0)  # a late load is felt sooner
    if chip.kind == "mma" and resident == 1:  # nothing runs while its warps wait for each other
        stage *= 1.12
    if chip.kind == "wgmma" and t.threads > 128:  # the loads of the next tile and one group's products hide the rest
        outside += (rounds - 1) * (1000 + leaving)
    else:
        outside *= ceil(rounds / resident)
    cycles = rounds * depth * (stage + late) + outside
    if prod(spans) > 2 and not _side_by_side(chip, p, t.bm, t.bn, t.parts):
        cycles += _TOGETHER
    if chip.kind == "wgmma":  # where power limits, units that are done early leave theirs to the others
        idle = (1 - tiles / chip.units / rounds) * depth * stage * rounds
        cycles -= 0.5 * _long(cycles / chip.clock + chip.around) * idle
    own, moved, more = _seconds(chip, cycles), _memory(chip, p, t), chip.start
    near = _side_by_side(chip, p, t.bm, t.bn, t.parts) if moved > chip.cache else ""
    moved /= chip.memory * (_WARM if chip.kind == "wgmma" and moved < _KEPT * chip.cache else 1.0)
    if near and (columns if near == "a" else rows) > 1:
        moved *= _SHARED_ROWS[t.bk * size > 128]
    if t.parts > 1:
        more += chip.start + p.batch * p.m * p.n * (4 * t.parts + p.out_bits / 8) / (1.5 * chip.memory)
    return max(own, moved) + more, own + more


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
    whole = (p.m if across else p.n) * out_bytes % 16 == 0
    if t.staged or p.staged:
        return _STAGED if whole or chip.kind != "wgmma" else _STAGED_APART
    if chip.kind != "wgmma":
        return 0.0
    if across:
        return _TURNED_SUMS if t.parts > 1 else _TURNED
    return _MOVED_SUMS if t.parts > 1 and t.moved else 0.0 if whole else _APART


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


def column_parts(t: Tile) -> int:
    """In how many parts of its columns a tile's product is computed so that the sums of one fit beside the totals; 0 for none
    (transform/split_products.py)."""
    most, sums = _SUMS[t.threads // 128], t.bm * t.bn // t.threads
    return next((s for s in range(1, max(1, t.bn // 64) + 1) if t.bn % s == 0 and t.bn // s % 8 == 0 and
                 sums + sums // s <= most), 0)


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


def _loads(p: Problem, t: Tile, spans: tuple[int, ...], rows: int, columns: int) -> tuple[Load, Load]:
    """A stage's loads of so many rows of A and columns of B; the tiles of a row of a cluster load A once, of a column B."""
    row = t.bk * p.bits / 8
    return Load(rows * row, p.a_rows, spans[0]), Load(columns * row, p.b_rows, spans[1])


def _clusters(chip: Chip, p: Problem, t: Tile, matrix: float) -> tuple[int, ...]:
    """Tiles of a cluster side by side and one below the other, as the compiler makes them (transform/pairing.py)."""
    found: tuple[int, ...] = (1, 1, 1)
    if chip.kind != "wgmma":
        return found
    grid = ceil(p.n / t.bn), ceil(p.m / t.bm), p.batch * t.parts
    depth, one_round = ceil(ceil(p.k / t.bk) / t.parts), prod(grid) <= chip.units
    for spans, count in (((2, 1, 1), grid[0]), ((1, 2, 1), grid[1])):
        loads = _loads(p, t, spans, t.bm, t.loaded)
        if count % 2 == 0 and (pays_in_one_round(loads, matrix, depth) if one_round else pays_for_many(loads, matrix)) and (
                prod(found) == 1 or loads[1].size > loads[0].size):
            found = spans
    if not one_round or p.open_rows or p.two_level:  # the compiler knows no grid, or not what an iteration takes
        return found

    def saved(spans: tuple[int, ...]) -> float:
        return saved_in_one_round(_loads(p, t, spans, t.bm, t.loaded), matrix, depth, prod(spans))

    return larger_in_one_round(grid, (True, True, False), saved, chip.units, found)


def _boxes(p: Problem, k_inner: bool, extent: int, load: Load) -> float:
    """What more an operand's load costs because of the form of its boxes."""
    cost = _TALL if extent > 256 else 1.0
    if not k_inner:
        cost *= (_NARROW if extent * p.bits < 1024 else 1.0) * (_OUTERMOST if load.row % SECTOR else 1.0)
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
    columns, rows = ceil(p.n / t.bn), ceil(p.m / t.bm)
    if columns * rows * p.batch * t.parts <= chip.units:
        rate /= 1 + _DRIFT * log2(max(1.0, p.k / t.parts * p.bits / 16384))
    own, near = _OWN / busy**0.5, _side_by_side(chip, p, t.bm, t.bn, t.parts)
    alone = a / (rate if near == "a" and columns > 1 else min(rate, own * columns ** (1 / 3)))
    alone += b / (rate if near == "b" and rows > 1 else min(rate, own * rows ** (1 / 3)))
    return alone if prod(spans) == 1 else max(alone, paired_cycles(loads, 0, prod(spans)))


def _lines(k_inner: bool, load: Load) -> float:
    """What more of L2 rows take that lie in two lines; those across sectors: Load.cost."""
    if load.row % LINE == 0 or load.row % SECTOR:
        return 1.0
    return _ACROSS_OUTERMOST if not k_inner else _ACROSS if load.row % (LINE // 2) else _MIDDLE


def _at_edges(chip: Chip, p: Problem, t: Tile) -> tuple[int, float]:
    """(tiles that reach outside, cycles a stage that the zeros of the farthest of them take)."""
    rows, columns = ceil(p.m / t.bm), ceil(p.n / t.bn)
    below, beside = (0 if t.moved and n > 1 else n * x - of for n, x, of in ((rows, t.bm, p.m), (columns, t.bn, p.n)))
    beside += t.loaded - t.bn
    if chip.kind != "wgmma" or not (below or beside):
        return 0, 0.0
    tiles = (rows * columns - (rows - (below > 0)) * (columns - (beside > 0))) * p.batch * t.parts
    rate = min(_OUTSIDE, _OUTSIDE_ALL / min(tiles, chip.units))
    return tiles, max(below, beside) * t.bk * p.bits / 8 / rate


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


def shared_bytes(p: Problem, t: Tile) -> int:
    """Shared memory of the stages of a tile."""
    return t.stages * (t.bm + t.loaded) * t.bk * p.bits // 8


def candidates(chip: Chip, p: Problem) -> Iterator[Tile]:
    """Tiles that the machine can hold, unpriced."""
    wgmma, few = chip.kind == "wgmma" and p.kind != "float", p.m <= _FEW_ROWS
    if wgmma and p.may_turn and few:  # first: of equals they are faster, by 3 %
        yield from (replace(t, turned=True) for t in candidates(chip, turned(p)))
    if wgmma:
        shapes = list(_warp_group_tiles(chip, p))
    elif chip.kind == "cpu":
        shapes = [(bm, bn, 1024 // p.bits if p.two_level else 32, 1) for bm in (16, 32, 64, 128) for bn in (16, 32, 64, 128)]
    else:
        depths = (1024 // p.bits,) if p.two_level else (max(16, 512 // p.bits), max(32, 1024 // p.bits))
        shapes = [(bm, bn, bk, threads) for bm in (32, 64, 128, 256) for bn in (32, 64, 128, 256) for bk in depths
                  for threads in (128, 256) if 16 <= bm * bn // threads <= (64 if p.kind == "float" else 128)]
    room = chip.shared - _BARRIER_BYTES
    for bm, bn, bk, threads in shapes:
        if p.column_block and bn > p.column_block + gcd(bn, p.column_block) or p.two_level and bk * p.bits != 1024:
            continue
        wide = 0
        if chip.kind == "wgmma" and not p.b_k and bn * p.bits > 1024 and bn * p.bits % 1024:
            # Panels narrower than 128 bytes are many small boxes, of 0.3 of the speed: whole ones are loaded.
            # Those that begin inside a sector of L2 are slow again (128x104 at 1280^3: 13.8 us where 128x128 takes 9.3).
            wide = ceil(bn * p.bits / 1024) * 1024 // p.bits
            if bn * p.bits % 512:
                continue
        stage = (bm + (wide or bn)) * bk * p.bits // 8
        out = bm * bn * p.out_bits // 8
        for parts in _parts(chip, p, bm, bn, bk):
            blocks = ceil(p.m / bm) * ceil(p.n / bn) * p.batch * parts
            if (wide or p.staged or bn % 16) and not _FILLED * chip.units <= blocks <= chip.units:
                continue
            movable = blocks <= chip.units and _movable(p, bm, bn, bk * parts)
            for moved in (False, True) if movable and parts == 1 else (movable,):  # sums of parts need no room to move
                staged = parts == 1 and (p.staged or moved)
                left = room - (out if staged else min(_OUTPUT_STAGING, out) if chip.kind == "wgmma" else 0)
                stages = 1 if chip.kind == "cpu" else min(left // stage, 8 if chip.kind == "wgmma" else 4, ceil(p.k / bk) + 1)
                if stages > (chip.kind != "cpu"):
                    yield Tile(bm, bn, bk, stages, threads, parts, _panel(chip, p, bm, bn, parts), moved=moved,
                               staged=staged, wide=wide)
    if wgmma and p.may_turn and not few:
        yield from (replace(t, turned=True) for t in candidates(chip, turned(p, staged=True)))


def _movable(p: Problem, bm: int, bn: int, deep: int) -> bool:
    """Whether the last tiles may be moved inside, in loops over `deep` of k an iteration that are long enough to feel it."""
    cut = p.m > bm and p.m % bm > 0 or p.n > bn and p.n % bn > 0
    return p.may_move and cut and p.k >= _MOVED_STEPS * deep


def _panel(chip: Chip, p: Problem, bm: int, bn: int, parts: int) -> int:
    """Rows of tiles that are worked on together.

    In one round where one operand is by far the larger, blocks side by side share its tiles: what two neighbours ask for
    comes once.  4096x128x4096 in 64x64 tiles, 64 x 2 of them: 9.3 us row by row, 11.5 in panels of 12 rows; 256x4096x4096
    in 64x128 tiles, 4 x 32: 13.3 column by column, 22.4 row by row.
    """
    if chip.kind != "wgmma":
        return max(1, 2048 // bm)
    near = _side_by_side(chip, p, bm, bn, parts)
    return ceil(p.m / bm) if near == "b" else 1 if near == "a" or parts > 1 else panel_rows(chip.units, bm, bn)


def _side_by_side(chip: Chip, p: Problem, bm: int, bn: int, parts: int) -> str:
    """The operand whose tiles blocks side by side share, "a" or "b"; "" where both count."""
    one_round = ceil(p.m / bm) * ceil(p.n / bn) * p.batch * parts <= chip.units
    return "" if not one_round else "a" if p.m >= _FAR_LARGER * p.n else "b" if p.n >= _FAR_LARGER * p.m else ""


def _warp_group_tiles(chip: Chip, p: Problem) -> Iterator[tuple[int, int, int, int]]:
    """(bm, bn, bk, threads): 1 to 3 groups of 64 or 128 rows.  Accumulators leave room for addresses and the epilogue.

    Columns in steps of 8, and of whole panels that are wider, only for tiles of one round that fill the machine;
    wgmma has no odd multiples of 8 of bytes.
    """
    for groups, most in ((1, 168), (2, 168), (3, 96)):
        for rows in (64, 128):
            for bn in range(16, 257, 16 if p.kind == "int8" else 8):
                narrow = not p.b_k and bn * p.bits > 1024 and bn * p.bits % 1024
                if (bn % 16 or narrow or p.staged) and not (p.may_move and _fills(chip, p, rows * groups, bn)) or (
                        narrow and p.b_rows % 128):
                    continue
                if column_parts(Tile(rows * groups, bn, 0, 0, 128 * groups)) if p.two_level else rows * bn // 128 <= most:
                    for bytes_ in (128, 256) if not p.two_level else (128,):
                        yield rows * groups, bn, bytes_ * 8 // p.bits, 128 * groups


def _fills(chip: Chip, p: Problem, bm: int, bn: int) -> bool:
    """Whether tiles, of all or of some part of k, are nearly as many as units."""
    tiles = ceil(p.m / bm) * ceil(p.n / bn) * p.batch
    return tiles <= chip.units and chip.units // tiles * tiles >= _FILLED * chip.units


def _parts(chip: Chip, p: Problem, bm: int, bn: int, bk: int) -> tuple[int, ...]:
    """Ways to share out k: worth a thought where tiles leave units idle."""
    tiles = ceil(p.m / bm) * ceil(p.n / bn) * p.batch
    if not p.may_split or chip.kind == "cpu" or tiles * 3 > chip.units * 2:
        return (1,)
    steps = ceil(p.k / bk)
    depths = {ceil(steps / x): x for x in range(min(16, steps // 4), 1, -1) if tiles * x <= chip.units * 2}
    return (1, *sorted(depths.values()))  # the fewest of equal depth


@lru_cache(maxsize=1024)
def choose_tile(chip: Chip, p: Problem) -> Tile:
    """Of the candidates within 1 % of the cheapest the one that moves the fewest bytes a product; where memory is what
    limits, the one whose own work takes the least.  Of equals the one of shorter stages, then one that is moved, which
    loads no zeros, then the one of more warp groups (128x96 of two 6.5 us, of one 6.7 at 495x2971x720).

    Raises ValueError where no tile fits (column_block).
    """
    priced = [(*_price(chip, p, t), t) for t in candidates(chip, p)]
    if not priced:
        raise ValueError(f"no tile of {chip.kind} suits {p}")
    best, own, _ = min(priced, key=lambda x: x[:2])
    near = [(t.parts, x if own < best else (t.bm + t.bn) / (t.bm * t.bn), t.bk, not t.moved, -t.threads, seconds, k)
            for k, (seconds, x, t) in enumerate(priced) if seconds <= 1.01 * best]
    seconds, _, t = priced[min(near)[-1]]
    return replace(t, seconds=seconds)


__all__ = ["Chip", "Problem", "Tile", "candidates", "chip_of", "choose_tile", "column_parts", "matrix_cycles", "price",
           "shared_bytes", "turned", "without_wgmma"]
