"""Blocks that a condition switches off, each a block of the grid or a tile that a block takes from a counter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_lowered import lowered, report

import tilelang.language as T
from tilelang.simulator import run_device, run_tile

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


@pytest.mark.parametrize("form", ["", "given", "longer"])
@pytest.mark.parametrize("counts, blocks", [((0, 0), 2), ((70, 128), 3), ((128, 1), 2), ((70, 128), 0)])
def test_blocks_that_a_count_switches_off_write_nothing(form: str, counts: tuple[int, int], blocks: int):
    program = guarded(form)
    rng = np.random.default_rng(1)
    given = {b.name: rng.integers(-3, 4, b.shape).astype(str(b.dtype)) for b in program.buffer_map.values()}
    given |= {"counts": np.array(counts, "int32"), "first": np.array([0, 128], "int32")}
    low = lowered(program, resize_blocks=True, persistent=blocks or False)
    expected, found = run_tile(program, given), run_device(low, given).outputs
    assert ("counter" in report(low.kernels[0].launch)) == (blocks > 0)
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


@pytest.mark.parametrize("form, taken", [("assert", False), ("print", True), ("table", False), ("count", False)])
def test_blocks_that_a_condition_switches_off_ran_what_stands_in_front_of_the_loop(form: str, taken: bool, capsys):
    """An assertion failed, prints came, a store went beyond its tile; a count that the block changes had no single value."""
    program = in_front(form)
    rng = np.random.default_rng(1)
    given = {b.name: rng.integers(-3, 4, b.shape).astype(str(b.dtype)) for b in program.buffer_map.values()}
    given["counts"] = np.array([0, 2, 0, 0], "int32")
    expected = run_tile(program, {k: v.copy() for k, v in given.items()})
    printed = capsys.readouterr().out.count("value=")
    low = lowered(program, resize_blocks=True, persistent=2)
    found = run_device(low, given).outputs
    assert ("counter" in report(low.kernels[0].launch)) == taken
    assert capsys.readouterr().out.count("value=") == (128 if form == "print" else 0) >= printed
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])
