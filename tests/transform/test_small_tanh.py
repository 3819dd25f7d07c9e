"""Polynomials for tanh of small arguments, beside GEMMs."""

import numpy as np
import pytest
from test_shorten_exponents import capped, elementwise, softmax, text

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.library.attention.flex_attention import FlexForm, flex_program
from tilelang.library.attention.form import AttentionForm, ScoreFunctions, Tile
from tilelang.library.attention.problem import Mask, Sizes
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import DEVICE_PASSES, lower
from tilelang.transform.registers.small_tanh import small_tanh


def test_one_vote_for_all_elements_of_a_thread():
    assert small_tanh in DEVICE_PASSES
    body = text(softmax(capped))
    assert body.count("any_sync((int)(largest") == 1 and body.count("tl::scaled_tanh(") == 1, body


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tanh_that_is_rounded(dtype):
    @T.prim_func
    def f(A: T.Tensor((64, 64), dtype), B: T.Tensor((64, 64), dtype)):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((64, 64), dtype)
            S = T.alloc_fragment((64, 64), "float32")
            P = T.alloc_fragment((64, 64), dtype)
            acc = T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for _ in T.Pipelined(3, num_stages=2):
                T.copy(A, As)
                T.gemm(As, As, S, clear_accum=True)
                for i, j in T.Parallel(64, 64):
                    S[i, j] = T.tanh(S[i, j] * 0.125)
                T.copy(S, P)
                T.gemm(P, As, acc)
            T.copy(acc, B)

    body = text(f)
    assert "tl::tanh_wide(" in body and body.count("any_sync((int)(largest") == 1
    assert "> 4.0f" in body  # a factor of the argument needs no multiplication


def test_the_vote_sees_arguments_in_named_values():
    """A value that is named before its argument is overwritten: the stores hold no call.  Here some arguments are large."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((64, 64), "float16")
            S, acc = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            W, P = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float16")
            T.clear(acc)
            for _ in T.Pipelined(2, num_stages=2):
                T.copy(A, As)
                T.gemm(As, As, S, clear_accum=True)
                for i, j in T.Parallel(64, 64):
                    x = 2.0 * T.tanh(S[i, j] * 0.0625)
                    W[i, j] = T.exp2(x)
                    S[i, j] = 0.0
                T.copy(W, P)
                T.gemm(P, As, acc)
            T.copy(acc, B)

    kernel = tilelang.compile(f, target={"kind": "cuda", "arch": "sm_90a"}, execution_backend="simulator")
    a, b = (16 * np.eye(64)).astype(np.float16), np.zeros((64, 64), np.float16)
    kernel(a, b)
    np.testing.assert_array_equal(b, 2 * 16 * (1 + 3 * np.eye(64)))


@pytest.mark.parametrize("program", [
    elementwise(lambda x: T.exp(T.tanh(x))),  # no GEMM beside it
    softmax(lambda s: T.tanh(s) * 30.0 + T.tanh(s * 0.5)),  # two factors
    softmax(lambda s: T.tanh(s * 1e-5) * 30.0)])  # its seventh power would be subnormal
def test_loops_that_stay(program):
    body = text(program)
    assert "tl::scaled_tanh(" in body and "any_sync" not in body


@pytest.mark.parametrize("size", [1.0, 40.0])  # all arguments small, and some large
def test_softmax_of_capped_scores(size):
    rng = np.random.default_rng(0)
    q = (rng.standard_normal((64, 64)) * size / 8).astype(np.float16)
    k = rng.standard_normal((128, 64)).astype(np.float16)
    kernel = tilelang.compile(softmax(capped, "logarithm"), target={"kind": "cuda", "arch": "sm_90a"},
                              execution_backend="simulator")
    out, logs, rest = np.zeros((64, 64), np.float16), np.zeros(64, np.float32), np.zeros((64, 64), np.float32)
    kernel(q, k, out, logs, rest)
    s = 30 * np.tanh(q.astype(np.float64) @ k.astype(np.float64).T / 30)
    p = np.exp(s - s.max(1, keepdims=True))
    want = p / p.sum(1, keepdims=True) @ k.astype(np.float64)
    assert np.abs(out - want).max() <= 2.0**-10 * np.abs(k).max() * 1.1
    assert np.abs(logs - (np.log(p.sum(1)) + s.max(1))).max() <= 30 * 8 * 2.0**-24 + 1e-5


def after_maxima(cap, n, keys, dim):
    """Attention whose maxima come before a softcap."""
    strides = tuple((x * dim, x * dim, dim, 1) for x in (n, keys, keys, n))
    sizes, tile = Sizes(1, n, keys, 1, 1, dim, dim), Tile(64, 64, 2, 128)
    form = AttentionForm(sizes, strides, "bhsd", "float16", Mask(), tile, True, dim**-0.5)
    program = flex_program(FlexForm(form, ScoreFunctions(lambda s, b, h, i, j: cap * T.tanh(s / cap))))
    return lower(program.func, Target({"kind": "cuda", "arch": "sm_90a"}))


def main_loop(lowered):
    return print_kernel(lowered.kernels[0]).partition("__global__")[2].rpartition("for (int k")[2]


def test_the_least_elements_are_sought_beside_maxima():
    body = main_loop(after_maxima(8.0, 64, 192, 64))
    assert "if (doubt" not in body and "tl::below_S" in body and body.count("any_sync((int)") == 1


def test_large_weights_need_the_least_elements_only_in_doubt():
    """Warps have scores around 0, -4, -24 and 24: no doubt, doubt, and large arguments."""
    n, keys, dim, cap = 64, 192, 64, 30.0
    lowered = after_maxima(cap, n, keys, dim)
    body = main_loop(lowered)
    assert body.index("if (doubt") < body.index("tl::below_S") < body.index("scaled_tanh(S") < body.index("tl::map_S")
    assert body.count("tl::map_S") == 2 and body.count("tl::registers_out_S") == 1
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, x, dim)).astype(np.float16) for x in (n, keys, keys))
    k[..., 0], q[..., 0] = 8.0, np.repeat([0.0, -4.0, -24.0, 24.0], 16)
    given = {"Q": q, "K": k, "V": v, "Blocks": np.zeros((1, 1, 1, 1), np.int32), "X0": np.zeros(1, np.float32),
             "X1": np.zeros(1, np.float32), "O": np.zeros_like(q), "LSE": np.zeros((1, 1, n), np.float32)}
    found = run_device(lowered, given).outputs
    s = cap * np.tanh(q[0, 0].astype(float) @ k[0, 0].astype(float).T * dim**-0.5 / cap)
    weights = np.exp(s - s.max(1, keepdims=True))
    want = weights @ v[0, 0].astype(float) / weights.sum(1, keepdims=True)
    assert np.abs(found["O"][0, 0] - want).max() <= 2.0**-10 * np.abs(v).max() * 1.1
    assert np.abs(found["LSE"][0, 0] - np.log(weights.sum(1)) - s.max(1)).max() <= cap * 8 * 2.0**-24 + 1e-5
