"""Integer functions: division rounded up, next power of two, strides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, for integers and integer expressions."""
    return (a + b - 1) // b


def next_power_of_2(x: int) -> int:
    """The least power of two that is >= x; 1 for x <= 1."""
    return 1 if x <= 1 else 1 << (int(x) - 1).bit_length()


def row_major_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a compact row-major array, in elements; () for a scalar."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[:len(shape)][::-1]
