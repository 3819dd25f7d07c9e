"""Attention to the top-k keys that a small indexer finds: scores, selection and the sparse attention itself.

1. The indexer rates key s for query t by sum_h weight[t, h] * relu(qi[t, h] . ki[s]), with few short heads.
2. The `topk` best among the keys up to t are selected without sorting.  Ratings become unsigned numbers of the same order;
   the smallest number that is still among the best is found bit by bit from the highest, counting 32 times how many keys reach
   a trial.  Keys above it are taken, and of those at it the first, each at the place that a running sum gives it.
3. All heads of a query attend to the gathered rows of a shared latent cache, which is key and value at once.

The three kernels belong to one program and run in order.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from online_softmax import absorb, finish, reset

import tilelang.language as T


def topk_attention(seq, heads, dim, index_heads, index_dim, topk, bm=64, bn=64, dtype="float16", threads=128):
    scale = dim**-0.5 * LOG2E
    rows = T.ceildiv(heads, 16) * 16

    @T.prim_func
    def attend(Qi: T.Tensor((seq, index_heads, index_dim), dtype), Ki: T.Tensor((seq, index_dim), dtype),
               weight: T.Tensor((seq, index_heads), "float32"), Q: T.Tensor((seq, heads, dim), dtype),
               KV: T.Tensor((seq, dim), dtype), rating: T.Tensor((seq, seq), "float32"),
               chosen: T.Tensor((seq, topk), "int32"), O: T.Tensor((seq, heads, dim), dtype)):
        with T.Kernel(T.ceildiv(seq, bn), T.ceildiv(seq, bm), threads=threads) as (bx, by):
            Qs = T.alloc_shared((bm, index_dim), dtype)
            Ks = T.alloc_shared((bn, index_dim), dtype)
            S = T.alloc_fragment((bm, bn), "float32")
            sum_ = T.alloc_fragment((bm, bn), "float32")
            T.clear(sum_)
            T.copy(Ki[bx * bn, 0], Ks)
            for h in T.Pipelined(index_heads, num_stages=2):
                T.copy(Qi[by * bm:(by + 1) * bm, h, :], Qs)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    sum_[i, j] += T.max(S[i, j], 0) * weight[by * bm + i, h]
            T.copy(sum_, rating[by * bm, bx * bn])

        with T.Kernel(seq, threads=threads) as t:
            key = T.alloc_fragment((seq,), "uint32")
            flag = T.alloc_fragment((seq,), "int32")
            count = T.alloc_fragment((1,), "int32")
            above = T.alloc_shared((seq,), "int32")
            level = T.alloc_shared((seq,), "int32")
            least = T.alloc_var("uint32", init=0)
            wanted = T.min(topk, t + 1)
            for i in T.Parallel(seq):
                bits = T.reinterpret(rating[t, i], "uint32")
                ordered = T.if_then_else(bits >> T.uint32(31) == 0, bits | T.uint32(1 << 31), ~bits)
                key[i] = T.if_then_else(i <= t, ordered, T.uint32(0))
            for bit in T.serial(32):
                trial = least | (T.uint32(1 << 31) >> T.cast(bit, "uint32"))
                for i in T.Parallel(seq):
                    flag[i] = T.if_then_else(key[i] >= trial, 1, 0)
                T.reduce_sum(flag, count)
                least = T.if_then_else(count[0] >= wanted, trial, least)
            for i in T.Parallel(seq):
                above[i] = T.if_then_else(key[i] > least, 1, 0)
                level[i] = T.if_then_else(key[i] == least, 1, 0)
            T.cumsum(above)
            T.cumsum(level)
            for i in T.Parallel(topk):
                if i >= wanted:
                    chosen[t, i] = -1
            for i in T.Parallel(seq):
                if key[i] > least:
                    chosen[t, above[i] - 1] = i
                if key[i] == least and above[seq - 1] + level[i] <= wanted:
                    chosen[t, above[seq - 1] + level[i] - 1] = i

        with T.Kernel(seq, threads=threads) as t:
            Qs = T.alloc_shared((rows, dim), dtype)
            KVs = T.alloc_shared((bn, dim), dtype)
            Ps = T.alloc_shared((rows, bn), dtype)
            S = T.alloc_fragment((rows, bn), "float32")
            acc = T.alloc_fragment((rows, dim), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((rows,), "float32") for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[t, 0, 0], Qs)
            reset(acc, top, total)
            for k in T.serial(T.ceildiv(topk, bn)):
                for i, j in T.Parallel(bn, dim):
                    some = k * bn + i < topk and chosen[t, k * bn + i] >= 0
                    KVs[i, j] = T.if_then_else(some, KV[chosen[t, k * bn + i], j], 0)
                T.gemm(Qs, KVs, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(rows, bn):
                    some = k * bn + j < topk and chosen[t, k * bn + j] >= 0
                    S[i, j] = T.if_then_else(some, S[i, j], -T.infinity("float32"))
                absorb(S, Ps, acc, top, before, rescale, total, row, scale)
                T.gemm(Ps, KVs, acc)
            finish(acc, total)
            T.copy(acc[0:heads, :], O[t, 0:heads, :])

    return attend


def check(seq=2048, heads=64, dim=256, index_heads=16, index_dim=128, topk=512, dtype="float16", seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    qi, ki = harness.random(rng, (seq, index_heads, index_dim), dtype), harness.random(rng, (seq, index_dim), dtype)
    weight = harness.random(rng, (seq, index_heads), "float32")
    q, kv = harness.random(rng, (seq, heads, dim), dtype), harness.random(rng, (seq, dim), dtype)
    program = topk_attention(seq, heads, dim, index_heads, index_dim, topk, dtype=dtype)
    rating, chosen, got = harness.run(program, [qi, ki, weight, q, kv], [5, 6, 7], on)

    products = np.einsum("thd,sd->ths", harness.wide(qi), harness.wide(ki))
    want_rating = np.einsum("ths,th->ts", np.maximum(products, 0), harness.wide(weight))
    size = np.einsum("thd,sd->ths", np.abs(harness.wide(qi)), np.abs(harness.wide(ki)))
    slack = float((index_dim + index_heads) * harness.EPS["float32"] *
                  np.einsum("ths,th->ts", size, np.abs(harness.wide(weight))).max())
    ratings = harness.compare("topk attention, ratings", rating, want_rating, slack)
    if not ratings.ok:
        return ratings
    # Ratings may lie closer together than their error, so the selection is judged by what it must satisfy: it holds the
    # right number of different keys up to t, none of them worse than the k-th best by more than the error of two ratings.
    keep, want_rating, chosen = np.zeros((seq, seq), bool), np.asarray(want_rating), np.asarray(chosen)
    for t in range(seq):
        count = min(topk, t + 1)
        picked = chosen[t, :count].astype(int)
        kth = np.sort(want_rating[t, :t + 1])[-count]
        if (len(set(picked)) != count or picked.min() < 0 or picked.max() > t or (chosen[t, count:] != -1).any()
                or want_rating[t, picked].min() < kth - 2 * slack):
            return harness.Comparison(f"topk attention, choice of query {t}", float("inf"), slack)
        keep[t, picked] = True
    latent = harness.wide(kv)[None, None]
    want, _ = harness.attention(harness.wide(q).transpose(1, 0, 2)[None], latent, latent, keep)
    bound = harness.attention_bound(q, kv, kv, dtype)
    return [ratings, harness.compare("topk attention", got.transpose(1, 0, 2), want[0], bound)]


if __name__ == "__main__":
    harness.main(check)
