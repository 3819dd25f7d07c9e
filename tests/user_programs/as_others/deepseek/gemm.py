"""Products of FP8 and FP4 with scales."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import Bound, Program, drawn, dtype, integers, uniform, unpack4, wide, zeros
from .common import BF16, F32, FAST, FP4, FP8, UE8


@tilelang.jit(pass_configs=FAST)
def scaled_gemm(N, K, out_dtype=BF16, accum_dtype="float32"):
    assert out_dtype in [BF16, "float32"]
    M = T.symbolic("M")
    group = 128
    block_M, block_N, block_K = 32, 128, 128

    @T.prim_func
    def scaled_gemm_(
        A: T.Tensor[(M, K), FP8],
        B: T.Tensor[(N, K), FP8],
        C: T.Tensor[(M, N), out_dtype],
        scales_a: T.Tensor[(M, T.ceildiv(K, group)), F32],
        scales_b: T.Tensor[(T.ceildiv(N, group), T.ceildiv(K, group)), F32],
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), FP8)
            B_shared = T.alloc_shared((block_N, block_K), FP8)
            C_shared = T.alloc_shared((block_M, block_N), out_dtype)
            Scale_C_shared = T.alloc_shared((block_M), F32)
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            C_local_accum = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.use_swizzle(panel_size=10)
            T.clear(C_local)
            T.clear(C_local_accum)
            K_iters = T.ceildiv(K, block_K)
            for k in T.Pipelined(K_iters, num_stages=4):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[bx * block_N, k * block_K], B_shared)
                Scale_B = scales_b[bx * block_N // group, k]
                for i in T.Parallel(block_M):
                    Scale_C_shared[i] = scales_a[by * block_M + i, k] * Scale_B
                T.gemm(A_shared, B_shared, C_local, transpose_B=True)
                for i, j in T.Parallel(block_M, block_N):
                    C_local_accum[i, j] += C_local[i, j] * Scale_C_shared[i]
                T.clear(C_local)
            T.copy(C_local_accum, C_shared)
            T.copy(C_shared, C[by * block_M, bx * block_N])

    return scaled_gemm_


def scaled_gemm_reference(a, b, c, sa, sb):
    a, b, sa, sb = wide(a, b, sa, sb)
    a = a * np.repeat(sa, 128, 1)[:, : a.shape[1]]
    b = b * np.repeat(np.repeat(sb, 128, 0), 128, 1)[: b.shape[0], : b.shape[1]]
    return a @ b.T


@tilelang.jit(pass_configs=FAST)
def fp4_gemm(N, K):
    M = T.symbolic("M")
    act_group, weight_group = 128, 32
    block_M, block_N, block_K = 32, 64, 32
    n_sub = act_group // block_K

    @T.prim_func
    def fp4_gemm_(
        A: T.Tensor[(M, K), FP8],
        B: T.Tensor[(N, K), FP4],
        C: T.Tensor[(M, N), BF16],
        scales_a: T.Tensor[(M, T.ceildiv(K, act_group)), F32],
        scales_b: T.Tensor[(N, T.ceildiv(K, weight_group)), UE8],
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), FP8)
            B_fp4 = T.alloc_shared((block_N, block_K), FP4)
            B_shared = T.alloc_shared((block_N, block_K), FP8)
            C_shared = T.alloc_shared((block_M, block_N), BF16)
            acc = T.alloc_fragment((block_M, block_N), F32)
            part = T.alloc_fragment((block_M, block_N), F32)
            sa = T.alloc_fragment((block_M,), F32)
            sb = T.alloc_fragment((block_N,), F32)
            T.clear(acc)
            T.clear(part)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[bx * block_N, k * block_K], B_fp4)
                for i, j in T.Parallel(block_N, block_K):
                    B_shared[i, j] = T.Cast(FP8, T.Cast(F32, B_fp4[i, j]))
                for i in T.Parallel(block_N):
                    sb[i] = T.Cast(F32, scales_b[bx * block_N + i, k])
                for i in T.Parallel(block_M):
                    sa[i] = scales_a[by * block_M + i, k // n_sub]
                T.gemm(A_shared, B_shared, part, transpose_B=True)
                for i, j in T.Parallel(block_M, block_N):
                    acc[i, j] += part[i, j] * sa[i] * sb[j]
                T.clear(part)
            T.copy(acc, C_shared)
            T.copy(C_shared, C[by * block_M, bx * block_N])

    return fp4_gemm_


def fp4_gemm_reference(a, b, c, sa, sb):
    a, sa, sb = wide(a, sa, sb)
    return (a * np.repeat(sa, 128, 1)[:, : a.shape[1]]) @ (unpack4(b) * np.repeat(sb, 32, 1)).T


PROGRAMS = [
    Program(
        "scaled_gemm",
        scaled_gemm,
        dict(N=192, K=256),
        drawn(
            uniform((50, 256), FP8),
            uniform((192, 256), FP8),
            zeros((50, 192), BF16),
            uniform((50, 2), F32, 0.1, 1),
            uniform((2, 2), F32, 0.1, 1),
        ),
        scaled_gemm_reference,
        Bound(BF16, 256, 64.0),
        changed=(2,),
    ),
    Program(
        "fp4_gemm",
        fp4_gemm,
        dict(N=96, K=256),
        drawn(
            uniform((20, 256), FP8),
            integers((96, 128), -128, 128, "int8"),
            zeros((20, 96), BF16),
            uniform((20, 2), F32, 0.1, 1),
            lambda g: (2.0 ** g.integers(-3, 2, (96, 8))).astype(dtype(UE8)),
        ),
        fp4_gemm_reference,
        Bound(BF16, 256, 256.0),
        changed=(2,),
    ),
]
