"""Vectors of a row whose end was proven and whose start was not."""

import ml_dtypes
import numpy as np
import pytest

import tilelang
import tilelang.language as T

PLACES = {"cpu": {"target": "cpu"}, **{arch: {"target": {"kind": "cuda", "arch": arch}, "execution_backend": "simulator"}
                                       for arch in ("sm_80", "sm_90a")}}


@pytest.mark.parametrize("on", PLACES)
@pytest.mark.parametrize("shift", [2, 3, 4])
def test_a_vector_that_starts_before_its_row_reads_the_safe_value(on, shift):
    """12 of 29 elements from the second one in front of the first: the vectors end inside, so no bound was tested."""

    @T.prim_func
    def f(A: T.Tensor((29,), "float32"), O: T.Tensor((12, 26), "bfloat16")):
        with T.Kernel(1, threads=64) as _:
            S = T.alloc_shared((12, 26), "bfloat16")
            for i, j in T.Parallel(12, 26):
                S[i, j] = A[i - shift] * 2.0
            T.copy(S, O)

    a, o = np.arange(1, 30, dtype=np.float32), np.zeros((12, 26), ml_dtypes.bfloat16)
    tilelang.compile(f, **PLACES[on])(a, o)
    want = np.pad(a[:12 - shift] * 2, (shift, 0))
    assert np.array_equal(o, np.repeat(want[:, None], 26, 1).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("on", PLACES)
def test_a_vector_that_starts_before_its_row_is_not_stored(on):
    @T.prim_func
    def f(A: T.Tensor((12,), "float32"), O: T.Tensor((29,), "float32")):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(12):
                O[i - 4] = A[i]

    a, o = np.arange(1, 13, dtype=np.float32), np.full(29, -1, np.float32)
    tilelang.compile(f, **PLACES[on])(a, o)
    assert np.array_equal(o, np.pad(a[4:], (0, 21), constant_values=-1))
