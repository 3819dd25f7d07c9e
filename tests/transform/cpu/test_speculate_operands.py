"""Operands of `and`, `or` and if_then_else that are evaluated always."""

import numpy as np
import pytest
from planned import plan_cpu

import tilelang
import tilelang.language as T
from tilelang.ir import Binary, Select, walk
from tilelang.transform.cpu.speculate_operands import MOST_NODES, is_harmless
from tilelang.target.cpu_launch import CpuLaunch


def _code(program):
    (launch,) = walk(plan_cpu(program.func).body, CpuLaunch)
    return launch.codes[0].body


def _program(value):
    @T.prim_func
    def main(A: T.Tensor((16,), "int32"), B: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=1):
            for i in T.serial(16):
                x = A[i]
                B[i] = value(A, x, i)

    return main


CASES = [
    (lambda A, x, i: T.if_then_else(x > 3, x + 1, 0), False),
    (lambda A, x, i: T.if_then_else(x > 3, A[15 - i], 0), True),  # a load
    (lambda A, x, i: T.if_then_else(x != 0, 100 // x, 0), True),  # a division
]


@pytest.mark.parametrize("value, lazy", CASES)
def test_selections_keep_a_branch_where_an_operand_may_do_harm(value, lazy):
    program = _program(value)
    assert [s.lazy for s in walk(_code(program), Select)] == [lazy]
    a, b = np.arange(-4, 12, dtype=np.int32), np.zeros(16, np.int32)
    tilelang.compile(program, target="cpu")(a, b)
    want = [np.where(a > 3, a + 1, 0), np.where(a > 3, a[::-1], 0),
            np.array([100 // int(x) if x else 0 for x in a])][[v for v, _ in CASES].index(value)]
    np.testing.assert_array_equal(b, want)


def test_conditions_are_joined_without_a_branch():
    @T.prim_func
    def main(A: T.Tensor((16,), "int32"), B: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=1):
            for i in T.serial(16):
                x = A[i]
                if x > 3 and i < 8:
                    B[i] = x
                if x < 3 or A[15 - i] > 3:
                    B[i] = 0

    ops = [e.op for e in walk(_code(main), Binary) if e.dtype == "bool" and e.a.dtype == "bool"]
    assert sorted(ops) == ["bitand", "or"]


def test_a_long_operand_is_not_evaluated_for_nothing():
    from tilelang.ir import I32, Var

    x = e = Var("x", I32)
    for _ in range(MOST_NODES // 2 - 1):
        e = e + x
    assert is_harmless(e) and not is_harmless(e + x + x)
