"""Loops over registers that have a form in PTX on registers with names: what product_registers marks and codegen prints.

    for r: acc[r] = x                               fill     one mov each
    for r: acc[r] = acc[r] * f[…]                   scale    one mul each
    for r: P[r] = float16(S[…])                     halves   one cvt for each pair
    for j: packed[0:8] = float16x8(C[…]); rest      read     one cvt for each pair; the rest as it stands

Without a form the values pass through an array, whose elements a compiler has to take apart again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tilelang.ir import AddressOf, Binary, Buffer, Cast, Const, Expr, For, Load, Ramp, Stmt, Store, Var, stmts_of, walk
from tilelang.ir.record import record

MOST = 256  # points of a loop nest
_HALVES = ("float16", "bfloat16")
_VALUES: dict[str, Any] = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
                           "floordiv": lambda a, b: a // b, "floormod": lambda a, b: a % b}


@record
class Form:
    """kind: "fill" | "scale" | "halves" | "read".  buffer: the registers.  reads: it needs what they held.

    points: fill: (element, value); scale: (element, factor); halves: (word, source, lower element, upper element).
    read: none.
    """

    kind: str
    buffer: Buffer
    reads: bool
    points: tuple[tuple[Any, ...], ...] = ()


def register_form(s: Stmt) -> Form | None:
    """The form of a loop that the compiler would unroll, None where it has none."""
    loops, body = _nest(s)
    if not loops:
        return None
    if isinstance(body, Store):
        return _of_store(loops, body)
    return _reading(s) if len(loops) == 1 else None


def constant(e: Expr, at: dict[Var, int]) -> int | None:
    """Value of an index where variables have these values, None when it depends on others."""
    if isinstance(e, Const):
        return int(e.value)
    if isinstance(e, Var):
        return at.get(e)
    if isinstance(e, Binary) and e.op in _VALUES:
        a, b = constant(e.a, at), constant(e.b, at)
        return None if a is None or b is None or b == 0 and e.op.startswith("floor") else int(_VALUES[e.op](a, b))
    return None


def _nest(s: Stmt) -> tuple[list[tuple[Var, int]], Stmt]:
    loops: list[tuple[Var, int]] = []
    points = 1
    while isinstance(s, For):
        if s.kind != "unroll" or s.attr("factor") or not (isinstance(s.start, Const) and s.start.value == 0) or \
                not isinstance(s.extent, Const):
            return [], s
        points *= int(s.extent.value)
        loops.append((s.var, int(s.extent.value)))
        body = stmts_of(s.body) or (s.body,)
        s = body[0] if len(body) == 1 else s.body
    return (loops, s) if 0 < points <= MOST else ([], s)


def _points(loops: list[tuple[Var, int]]) -> Iterator[dict[Var, int]]:
    for values in itertools.product(*(range(n) for _, n in loops)):
        yield {v: x for (v, _), x in zip(loops, values)}


def _element(e: Load | Store, at: dict[Var, int]) -> int | None:
    return constant(e.indices[0], at) if len(e.indices) == 1 else None


def _of_store(loops: list[tuple[Var, int]], s: Store) -> Form | None:
    b, v = s.buffer, s.value
    if b.scope_name != "local" or not b.is_static or v.dtype.lanes > 1:
        return None
    if isinstance(v, Cast) and b.dtype.base in _HALVES:
        return _halves(loops, s, v)
    factor: Expr | None = None
    if isinstance(v, Binary) and v.op == "mul" and b.dtype == v.dtype == "float32":
        for mine, other in ((v.a, v.b), (v.b, v.a)):
            if isinstance(mine, Load) and mine.buffer is b and bool(mine.indices == s.indices) and _given(other, b, loops):
                factor = other
    if factor is None and (b.dtype not in ("float32", "int32") or isinstance(v, Load) or not _given(v, b, loops)):
        return None
    points: dict[int, Expr] = {}
    for at in _points(loops):
        k = _element(s, at)
        if k is None or k in points:
            return None
        x = v if factor is None else factor
        if isinstance(x, Load):
            j = _element(x, at)
            if j is None:
                return None
            x = Load(x.buffer, (Const(j, x.indices[0].dtype),), x.dtype)
        points[k] = x
    return Form("fill" if factor is None else "scale", b, factor is not None or len(points) < b.size, tuple(points.items()))


def _given(e: Expr, b: Buffer, loops: list[tuple[Var, int]]) -> bool:
    """Whether a value is an element of another array of registers, or needs neither memory nor the loops."""
    if isinstance(e, Load):
        return e.buffer.data is not b.data and e.buffer.scope_name == "local" and len(e.indices) == 1
    inside = {v for v, _ in loops}
    return isinstance(e, Const) or isinstance(e, Var) and e not in inside


def _halves(loops: list[tuple[Var, int]], s: Store, v: Cast) -> Form | None:
    x = v.value
    if not isinstance(x, Load) or x.dtype != "float32" or x.buffer.scope_name != "local" or v.dtype != s.buffer.dtype:
        return None
    sources: dict[int, int] = {}
    for at in _points(loops):
        k, j = _element(s, at), _element(x, at)
        if k is None or j is None or k in sources:
            return None
        sources[k] = j
    if any(k ^ 1 not in sources for k in sources):
        return None
    points = tuple((k // 2, x.buffer, sources[k], sources[k + 1]) for k in sorted(sources) if k % 2 == 0)
    return Form("halves", s.buffer, len(sources) < s.buffer.size, points)


def _reading(s: Stmt) -> Form | None:
    """A loop in which floats are read only to be packed."""
    assert isinstance(s, For)
    found: Buffer | None = None
    packs = 0
    for x in stmts_of(s.body):
        if isinstance(x, Store) and (floats := packed_source(x)) is not None:
            if found is not None and found is not floats.buffer:
                return None
            for k in range(int(s.extent.value)):  # type: ignore[attr-defined]
                if constant(floats.indices[0].base, {s.var: k}) is None:  # type: ignore[attr-defined]
                    return None
            found, packs = floats.buffer, packs + 1
    if found is None:
        return None
    uses = sum(x.buffer.data is found.data for x in walk(s.body) if isinstance(x, Load | Store | AddressOf))
    return Form("read", found, True) if uses == packs else None


def packed_source(s: Store) -> Load | None:
    """The neighbouring floats that a store makes whole pairs of halves in registers of, None for other stores."""
    v = s.value
    if not (isinstance(v, Cast) and isinstance(v.value, Load) and v.dtype.base in _HALVES and v.dtype.lanes > 1
            and v.dtype.lanes % 2 == 0 and v.value.dtype.base == "float32"):
        return None
    to, x = s.indices, v.value
    if len(to) != 1 or len(x.indices) != 1 or s.buffer.dtype.base != v.dtype.base:
        return None
    place, source = to[0], x.indices[0]
    if not isinstance(place, Ramp) or not isinstance(source, Ramp) or s.buffer.scope_name != "local":
        return None
    if any(not isinstance(r.stride, Const) or r.stride.value != 1 for r in (place, source)):
        return None
    even = isinstance(place.base, Const) and place.base.value % 2 == 0
    return x if even and x.buffer.scope_name == "local" and x.buffer.dtype == "float32" else None


__all__ = ["Form", "constant", "packed_source", "register_form"]
