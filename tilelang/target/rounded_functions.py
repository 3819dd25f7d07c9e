"""Forms of float32 functions for results that are only rounded to 16 or 8 bits (transform/lower/shorten_rounded.py).

Errors are in units of float32 (relative 2^-23) and follow from those of the PTX ISA: ex2.approx 2 units, rcp.approx 1, div.full
2; the rounding of an exponent y adds |y| 2^-24 ln 2.  The simulators compute the functions themselves.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilelang.ir import Binary, Const
from tilelang.ir.record import record

from .intrinsics import INTRINSICS, PURE, Intrinsic, add_intrinsic

# Units of float32 that values may be off before their rounding: a hundredth of a unit of the type, less a reserve.
ALLOWED = {"float16": 72, "bfloat16": 600, "float8_e4m3fn": 600, "float8_e5m2": 600}
NOT_NEGATIVE = {"exp", "exp2", "sigmoid", "sqrt", "abs", "fabs"}


@record
class RoundedForm:
    """A form: the intrinsic's name and the error in units of float32."""

    name: str
    units: float


# function: where it is used -> (units, CUDA text).  half: directly below a rounding to float16 or 8 bits, where results
# below 2^-25 round to zero or are subnormals of float16; wide: for all results of float32; term: a term of a float32 sum, where
# results below 2^-126 may be zero (in float32 CUDA's exp2f is the same instruction between a scaling of subnormal results), of
# exp only for an argument x that is a rounded result itself: it is off by |x| 2^-24, and the form by 1.3 times that besides;
# row: of many elements with one divisor; sum: added to a constant of at least 1, so that the error of the function is absolute.
# Where 1 + erf(-t) cancels the error is relative, but for the last digit: it is the exponential in 1 - exp2(t * Q(t)); so is
# 2 e / (1 + e) in the form of tanh.
_ROWS: dict[str, dict[str, tuple[float, str]]] = {
    "exp": {"half": (16, "tl::fast_exp2(({0}) * 1.44269504f)"), "wide": (40, "tl::exp_wide({0})"),
            "term": (4, "tl::fast_exp2(({0}) * 1.44269504f)")},
    "exp2": {"half": (4, "tl::fast_exp2({0})"), "term": (4, "tl::fast_exp2({0})")},
    "sigmoid": {"half": (16, "tl::sigmoid_half({0})"), "wide": (40, "tl::sigmoid_wide({0})")},
    "tanh": {"half": (24, "tl::tanh_wide({0})"), "wide": (24, "tl::tanh_wide({0})"), "sum": (16, "tl::tanh_in_sum({0})")},
    "erf": {"sum": (16, "tl::erf_in_sum({0})")},
    "div": {"half": (3, "tl::quotient({0}, {1})"), "wide": (3, "tl::quotient({0}, {1})"),
            "row": (3, "tl::row_quotient({0}, {1})")},
}
FORMS: dict[str, dict[str, RoundedForm]] = {}
for _name, _uses in _ROWS.items():
    FORMS[_name] = {}
    _exact = np.divide if _name == "div" else INTRINSICS[_name].reference
    for _use, (_units, _text) in _uses.items():
        FORMS[_name][_use] = RoundedForm(f"{_name}_rounded_{_use}", _units)
        add_intrinsic(Intrinsic(f"{_name}_rounded_{_use}", 2 if _name == "div" else 1, PURE, _exact, {"float32": _text}))

# c * tanh(x * k) for exponents.  With r = rcp(1 + ex2(2 log2(e) k x)) it is c - 2 c r.  Errors of tanh, in units of 2^-24: the
# exponential is off by a relative 2^-22, which counts most at 0, by a half (2); the sum 2, the reciprocal 2 (both where r is
# near 1), the rest 1.  Where the declared bound of tanh has 2.5, this form has at most 7.
SCALED_TANH = "tanh_rounded_scaled"
TANH_ERROR = 7 * 2.0**-24
MOST_WEIGHT = 100.0  # so exponents are off by 100 * 7 * 2^-24 = 2^-14.5 at most: an eleventh of a unit of float16
# (maxima of a softcap of 50 go through three sums, and have 98)
# (L, coefficients) of tanh(x) = x (a0 + a1 x^2 + …) for |x| <= L (minimax by Remez): for rounded results and weights below
# LEAST_ANCHORED, with an error of 2.2 units of 2^-24, relatively at most 20 units of float32 (those forms have 24); and for
# larger weights in exponents, where a range is worth less than a term: 5.5 units, and 1 by roundings.
SMALL_TANH = ((0.5, (0.9999976754188538, -0.33320656418800354, 0.13145145773887634, -0.04337248206138611)),
              (0.33, (0.9999930262565613, -0.33281534910202026, 0.12361811101436615)))
# The largest of 2^(-c tanh z) |1 - 2^(c (tanh z - p(z)))| over z > 0.33, for the latter p, is below 2^-26 from this c on.
LEAST_ANCHORED = 40.0


add_intrinsic(Intrinsic(SCALED_TANH, 3, PURE, lambda x, k, c: c * np.tanh(x * k),
                        {"float32": "tl::scaled_tanh({0}, {1}, {2})"}))


def without_factors(e: Any) -> tuple[Any, float]:
    """(x, k) of an expression that is k x, for the constants that it is multiplied and divided by."""
    x: Any = e
    k = 1.0
    while isinstance(x, Binary) and x.op in ("mul", "div"):
        a, b = (float(n.value) if isinstance(n, Const) and math.isfinite(n.value) else None for n in (x.a, x.b))
        if b:
            k, x = k * b if x.op == "mul" else k / b, x.a
        elif a is not None and x.op == "mul":
            x, k = x.b, k * a
        else:
            break
    return (x, k) if 2.0**-60 < abs(k) < 2.0**60 else (e, 1.0)
