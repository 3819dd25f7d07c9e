"""simplify: index arithmetic that the ranges of loops and threads decide is gone, and the values stay.

The rules themselves are tested in tests/arith/test_simplify.py.
"""

import numpy as np
from pass_steps import around

import tilelang.language as T
from tilelang.ir import If, walk
from tilelang.simulator import run_device


@T.prim_func
def decided(A: T.Tensor((256,), "int32"), B: T.Tensor((256,), "int32")):
    with T.Kernel(4, threads=64) as b:
        t = T.get_thread_binding()
        for k in T.serial(2):
            if t + k * 64 < 128:
                B[(b * 64 + t) % 256 + 0 * k] = A[(b * 64 + t) // 1] + (k * 4 + 3) // 4
            if t // 64 == 1:
                B[0] = -1


def size(func):
    return len(repr(func))


def test_branches_and_quotients_that_are_decided_are_gone():
    before, after = around(decided, "simplify")
    assert [*walk(after.body, If)] == [] and size(after) < size(before)
    assert "// " not in repr(after).partition("with T.Kernel")[2] and "%" not in repr(after).partition("with T.Kernel")[2]
    a = np.arange(256, dtype=np.int32)
    for func in (before, after):
        assert np.array_equal(run_device(func, [a, np.zeros_like(a)]).outputs["B"], a + 1)


def test_what_a_call_decides_stays():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            if t < n:
                A[t] = n

    _, after = around(main, "simplify")
    assert len([*walk(after.body, If)]) == 1
    for n in (0, 5, 64):
        got = run_device(after, [np.zeros(64, np.int32), n]).outputs["A"]
        assert np.array_equal(got, np.where(np.arange(64) < n, n, 0))
