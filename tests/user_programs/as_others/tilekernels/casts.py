"""Casts between narrow types, and transposes."""

import numpy as np
from tvm import DataType

import tilelang
import tilelang.language as T

from ..catalogue import EXACT, Bound, Program, drawn, integers, pack4, uniform, unpack4, wide, zeros
from .common import BF16, F32, FP4, FP8, NO_SPECIALISATION, ROUNDED, scale_of


@tilelang.jit(compile_flags="-O3")
def widen_e2m1(block=64):
    """e2m1 rows at a distance, with two scales a row multiplied, to fp8 with no loss: a scale's ratio is a power of two."""
    m, n = T.dynamic("m, n")

    @T.prim_func
    def main(
        x: T.StridedTensor[(m, n), (n, 1), FP4],
        sf: T.StridedTensor[(m, T.ceildiv(n, block)), (T.ceildiv(n, block), 1), F32],
        out: T.Tensor[(m, n), FP8],
    ):
        with T.Kernel(T.ceildiv(m, 8), T.ceildiv(n, block), threads=64) as (pm, pn):
            tile = T.alloc_fragment((8, block), F32)
            for i, j in T.Parallel(8, block):
                tile[i, j] = T.cast(x[pm * 8 + i, pn * block + j], F32)
            for i, j in T.Parallel(8, block):
                if pm * 8 + i < m:
                    tile[i, j] *= sf[pm * 8 + i, pn]
            T.copy(tile, out[pm * 8, pn * block])

    return main


def widen_e2m1_reference(x, sf, out):
    return unpack4(x) * np.repeat(wide(sf)[0], 64, 1)


@tilelang.jit
def token_cast_from_e2m1(n, block=32):
    """Requantise e2m1 with scales of 32 values to fp8 with one scale a token."""
    m = T.dynamic("m")

    @T.prim_func
    def main(
        x: T.Tensor[(m, n), FP4], x_sf: T.Tensor[(m, n // block), F32], y: T.Tensor[(m, n), FP8], y_sf: T.Tensor[(m, 1), F32]
    ):
        with T.Kernel(m, threads=32) as pid:
            v = T.alloc_fragment((n,), F32)
            amax = T.alloc_fragment((1,), F32)
            for j in T.Parallel(n):
                v[j] = T.cast(x[pid, j], F32) * x_sf[pid, j // block]
            T.reduce_absmax(v, amax)
            sf, inv = scale_of(amax[0], 448.0)
            for j in T.Parallel(n):
                y[pid, j] = v[j] * inv
            y_sf[pid, 0] = sf

    return main


def token_cast_from_e2m1_reference(x, x_sf, y, y_sf):
    v = unpack4(x) * np.repeat(wide(x_sf)[0], 32, 1)
    sf = np.maximum(np.abs(v).max(1, keepdims=True), 1e-4) / 448
    return v / sf, sf


@tilelang.jit
def block_cast_to_e2m1(rows=32, cols=32):
    """bf16 to e2m1 with one scale for each block: elements are stored one by one."""
    m, n = T.dynamic("m, n")

    @T.prim_func
    def main(
        x: T.Tensor[(m, n), BF16], out: T.Tensor[(m, n), FP4], sf: T.Tensor[(T.ceildiv(m, rows), T.ceildiv(n, cols)), F32]
    ):
        with T.Kernel(T.ceildiv(n, cols), T.ceildiv(m, rows), threads=128) as (bx, by):
            t = T.alloc_fragment((rows, cols), F32)
            part = T.alloc_fragment((rows,), F32)
            amax = T.alloc_fragment((1,), F32)
            T.copy(x[by * rows, bx * cols], t)
            T.reduce_absmax(t, part, dim=1)
            T.reduce_max(part, amax, dim=0)
            scale, inv = scale_of(amax[0], 6.0)
            for i, j in T.Parallel(rows, cols):
                out[by * rows + i, bx * cols + j] = t[i, j] * inv
            if T.get_thread_binding() == 0:
                sf[by, bx] = scale

    return main


def block_cast_to_e2m1_reference(x, out, sf):
    m, n = x.shape
    padded = np.zeros((-(-m // 32) * 32, n), np.float32)
    padded[:m] = x
    t = padded.reshape(-1, 32, n // 32, 32)
    amax = np.maximum(np.abs(t).max((1, 3)), np.float32(1e-4)).astype(np.float32)
    inv = (np.float32(6) / amax).astype(np.float32)
    q = (t * inv[:, None, :, None]).reshape(padded.shape)[:m]
    return unpack4(pack4(q)), amax.astype(np.float64) / 6


@tilelang.jit(pass_configs=NO_SPECIALISATION)
def channel_cast_and_transpose(rows=128, cols=64):
    """fp8 of the transpose, with a scale for each column of 128 rows."""
    m, n = T.dynamic("m, n")

    @T.prim_func
    def main(x: T.Tensor[(m, n), BF16], out: T.Tensor[(n, m), FP8], sf: T.Tensor[(m // rows, n), F32]):
        with T.Kernel(m // rows, T.ceildiv(n, cols), threads=256) as (pm, pn):
            tile = T.alloc_shared((rows, cols), BF16)
            turned = T.alloc_shared((cols, rows), FP8)
            f = T.alloc_fragment((rows, cols), F32)
            amax = T.alloc_fragment((cols,), F32)
            T.annotate_padding({turned: 16}) if hasattr(T, "annotate_padding") else None
            T.copy(x[pm * rows, pn * cols], tile)
            T.copy(tile, f)
            T.reduce_absmax(f, amax, dim=0)
            for j in T.Parallel(cols):
                amax[j] = T.max(amax[j], 1e-4) / 448.0
                if pn * cols + j < n:
                    sf[pm, pn * cols + j] = amax[j]
            for i, j in T.Parallel(rows, cols):
                turned[j, i] = f[i, j] / amax[j]
            T.copy(turned, out[pn * cols, pm * rows])

    return main


def channel_cast_and_transpose_reference(x, out, sf):
    (x,) = wide(x)
    scale = np.maximum(np.abs(x.reshape(-1, 128, x.shape[1])).max(1), 1e-4) / 448
    return (x / np.repeat(scale, 128, 0)).T, scale


@tilelang.jit(out_idx=[1])
def batched_transpose(b, dt="bfloat16", block=32):
    m, n = T.dynamic("m, n")
    lanes = 128 // DataType(dt).bits

    @T.prim_func
    def main(x: T.StridedTensor[(b, m, n), (m * n, n, 1), dt], y: T.Tensor[(b, n, m), dt]):
        with T.Kernel(T.ceildiv(n, block), T.ceildiv(m, block), b, threads=block * block // lanes) as (bx, by, bz):
            s = T.alloc_shared((block, block + lanes), dt)
            for i, j in T.Parallel(block, block):
                s[i, j] = x[bz, by * block + i, bx * block + j]
            for i, j in T.Parallel(block, block):
                if bx * block + i < n and by * block + j < m:
                    y[bz, bx * block + i, by * block + j] = s[j, i]

    return main


@tilelang.jit
def cast_e5m6(X, threads: int = 32):
    """bf16 to 12 bits (1-5-6), rounded towards zero by CUDA's own conversion, two values in three bytes."""
    m = T.dynamic("m")
    N = T.const("N")
    X: T.Tensor((m, N), F32)
    Y = T.empty((m, N // 2 * 3), "uint8")
    with T.Kernel(m, threads=threads) as pid:
        pair = T.alloc_local((2,), "uint16")
        tx = T.get_thread_binding()
        for k in T.serial(T.ceildiv(N // 2, threads)):
            p = k * threads + tx
            if p < N // 2:
                for i in T.unroll(2):
                    half = T.call_extern("float16", "__float2half_rz", X[pid, 2 * p + i])
                    pair[i] = T.reinterpret("uint16", half) >> T.uint16(4)
                Y[pid, 3 * p] = T.cast(pair[0] & T.uint16(255), "uint8")
                Y[pid, 3 * p + 1] = T.cast((pair[0] >> T.uint16(8)) | ((pair[1] & T.uint16(15)) << T.uint16(4)), "uint8")
                Y[pid, 3 * p + 2] = T.cast(pair[1] >> T.uint16(4), "uint8")
    return Y


def cast_e5m6_reference(x):
    half = x.astype(np.float16)
    over = np.abs(half.astype(np.float64)) > np.abs(x.astype(np.float64))
    codes = (half.view(np.uint16) - over.astype(np.uint16)) >> 4
    a, b = codes[:, 0::2], codes[:, 1::2]
    return np.stack([a & 255, (a >> 8) | ((b & 15) << 4), b >> 4], -1).reshape(len(x), -1)


PROGRAMS = [
    Program(
        "widen_e2m1",
        widen_e2m1,
        {},
        drawn(
            integers((20, 64), -128, 128, "int8"),
            lambda g: 2.0 ** g.integers(-3, 3, (20, 2)).astype(np.float32),
            zeros((20, 128), FP8),
        ),
        widen_e2m1_reference,
        EXACT,
        changed=(2,),
    ),
    Program(
        "token_cast_from_e2m1",
        token_cast_from_e2m1,
        dict(n=128),
        drawn(integers((9, 64), -128, 128, "int8"), uniform((9, 4), F32, 0.1, 1), zeros((9, 128), FP8), zeros((9, 1))),
        token_cast_from_e2m1_reference,
        (ROUNDED, Bound(ulps=4)),
        changed=(2, 3),
    ),
    Program(
        "block_cast_to_e2m1",
        block_cast_to_e2m1,
        {},
        drawn(uniform((40, 64), BF16), np.zeros((40, 32), np.int8), zeros((2, 2))),
        block_cast_to_e2m1_reference,
        (EXACT, Bound(ulps=4)),
        changed=(1, 2),
        arrange=lambda results: [unpack4(results[0]), results[1]],
    ),
    Program(
        "channel_cast_and_transpose",
        channel_cast_and_transpose,
        {},
        drawn(uniform((256, 72), BF16), zeros((72, 256), FP8), zeros((2, 72))),
        channel_cast_and_transpose_reference,
        (ROUNDED, Bound(ulps=4)),
        changed=(1, 2),
    ),
    Program(
        "batched_transpose",
        batched_transpose,
        dict(b=2),
        drawn(uniform((2, 50, 72), BF16)),
        lambda x: np.swapaxes(x, 1, 2).astype(np.float64),
        EXACT,
    ),
    Program(
        "cast_e5m6",
        cast_e5m6,
        dict(N=72),
        drawn(uniform((5, 72), F32, -4, 4)),
        cast_e5m6_reference,
        EXACT,
    ),
]
