"""Loops took steps of 32 elements along K as written: wgmma waited for a stage after every two instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_lowered import launch_of, lowered, report

import tilelang.language as T
from tilelang.ir import For, walk
from tilelang.ops import Gemm
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.legalize.joined_steps import joined_steps
from tilelang.transform.pipeline import legalized


def product(bk: int = 32, k: int = 200, stages: int = 3, dtype: str = "float16", form: str = "", k_first: bool = False) -> Any:
    acc, rows, columns = "int32" if dtype == "int8" else "float32", 100, 72

    @T.prim_func
    def main(A: T.Tensor((rows, k), dtype), B: T.Tensor((k, columns) if k_first else (columns, k), dtype),
             C: T.Tensor((rows, columns), acc), D: T.Tensor((2, 2, 64, bk), dtype)):
        with T.Kernel(T.ceildiv(columns, 64), T.ceildiv(rows, 64), threads=128) as (bx, by):
            a, b = T.alloc_shared((64, bk), dtype), T.alloc_shared((bk, 64) if k_first else (64, bk), dtype)
            if form == "view":
                a, b = T.view(a, (64, bk), dtype), T.view(b, (64, bk), dtype)
            c, d = T.alloc_fragment((64, 64), acc), T.alloc_fragment((64, 64), acc)
            T.clear(c)
            T.clear(d)
            for step in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                at = (step // 2 if form == "twice" else step) * bk
                T.copy(A[by * 64, at], a, loop_layout=rows_of(bk) if form == "layout" else None)
                T.copy(B[step * bk, bx * 64] if k_first else B[bx * 64, step * bk], b)
                T.gemm(a, b, c, transpose_B=not k_first, clear_accum=form == "last")
                if form == "two":
                    T.gemm(a, b, d, transpose_B=not k_first)
                if form == "one sum":
                    T.gemm(a, b, c, transpose_B=not k_first)
                if form == "element":
                    for i, j in T.Parallel(64, 64):
                        c[i, j] += 1
            if form == "outside":
                T.copy(a, D[by, bx, :, :])
            for i, j in T.Parallel(64, 64):
                c[i, j] += d[i, j]
            T.copy(c, C[by * 64, bx * 64])

    return main


def rows_of(bk: int) -> Any:
    return T.Fragment((64, bk), forward_fn=lambda i, j: (i * 2 + j // (bk // 2), j % (bk // 2)))


def depths(program: Any) -> tuple[list[int], list[int]]:
    """(K of each GEMM, steps of each loop) after the pass."""
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    func = run_passes(legalized(program.func, target), (joined_steps,), PassContext(target))
    return [op.k for op in walk(func, Gemm)], [int(s.extent.value) for s in walk(func, For)]


@pytest.mark.parametrize("bk, k, dtype, k_first, depth, steps", [
    (32, 256, "float16", False, 64, 4), (16, 256, "bfloat16", False, 64, 4), (32, 200, "float16", False, 32, 7),
    (32, 230, "float16", True, 64, 4), (64, 256, "float16", False, 64, 4), (32, 256, "int8", False, 128, 2),
    (16, 96, "float16", False, 32, 3)])
def test_narrow_steps_are_joined_to_128_bytes(bk: int, k: int, dtype: str, k_first: bool, depth: int, steps: int):
    assert depths(product(bk, k, dtype=dtype, k_first=k_first)) == ([depth], [steps])


@pytest.mark.parametrize("form", ["twice", "last", "one sum", "element", "outside", "view", "layout"])
def test_another_program_keeps_its_steps(form: str):
    assert set(depths(product(k=256, form=form))[0]) == {32}


def test_two_sums_of_one_loop_are_joined():
    assert depths(product(k=256, form="two")) == ([64, 64], [4])


@pytest.mark.parametrize("form, k_first, k", [("", False, 230), ("", True, 256), ("two", False, 250)])
def test_joined_steps_give_the_same_sums(form: str, k_first: bool, k: int):
    program, rng = product(k=k, form=form, k_first=k_first), np.random.default_rng(1)
    given = {b.name: rng.standard_normal(b.shape).astype(str(b.dtype)) for b in program.buffer_map.values()}
    whole = lowered(program, resize_blocks=True)
    joined, apart = run_device(whole, given).outputs, run_device(lowered(program), given).outputs
    np.testing.assert_array_equal(joined["C"], apart["C"])
    np.testing.assert_allclose(joined["C"], run_tile(program, given)["C"], rtol=1e-5, atol=1e-4)
    assert "does what two did" in report(launch_of(program, resize_blocks=True))



def test_a_loop_that_names_a_loaded_value_was_asked_for_its_truth():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), C: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            for k in T.serial(4):
                v = A[k]
                C[k] = v + v
                C[k + 4] = v * v

    assert depths(main) == ([], [4])


def test_a_tile_that_two_gemms_read_along_both_dimensions_got_one_length():
    """c took the second step's rows of b as more columns of the first."""
    @T.prim_func
    def main(A: T.Tensor((64, 128), "float16"), B: T.Tensor((128, 32), "float16"), C: T.Tensor((64, 32), "float32"),
             D: T.Tensor((64, 32), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 32), "float16")
            c, d = T.alloc_fragment((64, 32), "float32"), T.alloc_fragment((64, 32), "float32")
            T.clear(c)
            T.clear(d)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, c, transpose_B=True)
                T.gemm(a, b, d)
            T.copy(c, C)
            T.copy(d, D)

    assert depths(main) == ([32, 32], [4])
    rng = np.random.default_rng(3)
    given = {b.name: rng.integers(-3, 4, b.shape).astype(str(b.dtype)) for b in main.buffer_map.values()}
    got, want = run_device(lowered(main, resize_blocks=True), given).outputs, run_tile(main, given)
    assert all(np.array_equal(got[x], want[x]) for x in "CD")


def test_joined_steps_that_do_not_fit_cost_a_stage_of_the_program():
    @T.prim_func
    def main(A: T.Tensor((128, 256), "float16"), B: T.Tensor((128, 256), "float16"), E: T.Tensor((1500, 64), "float16"),
             C: T.Tensor((128, 128), "float32"), F: T.Tensor((1500, 64), "float16")):
        with T.Kernel(1, threads=256):
            a, b, e = (T.alloc_shared((rows, columns), "float16") for rows, columns in ((128, 32), (128, 32), (1500, 64)))
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            T.copy(E, e)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B[0, k * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            for i, j in T.Parallel(1500, 64):
                F[i, j] = e[1499 - i, j]
            T.copy(c, C)

    (kernel,) = lowered(main, resize_blocks=True).kernels
    assert {n for _, n in kernel.launch.plan.stages} >= {2}, kernel.launch.plan.stages
    assert "compiled without blocks and steps of another size" in " ".join(kernel.launch.plan.report)
