"""Multi-head latent attention while decoding: all heads share one compressed cache.

The cache keeps per token one latent vector of `dim` (512 in the paper) and one rotary key of `pe` (64).  After the
projections are absorbed into the query, a score is q . latent + q_pe . k_pe, and the latent is the value as well: one
tile in shared memory serves both products, and every head of the block reads it.  So a tile has `bh` heads as rows, and
the arithmetic per byte is high enough for the tensor cores although each sequence has only one query.

The keys are split over blocks and joined by a second kernel, as in paged_decode.py.  A target with little shared memory gets
smaller tiles of heads and keys: the check asks which of two sizes fit.
"""

from functools import partial

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from online_softmax import absorb, finish, reset
from paged_decode import join_parts

import tilelang.language as T


def mla_decode(batch, heads, seq, dim=512, pe=64, splits=2, bh=64, bn=64, stages=2, dtype="float16", threads=256):
    scale = (dim + pe)**-0.5

    @T.prim_func
    def decode(Q: T.Tensor((batch, heads, dim), dtype), Qpe: T.Tensor((batch, heads, pe), dtype),
               KV: T.Tensor((batch, seq, dim), dtype), Kpe: T.Tensor((batch, seq, pe), dtype),
               part: T.Tensor((batch, heads, splits, dim), "float32"), lse: T.Tensor((batch, heads, splits), "float32"),
               O: T.Tensor((batch, heads, dim), dtype)):
        with T.Kernel(T.ceildiv(heads, bh), splits, batch, threads=threads) as (hb, s, b):
            Qs = T.alloc_shared((bh, dim), dtype)
            Qps = T.alloc_shared((bh, pe), dtype)
            KVs = T.alloc_shared((bn, dim), dtype)
            Kps = T.alloc_shared((bn, pe), dtype)
            Ps = T.alloc_shared((bh, bn), dtype)
            S = T.alloc_fragment((bh, bn), "float32")
            acc = T.alloc_fragment((bh, dim), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((bh,), "float32") for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[b, hb * bh, 0], Qs)
            T.copy(Qpe[b, hb * bh, 0], Qps)
            reset(acc, top, total)
            tiles = T.ceildiv(seq, bn)
            each = T.ceildiv(tiles, splits)
            first = T.min(s * each, tiles)
            for step in T.Pipelined(T.min(each, tiles - first), num_stages=stages):
                k = first + step
                T.copy(KV[b, k * bn, 0], KVs)
                T.copy(Kpe[b, k * bn, 0], Kps)
                T.gemm(Qs, KVs, S, transpose_B=True, clear_accum=True)
                T.gemm(Qps, Kps, S, transpose_B=True)
                for i, j in T.Parallel(bh, bn):
                    S[i, j] = T.if_then_else(k * bn + j < seq, S[i, j], -T.infinity("float32"))
                absorb(S, Ps, acc, top, before, rescale, total, row, scale * LOG2E)
                T.gemm(Ps, KVs, acc)  # the warps share the wide result by columns: P goes through shared memory
            finish(acc, total)
            for i in T.Parallel(bh):
                total[i] = T.if_then_else(total[i] > 0, T.log(total[i]) + top[i] * scale, -T.infinity("float32"))
            T.copy(acc, part[b, hb * bh:(hb + 1) * bh, s, :])
            T.copy(total, lse[b, hb * bh:(hb + 1) * bh, s])

        with T.Kernel(heads, batch, threads=128) as (h, b):
            join_parts(part, lse, O, b, h, splits, dim)

    return decode


def check(batch=16, heads=128, seq=4096, dim=512, pe=64, splits=4, bh=64, bn=64, stages=2, dtype="float16", seed=0,
          on=harness.HERE):
    rng = np.random.default_rng(seed)
    q, qpe = harness.random(rng, (batch, heads, dim), dtype), harness.random(rng, (batch, heads, pe), dtype)
    kv, kpe = harness.random(rng, (batch, seq, dim), dtype), harness.random(rng, (batch, seq, pe), dtype)
    program = partial(mla_decode, batch, heads, seq, dim, pe, splits, stages=stages, dtype=dtype)
    bh, bn = on.fitting(program, (bh, bn), (16, 32))
    _, _, got = harness.run(program(bh, bn), [q, qpe, kv, kpe], [4, 5, 6], on)
    whole_q, whole_k = (np.concatenate([harness.wide(a), harness.wide(b)], -1) for a, b in ((q, qpe), (kv, kpe)))
    want, _ = harness.attention(whole_q[:, :, None, :], whole_k[:, None], harness.wide(kv)[:, None])
    return harness.compare("mla decode", got, want[:, :, 0, :], harness.attention_bound(whole_q, whole_k, kv, dtype))


if __name__ == "__main__":
    harness.main(check)
