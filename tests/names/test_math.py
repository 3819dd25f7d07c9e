"""Functions of numbers (T.exp … T.clz), each against NumPy in a wider type, special values included."""

import math

import ml_dtypes
import numpy as np
import pytest
from everywhere import EXECUTIONS, cuda_text, is_gpu, run

import tilelang.language as T
from tilelang.errors import TileLangError

NP = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


UNARY = {  # name: (function, meaning, low and high end of the ordinary arguments)
    "exp": (T.exp, np.exp, -80, 80), "exp2": (T.exp2, np.exp2, -120, 120), "log": (T.log, np.log, 0, 1e4),
    "exp10": (T.exp10, lambda x: np.power(10.0, x), -30, 30),
    "log2": (T.log2, np.log2, 0, 1e4), "log10": (T.log10, np.log10, 0, 1e4), "log1p": (T.log1p, np.log1p, -1, 10),
    "sqrt": (T.sqrt, np.sqrt, 0, 1e9), "rsqrt": (T.rsqrt, lambda x: 1 / np.sqrt(x), 1e-3, 1e4),
    "sin": (T.sin, np.sin, -9, 9), "cos": (T.cos, np.cos, -9, 9), "tan": (T.tan, np.tan, -1.5, 1.5),
    "sinh": (T.sinh, np.sinh, -10, 10), "cosh": (T.cosh, np.cosh, -10, 10), "tanh": (T.tanh, np.tanh, -5, 5),
    "asin": (T.asin, np.arcsin, -1, 1), "acos": (T.acos, np.arccos, -1, 1), "atan": (T.atan, np.arctan, -9, 9),
    "asinh": (T.asinh, np.arcsinh, -9, 9), "acosh": (T.acosh, np.arccosh, 1, 9), "atanh": (T.atanh, np.arctanh, -1, 1),
    "erf": (T.erf, erf, -3, 3), "sigmoid": (T.sigmoid, sigmoid, -30, 30), "floor": (T.floor, np.floor, -9, 9),
    "ceil": (T.ceil, np.ceil, -9, 9), "trunc": (T.trunc, np.trunc, -9, 9), "nearbyint": (T.nearbyint, np.rint, -9, 9),
    "round": (T.round, np.rint, -9, 9), "abs": (T.abs, np.abs, -9, 9), "fabs": (T.fabs, np.abs, -9, 9),
}
EXACT = {"floor", "ceil", "trunc", "nearbyint", "round", "abs", "fabs", "sqrt"}
BINARY = {
    "pow": (T.pow, np.power, 0, 9), "atan2": (T.atan2, np.arctan2, -9, 9), "fmod": (T.fmod, np.fmod, -9, 9),
    "hypot": (T.hypot, np.hypot, -9, 9), "copysign": (T.copysign, np.copysign, -9, 9),
}
N = 64


def arguments(dtype, low, high, seed=0):
    """Special values (zeros of both signs, infinities, NaN, subnormals, ties), then ordinary ones."""
    x = np.random.default_rng(seed).uniform(low, high, N)
    big = float(ml_dtypes.finfo(NP[dtype]).max)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, TINY[dtype], -TINY[dtype], big, -big, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5]
    x[:len(special)] = special
    with np.errstate(over="ignore"):
        return x.astype(NP[dtype])


def same(got, want):
    """Equal values, NaN for NaN and zeros with their sign."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_array_equal(got, want)
    some = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[some], np.signbit(want)[some])


def all_unary(dtype):
    fns = [row[0] for row in UNARY.values()]

    @T.prim_func
    def f(X: T.Tensor((len(fns), N), dtype), Y: T.Tensor((len(fns), N), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            apply(fns, X, Y, i)

    return f


def apply(fns, X, Y, i):
    for k, fn in enumerate(fns):
        T.buffer_store(Y, fn(X[k, i]), (k, i))


def close(name, dtype, got, want, exact):
    """Non-finite values and zeros agree, signs of zero included; the rest is within two units of the last place.

    A result below the least normal number may be flushed by no execution: units there are those of subnormals.
    """
    nt = NP[dtype]
    with np.errstate(all="ignore"):
        rounded = want.astype(nt)
    g, r = got.astype(np.float64), rounded.astype(np.float64)
    assert np.array_equal(np.isnan(g), np.isnan(r)), (name, got, rounded)
    big = np.isinf(r)
    assert np.array_equal(g[big], r[big]), (name, got, rounded)
    fine = np.isfinite(r)
    with np.errstate(all="ignore"):  # the unit of the greatest number overflows in halves
        unit = np.abs(np.spacing(np.abs(rounded[fine]))).astype(np.float64)
    unit = np.where(np.isfinite(unit), np.maximum(unit, TINY[dtype]), np.inf)
    error = np.abs(g[fine] - want[fine].astype(np.float64)) / unit
    assert np.max(error, initial=0) <= (0.5000001 if exact else 2.0), (name, dtype, got[fine][error.argmax()],
                                                                     rounded[fine][error.argmax()])
    zero = fine & (r == 0) & (g == 0)
    assert np.array_equal(np.signbit(g[zero]), np.signbit(r[zero])), name


@pytest.mark.spec("T.atan", "T.ceil", "T.cos", "T.cosh", "T.erf", "T.exp", "T.exp10", "T.exp2", "T.floor", "T.log",
                  "T.log10", "T.log2", "T.nearbyint", "T.rsqrt", "T.sigmoid", "T.sin", "T.sinh", "T.sqrt", "T.tan",
                  "T.tanh", "T.trunc")
@pytest.mark.spec("L14:unary")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", NP)
def test_functions_of_one_number(dtype, on):
    x = np.stack([arguments(dtype, low, high, k) for k, (_, _, low, high) in enumerate(UNARY.values())])
    y = run(all_unary(dtype), x, on=on)[1]
    wide = x.astype(np.longdouble if dtype == "float64" else np.float64)
    for k, (name, (_, meaning, _, _)) in enumerate(UNARY.items()):
        with np.errstate(all="ignore"):
            want = meaning(wide[k])
        close(name, dtype, y[k], want, name in EXACT)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_functions_of_one_number_assemble_for_a_gpu(dtype):
    cuda_text(all_unary(dtype))


def all_binary(dtype):
    fns = [row[0] for row in BINARY.values()]

    @T.prim_func
    def f(X: T.Tensor((len(fns), N), dtype), Z: T.Tensor((N,), dtype), Y: T.Tensor((len(fns), N), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            apply2(fns, X, Z, Y, i)

    return f


def apply2(fns, X, Z, Y, i):
    for k, fn in enumerate(fns):
        T.buffer_store(Y, fn(X[k, i], Z[i]), (k, i))


@pytest.mark.spec("T.fmod", "T.pow")
@pytest.mark.spec("L14:binary")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", NP)
def test_functions_of_two_numbers(dtype, on):
    x = np.stack([arguments(dtype, low, high, k) for k, (_, _, low, high) in enumerate(BINARY.values())])
    z = np.roll(arguments(dtype, -3, 3, 77), 4)  # pairs of special values that differ
    y = run(all_binary(dtype), x, z, on=on)[2]
    wide = np.longdouble if dtype == "float64" else np.float64
    for k, (name, (_, meaning, _, _)) in enumerate(BINARY.items()):
        with np.errstate(all="ignore"):
            want = meaning(x[k].astype(wide), z.astype(wide))
        if name == "hypot" and is_gpu(on):  # within two units there: beyond the greatest number may be infinity
            y[k] = np.where(np.isinf(y[k]) & (want >= ml_dtypes.finfo(NP[dtype]).max), want.astype(NP[dtype]), y[k])
        close(name, dtype, y[k], want, name in ("fmod", "copysign"))


@pytest.mark.parametrize("dtype", NP)
def test_functions_of_two_numbers_assemble_for_a_gpu(dtype):
    cuda_text(all_binary(dtype))


@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", NP)
def test_nextafter_gives_the_neighbour_in_the_type(dtype, on):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Z: T.Tensor((N,), dtype), Y: T.Tensor((N,), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[i] = T.nextafter(X[i], Z[i])

    x, z = arguments(dtype, -9, 9), np.roll(arguments(dtype, -9, 9, 5), 3)
    z[20:24] = x[20:24]
    with np.errstate(all="ignore"):
        want = np.nextafter(x, z)
    same(run(f, x, z, on=on)[2], want)
    if on == "tile":
        cuda_text(f)


@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", NP)
def test_ldexp_scales_by_a_power_of_two_and_rounds_once(dtype, on):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Z: T.Tensor((N,), "int32"), Y: T.Tensor((N,), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[i] = T.ldexp(X[i], Z[i])

    x = arguments(dtype, -9, 9)
    z = np.random.default_rng(3).integers(-40, 20, N).astype(np.int32)
    with np.errstate(all="ignore"):
        want = np.ldexp(x.astype(np.float64), z).astype(NP[dtype])
    same(run(f, x, z, on=on)[2], want)


@pytest.mark.spec("T.isfinite")
@pytest.mark.spec("L14:predicates")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", NP)
def test_predicates(dtype, on):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Y: T.Tensor((3, N), "bool")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[0, i] = T.isnan(X[i])
            Y[1, i] = T.isinf(X[i])
            Y[2, i] = T.isfinite(X[i])

    x = arguments(dtype, -9, 9)
    wide = x.astype(np.float64)
    assert np.array_equal(run(f, x, on=on)[1], np.stack([np.isnan(wide), np.isinf(wide), np.isfinite(wide)]))


@pytest.mark.spec("L14:predicates")
def test_predicates_of_integers_are_constants():
    i = T.Var("i", T.int32)
    assert [p(i).value for p in (T.isnan, T.isinf, T.isfinite)] == [False, False, True]


@pytest.mark.spec("T.round")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", NP)
def test_round_away_from_zero(dtype, on):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Y: T.Tensor((N,), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[i] = T.round(X[i], rounding_mode="ties-away-from-zero")

    x = arguments(dtype, -9, 9)
    x[20:24] = [0.49999997, -0.49999997, 3.5, -4.5]  # in halves the first two are ties too
    wide = x.astype(np.float64)
    want = np.where(np.isfinite(wide), np.copysign(np.floor(np.abs(wide) + np.nextafter(0.5, 0)), wide), wide)
    same(run(f, x, on=on)[1], want)


def test_round_refuses_unknown_modes():
    with pytest.raises(ValueError, match="rounding mode") as e:
        T.round(T.Var("x", T.float32), rounding_mode="up")
    assert e.value.kind == "rounding-mode"


INTS = ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.spec("T.__ffs", "T.abs")
@pytest.mark.spec("L14:bits")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", INTS)
def test_bits_of_integers(dtype, on):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Y: T.Tensor((3, N), dtype), F: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[0, i] = T.popcount(X[i])
            Y[1, i] = T.clz(X[i])
            Y[2, i] = T.abs(X[i])
            F[i] = T.__ffs(X[i])

    info = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(info.min, info.max, N, dtype=dtype, endpoint=True)
    x[:6] = [0, 1, info.max, info.min, 2, 64]
    _, y, ffs = run(f, x, on=on)
    bits = [int(v) & ((1 << info.bits) - 1) for v in x]
    assert y[0].tolist() == [b.bit_count() for b in bits]
    assert y[1].tolist() == [info.bits - b.bit_length() for b in bits]
    with np.errstate(over="ignore"):
        assert np.array_equal(y[2], np.abs(x))  # the least number has no opposite
    assert ffs.tolist() == [(b & -b).bit_length() for b in bits]
    if on == "tile":
        cuda_text(f)


@pytest.mark.spec("T.__fns")
@pytest.mark.spec("L14:bits")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_fns_finds_the_nth_set_bit(on):
    @T.prim_func
    def f(M: T.Tensor((N,), "uint32"), B: T.Tensor((N,), "uint32"), O: T.Tensor((N,), "int32"),
          Y: T.Tensor((N,), "uint32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[i] = T.__fns(M[i], B[i], O[i])

    rng = np.random.default_rng(0)
    m, b = rng.integers(0, 2**32, N, dtype=np.uint32), rng.integers(0, 32, N, dtype=np.uint32)
    o = rng.integers(-6, 7, N).astype(np.int32)
    m[:4], b[:4], o[:4] = [0, 1, 0x80000000, 0xFFFFFFFF], [0, 0, 0, 31], [1, 1, 1, -32]

    def nth(m, b, o):
        if o == 0:
            return b if m >> b & 1 else 0xFFFFFFFF
        hits = [k for k in (range(b, 32) if o > 0 else range(b, -1, -1)) if m >> k & 1]
        return hits[abs(o) - 1] if len(hits) >= abs(o) else 0xFFFFFFFF

    assert run(f, m, b, o, on=on)[3].tolist() == [nth(int(p), int(q), int(r)) for p, q, r in zip(m, b, o)]
    if on == "tile":
        assert "__fns(" in cuda_text(f)


@pytest.mark.spec("must:14-integers")
@pytest.mark.spec("L14:unary")
def test_integers_are_promoted_to_float32_or_refused():
    i = T.Var("i", T.int32)
    assert all(fn(i).dtype == "float32" for fn in (T.exp, T.log, T.sqrt, T.sigmoid, T.exp2, T.rsqrt))
    for fn in (T.tan, T.sinh, T.acosh, T.atanh, T.erf, T.__exp, T.__log2):
        with pytest.raises(TypeError, match="only supports floating-point inputs"):
            fn(i)
    assert all(fn(i) is i for fn in (T.floor, T.ceil, T.trunc, T.round))
    for fn in (T.popcount, T.clz):
        with pytest.raises(TileLangError) as e:
            fn(T.Var("x", T.float32))
        assert e.value.kind == "math-type"


def test_a_python_float_promotes_halves_and_an_integer_does_not():
    h = T.Var("h", T.float16)
    assert T.pow(h, 2.0).dtype == "float32" and T.pow(h, 2).dtype == "float16"
    assert T.max(h, 1.0).dtype == "float32" and T.max(h, 1).dtype == "float16"


@pytest.mark.parametrize("on", EXECUTIONS)
def test_a_loop_without_iterations_does_nothing(on):
    @T.prim_func
    def f(X: T.Tensor((4,), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=4):
            i = T.get_thread_binding()
            for k in range(0):
                Y[k] = X[i]

    assert run(f, np.ones(4, np.float32), on=on)[1].tolist() == [0, 0, 0, 0]
