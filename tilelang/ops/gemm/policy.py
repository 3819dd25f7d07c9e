"""Warp partition of a gemm: how the accumulator is divided among the warps of a block."""

from __future__ import annotations

from enum import IntEnum
from math import ceil

from tilelang.errors import facts


class GemmWarpPolicy(IntEnum):
    """How warps are placed: Square balances them over M and N, FullRow puts all along M, FullCol all along N."""

    Square = 0
    FullRow = 1
    FullCol = 2

    def is_square(self) -> bool: return self is GemmWarpPolicy.Square
    def is_full_row(self) -> bool: return self is GemmWarpPolicy.FullRow
    def is_full_col(self) -> bool: return self is GemmWarpPolicy.FullCol

    def compute_warp_partition(self, M: int, N: int, num_warps: int,
                               tile: tuple[int, int] = (16, 8)) -> tuple[int, int]:
        """(warps along M, warps along N) for an accumulator of M x N in instruction tiles of `tile`.

        Raises ValueError when the warps cannot cover it evenly.

        >>> GemmWarpPolicy.Square.compute_warp_partition(128, 128, 4)
        (2, 2)
        """
        best = self.even_partition(M, N, num_warps, tile)
        if best is None:
            raise facts(ValueError(f"No valid warp partition for T.gemm: M={M}, N={N} cannot be evenly covered by "
                                   f"{tile[0]}x{tile[1]} tiles of {num_warps} warps"),
                        f"tiles that {num_warps} warps divide", f"M={M}, N={N}")
        return best

    def even_partition(self, m: int, n: int, warps: int, tile: tuple[int, int]) -> tuple[int, int] | None:
        """(warps along M, warps along N) such that all warps get equally many whole tiles; None where that is impossible."""
        options = [(i, warps // i) for i in range(1, warps + 1)
                   if warps % i == 0 and m % (tile[0] * i) == 0 and n % (tile[1] * (warps // i)) == 0]
        if not options:
            return None
        if self is GemmWarpPolicy.FullRow:
            return max(options)
        if self is GemmWarpPolicy.FullCol:
            return min(options)
        # A warp reads M/m rows of A and N/n columns of B per step, so this sum measures the shared-memory traffic.
        return min(options, key=lambda p: (m // p[0] + n // p[1], -p[0]))

    def cover(self, m: int, n: int, warps: int, tile: tuple[int, int]) -> tuple[int, int]:
        """(warps along M, warps along N), at most `warps` in total, whose tiles cover an accumulator of any size.

        All warps have the same number of tiles.  The last tiles may extend beyond the edge, but none lies wholly beyond it.

        >>> GemmWarpPolicy.Square.cover(16, 104, 12, (16, 8))
        (1, 7)
        """
        best: tuple[tuple[int, ...], tuple[int, int]] | None = None
        down, across = ceil(m / tile[0]), ceil(n / tile[1])  # tiles
        for i in range(1, min(warps, down) + 1):
            rows, cols = ceil(down / i), ceil(across / min(warps // i, across))  # tiles of one warp
            used = ceil(down / rows), ceil(across / cols)
            work, traffic = rows * cols, rows * tile[0] + cols * tile[1]
            first = {GemmWarpPolicy.FullRow: rows, GemmWarpPolicy.FullCol: cols}.get(self, 0)
            key = (first, work, traffic, used[0] * used[1])
            if best is None or key < best[0]:
                best = (key, used)
        assert best is not None  # i = 1 is always tried
        return best[1]

    @staticmethod
    def to_prime_factors(n: int) -> list[int]:
        """Prime factors of n in ascending order."""
        out, p = [], 2
        while n > 1:
            while n % p == 0:
                out.append(p)
                n //= p
            p += 1
        return out

    @classmethod
    def from_warp_partition(cls, m_warp: int, n_warp: int) -> GemmWarpPolicy:
        """The policy that gives this warp partition."""
        if n_warp == 1:
            return cls.FullRow
        return cls.FullCol if m_warp == 1 else cls.Square
