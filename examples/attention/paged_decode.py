"""Flash decoding: one query a sequence against a long paged cache, the keys split over several blocks.

While decoding there is one query row a head, far too few blocks to fill a GPU.  So (1) the heads that share a kv head
form the rows of one tile, and (2) the keys are cut into `splits` parts, each giving a partial result and the log of its
sum.  A second kernel joins the parts: exp(lse_s - max lse) are their weights.

The cache is paged: `table[b, i]` says which page of the pool holds keys i * page … of sequence b.  A tile of keys is one
page, found by one indirect read; the copy of the next page runs while this one is used.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from online_softmax import LOWEST, absorb, finish, reset

import tilelang.language as T


@T.macro
def join_parts(part, lse, out, b, h, splits, dim):
    """out[b, h, :] from the partial results part[b, h, s, :] and their logs lse[b, h, s] (-inf: saw no key)."""
    acc = T.alloc_fragment((dim,), "float32")
    top = T.alloc_var("float32", init=LOWEST)
    total = T.alloc_var("float32", init=0.0)
    T.clear(acc)
    for s in T.serial(splits):
        top = T.max(top, lse[b, h, s])
    for s in T.serial(splits):
        weight = T.exp2((lse[b, h, s] - top) * LOG2E)
        total = total + weight
        for j in T.Parallel(dim):
            acc[j] += weight * part[b, h, s, j]
    for j in T.Parallel(dim):
        out[b, h, j] = T.if_then_else(total > 0, acc[j] / total, 0.0)


def paged_decode(batch, heads, kv_heads, pages, max_pages, page, dim, splits=4, stages=2, dtype="float16", threads=128):
    """Q, O (batch, heads, dim); K, V (pages, page, kv_heads, dim); table (batch, max_pages); lengths (batch,)."""
    scale, group = dim**-0.5 * LOG2E, heads // kv_heads
    bm = T.ceildiv(group, 16) * 16  # tensor cores take 16 rows; surplus rows are computed and not stored
    pool = (pages, page, kv_heads, dim)

    @T.prim_func
    def decode(Q: T.Tensor((batch, heads, dim), dtype), K: T.Tensor(pool, dtype), V: T.Tensor(pool, dtype),
               table: T.Tensor((batch, max_pages), "int32"), lengths: T.Tensor((batch,), "int32"),
               part: T.Tensor((batch, heads, splits, dim), "float32"), lse: T.Tensor((batch, heads, splits), "float32"),
               O: T.Tensor((batch, heads, dim), dtype)):
        with T.Kernel(splits, kv_heads, batch, threads=threads) as (s, hk, b):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((page, dim), dtype)
            Vs = T.alloc_shared((page, dim), dtype)
            S = T.alloc_fragment((bm, page), "float32")
            P = T.alloc_fragment((bm, page), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[b, hk * group, 0], Qs)
            reset(acc, top, total)
            n = lengths[b]
            used = T.ceildiv(n, page)
            each = T.ceildiv(used, splits)
            first = T.min(s * each, used)
            for step in T.Pipelined(T.min(each, used - first), num_stages=stages):
                where = table[b, first + step]
                T.copy(K[where, 0:page, hk, :], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, page):
                    S[i, j] = T.if_then_else((first + step) * page + j < n, S[i, j], -T.infinity("float32"))
                T.copy(V[where, 0:page, hk, :], Vs)
                absorb(S, P, acc, top, before, rescale, total, row, scale)
                T.gemm(P, Vs, acc)
            finish(acc, total)
            for i, j in T.Parallel(bm, dim):
                if i < group:
                    part[b, hk * group + i, s, j] = acc[i, j]
            for i in T.Parallel(bm):
                if i < group:
                    lse[b, hk * group + i, s] = T.if_then_else(
                        total[i] > 0, T.log(total[i]) + top[i] * (scale / LOG2E), -T.infinity("float32"))

        with T.Kernel(heads, batch, threads=threads) as (h, b):
            join_parts(part, lse, O, b, h, splits, dim)

    return decode


def check(lengths="8000,1,0,777,64,4097,8192,3000", heads=32, kv_heads=8, page=64, dim=128, splits=8, dtype="float16", seed=0,
          on=harness.HERE):
    rng = np.random.default_rng(seed)
    n = [int(x) for x in lengths.split(",")]
    batch, max_pages = len(n), max(-(-x // page) for x in n)
    pages = batch * max_pages + 3
    table = rng.permutation(pages)[:batch * max_pages].reshape(batch, max_pages).astype(np.int32)
    q = harness.random(rng, (batch, heads, dim), dtype)
    k, v = (harness.random(rng, (pages, page, kv_heads, dim), dtype) for _ in range(2))
    program = paged_decode(batch, heads, kv_heads, pages, max_pages, page, dim, splits, dtype=dtype)
    _, _, got = harness.run(program, [q, k, v, table, np.asarray(n, np.int32)], [5, 6, 7], on)
    want = np.zeros(q.shape)
    for b in range(batch):
        kb, vb = (harness.wide(x[table[b]]).reshape(-1, kv_heads, dim)[:n[b]].transpose(1, 0, 2)[None] for x in (k, v))
        want[b] = harness.attention(harness.wide(q[b])[None, :, None, :], kb, vb)[0][0, :, 0, :]
    return harness.compare("paged decode", got, want, harness.attention_bound(q, k, v, dtype))


if __name__ == "__main__":
    harness.main(check)
