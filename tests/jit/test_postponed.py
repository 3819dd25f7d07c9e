"""Postponed annotations: names that only annotations use are found where the function was decorated."""

from __future__ import annotations

import numpy as np

import tilelang
import tilelang.language as T


def eager_around(n, dt):
    @tilelang.jit(target="cpu")
    def double(A: T.Tensor((n,), dt), B: T.Tensor((n,), dt)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                B[i] = A[i] * 2.0

    return double


def lazy_around(n, dt):
    @tilelang.jit(target="cpu", out_idx=[1])
    def double(m):
        @T.prim_func
        def main(A: T.Tensor((n,), dt), B: T.Tensor((m,), dt)):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(4):
                    B[i] = A[i] * 2.0

        return main

    return double


def test_eager():
    a, b = np.ones(4, np.float32), np.zeros(4, np.float32)
    eager_around(4, "float32")(a, b)
    assert (b == 2).all()


def test_lazy_factories_keep_their_own_surroundings():
    small, wide = lazy_around(4, "float32"), lazy_around(8, "float64")
    assert (small(4)(np.ones(4, np.float32)) == 2).all()
    assert (wide(4)(np.ones(8)) == 2).all() and wide(4)(np.ones(8)).dtype == np.float64
    assert small(4) is small(m=4)


@tilelang.jit(target="cpu")
def add_one(A, blk: int = 32):
    N = T.const("N")
    A: T.Tensor((N,), "float32")
    B = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, blk), threads=32) as bx:
        for i in T.Parallel(blk):
            B[bx * blk + i] = A[bx * blk + i] + 1.0
    return B


def test_module_level_eager():
    assert (add_one(np.ones(70, np.float32)) == 2).all()
