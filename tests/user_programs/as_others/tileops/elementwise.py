"""Elementwise operators."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import EXACT, Bound, Program, drawn, uniform, wide


@tilelang.jit(out_idx=[1])
def dropout(N, keep, seed=7, block=256):
    """Philox numbers of each thread, drawn inside of the parallel loop: kept elements are scaled, and 0 stays 0."""

    @T.prim_func
    def main(x: T.Tensor((N,), "float32"), y: T.Tensor((N,), "float32")):
        with T.Kernel(T.ceildiv(N, block), threads=block) as bx:
            T.rng_init(seed, bx * block + T.get_thread_binding())
            for i in T.Parallel(block):
                u = T.rng_rand_float()
                if bx * block + i < N:
                    y[bx * block + i] = T.if_then_else(u < keep, x[bx * block + i] / keep, 0.0)

    return main


@tilelang.jit(out_idx=[-1], compile_flags=["-O3", "--use_fast_math"])
def gelu_and_mul(N, block=256, dt="float16"):
    M = T.dynamic("M")

    @T.prim_func
    def main(x: T.Tensor[(M, 2 * N), dt], y: T.Tensor[(M, N), dt]):
        with T.Kernel(T.ceildiv(N, block), M, threads=128) as (bx, by):
            for i in T.Parallel(block):
                if bx * block + i < N:
                    a = x[by, bx * block + i].astype("float32")
                    b = x[by, N + bx * block + i].astype("float32")
                    y[by, bx * block + i] = 0.5 * a * (1.0 + T.erf(a * 0.70710678)) * b

    return main


def gelu_and_mul_reference(x):
    from math import erf

    (x,) = wide(x)
    n = x.shape[1] // 2
    return 0.5 * x[:, :n] * (1 + np.vectorize(erf)(x[:, :n] / np.sqrt(2))) * x[:, n:]


PROGRAMS = [
    Program(
        "dropout",
        dropout,
        dict(N=600, keep=0.5),
        drawn(np.ones(600, np.float32)),
        lambda x: np.ones(600),
        EXACT,
        arrange=lambda r: [np.where((r[0] == 0) | (r[0] == 2), 1.0, 0.0) * (200 < (r[0] == 2).sum() < 400)],
    ),
    Program(
        "gelu_and_mul",
        gelu_and_mul,
        dict(N=300),
        drawn(uniform((3, 600), "float16", -3, 3)),
        gelu_and_mul_reference,
        Bound("float16", 16, 9.0),
    ),
]
