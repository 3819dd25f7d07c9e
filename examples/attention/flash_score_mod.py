"""Attention with any change of the scores: the change is a macro that the kernel takes as an argument.

`alibi` adds a slope times the distance of key and query (no positions in the embedding are needed then); `softcap` squeezes
the scores smoothly into (-cap, cap).  A third needs no new kernel: write a macro of (score, head, query, key, slopes), where
`score` already carries the scale.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from flash_forward import visible
from online_softmax import absorb, finish, reset

import tilelang.language as T

CAP = 20.0


@T.macro
def alibi(score, h, query, key, slopes):
    return score + slopes[h] * T.cast(key - query, "float32")


@T.macro
def softcap(score, h, query, key, slopes):
    return CAP * T.tanh(score / CAP)


def flash_score_mod(change, batch, heads, seq, dim, bm=64, bn=64, stages=2, dtype="float16", threads=128):
    """Causal attention of (batch, heads, seq, dim) tensors with change(score, head, query, key, slopes)."""

    @T.prim_func
    def attend(Q: T.Tensor((batch, heads, seq, dim), dtype), K: T.Tensor((batch, heads, seq, dim), dtype),
               V: T.Tensor((batch, heads, seq, dim), dtype), slopes: T.Tensor((heads,), "float32"),
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
            for k in T.Pipelined(T.ceildiv(T.min(seq, (bx + 1) * bm), bn), num_stages=stages):
                T.copy(K[b, h, k * bn, 0], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    changed = change(S[i, j] * dim**-0.5, h, bx * bm + i, k * bn + j, slopes)
                    S[i, j] = T.if_then_else(k * bn + j <= bx * bm + i, changed, -T.infinity("float32"))
                T.copy(V[b, h, k * bn, 0], Vs)
                absorb(S, P, acc, top, before, rescale, total, row, LOG2E)
                T.gemm(P, Vs, acc)
            finish(acc, total)
            T.copy(acc, O[b, h, bx * bm, 0])

    return attend


def check(kind="alibi", batch=1, heads=16, seq=4096, dim=128, dtype="float16", seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    q, k, v = (harness.random(rng, (batch, heads, seq, dim), dtype) for _ in range(3))
    slopes = (2.0**(-8 * (np.arange(heads) + 1) / heads)).astype(np.float32)
    change = {"alibi": alibi, "softcap": softcap}[kind]
    got, = harness.run(flash_score_mod(change, batch, heads, seq, dim, dtype=dtype), [q, k, v, slopes], [4], on)
    distance = np.arange(seq)[None, :] - np.arange(seq)[:, None]
    want, _ = harness.attention(
        harness.wide(q), harness.wide(k), harness.wide(v), visible(seq, seq, True, 0),
        bias=harness.wide(slopes)[None, :, None, None] * distance if kind == "alibi" else 0.0,
        cap=CAP if kind == "softcap" else 0.0)
    # A changed score is rounded to float32 once more, and tanh of the device is good to about 2^-20 of CAP.
    extra = 2 * (harness.EPS["float32"] * seq if kind == "alibi" else CAP * 2.0**-20)
    bound = harness.attention_bound(q, k, v, dtype) + extra * float(np.abs(harness.wide(v)).max())
    return harness.compare(f"flash score mod, {kind}", got, want, bound)


if __name__ == "__main__":
    harness.main(check)
