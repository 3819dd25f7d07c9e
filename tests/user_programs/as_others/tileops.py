"""In the manner of an operator library for language models: GEMM, attention, norms, reductions, mixture of experts."""

import functools
import itertools

import numpy as np

import tilelang
import tilelang.language as T
from tilelang import PassConfigKey
from tvm import tirx

from .catalogue import EXACT, HOPPER_ONLY, Bound, Program, drawn, dtype, integers, uniform, wide

FLAGS = ["-O3", "-DENABLE_BF16", "--ptxas-options=-v,--register-usage-level=10", "-Wno-deprecated-declarations"]
FAST = {PassConfigKey.TL_ENABLE_FAST_MATH: True}
LOG2E = 1.44269504


def zeros(shape, name="float32"):
    return np.zeros(shape, dtype(str(name)))


@functools.lru_cache(maxsize=8)
def make_gemm(M, N, K, dt="float16"):
    """A factory that closes over the problem and is compiled for a configuration, as operator classes do."""
    acc = "float32"

    @tilelang.jit(out_idx=[-1], compile_flags=FLAGS)
    def gemm(block_m, block_n, block_k, stages, threads, raster):
        @T.prim_func
        def main(a: T.Tensor((M, K), dt), b: T.Tensor((K, N), dt), c: T.Tensor((M, N), dt)):
            with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (bx, by):
                a_s = T.alloc_shared((block_m, block_k), dt)
                b_s = T.alloc_shared((block_k, block_n), dt)
                c_l = T.alloc_fragment((block_m, block_n), acc)
                c_s = T.alloc_shared((block_m, block_n), dt)
                T.annotate_layout({c_s: tilelang.layout.make_swizzled_layout(c_s)})
                T.use_swizzle(10, enable=raster)
                T.clear(c_l)
                for k in T.Pipelined(T.ceildiv(K, block_k), order=[0, 1, 2], stage=[0, 0, stages]):
                    T.copy(a[by * block_m, k * block_k], a_s)
                    T.copy(b[k * block_k, bx * block_n], b_s)
                    T.gemm(a_s, b_s, c_l)
                T.copy(c_l, c_s)
                T.copy(c_s, c[by * block_m, bx * block_n])

        return main

    return gemm


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


@tilelang.jit(out_idx=[5])
def mha_decode_paged_ws(heads, dim, page, block=32, threads=96):
    """One query a head against paged keys: one warp gathers pages with cp.async, two compute."""
    batch, pages, most = T.dynamic("batch, pages, most")
    scale = dim**-0.5 * LOG2E

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, dim), "float16"),
        K: T.Tensor((pages, page, heads, dim), "float16"),
        V: T.Tensor((pages, page, heads, dim), "float16"),
        table: T.Tensor((batch, most), "int32"),
        length: T.Tensor((batch,), "int32"),
        O: T.Tensor((batch, heads, dim), "float16"),
    ):
        with T.Kernel(heads, batch, threads=threads) as (h, b):
            tx = T.get_thread_binding()
            k_s = T.alloc_shared((block, dim), "float16")
            v_s = T.alloc_shared((block, dim), "float16")
            q = T.alloc_shared((dim,), "float32")
            s_s = T.alloc_shared((block,), "float32")
            stat = T.alloc_shared((2,), "float32")
            T.copy(Q[b, h, 0], q)
            acc = T.alloc_var("float32", init=0.0)
            m = T.alloc_var("float32", init=-T.infinity("float32"))
            l = T.alloc_var("float32", init=0.0)
            for kb in T.serial(T.ceildiv(length[b], block)):
                if tx >= 64:
                    for i, j in T.Parallel(block, dim):
                        pos = kb * block + i
                        k_s[i, j] = T.if_then_else(pos < length[b], K[table[b, pos // page], pos % page, h, j], 0)
                        v_s[i, j] = T.if_then_else(pos < length[b], V[table[b, pos // page], pos % page, h, j], 0)
                T.sync_threads()
                if tx < block:
                    dot = T.alloc_var("float32", init=0.0)
                    for d in T.serial(dim):
                        dot += q[d] * k_s[tx, d]
                    s_s[tx] = T.if_then_else(kb * block + tx < length[b], dot * scale, -T.infinity("float32"))
                T.sync_threads()
                if tx == 0:
                    m_new = T.alloc_var("float32")
                    m_new = m
                    for i in T.serial(block):
                        m_new = T.max(m_new, s_s[i])
                    stat[0] = T.exp2(m - m_new)
                    m = m_new
                    l = l * stat[0]
                    for i in T.serial(block):
                        s_s[i] = T.exp2(s_s[i] - m_new)
                        l += s_s[i]
                    stat[1] = l
                T.sync_threads()
                if tx < dim:
                    acc = acc * stat[0]
                    for i in T.serial(block):
                        acc += s_s[i] * v_s[i, tx]
                T.sync_threads()
            if tx < dim:
                O[b, h, tx] = acc / stat[1]

    return main


def paged_reference(q, k, v, table, length):
    q, k, v = wide(q, k, v)
    out = np.zeros(q.shape)
    for b, n in enumerate(length):
        keys, values = (t[table[b]].reshape(-1, *t.shape[2:])[:n] for t in (k, v))
        e = np.exp(np.einsum("hd,nhd->hn", q[b], keys) * q.shape[2] ** -0.5)
        out[b] = np.einsum("hn,nhd->hd", e / e.sum(1, keepdims=True), values)
    return out


@tilelang.jit(out_idx=[2], compile_flags=["-O3"])
def rms_norm(N, eps=1e-6, dt="bfloat16", block_m=2, threads=128):
    M = T.dynamic("M")
    padded = T.ceildiv(N, 128) * 128

    @T.prim_func
    def main(x: T.Tensor[(M, N), dt], weight: T.Tensor[(N,), dt], y: T.Tensor[(M, N), dt]):
        with T.Kernel(T.ceildiv(M, block_m), threads=threads) as pid:
            x_s = T.alloc_shared((block_m, padded), dt)
            x_l = T.alloc_fragment((block_m, padded), "float32")
            sq = T.alloc_fragment((block_m, padded), "float32")
            rms = T.alloc_fragment((block_m,), "float32")
            for i, j in T.Parallel(block_m, padded):
                x_s[i, j] = T.if_then_else(j < N and pid * block_m + i < M, x[pid * block_m + i, j], T.cast(0, dt))
            T.copy(x_s, x_l)
            for i, j in T.Parallel(block_m, padded):
                sq[i, j] = x_l[i, j] * x_l[i, j]
            T.reduce_sum(sq, rms, dim=1)
            for i in T.Parallel(block_m):
                rms[i] = T.rsqrt(rms[i] / float(N) + eps)
            for i, j in T.Parallel(block_m, padded):
                if j < N and pid * block_m + i < M:
                    y[pid * block_m + i, j] = x_l[i, j] * rms[i] * weight[j]

    return main


def rms_norm_reference(x, weight):
    x, weight = wide(x, weight)
    return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * weight


@tilelang.jit(compile_flags=["-O3"])
def fused_add_layer_norm(x, residual, weight, bias, eps: float = 1e-5, block_m: int = 1):
    M = T.dynamic("M")
    N = T.const("N")
    x: T.Tensor((M, N), "float16")
    residual: T.Tensor((M, N), "float16")
    weight: T.Tensor((N,), "float16")
    bias: T.Tensor((N,), "float16")
    y = T.empty((M, N), "float16")
    with T.Kernel(T.ceildiv(M, block_m), threads=128) as pid:
        r = T.alloc_fragment((block_m, N), "float32")
        t = T.alloc_fragment((block_m, N), "float32")
        mean = T.alloc_fragment((block_m,), "float32")
        var = T.alloc_fragment((block_m,), "float32")
        T.copy(x[pid * block_m, 0], r)
        T.copy(residual[pid * block_m, 0], t)
        for i, j in T.Parallel(block_m, N):
            r[i, j] += t[i, j]
        T.copy(r, residual[pid * block_m, 0])
        T.reduce_sum(r, mean, dim=1)
        for i in T.Parallel(block_m):
            mean[i] /= N
        for i, j in T.Parallel(block_m, N):
            t[i, j] = (r[i, j] - mean[i]) * (r[i, j] - mean[i])
        T.reduce_sum(t, var, dim=1)
        for i, j in T.Parallel(block_m, N):
            y[pid * block_m + i, j] = (r[i, j] - mean[i]) * T.rsqrt(var[i] / N + eps) * weight[j] + bias[j]
    return y


def fused_add_layer_norm_reference(x, residual, weight, bias):
    x, residual, weight, bias = wide(x, residual, weight, bias)
    r = x + residual
    c = r - r.mean(1, keepdims=True)
    return c / np.sqrt((c * c).mean(1, keepdims=True) + 1e-5) * weight + bias, r


@tilelang.jit(out_idx=[1, 2], compile_flags=["-O3"])
def var_std(N, correction=1, rows=1, threads=256):
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor((M, N), "float32"), var: T.Tensor((M,), "float32"), std: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, rows), threads=threads) as pid:
            p = T.alloc_fragment((rows, N), "float32")
            sq = T.alloc_fragment((rows, N), "float32")
            mean = T.alloc_fragment((rows,), "float32")
            acc = T.alloc_fragment((rows,), "float32")
            T.copy(x[pid * rows, 0], p)
            T.reduce_sum(p, mean, dim=1)
            for i in T.serial(rows):
                mean[i] = mean[i] / T.float32(N)
            for i in T.serial(rows):
                for j in T.Parallel(N):
                    sq[i, j] = (p[i, j] - mean[i]) * (p[i, j] - mean[i])
            T.reduce_sum(sq, acc, dim=1)
            for i in T.Parallel(rows):
                acc[i] = acc[i] / T.float32(N - correction)
            T.copy(acc, var[pid * rows])
            for i in T.Parallel(rows):
                std[pid * rows + i] = T.sqrt(acc[i])

    return main


def reduce_kinds(N):
    """All kinds of reductions in one launch, of a row in shared memory and in registers."""
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor((M, N), "float16"), out: T.Tensor((M, 5), "float32")):
        with T.Kernel(M, threads=64) as pid:
            x_s = T.alloc_shared((1, N), "float16")
            x_f = T.alloc_fragment((1, N), "float32")
            r = T.alloc_fragment((1, 1), "float32")
            T.copy(x[pid, 0], x_s)
            T.copy(x_s, x_f)
            T.reduce(x_f, r, "sum", 1, True)
            out[pid, 0] = r[0, 0]
            T.reduce(x_f, r, "max", 1, True)
            out[pid, 1] = r[0, 0]
            T.reduce(x_f, r, "min", 1, True)
            out[pid, 2] = r[0, 0]
            T.reduce_absmax(x_f, r, dim=-1)
            out[pid, 3] = r[0, 0]
            T.reduce_abssum(x_f, r, dim=-1)
            out[pid, 4] = r[0, 0]

    return main


def reduce_kinds_reference(x, out):
    (x,) = wide(x)
    return np.stack([x.sum(1), x.max(1), x.min(1), np.abs(x).max(1), np.abs(x).sum(1)], 1)


@tilelang.jit(out_idx=[-1], compile_flags="-O3")
def log_softmax(N, block_n=128, dt="float32"):
    """Online: a running maximum and sum over column blocks, then a second pass."""
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor[(M, N), dt], y: T.Tensor[(M, N), dt]):
        with T.Kernel(M, threads=128) as pid:
            x_l = T.alloc_fragment((1, block_n), dt)
            e = T.alloc_fragment((1, block_n), dt)
            mx = T.alloc_fragment((1,), dt)
            s = T.alloc_fragment((1,), dt)
            lse = T.alloc_fragment((1,), dt)
            T.fill(lse, -T.infinity(dt))
            for k in T.Pipelined(T.ceildiv(N, block_n), num_stages=2):
                for i, j in T.Parallel(1, block_n):
                    x_l[i, j] = T.if_then_else(k * block_n + j < N, x[pid, k * block_n + j], -T.infinity(dt))
                T.reduce_max(x_l, mx, dim=1, clear=True)
                for i, j in T.Parallel(1, block_n):
                    e[i, j] = T.exp2((x_l[i, j] - mx[i]) * LOG2E)
                T.reduce_sum(e, s, dim=1, clear=True)
                for i in T.Parallel(1):
                    lse[i] = mx[i] * LOG2E + T.log2(T.exp2(lse[i] - mx[i] * LOG2E) + s[i])
            for k in T.serial(T.ceildiv(N, block_n)):
                for i, j in T.Parallel(1, block_n):
                    if k * block_n + j < N:
                        y[pid + i, k * block_n + j] = x[pid + i, k * block_n + j] - lse[i] / LOG2E

    return main


def log_softmax_reference(x):
    (x,) = wide(x)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


@tilelang.jit(out_idx=[-1])
def argmax(N, threads=128):
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor((M, N), "float16"), out: T.Tensor((M,), "int64")):
        with T.Kernel(M, threads=threads) as pid:
            tx = T.get_thread_binding()
            best = T.alloc_var("float32", init=-T.infinity("float32"))
            at = T.alloc_var("int32", init=0)
            vals = T.alloc_shared((threads,), "float32")
            ats = T.alloc_shared((threads,), "int32")
            for k in T.serial(T.ceildiv(N, threads)):
                j = k * threads + tx
                if j < N and T.cast(x[pid, j], "float32") > best:
                    best = x[pid, j]
                    at = j
            vals[tx] = best
            ats[tx] = at
            for s in T.unroll(7):
                half = threads >> (s + 1)
                T.sync_threads()
                if tx < half:
                    if vals[tx + half] > vals[tx] or (vals[tx + half] == vals[tx] and ats[tx + half] < ats[tx]):
                        vals[tx] = vals[tx + half]
                        ats[tx] = ats[tx + half]
            T.sync_threads()
            if tx == 0:
                out[pid] = T.cast(ats[0], "int64")

    return main


@tilelang.jit(out_idx=[1, 2])
def cumulative(N, block=64):
    """Inclusive sums and running maxima of long rows, block by block with a carry."""
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor((M, N), "float32"), total: T.Tensor((M, N), "float32"), largest: T.Tensor((M, N), "float32")):
        with T.Kernel(M, threads=64) as pid:
            s = T.alloc_shared((block,), "float32")
            mx = T.alloc_shared((block,), "float32")
            carry = T.alloc_fragment((1,), "float32")
            high = T.alloc_fragment((1,), "float32")
            T.clear(carry)
            T.fill(high, -T.infinity("float32"))
            for k in T.serial(T.ceildiv(N, block)):
                T.copy(x[pid, k * block], s)
                T.copy(x[pid, k * block], mx)
                T.cumsum(s, dim=0)
                T.cummax(mx, dim=0)
                for j in T.Parallel(block):
                    if k * block + j < N:
                        total[pid, k * block + j] = s[j] + carry[0]
                        largest[pid, k * block + j] = T.max(mx[j], high[0])
                carry[0] += s[block - 1]
                high[0] = T.max(high[0], mx[block - 1])

    return main


@tilelang.jit(compile_flags=FLAGS)
def moe_align(experts, block, threads=64):
    """Sorted token positions of each expert, padded to whole blocks, and each block's expert."""
    n, most = T.dynamic("n, most")

    @T.prim_func
    def main(
        choice: T.Tensor((n,), "int32"),
        order: T.Tensor((most,), "int32"),
        owner: T.Tensor((most // block,), "int32"),
        total: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(1, threads=threads) as _:
            tx = T.get_thread_binding()
            count = T.alloc_shared((experts,), "int32")
            start = T.alloc_shared((experts + 1,), "int32")
            T.clear(count)
            for k in T.serial(T.ceildiv(n, threads)):
                i = k * threads + tx
                if i < n:
                    T.atomic_add(count[choice[i]], 1)
            T.sync_threads()
            if tx == 0:
                start[0] = 0
                for e in T.serial(experts):
                    start[e + 1] = start[e] + T.ceildiv(count[e], block) * block
                total[0] = start[experts]
            T.sync_threads()
            for k in T.serial(T.ceildiv(most, threads)):
                i = k * threads + tx
                if i < most:
                    order[i] = n
            T.sync_threads()
            if tx < experts:
                for b in T.serial(start[tx] // block, start[tx + 1] // block):
                    owner[b] = tx
                at = T.alloc_var("int32", init=start[tx])
                for i in T.serial(n):
                    if choice[i] == tx:
                        order[at] = i
                        at += 1

    return main


def moe_align_reference(choice, order, owner, total, experts=6, block=16):
    order, owner, at = np.full(order.shape, len(choice)), owner.copy(), 0
    for e in range(experts):
        mine = np.flatnonzero(choice == e)
        order[at : at + len(mine)] = mine
        blocks = -(-len(mine) // block)
        owner[at // block : at // block + blocks] = e
        at += blocks * block
    return order, owner, np.array([at])


@tilelang.jit(compile_flags=["-O3"])
def grouped_gemm(N, K, experts, block_m=32, block_n=64, block_k=32, dt="bfloat16"):
    """C[rows of e] = A[rows of e] @ B[e].T, with the group found from the offsets by each block."""
    rows = T.dynamic("rows")
    tiles = T.ceildiv(rows, block_m) + experts

    @T.prim_func
    def main(
        A: T.Tensor[(rows, K), dt],
        B: T.Tensor[(experts, N, K), dt],
        ends: T.Tensor((experts,), "int32"),
        C: T.Tensor[(rows, N), dt],
    ):
        with T.Kernel(T.ceildiv(N, block_n), tiles, threads=128) as (bx, by):
            A_s = T.alloc_shared((block_m, block_k), dt)
            B_s = T.alloc_shared((block_n, block_k), dt)
            acc = T.alloc_fragment((block_m, block_n), "float32")
            tile = T.alloc_var("int32", init=by)
            group = T.alloc_var("int32", init=-1)
            first = T.alloc_var("int32", init=0)
            last = T.alloc_var("int32", init=0)
            start = T.alloc_var("int32", init=0)
            for e in T.serial(experts):
                t = T.ceildiv(ends[e] - start, block_m)
                if group < 0:
                    if tile < t:
                        group = e
                        first = start + tile * block_m
                        last = ends[e]
                    else:
                        tile -= t
                start = ends[e]
            if group >= 0:
                T.clear(acc)
                for k in T.Pipelined(T.ceildiv(K, block_k), num_stages=2):
                    T.copy(A[first : first + block_m, k * block_k : (k + 1) * block_k], A_s)
                    T.copy(B[group, bx * block_n : (bx + 1) * block_n, k * block_k : (k + 1) * block_k], B_s)
                    T.gemm(A_s, B_s, acc, transpose_B=True)
                for i, j in T.Parallel(block_m, block_n):
                    if first + i < last and bx * block_n + j < N:
                        C[first + i, bx * block_n + j] = acc[i, j]

    return main


def grouped_gemm_reference(a, b, ends, c):
    a, b, c = wide(a, b, c)
    for e, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        c[start:end] = a[start:end] @ b[e].T
    return c


@tilelang.jit(out_idx=[-1])
def moe_gate_up(hidden, inter, block_m=64, block_n=64, block_k=64, dt="float16"):
    """silu(x @ gate.T) * (x @ up.T): two accumulators, operands in layouts that the author asks for."""
    M = T.dynamic("M")

    @T.prim_func
    def main(
        x: T.Tensor[(M, hidden), dt],
        gate: T.Tensor[(inter, hidden), dt],
        up: T.Tensor[(inter, hidden), dt],
        y: T.Tensor[(M, inter), dt],
    ):
        with T.Kernel(T.ceildiv(M, block_m), T.ceildiv(inter, block_n), threads=128) as (bx, by):
            x_s = T.alloc_shared((block_m, block_k), dt)
            g_s = T.alloc_shared((block_n, block_k), dt)
            u_s = T.alloc_shared((block_n, block_k), dt)
            g = T.alloc_fragment((block_m, block_n), "float32")
            u = T.alloc_fragment((block_m, block_n), "float32")
            T.annotate_layout({b: tilelang.layout.make_swizzled_layout(b) for b in (x_s, g_s, u_s)})
            T.use_swizzle(4)
            T.clear(g)
            T.clear(u)
            for k in T.Pipelined(T.ceildiv(hidden, block_k), num_stages=2):
                T.copy(x[bx * block_m, k * block_k], x_s)
                T.copy(gate[by * block_n, k * block_k], g_s)
                T.gemm(x_s, g_s, g, transpose_B=True)
                T.copy(up[by * block_n, k * block_k], u_s)
                T.gemm(x_s, u_s, u, transpose_B=True)
            for i, j in T.Parallel(block_m, block_n):
                g[i, j] = g[i, j] * (1.0 / (1.0 + T.exp2(-g[i, j] * LOG2E))) * u[i, j]
            T.copy(g, y[bx * block_m, by * block_n])

    return main


def moe_gate_up_reference(x, gate, up):
    x, gate, up = wide(x, gate, up)
    g = x @ gate.T
    return g / (1 + np.exp(-g)) * (x @ up.T)


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


@tilelang.jit(out_idx=[-1], pass_configs={PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
def dsa_decode(heads, dim, topk, block=32, stages=2):
    """Gathered keys come by asynchronous stores under the raw attribute; the block waits for groups by hand."""
    batch, rows = T.dynamic("batch, rows")
    scale = dim**-0.5 * LOG2E

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, dim), "bfloat16"),
        KV: T.Tensor((rows, dim), "bfloat16"),
        index: T.Tensor((batch, topk), "int32"),
        O: T.Tensor((batch, heads, dim), "bfloat16"),
    ):
        with T.Kernel(batch, threads=128) as b:
            q_s = T.alloc_shared((heads, dim), "bfloat16")
            kv_s = T.alloc_shared((stages, block, dim), "bfloat16")
            s = T.alloc_fragment((heads, block), "float32")
            p_s = T.alloc_shared((heads, block), "bfloat16")
            o = T.alloc_fragment((heads, dim), "float32")
            m, m_prev, corr, row, l = (T.alloc_fragment((heads,), "float32") for _ in (0, 1, 2, 3, 4))
            T.copy(Q[b, 0, 0], q_s)
            T.clear(o)
            T.clear(l)
            T.fill(m, -1e30)
            with T.attr("default", "async_scope", 1):
                for i, d in T.Parallel(block, dim):
                    kv_s[0, i, d] = KV[index[b, i], d]
            T.ptx_commit_group()
            for k in T.serial(topk // block):
                if k + 1 < topk // block:
                    with T.attr("default", "async_scope", 1):
                        for i, d in T.Parallel(block, dim):
                            kv_s[(k + 1) % stages, i, d] = KV[index[b, (k + 1) * block + i], d]
                T.ptx_commit_group()
                T.ptx_wait_group(1)
                T.sync_threads()
                T.gemm(q_s, kv_s[k % stages, :, :], s, transpose_B=True, clear_accum=True)
                T.copy(m, m_prev)
                T.reduce_max(s, m, dim=1, clear=False)
                for i in T.Parallel(heads):
                    corr[i] = T.exp2((m_prev[i] - m[i]) * scale)
                for i, j in T.Parallel(heads, block):
                    s[i, j] = T.exp2((s[i, j] - m[i]) * scale)
                T.reduce_sum(s, row, dim=1)
                T.copy(s, p_s)
                for i in T.Parallel(heads):
                    l[i] = l[i] * corr[i] + row[i]
                for i, j in T.Parallel(heads, dim):
                    o[i, j] *= corr[i]
                T.gemm(p_s, kv_s[k % stages, :, :], o)
                T.sync_threads()
            for i, j in T.Parallel(heads, dim):
                o[i, j] /= l[i]
            T.copy(o, O[b, 0, 0])

    return main


def dsa_decode_reference(q, kv, index):
    q, kv = wide(q, kv)
    keys = kv[index]
    e = np.exp(np.einsum("bhd,bnd->bhn", q, keys) * q.shape[2] ** -0.5)
    return np.einsum("bhn,bnd->bhd", e / e.sum(2, keepdims=True), keys)


@tilelang.jit(out_idx=[2])
def conv2d(n, h, w, c, f, kernel, stride, pad, block_m=64, block_n=32, block_k=32, dt="float16"):
    out_h, out_w = (h + 2 * pad - kernel) // stride + 1, (w + 2 * pad - kernel) // stride + 1

    @T.prim_func
    def main(
        data: T.Tensor((n, h, w, c), dt), weight: T.Tensor((kernel, kernel, c, f), dt), out: T.Tensor((n, out_h, out_w, f), dt)
    ):
        with T.Kernel(T.ceildiv(f, block_n), T.ceildiv(n * out_h * out_w, block_m), threads=128) as (bx, by):
            data_s = T.alloc_shared((block_m, block_k), dt)
            weight_s = T.alloc_shared((block_k, block_n), dt)
            acc = T.alloc_fragment((block_m, block_n), "float")
            flat = T.reshape(weight, (kernel * kernel * c, f))
            out_flat = T.view(out, (n * out_h * out_w, f))
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(kernel * kernel * c, block_k), num_stages=2):
                T.im2col(data, data_s, by, k, kernel, stride, 1, pad)
                T.copy(flat[k * block_k, bx * block_n], weight_s)
                T.gemm(data_s, weight_s, acc)
            T.copy(acc, out_flat[by * block_m, bx * block_n])

    return main


def conv2d_reference(stride, pad):
    def reference(x, w):
        x, w = wide(x, w)
        x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        k = w.shape[0]
        oh, ow = (x.shape[1] - k) // stride + 1, (x.shape[2] - k) // stride + 1
        out = np.zeros((x.shape[0], oh, ow, w.shape[3]))
        for i, j in np.ndindex(k, k):
            out += x[:, i : i + oh * stride : stride, j : j + ow * stride : stride] @ w[i, j]
        return out

    return reference


@tilelang.jit(out_idx=[1])
def dropout(N, keep, seed=7, block=256):
    """Philox numbers of each thread, drawn inside of the parallel loop: kept elements are scaled, and 0 stays 0."""

    @T.prim_func
    def main(x: T.Tensor((N,), "float32"), y: T.Tensor((N,), "float32")):
        with T.Kernel(T.ceildiv(N, block), threads=block) as bx:
            T.rng_init(seed, bx * block + T.get_thread_binding())
            for i in T.Parallel(block):
                u = T.rng_rand_float()
                if bx * block + i < N:
                    y[bx * block + i] = T.if_then_else(u < keep, x[bx * block + i] / keep, 0.0)

    return main


@tilelang.jit(out_idx=[2])
def gemv(N, K, lanes=4, reduce_threads=32, dt="float16", acc="float32"):
    """One warp a row of the matrix, vector loads and an all-reduce."""
    vector = 128 // tirx.IntImm("int32", 16).value if hasattr(tirx.IntImm("int32", 16), "value") else 8

    @T.prim_func
    def main(A: T.Tensor((K,), dt), B: T.Tensor((N, K), dt), C: T.Tensor((N,), dt)):
        with T.Kernel(T.ceildiv(N, lanes), threads=(lanes, reduce_threads)) as bn:
            tn = T.get_thread_binding(0)
            tk = T.get_thread_binding(1)
            a = T.alloc_local((vector,), dt)
            b = T.alloc_local((vector,), dt)
            total = T.alloc_local((1,), acc)
            T.clear(total)
            for bk in T.serial(T.ceildiv(K, reduce_threads * vector)):
                for k in T.vectorized(vector):
                    a[k] = A[bk * reduce_threads * vector + tk * vector + k]
                    b[k] = B[bn * lanes + tn, bk * reduce_threads * vector + tk * vector + k]
                for k in T.serial(vector):
                    total[0] += a[k].astype(acc) * b[k].astype(acc)
            reduced = T.alloc_local((1,), acc)
            with T.attr(
                T.comm_reducer(lambda x, y: x + y, [T.Cast(acc, 0)]), "reduce_scope", T.reinterpret(T.uint64(0), dtype="handle")
            ):
                T.evaluate(T.tvm_thread_allreduce(T.uint32(1), total[0], True, reduced[0], tk, dtype="handle"))
            C[bn * lanes + tn] = reduced[0]

    return main


@tilelang.jit
def batch_norm_train(x, weight, bias, running_mean, running_var, momentum: float = 0.1, eps: float = 1e-5):
    """Channel statistics over a batch with Welford's update in one thread a lane, merged by shuffles."""
    n = T.dynamic("n")
    C = T.const("C")
    x: T.Tensor((n, C), "float32")
    weight: T.Tensor((C,), "float32")
    bias: T.Tensor((C,), "float32")
    running_mean: T.Tensor((C,), "float32")
    running_var: T.Tensor((C,), "float32")
    y = T.empty((n, C), "float32")
    with T.Kernel(C, threads=32) as c:
        lane = T.get_thread_binding()
        count = T.alloc_var("float32", init=0.0)
        mean = T.alloc_var("float32", init=0.0)
        m2 = T.alloc_var("float32", init=0.0)
        for k in T.serial(T.ceildiv(n, 32)):
            if k * 32 + lane < n:
                v = x[k * 32 + lane, c]
                count += 1.0
                d = v - mean
                mean += d / count
                m2 += d * (v - mean)
        for s in T.unroll(5):
            other_count = T.shfl_xor(count, 16 >> s)
            other_mean = T.shfl_xor(mean, 16 >> s)
            other_m2 = T.shfl_xor(m2, 16 >> s)
            both = count + other_count
            delta = other_mean - mean
            # both lanes form the pair the same way: count-weighted, so that all lanes agree
            m2 = T.if_then_else(both > 0.0, m2 + other_m2 + delta * delta * count * other_count / T.max(both, 1.0), 0.0)
            mean = T.if_then_else(both > 0.0, (mean * count + other_mean * other_count) / T.max(both, 1.0), 0.0)
            count = both
        var = m2 / count
        inv = T.rsqrt(var + eps)
        for k in T.serial(T.ceildiv(n, 32)):
            if k * 32 + lane < n:
                y[k * 32 + lane, c] = (x[k * 32 + lane, c] - mean) * inv * weight[c] + bias[c]
        if lane == 0:
            running_mean[c] = running_mean[c] * (1.0 - momentum) + mean * momentum
            running_var[c] = running_var[c] * (1.0 - momentum) + m2 / (count - 1.0) * momentum
    return y


def batch_norm_train_reference(x, weight, bias, rm, rv):
    x, weight, bias, rm, rv = wide(x, weight, bias, rm, rv)
    y = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * weight + bias
    return y, rm * 0.9 + x.mean(0) * 0.1, rv * 0.9 + x.var(0, ddof=1) * 0.1


@tilelang.jit(out_idx=[-1], compile_flags=["-O3", "--use_fast_math"])
def gelu_and_mul(N, block=256, dt="float16"):
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor[(M, 2 * N), dt], y: T.Tensor[(M, N), dt]):
        with T.Kernel(T.ceildiv(N, block), M, threads=128) as (bx, by):
            for i in T.Parallel(block):
                if bx * block + i < N:
                    a = x[by, bx * block + i].astype("float32")
                    b = x[by, N + bx * block + i].astype("float32")
                    y[by, bx * block + i] = 0.5 * a * (1.0 + T.erf(a * 0.70710678)) * b

    return main


def gelu_and_mul_reference(x):
    from math import erf

    (x,) = wide(x)
    n = x.shape[1] // 2
    return 0.5 * x[:, :n] * (1 + np.vectorize(erf)(x[:, :n] / np.sqrt(2))) * x[:, n:]


def paged_inputs(batch, heads, dim, page, most):
    def draw(g):
        pages = batch * most
        length = g.integers(1, most * page, batch).astype(np.int32)
        half = [
            g.uniform(-1, 1, s).astype(np.float16)
            for s in ((batch, heads, dim), (pages, page, heads, dim), (pages, page, heads, dim))
        ]
        return [*half, g.permutation(pages).reshape(batch, most).astype(np.int32), length]

    return draw


HALF = Bound("float16", via=(("float16", 1.0),))
QKV = drawn(uniform((2, 70, 4, 32), "float16"), uniform((2, 70, 2, 32), "float16"), uniform((2, 70, 2, 32), "float16"))
PROGRAMS = [
    Program(
        "gemm",
        make_gemm(100, 136, 96),
        dict(block_m=64, block_n=64, block_k=32, stages=2, threads=128, raster=True),
        drawn(uniform((100, 96), "float16"), uniform((96, 136), "float16")),
        lambda a, b: wide(a)[0] @ wide(b)[0],
        Bound("float16", 96, 96.0),
    ),
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
        "mha_decode_paged_ws",
        mha_decode_paged_ws,
        dict(heads=2, dim=64, page=16),
        paged_inputs(3, 2, 64, 16, 5),
        paged_reference,
        HALF,
    ),
    Program(
        "rms_norm",
        rms_norm,
        dict(N=200),
        drawn(uniform((5, 200), "bfloat16"), uniform((200,), "bfloat16")),
        rms_norm_reference,
        Bound("bfloat16", 256, 2.0),
    ),
    Program(
        "fused_add_layer_norm",
        fused_add_layer_norm,
        dict(N=192),
        drawn(
            uniform((5, 192), "float16"), uniform((5, 192), "float16"), uniform((192,), "float16"), uniform((192,), "float16")
        ),
        fused_add_layer_norm_reference,
        Bound("float16", 200, 4.0),
        changed=(1,),
    ),
    Program(
        "var_std",
        var_std,
        dict(N=1024),
        drawn(uniform((3, 1024))),
        lambda x: (wide(x)[0].var(1, ddof=1), wide(x)[0].std(1, ddof=1)),
        Bound("float32", 1024, 2.0),
    ),
    Program(
        "reduce_kinds",
        reduce_kinds,
        dict(N=160),
        drawn(uniform((4, 160), "float16"), zeros((4, 5))),
        reduce_kinds_reference,
        Bound("float32", 160, 160.0),
        changed=(1,),
    ),
    Program(
        "log_softmax",
        log_softmax,
        dict(N=300),
        drawn(uniform((4, 300), low=-4, high=4)),
        log_softmax_reference,
        Bound("float32", 300, 16.0),
    ),
    Program(
        "argmax", argmax, dict(N=300), drawn(uniform((4, 300), "float16")), lambda x: x.astype(np.float32).argmax(1), EXACT
    ),
    Program(
        "cumulative",
        cumulative,
        dict(N=150),
        drawn(uniform((3, 150))),
        lambda x: (np.cumsum(wide(x)[0], 1), np.maximum.accumulate(wide(x)[0], 1)),
        (Bound("float32", 150, 75.0), EXACT),
    ),
    Program(
        "moe_align",
        moe_align,
        dict(experts=6, block=16),
        drawn(integers((100,), 0, 6), zeros((208,), "int32"), zeros((13,), "int32"), zeros((1,), "int32")),
        moe_align_reference,
        EXACT,
        changed=(1, 2, 3),
    ),
    Program(
        "grouped_gemm",
        grouped_gemm,
        dict(N=72, K=64, experts=4),
        drawn(
            uniform((90, 64), "bfloat16"),
            uniform((4, 72, 64), "bfloat16"),
            np.array([20, 20, 75, 90], np.int32),
            zeros((90, 72), "bfloat16"),
        ),
        grouped_gemm_reference,
        Bound("bfloat16", 64, 64.0),
        changed=(3,),
    ),
    Program(
        "moe_gate_up",
        moe_gate_up,
        dict(hidden=128, inter=72),
        drawn(uniform((70, 128), "float16"), uniform((72, 128), "float16"), uniform((72, 128), "float16")),
        moe_gate_up_reference,
        Bound("float16", 256, 512.0),
    ),
    Program(
        "delta_net_backward",
        delta_net_backward,
        dict(chunk=64, dim=64),
        drawn(uniform((3, 64, 64)), uniform((3, 64, 64)), uniform((3, 64))),
        delta_net_backward_reference,
        Bound("float32", 256, 64.0),
    ),
    Program(
        "dsa_decode",
        dsa_decode,
        dict(heads=16, dim=64, topk=96),
        drawn(uniform((2, 16, 64), "bfloat16"), uniform((150, 64), "bfloat16"), integers((2, 96), 0, 150)),
        dsa_decode_reference,
        Bound("bfloat16", via=(("bfloat16", 1.0),)),
    ),
    Program(
        "conv2d",
        conv2d,
        dict(n=2, h=9, w=7, c=16, f=24, kernel=3, stride=1, pad=1),
        drawn(uniform((2, 9, 7, 16), "float16"), uniform((3, 3, 16, 24), "float16")),
        conv2d_reference(1, 1),
        Bound("float16", 144, 144.0),
    ),
    Program(
        "dropout",
        dropout,
        dict(N=600, keep=0.5),
        drawn(np.ones(600, np.float32)),
        lambda x: np.ones(600),
        EXACT,
        arrange=lambda r: [np.where((r[0] == 0) | (r[0] == 2), 1.0, 0.0) * (200 < (r[0] == 2).sum() < 400)],
    ),
    Program(
        "gemv",
        gemv,
        dict(N=44, K=512),
        drawn(uniform((512,), "float16"), uniform((44, 512), "float16")),
        lambda a, b: wide(b)[0] @ wide(a)[0],
        Bound("float16", 512, 512.0),
    ),
    Program(
        "batch_norm_train",
        batch_norm_train,
        dict(C=10),
        drawn(uniform((75, 10)), uniform((10,)), uniform((10,)), uniform((10,)), uniform((10,), low=0.5)),
        batch_norm_train_reference,
        Bound("float32", 75, 8.0),
        changed=(3, 4),
    ),
    Program(
        "gelu_and_mul",
        gelu_and_mul,
        dict(N=300),
        drawn(uniform((3, 600), "float16", -3, 3)),
        gelu_and_mul_reference,
        Bound("float16", 16, 9.0),
    ),
]
