"""Arithmetic rounded once, in any of the four IEEE directions, by error-free transformations.

A sum a + b of floats equals s + e, where s is the rounded sum and the rounding error e is itself a float; a product likewise
(Dekker, "A floating-point technique for extending the available precision").  The fused multiply-add is from Boldo and
Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".  Near the ends of float64's
range, where errors underflow and intermediate results overflow, results are computed as fractions, one element at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fractions import Fraction

_SPLIT = 2.0**27 + 1


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """(rounded sum, rounding error) of float64 numbers; the error of an infinite sum is 0."""
    s = a + b
    t = s - a
    return s, _known((a - (s - t)) + (b - t))


def two_product(a: Any, b: Any) -> tuple[Any, Any]:
    """(rounded product, rounding error) of float64 numbers; the error of an infinite product is 0."""
    p = a * b
    a_high = _SPLIT * a
    a_high = a_high - (a_high - a)
    b_high = _SPLIT * b
    b_high = b_high - (b_high - b)
    a_low, b_low = a - a_high, b - b_high
    rest = a_low * b_low - (((p - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return p, _known(rest)


def _known(rest: Any) -> Any:
    """The rounding error of an operation, with 0 in place of infinities and NaN."""
    return np.where(np.isfinite(rest), rest, 0.0)


def to_odd(s: Any, rest: Any) -> Any:
    """s + rest rounded to odd: the adjacent float64 with an odd last bit, or s where rest is 0.

    A second rounding to a type with a significand of at most 51 bits then gives the rounded exact sum.
    """
    s = np.asarray(s, np.float64)
    bits = s.view(np.int64)
    even = (bits & 1 == 0) & (rest != 0) & np.isfinite(s)
    outwards = np.where(s == 0, True, (rest > 0) == (s > 0))
    start = np.where(s == 0, np.copysign(0.0, rest), s).view(np.int64)
    return np.where(even, start + np.where(outwards, 1, -1), bits).astype(np.int64).view(np.float64)


def sum_odd(a: Any, b: Any) -> Any:
    """a + b of float64 numbers, rounded to odd."""
    return to_odd(*two_sum(np.asarray(a, np.float64), np.asarray(b, np.float64)))


def fused_odd(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 (or narrower) numbers, as a float64 rounded to odd; a * b is exact in float64."""
    return sum_odd(np.asarray(a, np.float64) * np.asarray(b, np.float64), c)


def _fused(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """(a * b + c rounded once, a number with the sign of the rounding error) of float64 numbers."""
    p, e = two_product(a, b)
    high, low = two_sum(np.asarray(c), e)
    top, rest = two_sum(p, high)
    s, left = two_sum(top, sum_odd(rest, low))
    plain = a * b + c
    plain = np.where(np.isinf(c) & np.isfinite(a) & np.isfinite(b), c, plain)  # the product alone would overflow
    plain = np.where((plain == 0) & (c == 0) & (a != 0) & (b != 0), p, plain)  # a product that underflows keeps its sign
    return np.where(np.isfinite(plain) & np.isfinite(s) & (s != 0), s, plain), left


def _quotient(a: Any, b: Any) -> tuple[Any, Any]:
    q = np.divide(a, b)
    p, e = two_product(q, np.asarray(b))
    return q, _known(((a - p) - e) * np.sign(b))


def _root(a: Any) -> tuple[Any, Any]:
    q = np.sqrt(a)
    p, e = two_product(q, q)
    return q, _known((a - p) - e)


# operation: float64 operands -> (rounded to nearest, a number with the sign of the rounding error)
_DOUBLE: dict[str, Callable[..., tuple[Any, Any]]] = {
    "add": two_sum, "sub": lambda a, b: two_sum(a, -b), "mul": two_product, "fdiv": _quotient, "fmaf": _fused,
    "frcp": lambda a: _quotient(np.ones_like(a), a), "fsqrt": _root, "frsqrt": lambda a: (1 / np.sqrt(a), np.zeros_like(a))}
# operation: operands of float32 or narrower -> a float64 that rounds as the exact result does
_SINGLE: dict[str, Callable[..., Any]] = {
    "add": sum_odd, "sub": lambda a, b: sum_odd(a, -np.asarray(b)), "mul": lambda a, b: a * b,
    "fdiv": lambda a, b: to_odd(*_quotient(a, b)), "fmaf": fused_odd, "frcp": lambda a: to_odd(*_quotient(np.ones_like(a), a)),
    "fsqrt": lambda a: to_odd(*_root(a)), "frsqrt": lambda a: 1 / np.sqrt(a)}


def rounded(op: str, mode: str, *args: Any) -> Any:
    """The result of an operation (add, sub, mul, fdiv, fmaf, frcp, fsqrt, frsqrt), rounded in a direction (rn, rz, ru, rd).

    args: NumPy floats of one type.  For float32 operands and rn the result is a float64 that rounds to float32, float16 and
    bfloat16 as the exact result does.
    """
    kind = np.result_type(*args)
    wide = [np.asarray(a, np.float64) for a in args]
    with np.errstate(all="ignore"):
        if kind == np.float64:
            near, rest = _at_the_ends(op, wide, *_DOUBLE[op](*wide))
            return near if mode == "rn" else _directed(near, rest, mode, _negative_zero(op, wide))
        exact = _SINGLE[op](*wide)
        if mode == "rn":
            return exact
        near = exact.astype(kind)
        beyond = np.isinf(near) & np.isfinite(exact)  # overflow: rounding inwards gives the greatest finite number
        rest = np.where(beyond, -np.sign(exact), np.where(np.isfinite(near), exact - near.astype(np.float64), 0.0))
        return _directed(near, rest, mode, _negative_zero(op, wide))


_FRACTION: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fdiv": lambda a, b: a / b,
    "fmaf": lambda a, b, c: a * b + c, "frcp": lambda a: 1 / a}
_SAFE = 2.0**300  # for operands between 1 / _SAFE and _SAFE no step overflows and no rounding error underflows


def _at_the_ends(op: str, args: list[Any], near: Any, rest: Any) -> tuple[Any, Any]:
    """(rounded to nearest, rounding error) of float64 numbers, with fractions where an operand is near an end of the range."""
    if op not in _FRACTION and op != "fsqrt":
        return near, rest
    *spread, near, rest = (x.copy() for x in np.broadcast_arrays(*args, near, rest))
    sizes = [np.abs(x) for x in spread]
    inside = np.logical_and.reduce([np.isfinite(s) for s in sizes])
    outer = np.logical_or.reduce([(s > _SAFE) | (s < 1 / _SAFE) & (s != 0) for s in sizes])
    wanted = inside & outer
    if op in ("fdiv", "frcp"):
        wanted &= spread[-1] != 0
    elif op == "fsqrt":
        wanted &= spread[0] > 0
    if not wanted.any():
        return near, rest
    from fractions import Fraction  # 2 ms

    for at in zip(*np.nonzero(wanted)) if near.ndim else [()] * bool(wanted):
        values = [Fraction(float(x[at])) for x in spread]
        if op == "fsqrt":
            rest[at] = _sign(values[0] - Fraction(float(near[at])) ** 2)
            continue
        exact = _FRACTION[op](*values)
        if exact:  # the sign of a zero comes from the operation itself
            near[at] = _nearest(exact)
            rest[at] = -_sign(exact) if math.isinf(near[at]) else _sign(exact - Fraction(float(near[at])))
    return near, rest


def _nearest(x: Fraction) -> float:
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _sign(x: Fraction) -> int:
    return (x > 0) - (x < 0)


def _negative_zero(op: str, args: list[Any]) -> Any:
    """Where a sum that is exactly zero becomes -0 when rounded down: everywhere except for +0 + +0."""
    if op not in ("add", "sub", "fmaf"):
        return False
    a, b = (args[0] * args[1], args[2]) if op == "fmaf" else (args[0], args[1] if op == "add" else -args[1])
    return (a + b == 0) & ~((a == 0) & (b == 0) & ~np.signbit(a) & ~np.signbit(b))


def _directed(near: Any, rest: Any, mode: str, negative_zero: Any) -> Any:
    """near, moved to its neighbour where the sign of the rounding error (exact minus near) and the direction require it."""
    up, down = np.nextafter(near, np.asarray(np.inf, near.dtype)), np.nextafter(near, np.asarray(-np.inf, near.dtype))
    if mode == "ru":
        return np.where(rest > 0, up, near)
    if mode == "rd":
        return np.where(rest < 0, down, np.where((rest == 0) & (near == 0) & negative_zero, -np.abs(near), near))
    inwards = np.where(near > 0, rest < 0, (near < 0) & (rest > 0))  # the exact result is closer to zero than near
    return np.where((rest != 0) & inwards, np.where(near > 0, down, up), near)
