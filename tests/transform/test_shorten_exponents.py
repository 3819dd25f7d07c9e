"""tanh whose value is only used in exponents: which uses count (tests/numerics measures the errors of its form)."""

import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.target import Target
from tilelang.transform.lower.shorten_exponents import shorten_exponents
from tilelang.transform.pipeline import DEVICE_PASSES, lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})


def text(program, **config):
    return print_kernel(lower(program.func, SM90, config).kernels[0]).partition("__global__")[2]


def capped(s):
    return 30.0 * T.tanh(s / 30.0)


def softmax(score, after="", dtype="float16", keys=64, tiles=2):
    """Attention of one tile of queries, whose V is K, with a function of the scores."""
    @T.prim_func
    def f(Q: T.Tensor((64, 64), "float16"), K: T.Tensor((tiles * keys, 64), "float16"), O: T.Tensor((64, 64), dtype),
          L: T.Tensor((64,), "float32"), X: T.Tensor((64, keys), "float32")):
        with T.Kernel(1, threads=128):
            Qs = T.alloc_shared((64, 64), "float16")
            Ks = T.alloc_shared((keys, 64), "float16")
            S = T.alloc_fragment((64, keys), "float32")
            P = T.alloc_fragment((64, keys), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((64,), "float32") for _ in range(5)]
            T.copy(Q, Qs)
            T.clear(acc)
            T.clear(total)
            T.fill(top, -1e30)
            for k in T.Pipelined(tiles, num_stages=2):
                T.copy(K[k * keys:(k + 1) * keys, :], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(64, keys):
                    s = score(S[i, j])
                    S[i, j] = T.if_then_else(k * keys + j >= 0, s, -T.infinity("float32"))
                if after == "scores":
                    T.copy(S, X)
                T.copy(top, before)
                T.reduce_max(S, top, dim=1, clear=False)
                if after == "lazy":
                    for i in T.Parallel(64):
                        top[i] = T.if_then_else((top[i] - before[i]) * 1.44 > 8.0, top[i], before[i])
                for i in T.Parallel(64):
                    rescale[i] = T.exp2((before[i] - top[i]) * 1.4426950408889634)
                for i, j in T.Parallel(64, keys):
                    S[i, j] = T.exp2(S[i, j] * 1.4426950408889634 - top[i] * 1.4426950408889634)
                T.reduce_sum(S, row, dim=1)
                for i in T.Parallel(64):
                    total[i] = total[i] * rescale[i] + row[i]
                for i, j in T.Parallel(64, 64):
                    acc[i, j] *= rescale[i]
                T.copy(S, P)
                T.gemm(P, Ks, acc)
            for i, j in T.Parallel(64, 64):
                acc[i, j] = acc[i, j] / total[i]
            T.copy(acc, O)
            if after == "maximum":
                T.copy(top, L)
            if after == "logarithm":
                for i in T.Parallel(64):
                    L[i] = (T.log2(total[i]) + top[i] * 1.4426950408889634) * 0.6931471805599453

    return f


def elementwise(value, dtype="float16"):
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), dtype)):
        with T.Kernel(1, threads=128):
            for i, j in T.Parallel(64, 64):
                B[i, j] = value(A[i, j])

    return f


@pytest.mark.parametrize("after", ["", "lazy", "logarithm"])
def test_tanh_of_scores_had_digits_that_no_exponent_needs(after):
    assert shorten_exponents in DEVICE_PASSES
    body = text(softmax(capped, after))
    assert "tl::scaled_tanh(" in body and "tanhf(" not in body and "divided_by" not in body, body


@pytest.mark.parametrize("score", [
    lambda s: 50.0 * T.tanh(s * 0.02) + 2.0, lambda s: T.max(T.tanh(s), -0.5), lambda s: -T.tanh(T.tanh(s) * 2.0),
    lambda s: T.tanh(s) * 8.0 / 0.5])
def test_ways_down_from_an_exponent(score):
    assert "tanhf(" not in text(softmax(score))


@pytest.mark.parametrize("score", [
    lambda s: 1e6 * T.tanh(s / 1e6),  # an absolute error of tanh would change the exponent
    lambda s: T.tanh(s) * s, lambda s: T.exp(T.tanh(s)), lambda s: T.if_then_else(T.tanh(s) > 0, s, 0.0),
    lambda s: s / T.tanh(s), lambda s: T.sqrt(T.tanh(s))])
def test_scores_that_need_all_digits(score):
    assert "scaled_tanh" not in text(softmax(score))


@pytest.mark.parametrize("after", ["scores", "maximum"])
def test_scores_that_are_stored_need_all_digits(after):
    assert "scaled_tanh" not in text(softmax(capped, after))


def test_a_sum_over_iterations_has_no_bound_on_its_error():
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            s = T.alloc_fragment((64, 64), "float32")
            p = T.alloc_fragment((64, 64), "float16")
            T.clear(s)
            for k in T.serial(100):
                for i, j in T.Parallel(64, 64):
                    s[i, j] = s[i, j] + T.tanh(A[i, j] + k)
            for i, j in T.Parallel(64, 64):
                p[i, j] = T.exp(s[i, j])
            T.copy(p, B)

    assert "tanhf(" in text(f)


def test_float32_results_and_the_switch():
    def value(x):
        return T.exp(30.0 * T.tanh(x))

    assert "tanhf(" in text(elementwise(value, "float32"))
    assert "tanhf(" not in text(elementwise(value)) and "tanhf(" in text(elementwise(lambda x: value(x) - 1.0))
    assert "tanhf(" in text(softmax(capped), **{"tl.shorten_rounded": False})
