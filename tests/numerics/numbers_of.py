"""Numbers to compute with, the distance of results from exact ones, and one run of a program on an execution."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import pytest
from everywhere import EXECUTIONS, on_gpu, run

from tilelang.ir import dtype, numpy_dtype

THREADS = 512  # many: the simulator takes as long for a block of few
BLOCK = 8 * THREADS  # elements of a block: 8 for each thread, so that vector code runs
N = 65536
HALVES = ("float16", "bfloat16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
FLOATS = (*FLOAT8, *HALVES, "float32", "float64")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
EVERYWHERE = (*EXECUTIONS, pytest.param("gpu", marks=pytest.mark.gpu))


def run_on(program, *args, on):
    """The arrays of a program after one call on an execution, "gpu" included."""
    return on_gpu(program, *args) if on == "gpu" else run(program, *args, on=on)


@functools.cache
def bits_of(name: str) -> tuple[int, int, float]:
    """(bits of the fraction, least normal exponent, greatest finite number) of a float type."""
    info = ml_dtypes.finfo(numpy_dtype(name))
    return int(info.nmant), int(info.minexp), float(info.max)


def count(name: str, operands: int = 1) -> int:
    """How many points show a type: all of 16 bits, be it one operand or two, else all of 8 bits over and over, or samples."""
    return N if operands * dtype(name).bits == 16 else N // 16


def every(name: str, n: int | None = None) -> np.ndarray:
    """All numbers of an 8- or 16-bit type (repeated up to n), or n samples of a wider one.

    Samples: all bit patterns alike, numbers near 1 and of middle size, and the edges: zeros, infinities, NaN, the least
    subnormal and normal numbers, the greatest, ties of rounding to integers and the ends of the integer types.
    """
    kind, n = numpy_dtype(name), count(name) if n is None else n
    if name == "bool":
        return np.arange(n) % 3 == 0
    if kind.itemsize <= 2:
        return np.resize(np.arange(256**kind.itemsize, dtype=np.uint32).astype(f"u{kind.itemsize}"), n).view(kind)
    rng = np.random.default_rng(len(name))
    x = rng.integers(0, 2**(8 * kind.itemsize), n, dtype=np.uint64).astype(f"u{kind.itemsize}").view(kind).copy()
    if dtype(name).is_int:
        info = np.iinfo(kind)
        x[::3] = rng.integers(max(info.min, -300), 300, len(x[::3]))
        powers = [s * 2**k + d for k in range(info.bits) for d in (-1, 0, 1) for s in (1, -1)]
        edge = [v for v in (*powers, info.min, info.max) if info.min <= v <= info.max]
    else:
        m, least, greatest = bits_of(name)
        x[1::4] = rng.standard_normal(len(x[1::4]))
        x[2::4] = rng.uniform(-20, 20, len(x[2::4]))
        x[3::8] = rng.uniform(-120, 120, len(x[3::8]))
        ends = [float(2**k) * s + d for k in (7, 8, 15, 16, 31, 32, 63, 64) for s in (1, -1) for d in (-1, -0.5, 0, 0.5)]
        ties = [k + 0.5 for k in range(-9, 9)]
        edge = [0.0, -0.0, math.inf, -math.inf, math.nan, greatest, -greatest, 2.0**least, -(2.0**least), 2.0**(least - m),
                1.0, -1.0, 1 + 2.0**-m, 1 - 2.0**-m, *ends, *ties]
    x[:len(edge)] = edge
    return x


def wide(x: np.ndarray) -> np.ndarray:
    """Values in the type of the reference: longdouble for float64, else float64."""
    return x.astype(np.longdouble if x.dtype == np.float64 else np.float64)


def unit(exact: np.ndarray, name: str) -> np.ndarray:
    """Distance of neighbouring numbers of a type at a finite exact value."""
    m, least, _ = bits_of(name)
    exponent = np.frexp(np.abs(exact))[1] - 1
    return np.ldexp(np.ones_like(exact), np.maximum(np.where(exact == 0, least, exponent), least) - m)


def error(got: np.ndarray, exact: np.ndarray, name: str) -> np.ndarray:
    """Distance of results from exact values, in units in the last place of the type.

    NaN is 0 from NaN and infinitely far from numbers.  An infinity counts as the number that would follow the greatest; in
    types of 8 bits what is greater is the greatest.
    """
    m, _, greatest = bits_of(name)
    got, exact = got.astype(exact.dtype), exact.copy()
    beyond = exact.dtype.type(greatest) if dtype(name).bits == 8 else np.ldexp(
        exact.dtype.type(1), math.frexp(greatest)[1])
    got, exact = np.clip(got, -beyond, beyond), np.clip(exact, -beyond, beyond)  # NaN stays NaN
    with np.errstate(invalid="ignore"):
        off = np.abs(got - exact) / unit(np.clip(np.nan_to_num(exact), -greatest, greatest), name)
    return np.where(np.isnan(got) & np.isnan(exact), 0, np.where(np.isnan(got) | np.isnan(exact), np.inf, off))


WORST: dict[tuple[str, str], tuple[float, float]] = {}  # (function, type) -> (greatest error met, bound)
checked: dict[str, int] = {"within": 0, "exact": 0}  # how many results were compared with a bound, how many bit by bit


def worst_table() -> list[str]:
    """The greatest errors met so far, in units in the last place, beside their bounds: a line for each function."""
    narrow = [t for t in FLOATS if dtype(t).bits <= 16]
    lines = ["| function | 8 and 16 bits | float32 | float64 |", "|---|---|---|---|"]
    for name in sorted({n for n, _ in WORST}):
        cells = []
        for types in (narrow, ["float32"], ["float64"]):
            met = [WORST[name, t] for t in types if (name, t) in WORST]
            cells.append(f"{max(m[0] for m in met):.3f} of {max(m[1] for m in met):g}" if met else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, f"{checked['within']} results within their bounds, {checked['exact']} equal to the one right result"]


def check(what: str, name: str, got: np.ndarray, exact: np.ndarray, bound: float, *args: np.ndarray) -> float:
    """Assert that all results are within `bound` units of exact ones, and zeros have their sign.  The greatest error."""
    if dtype(name).bits == 8 and what != "nextafter":
        assert not np.isinf(got.astype(np.float64)).any(), f"{what} gives an infinity in {name}, which saturates"
    off = error(got, exact, name)
    at = int(np.argmax(off))
    shown = ", ".join(repr(a[at]) for a in args)
    assert off[at] <= bound * (1 + 2.0**-20), (f"{what}({shown}) in {name}: {got[at]!r}, exact {exact[at]!r}: {off[at]:.3f} "
                                               f"units, stated {bound}; {int((off > bound).sum())} such")
    zero = (exact == 0) & (got.astype(exact.dtype) == 0) & ("fnuz" not in name)  # these have one zero
    wrong = np.flatnonzero(zero & (np.signbit(exact) != np.signbit(got.astype(exact.dtype))))
    assert not len(wrong), f"{what} in {name}: the zero of {[a[wrong[0]] for a in args]} has the wrong sign"
    checked["within"] += len(off)
    WORST[what, name] = max(WORST.get((what, name), (0.0, bound)), (float(off[at]), bound))
    return float(off[at])


def rounded(exact: np.ndarray, name: str) -> np.ndarray:
    """Exact values (longdouble or float64) rounded once to a float type, ties to even; types of 8 bits saturate."""
    m, _, greatest = bits_of(name)
    with np.errstate(all="ignore"):
        step = unit(np.where(np.isfinite(exact), exact, 0), name)
        near = np.where(np.isfinite(exact), np.rint(exact / step) * step, exact)
        if dtype(name).bits == 8:
            near = np.clip(near, -greatest, greatest)
        else:
            near = np.where(np.abs(near) > greatest, np.copysign(np.inf, near), near)
        return np.copysign(near, exact).astype(np.float64).astype(numpy_dtype(name))


def assert_same(got: np.ndarray, want: np.ndarray, what: str, *args: np.ndarray) -> None:
    """Equal values, zeros with their sign, NaN for NaN."""
    if got.dtype.kind in "biu":
        wrong = got != want
    else:
        g, w = got.astype(np.float64), want.astype(np.float64)
        wrong = ~((g == w) & (np.signbit(g) == np.signbit(w)) | np.isnan(g) & np.isnan(w))
    checked["exact"] += wrong.size
    at = np.flatnonzero(wrong)
    assert not len(at), f"{what}: {[a[at[0]] for a in args]} gives {got[at[0]]!r}, expected {want[at[0]]!r} ({len(at)} such)"
