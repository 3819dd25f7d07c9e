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

    def compute_warp_partition(self, M: int, N: int, num_warps: int,
                               tile: tuple[int, int] = (16, 8)) -> tuple[int, int]:
        """(warps along M, warps along N) for an accumulator of M x N in instruction tiles of `tile`.

        Raises ValueError when the warps cannot cover it evenly.

        >>> GemmWarpPolicy.Square.compute_warp_partition(128, 128, 4)
        (2, 2)
        """
        options = [(m, num_warps // m) for m in range(1, num_warps + 1)
                   if num_warps % m == 0 and M % (tile[0] * m) == 0 and N % (tile[1] * (num_warps // m)) == 0]
        if not options:
            raise ValueError(f"No valid warp partition for T.gemm: M={M}, N={N} cannot be evenly covered by "
                             f"{tile[0]}x{tile[1]} tiles of {num_warps} warps")
        if self is GemmWarpPolicy.FullRow:
            return max(options)
        if self is GemmWarpPolicy.FullCol:
            return min(options)
        # A warp reads M/m rows of A and N/n columns of B per step: their sum is the shared-memory traffic.
        return min(options, key=lambda p: (M // p[0] + N // p[1], -p[0]))

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
        """The policy that a partition comes from."""
        if n_warp == 1:
            return cls.FullRow
        return cls.FullCol if m_warp == 1 else cls.Square
