"""Fragments and reducers that one parallel loop adds to in several ways, and tile operations on private arrays."""

import numpy as np
import pytest
from user_harness import agree, mark

import tilelang.language as T
from tilelang.transform.lower.lower_parallel import serial_choices

F32, I32 = "float32", "int32"
RNG = np.random.default_rng(3)
A = RNG.standard_normal((8, 20)).astype(np.float32)


def test_private_arrays_differ_between_threads_through_tile_operations():
    @T.prim_func
    def main(A: T.Tensor((8, 20), F32), O: T.Tensor((8, 4), F32)):
        with T.Kernel(1, threads=8) as _:
            t = T.get_thread_binding()
            own = T.alloc_local((4, 5), F32)
            same = T.alloc_local((4, 5), F32)
            rows = T.alloc_local((4,), F32)
            total = T.alloc_var(F32)
            for i, j in T.grid(4, 5):
                own[i, j] = A[t, i * 5 + j]
            T.copy(own, same)
            T.reduce_sum(same, rows, dim=1)
            T.reduce_max(rows, total, dim=0)
            O[t, 0] = rows[0]
            O[t, 1] = rows[3]
            O[t, 2] = total

    rows = A.reshape(8, 4, 5).sum(2)
    want = np.stack([rows[:, 0], rows[:, 3], rows.max(1), mark(8, np.float32)], 1)
    agree(main, [A, mark((8, 4), np.float32)], {1: want}, 1e-5)


def test_private_arrays_under_a_condition_on_the_thread():
    @T.prim_func
    def main(A: T.Tensor((8, 20), F32), O: T.Tensor((8, 20), F32)):
        with T.Kernel(1, threads=8) as _:
            t = T.get_thread_binding()
            own = T.alloc_local((20,), F32)
            T.fill(own, -1)
            if t % 3 == 0:
                T.copy(A[t, :], own)
                for k in T.serial(t):
                    own[k] += 1
            T.copy(own, O[t, :])

    want = np.full((8, 20), -1, np.float32)
    for t in range(0, 8, 3):
        want[t] = A[t]
        want[t, :t] += 1
    agree(main, [A, mark((8, 20), np.float32)], {1: want}, 1e-6)


def test_one_loop_feeds_reducers_of_rows_columns_and_all():
    @T.prim_func
    def main(A: T.Tensor((8, 20), F32), O: T.Tensor((20,), F32), P: T.Tensor((8,), F32), X: T.Tensor((1,), I32)):
        with T.Kernel(1, threads=96) as _:
            columns = T.alloc_reducer((20,), F32, op="sum")
            rows = T.alloc_reducer((8,), F32, op="max")
            bits = T.alloc_reducer((1,), I32, op="bitxor")
            T.reducer_init(columns, 1.5)
            T.reducer_init(rows)
            T.reducer_init(bits)
            for i, j in T.Parallel(8, 20):
                T.reducer_update(columns[j], A[i, j] * 2)
                if j % 3 == 0:
                    T.reducer_update(rows[i], A[i, j])
                T.reducer_update(bits[0], i * 20 + j)
            o, p, x = T.alloc_fragment((20,), F32), T.alloc_fragment((8,), F32), T.alloc_fragment((1,), I32)
            T.finalize_reducer(columns, o)
            T.finalize_reducer(rows, p)
            T.finalize_reducer(bits, x)
            T.copy(o, O)
            T.copy(p, P)
            T.copy(x, X)

    want = {1: A.sum(0) * 2 + 1.5, 2: A[:, ::3].max(1), 3: np.bitwise_xor.reduce(np.arange(160, dtype=np.int32), keepdims=True)}
    agree(main, [A, mark(20, np.float32), mark(8, np.float32), mark(1, np.int32)], want, 1e-5)


@T.macro
def _remainder(acc, A, i, j):
    T.reducer_update(acc[j % 4], A[i, j])


@T.macro
def _reversed(acc, A, i, j):
    T.reducer_update(acc[19 - j], A[i, j])


@T.macro
def _diagonals(acc, A, i, j):
    if j < 8:
        T.reducer_update(acc[i + j], A[i, j])


DIAGONALS = [sum(A[i, d - i] for i in range(8) if 0 <= d - i < 8) for d in range(15)]


@pytest.mark.parametrize("update, size, want", [
    (_remainder, 4, A.sum(0).reshape(5, 4).sum(0)), (_reversed, 20, A.sum(0)[::-1]), (_diagonals, 15, np.array(DIAGONALS)),
], ids=["remainder", "reversed", "diagonals"])  # fmt: skip
def test_elements_of_a_reducer_that_points_far_apart_meet_in(update, size, want):
    @T.prim_func
    def main(A: T.Tensor((8, 20), F32), O: T.Tensor((size,), F32)):
        with T.Kernel(1, threads=96) as _:
            acc, o = T.alloc_reducer((size,), F32), T.alloc_fragment((size,), F32)
            T.reducer_init(acc)
            for i, j in T.Parallel(8, 20):
                update(acc, A, i, j)
            T.finalize_reducer(acc, o)
            T.copy(o, O)

    agree(main, [A, mark(size, np.float32)], {1: want.astype(np.float32)}, 1e-5)


def test_elements_of_a_reducer_chosen_by_the_data():
    where = RNG.integers(0, 4, 20).astype(np.int32)

    @T.prim_func
    def main(A: T.Tensor((8, 20), F32), where: T.Tensor((20,), I32), O: T.Tensor((4,), F32), P: T.Tensor((20,), F32)):
        with T.Kernel(1, threads=32) as _:
            acc, o = T.alloc_reducer((4,), F32), T.alloc_fragment((4,), F32)
            turned = T.alloc_fragment((20,), F32)
            T.reducer_init(acc)
            T.clear(turned)
            for j in T.Parallel(20):
                T.reducer_update(acc[where[j]], A[0, j])
            for j in T.Parallel(20):
                if where[j] > 1:
                    turned[19 - j] += A[1, j]
            T.finalize_reducer(acc, o)
            T.copy(o, O)
            T.copy(turned, P)

    sums = np.zeros(4, np.float32)
    np.add.at(sums, where, A[0])
    args = [A, where, mark(4, np.float32), mark(20, np.float32)]
    agree(main, args, {2: sums, 3: np.where(where > 1, A[1], 0)[::-1]}, 1e-5)


@T.macro
def _writes_first(p, rows, columns, counts, where, i, j):
    p[i, j] = p[i, j] * 2
    x = p[i, j] + 1
    if j < 15:
        rows[i] += x
        if i % 2 == 0:
            columns[j] = T.max(columns[j], p[i, j])
    counts[where[i]] += 1


@T.macro
def _writes_between(p, rows, columns, counts, where, i, j):
    x = p[i, j]
    rows[i] += p[i, j]
    p[i, j] = x * 2
    columns[j] += x


@T.macro
def _reads_a_total(p, rows, columns, counts, where, i, j):
    for k in T.serial(2):
        rows[i] += p[i, j] * k
        columns[19 - j] += rows[i] * 0 + 1


WHERE = RNG.integers(0, 8, 8).astype(np.int32)
NONE = np.zeros(8, np.int32)
COLUMNS = np.concatenate([np.maximum(A[::2, :15] * 2, 0).max(0), np.zeros(5)])


@pytest.mark.parametrize("body, want", [
    (_writes_first, (A * 2, (A * 2 + 1)[:, :15].sum(1), COLUMNS, np.bincount(WHERE, minlength=8) * 20)),
    (_writes_between, (A * 2, A.sum(1), A.sum(0), NONE)),
    (_reads_a_total, (A, A.sum(1), np.full(20, 16.0), NONE)),
], ids=["write first", "write between", "total read"])  # fmt: skip
def test_sums_beside_other_work_of_a_loop(body, want):
    """Loops that may be parted, that may not because of what is written when, and indices read from memory."""
    @T.prim_func
    def main(A: T.Tensor((8, 20), F32), where: T.Tensor((8,), I32), X: T.Tensor((8, 20), F32), R: T.Tensor((8,), F32),
             C: T.Tensor((20,), F32), H: T.Tensor((8,), I32)):
        with T.Kernel(1, threads=32) as _:
            p, rows = T.alloc_fragment((8, 20), F32), T.alloc_fragment((8,), F32)
            columns, counts = T.alloc_fragment((20,), F32), T.alloc_fragment((8,), I32)
            T.copy(A, p)
            T.clear(rows)
            T.clear(columns)
            T.clear(counts)
            for i, j in T.Parallel(8, 20):
                body(p, rows, columns, counts, where, i, j)
            T.copy(p, X)
            T.copy(rows, R)
            T.copy(columns, C)
            T.copy(counts, H)

    args = [A, WHERE, mark((8, 20), np.float32), mark(8, np.float32), mark(20, np.float32), mark(8, np.int32)]
    agree(main, args, {2 + k: w for k, w in enumerate(want)}, 1e-4)


def test_dimensions_with_few_points_are_run_in_order_first():
    assert serial_choices((4, 6)) == [[], [0], [1], [0, 1]]


def test_serial_iterations_of_neighbouring_points_meet_in_an_element_of_shared_memory():
    @T.prim_func
    def main(A: T.Tensor((8, 20), F32), O: T.Tensor((8,), F32)):
        with T.Kernel(1, threads=32) as _:
            acc = T.alloc_shared((8,), F32)
            T.clear(acc)
            for i, j in T.Parallel(8, 20):
                for k in T.serial(2):
                    acc[(i + k) % 8] += A[i, j]
            T.copy(acc, O)

    rows = A.sum(1)
    agree(main, [A, mark(8, np.float32)], {1: rows + np.roll(rows, 1)}, 1e-4)


def test_updates_of_shared_memory_under_a_condition_that_memory_decides():
    @T.prim_func
    def main(A: T.Tensor((8, 20), F32), where: T.Tensor((20,), I32), O: T.Tensor((4,), F32)):
        with T.Kernel(1, threads=32) as _:
            acc = T.alloc_shared((4,), F32)
            T.clear(acc)
            for i, j in T.Parallel(8, 20):
                if where[j] > 2:
                    acc[j % 4] += A[i, j]
            T.copy(acc, O)

    where = RNG.integers(0, 8, 20).astype(np.int32)
    agree(main, [A, where, mark(4, np.float32)], {2: np.where(where > 2, A.sum(0), 0).reshape(5, 4).sum(0)}, 1e-4)


def test_rows_that_are_copied_from_one_element_in_front_of_a_tensor():
    """Vectors that start at element -1 were dropped as a whole."""
    @T.prim_func
    def main(A: T.Tensor((8, 64), "float16"), O: T.Tensor((8, 64), "float16")):
        with T.Kernel(2, threads=32) as bx:
            tile = T.alloc_shared((8, 32), "float16")
            T.copy(A[0:8, bx * 32 - 1:bx * 32 + 31], tile)
            T.copy(tile, O[0:8, bx * 32:bx * 32 + 32])

    halves = RNG.integers(-9, 10, (8, 64)).astype(np.float16)
    want = np.concatenate([np.zeros((8, 1), np.float16), halves[:, :63]], 1)
    agree(main, [halves, mark((8, 64), np.float16)], {1: want}, 0)
