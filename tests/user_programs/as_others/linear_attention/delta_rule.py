"""The gated delta rule."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import Bound, Program, drawn, uniform, wide
from .common import BF16, F32


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


PROGRAMS = [
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
