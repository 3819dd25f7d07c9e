"""Fast, IEEE-rounded and packed arithmetic of section 14, and the read-only load."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from everywhere import EXECUTIONS, cuda_text, everywhere, is_gpu, run

import tilelang.language as T
from tilelang.errors import TileLangError

N = 64
NP = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
# name: (function, meaning, low, high).  The executions but a GPU compute the exact function.
FAST = {
    "__expf": (T.__exp, np.exp, -20, 20), "__exp10f": (T.__exp10, lambda x: 10.0**x, -9, 9),
    "__logf": (T.__log, np.log, 0.1, 90), "__log2f": (T.__log2, np.log2, 0.1, 90),
    "__log10f": (T.__log10, np.log10, 0.1, 90), "__sinf": (T.__sin, np.sin, -3, 3),
    "__cosf": (T.__cos, np.cos, -3, 3), "__tanf": (T.__tan, np.tan, -1, 1),
    "fast_rcp": (T.fast_rcp, lambda x: 1 / x, 0.1, 90), "fast_exp2": (T.fast_exp2, np.exp2, -20, 20),
}
# On a device, CUDA C++ Programming Guide, table of intrinsic functions: units by the argument's size; the others are within
# 2**-21.19 or 4 units, a tangent within both of its parts' errors.
SLOPES = {"__expf": 1.173, "__exp10f": 2.97}


def each(fns, X, Y, i):
    for k, fn in enumerate(fns):
        T.buffer_store(Y, fn(X[k, i]), (k, i))


def fast(dtype):
    fns = [row[0] for row in FAST.values()]

    @T.prim_func
    def f(X: T.Tensor((len(fns), N), dtype), Y: T.Tensor((len(fns), N), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            each(fns, X, Y, i)

    return f


@pytest.mark.spec("T.__cos", "T.__exp", "T.__exp10", "T.__log", "T.__log10", "T.__log2", "T.__sin", "T.__tan",
                  "T.fast_rcp")
@pytest.mark.spec("L14:fast")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fast_functions(dtype, on):
    rng = np.random.default_rng(0)
    x = np.stack([rng.uniform(low, high, N) for _, _, low, high in FAST.values()]).astype(NP[dtype])
    y = run(fast(dtype), x, on=on)[1].astype(np.float64)
    eps = float(ml_dtypes.finfo(NP[dtype]).eps)
    for k, (name, (_, meaning, _, _)) in enumerate(FAST.items()):
        with np.errstate(over="ignore"):
            want = meaning(x[k].astype(np.float64)).astype(NP[dtype]).astype(np.float64)
        units, least = (4 + SLOPES.get(name, 0) * np.abs(x[k].astype(np.float64)), 2.0**-20) if is_gpu(on) else (2, 2.0**-24)
        with np.errstate(invalid="ignore"):  # both infinite
            off = np.where(y[k] == want, 0, np.abs(y[k] - want) - (units * eps * np.abs(want) + least))
        assert off.max() <= 0, f"{name}({x[k][off.argmax()]}) is {y[k][off.argmax()]}, not {want[off.argmax()]}"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fast_functions_use_the_instructions_of_the_device(dtype):
    text = cuda_text(fast(dtype))
    assert not [name for name in FAST if f"{name}(" not in text]


@pytest.mark.spec("L14:fast")
def test_fast_functions_refuse_integers():
    i = T.Var("i", T.int32)
    for fn in (T.__exp, T.__exp10, T.__log, T.__log2, T.__log10, T.__sin, T.__cos, T.__tan):
        with pytest.raises(TypeError, match="only supports floating-point inputs, but got int32"):
            fn(i)


# ---- IEEE-rounded --------------------------------------------------------------------------------------------------

def neighbours(exact: Fraction, near: np.float32) -> dict[str, float]:
    """The correctly rounded results of an exact value, from one of the float32 numbers next to it."""
    r = np.float32(near)
    while Fraction(float(r)) > exact:
        r = np.nextafter(r, np.float32(-np.inf))
    while Fraction(float(np.nextafter(r, np.float32(np.inf)))) <= exact:
        r = np.nextafter(r, np.float32(np.inf))
    down, up = float(r), float(r) if Fraction(float(r)) == exact else float(np.nextafter(r, np.float32(np.inf)))
    return {"rd": down, "ru": up, "rz": down if exact > 0 else up}


IEEE = {
    "add": (T.ieee_add, 2, lambda a, b: a + b), "sub": (T.ieee_sub, 2, lambda a, b: a - b),
    "mul": (T.ieee_mul, 2, lambda a, b: a * b), "fdiv": (T.ieee_fdiv, 2, lambda a, b: a / b),
    "fmaf": (T.ieee_fmaf, 3, lambda a, b, c: a * b + c), "frcp": (T.ieee_frcp, 1, lambda a: 1 / a),
}


def ieee(dtype, modes=("rn", "rz", "ru", "rd"), extra=True):
    jobs = [(fn, arity, mode) for fn, arity, _ in IEEE.values() for mode in modes]
    jobs += [(T.ieee_fsqrt, 1, mode) for mode in modes]

    def rounded(X, Y, i):
        for k, (fn, arity, mode) in enumerate(jobs):
            T.buffer_store(Y, fn(*(X[j, i] for j in range(arity)), rounding_mode=mode), (k, i))

    @T.prim_func
    def f(X: T.Tensor((3, N), dtype), Y: T.Tensor((len(jobs) + 1, N), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            rounded(X, Y, i)
            if extra:
                Y[len(jobs), i] = T.ieee_frsqrt(X[0, i])

    return f, jobs


@pytest.mark.spec("T.ieee_add", "T.ieee_fdiv", "T.ieee_fmaf", "T.ieee_frcp", "T.ieee_frsqrt", "T.ieee_fsqrt",
                  "T.ieee_mul", "T.ieee_sub")
@pytest.mark.spec("L14:ieee")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_ieee_arithmetic_rounds_as_told(on):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((3, N)) * np.exp2(rng.integers(-12, 12, (3, N)))).astype(np.float32)
    x[0] = np.abs(x[0])  # roots
    f, jobs = ieee("float32")
    y = run(f, x, on=on)[1]
    exact_args = [[Fraction(float(v)) for v in row] for row in x]
    for k, (fn, arity, mode) in enumerate(jobs):
        for i in range(N):
            args = [exact_args[j][i] for j in range(arity)]
            if fn is T.ieee_fsqrt:
                near = np.sqrt(x[0, i])
                down, up = (np.nextafter(near, np.float32(s)) for s in (-np.inf, np.inf))
                ordered = [v for v in (down, near, up)]
                if mode == "rd" or mode == "rz":
                    want = max(v for v in ordered if Fraction(float(v))**2 <= args[0])
                elif mode == "ru":
                    want = min(v for v in ordered if Fraction(float(v))**2 >= args[0])
                else:
                    want = near
                assert y[k, i] == want, (fn.__name__, mode)
                continue
            meaning = next(m for g, _, m in IEEE.values() if g is fn)
            exact = meaning(*args)
            around = neighbours(exact, np.float32(float(exact)))
            if mode == "rn":
                low, high = Fraction(around["rd"]), Fraction(around["ru"])
                even = min(around["rd"], around["ru"], key=lambda v: int(np.float32(v).view(np.uint32)) & 1)
                closest = (around["rd"] if exact - low < high - exact else
                           around["ru"] if exact - low > high - exact else even)
                assert y[k, i] == closest, (fn.__name__, mode)
            else:
                assert y[k, i] == around[mode], (fn.__name__, mode, args)
    np.testing.assert_allclose(y[-1], 1 / np.sqrt(x[0].astype(np.float64)), rtol=2.0**-23)


def test_ieee_arithmetic_prints_the_rounding_of_the_device():
    text = cuda_text(ieee("float32")[0])
    for stem in ("__fadd", "__fsub", "__fmul", "__fdiv", "__fmaf", "__frcp", "__fsqrt"):
        assert not [m for m in ("rn", "rz", "ru", "rd") if f"{stem}_{m}(" not in text], stem
    assert "__frsqrt_rn(" in text
    text = cuda_text(ieee("float64", extra=False)[0])
    assert "__dadd_rz(" in text and "__fma_ru(" in text and "__dsqrt_rd(" in text


@pytest.mark.parametrize("on", EXECUTIONS)
def test_ieee_overflow_goes_to_the_greatest_number_or_infinity(on):
    f, jobs = ieee("float32")
    x = np.full((3, N), 3e38, np.float32)
    x[0, 1:], x[1, 1:], x[2, 1:] = np.inf, 1.0, 0.0
    y = run(f, x, on=on)[1]
    big = np.float32(np.finfo(np.float32).max)
    for k, (fn, _, mode) in enumerate(jobs):
        if fn in (T.ieee_add, T.ieee_mul, T.ieee_fmaf):
            assert y[k, 0] == (big if mode in ("rz", "rd") else np.inf), (fn.__name__, mode)
            assert y[k, 1] == np.inf, (fn.__name__, mode)


@pytest.mark.spec("L14:ieee")
def test_ieee_errors():
    x = T.Var("x", T.float32)
    for fn in (T.ieee_add, T.ieee_sub, T.ieee_mul, T.ieee_fdiv):
        with pytest.raises(ValueError, match="Invalid rounding mode 'up'"):
            fn(x, x, "up")
    with pytest.raises(ValueError, match="Invalid rounding mode"):
        T.ieee_fmaf(x, x, x, rounding_mode="rm")
    for fn in (T.ieee_frcp, T.ieee_fsqrt):
        with pytest.raises(TileLangError) as e:
            fn(x, "down")
        assert e.value.kind == "rounding-mode"
    with pytest.raises(ValueError, match="T.ieee_frsqrt of float32 rounds to nearest only"):
        T.ieee_frsqrt(x, rounding_mode="rz")


@pytest.mark.parametrize("dtype, text", [("float16", "rz"), ("bfloat16", "ru"), ("float8_e5m2", "rd")])
def test_halves_round_to_nearest_only(dtype, text):
    with pytest.raises(ValueError, match="rounds to nearest only"):
        ieee(dtype, modes=(text,), extra=False)


def test_frsqrt_of_float64_is_refused():
    @T.prim_func
    def f(X: T.Tensor((N,), "float64"), Y: T.Tensor((N,), "float64")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[i] = T.ieee_frsqrt(X[i])

    with pytest.raises(TileLangError):
        cuda_text(f)


# ---- packed pairs --------------------------------------------------------------------------------------------------

def packed(dtype):
    @T.prim_func
    def f(X: T.Tensor((3, 2 * N), dtype), Y: T.Tensor((7, 2 * N), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding() * 2
            Y[0, i:i + 2] = T.add2(X[0, i:i + 2], X[1, i:i + 2])
            Y[1, i:i + 2] = T.sub2(X[0, i:i + 2], X[1, i:i + 2])
            Y[2, i:i + 2] = T.mul2(X[0, i:i + 2], X[1, i:i + 2])
            Y[3, i:i + 2] = T.max2(X[0, i:i + 2], X[1, i:i + 2])
            Y[4, i:i + 2] = T.min2(X[0, i:i + 2], X[1, i:i + 2])
            Y[5, i:i + 2] = T.fma2(X[0, i:i + 2], X[1, i:i + 2], X[2, i:i + 2])
            Y[6, i:i + 2] = T.abs2(X[0, i:i + 2])

    return f


@pytest.mark.spec("T.abs2", "T.fma2", "T.max2", "T.min2", "T.mul2", "T.sub2")
@pytest.mark.spec("L14:packed")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_packed_arithmetic_is_that_of_its_elements(dtype, on):
    x = np.random.default_rng(0).standard_normal((3, 2 * N)).astype(NP[dtype])
    a, b, c = x.astype(np.float64)
    a[:6] = [np.nan, 1, np.inf, -np.inf, 0.0, -0.0]
    b[:6] = [1, np.nan, -np.inf, -np.inf, -0.0, 0.0]
    x[:] = np.stack([a, b, c])
    y = run(packed(dtype), x, on=on)[1].astype(np.float64)
    with np.errstate(invalid="ignore"):
        want = [a + b, a - b, a * b, np.fmax(a, b), np.fmin(a, b), a * b + c, np.abs(a)]
    for got, w in zip(y, want):
        np.testing.assert_array_equal(got, w.astype(NP[dtype]).astype(np.float64))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_packed_arithmetic_assembles(dtype):
    text = cuda_text(packed(dtype))
    assert not [n for n in ("add2", "sub2", "mul2", "max2", "min2", "fma2", "abs2") if f"tl::{n}(" not in text]


@pytest.mark.spec("L14:packed")
def test_packed_errors():
    x, h, i = T.Var("x", "float32x2"), T.Var("h", "float16x2"), T.Var("i", "int32x2")
    for fn in (T.add2, T.sub2, T.mul2, T.max2, T.min2):
        with pytest.raises(ValueError, match="same dtype"):
            fn(x, h)
        with pytest.raises(ValueError, match="Expected dtype in"):
            fn(i, i)
        with pytest.raises(TypeError):
            fn(x, 1.0)
    with pytest.raises(ValueError, match="Expected dtype in"):
        T.fma2(x, x, i)
    with pytest.raises(ValueError, match="Expected dtype in"):
        T.abs2(T.Var("s", "float32"))


@pytest.mark.spec("T.__ldg")
@pytest.mark.spec("L14:bits")
def test_read_only_load():
    @T.prim_func
    def f(X: T.Tensor((N,), "float32"), Y: T.Tensor((2, N), "float32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[0, i] = T.__ldg(X[N - 1 - i])
            Y[1, i] = T.__ldg(X, i)

    x = np.arange(N, dtype=np.float32)
    assert np.array_equal(everywhere(f, x)[1], np.stack([x[::-1], x]))
    assert sum("= __ldg(&" in line for line in cuda_text(f).splitlines()) == 2


def test_read_only_load_needs_an_element():
    def refused(what, error):
        with pytest.raises(error):
            @T.prim_func
            def f(X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "float32")):
                with T.Kernel(1, threads=N):
                    Y[0] = T.__ldg(X) if what == "buffer" else T.__ldg(3)

    refused("buffer", ValueError)
    refused("number", TypeError)
