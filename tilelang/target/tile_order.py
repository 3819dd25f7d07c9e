"""The order in which blocks take the tiles of a grid, by the data that neighbouring blocks have in common.

A launch fills one GPC after the other, so blocks of consecutive numbers request data through one port of L2, which delivers
once what several of them request (H200: benchmarks/results/2026-11-30-h200-orders-of-tiles.json).

    rows of tiles a, b, …; columns 0, 1, …          panels of 2 rows        panels of 3 columns
                                                    a0 b0 a1 b1 a2 …        a0 a1 a2 b0 b1 b2 c0 …
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

PORT = 16  # blocks, one an SM, that request data through one port
WAVE = 0.1  # what a byte counts that a wave of blocks requests, beside a byte that a port requests
HELD = 1.05  # operands over L2 up to which the ports decide; beyond that what waves load from memory
ALIGNED = 1.1  # bytes that a rasterisation panel with waves of whole columns may load, relative to the best one
_SIZES = 1, 2, 3, 4, 6, 8, 12, 16  # of panels, beside that of the whole grid
_SLOWEST = 12  # exponent of the mean over ports: the slowest decides
_STEP = 3  # every so many tiles a port's tiles are counted from
_CROSSED = 0.75  # of the rows of a second panel that a port's tiles reach, on average


class TileOrder(NamedTuple):
    """An order in panels of `size` rows, or with order="column" of as many columns, as T.use_swizzle takes it.

    rows, columns: of tiles that a port requests, for each of its tiles.
    """

    size: int
    order: str
    rows: float
    columns: float


def panels_of(size: int, rows: int, columns: int) -> TileOrder:
    """Panels of so many rows, at most those of the grid."""
    size, n = min(size, rows), min(PORT, rows * columns)
    return TileOrder(size, "row", *(x / n for x in _distinct_estimate(size, rows, columns, n)))


def _distinct_estimate(size: int, down: int, across: int, n: int) -> tuple[float, float]:
    """About how many rows and columns a port's n tiles have in panels of `size` rows of a grid of down x across tiles."""
    crossed = (n - 1) / (size * across)  # ends of panels among the tiles
    if crossed > 1:
        return min(down, size * (1 + crossed)), min(across, 1 + (n - 1) / size)
    return min(size, n) + _CROSSED * crossed * min(size, down - size), min(across, 1 + (n - 1) / size)


def _panels(down: int) -> list[int]:
    return [*(x for x in _SIZES if x < down), down]


@lru_cache(maxsize=1 << 14)
def nominal_order(rows: int, columns: int, share: float) -> TileOrder:
    """The order that `tile_order` would give, by estimates of its numbers: 1 % of the time.

    share: of a row of tiles in the cost of loading a row and a column.
    """
    best, n = (float("inf"), TileOrder(1, "row", 1.0, 1.0)), min(PORT, rows * columns)
    for order, down, across, a in (("row", rows, columns, share), ("column", columns, rows, 1 - share)):
        for size in _panels(down):
            high, wide = _distinct_estimate(size, down, across, n)
            cost = (high * a + wide * (1 - a)) / n
            if cost < best[0]:
                best = cost, TileOrder(size, order, *(x / n for x in ((high, wide) if order == "row" else (wide, high))))
    return best[1]


@lru_cache(maxsize=1 << 12)
def tile_order(rows: int, columns: int, share: float, blocks: int, layers: int = 1, either: bool = True,
               port: int = PORT) -> TileOrder:
    """The order of `layers` grids of tiles, one after another, in which blocks request the least of L2.

    share: see nominal_order.  blocks: that run at a time, `port` of them at a port.  either: panels may be of rows or of
    columns.
    """
    best = None
    for size, order, each, wave in _requested(rows, columns, blocks, layers, port):
        if order == "column" and not either:
            continue
        cost = np.asarray(each[0] * share + each[1] * (1 - share))
        slowest = float((cost**_SLOWEST).mean()**(1 / _SLOWEST)) + WAVE * (wave[0] * share + wave[1] * (1 - share))
        if best is None or slowest < best[0]:
            best = slowest, TileOrder(size, order, float(each[0].mean()), float(each[1].mean()))
    assert best is not None
    return best[1]


Counted = tuple["np.ndarray[tuple[int, ...], np.dtype[np.float64]]", ...]


@lru_cache(maxsize=256)
def _requested(rows: int, columns: int, blocks: int, layers: int, port: int) -> list[tuple[int, str, Counted, Counted]]:
    """For each order (size, order, rows and columns a tile of each port's tiles, those of waves)."""
    found, count = [], min(rows * columns * layers, 2 * blocks)
    tile = np.arange(count)
    layer, tile = np.divmod(tile, rows * columns)
    for order, down, across in (("row", rows, columns), ("column", columns, rows)):
        for size in _panels(down):
            panel, inside = np.divmod(tile, size * across)
            high = np.minimum(size, down - panel * size)
            column = inside // high
            places = (panel * size + inside % high + layer * down,
                      np.where(panel % 2, across - 1 - column, column) + layer * across)
            each, wave = ([_distinct(x, n, step) for x in places[::1 if order == "row" else -1]]
                          for n, step in ((min(port, count), _STEP), (min(blocks, count), blocks)))
            found.append((size, order, tuple(each), tuple(x.mean() for x in wave)))
    return found


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
    return (whole if whole[0] <= ALIGNED * best[0] else best)[1]
