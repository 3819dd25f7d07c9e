"""Tile scheduler of persistent launches: which block computes which tiles, in which order.

Tiles of equal length are ordered in rasterisation panels of rows, each traversed column by column; see
`rasterisation_rows`.

Tiles of unequal length are distributed so that all blocks have about the same work.  The tiles form rows of equal length,
the longest row first, and are cut into groups of columns that fit L2 together.  The tiles of a group are given to the blocks
in passes of alternating direction, so that a block that gets the longest tile of one pass gets the shortest of the next:

    pass 0:  block 0 1 2 3       the tiles of a group, in order
    pass 1:  block 3 2 1 0
    pass 2:  block 0 1           the last pass of a group may be incomplete

The schedule is static, without counters at run time: the same block computes the same tiles at every launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tilelang.ir import Expr, Select, binary, cast, const
from tilelang.ir.record import record

ALIGNED = 1.1  # bytes that a rasterisation panel with waves of whole columns may load, relative to the best one
SLACK = 1.005  # a partition that is less even by at most this factor is taken if its groups are wider (more reuse in L2)


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


@record
class TilePartition:
    """A static work partition: rows x columns tiles in groups of `width` columns, for `blocks` blocks.

    Tiles are named (row, column); those of row 0 are the longest.
    """

    rows: int
    columns: int
    width: int
    blocks: int

    @property
    def groups(self) -> int:
        """Number of groups of full width."""
        return self.columns // self.width

    @property
    def rest(self) -> int:
        """Columns of the narrower last group; 0 if there is none."""
        return self.columns % self.width

    def count(self, block: Expr) -> Expr:
        """How many tiles a block computes."""
        out = self._tiles_in_group(block, self.width) * self.groups
        return out + self._tiles_in_group(block, self.rest) if self.rest else out

    def place(self, block: Expr, index: Expr) -> tuple[Expr, Expr]:
        """(row, column) of tile number `index` of a block."""
        each = self._tiles_in_group(block, self.width)
        last = const(self.groups - (0 if self.rest else 1), "int32")
        group = binary("min", index // each, last)
        wave = index - group * each
        back = binary("eq", wave % 2, const(1, "int32"))
        inside = wave * self.blocks + Select(back, (self.blocks - 1) - block, block, block.dtype, False)
        width: Expr = const(self.width, "int32")
        if self.rest:
            width = Select(binary("eq", group, last), const(self.rest, "int32"), width, width.dtype, False)
        row = binary("min", inside // width, const(self.rows - 1, "int32"))
        return row, group * self.width + inside % width

    def _tiles_in_group(self, block: Expr, width: int) -> Expr:
        """How many tiles a block gets in a group of this width (one per pass that reaches it)."""
        full, more = self._split(width)
        if not more:
            return const(full, "int32")
        place = (self.blocks - 1) - block if full % 2 else block
        return cast(binary("lt", place, const(more, "int32")), "int32") + full

    def _split(self, width: int) -> tuple[int, int]:
        return divmod(self.rows * width, self.blocks)

    def unevenness(self, lengths: Sequence[float]) -> float:
        """The work of the busiest block divided by the average.  lengths: length of a tile of each row."""
        work = np.zeros(self.blocks)
        for times, width in ((self.groups, self.width), (1, self.rest)):
            wave, p = np.divmod(np.arange(self.rows * width), self.blocks)
            block = np.where(wave % 2 == 1, self.blocks - 1 - p, p)
            work += times * np.bincount(block, np.repeat(np.asarray(lengths, float), width), self.blocks)
        return float(work.max() * self.blocks / max(work.sum(), 1e-9))


def schedule_tiles(lengths: Sequence[float], columns: int, blocks: int, width: int) -> TilePartition | None:
    """The most even partition with groups of about `width` columns; None if no block gets more than two tiles.

    lengths: length of a tile of each row, the longest first.
    """
    rows = len(lengths)
    if rows * columns <= 2 * blocks:
        return None
    most = min(width, columns)
    found = [(d.unevenness(lengths), d) for d in (TilePartition(rows, columns, w, blocks)
                                                  for w in range(max(1, most // 2), most + 1))
             if rows * d.width >= blocks]
    if not found:
        return None
    best = min(x for x, _ in found)
    return max((d for x, d in found if x <= best * SLACK), key=lambda d: d.width)


__all__ = ["TilePartition", "schedule_tiles", "rasterisation_rows"]
