"""Blocks of a grid that loop over more or fewer tiles, or over none, as over sequences of unequal length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_lowered import launch_of, lowered, ops

import tilelang.language as T
from tilelang.ir import If, stmts_of
from tilelang.simulator import run_device, run_tile

K, N = 64, 64


def of_sequences(heads: int = 3, form: str = "") -> Any:
    """Block (x, h, g) adds up x + 1 tiles for the rows x * 64 of sequence g, if there are such."""
    @T.prim_func
    def main(A: T.Tensor((2, 192, K), "float16"), B: T.Tensor((heads, 3 * N, K), "float16"), ends: T.Tensor((3,), "int32"),
             C: T.Tensor((192, heads, N), "float16")):
        with T.Kernel(3, heads, 2, threads=128) as (x, h, g):
            a, b = T.alloc_shared((64, K), "float16"), T.alloc_shared((N, K), "float16")
            c = T.alloc_fragment((64, N), "float32")
            first, length = ends[g], ends[g + 1] - ends[g]
            if (x * 64 < length) if form != "own" else (C[0, h, g] < T.cast(x * 64 + length, "float16")):
                T.clear(c)
                for step in T.Pipelined(T.min(x + 1, T.ceildiv(length, 64)), num_stages=2):
                    T.copy(A[g, x * 64, 0], a)
                    T.copy(B[h, step * N, 0], b)
                    T.gemm(a, b, c, transpose_B=True)
                for i, j in T.Parallel(64, N):
                    if x * 64 + i < length:
                        C[first + x * 64 + i, h, j] = c[i, j]
            if form == "more":
                C[191, h, x] = T.cast(1.0, "float16")

    return main


def has_setup(s: Any) -> bool:
    return "mbarrier_init" in ops(s)


@pytest.mark.parametrize("form, ends", [("", True), ("more", False), ("own", False)])
def test_blocks_without_rows_made_barriers_first(form: str, ends: bool):
    """Not where a block does more, or where the kernel writes what the condition reads."""
    launch = launch_of(of_sequences(form=form), enable_async_copy=True)
    guarded = any(isinstance(s, If) and has_setup(s.then) and "sync_threads" in ops(s.then) for s in stmts_of(launch.body))
    assert guarded == ends


@pytest.mark.parametrize("heads, order", [(3, "hgx"), (1000, "hxg"), (20_000, "xhg")])
def test_short_blocks_of_a_head_started_before_long_ones_of_the_next(heads: int, order: str):
    """As long as what the heads load fits L2 together."""
    launch = launch_of(of_sequences(heads))
    assert [n.value for n in launch.grid] == [{"x": 3, "h": heads, "g": 2}[v] for v in order]
    assert "".join(v.name for v in launch.block_vars) == order


@pytest.mark.parametrize("ends", [(0, 100, 192), (0, 0, 64), (5, 69, 69), (10, 10, 10)])
def test_sequences_of_unequal_length(ends: tuple[int, int, int]):
    program, rng = of_sequences(), np.random.default_rng(1)
    given = {b.name: rng.integers(-3, 4, b.shape).astype(str(b.dtype)) for b in program.buffer_map.values()}
    given["ends"] = np.array(ends, "int32")
    expected, found = run_tile(program, given), run_device(lowered(program), given).outputs
    np.testing.assert_array_equal(found["C"], expected["C"])


def test_blocks_of_an_empty_grid_have_no_mean_length():
    """The grid is empty and its loops end at their block's number: an internal error of a schedule."""
    @T.prim_func
    def f(A: T.Tensor((0, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((0, 64), "float32")):
        with T.Kernel(0, threads=128) as x:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for _ in T.Pipelined(x + 1, num_stages=2):
                T.copy(A[x * 64, 0], a)
                T.copy(B, b)
                T.gemm(a, b, c)
            T.copy(c, C[x * 64, 0])

    assert launch_of(f)
