"""Layouts of tensors whose extents are known at run time: the map repeats along such a dimension, a distance further on.

    (i, j) -> (i // 8, j, i % 8)      along i: period 8, physical index 0 grows by 1; M / 8 of them hold M rows
    (i, j) -> (j, i)                  along i: period 1, physical index 1 grows by 1

A period is found in the expressions, not in a table, so it holds for every extent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tilelang.ir import Binary, Cast, Const, Expr, Var, convert, free_vars, to_text, walk
from tilelang.ir.record import record

from .fitted import applied, index_vars
from tilelang.errors import error

_LONGEST = 4096  # elements of a period


@record
class Period:
    """How a layout goes on along a dimension: after `length` elements, physical index `at` is `step` more, all others equal."""

    length: int
    at: int
    step: int


def is_open(extent: Any) -> bool:
    """Whether an extent is known at run time only."""
    return isinstance(extent, Expr) and not isinstance(extent, Const)


def closed_shape(shape: Any, forward: Callable[..., Any]) -> Any:
    """The shape with two periods of the map in place of each extent that is known at run time only.

    Raises layout-invalid for a map that does not repeat along such a dimension.
    """
    if not isinstance(shape, (tuple, list)) or not any(map(is_open, shape)):
        return shape
    vs = index_vars(len(shape))
    places = applied(forward, vs, f"Layout {tuple(shape)}")
    index = tuple(map(convert, places if isinstance(places, (tuple, list)) else (places,)))
    out = list(shape)
    for d, extent in enumerate(shape):
        if is_open(extent):
            period = period_along(index, vs, d)
            if period is None:
                raise error("layout-invalid", f"the map of Layout {tuple(shape)} does not repeat along dimension {d}, whose "
                            "extent is known at run time only", expected="one physical index that grows with this dimension",
                            found=", ".join(map(to_text, index)), hint="give a physical index for each digit: lambda i, j: "
                            "(i // 8, j, i % 8)")
            out[d] = 2 * period.length
    return tuple(out)


def period_along(index: Sequence[Expr], vs: Sequence[Var], d: int) -> Period | None:
    """The period of physical indices along dimension d; None where they do not repeat, or more than one of them grows."""
    if any(v not in vs for e in index for v in free_vars(e)):
        return None
    divisors = [abs(int(x.b.value)) for e in index for x in walk(e, Binary)
                if x.op in ("floordiv", "floormod") and isinstance(x.b, Const) and x.b.value and vs[d] in free_vars(x.a)]
    longest = prod(divisors)
    for length in (n for n in range(1, min(longest, _LONGEST) + 1) if longest % n == 0):
        grown = [_growth(e, vs[d], length) for e in index]
        moved = [k for k, g in enumerate(grown) if g]
        if None not in grown and len(moved) == 1 and (grown[moved[0]] or 0) > 0:
            step = grown[moved[0]]
            assert step is not None
            return Period(length, moved[0], step)
    return None


def _growth(e: Expr, v: Var, length: int) -> int | None:
    """How much more e is when v is `length` more, for all values of v; None where this is no constant."""
    match e:
        case Var():
            return length if e is v else 0
        case Const():
            return 0
        case Cast():
            return _growth(e.value, v, length)
        case Binary(op=op, a=a, b=b):
            x, y = _growth(a, v, length), _growth(b, v, length)
            if x is None or y is None:
                return None
            if not x and not y:
                return 0
            match op:
                case "add":
                    return x + y
                case "sub":
                    return x - y
                case "mul" if isinstance(b, Const):
                    return x * int(b.value)
                case "mul" if isinstance(a, Const):
                    return y * int(a.value)
                case "bitxor" if y == 0 and x % _power_of_two_from(b) == 0:
                    return x
                case "bitxor" if x == 0 and y % _power_of_two_from(a) == 0:
                    return y
                case "floordiv" if isinstance(b, Const) and b.value and x % int(b.value) == 0:
                    return x // int(b.value)
                case "floormod" if isinstance(b, Const) and b.value and x % int(b.value) == 0:
                    return 0
            return None
    return None if v in free_vars(e) else 0


def _power_of_two_from(e: Expr) -> int:
    """A power of two that no value of e reaches, where e is a remainder; else one that divides no growth."""
    n = int(e.b.value) if isinstance(e, Binary) and e.op == "floormod" and isinstance(e.b, Const) else 0
    return 1 << (n - 1).bit_length() if n > 0 else 1 << 62


def stored_extents(layout: Any, shape: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[tuple[int, int], ...]] | str:
    """(extents of the storage of a tensor of this shape, (dimension, length) of the periods that must divide its extents).

    layout: a Layout of the tensor, made for its shape.  A sentence where the layout does not permute compact storage.
    """
    vs = index_vars(len(shape))
    index = layout.places_of(vs)
    extents, rules = list(layout.output_shape), []
    grown = set[int]()
    for d, n in enumerate(shape):
        if not is_open(n):
            continue
        period = period_along(index, vs, d)
        if period is None or period.at in grown or layout.shape[d] != 2 * period.length:
            return f"a layout that does not repeat along dimension {d} by itself"
        if layout.output_shape[period.at] != 2 * period.step:
            return f"a layout whose periods along dimension {d} overlap or leave places unused"
        grown.add(period.at)
        extents[period.at] = n // period.length * period.step if period.length != period.step else n
        if period.length > 1:
            rules.append((d, period.length))
    if layout.size != prod(layout.shape):
        return f"a layout over {layout.size} places for {prod(layout.shape)} elements"
    return tuple(extents), tuple(rules)
