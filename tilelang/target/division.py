"""Division of float32 numbers by a constant with a multiplication and a fused multiply-add, correctly rounded.

N. Brisebarre, J.-M. Muller, S. K. Raina, "Accelerating correctly rounded floating-point division when the divisor is known in
advance": with 1/c as a sum of two floats, x/c = fma(x, high, x * low) but for quotients very near the middle between two
floats.  Their significands solve a congruence, so a divisor is checked by computing those few quotients exactly.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import numpy as np

RANGE = 20  # divisors from 2^-20 to 2^20: quotients of dividends above 2^-78 are normal with 22 bits to spare


@lru_cache(maxsize=1024)
def reciprocal(c: float) -> tuple[float, float] | None:
    """Positive floats (high, low) with x/c == fma(x, high, x * low), rounded correctly, for all x above 2^-78 in size.

    None for powers of two, whose reciprocal is exact, divisors out of range, and divisors for which it is not true.  low is not
    negative, so that zeros keep their sign and infinities do not become NaN.
    """
    c = float(np.float32(c))
    if not 2.0**-RANGE <= c <= 2.0**RANGE or np.frexp(c)[0] == 0.5:
        return None
    exact = 1 / Fraction(c)
    high = _rounded(exact)
    if Fraction(high) > exact:
        high = float(np.nextafter(np.float32(high), np.float32(0)))
    low = _rounded(exact - Fraction(high))
    return (high, low) if all(_right(x, c, high, low) for x in _critical(c)) else None


def _rounded(x: Fraction) -> float:
    """The nearest number with 24 bits of significand, ties to even; of any exponent."""
    if x == 0:
        return 0.0
    exponent = x.numerator.bit_length() - x.denominator.bit_length() - 24
    scaled = x / Fraction(2)**exponent
    while scaled >= 2**24:
        exponent, scaled = exponent + 1, scaled / 2
    while scaled < 2**23:
        exponent, scaled = exponent - 1, scaled * 2
    return float(round(scaled) * Fraction(2)**exponent)


def _right(x: int, c: float, high: float, low: float) -> bool:
    first = _rounded(x * Fraction(low))
    return _rounded(x * Fraction(high) + Fraction(first)) == _rounded(x / Fraction(c))


def _critical(c: float) -> list[int]:
    """Significands of 24 bits whose quotient by c is within 2^-22 units in the last place of the middle between two floats.

    The error of fma(x, high, x * low) before its last rounding is less: low and the multiplication by it each give 2^-23.
    With C the significand of c, such an x solves x * 2^s = (2j + 1) C + d for a small d, where s is 24, or 25 if x < C.
    """
    divisor = int(np.frexp(np.float64(c))[0] * 2**24)
    even = divisor & -divisor
    odd, out = divisor // even, []
    for d in range(-8, 9):
        if d == 0 or (d + divisor) % (2 * even):
            continue
        for s in (24, 25):
            first = (d + divisor) // (2 * even) * pow(1 << s, -1, odd) * (2 * even) % odd
            start = first + -(-(2**23 - first) // odd) * odd
            out += [x for x in range(start, 2**24, odd) if (x >= divisor) == (s == 24)]
    return out
