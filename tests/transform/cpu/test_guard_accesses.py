"""The pass guard_accesses: guards, tests in front of nests, accesses of block memory that certainly leave it."""

import numpy as np
from planned import planned_body, text_of

import tilelang
import tilelang.language as T
from tilelang.ir import walk
from tilelang.target.cpu_launch import CheckedLoad, CheckedStore, NestVersions, TileLoops


def _guards(s):
    return {(type(n).__name__, n.buffer.name): n.guards for n in walk(s, CheckedLoad, CheckedStore)}


def test_a_nest_at_the_edge_has_two_versions():
    @T.prim_func
    def main(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            for i in T.Parallel(32):
                B[bx * 32 + i] = A[bx * 32 + i]

    (code,) = planned_body(main).codes
    assert isinstance(code.body, NestVersions)
    assert _guards(code.body.inside) == {("CheckedLoad", "A"): (), ("CheckedStore", "B"): ()}
    assert _guards(code.body.edge) == {("CheckedLoad", "A"): (0,), ("CheckedStore", "B"): (0,)}
    (test,) = code.body.tests
    assert test.size == 100 and not test.test_low
    assert "edge" in text_of(main)


def test_what_is_proven_needs_no_guard():
    @T.prim_func
    def main(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            for i in T.Parallel(32):
                B[bx * 32 + i] = A[bx * 32 + i]

    (code,) = planned_body(main).codes
    assert not isinstance(code.body, NestVersions)
    assert _guards(code.body) == {("CheckedLoad", "A"): (), ("CheckedStore", "B"): ()}


def test_an_index_that_only_names_a_variable_of_the_nest_is_tested_before_it():
    """`i // 2` and `j` are always 0: the test in front of the nest named them where they had no value."""
    @T.prim_func
    def main(A: T.Tensor((12,), "int32"), B: T.Tensor((4, 16), "int32")):
        with T.Kernel(4, threads=32) as bx:
            for i, j in T.Parallel(2, 1):
                for r in T.serial(2):
                    B[bx, i * 2 + r] = A[bx * 4 + i + i // 2 + j] + A[bx * 4 + r // 2]

    (code,) = planned_body(main).codes
    assert isinstance(code.body, NestVersions) and len(code.body.tests) == 2
    A, want = np.arange(12, dtype=np.int32), np.zeros((4, 16), np.int32)
    got = want.copy()
    tilelang.compile(main, target="cpu")(A, got)
    tilelang.compile(main, target="cpu", execution_backend="tile")(A, want)
    assert got.tolist() == want.tolist()


def test_an_index_from_memory_is_guarded():
    @T.prim_func
    def main(A: T.Tensor((128,), "float32"), N: T.Tensor((32,), "int32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                B[i] = A[N[i]]

    (code,) = planned_body(main).codes
    assert _guards(code.body) == {("CheckedLoad", "A"): (0,), ("CheckedLoad", "N"): (), ("CheckedStore", "B"): ()}


def test_a_copy_is_clipped_where_it_may_leave_the_tensor():
    @T.prim_func
    def main(A: T.Tensor((100, 64), "float32"), B: T.Tensor((128, 64), "float32")):
        with T.Kernel(4, threads=32) as bx:
            s = T.alloc_shared((32, 64), "float32")
            T.copy(A[bx * 32, 0], s)
            T.copy(s, B[bx * 32, 0])

    (code,) = planned_body(main).codes
    read, write = walk(code.body, TileLoops)
    assert read.src.clipped == ((0, 0),) and read.dst.clipped == ()
    assert write.src.clipped == write.dst.clipped == ()
