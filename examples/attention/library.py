"""Attention from tilelang.library: called, and taken as parts of a kernel of one's own.

`flash_attention` and `flash_decode` choose tiles by a cost model, compile once and keep the kernel.  Their programs are
plain text of the language in tilelang/library/attention/kernels.py; the running softmax in it is two macros, absorb
and finish, which any kernel may use: prefix_attention does, for a mask that the library does not have.  `lowest` is what a
row's maximum starts from: -inf would make the first weights NaN (-inf - -inf) where a row's first keys are all hidden.
"""

import attention_harness as harness
import numpy as np
from flash_forward import sdpa, visible

import tilelang.language as T
from tilelang.library import flash_attention, flash_decode, mla_decode
from tilelang.library.attention.kernels import absorb, finish, lowest


def prefix_attention(batch, heads, seq, dim, prefix, bm=128, bn=64, stages=2, dtype="float16", threads=256):
    """(batch, seq, heads, dim) tensors.  The first `prefix` keys are seen by all queries, the others causally."""
    shape = (batch, seq, heads, dim)

    @T.prim_func
    def attend(Q: T.Tensor(shape, dtype), K: T.Tensor(shape, dtype), V: T.Tensor(shape, dtype), O: T.Tensor(shape, dtype)):
        with T.Kernel(T.ceildiv(seq, bm), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((bn, dim), dtype)
            Vs = T.alloc_shared((bn, dim), dtype)
            S = T.alloc_fragment((bm, bn), "float32")
            P = T.alloc_fragment((bm, bn), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            top, before, factor, total, more = [T.alloc_fragment((bm,), "float32") for _ in (0, 1, 2, 3, 4)]
            c = dim**-0.5 * harness.LOG2E
            T.copy(Q[b, bx * bm:(bx + 1) * bm, h, :], Qs)
            T.clear(acc)
            T.clear(total)
            T.fill(top, lowest(c))
            end = T.min(seq, T.max(prefix, (bx + 1) * bm))
            for k in T.Pipelined(T.ceildiv(end, bn), num_stages=stages):
                T.copy(K[b, k * bn:(k + 1) * bn, h, :], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    seen = k * bn + j < seq and (k * bn + j < prefix or k * bn + j <= bx * bm + i)
                    S[i, j] = T.if_then_else(seen, S[i, j], -T.infinity("float32"))
                T.copy(V[b, k * bn:(k + 1) * bn, h, :], Vs)
                absorb(S, P, acc, (top, before, factor, total, more), c)
                T.gemm(P, Vs, acc)
            finish(acc, top, total, factor, c)
            T.copy(acc, O[b, bx * bm:(bx + 1) * bm, h, :])

    return attend


def place(on):
    """The library's way to name a place for NumPy arrays: interpreters by their names, a target for the simulator."""
    if on.on_gpu or on.backend is None:
        return None
    return on.backend if on.backend == "tile" else on.target


def call(function, on, *args, **options):
    """A library function for NumPy arrays, sent to the GPU where there is one."""
    if on.on_gpu:
        return on.library(function)(*args, **options)
    return function(*args, target=place(on), **options)


def check_attention(batch=1, heads=32, kv_heads=8, seq=4096, dim=128, window=0, dtype="bfloat16", seed=0, on=harness.HERE):
    """Causal, with grouped queries; window: only the last so many keys."""
    rng = np.random.default_rng(seed)
    q = harness.random(rng, (batch, seq, heads, dim), dtype)
    k, v = (harness.random(rng, (batch, seq, kv_heads, dim), dtype) for _ in range(2))
    options = {"window": (window - 1, 0)} if window else {"causal": True}
    got = call(flash_attention, on, q, k, v, **options)
    seen = seq * (seq + 1) / 2 if not window else window * seq - window * (window - 1) / 2
    on.work(4.0 * batch * heads * dim * seen)
    if not window:
        on.peer("torch sdpa", sdpa, *(np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v)), True)
    want, _ = harness.attention(*(harness.wide(x).transpose(0, 2, 1, 3) for x in (q, k, v)),
                                keep=visible(seq, seq, True, window))
    bound = harness.attention_bound(q, k, v, dtype)
    return harness.compare("library attention", harness.wide(got).transpose(0, 2, 1, 3), want, bound)


def check_packed(lengths="3000,1,128,4096", heads=16, kv_heads=4, dim=128, dtype="float16", seed=0, on=harness.HERE):
    """Sequences one after another, named by where they start."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum([int(n) for n in lengths.split(",")])]).astype(np.int32)
    q = harness.random(rng, (starts[-1], heads, dim), dtype)
    k, v = (harness.random(rng, (starts[-1], kv_heads, dim), dtype) for _ in range(2))
    got = call(flash_attention, on, q, k, v, causal=True, cu_seqlens_q=starts)
    on.work(4.0 * heads * dim * sum(n * (n + 1) / 2 for n in np.diff(starts).tolist()))
    parts = []
    for lo, hi in zip(starts, starts[1:]):
        one = [harness.wide(x[lo:hi]).transpose(1, 0, 2)[None] for x in (q, k, v)]
        parts.append(harness.attention(*one, keep=visible(hi - lo, hi - lo, True, 0))[0][0].transpose(1, 0, 2))
    return harness.compare("library packed", got, np.concatenate(parts), harness.attention_bound(q, k, v, dtype))


def check_decode(lengths="8000,1,777,4097", heads=32, kv_heads=8, page=64, dim=128, dtype="float16", seed=0, on=harness.HERE):
    """One query a sequence against pages in any order."""
    rng = np.random.default_rng(seed)
    n = np.array([int(x) for x in lengths.split(",")], np.int32)
    most = int(-(-n.max() // page))
    table = rng.permutation(n.size * most + 2)[:n.size * most].reshape(n.size, most).astype(np.int32)
    q = harness.random(rng, (n.size, heads, dim), dtype)
    k, v = (harness.random(rng, (n.size * most + 2, page, kv_heads, dim), dtype) for _ in range(2))
    got = call(flash_decode, on, q, k, v, n, block_table=table)
    on.work(nbytes=4.0 * kv_heads * dim * float(n.sum()))
    want = []
    for b, length in enumerate(n):
        kb, vb = (harness.wide(x[table[b]]).reshape(-1, kv_heads, dim)[:length].transpose(1, 0, 2)[None] for x in (k, v))
        want.append(harness.attention(harness.wide(q[b])[None, :, None, :], kb, vb)[0][0, :, 0, :])
    return harness.compare("library decode", got, np.stack(want), harness.attention_bound(q, k, v, dtype))


def check_latent(lengths="8000,1,777,4097", heads=128, dim_v=512, rope=64, page=64, dtype="float16", seed=0, on=harness.HERE):
    """Latent attention while decoding: one vector a key, whose first `dim_v` elements are the value, read by all heads."""
    rng = np.random.default_rng(seed)
    n = np.array([int(x) for x in lengths.split(",")], np.int32)
    most = int(-(-n.max() // page))
    table = rng.permutation(n.size * most + 2)[:n.size * most].reshape(n.size, most).astype(np.int32)
    q = harness.random(rng, (n.size, heads, dim_v + rope), dtype)
    cache = harness.random(rng, (n.size * most + 2, page, dim_v + rope), dtype)
    got = call(mla_decode, on, q, cache, n, dim_v=dim_v, block_table=table)
    on.work(2.0 * heads * (2 * dim_v + rope) * float(n.sum()))
    want = []
    for b, length in enumerate(n):
        keys = harness.wide(cache[table[b]]).reshape(-1, dim_v + rope)[None, None, :length]
        want.append(harness.attention(harness.wide(q[b])[None, :, None, :], keys, keys[..., :dim_v])[0][0, :, 0, :])
    return harness.compare("library latent", got, np.stack(want), harness.attention_bound(q, cache, cache, dtype))


def check_prefix(batch=1, heads=16, seq=4096, dim=128, prefix=1000, dtype="float16", seed=0, on=harness.HERE):
    """A mask of one's own around the library's macros."""
    rng = np.random.default_rng(seed)
    q, k, v = (harness.random(rng, (batch, seq, heads, dim), dtype) for _ in range(3))
    got, = harness.run(prefix_attention(batch, heads, seq, dim, prefix, dtype=dtype), [q, k, v], [3], on)
    keep = visible(seq, seq, True, 0) | (np.arange(seq) < prefix)
    want, _ = harness.attention(*(harness.wide(x).transpose(0, 2, 1, 3) for x in (q, k, v)), keep=keep)
    return harness.compare("library prefix", got.transpose(0, 2, 1, 3), want, harness.attention_bound(q, k, v, dtype))


if __name__ == "__main__":
    harness.main(check_attention, check_packed, check_decode, check_latent, check_prefix)
