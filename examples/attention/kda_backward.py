"""Gradients of Kimi delta attention, in chunks: gated_delta_backward.py with a decay for every channel of the key.

Decays are in the operands, as in kda.py: `later` is what a step reads with, times exp(g - m), `earlier` what it writes
with, times exp(m - g), and m is g in the middle of the chunk.  What comes from other chunks is brought to the same measure,
exp(m) or exp(g_last - m), before the products inside the chunk are added; the whole is scaled by exp(g - m) or
exp(m - g) at the end:
    dq = exp(g - m) (exp(m) (do state^T) + A (k exp(m - g)))         and likewise for both parts of dk.
The gradient of g has a number for every channel, the products that gated_delta_backward.py adds up over them:
    dg_t = q_t dq_t + k_t dk_read_t - k_t dk_write_t.
"""

import attention_harness as harness
from attention_harness import LOG2E
from delta_rule import check_backward, products_of_values, solve_transposed
from kda import kda

import tilelang.language as T


def kda_backward(batch, heads, seq, dim_k, dim_v, chunk=32, bv=32, dtype="bfloat16", threads=128):
    """Tensors as in kda, `before` and W as it keeps them.  after, R: scratch; gradients are shaped as their tensors."""
    chunks, mid, end = T.ceildiv(seq, chunk), chunk // 2, chunk - 1
    key, value, row = (batch, seq, heads, dim_k), (batch, seq, heads, dim_v), (batch, heads, seq)
    states = (batch, heads, chunks, dim_k, dim_v)

    @T.prim_func
    def gradients(Q: T.Tensor(key, dtype), K: T.Tensor(key, dtype), log_alpha: T.Tensor(key, "float32"),
                  beta: T.Tensor(row, "float32"), before: T.Tensor(states, dtype), W: T.Tensor(value, dtype),
                  dO: T.Tensor(value, dtype), after: T.Tensor(states, dtype), R: T.Tensor(value, dtype),
                  dQ: T.Tensor(key, dtype), dK: T.Tensor(key, dtype), dV: T.Tensor(value, dtype),
                  dlog_alpha: T.Tensor(key, "float32"), dbeta: T.Tensor(row, "float32")):
        with T.Kernel(T.ceildiv(dim_v, bv), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((chunk, dim_k), dtype)
            Ks = T.alloc_shared((chunk, dim_k), dtype)
            g = T.alloc_shared((chunk, dim_k), "float32")
            later = T.alloc_shared((chunk, dim_k), dtype)
            earlier = T.alloc_shared((chunk, dim_k), dtype)
            dOs = T.alloc_shared((chunk, bv), dtype)
            minus_dv = T.alloc_shared((chunk, bv), dtype)
            Gs = T.alloc_shared((dim_k, bv), dtype)
            L = T.alloc_shared((chunk, chunk), "float32")
            r = T.alloc_shared((chunk, bv), "float32")
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
                T.copy(log_alpha[b, c * chunk:(c + 1) * chunk, h, :], g)
                T.copy(beta[b, h, c * chunk:(c + 1) * chunk], bt)
                T.cumsum(g, dim=0)
                T.copy(G, Gs)
                T.copy(Gs, after[b, h, c, :, bx * bv:(bx + 1) * bv])

                for i, d in T.Parallel(chunk, dim_k):
                    earlier[i, d] = Ks[i, d] * T.exp2((g[mid, d] - g[i, d]) * LOG2E)
                for i, d in T.Parallel(chunk, dim_k):
                    later[i, d] = Ks[i, d] * T.exp2((g[i, d] - g[mid, d]) * LOG2E)
                T.gemm(later, earlier, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    L[i, j] = S[i, j] * bt[i] if j < i else 0.0
                for i, d in T.Parallel(chunk, dim_k):
                    later[i, d] = Qs[i, d] * T.exp2((g[i, d] - g[mid, d]) * LOG2E)
                T.gemm(earlier, later, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    Sh[i, j] = T.if_then_else(j >= i, S[i, j], 0.0)
                for i, d in T.Parallel(chunk, dim_k):
                    earlier[i, d] = Ks[i, d] * T.exp2((g[end, d] - g[i, d]) * LOG2E)
                T.gemm(earlier, Gs, du, clear_accum=True)
                T.gemm(Sh, dOs, du)
                T.copy(du, r)
                solve_transposed(L, r, chunk, bv)
                T.copy(r, R[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])
                for i, j in T.Parallel(chunk, bv):
                    r[i, j] *= bt[i]
                T.copy(r, dV[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])

                for i, j in T.Parallel(chunk, bv):
                    minus_dv[i, j] = -r[i, j]
                for d, j in T.Parallel(dim_k, bv):
                    G[d, j] *= T.exp2(g[end, d] * LOG2E)
                for i, d in T.Parallel(chunk, dim_k):
                    later[i, d] = Qs[i, d] * T.exp2(g[i, d] * LOG2E)
                T.gemm(later, dOs, G, transpose_A=True)
                for i, d in T.Parallel(chunk, dim_k):
                    later[i, d] = Ks[i, d] * T.exp2(g[i, d] * LOG2E)
                T.gemm(later, minus_dv, G, transpose_A=True)

        with T.Kernel(chunks, heads, batch, threads=2 * threads) as (c, h, b):
            Qs = T.alloc_shared((chunk, dim_k), dtype)
            Ks = T.alloc_shared((chunk, dim_k), dtype)
            g = T.alloc_shared((chunk, dim_k), "float32")
            dg = T.alloc_shared((chunk, dim_k), "float32")
            scaled = T.alloc_shared((chunk, dim_k), dtype)
            dOs = T.alloc_shared((chunk, bv), dtype)
            dVs = T.alloc_shared((chunk, bv), dtype)
            Us = T.alloc_shared((chunk, bv), dtype)
            Ss = T.alloc_shared((dim_k, bv), dtype)
            Gs = T.alloc_shared((dim_k, bv), dtype)
            As = T.alloc_shared((chunk, chunk), dtype)
            Bs = T.alloc_shared((chunk, chunk), dtype)
            bt = T.alloc_shared((chunk,), "float32")
            A = T.alloc_fragment((chunk, chunk), "float32")
            B = T.alloc_fragment((chunk, chunk), "float32")
            dq = T.alloc_fragment((chunk, dim_k), "float32")
            read = T.alloc_fragment((chunk, dim_k), "float32")
            write = T.alloc_fragment((chunk, dim_k), "float32")
            rw = T.alloc_fragment((chunk, bv), "float32")
            db = T.alloc_fragment((chunk,), "float32")
            edges = T.alloc_fragment((dim_k,), "float32")
            last = T.alloc_shared((dim_k,), "float32")
            T.copy(Q[b, c * chunk:(c + 1) * chunk, h, :], Qs)
            T.copy(K[b, c * chunk:(c + 1) * chunk, h, :], Ks)
            T.copy(log_alpha[b, c * chunk:(c + 1) * chunk, h, :], g)
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
                As[i, j] = T.if_then_else(j <= i, A[i, j], 0.0)
                Bs[i, j] = T.if_then_else(j < i, -B[i, j], 0.0)
            for i, d in T.Parallel(chunk, dim_k):
                dg[i, d] = Ks[i, d] * write[i, d] * T.exp2((g[end, d] - g[i, d]) * LOG2E)
            for d in T.Parallel(dim_k):
                edges[d] *= T.exp2(g[end, d] * LOG2E)
            T.reduce_sum(dg, edges, dim=0, clear=False)  # G * (state after the chunk), channel by channel
            for i, d in T.Parallel(chunk, dim_k):
                dq[i, d] *= T.exp2(g[mid, d] * LOG2E)
                read[i, d] *= -T.exp2(g[mid, d] * LOG2E)
                write[i, d] *= T.exp2((g[end, d] - g[mid, d]) * LOG2E)
            for i, d in T.Parallel(chunk, dim_k):
                scaled[i, d] = Ks[i, d] * T.exp2((g[mid, d] - g[i, d]) * LOG2E)
            T.gemm(As, scaled, dq)
            T.gemm(Bs, scaled, read)
            for i, d in T.Parallel(chunk, dim_k):
                scaled[i, d] = Qs[i, d] * T.exp2((g[i, d] - g[mid, d]) * LOG2E)
            T.gemm(As, scaled, write, transpose_A=True)
            for i, d in T.Parallel(chunk, dim_k):
                scaled[i, d] = Ks[i, d] * T.exp2((g[i, d] - g[mid, d]) * LOG2E)
            T.gemm(Bs, scaled, write, transpose_A=True)

            for i, d in T.Parallel(chunk, dim_k):
                dq[i, d] *= T.exp2((g[i, d] - g[mid, d]) * LOG2E)
                read[i, d] *= T.exp2((g[i, d] - g[mid, d]) * LOG2E)
                write[i, d] *= T.exp2((g[mid, d] - g[i, d]) * LOG2E)
                dg[i, d] = Qs[i, d] * dq[i, d] + Ks[i, d] * (read[i, d] - write[i, d])
                read[i, d] += write[i, d]
            T.cumsum(dg, dim=0, reverse=True)
            T.copy(edges, last)
            for i, d in T.Parallel(chunk, dim_k):
                dlog_alpha[b, c * chunk + i, h, d] = dg[i, d] + last[d]
            T.copy(dq, dQ[b, c * chunk:(c + 1) * chunk, h, :])
            T.copy(read, dK[b, c * chunk:(c + 1) * chunk, h, :])

    return gradients


def check(batch=1, heads=16, seq=1024, dim_k=128, dim_v=128, chunk=32, dtype="bfloat16", seed=0, on=harness.HERE):
    sizes = batch, heads, seq, dim_k, dim_v
    return check_backward("kda backward", kda, kda_backward, sizes, chunk, dtype, seed, on, channels=True)


if __name__ == "__main__":
    harness.main(check)
