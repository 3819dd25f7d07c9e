"""Attention of whole sequences, forwards and backwards, and the delta rule backwards."""

import numpy as np

import tilelang
import tilelang.language as T
from tilelang import PassConfigKey

from ..catalogue import HOPPER_ONLY, Bound, Program, drawn, uniform, wide, zeros
from .common import HALF, LOG2E

FAST = {PassConfigKey.TL_ENABLE_FAST_MATH: True}


@tilelang.jit(out_idx=[3, 4], pass_configs=FAST, compile_flags=["-O3", "-DENABLE_BF16"])
def gqa_forward(batch, heads, heads_kv, seq, dim, causal, block_m=64, block_n=32, num_stages=1, threads=128):
    scale = (1.0 / dim) ** 0.5 * LOG2E
    q_shape, kv_shape, groups = (batch, seq, heads, dim), (batch, seq, heads_kv, dim), heads // heads_kv
    dt, acc = "float16", "float"

    @T.macro
    def scores(
        K: T.Tensor(kv_shape, dt),
        q_s: T.SharedBuffer([block_m, dim], dt),
        k_s: T.SharedBuffer([block_n, dim], dt),
        s,
        k,
        bx,
        by,
        bz,
    ):
        T.copy(K[bz, k * block_n : (k + 1) * block_n, by // groups, :], k_s)
        for i, j in T.Parallel(block_m, block_n):
            if causal:
                s[i, j] = T.if_then_else((bx * block_m + i >= k * block_n + j) and (k * block_n + j < seq), 0, -T.infinity(acc))
            else:
                s[i, j] = T.if_then_else(k * block_n + j >= seq, -T.infinity(acc), 0)
        T.gemm(q_s, k_s, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

    @T.macro
    def softmax(s, s_cast, m, m_prev, corr, row, l):
        T.copy(m, m_prev)
        T.fill(m, -T.infinity(acc))
        T.reduce_max(s, m, dim=1, clear=False)
        for i in T.Parallel(block_m):
            m[i] = T.max(m[i], m_prev[i])
            corr[i] = T.exp2(m_prev[i] * scale - m[i] * scale)
        for i, j in T.Parallel(block_m, block_n):
            s[i, j] = T.exp2(s[i, j] * scale - m[i] * scale)
        T.reduce_sum(s, row, dim=1)
        for i in T.Parallel(block_m):
            l[i] = l[i] * corr[i] + row[i]
        T.copy(s, s_cast)

    @T.prim_func
    def main(
        Q: T.Tensor(q_shape, dt),
        K: T.Tensor(kv_shape, dt),
        V: T.Tensor(kv_shape, dt),
        Output: T.Tensor(q_shape, dt),
        lse: T.Tensor([batch, heads, seq], acc),
    ):
        with T.Kernel(T.ceildiv(seq, block_m), heads, batch, threads=threads) as (bx, by, bz):
            q_s = T.alloc_shared([block_m, dim], dt)
            k_s = T.alloc_shared([block_n, dim], dt)
            v_s = T.alloc_shared([block_n, dim], dt)
            o_s = T.alloc_shared([block_m, dim], dt)
            s = T.alloc_fragment([block_m, block_n], acc)
            p = T.alloc_fragment([block_m, block_n], dt)
            o = T.alloc_fragment([block_m, dim], acc)
            m, m_prev, corr, row, l = (T.alloc_fragment([block_m], acc) for _ in (0, 1, 2, 3, 4))
            T.annotate_layout({q_s: tilelang.layout.make_swizzled_layout(q_s), o_s: tilelang.layout.make_swizzled_layout(o_s)})
            T.copy(Q[bz, bx * block_m : (bx + 1) * block_m, by, :], q_s)
            T.fill(o, 0)
            T.fill(l, 0)
            T.fill(m, -T.infinity(acc))
            loop = T.min(T.ceildiv(seq, block_n), T.ceildiv((bx + 1) * block_m, block_n)) if causal else T.ceildiv(seq, block_n)
            for k in T.Pipelined(loop, num_stages=num_stages):
                scores(K, q_s, k_s, s, k, bx, by, bz)
                softmax(s, p, m, m_prev, corr, row, l)
                for i, j in T.Parallel(block_m, dim):
                    o[i, j] *= corr[i]
                T.copy(V[bz, k * block_n : (k + 1) * block_n, by // groups, :], v_s)
                T.gemm(p, v_s, o, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_m, dim):
                o[i, j] /= l[i]
            T.copy(o, o_s)
            T.copy(o_s, Output[bz, bx * block_m : (bx + 1) * block_m, by, :])
            for i in T.Parallel(block_m):
                l[i] = T.log2(l[i]) + m[i] * scale
            T.copy(l, lse[bz, by, bx * block_m : (bx + 1) * block_m])

    return main


def attend(q, k, v, causal):
    """Probabilities, outputs and log2 sums of (batch, seq, heads, dim) tensors with grouped heads."""
    q, k, v = wide(q, k, v)
    groups = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    if causal:
        s = np.where(np.tril(np.ones(s.shape[2:], bool)), s, -np.inf)
    e = np.exp(s - s.max(3, keepdims=True))
    lse = (np.log(e.sum(3)) + s.max(3)) * LOG2E
    p = e / e.sum(3, keepdims=True)
    return p, np.einsum("bhqk,bkhd->bqhd", p, v), lse


@tilelang.jit(pass_configs=FAST)
def mha_backward(batch, heads, seq, dim, causal, block_m=32, block_n=32):
    """Three launches: row sums of O * dO, the gradients with atomics into a permuted dQ, and dQ put in order."""
    scale = (1.0 / dim) ** 0.5
    shape, dt, acc = [batch, seq, heads, dim], "float16", "float"

    def dq_layout(dQ):
        return T.Layout(dQ.shape, lambda b, l, h, d: [b, l // 8, h, d // 8, (d % 2), 4 * (l % 8) + (d % 8) // 2])

    @T.prim_func
    def main(
        Q: T.Tensor(shape, dt),
        K: T.Tensor(shape, dt),
        V: T.Tensor(shape, dt),
        O: T.Tensor(shape, dt),
        dO: T.Tensor(shape, dt),
        lse: T.Tensor([batch, heads, seq], acc),
        delta: T.Tensor([batch, heads, seq], acc),
        dQ: T.Tensor(shape, acc),
        dQ_out: T.Tensor(shape, dt),
        dK: T.Tensor(shape, dt),
        dV: T.Tensor(shape, dt),
    ):
        with T.Kernel(heads, T.ceildiv(seq, block_m), batch) as (bx, by, bz):
            o = T.alloc_fragment([block_m, 32], dt)
            do = T.alloc_fragment([block_m, 32], dt)
            part = T.alloc_fragment([block_m, 32], acc)
            total = T.alloc_fragment([block_m], acc)
            T.clear(part)
            for k in range(T.ceildiv(dim, 32)):
                T.copy(O[bz, by * block_m : (by + 1) * block_m, bx, k * 32 : (k + 1) * 32], o)
                T.copy(dO[bz, by * block_m : (by + 1) * block_m, bx, k * 32 : (k + 1) * 32], do)
                for i, j in T.Parallel(block_m, 32):
                    part[i, j] += o[i, j] * do[i, j]
            T.reduce_sum(part, total, 1)
            T.copy(total, delta[bz, bx, by * block_m : (by + 1) * block_m])

        with T.Kernel(heads, T.ceildiv(seq, block_m), batch, threads=128) as (bx, by, bz):
            K_shared = T.alloc_shared([block_m, dim], dt)
            V_shared = T.alloc_shared([block_m, dim], dt)
            q = T.alloc_shared([block_n, dim], dt)
            do_s = T.alloc_shared([block_n, dim], dt)
            dsT_shared = T.alloc_shared([block_m, block_n], dt)
            qkT = T.alloc_fragment([block_m, block_n], acc)
            dsT = T.alloc_fragment([block_m, block_n], acc)
            qkT_cast = T.alloc_fragment([block_m, block_n], dt)
            dsT_cast = T.alloc_fragment([block_m, block_n], dt)
            lse_shared = T.alloc_shared([block_n], acc)
            delta_s = T.alloc_shared([block_n], acc)
            dv = T.alloc_fragment([block_m, dim], acc)
            dk = T.alloc_fragment([block_m, dim], acc)
            dq = T.alloc_fragment([block_n, dim], acc)
            T.annotate_layout({dQ: dq_layout(dQ), K_shared: tilelang.layout.make_swizzled_layout(K_shared)})
            T.copy(K[bz, by * block_m : (by + 1) * block_m, bx, :], K_shared)
            T.copy(V[bz, by * block_m : (by + 1) * block_m, bx, :], V_shared)
            T.clear(dv)
            T.clear(dk)
            first = T.floordiv(by * block_m, block_n) if causal else 0
            for k in T.Pipelined(first, T.ceildiv(seq, block_n), num_stages=2):
                T.copy(Q[bz, k * block_n : (k + 1) * block_n, bx, :], q)
                T.clear(qkT)
                T.gemm(K_shared, q, qkT, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(lse[bz, bx, k * block_n : (k + 1) * block_n], lse_shared)
                for i, j in T.Parallel(block_m, block_n):
                    qkT[i, j] = T.exp2(qkT[i, j] * scale * LOG2E - lse_shared[j])
                if causal:
                    for i, j in T.Parallel(block_m, block_n):
                        qkT[i, j] = T.if_then_else(by * block_m + i <= k * block_n + j, qkT[i, j], 0)
                T.copy(dO[bz, k * block_n : (k + 1) * block_n, bx, :], do_s)
                T.clear(dsT)
                T.gemm(V_shared, do_s, dsT, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(qkT, qkT_cast)
                T.gemm(qkT_cast, do_s, dv, policy=T.GemmWarpPolicy.FullRow)
                T.copy(delta[bz, bx, k * block_n : (k + 1) * block_n], delta_s)
                for i, j in T.Parallel(block_m, block_n):
                    dsT_cast[i, j] = qkT[i, j] * (dsT[i, j] - delta_s[j]) * scale
                T.gemm(dsT_cast, q, dk, policy=T.GemmWarpPolicy.FullRow)
                T.copy(dsT_cast, dsT_shared)
                T.clear(dq)
                T.gemm(dsT_shared, K_shared, dq, transpose_A=True)
                for i, j in T.Parallel(block_n, dim):
                    if k * block_n + i < seq:
                        T.atomic_add(dQ[bz, k * block_n + i, bx, j], dq[i, j])
            T.copy(dv, dV[bz, by * block_m : (by + 1) * block_m, bx, :])
            T.copy(dk, dK[bz, by * block_m : (by + 1) * block_m, bx, :])

        with T.Kernel(T.ceildiv(seq, 32), heads, batch, threads=128) as (bx, by, bz):
            T.annotate_layout({dQ: dq_layout(dQ)})
            T.copy(dQ[bz, bx * 32 : (bx + 1) * 32, by, :], dQ_out[bz, bx * 32 : (bx + 1) * 32, by, :])

    return main


def mha_backward_inputs(batch, seq, heads, dim, causal):
    def draw(g):
        q, k, v, do = (g.uniform(-1, 1, (batch, seq, heads, dim)).astype(np.float16) for _ in range(4))
        _, o, lse = attend(q, k, v, causal)
        empty = [zeros((batch, heads, seq)), zeros(q.shape), *(zeros(q.shape, "float16") for _ in range(3))]
        return [q, k, v, o.astype(np.float16), do, lse.astype(np.float32), *empty]

    return draw


def mha_backward_reference(causal):
    def reference(q, k, v, o, do, lse, *_):
        p, o, _ = attend(q, k, v, causal)
        q, k, v, do = wide(q, k, v, do)
        dv = np.einsum("bhqk,bqhd->bkhd", p, do)
        dp = np.einsum("bqhd,bkhd->bhqk", do, v)
        ds = p * (dp - np.einsum("bqhd,bqhd->bhq", do, o)[..., None]) * q.shape[3] ** -0.5
        return np.einsum("bhqk,bkhd->bqhd", ds, k), np.einsum("bhqk,bqhd->bkhd", ds, q), dv

    return reference


@tilelang.jit(out_idx=[3], pass_configs={PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
def gqa_prefill_ws(heads, heads_kv, seq, dim, block_m=64, block_n=64, stages=2):
    """Producer and consumer written by hand: threads from 128 on load, the others multiply."""
    scale, dt, acc, consumers = dim**-0.5 * LOG2E, "float16", "float32", 128

    @T.prim_func
    def main(
        Q: T.Tensor((seq, heads, dim), dt),
        K: T.Tensor((seq, heads_kv, dim), dt),
        V: T.Tensor((seq, heads_kv, dim), dt),
        O: T.Tensor((seq, heads, dim), dt),
    ):
        with T.Kernel(T.ceildiv(seq, block_m), heads, threads=256) as (bx, by):
            tx = T.get_thread_binding()
            q_s = T.alloc_shared((block_m, dim), dt)
            k_s = T.alloc_shared((stages, block_n, dim), dt)
            v_s = T.alloc_shared((stages, block_n, dim), dt)
            s = T.alloc_fragment((block_m, block_n), acc)
            p = T.alloc_fragment((block_m, block_n), dt)
            o = T.alloc_fragment((block_m, dim), acc)
            m, m_prev, corr, row, l = (T.alloc_fragment((block_m,), acc) for _ in (0, 1, 2, 3, 4))
            loaded = T.alloc_barrier([128] * stages)
            freed = T.alloc_barrier([128] * stages)
            q_ready = T.alloc_barrier(128)
            steps = T.ceildiv((bx + 1) * block_m, block_n)
            if tx >= consumers:
                T.dec_max_nreg(40)
                T.tma_copy(Q[bx * block_m : (bx + 1) * block_m, by, :], q_s, barrier=q_ready)
                T.barrier_arrive(q_ready)
                for k in T.serial(steps):
                    T.mbarrier_wait_parity(freed[k % stages], (k // stages + 1) % 2)
                    T.tma_copy(
                        K[k * block_n : (k + 1) * block_n, by * heads_kv // heads, :],
                        k_s[k % stages, :, :],
                        barrier=loaded[k % stages],
                    )
                    T.tma_copy(
                        V[k * block_n : (k + 1) * block_n, by * heads_kv // heads, :],
                        v_s[k % stages, :, :],
                        barrier=loaded[k % stages],
                    )
                    T.mbarrier_arrive(loaded[k % stages])
            else:
                T.inc_max_nreg(240)
                T.clear(o)
                T.clear(l)
                T.fill(m, -T.infinity(acc))
                T.barrier_wait(q_ready, 0)
                for k in T.serial(steps):
                    T.mbarrier_wait_parity(loaded[k % stages], (k // stages) % 2)
                    T.gemm(q_s, k_s[k % stages, :, :], s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, j in T.Parallel(block_m, block_n):
                        s[i, j] = T.if_then_else(bx * block_m + i >= k * block_n + j, s[i, j], -T.infinity(acc))
                    T.copy(m, m_prev)
                    T.reduce_max(s, m, dim=1, clear=False)
                    for i in T.Parallel(block_m):
                        corr[i] = T.exp2((m_prev[i] - m[i]) * scale)
                    for i, j in T.Parallel(block_m, block_n):
                        s[i, j] = T.exp2(s[i, j] * scale - m[i] * scale)
                    T.reduce_sum(s, row, dim=1)
                    for i in T.Parallel(block_m):
                        l[i] = l[i] * corr[i] + row[i]
                    for i, j in T.Parallel(block_m, dim):
                        o[i, j] *= corr[i]
                    T.copy(s, p)
                    T.gemm(p, v_s[k % stages, :, :], o, policy=T.GemmWarpPolicy.FullRow)
                    T.mbarrier_arrive(freed[k % stages])
                for i, j in T.Parallel(block_m, dim):
                    o[i, j] /= l[i]
                T.copy(o, O[bx * block_m : (bx + 1) * block_m, by, :])

    return main


@tilelang.jit(out_idx=[3, 4])
def delta_net_backward(chunk, dim):
    """Gradients through one chunk's gated product (q k^T * decay) v: sums that end in the last element of a shared vector."""
    n = T.dynamic("n")

    @T.prim_func
    def main(
        p: T.Tensor((n, chunk, chunk), "float32"),
        dp: T.Tensor((n, chunk, chunk), "float32"),
        h: T.Tensor((n, dim), "float32"),
        dg: T.Tensor((n, chunk), "float32"),
        last: T.Tensor((n,), "float32"),
    ):
        with T.Kernel(n, threads=128) as b:
            x = T.alloc_fragment((chunk, chunk), "float32")
            y = T.alloc_fragment((chunk, chunk), "float32")
            rows = T.alloc_fragment((chunk,), "float32")
            cols = T.alloc_fragment((chunk,), "float32")
            hs = T.alloc_fragment((dim,), "float32")
            extra = T.alloc_fragment((1,), "float32")
            g = T.alloc_shared((chunk,), "float32")
            T.copy(p[b, 0, 0], x)
            T.copy(dp[b, 0, 0], y)
            for i, j in T.Parallel(chunk, chunk):
                x[i, j] = T.if_then_else(i >= j, x[i, j] * y[i, j], 0.0)
            T.reduce_sum(x, rows, dim=1)
            T.reduce_sum(x, cols, dim=0)
            T.copy(h[b, 0], hs)
            T.reduce_sum(hs, extra, dim=0)
            for i in T.Parallel(chunk):
                g[i] = rows[i]
            for i in T.Parallel(chunk):
                g[i] = g[i] - cols[i]
            g[chunk - 1] = g[chunk - 1] + extra[0]
            T.cumsum(g, dim=0, reverse=True)
            T.copy(g, dg[b, 0])
            if T.get_thread_binding() == 0:
                last[b] = extra[0]

    return main


def delta_net_backward_reference(p, dp, h):
    p, dp, h = wide(p, dp, h)
    x = np.tril(p * dp)
    g = x.sum(2) - x.sum(1)
    g[:, -1] += h.sum(1)
    return np.flip(np.cumsum(np.flip(g, 1), 1), 1), h.sum(1)


QKV = drawn(uniform((2, 70, 4, 32), "float16"), uniform((2, 70, 2, 32), "float16"), uniform((2, 70, 2, 32), "float16"))

PROGRAMS = [
    Program(
        "gqa_forward_causal",
        gqa_forward,
        dict(batch=2, heads=4, heads_kv=2, seq=70, dim=32, causal=True),
        QKV,
        lambda q, k, v: attend(q, k, v, True)[1:],
        (HALF, Bound("float32", 64, 8.0)),
    ),
    Program(
        "gqa_forward_pipelined",
        gqa_forward,
        dict(batch=2, heads=4, heads_kv=2, seq=70, dim=32, causal=False, num_stages=2),
        QKV,
        lambda q, k, v: attend(q, k, v, False)[1:],
        (HALF, Bound("float32", 64, 8.0)),
    ),
    Program(
        "mha_backward",
        mha_backward,
        dict(batch=1, heads=2, seq=64, dim=32, causal=True),
        mha_backward_inputs(1, 64, 2, 32, True),
        mha_backward_reference(True),
        Bound("float16", via=(("float16", 16.0),)),
        changed=(8, 9, 10),
    ),
    Program(
        "gqa_prefill_ws",
        gqa_prefill_ws,
        dict(heads=2, heads_kv=1, seq=160, dim=64),
        drawn(uniform((160, 2, 64), "float16"), uniform((160, 1, 64), "float16"), uniform((160, 1, 64), "float16")),
        lambda q, k, v: attend(q[None], k[None], v[None], True)[1][0],
        HALF,
        absent=HOPPER_ONLY,
    ),
    Program(
        "delta_net_backward",
        delta_net_backward,
        dict(chunk=64, dim=64),
        drawn(uniform((3, 64, 64)), uniform((3, 64, 64)), uniform((3, 64))),
        delta_net_backward_reference,
        Bound("float32", 256, 64.0),
    ),
]
