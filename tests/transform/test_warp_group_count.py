"""Warp groups beyond the blocks of 64 rows of a GEMM took wgmma, or whole rows, away from all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_lowered import lowered

import tilelang.language as T
from tilelang.ir import Launch, walk
from tilelang.layout import make_swizzled_layout
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.legalize.warp_group_count import warp_group_count
from tilelang.transform.pipeline import legalized


def product(threads: int, bm: int = 128, bn: int = 128, tells: str = "") -> Any:
    @T.prim_func
    def main(A: T.Tensor((200, 96), "float16"), B: T.Tensor((150, 96), "float16"), C: T.Tensor((200, 150), "float32"),
             count: T.Tensor((1,), "int32")):
        with T.Kernel(T.ceildiv(150, bn), T.ceildiv(200, bm), threads=threads) as (bx, by):
            a, b = T.alloc_shared((bm, 64), "float16"), T.alloc_shared((bn, 64), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            if tells == "layout":
                T.annotate_layout({a: make_swizzled_layout(a)})
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[by * bm, k * 64], a)
                T.copy(B[bx * bn, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            if tells == "thread":
                if T.get_thread_binding() == 0:
                    count[0] = 1
            if tells == "atomic":
                T.atomic_add(count[0], 1)
            T.copy(c, C[by * bm, bx * bn])

    return main


def rows(threads: int) -> Any:
    """Attention of 128 rows: a maximum of each row stands between its GEMMs."""
    @T.prim_func
    def main(A: T.Tensor((128, 64), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((128, 64), "float32")):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 64), "float16")
            s, p = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128, 64), "float16")
            o, m = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128,), "float32")
            T.copy(A, a)
            T.clear(o)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, s, transpose_B=True, clear_accum=True)
                T.reduce_max(s, m, dim=1)
                for i, j in T.Parallel(128, 64):
                    p[i, j] = s[i, j] - m[i]
                T.gemm(p, b, o)
            T.copy(o, C)

    return main


def threads_of(program: Any) -> int:
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    (launch,) = walk(run_passes(legalized(program.func, target), (warp_group_count,), PassContext(target)), Launch)
    return launch.num_threads


@pytest.mark.parametrize("threads, bm, bn, groups", [
    (384, 128, 128, 2), (512, 128, 128, 2), (512, 128, 64, 2), (384, 64, 128, 1), (512, 256, 64, 4), (384, 192, 64, 3),
    (256, 128, 128, 2), (256, 64, 128, 2)])
def test_groups_are_as_many_as_have_rows(threads: int, bm: int, bn: int, groups: int):
    assert threads_of(product(threads, bm, bn)) == groups * 128


@pytest.mark.parametrize("tells", ["thread", "layout", "atomic"])
def test_a_program_that_could_tell_keeps_its_threads(tells: str):
    assert threads_of(product(512, tells=tells)) == 512


def test_accumulators_that_fewer_groups_could_not_hold_keep_the_threads():
    assert threads_of(product(512, bm=128, bn=512)) == 512


def test_rows_of_a_maximum_stay_in_one_group_and_the_report_says_so():
    assert threads_of(rows(512)) == 256
    assert any("threads=256 instead of 512" in line for line in lowered(rows(512)).kernels[0].launch.plan.report)


@pytest.mark.parametrize("program", [product(384), product(512, bn=64), product(384, 64, 128), rows(384), rows(512)])
def test_results_are_those_of_the_interpreter(program: Any):
    rng = np.random.default_rng(1)
    given = {b.name: rng.integers(-3, 4, b.shape).astype(str(b.dtype)) for b in program.buffer_map.values()}
    expected, found = run_tile(program, given), run_device(lowered(program), given).outputs
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])
