"""Multi-head latent attention over a prompt: keys and values are expanded, queries and keys have two parts.

A score is q . k + q_pe . k_pe, where the rotary part of the keys is one vector a token, shared by all heads: two products
into one accumulator, no concatenated copy in memory.  Keys (`dim` + `pe`) and values (`dv`) have different lengths.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from flash_forward import visible
from online_softmax import absorb, finish, reset

import tilelang.language as T


def mla_prefill(batch, heads, seq, dim=128, pe=64, dv=128, bm=64, bn=64, stages=2, dtype="float16", threads=128):
    scale = (dim + pe)**-0.5 * LOG2E

    @T.prim_func
    def attend(Q: T.Tensor((batch, seq, heads, dim), dtype), Qpe: T.Tensor((batch, seq, heads, pe), dtype),
               K: T.Tensor((batch, seq, heads, dim), dtype), Kpe: T.Tensor((batch, seq, pe), dtype),
               V: T.Tensor((batch, seq, heads, dv), dtype), O: T.Tensor((batch, seq, heads, dv), dtype)):
        with T.Kernel(T.ceildiv(seq, bm), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((bm, dim), dtype)
            Qps = T.alloc_shared((bm, pe), dtype)
            Ks = T.alloc_shared((bn, dim), dtype)
            Kps = T.alloc_shared((bn, pe), dtype)
            Vs = T.alloc_shared((bn, dv), dtype)
            S = T.alloc_fragment((bm, bn), "float32")
            P = T.alloc_fragment((bm, bn), dtype)
            acc = T.alloc_fragment((bm, dv), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[b, bx * bm:(bx + 1) * bm, h, :], Qs)
            T.copy(Qpe[b, bx * bm:(bx + 1) * bm, h, :], Qps)
            reset(acc, top, total)
            for k in T.Pipelined(T.ceildiv(T.min(seq, (bx + 1) * bm), bn), num_stages=stages):
                T.copy(K[b, k * bn:(k + 1) * bn, h, :], Ks)
                T.copy(Kpe[b, k * bn, 0], Kps)
                T.copy(V[b, k * bn:(k + 1) * bn, h, :], Vs)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                T.gemm(Qps, Kps, S, transpose_B=True)
                for i, j in T.Parallel(bm, bn):
                    S[i, j] = T.if_then_else(k * bn + j <= bx * bm + i, S[i, j], -T.infinity("float32"))
                absorb(S, P, acc, top, before, rescale, total, row, scale)
                T.gemm(P, Vs, acc)
            finish(acc, total)
            T.copy(acc, O[b, bx * bm:(bx + 1) * bm, h, :])

    return attend


def check(batch=1, heads=16, seq=4096, dim=128, pe=64, dv=128, stages=2, dtype="bfloat16", seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    q, qpe = (harness.random(rng, (batch, seq, heads, n), dtype) for n in (dim, pe))
    k, v = (harness.random(rng, (batch, seq, heads, n), dtype) for n in (dim, dv))
    kpe = harness.random(rng, (batch, seq, pe), dtype)
    program = mla_prefill(batch, heads, seq, dim, pe, dv, stages=stages, dtype=dtype)
    got, = harness.run(program, [q, qpe, k, kpe, v], [5], on)
    shared = np.broadcast_to(kpe[:, :, None, :], (batch, seq, heads, pe))
    whole_q, whole_k = (np.concatenate([harness.wide(a), harness.wide(b)], -1) for a, b in ((q, qpe), (k, shared)))
    want, _ = harness.attention(*(x.transpose(0, 2, 1, 3) for x in (whole_q, whole_k, harness.wide(v))),
                                keep=visible(seq, seq, True, 0))
    return harness.compare("mla prefill", got.transpose(0, 2, 1, 3), want,
                           harness.attention_bound(whole_q, whole_k, v, dtype))


if __name__ == "__main__":
    harness.main(check)
