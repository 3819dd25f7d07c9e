"""Attention of one token over caches."""

import numpy as np

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from ..catalogue import Bound, Program, drawn, integers, uniform, wide, zeros
from .common import BF16, F16, F32, FP8, HALF, I32, LOG2E, PLAIN


def make_paged_decode(heads, heads_kv, dim, page, splits, block_h=16):
    """Split keys and values, gathered page by page; a second launch of the same function puts the splits together."""
    groups, scale = heads // heads_kv, dim**-0.5 * LOG2E

    @tilelang.jit(out_idx=[-1], pass_configs=PLAIN)
    def paged_decode(threads, stages):
        batch, pages, most = T.dynamic("batch, pages, most")
        blk = page

        @T.prim_func
        def main(
            Q: T.Tensor((batch, heads, dim), F16),
            K: T.Tensor((pages, page, heads_kv, dim), F16),
            V: T.Tensor((pages, page, heads_kv, dim), F16),
            table: T.Tensor((batch, most), I32),
            lens: T.Tensor((batch,), I32),
            part: T.Tensor((batch, heads, splits, dim), F32),
            lse: T.Tensor((batch, heads, splits), F32),
            O: T.Tensor((batch, heads, dim), F16),
        ):
            with T.Kernel(batch, heads_kv, splits, threads=threads) as (b, h, sp):
                q_s = T.alloc_shared((block_h, dim), F16)
                k_s = T.alloc_shared((blk, dim), F16)
                v_s = T.alloc_shared((blk, dim), F16)
                s = T.alloc_fragment((block_h, blk), F32)
                p = T.alloc_fragment((block_h, blk), F16)
                o = T.alloc_fragment((block_h, dim), F32)
                m, m_old, corr, row, l = (T.alloc_fragment((block_h,), F32) for _ in (0, 1, 2, 3, 4))
                T.annotate_layout({q_s: make_swizzled_layout(q_s), k_s: make_swizzled_layout(k_s)})
                for i, j in T.Parallel(block_h, dim):
                    q_s[i, j] = T.if_then_else(i < groups, Q[b, h * groups + i, j], T.float16(0))
                T.clear(o)
                T.clear(l)
                T.fill(m, -1e30)
                blocks = T.ceildiv(lens[b], blk)
                per = T.ceildiv(blocks, splits)
                for kb in T.Pipelined(T.max(0, T.min(per, blocks - sp * per)), num_stages=stages):
                    n = sp * per + kb
                    T.copy(K[table[b, n], 0:blk, h, :], k_s)
                    T.copy(V[table[b, n], 0:blk, h, :], v_s)
                    T.gemm(q_s, k_s, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
                    for i, j in T.Parallel(block_h, blk):
                        s[i, j] = T.if_then_else(n * blk + j < lens[b], s[i, j] * scale, -T.infinity(F32))
                    T.copy(m, m_old)
                    T.reduce_max(s, m, dim=1, clear=False)
                    for i in T.Parallel(block_h):
                        corr[i] = T.exp2(m_old[i] - m[i])
                    for i, j in T.Parallel(block_h, blk):
                        s[i, j] = T.exp2(s[i, j] - m[i])
                    T.reduce_sum(s, row, dim=1)
                    for i in T.Parallel(block_h):
                        l[i] = l[i] * corr[i] + row[i]
                    T.copy(s, p)
                    for i, j in T.Parallel(block_h, dim):
                        o[i, j] *= corr[i]
                    T.gemm(p, v_s, o, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(block_h, dim):
                    if i < groups:
                        part[b, h * groups + i, sp, j] = T.if_then_else(l[i] > 0, o[i, j] / l[i], 0.0)
                for i in T.Parallel(block_h):
                    if i < groups:
                        lse[b, h * groups + i, sp] = T.if_then_else(l[i] > 0, T.log2(l[i]) + m[i], -T.infinity(F32))
            with T.Kernel(heads, batch, threads=64) as (h, b):
                total = T.alloc_fragment((dim,), F32)
                high = T.alloc_var(F32, init=-T.infinity(F32))
                weight = T.alloc_var(F32, init=0.0)
                T.clear(total)
                for sp in T.serial(splits):
                    high = T.max(high, lse[b, h, sp])
                for sp in T.serial(splits):
                    w = T.exp2(lse[b, h, sp] - high)
                    weight += w
                    for j in T.Parallel(dim):
                        total[j] += part[b, h, sp, j] * w
                for j in T.Parallel(dim):
                    O[b, h, j] = total[j] / weight

        return main

    return paged_decode


def paged_inputs(batch, heads, heads_kv, dim, page, most, splits):
    def draw(g):
        pages = batch * most
        q, k, v = (
            g.uniform(-1, 1, s).astype(F16)
            for s in ((batch, heads, dim), (pages, page, heads_kv, dim), (pages, page, heads_kv, dim))
        )
        table = g.permutation(pages).reshape(batch, most).astype(np.int32)
        lens = np.array([1, most * page - 5, page * 2][:batch], np.int32)
        return [q, k, v, table, lens, zeros((batch, heads, splits, dim)), zeros((batch, heads, splits))]

    return draw


def paged_reference(q, k, v, table, lens, part, lse):
    q, k, v = wide(q, k, v)
    out = np.zeros(q.shape)
    for b, n in enumerate(lens):
        keys, values = (np.repeat(t[table[b]].reshape(-1, *t.shape[2:])[:n], q.shape[1] // t.shape[2], 1) for t in (k, v))
        e = np.exp(np.einsum("hd,nhd->hn", q[b], keys) * q.shape[2] ** -0.5)
        out[b] = np.einsum("hn,nhd->hd", e / e.sum(1, keepdims=True), values)
    return out


@tilelang.jit(out_idx=[-1], pass_configs=PLAIN)
def mla_two_groups(heads, dim, topk, block=32):
    """Two warp groups: the first multiplies left halves, the second right ones; a third copies gathered rows with barriers."""
    batch, rows = T.dynamic("batch, rows")
    half, scale = dim // 2, dim**-0.5 * LOG2E

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, dim), BF16),
        KV: T.Tensor((rows, dim), BF16),
        index: T.Tensor((batch, topk), I32),
        O: T.Tensor((batch, heads, dim), BF16),
    ):
        with T.Kernel(batch, threads=384) as b:
            q_l = T.alloc_shared((heads, half), BF16)
            q_r = T.alloc_shared((heads, half), BF16)
            kv_l = T.alloc_shared((block, half), BF16)
            kv_r = T.alloc_shared((block, half), BF16)
            p_s = T.alloc_shared((heads, block), BF16)
            c_s = T.alloc_shared((heads,), F32)
            l_s = T.alloc_shared((heads,), F32)
            o_l = T.alloc_fragment((heads, half), F32)
            o_r = T.alloc_fragment((heads, half), F32)
            s = T.alloc_fragment((heads, block), F32)
            m, m_old, corr, row, l = (T.alloc_fragment((heads,), F32) for _ in (0, 1, 2, 3, 4))
            full = T.alloc_barrier(128)
            free = T.alloc_barrier(256)
            ready = T.alloc_barrier(128)
            q_in = T.alloc_barrier(384)
            tx = T.get_thread_binding()
            T.copy(Q[b, 0:heads, 0:half], q_l)
            T.copy(Q[b, 0:heads, half:dim], q_r)
            T.barrier_arrive(q_in)
            if tx < 128:
                T.set_max_nreg(240, 1)
                T.clear(o_l)
                T.clear(l)
                T.fill(m, -1e30)
                T.barrier_wait(q_in, 0)
                for k in T.serial(topk // block):
                    T.barrier_wait(full, k & 1)
                    T.gemm(q_l, kv_l, s, transpose_B=True, clear_accum=True, wg_wait=0)
                    T.gemm(q_r, kv_r, s, transpose_B=True, wg_wait=0)
                    T.copy(m, m_old)
                    T.reduce_max(s, m, dim=1, clear=False)
                    for i in T.Parallel(heads):
                        corr[i] = T.exp2((m_old[i] - m[i]) * scale)
                    for i, j in T.Parallel(heads, block):
                        s[i, j] = T.exp2(s[i, j] * scale - m[i] * scale)
                    T.reduce_sum(s, row, dim=1)
                    for i in T.Parallel(heads):
                        l[i] = l[i] * corr[i] + row[i]
                    for i, j in T.Parallel(heads, half):
                        o_l[i, j] *= corr[i]
                    T.copy(corr, c_s)
                    T.copy(s, p_s)
                    T.copy(l, l_s)
                    T.barrier_arrive(ready)
                    T.gemm(p_s, kv_l, o_l)
                    T.barrier_arrive(free)
                for i, j in T.Parallel(heads, half):
                    o_l[i, j] /= l[i]
                T.copy(o_l, O[b, 0:heads, 0:half])
            elif tx < 256:
                T.set_max_nreg(168, 1)
                T.clear(o_r)
                for k in T.serial(topk // block):
                    T.barrier_wait(ready, k & 1)
                    for i, j in T.Parallel(heads, half):
                        o_r[i, j] *= c_s[i]
                    T.gemm(p_s, kv_r, o_r)
                    if k == topk // block - 1:
                        for i, j in T.Parallel(heads, half):
                            o_r[i, j] /= l_s[i]
                    T.barrier_arrive(free)
                T.copy(o_r, O[b, 0:heads, half:dim])
            else:
                T.set_max_nreg(80, 0)
                for k in T.serial(topk // block):
                    T.barrier_wait(free, (k & 1) ^ 1)
                    for r in T.serial(block * half // 8 // 128):
                        e = r * 128 + (tx - 256)
                        i, c = e // (half // 8), e % (half // 8) * 8
                        with T.attr("default", "async_scope", 1):
                            for v in T.vectorized(8):
                                kv_l[i, c + v] = KV[index[b, k * block + i], c + v]
                                kv_r[i, c + v] = KV[index[b, k * block + i], half + c + v]
                    T.cp_async_barrier_noinc(full[0])

    return main


def gathered_reference(q, kv, index):
    q, kv = wide(q, kv)
    keys = kv[index]
    e = np.exp(np.einsum("bhd,bnd->bhn", q, keys) * q.shape[2] ** -0.5)
    return np.einsum("bhn,bnd->bhd", e / e.sum(2, keepdims=True), keys)


@tilelang.jit(out_idx=[-1])
def fp8_kv_decode(heads, dim, block=64):
    """Keys and values in fp8 with one scale a token, widened on the way to shared memory."""
    batch, seq = T.dynamic("batch, seq")
    scale = dim**-0.5 * LOG2E

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, dim), BF16),
        K: T.Tensor((batch, seq, dim), FP8),
        ks: T.Tensor((batch, seq), F32),
        lens: T.Tensor((batch,), I32),
        O: T.Tensor((batch, heads, dim), BF16),
    ):
        with T.Kernel(batch, threads=128) as b:
            q = T.alloc_shared((heads, dim), BF16)
            k8 = T.alloc_shared((block, dim), FP8)
            k_s = T.alloc_shared((block, dim), BF16)
            sc = T.alloc_shared((block,), F32)
            s = T.alloc_fragment((heads, block), F32)
            p = T.alloc_shared((heads, block), BF16)
            o = T.alloc_fragment((heads, dim), F32)
            m, m_old, corr, row, l = (T.alloc_fragment((heads,), F32) for _ in (0, 1, 2, 3, 4))
            T.copy(Q[b, :, :], q)
            T.clear(o)
            T.clear(l)
            T.fill(m, T.cast(-1e30, F32))
            for k in T.Pipelined(T.ceildiv(lens[b], block), num_stages=2):
                T.copy(K[b, k * block : (k + 1) * block, :], k8)
                T.copy(ks[b, k * block : (k + 1) * block], sc)
                for i, j in T.Parallel(block, dim):
                    k_s[i, j] = T.cast(k8[i, j], F32) * sc[i]
                T.gemm(q, k_s, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(heads, block):
                    s[i, j] = T.if_then_else(k * block + j < lens[b], s[i, j], -T.infinity(F32))
                T.copy(m, m_old)
                T.reduce_max(s, m, dim=1, clear=False)
                for i in T.Parallel(heads):
                    corr[i] = T.exp2((m_old[i] - m[i]) * scale)
                for i, j in T.Parallel(heads, block):
                    s[i, j] = T.exp2((s[i, j] - m[i]) * scale)
                T.reduce_sum(s, row, dim=1)
                for i in T.Parallel(heads):
                    l[i] = l[i] * corr[i] + row[i]
                T.copy(s, p)
                for i, j in T.Parallel(heads, dim):
                    o[i, j] *= corr[i]
                T.gemm(p, k_s, o)
            for i, j in T.Parallel(heads, dim):
                o[i, j] /= l[i]
            T.copy(o, O[b, :, :])

    return main


def fp8_kv_decode_reference(q, k, ks, lens):
    q, k, ks = wide(q, k, ks)
    out = np.zeros(q.shape)
    for b, n in enumerate(lens):
        kv = k[b, :n] * ks[b, :n, None]
        e = np.exp(q[b] @ kv.T * q.shape[2] ** -0.5)
        out[b] = e / e.sum(1, keepdims=True) @ kv
    return out


PAGED = dict(batch=3, heads=8, heads_kv=2, dim=64, page=32, most=5, splits=3)

BRAIN = Bound(BF16, via=((BF16, 1.0),))

PROGRAMS = [
    Program(
        "paged_decode",
        make_paged_decode(8, 2, 64, 32, 3),
        dict(threads=128, stages=2),
        paged_inputs(**PAGED),
        paged_reference,
        HALF,
    ),
    Program(
        "mla_two_groups",
        mla_two_groups,
        dict(heads=64, dim=128, topk=96),
        drawn(uniform((2, 64, 128), BF16), uniform((150, 128), BF16), integers((2, 96), 0, 150)),
        gathered_reference,
        BRAIN,
        absent={"cpu": "mbarriers are Hopper's", "sm_80": "mbarriers are Hopper's"},
    ),
    Program(
        "fp8_kv_decode",
        fp8_kv_decode,
        dict(heads=16, dim=64),
        drawn(
            uniform((2, 16, 64), BF16),
            uniform((2, 150, 64), FP8),
            uniform((2, 150), low=0.5, high=1),
            np.array([150, 33], np.int32),
        ),
        fp8_kv_decode_reference,
        BRAIN,
    ),
]
