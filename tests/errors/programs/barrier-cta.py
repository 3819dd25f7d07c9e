"""An arrival at another block on a barrier of one's own."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.ClusterKernel(2, cluster_dims=2, threads=128):
        bar = T.alloc_barrier(128)
        T.mbarrier_arrive(bar, cta_id=1)
