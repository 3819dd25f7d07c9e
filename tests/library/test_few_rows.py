"""A few rows, or columns, times a matrix whose rows are no multiples of 16 bytes."""

import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.library import matmul, place
from tilelang.library.caches import Cache
from tilelang.library.gemm import plan as matmul_plan
from tilelang.library.gemm.build import Place
from tilelang.library.gemm.few_rows import FewRows, few_rows_gemm
from tilelang.library.gemm.kernels import Form
from tilelang.library.gemm.operands import Operand
from tilelang.library.gemm.plan import plan_matmul, thin_forms
from tilelang.library.gemm.problem import MatmulProblem
from tilelang.library.gemm.repack import Rows
from tilelang.library.gemm.tile import Tile, chip_of
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
HOPPER = {"tl.enable_hopper": True}
H200 = replace(chip_of(SM90), sms=132)


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(Place, "chip", property(lambda self: H200))


def few_rows(m, n, k, ta, tb, element="float16", down=0, splits=2, deep=64):
    """down: of the matrix, where its rows lie apart."""
    rows, columns = ((n, k) if tb else (k, n)) if m <= n else ((k, m) if ta else (m, k))
    apart = {"b_strides" if m <= n else "a_strides": (down, 1)} if down else {}
    form = Form(m, n, k, (element, element, "float32", "float32"), Tile(64, 64, 64, 2, 128), ta=ta, tb=tb, **apart)
    return FewRows(form, Rows(0, rows, columns, 0, down or columns, down or columns, element), splits, deep)


def stored(x, turned, down=0):
    x = np.ascontiguousarray(x.T if turned else x)
    if not down:
        return x
    bits = np.full((x.shape[0] - 1) * down + x.shape[1], np.inf, x.dtype)
    out = np.lib.stride_tricks.as_strided(bits, x.shape, (down * x.itemsize, x.itemsize))
    out[:] = x
    return out


@pytest.mark.parametrize("m, n, k, ta, tb, down, parts", [
    (3, 133, 517, False, True, 0, 8), (16, 131, 389, False, False, 0, 3), (9, 200, 517, True, True, 521, 2),
    (133, 5, 517, False, False, 0, 4), (133, 2, 519, True, True, 0, 2), (130, 8, 130, True, False, 135, 5),
    (2, 37, 66, False, True, 0, 2), (5, 6, 9, False, False, 0, 2), (2, 66, 64, False, True, 67, 2),
    (2, 130, 63, False, False, 0, 8), (2, 65, 65, False, True, 0, 8)])
@pytest.mark.parametrize("element, deep", [("float16", 64), ("bfloat16", 128)])
def test_any_part_of_the_matrix_and_of_k(m, n, k, ta, tb, down, parts, element, deep):
    """Tiles at edges, k that ends inside a stretch or a word, blocks without work; what is no number stays where it is."""
    v = few_rows(m, n, k, ta, tb, element, down, parts, deep)
    rng = np.random.default_rng(0)
    dt = np.dtype(getattr(ml_dtypes, element, None) or element)
    a, b = (rng.integers(-3, 4, s).astype(dt) for s in ((m, k), (k, n)))
    (b if v.of_b else a.T)[:, 1] = np.inf
    one, c = np.zeros(1, np.float32), np.full((m, n), np.nan, np.float32)
    given = stored(a, ta, 0 if v.of_b else down), stored(b, tb, down if v.of_b else 0)
    got = run_device(lower(few_rows_gemm(v).func, SM90, HOPPER), [*given, one, one, one, c]).outputs["C"]
    want = np.where(np.isfinite(a), a, 0).astype(np.float64) @ np.where(np.isfinite(b), b, 0).astype(np.float64)
    got, want = (got, want) if v.of_b else (got.T, want.T)
    finite = np.arange(max(m, n)) != 1
    assert np.array_equal(got[:, finite], want[:, finite]) and not np.isfinite(got[:, 1]).any()


def test_parts_keep_loads_under_way():
    """The fewest that leave a block as much of k; two of longer stretches where C alone has blocks enough."""
    long, short, many = (few_rows(*s).divided(132) for s in (
        (2, 4097, 4097, False, True), (7, 1025, 513, False, True), (3, 20001, 999, False, False)))
    assert (long.splits, long.deep) == (8, 64) and (short.splits, short.block_steps) == (5, 2)
    assert (many.splits, many.deep) == (2, 128)


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("n, tb", [(4097, False), (4097, True), (20001, False), (20001, True)])
def test_whole_words_without_spills(n, tb):
    v = few_rows(8, n, 4097, False, tb).divided(132)
    (kernel,) = lower(few_rows_gemm(v).func, SM90, HOPPER).kernels
    cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
    assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log


def asked(m, n, k, tb):
    left = Operand(m, k, 0, m * k, k, 1, False, False)
    right = Operand(n, k, 0, n * k, k, 1, False, True) if tb else Operand(k, n, 0, n * k, n, 1, False, False)
    return MatmulProblem(m, n, k, ("float16",) * 3 + ("float32",), "half", left, right)


@pytest.mark.parametrize("shape, tb, taken", [
    ((2, 4097, 4097), True, True), ((8, 4097, 4097), False, True), ((16, 8191, 2047), True, True),
    ((4097, 4, 4097), False, True), ((2, 65, 9001), True, False), ((8, 4096, 4096), True, None),
    ((64, 4097, 4097), True, None)])
def test_which_products_are_one_pass(shape, tb, taken):
    """By the model; None: of operands that TMA loads, or of too many rows, there is no such product."""
    p = asked(*shape, tb)
    found = thin_forms(p, H200)
    assert (found is None) == (taken is None)
    assert isinstance(plan_matmul(p, H200).thin, FewRows) == bool(taken)


@pytest.mark.parametrize("m, n, k, tb, element", [(2, 133, 777, True, np.float16), (131, 7, 265, False, ml_dtypes.bfloat16)])
def test_in_the_library(m, n, k, tb, element, monkeypatch):
    """Bias, activation, the result's own type; identical inputs give identical bits."""
    programs = []
    real = place.compile
    monkeypatch.setattr(sys.modules["tilelang.library.gemm.matmul"], "_ANSWERS", Cache(64))
    monkeypatch.setattr(matmul_plan, "expected", lambda *_: 1.0)
    monkeypatch.setattr(place, "compile", lambda p, **k: programs.append(p.func.name) or real(p, **k))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(element) for s in ((m, k), (n, k) if tb else (k, n)))
    bias = rng.integers(-3, 4, n).astype(np.float32)
    on = dict(target=SM90, execution_backend="simulator")
    got = [matmul(a, b, transpose_b=tb, bias=bias, activation="relu", **on) for _ in range(2)]
    x, y = a.astype(np.float64), (b.T if tb else b).astype(np.float64)
    want, sums = np.maximum(x @ y + bias, 0), abs(x) @ abs(y)
    eps = 2.0**-11 if element is np.float16 else 2.0**-8
    assert (abs(got[0].astype(np.float64) - want) <= k * 2.0**-24 * sums + eps * want).all() and got[0].dtype == element
    assert programs == ["matmul_few_rows"] and np.array_equal(got[0].view("u2"), got[1].view("u2"))
