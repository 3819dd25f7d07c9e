"""Slices as vector values beyond arithmetic: functions of integers, selections, conditions (language.md 4, 5, 14)."""

import numpy as np
import pytest
from everywhere import SM80
from user_harness import agree, mark, refused

import tilelang
import tilelang.language as T
from tilelang.runtime import nvrtc


def _bits(x):
    return np.array([bin(int(v) & 0xFFFFFFFF)[2:] for v in x])


def test_functions_and_selections_of_slices():
    @T.prim_func
    def main(A: T.Tensor((8,), "int32"), B: T.Tensor((9, 4), "int32")):
        with T.Kernel(1, threads=1):
            B[0, 0:4] = T.abs(A[0:4])
            B[1, 0:4] = T.popcount(A[0:4])
            B[2, 0:4] = T.clz(A[0:4])
            B[3, 0:4] = T.__ffs(A[0:4])
            B[4, 0:4] = T.if_then_else(A[0:4] > 0, 1, A[4:8])
            B[5, 0:4] = T.Select(A[0:4] > 0, 1, 2)
            B[6, 0:4] = T.if_then_else(A[0:4], A[4:8], 7)
            B[7, 0:4] = A[0:4].astype("float32") * 2.0
            B[8, 0:4] = (A[0:4] + 1).astype("int8") * 2

    a = np.array([-3, 0, 12, 1 << 20, 5, -6, 7, -8], np.int32)
    x, y, bits = a[:4], a[4:], _bits(a[:4])
    want = np.stack([abs(x), [b.count("1") for b in bits], [32 - len(b) if v else 32 for b, v in zip(bits, x)],
                     [len(b) - b.rfind("1") if v else 0 for b, v in zip(bits, x)], np.where(x > 0, 1, y),
                     np.where(x > 0, 1, 2), np.where(x != 0, y, 7), x * 2, (x + 1).astype(np.int8).astype(np.int32) * 2])
    agree(main, [a, mark((9, 4), np.int32)], {1: want.astype(np.int32)})
    if nvrtc.available():
        tilelang.compile(main, target=SM80)


def _branch():
    @T.prim_func
    def main(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=1):
            if A[0:4] > 0:
                B[0] = 1
    return main


def _whole_slice():
    @T.prim_func
    def main(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=1):
            s = A[0:4]
            B[0] = 1 if not s else 2
    return main


@pytest.mark.parametrize("build", [_branch, _whole_slice])
def test_a_vector_is_no_condition(build):
    """The branch was the vector's first element on one execution, an internal error on another."""
    refused(build, "vector of 4 values has no one truth value", on=("cpu",))


def test_a_vector_selection_is_no_scalar_and_has_one_number_of_lanes():
    def scalar():
        @T.prim_func
        def main(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
            with T.Kernel(1, threads=1):
                B[0] = T.if_then_else(A[0:4] > 0, 1, 2)
        return main

    def unequal():
        @T.prim_func
        def main(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
            with T.Kernel(1, threads=1):
                B[0:4] = T.if_then_else(A[0:8] > 0, A[0:4], A[4:8])
        return main

    refused(scalar, "Incompatible types in BufferStore|lane", on=("cpu",))
    refused(unequal, "a condition of 8 lanes", on=("cpu",))


def test_private_arrays_of_run_time_size_are_refused_for_gpus():
    def build():
        n = T.dynamic("n")

        @T.prim_func
        def main(A: T.Tensor((n,), "int32")):
            with T.Kernel(1, threads=1):
                x = T.alloc_local((n,), "int32")
                for i in T.serial(n):
                    x[i] = i
                A[0] = x[n - 1]
        return main

    refused(build, "`x` \\(local\\) has a run-time shape", on=("simulator",))
