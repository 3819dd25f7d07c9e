"""The device functions of a few instructions: their errors, if each instruction errs as its specification allows, and their
length in machine code.

PTX ISA: ex2.approx errs by a relative 2^-22.5 at most, rcp.approx by one unit in the last place.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
from everywhere import cuda_text
from numbers_of import error, every

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.runtime import nvrtc, sass
from tilelang.target import Target
from tilelang.ir import dtype as as_dtype
from tilelang.ir.numbers import to_dtype
from tilelang.target.accuracy import NARROW, units
from tilelang.target.division import _critical, reciprocal
from tilelang.target.rounded_functions import FORMS, LEAST_ANCHORED, SMALL_TANH, TANH_ERROR
from tilelang.target.rounding import rounded
from tilelang.transform.pipeline import lower

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import sass_per_element

f32 = np.float32
NO_NVDISASM = pytest.mark.skipif(not nvrtc.available() or sass.find_nvdisasm() is None, reason="no NVRTC or nvdisasm")


def fma(a, b, c):
    return np.asarray(rounded("fmaf", "rn", *np.broadcast_arrays(*(np.asarray(v, f32) for v in (a, b, c))))).astype(f32)


def inputs(n=40000):
    rng = np.random.default_rng(0)
    return np.concatenate([every("float32", n), rng.uniform(-110, 110, n).astype(f32), rng.uniform(-20, 20, n).astype(f32)])


def sigmoid(x, exp2_errs, rcp_errs):
    """tl::sigmoid, where ex2 is off by a relative error and rcp by units in the last place."""
    log2e, rest = f32(1.44269502), f32(1.925963033e-8)
    part = fma(x, -log2e / f32(216), f32(90) / f32(216))
    part = np.where(np.isnan(part), f32(0), np.clip(part, f32(0), f32(1)))
    shifted = fma(part, 216, 12582917)
    f = fma(x, -rest, fma(x, -log2e, f32(12583007) - shifted))
    scale = (shifted.view(np.uint32) << np.uint32(23)).view(f32)
    e = np.exp2(f.astype(np.float64)) * (1 + exp2_errs)
    w = fma(np.where(e < 2.0**-126, 0, e).astype(f32), scale, 2.0**-32)
    r = 1 / w.astype(np.float64)
    r = r + np.where(np.isfinite(w), rcp_errs, 0) * np.spacing(np.abs(r).astype(f32))
    return np.where(r < 2.0**-126, 0, r).astype(f32) * f32(2.0**-32)


@pytest.mark.parametrize("rcp_errs", [-0.5, 0.0, 0.5])  # half a unit more by rounding to float32
@pytest.mark.parametrize("exp2_errs", [-1.0, 0.0, 1.0])
def test_sigmoid_keeps_its_bound(exp2_errs, rcp_errs):
    x = inputs()
    with np.errstate(all="ignore"):
        exact = 1 / (1 + np.exp(-x.astype(np.longdouble)))
        off = error(sigmoid(x, exp2_errs * (2.0**-22.5 - 2.0**-24), rcp_errs), exact.astype(np.longdouble), "float32")
    assert off.max() <= units("sigmoid", "float32"), (off.max(), x[np.argmax(off)])


DIVISORS = [3.0, 30.0, 50.0, 7.3, 1e-3, np.sqrt(2), 1.9999999, 448.0, 20.0, 0.1, 2.0**20 - 1, 3 * 2.0**-21]


@pytest.mark.parametrize("c", DIVISORS)
def test_quotients_by_a_constant_are_correctly_rounded(c):
    c = float(f32(c))
    parts = reciprocal(c)
    assert parts is not None
    high, low = map(f32, parts)
    hard = np.array(_critical(c), f32)
    x = np.concatenate([inputs(), hard, -hard, hard * f32(2.0**-100), f32(c) * np.arange(64).astype(f32) * f32(2.0**-149)])
    with np.errstate(all="ignore"):
        q = fma(x, high, x * low)
        near = x.astype(np.float64) * (1 / c)
        rest = rounded("fmaf", "rn", np.full(x.shape, -c), near, x.astype(np.float64))
        near = rounded("fmaf", "rn", rest, np.full(x.shape, 1 / c), near)
        q = np.where((np.abs(x) < 2.0**-78) & (x != 0), near.astype(f32), q)
        want = x / f32(c)
    assert np.array_equal(np.isnan(q), np.isnan(want))
    same = (q.view(np.uint32) == want.view(np.uint32)) | np.isnan(want)
    assert same.all(), (x[~same][:4], q[~same][:4], want[~same][:4])


def test_the_hard_dividends_of_a_constant_are_all_found():
    c = int(f32(7.3) * 2**21)
    x = np.arange(2**23, 2**24, dtype=np.int64)
    rest = ((x << np.where(x >= c, 24, 25)) - c) % (2 * c)
    rest = np.minimum(rest, 2 * c - rest)
    assert sorted(_critical(float(f32(7.3)))) == x[(rest <= 8) & (rest != 0)].tolist()


@pytest.mark.parametrize("c", [4.0, 2.0**-30, 2.0**21 + 1, 0.0, -3.0, float("inf")])
def test_divisors_that_stay(c):
    assert reciprocal(c) is None


def quotients(dtype="float32"):
    @T.prim_func
    def f(X: T.Tensor((1024,), dtype), Y: T.Tensor((4, 1024), dtype)):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(1024):
                Y[0, i] = X[i] / T.cast(3.0, dtype)
                Y[1, i] = X[i] / T.cast(4.0, dtype)
                Y[2, i] = T.sigmoid(X[i])
                Y[3, i] = T.sqrt(X[i])

    return f


def test_a_division_by_a_constant_is_a_product_unless_it_is_exact_or_fast():
    text = cuda_text(quotients())
    assert text.count("tl::divided_by(") == 1 and "tl::square_root(" in text
    (kernel,) = lower(quotients().func, Target({"kind": "cuda", "arch": "sm_80"}), {"tl.enable_fast_math": True}).kernels
    assert "divided_by" not in (fast := print_kernel(kernel, fast_math=True)) and "square_root" not in fast


LOG2E = f32(1.4426950408889634)


def rcp(x):
    r = 1 / x.astype(np.float64)
    return np.where(np.abs(r) < 2.0**-126, 0, r).astype(f32)


def ex2(x, errs=0.0, flush=True):
    e = np.exp2(x.astype(np.float64)) * (1 + errs)
    return np.where(flush & (e < 2.0**-126), 0, e).astype(f32)


def tanh_wide(x, errs):
    u = x * x
    large = fma(rcp(ex2(x * f32(2.88539008), errs) + f32(1)), -2, 1)
    return np.where(np.abs(x) < f32(0.125), x * fma(u, fma(u, 2 / 15, -1 / 3), 1), large)


STEPS = {
    ("exp", "half"): lambda x, errs: ex2(x * LOG2E, errs), ("exp", "wide"): lambda x, errs: ex2(x * LOG2E, errs, False),
    ("exp2", "half"): ex2, ("sigmoid", "half"): lambda x, errs: rcp(f32(1) + ex2(x * -LOG2E, errs)),
    ("sigmoid", "wide"): lambda x, errs: rcp(ex2(fma(x, -LOG2E, -32), errs) + f32(2.0**-32)) * f32(2.0**-32),
    ("tanh", "half"): tanh_wide, ("tanh", "wide"): tanh_wide,
    ("exp2", "term"): lambda x, errs: ex2(x, errs), ("exp", "term"): lambda x, errs: ex2(x * LOG2E, errs),
}
EXACT = {"exp": np.exp, "exp2": np.exp2, "tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x))}


def test_the_form_of_tanh_lost_the_sign_of_zero():
    assert np.signbit(tanh_wide(np.array([-0.0, 0.0], f32), 0.0)).tolist() == [True, False]


@pytest.mark.parametrize("errs", [-2.0**-22, 0.0, 2.0**-22])
@pytest.mark.parametrize("name, use", STEPS)
def test_forms_for_rounded_results_keep_the_bound_of_narrow_types(name, use, errs):
    """The steps of a form, rounded to each type that takes it; test_shorten_rounded has the forms in sums."""
    assert use in FORMS[name] and {(n, u) for n, f in FORMS.items() for u in f if n != "div" and u != "sum"} == {*STEPS}
    x = inputs()
    with np.errstate(all="ignore"):
        y, exact = STEPS[name, use](x, errs), EXACT[name](x.astype(np.float64))
        if use == "term":
            normal = exact < 2.0**127
            # exp: beside the |x| 2^-24 of an argument that was rounded
            grows = 1.3 * np.minimum(np.abs(x), 128) * 2.0**-24 if name == "exp" else 0
            assert (np.abs(y - exact) <= (2.0**-22 + 2.0**-23 + grows) * exact + 2.0**-126)[normal].all()
            return
        for dtype in ("float16", "float8_e4m3fn", "float8_e5m2") if use == "half" else ("bfloat16", "float16"):
            off = error(to_dtype(y, as_dtype(dtype)), exact, dtype)
            assert off.max() <= NARROW, (dtype, off.max(), x[np.argmax(off)])
        if use == "wide":
            off = error(y, exact, "float32")[np.abs(exact) > 2.0**-120]
            assert off.max() <= 2 * FORMS[name][use].units, off.max()


@pytest.mark.parametrize("errs", [-2.0**-22, 0.0, 2.0**-22])
@pytest.mark.parametrize("rcp_errs", [-1.0, 0.0, 1.0])
def test_tanh_for_exponents_keeps_its_absolute_error(errs, rcp_errs):
    x = inputs()
    with np.errstate(all="ignore"):
        for k in (1.0, 0.02, 1 / 30):
            y = 1 / (ex2(x * (f32(k) * f32(2.88539008)), errs) + f32(1)).astype(np.float64)
            r = (y + rcp_errs * 2.0**-24 * (y >= 0.5) * (y < 1) + rcp_errs * 2.0**-25 * (y < 0.5) * (y > 0)).astype(f32)
            off = np.abs(fma(r, -2, 1) - np.tanh(x.astype(np.float64) * float(f32(k))))
            assert off[~np.isnan(x)].max() <= TANH_ERROR, (k, off[~np.isnan(x)].max() * 2**24)
            assert np.isnan(r[np.isnan(x)]).all()


@pytest.mark.parametrize("exponents", [False, True])
@pytest.mark.parametrize("k, c", [(1.0, 1.0), (0.0029462783, 30.0), (-0.02, 50.0)])
def test_tanh_of_small_arguments_keeps_its_absolute_error(k, c, exponents):
    limit, factors = SMALL_TANH[exponents]
    x = np.linspace(-limit / abs(k), limit / abs(k), 100001).astype(f32)
    u, y = x * x, f32(0)
    for i in reversed(range(len(factors))):
        y = fma(y, u, f32(c * factors[i] * k**(2 * i + 1)))
    off = np.abs(x * y - c * np.tanh(x.astype(np.float64) * k))
    assert off.max() <= c * TANH_ERROR * (1.0 if exponents else 0.75)
    if not exponents:  # for rounded results: FORMS["tanh"]
        assert (off <= 23 * 2.0**-23 * np.abs(c * np.tanh(x.astype(np.float64) * k))).all()


@pytest.mark.parametrize("c", [LEAST_ANCHORED, 64.0, 92.0])
def test_weights_below_the_polynomials_range_hardly_count(c):
    """Of an argument -x, relative to that of 0; no maximum above tanh there makes one of them large."""
    limit, factors = SMALL_TANH[True]
    x = np.concatenate([np.linspace(limit, 8, 100001), np.logspace(1, 6, 1001)])
    exact, found = np.tanh(x), sum(a * x**(2 * i + 1) for i, a in enumerate(factors))
    assert (np.abs(np.exp2(-c * exact) - np.exp2(-c * np.minimum(found, 100))) < 2.0**-26).all()
    assert (np.diff(found) > 0).all() and (found > exact - TANH_ERROR).all()


@pytest.mark.parametrize("errs", [-2.0**-23, 0.0, 2.0**-23])
def test_quotients_of_rows_keep_three_units(errs):
    exponents = (-149, -126, -70, -64, 0, 64, 70, 126)
    y = np.concatenate([s * np.ldexp(np.linspace(1, 2, 7, dtype=f32), e) for e in exponents for s in (1, -1)])
    x = np.concatenate([np.ldexp(np.linspace(1, 2, 9, dtype=f32), e) for e in range(-126, 127, 9)])[:, None]
    with np.errstate(all="ignore"):
        k = np.where(np.abs(y) > 2.0**64, f32(2.0**-64), np.where(np.abs(y) < 2.0**-64, f32(2.0**64), f32(1)))
        got = ((x * k) * (1 / (y * k).astype(np.float64) * (1 + errs)).astype(f32)).astype(np.float64)
        exact = x.astype(np.float64) / y
    normal = np.abs(exact) < 2.0**127.9
    assert (np.abs(got - exact) <= 3 * 2.0**-23 * np.abs(exact) + 2.0**-148)[normal].all()


LENGTHS = {"sigmoid": 10.1, "silu": 11.1, "sqrt": 10.1, "x/3": 11.1, "softcap 30": 27.1, "exp": 8.1, "tanh": 15.1}


ROUNDED = {"sigmoid": 5.1, "tanh": 11.1, "exp": 5.1, "silu": 6.1, "silu x/(1+exp(-x))": 11.1}


@NO_NVDISASM
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("out", ["float16", "bfloat16"])
def test_instructions_of_a_rounded_element(name, out):
    row = sass_per_element.per_element(name, out)
    assert row["branch"] == 0 and row["all"] <= ROUNDED[name], row


@NO_NVDISASM
@pytest.mark.parametrize("name", LENGTHS)
def test_instructions_of_an_element(name):
    row = sass_per_element.per_element(name)
    assert row["branch"] == 0 and row["all"] <= LENGTHS[name], row
