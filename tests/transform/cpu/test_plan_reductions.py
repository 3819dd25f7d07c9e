"""The pass plan_reductions: which reductions accumulate in a vector on the CPU."""

import numpy as np
import pytest
from planned import planned_body

import tilelang
import tilelang.language as T
from tilelang.ir import walk
from tilelang.target.cpu import describe
from tilelang.target.cpu_launch import ReduceLoops

AVX2 = describe("haswell", frozenset({"avx2", "fma", "f16c"}), "+avx2,+fma,+f16c", True)


def _program(shape, dim, dtype="float32"):
    out = shape[:dim] + shape[dim + 1:]

    @T.prim_func
    def main(A: T.Tensor(shape, dtype), B: T.Tensor(out, dtype)):
        with T.Kernel(1, threads=32):
            a, b = T.alloc_fragment(shape, dtype), T.alloc_fragment(out, dtype)
            T.copy(A, a)
            T.reduce_max(a, b, dim=dim)
            T.copy(b, B)

    return main


@pytest.mark.parametrize("shape, dim, dtype, lanes", [
    ((4, 37), 1, "float32", 8),  # adjacent along dim; the last 5 elements one by one
    ((4, 7), 1, "float32", 1),  # fewer elements than a vector has
    ((37, 4), 0, "float32", 1),  # the columns are adjacent
    ((4, 37), 1, "float64", 4),
    ((4, 37), 1, "float16", 8),  # accumulated in 32 bits each
])
def test_width_of_the_accumulator(shape, dim, dtype, lanes):
    (code,) = planned_body(_program(shape, dim, dtype), AVX2).codes
    assert [s.lanes for s in walk(code.body, ReduceLoops)] == [lanes]


@pytest.mark.parametrize("shape, dim", [((4, 37), 1), ((4, 7), 1), ((37, 4), 0)])
def test_reductions_of_each_width(shape, dim):
    a = np.random.default_rng(0).standard_normal(shape, np.float32)
    b = np.zeros(np.delete(shape, dim), np.float32)
    tilelang.compile(_program(shape, dim), target="cpu")(a, b)
    np.testing.assert_array_equal(b, a.max(axis=dim))
