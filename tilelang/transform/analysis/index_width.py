"""Compute indices of dimensions that may exceed 32 bits in 64 bits, also where they are bound to names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilelang.arith.flat_index import widened
from tilelang.ir import (AddressOf, Binary, Bind, Buffer, Cast, Expr, Func, Load, Node, Region, Select, Seq, Store, Var, binary,
                         free_vars, replace, rewrite, walk, I64, GLOBAL, COMPARISONS)

PADDING = 2**24  # the largest distance by which an edge tile reaches past the end of a dimension
_ACCESS = (Load, Store, AddressOf)


def widen_indices(func: Func) -> Func:
    """Compute the indices of long dimensions in 64 bits.

    Before:  i: int32 = bx * 1024 + tx; A[i]       After:  i = …; i_64: int64 = int64(bx) * 1024 + int64(tx); A[i_64]
    for A with 2^31 elements or more in that dimension. A name that such an index reads gets a 64-bit twin. Comparisons and
    conversions of the name read the twin too; all other uses keep the 32-bit value.
    """
    wanted = [i for n in walk(func.body, *_ACCESS, Region) for i in _long_indices(n)]
    if not wanted:
        return func
    twins = _twins(func, wanted)

    def fn(x: Node) -> Node | None:
        if isinstance(x, Bind) and x.var in twins:
            return Seq((x, Bind(twins[x.var], widened(x.value, twins), x.span)))
        if isinstance(x, Binary) and x.op in COMPARISONS and (_reads(x.a, twins) or _reads(x.b, twins)):
            return binary(x.op, widened(x.a, twins), widened(x.b, twins), span=x.span)
        if isinstance(x, Cast) and x.dtype.is_int and x.dtype.bits == 64 and _reads(x.value, twins):
            return widened(x.value, twins) if x.dtype == "int64" else None
        if isinstance(x, _ACCESS):
            wide = _wide_at(x.buffer, x.indices, twins)
            return replace(x, indices=wide) if wide is not x.indices else None
        if isinstance(x, Region):
            wide = _wide_at(x.buffer, x.mins, twins)
            return replace(x, mins=wide) if wide is not x.mins else None
        return None

    return rewrite(func, fn, Bind, Binary, Cast, *_ACCESS, Region)


def is_long_dim(d: Any) -> bool:
    """Whether an index of a dimension, with the padding of tiles, may need more than 32 bits."""
    if isinstance(d, int):
        return d >= 2**31 - PADDING
    return d.dtype.bits > 32 or any(x.op == "mul" for x in walk(d, Binary))


def _long_indices(n: Any) -> Iterator[Expr]:
    if n.buffer.scope_name == GLOBAL:
        for i, d in zip(n.mins if isinstance(n, Region) else n.indices, n.buffer.shape):
            if is_long_dim(d):
                yield i


def _wide_at(b: Buffer, indices: tuple[Expr, ...], twins: dict[Var, Var]) -> tuple[Expr, ...]:
    if b.scope_name != GLOBAL:
        return indices
    wide = tuple(widened(i, twins) if is_long_dim(d) else i for i, d in zip(indices, b.shape))
    return indices if all(a is b for a, b in zip(wide, indices)) else wide


def _twins(func: Func, wanted: list[Expr]) -> dict[Var, Var]:
    """The 64-bit twin of each 32-bit name that the `wanted` indices read, directly or through other names."""
    bound = {n.var: n.value for n in walk(func.body, Bind)
             if n.var.dtype == "int32" and isinstance(n.value, (Binary, Select, Var))}
    out: dict[Var, Var] = {}
    while wanted:
        for v in free_vars(wanted.pop()):
            if v in bound and v not in out:
                out[v] = Var(f"{v.name}_64", I64, span=v.span)
                wanted.append(bound[v])
    return out


def _reads(e: Expr, twins: dict[Var, Var]) -> bool:
    return e.dtype.is_int and e.dtype.lanes == 1 and any(x in twins for x in walk(e, Var))
