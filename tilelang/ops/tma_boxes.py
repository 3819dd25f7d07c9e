"""What copies by TMA boxes have in common: tensors that TMA cannot address, extents of boxes, and the instructions.

The instructions are statements of the one thread that issues them.  A store is committed as a bulk group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tilelang.arith import divisible
from tilelang.ir import AddressOf, Buffer, Const, Expr, Region, Stmt, const, convert, do, is_const, seq, GLOBAL
from tilelang.target.tensor_map import STRIDE_ALIGN

Piece = tuple[AddressOf, dict[int, Any]]  # shared address, {dimension of the tensor: distance from the first element}


# ---- what TMA cannot do ---------------------------------------------------------------------------------------------------


def excluded(op: Any, tile: Region, other: Region) -> str:
    """Why a copy between a shared tile and a tensor is not TMA's, whatever their shapes; "" when nothing excludes it."""
    if op.plan.disable_tma or op.plan.prefer_instruction not in (None, "tma"):
        return "the copy asks for another way"
    if op.plan.unaligned_columns:
        return unaligned(other)
    return reached_by_ranks(other.buffer) or ("the copy converts" if tile.dtype != other.dtype else "")


def reached_by_ranks(b: Buffer) -> str:
    """Why no tensor map describes a tensor that other ranks reach: only bulk copies (bulk.py) do; "" for others."""
    return f"other ranks reach `{b.name}`" if b.facts.symmetric else ""


def unaligned(tile: Region) -> str:
    """Why TMA cannot load a tile whose first column is not known to be a multiple of 16 bytes
    (transform/legalize/given_boxes.py)."""
    return f"the tile of `{tile.buffer.name}` may start at a column that is no multiple of {STRIDE_ALIGN} bytes"


def strides_unsupported(buffer: Buffer, strides: bool) -> str:
    """Why TMA cannot address a tensor with its run-time strides; "" when it can.

    strides: they are assumed to be multiples of 16 bytes, which the host checks.
    """
    unit = STRIDE_ALIGN * 8 // math.gcd(buffer.dtype.bits, STRIDE_ALIGN * 8)
    if strides or all(divisible(s, unit) for s in buffer.strides[:-1] if not isinstance(s, int) and not hasattr(s, "value")):
        return ""
    return f"run-time strides of `{buffer.name}` may be no multiples of {STRIDE_ALIGN} bytes"


def tensor_unsupported(buffer: Buffer, strides: bool = False) -> str:
    """Why TMA cannot write a tensor, whatever the boxes; "" when it can.  strides: as for strides_unsupported."""
    if buffer.facts.symmetric:
        return reached_by_ranks(buffer)
    if not isinstance(buffer.offset, int) and not hasattr(buffer.offset, "value"):
        return strides_unsupported(buffer, strides) or f"where `{buffer.name}` starts is known at run time only"
    return strides_unsupported(buffer, strides)


def no_box(tile: Region) -> str:
    """Why a tile of a tensor that has no matrix_dims is no box."""
    return f"the tile of `{tile.buffer.name}` is no box whose rows are contiguous"


# ---- boxes ------------------------------------------------------------------------------------------------------------------


def matrix_dims(region: Region, rows: int | Expr, columns: int) -> tuple[int, int] | None:
    """The dimensions of a tensor that are a tile's rows and columns; None where the region is not such a tile."""
    wide = [d for d, n in enumerate(region.extents) if not is_const(n, 1)]
    if len(wide) != 2 or wide[1] != region.buffer.ndim - 1 or not _same(region.extents[wide[0]], rows) or \
            not is_const(region.extents[wide[1]], columns):
        return None
    return wide[0], wide[1]


def _same(extent: Any, rows: int | Expr) -> bool:
    return is_const(extent, rows) if isinstance(rows, int) else isinstance(extent, Expr) and extent.same(rows)


def row_bytes(tensor: Region, columns: int) -> int:
    """Contiguous bytes that a row of so many columns takes of a tensor: for T.tma_copy, L2 fetches nothing behind the tensor's
    last column. For T.copy it does, as blocks that read neighbouring rows at the same time are faster so (decision 241)."""
    width = convert(tensor.buffer.shape[-1])
    return (min(columns, int(width.value)) if isinstance(width, Const) else columns) * tensor.buffer.dtype.bits // 8


def box_of(tensor: Region, dims: tuple[int, int], rows: int, columns: int) -> tuple[int, ...]:
    """Extents of a TMA box, innermost first.  dims: the dimensions of its rows and columns."""
    sizes = {dims[0]: rows, dims[1]: columns}
    return tuple(sizes.get(d, 1) for d in reversed(range(tensor.buffer.ndim)))


def row_box(tensor: Region, columns: int) -> tuple[int, ...]:
    """Extents of a box of one row, innermost first."""
    return (columns, *[1] * (tensor.buffer.ndim - 1))


def copied_tile(op: Any) -> Region:
    """The shared tile of a Copy or AtomicTile that is done by TMA."""
    if op.dst.buffer.scope_name != GLOBAL:
        return op.dst  # type: ignore[no-any-return]
    return op.src if hasattr(op, "src") else op.value  # type: ignore[no-any-return]


def tensor_of(op: Any) -> Region:
    """The region of the tensor that a Copy moves from or to the shared tile."""
    return op.src if copied_tile(op) is op.dst else op.dst  # type: ignore[no-any-return]


# ---- instructions -----------------------------------------------------------------------------------------------------------


def start_of(tile: Region, cx: Any) -> tuple[Buffer, Expr]:
    """Storage and index of the first element of the shared matrix, or of the stage of it, that a tile belongs to."""
    storage, (base,) = cx.physical(tile.buffer, (*(cx.expr(convert(m)) for m in tile.mins[:-2]), const(0), const(0)))
    return storage, base


def barrier_of(op: Any, cx: Any) -> AddressOf:
    """The mbarrier on which the bytes of a load arrive."""
    barrier, index = op.plan.barrier
    return AddressOf(barrier, (cx.expr(convert(index)),))


def cache_hint(op: Any) -> dict[str, Any]:
    """The option of an instruction for the eviction policy that the program asks for."""
    hint = op.plan.eviction_policy
    return {"cache_hint": hint} if hint in ("evict_first", "evict_last") else {}


def moved(op: Any, cx: Any, name: str, pieces: Sequence[Piece], to: Expr | None = None, store: str = "tma_store") -> Stmt:
    """The loads or stores of boxes.  name: their tensor map.  to: mask of the CTAs that receive a load."""
    load = op.dst.buffer.scope_name != GLOBAL
    options: dict[str, Any] = {"map": name, **cache_hint(op), **({} if to is None else {"multicast": True})}
    fixed, more = [barrier_of(op, cx)] if load else [], [] if to is None else [to]
    first, out = [cx.expr(convert(m)) for m in (op.src if load else op.dst).mins], []
    for place, far in pieces:
        where = cx.simplified(tuple(first[d] + far[d] if d in far else first[d] for d in reversed(range(len(first)))))
        out.append(do("tma_load" if load else store, place, *fixed, *where, *more, span=op.span, **options))
    return seq(*out, *([] if load else [do("bulk_commit", span=op.span)]), span=op.span)
