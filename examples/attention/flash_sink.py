"""Sliding-window attention with a sink: one learned score a head that takes weight and gives nothing.

A head that has nothing to say must still spread weights that sum to one.  A sink lets it spend them: the softmax runs over
the visible scores and one more, sink[h], whose value is zero.  In the running softmax that is one addition at the end:
total += exp(sink - top).
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from flash_forward import visible
from online_softmax import absorb, finish, reset

import tilelang.language as T


def flash_sink(batch, heads, kv_heads, seq, dim, window=0, bm=64, bn=64, stages=2, dtype="float16", threads=128):
    """(batch, heads, seq, dim) tensors, causal; `window` 0 sees everything before."""
    scale, group = dim**-0.5, heads // kv_heads

    @T.prim_func
    def attend(Q: T.Tensor((batch, heads, seq, dim), dtype), K: T.Tensor((batch, kv_heads, seq, dim), dtype),
               V: T.Tensor((batch, kv_heads, seq, dim), dtype), sink: T.Tensor((heads,), "float32"),
               O: T.Tensor((batch, heads, seq, dim), dtype)):
        with T.Kernel(T.ceildiv(seq, bm), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((bn, dim), dtype)
            Vs = T.alloc_shared((bn, dim), dtype)
            S = T.alloc_fragment((bm, bn), "float32")
            P = T.alloc_fragment((bm, bn), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[b, h, bx * bm, 0], Qs)
            reset(acc, top, total)
            first = T.max(0, (bx * bm - window + 1) // bn) if window else 0
            last = T.ceildiv(T.min(seq, (bx + 1) * bm), bn)
            for k in T.Pipelined(first, last, num_stages=stages):
                T.copy(K[b, h // group, k * bn, 0], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    seen = k * bn + j <= bx * bm + i and ((not window) or k * bn + j > bx * bm + i - window)
                    S[i, j] = T.if_then_else(seen, S[i, j], -T.infinity("float32"))
                T.copy(V[b, h // group, k * bn, 0], Vs)
                absorb(S, P, acc, top, before, rescale, total, row, scale * LOG2E)
                T.gemm(P, Vs, acc)
            for i in T.Parallel(bm):
                total[i] += T.exp2((sink[h] - top[i] * scale) * LOG2E)
            finish(acc, total)
            T.copy(acc, O[b, h, bx * bm, 0])

    return attend


def check(batch=1, heads=64, kv_heads=8, seq=2048, dim=64, window=128, dtype="bfloat16", seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    q = harness.random(rng, (batch, heads, seq, dim), dtype)
    k, v = (harness.random(rng, (batch, kv_heads, seq, dim), dtype) for _ in range(2))
    sink = harness.random(rng, (heads,), "float32", scale=2)
    got, = harness.run(flash_sink(batch, heads, kv_heads, seq, dim, window, dtype=dtype), [q, k, v, sink], [4], on)
    want, _ = harness.attention(harness.wide(q), harness.wide(k), harness.wide(v), visible(seq, seq, True, window), sink=sink)
    return harness.compare("flash sink", got, want, harness.attention_bound(q, k, v, dtype))


if __name__ == "__main__":
    harness.main(check)
