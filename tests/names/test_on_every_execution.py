"""Calls that other tests run on one execution only: the same values on the tile meaning, the simulator and the CPU."""

import ml_dtypes
import numpy as np
import pytest
from everywhere import EXECUTIONS, WITH_HOPPER, cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError

RNG = np.random.default_rng(0)


@pytest.mark.spec("T.atomic_addx2", "T.atomic_addx4")
@pytest.mark.spec("L13:vector")
@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16"])
def test_vector_atomics_of_many_threads(element):
    """32 threads add pairs, and fours of float32, to 8 elements; small integers are exact in each type."""

    @T.prim_func
    def f(A: T.Tensor((32, 4), element), O: T.Tensor((4, 2), element), Q: T.Tensor((2, 4), "float32")):
        with T.Kernel(1, threads=32):
            i = T.get_thread_binding()
            T.atomic_addx2(O[i % 4, 0], A[i, 0])
            if element == "float32":
                T.atomic_addx4(Q[i % 2, 0], A[i, 0])

    a = RNG.integers(-2, 3, (32, 4)).astype(getattr(ml_dtypes, element) if element == "bfloat16" else element)
    _, o, q = everywhere(f, a, on=WITH_HOPPER)
    wide = a.astype(np.float64)
    assert np.array_equal(o.astype(np.float64), wide[:, :2].reshape(8, 4, 2).sum(0))
    if element == "float32":
        assert np.array_equal(q, wide.reshape(16, 2, 4).sum(0))
    assert "atomic_add" in cuda_text(f, "sm_90a")


@pytest.mark.spec("T.dp4a")
@pytest.mark.spec("L11:dp4a")
def test_four_products_of_bytes():
    @T.prim_func
    def f(A: T.Tensor((32, 8), "int8"), B: T.Tensor((32, 8), "int8"), O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            i = T.get_thread_binding()
            acc = T.alloc_local((1,), "int32")
            acc[0] = i
            T.dp4a(A[i, 0], B[i, 0], acc)
            T.dp4a(A[i, 4:8], B[i, 4:8], acc)
            O[i] = acc[0]

    a, b = (RNG.integers(-128, 128, (32, 8)).astype(np.int8) for _ in "ab")
    a[0], b[0] = -128, -128
    o = everywhere(f, a, b)[2]
    assert np.array_equal(o, (a.astype(np.int32) * b).sum(1) + np.arange(32))


@pytest.mark.spec("T.im2col")
@pytest.mark.spec("L10:im2col")
@pytest.mark.parametrize("stride, dilation, pad", [(1, 1, 1), (2, 1, 0), (1, 2, 2)])
def test_image_columns(stride, dilation, pad):
    n, h, w, c, kernel, rows, columns = 2, 6, 5, 8, 3, 16, 8
    oh = (h + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
    ow = (w + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
    total = n * oh * ow

    @T.prim_func
    def f(X: T.Tensor((n, h, w, c), "float16"), Y: T.Tensor((total, kernel * kernel * c), "float16")):
        with T.Kernel(T.ceildiv(total, rows), kernel * kernel * c // columns, threads=32) as (by, bk):
            S = T.alloc_shared((rows, columns), "float16")
            T.im2col(X, S, by, bk, kernel, stride, dilation, pad)
            T.copy(S, Y[by * rows, bk * columns])

    x = RNG.standard_normal((n, h, w, c)).astype(np.float16)
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    want = np.stack([padded[:, i * dilation:i * dilation + (oh - 1) * stride + 1:stride,
                            j * dilation:j * dilation + (ow - 1) * stride + 1:stride]
                     for i in range(kernel) for j in range(kernel)], 3).reshape(total, -1)
    assert np.array_equal(everywhere(f, x, on=WITH_HOPPER)[1], want)


@pytest.mark.spec("T.device_assert")
@pytest.mark.spec("L20:device_assert")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_an_assertion_that_holds_changes_nothing_and_one_that_does_not_is_told(on):
    @T.prim_func
    def f(A: T.Tensor((32,), "int32"), O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            i = T.get_thread_binding()
            T.device_assert(A[i] > 0, "A must be positive")
            O[i] = A[i] * 2

    a = np.arange(1, 33, dtype=np.int32)
    assert np.array_equal(run(f, a, on=on)[1], 2 * a)
    a[5] = 0
    if on == "cpu":  # of CUDA alone, says the specification
        assert np.array_equal(run(f, a, on=on)[1], 2 * a)
    else:
        with pytest.raises(TileLangError, match="A must be positive"):
            run(f, a, on=on, simulated=True)
    assert "A must be positive" in cuda_text(f)


@pytest.mark.spec("T.alloc_global", "L6:alloc_global")
def test_a_workspace_between_two_launches():
    @T.prim_func
    def f(A: T.Tensor((40,), "float32"), O: T.Tensor((40,), "float32")):
        W = T.alloc_global((40,), "float32")
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(20):
                W[b * 20 + i] = A[b * 20 + i] + 1.0
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                O[i] = W[39 - i]

    a = RNG.standard_normal(40).astype(np.float32)
    assert np.array_equal(everywhere(f, a, on=WITH_HOPPER)[1], (a + np.float32(1))[::-1])
