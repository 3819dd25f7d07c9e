"""Every function of section 14 within the bound that its docstring states (tilelang.target.accuracy), on every execution."""

import math

import numpy as np
import pytest
from everywhere import cuda_text, is_gpu
from numbers_of import BLOCK, EVERYWHERE, FLOATS, THREADS, bits_of, check, count, every, run_on, unit, wide

import tilelang.language as T
from tilelang.ir import numpy_dtype
from tilelang.target.accuracy import FAST, UNITS, stated, units


def erf(x):
    """erf in the type of x: math.erf, or its series of positive terms in longdouble."""
    if x.dtype != np.longdouble:
        return np.array([math.erf(v) for v in x])
    a = np.minimum(np.abs(x), 7)
    term = 2 * a / np.sqrt(np.longdouble(np.pi) + np.longdouble(1.2246467991473532e-16)) * np.exp(-a * a)
    total, k = term.copy(), 1
    while k < 200:
        term = term * (2 * a * a / (2 * k + 1))
        total, k = total + term, k + 1
    return np.copysign(np.where(np.isnan(x), x, np.minimum(total, 1)), x)


def away(x):
    """Nearest integer, ties away from zero; numbers without a fraction as they are."""
    return np.copysign(np.where(np.abs(x) < 2.0**52, np.floor(np.abs(x) + x.dtype.type(0.5)), np.abs(x)), x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# Signaling NaN among the bit patterns: NumPy warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value")
UNARY = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(x.dtype.type(10), x), "log": np.log, "log2": np.log2,
    "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": sigmoid,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asin": np.arcsin,
    "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "erf": erf,
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "nearbyint": np.rint, "round": np.rint, "abs": np.abs,
}
BINARY = {
    "pow": np.power, "atan2": np.arctan2, "fmod": np.fmod, "hypot": np.hypot, "copysign": np.copysign,
}


def of_one(dtype, names=tuple(UNARY), result=None):
    N = count(dtype)
    fns = [getattr(T, k) for k in names]

    def apply(X, Y, i):
        for k, fn in enumerate(fns):
            T.buffer_store(Y, fn(X[i]), (k, i))

    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Y: T.Tensor((len(fns), N), result or dtype)):
        with T.Kernel(N // BLOCK, threads=THREADS) as b:
            for i in T.Parallel(BLOCK):
                apply(X, Y, b * BLOCK + i)

    return f


@pytest.mark.spec("L14:unary")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_one_number(dtype, on):
    x = every(dtype)
    y = run_on(of_one(dtype), x, on=on)[1]
    with np.errstate(all="ignore"):
        for k, (name, meaning) in enumerate(UNARY.items()):
            check(name, dtype, y[k], meaning(wide(x)), units(name, dtype), x)


PROMOTED = [n for n in ("exp", "exp2", "exp10", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid", "sin", "cos")]


@pytest.mark.spec("L14:unary")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_integers_become_float32(dtype, on):
    x = every(dtype)
    y = run_on(of_one(dtype, PROMOTED, "float32"), x, on=on)[1]
    with np.errstate(all="ignore"):
        for k, name in enumerate(PROMOTED):
            check(name, "float32", y[k], UNARY[name](x.astype(np.float64)), units(name, "float32"), x)


def of_two(dtype):
    N = count(dtype, 2)
    fns = [getattr(T, k) for k in BINARY]

    def apply(X, Z, Y, i):
        for k, fn in enumerate(fns):
            T.buffer_store(Y, fn(X[i], Z[i]), (k, i))

    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Z: T.Tensor((N,), dtype), Y: T.Tensor((len(fns), N), dtype)):
        with T.Kernel(N // BLOCK, threads=THREADS) as b:
            for i in T.Parallel(BLOCK):
                apply(X, Z, Y, b * BLOCK + i)

    return f


def pairs(dtype):
    """All pairs of an 8-bit type; else samples, each special value beside each."""
    if numpy_dtype(dtype).itemsize == 1:
        x = every(dtype, 256)
        return np.repeat(x, 256), np.tile(x, 256)
    N = count(dtype, 2)
    x, z = (np.random.default_rng(k).permutation(every(dtype))[:N] for k in (0, 1))
    for v in (x, z):  # a signaling NaN makes NaN of what a quiet one does not: hypot of infinity, pow of 1
        v[np.isnan(v)] = np.nan
    m, least, greatest = bits_of(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, 2.0, -2.0, 3.0, -3.0, greatest, 2.0**least])
    n = len(special)
    x[:n * n], z[:n * n] = np.repeat(special, n), np.tile(special, n)
    rng = np.random.default_rng(2)
    half = slice(N // 2, N)
    x[half], z[half] = rng.uniform(-9, 9, N // 2), rng.uniform(-9, 9, N // 2)
    return x, z


@pytest.mark.spec("L14:binary")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_two_numbers(dtype, on):
    x, z = pairs(dtype)
    if dtype.startswith("float8") and is_gpu(on):  # the processor's conversions know one NaN: it has no sign
        z = np.where(np.isnan(z.astype(np.float32)), np.zeros_like(z), z)
    y = run_on(of_two(dtype), x, z, on=on)[2]
    with np.errstate(all="ignore"):
        for k, (name, meaning) in enumerate(BINARY.items()):
            check(name, dtype, y[k], meaning(wide(x), wide(z)), units(name, dtype), x, z)


@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_and_powers_of_two(dtype, on):
    N = count(dtype, 2)

    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Z: T.Tensor((N,), dtype), K: T.Tensor((N,), "int32"), Y: T.Tensor((2, N), dtype)):
        with T.Kernel(N // BLOCK, threads=THREADS) as b:
            for i in T.Parallel(BLOCK):
                Y[0, b * BLOCK + i] = T.nextafter(X[b * BLOCK + i], Z[b * BLOCK + i])
                Y[1, b * BLOCK + i] = T.ldexp(X[b * BLOCK + i], K[b * BLOCK + i])

    x, z = pairs(dtype)
    x[-9:] = z[-9:]
    k = np.random.default_rng(0).integers(-300, 300, N).astype(np.int32)
    k[::2] = np.random.default_rng(1).integers(-9, 9, N // 2)
    k[:4], x[:4] = (2**31 - 1, -(2**31), 2**31 - 1, -2200), (1.0, 1.0, 0.0, -1.0)
    y = run_on(f, x, z, k, on=on)[3]
    with np.errstate(all="ignore"):
        check("nextafter", dtype, y[0], wide(neighbour(x, z)), 0.0, x, z)
        check("ldexp", dtype, y[1], np.ldexp(wide(x), np.clip(k, -3000, 3000)), units("ldexp", dtype), x, k)


def neighbour(x, z):
    """The next number of the type of x towards z, by its place among all numbers in order."""
    if x.dtype.itemsize > 2:
        return np.nextafter(x, z)
    codes = x.view(f"i{x.dtype.itemsize}").astype(np.int32)
    top = 1 << (8 * x.dtype.itemsize - 1)
    place = np.where(codes < 0, -(codes + top), codes)
    place = place + np.sign(z.astype(np.float64) - x.astype(np.float64)).astype(np.int32)
    back = np.where(place < 0, top - place, place).astype(f"u{x.dtype.itemsize}").view(x.dtype)
    back = np.where((place == 0) & (x.astype(np.float64) < 0), np.asarray(-0.0, x.dtype), back)
    wide_x, wide_z = x.astype(np.float64), z.astype(np.float64)
    back = np.where(wide_x == wide_z, z, back)
    return np.where(np.isnan(wide_x) | np.isnan(wide_z), np.asarray(np.nan, x.dtype), back)


def fast():
    N = count("float32")
    fns = [getattr(T, k) for k in FAST]

    def apply(X, Y, i):
        for k, fn in enumerate(fns):
            T.buffer_store(Y, fn(X[k, i]), (k, i))

    @T.prim_func
    def f(X: T.Tensor((len(fns), N), "float32"), Y: T.Tensor((len(fns), N), "float32")):
        with T.Kernel(N // BLOCK, threads=THREADS) as b:
            for i in T.Parallel(BLOCK):
                apply(X, Y, b * BLOCK + i)

    return f


@pytest.mark.spec("L14:fast")
@pytest.mark.parametrize("on", EVERYWHERE)
def test_fast_functions(on):
    ranges = {"__exp": (-80, 80), "__exp10": (-37, 37), "__log": (0, 9), "__log2": (0, 9), "__log10": (0, 9),
              "__sin": (-3.14, 3.14), "__cos": (-3.14, 3.14), "__tan": (-1, 1), "fast_rcp": (-9, 9),
              "fast_exp2": (-120, 120)}
    rng = np.random.default_rng(4)
    x = np.stack([rng.uniform(*ranges[n], count("float32")) for n in FAST]).astype(np.float32)
    y = run_on(fast(), x, on=on)[1]
    for k, (name, row) in enumerate(FAST.items()):
        v = x[k].astype(np.float64)
        exact = 1 / v if name == "fast_rcp" else UNARY[name.removeprefix("fast_").removeprefix("__")](v)
        step = unit(exact, "float32")
        allowed = np.inf if row.units is None else (row.units + row.slope * np.abs(v)) * step
        inside = (row.low <= v) & (v <= row.high)
        allowed = np.where(inside, row.absolute + step / 2, allowed)
        assert np.all(np.abs(y[k] - exact) <= allowed), (name, np.max(np.abs(y[k] - exact) / allowed))


@pytest.mark.spec("L14:predicates")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_predicates_and_ties(dtype, on):
    N = count(dtype)

    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Y: T.Tensor((3, N), "bool"), Z: T.Tensor((2, N), dtype)):
        with T.Kernel(N // BLOCK, threads=THREADS) as b:
            for i in T.Parallel(BLOCK):
                Y[0, b * BLOCK + i] = T.isnan(X[b * BLOCK + i])
                Y[1, b * BLOCK + i] = T.isinf(X[b * BLOCK + i])
                Y[2, b * BLOCK + i] = T.isfinite(X[b * BLOCK + i])
                Z[0, b * BLOCK + i] = T.round(X[b * BLOCK + i], "ties-away-from-zero")
                Z[1, b * BLOCK + i] = -X[b * BLOCK + i]

    x = every(dtype)
    _, y, z = run_on(f, x, on=on)
    w = wide(x)
    assert np.array_equal(y, [np.isnan(w), np.isinf(w), np.isfinite(w)])
    check("round", dtype, z[0], away(w), 0.0, x)
    check("neg", dtype, z[1], -w, 0.0, x)


def test_every_bound_is_stated_in_the_docstring_and_measured():
    measured = {*UNARY, *BINARY, "nextafter", "ldexp"}
    assert measured == set(UNITS)
    for name in UNITS:
        assert stated(name) in getattr(T, name).__doc__, name
    for name, row in FAST.items():
        assert row.stated() in getattr(T, name).__doc__, name


def test_functions_assemble_for_a_gpu():
    cuda_text(of_one("bfloat16"))  # through float32; tests/names/test_math.py assembles the other types
