"""Operands whose rows are no multiples of 16 bytes: when they are copied, their copies, the tiles of what is copied."""

import math
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tilelang.env import env
from tilelang.ir import walk
from tilelang.ir.expr import Call
from tilelang.library import grouped_matmul, matmul, place
from tilelang.library.caches import Cache
from tilelang.library.gemm import plan as matmul_plan
from tilelang.library.gemm.build import Place
from tilelang.library.gemm.gemv import GemvForm, gemv
from tilelang.library.gemm.kernels import Form, gemm
from tilelang.library.gemm.operands import Operand
from tilelang.library.gemm.problem import MatmulProblem
from tilelang.library.gemm.repack import Rows, pad_rows
from tilelang.library.gemm.tile import Tile
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
HOPPER = {"tl.enable_hopper": True}
ROWS = {
    "halves": Rows(0, 21, 37, 0, 37, 64, "float16"), "batched": Rows(3, 5, 7, 35, 7, 8, "bfloat16"),
    "apart": Rows(3, 5, 7, 43, 8, 8, "float16"), "bytes": Rows(2, 9, 33, 401, 37, 48, "uint8"),
    "one_left": Rows(0, 5, 33, 0, 33, 48, "int8"), "three_left": Rows(0, 7, 33, 0, 33, 48, "int8"),
    "float8": Rows(0, 7, 130, 0, 130, 256, "float8_e4m3fn"), "words": Rows(0, 5, 9, 0, 9, 12, "float32"),
    "one_row": Rows(0, 1, 3, 0, 3, 8, "float16"), "a_word": Rows(0, 1, 2, 0, 2, 8, "float16"),
    "many_blocks": Rows(0, 41, 1025, 0, 1031, 1088, "float16"),
    "whole_blocks_and_a_rest": Rows(0, 257, 9, 0, 9, 16, "float16"), "whole_blocks": Rows(0, 256, 16, 0, 16, 16, "float16"),
}


def matrix(r, seed=0):
    """(the operand, its copy before it is made), of any bits but those of NaN."""
    bits = np.random.default_rng(seed).integers(0, 100, r.bytes // r.size).astype(f"u{r.size}")
    element = np.dtype(getattr(ml_dtypes, r.element, None) or r.element)
    lead = slice(not r.batch, None)
    x = np.lib.stride_tricks.as_strided(bits, (r.batch, r.rows, r.columns)[lead],
                                        tuple(s * r.size for s in (r.lead, r.down, 1))[lead])
    return x.view(element), np.zeros((*x.shape[:-1], r.padded), element)


def same(x, copy):
    return np.array_equal(x.view(f"u{x.itemsize}"), copy[..., :x.shape[-1]].view(f"u{x.itemsize}"))


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_padded_by_whole_words(name):
    """Any start inside a word; where the operand ends inside one nothing behind it is read."""
    r = ROWS[name]
    x, copy = matrix(r)
    assert r.fits
    assert same(x, run_device(lower(pad_rows(r).func, SM90, HOPPER), {"X": x, "Y": copy}).outputs["Y"])


def test_what_is_not_copied_by_words():
    assert not Rows(0, 1, 1, 0, 1, 8, "float16").fits and not Rows(0, 5, 5, 0, 5, 6, "float64").fits


def test_loads_are_words_and_stores_are_16_bytes():
    from tilelang.codegen.cuda.printer import print_kernel

    (kernel,) = lower(pad_rows(Rows(0, 300, 1001, 0, 1001, 1024, "float16")).func, SM90, HOPPER).kernels
    text = print_kernel(kernel)
    assert "copy<unsigned, 4>" in text


@pytest.fixture
def planned_anew(monkeypatch):
    monkeypatch.setattr(sys.modules["tilelang.library.gemm.matmul"], "_ANSWERS", Cache(64))


@pytest.fixture
def always_copied(monkeypatch, planned_anew):
    monkeypatch.setattr(matmul_plan, "_copies_pay", lambda *_: True)


@pytest.mark.parametrize("element", [np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn, np.int8])
@pytest.mark.parametrize("ta, tb", [(False, False), (True, True)])
def test_products_of_padded_operands(element, ta, tb, always_copied):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(element) for s in ((37, 51), (51, 69)))
    got = matmul(a.T.copy() if ta else a, b.T.copy() if tb else b, transpose_a=ta, transpose_b=tb, target=SM90,
                 execution_backend="simulator")
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert np.array_equal(got.astype(np.float64), want.astype(got.dtype).astype(np.float64))


OVERLAPPING = Tile(64, 64, 64, 3, 128, panel_size=2, overlapping=True, staged=True)


@pytest.mark.parametrize("tile, ta, tb", [
    (OVERLAPPING, False, False), (OVERLAPPING, True, True), (replace(OVERLAPPING, swap_ab=True), False, False),
    (replace(OVERLAPPING, splits=2, staged=False), False, False)])
def test_the_last_tile_of_rows_of_any_length_is_loaded_by_tma(tile, ta, tb, monkeypatch, always_copied):
    """It is moved to a multiple of 16 bytes of a row: TMA takes no other, and threads would load it element by element."""
    monkeypatch.setattr(matmul_plan, "choose_tile", lambda chip, p: tile)
    programs = []
    real = place.compile
    monkeypatch.setattr(place, "compile", lambda p, **k: programs.append((p, k)) or real(p, **k))
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((93, 131), (131, 107)))
    got = matmul(a.T.copy() if ta else a, b.T.copy() if tb else b, transpose_a=ta, transpose_b=tb, target=SM90,
                 execution_backend="simulator")
    assert np.array_equal(got.astype(np.float64), a.astype(np.float64) @ b.astype(np.float64))
    (program, options), = programs  # copies and product are one call
    kernels = lower(program.func, SM90, options["pass_configs"]).kernels
    assert len(kernels) == 1 + tile.splits
    ops = {x.op for x in walk(kernels[1].launch) if isinstance(x, Call)}
    assert {"tma_load", "wgmma"} <= ops and "cp_async" not in ops


@pytest.mark.parametrize("shape, tb, copied", [
    ((447, 2153, 4187), False, (True, True)), ((65, 127, 255), False, (True, True)), ((1001, 127, 301), False, (True, True)),
    ((17, 4097, 4097), True, (True, True)), ((1000, 1001, 1024), False, (False, True)),
    ((1000, 1001, 1024), True, (False, False)), ((3, 5, 7), True, (False, False)), ((500, 499, 67), False, (False, False)),
    ((2, 4097, 4097), True, (True, True)), ((7, 1025, 513), True, (True, True)), ((65, 67, 69), True, (False, False)),
    ((15212, 74, 2692), True, (False, False)), ((1028, 1028, 1028), True, (True, True)),  # rows of whole 8 bytes
    ((5313, 520, 4228), True, (True, True)), ((8, 4100, 4100), True, (True, True))])
def test_which_products_copy_their_operands(shape, tb, copied):
    """By the model: where copies of all odd rows and TMA take less than loads of their elements, as on an H200."""
    m, n, k = shape
    left = Operand(m, k, 0, m * k, k, 1, False, False)
    right = Operand(n, k, 0, n * k, k, 1, False, True) if tb else Operand(k, n, 0, n * k, n, 1, False, False)
    p = MatmulProblem(m, n, k, ("float16",) * 3 + ("float32",), "half", left, right)
    _, a, b = matmul_plan.routes(p, Place(SM90, None).chip)[0]
    assert (a is not None, b is not None) == copied


def test_starts_of_moved_tiles():
    f = Form(447, 2153, 4187, ("float16",) * 3 + ("float32",), replace(OVERLAPPING, bm=128), b_strides=(2176, 1))
    assert math.gcd(8, f.column(33).value) == 8
    gemm(f)


def test_one_kernel_for_any_number_of_rows_copies_the_other_operand(monkeypatch, always_copied):
    monkeypatch.setitem(env._overrides, "TILELANG_LIBRARY_DYNAMIC_SHAPES", "1")
    place.KERNELS.clear()
    compiled = []
    real = place.compile
    monkeypatch.setattr(place, "compile", lambda p, **k: compiled.append(p) or real(p, **k))
    b = np.random.default_rng(1).integers(-3, 4, (40, 51)).astype(np.float16)
    for m in (17, 30):
        a = np.random.default_rng(m).integers(-3, 4, (m, 40)).astype(np.float16)
        got = matmul(a, b, target=SM90, execution_backend="simulator")
        assert np.array_equal(got.astype(np.float64), a.astype(np.float64) @ b.astype(np.float64))
    assert len(compiled) == 1


def test_batches_and_groups_of_padded_operands(always_copied):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((2, 19, 21), (2, 21, 35)))
    got = matmul(a, b, target=SM90, execution_backend="simulator")
    assert np.array_equal(got.astype(np.float64), a.astype(np.float64) @ b.astype(np.float64))
    got = grouped_matmul(a[0], b, np.array([7, 12], np.int32), target=SM90, execution_backend="simulator")
    want = np.concatenate([a[0, :7].astype(np.float64) @ b[0], a[0, 7:].astype(np.float64) @ b[1]])
    assert np.array_equal(got.astype(np.float64), want)


@pytest.mark.parametrize("m, n, k, ta, tb, element", [
    (1, 133, 77, False, False, np.float16), (1, 133, 77, True, True, ml_dtypes.bfloat16),
    (133, 1, 77, False, False, np.float16), (133, 1, 77, True, False, np.float16),
    (1, 33, 1301, False, False, np.float16), (1, 3, 9001, False, True, np.float16),
    (1, 37, 66, False, True, np.float16), (1, 1, 91, False, True, np.float16),
    (1, 1, 92, False, False, np.float16), (1, 2, 9, False, False, np.float16), (2, 1, 3, False, False, np.float16)])
def test_a_vector_times_odd_rows_reads_them_once(m, n, k, ta, tb, element, monkeypatch, planned_anew):
    """Down the columns and along the rows, k in one part and in several; what is no number stays in its row or column."""
    programs = []
    real = place.compile
    monkeypatch.setattr(place, "compile", lambda p, **k: programs.append(p.func.name) or real(p, **k))
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(element) for s in ((m, k), (k, n)))
    matrix = b if m == 1 else a.T  # (k, elements of the result)
    matrix[:, 1:2] = np.inf
    bias = rng.integers(-3, 4, n).astype(np.float32)
    got = matmul(np.ascontiguousarray(a.T) if ta else a, np.ascontiguousarray(b.T) if tb else b, transpose_a=ta,
                 transpose_b=tb, bias=bias, out_dtype="float32", target=SM90, execution_backend="simulator")
    finite = np.arange(max(m, n)) != 1
    want = np.where(np.isfinite(a), a, 0).astype(np.float64) @ np.where(np.isfinite(b), b, 0) + bias
    assert np.array_equal(got.ravel()[finite], want.ravel()[finite])
    assert programs == ["matmul_vector"] and not np.isfinite(got.ravel()[~finite]).any()


def test_parts_of_a_vector_product():
    """As many blocks as keep the machine busy, each with enough of k; the loop's steps leave few without work."""
    form = Form(1, 4097, 4097, ("float16",) * 3 + ("float32",), OVERLAPPING, tb=True)
    long = GemvForm(form, Rows(0, 4097, 4097, 0, 4097, 4097, "float16"))
    assert long.along and long.divided(132).splits == 1 and long.iterations * long.ahead == long.steps == 8
    short = replace(long, f=replace(form, k=129), r=Rows(0, 8191, 129, 0, 129, 129, "float16"))
    assert (short.row_groups, short.blocks, short.steps, short.ahead, short.iterations) == (8, 256, 2, 2, 1)
    down = replace(long, f=replace(long.f, tb=False))
    assert not down.along and 8 * 132 <= down.divided(132).splits * down.blocks < 9 * 132
    wide = down.divided(132)
    assert wide.splits * wide.iterations * wide.ahead < 1.2 * wide.steps
    assert "matmul_vector" in gemv(long).func.name
