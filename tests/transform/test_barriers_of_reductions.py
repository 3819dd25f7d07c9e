"""Reductions over all warps of a block exchange partial results through shared memory, in two buffers alternately."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T


def test_reductions_one_after_another_took_two_barriers_each():
    """Two scratch buffers alternate: in a loop over a maximum and a sum each reduction has the one barrier that it needs."""
    @T.prim_func
    def main(X: T.Tensor((3, 512), "float32"), Y: T.Tensor((3,), "float32")):
        with T.Kernel(1, threads=128):
            x, top = T.alloc_fragment((1, 512), "float32"), T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            for r in T.serial(3):
                T.copy(X[r, 0], x)
                T.reduce_max(x, top, dim=1)
                for i, j in T.Parallel(1, 512):
                    x[i, j] = x[i, j] - top[i]
                T.reduce_sum(x, total, dim=1)
                for i in T.Parallel(1):
                    Y[r] = total[i]

    x = np.random.default_rng(0).integers(-9, 9, (3, 512)).astype(np.float32)
    for arch in ("sm_80", "sm_90a"):
        target = {"kind": "cuda", "arch": arch}
        y = np.zeros(3, np.float32)
        tilelang.compile(main, target=target, execution_backend="simulator")(x, y)
        assert np.array_equal(y, (x - x.max(1, keepdims=True)).sum(1))
        assert tilelang.compile(main, target=target).get_kernel_source().count("__syncthreads()") == 2


@pytest.mark.parametrize("columns, threads, groups", [(640, 320, 10), (96, 96, 3), (576, 160, 5)])
def test_threads_of_no_power_of_two_reduce_by_warps_first(columns, threads, groups):
    """Each thread read what all others had: 640 loads of shared memory for 640 threads, where their warps have 20 sums."""
    @T.prim_func
    def main(X: T.Tensor((2, columns), "float32"), Y: T.Tensor((2,), "float32")):
        with T.Kernel(2, threads=threads) as bx:
            x, total = T.alloc_fragment((1, columns), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(X[bx, 0], x)
            T.reduce_sum(x, total, dim=1)
            for i in T.Parallel(1):
                Y[bx] = total[i]

    x, y = np.random.default_rng(0).integers(-9, 9, (2, columns)).astype(np.float32), np.zeros(2, np.float32)
    target = {"kind": "cuda", "arch": "sm_90a"}
    tilelang.compile(main, target=target, execution_backend="simulator")(x, y)
    assert np.array_equal(y, x.sum(1))
    text = tilelang.compile(main, target=target).get_kernel_source()
    assert f"g < {groups};" in text and "shfl_xor" in text
