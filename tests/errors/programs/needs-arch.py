"""A barrier in shared memory on a target that has none."""

import tilelang
import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        bar = T.alloc_barrier(128)
        T.mbarrier_arrive(bar)
        T.mbarrier_wait_parity(bar, 0)


tilelang.compile(main, target={"kind": "cuda", "arch": "sm_80"})
