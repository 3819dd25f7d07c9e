"""Tensors of shape (): read by all threads, written by one, beside vectors and in programs with wgmma."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere

import tilelang.language as T


def test_a_number_in_a_tensor_is_read_beside_vectors():
    @T.prim_func
    def f(A: T.Tensor((300,), "float32"), C: T.Tensor((), "float32"), B: T.Tensor((300,), "float32")):
        with T.Kernel(2, threads=128) as b:
            for j in T.Parallel(150):
                B[b * 150 + j] = A[b * 150 + j] * C[()]

    a = np.arange(300, dtype=np.float32)
    assert np.array_equal(everywhere(f, a, np.full((), 3, np.float32), on=WITH_HOPPER)[-1], a * 3)


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64"])
def test_a_sum_is_stored_in_a_tensor_without_axes(dtype):
    @T.prim_func
    def f(A: T.Tensor((128,), dtype), S: T.Tensor((), dtype)):
        with T.Kernel(1, threads=64):
            a, s = T.alloc_fragment((128,), dtype), T.alloc_fragment((1,), dtype)
            T.copy(A, a)
            T.reduce_sum(a, s, dim=0)
            if T.get_thread_binding() == 0:
                S[()] = s[0] + S[()]

    a = (np.arange(128) % 3 - 1).astype(dtype)
    assert everywhere(f, a, np.full((), 5, dtype), on=WITH_HOPPER)[-1] == a.sum() + 5


def test_a_scale_of_a_matrix_product_is_a_tensor_without_axes():
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((), "float32"),
          O: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            for i, j in T.Parallel(64, 64):
                O[i, j] = c[i, j] * C[()]

    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, (64, 64)).astype(np.float16) for _ in range(2))
    assert np.array_equal(everywhere(f, a, b, np.full((), 0.5, np.float32), on=WITH_HOPPER)[-1],
                          (a.astype(np.float32) @ b.astype(np.float32)) * 0.5)
