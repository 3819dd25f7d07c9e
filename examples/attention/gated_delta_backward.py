"""Gradients of the gated delta rule, in chunks.

The forward pass (gated_delta.py) kept the states before each chunk and the corrected values w.  G_t, the gradient of state_t,
is itself the state of a delta rule that walks from the end to the start, so its chunks are computed alike.  With
U = beta w, E_ts = exp(g_t - g_s), G the gradient of the state after the chunk, and R the gradient of U:
    (I + L)^T R = (scores)^T do + (k exp(g_last - g)) G,      L_ts = beta_t (k_t . k_s) E_ts for s < t
    dv = beta R
    G <- exp(g_last) G + (q exp(g))^T do - (k exp(g))^T dv.
A key has two parts: it reads (k_t^T state), and it writes (k_t w_t^T).  With A = (do U^T) E for s <= t and
B = -(dv U^T) E for s < t,
    dq = exp(g) (do state^T) + A k,
    dk = dk_read + dk_write = -exp(g) (dv state^T) + B k + exp(g_last - g) (U G^T) + A^T q + B^T k.
exp(g_t) stands beside everything that step t reads with and exp(-g_t) beside everything it writes, hence
    dg_t = q_t . dq_t + k_t . dk_read_t - k_t . dk_write_t,
and log alpha_t is in g_t and all later ones: within a chunk a sum from the end, beyond it the sum of
G * (state after the chunk).

Two kernels: one walks back for R and G, a block a part of the value columns; the other has a block for every chunk.
"""

import attention_harness as harness
from attention_harness import LOG2E
from delta_rule import check_backward, products_of_values, solve_transposed
from gated_delta import gated_delta

import tilelang.language as T


def gated_delta_backward(batch, heads, seq, dim_k, dim_v, chunk=32, bv=32, dtype="float16", threads=128):
    """Tensors as in gated_delta, `before` and W as it keeps them.  after, R: scratch; gradients are shaped as their tensors."""
    chunks = T.ceildiv(seq, chunk)
    key, value, row = (batch, seq, heads, dim_k), (batch, seq, heads, dim_v), (batch, heads, seq)
    states = (batch, heads, chunks, dim_k, dim_v)

    @T.prim_func
    def gradients(Q: T.Tensor(key, dtype), K: T.Tensor(key, dtype), log_alpha: T.Tensor(row, "float32"),
                  beta: T.Tensor(row, "float32"), before: T.Tensor(states, dtype), W: T.Tensor(value, dtype),
                  dO: T.Tensor(value, dtype), after: T.Tensor(states, dtype), R: T.Tensor(value, dtype),
                  dQ: T.Tensor(key, dtype), dK: T.Tensor(key, dtype), dV: T.Tensor(value, dtype),
                  dlog_alpha: T.Tensor(row, "float32"), dbeta: T.Tensor(row, "float32")):
        with T.Kernel(T.ceildiv(dim_v, bv), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((chunk, dim_k), dtype)
            Ks = T.alloc_shared((chunk, dim_k), dtype)
            Qd = T.alloc_shared((chunk, dim_k), dtype)
            Kd = T.alloc_shared((chunk, dim_k), dtype)
            dOs = T.alloc_shared((chunk, bv), dtype)
            minus_dv = T.alloc_shared((chunk, bv), dtype)
            Gs = T.alloc_shared((dim_k, bv), dtype)
            L = T.alloc_shared((chunk, chunk), "float32")
            r = T.alloc_shared((chunk, bv), "float32")
            g = T.alloc_shared((chunk,), "float32")
            bt = T.alloc_shared((chunk,), "float32")
            G = T.alloc_fragment((dim_k, bv), "float32")
            S = T.alloc_fragment((chunk, chunk), "float32")
            Sh = T.alloc_fragment((chunk, chunk), dtype)
            du = T.alloc_fragment((chunk, bv), "float32")
            T.clear(G)
            for step in T.serial(chunks):
                c = chunks - 1 - step
                T.copy(Q[b, c * chunk:(c + 1) * chunk, h, :], Qs)
                T.copy(K[b, c * chunk:(c + 1) * chunk, h, :], Ks)
                T.copy(dO[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv], dOs)
                T.copy(log_alpha[b, h, c * chunk:(c + 1) * chunk], g)
                T.copy(beta[b, h, c * chunk:(c + 1) * chunk], bt)
                T.cumsum(g, dim=0)
                T.copy(G, Gs)
                T.copy(Gs, after[b, h, c, :, bx * bv:(bx + 1) * bv])

                for i, j in T.Parallel(chunk, dim_k):
                    Kd[i, j] = Ks[i, j] * T.exp2((g[chunk - 1] - g[i]) * LOG2E)
                T.gemm(Kd, Gs, du, clear_accum=True)
                T.gemm(Ks, Qs, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    Sh[i, j] = T.if_then_else(j >= i, S[i, j] * T.exp2((g[j] - g[i]) * LOG2E), 0.0)
                T.gemm(Sh, dOs, du)
                T.copy(du, r)
                T.gemm(Ks, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    L[i, j] = S[i, j] * bt[i] * T.exp2((g[i] - g[j]) * LOG2E) if j < i else 0.0
                solve_transposed(L, r, chunk, bv)
                T.copy(r, R[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])
                for i, j in T.Parallel(chunk, bv):
                    r[i, j] *= bt[i]
                T.copy(r, dV[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])

                for i, j in T.Parallel(chunk, bv):
                    minus_dv[i, j] = -r[i, j]
                for i, j in T.Parallel(chunk, dim_k):
                    Qd[i, j] = Qs[i, j] * T.exp2(g[i] * LOG2E)
                    Kd[i, j] = Ks[i, j] * T.exp2(g[i] * LOG2E)
                for i, j in T.Parallel(dim_k, bv):
                    G[i, j] *= T.exp2(g[chunk - 1] * LOG2E)
                T.gemm(Qd, dOs, G, transpose_A=True)
                T.gemm(Kd, minus_dv, G, transpose_A=True)

        with T.Kernel(chunks, heads, batch, threads=threads) as (c, h, b):
            Qs = T.alloc_shared((chunk, dim_k), dtype)
            Ks = T.alloc_shared((chunk, dim_k), dtype)
            dOs = T.alloc_shared((chunk, bv), dtype)
            dVs = T.alloc_shared((chunk, bv), dtype)
            Us = T.alloc_shared((chunk, bv), dtype)
            Ss = T.alloc_shared((dim_k, bv), dtype)
            Gs = T.alloc_shared((dim_k, bv), dtype)
            As = T.alloc_shared((chunk, chunk), dtype)
            Bs = T.alloc_shared((chunk, chunk), dtype)
            g = T.alloc_shared((chunk,), "float32")
            dg = T.alloc_shared((chunk,), "float32")
            bt = T.alloc_shared((chunk,), "float32")
            A = T.alloc_fragment((chunk, chunk), "float32")
            B = T.alloc_fragment((chunk, chunk), "float32")
            dq = T.alloc_fragment((chunk, dim_k), "float32")
            read = T.alloc_fragment((chunk, dim_k), "float32")
            write = T.alloc_fragment((chunk, dim_k), "float32")
            along = T.alloc_fragment((chunk, dim_k), "float32")
            steps = T.alloc_fragment((chunk,), "float32")
            rw = T.alloc_fragment((chunk, bv), "float32")
            db = T.alloc_fragment((chunk,), "float32")
            edges = T.alloc_fragment((dim_k,), "float32")
            edge = T.alloc_fragment((1,), "float32")
            last = T.alloc_shared((1,), "float32")
            T.copy(Q[b, c * chunk:(c + 1) * chunk, h, :], Qs)
            T.copy(K[b, c * chunk:(c + 1) * chunk, h, :], Ks)
            T.copy(log_alpha[b, h, c * chunk:(c + 1) * chunk], g)
            T.copy(beta[b, h, c * chunk:(c + 1) * chunk], bt)
            T.cumsum(g, dim=0)
            T.clear(A)
            T.clear(B)
            T.clear(dq)
            T.clear(read)
            T.clear(write)
            T.clear(db)
            T.clear(edges)
            for p in T.serial(T.ceildiv(dim_v, bv)):
                T.copy(dO[b, c * chunk:(c + 1) * chunk, h, p * bv:(p + 1) * bv], dOs)
                T.copy(dV[b, c * chunk:(c + 1) * chunk, h, p * bv:(p + 1) * bv], dVs)
                T.copy(W[b, c * chunk:(c + 1) * chunk, h, p * bv:(p + 1) * bv], Us)
                T.copy(R[b, c * chunk:(c + 1) * chunk, h, p * bv:(p + 1) * bv], rw)
                T.copy(before[b, h, c, :, p * bv:(p + 1) * bv], Ss)
                T.copy(after[b, h, c, :, p * bv:(p + 1) * bv], Gs)
                products_of_values(dOs, dVs, Us, bt, rw, Ss, Gs, A, B, dq, read, write, db, edges)
            T.copy(db, dbeta[b, h, c * chunk:(c + 1) * chunk])

            for i, j in T.Parallel(chunk, chunk):
                As[i, j] = T.if_then_else(j <= i, A[i, j] * T.exp2((g[i] - g[j]) * LOG2E), 0.0)
                Bs[i, j] = T.if_then_else(j < i, -B[i, j] * T.exp2((g[i] - g[j]) * LOG2E), 0.0)
            for i, j in T.Parallel(chunk, dim_k):
                dq[i, j] *= T.exp2(g[i] * LOG2E)
                read[i, j] *= -T.exp2(g[i] * LOG2E)
                write[i, j] *= T.exp2((g[chunk - 1] - g[i]) * LOG2E)
                along[i, j] = Ks[i, j] * write[i, j]
            for i in T.Parallel(dim_k):
                edges[i] *= T.exp2(g[chunk - 1] * LOG2E)
            T.reduce_sum(along, edges, dim=0, clear=False)  # G * (state after the chunk)
            T.gemm(As, Ks, dq)
            T.gemm(Bs, Ks, read)
            T.gemm(As, Qs, write, transpose_A=True)
            T.gemm(Bs, Ks, write, transpose_A=True)

            for i, j in T.Parallel(chunk, dim_k):
                along[i, j] = Qs[i, j] * dq[i, j] + Ks[i, j] * (read[i, j] - write[i, j])
                read[i, j] += write[i, j]
            T.reduce_sum(along, steps, dim=1)
            T.copy(steps, dg)
            T.cumsum(dg, dim=0, reverse=True)
            T.reduce_sum(edges, edge)
            T.copy(edge, last)
            for i in T.Parallel(chunk):
                dlog_alpha[b, h, c * chunk + i] = dg[i] + last[0]
            T.copy(dq, dQ[b, c * chunk:(c + 1) * chunk, h, :])
            T.copy(read, dK[b, c * chunk:(c + 1) * chunk, h, :])

    return gradients


def check(batch=1, heads=16, seq=1024, dim_k=128, dim_v=128, chunk=32, dtype="bfloat16", seed=0, on=harness.HERE):
    sizes = batch, heads, seq, dim_k, dim_v
    return check_backward("gated delta backward", gated_delta, gated_delta_backward, sizes, chunk, dtype, seed, on)


if __name__ == "__main__":
    harness.main(check)
