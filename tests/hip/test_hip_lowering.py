"""What passes make of the features of AMD GPUs: waves of 64 lanes, tiles that are in flight in registers, the LDS of a chip.

Programs run on the device simulator of gfx942 and are compared with NumPy.
"""

import numpy as np
import pytest

import tilelang
import tilelang.language as T


def row_sums(threads, rows, dtype="float32"):
    @T.prim_func
    def program(A: T.Tensor((64, 512), dtype), C: T.Tensor((64,), "float32")):
        with T.Kernel(64 // rows, threads=threads) as bx:
            x, s = T.alloc_fragment((rows, 512), dtype), T.alloc_fragment((rows,), "float32")
            T.copy(A[bx * rows, 0], x)
            T.reduce_sum(x, s, dim=1)
            T.copy(s, C[bx * rows])

    return program


@pytest.mark.parametrize("threads, rows", [(64, 1), (96, 1), (256, 4), (32, 4)])
def test_rows_are_reduced_over_whole_waves(threads, rows):
    a, c = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32), np.zeros(64, np.float32)
    tilelang.compile(row_sums(threads, rows), target="gfx942", execution_backend="simulator")(a, c)
    np.testing.assert_allclose(c, a.sum(1), rtol=1e-5, atol=1e-4)
    source = tilelang.lower(row_sums(threads, rows), target="gfx942").kernel_source
    assert (", 32, 64," in source) == (threads % 64 == 0)  # a lane exchanges with the one 32 away
    assert ", 32, 64," not in tilelang.lower(row_sums(threads, rows), target="sm_80").kernel_source


def products(stages, rows=64):
    @T.prim_func
    def program(A: T.Tensor((512, 64), "float32"), B: T.Tensor((512, 64), "float32"), C: T.Tensor((rows, 64), "float32")):
        with T.Kernel(2, threads=128) as bx:
            a, b = T.alloc_shared((rows, 32), "float32"), T.alloc_shared((rows, 32), "float32")
            acc = T.alloc_fragment((rows, 32), "float32")
            T.clear(acc)
            for k in T.Pipelined(512 // rows, num_stages=stages):
                T.copy(A[k * rows, bx * 32], a)
                T.copy(B[k * rows, bx * 32], b)
                for i, j in T.Parallel(rows, 32):
                    acc[i, j] = acc[i, j] + a[rows - 1 - i, 31 - j] * b[i, j]
            T.copy(acc, C[0, bx * 32])

    return program


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_tiles_of_the_next_iteration_are_in_flight_in_registers(stages):
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((512, 64)).astype(np.float32) for _ in range(2))
    c = np.zeros((64, 64), np.float32)
    kernel = tilelang.compile(products(stages), target="gfx942", execution_backend="simulator")
    kernel(a, b, c)
    turned = a.reshape(8, 64, 2, 32)[:, ::-1, :, ::-1].reshape(512, 64)
    np.testing.assert_allclose(c, (turned * b).reshape(8, 64, 64).sum(0), rtol=1e-5, atol=1e-5)
    (facts,) = kernel.report_data["kernels"]
    assert facts["schedule"].startswith("pipelined") and facts["shared_bytes"] == facts["stages"].get("a", 1) * 2 * 64 * 32 * 4
    assert kernel.sync_report().split(": ")[1].startswith("ordered")


def test_a_pipelined_loop_without_statements_is_no_loop():
    """The number of tiles that are live at once is that of none."""
    @T.prim_func
    def program(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for _ in T.Pipelined(3, num_stages=2):
                T.make_tensor(T.address_of(A[0]), (32,), "float64")
            T.fill(A, 2.0)

    a = np.zeros(64, np.float32)
    tilelang.compile(program, target="gfx942", execution_backend="simulator")(a)
    assert (a == 2).all()


def test_a_tile_that_the_iteration_before_writes_is_not_loaded_ahead():
    @T.prim_func
    def program(A: T.Tensor((9, 128), "float32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((128,), "float32")
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[k, 0], s)
                for i in T.Parallel(128):
                    A[k + 1, i] = s[127 - i] + 1.0

    a = np.random.default_rng(3).standard_normal((9, 128)).astype(np.float32)
    expected = a.copy()
    for k in range(8):
        expected[k + 1] = expected[k, ::-1] + 1
    tilelang.compile(program, target="gfx942", execution_backend="simulator")(a)
    np.testing.assert_array_equal(a, expected)


def test_a_gemm_of_ragged_sizes_loads_ahead_no_element_outside():
    m = T.dynamic("m")

    @T.prim_func
    def program(A: T.Tensor((m, 45), "float16"), B: T.Tensor((45, 7), "float16"), C: T.Tensor((m, 7), "float32")):
        with T.Kernel(T.ceildiv(m, 32), threads=64) as bx:
            a, b = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 16), "float16")
            acc = T.alloc_fragment((32, 16), "float32")
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(45, 32), num_stages=2):
                T.copy(A[bx * 32, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, acc)
            T.copy(acc, C[bx * 32, 0])

    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((33, 45)).astype(np.float16), rng.standard_normal((45, 7)).astype(np.float16)
    c = np.zeros((33, 7), np.float32)
    kernel = tilelang.compile(program, target="gfx950", execution_backend="simulator")
    kernel(a, b, c)
    np.testing.assert_allclose(c, a.astype(np.float32) @ b.astype(np.float32), rtol=1e-4, atol=1e-4)
    assert kernel.report_data["kernels"][0]["schedule"].startswith("pipelined: ")
