"""Scalar operations and conversions in NumPy, for every dtype, on many values at once.

A value is a NumPy array (or NumPy scalar) of `numpy_dtype(dtype)`.  The rules (wrapping integers, floor and truncating
division, one rounding per operation, NaN in min and max, cast truncation) are those of ir/__init__.py.

Wraps integers that an analysis computed with more bits to the integer types of the program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .dtype import SCALE, dtype, numpy_dtype


def keeps_value(src: dtype, dst: dtype) -> bool:
    """Whether dst can represent every value of the integer type src, so that a cast changes no value."""
    if src.is_bool or src == dst:
        return src == dst
    return src.bits < dst.bits and (src.is_unsigned or not dst.is_unsigned)


def wrapped(x: Any, dt: dtype) -> Any:
    """Integers or bools (a scalar or an array, of any width) wrapped to an integer type or bool.

    64-bit values are returned as they are.
    """
    if dt.is_bool:
        return x != 0
    if isinstance(x, (bool, np.bool_)) or isinstance(x, np.ndarray) and x.dtype == np.bool_:
        x = x * 1
    if dt.bits >= 64:
        return x
    half = 0 if dt.is_unsigned else 1 << (dt.bits - 1)
    return ((x + half) & ((1 << dt.bits) - 1)) - half


def may_wrap(dt: dtype, op: str = "") -> bool:
    """Whether arithmetic of a type may wrap.  That of index types (int32 and wider) is assumed not to, but for shifts left."""
    return dt.is_int and (dt.is_unsigned or dt.bits < 32 or op == "shl")


def shifted_left(x: Any, y: Any) -> Any:
    """x << y of integers of at most 64 bits (scalars or arrays) before they wrap; for y outside 0..63 no bit is left."""
    return (x << y if 0 <= y < 64 else 0) if isinstance(x, int) and isinstance(y, int) else np.left_shift(x, y)


def shifted_right(x: Any, y: Any) -> Any:
    """x >> y of integers of at most 64 bits (scalars or arrays); for y outside 0..63 only the sign is left."""
    return x >> (y if 0 <= y < 64 else 64) if isinstance(x, int) and isinstance(y, int) else np.right_shift(x, y)


# Operations of integers and bools on arrays, before they wrap.  Divisions are left to those who know what 0 means there.
INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "bitand": np.bitwise_and,
    "bitor": np.bitwise_or, "bitxor": np.bitwise_xor, "shl": shifted_left, "shr": shifted_right, "eq": np.equal,
    "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "and": np.logical_and,
    "or": np.logical_or,
}


Value = Any  # np.ndarray | np.generic


def round_tf32(x: Value) -> Value:
    """float32 rounded to 10 mantissa bits, ties away from zero (PTX `cvt.rna.tf32.f32`); infinities and NaN stay."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x).astype(np.float32)


def _wrap4(x: Value) -> Value:
    return np.right_shift(np.left_shift(x, np.int8(4)), np.int8(4))


def _fit(dt: dtype) -> Callable[[Value], Value] | None:
    """The function that converts a result computed in the storage type to dt; None if the two are the same."""
    return {"int4": _wrap4, "uint4": lambda x: np.bitwise_and(x, np.uint8(15))}.get(dt.base)


@functools.cache
def _finite_limit(name: str) -> float:
    import ml_dtypes  # 4 ms

    return float(ml_dtypes.finfo(numpy_dtype(name)).max)


def _to_odd32(x: Value) -> Value:
    """float64 to float32, rounded to odd: a second rounding to a narrower type then gives the correctly rounded result."""
    near = x.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32) - (np.abs(back) > np.abs(x))
    inexact = (back != x) & ~np.isnan(x)
    return np.where(inexact, bits | np.uint32(1), near.view(np.uint32)).astype(np.uint32).view(np.float32)


def _for_narrow_float(x: Value) -> Value:
    """x as a float32 that rounds to a narrower float as x itself does."""
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        # Of more than 53 bits the low ones only matter for "not exact"; bit 12 represents all of them.
        low = x & np.asarray(4095, x.dtype)
        cut = (x - low) | np.where(low != 0, np.asarray(4096, x.dtype), np.asarray(0, x.dtype))
        x = np.where(np.abs(x.astype(np.float64)) < 2.0**53, x, cut)
    if x.dtype.kind in "iu" and x.dtype.itemsize >= 4 or x.dtype == np.float64:
        return _to_odd32(np.asarray(x, np.float64))
    return x.astype(np.float32)


def _to_scale(x: Value) -> Value:
    """float32 as float8_e8m0fnu: |x| rounded up to a power of two, at most 2**127; NaN stays (cvt.rp.satfinite.ue8m0x2)."""
    size = np.asarray(x, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    up = np.minimum(size + np.uint32(0x7FFFFF) >> np.uint32(23), np.uint32(254))
    code = np.where(size <= 0x400000, np.uint32(0), np.where(size > 0x7F800000, np.uint32(255), up))
    return np.asarray(code, np.uint8).view(numpy_dtype(SCALE))


def _to_int(x: Value, target: np.dtype) -> Value:
    """Floats truncated towards zero and saturated to the range of target; NaN becomes 0 (PTX `cvt.rzi`)."""
    if x.dtype.kind != "f" or x.dtype == np.float16:
        x = x.astype(np.float32)
    info = np.iinfo(target)
    x = np.trunc(x)
    high = x.dtype.type(2.0 ** (info.bits - (info.min < 0)))  # first value past the range: exact in every float type
    low = x.dtype.type(info.min)
    inside = (x < high) & (x >= low)
    out = np.where(inside, x, 0).astype(target)
    # Start with the target's type: NumPy releases convert Python integers differently here.
    most, least, none = (np.asarray(n, target) for n in (info.max, info.min, 0))
    return np.where(inside, out, np.where(x >= high, most, np.where(x < low, least, none)))


def to_dtype(x: Value, dt: dtype) -> Value:
    """Convert x (any NumPy dtype) to dt.

    Float to int truncates and saturates, and NaN becomes 0.  Narrowing a float rounds once, to nearest even.  Integers wrap.

    fp8 and narrower saturate to the largest finite value (PTX `cvt.satfinite`); NaN stays NaN where the type has one.
    float8_e8m0fnu rounds |x| up to a power of two, as the conversion of CUDA's header does.
    tfloat32 is stored as float32 and is rounded only when an MMA reads it.
    """
    target = numpy_dtype(dt)
    x = np.asarray(x)
    if dt.is_bool:
        x = x if x.dtype.kind in "biuf" else x.astype(np.float32)
        return x != np.zeros((), x.dtype)
    if x.dtype == target and dt.base not in ("int4", "uint4"):
        return x
    if dt.is_float:
        if dt.base == SCALE:
            return _to_scale(_for_narrow_float(x))
        if dt.bits <= 8:
            limit = np.float32(_finite_limit(dt.base))
            return np.clip(_for_narrow_float(x), -limit, limit).astype(target)
        if dt.base == "bfloat16":
            return _for_narrow_float(x).astype(target)
        return x.astype(target)
    x = x.astype(target) if x.dtype.kind in "biu" else _to_int(x, target)
    fit = _fit(dt)
    return x if fit is None else fit(x)


def _truncdiv(x: Value, y: Value) -> Value:
    return np.floor_divide(np.subtract(x, np.fmod(x, y)), y)


def _by_one_for_zero(fn: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    """fn of integers with a divisor of 0 taken as 1."""
    return lambda x, y: fn(x, y + (y == 0))


def _bool_arithmetic(fn: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    return lambda x, y: fn(x.astype(np.int32), y.astype(np.int32)) != 0


_PLAIN = INTEGERS | {"floordiv": np.floor_divide, "floormod": np.remainder}
_TRUTH = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or")


def _through_float32(fn: Callable[..., Value], dt: dtype) -> Callable[..., Value]:
    """fn for an 8-bit float type: computes in float32, then rounds and saturates as a conversion does."""
    return lambda *values: to_dtype(fn(*(np.asarray(v).astype(np.float32) for v in values)), dt)


def beside_nan(fn: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    """np.fmin or np.fmax, which give the other operand where one is NaN, also beside a signalling NaN: there NumPy's vector
    instructions give it too, and its scalar ones for the last elements of an array give NaN."""
    def run(x: Value, y: Value) -> Value:
        out = fn(x, y)
        return out if np.all(out == out) else np.where(x == x, np.where(y == y, out, x), y)

    return run


@functools.cache
def binary_function(op: str, dt: dtype) -> Callable[[Value, Value], Value]:
    """The function that computes Binary(op) of two values of dt; comparisons give bool."""
    if dt.is_float and dt.bits <= 8 and op not in _TRUTH:
        return _through_float32(binary_function(op, dtype("float32")), dt)
    if op in ("min", "max"):
        least = op == "min"
        if dt.is_float:
            return beside_nan(np.fmin if least else np.fmax)
        return np.minimum if least else np.maximum
    if op == "div":
        fn: Callable[[Value, Value], Value] = np.true_divide if dt.is_float else _truncdiv
    elif op == "truncdiv":
        fn = (lambda x, y: np.trunc(np.true_divide(x, y))) if dt.is_float else _truncdiv
    elif op == "truncmod":
        fn = np.fmod
    else:
        fn = _PLAIN[op]
    if op.endswith(("div", "mod")) and not dt.is_float:
        fn = _by_one_for_zero(fn)
    if op in _TRUTH:
        return fn
    if dt.is_bool and not op.startswith("bit"):
        return _bool_arithmetic(fn)
    fit = _fit(dt)
    return fn if fit is None else lambda x, y: fit(fn(x, y))


def unary_function(op: str, dt: dtype) -> Callable[[Value], Value]:
    """The function that computes Unary(op) of a value of dt, a scalar dtype."""
    fn = {"neg": np.negative, "not": np.logical_not, "bitnot": np.bitwise_not}[op]
    if dt.is_float and dt.bits <= 8:
        return _through_float32(fn, dt)
    fit = _fit(dt)
    return fn if fit is None else lambda x: fit(fn(x))


def call_function(fn: Callable[..., Value], args: tuple[dtype, ...], result: dtype) -> Callable[..., Value]:
    """The NumPy function of an intrinsic: computes narrow floats in float32 and rounds the result once to `result`."""
    widen = [a.is_float and a.bits < 32 for a in args]

    def run(*values: Value) -> Value:
        wide = [np.asarray(v).astype(np.float32) if w else v for v, w in zip(values, widen)]
        return to_dtype(fn(*wide), result)

    return run
