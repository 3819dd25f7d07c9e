"""Quantised weights and activations."""

import numpy as np

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from ..catalogue import Bound, Program, drawn, integers, uniform, wide
from .common import BF16, F16, F32, FP8, I32


@tilelang.jit(out_idx=[-1])
def w4a16(M, N, K, group=64, block_m=32, block_n=64, block_k=64, stages=2, threads=128):
    """Packed weights decoded in registers: vector loads of bytes, shifts, a scale for each group of K."""

    @T.macro
    def decode(packed, out, scales):
        tx = T.get_thread_binding()
        raw = T.alloc_local((8,), "uint8")
        half = T.alloc_local((16,), F16)
        for s in T.serial(block_n * block_k // threads // 16):
            at = s * threads * 16 + tx * 16
            for v in T.vectorized(8):
                raw[v] = packed[at // block_k, at % block_k // 2 + v]
            for v in T.unroll(16):
                nibble = raw[v // 2] >> T.cast(4 * (v % 2), "uint8")
                half[v] = T.cast(T.cast(nibble & T.uint8(15), I32) - 8, F16) * scales[at // block_k]
            for v in T.vectorized(16):
                out[at // block_k, at % block_k + v] = half[v]

    @T.prim_func
    def main(
        A: T.Tensor((M, K), F16), W: T.Tensor((N, K // 2), "uint8"), S: T.Tensor((N, K // group), F16), C: T.Tensor((M, N), F16)
    ):
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (bx, by):
            a = T.alloc_shared((block_m, block_k), F16)
            w = T.alloc_shared((block_n, block_k // 2), "uint8")
            wd = T.alloc_shared((block_n, block_k), F16)
            sc = T.alloc_shared((block_n,), F16)
            acc = T.alloc_fragment((block_m, block_n), F32)
            T.annotate_layout({wd: make_swizzled_layout(wd)})
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, block_k), num_stages=stages):
                T.copy(A[by * block_m, k * block_k], a)
                T.copy(W[bx * block_n, k * block_k // 2], w)
                for i in T.Parallel(block_n):
                    sc[i] = S[bx * block_n + i, k * block_k // group]
                decode(w, wd, sc)
                T.gemm(a, wd, acc, transpose_B=True)
            T.copy(acc, C[by * block_m, bx * block_n])

    return main


def w4a16_reference(a, w, s):
    a, s = wide(a, s)
    q = np.stack([w & 15, w >> 4], -1).reshape(len(w), -1).astype(float) - 8
    return a @ (q * np.repeat(s, 64, 1)).T


@tilelang.jit(out_idx=[4])
def int8_scaled_mm(N, K, block_m=64, block_n=64, block_k=64):
    M = T.dynamic("M")

    @T.prim_func
    def main(
        A: T.Tensor((M, K), "int8"),
        B: T.Tensor((N, K), "int8"),
        sa: T.Tensor((M, 1), F32),
        sb: T.Tensor((N, 1), F32),
        C: T.Tensor((M, N), BF16),
    ):
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=128) as (bx, by):
            a = T.alloc_shared((block_m, block_k), "int8")
            b = T.alloc_shared((block_n, block_k), "int8")
            acc = T.alloc_fragment((block_m, block_n), I32)
            row = T.alloc_fragment((block_m, 1), F32)
            col = T.alloc_fragment((block_n, 1), F32)
            T.clear(acc)
            T.copy(sa[by * block_m, 0], row)
            T.copy(sb[bx * block_n, 0], col)
            for k in T.Pipelined(T.ceildiv(K, block_k), num_stages=3):
                T.copy(A[by * block_m, k * block_k], a)
                T.copy(B[bx * block_n, k * block_k], b)
                T.gemm(a, b, acc, transpose_B=True)
            for i, j in T.Parallel(block_m, block_n):
                if by * block_m + i < M and bx * block_n + j < N:
                    C[by * block_m + i, bx * block_n + j] = T.cast(acc[i, j], F32) * row[i, 0] * col[j, 0]

    return main


@tilelang.jit
def masked_silu_quant(x, counts, group: int = 64):
    """silu(a) * b of the first rows of each expert, to fp8 with scales stored column-major for the next product."""
    E, M, H = T.const("E M H")
    x: T.Tensor((E, M, 2 * H), BF16)
    counts: T.Tensor((E,), I32)
    out = T.empty((E, M, H), FP8)
    scales = T.empty((E, H // group, M), F32)
    with T.Kernel(H // group, M, E, threads=32) as (g, m, e):
        a = T.alloc_fragment((group,), F32)
        amax = T.alloc_fragment((1,), F32)
        if m < counts[e]:
            for i in T.Parallel(group):
                u = T.cast(x[e, m, g * group + i], F32)
                a[i] = u * T.sigmoid(u) * T.cast(x[e, m, H + g * group + i], F32)
            T.reduce_absmax(a, amax)
            sc = T.max(amax[0], 1e-10) / 448.0
            for i in T.Parallel(group):
                out[e, m, g * group + i] = T.clamp(a[i] / sc, -448.0, 448.0)
            scales[e, g, m] = sc
        else:
            for i in T.Parallel(group):
                out[e, m, g * group + i] = T.cast(0.0, FP8)
            scales[e, g, m] = 0.0
    return out, scales


def masked_silu_quant_reference(x, counts):
    (x,) = wide(x)
    e, m, h = x.shape[0], x.shape[1], x.shape[2] // 2
    v = x[..., :h] / (1 + np.exp(-x[..., :h])) * x[..., h:]
    v = v.reshape(e, m, -1, 64)
    scale = np.maximum(np.abs(v).max(3), 1e-10) / 448
    live = (np.arange(m) < counts[:, None])[..., None]
    return np.where(live, (v / scale[..., None]).reshape(e, m, h), 0), np.where(live, scale, 0).transpose(0, 2, 1)


PROGRAMS = [
    Program(
        "w4a16",
        w4a16,
        dict(M=40, N=72, K=128),
        drawn(uniform((40, 128), F16), integers((72, 64), 0, 256, "uint8"), uniform((72, 2), F16, 0.1, 0.2)),
        w4a16_reference,
        Bound(F16, 128, 200.0, via=((F16, 16.0),)),
    ),
    Program(
        "int8_scaled_mm",
        int8_scaled_mm,
        dict(N=72, K=128),
        drawn(
            integers((70, 128), -128, 128, "int8"),
            integers((72, 128), -128, 128, "int8"),
            uniform((70, 1), low=0.001, high=0.01),
            uniform((72, 1), low=0.001, high=0.01),
        ),
        lambda a, b, sa, sb: a.astype(np.int64) @ b.astype(np.int64).T * wide(sa)[0] * wide(sb)[0].T,
        Bound(BF16),
    ),
    Program(
        "masked_silu_quant",
        masked_silu_quant,
        dict(E=3, M=5, H=128),
        drawn(uniform((3, 5, 256), BF16, -3, 3), np.array([5, 0, 2], np.int32)),
        masked_silu_quant_reference,
        (Bound(FP8, via=((FP8, 0.002),)), Bound(F32, ulps=16)),
    ),
]
