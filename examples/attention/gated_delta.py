"""Gated delta rule, forward in chunks: a linear attention that overwrites what it stored under a key.

    state_t = alpha_t (state_(t-1) - beta_t k_t (k_t^T state_(t-1))) + beta_t k_t v_t^T,      o_t = state_t^T q_t

Within a chunk, with g_t the running sum of log alpha, every step writes beta_t k_t w_t^T with a corrected value w_t, and the w
of a chunk solve a lower triangular system:
    (I + L) w = v - exp(g) (k state),      L_ts = (k_t . k_s) exp(g_t - g_s) beta_s for s < t.
Its columns are independent, so each thread solves its own by forward substitution, in float32.  The rest is as in
retention.py: three products on the tensor cores, and a state that stays in registers.  The states before each chunk and w are
kept when gradients will be asked for (gated_delta_backward.py).
"""

import attention_harness as harness
from attention_harness import LOG2E
from delta_rule import check_forward, solve

import tilelang.language as T


def gated_delta(batch, heads, seq, dim_k, dim_v, keep=False, chunk=32, bv=32, dtype="float16", threads=128):
    """Q, K (batch, seq, heads, dim_k) with rows of K normalised; log_alpha, beta (batch, heads, seq) float32.

    before, W: empty unless `keep`.
    """
    chunks = T.ceildiv(seq, chunk)
    key, value, row = (batch, seq, heads, dim_k), (batch, seq, heads, dim_v), (batch, heads, seq)
    states = (batch, heads, chunks if keep else 0, dim_k, dim_v)

    @T.prim_func
    def delta(Q: T.Tensor(key, dtype), K: T.Tensor(key, dtype), V: T.Tensor(value, dtype), log_alpha: T.Tensor(row, "float32"),
              beta: T.Tensor(row, "float32"), O: T.Tensor(value, dtype), before: T.Tensor(states, dtype),
              W: T.Tensor((batch, seq if keep else 0, heads, dim_v), dtype)):
        with T.Kernel(T.ceildiv(dim_v, bv), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((chunk, dim_k), dtype)
            Ks = T.alloc_shared((chunk, dim_k), dtype)
            Kd = T.alloc_shared((chunk, dim_k), dtype)
            Vs = T.alloc_shared((chunk, bv), dtype)
            Ss = T.alloc_shared((dim_k, bv), dtype)
            L = T.alloc_shared((chunk, chunk), "float32")
            w = T.alloc_shared((chunk, bv), "float32")
            Us = T.alloc_shared((chunk, bv), dtype)
            g = T.alloc_shared((chunk,), "float32")
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
                T.copy(log_alpha[b, h, c * chunk:(c + 1) * chunk], g)
                T.copy(beta[b, h, c * chunk:(c + 1) * chunk], bt)
                T.cumsum(g, dim=0)
                T.copy(state, Ss)

                T.gemm(Ks, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    L[i, j] = S[i, j] * bt[j] * T.exp2((g[i] - g[j]) * LOG2E) if j < i else 0.0
                T.gemm(Ks, Ss, past, clear_accum=True)
                for i, j in T.Parallel(chunk, bv):
                    w[i, j] = Vs[i, j] - T.exp2(g[i] * LOG2E) * past[i, j]
                solve(L, w, chunk, bv)
                for i, j in T.Parallel(chunk, bv):
                    Us[i, j] = bt[i] * w[i, j]
                if keep:
                    T.copy(Ss, before[b, h, c, :, bx * bv:(bx + 1) * bv])
                    T.copy(w, W[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])

                T.gemm(Qs, Ss, o, clear_accum=True)
                for i, j in T.Parallel(chunk, bv):
                    o[i, j] *= T.exp2(g[i] * LOG2E)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    S[i, j] = T.if_then_else(j <= i, S[i, j] * T.exp2((g[i] - g[j]) * LOG2E), 0.0)
                T.copy(S, Sh)
                T.gemm(Sh, Us, o)
                T.copy(o, O[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])

                for i, j in T.Parallel(chunk, dim_k):
                    Kd[i, j] = Ks[i, j] * T.exp2((g[chunk - 1] - g[i]) * LOG2E)
                for i, j in T.Parallel(dim_k, bv):
                    state[i, j] *= T.exp2(g[chunk - 1] * LOG2E)
                T.gemm(Kd, Us, state, transpose_A=True)

    return delta


def check(batch=1, heads=32, seq=1024, dim_k=128, dim_v=128, chunk=32, dtype="bfloat16", seed=0, on=harness.HERE):
    return check_forward("gated delta", gated_delta, (batch, heads, seq, dim_k, dim_v), chunk, dtype, seed, on)


if __name__ == "__main__":
    harness.main(check)
