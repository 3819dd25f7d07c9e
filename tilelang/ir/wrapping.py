"""Wraps integers that an analysis computed with more bits to the integer types of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .dtype import dtype


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
