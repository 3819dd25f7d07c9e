"""Retention and linear attention in chunks."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import Bound, Program, drawn, uniform, wide
from .common import F16, F32


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
        "linear_attention_fused",
        linear_attention_fused,
        dict(B=1, S=80, H=2, D=64),
        drawn(uniform((1, 80, 2, 64), F16), uniform((1, 80, 2, 64), F16), uniform((1, 80, 2, 64), F16)),
        linear_attention_reference,
        Bound(F32, via=((F16, 64.0),)),
    ),
]
