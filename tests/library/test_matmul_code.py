"""The programs of the library compiled for sm_90a with the tiles the model chooses: roles, no spills, nothing serialised."""

from dataclasses import replace

import numpy as np
import pytest

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import For, Ramp, Store, const, dtype, numpy_dtype, walk
from tilelang.ir.expr import Call
from tilelang.library.gemm.kernels import gemm_grouped, gemm_split
from tilelang.library.gemm.kernels import Form, gemm, gemm_two_level
from tilelang.library.gemm.operands import Operand, copy_of, operand
from tilelang.library.gemm.plan import plan_matmul
from tilelang.library.gemm.problem import MatmulProblem, check_target
from tilelang.library.gemm.repack import repack
from tilelang.library.gemm.tile import Tile, TileProblem, chip_of
from tilelang.library.gemm.tile_candidates import candidates
from tilelang.library.gemm.tile_cost import choose_tile
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
H200 = replace(chip_of(SM90), sms=132)
HALF, BF16 = ("float16", "float16", "float16", "float32"), ("bfloat16", "bfloat16", "bfloat16", "float32")
F8 = ("float8_e4m3fn", "float8_e4m3fn", "bfloat16", "float32")


def form(m, n, k, types=HALF, kind="half", **more):
    bits = {"float16": 16, "bfloat16": 16, "float32": 32}.get(types[0], 8)
    two = more.pop("two", False)
    p = TileProblem(m, n, k, max(1, more.get("batch", 0)), kind, bits, 32 if types[2] in ("float32", "int32") else 16, two,
                not more.get("ta"), more.get("tb", False), not two, 128 if more.get("scaling") == "block" else 0,
                may_swap_ab=not more.get("groups") and more.get("scaling") != "block")
    return Form(m, n, k, types, choose_tile(H200, p), **more)


def program(f, two=False):
    if f.groups:
        return gemm_grouped(f)
    return (gemm_two_level if two else gemm_split if f.tile.splits > 1 else gemm)(f)


CASES = {
    "M0": (4096, 1024, 8192, HALF, "half", {}), "M1_NT": (4096, 8192, 8192, HALF, "half", {"tb": True}),
    "M2": (4096, 28672, 8192, HALF, "half", {}), "M5": (8192, 8192, 8192, BF16, "half", {}),
    "M7_NT": (8192, 8192, 28672, HALF, "half", {"tb": True}), "1024": (1024, 1024, 1024, HALF, "half", {}),
    "2048_TN": (2048, 2048, 2048, HALF, "half", {"ta": True}), "1000": (1000, 1000, 1000, HALF, "half", {}),
    "fp8": (4096, 4096, 4096, F8, "fp8", {"tb": True, "scaling": "tensor"}),
    "fp8_two_level": (8192, 8192, 8192, F8, "fp8", {"tb": True, "scaling": "tensor", "two": True}),
    "fp8_blocks": (4096, 4096, 4096, F8, "fp8", {"tb": True, "scaling": "block", "two": True}),
    "tf32": (4096, 4096, 4096, ("float32",) * 4, "tf32", {"tb": True}),
    "int8": (4096, 4096, 4096, ("int8", "int8", "int32", "int32"), "int8", {"tb": True}),
    "split": (256, 256, 16384, HALF, "half", {}), "few_rows": (40, 4096, 4096, HALF, "half", {}),
    "few_rows_split": (16, 1024, 16384, HALF, "half", {"tb": True, "bias": "float16"}),
    "few_rows_fp8": (16, 4096, 4096, F8, "fp8", {"tb": True, "scaling": "tensor", "two": True}),
    "bias_silu": (4096, 4096, 4096, HALF, "half", {"tb": True, "bias": "float16", "activation": "silu"}),
    "open_rows": (4096, 1024, 4096, HALF, "half", {"tb": True, "open_rows": True}),
    "batched": (1024, 1024, 1024, HALF, "half", {"batch": 8}), "grouped": (4096, 4096, 4096, HALF, "half", {"groups": 8}),
}


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("name", CASES)
def test_compiles_clean_with_roles(name):
    m, n, k, types, kind, more = CASES[name]
    f = form(m, n, k, types, kind, **more)
    kernels = lower(program(f, more.get("two", False)).func, SM90, {"tl.enable_hopper": True}).kernels
    found = [{x.op for x in walk(kernel.launch) if isinstance(x, Call)} for kernel in kernels]
    assert any({"wgmma", "tma_load", "in_warp_groups"} <= ops for ops in found) and not any("mma" in ops for ops in found)
    for kernel in kernels:
        cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
        assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log


@pytest.mark.parametrize("tile", [dict(overlapping=True), dict(swap_ab=True), {}], ids=str)
@pytest.mark.parametrize("parts", [11, 13])
def test_sums_of_an_odd_number_of_parts_wait_for_their_loads_once(tile, parts):
    """NVRTC unrolls loops of 12 and 14 turns wholly, of 11 and 13 not: each turn waited for its own load."""
    f = Form(176, 184, 12592, HALF, Tile(64, 48, 64, 8, 128, parts, **tile), tb=True)
    _, second = lower(gemm_split(f).func, SM90, {"tl.enable_hopper": True}).kernels
    loops = [x for x in walk(second.launch) if isinstance(x, For) and x.extent == const(parts)]
    assert loops and all(x.kind == "unroll" for x in loops)


def test_which_copies_are_made():
    x = np.zeros((100, 51), np.float16)
    a = operand(x, "a", False)
    assert a.logical == (100, 51) and a.plain and not a.fits(2) and a.strides == ()
    c = copy_of(a, 2, False)
    assert c.shape == (1, 100, 56) and c.operand.fits(2) and c.operand.logical == (100, 51) and c.strides == (5600, 56, 1)
    wide = copy_of(operand(np.zeros((9, 201), np.float16), "a", False), 2, False).operand
    assert wide.down == 256 and wide.row_start(2) == 128 and a.row_start(2) < 128
    turned = copy_of(operand(np.zeros((64, 100), np.int8), "b", False), 1, True)
    assert turned.shape == (1, 100, 64) and turned.operand.transposed and turned.operand.logical == (64, 100)
    view = operand(x.T, "a", True)
    assert view.flipped and not view.transposed and view.logical == (100, 51) and view.view(x.T).shape == (100, 51)
    assert not operand(x[:, ::2], "a", False).plain and not operand(np.broadcast_to(x[0], (9, 51)), "a", False).plain


@pytest.mark.parametrize("element", [np.float32, np.int8])
@pytest.mark.parametrize("turned", [False, True])
def test_a_copy_in_another_order(turned, element):
    """Of rows that take 16 elements each; what lies behind their own may be anything."""
    x = np.arange(2 * 5 * 7).reshape(2, 5, 7).astype(element)
    rows, columns = (7, 5) if turned else (5, 7)
    out = run_tile(repack((2, 5, 7), (35, 7, 1), (rows * 16, 16, 1), np.dtype(element).name, turned).func,
                   {"X": x, "Y": np.zeros((2, rows, 16), element)})["Y"]
    assert np.array_equal(out[:, :, :columns], x.transpose(0, 2, 1) if turned else x)


def test_bytes_change_their_order_by_words():
    """Of tiles that the matrices do not fill; every bit of a byte, and nothing behind the rows."""
    x = np.random.default_rng(0).integers(0, 256, (2, 130, 137)).astype(np.uint8)
    program = lower(repack(x.shape, (130 * 137, 137, 1), (137 * 144, 144, 1), "uint8", True).func, SM90)
    got = run_device(program, {"X": x, "Y": np.zeros((2, 137, 144), np.uint8)}).outputs["Y"]
    assert np.array_equal(got[:, :, :130], x.transpose(0, 2, 1))


@pytest.mark.parametrize("element", ["float32", "int8"])
def test_a_copy_in_the_other_order_is_stored_in_vectors(element):
    """Bytes one by one came at 0.3 TB/s: of 4096 x 4096 the copy took longer than the GEMM (H200)."""
    kernels = lower(repack((1, 200, 304), (200 * 304, 304, 1), (304 * 256, 256, 1), element, True).func, SM90).kernels
    stored = [x for k in kernels for x in walk(k.launch) if isinstance(x, Store) and x.buffer.scope_name == "global"]
    assert stored and all(isinstance(x.indices[-1], Ramp) and x.indices[-1].lanes * x.buffer.dtype.bytes == 16 for x in stored)


def test_float8_needs_a_target_that_has_it():
    x = operand(np.zeros((8, 8), np.int8), "a", False)
    for arch, fine in (("sm_80", False), ("sm_89", True), ("sm_90a", True)):
        p, target = MatmulProblem(8, 8, 8, F8, "fp8", x, x), Target({"kind": "cuda", "arch": arch})
        if fine:
            check_target(p, target)
        else:
            with pytest.raises(ValueError, match="no MMA of float8"):
                check_target(p, target)


LARGE = [((192, 160, 64, 4, 384), HALF, False), ((256, 144, 64, 3, 256), HALF, False), ((128, 96, 64, 7, 128), HALF, False),
         ((192, 176, 128, 4, 384), F8, False), ((128, 176, 128, 5, 256), F8, True), ((192, 128, 128, 4, 384), F8, True)]


@pytest.mark.parametrize("tile, types, two", LARGE, ids=lambda x: str(x[0]) if isinstance(x, tuple) else str(x))
def test_the_large_tiles_of_the_model(tile, types, two):
    """Two tiles and a bit each way, so that the last ones are cut."""
    m, n, k = tile[0] + 40, tile[1] + 24, 3 * tile[2] - 16
    rng = np.random.default_rng(0)
    element = numpy_dtype(dtype(types[0]))
    a, b = (rng.integers(-3, 4, s).astype(element) for s in ((m, k), (n, k)))
    f = Form(m, n, k, (*types[:2], "float32", "float32"), Tile(*tile), tb=True)
    one = np.ones(1, np.float32)
    got = run_device(lower(program(f, two).func, SM90, {"tl.enable_hopper": True}),
                     {"A": a, "B": b, "bias": one, "sa": one, "sb": one, "C": np.zeros((m, n), np.float32)})
    assert np.array_equal(got.outputs["C"], a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.parametrize("tile", [Tile(64, 16, 128, 3, 128, swap_ab=True), Tile(128, 24, 128, 3, 256, swap_ab=True)], ids=str)
def test_block_scales_of_swap_ab_tiles(tile):
    """Rows of the tile are columns of B, which share a scale; each of its columns has one of A."""
    m, n, k = 21, 300, 3 * 128
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(numpy_dtype(dtype("float8_e4m3fn"))) for s in ((m, k), (n, k)))
    sa, sb = (rng.integers(1, 5, s).astype(np.float32) for s in ((m, 3), (-(-n // 128), 3)))
    f = Form(m, n, k, (*F8[:2], "float32", "float32"), tile, tb=True, scaling="block")
    got = run_device(lower(gemm_two_level(f).func, SM90, {"tl.enable_hopper": True}),
                     {"A": a, "B": b, "bias": np.ones(1, np.float32), "sa": sa, "sb": sb, "C": np.zeros((m, n), np.float32)})
    wa, wb = a.astype(np.float64) * sa.repeat(128, 1), b.astype(np.float64) * sb.repeat(128, 0)[:n].repeat(128, 1)
    assert np.array_equal(got.outputs["C"], wa @ wb.T)


def stored(rows, columns, transposed):
    """A compact matrix, op(x) of rows x columns."""
    shape = (columns, rows) if transposed else (rows, columns)
    return Operand(*shape, 0, rows * columns, shape[1], 1, False, transposed)


@pytest.mark.parametrize("ta, tb", [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("m, n", [(1024, 4096), (4096, 1024)])
def test_float32_that_wgmma_does_not_read_from_shared_memory_goes_through_registers(ta, tb, m, n):
    """It wants k contiguous there.  One operand is read from registers; where both have it outermost, the smaller is copied."""
    both, k = ta and not tb, 2048
    found = plan_matmul(MatmulProblem(m, n, k, ("float32",) * 4, "tf32", stored(m, k, ta), stored(k, n, tb)), H200)
    tile = found.form.tile
    assert [x is not None for x in found.copied] == [both and m < n, both and m > n]
    assert tile.from_registers == (ta or not tb) and (tile.swap_ab == (m < n if both else not tb) or not tile.from_registers)


@pytest.mark.parametrize("tile", [Tile(64, 40, 32, 3, 128, swap_ab=True, from_registers=True),
                                  Tile(128, 24, 64, 2, 256, 2, swap_ab=True, from_registers=True),
                                  Tile(128, 64, 32, 3, 256, from_registers=True)], ids=str)
def test_products_of_registers(tile):
    m, n, k = 72, 136, 264
    rng = np.random.default_rng(0)
    ta, tb = not tile.swap_ab, not tile.swap_ab
    a, b = (rng.integers(-3, 4, s).astype(np.float32) for s in ((k, m) if ta else (m, k), (n, k) if tb else (k, n)))
    f = Form(m, n, k, ("float32",) * 4, tile, ta=ta, tb=tb)
    one = np.ones(1, np.float32)
    lowered = lower(program(f).func, SM90, {"tl.enable_hopper": True})
    ops = {x.op for x in walk(lowered.kernels[0].launch) if isinstance(x, Call)}
    assert {"wgmma", "tma_load", "in_warp_groups"} <= ops
    cubin = nvrtc.compile_cubin(print_kernel(lowered.kernels[0]), "sm_90a") if nvrtc.available() else None
    assert cubin is None or cubin.spills == 0 and "C75" not in cubin.log
    got = run_device(lowered, {"A": a, "B": b, "bias": one, "sa": one, "sb": one, "C": np.zeros((m, n), np.float32),
                               **({"W": np.zeros(f.partials_shape, np.float32)} if tile.splits > 1 else {})})
    assert np.array_equal(got.outputs["C"], (a.T if ta else a) @ (b.T if tb else b))


def test_swap_ab_tiles_lie_in_one_block_of_scales():
    for m in (16, 128):
        p = TileProblem(m, 4096, 2048, kind="fp8", bits=8, b_k=True, two_level=True, may_split=False, column_block=128,
                    may_swap_ab=True)
        found = [t for t in candidates(H200, p) if t.swap_ab]
        assert found and all(128 % t.bm == 0 for t in found)
    assert choose_tile(H200, replace(p, m=16)).swap_ab


@pytest.mark.parametrize("bn", [160, 192, 128])
def test_block_scales_of_tiles_that_lie_in_two_blocks(bn):
    m, n, k = 70, 2 * bn + 40, 3 * 128
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(numpy_dtype(dtype("float8_e4m3fn"))) for s in ((m, k), (n, k)))
    sa, sb = (rng.integers(1, 5, s).astype(np.float32) for s in ((m, 3), (-(-n // 128), 3)))
    f = Form(m, n, k, (*F8[:2], "float32", "float32"), Tile(64, bn, 128, 3, 128), tb=True, scaling="block")
    got = run_device(lower(gemm_two_level(f).func, SM90, {"tl.enable_hopper": True}),
                     {"A": a, "B": b, "bias": np.ones(1, np.float32), "sa": sa, "sb": sb, "C": np.zeros((m, n), np.float32)})
    wa = a.astype(np.float64) * sa.repeat(128, 1)
    wb = b.astype(np.float64) * sb.repeat(128, 0)[:n].repeat(128, 1)
    assert np.array_equal(got.outputs["C"], wa @ wb.T)
