"""Blocks under a condition went through one tile each: 0.96 of the speed of blocks that go from tile to tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_lowered import lowered

import tilelang.language as T
from tilelang.ir import For, Launch, stmts_of, walk
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.legalize.guarded_blocks import guarded_blocks
from tilelang.transform.pipeline import legalized

K = 64


def guarded(form: str = "", rows: int = 256) -> Any:
    """Blocks of rows that a count switches off.  form: what is there beside a count."""
    @T.prim_func
    def main(A: T.Tensor((rows, K), "float16"), B: T.Tensor((128, K), "float16"), counts: T.Tensor((2,), "int32"),
             first: T.Tensor((2,), "int32"), C: T.Tensor((rows, 128), "float32")):
        with T.Kernel(2, rows // 128, 2, threads=128) as (bx, by, g):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            if by * 64 < counts[g]:
                start = first[g] if form == "given" else g * (rows // 2)
                T.clear(c)
                for k in T.Pipelined(by + 1 if form == "longer" else K // 32, num_stages=2):
                    T.copy(A[start + by * 64, k * 32], a)
                    T.copy(B[bx * 64, k * 32], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, C[start + by * 64, bx * 64])
                if form == "counted":
                    counts[g] = 0

    return main


def at_the_top(program: Any) -> bool:
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    (launch,) = walk(run_passes(legalized(program.func, target), (guarded_blocks,), PassContext(target)), Launch)
    return any(isinstance(s, For) for s in stmts_of(launch.body))


@pytest.mark.parametrize("form, moves", [("", True), ("given", False), ("longer", False), ("counted", False)])
def test_a_loop_under_a_condition_stood_inside(form: str, moves: bool):
    """Not where the condition guards a read, blocks have loops of unequal length, or the kernel changes the count."""
    assert at_the_top(guarded(form)) == moves


@pytest.mark.parametrize("form", ["", "given", "longer"])
@pytest.mark.parametrize("counts", [(0, 0), (70, 128), (128, 1)])
def test_blocks_that_a_count_switches_off_write_nothing(form: str, counts: tuple[int, int]):
    program = guarded(form)
    rng = np.random.default_rng(1)
    given = {b.name: rng.integers(-3, 4, b.shape).astype(str(b.dtype)) for b in program.buffer_map.values()}
    given |= {"counts": np.array(counts, "int32"), "first": np.array([0, 128], "int32")}
    expected, found = run_tile(program, given), run_device(lowered(program, resize_blocks=True), given).outputs
    np.testing.assert_array_equal(found["C"], expected["C"])


def in_front(form: str) -> Any:
    """The condition guards a statement in front of the loop."""
    @T.prim_func
    def main(A: T.Tensor((256, K), "float16"), B: T.Tensor((64, K), "float16"), counts: T.Tensor((4,), "int32"),
             C: T.Tensor((256, 64), "float32")):
        with T.Kernel(4, threads=128) as by:
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c, table = T.alloc_fragment((64, 64), "float32"), T.alloc_shared((128,), "int32")
            n = counts[by]
            if (n > 0) if form in ("count", "print") else (by < 2):
                T.clear(c)
                if form == "assert":
                    T.device_assert(by < 2)
                elif form == "print":
                    T.print(n)
                elif form == "table":
                    for i in T.Parallel(64):
                        table[by * 64 + i] = i
                for k in T.Pipelined(K // 32, num_stages=2):
                    T.copy(A[by * 64, k * 32], a)
                    T.copy(B[0, k * 32], b)
                    T.gemm(a, b, c, transpose_B=True)
                if form == "table":
                    for i, j in T.Parallel(64, 64):
                        c[i, j] += T.cast(table[by * 64 + i], "float32")
                T.copy(c, C[by * 64, 0])
                if form == "count":
                    if T.get_thread_binding() == 0:
                        counts[by] = n - 1

    return main


@pytest.mark.parametrize("form", ["assert", "print", "table", "count"])
def test_blocks_that_a_condition_switches_off_ran_what_stands_in_front_of_the_loop(form: str, capsys):
    """An assertion failed, prints came, a store went beyond its tile; a count that the block changes had no single value."""
    program = in_front(form)
    rng = np.random.default_rng(1)
    given = {b.name: rng.integers(-3, 4, b.shape).astype(str(b.dtype)) for b in program.buffer_map.values()}
    given["counts"] = np.array([0, 2, 0, 0], "int32")
    expected = run_tile(program, {k: v.copy() for k, v in given.items()})
    printed = capsys.readouterr().out.count("value=")
    found = run_device(lowered(program, resize_blocks=True), given).outputs
    assert capsys.readouterr().out.count("value=") == (128 if form == "print" else 0) >= printed
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])
