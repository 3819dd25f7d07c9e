"""Retention: linear attention with a decay, computed in chunks.

    o_t = sum over s <= t of gamma^(t - s) (q_t . k_s) v_s

is a recurrence over a state of dim x dim, state_t = gamma state_(t-1) + k_t v_t^T.  Step by step it would use no tensor
core.  In chunks of C steps it is three products: what the chunk sees of itself (masked scores times values), what it sees
of the past (queries times the state), and the step of the state by a whole chunk.  The state stays in registers for the
whole sequence, in float32; each head and each part of the value columns is one block.
"""

import attention_harness as harness
import numpy as np

import tilelang.language as T


def retention(batch, heads, seq, dim_k, dim_v, chunk=64, bv=64, stages=2, dtype="float16", threads=128):
    """(batch, seq, heads, dim) tensors; log_gamma (heads,) holds log2 of each head's decay."""

    @T.prim_func
    def retain(Q: T.Tensor((batch, seq, heads, dim_k), dtype), K: T.Tensor((batch, seq, heads, dim_k), dtype),
               V: T.Tensor((batch, seq, heads, dim_v), dtype), log_gamma: T.Tensor((heads,), "float32"),
               O: T.Tensor((batch, seq, heads, dim_v), dtype)):
        with T.Kernel(T.ceildiv(dim_v, bv), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((chunk, dim_k), dtype)
            Ks = T.alloc_shared((chunk, dim_k), dtype)
            Vs = T.alloc_shared((chunk, bv), dtype)
            Ss = T.alloc_shared((dim_k, bv), dtype)
            state = T.alloc_fragment((dim_k, bv), "float32")
            S = T.alloc_fragment((chunk, chunk), "float32")
            Sh = T.alloc_fragment((chunk, chunk), dtype)
            Kd = T.alloc_shared((chunk, dim_k), dtype)
            o = T.alloc_fragment((chunk, bv), "float32")
            g = log_gamma[h]
            T.clear(state)
            for c in T.Pipelined(T.ceildiv(seq, chunk), num_stages=stages):
                T.copy(Q[b, c * chunk:(c + 1) * chunk, h, :], Qs)
                T.copy(K[b, c * chunk:(c + 1) * chunk, h, :], Ks)
                T.copy(V[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv], Vs)
                T.copy(state, Ss)
                T.gemm(Qs, Ss, o, clear_accum=True)
                for i, j in T.Parallel(chunk, bv):
                    o[i, j] *= T.exp2(g * T.cast(i + 1, "float32"))
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    S[i, j] = T.if_then_else(j <= i, S[i, j] * T.exp2(g * T.cast(i - j, "float32")), 0.0)
                T.copy(S, Sh)
                T.gemm(Sh, Vs, o)
                T.copy(o, O[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])
                for i, j in T.Parallel(chunk, dim_k):
                    Kd[i, j] = Ks[i, j] * T.exp2(g * T.cast(chunk - 1 - i, "float32"))
                for i, j in T.Parallel(dim_k, bv):
                    state[i, j] *= T.exp2(g * chunk)
                T.gemm(Kd, Vs, state, transpose_A=True)

    return retain


def check(batch=2, heads=8, seq=2048, dim_k=128, dim_v=256, chunk=64, dtype="bfloat16", seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    q, k = (harness.random(rng, (batch, seq, heads, dim_k), dtype, dim_k**-0.25) for _ in range(2))
    v = harness.random(rng, (batch, seq, heads, dim_v), dtype)
    log_gamma = np.log2(1 - 2.0**(-4 - np.arange(heads))).astype(np.float32)
    got, = harness.run(retention(batch, heads, seq, dim_k, dim_v, chunk, dtype=dtype), [q, k, v, log_gamma], [4], on)

    gamma = 2.0**harness.wide(log_gamma)[None, :, None, None]
    qw, kw, vw = (harness.wide(x) for x in (q, k, v))
    want, spread = np.zeros_like(vw), np.zeros_like(vw)
    state = np.zeros((batch, heads, dim_k, dim_v))
    squares = np.zeros_like(state)  # the same recurrence of squares: what roundings of decayed keys add up to
    for t in range(seq):
        step = kw[:, t, :, :, None] * vw[:, t, :, None, :]
        state, squares = gamma * state + step, gamma**2 * squares + step**2
        want[:, t] = (qw[:, t, :, None, :] @ state)[:, :, 0]
        spread[:, t] = (qw[:, t, :, None, :]**2 @ (squares + state**2))[:, :, 0]
    apart = np.arange(seq)[:, None] - np.arange(seq)
    scores = np.einsum("bthk,bshk->bhts", qw, kw) * np.where(apart >= 0, gamma**np.maximum(apart, 0), 0)
    spread += (scores**2 @ vw.transpose(0, 2, 1, 3)**2).transpose(0, 2, 1, 3)
    # Decayed keys, the state where q reads it, and scores are rounded to `dtype`.  Roundings are independent: they add up
    # like the root of their squares, and a result is within four standard deviations; it is rounded once more.
    eps = harness.EPS[dtype]
    bound = eps * (4 * np.sqrt(spread) + np.abs(want)) + 2.0**-24
    return harness.compare("retention", got, want, bound)


if __name__ == "__main__":
    harness.main(check)
