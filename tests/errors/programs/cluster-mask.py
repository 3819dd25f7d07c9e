"""A multicast to a block that the cluster does not have."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64, 64), "float16")):
    with T.ClusterKernel(2, cluster_dims=2, threads=128):
        S, bar = T.alloc_shared((64, 64), "float16"), T.alloc_barrier(128)
        T.tma_copy(A, S, barrier=bar, cluster_mask=0b111)
