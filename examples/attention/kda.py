"""Kimi delta attention, forward in chunks: the gated delta rule with a decay of its own for every channel of the key.

    state_t = (I - beta_t k_t k_t^T) diag(alpha_t) state_(t-1) + beta_t k_t v_t^T,      o_t = state_t^T q_t

With g_t (dim_k numbers) the running sum of log alpha in a chunk, decays between two steps are exp(g_t - g_s), channel by
channel, and go into the operands of the products before they are made:
    (I + L) w = v - (k exp(g)) state,           L_ts = (k_t exp(g_t - m)) . (k_s exp(m - g_s)) beta_s  for s < t,
    o = (q exp(g)) state + (scores of the same form, s <= t) (beta w),
    state <- exp(g_last) state + (k exp(g_last - g))^T (beta w).
m is g in the middle of the chunk: it keeps both factors within exp(half a chunk's decay), where one of them alone would
overflow.  With bfloat16 and chunks of 32 that allows decays down to exp(-5) a step.  The triangular system is solved as in
gated_delta.py, and what gradients need is kept in the same form (kda_backward.py).
"""

import attention_harness as harness
from attention_harness import LOG2E
from delta_rule import check_forward, solve

import tilelang.language as T


def kda(batch, heads, seq, dim_k, dim_v, keep=False, chunk=32, bv=32, dtype="bfloat16", threads=128):
    """Q, K, log_alpha (batch, seq, heads, dim_k), rows of K normalised, log_alpha float32 and at most 0;
    beta (batch, heads, seq) float32; V, O (batch, seq, heads, dim_v).  before, W: empty unless `keep`."""
    chunks = T.ceildiv(seq, chunk)
    key, value = (batch, seq, heads, dim_k), (batch, seq, heads, dim_v)
    states = (batch, heads, chunks if keep else 0, dim_k, dim_v)

    @T.prim_func
    def delta(Q: T.Tensor(key, dtype), K: T.Tensor(key, dtype), V: T.Tensor(value, dtype), log_alpha: T.Tensor(key, "float32"),
              beta: T.Tensor((batch, heads, seq), "float32"), O: T.Tensor(value, dtype), before: T.Tensor(states, dtype),
              W: T.Tensor((batch, seq if keep else 0, heads, dim_v), dtype)):
        with T.Kernel(T.ceildiv(dim_v, bv), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((chunk, dim_k), dtype)
            Ks = T.alloc_shared((chunk, dim_k), dtype)
            Vs = T.alloc_shared((chunk, bv), dtype)
            g = T.alloc_shared((chunk, dim_k), "float32")
            later = T.alloc_shared((chunk, dim_k), dtype)  # of the step that reads, its decay since m or the chunk's start
            earlier = T.alloc_shared((chunk, dim_k), dtype)  # of the step that wrote, the decay until m or the chunk's end
            Ss = T.alloc_shared((dim_k, bv), dtype)
            L = T.alloc_shared((chunk, chunk), "float32")
            w = T.alloc_shared((chunk, bv), "float32")
            Us = T.alloc_shared((chunk, bv), dtype)
            bt = T.alloc_shared((chunk,), "float32")
            state = T.alloc_fragment((dim_k, bv), "float32")
            S = T.alloc_fragment((chunk, chunk), "float32")
            Sh = T.alloc_fragment((chunk, chunk), dtype)
            o = T.alloc_fragment((chunk, bv), "float32")
            past = T.alloc_fragment((chunk, bv), "float32")
            T.clear(state)
            for c in T.serial(chunks):
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
                    L[i, j] = S[i, j] * bt[j] if j < i else 0.0
                for i, d in T.Parallel(chunk, dim_k):
                    later[i, d] = Qs[i, d] * T.exp2((g[i, d] - g[chunk // 2, d]) * LOG2E)
                T.gemm(later, earlier, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    Sh[i, j] = T.if_then_else(j <= i, S[i, j], 0.0)

                for i, d in T.Parallel(chunk, dim_k):
                    later[i, d] = Ks[i, d] * T.exp2(g[i, d] * LOG2E)
                T.gemm(later, Ss, past, clear_accum=True)
                for i, j in T.Parallel(chunk, bv):
                    w[i, j] = Vs[i, j] - past[i, j]
                solve(L, w, chunk, bv)
                for i, j in T.Parallel(chunk, bv):
                    Us[i, j] = bt[i] * w[i, j]
                if keep:
                    T.copy(Ss, before[b, h, c, :, bx * bv:(bx + 1) * bv])
                    T.copy(w, W[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])

                for i, d in T.Parallel(chunk, dim_k):
                    later[i, d] = Qs[i, d] * T.exp2(g[i, d] * LOG2E)
                T.gemm(later, Ss, o, clear_accum=True)
                T.gemm(Sh, Us, o)
                T.copy(o, O[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])

                for i, d in T.Parallel(chunk, dim_k):
                    earlier[i, d] = Ks[i, d] * T.exp2((g[chunk - 1, d] - g[i, d]) * LOG2E)
                for d, j in T.Parallel(dim_k, bv):
                    state[d, j] *= T.exp2(g[chunk - 1, d] * LOG2E)
                T.gemm(earlier, Us, state, transpose_A=True)

    return delta


def check(batch=1, heads=32, seq=1024, dim_k=128, dim_v=128, chunk=32, dtype="bfloat16", seed=0, on=harness.HERE):
    return check_forward("kda", kda, (batch, heads, seq, dim_k, dim_v), chunk, dtype, seed, on, channels=True)


if __name__ == "__main__":
    harness.main(check)
