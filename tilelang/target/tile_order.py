"""The order in which blocks take the tiles of a grid, by the data that neighbouring blocks have in common.

A launch fills one GPC after the other, so blocks of consecutive numbers request data through one port of L2, which delivers
once what several of them request (H200: benchmarks/results/2026-11-30-h200-orders-of-tiles.json).

    rows of tiles a, b, …; columns 0, 1, …          by 2 rows               by 3 columns
                                                    a0 b0 a1 b1 a2 …        a0 a1 a2 b0 b1 b2 c0 …
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

_PORT = 16  # blocks, one an SM, that request data through one port
# What a byte counts that a wave of blocks requests, beside a byte that a port requests: where L2 holds the operands (up to
# _HELD times its size), or all tiles run at once; elsewhere, where waves load from memory.
_WAVE, _WAVE_OF_MEMORY, _HELD = 0.1, 1.0, 1.05
_FEW_WAVES = 6  # up to so many, rasterisation panels end in the middle of waves, and tiles are counted one by one
_FEWER = 0.9  # fraction of the requests of waves below which rasterisation panels of clusters have one row (narrow grids)
_SIZES = 1, 2, 3, 4, 6, 8, 12, 16  # of rasterisation panels, beside that of the whole grid
_SLOWEST = 12  # exponent of the mean over ports: the slowest decides
_COUNTED = 6  # waves at most whose tiles are counted
_STEP = 3  # every so many tiles a port's tiles are counted from
_ALIGNED = 1.1  # bytes that a rasterisation panel with waves of whole columns may load, relative to the best one


@lru_cache(maxsize=1 << 12)
def tile_order(grid: tuple[int, int, int], loads: tuple[float, float], blocks: int, l2: float, either: bool = True
               ) -> tuple[int, str]:
    """The order in which blocks request the least of L2 and memory, as T.use_swizzle takes it: (rows or columns of a
    rasterisation panel, "row" or "column").

    grid: rows and columns of tiles, and how many such layers come one after another; one of them is 0 if they are not known.
    loads: bytes of a row and of a column, in a step if all the steps are not known.
    blocks: that run at a time.  l2: its bytes.  either: the order may be "column" where all tiles run at once.  (In several
    waves results are stored faster row after row: 11328x9448x88 112 us, 117.)
    """
    (rows, columns, layers), (row, column) = grid, loads
    tiles, held = rows * columns, rows * row + columns * column <= _HELD * l2
    if not tiles * layers or not held and tiles > _FEW_WAVES * blocks:
        return rasterisation_rows(blocks, row, column), "row"
    share = row / (row + column)
    weight = _WAVE if held or tiles <= blocks else _WAVE_OF_MEMORY
    costs = []
    for size, order, each, wave in _requested(rows, columns, blocks, layers):
        if order == "column" and not (either and tiles <= blocks):
            continue
        slowest = float(((each[0] * share + each[1] * (1 - share))**_SLOWEST).mean()**(1 / _SLOWEST))
        costs.append((round(slowest + weight * (wave[0] * share + wave[1] * (1 - share)), 9), order == "column", -size))
    _, by_columns, size = min(costs)  # of equals the largest size
    return -size, "column" if by_columns else "row"


def rows_of_waves(rows: int, columns: int, loads: tuple[float, float], blocks: int) -> int:
    """The rows of a rasterisation panel in several waves: those of about square waves, or one, where that requests far less."""
    (row, column), high = loads, min(rows, rasterisation_rows(blocks, *loads))
    alone, several = (by * row + bx * column for by, bx in (_wave(rows, columns, size, blocks) for size in (1, high)))
    return 1 if alone < _FEWER * several else high


def _sizes(down: int) -> list[int]:
    return [*(x for x in _SIZES if x < down), down]


@lru_cache(maxsize=256)
def _requested(rows: int, columns: int, blocks: int, layers: int) -> list[tuple[int, str, Any, Any]]:
    """For each order (size, order, rows and columns a tile of each port's tiles, those of waves)."""
    found, count = [], min(rows * columns * layers, 2 * blocks)
    for order, down, across in (("row", rows, columns), ("column", columns, rows)):
        for size in _sizes(down):
            places = _places(down, across, size, count)
            each, wave = ([_distinct(x, n, step) for x in places[::1 if order == "row" else -1]]
                          for n, step in ((min(_PORT, count), _STEP), (min(blocks, count), blocks)))
            found.append((size, order, tuple(each), tuple(x.mean() for x in wave)))
    return found


def _places(down: int, across: int, size: int, count: int) -> tuple[Any, Any]:
    """Row and column of each of the first `count` tiles, in rasterisation panels of `size` rows."""
    layer, tile = np.divmod(np.arange(count), down * across)
    panel, inside = np.divmod(tile, size * across)
    high = np.minimum(size, down - panel * size)
    column = inside // high
    return (panel * size + inside % high + layer * down, np.where(panel % 2, across - 1 - column, column) + layer * across)


@lru_cache(maxsize=1 << 10)
def _wave(rows: int, columns: int, size: int, blocks: int) -> tuple[float, float]:
    """Rows and columns a tile that whole waves of blocks request, on average."""
    running = min(blocks, rows * columns)
    waves = min(_COUNTED, rows * columns // running)
    by, bx = (_distinct(x, running, running).mean() for x in _places(rows, columns, size, waves * running))
    return float(by), float(bx)


def _distinct(x: Any, count: int, step: int) -> Any:
    """Of `count` consecutive numbers from every `step`-th on, how many differ, over `count`."""
    windows = np.sort(x[np.arange(0, len(x) - count + 1, step)[:, None] + np.arange(count)], axis=1)
    return (1 + (np.diff(windows, axis=1) != 0).sum(1)) / count


@lru_cache(maxsize=8)
def _waves(blocks: int) -> list[tuple[int, float]]:
    """(rows of a rasterisation panel, columns that `blocks` blocks load in one wave of it), for each number of rows."""
    return [(rows, blocks / rows if blocks % rows == 0 else (blocks - 1) / rows + 1) for rows in range(1, blocks + 1)]


@lru_cache(maxsize=4096)
def rasterisation_rows(blocks: int, row: float, column: float) -> int:
    """The number of rows of a rasterisation panel, for `blocks` blocks that run at a time.

    row, column: bytes that a row and a column of tiles load.  About square waves load the fewest bytes.  If the blocks fill
    whole columns of it, each block keeps its row from wave to wave, and no column is in two waves: on an H200, 12 rows for
    132 blocks made GEMMs with 128x256 tiles 1 to 5 % faster than 16 or 8 rows (benchmarks/results/notes.md).
    """
    loaded = [(rows * row + columns * column, rows) for rows, columns in _waves(blocks)]
    best, whole = min(loaded), min(x for x in loaded if blocks % x[1] == 0)
    return (whole if whole[0] <= _ALIGNED * best[0] else best)[1]
