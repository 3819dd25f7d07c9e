"""Shared buffers of run-time size (language 6): stored row by row (RowMajor), sized at each launch."""

import numpy as np
import pytest
from everywhere import EXECUTIONS, SM80, call, cuda_text, placed

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.layout import RowMajor
from tilelang.target import Target
from tilelang.transform.pipeline import lower


def reversed_rows(threads=48):
    """Y = X with rows and columns reversed, through two tiles of run-time size and one of static size."""
    m, n = T.dynamic("m, n")

    @T.prim_func
    def f(X: T.Tensor((m, n), "float16"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=threads):
            S = T.alloc_shared((m, n), "float16")
            R = T.alloc_shared((n,), "float32")
            K = T.alloc_shared((8,), "int32")
            T.fill(K, 1)
            T.copy(X, S)
            for r in T.serial(m):
                for j in T.Parallel(n):
                    R[j] = S[m - 1 - r, j] * K[j % 8]
                for j in T.Parallel(n):
                    Y[r, j] = R[n - 1 - j]

    return f


@pytest.mark.spec("L6:alloc_shared", "T.alloc_shared")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("size", [(1, 1), (3, 40), (5, 33), (7, 128)])
def test_sizes_differ_from_call_to_call(size, on):
    f = reversed_rows()
    where = placed(on)
    kernel = tilelang.compile(f, **where)
    for m, n in (size, (2, 9)):
        x = np.random.default_rng(m).integers(-9, 9, (m, n)).astype(np.float16)
        y = np.zeros((m, n), np.float32)
        call(where, kernel, x, y)
        assert np.array_equal(y, x[::-1, ::-1])


@pytest.mark.spec("L6:alloc_shared", "T.alloc_shared")
def test_the_size_is_an_expression_of_the_launch():
    (kernel,) = lower(reversed_rows().func, Target(SM80), {}).kernels
    assert not isinstance(kernel.shared_bytes, int)
    assert {v.name for v in tilelang.ir.free_vars(kernel.shared_bytes)} == {"m", "n"}
    cuda_text(reversed_rows())


def test_rows_are_stored_one_after_another():
    n = T.dynamic("n")
    layout = RowMajor((3, n, 8))
    i, j, k = (T.var(v) for v in "ijk")
    assert layout.offset((i, j, k)).same((i * n + j) * 8 + k) and layout.aligned_run == 8
    assert RowMajor((8, n)).aligned_run == 1 and layout.swizzle is None


def test_matrix_operands_of_run_time_size_are_refused():
    n = T.dynamic("n")

    @T.prim_func
    def f(X: T.Tensor((n, 16), "float16"), Y: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((n, 16), "float16")
            B = T.alloc_shared((16, 16), "float16")
            C = T.alloc_fragment((16, 16), "float32")
            T.copy(X, S)
            T.clear(B)
            T.clear(C)
            T.gemm(S[0:16, :], B, C)
            T.copy(C, Y)

    with pytest.raises((TileLangError, AssertionError), match="run-time shape"):
        lower(f.func, Target(SM80), {})
