"""Statements that depend on the thread become loops over threads; the rest runs once for the block."""

import pytest
from planned import text_of

import tilelang.language as T
from tilelang.errors import TileLangError


def test_only_what_depends_on_the_thread_is_a_loop():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            s = T.alloc_shared((64,), "int32")
            s[tx] = A[tx]
            s[5] = 7
            T.sync_threads()
            if tx < 3:
                B[tx] = s[63 - tx]

    assert text_of(main) == """\
with ThreadLoop():
    s[tx] = A[tx]
s[5] = 7
T.evaluate(T.call("sync_threads", "void"))
with ThreadLoop():
    if (tx < 3):
        B[tx] = s[(63 - tx)]"""


def test_a_loop_with_bounds_of_the_thread_runs_thread_after_thread():
    @T.prim_func
    def main(B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            for k in range(4):
                for i in range(tx, 64, 64):
                    B[i] = k

    lines = text_of(main).split("\n")
    assert lines[0].startswith("for k in") and lines[1].strip() == "with ThreadLoop():"


def test_one_thread_needs_no_loop():
    @T.prim_func
    def main(B: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=1):
            tx = T.get_thread_binding()
            B[tx] = tx

    assert text_of(main) == "B[tx] = tx"


def test_a_parallel_loop_that_names_a_thread_is_unsupported():
    @T.prim_func
    def main(B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            for i in T.Parallel(64):
                B[i] = tx

    with pytest.raises(TileLangError, match="the thread-dependent value"):
        text_of(main)
