"""Attention over a packed batch: sequences of different lengths lie one after another, no padding.

`cu_q` and `cu_k` (batch + 1 each) hold where each sequence starts and ends.  The grid is made for the longest one; blocks
past the end of a shorter sequence run a loop of no iterations.  A tile may reach into the next sequence: scores beyond the own
keys are masked, rows beyond the own queries are not stored.  Queries are right-aligned to the keys, as in decoding with a
prefix.  The number of tokens is dynamic: one compiled kernel serves every packing.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from online_softmax import absorb, finish, reset

import tilelang.language as T


def flash_varlen(batch, heads, kv_heads, longest, dim, causal=True, bm=64, bn=64, stages=2, dtype="float16", threads=128):
    scale, group = dim**-0.5 * LOG2E, heads // kv_heads
    tokens_q, tokens_k = T.dynamic("tokens_q, tokens_k")

    @T.prim_func
    def attend(Q: T.Tensor((tokens_q, heads, dim), dtype), K: T.Tensor((tokens_k, kv_heads, dim), dtype),
               V: T.Tensor((tokens_k, kv_heads, dim), dtype), cu_q: T.Tensor((batch + 1,), "int32"),
               cu_k: T.Tensor((batch + 1,), "int32"), O: T.Tensor((tokens_q, heads, dim), dtype)):
        with T.Kernel(T.ceildiv(longest, bm), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((bn, dim), dtype)
            Vs = T.alloc_shared((bn, dim), dtype)
            S = T.alloc_fragment((bm, bn), "float32")
            P = T.alloc_fragment((bm, bn), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in (0, 1, 2, 3, 4)]
            q0 = cu_q[b]
            k0 = cu_k[b]
            len_q = cu_q[b + 1] - q0
            len_k = cu_k[b + 1] - k0
            shift = len_k - len_q
            T.copy(Q[q0 + bx * bm:q0 + (bx + 1) * bm, h, :], Qs)
            reset(acc, top, total)
            end = T.min(len_k, (bx + 1) * bm + shift) if causal else len_k
            steps = T.if_then_else(bx * bm < len_q, T.ceildiv(T.max(end, 0), bn), 0)
            for k in T.Pipelined(steps, num_stages=stages):
                T.copy(K[k0 + k * bn:k0 + (k + 1) * bn, h // group, :], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    seen = (k * bn + j < len_k) and ((not causal) or k * bn + j <= bx * bm + i + shift)
                    S[i, j] = T.if_then_else(seen, S[i, j], -T.infinity("float32"))
                T.copy(V[k0 + k * bn:k0 + (k + 1) * bn, h // group, :], Vs)
                absorb(S, P, acc, top, before, rescale, total, row, scale)
                T.gemm(P, Vs, acc)
            finish(acc, total)
            for i, j in T.Parallel(bm, dim):
                if bx * bm + i < len_q:
                    O[q0 + bx * bm + i, h, j] = acc[i, j]

    return attend


def check(lengths="1000,17,4096,1,400", prefix=300, heads=16, kv_heads=4, dim=128, causal=True, dtype="float16", seed=0,
          on=harness.HERE):
    """`lengths`: queries of each sequence; its keys are `prefix` more for every second one."""
    rng = np.random.default_rng(seed)
    len_q = [int(n) for n in lengths.split(",")]
    len_k = [n + prefix * (i % 2) for i, n in enumerate(len_q)]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (len_q, len_k))
    q = harness.random(rng, (cu_q[-1], heads, dim), dtype)
    k, v = (harness.random(rng, (cu_k[-1], kv_heads, dim), dtype) for _ in range(2))
    program = flash_varlen(len(len_q), heads, kv_heads, max(len_q), dim, causal, dtype=dtype)
    got, = harness.run(program, [q, k, v, cu_q, cu_k], [5], on)
    want = np.zeros(q.shape)
    for b, (m, n) in enumerate(zip(len_q, len_k)):
        parts = [harness.wide(x)[lo:hi].transpose(1, 0, 2)[None] for x, lo, hi in
                 ((q, cu_q[b], cu_q[b + 1]), (k, cu_k[b], cu_k[b + 1]), (v, cu_k[b], cu_k[b + 1]))]
        keep = np.arange(n)[None, :] <= np.arange(m)[:, None] + n - m if causal else None
        want[cu_q[b]:cu_q[b + 1]] = harness.attention(*parts, keep=keep)[0][0].transpose(1, 0, 2)
    return harness.compare("flash varlen", got, want, harness.attention_bound(q, k, v, dtype))


if __name__ == "__main__":
    harness.main(check)
