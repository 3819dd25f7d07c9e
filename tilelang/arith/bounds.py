"""Interval arithmetic on inclusive (low, high); None means that this end is unknown."""

from __future__ import annotations

from .linear import Bounds

UNKNOWN: Bounds = (None, None)


def add(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of a sum."""
    return (None if a[0] is None or b[0] is None else a[0] + b[0],
            None if a[1] is None or b[1] is None else a[1] + b[1])


def scale(a: Bounds, k: int) -> Bounds:
    """Bounds of a constant multiple."""
    lo = None if a[0] is None else a[0] * k
    hi = None if a[1] is None else a[1] * k
    return (lo, hi) if k >= 0 else (hi, lo)


def mul(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of a product."""
    if None not in a and None not in b:
        corners = [p * q for p in a for q in b]  # type: ignore[operator]
        return min(corners), max(corners)
    if a[0] is not None and b[0] is not None and a[0] >= 0 and b[0] >= 0:
        return a[0] * b[0], None if a[1] is None or b[1] is None else a[1] * b[1]
    return UNKNOWN


def floordiv(a: Bounds, b: Bounds) -> Bounds:
    """a // b; known only for positive divisors."""
    if b[0] is None or b[0] <= 0:
        return UNKNOWN
    lo = hi = None
    if a[0] is not None:
        lo = a[0] // b[0] if a[0] < 0 else (0 if b[1] is None else a[0] // b[1])
    if a[1] is not None:
        hi = a[1] // b[0] if a[1] >= 0 else (-1 if b[1] is None else a[1] // b[1])
    return lo, hi


def floormod(a: Bounds, b: Bounds) -> Bounds:
    """a % b; known only for positive divisors."""
    if b[0] is None or b[0] <= 0:
        return UNKNOWN
    if a[0] is not None and a[1] is not None and a[0] >= 0 and a[1] < b[0]:
        return a
    hi = None if b[1] is None else b[1] - 1
    if a[0] is not None and a[0] >= 0 and a[1] is not None:
        hi = a[1] if hi is None else min(hi, a[1])
    return 0, hi


def union(a: Bounds, b: Bounds) -> Bounds:
    """Bounds that hold for both of two values: the smallest interval around both."""
    return (None if a[0] is None or b[0] is None else min(a[0], b[0]),
            None if a[1] is None or b[1] is None else max(a[1], b[1]))


def meet(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of a value that lies in both intervals."""
    lo = b[0] if a[0] is None else a[0] if b[0] is None else max(a[0], b[0])
    hi = b[1] if a[1] is None else a[1] if b[1] is None else min(a[1], b[1])
    return lo, hi


def minimum(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of the smaller of two values."""
    return (None if a[0] is None or b[0] is None else min(a[0], b[0]),
            b[1] if a[1] is None else a[1] if b[1] is None else min(a[1], b[1]))


def maximum(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of the larger of two values."""
    return (b[0] if a[0] is None else a[0] if b[0] is None else max(a[0], b[0]),
            None if a[1] is None or b[1] is None else max(a[1], b[1]))


def bits(op: str, a: Bounds, b: Bounds) -> Bounds:
    """Bounds of bitand, bitor, bitxor.  Both operands must be known to be non-negative; for bitand one of them suffices."""
    nonneg = [v for v in (a, b) if v[0] is not None and v[0] >= 0]
    if op == "bitand":
        highs = [v[1] for v in nonneg if v[1] is not None]
        return (0, min(highs)) if highs else (0, None) if nonneg else UNKNOWN
    if len(nonneg) < 2:
        return UNKNOWN
    if a[1] is None or b[1] is None:
        return 0, None
    return 0, (1 << max(a[1], b[1]).bit_length()) - 1


def inside(a: Bounds, lo: int, hi: int) -> bool:
    """Whether a is known and lies in [lo, hi]."""
    return a[0] is not None and a[1] is not None and lo <= a[0] and a[1] <= hi
