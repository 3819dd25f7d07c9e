"""The parameters that a kernel of dequant_matmul is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

GROUP_ROWS = 64  # rows of the weights that one warp group computes
_BARRIERS = 1024


@dataclass(frozen=True)
class DequantTile:
    """A tile of dequant_matmul.

    bm, bn: rows of A and rows of the weights in a tile. bk: columns of k in one step of the loop. stages: of its pipeline.
    splits: number of blocks that split k.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    splits: int = 1

    @property
    def threads(self) -> int:
        return self.bn // GROUP_ROWS * 128


@dataclass(frozen=True)
class DequantForm:
    """The form of a GEMM of m x k by n x k weights, which are quantised in groups along k.

    element: type of A, the scales and the result. lut: the weights are indices of a look-up table; otherwise they are integers.
    zero_points: whether there are zero points.
    """

    m: int
    n: int
    k: int
    group: int
    element: str
    lut: bool
    zero_points: bool
    tile: DequantTile

    @property
    def steps(self) -> int:
        """Number of steps that a block runs, each over `bk` columns of k."""
        return ceil(ceil(self.k / self.tile.bk) / self.tile.splits)

    @property
    def groups(self) -> int:
        """Number of quantisation groups in the columns of k that a block reads of one row of the weights."""
        return ceil(self.steps * self.tile.bk / self.group)

    @property
    def shared(self) -> int:
        """Shared memory of a block, in bytes."""
        t = self.tile
        return t.stages * t.bk * (t.bm * 2 + t.bn // 2) + t.bn * self.groups * (2 + self.zero_points) + _BARRIERS
