"""How the warps of a block share out the accumulator of a gemm."""

from __future__ import annotations

from enum import IntEnum


class GemmWarpPolicy(IntEnum):
    """Square balances warps over M and N; FullRow puts them along M, FullCol along N."""

    Square = 0
    FullRow = 1
    FullCol = 2

    def is_square(self) -> bool:
        return self is GemmWarpPolicy.Square

    def is_full_row(self) -> bool:
        return self is GemmWarpPolicy.FullRow

    def is_full_col(self) -> bool:
        return self is GemmWarpPolicy.FullCol
