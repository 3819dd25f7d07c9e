"""Expressions of many operations, and values that helper functions of Python use several times."""

import cProfile
import importlib.util

import numpy as np
import pytest
from user_harness import RUNS, SIM, agree

import tilelang
import tilelang.language as T

EVERYWHERE = tuple(RUNS)
U32 = np.uint32
X = (np.arange(64) * 7 % 64).astype(U32)
ZERO = np.zeros(64, U32)


def mixed(x, rounds):
    """xorshift: each step uses its value twice."""
    for _ in range(rounds):
        x = x ^ (x << 13)
        x = x ^ (x >> 17)
        x = x ^ (x << 5)
    return x


def numbers(x, rounds):
    with np.errstate(over="ignore"):
        return mixed(np.asarray(x).astype(U32), rounds)


def elementwise(value, threads=32):
    """Y[i] = value(X, i) for 64 elements."""
    @T.prim_func
    def f(X: T.Tensor((64,), "uint32"), Y: T.Tensor((64,), "uint32")):
        with T.Kernel(1, threads=threads):
            for i in T.Parallel(64):
                Y[i] = value(X, i)

    return f


def calls(program):
    profile = cProfile.Profile()
    profile.runcall(lambda: tilelang.compile(program(), target=SIM, execution_backend="simulator"))
    return sum(x.callcount for x in profile.getstats())


@pytest.mark.parametrize("step", [lambda x: x ^ (x << 13), lambda x: x * x + x, lambda x: T.if_then_else(x > 5, x * 3, x + 7)])
def test_a_value_that_a_helper_uses_several_times_is_computed_once(step):
    """The program grew by a factor with each use: ten rounds took 21 seconds and 5 MB of text."""
    def rounds(n):
        def value(X, i):
            x = X[i]
            for _ in range(n):
                x = step(x)
            return x

        return lambda: elementwise(value)

    calls(rounds(3))  # what is loaded once
    few, more = calls(rounds(6)), calls(rounds(12))
    assert more < 4 * few, (few, more)


@pytest.mark.parametrize("value, want", [
    (lambda X, i: mixed(X[i], 20), lambda x, i: numbers(x, 20)),
    (lambda X, i: X[mixed(i + 1, 10) % 64], lambda x, i: x[(mixed((i + 1).astype(np.int32), 10) % 64)]),
    (lambda X, i: T.if_then_else(i < 30, mixed(X[i + 2], 10), mixed(X[i], 10)),
     lambda x, i: np.where(i < 30, numbers(np.roll(x, -2), 10), numbers(x, 10))),
    (lambda X, i: T.if_then_else((mixed(X[i], 10) & 1) > 0, mixed(X[i], 12), X[i]),
     lambda x, i: np.where(numbers(x, 10) & 1 > 0, numbers(x, 12), x)),
])
def test_shared_values_as_elements_indices_conditions_and_operands_that_may_not_run(value, want):
    agree(elementwise(value), [X, ZERO], {1: want(X, np.arange(64))}, on=EVERYWHERE)


def test_a_value_read_where_its_condition_holds_is_not_read_elsewhere():
    """The operand that may not run reads beside its tile."""
    @T.prim_func
    def f(X: T.Tensor((64,), "uint32"), Y: T.Tensor((64,), "uint32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((64,), "uint32")
            T.copy(X, s)
            for i in T.Parallel(64):
                Y[i] = T.if_then_else(i < 62, mixed(s[i + 2], 10), 1)

    agree(f, [X, ZERO], {1: np.where(np.arange(64) < 62, numbers(np.roll(X, -2), 10), 1)}, on=EVERYWHERE)


def chained(X, i):
    x = X[i]
    for k in range(400):
        x = x + k ^ T.uint32(5)
    return x


def looked_up(X, i):
    r = T.uint32(0)
    for k in range(120):
        r = T.if_then_else(X[i] == k, X[(99 - k) % 64], r)
    return r


def tree(X, i):
    values = [X[(i + k) % 64] for k in range(256)]
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def chained_numbers(x):
    for k in range(400):
        x = x + U32(k) ^ U32(5)
    return x


@pytest.mark.parametrize("value, want", [(chained, chained_numbers), (looked_up, lambda x: x[(99 - x) % 64]),
                                         (tree, lambda x: np.full(64, 4 * x.sum()))])
def test_expressions_of_hundreds_of_operations(value, want):
    """Python's recursion ended in some pass from 110 to 200 operations on."""
    agree(elementwise(value), [X, ZERO], {1: want(X)}, on=EVERYWHERE)


def written(text, tmp_path):
    path = tmp_path / "written.py"
    path.write_text("import tilelang.language as T\n" + text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("written", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build()


HEAD = """
def build():
    @T.prim_func
    def f(X: T.Tensor((64,), "uint32"), Y: T.Tensor((64,), "uint32")):
        with T.Kernel(1, threads=32):
"""


@pytest.mark.parametrize("loop, start, place", [
    ("for i in T.Parallel(64):", "X[i]", "Y[i]"),
    ("for i in T.Parallel(64):", "T.cast(i, 'uint32')", "Y[i]"),
    ("for i in T.Parallel(64):", "X[i]", "Y[T.cast(x60 % 64, 'int32')]"),
    ("if T.get_thread_binding(0) < 32:", "T.cast(T.get_thread_binding(0), 'uint32')", "Y[x60 % 64]")])
def test_scalars_of_the_kernel_that_are_made_of_each_other(loop, start, place, tmp_path):
    """Analyses put their values into each other: twenty took a minute."""
    lines = "".join(f"                x{k + 1} = x{k} ^ (x{k} << 13)\n" for k in range(60))
    f = written(f"{HEAD}            {loop}\n                x0 = {start}\n{lines}                {place} = x60\n    return f\n",
                tmp_path)
    x = X if "X" in start else np.arange(32 if "thread" in start else 64).astype(U32)
    last = x
    for _ in range(60):
        last = last ^ (last << U32(13))
    want = ZERO.copy()
    want[last % 64 if "x60" in place else np.arange(64)] = last
    agree(f, [X, ZERO], {1: want}, on=EVERYWHERE)


def test_a_line_of_a_thousand_operators(tmp_path):
    line = f"Y[i] = X[i]{' + X[i]' * 999}"
    f = written(f"{HEAD}            for i in T.Parallel(64):\n                {line}\n    return f\n", tmp_path)
    agree(f, [X, ZERO], {1: X * 1000}, on=EVERYWHERE)


def test_large_bounds_conditions_and_operands_of_statements():
    @T.prim_func
    def f(X: T.Tensor((64,), "uint32"), Y: T.Tensor((64,), "uint32"), n: T.int32):
        with T.Kernel(mixed(n, 10) % 3 + 1, threads=32) as b:
            v = T.alloc_var("uint32", init=0)
            while mixed(v, 10) % 97 != 13 and v < 50:
                v = v + 1
            Y[b] = v
            for j in T.serial(T.cast(mixed(X[5], 10) % 7, "int32")):
                Y[8 + j] = 1
            T.copy(X[mixed(n, 10) % 7], Y[16:20])
            T.fill(Y[20:24], mixed(X[5], 10))
            for i in T.Parallel(64):
                T.atomic_add(Y[24 + mixed(i, 10) % 4], mixed(X[i], 10))
                if mixed(X[i], 10) % 3 == 0:
                    Y[32 + i % 32] = 3

    def number(x):
        return int(mixed(np.array(x, np.int32), 10))

    y, i = ZERO.copy(), np.arange(64, dtype=np.int32)
    with np.errstate(over="ignore"):
        blocks, at = number(5) % 3 + 1, number(5) % 7
        v = next(k for k in range(51) if k == 50 or int(numbers(k, 10)) % 97 == 13)
        y[:blocks] = v
        y[8:8 + int(numbers(X[5], 10)) % 7] = 1
        y[16:20], y[20:24] = X[at:at + 4], numbers(X[5], 10)
        for _ in range(blocks):
            np.add.at(y, 24 + mixed(i, 10) % 4, numbers(X, 10))
        y[32 + i[numbers(X, 10) % 3 == 0] % 32] = 3
    agree(f, [X, ZERO, 5], {1: y}, on=EVERYWHERE)
