"""SwiGLU with a cast, forwards and backwards."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import Bound, Program, drawn, uniform, wide, zeros
from .common import BF16, F32, FP8, I32, NO_SPECIALISATION, ROUNDED, scale_of

FLAGS = ["-O3", "-Wno-deprecated-declarations", "--expt-relaxed-constexpr", "--expt-extended-lambda"]

LIMIT = {"float8_e4m3fn": 448.0, "float4_e2m1fn": 6.0}


@tilelang.jit(pass_configs=NO_SPECIALISATION, compile_flags=FLAGS)
def swiglu_and_cast(hidden, group=128, out_dtype=FP8):
    """y = swish(a) * b, cast to fp8 with a scale for each token and group of channels; rows past the count stay."""
    tokens = T.dynamic("tokens")
    limit = LIMIT[str(out_dtype)]

    @T.prim_func
    def main(
        X: T.Tensor[(tokens, 2 * hidden), BF16],
        Y: T.Tensor[(tokens, hidden), out_dtype],
        SF: T.Tensor[(tokens, hidden // group), F32],
        count: T.Tensor[(1,), I32],
    ):
        with T.Kernel(tokens, hidden // group, threads=64) as (pid, pg):
            if pid < count[0]:
                a = T.alloc_fragment((group,), F32)
                b = T.alloc_fragment((group,), F32)
                amax = T.alloc_fragment((1,), F32)
                T.copy(X[pid, pg * group], a)
                T.copy(X[pid, hidden + pg * group], b)
                for i in T.Parallel(group):
                    a[i] = a[i] / (1.0 + T.exp(-a[i])) * b[i]
                T.reduce_absmax(a, amax, dim=0)
                sf, inv = scale_of(amax[0], limit)
                for i in T.Parallel(group):
                    Y[pid, pg * group + i] = a[i] * inv
                if T.get_thread_binding() == 0:
                    SF[pid, pg] = sf

    return main


def swiglu_and_cast_reference(x, y, sf, count):
    x, y, sf = wide(x, y, sf)
    n, hidden = count[0], y.shape[1]
    a, b = x[:n, :hidden], x[:n, hidden:]
    v = (a / (1 + np.exp(-a)) * b).reshape(n, -1, 128)
    sf[:n] = np.maximum(np.abs(v).max(2), 1e-4) / 448
    y[:n] = (v / sf[:n, :, None]).reshape(n, hidden)
    return y, sf


@T.macro
def dequant_pair(x, x_sf):
    return x * x_sf, 1.0 / x_sf


@tilelang.jit(pass_configs=NO_SPECIALISATION)
def swiglu_backward(hidden, block=64):
    """Gradients of swish(a) * b * w for activations kept in fp8 with scales; also recomputes the forward value."""
    tokens = T.symbolic("tokens")

    @T.prim_func
    def main(
        x: T.Tensor[(tokens, 2 * hidden), FP8],
        x_sf: T.Tensor[(tokens, 2 * hidden // block), F32],
        dy: T.Tensor[(tokens, hidden), BF16],
        w: T.Tensor[(tokens,), F32],
        dx: T.Tensor[(tokens, 2 * hidden), BF16],
        y: T.Tensor[(tokens, hidden), BF16],
        dw: T.Tensor[(tokens,), F32],
    ):
        with T.Kernel(tokens, threads=64) as pid:
            acc = T.alloc_fragment((block,), F32)
            total = T.alloc_fragment((1,), F32)
            a = T.alloc_fragment((block,), F32)
            b = T.alloc_fragment((block,), F32)
            T.clear(acc)
            for k in T.serial(hidden // block):
                for i in T.Parallel(block):
                    a[i] = T.cast(x[pid, k * block + i], F32)
                    b[i] = T.cast(x[pid, hidden + k * block + i], F32)
                for i in T.Parallel(block):
                    va, inv = dequant_pair(a[i], x_sf[pid, k])
                    vb, inv = dequant_pair(b[i], x_sf[pid, hidden // block + k])
                    g = T.cast(dy[pid, k * block + i], F32)
                    sig = T.sigmoid(va)
                    act = va * sig * vb
                    acc[i] += g * act
                    y[pid, k * block + i] = act * w[pid]
                    dx[pid, k * block + i] = g * w[pid] * vb * (sig + va * sig * (1.0 - sig))
                    dx[pid, hidden + k * block + i] = g * w[pid] * va * sig
            T.reduce_sum(acc, total)
            for i in T.Parallel(1):
                dw[pid + i] = total[i]

    return main


def swiglu_backward_reference(x, x_sf, dy, w, dx, y, dw):
    x, x_sf, dy, w = wide(x, x_sf, dy, w)
    hidden = dy.shape[1]
    x = x * np.repeat(x_sf, 64, 1)
    a, b = x[:, :hidden], x[:, hidden:]
    s = 1 / (1 + np.exp(-a))
    g = dy * w[:, None]
    return np.concatenate([g * b * (s + a * s * (1 - s)), g * a * s], 1), a * s * b * w[:, None], (dy * a * s * b).sum(1)


PROGRAMS = [
    Program(
        "swiglu_and_cast",
        swiglu_and_cast,
        dict(hidden=256),
        drawn(uniform((9, 512), BF16, -3, 3), zeros((9, 256), FP8), zeros((9, 2)), np.array([7], np.int32)),
        swiglu_and_cast_reference,
        (ROUNDED, Bound(ulps=16)),
        changed=(1, 2),
    ),
    Program(
        "swiglu_backward",
        swiglu_backward,
        dict(hidden=128),
        drawn(
            uniform((5, 256), FP8, -4, 4),
            uniform((5, 4), F32, 0.5, 1),
            uniform((5, 128), BF16),
            uniform((5,)),
            zeros((5, 256), BF16),
            zeros((5, 128), BF16),
            zeros((5,)),
        ),
        swiglu_backward_reference,
        (Bound(BF16, 8, 16.0), Bound(BF16, 8, 16.0), Bound(F32, 128, 16.0 * 32)),
        changed=(4, 5, 6),
    ),
]
