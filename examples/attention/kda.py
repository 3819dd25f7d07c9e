"""Kimi delta attention, forward in chunks: the gated delta rule with a decay of its own for every channel of the key.

    state_t = (I - beta_t k_t k_t^T) diag(alpha_t) state_(t-1) + beta_t k_t v_t^T,      o_t = state_t^T q_t

With g_t (dim_k numbers) the running sum of log alpha in a chunk, decays between two steps are exp(g_t - g_s), channel by
channel, and go into the operands of the products before they are made:
    (I + L) u = beta (v - (k exp(g)) state),    L_ts = beta_t (k_t exp(g_t - m)) . (k_s exp(m - g_s))  for s < t,
    o = (q exp(g)) state + (scores of the same form, s <= t) u,
    state <- exp(g_last) state + (k exp(g_last - g))^T u.
m is g in the middle of the chunk: it keeps both factors within exp(half a chunk's decay), where one of them alone would
overflow.  With bfloat16 and chunks of 32 that allows decays down to exp(-5) a step.  The triangular system is solved as in
gated_delta.py.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E

import tilelang.language as T


def kda(batch, heads, seq, dim_k, dim_v, chunk=32, bv=32, dtype="bfloat16", threads=128):
    """Q, K, log_alpha (batch, seq, heads, dim_k), rows of K normalised, log_alpha float32 and at most 0;
    beta (batch, heads, seq) float32; V, O (batch, seq, heads, dim_v)."""
    key = (batch, seq, heads, dim_k)

    @T.prim_func
    def delta(Q: T.Tensor(key, dtype), K: T.Tensor(key, dtype), V: T.Tensor((batch, seq, heads, dim_v), dtype),
              log_alpha: T.Tensor(key, "float32"), beta: T.Tensor((batch, heads, seq), "float32"),
              O: T.Tensor((batch, seq, heads, dim_v), dtype)):
        with T.Kernel(T.ceildiv(dim_v, bv), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((chunk, dim_k), dtype)
            Ks = T.alloc_shared((chunk, dim_k), dtype)
            Vs = T.alloc_shared((chunk, bv), dtype)
            g = T.alloc_shared((chunk, dim_k), "float32")
            later = T.alloc_shared((chunk, dim_k), dtype)  # of the step that reads, its decay since m or the chunk's start
            earlier = T.alloc_shared((chunk, dim_k), dtype)  # of the step that wrote, the decay until m or the chunk's end
            Ss = T.alloc_shared((dim_k, bv), dtype)
            L = T.alloc_shared((chunk, chunk), "float32")
            U = T.alloc_shared((chunk, bv), "float32")
            Uh = T.alloc_shared((chunk, bv), dtype)
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
                T.copy(log_alpha[b, c * chunk:(c + 1) * chunk, h, :], g)
                T.copy(beta[b, h, c * chunk:(c + 1) * chunk], bt)
                T.cumsum(g, dim=0)
                T.copy(state, Ss)

                for i, d in T.Parallel(chunk, dim_k):
                    earlier[i, d] = Ks[i, d] * T.exp2((g[chunk // 2, d] - g[i, d]) * LOG2E)
                for i, d in T.Parallel(chunk, dim_k):
                    later[i, d] = Ks[i, d] * T.exp2((g[i, d] - g[chunk // 2, d]) * LOG2E)
                T.gemm(later, earlier, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    L[i, j] = S[i, j] * bt[i] if j < i else 0.0
                for i, d in T.Parallel(chunk, dim_k):
                    later[i, d] = Qs[i, d] * T.exp2((g[i, d] - g[chunk // 2, d]) * LOG2E)
                T.gemm(later, earlier, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    Sh[i, j] = T.if_then_else(j <= i, S[i, j], 0.0)

                for i, d in T.Parallel(chunk, dim_k):
                    later[i, d] = Ks[i, d] * T.exp2(g[i, d] * LOG2E)
                T.gemm(later, Ss, u, clear_accum=True)
                for i, j in T.Parallel(chunk, bv):
                    U[i, j] = bt[i] * (Vs[i, j] - u[i, j])
                for i in T.serial(1, chunk):
                    for j in T.Parallel(bv):
                        for r in T.serial(i):
                            U[i, j] -= L[i, r] * U[r, j]
                T.copy(U, Uh)

                for i, d in T.Parallel(chunk, dim_k):
                    later[i, d] = Qs[i, d] * T.exp2(g[i, d] * LOG2E)
                T.gemm(later, Ss, o, clear_accum=True)
                T.gemm(Sh, Uh, o)
                T.copy(o, O[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])

                for i, d in T.Parallel(chunk, dim_k):
                    earlier[i, d] = Ks[i, d] * T.exp2((g[chunk - 1, d] - g[i, d]) * LOG2E)
                for d, j in T.Parallel(dim_k, bv):
                    state[d, j] *= T.exp2(g[chunk - 1, d] * LOG2E)
                T.gemm(earlier, Uh, state, transpose_A=True)

    return delta


def reference(q, k, v, log_alpha, beta):
    """The recurrence step by step in float64: (results, how roundings of 1 reach each result).

    Rounded to 16 bits are, for every step s, the corrected value u_s (or the operand that meets it), the state where q
    and k read it, and the decayed keys on both sides of a product.  An error of u_s reaches result t through the
    recurrence itself, by reach_ts; independent roundings add up like the root of their squares.
    """
    batch, seq, heads, dim_k = q.shape
    want, state = np.zeros_like(v), np.zeros((batch, heads, dim_k, v.shape[-1]))
    read, noise, spread = np.zeros_like(v), np.zeros_like(v), np.zeros_like(v)
    reply = harness.wide(np.zeros((batch, heads, dim_k, seq)))  # what an error of u_s has become in the state
    for t in range(seq):
        kt, qt, bt, decay = k[:, t], q[:, t], beta[:, :, t, None], np.exp(log_alpha[:, t])[..., None]
        past = decay * state
        u = bt * (v[:, t] - np.einsum("bhk,bhkv->bhv", kt, past))
        state = past + kt[..., :, None] * u[..., None, :]
        want[:, t] = np.einsum("bhkv,bhk->bhv", state, qt)
        reply = decay * reply
        reply = reply - (bt * kt)[..., None] * np.einsum("bhk,bhks->bhs", kt, reply)[..., None, :]
        reply[..., t] += kt
        read[:, t] = np.einsum("bhkv,bhk->bhv", state**2, qt**2)
        noise[:, t] = 9 * u**2 + 4 * bt**2 * np.einsum("bhkv,bhk->bhv", past**2, kt**2)
        reach = np.einsum("bhks,bhk->bhs", reply, qt)
        spread[:, t] = np.einsum("bhs,bshv->bhv", reach**2, noise)
    return want, np.sqrt(4 * read) + np.sqrt(spread)


def check(batch=1, heads=32, seq=1024, dim_k=128, dim_v=128, chunk=32, dtype="bfloat16", seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((batch, seq, heads, dim_k)) for _ in range(2))
    q, k = ((x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(harness.NUMPY[dtype]) for x in (q, k))
    v = harness.random(rng, (batch, seq, heads, dim_v), dtype)
    log_alpha = -np.abs(harness.random(rng, (batch, seq, heads, dim_k), "float32", 0.1))
    beta = rng.random((batch, heads, seq)).astype(np.float32)
    got, = harness.run(kda(batch, heads, seq, dim_k, dim_v, chunk, dtype=dtype), [q, k, v, log_alpha, beta], [5], on)
    want, spread = reference(*(harness.wide(x) for x in (q, k, v, log_alpha, beta)))
    eps = harness.EPS[dtype]
    return harness.compare("kda", got, want, eps * (4 * spread + np.abs(want)) + 2.0**-24)


if __name__ == "__main__":
    harness.main(check)
