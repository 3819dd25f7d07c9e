"""In the manner of linear-attention libraries: retention, state space models, the gated delta rule."""

import numpy as np

import tilelang
import tilelang.language as T

from .catalogue import Bound, Program, drawn, dtype, uniform, wide

BF16, F16, F32 = "bfloat16", "float16", "float32"


def zeros(shape, name=F32):
    return np.zeros(shape, dtype(name))


@tilelang.jit(out_idx=[3])
def retention(batch, heads, seq, dim_qk, dim_v, block_m=32, block_n=32, block_v=32, threads=128):
    """softmax-free attention with a decay of each head, normalised by the absolute row sum."""

    @T.macro
    def decay(mask, bx, k, h):
        for i, j in T.Parallel(block_m, block_n):
            distance = bx * block_m + i - (k * block_n + j)
            gamma = 1.0 - T.exp2(T.cast(-5 - h, F32))
            mask[i, j] = T.if_then_else(distance >= 0, T.pow(gamma, T.cast(distance, F32)), 0.0)

    @T.prim_func
    def main(
        Q: T.Tensor((batch, seq, heads, dim_qk), F16),
        K: T.Tensor((batch, seq, heads, dim_qk), F16),
        V: T.Tensor((batch, seq, heads, dim_v), F16),
        O: T.Tensor((batch, seq, heads, dim_v), F16),
    ):
        with T.Kernel(T.ceildiv(seq, block_m) * T.ceildiv(dim_v, block_v), heads, batch, threads=threads) as (bx, by, bz):
            m_block = bx // T.ceildiv(dim_v, block_v)
            v_block = bx % T.ceildiv(dim_v, block_v)
            q = T.alloc_shared([block_m, dim_qk], F16)
            k_s = T.alloc_shared([block_n, dim_qk], F16)
            v = T.alloc_shared([block_n, block_v], F16)
            s = T.alloc_fragment([block_m, block_n], F32)
            mask = T.alloc_fragment([block_m, block_n], F32)
            p = T.alloc_fragment([block_m, block_n], F16)
            o = T.alloc_fragment([block_m, block_v], F32)
            norm = T.alloc_fragment([block_m], F32)
            T.copy(Q[bz, m_block * block_m : (m_block + 1) * block_m, by, :], q)
            T.clear(o)
            T.clear(norm)
            for k in T.Pipelined(T.ceildiv((m_block + 1) * block_m, block_n), num_stages=1):
                T.copy(K[bz, k * block_n : (k + 1) * block_n, by, :], k_s)
                T.clear(s)
                T.gemm(q, k_s, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                decay(mask, m_block, k, by)
                for i, j in T.Parallel(block_m, block_n):
                    s[i, j] *= mask[i, j]
                row = T.alloc_fragment([block_m], F32)
                T.reduce_abssum(s, row, dim=1)
                for i in T.Parallel(block_m):
                    norm[i] += row[i]
                T.copy(s, p)
                T.copy(V[bz, k * block_n : (k + 1) * block_n, by, v_block * block_v : (v_block + 1) * block_v], v)
                T.gemm(p, v, o, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_m, block_v):
                o[i, j] /= T.max(norm[i], 1.0)
            T.copy(o, O[bz, m_block * block_m : (m_block + 1) * block_m, by, v_block * block_v : (v_block + 1) * block_v])

    return main


def retention_reference(q, k, v):
    q, k, v = wide(q, k, v)
    s = np.einsum("bqhd,bkhd->bhqk", q, k)
    n = s.shape[2]
    gamma = 1 - 2.0 ** (-5 - np.arange(s.shape[1]))
    distance = np.arange(n)[:, None] - np.arange(n)
    s = s * np.where(distance >= 0, gamma[:, None, None] ** np.maximum(distance, 0), 0)
    o = np.einsum("bhqk,bkhd->bqhd", s, v)
    return o / np.maximum(np.abs(s).sum(3), 1).transpose(0, 2, 1)[..., None]


@tilelang.jit(out_idx=[4])
def ssd_chunk_state(batch, seq, chunk, groups, heads, headdim, dstate, block_m=32, block_n=32, block_k=32):
    n_chunks = T.ceildiv(seq, chunk)
    p = 1.44269504

    @T.prim_func
    def main(
        B: T.Tensor((batch, seq, groups, dstate), F16),
        x: T.Tensor((batch, seq, heads, headdim), F16),
        dt: T.Tensor((batch, heads, n_chunks, chunk), F16),
        dA_cumsum: T.Tensor((batch, heads, n_chunks, chunk), F16),
        Output: T.Tensor((batch, n_chunks, heads, headdim, dstate), F16),
    ):
        with T.Kernel(heads, T.ceildiv(headdim, block_m) * T.ceildiv(dstate, block_n), batch * n_chunks, threads=128) as (
            bz,
            bx,
            by,
        ):
            x_s = T.alloc_shared((block_k, block_m), F16)
            x_l = T.alloc_fragment((block_k, block_m), F16)
            xt = T.alloc_fragment((block_m, block_k), F16)
            B_s = T.alloc_shared((block_k, block_n), F16)
            dt_s = T.alloc_shared((block_k), F16)
            dA_s = T.alloc_shared((block_k), F16)
            acc = T.alloc_fragment((block_m, block_n), F32)
            scale = T.alloc_fragment((block_k), F32)
            dA_last = T.alloc_fragment((1), F32)
            dA_l = T.alloc_fragment((block_k), F32)
            dt_l = T.alloc_fragment((block_k), F32)
            batch_idx = by % batch
            chunk_idx = by // batch
            m_idx = bx // T.ceildiv(dstate, block_n)
            n_idx = bx % T.ceildiv(dstate, block_n)
            T.annotate_layout({x_s: tilelang.layout.make_swizzled_layout(x_s)})
            dA_last[0] = dA_cumsum[batch_idx, bz, chunk_idx, chunk - 1]
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(chunk, block_k), num_stages=2):
                T.copy(
                    x[
                        batch_idx,
                        chunk_idx * chunk + k * block_k : chunk_idx * chunk + (k + 1) * block_k,
                        bz,
                        m_idx * block_m : (m_idx + 1) * block_m,
                    ],
                    x_s,
                )
                T.copy(dA_cumsum[batch_idx, bz, chunk_idx, k * block_k : (k + 1) * block_k], dA_s)
                T.copy(dt[batch_idx, bz, chunk_idx, k * block_k : (k + 1) * block_k], dt_s)
                T.copy(dA_s, dA_l)
                T.copy(dt_s, dt_l)
                for i in T.Parallel(block_k):
                    scale[i] = T.exp2(dA_last[0] * p - dA_l[i] * p) * dt_l[i]
                T.copy(x_s, x_l)
                for i, j in T.Parallel(block_m, block_k):
                    xt[i, j] = x_l[j, i] * scale[j]
                T.copy(
                    B[
                        batch_idx,
                        chunk_idx * chunk + k * block_k : chunk_idx * chunk + (k + 1) * block_k,
                        bz // (heads // groups),
                        n_idx * block_n : (n_idx + 1) * block_n,
                    ],
                    B_s,
                )
                T.gemm(xt, B_s, acc)
            T.copy(
                acc,
                Output[
                    batch_idx, chunk_idx, bz, m_idx * block_m : (m_idx + 1) * block_m, n_idx * block_n : (n_idx + 1) * block_n
                ],
            )

    return main


def ssd_chunk_state_reference(B, x, dt, dA):
    B, x, dt, dA = wide(B, x, dt, dA)
    b, h, n, c = dt.shape
    B = np.repeat(B, h // B.shape[2], 2).reshape(b, n, c, h, -1)
    x = x.reshape(b, n, c, h, -1)
    scale = np.exp(dA[..., -1:] - dA) * dt
    return np.einsum("bnchs,bhnc,bnchp->bnhps", B, scale, x)


@tilelang.jit(out_idx=[6])
def ssd_chunk_scan(batch, seq, chunk, groups, heads, headdim, dstate, block_m=32, block_n=32, block_k=32):
    n_chunks = T.ceildiv(seq, chunk)
    p = 1.44269504

    @T.prim_func
    def main(
        cb: T.Tensor((batch, n_chunks, groups, chunk, chunk), F16),
        x: T.Tensor((batch, seq, heads, headdim), F16),
        dt: T.Tensor((batch, heads, n_chunks, chunk), F16),
        dA: T.Tensor((batch, heads, n_chunks, chunk), F16),
        C: T.Tensor((batch, seq, groups, dstate), F16),
        states: T.Tensor((batch, n_chunks, heads, headdim, dstate), F16),
        Output: T.Tensor((batch, seq, heads, headdim), F16),
    ):
        with T.Kernel(heads, T.ceildiv(chunk, block_m) * T.ceildiv(headdim, block_n), batch * n_chunks, threads=128) as (
            bz,
            bx,
            by,
        ):
            acc = T.alloc_fragment((block_m, block_n), F32)
            cb_s = T.alloc_shared((block_m, block_k), F16)
            cb_l = T.alloc_fragment((block_m, block_k), F16)
            dA_k = T.alloc_shared((block_k), F16)
            dA_k_l = T.alloc_fragment((block_k), F32)
            dA_m = T.alloc_fragment((block_m), F32)
            dt_s = T.alloc_shared((block_k), F16)
            dt_l = T.alloc_fragment((block_k), F32)
            x_s = T.alloc_shared((block_k, block_n), F16)
            C_s = T.alloc_shared((block_m, dstate), F16)
            st_s = T.alloc_shared((block_n, dstate), F16)
            b_i, c_i = by % batch, by // batch
            m_i = bx // T.ceildiv(headdim, block_n)
            n_i = bx % T.ceildiv(headdim, block_n)
            base = c_i * chunk
            T.copy(dA[b_i, bz, c_i, m_i * block_m : (m_i + 1) * block_m], dA_m)
            T.copy(C[b_i, base + m_i * block_m : base + (m_i + 1) * block_m, bz // (heads // groups), 0:dstate], C_s)
            T.copy(states[b_i, c_i, bz, n_i * block_n : (n_i + 1) * block_n, 0:dstate], st_s)
            T.gemm(C_s, st_s, acc, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(block_m, block_n):
                acc[i, j] *= T.exp2(dA_m[i] * p)
            for k in T.Pipelined(T.ceildiv((m_i + 1) * block_m, block_k), num_stages=2):
                T.copy(
                    cb[b_i, c_i, bz // (heads // groups), m_i * block_m : (m_i + 1) * block_m, k * block_k : (k + 1) * block_k],
                    cb_s,
                )
                T.copy(cb_s, cb_l)
                T.copy(dA[b_i, bz, c_i, k * block_k : (k + 1) * block_k], dA_k)
                T.copy(dA_k, dA_k_l)
                for i, j in T.Parallel(block_m, block_k):
                    cb_l[i, j] = cb_l[i, j] * T.exp2(dA_m[i] * p - dA_k_l[j] * p)
                T.copy(dt[b_i, bz, c_i, k * block_k : (k + 1) * block_k], dt_s)
                T.copy(dt_s, dt_l)
                for i, j in T.Parallel(block_m, block_k):
                    cb_l[i, j] *= dt_l[j]
                for i, j in T.Parallel(block_m, block_k):
                    cb_l[i, j] = T.if_then_else(m_i * block_m + i >= k * block_k + j, cb_l[i, j], 0)
                T.copy(x[b_i, base + k * block_k : base + (k + 1) * block_k, bz, n_i * block_n : (n_i + 1) * block_n], x_s)
                T.gemm(cb_l, x_s, acc)
            T.copy(acc, Output[b_i, base + m_i * block_m : base + (m_i + 1) * block_m, bz, n_i * block_n : (n_i + 1) * block_n])

    return main


def ssd_chunk_scan_reference(cb, x, dt, dA, C, states):
    cb, x, dt, dA, C, states = wide(cb, x, dt, dA, C, states)
    b, h, n, c = dt.shape
    per = h // C.shape[2]
    C = np.repeat(C, per, 2).reshape(b, n, c, h, -1)
    scores = np.repeat(cb, per, 2) * np.tril(np.exp(np.minimum(dA[..., :, None] - dA[..., None, :], 0))).transpose(
        0, 2, 1, 3, 4
    )
    scores = scores * dt.transpose(0, 2, 1, 3)[..., None, :]
    out = np.einsum("bnhij,bnjhp->bnihp", scores, x.reshape(b, n, c, h, -1))
    out += np.einsum("bnchs,bnhps,bhnc->bnchp", C, states, np.exp(dA))
    return out.reshape(x.shape)


@tilelang.jit
def state_passing(states, decay, initial, threads: int = 64):
    """h[c] = exp(decay[c]) * h[c - 1] + states[c], carried through the chunks; the last one goes to the caller."""
    B, C, H, D = T.const("B C H D")
    states: T.Tensor((B, C, H, D), F32)
    decay: T.Tensor((B, H, C), F32)
    initial: T.Tensor((B, H, D), F32)
    out = T.empty((B, C, H, D), F32)
    final = T.empty((B, H, D), F32)
    with T.Kernel(T.ceildiv(D, threads), H, B, threads=threads) as (bx, h, b):
        carry = T.alloc_fragment((threads,), F32)
        T.copy(initial[b, h, bx * threads], carry)
        for c in T.serial(C):
            T.copy(carry, out[b, c, h, bx * threads : (bx + 1) * threads])
            scale = T.exp(decay[b, h, c])
            for i in T.Parallel(threads):
                if bx * threads + i < D:
                    carry[i] = carry[i] * scale + states[b, c, h, bx * threads + i]
        T.copy(carry, final[b, h, bx * threads])
    return out, final


def state_passing_reference(states, decay, initial):
    states, decay, carry = wide(states, decay, initial)
    out = np.zeros(states.shape)
    for c in range(states.shape[1]):
        out[:, c] = carry
        carry = carry * np.exp(decay[:, :, c])[..., None] + states[:, c]
    return out, carry


@tilelang.jit(out_idx=[-1])
def chunk_cumsum(batch, seq, heads, chunk, reverse=False):
    """Sums of gates inside of each chunk, for all heads of a token block at once."""

    @T.prim_func
    def main(g: T.Tensor((batch, seq, heads), F32), out: T.Tensor((batch, seq, heads), F32)):
        with T.Kernel(T.ceildiv(seq, chunk), batch, threads=64) as (c, b):
            s = T.alloc_shared((chunk, heads), F32)
            T.copy(g[b, c * chunk, 0], s)
            T.cumsum(s, dim=0, reverse=reverse)
            T.copy(s, out[b, c * chunk, 0])

    return main


def chunk_cumsum_reference(chunk):
    def reference(g):
        (g,) = wide(g)
        out = np.zeros(g.shape)
        for s in range(0, g.shape[1], chunk):
            out[:, s : s + chunk] = np.cumsum(g[:, s : s + chunk], 1)
        return out

    return reference


@tilelang.jit(out_idx=[3])
def kkt(batch, seq, heads, dim, chunk=32, block_k=32):
    """A = strictly lower part of beta * K K^T * exp(g_i - g_j), chunk by chunk."""

    @T.prim_func
    def main(
        K: T.Tensor((batch, seq, heads, dim), BF16),
        beta: T.Tensor((batch, seq, heads), BF16),
        g: T.Tensor((batch, seq, heads), F32),
        A: T.Tensor((batch, seq, heads, chunk), F32),
    ):
        with T.Kernel(T.ceildiv(seq, chunk), batch * heads, threads=128) as (bs, bbh):
            bb, bh = bbh // heads, bbh % heads
            k_s = T.alloc_shared((chunk, block_k), BF16)
            bk_s = T.alloc_fragment((chunk, block_k), BF16)
            beta_s = T.alloc_shared((chunk,), BF16, scope="shared")
            g_s = T.alloc_shared((chunk,), F32, scope="shared")
            a = T.alloc_fragment((chunk, chunk), F32)
            a_s = T.alloc_shared((chunk, chunk), F32)
            T.fill(a, 0)
            T.disable_warp_group_reg_alloc()
            for i in T.Parallel(chunk):
                beta_s[i] = beta[bb, bs * chunk + i, bh]
                g_s[i] = g[bb, bs * chunk + i, bh]
            for k in T.Pipelined(T.ceildiv(dim, block_k), num_stages=2):
                T.copy(K[bb, bs * chunk : (bs + 1) * chunk, bh, k * block_k : (k + 1) * block_k], k_s)
                for i, j in T.Parallel(chunk, block_k):
                    bk_s[i, j] = k_s[i, j] * beta_s[i]
                T.gemm(bk_s, k_s, a, transpose_B=True)
            for i, j in T.Parallel(chunk, chunk):
                a[i, j] = T.if_then_else(i > j, a[i, j] * T.exp(g_s[i] - g_s[j]), 0)
            T.copy(a, a_s)
            T.copy(a_s, A[bb, bs * chunk : (bs + 1) * chunk, bh, :])

    return main


def kkt_reference(k, beta, g, chunk=32):
    k, beta, g = wide(k, beta, g)
    b, n, h, d = k.shape
    k, beta, g = (t.reshape(b, n // chunk, chunk, *t.shape[2:]) for t in (k, beta, g))
    a = np.einsum("bcihd,bcjhd->bcihj", k * beta[..., None], k) * np.exp(
        g[:, :, :, :, None] - g.transpose(0, 1, 3, 2)[:, :, None]
    )
    return np.where((np.arange(chunk)[:, None] > np.arange(chunk))[None, None, :, None], a, 0).reshape(b, n, h, chunk)


@tilelang.jit(out_idx=[-1])
def solve_lower(n, size, threads=32):
    """(I + A)^-1 of strictly lower matrices, row by row: each row needs all rows above it."""

    @T.prim_func
    def main(A: T.Tensor((n, size, size), F32), X: T.Tensor((n, size, size), F32)):
        with T.Kernel(n, threads=threads) as b:
            a = T.alloc_shared((size, size), F32)
            x = T.alloc_shared((size, size), F32)
            row = T.alloc_fragment((size,), F32)
            T.copy(A[b, 0, 0], a)
            for i, j in T.Parallel(size, size):
                x[i, j] = T.if_then_else(i == j, 1.0, 0.0)
            for i in T.serial(1, size):
                T.clear(row)
                for k in T.serial(i):
                    for j in T.Parallel(size):
                        row[j] += a[i, k] * x[k, j]
                for j in T.Parallel(size):
                    x[i, j] -= row[j]
            T.copy(x, X[b, 0, 0])

    return main


@tilelang.jit(out_idx=[5, 6])
def wy_representation(batch, seq, heads, dim_k, dim_v, chunk=32, block_k=32, block_v=32):
    """W = A (beta exp(g) K), U = A (beta V), with A of each chunk kept in shared memory."""

    @T.prim_func
    def main(
        K: T.Tensor((batch, seq, heads, dim_k), BF16),
        V: T.Tensor((batch, seq, heads, dim_v), BF16),
        beta: T.Tensor((batch, seq, heads), BF16),
        G: T.Tensor((batch, seq, heads), F32),
        A: T.Tensor((batch, seq, heads, chunk), BF16),
        W: T.Tensor((batch, seq, heads, dim_k), BF16),
        U: T.Tensor((batch, seq, heads, dim_v), BF16),
    ):
        with T.Kernel(T.ceildiv(seq, chunk), batch * heads, threads=128) as (bs, bbh):
            bb, bh = bbh // heads, bbh % heads
            beta_s = T.alloc_shared((chunk,), BF16)
            k_s = T.alloc_shared((chunk, block_k), BF16)
            a_s = T.alloc_shared((chunk, chunk), BF16)
            g_s = T.alloc_shared((chunk,), F32)
            w_f = T.alloc_fragment((chunk, block_k), F32)
            u_f = T.alloc_fragment((chunk, block_v), F32)
            w_s = T.alloc_shared((chunk, block_k), BF16)
            v_s = T.alloc_shared((chunk, block_v), BF16)
            wb = T.alloc_shared((chunk, block_k), BF16)
            vb = T.alloc_shared((chunk, block_v), BF16)
            T.annotate_layout({t: tilelang.layout.make_swizzled_layout(t) for t in (k_s, v_s, wb, vb)})
            for i in T.Parallel(chunk):
                beta_s[i] = beta[bb, bs * chunk + i, bh]
                g_s[i] = T.exp(G[bb, bs * chunk + i, bh])
            T.copy(A[bb, bs * chunk : (bs + 1) * chunk, bh, :], a_s)
            for v in T.Pipelined(T.ceildiv(dim_v, block_v), num_stages=2):
                T.copy(V[bb, bs * chunk : (bs + 1) * chunk, bh, v * block_v : (v + 1) * block_v], v_s)
                for i, j in T.Parallel(chunk, block_v):
                    vb[i, j] = v_s[i, j] * beta_s[i]
                T.gemm(a_s, vb, u_f, clear_accum=True)
                T.copy(u_f, U[bb, bs * chunk : (bs + 1) * chunk, bh, v * block_v : (v + 1) * block_v])
            for k in T.Pipelined(T.ceildiv(dim_k, block_k), num_stages=2):
                T.copy(K[bb, bs * chunk : (bs + 1) * chunk, bh, k * block_k : (k + 1) * block_k], k_s)
                for i, j in T.Parallel(chunk, block_k):
                    wb[i, j] = k_s[i, j] * beta_s[i] * g_s[i]
                T.gemm(a_s, wb, w_f, clear_accum=True)
                T.copy(w_f, w_s)
                T.copy(w_s, W[bb, bs * chunk : (bs + 1) * chunk, bh, k * block_k : (k + 1) * block_k])

    return main


def wy_reference(k, v, beta, g, a, chunk=32):
    k, v, beta, g, a = wide(k, v, beta, g, a)
    b, n, h, _ = k.shape
    cut = lambda t: t.reshape(b, n // chunk, chunk, *t.shape[2:])  # noqa: E731
    w = np.einsum("bcihj,bcjhd->bcihd", cut(a), cut(k * beta[..., None] * np.exp(g)[..., None]))
    u = np.einsum("bcihj,bcjhd->bcihd", cut(a), cut(v * beta[..., None]))
    return w.reshape(k.shape), u.reshape(v.shape)


@tilelang.jit(out_idx=[4, 5, 6])
def delta_states(batch, seq, heads, dim_k, dim_v, chunk=32, block_v=32, gated=True):
    """The state before each chunk: h -> exp(g_last) h + K^T (exp(g_last - g) (U - W h))."""
    n_chunks = seq // chunk

    @T.prim_func
    def main(
        K: T.Tensor((batch, seq, heads, dim_k), BF16),
        W: T.Tensor((batch, seq, heads, dim_k), BF16),
        U: T.Tensor((batch, seq, heads, dim_v), BF16),
        G: T.Tensor((batch, seq, heads), F32),
        h: T.Tensor((batch, n_chunks, heads, dim_k, dim_v), BF16),
        final: T.Tensor((batch, heads, dim_k, dim_v), F32),
        V_new: T.Tensor((batch, seq, heads, dim_v), BF16),
    ):
        with T.Kernel(T.ceildiv(dim_v, block_v), batch * heads, threads=128) as (bv, bbh):
            bb, bh = bbh // heads, bbh % heads
            h_s = T.alloc_shared((dim_k, block_v), BF16)
            h_f = T.alloc_fragment((dim_k, block_v), F32)
            u_s = T.alloc_shared((chunk, block_v), BF16)
            u_f = T.alloc_fragment((chunk, block_v), F32)
            w_s = T.alloc_shared((chunk, dim_k), BF16)
            v_f = T.alloc_fragment((chunk, block_v), F32)
            v_s = T.alloc_shared((chunk, block_v), BF16)
            k_s = T.alloc_shared((chunk, dim_k), BF16)
            g_f = T.alloc_fragment((chunk, block_v), F32)
            g_last = T.alloc_var(F32)
            T.use_swizzle(10)
            T.clear(h_f)
            for i in T.Pipelined(n_chunks, num_stages=2):
                T.copy(h_f, h_s)
                T.copy(h_s, h[bb, i, bh, 0:dim_k, bv * block_v : (bv + 1) * block_v])
                T.copy(W[bb, i * chunk : (i + 1) * chunk, bh, 0:dim_k], w_s)
                T.gemm(w_s, h_s, v_f, clear_accum=True)
                T.copy(U[bb, i * chunk : (i + 1) * chunk, bh, bv * block_v : (bv + 1) * block_v], u_s)
                T.copy(u_s, u_f)
                for r, c in T.Parallel(chunk, block_v):
                    v_f[r, c] = -v_f[r, c] + u_f[r, c]
                T.copy(v_f, v_s)
                T.copy(v_s, V_new[bb, i * chunk : (i + 1) * chunk, bh, bv * block_v : (bv + 1) * block_v])
                T.copy(K[bb, i * chunk : (i + 1) * chunk, bh, 0:dim_k], k_s)
                if gated:
                    g_last = G[bb, (i + 1) * chunk - 1, bh]
                    for r, c in T.Parallel(chunk, block_v):
                        g_f[r, c] = G[bb, i * chunk + r, bh]
                    for r, c in T.Parallel(chunk, block_v):
                        v_f[r, c] = v_f[r, c] * T.exp2((g_last - g_f[r, c]) * 1.442695)
                    g_last = T.exp2(g_last * 1.442695)
                    for r, c in T.Parallel(dim_k, block_v):
                        h_f[r, c] *= g_last
                T.copy(v_f, v_s)
                T.gemm(k_s, v_s, h_f, transpose_A=True)
            T.copy(h_f, final[bb, bh, 0:dim_k, bv * block_v : (bv + 1) * block_v])

    return main


def delta_states_reference(k, w, u, g, chunk=32):
    k, w, u, g = wide(k, w, u, g)
    b, n, h, dk = k.shape
    state, states, new = np.zeros((b, h, dk, u.shape[3])), [], []
    for s in range(0, n, chunk):
        at = slice(s, s + chunk)
        states.append(state)
        v = u[:, at] - np.einsum("bihk,bhkv->bihv", w[:, at], state)
        new.append(v)
        last = g[:, s + chunk - 1]
        v = v * np.exp(last[:, None] - g[:, at])[..., None]
        state = state * np.exp(last)[..., None, None] + np.einsum("bihk,bihv->bhkv", k[:, at], v)
    return np.stack(states, 1), state, np.concatenate(new, 1)


@tilelang.jit(out_idx=[5])
def delta_output(batch, seq, heads, dim_k, dim_v, chunk=32, block_k=32, block_v=32):
    n_chunks = seq // chunk

    @T.prim_func
    def main(
        Q: T.Tensor((batch, seq, heads, dim_k), BF16),
        K: T.Tensor((batch, seq, heads, dim_k), BF16),
        V: T.Tensor((batch, seq, heads, dim_v), BF16),
        H: T.Tensor((batch, n_chunks, heads, dim_k, dim_v), BF16),
        G: T.Tensor((batch, seq, heads), F32),
        O: T.Tensor((batch, seq, heads, dim_v), BF16),
    ):
        with T.Kernel(T.ceildiv(dim_v, block_v), n_chunks, batch * heads, threads=128) as (bv, bs, bbh):
            bb, bh = bbh // heads, bbh % heads
            q = T.alloc_shared((chunk, block_k), BF16)
            k = T.alloc_shared((chunk, block_k), BF16)
            v = T.alloc_shared((chunk, block_v), BF16)
            h = T.alloc_shared((block_k, block_v), BF16)
            a_s = T.alloc_shared((chunk, chunk), BF16)
            o_s = T.alloc_shared((chunk, block_v), BF16)
            a = T.alloc_fragment((chunk, chunk), F32)
            o = T.alloc_fragment((chunk, block_v), F32)
            g = T.alloc_shared((chunk,), F32, scope="shared")
            gd = T.alloc_fragment((chunk, chunk), F32)
            T.annotate_layout({a_s: tilelang.layout.make_swizzled_layout(a_s), o_s: tilelang.layout.make_swizzled_layout(o_s)})
            T.clear(a)
            T.clear(o)
            for kb in T.Pipelined(T.ceildiv(dim_k, block_k), num_stages=1):
                T.copy(Q[bb, bs * chunk : (bs + 1) * chunk, bh, kb * block_k : (kb + 1) * block_k], q)
                T.copy(K[bb, bs * chunk : (bs + 1) * chunk, bh, kb * block_k : (kb + 1) * block_k], k)
                T.copy(H[bb, bs, bh, kb * block_k : (kb + 1) * block_k, bv * block_v : (bv + 1) * block_v], h)
                T.gemm(q, h, o)
                T.gemm(q, k, a, transpose_B=True)
            for i in T.Parallel(chunk):
                g[i] = G[bb, bs * chunk + i, bh]
            for i, j in T.Parallel(chunk, block_v):
                o[i, j] = o[i, j] * T.exp2(g[i] * 1.442695)
            for i, j in T.Parallel(chunk, chunk):
                gd[i, j] = g[i] - g[j]
            for i, j in T.Parallel(chunk, chunk):
                with T.If(gd[i, j] <= 0):
                    with T.Then():
                        a[i, j] = a[i, j] * T.exp2(gd[i, j] * 1.442695)
                    with T.Else():
                        a[i, j] = 0
            for i, j in T.Parallel(chunk, chunk):
                if i < j:
                    a[i, j] = 0
            T.copy(V[bb, bs * chunk : (bs + 1) * chunk, bh, bv * block_v : (bv + 1) * block_v], v)
            T.copy(a, a_s)
            T.gemm(a_s, v, o)
            T.copy(o, o_s)
            T.copy(o_s, O[bb, bs * chunk : (bs + 1) * chunk, bh, bv * block_v : (bv + 1) * block_v])

    return main


def delta_output_reference(q, k, v, hs, g, chunk=32):
    q, k, v, hs, g = wide(q, k, v, hs, g)
    out = np.zeros(v.shape)
    for c in range(hs.shape[1]):
        at = slice(c * chunk, (c + 1) * chunk)
        d = (g[:, at, None] - g[:, None, at]).transpose(0, 3, 1, 2)
        a = np.tril(np.einsum("bihk,bjhk->bhij", q[:, at], k[:, at]) * np.where(d <= 0, np.exp(np.minimum(d, 0)), 0))
        out[:, at] = np.einsum("bihk,bhkv->bihv", q[:, at], hs[:, c]) * np.exp(g[:, at])[..., None]
        out[:, at] += np.einsum("bhij,bjhv->bihv", a, v[:, at])
    return out


@tilelang.jit
def linear_attention_fused(Q, K, V, chunk: int = 32, bk: int = 32, bv: int = 32):
    """Chunked causal attention without softmax: every K block of a head adds its part of the output with atomics."""
    B, S, H, D = T.const("B S H D")
    Q: T.Tensor((B, S, H, D), F16)
    K: T.Tensor((B, S, H, D), F16)
    V: T.Tensor((B, S, H, D), F16)
    O = T.empty((B, S, H, D), F32)
    NK, NV = T.ceildiv(D, bk), T.ceildiv(D, bv)
    with T.Kernel(T.ceildiv(S * H * D, 1024), B, threads=128) as (bx, b):
        flat = T.view(O, (B, S * H * D))
        for i in T.Parallel(1024):
            if bx * 1024 + i < S * H * D:
                flat[b, bx * 1024 + i] = 0
    with T.Kernel(NV, NK, B * H, threads=128) as (i_v, i_k, i_bh):
        i_b, i_h = i_bh // H, i_bh % H
        q = T.alloc_shared([chunk, bk], F16)
        k = T.alloc_shared([chunk, bk], F16)
        v = T.alloc_shared([chunk, bv], F16)
        h = T.alloc_fragment([bk, bv], F32)
        h_s = T.alloc_shared([bk, bv], F16)
        s = T.alloc_fragment([chunk, chunk], F32)
        s_s = T.alloc_shared([chunk, chunk], F16)
        o = T.alloc_fragment([chunk, bv], F32)
        T.clear(h)
        for i in T.Pipelined(0, T.ceildiv(S, chunk)):
            for row, col in T.Parallel(chunk, bk):
                q[row, col] = Q[i_b, i * chunk + row, i_h, i_k * bk + col] * T.float16(0.125)
            T.copy(K[i_b, i * chunk : (i + 1) * chunk, i_h, i_k * bk : (i_k + 1) * bk], k)
            T.copy(V[i_b, i * chunk : (i + 1) * chunk, i_h, i_v * bv : (i_v + 1) * bv], v)
            T.gemm(q, k, s, clear_accum=True, transpose_B=True)
            for row, col in T.Parallel(chunk, chunk):
                s_s[row, col] = T.if_then_else(row >= col, s[row, col], 0)
            T.gemm(s_s, v, o, clear_accum=True)
            T.copy(h, h_s)
            T.gemm(k, v, h, transpose_A=True)
            T.gemm(q, h_s, o)
            T.atomic_add(O[i_b, i * chunk : (i + 1) * chunk, i_h, i_v * bv : (i_v + 1) * bv], o)
    return O


def linear_attention_reference(q, k, v):
    q, k, v = wide(q, k, v)
    s = np.tril(np.einsum("bqhd,bkhd->bhqk", q * 0.125, k))
    return np.einsum("bhqk,bkhd->bqhd", s, v)


@tilelang.jit
def recurrent_delta(q, k, v, g, beta, state, slots, threads: int = 32):
    """One decoding step of the gated delta rule; each thread keeps one column of the state, found through a slot table."""
    n, cap = T.dynamic("n, cap")
    H, DK, DV = T.const("H DK DV")
    q: T.Tensor((n, H, DK), BF16)
    k: T.Tensor((n, H, DK), BF16)
    v: T.Tensor((n, H, DV), BF16)
    g: T.Tensor((n, H), F32)
    beta: T.Tensor((n, H), F32)
    state: T.Tensor((cap, H, DK, DV), F32)
    slots: T.Tensor((n,), "int32")
    out = T.empty((n, H, DV), BF16)
    with T.Kernel(T.ceildiv(DV, threads), H, n, threads=threads) as (bx, h, b):
        c = bx * threads + T.get_thread_binding()
        slot = slots[b]
        if slot < 0:
            T.thread_return()
        qs = T.alloc_shared((DK,), F32)
        ks = T.alloc_shared((DK,), F32)
        T.copy(q[b, h, 0], qs)
        T.copy(k[b, h, 0], ks)
        column = T.alloc_local((DK,), F32)
        kv = T.alloc_var(F32, init=0.0)
        o = T.alloc_var(F32, init=0.0)
        decay = T.exp(g[b, h])
        if c < DV:
            for i in T.serial(DK):
                column[i] = state[slot, h, i, c] * decay
                kv += column[i] * ks[i]
            delta = (T.cast(v[b, h, c], F32) - kv) * beta[b, h]
            for i in T.serial(DK):
                column[i] += ks[i] * delta
                o += column[i] * qs[i]
                state[slot, h, i, c] = column[i]
            out[b, h, c] = o
    return out


def recurrent_delta_reference(q, k, v, g, beta, state, slots):
    q, k, v, g, beta, state = wide(q, k, v, g, beta, state)
    out = np.zeros(v.shape)
    for b, slot in enumerate(slots):
        s = state[slot] * np.exp(g[b])[:, None, None]
        d = (v[b] - np.einsum("hkv,hk->hv", s, k[b])) * beta[b][:, None]
        s = s + k[b][:, :, None] * d[:, None]
        state[slot], out[b] = s, np.einsum("hkv,hk->hv", s, q[b])
    return out, state


def gates(shape):
    """Sums of negative gates along the sequence, restarted in chunks of 32."""

    def draw(g):
        steps = -g.uniform(0, 0.1, shape).astype(np.float32)
        return np.concatenate([np.cumsum(steps[:, s : s + 32], 1) for s in range(0, shape[1], 32)], 1)

    return draw


def small(shape, name=BF16):
    return uniform(shape, name, -0.25, 0.25)


def decays(shape):
    return lambda g: np.cumsum(-g.uniform(0, 0.1, shape), 3).astype(np.float16)


HALF = Bound(F16, via=((F16, 1.0),))
PROGRAMS = [
    Program(
        "retention",
        retention,
        dict(batch=1, heads=2, seq=80, dim_qk=32, dim_v=64),
        drawn(uniform((1, 80, 2, 32), F16), uniform((1, 80, 2, 32), F16), uniform((1, 80, 2, 64), F16)),
        retention_reference,
        Bound(F16, 100, 4.0, via=((F16, 2.0),)),
    ),
    Program(
        "ssd_chunk_state",
        ssd_chunk_state,
        dict(batch=2, seq=128, chunk=64, groups=1, heads=2, headdim=32, dstate=48),
        drawn(
            uniform((2, 128, 1, 48), F16),
            uniform((2, 128, 2, 32), F16),
            uniform((2, 2, 2, 64), F16, 0, 1),
            decays((2, 2, 2, 64)),
        ),
        ssd_chunk_state_reference,
        Bound(F16, via=((F16, 16.0),)),
    ),
    Program(
        "ssd_chunk_scan",
        ssd_chunk_scan,
        dict(batch=1, seq=128, chunk=64, groups=1, heads=2, headdim=48, dstate=32),
        drawn(
            uniform((1, 2, 1, 64, 64), F16),
            uniform((1, 128, 2, 48), F16),
            uniform((1, 2, 2, 64), F16, 0, 1),
            decays((1, 2, 2, 64)),
            uniform((1, 128, 1, 32), F16),
            uniform((1, 2, 2, 48, 32), F16),
        ),
        ssd_chunk_scan_reference,
        Bound(F16, via=((F16, 16.0),)),
    ),
    Program(
        "state_passing",
        state_passing,
        dict(B=2, C=5, H=2, D=100),
        drawn(uniform((2, 5, 2, 100)), uniform((2, 2, 5), low=-1, high=0), uniform((2, 2, 100))),
        state_passing_reference,
        Bound(F32, 20, 5.0),
    ),
    Program(
        "chunk_cumsum",
        chunk_cumsum,
        dict(batch=2, seq=100, heads=6, chunk=32),
        drawn(uniform((2, 100, 6))),
        chunk_cumsum_reference(32),
        Bound(F32, 32, 32.0),
    ),
    Program(
        "kkt",
        kkt,
        dict(batch=1, seq=64, heads=2, dim=64),
        drawn(uniform((1, 64, 2, 64), BF16), uniform((1, 64, 2), BF16, 0, 1), gates((1, 64, 2))),
        kkt_reference,
        Bound(F32, via=((BF16, 16.0),)),
    ),
    Program(
        "solve_lower",
        solve_lower,
        dict(n=2, size=24),
        drawn(lambda g: np.tril(g.uniform(-0.5, 0.5, (2, 24, 24)), -1).astype(np.float32)),
        lambda a: np.linalg.inv(np.eye(24) + wide(a)[0]),
        Bound(F32, 576, 8.0),
    ),
    Program(
        "wy_representation",
        wy_representation,
        dict(batch=1, seq=64, heads=2, dim_k=64, dim_v=32),
        drawn(
            uniform((1, 64, 2, 64), BF16),
            uniform((1, 64, 2, 32), BF16),
            uniform((1, 64, 2), BF16, 0, 1),
            gates((1, 64, 2)),
            uniform((1, 64, 2, 32), BF16),
        ),
        wy_reference,
        Bound(BF16, via=((BF16, 16.0),)),
    ),
    Program(
        "delta_states",
        delta_states,
        dict(batch=1, seq=96, heads=2, dim_k=32, dim_v=64),
        drawn(small((1, 96, 2, 32)), small((1, 96, 2, 32)), small((1, 96, 2, 64)), gates((1, 96, 2))),
        delta_states_reference,
        Bound(BF16, via=((BF16, 2.0),)),
    ),
    Program(
        "delta_output",
        delta_output,
        dict(batch=1, seq=64, heads=2, dim_k=64, dim_v=32),
        drawn(
            small((1, 64, 2, 64)),
            small((1, 64, 2, 64)),
            uniform((1, 64, 2, 32), BF16),
            uniform((1, 2, 2, 64, 32), BF16),
            gates((1, 64, 2)),
        ),
        delta_output_reference,
        Bound(BF16, via=((BF16, 4.0),)),
    ),
    Program(
        "linear_attention_fused",
        linear_attention_fused,
        dict(B=1, S=80, H=2, D=64),
        drawn(uniform((1, 80, 2, 64), F16), uniform((1, 80, 2, 64), F16), uniform((1, 80, 2, 64), F16)),
        linear_attention_reference,
        Bound(F32, via=((F16, 64.0),)),
    ),
    Program(
        "recurrent_delta",
        recurrent_delta,
        dict(H=2, DK=32, DV=40),
        drawn(
            small((3, 2, 32)),
            small((3, 2, 32)),
            uniform((3, 2, 40), BF16),
            uniform((3, 2), low=-1, high=0),
            uniform((3, 2), low=0, high=1),
            uniform((6, 2, 32, 40)),
            np.array([4, 1, 0], np.int32),
        ),
        recurrent_delta_reference,
        (Bound(BF16, 64, 16.0), Bound(F32, 64, 8.0)),
        changed=(5,),
    ),
]
