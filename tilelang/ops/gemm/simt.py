"""Lower gemm to scalar multiply-adds of each thread: supports all types, layouts and sizes."""

from __future__ import annotations

from typing import Any

from tilelang.errors import error
from tilelang.ir import (Buffer, Const, For, If, Region, Stmt, Store, cast, const, convert, dtype, fresh, load, seq, FRAGMENT,
                         LOCAL)


def lower_simt(op: Any, cx: Any) -> Stmt:
    """c[i, j] += a[i, k] * b[k, j] with k as the outermost loop.

    A thread's accumulators stay in registers, and an operand element that several of them use is read once per k step.
    Where c is thread-private memory, each thread computes all of it.
    """
    dt = op.c.dtype
    wide = dtype("float32") if op.a.dtype == "bfloat16" else dt  # float16 cannot represent every bfloat16
    a, b = (_readable(cx, r, op) for r in (op.a, op.b))
    k = fresh("k")

    def at(r: Region, i: Any, j: Any) -> tuple[Any, ...]:
        mins = tuple(convert(m) for m in r.mins)
        return (*mins[:-2], mins[-2] + i, mins[-1] + j)

    def clear(p: Any) -> Stmt:
        return Store(op.c.buffer, at(op.c, *p), const(0.0 if dt.is_float else 0, dt), span=op.span)

    def add(p: Any) -> Stmt:
        i, j = p
        x = load(a.buffer, at(a, k, i) if op.transpose_a else at(a, i, k))
        y = load(b.buffer, at(b, j, k) if op.transpose_b else at(b, k, j))
        where = at(op.c, i, j)
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
    scratch = cx.new_shared(f"{source.name}_s", tuple(source.shape), source.dtype)
    cx.prepend(cx.parallel(tuple(source.shape), lambda p: Store(scratch, p, load(source, p)), span=op.span))
    return Region(scratch, region.mins, region.extents, span=region.span)
