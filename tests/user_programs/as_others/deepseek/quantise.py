"""Quantisation to FP8 and FP4, and back."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import EXACT, Bound, Program, drawn, dtype, pack4, uniform, wide, zeros
from .common import BF16, F32, FAST, FP4, FP8, UE8


def log2_ceil(x):
    bits = T.reinterpret("uint32", x)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & ((1 << 23) - 1)
    return T.Cast("int32", exponent - 127 + T.if_then_else(mantissa != 0, 1, 0))


def pow2(n):
    return T.reinterpret("float32", (n + 127) << 23)


def round_scale(amax, inv_max):
    return pow2(log2_ceil(amax * inv_max))


@tilelang.jit(pass_configs=FAST)
def token_quant(N, in_dtype=BF16, out_dtype=FP8, scale_dtype=F32, pow2_scale=False):
    M = T.symbolic("M")
    fp8_min, fp8_max = -448.0, 448.0
    fp8_max_inv = 1 / fp8_max
    num_stages = 0 if pow2_scale else 2
    blk_m, group = 32, 128

    @T.prim_func
    def token_quant_(
        X: T.Tensor[(M, N), in_dtype],
        Y: T.Tensor[(M, N), out_dtype],
        S: T.Tensor[(M, T.ceildiv(N, group)), scale_dtype],
    ):
        with T.Kernel(T.ceildiv(M, blk_m), T.ceildiv(N, group), threads=128) as (pid_m, pid_n):
            x_shared = T.alloc_shared((blk_m, group), in_dtype)
            x_local = T.alloc_fragment((blk_m, group), in_dtype)
            amax_local = T.alloc_fragment((blk_m,), scale_dtype)
            s_local = T.alloc_fragment((blk_m,), scale_dtype)
            y_local = T.alloc_fragment((blk_m, group), out_dtype)
            y_shared = T.alloc_shared((blk_m, group), out_dtype)
            for _ in T.Pipelined(1, num_stages=num_stages):
                T.copy(X[pid_m * blk_m, pid_n * group], x_shared)
                T.copy(x_shared, x_local)
                T.reduce_absmax(x_local, amax_local, dim=1)
                for i in T.Parallel(blk_m):
                    amax_local[i] = T.max(amax_local[i], 1e-4)
                    if pow2_scale:
                        s_local[i] = round_scale(amax_local[i], fp8_max_inv)
                    else:
                        s_local[i] = amax_local[i] * fp8_max_inv
                for i, j in T.Parallel(blk_m, group):
                    y_local[i, j] = T.clamp(x_local[i, j] / s_local[i], fp8_min, fp8_max)
                for i in T.Parallel(blk_m):
                    S[pid_m * blk_m + i, pid_n] = s_local[i]
                T.copy(y_local, y_shared)
                T.copy(y_shared, Y[pid_m * blk_m, pid_n * group])

    return token_quant_


def token_quant_reference(pow2_scale):
    def reference(x, y, s):
        (x,) = wide(x)
        rows = x.reshape(x.shape[0], -1, 128)
        amax = np.maximum(np.abs(rows).max(2), 1e-4)
        scale = 2.0 ** np.ceil(np.log2((amax * np.float32(1 / 448)).astype(np.float32))) if pow2_scale else amax / 448
        q = np.clip(rows / scale[..., None], -448, 448)
        return q.reshape(x.shape), scale

    return reference


@tilelang.jit(pass_configs=FAST)
def fp4_quant(N, block=32, blk_m=32):
    M = T.symbolic("M")

    @T.prim_func
    def fp4_quant_(X: T.Tensor[(M, N), BF16], Y: T.Tensor[(M, N), FP4], S: T.Tensor[(M, N // block), UE8]):
        with T.Kernel(T.ceildiv(M, blk_m), T.ceildiv(N, block), threads=128) as (pid_m, pid_n):
            x_shared = T.alloc_shared((blk_m, block), BF16)
            x_local = T.alloc_fragment((blk_m, block), BF16)
            amax = T.alloc_fragment((blk_m,), F32)
            scale = T.alloc_fragment((blk_m,), F32)
            y_local = T.alloc_fragment((blk_m, block), FP4)
            T.copy(X[pid_m * blk_m, pid_n * block], x_shared)
            T.copy(x_shared, x_local)
            T.reduce_absmax(x_local, amax, dim=1)
            for i in T.Parallel(blk_m):
                amax[i] = T.max(amax[i], 6 * (2**-126))
                scale[i] = round_scale(amax[i], 1.0 / 6.0)
            for i, j in T.Parallel(blk_m, block):
                y_local[i, j] = T.clamp(x_local[i, j] / scale[i], -6.0, 6.0)
            for i in T.Parallel(blk_m):
                S[pid_m * blk_m + i, pid_n] = T.Cast(UE8, scale[i])
            T.copy(y_local, Y[pid_m * blk_m, pid_n * block])

    return fp4_quant_


def fp4_quant_reference(x, y, s):
    (x,) = wide(x)
    rows = x.reshape(x.shape[0], -1, 32)
    amax = np.abs(rows).max(2).astype(np.float32)
    scale = 2.0 ** np.ceil(np.log2(amax * np.float32(1 / 6)))
    return pack4((rows / scale[..., None]).reshape(x.shape)), scale


@tilelang.jit(out_idx=[-1], pass_configs=FAST)
def weight_dequant(block=128):
    M, N = T.symbolic("M, N")

    @T.prim_func
    def weight_dequant_(
        x: T.Tensor[(M, N), FP8], s: T.Tensor[(T.ceildiv(M, block), T.ceildiv(N, block)), F32], y: T.Tensor[(M, N), BF16]
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=256) as (bx, by):
            tile = T.alloc_fragment((block, block), F32)
            T.copy(x[by * block, bx * block], tile)
            scale = s[by, bx]
            for i, j in T.Parallel(block, block):
                tile[i, j] *= scale
            T.copy(tile, y[by * block, bx * block])

    return weight_dequant_


def weight_dequant_reference(x, s):
    x, s = wide(x, s)
    return x * np.repeat(np.repeat(s, 128, 0), 128, 1)[: x.shape[0], : x.shape[1]]


@T.macro
def quant_group(x, y, scale: T.Ref, lo, hi):
    scale = T.max(scale, 1e-4) / hi
    for i, j in T.Parallel(x.shape[0], x.shape[1]):
        y[i, j] = T.clamp(x[i, j] / scale, lo, hi)


@tilelang.jit
def fake_quant(X, rows: int = 8, group: int = 64):
    """Quantise and dequantise in place: one scale for each 8 x 64 block."""
    m = T.dynamic("m")
    N = T.const("N")
    X: T.Tensor((m, N), BF16)
    S = T.empty((T.ceildiv(m, rows), N // group), F32)
    with T.Kernel(T.ceildiv(m, rows), N // group, threads=128) as (bm, bn):
        x = T.alloc_fragment((rows, group), F32)
        q = T.alloc_fragment((rows, group), FP8)
        flat = T.alloc_fragment((rows,), F32)
        amax = T.alloc_fragment((1,), F32)
        T.copy(X[bm * rows, bn * group], x)
        T.reduce_absmax(x, flat, dim=1)
        T.reduce_max(flat, amax, dim=0)
        scale = T.alloc_var("float32")
        scale = amax[0]
        quant_group(x, q, scale, -448.0, 448.0)
        S[bm, bn] = scale
        for i, j in T.Parallel(rows, group):
            x[i, j] = T.cast(q[i, j], F32) * scale
        T.copy(x, X[bm * rows, bn * group])
    return S


def fake_quant_reference(x):
    (x,) = wide(x)
    m, n = x.shape
    padded = np.zeros((-(-m // 8) * 8, n))
    padded[:m] = x
    blocks = padded.reshape(-1, 8, n // 64, 64)
    scale = np.maximum(np.abs(blocks).max((1, 3)), 1e-4) / 448
    q = np.clip(blocks / scale[:, None, :, None], -448, 448).astype(dtype(FP8)).astype(np.float64)
    return scale, (q * scale[:, None, :, None]).reshape(padded.shape)[:m]


FP8_ROUNDED = Bound(FP8, via=((FP8, 0.002),))

PROGRAMS = [
    Program(
        "token_quant",
        token_quant,
        dict(N=256),
        drawn(uniform((37, 256), BF16), zeros((37, 256), FP8), zeros((37, 2), F32)),
        token_quant_reference(False),
        (FP8_ROUNDED, Bound(ulps=4)),
        changed=(1, 2),
    ),
    Program(
        "token_quant_pow2",
        token_quant,
        dict(N=256, pow2_scale=True),
        drawn(uniform((37, 256), BF16), zeros((37, 256), FP8), zeros((37, 2), F32)),
        token_quant_reference(True),
        (FP8_ROUNDED, EXACT),
        changed=(1, 2),
    ),
    Program(
        "fp4_quant",
        fp4_quant,
        dict(N=128),
        drawn(uniform((21, 128), BF16), np.zeros((21, 64), np.int8), zeros((21, 4), UE8)),
        fp4_quant_reference,
        EXACT,
        changed=(1, 2),
    ),
    Program(
        "weight_dequant",
        weight_dequant,
        {},
        drawn(uniform((130, 200), FP8), uniform((2, 2), F32, 0.1, 1)),
        weight_dequant_reference,
        Bound(BF16),
    ),
    Program(
        "fake_quant",
        fake_quant,
        dict(N=128),
        drawn(uniform((21, 128), BF16)),
        fake_quant_reference,
        (Bound(ulps=4), Bound(BF16, via=((FP8, 1.0),))),
        changed=(0,),
    ),
]
