"""The row-major layout of tiles whose shape is known only at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang.ir import Expr, binary, convert


class RowMajor:
    """Row-major layout of a shape with run-time dimensions.  Has the queries of Layout, computed by formula, not by table.

    shape: ints and integer expressions.  size: elements, an expression.
    """

    swizzle = None

    def __init__(self, shape: Sequence[Any]) -> None:
        self.shape = tuple(shape)
        self.size: Any = 1
        for d in self.shape:
            self.size = d * self.size

    def offset(self, indices: Sequence[Any]) -> Expr:
        """Offset in storage of the element at these indices."""
        out = convert(0)
        for i, d in zip(indices, self.shape):
            out = binary("add", binary("mul", out, convert(d)), convert(i))
        return out

    @property
    def aligned_run(self) -> int:
        """Largest power of two (at most 64) that divides the row length: aligned runs of so many elements are contiguous."""
        last = self.shape[-1] if self.shape else 1
        return min(64, last & -last) if isinstance(last, int) and last else 1
