"""Parallel loops in which two iterations surely store different values in one place are refused, on every target."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import lower
from tilelang.transform.check.check_races import check_races


def loop(body, **launch):
    """body: macro of (A, B, S, i, j, bx, n) in T.Parallel(32, 8)."""
    @T.prim_func
    def f(A: T.Tensor((64, 8), "float32"), B: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(2, threads=64) as bx:
            S = T.alloc_shared((64,), "float16")
            T.clear(S)
            for i, j in T.Parallel(32, 8):
                body(A, B, S, i, j, bx, n)
            T.copy(S[0:1], B[bx:bx + 1])

    return f


@T.macro
def number(A, B, S, i, j, bx, n):
    B[bx * 32 + i] = j


@T.macro
def halves(A, B, S, i, j, bx, n):
    A[bx * 32 + i // 2, j] = i


@T.macro
def inner_loop(A, B, S, i, j, bx, n):
    for k in T.serial(4):
        S[k] = i


@T.macro
def named(A, B, S, i, j, bx, n):
    k = i * 8 + j
    S[k % 64] = k


@T.macro
def under_a_condition(A, B, S, i, j, bx, n):
    if i < 2:
        S[0] = i + 1.0


REFUSED = {number: r"\(i=0, j=0\) and \(i=0, j=1\) .* `B`", halves: r"\(i=0, j=0\) and \(i=1, j=0\) .* `A`",
           inner_loop: r"\(i=0, j=0\) and \(i=1, j=0\) .* `S`", named: r"\(i=0, j=0\) and \(i=8, j=0\) .* `S`",
           under_a_condition: r"\(i=0, j=0\) and \(i=1, j=0\) .* `S`"}


@pytest.mark.parametrize("body", REFUSED, ids=lambda m: m.__name__)
def test_different_values_in_one_place_are_refused(body):
    with pytest.raises(TileLangError, match=REFUSED[body]) as e:
        run_passes(loop(body).func, [check_races], PassContext())
    assert e.value.kind == "parallel-overwrite" and "test_reject_races.py" in str(e.value)


def test_on_every_target():
    for compiled in (lambda f: tilelang.compile(f, target="cpu"),
                     lambda f: lower(f.func, Target({"kind": "cuda", "arch": "sm_80"})),
                     lambda f: lower(f.func, Target({"kind": "cuda", "arch": "sm_90a"}))):
        with pytest.raises(TileLangError, match="store different values"):
            compiled(loop(named))


@T.macro
def same_value(A, B, S, i, j, bx, n):
    S[i] = i * 2


@T.macro
def one_iteration(A, B, S, i, j, bx, n):
    if j == 3:
        S[i] = j


@T.macro
def equal_as_float16(A, B, S, i, j, bx, n):
    S[i] = 2048 + j // 4 + i * 0


@T.macro
def under_an_argument(A, B, S, i, j, bx, n):
    if j == n:
        S[i] = j


@T.macro
def may_not_run(A, B, S, i, j, bx, n):
    for k in T.serial(n):
        S[k] = i


@T.macro
def read_from_memory(A, B, S, i, j, bx, n):
    B[bx * 32 + i] = A[i, j]


@T.macro
def place_of_an_argument(A, B, S, i, j, bx, n):
    S[(i + n) // 2] = i


@T.macro
def shifted(A, B, S, i, j, bx, n):
    A[(bx * 32 + i) % 64, 7 - j] = i * 8 + j


@T.macro
def atomic(A, B, S, i, j, bx, n):
    T.atomic_add(B[i], j)


@pytest.mark.parametrize("body", [same_value, one_iteration, equal_as_float16, under_an_argument, may_not_run, read_from_memory,
                                  place_of_an_argument, shifted, atomic], ids=lambda m: m.__name__)
def test_what_is_no_race_or_does_not_show_is_left_alone(body):
    f = loop(body).func
    assert run_passes(f, [check_races], PassContext()) == f


def test_equal_values_run():
    @T.prim_func
    def f(B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(32, 8):
                B[i] = i * 3 + j * 0

    b = np.zeros(32, np.int32)
    tilelang.compile(f, target="cpu")(b)
    assert np.array_equal(b, np.arange(32) * 3)


def test_iterations_that_go_on_to_the_next_are_left_alone():
    @T.prim_func
    def f(B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(32, 8):
                if j != 3:
                    continue
                B[i] = j

    assert run_passes(f.func, [check_races], PassContext()) == f.func


def test_long_loops_are_not_followed():
    @T.prim_func
    def f(B: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(1 << 19):
                B[0] = i

    assert run_passes(f.func, [check_races], PassContext()) == f.func


def test_what_is_left_of_iterations_that_go_on_to_the_next_is_followed():
    @T.prim_func
    def f(B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(32, 8):
                if j > 3:
                    continue
                B[i] = j

    with pytest.raises(TileLangError) as e:
        run_passes(f.func, [check_races], PassContext())
    assert e.value.kind == "parallel-overwrite"


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90a"])
def test_a_vectorised_update_of_a_threads_own_elements_is_no_race(target):
    @T.prim_func
    def f(Y: T.Tensor((512,), "float16")):
        with T.Kernel(2, threads=32) as bx:
            at = (bx * 32 + T.get_thread_binding()) * 8
            for v in T.vectorized(8):
                Y[at + v] = Y[at + v] * T.float16(2)

    how = {"target": "cpu"}
    if target != "cpu":
        how = {"target": {"kind": "cuda", "arch": target}, "execution_backend": "simulator"}
    y = np.arange(512).astype("float16")
    tilelang.compile(f, **how)(y)
    assert (y == 2 * np.arange(512)).all()
