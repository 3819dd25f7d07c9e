"""Attention backward as programs write it: one pass over the queries, atomics into dQ in the order of an accumulator's lanes,
and a second kernel that reads dQ back through the same layout."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

EXECUTIONS = [({"kind": "cuda", "arch": "sm_90a"}, "simulator"), ({"kind": "cuda", "arch": "sm_80"}, "simulator"),
              ("cpu", "tile"), ("cpu", None)]
LOG2E = 1.4426950408889634


def lanes(tensor):
    """8 x 8 tiles in the order in which the lanes of an MMA accumulator hold them."""
    return T.Layout(tensor.shape, lambda b, s, h, d: [b, s // 8, h, d // 8, d % 2, 4 * (s % 8) + d % 8 // 2])


def backward(batch, length, heads, dim, causal, keys, queries, stages, threads):
    shape, rows = (batch, length, heads, dim), (batch, heads, length)
    scale = dim ** -0.5

    @T.prim_func
    def main(Q: T.Tensor(shape, "float16"), K: T.Tensor(shape, "float16"), V: T.Tensor(shape, "float16"),
             dO: T.Tensor(shape, "float16"), L: T.Tensor(rows, "float32"), D: T.Tensor(rows, "float32"),
             dQ: T.Tensor(shape, "float32"), dK: T.Tensor(shape, "float16"), dV: T.Tensor(shape, "float16")):
        with T.Kernel(T.ceildiv(length, keys), heads, batch, threads=threads) as (bx, h, b):
            k = T.alloc_shared((keys, dim), "float16")
            v = T.alloc_shared((keys, dim), "float16")
            q = T.alloc_shared((queries, dim), "float16")
            do = T.alloc_shared((queries, dim), "float16")
            l = T.alloc_shared((queries,), "float32")
            delta = T.alloc_shared((queries,), "float32")
            ds_s = T.alloc_shared((keys, queries), "float16")
            out = T.alloc_shared((keys, dim), "float16")
            p = T.alloc_fragment((keys, queries), "float32")
            dp = T.alloc_fragment((keys, queries), "float32")
            p16 = T.alloc_fragment((keys, queries), "float16")
            ds = T.alloc_fragment((keys, queries), "float16")
            dk = T.alloc_fragment((keys, dim), "float32")
            dv = T.alloc_fragment((keys, dim), "float32")
            dq = T.alloc_fragment((queries, dim), "float32")
            T.annotate_layout({dQ: lanes(dQ), k: make_swizzled_layout(k), out: make_swizzled_layout(out)})
            T.copy(K[b, bx * keys:(bx + 1) * keys, h, :], k)
            T.copy(V[b, bx * keys:(bx + 1) * keys, h, :], v)
            T.clear(dk)
            T.clear(dv)
            first = bx * keys // queries if causal else 0
            for i in T.Pipelined(first, T.ceildiv(length, queries), num_stages=stages):
                T.copy(Q[b, i * queries:(i + 1) * queries, h, :], q)
                T.copy(L[b, h, i * queries:(i + 1) * queries], l)
                T.clear(p)
                T.gemm(k, q, p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for r, c in T.Parallel(keys, queries):
                    p[r, c] = T.exp2(p[r, c] * (scale * LOG2E) - l[c])
                if causal:
                    for r, c in T.Parallel(keys, queries):
                        p[r, c] = T.if_then_else(bx * keys + r <= i * queries + c, p[r, c], 0)
                T.copy(dO[b, i * queries:(i + 1) * queries, h, :], do)
                T.copy(D[b, h, i * queries:(i + 1) * queries], delta)
                T.clear(dp)
                T.gemm(v, do, dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(p, p16)
                T.gemm(p16, do, dv, policy=T.GemmWarpPolicy.FullRow)
                for r, c in T.Parallel(keys, queries):
                    ds[r, c] = p[r, c] * (dp[r, c] - delta[c]) * scale
                T.gemm(ds, q, dk, policy=T.GemmWarpPolicy.FullRow)
                T.copy(ds, ds_s)
                T.clear(dq)
                T.gemm(ds_s, k, dq, transpose_A=True)
                for r, c in T.Parallel(queries, dim):
                    T.atomic_add(dQ[b, i * queries + r, h, c], dq[r, c])
            T.copy(dk, out)
            T.copy(out, dK[b, bx * keys:(bx + 1) * keys, h, :])
            T.copy(dv, out)
            T.copy(out, dV[b, bx * keys:(bx + 1) * keys, h, :])

    return main


def in_rows(shape):
    batch, length, heads, _ = shape

    @T.prim_func
    def main(dQ: T.Tensor(shape, "float32"), O: T.Tensor(shape, "float16")):
        with T.Kernel(T.ceildiv(length, 64), heads, batch, threads=128) as (i, h, b):
            T.annotate_layout({dQ: lanes(dQ)})
            T.copy(dQ[b, i * 64:(i + 1) * 64, h, :], O[b, i * 64:(i + 1) * 64, h, :])

    return main


def reference(q, k, v, do, causal):
    """dQ, dK, dV and, per query, the logarithm to base 2 of the sum of exponentials, and dO * O summed, all in float64."""
    q, k, v, do = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    s = q @ k.swapaxes(-1, -2) * scale
    if causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    total = np.log(np.exp(s).sum(-1, keepdims=True))
    p = np.exp(s - total)
    delta = (do * (p @ v)).sum(-1)
    ds = p * (do @ v.swapaxes(-1, -2) - delta[..., None]) * scale
    grads = ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do
    return [g.transpose(0, 2, 1, 3) for g in grads], total[..., 0] * LOG2E, delta


@pytest.mark.parametrize("target, backend", EXECUTIONS)
@pytest.mark.parametrize("keys, queries, stages, threads", [(64, 32, 2, 128), (128, 64, 2, 256), (64, 64, 1, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_attention_with_a_layout_of_dq(causal, keys, queries, stages, threads, target, backend):
    shape = batch, length, heads, dim = 1, 128, 2, 64
    rng = np.random.default_rng(7)
    q, k, v, do = (rng.standard_normal(shape).astype(np.float16) for _ in range(4))
    want, logsum, delta = reference(q, k, v, do, causal)
    dq = np.zeros(shape, np.float32)
    dk, dv, out = (np.zeros(shape, np.float16) for _ in range(3))
    program = backward(batch, length, heads, dim, causal, keys, queries, stages, threads)
    tilelang.compile(program, target=target, execution_backend=backend)(
        q, k, v, do, logsum.astype(np.float32), delta.astype(np.float32), dq, dk, dv)
    tilelang.compile(in_rows(shape), target=target, execution_backend=backend)(dq, out)
    # p and ds are rounded to float16 (2**-11 relative) in sums of `length` products; the results are rounded once more.
    for got, expected in zip((out, dk, dv), want):
        bound = 2.0 ** -10 * np.sqrt(length) * max(1.0, np.abs(expected).max())
        assert np.abs(got.astype(np.float64) - expected).max() < bound
    assert not np.array_equal(dq.astype(np.float16), out)  # dQ itself is stored in the order of lanes
