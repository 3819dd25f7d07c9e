"""Attention of one token: over pages, and over chosen keys."""

import numpy as np

import tilelang
import tilelang.language as T
from tilelang import PassConfigKey

from ..catalogue import Bound, Program, drawn, integers, uniform, wide
from .common import HALF, LOG2E


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


PROGRAMS = [
    Program(
        "mha_decode_paged_ws",
        mha_decode_paged_ws,
        dict(heads=2, dim=64, page=16),
        paged_inputs(3, 2, 64, 16, 5),
        paged_reference,
        HALF,
    ),
    Program(
        "dsa_decode",
        dsa_decode,
        dict(heads=16, dim=64, topk=96),
        drawn(uniform((2, 16, 64), "bfloat16"), uniform((150, 64), "bfloat16"), integers((2, 96), 0, 150)),
        dsa_decode_reference,
        Bound("bfloat16", via=(("bfloat16", 1.0),)),
    ),
]
