"""Maxima of rows that are sought only where the sums of weights say that one may move."""

import numpy as np
import pytest
from test_shorten_exponents import text
from test_small_tanh import after_maxima, main_loop

import tilelang.language as T
from tilelang.simulator import run_device
from tilelang.transform.pipeline import DEVICE_PASSES
from tilelang.transform.registers import kept_maxima as module
from tilelang.transform.registers.kept_maxima import kept_maxima

N, DIM, KEYS = 64, 64, 64  # queries, columns, keys of a tile
LOWERED = {}


def lowered(cap, tiles):
    if (cap, tiles) not in LOWERED:
        LOWERED[cap, tiles] = after_maxima(cap, N, tiles * KEYS, DIM)
    return LOWERED[cap, tiles]


def attention(cap, by_tile, by_warp, spoil=None):
    """(found, wanted) (result, logarithms) of queries whose scores have by_tile[t] * by_warp[w] added to normal ones."""
    rng = np.random.default_rng(0)
    keys = len(by_tile) * KEYS
    q, k, v = (rng.standard_normal((1, 1, x, DIM)).astype(np.float16) for x in (N, keys, keys))
    k[..., 0], q[..., 0] = np.repeat(by_tile, KEYS), np.repeat(by_warp, N // 4) * DIM**0.5
    if spoil is not None:
        q[0, 0, spoil, 1] = np.nan
    given = {"Q": q, "K": k, "V": v, "Blocks": np.zeros((1, 1, 1, 1), np.int32), "X0": np.zeros(1, np.float32),
             "X1": np.zeros(1, np.float32), "O": np.zeros_like(q), "LSE": np.zeros((1, 1, N), np.float32)}
    found = run_device(lowered(cap, len(by_tile)), given).outputs
    s = cap * np.tanh(q[0, 0].astype(float) @ k[0, 0].astype(float).T * DIM**-0.5 / cap)
    weights = np.exp(s - s.max(1, keepdims=True))
    want = weights @ v[0, 0].astype(float) / weights.sum(1, keepdims=True), np.log(weights.sum(1)) + s.max(1)
    return (found["O"][0, 0], found["LSE"][0, 0]), want, v


def test_the_loop_has_no_maxima_outside_of_the_branch():
    assert kept_maxima in DEVICE_PASSES
    body = main_loop(lowered(30.0, 3))
    before, _, branch = body.partition("if (large")
    assert "tl::weights_S(" in before and "shfl_xor" not in before and "any_sync" in before and "tl::max_S" not in before
    assert branch.index("tl::max_S") < branch.index("scaled_tanh(S") < branch.index("tl::halves_P")


def test_small_weights_of_tanh_need_the_least_elements():
    """Below the polynomial's range, weights of a cap of 8 are not small beside that of 0."""
    body = main_loop(lowered(8.0, 3))
    assert "tl::weights_S" not in body and "tl::below_S" in body


@pytest.mark.parametrize("by_tile, by_warp", [
    ([0, 0, 0, 0], [0, 0, 0, 0]),  # no branch
    ([0, 1, 4, -4], [0, 2, 6, -3]),  # maxima that move, arguments above and below the range
    ([1, 1, 1, 1], [-5, -12, -30, 12]),  # no score above 0, and large ones
    ([-4, -2, 2, 4], [5, 1, -5, 20]),  # from far below to far above
    ([4, 0, -1, 1], [3, -3, 8, -8])])
@pytest.mark.parametrize("cap", [28.0, 50.0])
def test_attention_is_right_for_any_scores(by_tile, by_warp, cap):
    found, want, v = attention(cap, by_tile, by_warp)
    assert np.abs(found[0] - want[0]).max() <= 2.0**-10 * np.abs(v).max() * 1.1
    assert np.abs(found[1] - want[1]).max() <= cap * 8 * 2.0**-24 + 1e-5


def test_threads_with_few_registers_wait_for_all_gemms_at_once(monkeypatch):
    monkeypatch.setattr(module, "MANY", 512)
    monkeypatch.setitem(LOWERED, (30.0, 3), after_maxima(30.0, N, 3 * KEYS, DIM))
    body = main_loop(lowered(30.0, 3)).partition("if (large")[0]
    assert body.count("tl::weights_S") == 1 and body.count("wgmma_wait<0>") == 1 and "wgmma_wait<1>" not in body
    found, want, v = attention(30.0, [0, 1, 6], [0, 2, -3, 5])
    assert np.abs(found[0] - want[0]).max() <= 2.0**-10 * np.abs(v).max() * 1.1


def test_a_row_with_nan_keeps_it_for_itself():
    found, want, v = attention(30.0, [0, 1, 0], [0, 1, 2, 3], spoil=5)
    assert np.isnan(found[0][5]).all() and np.isnan(found[1][5])
    rest = np.arange(N) != 5
    assert np.abs(found[0] - want[0])[rest].max() <= 2.0**-10 * np.abs(v).max() * 1.1


def attention_with(change):
    """Attention with a softcap, in which a part of the loop is another one."""
    n, keys, dim, c = 64, 192, 64, 30 * 1.4426950408889634

    def at(part, a, b):
        return b if change == part else a

    @T.prim_func
    def f(Q: T.Tensor((n, dim), "float16"), K: T.Tensor((keys, dim), "float16"), V: T.Tensor((keys, dim), "float16"),
          O: T.Tensor((n, dim), "float16"), R: T.Tensor((n, 64), "float32")):
        with T.Kernel(1, threads=128):
            Qs, Ks, Vs = [T.alloc_shared((x, dim), "float16") for x in (n, 64, 64)]
            S, acc = T.alloc_fragment((n, 64), "float32"), T.alloc_fragment((n, dim), "float32")
            P = T.alloc_fragment((n, 64), "float16")
            top, before, most, factor, total, part = [T.alloc_fragment((n,), "float32") for _ in range(6)]
            T.copy(Q, Qs)
            T.clear(acc)
            T.clear(total)
            T.fill(top, -1e30)
            for k in T.Pipelined(keys // 64, num_stages=2):
                T.copy(K[k * 64:k * 64 + 64, :], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                T.copy(V[k * 64:k * 64 + 64, :], Vs)
                T.copy(top, before)
                T.reduce_max(S, most, dim=1, clear=True)
                for i in T.Parallel(n):
                    top[i] = c * T.tanh(most[i] * at("candidate", 1 / 240, 1 / 200))
                for i in T.Parallel(n):
                    top[i] = T.if_then_else(top[i] - at("before", before[i], total[i]) > 8.0, top[i], before[i])
                for i in T.Parallel(n):
                    factor[i] = T.exp2(at("factor", before[i] - top[i], before[i]))
                for i, j in T.Parallel(n, 64):
                    S[i, j] = T.exp2(c * T.tanh(S[i, j] * (1 / 240)) - top[i])
                if change == "weights":
                    for i, j in T.Parallel(n, 64):
                        S[i, j] = S[i, j] * 0.5
                T.reduce_sum(S, part, dim=1)
                for i in T.Parallel(n):
                    total[i] = total[i] * factor[i] + part[i]
                for i, j in T.Parallel(n, dim):
                    acc[i, j] *= factor[i]
                T.copy(S, P)
                T.gemm(P, Vs, acc)
            for i, j in T.Parallel(n, dim):
                acc[i, j] /= total[i]
            T.copy(acc, O)
            if change == "afterwards":
                T.copy(S, R)

    return f


@pytest.mark.parametrize("change", ["", "candidate", "before", "factor", "weights", "afterwards"])
def test_loops_of_another_shape_stay(change):
    body = text(attention_with(change))
    assert ("tl::weights_S" in body) == (not change), body
