"""Bulk copies (cp.async.bulk) of a contiguous run between global and shared memory, issued by one thread.

Addresses and size are multiples of 16 bytes, and nothing is clipped: the run must provably lie inside the tensor.  The
Copy carries bulk=True, and for a load into shared memory barrier=(shared.barrier buffer, index).

A run that may extend beyond the tensor is copied as TMA boxes of one row with a tensor map (boxes=True beside bulk):
elements outside are read as zero and not written.  Such boxes have up to 256 elements and start at multiples of 128 bytes
of shared memory.  Tensors that other ranks reach have no tensor maps, because the host does not know which rank is meant.
"""

from __future__ import annotations

import math
from typing import Any

from tilelang.arith import divisible
from tilelang.ir import AddressOf, Region, Stmt, const, convert, do, is_const, seq
from tilelang.target.tensor_map import REDUCE_ADD, unsupported

from .tma_boxes import barrier_of, copied_tile, moved, row_box, tensor_of, tensor_unsupported, unaligned

UNIT = 16  # bytes
MOST_BYTES = 1 << 16
_BOX, _START = 256, 128  # maximum elements of a box; alignment of its start in bytes
_MOST_BOXES = 16


def run_unsupported(op: Any, tile: Region, run: Region, analyzer: Any, strides: bool = False) -> str:
    """Why `tile` (shared) and `run` (global) can use neither a bulk copy nor boxes of one row; "" when they can use one.

    analyzer: knows the ranges of the variables in run.  strides: run-time strides are assumed to be multiples of 16 bytes,
    which the host checks.
    """
    why = _form(op, tile, run)
    if why or not as_boxes(tile, run, analyzer):
        return why
    boxes = _boxes(op, tile, run, analyzer, strides)
    return f"{run_place(run, tile.dtype.bits, analyzer)}, and {boxes}" if boxes else ""


def run_sum_unsupported(op: Any, analyzer: Any, strides: bool = False) -> str:
    """Why the shared row of an atomic addition cannot be added by boxes of one row; "" when it can.

    analyzer, strides: as in run_unsupported.
    """
    if str(op.dst.dtype) not in REDUCE_ADD:
        return f"TMA cannot add elements of {op.dst.dtype}"
    return _form(op, op.value, op.dst) or _boxes(op, op.value, op.dst, analyzer, strides)


def row_boxes_unsupported(op: Any, strides: bool = False) -> str:
    """Why a load of a whole shared vector cannot be a stage of a ring, filled by boxes of one row; "" when it can.

    Each stage starts at a multiple of 128 bytes.  strides: as in run_unsupported.
    """
    why = _form(op, op.dst, op.src)
    if not why and bulk_bytes(op.dst) % _START:
        why = f"`{op.dst.buffer.name}` has {bulk_bytes(op.dst)} bytes, no multiple of {_START}"
    return why or _boxes(op, op.dst, op.src, None, strides)


def as_boxes(tile: Region, run: Region, analyzer: Any) -> bool:
    """Whether a copy needs boxes (attr boxes): its run is not provably inside the tensor in whole 16-byte units."""
    return bool(run_place(run, tile.dtype.bits, analyzer))


def _form(op: Any, tile: Region, run: Region) -> str:
    """Why neither way is possible; "" when nothing excludes both."""
    b, t = tile.buffer, run.buffer
    if op.plan.disable_tma or op.plan.prefer_instruction not in (None, "tma"):
        return "the copy asks for another way"
    if tile.dtype != run.dtype or tile.dtype.lanes != 1:
        return "the copy converts"
    if b.ndim != 1 or not b.is_static or b.strides_ is not None or not tile.is_full:
        return f"`{b.name}` is no whole row"
    n, bits = int(b.shape[0]), tile.dtype.bits
    if n * bits % (8 * UNIT) or n * bits > 8 * MOST_BYTES:
        return f"`{b.name}` has {n * bits / 8:g} bytes"
    if not is_const(run.extents[-1], n) or any(not is_const(e, 1) for e in run.extents[:-1]) or \
            not is_const(t.strides[-1], 1):
        return f"the tile of `{t.name}` is not contiguous"
    if (t.facts.align or UNIT) < UNIT:
        return f"`{t.name}` may start at no multiple of {UNIT} bytes"
    return ""


def run_place(run: Region, bits: int, analyzer: Any, divisors: Any = None) -> str:
    """Why the position of a run does not permit a bulk copy; "" when it does.  divisors: known ones of variables."""
    t = run.buffer
    step = UNIT * 8 // math.gcd(bits, UNIT * 8)
    at: Any = convert(t.offset)
    for m, s in zip(run.mins, t.strides):
        at = at + convert(m) * s
    if not divisible(at, step, divisors, analyzer):
        return f"the tile of `{t.name}` may start at no multiple of {UNIT} bytes"
    for m, e, size in zip(run.mins, run.extents, t.shape):
        low = convert(m)
        inside = low < size if is_const(e, 1) else low + e <= size  # as a condition around the copy may say it
        if not (analyzer.can_prove(low >= 0) and analyzer.can_prove(inside)):
            return f"the tile may leave `{t.name}`"
    return ""


def _boxes(op: Any, tile: Region, run: Region, analyzer: Any, strides: bool) -> str:
    """Why boxes of one row are not possible; "" when they are."""
    t = run.buffer
    unit = UNIT * 8 // math.gcd(tile.dtype.bits, UNIT * 8)
    # Without an analyzer the pass given_boxes, which knows the divisors of bound variables, has decided.
    if op.plan.unaligned_columns or analyzer is not None and not divisible(convert(run.mins[-1]), unit, None, analyzer):
        return unaligned(run)
    wide = _box_columns(tile)
    if not wide:
        return f"`{tile.buffer.name}` has no parts of whole {_START} bytes and at most {_BOX} elements"
    return tensor_unsupported(t, strides) or unsupported(t, row_box(run, wide)) or ""


def _box_columns(tile: Region) -> int:
    """Elements of a box; 0 where the tile cannot be divided into boxes or needs too many."""
    n, bits = _length(tile), tile.dtype.bits
    fits = [w for w in range(1, min(_BOX, n) + 1) if n % w == 0 and (w == n or w * bits % (8 * _START) == 0)]
    return fits[-1] if fits and n // fits[-1] <= _MOST_BOXES else 0


def bulk_bytes(tile: Region) -> int:
    """Bytes that a bulk copy of a shared tile moves."""
    return _length(tile) * tile.dtype.bits // 8


def _length(tile: Region) -> int:
    """Elements of a row: the last dimension of a shared vector or of its stages."""
    return int(tile.buffer.shape[-1])


def _place_of(tile: Region, first: int, cx: Any) -> AddressOf:
    storage, place = cx.physical(tile.buffer, (*(cx.expr(convert(m)) for m in tile.mins[:-1]), const(first)))
    return AddressOf(storage, cx.simplified(place))


def lower_bulk(op: Any, cx: Any, store: str = "tma_store") -> Stmt:
    """Lower an op with bulk=True to the statements of the one thread that issues it; a store is committed as a bulk group.

    store: the instruction that stores a box.
    """
    tile, run = copied_tile(op), tensor_of(op)
    if op.plan.boxes:
        wide = _box_columns(tile)
        name = cx.tensor_map(run.buffer, row_box(run, wide), 0, row_bytes=bulk_bytes(tile))
        return moved(op, cx, name, [(_place_of(tile, first, cx), {run.buffer.ndim - 1: first})
                                    for first in range(0, _length(tile), wide)], store=store)
    return committed(op, bulk_run(op, cx, _place_of(tile, 0, cx), bulk_bytes(tile)))


def bulk_run(op: Any, cx: Any, inside: AddressOf, nbytes: int, at: Any = None) -> Stmt:
    """The bulk copy of a run, which begins at the lowered indices `at` if given, to or from shared memory at `inside`."""
    run, size = tensor_of(op), const(nbytes, "uint32")
    outside = AddressOf(run.buffer, cx.simplified(at or tuple(cx.expr(convert(m)) for m in run.mins)))
    if run is op.src:
        return do("bulk_load", inside, outside, size, barrier_of(op, cx), span=op.span)
    return do("bulk_store", outside, inside, size, span=op.span)


def committed(op: Any, copies: Stmt) -> Stmt:
    """The copies of an op; stores are one bulk group."""
    return copies if tensor_of(op) is op.src else seq(copies, do("bulk_commit", span=op.span), span=op.span)
