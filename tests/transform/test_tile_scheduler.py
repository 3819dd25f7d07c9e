"""Tiles of unequal length dealt out to blocks (transform/schedule/persistent.py)."""

import itertools

import pytest

from tilelang.ir import Var, convert, dtype, substitute
from tilelang.ir.evaluate import evaluate
from tilelang.target.tile_order import rasterisation_rows, tile_order
from tilelang.transform.schedule.persistent import OpenPartition, TilePartition, schedule_tiles


def value(e, **values):
    return int(evaluate(substitute(convert(e), {}), {v: values[v.name] for v in VARS if v.name in values}))


BLOCK, INDEX = Var("block", dtype("int32")), Var("index", dtype("int32"))
VARS = (BLOCK, INDEX)


@pytest.mark.parametrize("rows, columns, width, blocks", [
    (64, 64, 8, 132), (5, 7, 7, 3), (5, 7, 2, 3), (6, 9, 4, 5), (4, 4, 4, 5), (9, 1, 1, 4), (3, 10, 3, 4), (8, 3, 2, 16)])
def test_every_tile_once_and_as_planned(rows, columns, width, blocks):
    deal = TilePartition(rows, columns, width, blocks)
    count, place = deal.count(BLOCK), deal.place(BLOCK, INDEX)
    seen, work = [], []
    for b in range(blocks):
        mine = [tuple(value(e, block=b, index=i) for e in place) for i in range(value(count, block=b))]
        seen += mine
        work.append(sum(rows - r for r, _ in mine))
    assert sorted(seen) == sorted(itertools.product(range(rows), range(columns)))
    lengths = [rows - r for r in range(rows)]
    assert deal.unevenness(lengths) == pytest.approx(max(work) * blocks / sum(work))


def open_tiles(rows, columns, groups, blocks):
    """The tiles of each block that a grid's kernel for any sizes computes."""
    sizes = [Var(name, dtype("int32")) for name in ("grid_x", "grid_y", "groups")]
    deal, before = OpenPartition.of((sizes[0], sizes[1]), lambda columns: sizes[2], blocks, BLOCK)
    own, *place = deal.place(INDEX)
    env = dict(zip(sizes, (rows, columns, groups)))
    for b in range(min(blocks, rows * columns)):
        env[BLOCK] = b
        for x in before:
            env[x.var] = int(evaluate(x.value, env))
        mine = []
        for i in range(int(evaluate(deal.count, env))):
            env[INDEX] = i
            for x in own:
                env[x.var] = int(evaluate(x.value, env))
            mine.append(tuple(int(evaluate(e, env)) for e in place))
        yield mine


@pytest.mark.parametrize("rows, columns, groups, blocks", [
    (24, 64, 4, 132), (32, 24, 3, 44), (5, 7, 1, 3), (5, 7, 9, 3), (6, 9, 2, 5), (4, 4, 1, 5), (9, 1, 1, 4), (3, 10, 10, 4),
    (8, 3, 2, 16), (1, 1, 1, 132), (40, 7, 3, 132), (2, 200, 16, 132), (4, 8, 0, 132)])
def test_sizes_of_a_call_deal_out_every_tile_once(rows, columns, groups, blocks):
    mine = list(open_tiles(rows, columns, groups, blocks))
    assert sorted(x for m in mine for x in m) == sorted(itertools.product(range(rows), range(columns))) and all(mine)
    if columns > 20 and rows > 20:
        work = [sum(rows - r + 1.5 for r, _ in m) for m in mine]
        assert max(work) * len(work) / sum(work) < 1.035


@pytest.mark.parametrize("rows, columns, width", [(64, 64, 8), (32, 32, 32), (32, 32, 16), (128, 16, 4), (64, 40, 8),
                                                  (64, 24, 8), (48, 96, 10), (16, 64, 32)])
def test_causal_tiles_are_dealt_out_evenly(rows, columns, width):
    lengths = [rows - r + 1.5 for r in range(rows)]
    deal = schedule_tiles(lengths, columns, 132, width)
    assert deal is not None and deal.width <= width and deal.unevenness(lengths) < 1.035


def test_few_tiles_are_not_dealt():
    assert schedule_tiles([3, 2, 1], 44, 132, 44) is None and schedule_tiles([1.0] * 8, 64, 132, 1) is None


def waves(blocks, rows, columns, panel):
    """(rows, columns) of tiles that each wave of blocks works on, in panels walked column by column."""
    order = [(r, c) for p in range(0, rows, panel) for c in range(columns) for r in range(p, min(p + panel, rows))]
    for at in range(0, len(order) - blocks + 1, blocks):
        wave = order[at:at + blocks]
        yield {r for r, _ in wave}, {c for _, c in wave}


@pytest.mark.parametrize("blocks, row, column", [(132, 128, 256), (132, 128, 128), (114, 128, 256), (78, 128, 256),
                                                 (127, 64, 64)])
def test_panels_load_about_the_fewest_bytes(blocks, row, column):
    """Counted tile by tile, against every other height; a block keeps its row where the blocks fill whole columns."""
    def loaded(panel):
        found = [len(r) * row + len(c) * column for r, c in waves(blocks, panel * 4, 400, panel)]
        return sum(found) / len(found)

    chosen = rasterisation_rows(blocks, row, column)
    assert loaded(chosen) <= 1.12 * min(loaded(p) for p in range(1, 41))
    if blocks in (132, 78):
        assert blocks % chosen == 0
    if blocks == 127:  # a prime: panels of 1 or 127 rows would be whole, and load far more
        assert 8 <= chosen <= 16


@pytest.mark.parametrize("grid, loads", [((10, 13, 1), (64, 144)), ((6, 22, 1), (128, 72)), ((9, 29, 1), (256, 80)),
                                         ((2, 66, 1), (64, 64))])
def test_ports_request_few_tiles(grid, loads):
    """Counted one by one, each 16 blocks of the order request less than row by row, and less than column by column."""
    def requested(size, how):
        down, across = grid[:2] if how == "row" else grid[1::-1]
        order = [(top + i, j if top // size % 2 == 0 else across - 1 - j) for top in range(0, down, size) for j in range(across)
                 for i in range(min(size, down - top))]
        a, b = loads if how == "row" else loads[::-1]
        return sum(len({x for x, _ in order[k:k + 16]}) * a + len({y for _, y in order[k:k + 16]}) * b
                   for k in range(len(order) - 15))

    size, how = tile_order(grid, loads, 132, 1 << 30)
    assert how == "row" or grid[0] * grid[1] <= 132
    assert requested(size, how) <= min(requested(1, "row"), requested(grid[0], "row"), requested(1, "column")) * 1.05


def test_where_l2_is_too_small_or_sizes_are_unknown_waves_are_square():
    assert tile_order((64, 64, 1), (1 << 20, 1 << 21), 132, 1 << 20) == (12, "row")
    assert tile_order((0, 0, 0), (128, 256), 132, 1 << 26) == (12, "row")
