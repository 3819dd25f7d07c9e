"""Descriptions of computations to be tiled: sizes and element types."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Matmul:
    """A batched GEMM C[b] = A[b] @ B[b] of m x n x k, `batch` times.  Memory traffic is counted for these element types."""

    m: int
    n: int
    k: int
    in_dtype: str
    out_dtype: str
    accum_dtype: str
    batch: int = 1
    trans_a: bool = False
    trans_b: bool = True


@dataclass(frozen=True)
class Attention:
    """softmax(Q @ K^T) @ V for `heads` (batch size times heads).  Sizes: rows of queries, keys, width of a head."""

    heads: int
    rows: int
    keys: int
    width: int
    in_dtype: str
    out_dtype: str
    accum_dtype: str
    causal: bool = False


@dataclass(frozen=True)
class Map:
    """Values over `space`, each a sum over `reduced` (may be empty).  loads: bytes read per term; stores: written per value.

    inner: the innermost axis of storage is a reduced one.  weight: the operand whose rows are read once each.
    """

    space: tuple[int, ...]
    reduced: tuple[int, ...]
    dtype: str
    accum_dtype: str
    inner: bool = False

    @property
    def points(self) -> int:
        """Total number of terms."""
        return prod(self.space) * prod(self.reduced)


Work = Matmul | Attention | Map
