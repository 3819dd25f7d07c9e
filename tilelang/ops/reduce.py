"""T.reduce_*: combine along one dimension."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import Attrs, Region, Span, Stmt, TileOp, dtype, int_range, tile_op
from tilelang.ir.evaluate import binary_function, to_dtype

from .base import LowerContext
from .lower_reduce import ReduceLowering
from .tiles import combine

KINDS = ("sum", "abssum", "max", "absmax", "min", "bitand", "bitor", "bitxor")

# kind -> the Binary op that combines two elements
COMBINE = {"sum": "add", "abssum": "add", "max": "max", "absmax": "max", "min": "min", "bitand": "bitand",
           "bitor": "bitor", "bitxor": "bitxor"}


def identity(kind: str, dt: dtype) -> Any:
    """The value that leaves `kind` unchanged, as a Python number of dt's range."""
    if kind == "bitand":
        return True if dt.is_bool else (int_range(dt)[1] if dt.is_unsigned else -1)
    if kind in ("max", "min"):
        low, high = (-np.inf, np.inf) if dt.is_float else int_range(dt)
        return low if kind == "max" else high
    return 0


@tile_op("reduce")
class Reduce(TileOp):
    """dst[i…] = kind over the elements of src along dim; with clear=False combined once with dst's old value.

    src: whole buffer.  dst: src's shape with dim removed or kept as 1.  kind: one of KINDS.
    Each element is first converted to dst's dtype and combined in it, order unspecified.
    """

    src: Region
    dst: Region
    kind: str
    dim: int
    clear: bool = True
    nan_propagate: bool = False
    attrs: Attrs = ()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """Convert to dst's dtype, combine along dim, join with the old value unless clear."""
        dt, op = self.dst.dtype, COMBINE[self.kind]
        tile = to_dtype(env.read(self.src), dt)
        if self.kind.startswith("abs"):
            tile = np.abs(tile) if not dt.is_unsigned else tile
        axis = self.dim % tile.ndim
        out = combine(op, dt, tile, axis, identity(self.kind, dt))
        if self.nan_propagate and dt.is_float and op in ("max", "min"):
            out = np.where(np.isnan(tile).any(axis), np.asarray(np.nan).astype(out.dtype), out)
        out = out.reshape(env.shape(self.dst))
        if not self.clear:
            out = binary_function(op, dt)(env.read(self.dst), out)
        env.write(self.dst, out)

    def lower(self, cx: LowerContext) -> Stmt:
        """Registers of a thread, then butterflies over the lanes that share a row, then shared memory over warps."""
        return ReduceLowering(self, cx, COMBINE[self.kind], identity(self.kind, self.dst.dtype)).lower()
