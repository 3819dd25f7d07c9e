"""T.copy_cluster with a remote mbarrier, for rows that bulk copies of 16 bytes cannot move."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

SM90 = {"kind": "cuda", "arch": "sm_90a"}


def exchange(columns, rows=8, dtype="float16", wide=None, first=0, announced=0):
    """B[block] = A[the other block of its cluster]; wide, first: the tile's row and where the columns lie in it."""
    wide, nbytes = wide or columns, rows * columns * np.dtype(dtype).itemsize + announced

    @T.prim_func
    def f(A: T.Tensor((4, rows, columns), dtype), B: T.Tensor((4, rows, columns), dtype)):
        with T.ClusterKernel(4, cluster_dims=2, threads=128) as bx:
            s, r = T.alloc_shared((rows, columns), dtype), T.alloc_shared((rows, wide), dtype)
            bar, rank = T.alloc_cluster_barrier(1), T.block_rank_in_cluster()
            T.copy(A[bx, :, :], s)
            T.fence_proxy_async()
            T.cluster_sync()
            if T.get_thread_binding() == 0:
                T.mbarrier_arrive_expect_tx(bar[0], nbytes)
            T.copy_cluster(s, r[:, first:first + columns], dst_block=1 - rank, remote_barrier=bar[0])
            T.mbarrier_wait_parity(bar[0], 0)
            T.copy(r[:, first:first + columns], B[bx, :, :])
            T.cluster_sync()

    return f


ODD = [{"columns": 5, "wide": 12}, {"columns": 5, "wide": 12, "first": 3}, {"columns": 8, "wide": 24, "first": 4},
       {"columns": 3, "rows": 50, "dtype": "float32"}, {"columns": 7, "rows": 1, "dtype": "int8"},
       {"columns": 200, "rows": 3, "wide": 201, "dtype": "int8"}]


@pytest.mark.parametrize("backend", ["simulator", "tile"])
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_rows_that_are_no_multiples_of_16_bytes_were_refused(shape, backend):
    """"contiguous parts of `s` and `r` are no multiples of 16 bytes"; a start inside 16 bytes was not seen at all."""
    program = exchange(**shape)
    target = SM90 if backend == "simulator" else "auto"
    kernel = tilelang.compile(program, target=target, execution_backend=backend)
    a = np.random.default_rng(0).integers(-9, 9, (4, *map(int, program.func.buffers[0][1].shape[1:]))).astype(
        shape.get("dtype", "float16"))
    b = np.zeros_like(a)
    kernel(a, b)
    np.testing.assert_array_equal(b, a[[1, 0, 3, 2]])


def test_the_copy_is_verified_and_assembled():
    kernel = tilelang.compile(exchange(5, wide=12), target=SM90)
    source = kernel.get_kernel_source()
    assert kernel.sync_report().startswith("f_kernel: ordered")
    assert "mbarrier_complete_remote(&bar[0]" in source and "tl::bulk_copy_cluster(" not in source


def test_rows_of_16_bytes_stay_bulk_copies():
    assert "tl::bulk_copy_cluster(" in tilelang.compile(exchange(64), target=SM90).get_kernel_source()


def test_bytes_that_do_not_add_up_are_refused():
    with pytest.raises(TileLangError, match="comes to a standstill") as e:
        tilelang.compile(exchange(5, wide=12, announced=2), target=SM90)
    assert e.value.kind == "sync-unordered"
