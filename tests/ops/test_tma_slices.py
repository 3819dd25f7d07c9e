"""T.tma_copy of some rows and columns of a shared tile."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

SM90 = {"kind": "cuda", "arch": "sm_90a"}


def loaded(row, rows, column, columns, shape=(64, 512), dtype="float16", slices=1):
    """A tensor's tile goes to a slice of a shared buffer of zeros, or to `slices` slices side by side."""
    @T.prim_func
    def f(A: T.Tensor((rows, columns * slices), dtype), O: T.Tensor(shape, dtype)):
        with T.Kernel(1, threads=128):
            s, bar = T.alloc_shared(shape, dtype), T.alloc_barrier(128)
            T.clear(s)
            T.fence_proxy_async()
            T.sync_threads()
            for h in T.serial(slices):
                T.tma_copy(A[0:rows, h * columns:(h + 1) * columns],
                           s[row:row + rows, column + h * columns:column + (h + 1) * columns], barrier=bar)
            T.barrier_arrive(bar)
            T.barrier_wait(bar, 0)
            T.copy(s, O)

    return f


def stored(row, rows, column, columns, shape=(64, 512), dtype="float16"):
    @T.prim_func
    def f(A: T.Tensor(shape, dtype), O: T.Tensor((rows, columns), dtype)):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared(shape, dtype)
            T.copy(A, s)
            T.fence_proxy_async()
            T.sync_threads()
            T.tma_copy(s[row:row + rows, column:column + columns], O)
            T.tma_store_wait(0)

    return f


def run(program):
    kernel = tilelang.compile(program, target=SM90, execution_backend="simulator")
    rng, args = np.random.default_rng(0), []
    for _, b in program.func.buffers:
        args.append(rng.integers(1, 9, tuple(map(int, b.shape))).astype(str(b.dtype)))
    kernel(*args)
    return args


SLICES = [(0, 64, 0, 64), (0, 64, 448, 64), (8, 16, 128, 192), (3, 20, 64, 64), (5, 1, 64, 128), (0, 64, 0, 512),
          (4, 20, 0, 512), (0, 64, 32, 32), (8, 24, 16, 48)]


@pytest.mark.parametrize("slice_", SLICES, ids=str)
def test_a_slice_was_refused_with_it_takes_whole_rows_and_columns(slice_):
    row, rows, column, columns = slice_
    a, o = run(loaded(*slice_))
    want = np.zeros_like(o)
    want[row:row + rows, column:column + columns] = a
    np.testing.assert_array_equal(o, want)
    a, o = run(stored(*slice_))
    np.testing.assert_array_equal(o, a[row:row + rows, column:column + columns])


@pytest.mark.parametrize("dtype,shape,slice_", [("float32", (32, 96), (0, 32, 32, 32)), ("int8", (48, 256), (8, 8, 128, 128)),
                                                ("float16", (64, 32), (2, 6, 0, 32)), ("float16", (300, 64), (0, 290, 0, 64)),
                                                ("float16", (64, 24), (8, 16, 8, 16))], ids=str)
def test_slices_of_other_boxes(dtype, shape, slice_):
    """Boxes of 128, 64, 32 and 16 bytes; more than 256 rows take several boxes."""
    row, rows, column, columns = slice_
    a, o = run(loaded(*slice_, shape, dtype))
    want = np.zeros_like(o)
    want[row:row + rows, column:column + columns] = a
    np.testing.assert_array_equal(o, want)


def test_wgmma_reads_boxes_of_narrow_slices():
    """Slices of 32 columns make boxes of 64 bytes, in the operand's descriptor too."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            bar = T.alloc_barrier(128)
            for h in T.serial(2):
                T.tma_copy(A[0:64, h * 32:(h + 1) * 32], a[0:64, h * 32:(h + 1) * 32], barrier=bar)
            T.tma_copy(B, b, barrier=bar)
            T.barrier_arrive(bar)
            T.barrier_wait(bar, 0)
            T.clear(c)
            T.wgmma_gemm(a, b, c)
            T.wait_wgmma(0)
            T.copy(c, C)

    a, b, c = run(f)
    np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32))
    assert "boxes of 64 x 32 of `A`, swizzle 64" in tilelang.compile(f, target=SM90).report()


def test_slices_that_a_loop_chooses():
    a, o = run(loaded(0, 64, 128, 64, slices=3))
    want = np.zeros_like(o)
    want[:, 128:320] = a
    np.testing.assert_array_equal(o, want)


@pytest.mark.parametrize("slice_,why", [((0, 64, 4, 4), "the slice is 4 of 512 columns of `s`, whose boxes have 64 columns"),
                                        ((3, 20, 0, 24), "the slice is 20 of 64 rows of `s`, and its boxes of 16 bytes a row")])
def test_the_error_names_the_slice(slice_, why):
    """It said "it takes whole rows and columns of `s`"."""
    with pytest.raises(TileLangError) as e:
        run(loaded(*slice_, (64, 24) if slice_[3] == 24 else (64, 512)))
    assert e.value.kind == "tma-copy" and why in str(e.value) and "whole boxes, or move it by T.copy" in str(e.value)
