"""Normalisations."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import Bound, Program, drawn, uniform, wide


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


PROGRAMS = [
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
        "batch_norm_train",
        batch_norm_train,
        dict(C=10),
        drawn(uniform((75, 10)), uniform((10,)), uniform((10,)), uniform((10,)), uniform((10,), low=0.5)),
        batch_norm_train_reference,
        Bound("float32", 75, 8.0),
        changed=(3, 4),
    ),
]
