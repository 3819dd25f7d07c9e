"""Functions whose results are only rounded to 16 or 8 bits: which uses count (tests/numerics measures the errors)."""

import math

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.target import Target
from tilelang.target.rounded_functions import FORMS
from tilelang.transform.lower.shorten_rounded import shorten_rounded
from tilelang.transform.pipeline import DEVICE_PASSES, lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})


def text(program, **config):
    return print_kernel(lower(program.func, SM90, config).kernels[0], fast_math=bool(config.get("tl.enable_fast_math")))


def tile(after, dtype="float16", value=lambda x: T.sigmoid(x)):
    """A loop that multiplies, applies a function to the accumulator, copies it, and does something after that."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), P: T.Tensor((64, 64), dtype), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((64, 64), "float16")
            S = T.alloc_fragment((64, 64), "float32")
            rows = T.alloc_fragment((64,), "float32")
            for _ in T.Pipelined(3, num_stages=2):
                T.copy(A, As)
                T.gemm(As, As, S, clear_accum=after != "the next iteration")
                for i, j in T.Parallel(64, 64):
                    S[i, j] = value(S[i, j])
                T.copy(S, P)
                if after == "a sum":
                    T.reduce_sum(S, rows, dim=1)
                    T.copy(rows, Y[0, :])
            if after == "a copy behind the loop":
                T.copy(S, Y)
            if after == "another loop":
                for i, j in T.Parallel(64, 64):
                    Y[i, j] = S[i, j]
            if after == "a second copy":
                T.copy(S, P)

    return f


@pytest.mark.parametrize("after", ["nothing", "a second copy"])
def test_a_fragment_that_is_only_rounded(after):
    assert shorten_rounded in DEVICE_PASSES
    assert "tl::sigmoid_half(" in text(tile(after))
    assert "tl::sigmoid_wide(" in text(tile(after, "bfloat16"))


@pytest.mark.parametrize("after", ["the next iteration", "a sum", "a copy behind the loop", "another loop"])
def test_a_fragment_that_is_used_otherwise(after):
    assert "tl::sigmoid(" in text(tile(after)), after


@pytest.mark.parametrize("what, short", [("cleared", True), ("added to", False), ("copied", False)])
def test_a_loop_over_tiles_around_the_loop_kept_the_long_form(what, short):
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), P: T.Tensor((64, 64), "float16"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((64, 64), "float16")
            S = T.alloc_fragment((64, 64), "float32")
            for _ in T.serial(3):
                if what == "copied":
                    T.copy(S, Y)
                for _ in T.Pipelined(2, num_stages=2):
                    T.copy(A, As)
                    T.gemm(As, As, S, clear_accum=what != "added to")
                    for i, j in T.Parallel(64, 64):
                        S[i, j] = T.sigmoid(S[i, j])
                    T.copy(S, P)

    assert ("tl::sigmoid_half(" in text(f)) == short


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_exp2_that_is_rounded_and_summed_scaled_its_subnormal_results(dtype):
    program = tile("a sum", dtype, lambda x: T.if_then_else(x > 0, -T.infinity("float32"), T.exp2(x)))
    assert "tl::fast_exp2(" in text(program) and "exp2f(" in text(program, **{"tl.shorten_rounded": False})
    assert "exp2f(" in text(tile("a copy behind the loop", dtype, lambda x: T.exp2(x)))
    assert "exp2f(" in text(tile("a sum", dtype, lambda x: T.exp2(x) * 2.0))  # a product may make a subnormal result normal


@pytest.mark.parametrize("after, short", [("a sum", True), ("the other branch", True), ("the end", False),
                                          ("a condition", False)])
def test_exp2_in_a_branch_scaled_its_subnormal_results(after, short):
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), M: T.Tensor((3,), "int32"), P: T.Tensor((64, 64), "float16"), Y: T.Tensor(
            (64, 64), "float32")):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((64, 64), "float16")
            S, rows = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
            for k in T.Pipelined(3, num_stages=2):
                if M[k] != 0:
                    T.copy(A, As)
                    T.gemm(As, As, S, clear_accum=True)
                    for i, j in T.Parallel(64, 64):
                        S[i, j] = T.exp2(S[i, j])
                    T.reduce_sum(S, rows, dim=1)
                    T.copy(S, P)
                else:
                    if after == "the other branch":
                        T.copy(S, P)
                    if after == "a condition" and M[0] == 1:
                        T.copy(S, Y)
            if after == "the end":
                T.copy(S, Y)

    assert ("ex2.approx.ftz" in text(f) or "tl::fast_exp2(" in text(f)) == short


def losses(value):
    """Logarithms of sums of exponentials in tiles: the fragment is summed and not rounded."""
    @T.prim_func
    def f(X: T.Tensor((4, 1000), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=64) as r:
            x, top, total = T.alloc_fragment((1, 1024), "float32"), T.alloc_fragment((1,), "float32"), T.alloc_fragment(
                (1,), "float32")
            T.copy(X[r, 0], x)
            for i, j in T.Parallel(1, 1024):
                x[i, j] = T.if_then_else(j < 1000, x[i, j], -T.infinity("float32"))
            T.reduce_max(x, top, dim=1)
            for i, j in T.Parallel(1, 1024):
                x[i, j] = value(x[i, j], top[i])
            T.reduce_sum(x, total, dim=1)
            for i in T.Parallel(1):
                Y[r] = T.log(total[i]) + top[i]

    return f


def test_exp_of_a_difference_that_is_summed_took_the_seven_instructions_of_expf():
    """An exponent that is rounded itself: so is the product in exp2, by as much.  Other exponents keep expf."""
    program = losses(lambda x, top: T.exp(x - top))
    assert "expf(" not in text(program) and "tl::fast_exp2(" in text(program)
    for value in (lambda x, top: T.exp(x), lambda x, top: T.exp(T.max(x, top))):
        assert "expf(" in text(losses(value))
    assert "expf(" in text(program, **{"tl.shorten_rounded": False})
    x = np.random.default_rng(0).normal(0, 20, (4, 1000)).astype(np.float32)
    want = np.log(np.exp(x.astype(np.float64)).sum(1))
    for arch in ("sm_80", "sm_90a"):
        y = np.zeros(4, np.float32)
        tilelang.compile(program, target={"kind": "cuda", "arch": arch}, execution_backend="simulator")(x, y)
        assert np.allclose(y, want, rtol=2e-6), arch


def shares(change="", dtype="float16"):
    """Rows of exponentials divided by their sums."""
    @T.prim_func
    def f(X: T.Tensor((4, 1024), dtype), Y: T.Tensor((4, 1024), dtype)):
        with T.Kernel(2, threads=64) as r:
            x = T.alloc_fragment((2, 1024), "float32")
            top, total = T.alloc_fragment((2,), "float32"), T.alloc_fragment((2,), "float32")
            T.copy(X[2 * r, 0], x)
            T.reduce_max(x, top, dim=1)
            if change == "scores move":
                for i, j in T.Parallel(2, 1024):
                    x[i, j] = x[i, j] - 100.0
            for i, j in T.Parallel(2, 512 if change == "half a row" else 1024):
                x[i, j] = T.exp(x[i, j] - top[1 - i if change == "the other row's maximum" else i])
            if change == "the greatest is cleared":
                for i in T.Parallel(2):
                    x[i, 5] = 0
            if change == "a minimum":
                T.reduce_min(x, total, dim=1)
            elif change == "a part of the sum":
                T.reduce_sum(x[0:2, 0:512], total, dim=1)
            else:
                T.reduce_sum(x, total, dim=1)
            if change == "another sum":
                for i in T.Parallel(2):
                    total[i] = total[i] * 0.001
            for i, j in T.Parallel(2, 1024):
                x[i, j] = x[i, j] / (total[i] * 0.5 if change == "half the sum" else total[i])
            T.copy(x, Y[2 * r, 0])

    return f


def test_exp_of_a_softmax_took_the_seven_instructions_of_expf():
    """A greatest exponential of 1 makes the sum 1 at least, so what counts as zero is zero behind the division too."""
    assert "expf(" not in text(shares()) and "tl::fast_exp2(" in text(shares())
    for change in ("scores move", "the other row's maximum", "a minimum", "half the sum", "another sum", "half a row",
                   "the greatest is cleared", "a part of the sum"):
        assert "expf(" in text(shares(change)), change
    assert "expf(" in text(shares(dtype="float32"))
    x, y = np.random.default_rng(0).normal(0, 20, (4, 1024)).astype(np.float16), np.zeros((4, 1024), np.float16)
    tilelang.compile(shares(), target={"kind": "cuda", "arch": "sm_90a"}, execution_backend="simulator")(x, y)
    e = np.exp(x - x.max(1, keepdims=True).astype(np.float64))
    assert np.allclose(y, e / e.sum(1, keepdims=True), rtol=2.0**-10, atol=2.0**-24)


def test_quotients_of_sums_took_the_exact_sequence():
    """The last division of attention: sums in an unspecified order have no one right quotient."""
    assert "tl::quotient(" in text(tile("nothing", value=lambda x: x / T.max(x, 3.0)))

    @T.prim_func
    def f(A: T.Tensor((64, 64), "float32"), P: T.Tensor((64, 64), "float16"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            S, rows = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(A, S)
            T.reduce_absmax(S, rows, dim=1)
            for i, j in T.Parallel(64, 64):
                S[i, j] = S[i, j] / rows[i]
            T.copy(S, P)

    assert "quotient(" not in text(f), "a maximum has one right value"


def test_the_switch_and_fast_math():
    assert "tl::sigmoid(" in text(tile("nothing"), **{"tl.shorten_rounded": False})
    assert "__fdividef(" in text(tile("nothing"), **{"tl.enable_fast_math": True})


@pytest.mark.parametrize("value, short, exact", [
    (lambda x: x * T.sigmoid(x), "tl::sigmoid_wide(", "tl::sigmoid("),  # a product may make what is small large
    (lambda x: x / (1.0 + T.exp(-x)), "tl::exp_wide(", "expf("),
    (lambda x: T.if_then_else(x > 0, T.exp(x), 0.0), "tl::fast_exp2(", "expf("),
    (lambda x: 1.0 / (1.0 + T.exp(-x)), "tl::quotient(", "expf("),
    (lambda x: T.exp(x) - 1.0, "expf(", "exp_wide("),  # a difference may cancel
    (lambda x: 0.5 * x * (1.0 + T.erf(x * 0.70710678)), "tl::erf_in_sum(", "erff("),  # the sum is what loses digits
    (lambda x: 0.5 * x * (1.0 + T.tanh(x * 0.8)), "tl::tanh_in_sum(", "tanh_wide("),
    (lambda x: x * (0.5 - 0.5 * T.erf(x)), "tl::erf_in_sum(", "erff("),
    (lambda x: x * (0.5 - T.erf(x)), "erff(", "erf_in_sum("),  # near 0 for an x where erf is near 1/2
    (lambda x: x * T.erf(x), "erff(", "erf_in_sum("),
    (lambda x: T.log(T.sigmoid(x)), "tl::sigmoid(", "sigmoid_wide("),  # the argument of a function is not rounded
])
def test_ways_down_from_a_rounding(value, short, exact):
    body = text(tile("nothing", value=value)).partition("__global__")[2]
    assert short in body and exact not in body, body


def test_gelu_in_half_took_the_26_instructions_of_float32_erf():
    """The form of erf in a sum, computed in float32 here: as near the exact sum as its row says."""
    f = np.float32
    x = np.concatenate([np.linspace(-6, 6, 100001), [-50, 50, np.inf, -np.inf, -0.0, np.nan]]).astype(f)
    t = np.minimum(np.abs(x), f(4))
    q = np.full_like(t, f(2.6778443e-4))
    for c in (-4.34066374e-3, 3.2206294e-2, -1.50812274e-1, -9.17768047e-1, -1.62796927):
        q = (q.astype(np.float64) * t + f(c)).astype(f)
    got = (1 + np.copysign(f(1) - np.exp2((t * q).astype(f)), x)).astype(np.float64)
    assert np.isnan(got[-1]) and [*got[-6:-1]] == [0, 2, 2, 0, 1]
    want = np.array([math.erfc(-float(v)) for v in x[:-1]])
    # Beside the row's units, less the 4 of ex2.approx, an error of 2.5 units that erf itself may have near -1.
    assert np.all(np.abs(got[:-1] - want) <= (FORMS["erf"]["sum"].units - 4) * 2.0**-23 * want + 2.5 * 2.0**-24)


def test_gelu_by_tanh_in_half_took_the_form_of_all_results():
    """1 + tanh(x) by the form of tanh in a sum, computed in float32 here."""
    f = np.float32
    x = np.concatenate([np.linspace(-10, 10, 100001), [-50, 50, np.inf, -np.inf, -0.0, np.nan]]).astype(f)
    e = np.exp2((np.abs(x) * f(-2.88539008)).astype(f))
    with np.errstate(invalid="ignore"):
        tanh = (1.0 - 2.0 * (e * (1 / (e + f(1)))).astype(f).astype(np.float64)).astype(f)
    got = (f(1) + np.copysign(tanh, x)).astype(np.float64)
    assert np.isnan(got[-1]) and [*got[-6:-1]] == [0, 2, 2, 0, 1]
    want = 2 / (1 + np.exp(-2 * x[:-1].astype(np.float64)))
    # Beside the row's units, less the 3 of ex2.approx and rcp.approx, the error of 2.5 units that tanh itself may have near -1.
    assert np.all(np.abs(got[:-1] - want) <= (FORMS["tanh"]["sum"].units - 3) * 2.0**-23 * want + 2.5 * 2.0**-24)
