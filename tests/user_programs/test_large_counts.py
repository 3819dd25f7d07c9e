"""Counts of a program for which Python, a compiler or a call would allocate without end, or less than is written."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

S90 = {"kind": "cuda", "arch": "sm_90a"}
HUGE = 1 << 40


def program(where):
    @T.prim_func
    def main(A: T.Tensor((HUGE,), "float32")):
        with T.Kernel(1, threads=128):
            if where == "barriers that the program sets up":
                T.create_barriers(HUGE)
            elif where == "barriers":
                T.alloc_barrier([128] * 100_000)
            elif where == "no barriers":
                T.create_barriers(0)
            elif where == "lanes of a slice":
                A[0:HUGE // 2] = A[HUGE // 2:HUGE]
            elif where == "lanes of a ramp":
                A[T.Ramp(0, 1, HUGE)] = T.Broadcast(1.0, HUGE)
            elif where == "a workspace":
                T.fill(T.alloc_global((1 << 62,), "float32"), 0)
            elif where == "a fragment's layout":
                T.annotate_layout({T.alloc_fragment((8, 8), "float32"): T.Fragment(
                    (1 << 20, 1 << 20), forward_fn=lambda i, j: (i % 128, j))})

    return main


@pytest.mark.parametrize("where, kind", [
    ("barriers that the program sets up", "barrier-count"), ("barriers", "barrier-count"), ("no barriers", "barrier-count"),
    ("lanes of a slice", "value"), ("lanes of a ramp", "value"), ("a workspace", "tensor-shape"),
    ("a fragment's layout", "layout-invalid")])
def test_counts_that_ended_in_a_memory_error_have_names(where, kind):
    with pytest.raises(TileLangError) as e:
        program(where)
    assert e.value.kind == kind and e.value.span is not None


def test_a_copy_of_more_elements_than_fit_a_table_compiles():
    @T.prim_func
    def main(A: T.Tensor((HUGE,), "float32"), C: T.Tensor((HUGE,), "float32")):
        with T.Kernel(1, threads=128):
            T.copy(A, C)

    tilelang.lower(main, target=S90)


@pytest.mark.parametrize("scope", ["alloc_global", "alloc_shared"])
def test_sizes_of_a_call_that_wrap_to_few_bytes_had_less_memory_than_was_written(scope):
    alloc = getattr(T, scope)

    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), n: T.int64):
        with T.Kernel(1, threads=128):
            s = alloc((n * 4, 256), "float32")
            s[0, 0] = 2.0
            A[0] = s[0, 0]

    kernel, a = tilelang.compile(main, target="cpu"), np.zeros(64, np.float32)
    kernel(a, 1)
    assert a[0] == 2
    for n in (1 << 52, 1 << 53, -1):
        with pytest.raises(RuntimeError, match="out of memory"):
            kernel(a, n)


@pytest.mark.parametrize("op", ["copy", "fill", "parallel", "atomic"])
def test_loops_over_extents_of_64_bits_had_counters_of_32(op):
    m = T.dynamic("m", "int64")

    @T.prim_func
    def main(A: T.Tensor((m,), "float32"), C: T.Tensor((m,), "float32")):
        with T.Kernel(1, threads=128):
            if op == "copy":
                T.copy(A, C)
            elif op == "fill":
                T.fill(C, 1)
            elif op == "atomic":
                T.atomic_add(C, A)
            else:
                for i in T.Parallel(m):
                    C[i] = A[i]

    text = tilelang.lower(main, target=S90).kernel_source
    assert "for (long long it" in text and "for (int it" not in text, text
