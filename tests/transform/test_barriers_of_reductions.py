"""Reductions over all warps of a block exchange partial results through shared memory, in two buffers alternately."""

import numpy as np

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
