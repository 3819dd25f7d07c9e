"""Results that a parallel loop stored under a condition on the row went to global memory as stores of four bytes
(transform/legalize/staged_reads.py: staged_writes)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_lowered import launch_of, lowered, ops, plain_stores

import tilelang.language as T
from tilelang.ir import Ramp
from tilelang.simulator import run_device, run_tile

K = 32


def stored(form: str = "", threads: int = 128, dtype: str = "float16", n: int = 64) -> Any:
    """Block (by, g) has the rows by * 64 of group g, if there are such, from row first[g] of C on."""
    @T.prim_func
    def main(A: T.Tensor((256, K), "float16"), B: T.Tensor((n, K), "float16"), R: T.Tensor((256, n), dtype),
             counts: T.Tensor((2,), "int32"), first: T.Tensor((2,), "int32"), C: T.Tensor((256, n), dtype)):
        with T.Kernel(2, 2, threads=threads) as (by, g):
            a, b = T.alloc_shared((64, K), "float16"), T.alloc_shared((n, K), "float16")
            c, top = T.alloc_fragment((64, n), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(A[g * 128 + by * 64, 0], a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_B=True, clear_accum=True)
            T.reduce_max(c, top, dim=1)
            for i, j in T.Parallel(64, n):
                if form == "all":
                    C[g * 128 + by * 64 + i, j] = c[i, j] + top[i]
                elif form == "residual":
                    C[g * 128 + by * 64 + i, j] = c[i, j] + R[g * 128 + by * 64 + i, j]
                elif form == "columns":
                    if j < counts[g]:
                        C[g * 128 + by * 64 + i, j] = c[i, j]
                elif form == "below":
                    if first[g] + i < counts[g]:
                        C[g * 128 + by * 64 + i, j] = c[i, j]
                elif form == "few":
                    if i < 5:
                        C[g * 128 + by * 64 + i, j] = c[i, j]
                elif form == "guarded read":
                    if by * 64 + i < counts[g]:
                        C[first[g] + by * 64 + i, j] = c[i, j] + R[g * 128 + by * 64 + i, j]
                elif form == "own":
                    if by * 64 + i < counts[g]:
                        C[first[g] + by * 64 + i, j] = C[first[g] + by * 64 + i, j] + c[i, j]
                elif form == "turned":
                    if by * 64 + i < counts[g]:
                        C[first[g] + by * 64 + j, i] = c[i, j]
                elif by * 64 + i < counts[g]:
                    C[first[g] + by * 64 + i, j] = c[i, j] * 2 - top[i]

    return main


def given(program: Any, counts: tuple[int, int], first: tuple[int, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    out = {b.name: rng.integers(-3, 4, b.shape).astype(str(b.dtype)) for b in program.buffer_map.values()}
    return out | {"counts": np.array(counts, "int32"), "first": np.array(first, "int32")}


@pytest.mark.parametrize("counts, first", [
    ((70, 128), (0, 100)), ((0, 64), (3, 5)), ((63, -5), (200, 0)), ((65, 128), (-40, 170)), ((-2**31, 2**31 - 1), (0, 70))])
def test_first_rows_are_stored_and_no_others(counts: tuple[int, int], first: tuple[int, int]):
    """Rows outside the tensor are not stored either."""
    program = stored()
    inputs = given(program, counts, first)
    expected, found = run_tile(program, inputs), run_device(lowered(program), inputs).outputs
    np.testing.assert_array_equal(found["C"], expected["C"])


@pytest.mark.parametrize("form, threads, dtype, n", [
    ("all", 128, "float16", 64), ("residual", 128, "float16", 64), ("", 128, "float32", 64), ("", 128, "float16", 24),
    ("", 128, "float16", 128), ("", 256, "float16", 128), ("turned", 128, "float16", 64), ("own", 128, "float16", 64),
    ("guarded read", 128, "float16", 64), ("below", 128, "float16", 64), ("columns", 128, "float16", 64)])
def test_forms_of_the_store(form: str, threads: int, dtype: str, n: int):
    program = stored(form, threads, dtype, n)
    inputs = given(program, (50, 101), (10, 120))
    if form == "columns":
        inputs["C"] = inputs["C"] * 0
    expected, found = run_tile(program, inputs), run_device(lowered(program), inputs).outputs
    np.testing.assert_array_equal(found["C"], expected["C"])


@pytest.mark.parametrize("form, staged", [("", True), ("all", True), ("residual", True), ("columns", False), ("below", False),
                                          ("few", False), ("guarded read", False), ("own", False), ("turned", False)])
def test_guarded_results_went_as_four_bytes(form: str, staged: bool):
    launch = launch_of(stored(form))
    assert ("tma_store" in ops(launch)) == staged
    widths = {x.indices[-1].lanes if isinstance(x.indices[-1], Ramp) else 1 for x in plain_stores(launch)}
    assert widths <= ({8} if staged else {1, 2})


def test_places_of_rows_were_read_outside_a_tensor_where_the_condition_switched_them_off():
    """Without checks of bounds, a load behind a condition stays there."""
    @T.prim_func
    def main(A: T.Tensor((256, K), "float16"), B: T.Tensor((64, K), "float16"), first: T.Tensor((1,), "int32"),
             n: T.Tensor((1,), "int32"), C: T.Tensor((256, 64), "float16")):
        with T.Kernel(2, threads=128) as x:
            a, b = T.alloc_shared((64, K), "float16"), T.alloc_shared((64, K), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A[x * 64, 0], a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(64, 64):
                if x * 64 + i < n[0]:
                    C[first[x] + i, j] = c[i, j]

    inputs = given(main, (0, 0), (70, 0)) | {"n": np.array([50], "int32"), "first": np.array([70], "int32")}
    inputs = {name: x for name, x in inputs.items() if name != "counts"}
    expected = run_tile(main, inputs)["C"]
    for unchecked in (False, True):
        found = run_device(lowered(main, disable_safe_memory_legalize=unchecked), inputs).outputs["C"]
        np.testing.assert_array_equal(found, expected)


def test_float32_results_went_through_a_tile():
    """Four threads store a sector of 32 bytes; only stores under a condition gain by a tile."""
    assert "tma_store" not in ops(launch_of(stored("all", dtype="float32")))
    assert "tma_store" in ops(launch_of(stored(dtype="float32")))
