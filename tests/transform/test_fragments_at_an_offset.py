"""Loops that access a fragment at an offset take no copy of it in shared memory, or one of the rows that they need."""

import re

import numpy as np
import pytest

import tilelang
import tilelang.language as T

S80, S90 = ({"kind": "cuda", "arch": x} for x in ("sm_80", "sm_90a"))
ROWS, COLUMNS = 64, 32


@T.macro
def guarded(f, h, p, x):
    for i, d in T.Parallel(32, COLUMNS):
        if i < 16:
            h[i, d] = f[i + p * 16, d]


@T.macro
def some_columns(f, h, p, x):
    for i, d in T.Parallel(32, 8):
        h[i, d] = f[i, d + p * 8]


@T.macro
def one_row(f, h, p, x):
    for d in T.Parallel(COLUMNS):
        h[3, d] = f[p * 7, d]


@T.macro
def backwards(f, h, p, x):
    for i, d in T.Parallel(16, COLUMNS):
        h[i, d] = f[15 - i + p * 16, d]


@T.macro
def first_rows(f, h, p, x):
    for i, d in T.Parallel(16, COLUMNS):
        h[i, d] = f[i, d] * 2.0


@T.macro
def at_a_value_from_memory(f, h, p, x):
    for i, d in T.Parallel(16, COLUMNS):
        h[i, d] = f[i + x[p], d]


@T.macro
def stored(f, h, p, x):
    for i, d in T.Parallel(16, COLUMNS):
        f[i + p * 16, d] = f[i + p * 16, d] + 1.0
    T.copy(h[0:8, :], f[p * 8:p * 8 + 8, :])
    T.copy(f[p * 16:p * 16 + 16, :], h[16:32, :])


@T.macro
def into_a_fragment(f, h, p, x):
    for i, d in T.Parallel(32, COLUMNS):
        h[i, d] = f[i + p * 8, d]


@T.macro
def of_a_fragment(f, h, p, x):
    for i, d in T.Parallel(32, COLUMNS):
        f[i + p * 8, d] = h[i, d] + p
    for i, d in T.Parallel(16, COLUMNS):
        if i < 8:
            h[i + 8, d] = f[i + p * 16, d] + f[i + p * 16, COLUMNS - 1 - d]


@T.macro
def with_rows_outside(f, h, p, x):
    for i, d in T.Parallel(32, COLUMNS):
        h[i, d] = 7.0
        if i + p * 16 < ROWS:
            h[i, d] = f[i + p * 16, d]


@T.macro
def or_another_value(f, h, p, x):
    for i, d in T.Parallel(32, COLUMNS):
        h[i, d] = T.if_then_else(i + p * 16 < ROWS, f[i + p * 16, d], 5.0)


@T.macro
def at_a_value_that_exists_under_the_condition(f, h, p, x):
    s = T.alloc_shared((3,), "int32")
    for i in T.Parallel(3):
        s[i] = i * 8
    for i, d in T.Parallel(16, COLUMNS):
        if p < 3:
            h[i, d] = f[i + s[p], d]


@T.macro
def with_a_difference_that_wraps(f, h, p, x):
    for i, d in T.Parallel(32, COLUMNS):
        if T.cast(i, "uint32") - T.cast(p, "uint32") < ROWS:
            h[i, d] = f[T.cast(i, "uint32") - T.cast(p, "uint32"), d]


def program(body, in_registers):
    @T.prim_func
    def f(A: T.Tensor((ROWS, COLUMNS), "float32"), B: T.Tensor((4, 32, COLUMNS), "float32"), X: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((ROWS, COLUMNS), "float32")
            h = T.alloc_fragment((32, COLUMNS), "float32") if in_registers else T.alloc_shared((32, COLUMNS), "float32")
            T.copy(A, f)
            T.clear(h)
            for p in T.serial(4):
                body(f, h, p, X)
                T.copy(h, B[p, :, :])
    return f


# h alone is in shared memory, of 32 rows; or 32 rows of f are exchanged through it, and 16 of f and of h in a second loop;
# or h and 16 or 32 rows of f; or h, s and all of f, where a thread outside of the condition cannot know which rows, or the
# sum may wrap.
ALONE = (guarded, some_columns, one_row, first_rows, at_a_value_from_memory, stored)
EXCHANGED = (into_a_fragment, of_a_fragment)
OUTSIDE = (with_rows_outside, or_another_value, at_a_value_that_exists_under_the_condition, with_a_difference_that_wraps)
MORE_ROWS = {of_a_fragment: 64, backwards: 48, with_rows_outside: 64, or_another_value: 64, OUTSIDE[2]: 97,
             OUTSIDE[3]: 96}


@pytest.mark.parametrize("body", (*ALONE, *EXCHANGED, backwards, *OUTSIDE), ids=lambda b: b.__name__)
def test_a_copy_of_the_whole_fragment_was_made(body, as_planned):
    f, out = program(body, body in EXCHANGED), {}
    A = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    for name, on in (("tile", {"target": S90, "execution_backend": "tile"}), ("cpu", {"target": "cpu"}),
                     ("sm_80", {"target": S80, "execution_backend": "simulator"}),
                     ("sm_90a", {"target": S90, "execution_backend": "simulator"})):
        kernel, out[name] = tilelang.compile(f, **on), np.zeros((4, 32, COLUMNS), np.float32)
        kernel(A, out[name], np.array([3, 48, 0, 17], np.int32))
        np.testing.assert_array_equal(out[name], out["tile"], err_msg=name)
        if name.startswith("sm"):
            used = int(re.search(r"dynamic shared memory (\d+) bytes", kernel.report())[1])
            assert used <= MORE_ROWS.get(body, 32) * COLUMNS * 4
