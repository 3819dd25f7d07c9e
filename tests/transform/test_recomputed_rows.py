"""Rows that fill the registers of an SM are kept in shared memory (transform/legalize/recomputed_rows.py)."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T

SM90A = {"kind": "cuda", "arch": "sm_90a"}


def rows(change="", m=1, n=24576, threads=512):
    """Two blocks of 512 threads do not fit beside such rows; two of 1,024 would have 32 registers a thread."""
    @T.prim_func
    def f(X: T.Tensor((m, n), "float16"), V: T.Tensor((n,), "float16"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(m, threads=threads) as r:
            x, v, total = T.alloc_fragment((1, n), "float32"), T.alloc_fragment((n,), "float32"), T.alloc_fragment(
                (1,), "float32")
            T.copy(X[r, 0], x)
            T.copy(V, v)
            T.reduce_max(x, total, dim=1)
            for i, j in T.Parallel(1, n):
                x[i, j] = x[i, j] - total[i]
            if change == "loaded again":
                T.copy(X[r, 0], x)
            if change == "part of a row":
                for i, j in T.Parallel(1, n // 2):
                    x[i, j] = x[i, j] + 1
            if change == "functions":
                for i, j in T.Parallel(1, n):
                    x[i, j] = T.abs(T.floor(x[i, j] * 0.5)) + T.ceil(x[i, j] * 0.25)
            if change == "the maximum changes":
                T.reduce_sum(x, total, dim=1)
            elif change != "one reduction":
                for _ in T.serial(1):
                    T.reduce_min(x, total, dim=1)
                for i in T.Parallel(1):
                    total[i] = total[i] * 2
            for i, j in T.Parallel(1, n):
                x[i, j] = x[i, j] * total[i] + v[j]
            T.copy(x, Y[r, 0])

    return f


def agree(program):
    """The text for sm_90a of a program whose results on the simulator are those of the reference interpreter."""
    rng = np.random.default_rng(0)
    x, v = (rng.integers(-4, 5, s).astype(np.float16) for s in ((1, 24576), 24576))
    want = np.zeros((1, 24576), np.float32)
    tilelang.compile(program, target="cpu", execution_backend="tile")(x, v, want)
    got = np.zeros_like(want)
    tilelang.compile(program, target=SM90A, execution_backend="simulator")(x, v, got)
    np.testing.assert_array_equal(got, want)
    return tilelang.compile(program, target=SM90A).get_kernel_source().partition("__global__")[2]


def test_long_rows_left_room_for_one_block():
    """The row is loaded once, and its difference computed again; the vector is loaded where it is used."""
    text = agree(rows("one reduction"))
    assert text.count("&X[") == 1 and text.count("X_rows[") == 3 and text.index("&V[") > text.index("__syncthreads")


@pytest.mark.parametrize("change", ["", "loaded again", "part of a row", "functions", "the maximum changes"])
def test_rows_that_stay_in_registers(change):
    assert "X_rows" not in agree(rows(change))


@pytest.mark.parametrize("n, threads", [(24576, 1024), (16384, 512)])
def test_rows_that_are_no_reason(n, threads):
    text = tilelang.compile(rows("one reduction", n=n, threads=threads), target=SM90A).get_kernel_source()
    assert "X_rows" not in text


def loaded_late(change):
    """Rows whose vector is loaded again behind the reduction, or whose vector's place is loaded."""
    n = 24576

    @T.prim_func
    def f(X: T.Tensor((1, n), "float16"), V: T.Tensor((2, n), "float16"), at: T.Tensor((1,), "int32"),
          Y: T.Tensor((1, n), "float32")):
        with T.Kernel(1, threads=512) as r:
            x, v, total = (T.alloc_fragment(s, "float32") for s in ((1, n), (n,), (1,)))
            k = T.alloc_fragment((1,), "int32")
            T.copy(at, k)
            T.copy(V[k[0] if change == "a place" else 0, 0], v)
            T.copy(X[r, 0], x)
            T.reduce_max(x, total, dim=1)
            for i, j in T.Parallel(1, n):
                x[i, j] = x[i, j] - total[i] + v[j]
            T.reduce_sum(x, total, dim=1)
            if change == "a vector":
                T.copy(V[1, 0], v)
            for i, j in T.Parallel(1, n):
                x[i, j] = x[i, j] * total[i] + v[j]
            T.copy(x, Y[r, 0])

    return f


@pytest.mark.parametrize("change", ["a vector", "a place"])
def test_what_is_computed_again_read_later_values(change):
    """A vector that is loaded again behind the reduction; a vector that waited, without its place."""
    rng = np.random.default_rng(0)
    inputs = [rng.integers(-4, 5, s).astype(np.float16) for s in ((1, 24576), (2, 24576))] + [np.ones(1, np.int32)]
    want, got = (np.zeros((1, 24576), np.float32) for _ in range(2))
    tilelang.compile(loaded_late(change), target="cpu", execution_backend="tile")(*inputs, want)
    tilelang.compile(loaded_late(change), target=SM90A, execution_backend="simulator")(*inputs, got)
    np.testing.assert_array_equal(got, want)
