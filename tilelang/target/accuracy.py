"""Error bounds of the mathematical functions (reference, section 14), which hold on every backend.

A unit in the last place is the distance of neighbouring numbers of the result's type at the exact result (below the least
normal number, of the subnormals); 0.5 units is correct rounding.  float16, bfloat16 and the 8-bit floats are computed in
float32 and rounded once, so one bound holds for all of them.  The bounds of float32 and float64 hold for the functions of the
device, of the CPU target and of NumPy, which the simulators call.  Those of the device are from the CUDA C++ Programming
Guide, "Mathematical Functions", plus half a unit, because the guide measures from the correctly rounded result.
`tl.enable_fast_math` replaces them by the bounds of the fast functions.  tests/numerics measures every entry.
"""

from __future__ import annotations


from tilelang.ir import dtype
from tilelang.ir.record import record

NARROW = 0.51  # bound of the narrow types: half a unit, plus the effect of an error of 8 units of float32

# function: (float32, float64), units in the last place
UNITS: dict[str, tuple[float, float]] = {
    "exp": (2.5, 1.5), "exp2": (2.5, 1.5), "exp10": (2.5, 2.5), "log": (3.0, 1.5), "log2": (2.5, 1.5), "log10": (2.5, 2.5),
    "log1p": (2.5, 1.5), "sqrt": (0.5, 0.5), "rsqrt": (2.5, 1.5), "sigmoid": (5.0, 4.0), "sin": (2.5, 2.5),
    "cos": (2.5, 2.5), "tan": (4.5, 2.5), "sinh": (3.5, 2.5), "cosh": (2.5, 1.5), "tanh": (2.5, 2.5), "asin": (3.0, 2.5),
    "acos": (2.5, 2.5), "atan": (2.5, 2.5), "asinh": (3.5, 3.5), "acosh": (4.5, 3.5), "atanh": (3.5, 2.5), "erf": (2.5, 2.5),
    "pow": (4.5, 2.5), "atan2": (3.5, 2.5), "fmod": (0.0, 0.0), "hypot": (3.5, 2.5), "copysign": (0.0, 0.0),
    "nextafter": (0.0, 0.0), "ldexp": (0.5, 0.5), "floor": (0.0, 0.0), "ceil": (0.0, 0.0), "trunc": (0.0, 0.0),
    "nearbyint": (0.0, 0.0), "round": (0.0, 0.0), "abs": (0.0, 0.0),
}


def units(name: str, dt: str) -> float:
    """The bound of a function in a float type, in units in the last place.  Raises KeyError for other functions."""
    single, double = UNITS[name]
    bits = dtype(dt).bits
    if bits == 64:
        return double
    return single if bits == 32 else min(NARROW, max(single, 0.5)) if single else 0.0


def stated(name: str) -> str:
    """The bounds of a function as a sentence for its docstring."""
    single, double = UNITS[name]
    if single == double == 0.0:
        return "Exact."
    if single == double == 0.5:
        return "Correctly rounded."
    return (f"At most {single:g} units in the last place from the exact result in float32, {double:g} in float64, "
            f"{NARROW:g} in narrower types.")


@record
class Fast:
    """The error bound of a fast float32 function, for results that are normal numbers (smaller results may become zero).

    units: the bound in units in the last place, which grows by `slope` * |x|.  For low <= x <= high the error is below
    `absolute` instead.  Without units there is no bound elsewhere.
    """

    units: float | None
    slope: float = 0.0
    low: float = 1.0
    high: float = 0.0
    absolute: float = 0.0

    def stated(self) -> str:
        """The bound as a sentence."""
        parts = []
        if self.low <= self.high:
            parts.append(f"off by at most {self.absolute:.2g} for {self.low:g} <= x <= {self.high:g}")
        if self.units is not None:
            grows = f" + {self.slope:g} |x|" if self.slope else ""
            parts.append(f"{'else' if parts else 'off'} by at most {self.units:g}{grows} units in the last place")
        return f"In float32 {', '.join(parts)}; results below 2**-126 may be zero."


# CUDA C++ Programming Guide, "Intrinsic Functions", plus half a unit.  The CPU and the simulators use the functions above.
FAST: dict[str, Fast] = {
    "__exp": Fast(2.5, 1.173), "__exp10": Fast(2.5, 2.97), "__log": Fast(3.5, 0, 0.5, 2, 2.0**-21.41),
    "__log2": Fast(2.5, 0, 0.5, 2, 2.0**-22), "__log10": Fast(3.5, 0, 0.5, 2, 2.0**-23),
    "__sin": Fast(None, 0, -3.14, 3.14, 2.0**-21.41), "__cos": Fast(None, 0, -3.14, 3.14, 2.0**-21.19),
    "__tan": Fast(None, 0, -1, 1, 2.0**-19), "fast_rcp": Fast(1.5),
    "fast_exp2": Fast(4.5),  # PTX ISA, ex2.approx.ftz.f32: relative error 2^-22
}
