"""Copies from global to shared memory by TMA: one thread issues the TMA boxes, which arrive on an mbarrier.

A swizzled tile (layout/swizzled_boxes.py) is loaded as one or several boxes, each at most one swizzle atom wide.  Elements
outside the tensor read as zero.  The Copy carries tma=True and barrier=(shared.barrier buffer, index).  The pass that sets them
makes one thread run the copy and sets the expected bytes of the barrier.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilelang.errors import InternalError
from tilelang.ir import AddressOf, Buffer, Const, Expr, If, Stmt, binary, const, convert, do, is_const, seq
from tilelang.ir.record import record
from tilelang.layout import Box, SwizzledBoxes, boxes_of
from tilelang.target.im2col import Im2col
from tilelang.target.tensor_map import unsupported

from .bulk import bulk_bytes
from .gemm.wgmma import no_boxes, shared_boxes
from .tma_boxes import barrier_of, box_of, cache_hint, excluded, matrix_dims, no_box, row_bytes, start_of, strides_unsupported

_A_BOX = 1024  # bytes whose transfer takes as long as issuing one more box
MOST_BOXES = 16  # boxes of a copy; with more, loads by all threads are no slower


def tma_unsupported(op: Any, strides: bool = False, some: bool = False) -> str:
    """Why a Copy from global to shared memory cannot be a TMA load; "" when it can.

    strides: run-time strides are assumed to be multiples of 16 bytes, which the host checks. some: it may fill some rows of the
    tile only.
    """
    src, dst = op.src, op.dst
    why, b = excluded(op, dst, src), dst.buffer
    if why:
        return why
    if b.ndim < 2 or not b.is_static or b.strides_ is not None or not (dst.is_full or some and _fills_rows(dst)):
        return f"`{b.name}` is not filled as a whole tile"
    rows, columns = int(dst.extents[-2]), int(b.shape[-1])
    if any(n != 1 for n in b.shape[:-2]) or rows == 1 or columns == 1:
        return f"`{b.name}` is no matrix"
    p = shared_boxes(b)
    if p is None:
        return no_boxes(b)
    dims, boxes = matrix_dims(src, rows, columns), p.boxes()
    if dims is None:
        return no_box(src)
    if len(boxes) > MOST_BOXES or len({(x.rows, x.columns) for x in boxes}) > 1:
        return f"`{b.name}` needs {len(boxes)} boxes"
    return strides_unsupported(src.buffer, strides) or unsupported(
        src.buffer, box_of(src, dims, min(rows, boxes[0].rows), boxes[0].columns), p.swizzle) or ""


def _fills_rows(dst: Any) -> bool:
    """Whether a region is whole rows of a matrix whose boxes each span all rows, in steps of a swizzle pattern."""
    first, rows = convert(dst.mins[-2]), convert(dst.extents[-2])
    return dst.buffer.ndim == 2 and is_const(dst.mins[-1], 0) and dst.extents[-1] == dst.buffer.shape[-1] and all(
        isinstance(n, Const) and n.value % 8 == 0 for n in (first, rows)) and dst.buffer.shape[0] <= 256


def versions_unsupported(b: Buffer) -> str:
    """Why the stages of a shared tile cannot be placed one after another for TMA; "" when they can."""
    p = shared_boxes(b)
    return f"`{b.name}` has {p.rows} rows, no multiple of the 8 of a swizzle pattern" if p and p.rows % 8 else ""


def tma_bytes(op: Any) -> int:
    """Bytes that the boxes of a copy's tile add to the transaction count of its mbarrier."""
    if op.dst.buffer.ndim == 1:
        return bulk_bytes(op.dst)
    p = shared_boxes(op.dst.buffer)
    if p is None:
        raise InternalError(f"`{op.dst.buffer.name}` has no TMA boxes")
    return p.transaction_bytes


def tma_boxes(op: Any, blocks: int) -> bool:
    """Whether each block of a cluster can load one piece of a copy's tile and multicast it to all of them."""
    p = shared_boxes(op.dst.buffer)
    return p is not None and _sub_tiles(p, blocks) is not None


@record
class _SubTiles:
    """A tile cut into equal pieces that the blocks of a cluster load cyclically: the boxes of the first piece, the distance to
    those of the next, and the number of pieces."""

    boxes: tuple[Box, ...]
    step: Box
    number: int


def _sub_tiles(p: SwizzledBoxes, blocks: int) -> _SubTiles | None:
    """The fastest cut of a tile into pieces, with at least one piece for each block.

    Every block must load a piece: only then does the arrival of a full tile prove to a block that all other blocks saw it
    release the stage before (transform/schedule/rings.py).  Pieces of a box start at a multiple of 128 bytes, because the
    swizzle pattern depends on the address.
    """
    boxes = p.boxes()
    first, found = boxes[0], []
    for each in range(1, len(boxes)):
        far = boxes[each]
        step = Box(far.row - first.row, far.column - first.column, 0, 0, far.offset - first.offset)
        n = len(boxes) // each
        moved = [Box(b.row + r * step.row, b.column + r * step.column, b.rows, b.columns, b.offset + r * step.offset)
                 for r in range(n) for b in boxes[:each]]
        if tuple(moved) == boxes:
            found.append(_SubTiles(boxes[:each], step, n))
    if all(b.rows == first.rows for b in boxes):
        found += [_SubTiles(tuple(replace(b, rows=rows) for b in boxes), Box(rows, 0, 0, 0, rows * p.width), first.rows // rows)
                  for rows in range(1, first.rows) if first.rows % rows == 0 and rows * p.width % 128 == 0]

    def cost(x: _SubTiles) -> int:
        """Cost of the block that loads most pieces, in bytes."""
        return -(-x.number // blocks) * sum(b.rows * b.columns * p.bits // 8 + _A_BOX for b in x.boxes)

    return min((x for x in found if x.number >= blocks), key=cost, default=None)


def row_boxes(op: Any, count: int) -> list[Any] | None:
    """Split a copy into `count` copies of equal numbers of rows, each a load of its own; None when that is impossible."""
    rows, columns = (int(n) for n in op.dst.buffer.shape[-2:])
    p, dims = shared_boxes(op.dst.buffer), matrix_dims(op.src, rows, columns)
    each = rows // count
    if p is None or dims is None or each * count != rows or each % 8 or any(b.row for b in p.boxes()):
        return None
    out = []
    for g in range(count):
        src, dst = ((tuple(m + g * each if k == d else m for k, m in enumerate(r.mins)),
                     tuple(each if k == d else n for k, n in enumerate(r.extents)), r)
                    for r, d in ((op.src, dims[0]), (op.dst, op.dst.buffer.ndim - 2)))
        out.append(replace(op, src=replace(src[2], mins=src[0], extents=src[1]),
                           dst=replace(dst[2], mins=dst[0], extents=dst[1])))
    return out


def lower_tma_load(op: Any, cx: Any, to: Expr | None = None) -> Stmt:
    """The TMA loads of a copy, as statements of the one thread that issues them.  to: mask of the CTAs that receive the tile.

    attr cluster_split=(rank, blocks, mask): `blocks` blocks of a cluster need the same tile.  Each loads its pieces and
    multicasts them to the blocks of the mask.
    """
    src, dst = op.src, op.dst
    got = boxes_of(cx.layout_of(dst.buffer), dst.dtype.bits)
    rows, columns = (int(n) for n in dst.extents[-2:])  # type: ignore[arg-type]
    dims = matrix_dims(src, rows, columns)
    if got is None or dims is None:
        raise InternalError(f"a copy to `{dst.buffer.name}` was planned as TMA, but it is no TMA box")
    boxes, step, count, blocks = got.boxes(), Box(0, 0, 0, 0, 0), 1, 1
    rank: Expr = const(0)
    if rows != got.rows:  # some rows of a tile whose boxes each span all of them
        first = int(convert(dst.mins[-2]).value)  # type: ignore[attr-defined]
        boxes = tuple(replace(b, row=0, rows=rows, offset=b.offset + first * got.width) for b in boxes)
    if op.plan.cluster_split:
        given, blocks, to = op.plan.cluster_split
        mine = _sub_tiles(got, blocks)
        if mine is None:
            raise InternalError(f"a copy to `{dst.buffer.name}` was shared by {blocks} blocks, but it has fewer sub-tiles")
        boxes, step, count = mine.boxes, mine.step, mine.number
        rank, to = cx.expr(convert(given)), cx.expr(convert(to))
    shape = box_of(src, dims, boxes[0].rows, got.boxes()[0].columns)
    wanted = row_bytes(src, columns) if op.plan.by_hand else columns * dst.dtype.bits // 8
    name = cx.tensor_map(src.buffer, shape, got.swizzle, op.plan.tf32, wanted)
    bar, (storage, base) = barrier_of(op, cx), start_of(dst, cx)
    attrs: dict[str, Any] = {"map": name, **cache_hint(op), **({"in_group": True} if op.plan.async_group else {})}
    mask: tuple[Expr, ...] = ()
    if to is not None:
        attrs["multicast"], mask = True, (to,)
    bits, m = dst.dtype.bits, Im2col.of(src.buffer)
    out: list[Stmt] = []
    for nth in range(-(-count // blocks)):
        sub_tile = rank + nth * blocks if nth else rank
        loads: list[Stmt] = []
        for box in boxes:
            at: list[Expr] = [cx.expr(convert(m)) for m in src.mins]
            at[dims[0]] = at[dims[0]] + box.row + sub_tile * step.row
            at[dims[1]] = at[dims[1]] + box.column + sub_tile * step.column
            far = base + box.offset * 8 // bits + sub_tile * (step.offset * 8 // bits)
            to_box = reversed(at) if m is None else m.coordinates(at[dims[0]], at[dims[1]], src.buffer.shape[0])
            place, *where = cx.simplified((far, *to_box))
            loads.append(do("tma_load", AddressOf(storage, (place,)), bar, *where, *mask, span=op.span, **attrs))
        last = (nth + 1) * blocks > count  # some blocks have one piece fewer
        out += [If(binary("lt", sub_tile, const(count, sub_tile.dtype)), seq(*loads))] if last else loads
    return seq(*out, span=op.span)
