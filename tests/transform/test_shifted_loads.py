"""Rows that start at odd addresses are loaded in vectors of 16 bytes: two aligned ones, shifted."""

import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.ir import numpy_dtype

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "names"))
from everywhere import SM80, WITH_HOPPER, everywhere


def to_shared(n, start, dtype, tile=1024, rows=8):
    """The elements of each row from `start` on, through a tile that reaches over the end of the row."""
    @T.prim_func
    def program(X: T.Tensor((rows, n), dtype), Y: T.Tensor((rows, n - start), dtype)):
        with T.Kernel(rows, threads=32) as r:
            s = T.alloc_shared((tile,), dtype)
            for i in T.Parallel(tile):
                s[i] = X[r, start + i]
            for i in T.Parallel(n - start):
                Y[r, i] = s[i]
    return program


def sums(n, dtype, block=512, reverse=False):
    """Sums of rows, by tiles in registers."""
    @T.prim_func
    def program(X: T.Tensor((4, n), dtype), Y: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=32) as r:
            x = T.alloc_fragment((block,), "float32")
            part, total = [T.alloc_fragment((1,), "float32") for _ in range(2)]
            T.clear(total)
            for k in range(T.ceildiv(n, block)):
                T.copy(X[r, k * block], x)
                T.reduce_sum(x, part)
                total[0] += part[0]
            Y[r] = total[0]
    return program


def text(program, arch=SM80):
    return tilelang.compile(program, target=arch).get_kernel_source()


def values(shape, dtype):
    x = np.arange(np.prod(shape)).reshape(shape) * 37 % 101 - 50
    return x.astype("float16" if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize("dtype", ["int8", "float16"])
@pytest.mark.parametrize("n, start", [(1001, 0), (1003, 1), (1002, 1), (1000, 3), (1001, 4), (1013, 5), (1001, 6), (1007, 7)])
def test_elements_of_odd_rows_were_loaded_one_by_one(n, start, dtype):
    program, x = to_shared(n, start, dtype), values((8, n), dtype)
    assert "tl::load_shifted<" in text(program)
    assert np.array_equal(everywhere(program, x, on=WITH_HOPPER)[1], x[:, start:])


@pytest.mark.parametrize("rows, shifted", [(3, False), (4, True), (T.dynamic("m"), False)])
def test_aligned_loads_reached_over_the_end_of_a_tensor(rows, shifted):
    """compute-sanitizer reports them where the tensor is all of its allocation."""
    assert ("tl::load_shifted<" in text(to_shared(1001, 1, "float16", rows=rows))) == shifted


@pytest.mark.parametrize("n", [1, 3, 8, 509, 513, 1025, 1543])
def test_tiles_in_registers_of_odd_rows(n):
    program, x = sums(n, "float16"), values((4, n), "float16")
    assert ("tl::load_shifted<" in text(program)) == (n % 8 > 0 and n >= 512 or n == 509)
    assert np.array_equal(everywhere(program, x, on=WITH_HOPPER)[1], x.astype(np.float32).sum(1))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_elements_of_four_bytes_are_loaded_alone(dtype):
    program, x = to_shared(1001, 1, dtype), values((8, 1001), dtype)
    assert "load_shifted" not in text(program)
    assert np.array_equal(everywhere(program, x)[1], x[:, 1:])


@pytest.mark.parametrize("first, second", [("float8_e5m2", "float8_e4m3fn"), ("bfloat16", "float8_e5m2")])
def test_loaded_elements_were_compared_with_casts_of_other_types(first, second):
    """Only what is cast to float32 at once is widened as a vector; a cast of another type had no common type with it."""
    @T.prim_func
    def program(X: T.Tensor((512,), first), Y: T.Tensor((512,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(512):
                Y[i] = T.cast(T.cast(X[i], second), "float32") + T.cast(X[i], "float32")

    x = values((512,), "float32") / 64
    got = everywhere(program, x.astype(numpy_dtype(first)), on=WITH_HOPPER)[1]
    y = x.astype(numpy_dtype(first))
    assert np.array_equal(got, y.astype(numpy_dtype(second)).astype(np.float32) + y.astype(np.float32))
