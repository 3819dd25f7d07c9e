"""Loops that leave warp roles to a second block on the SM, and loops that must not lose them."""

from __future__ import annotations

from typing import Any

import pytest
from hopper_lowered import lowered

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel


def product(kind: str, k: int = 1024) -> Any:
    """C = A B^T where B is int8 and converted through shared memory, A is gathered, or both are loaded as they are."""
    @T.prim_func
    def main(A: T.Tensor((512, k), "float16"), B: T.Tensor((256, k), "int8" if kind == "converted" else "float16"),
             index: T.Tensor((512,), "int32"), C: T.Tensor((512, 256), "float16")):
        with T.Kernel(2, 4, threads=256) as (bx, by):
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((128, 64), B.dtype)
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for step in T.Pipelined(k // 64, num_stages=3):
                h = T.alloc_shared((128, 64), "float16")  # of one iteration: it has one version
                if kind == "gathered":
                    for i, j in T.Parallel(128, 64):
                        a[i, j] = A[index[by * 128 + i], step * 64 + j]
                else:
                    T.copy(A[by * 128, step * 64], a)
                T.copy(B[bx * 128, step * 64], b)
                if kind == "converted":
                    for i, j in T.Parallel(128, 64):
                        h[i, j] = T.cast(b[i, j], "float16")
                    T.gemm(a, h, c, transpose_B=True)
                else:
                    T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 128, bx * 128])

    return main


@pytest.mark.parametrize("kind, why", [("converted", "`h`: a second block"), ("gathered", "asynchronous copies of")])
def test_threads_that_feed_a_gemm_kept_a_second_block_off_the_sm(kind: str, why: str):
    (kernel,) = lowered(product(kind)).kernels
    assert not kernel.launch.plan.overlap
    assert any(why in line for line in kernel.launch.plan.report), kernel.launch.plan.report


def test_a_loop_that_only_loads_and_multiplies_keeps_its_warp_roles():
    (kernel,) = lowered(product("plain")).kernels
    assert "compute" in kernel.launch.plan.pipeline_report


def sums(first: int) -> Any:
    """C = A B^T scaled by rows of V that start at a bound variable."""
    @T.prim_func
    def main(A: T.Tensor((512, 64), "float16"), B: T.Tensor((128, 64), "float16"), V: T.Tensor((4, 512), "float32"),
             C: T.Tensor((128, 64), "float32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((128, 64), "float16")
            v = T.alloc_shared((64,), "float32")
            s, c = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128, 64), "float32")
            T.copy(B, b)
            T.clear(c)
            for step in T.Pipelined(7, num_stages=2):
                at = (first + step) * 64
                T.copy(A[at:at + 64, :], a)
                T.copy(V[1, at:at + 64], v)
                T.gemm(b, a, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(128, 64):
                    c[i, j] += s[i, j] * v[j]
            T.copy(c, C)

    return main


@pytest.mark.parametrize("first", [0, 1])
def test_a_row_at_a_bound_start_left_the_loop_without_warp_roles(first: int):
    (kernel,) = lowered(sums(first)).kernels
    assert "1 loads" in kernel.launch.plan.pipeline_report and "v" in kernel.launch.plan.pipeline_report


def tiles(blocks: int = 2) -> Any:
    @T.prim_func
    def main(A: T.Tensor((1024, 1024), "float16"), B: T.Tensor((1024, 1024), "float16"), C: T.Tensor((1024, 1024), "float16")):
        with T.Kernel(blocks, threads=256) as block:
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((128, 64), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            for by, bx in T.Persistent([8, 8], blocks, block):
                T.clear(c)
                for step in T.Pipelined(16, num_stages=3):
                    T.copy(A[by * 128, step * 64], a)
                    T.copy(B[bx * 128, step * 64], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, C[by * 128, bx * 128])

    return main


def test_a_pipelined_loop_in_a_loop_of_tiles_waited_for_each_gemm():
    (kernel,) = lowered(tiles()).kernels
    assert "6 stages" in kernel.launch.plan.pipeline_report
    assert "in flight" in kernel.launch.plan.overlap


def masked(load: str) -> Any:
    @T.prim_func
    def main(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            g = T.alloc_shared((64,), "float32")
            x = T.alloc_fragment((64, 64), "float32")
            T.copy(X[0, :], g)
            T.copy(X, x)
            for i, j in T.Parallel(64, 64):
                if load == "shared":
                    x[i, j] = T.if_then_else(j <= i, x[i, j] * T.exp2(g[i] - g[j]), 0.0)
                elif load == "beyond":
                    x[i, j] = T.if_then_else(j < i, x[i, j] * g[T.cast(x[i, j], "int32")], 0.0)
                else:
                    x[i, j] = T.if_then_else(j <= i, x[i, j] * T.exp2(X[j, i]), 0.0)
            T.copy(x, Y)

    return main


@pytest.mark.parametrize("load, both", [("shared", True), ("beyond", False), ("global", False)])
def test_each_element_of_a_masked_tile_was_a_branch(load: str, both: bool):
    """Loads that may lie outside their buffer, or are from global memory, stay behind the condition."""
    (kernel,) = lowered(masked(load)).kernels
    assert ("select_both" in print_kernel(kernel)) == both
