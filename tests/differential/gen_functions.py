"""Functions whose results are no whole numbers: how they are rounded to some that every execution finds alike."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from gen_values import Value, cast, promote

# function: (its value in Python, least and largest whole argument, what arguments are multiplied by)
FUNCTIONS: dict[str, tuple[Callable[[float], float], int, int, float]] = {
    "exp": (math.exp, -4, 5, 1.0), "exp2": (math.exp2, -3, 7, 1.0), "exp10": (lambda x: 10.0**x, -2, 2, 1.0),
    "log": (math.log, 1, 40, 1.0), "log2": (math.log2, 1, 40, 1.0), "log10": (math.log10, 1, 40, 1.0),
    "log1p": (math.log1p, 0, 40, 1.0), "sqrt": (math.sqrt, 0, 60, 1.0), "rsqrt": (lambda x: x**-0.5, 1, 60, 1.0),
    "sin": (math.sin, -9, 9, 1.0), "cos": (math.cos, -9, 9, 1.0), "tan": (math.tan, -8, 8, 0.125),
    "sinh": (math.sinh, -4, 4, 1.0), "cosh": (math.cosh, -4, 4, 1.0), "tanh": (math.tanh, -8, 8, 0.25),
    "asin": (math.asin, -8, 8, 0.125), "acos": (math.acos, -8, 8, 0.125), "atan": (math.atan, -15, 15, 1.0),
    "asinh": (math.asinh, -15, 15, 1.0), "acosh": (math.acosh, 1, 15, 1.0), "atanh": (math.atanh, -7, 7, 0.125),
    "erf": (math.erf, -8, 8, 0.25), "sigmoid": (lambda x: 1 / (1 + math.exp(-x)), -9, 9, 1.0),
    "fast_rcp": (lambda x: 1 / x, 1, 15, 1.0), "__exp": (math.exp, -4, 5, 1.0), "__log": (math.log, 1, 40, 1.0),
    "__sin": (math.sin, -3, 3, 1.0), "__cos": (math.cos, -3, 3, 1.0), "__log2": (math.log2, 1, 40, 1.0),
    "pow": (lambda x: x**0.5, 0, 40, 1.0), "hypot": (lambda x: math.hypot(x, 3), -15, 15, 1.0),
    "atan2": (lambda x: math.atan2(x, 3), -15, 15, 1.0)}
SECOND = {"pow": "0.5", "hypot": "3.0", "atan2": "3.0"}
FLOATS_ONLY = ("fast_rcp", "__exp", "__log", "__sin", "__cos", "__log2")  # of float32: their errors are bounded there
SCALES = (1, 2, 3, 5, 8, 16, 40)
MARGIN = 0.02  # of a whole number's half that no scaled result comes nearer to: far more than any function's error


def rounded(rng: random.Random, a: Value, fit: Callable[[Value, int, int], Value],
            feature: Callable[[str], None]) -> Value | None:
    """T.round(f(a) * c), with f and c such that no result in a's range is near the middle of two whole numbers."""
    name = rng.choice(list(FUNCTIONS))
    f, low, high, step = FUNCTIONS[name]
    if low <= 0:
        a = fit(a, low, high)
    elif not low <= a.low <= a.high <= high:
        a = fit(a, 0, high - low)
        a = Value(f"({a.text} + {low})", promote(a.dtype, "int32") or a.dtype, a.low + low, a.high + low)
    low, high = a.low, a.high
    dt = "float32" if name in FLOATS_ONLY else rng.choice(("float32", "float32", "float64", "float16"))
    a = cast(a, dt)
    values = [f(x * step) for x in range(low, high + 1)]
    for c in rng.sample(SCALES, len(SCALES)):
        scaled = [c * v for v in values]
        halves = 2.0**-9 * max(map(abs, scaled)) if dt == "float16" else 0.0  # its own roundings, two of 11 bits
        if max(map(abs, scaled)) < 4000 and all(abs(abs(v % 1) - 0.5) > MARGIN + halves for v in scaled):
            break
    else:
        return None
    feature(f"rounded:{name}")
    feature(f"rounded:{dt}")
    arg = a.text if step == 1.0 else f"{a.text} * T.{dt}({step})"
    second = f", T.{dt}({SECOND[name]})" if name in SECOND else ""
    text = f"T.round(T.{name}({arg}{second}) * T.{dt}({c}))"
    whole = [round(v) for v in scaled]
    return Value(text, dt, min(whole), max(whole))
