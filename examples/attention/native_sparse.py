"""The selected branch of native sparse attention: every query attends to a few blocks of keys, chosen per query.

`chosen[b, t, hk, i]` names the i-th block of `size` keys that query t of kv head hk looks at (-1: none).  All query heads of
a kv head share the choice, so that they form the rows of one tile and a block of keys is read once for all of them.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from online_softmax import absorb, finish, reset

import tilelang.language as T


def native_sparse(batch, heads, kv_heads, seq, dim, count, size=32, stages=2, dtype="float16", threads=32):
    scale, group = dim**-0.5 * LOG2E, heads // kv_heads
    bm = T.ceildiv(group, 16) * 16
    q_shape, kv_shape = (batch, seq, heads, dim), (batch, seq, kv_heads, dim)

    @T.prim_func
    def attend(Q: T.Tensor(q_shape, dtype), K: T.Tensor(kv_shape, dtype), V: T.Tensor(kv_shape, dtype),
               chosen: T.Tensor((batch, seq, kv_heads, count), "int32"), O: T.Tensor(q_shape, dtype)):
        with T.Kernel(seq, kv_heads, batch, threads=threads) as (t, hk, b):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((size, dim), dtype)
            Vs = T.alloc_shared((size, dim), dtype)
            S = T.alloc_fragment((bm, size), "float32")
            P = T.alloc_fragment((bm, size), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[b, t, hk * group, 0], Qs)
            reset(acc, top, total)
            for i in T.Pipelined(count, num_stages=stages):
                start = chosen[b, t, hk, i] * size
                if start >= 0 and start <= t:
                    T.copy(K[b, start:start + size, hk, :], Ks)
                    T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                    for r, j in T.Parallel(bm, size):
                        S[r, j] = T.if_then_else(start + j <= t, S[r, j], -T.infinity("float32"))
                    T.copy(V[b, start:start + size, hk, :], Vs)
                    absorb(S, P, acc, top, before, rescale, total, row, scale)
                    T.gemm(P, Vs, acc)
            finish(acc, total)
            for r, j in T.Parallel(bm, dim):
                if r < group:
                    O[b, t, hk * group + r, j] = acc[r, j]

    return attend


def check(batch=1, heads=64, kv_heads=4, seq=2048, dim=128, count=16, size=64, dtype="float16", seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    q = harness.random(rng, (batch, seq, heads, dim), dtype)
    k, v = (harness.random(rng, (batch, seq, kv_heads, dim), dtype) for _ in range(2))
    blocks = -(-seq // size)
    chosen = np.full((batch, seq, kv_heads, count), -1, np.int32)
    keep = np.zeros((batch, kv_heads, seq, seq), bool)
    for b in range(batch):
        for t in range(seq):
            for h in range(kv_heads):
                some = rng.permutation(blocks)[:count]  # blocks of the future among them: the kernel skips those
                chosen[b, t, h, :len(some)] = some
                keep[b, h, t] = np.isin(np.arange(seq) // size, some) & (np.arange(seq) <= t)
    program = native_sparse(batch, heads, kv_heads, seq, dim, count, size, dtype=dtype)
    got, = harness.run(program, [q, k, v, chosen], [4], on)
    want, _ = harness.attention(*(harness.wide(x).transpose(0, 2, 1, 3) for x in (q, k, v)),
                                keep=np.repeat(keep, heads // kv_heads, 1))
    return harness.compare("native sparse", got.transpose(0, 2, 1, 3), want, harness.attention_bound(q, k, v, dtype))


if __name__ == "__main__":
    harness.main(check)
