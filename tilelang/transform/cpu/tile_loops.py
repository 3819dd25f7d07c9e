"""Tile operations on elements become loop nests: which loop walks which dimension, and which may run outside of a tensor."""

from __future__ import annotations

from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import Const, Region, TileOp, GLOBAL
from tilelang.ops import AtomicTile, Copy, Fill, Transpose
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import TileLoops, TileSide
from tilelang.target.cpu_ranges import is_in_range


def plan_tile_loops(op: TileOp, a: Analyzer, guarded: bool) -> TileLoops | None:
    """The loop nest of a copy, transpose, fill or atomic update; None for other operations.

        copy(A[bx * 64, 0 : 64], s[0 : 64])    loops: 64;  A: dimension 1 is loop 0, 0 is guarded;  s: dimension 0 is loop 0

    a: ranges at this place.  guarded: accesses outside of a tensor are skipped.
    Raises cpu-unsupported for operands of different numbers of dimensions.
    """
    if isinstance(op, (Copy, Transpose)):
        other: Any = op.src
    elif isinstance(op, (AtomicTile, Fill)):
        other = op.value if isinstance(op.value, Region) else None
    else:
        return None
    dst: Region = op.dst
    dims = _walked(dst)
    extents = tuple(dst.extents[d] for d in dims)
    to = _side(dst, {d: k for k, d in enumerate(dims)}, extents, a, guarded)
    src = None if other is None else _side(other, _other_loops(op, dst, dims, other), extents, a, guarded)
    return TileLoops(op, extents, to, src, span=op.span)


def _walked(r: Region) -> list[int]:
    """Dimensions of a region with more than one element."""
    return [d for d, e in enumerate(r.extents) if not (isinstance(e, int) and e == 1)]


def _other_loops(op: TileOp, dst: Region, dims: list[int], other: Region) -> dict[int, int]:
    """Dimension of the other operand -> loop: dimensions with more than one element are matched in order."""
    theirs = _walked(other)
    if len(theirs) != len(dims) and len(dst.extents) == len(other.extents):
        theirs = dims  # same rank: a run-time extent may stand opposite a 1
    if len(theirs) != len(dims):
        raise unsupported(f"regions of {len(theirs)} and {len(dims)} non-unit dimensions in one tile operation",
                          span=op.span, hint="give both operands the same number of dimensions larger than 1")
    n = len(dims)
    swap = {}
    if isinstance(op, Transpose) and not any(isinstance(e, int | Const) and int(e) == 1 for e in dst.extents[-2:]):
        swap = {n - 2: n - 1, n - 1: n - 2}
    return {d: swap.get(k, k) for k, d in enumerate(theirs)}


def _side(r: Region, loop_of: dict[int, int], extents: tuple[Any, ...], a: Analyzer, guarded: bool) -> TileSide:
    clipped: dict[int, int] = {}
    fixed: list[int] = []
    for d, size in enumerate(r.buffer.shape if guarded and r.buffer.scope() == GLOBAL else ()):
        k = loop_of.get(d)
        start = r.mins[d]
        if k is None:
            if not is_in_range(a, start, size):
                fixed.append(d)
            continue
        e = extents[k]
        if not (isinstance(e, int) and e > 0 and is_in_range(a, start, size) and is_in_range(a, start + (e - 1), size)):
            clipped[k] = d
    return TileSide(tuple(loop_of.get(d, -1) for d in range(len(r.mins))), tuple(clipped.items()), tuple(fixed))
