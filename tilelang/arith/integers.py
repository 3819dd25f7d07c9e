"""Integer functions: division rounded up, next power of two."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, for integers and integer expressions."""
    return (a + b - 1) // b


def next_power_of_2(x: int) -> int:
    """The least power of two that is >= x; 1 for x <= 1."""
    return 1 if x <= 1 else 1 << (int(x) - 1).bit_length()
