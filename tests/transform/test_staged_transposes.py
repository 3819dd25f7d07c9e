"""staged_transposes: what a loop reads across its rows comes along its own rows, through shared memory."""

import sys
from pathlib import Path

import numpy as np
import pytest
from pass_steps import SM90A, around

import tilelang
import tilelang.language as T

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "names"))
from everywhere import WITH_HOPPER, everywhere


def turned(m, n, tile=32, dtype="float16"):
    @T.prim_func
    def main(X: T.Tensor((m, n), dtype), Y: T.Tensor((n, m), dtype)):
        with T.Kernel(T.ceildiv(n, tile), T.ceildiv(m, tile), threads=128) as (bx, by):
            for i, j in T.Parallel(tile, tile):
                Y[bx * tile + i, by * tile + j] = X[by * tile + j, bx * tile + i]

    return main


def channels_last(b, c, h, w):
    """Also reads a vector that both walk, and writes half of the elements only."""
    @T.prim_func
    def main(X: T.Tensor((b, c, h, w), "float32"), B: T.Tensor((c,), "float32"), Y: T.Tensor((b, h, w, c), "float32")):
        with T.Kernel(b, h, threads=64) as (n, y):
            for x, k in T.Parallel(w, c):
                if (x + k) % 2 == 0:
                    Y[n, y, x, k] = T.abs(T.max(X[n, k, y, x] + B[k], 0.0))

    return main


@pytest.mark.parametrize("m, n, dtype", [(64, 96, "float16"), (33, 70, "float32"), (31, 65, "uint8")])
def test_a_transpose_by_elements_loaded_one_element_at_a_time(m, n, dtype):
    x = np.random.default_rng(0).integers(0, 100, (m, n)).astype(dtype)
    assert np.array_equal(everywhere(turned(m, n, dtype=dtype), x, on=WITH_HOPPER)[1], x.T)
    assert "X_turned" in tilelang.compile(turned(m, n, dtype=dtype), target=SM90A).get_kernel_source()


def fragment_turned(m, n, tile=64, dtype="float32", rows_first=True):
    """A fragment that comes along rows of X, normalised by its rows or not, and goes along rows of Y."""
    @T.prim_func
    def main(X: T.Tensor((m, n), dtype), Y: T.Tensor((n, m), dtype)):
        with T.Kernel(T.ceildiv(n, tile), T.ceildiv(m, tile), threads=128) as (bx, by):
            f, most = T.alloc_fragment((tile, tile), dtype), T.alloc_fragment((tile,), dtype)
            T.copy(X[by * tile, bx * tile], f)
            if rows_first:
                T.reduce_max(f, most, dim=1)
                for i, j in T.Parallel(tile, tile):
                    f[i, j] -= most[i]
            for i, j in T.Parallel(tile, tile):
                Y[bx * tile + j, by * tile + i] = f[i, j]

    return main


@pytest.mark.parametrize("m, n, dtype, rows_first", [(64, 128, "float32", False), (70, 64, "float16", True)])
def test_a_fragment_stored_across_its_rows_stored_one_element_at_a_time(m, n, dtype, rows_first):
    x = np.random.default_rng(0).integers(0, 100, (m, n)).astype(dtype)
    want = x - (x.max(axis=1, keepdims=True) if rows_first else 0)
    program = fragment_turned(m, n, dtype=dtype, rows_first=rows_first)
    assert np.array_equal(everywhere(program, x, on=WITH_HOPPER)[1], want.T)
    assert "f_turned" in tilelang.compile(program, target=SM90A).get_kernel_source()


def test_neighbouring_blocks_stored_along_columns():
    """Blocks go along the rows of Y, where the program has them go along those of X."""
    text = tilelang.compile(turned(64, 96), target=SM90A).get_kernel_source()
    assert "by = blockIdx.x" in text and "bx = blockIdx.y" in text

    @T.prim_func
    def copied(X: T.Tensor((64, 96), "float16"), Y: T.Tensor((64, 96), "float16")):
        with T.Kernel(3, 2, threads=128) as (bx, by):
            for i, j in T.Parallel(32, 32):
                Y[by * 32 + i, bx * 32 + j] = X[by * 32 + i, bx * 32 + j]

    assert "bx = blockIdx.x" in tilelang.compile(copied, target=SM90A).get_kernel_source()


def test_channels_to_the_end():
    rng = np.random.default_rng(0)
    x, b = (rng.integers(-9, 9, s).astype(np.float32) for s in ((2, 24, 3, 20), (24,)))
    want = np.maximum(x + b[:, None, None], 0).transpose(0, 2, 3, 1)
    got = everywhere(channels_last(2, 24, 3, 20), x, b, on=WITH_HOPPER)[2]
    at = np.add.outer(np.arange(20), np.arange(24)) % 2 == 0
    assert np.array_equal(got, np.where(at, want, 0))


def test_loops_along_the_rows_of_both_stay():
    @T.prim_func
    def main(X: T.Tensor((64, 64), "float16"), Y: T.Tensor((64, 64), "float16")):
        with T.Kernel(4, threads=128) as b:
            for i, j in T.Parallel(16, 64):
                Y[b * 16 + i, j] = X[63 - b * 16 - i, j]

    before, after = around(main, "staged_transposes")
    assert after is before


def test_the_place_of_a_row_named_in_the_loop_had_no_value():
    @T.prim_func
    def main(X: T.Tensor((4, 32, 32), "float32"), Y: T.Tensor((32, 4, 32), "float32")):
        with T.Kernel(1, threads=128):
            for n, i, j in T.Parallel(4, 32, 32):
                k = 3 - n
                Y[i, k, j] = X[k, j, i]

    x = np.random.default_rng(0).random((4, 32, 32), np.float32)
    assert np.array_equal(everywhere(main, x, on=WITH_HOPPER)[1], x.transpose(2, 0, 1))


def test_blocks_that_wait_for_those_in_front_of_them_changed_places():
    @T.prim_func
    def main(X: T.Tensor((64, 96), "float32"), Y: T.Tensor((96, 64), "float32"), done: T.Tensor((1,), "int32")):
        with T.Kernel(3, 2, threads=128) as (bx, by):
            if T.get_thread_binding() == 0:
                seen = T.alloc_var("int32", init=0)
                while seen < by * 3 + bx:
                    seen = T.atomic_load(done[0])
            for i, j in T.Parallel(32, 32):
                Y[bx * 32 + i, by * 32 + j] = X[by * 32 + j, bx * 32 + i]
            if T.get_thread_binding() == 0:
                T.atomic_add(done[0], 1)

    before, after = around(main, "staged_transposes")
    assert [x.body.grid[0].value for x in (before, after)] == [3, 3]
