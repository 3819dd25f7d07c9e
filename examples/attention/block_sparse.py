"""Block-sparse attention: a mask says which tiles of keys a tile of queries looks at; the others cost nothing.

`mask[b, h, i, j]` (bool) covers a tile of `bm` queries by `bn` keys.  The test is the same for the whole block, so a masked
tile is neither loaded nor multiplied.  Rows that see no tile at all give 0.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from flash_forward import visible
from online_softmax import absorb, finish, reset

import tilelang.language as T


def block_sparse(batch, heads, seq, dim, causal=True, bm=64, bn=64, stages=2, dtype="float16", threads=128):
    scale = dim**-0.5 * LOG2E
    shape = (batch, heads, seq, dim)

    @T.prim_func
    def attend(Q: T.Tensor(shape, dtype), K: T.Tensor(shape, dtype), V: T.Tensor(shape, dtype),
               mask: T.Tensor((batch, heads, T.ceildiv(seq, bm), T.ceildiv(seq, bn)), "bool"), O: T.Tensor(shape, dtype)):
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
            for k in T.Pipelined(T.ceildiv(T.min(seq, (bx + 1) * bm), bn) if causal else T.ceildiv(seq, bn), num_stages=stages):
                if mask[b, h, bx, k]:
                    T.copy(K[b, h, k * bn, 0], Ks)
                    T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(bm, bn):
                        seen = (k * bn + j < seq) and ((not causal) or k * bn + j <= bx * bm + i)
                        S[i, j] = T.if_then_else(seen, S[i, j], -T.infinity("float32"))
                    T.copy(V[b, h, k * bn, 0], Vs)
                    absorb(S, P, acc, top, before, rescale, total, row, scale)
                    T.gemm(P, Vs, acc)
            finish(acc, total)
            T.copy(acc, O[b, h, bx * bm, 0])

    return attend


def check(batch=1, heads=16, seq=4096, dim=128, causal=True, density=0.4, bm=64, bn=64, stages=2, dtype="float16",
          seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    q, k, v = (harness.random(rng, (batch, heads, seq, dim), dtype) for _ in range(3))
    mask = rng.random((batch, heads, -(-seq // bm), -(-seq // bn))) < density
    program = block_sparse(batch, heads, seq, dim, causal, bm, bn, stages, dtype)
    got, = harness.run(program, [q, k, v, mask], [4], on)
    keep = np.repeat(np.repeat(mask, bm, 2), bn, 3)[:, :, :seq, :seq] & visible(seq, seq, causal, 0)
    want, _ = harness.attention(harness.wide(q), harness.wide(k), harness.wide(v), keep)
    return harness.compare("block sparse", got, want, harness.attention_bound(q, k, v, dtype))


if __name__ == "__main__":
    harness.main(check)
