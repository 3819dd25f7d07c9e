"""FlashAttention forward: multi-head, grouped-query, causal and sliding-window attention in one pass over the keys.

Attention of one tile of queries never holds a row of scores.  It keeps, per row, the largest score so far `top`, the sum
of exp(score - top) `total`, and the weighted sum of values `acc`; when a tile of keys raises `top`, the two sums are
multiplied by exp(old top - new top).  Tiles of K and V stream through shared memory; T.Pipelined fetches the next while
the tensor cores work on this one.

Things worth noticing:
* The loop runs over the tiles that some row of this block sees: causal cuts its end, a window its start.
* `top` starts at a large negative number, not at -inf: a row whose first tile is masked altogether would else compute
  (-inf) - (-inf).
* exp2 is one instruction, exp is not: log2(e) goes into the scale.
* Grouped queries: head h reads kv head h // (heads / kv heads).  Nothing else changes.
* The log of the row sums is written beside the result: the backward pass recomputes the weights from it.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E

import tilelang.language as T


def flash_forward(batch, heads, kv_heads, seq_q, seq_kv, dim, causal=False, window=0, bm=64, bn=64, stages=2, dtype="float16",
                  threads=128):
    """(batch, seq, heads, dim) tensors.  Query i stands at key position i + seq_kv - seq_q; it sees positions up to its own
    with `causal`, and only the last `window` of those when that is not 0 (needs causal)."""
    scale, group, shift, low = dim**-0.5 * LOG2E, heads // kv_heads, seq_kv - seq_q, -1e30
    q_shape, kv_shape = (batch, seq_q, heads, dim), (batch, seq_kv, kv_heads, dim)

    @T.prim_func
    def attend(Q: T.Tensor(q_shape, dtype), K: T.Tensor(kv_shape, dtype), V: T.Tensor(kv_shape, dtype),
               O: T.Tensor(q_shape, dtype), LSE: T.Tensor((batch, heads, seq_q), "float32")):
        with T.Kernel(T.ceildiv(seq_q, bm), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((bn, dim), dtype)
            Vs = T.alloc_shared((bn, dim), dtype)
            S = T.alloc_fragment((bm, bn), "float32")
            P = T.alloc_fragment((bm, bn), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            top = T.alloc_fragment((bm,), "float32")
            before = T.alloc_fragment((bm,), "float32")
            rescale = T.alloc_fragment((bm,), "float32")
            total = T.alloc_fragment((bm,), "float32")
            row = T.alloc_fragment((bm,), "float32")

            T.copy(Q[b, bx * bm:(bx + 1) * bm, h, :], Qs)
            T.clear(acc)
            T.clear(total)
            T.fill(top, low)
            last = T.min(T.ceildiv(seq_kv, bn), T.ceildiv((bx + 1) * bm + shift, bn)) if causal else T.ceildiv(seq_kv, bn)
            first = T.max(0, (bx * bm + shift - window + 1) // bn) if window else 0
            for step in T.Pipelined(last - first, num_stages=stages):
                k = first + step
                T.copy(K[b, k * bn:(k + 1) * bn, h // group, :], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    position = bx * bm + i + shift
                    key = k * bn + j
                    seen = (key < seq_kv) and ((not causal) or key <= position) and ((not window) or key > position - window)
                    S[i, j] = T.if_then_else(seen, S[i, j], -T.infinity("float32"))
                T.copy(V[b, k * bn:(k + 1) * bn, h // group, :], Vs)
                T.copy(top, before)
                T.reduce_max(S, top, dim=1, clear=False)
                for i in T.Parallel(bm):
                    rescale[i] = T.exp2((before[i] - top[i]) * scale)
                for i, j in T.Parallel(bm, bn):
                    S[i, j] = T.exp2((S[i, j] - top[i]) * scale)
                T.reduce_sum(S, row, dim=1)
                for i in T.Parallel(bm):
                    total[i] = total[i] * rescale[i] + row[i]
                for i, j in T.Parallel(bm, dim):
                    acc[i, j] *= rescale[i]
                T.copy(S, P)
                T.gemm(P, Vs, acc)
            for i, j in T.Parallel(bm, dim):
                acc[i, j] = T.if_then_else(total[i] > 0, acc[i, j] / total[i], 0.0)
            for i in T.Parallel(bm):
                total[i] = T.if_then_else(total[i] > 0, T.log(total[i]) + top[i] * (scale / LOG2E), -T.infinity("float32"))
            T.copy(acc, O[b, bx * bm:(bx + 1) * bm, h, :])
            T.copy(total, LSE[b, h, bx * bm:(bx + 1) * bm])

    return attend


def visible(seq_q, seq_kv, causal, window):
    """(seq_q, seq_kv) mask, written without any tile."""
    position = np.arange(seq_q)[:, None] + seq_kv - seq_q
    key = np.arange(seq_kv)[None, :]
    keep = np.ones((seq_q, seq_kv), bool)
    if causal:
        keep &= key <= position
    if window:
        keep &= key > position - window
    return keep


def sdpa(q, k, v, causal):
    """torch's own attention of (batch, heads, seq, dim) tensors."""
    import torch

    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def check(batch=1, heads=32, kv_heads=8, seq_q=4096, seq_kv=4096, dim=128, causal=True, window=0, dtype="float16",
          bm=128, bn=64, stages=2, seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    q = harness.random(rng, (batch, seq_q, heads, dim), dtype)
    k, v = (harness.random(rng, (batch, seq_kv, kv_heads, dim), dtype) for _ in range(2))
    program = flash_forward(batch, heads, kv_heads, seq_q, seq_kv, dim, causal, window, bm, bn, stages, dtype, 2 * bm)
    got, lse = harness.run(program, [q, k, v], [3, 4], on)
    want, want_lse = harness.attention(*(harness.wide(x).transpose(0, 2, 1, 3) for x in (q, k, v)),
                                       keep=visible(seq_q, seq_kv, causal, window))
    bound = harness.attention_bound(q, k, v, dtype)
    # The log of the sum is a float32 number a few units large: its error is far below that of a 16-bit result.
    heads_first = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v)]
    if not window and seq_q == seq_kv:
        on.peer("torch sdpa", sdpa, *heads_first, causal)
    return [harness.compare("flash forward", got.transpose(0, 2, 1, 3), want, bound),
            harness.compare("flash forward, log of sums", lse, want_lse, bound)]


if __name__ == "__main__":
    harness.main(check)
