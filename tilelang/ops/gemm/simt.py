"""Lower gemm to scalar multiply-adds of each thread: supports all types, layouts and sizes."""

from __future__ import annotations

from typing import Any

from tilelang.errors import error
from tilelang.ir import (Buffer, Const, For, If, Region, Stmt, Store, cast, const, dtype, fresh, load, seq, FRAGMENT, LOCAL)

from .mma import staged


def lower_simt(op: Any, cx: Any) -> Stmt:
    """c[i, j] += a[i, k] * b[k, j] with k as the outermost loop.

    A thread's accumulators stay in registers, and an operand element that several of them use is read once per k step.
    Where c is thread-private memory, each thread computes all of it.
    """
    dt = op.c.dtype
    wide = dtype("float32") if op.a.dtype == "bfloat16" else dt  # float16 cannot represent every bfloat16
    a, b = (_readable(cx, r, op) for r in (op.a, op.b))
    k = fresh("k")

    def clear(p: Any) -> Stmt:
        return Store(op.c.buffer, op.c.at(*p), const(0.0 if dt.is_float else 0, dt), span=op.span)

    def add(p: Any) -> Stmt:
        i, j = p
        x = load(a.buffer, a.at(k, i) if op.transpose_a else a.at(i, k))
        y = load(b.buffer, b.at(j, k) if op.transpose_b else b.at(k, j))
        where = op.c.at(i, j)
        total = cast(load(op.c.buffer, where), wide) + cast(x, wide) * cast(y, wide)
        return Store(op.c.buffer, where, cast(total, dt), span=op.span)

    extents = (int(op.m), int(op.n))
    each = cx.private if op.c.buffer.scope_name == LOCAL else cx.parallel
    out: list[Stmt] = []
    if not isinstance(op.clear_accum, Const):
        out.append(If(cx.expr(op.clear_accum), each(extents, clear, span=op.span)))
    elif op.clear_accum.value:
        out.append(each(extents, clear, span=op.span))
    if op.c.buffer.scope_name == FRAGMENT:
        step = each(extents, add, span=op.span)
        out.append(For(k, const(0), const(int(op.k)), "serial", step, span=op.span))
    else:
        out.append(each(extents, lambda p: For(k, const(0), const(int(op.k)), "serial", add(p), span=op.span), span=op.span))
    return seq(*out, span=op.span)


def _readable(cx: Any, region: Region, op: Any) -> Region:
    """The operand in memory that every thread can read unchanged.  A fragment, and an operand that is also the accumulator,
    is copied to shared memory."""
    source: Buffer = region.buffer
    own = source.data is not op.c.buffer.data
    if own and source.scope_name != FRAGMENT:
        return region
    if source.scope_name == LOCAL:
        raise error("gemm-accumulator", f"`{source.name}`, in memory of each thread, is an operand and the accumulator of a "
                    "T.gemm", expected="an accumulator that is no operand", found=f"`{source.name}` as both", span=op.span,
                    hint="accumulate into another buffer")
    return staged(cx, region, op.span)
