"""T.ClusterKernel: the launch attribute, and the dimensions that are refused."""

import pytest

import tilelang.language as T
from tilelang.ir import Launch, walk


def launched(*grid, cluster_dims):
    @T.prim_func
    def f(A: T.Tensor((4,), "float32")):
        with T.ClusterKernel(*grid, cluster_dims=cluster_dims, threads=32):
            A[0] = 1.0

    (launch,) = [n for n in walk(f.func) if isinstance(n, Launch)]
    return launch.plan.cluster


@pytest.mark.spec("L7:ClusterKernel")
def test_cluster_kernel_sets_the_dimensions_of_the_launch():
    assert launched(4, cluster_dims=2) == (2, 1, 1)
    assert launched(4, 6, cluster_dims=[2, 3]) == (2, 3, 1)
    assert launched(4, cluster_dims=(1, 1, 1)) is None
    assert launched(32, cluster_dims=16) == (16, 1, 1)


@pytest.mark.spec("T.ClusterKernel")
@pytest.mark.parametrize("grid, dims, text", [
    ((3,), 2, "clusters of 2 blocks along x do not divide a grid of 3"), ((4,), (1, 2), "along y do not divide a grid of 1"),
    ((32,), 32, "at most 16 blocks"), ((4,), 0, "positive extents"), ((4,), (1, 1, 1, 1), "1 to 3 positive extents"),
    ((4,), True, "positive extents"),
])
def test_cluster_dimensions_that_cannot_be_are_refused(grid, dims, text):
    with pytest.raises(ValueError, match=text):
        launched(*grid, cluster_dims=dims)
