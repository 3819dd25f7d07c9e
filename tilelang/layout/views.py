"""Layouts of views, Buffers that use the storage of another Buffer: T.view, T.reshape, T.decl_buffer with strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tilelang.errors import error
from tilelang.ir import Buffer, Expr, binary, convert

from .layout import Layout


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


def view_layout(layout: Layout, root: Buffer, b: Buffer) -> Layout:
    """The layout of a view b of the shared buffer root.

    The view is either the whole storage in another shape, or the elements given by strides and an offset.  Raises
    layout-invalid for a view that extends beyond the storage.
    """
    bits_root, bits = (x.dtype.bits * x.dtype.lanes for x in (root, b))
    total = math.prod(root.shape) * bits_root
    strides = b.strides
    if b.strides_ is None and b.offset == 0 and math.prod(b.shape) * bits == total:
        return layout.reshape(b.shape, bits_root, bits)
    steps = (b.offset, *strides)
    known = all(isinstance(n, int) for n in steps)
    last = b.offset + sum((n - 1) * s for n, s in zip(b.shape, strides)) if known else -1
    if not known or total % bits or not 0 <= last < total // bits or any(s < 0 for s in steps):
        raise error("layout-invalid", f"`{b.name}` is no part of `{root.name}`",
                    expected=f"constant strides and elements from 0 to {total // bits - 1} of `{root.name}`",
                    found=f"shape {b.shape}, strides {tuple(strides)} from element {b.offset} on", span=b.span,
                    hint="view the whole buffer and index it")
    flat = layout.reshape((total // bits,), bits_root, bits)

    def fn(*at: Any) -> Any:
        return flat.offset((convert(b.offset) + sum(i * s for i, s in zip(at, strides)),))

    return Layout(b.shape, fn, size=flat.size)
