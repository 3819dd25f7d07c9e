"""Clusters that do not divide the grid."""

import tilelang.language as T


@T.prim_func
def main(A: T.Tensor((64,), "float32")):
    with T.ClusterKernel(3, cluster_dims=2, threads=32) as bx:
        A[bx] = 1.0
