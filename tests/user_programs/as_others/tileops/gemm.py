"""GEMM, GEMV and convolution."""

import functools

import numpy as np
from tvm import tirx

import tilelang
import tilelang.language as T

from ..catalogue import Bound, Program, drawn, uniform, wide
from .common import FLAGS


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
        "conv2d",
        conv2d,
        dict(n=2, h=9, w=7, c=16, f=24, kernel=3, stride=1, pad=1),
        drawn(uniform((2, 9, 7, 16), "float16"), uniform((3, 3, 16, 24), "float16")),
        conv2d_reference(1, 1),
        Bound("float16", 144, 144.0),
    ),
    Program(
        "gemv",
        gemv,
        dict(N=44, K=512),
        drawn(uniform((512,), "float16"), uniform((44, 512), "float16")),
        lambda a, b: wide(b)[0] @ wide(a)[0],
        Bound("float16", 512, 512.0),
    ),
]
