"""T.reduce_*: reduce a tile along one dimension."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang import errors
from tilelang.ir import Attrs, Buffer, Region, Span, Stmt, TileOp, dtype, int_range, tile_op, DYNAMIC, PRIVATE, STATIC, FRAGMENT
from tilelang.ir.dtype import SCALE, float_min
from tilelang.ir.numbers import binary_function, to_dtype

from .base import Access, LowerContext
from .layouts import carried, combine
from .lower_reduce import ReduceLowering
from .plans import ReducePlan

errors.register("reduce-shape", ValueError, "a reduction whose result has the wrong shape", "leave the reduced dimension out "
                "of the result, or keep it as 1")
errors.register("reduce-scope", ValueError, "a reduction between scopes it does not work on",
                "copy the data to a fragment or shared buffer first",
                expected="two tiles in shared memory, or two in registers")
errors.register("reduce-dtype", ValueError, "a bitwise reduction of floats, or a sum in a type without a zero",
                "cast to an integer type first", expected="integers or bool")

KINDS = ("sum", "abssum", "prod", "max", "absmax", "min", "bitand", "bitor", "bitxor")

# kind -> the Binary op that combines two elements
COMBINE = {"sum": "add", "abssum": "add", "prod": "mul", "max": "max", "absmax": "max", "min": "min", "bitand": "bitand",
           "bitor": "bitor", "bitxor": "bitxor"}


def identity(kind: str, dt: dtype) -> Any:
    """The neutral element of `kind`, as a Python number in dt's range."""
    if kind == "bitand":
        return True if dt.is_bool else (int_range(dt)[1] if dt.is_unsigned else -1)
    if dt.base == SCALE and kind == "max":
        return float_min(dt.base)  # this type has no infinity: converting one would give the greatest value
    if kind in ("max", "min"):
        low, high = (-np.inf, np.inf) if dt.is_float else int_range(dt)
        return low if kind == "max" else high
    return int(kind == "prod")


@tile_op("reduce")
class Reduce(TileOp):
    """dst[i…] = reduction by `kind` of the elements of src along dim; with clear=False dst's old value is combined in once.

    src: whole buffer.  dst: src's shape with dim removed or kept as 1.  kind: one of KINDS.
    Each element is converted to dst's dtype and combined in that dtype, in unspecified order.
    NaN: sum and abssum give NaN.  max, min and absmax ignore NaN (if nothing else is there: the neutral element); with
    nan_propagate they give NaN.
    """

    src: Region
    dst: Region
    kind: str
    dim: int
    clear: bool = True
    nan_propagate: bool = False
    attrs: Attrs = ()
    plan: ReducePlan = ReducePlan()
    span: Span | None = None

    def reference(self, env: Any) -> None:
        """Convert to dst's dtype, reduce along dim, combine with the old value unless clear."""
        dt, op = self.dst.dtype, COMBINE[self.kind]
        tile = to_dtype(env.read(self.src), dt)
        if self.kind.startswith("abs"):
            tile = np.abs(tile) if not dt.is_unsigned else tile
        axis = self.dim % tile.ndim
        out = combine(op, dt, tile, axis, identity(self.kind, dt)).reshape(env.shape(self.dst))
        old = None if self.clear else env.read(self.dst)
        if old is not None:
            out = binary_function(op, dt)(old, out)
        if self.nan_propagate and dt.is_float and op in ("max", "min"):
            lost = np.isnan(tile).any(axis).reshape(out.shape)
            lost = lost if old is None else lost | np.isnan(old)
            out = np.where(lost, np.asarray(np.nan).astype(out.dtype), out)
        env.write(self.dst, out)

    def infer_layout(self, known: Any) -> dict[Buffer, Any]:
        """Each thread that holds source elements of a row also holds the row's result."""
        src, dst = self.src.buffer, self.dst.buffer
        lay = known.get(src)
        if lay is None or src.scope_name != FRAGMENT or dst.scope_name != FRAGMENT or known.get(dst) is not None:
            return {}
        out = carried(lay.reduce(self.dim), dst.shape)
        return {} if out is None else {dst: out}

    def lower(self, cx: LowerContext) -> Stmt:
        """Reduce within each thread, then over the lanes of a row by butterfly shuffles, then over warps by shared memory."""
        return ReduceLowering(self, cx, COMBINE[self.kind], identity(self.kind, self.dst.dtype)).lower()

    def check(self) -> None:
        """dst is src without dim (or 1 there), in fragment, shared or thread-private memory; bitwise kinds need integers."""
        shape, out = list(self.src.extents), list(self.dst.extents)
        removed = shape[:self.dim] + shape[self.dim + 1:] or [1]
        kept = shape[:self.dim] + [1] + shape[self.dim + 1:]
        if out not in (removed, kept):
            raise errors.error("reduce-shape", f"Invalid reduce output shape, buffer shape is {shape}, dim is {self.dim}, "
                               f"output shape is ‹{out}›, expected shapes are {removed}, {kept}",
                               expected=f"{removed} or {kept}", span=self.span)
        a, b = (memory(r.buffer.scope_name) for r in (self.src, self.dst))
        if a == "other" or b == "other" or (a == "thread") != (b == "thread"):
            raise errors.error("reduce-scope", f"Invalid buffer scopes for a reduction: `{self.src.buffer.name}` is "
                               f"{self.src.buffer.scope_name}, `{self.dst.buffer.name}` {self.dst.buffer.scope_name}",
                               found=f"{self.src.buffer.scope_name} to {self.dst.buffer.scope_name}",
                               span=self.span)
        for r in (self.dst, self.src):
            if self.kind.startswith("bit") and not (r.dtype.is_int or r.dtype.is_bool):
                raise errors.error("reduce-dtype", f"a {self.kind} reduction needs integers or bool, `{r.buffer.name}` is "
                                   f"‹{r.dtype}›", span=self.span)
        if self.kind in ("sum", "abssum", "prod"):
            reject_reductions(self.dst, self.span)

    def accesses(self) -> tuple[Access, ...]:
        return Access(self.src, "read"), Access(self.dst, "write" if self.clear else "readwrite")


def reject_reductions(dst: Region, span: Span | None) -> None:
    """Raise reduce-dtype where the result's type has no zero to start a sum from."""
    if dst.dtype.base == SCALE:
        raise errors.error("reduce-dtype", f"a sum needs «a type with a zero», `{dst.buffer.name}` is ‹{dst.dtype}›", span=span,
                           hint="sum in float32 and convert the result")


def memory(scope: str) -> str:
    """Who holds a tile in this scope: the block, each thread, or other memory."""
    if scope in (FRAGMENT, STATIC, DYNAMIC):
        return "block"
    return "thread" if scope in PRIVATE else "other"
