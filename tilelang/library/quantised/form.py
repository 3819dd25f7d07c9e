"""What a kernel of dequant_matmul is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

GROUP_ROWS = 64  # rows of the weights for a warp group
_BARRIERS = 1024


@dataclass(frozen=True)
class DequantTile:
    """bm, bn: rows of A and of the weights of a tile.  bk, stages: of the loop.  splits: blocks that split k."""

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
    """A GEMM of m x k by the n x k weights in groups along k.

    element: of A, the scales and the result.  lut: the weights are indices of a look-up table, else integers.  zero_points:
    they have zero points.
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
        """Of a block."""
        return ceil(ceil(self.k / self.tile.bk) / self.tile.splits)

    @property
    def groups(self) -> int:
        """Of a row of a block's weights."""
        return ceil(self.steps * self.tile.bk / self.group)

    @property
    def shared(self) -> int:
        """Bytes of a block."""
        t = self.tile
        return t.stages * t.bk * (t.bm * 2 + t.bn // 2) + t.bn * self.groups * (2 + self.zero_points) + _BARRIERS


__all__ = ["GROUP_ROWS", "DequantForm", "DequantTile"]
