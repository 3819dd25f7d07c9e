"""Contiguous runs between global and shared memory as one bulk copy (cp.async.bulk), asked for by one thread.

Addresses and size are multiples of 16 bytes and nothing is clipped, so the run lies inside the tensor for certain.  The
Copy carries bulk=True, and into shared memory barrier=(shared.barrier buffer, index).
"""

from __future__ import annotations

import math
from typing import Any

from tilelang.arith import divisible
from tilelang.ir import AddressOf, Evaluate, Expr, Region, Stmt, call, const, convert, is_const, seq

UNIT = 16  # bytes
MOST_BYTES = 1 << 16


def bulk_refusal(op: Any, tile: Region, run: Region, analyzer: Any, divisors: Any = None) -> str:
    """Why `tile` (shared) and `run` (global) cannot be the two sides of a bulk copy; "" when they can.

    analyzer: knows the ranges of the variables in run.  divisors: known divisors of variables.
    """
    b, t = tile.buffer, run.buffer
    if op.attr("disable_tma") or op.attr("prefer_instruction") not in (None, "tma"):
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
    if int(t.attr("align", UNIT)) < UNIT:
        return f"`{t.name}` may start at no multiple of {UNIT} bytes"
    step = UNIT * 8 // math.gcd(bits, UNIT * 8)
    at: Any = convert(t.offset)
    for m, s in zip(run.mins, t.strides):
        at = at + convert(m) * s
    if not divisible(at, step, divisors, analyzer):
        return f"the tile of `{t.name}` may start at no multiple of {UNIT} bytes"
    for m, e, size in zip(run.mins, run.extents, t.shape):
        low = convert(m)
        if not (analyzer.can_prove(low >= 0) and analyzer.can_prove(low + e <= size)):
            return f"the tile may leave `{t.name}`"
    return ""


def bulk_bytes(tile: Region) -> int:
    """What a bulk copy of a shared tile moves."""
    return int(tile.buffer.shape[0]) * tile.dtype.bits // 8


def lower_bulk(op: Any, cx: Any) -> Stmt:
    """A Copy with bulk=True, as the one thread that runs it asks for it; a store is a bulk group."""
    into = op.dst.buffer.scope_name != "global"
    tile, run = (op.dst, op.src) if into else (op.src, op.dst)
    storage, place = cx.physical(tile.buffer, (const(0),))
    size = const(bulk_bytes(tile), "uint32")
    outside = AddressOf(run.buffer, cx.simplified(tuple(cx.expr(convert(m)) for m in run.mins)))
    if into:
        barrier, index = op.attr("barrier")
        bar = AddressOf(barrier, (cx.expr(convert(index)),))
        return _do("bulk_load", op, AddressOf(storage, place), outside, size, bar)
    return seq(_do("bulk_store", op, outside, AddressOf(storage, place), size), _do("bulk_commit", op), span=op.span)


def _do(name: str, op: Any, *args: Expr) -> Stmt:
    return Evaluate(call(name, args, "void", span=op.span), span=op.span)


__all__ = ["bulk_bytes", "bulk_refusal", "lower_bulk"]
