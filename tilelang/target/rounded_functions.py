"""Forms of float32 functions for results that are only rounded to 16 or 8 bits (transform/lower/shorten_rounded.py).

Errors are in units of float32 (relative 2^-23) and follow from those of the PTX ISA: ex2.approx 2 units, rcp.approx 1, div.full
2; the rounding of an exponent y adds |y| 2^-24 ln 2.  The simulators compute the functions themselves.
"""

from __future__ import annotations

import numpy as np

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
# results below 2^-126 may be zero (in float32 CUDA's exp2f is the same instruction between a scaling of subnormal results).
_ROWS: dict[str, dict[str, tuple[float, str]]] = {
    "exp": {"half": (16, "tl::fast_exp2(({0}) * 1.44269504f)"), "wide": (40, "tl::exp_wide({0})")},
    "exp2": {"half": (4, "tl::fast_exp2({0})"), "term": (4, "tl::fast_exp2({0})")},
    "sigmoid": {"half": (16, "tl::sigmoid_half({0})"), "wide": (40, "tl::sigmoid_wide({0})")},
    "tanh": {"half": (24, "tl::tanh_wide({0})"), "wide": (24, "tl::tanh_wide({0})")},
    "div": {"half": (3, "tl::quotient({0}, {1})"), "wide": (3, "tl::quotient({0}, {1})")},
}
FORMS: dict[str, dict[str, RoundedForm]] = {}
for _name, _uses in _ROWS.items():
    FORMS[_name] = {}
    _exact = np.divide if _name == "div" else INTRINSICS[_name].reference
    for _use, (_units, _text) in _uses.items():
        FORMS[_name][_use] = RoundedForm(f"{_name}_rounded_{_use}", _units)
        add_intrinsic(Intrinsic(f"{_name}_rounded_{_use}", 2 if _name == "div" else 1, PURE, _exact, {"float32": _text}))

__all__ = ["ALLOWED", "FORMS", "NOT_NEGATIVE", "RoundedForm"]
