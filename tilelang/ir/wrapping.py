"""Whole numbers that an analysis computes wider than the program does, brought back into the program's types."""

from __future__ import annotations

from typing import Any

import numpy as np

from .dtype import dtype


def keeps_value(src: dtype, dst: dtype) -> bool:
    """Whether every value of an integer type is one of another, so that a cast changes nothing."""
    if src.is_bool or src == dst:
        return src == dst
    return src.bits < dst.bits and (src.is_unsigned or not dst.is_unsigned)


def wrapped(x: Any, dt: dtype) -> Any:
    """Whole numbers or truths (one or an array, of any width) as values of an integer type or bool: bits beyond its width are
    lost.  Those of 64 bits stay as they are."""
    if dt.is_bool:
        return x != 0
    if isinstance(x, (bool, np.bool_)) or isinstance(x, np.ndarray) and x.dtype == np.bool_:
        x = x * 1
    if dt.bits >= 64:
        return x
    half = 0 if dt.is_unsigned else 1 << (dt.bits - 1)
    return ((x + half) & ((1 << dt.bits) - 1)) - half


def may_wrap(dt: dtype) -> bool:
    """Whether arithmetic of a type is followed bit by bit: that of indices, int32 and wider, is taken not to wrap."""
    return dt.is_int and (dt.is_unsigned or dt.bits < 32)


__all__ = ["keeps_value", "may_wrap", "wrapped"]
