"""The width of a vector follows from what a warp group has of a row, and from the tensor's width, column and alignment."""

import json

import numpy as np
import pytest
from backends import AGREES, FAILED, agree
from vector_forms import FILLS, LEAVES, Form, draw, outcomes
from vector_sweep import HERE, main

import tilelang.language as T

FIXED, FRESH = 24, 12


def check(seed, number, executions):
    form = draw(seed, number)
    found = outcomes(form, executions, number)
    assert not [text for status, text in found.values() if status == FAILED], f"seed {seed}, form {number}: {form}\n{found}"
    return found


@pytest.mark.core
@pytest.mark.timeout(300)
def test_forms_of_a_fixed_seed_agree_with_numpy():
    found = [o for k in range(FIXED) for o in check(5, k, HERE).values()]
    assert sum(status == AGREES for status, _ in found) >= 2 * FIXED


@pytest.mark.core
@pytest.mark.timeout(300)
def test_forms_of_a_fresh_seed_agree_with_numpy():
    seed = int(np.random.default_rng().integers(1000, 2**31))
    for k in range(FRESH):
        check(seed, k, HERE)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(8))
def test_forms_agree_with_numpy_on_the_device(chunk):
    for k in range(25):
        check(6, 25 * chunk + k, ("cuda",))


def test_forms_are_drawn_independently():
    drawn = [draw(3, k) for k in range(4000)]
    assert drawn[:20] == [draw(3, k) for k in range(20)]
    assert len(set(drawn)) > 3980
    assert {(f.fill, f.leave) for f in drawn} >= {(fill, leave) for fill in FILLS[:-2] for leave in LEAVES}
    assert {f.dtype for f in drawn} >= {"int4", "uint4", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float16", "float32",
                                        "float64", "int64"}


def test_a_run_leaves_its_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", f"vector_sweep.py --forms 2 --on sm_90a -n 1 --record {tmp_path / 'out.json'}".split())
    assert main() == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["forms"], found["wrong"], sum(found["runs"].values())) == (2, 0, 2)


def of_gemm(rows, columns, shape, dtype, threads=128, operand="float16", row=0, column=0, count=None, **more):
    """A GEMM's accumulators copied to [row.., column..] of a tensor of this shape."""
    form = Form("gemm", "copy", rows, columns, threads, operand, "int32" if operand == "int8" else "float32", dtype, depth=64,
                row=row, column=column, more_rows=shape[0] - row - (count or rows), more_columns=shape[1] - column - columns,
                first=count or 0, **more)
    assert form.tensor == shape
    return form


@pytest.mark.parametrize("form", [
    pytest.param(of_gemm(64, 24, (64, 32), "int8"), id="the last eight columns of 24"),
    pytest.param(of_gemm(64, 16, (64, 16), "int8", 256), id="eight columns of each of two warp groups"),
    pytest.param(of_gemm(64, 48, (64, 48), "int8", 256), id="24 columns of each of two warp groups"),
    pytest.param(of_gemm(64, 80, (64, 80), "int8", 256), id="40 columns of each of two warp groups"),
    pytest.param(of_gemm(64, 96, (64, 96), "uint8", 512), id="24 columns of each of four warp groups"),
    pytest.param(of_gemm(128, 48, (128, 48), "float8_e4m3fn", 512), id="24 columns of two by two warp groups"),
    pytest.param(of_gemm(64, 48, (80, 48), "int8", 256, row=8, column=0), id="in front of the last row"),
    pytest.param(of_gemm(64, 48, (80, 80), "float8_e5m2", 256, row=8, column=16), id="at a column"),
    pytest.param(of_gemm(128, 104, (129, 104), "float8_e4m3fn", 256, gap=4), id="rows with a gap between them"),
    pytest.param(of_gemm(64, 24, (64, 32), "int8", count=37), id="37 rows"),
    pytest.param(of_gemm(64, 40, (64, 48), "int8", count=37, counted=True), id="a number of rows known at run time"),
    pytest.param(of_gemm(64, 16, (64, 16), "float8_e4m3fn", 256, "float8_e4m3fn", stages=3), id="a pipelined float8 GEMM"),
    pytest.param(of_gemm(64, 136, (64, 144), "int8", 128, "int8"), id="136 columns"),
    pytest.param(of_gemm(64, 24, (64, 32), "int8", 128, "bfloat16", blocks=1), id="of bfloat16")])
def test_accumulators_of_a_part_of_a_row_are_stored_as_8_bit_elements(form):
    """Vectors of 16 bytes left the last columns of a warp group, or all, unwritten, were misaligned, or wrote outside."""
    assert outcomes(form, HERE) == dict.fromkeys(HERE, (AGREES, ""))


def test_columns_in_the_middle_of_a_tensor_are_stored_inside_the_row():
    """The second warp group's vectors began at column 24 + 16, and the last went on in the next row."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), B: T.Tensor((48, 64), "float16"), D: T.Tensor((80, 64), "int8")):
        with T.Kernel(1, threads=256):
            a = T.alloc_shared((64, 64), "float16")
            b = T.alloc_shared((48, 64), "float16")
            c = T.alloc_fragment((64, 48), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_B=True, clear_accum=True)
            T.copy(c, D[8:72, 16:64])

    r = np.random.default_rng(0)
    a, b = (r.integers(-1, 2, (n, 64)).astype(np.float16) for n in (64, 48))
    want = np.full((80, 64), 99, np.int8)
    want[8:72, 16:64] = (a.astype(np.float32) @ b.T.astype(np.float32)).astype(np.int8)
    agree(f, [a, b, np.full((80, 64), 99, np.int8)], {2: want})


def test_an_8_bit_fragment_in_the_layout_of_accumulators_is_stored_whole():
    """A fragment of 8-bit elements that T.Parallel fills from accumulators lost its last eight columns."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), B: T.Tensor((24, 64), "float16"), D: T.Tensor((64, 32), "int8")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((64, 64), "float16")
            b = T.alloc_shared((24, 64), "float16")
            c = T.alloc_fragment((64, 24), "float32")
            e = T.alloc_fragment((64, 24), "int8")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(64, 24):
                e[i, j] = T.cast(c[i, j], "int8") + T.int8(1)
            T.copy(e, D[0:64, 0:24])

    r = np.random.default_rng(0)
    a, b = (r.integers(-1, 2, (n, 64)).astype(np.float16) for n in (64, 24))
    want = np.full((64, 32), 99, np.int8)
    want[:, :24] = (a.astype(np.float32) @ b.T.astype(np.float32)).astype(np.int8) + 1
    agree(f, [a, b, np.full((64, 32), 99, np.int8)], {2: want})


@pytest.mark.parametrize("rows, columns, dtype", [(12, 44, "int32"), (12, 88, "float16"), (20, 176, "int8")])
def test_a_tile_whose_boxes_would_start_inside_128_bytes_is_not_loaded_by_tma(rows, columns, dtype):
    """Boxes of 16 bytes a row and of rows that are no multiple of eight stood at addresses that TMA cannot write."""
    form = Form("staged", "copy", rows, columns, 96, dtype, dtype, dtype, stages=0)
    assert outcomes(form, HERE) == dict.fromkeys(HERE, (AGREES, ""))


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_a_column_that_a_variable_holds_is_known_to_be_even(dtype):
    """`x = bx * 32` in front of a copy to packed elements was refused as a column that may lie inside a byte."""
    form = Form("shared", "copy", 8, 32, 32, "int8", "int8", dtype, blocks=2)
    assert outcomes(form, HERE) == dict.fromkeys(HERE, (AGREES, ""))
