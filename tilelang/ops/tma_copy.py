"""T.tma_copy and T.copy_cluster: asynchronous copies that one thread issues; the op does not wait for them.

    load:   leader: mbarrier_expect_tx(bar, bytes); tma_load(box, bar) ...      # multicast: by the lowest rank of the mask
    store:  leader: tma_store(box) ...; bulk_commit
    to another block:  leader: bulk_copy_cluster(row, ...) ...   # rows of other lengths: cluster_store by all threads
"""

from __future__ import annotations

import math
from typing import Any

from tilelang.arith import divisible
from tilelang.errors import error, register
from tilelang.ir import (AddressOf, Buffer, Expr, For, If, Region, Stmt, binary, call, const, convert, do, fresh, is_const,
                         load, region_of, replace, seq, SHARED)
from tilelang.layout import boxes_of, linear_layout
from tilelang.target.tensor_map import unsupported

from .bulk import bulk_run, committed, run_place
from .plans import CopyPlan
from .gemm.wgmma import no_boxes, shared_boxes
from .tma import lower_tma_load, tma_bytes, tma_unsupported
from .tma_boxes import (Piece, barrier_of, box_of, copied_tile, matrix_dims, moved, no_box, row_box, row_bytes, start_of,
                        tensor_of, unaligned)
from .tma_store import store_tile

register("tma-copy", ValueError, "a tile that TMA cannot move", "a tile is (rows, columns) of a tensor whose rows are "
         "contiguous, in a shared buffer with rows of 16, 32, 64 or a multiple of 128 bytes; or a whole row; T.copy moves any "
         "tile", expected="a tile that TMA can move")
_SLICE = "let the slice start at a box and consist of whole boxes, or move it by T.copy and a barrier"
MOST_OF_BOX = 256  # maximum elements of a box along one dimension (CUDA Driver API, cuTensorMapEncodeTiled)


def check_tma_copy(op: Any) -> None:
    """Raise tma-copy at the op where TMA cannot move the tile."""
    _reject(op, _unsupported(op))


def _reject(op: Any, why: str) -> None:
    if why:
        raise error("tma-copy", f"T.{'copy_cluster' if op.plan.dst_block is not None else 'tma_copy'} cannot be done by "
                    f"TMA: {why}", found=why, span=op.span, hint=_SLICE if why.startswith("the slice is") else "")


def is_row(op: Any) -> bool:
    """Whether a T.tma_copy moves rows: unswizzled boxes of one row, whatever its length, or bulk copies to and from other
    ranks, whose tensors have no tensor map."""
    tile, other = copied_tile(op), tensor_of(op)
    return op.plan.by_hand and (other.buffer.facts.symmetric or all(
        is_const(n, 1) for n in (*tile.extents[:-1], *other.extents[:-1])))


def _row_box(op: Any) -> int:
    """Elements of one box of a row: equal boxes, each starting at an address that TMA permits."""
    tile = copied_tile(op)
    n, bits = tile.extents[-1], tile.dtype.bits
    whole = int(tile.buffer.shape[-1])
    if not isinstance(n, int) or n * bits % 128 or not divisible(convert(tile.mins[-1]), max(1, 1024 // bits)):
        return 0
    if tile.buffer.ndim > 1 and whole * bits % 1024:
        return 0  # rows after the first would start at an address that is no multiple of 128 bytes
    return next((k for k in range(min(n, MOST_OF_BOX), 0, -1) if n % k == 0 and k * bits % (128 if k == n else 1024) == 0), 0)


def _row_unsupported(op: Any) -> str:
    tile, other = copied_tile(op), tensor_of(op)
    if tile.dtype != other.dtype:
        return "the copy converts"
    if other.buffer.facts.symmetric:  # a bulk copy of each row
        n, whole = tile.extents[-1], is_const(other.buffer.strides[-1], 1)
        ok = whole and isinstance(n, int) and n * tile.dtype.bits % 128 == 0 and divisible(
            convert(tile.mins[-1]), 128 // tile.dtype.bits) and int(tile.buffer.shape[-1]) * tile.dtype.bits % 128 == 0
        if _rows(tile) is None or _rows(tile) != _rows(other) or not is_const(other.extents[-1], n):
            return f"the tile is {tuple(tile.extents)}, and of `{other.buffer.name}` {tuple(other.extents)}"
        steps = (s for s, m in zip(other.buffer.strides[:-1], other.extents) if not is_const(m, 1))
        if not all(divisible(s, 128 // tile.dtype.bits) for s in steps):
            return f"rows of `{other.buffer.name}` do not start at multiples of 16 bytes"
        return "" if ok else f"{_slice(tile)}, no multiples of 16 bytes"
    if op.plan.unaligned_columns:
        return unaligned(other)
    k = _row_box(op)
    if not k:
        return f"{_slice(tile)}: no equal boxes of multiples of 16 bytes that start at multiples of 128 bytes"
    return unsupported(other.buffer, row_box(other, k), 0) or ""


def _rows(r: Region) -> tuple[int, ...] | None:
    """The extents of the rows of a region, without ones; None where they are known at run time only."""
    rows = tuple(n for n in r.extents[:-1] if not is_const(n, 1))
    return tuple(map(int, rows)) if all(isinstance(n, int) for n in rows) else None


def _bulk_rows(op: Any, cx: Any) -> Stmt:
    """The bulk copies of the rows of a tile to or from another rank; of all rows at once where they follow each other there."""
    tile, other = copied_tile(op), tensor_of(op)
    n, rows = int(tile.extents[-1]), math.prod(_rows(tile) or ())
    whole = all(is_const(a, b) for r in (tile, other) for a, b in list(zip(r.extents, r.buffer.shape))[-1:])
    if whole and len(_rows(tile) or ()) == 1 and all(is_const(m, 1) for r in (tile, other) for m in r.extents[:-2]):
        n, rows = n * rows, 1
    k = fresh("row")

    def run(row: Any) -> Stmt:
        inside = AddressOf(*cx.physical(tile.buffer, _at(tile, row * n, cx)))
        return bulk_run(op, cx, inside, n * tile.dtype.bits // 8, _at(other, row * n, cx))

    return committed(op, run(const(0)) if rows == 1 else For(k, const(0), const(rows), "serial", run(k), span=op.span))


def _slice(tile: Region) -> str:
    """What part of a shared buffer a tile is, in words."""
    b = tile.buffer
    if is_const(tile.extents[-1], b.shape[-1]) and b.ndim > 1 and not is_const(tile.extents[-2], 1):
        return f"the slice is {tile.extents[-2]} of {b.shape[-2]} rows of `{b.name}`"
    return f"the slice is {tile.extents[-1]} of {b.shape[-1]} columns of `{b.name}`"


def _is_slice(op: Any) -> bool:
    """Whether a T.tma_copy moves some rows or columns of a swizzled matrix."""
    tile = copied_tile(op)
    return not is_row(op) and not all(is_const(m, 0) and is_const(n, d) for m, n, d in zip(
        tile.mins[-2:], tile.extents[-2:], tile.buffer.shape[-2:]))


def _slice_unsupported(op: Any, tile: Region, other: Region) -> str:
    """Why boxes of the swizzled matrix are not the slice of an op; "" when they are."""
    p, (rows, columns) = shared_boxes(tile.buffer), tile.extents[-2:]
    if not isinstance(rows, int) or not isinstance(columns, int):
        return "its extents are known at run time only"
    if p is None:
        return no_boxes(tile.buffer)
    if columns % p.box_columns or not divisible(convert(tile.mins[-1]), p.box_columns):
        return f"{_slice(tile)}, whose boxes have {p.box_columns} columns"
    each = _rows_of_box(rows, p.width)
    if not each or not divisible(convert(tile.mins[-2]), 128 // p.width):
        return f"{_slice(tile)}, and its boxes of {p.width} bytes a row do not start at multiples of 128 bytes"
    dims = matrix_dims(other, rows, columns)
    if dims is None:
        return no_box(other)
    if tile.dtype != other.dtype:
        return "the copy converts"
    return unaligned(other) if op.plan.unaligned_columns else unsupported(
        other.buffer, box_of(other, dims, each, p.box_columns), p.swizzle) or ""


def _rows_of_box(rows: int, width: int) -> int:
    """Rows of each of the equal boxes of a slice, which start at multiples of 128 bytes; 0 where there are none."""
    return next((k for k in range(min(rows, MOST_OF_BOX), 0, -1) if rows % k == 0 and (k == rows or k * width % 128 == 0)), 0)


def _slice_boxes(op: Any, cx: Any, to: Expr | None = None) -> Stmt:
    """The TMA boxes of some rows and columns of a swizzled matrix, as statements of the one thread that issues them."""
    tile, other = copied_tile(op), tensor_of(op)
    rows, columns = map(int, tile.extents[-2:])
    p, dims = boxes_of(cx.layout_of(tile.buffer), tile.dtype.bits), matrix_dims(other, rows, columns)
    assert p is not None and dims is not None, "check_tma_copy has seen this slice"
    each = _rows_of_box(rows, p.width)
    box, (storage, base) = box_of(other, dims, each, p.box_columns), start_of(tile, cx)
    row, column = (cx.expr(convert(m)) for m in tile.mins[-2:])
    pieces: list[Piece] = []
    for c in range(0, columns, p.box_columns):
        for r in range(0, rows, each):
            first = (column // p.box_columns + c // p.box_columns) * (p.rows * p.box_columns) + (row + r) * p.box_columns
            (place,) = cx.simplified((base + first,))
            pieces.append((AddressOf(storage, (place,)), {dims[0]: r, dims[1]: c}))
    return moved(op, cx, cx.tensor_map(other.buffer, box, p.swizzle, row_bytes=row_bytes(other, columns)), pieces, to)


def _row_boxes(op: Any, cx: Any, to: Expr | None = None) -> Stmt:
    """The TMA boxes of a row, as statements of the one thread that issues them."""
    tile, other = copied_tile(op), tensor_of(op)
    if other.buffer.facts.symmetric:
        _reject(op, run_place(other, tile.dtype.bits, cx.known.analyzer, cx.known.divisors))
        return _bulk_rows(op, cx)
    k, n = _row_box(op), int(tile.extents[-1])
    name = cx.tensor_map(other.buffer, row_box(other, k), 0)
    pieces = [(AddressOf(*cx.physical(tile.buffer, _at(tile, first, cx))), {other.buffer.ndim - 1: first})
              for first in range(0, n, k)]
    return moved(op, cx, name, pieces, to)


def _unsupported(op: Any) -> str:
    if op.plan.dst_block is not None:
        return _bulk_unsupported(op)
    if is_row(op):
        return _row_unsupported(op)
    tile = copied_tile(op)
    b = tile.buffer
    if b.ndim < 2 or any(not is_const(n, 1) for n in tile.extents[:-2]):
        return f"the tile of `{b.name}` is no matrix"
    if _is_slice(op):
        return _slice_unsupported(op, tile, tensor_of(op))
    one = Buffer(b.name, tuple(b.shape[-2:]), b.dtype, b.scope_name, b.strides_ and b.strides_[-2:])
    kept = CopyPlan(tf32=op.plan.tf32, unaligned_columns=op.plan.unaligned_columns)
    return tma_unsupported(replace(op, src=tensor_of(op), dst=region_of(one), plan=kept))


def lower_tma_copy(op: Any, cx: Any) -> Stmt:
    """The per-thread statements of the copy."""
    if op.plan.dst_block is not None:
        return _leader(op, cx, _bulk(op, cx)) if _in_rows(op, cx) else _stores(op, cx)
    if op.dst.buffer.scope_name not in SHARED:
        return _leader(op, cx, _boxes(op)(op, cx) if is_row(op) or _is_slice(op) else store_tile(cx, op.src, op.dst, op))
    expect = do("mbarrier_expect_tx", barrier_of(op, cx), const(_bytes(op), "uint32"), span=op.span)
    return _leader(op, cx, seq(expect, _loads(op, cx), span=op.span))


def _bytes(op: Any) -> int:
    """Bytes that a load adds to its mbarrier's transaction count."""
    if not is_row(op) and not _is_slice(op):
        return tma_bytes(op)
    return math.prod(map(int, copied_tile(op).extents)) * op.dst.dtype.bits // 8


def _boxes(op: Any) -> Any:
    """The function that lowers the op to TMA instructions."""
    return _row_boxes if is_row(op) else _slice_boxes if _is_slice(op) else lower_tma_load


def _loads(op: Any, cx: Any) -> Stmt:
    mask, load = op.plan.cluster_mask, _boxes(op)
    if mask is None or cx.launch.plan.cluster is None:
        return load(op, cx)
    rank = call("cluster_rank", (), "uint32")
    first = (mask & -mask).bit_length() - 1
    shared = If(binary("eq", rank, const(first, "uint32")), load(op, cx, const(mask, "uint16")), span=op.span)
    x, y, z = cx.launch.plan.cluster or (1, 1, 1)
    if mask == (1 << x * y * z) - 1:
        return shared
    inside = binary("ne", binary("bitand", binary("shr", const(mask, "uint32"), rank), const(1, "uint32")), const(0, "uint32"))
    return If(inside, shared, load(op, cx), span=op.span)


def _leader(op: Any, cx: Any, body: Stmt) -> Stmt:
    """`body`, executed by one of the threads that execute the op (or by one of each `leader_scope` threads)."""
    thread, scope = cx.thread, op.plan.leader_scope
    if scope is not None:
        return If(binary("eq", thread % scope, const(0, "int32")), body, span=op.span)
    if cx.num_threads % 32:  # not a multiple of whole warps
        return If(binary("eq", thread, const(0, "int32")), body, span=op.span)
    body = If(call("elect_one", (), "bool"), body, span=op.span)
    return body if cx.num_threads <= 32 else If(binary("lt", thread, const(32, "int32")), body, span=op.span)


# ---- to another block of the cluster ------------------------------------------------------------------------------------


def _bulk_unsupported(op: Any) -> str:
    s, d = op.src, op.dst
    if s.dtype != d.dtype:
        return "the copy converts"
    if any(not isinstance(n, int) for n in (*s.extents, *d.extents)):
        return "the extents of its tile are known at run time only"
    return ""


def _in_rows(op: Any, cx: Any) -> int:
    """Elements of the contiguous parts that bulk copies move; 0 where these are no multiples of 16 bytes, or the user gave a
    tile another layout."""
    if any(cx.layout_of(b) != linear_layout(tuple(b.shape)) for b in (op.src.buffer, op.dst.buffer) if b.is_static):
        return 0
    n = math.gcd(_run(op.src), _run(op.dst))
    starts = (sum(m * w for m, w in zip(r.mins, r.buffer.strides)) for r in (op.src, op.dst))
    whole = n * op.src.dtype.bits % 128 == 0
    return n if whole and all(divisible(convert(at), 128 // op.src.dtype.bits) for at in starts) else 0


def _stores(op: Any, cx: Any) -> Stmt:
    """Threads store the elements to the other block, and each counts its bytes at that block's mbarrier."""
    s, d = op.src, op.dst
    bar, rank = barrier_of(op, cx), cx.expr(op.plan.dst_block)
    count, size = math.prod(map(int, s.extents)), s.dtype.bits // 8
    turns, rest = divmod(count, cx.num_threads)

    def element(k: Expr) -> Stmt:
        storage, at = cx.physical(s.buffer, _at(s, k, cx))
        there = AddressOf(*cx.physical(d.buffer, _at(d, k, cx)))
        return do("cluster_store", there, rank, load(storage, at), span=op.span)

    def counted(body: Stmt, n: int) -> Stmt:
        return seq(body, do("mbarrier_complete_remote", bar, rank, const(n * size, "uint32"), span=op.span))

    out: list[Stmt] = []
    if turns:
        v = fresh("v")
        out.append(counted(For(v, const(0), const(turns), "serial", element(v * cx.num_threads + cx.thread)), turns))
    if rest:
        out.append(If(binary("lt", cx.thread, const(rest, cx.thread.dtype)),
                      counted(element(cx.thread + turns * cx.num_threads), 1)))
    return seq(*out, span=op.span)


def _run(r: Region) -> int:
    """Elements of a region that are contiguous in a row-major buffer."""
    n = 1
    for extent, size in zip(reversed(r.extents), reversed(r.buffer.shape)):
        n *= extent
        if not is_const(size, extent):
            break
    return n


def _bulk(op: Any, cx: Any) -> Stmt:
    s, d, n = op.src, op.dst, _in_rows(op, cx)
    size, bar, rank = const(n * s.dtype.bits // 8, "uint32"), barrier_of(op, cx), cx.expr(op.plan.dst_block)
    out: list[Stmt] = []
    for first in range(0, math.prod(s.extents), n):
        to, frm = (AddressOf(*cx.physical(r.buffer, _at(r, first, cx))) for r in (d, s))
        out.append(do("bulk_copy_cluster", to, frm, size, bar, rank, span=op.span))
    return seq(*out, span=op.span)


def _at(r: Region, k: Any, cx: Any) -> tuple[Expr, ...]:
    """Indices of element k of a region, counted in row-major order."""
    out = []
    for low, n in zip(reversed(r.mins), reversed(r.extents)):
        out.append(cx.expr(convert(low)) + k % n)
        k //= n
    return tuple(reversed(out))
