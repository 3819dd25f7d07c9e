"""Gated delta rule, forward in chunks: a linear attention that overwrites what it stored under a key.

    state_t = alpha_t (state_(t-1) - beta_t k_t (k_t^T state_(t-1))) + beta_t k_t v_t^T,      o_t = state_t^T q_t

Within a chunk, with g_t the running sum of log alpha, every step writes k_t u_t^T with a corrected value u_t, and the u of
a chunk solve a lower triangular system:
    (I + L) u = beta (v - exp(g) k state),      L_ts = beta_t (k_t . k_s) exp(g_t - g_s) for s < t.
Its columns are independent, so each thread solves its own by forward substitution, in float32.  The rest is as in
retention.py: three products on the tensor cores, and a state that stays in registers.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E

import tilelang.language as T


def gated_delta(batch, heads, seq, dim_k, dim_v, chunk=32, bv=32, dtype="float16", threads=128):
    """Q, K (batch, seq, heads, dim_k) with rows of K normalised; log_alpha, beta (batch, heads, seq) float32."""

    @T.prim_func
    def delta(Q: T.Tensor((batch, seq, heads, dim_k), dtype), K: T.Tensor((batch, seq, heads, dim_k), dtype),
              V: T.Tensor((batch, seq, heads, dim_v), dtype), log_alpha: T.Tensor((batch, heads, seq), "float32"),
              beta: T.Tensor((batch, heads, seq), "float32"), O: T.Tensor((batch, seq, heads, dim_v), dtype)):
        with T.Kernel(T.ceildiv(dim_v, bv), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((chunk, dim_k), dtype)
            Ks = T.alloc_shared((chunk, dim_k), dtype)
            Kd = T.alloc_shared((chunk, dim_k), dtype)
            Vs = T.alloc_shared((chunk, bv), dtype)
            Ss = T.alloc_shared((dim_k, bv), dtype)
            L = T.alloc_shared((chunk, chunk), "float32")
            U = T.alloc_shared((chunk, bv), "float32")
            Uh = T.alloc_shared((chunk, bv), dtype)
            g = T.alloc_shared((chunk,), "float32")
            bt = T.alloc_shared((chunk,), "float32")
            state = T.alloc_fragment((dim_k, bv), "float32")
            S = T.alloc_fragment((chunk, chunk), "float32")
            Sh = T.alloc_fragment((chunk, chunk), dtype)
            o = T.alloc_fragment((chunk, bv), "float32")
            u = T.alloc_fragment((chunk, bv), "float32")
            T.clear(state)
            for c in T.serial(T.ceildiv(seq, chunk)):
                T.copy(Q[b, c * chunk:(c + 1) * chunk, h, :], Qs)
                T.copy(K[b, c * chunk:(c + 1) * chunk, h, :], Ks)
                T.copy(V[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv], Vs)
                T.copy(log_alpha[b, h, c * chunk:(c + 1) * chunk], g)
                T.copy(beta[b, h, c * chunk:(c + 1) * chunk], bt)
                T.cumsum(g, dim=0)
                T.copy(state, Ss)

                T.gemm(Ks, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    L[i, j] = S[i, j] * bt[i] * T.exp2((g[i] - g[j]) * LOG2E) if j < i else 0.0
                T.gemm(Ks, Ss, u, clear_accum=True)
                for i, j in T.Parallel(chunk, bv):
                    U[i, j] = bt[i] * (Vs[i, j] - T.exp2(g[i] * LOG2E) * u[i, j])
                for i in T.serial(1, chunk):
                    for j in T.Parallel(bv):
                        for r in T.serial(i):
                            U[i, j] -= L[i, r] * U[r, j]
                T.copy(U, Uh)

                T.gemm(Qs, Ss, o, clear_accum=True)
                for i, j in T.Parallel(chunk, bv):
                    o[i, j] *= T.exp2(g[i] * LOG2E)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    S[i, j] = T.if_then_else(j <= i, S[i, j] * T.exp2((g[i] - g[j]) * LOG2E), 0.0)
                T.copy(S, Sh)
                T.gemm(Sh, Uh, o)
                T.copy(o, O[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])

                for i, j in T.Parallel(chunk, dim_k):
                    Kd[i, j] = Ks[i, j] * T.exp2((g[chunk - 1] - g[i]) * LOG2E)
                for i, j in T.Parallel(dim_k, bv):
                    state[i, j] *= T.exp2(g[chunk - 1] * LOG2E)
                T.gemm(Kd, Uh, state, transpose_A=True)

    return delta


def check(batch=1, heads=32, seq=1024, dim_k=128, dim_v=128, chunk=32, dtype="bfloat16", seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((batch, seq, heads, dim_k)) for _ in range(2))
    q, k = ((x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32).astype(harness.NUMPY[dtype]) for x in (q, k))
    v = harness.random(rng, (batch, seq, heads, dim_v), dtype)
    log_alpha = -np.abs(harness.random(rng, (batch, heads, seq), "float32", 0.05))
    beta = rng.random((batch, heads, seq)).astype(np.float32)
    program = gated_delta(batch, heads, seq, dim_k, dim_v, chunk, dtype=dtype)
    got, = harness.run(program, [q, k, v, log_alpha, beta], [5], on)

    qw, kw, vw, gw, bw = (harness.wide(x) for x in (q, k, v, log_alpha, beta))
    want, state = np.zeros_like(vw), np.zeros((batch, heads, dim_k, dim_v))
    read_q, noise = np.zeros_like(vw), np.zeros_like(vw)  # of reading the rounded state; of a step's corrected values
    reply = harness.wide(np.zeros((batch, heads, dim_k, seq)))  # what an error of u_s has become in the state
    bound = np.zeros_like(vw)
    for t in range(seq):
        kt, qt, decay = kw[:, t], qw[:, t], np.exp(gw[:, :, t])[..., None, None]
        past = decay * state
        u = bw[:, :, t, None] * (vw[:, t] - np.einsum("bhk,bhkv->bhv", kt, past))
        state = past + kt[..., :, None] * u[..., None, :]
        want[:, t] = np.einsum("bhkv,bhk->bhv", state, qt)
        reply = decay * reply
        reply -= (bw[:, :, t, None] * kt)[..., None] * np.einsum("bhk,bhks->bhs", kt, reply)[..., None, :]
        reply[..., t] += kt
        read_q[:, t] = np.sqrt(np.einsum("bhkv,bhk->bhv", state**2, qt**2))
        noise[:, t] = 9 * u**2 + bw[:, :, t, None]**2 * np.einsum("bhkv,bhk->bhv", past**2, kt**2)
        reach = np.einsum("bhks,bhk->bhs", reply, qt)
        bound[:, t] = np.sqrt(np.einsum("bhs,bshv->bhv", reach**2, noise))
    # Rounded to `dtype` are the state where q and k read it, and on the way of every u to the result the u itself, the
    # score or the decayed key.  An error of u_s reaches result t through the recurrence itself, by reach_ts.  The
    # roundings are independent: they add up like the root of their squares, and a result is within four standard
    # deviations of that, beside its own rounding.
    eps = harness.EPS[dtype]
    bound = eps * (4 * (read_q + bound) + np.abs(want)) + 2.0**-24
    return harness.compare("gated delta", got, want, bound)


if __name__ == "__main__":
    harness.main(check)
