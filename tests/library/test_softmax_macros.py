"""The running softmax of the attention programs, taken as macros by another kernel."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.library.attention.kernels import absorb, finish, lowest

ROWS, KEYS, DIM, TILES = 64, 32, 32, 3


@T.prim_func
def masked_mean(X: T.Tensor((ROWS, TILES * KEYS), "float32"), V: T.Tensor((TILES * KEYS, DIM), "float16"),
                O: T.Tensor((ROWS, DIM), "float32"), LSE: T.Tensor((ROWS,), "float32")):
    """softmax(X) V, where X may be -inf."""
    with T.Kernel(1, threads=128):
        S = T.alloc_fragment((ROWS, KEYS), "float32")
        P = T.alloc_fragment((ROWS, KEYS), "float16")
        Vs = T.alloc_shared((KEYS, DIM), "float16")
        acc = T.alloc_fragment((ROWS, DIM), "float32")
        top, before, factor, total, more = [T.alloc_fragment((ROWS,), "float32") for _ in (0, 1, 2, 3, 4)]
        c = 1.4426950408889634
        T.clear(acc)
        T.clear(total)
        T.fill(top, lowest(c))
        for k in T.serial(TILES):
            T.copy(X[:, k * KEYS:(k + 1) * KEYS], S)
            T.copy(V[k * KEYS:(k + 1) * KEYS, :], Vs)
            absorb(S, P, acc, (top, before, factor, total, more), c)
            T.gemm(P, Vs, acc)
        finish(acc, top, total, factor, c)
        T.copy(acc, O)
        T.copy(total, LSE)


@pytest.mark.parametrize("on", [{"execution_backend": "tile"}, {"target": "cpu"}], ids=["tile", "cpu"])
def test_first_keys_hidden_are_not_nan(on):
    """Rows whose first tiles are hidden whole, and one that sees nothing: 0 and the logarithm -inf."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, TILES * KEYS)).astype(np.float32)
    v = rng.standard_normal((TILES * KEYS, DIM)).astype(np.float16)
    hidden = np.arange(TILES * KEYS) < 2 * np.arange(ROWS)[:, None]
    x[hidden] = -np.inf
    got, lse = np.zeros((ROWS, DIM), np.float32), np.zeros(ROWS, np.float32)
    tilelang.compile(masked_mean, **on)(x, v, got, lse)
    p = np.exp(x.astype(np.float64))
    total = p.sum(1, keepdims=True)
    want = p / np.where(total == 0, 1, total) @ v.astype(np.float64)
    assert (total == 0).sum() == ROWS - TILES * KEYS // 2
    np.testing.assert_allclose(got, want, atol=2.0**-9 * np.abs(v.astype(np.float64)).max())
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(total[:, 0]), rtol=1e-5, atol=1e-5)
