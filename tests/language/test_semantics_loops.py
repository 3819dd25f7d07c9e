"""Loops in a kernel function: what each means (one test a row of language.md 2.3 and 8)."""

import logging

import numpy as np
import pytest
from semantics_harness import nodes, out

import tilelang.language as T
from tilelang.ir import Break, Continue, For, Parallel, While


@pytest.mark.spec("L6:alloc_var")
def test_loop_carries_an_alloc_var():
    @T.prim_func
    def f(O: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=1):
            total = T.alloc_var("int32")
            for i in range(5):
                total += i
            O[0] = total

    assert out(f) == [10]


@pytest.mark.spec("L2.3:range", "L8:serial")
@pytest.mark.parametrize("bounds", [(5,), (2, 7), (0, 10, 3), (10, 0, -1), (9, -1, -4), (3, 3), (5, 2)])
def test_range_is_pythons_range(bounds):
    @T.prim_func
    def f(O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=1):
            n = T.alloc_var("int32")
            for i in range(*bounds):
                O[n] = i + 100
                n += 1

    want = [i + 100 for i in range(*bounds)]
    assert out(f)[:len(want) + 1] == want + [0]


@pytest.mark.parametrize("start, stop, step", [(0, 10, 3), (10, 0, -1), (10, 0, -3), (4, 4, 2), (0, 5, -1), (7, 1, -2)])
def test_run_time_step(start, stop, step):
    @T.prim_func
    def f(P: T.Tensor((3,), "int32"), O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=1):
            n = T.alloc_var("int32")
            for i in range(P[0], P[1], P[2]):
                O[n] = i + 100
                n += 1

    want = [i + 100 for i in range(start, stop, step)]
    assert out(f, np.array([start, stop, step], np.int32))[:len(want) + 1] == want + [0]


@pytest.mark.spec("L2.3:range")
def test_bounds_are_evaluated_on_entry():
    @T.prim_func
    def f(O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=1):
            n = T.alloc_var("int32", init=4)
            s = T.alloc_var("int32", init=2)
            for _ in range(n):
                n += 1
            for i in range(0, 8, s):
                s = 1
                O[1] += i
            O[0] = n

    assert out(f) == [8, 12]


@pytest.mark.spec("L2.3:while")
def test_while_break_continue():
    @T.prim_func
    def f(O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=1):
            n = T.alloc_var("int32")
            total = T.alloc_var("int32")
            while n < 100:
                n += 1
                if n % 2 == 0:
                    continue
                if n > 9:
                    break
                total += n
            O[0] = n
            O[1] = total

    assert out(f) == [11, 25]
    assert [len(nodes(f, k)) for k in (While, Break, Continue)] == [1, 1, 1]


@pytest.mark.spec("L2.3:break-continue")
def test_code_after_break_is_ignored_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tilelang.language"):
        @T.prim_func
        def f(O: T.Tensor((1,), "int32")):
            with T.Kernel(1, threads=1):
                for _i in range(3):
                    O[0] += 1
                    break
                    O[0] += 100
    assert "never executed" in caplog.text
    assert out(f) == [1]


@pytest.mark.spec("L2.3:while")
def test_constant_false_while_is_skipped(caplog):
    with caplog.at_level(logging.WARNING, "tilelang.language"):
        @T.prim_func
        def f(O: T.Tensor((1,), "int32")):
            with T.Kernel(1, threads=1):
                while 1 > 2:
                    O[0] = 9
                O[0] += 1
    assert "always false" in caplog.text
    assert out(f) == [1]


def test_nested_parallel_is_fused_and_continue_kept():
    @T.prim_func
    def f(O: T.Tensor((4, 4), "int32")):
        with T.Kernel(1, threads=16):
            for i in T.Parallel(4):
                for j in T.Parallel(4):
                    if i == j:
                        continue
                    O[i, j] = 1

    (p,) = nodes(f, Parallel)
    assert len(p.vars) == 2 and [v.name for v in p.vars] == ["i", "j"]
    assert out(f) == (1 - np.eye(4, dtype=int)).tolist()


@pytest.mark.spec("L8:unroll")
def test_unroll_vectorized_grid_and_attributes():
    @T.prim_func
    def f(O: T.Tensor((4, 4), "int32")):
        with T.Kernel(1, threads=1):
            for i in T.unroll(2, unroll_factor=2):
                for j in T.vectorized(4, annotations={"note": [1, 2]}):
                    O[i, j] = 1
            for i, j in T.grid(2, 4):
                O[i + 2, j] += i

    a, b, c, d = nodes(f, For)
    assert a.kind == "unroll" and a.plan.factor == 2
    assert b.kind == "vectorized" and b.attr("note") == (1, 2)
    assert out(f) == [[1] * 4, [1] * 4, [0] * 4, [1] * 4]


def test_try_match_import_and_del_run_at_trace_time():
    mode = "b"

    @T.prim_func
    def f(O: T.Tensor((3,), "int32")):
        from math import floor

        with T.Kernel(1, threads=1):
            x = floor(1.5)
            try:
                O[0] = x
            finally:
                O[1] = 2
            del x
            match mode:
                case "a":
                    O[2] = 10
                case "b":
                    O[2] = 20

    assert out(f) == [1, 2, 20]
    with pytest.raises(RuntimeError, match="used before it has a value"):
        @T.prim_func
        def g(O: T.Tensor((3,), "int32")):
            with T.Kernel(1, threads=1):
                O[0] = late  # noqa: F821
                late = 1  # noqa: F841


@pytest.mark.spec("L8:Persistent")
def test_persistent_bounds_are_taken_on_entry():
    @T.prim_func
    def f(O: T.Tensor((6,), "int32")):
        with T.Kernel(1, threads=1):
            w = T.alloc_var("int32", init=1)
            for x, y in T.Persistent([2, 3], w, w - 1):
                w = 5
                O[x * 3 + y] += 1

    assert out(f) == [1] * 6
