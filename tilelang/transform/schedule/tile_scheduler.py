"""How the tiles of a persistent launch are shared out to its blocks.

Tiles of equal length go in panels of rows, each walked column by column; see `rasterisation_rows`.

Tiles of unequal length are dealt out so that all blocks have as much to do.  Rows of tiles, the longest row first, are cut
into groups as wide as share L2.  A group is dealt out in rounds that go forth and back, as cards are, so that who got the
longest tile of one round gets the shortest of the next:

    round 0:  block 0 1 2 3       the tiles of a group, in order
    round 1:  block 3 2 1 0
    round 2:  block 0 1           the last round of a group need not go all the way

Nothing is counted while the kernel runs: the same block computes the same tiles at every launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tilelang.ir import Expr, Select, binary, cast, const
from tilelang.ir.record import record

ALIGNED = 1.1  # what a panel may load more whose waves are whole columns
SLACK = 1.005  # an order that is worse by less is taken when it shares more


@lru_cache(maxsize=8)
def _waves(blocks: int) -> list[tuple[int, float]]:
    """(rows of a panel, columns that as many blocks load in a wave of it)."""
    return [(rows, blocks / rows if blocks % rows == 0 else (blocks - 1) / rows + 1) for rows in range(1, blocks + 1)]


@lru_cache(maxsize=4096)
def rasterisation_rows(blocks: int, row: float, column: float) -> int:
    """Rows of a panel, of which `blocks` blocks work on as many columns as they fill at a time.

    row, column: bytes that a row and a column of tiles load.  Fewest bytes are loaded by about square waves.  Where the
    blocks fill whole columns, each keeps its row from wave to wave, and no column is in two waves: 12 rows for 132 blocks
    gave products of 128x256 tiles 1 to 5 % more on an H200 than 16 or 8 (benchmarks/results/notes.md).
    """
    loaded = [(rows * row + columns * column, rows) for rows, columns in _waves(blocks)]
    best, whole = min(loaded), min(x for x in loaded if blocks % x[1] == 0)
    return (whole if whole[0] <= ALIGNED * best[0] else best)[1]


@record
class TilePartition:
    """rows x columns tiles in groups `width` columns wide, for `blocks` blocks.

    Tile (row, column): row 0 is the longest.
    """

    rows: int
    columns: int
    width: int
    blocks: int

    @property
    def groups(self) -> int:
        """Groups of full width."""
        return self.columns // self.width

    @property
    def rest(self) -> int:
        """Columns of the narrower last group; 0 for none."""
        return self.columns % self.width

    def count(self, block: Expr) -> Expr:
        """How many tiles a block computes."""
        out = self._rounds(block, self.width) * self.groups
        return out + self._rounds(block, self.rest) if self.rest else out

    def place(self, block: Expr, index: Expr) -> tuple[Expr, Expr]:
        """(row, column) of a block's tile number `index`."""
        each = self._rounds(block, self.width)
        last = const(self.groups - (0 if self.rest else 1), "int32")
        group = binary("min", index // each, last)
        turn = index - group * each
        back = binary("eq", turn % 2, const(1, "int32"))
        inside = turn * self.blocks + Select(back, (self.blocks - 1) - block, block, block.dtype, False)
        width: Expr = const(self.width, "int32")
        if self.rest:
            width = Select(binary("eq", group, last), const(self.rest, "int32"), width, width.dtype, False)
        row = binary("min", inside // width, const(self.rows - 1, "int32"))
        return row, group * self.width + inside % width

    def _rounds(self, block: Expr, width: int) -> Expr:
        """How many rounds of a group of this width reach a block."""
        full, more = self._split(width)
        if not more:
            return const(full, "int32")
        place = (self.blocks - 1) - block if full % 2 else block
        return cast(binary("lt", place, const(more, "int32")), "int32") + full

    def _split(self, width: int) -> tuple[int, int]:
        return divmod(self.rows * width, self.blocks)

    def unevenness(self, lengths: Sequence[float]) -> float:
        """The work of the busiest block over that of the average one.  lengths: of a tile of each row."""
        work = np.zeros(self.blocks)
        for times, width in ((self.groups, self.width), (1, self.rest)):
            turn, p = np.divmod(np.arange(self.rows * width), self.blocks)
            block = np.where(turn % 2 == 1, self.blocks - 1 - p, p)
            work += times * np.bincount(block, np.repeat(np.asarray(lengths, float), width), self.blocks)
        return float(work.max() * self.blocks / max(work.sum(), 1e-9))


def schedule_tiles(lengths: Sequence[float], columns: int, blocks: int, width: int) -> TilePartition | None:
    """The evenest deal with groups of about `width` columns; None when blocks get two tiles at most.

    lengths: of a tile of each row, the longest first.
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
