"""Flattens per-thread arrays to one dimension and unrolls loops that lowering did not vectorise."""

from __future__ import annotations

from typing import Any

from tilelang.ir import (AddressOf, Alloc, Buffer, Const, Expr, For, Func, Load, Node, Ramp, Store, const, is_const, load, ramp,
                         replace, rewrite, PRIVATE)

from ..framework.pass_ import SYNCED, PassContext, pass_


@pass_(needs=SYNCED)
def flatten(func: Func, cx: PassContext) -> Func:
    """Row-major index arithmetic for local arrays of several dimensions.

    Before:  x = alloc_local((4, 8)); x[i, j]         After:  x = alloc_local((32,)); x[i * 8 + j]
    A `vectorized` loop that remains after lowering becomes an unrolled one.
    Keeps: shared and global buffers as they are.
    """
    flat: dict[Buffer, Buffer] = {}

    def one(b: Buffer) -> Buffer:
        got = flat.get(b)
        if got is None:
            n: Any = 1
            for d in b.shape:
                n = d * n
            got = flat[b] = replace(b, shape=(n,), strides_=None)
        return got

    def at(b: Buffer, indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        last = indices[-1] if indices else None
        if isinstance(last, Ramp) and is_const(last.stride, 1):  # a vector along the last dimension stays one
            (first,) = at(b, (*indices[:-1], last.base))
            return (ramp(first, last.lanes),)
        out: Expr = const(0)
        strides = b.strides_ or b.strides
        for i, s in zip(indices, strides):
            out = out + (i * s if not (isinstance(s, int) and s == 1) else i)
        return (out,)

    def fn(x: Node) -> Node | None:
        if isinstance(x, For) and x.kind == "vectorized":
            return replace(x, kind="unroll" if isinstance(x.extent, Const) else "serial")
        b = getattr(x, "buffer", None)
        if not isinstance(b, Buffer) or b.scope_name not in PRIVATE or len(b.shape) == 1:
            return None
        match x:
            case Alloc():
                return replace(x, buffer=one(b))
            case Load():
                return load(one(b), at(b, x.indices), span=x.span)
            case Store() | AddressOf():
                return replace(x, buffer=one(b), indices=at(b, x.indices))
        return None

    return rewrite(func, fn, For, Alloc, Load, Store, AddressOf)
