"""Tiles that start at any column: the innermost coordinate of a TMA box must be a multiple of 16 bytes (an H200 faults)."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import walk
from tilelang.ir.expr import Call
from tilelang.ops import Copy
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import legalized, lower
from tilelang.transform.legalize.given_boxes import given_boxes

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})


def moved(first, dtype="float32", stages=0):
    """B = A[:, first(i):…], tile by tile; `first` of the step gives the column."""

    @T.prim_func
    def main(A: T.Tensor((64, 256), dtype), B: T.Tensor((64, 256), dtype), at: T.int32):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 32), dtype)
            for i in T.Pipelined(3, num_stages=stages):
                column = first(i, at)
                T.copy(A[0:64, column:column + 32], S)
                T.copy(S, B[0:64, column:column + 32])

    return main


def by_tma(func):
    return sorted({x.op for x in walk(lower(func.func, SM90A).kernels[0].launch) if isinstance(x, Call)} &
                  {"tma_load", "tma_store"})


@pytest.mark.parametrize("first, aligned", [
    (lambda i, at: i * 32, True), (lambda i, at: i * 4 + 8, True), (lambda i, at: i * 4 + 15, False),
    (lambda i, at: i * 2, False), (lambda i, at: at, False), (lambda i, at: at * 4, True), (lambda i, at: at // 4 * 4, True)])
def test_tiles_that_may_start_at_any_column_are_moved_by_threads(first, aligned):
    func = moved(first)
    marked = [x.plan.unaligned_columns for x in walk(given_boxes(legalized(func.func), PassContext(SM90A)).body)
              if isinstance(x, Copy)]
    assert marked == [not aligned] * 2
    assert bool(by_tma(func)) is aligned
    a = np.random.default_rng(0).standard_normal((64, 256)).astype("float32")
    got = run_device(lower(func.func, SM90A), {"A": a, "at": 3}).outputs["B"]
    want = np.full_like(a, np.nan)  # what nothing wrote
    for i in range(3):
        c = first(i, 3)
        want[:, c:c + 32] = a[:, c:c + 32]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype, step, aligned", [("float16", 8, True), ("float16", 4, False), ("int8", 16, True),
                                                  ("int8", 8, False), ("float64", 2, True), ("float64", 1, False)])
def test_the_unit_is_sixteen_bytes(dtype, step, aligned):
    assert bool(by_tma(moved(lambda i, at: i * step, dtype))) is aligned


def test_rings_of_roles_ask_too():
    def product(shift):
        @T.prim_func
        def main(A: T.Tensor((128, 512), "float16"), B: T.Tensor((128, 512), "float16"), C: T.Tensor((128, 128), "float16")):
            with T.Kernel(1, threads=128):
                As, Bs = T.alloc_shared((128, 64), "float16"), T.alloc_shared((128, 64), "float16")
                acc = T.alloc_fragment((128, 128), "float32")
                T.clear(acc)
                for k in T.Pipelined(4, num_stages=2):
                    T.copy(A[0, k * 64 + shift], As)
                    T.copy(B[0, k * 64], Bs)
                    T.gemm(As, Bs, acc, transpose_B=True)
                T.copy(acc, C)

        return main

    def loads(shift):
        maps = {x.options.map for x in walk(lower(product(shift).func, SM90A).kernels[0].launch)
                if isinstance(x, Call) and x.op == "tma_load"}
        return sorted(str(m)[0] for m in maps)

    assert "A" in loads(8) and "A" not in loads(3)
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-3, 4, (128, 512)).astype("float16") for _ in range(2))
    got = run_device(lower(product(3).func, SM90A), {"A": a, "B": b}).outputs["C"]
    np.testing.assert_array_equal(got, (a[:, 3:259].astype("float32") @ b[:, :256].astype("float32").T).astype("float16"))


def test_a_copy_by_hand_from_any_column_is_refused():
    @T.prim_func
    def main(A: T.Tensor((64, 256), "float16"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), "float16")
            bar = T.alloc_barrier(1)
            T.tma_copy(A[0:64, 3:67], S, barrier=bar)
            T.barrier_arrive(bar)
            T.barrier_wait(bar, 0)
            T.copy(S, B)

    with pytest.raises(TileLangError, match="no multiple of 16 bytes"):
        lower(main.func, SM90A)
