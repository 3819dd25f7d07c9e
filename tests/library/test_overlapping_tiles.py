"""Where the tiles of products lie, and in which order blocks take them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from lone_launch import lone_seconds
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import walk
from tilelang.ir.expr import Call
from tilelang.library import matmul
from tilelang.library.gemm.build import Place, compiled
from tilelang.library.gemm.kernels import Form, gemm
from tilelang.library.gemm.kernels import gemm_split
from tilelang.library.gemm.tile import Tile, TileProblem, chip_of, without_wgmma
from tilelang.library.gemm.tile_candidates import candidates
from tilelang.library.gemm.tile_cost import choose_tile, estimate_seconds as seconds, finished, uses_pdl
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
H200 = replace(chip_of(SM90), sms=132)


def lined(m, n, k, order, **more):
    return TileProblem(m, n, k, b_k=order == "nt", a_rows=math.gcd(2 * k, 128),
                   b_rows=math.gcd(2 * (k if order == "nt" else n), 128), may_swap_ab=True, **more)


def check(m, n, k, tile, batch=0, ta=False, tb=True, bias=False, out="float32"):
    """A product of small integers on the device simulator, which sees every element loaded and stored."""
    rng = np.random.default_rng(0)
    lead = (batch,) if batch else ()
    a, b = (rng.integers(-3, 4, (*lead, *s)).astype(np.float16) for s in ((m, k), (k, n)))
    f = Form(m, n, k, ("float16", "float16", out, "float32"), tile, batch, ta, tb, bias="float32" if bias else "")
    one, space = np.ones(1, np.float32), {}
    added = np.arange(n, dtype=np.float32) if bias else one
    if tile.splits > 1:
        space = {"W": np.full(f.partials_shape, np.nan, np.float32)}
    program = (gemm_split if tile.splits > 1 else gemm)(f)
    got = run_device(lower(program.func, SM90, {"tl.enable_hopper": True}),
                     {"A": np.ascontiguousarray(a.swapaxes(-1, -2)) if ta else a,
                      "B": np.ascontiguousarray(b.swapaxes(-1, -2)) if tb else b, "bias": added, "sa": one, "sb": one, **space,
                      "C": np.full((*lead, m, n), np.nan, out)})
    want = a.astype(np.float64) @ b.astype(np.float64) + (added if bias else 0)
    assert np.array_equal(got.outputs["C"], want.astype(out))


@pytest.mark.parametrize("shape, near", [
    ((4096, 128, 4096), "a"), ((4096, 256, 4096), "a"), ((256, 4096, 4096), "b"), ((128, 4096, 14336), "b"),
    ((1024, 1024, 4096), ""), ((4096, 4096, 4096), ""), ((4096, 1024, 8192), "")])
def test_neighbours_share_the_larger_operand(shape, near):
    """In one round, where it is by far the larger; turned tiles change the sides."""
    m, n, _ = shape
    t = choose_tile(H200, lined(*shape, "nt"))
    rows = -(-(n if t.swap_ab else m) // t.bm)
    near = {"a": "b", "b": "a"}.get(near, "") if t.swap_ab else near
    if t.order == "row" and near:
        assert t.panel_size == (rows if near == "b" else 1)
    columns = -(-(m if t.swap_ab else n) // t.bn)
    places = [(t.panel_size * (k // (t.panel_size * columns)) + k % t.panel_size, k // t.panel_size % columns)
              for k in range(48)] if t.order == "row" else []
    for at in range(0, len(places) - 16, 5):  # of a port, of whole rasterisation panels
        down, across = ({x[side] for x in places[at:at + 16]} for side in (0, 1))
        assert len(down) * t.bm + len(across) * t.bn <= 0.5 * 16 * (t.bm + t.bn)


def test_split_sums_of_blocks_column_by_column():
    check(100, 130, 300, Tile(64, 64, 64, 3, 128, splits=2, panel_size=2))


SPLIT = Tile(64, 72, 64, 3, 128, splits=2, overlapping=True)
OVERLAPPING = replace(SPLIT, splits=1, panel_size=2, staged=True)
TURNED = replace(OVERLAPPING, swap_ab=True)
STAGED = replace(TURNED, overlapping=False)
PLACES = {
    "moved": (100, 200, 200, OVERLAPPING, {}), "moved_nn_batched": (100, 96, 136, OVERLAPPING, {"batch": 2, "tb": False}),
    "moved_tn": (104, 80, 136, OVERLAPPING, {"ta": True, "tb": False}), "rows_only": (100, 40, 136, OVERLAPPING, {}),
    "columns_only": (40, 100, 136, OVERLAPPING, {"bias": True}), "whole": (128, 144, 128, OVERLAPPING, {}),
    "split": (100, 90, 300, replace(SPLIT, panel_size=2), {}),
    "split_batched": (100, 90, 300, SPLIT, {"batch": 2}),
    "split_turned": (90, 104, 300, replace(SPLIT, swap_ab=True), {"tb": False}), "turned": (90, 104, 136, TURNED, {}),
    "staged": (90, 104, 136, STAGED, {"bias": True}),
    "staged_nn": (90, 104, 136, STAGED, {"tb": False, "batch": 2}),
    "staged_odd": (90, 99, 136, STAGED, {}), "turned_half": (90, 104, 136, TURNED, {"out": "float16", "bias": True}),
    "staged_half": (90, 104, 136, STAGED, {"out": "float16", "bias": True, "batch": 2}),
    "staged_half_odd": (90, 99, 136, replace(STAGED, bm=128, threads=256, stages=2), {"out": "float16"}),
    "staged_groups": (200, 104, 136, Tile(192, 136, 64, 2, 384, swap_ab=True, staged=True), {"out": "float16", "tb": False}),
    "moved_half": (100, 200, 200, OVERLAPPING, {"out": "float16"}), "split_turned_only": (
        90, 104, 300, replace(SPLIT, swap_ab=True, overlapping=False), {"bias": True, "out": "float16", "batch": 2}),
    "turned_bias": (90, 104, 136, TURNED, {"bias": True}),
    "wide": (100, 200, 136, Tile(64, 72, 64, 3, 128, wide=128), {"tb": False}),
    "wide_moved": (100, 200, 200, replace(OVERLAPPING, wide=128), {"tb": False}),
    "wide_split": (100, 200, 300, replace(SPLIT, wide=128), {"tb": False}),
}


@pytest.mark.parametrize("name", PLACES)
def test_values_wherever_tiles_lie(name):
    m, n, k, tile, more = PLACES[name]
    check(m, n, k, tile, **more)


def test_tiles_leave_in_whole_vectors():
    """Turned ones by stmatrix, in boxes; those of which only some goes, from shared memory."""
    f = Form(100, 200, 200, ("float16", "float16", "float16", "float32"), STAGED)
    for tile in (STAGED, replace(STAGED, staged=False)):
        text = printed(replace(f, tile=tile))
        assert "tl::stmatrix_x4_trans(" in text and "tl::tma_store_2d(" in text and "&C[" not in text
    for tile, matrix in ((TURNED, "_trans("), (OVERLAPPING, "tl::stmatrix_x")):
        text = printed(replace(f, tile=tile))
        assert matrix in text and "tl::copy<half_t, 8>(&C[" in text and "tma_store" not in text
    wide = ("float16", "float16", "float32", "float32")  # which stmatrix does not turn
    for tile, staged in ((STAGED, True), (replace(STAGED, staged=False), False)):
        assert ("tl::tma_store_2d(&Cs" in printed(replace(f, types=wide, tile=tile))) == staged


def test_sums_of_parts_leave_in_boxes():
    """Whole tiles, wherever they lie in C; the second launch reads neighbouring sums by neighbouring threads."""
    for tile in (SPLIT, replace(SPLIT, swap_ab=True), replace(SPLIT, swap_ab=True, overlapping=False)):
        f = Form(100, 200, 300, ("float16", "float16", "float16", "float32"), tile, tb=True)
        down, across = (200, 100) if tile.swap_ab else (100, 200)
        assert f.partials_shape == (2, -(-down // 64) * 64, -(-across // 72) * 72)
        first, second = lower(gemm_split(f).func, SM90, {"tl.enable_hopper": True}).kernels
        assert "tl::tma_store_3d(" in print_kernel(first) and "&W[" not in print_kernel(first)
        assert ("const int j = tx & 31;" if tile.swap_ab else "const int j = tx & 63;") in print_kernel(second)
    assert replace(f, tile=replace(SPLIT, overlapping=False), batch=3).partials_shape == (6, 100, 200)


def printed(f):
    (kernel,) = lower(gemm(f).func, SM90, {"tl.enable_hopper": True}).kernels
    calls = [x.op for x in walk(kernel.launch) if isinstance(x, Call)]
    assert calls.count("tma_load") >= 2 and "wgmma" in calls
    return print_kernel(kernel)


def chosen(m, n, k, order, **more):
    return choose_tile(H200, lined(m, n, k, order, may_overlap=True, **more))


def test_what_the_model_chooses():
    """Tiles of one round that fill the machine; measured on an H200."""
    t = chosen(1536, 1536, 1536, "nn")  # 12.2 us; 192x96 of whole panels 12.6
    assert (t.bm, t.bn, t.wide) == (128, 144, 0) and t.swap_ab and t.staged
    t = chosen(788, 3072, 768, "nt")
    assert (t.bm, t.bn) == (256, 72) and t.swap_ab and t.staged
    t = chosen(10000, 200, 1000, "nt")
    assert (t.bm, t.bn) == (192, 104)
    for k, order in ((1000, "nt"), (1000, "nn"), (4000, "nn")):  # in clusters of 2 x 4 or 1 x 4, NT 6.5 and 6.4 us
        t = chosen(1000, 1000, k, order)
        assert (t.bm, t.bn) in ((128, 72), (64, 144)) and (t.swap_ab or order == "nt")
    t = chosen(1000, 1000, 4000, "nt")  # rows in whole sectors
    assert sorted((t.bm, t.bn)) == [64, 128]
    known, t = lined(1000, 1000, 1000, "nt"), Tile(128, 72, 64, 8, 128)
    assert seconds(H200, replace(known, open_rows=True), t) > seconds(H200, known, t)  # no clusters of 8
    odd = [chosen(4088, 4104, 4120, order) for order in ("nt", "nn")]  # rows across sectors, several rounds
    assert [(t.bm, t.bn) for t in odd] == [(192, 176), (192, 176)]
    assert chosen(800, 800, 8000, "nn").swap_ab and chosen(100, 4096, 4096, "nt").overlapping
    large = lined(8192, 8192, 4096, "nn", may_overlap=True)
    assert not any(t.overlapping or t.staged or t.wide for t in candidates(H200, large))
    assert not any(t.overlapping for t in candidates(H200, lined(1000, 1000, 1000, "nt")))
    assert not chosen(1000, 1048, 328, "nt").overlapping  # too few steps to feel it
    small = replace(lined(200, 3000, 2048, "nt", may_overlap=True), kind="int8", bits=8, out_bits=32)
    assert all(t.bn % 16 == 0 for t in candidates(H200, small)) and any(t.overlapping for t in candidates(H200, small))


def test_weights_that_fill_l2_were_read_from_far_sms_with_pdl():
    """7 rows, NN: 45 MB 9.0 us on an H200, 16.0 with PDL; 128 rows, 34 MB 8.4, 10.5; 16 rows, 34 MB 6.4, 6.0."""
    assert not any(chosen(*s, "nn").pdl for s in ((7, 11008, 2048), (64, 11008, 2048), (128, 8192, 2048), (32, 10240, 2048)))
    assert all(chosen(*s, "nn").pdl for s in ((7, 8192, 2048), (16, 8192, 2048), (7, 16384, 2560), (500, 4096, 2048)))


def test_launches_that_start_soon():
    """In clusters, short loops, few short rounds; not where loads of neighbours would come apart (H200, both ways timed)."""
    for m, n, k, order in ((1000, 1000, 1000, "nt"), (1024, 1024, 1024, "nt"), (512, 512, 512, "nt"), (200, 10000, 1000, "nt"),
                           (1000, 1048, 328, "nt"), (3192, 544, 528, "nn"), (6312, 1144, 224, "nn"), (216, 8056, 840, "nn")):
        t = chosen(m, n, k, order)
        assert t.pdl and uses_pdl(H200, lined(m, n, k, order), t)
    assert not any(chosen(*s, "nt").pdl for s in ((1024, 1024, 4096), (128, 4096, 14336), (4096, 4096, 4096)))
    p, t = lined(1024, 1024, 1024, "nt"), Tile(64, 128, 64, 8, 128)
    assert uses_pdl(H200, p, t) and not uses_pdl(H200, replace(p, open_rows=True), t)
    assert not uses_pdl(without_wgmma(H200), p, t)
    assert uses_pdl(H200, replace(p, kind="int8", bits=8, out_bits=32), t)  # 1024 cubed: 4.4 us, then 3.7
    done = finished(H200, p, t)
    assert done == replace(t, pdl=True, panel_size=done.panel_size, order=done.order)


@pytest.mark.parametrize("splits", [1, 2])
def test_what_starts_soon_waits_before_it_touches_memory(splits):
    """The library's own way to a kernel: the wait stands in front of every access, and lets the next one start."""
    f = Form(96, 72, 512, ("float16", "float16", "float16", "float32"), Tile(64, 72, 64, 3, 128, splits, pdl=True), tb=True)
    for soon in (True, False):
        kernel = compiled(replace(f, tile=replace(f.tile, pdl=soon)), False, Place(SM90, None))
        first = kernel.get_kernel_source().split("// ---- next")[0]
        assert ("griddepcontrol.launch_dependents" in first) == soon == ("  tl::pdl_sync();" in first)
        body = first[first.index("__global__"):]
        if soon:
            assert body.index("tl::pdl_sync()") < body.index("tl::pdl_trigger()") < body.index("tl::tma_load")


PRICES = {
    (800, 800, 8000, "nn", 64, 160, 64, 7, 128, 2): ("swap_ab", 21.7),
    (1152, 328, 10624, "nt", 128, 168, 64, 5, 256, 7): ("overlapping", 18.6),
    (1536, 1536, 1536, "nn", 192, 96, 64, 4, 384, 1): ("wide", 12.4),
    (768, 3072, 768, "nn", 192, 96, 64, 4, 384, 1): ("wide", 7.6),
    (384, 1536, 6144, "nn", 192, 96, 64, 4, 384, 4): ("wide", 15.8),
    (788, 3072, 768, "nt", 256, 72, 64, 4, 256, 1): ("staged", 7.9),
    (1536, 1536, 1536, "nn", 192, 96, 64, 5, 384, 1): ("staged", 12.9),
    (800, 800, 8000, "nt", 64, 160, 64, 7, 128, 2): ("overlapping", 22.0),
    (4384, 2232, 2824, "nn", 128, 200, 64, 4, 256, 1): ("staged", 86.4),
    (216, 8056, 840, "nn", 128, 112, 64, 6, 256, 1): ("staged", 9.6),
    (10000, 200, 1000, "nt", 192, 104, 64, 5, 384, 1): ("overlapping", 11.1),
}


@pytest.mark.parametrize("kernel", PRICES, ids=str)
def test_prices_are_near_what_was_measured(kernel):
    """Microseconds on an H200."""
    how, measured = PRICES[kernel]
    t = Tile(*kernel[4:], swap_ab=how in ("swap_ab", "staged"), overlapping=how == "moved",
             staged=how == "staged" or how == "moved" and kernel[9] == 1,
             wide=128 if how == "wide" else 0)
    assert lone_seconds(H200, lined(*kernel[:4]), t) * 1e6 == pytest.approx(measured, rel=0.12)


def test_the_library_takes_them():
    """Through matmul itself, with 16-bit results."""
    m, n, k = 72, 88, 840
    t = chosen(m, n, k, "nn")
    assert t.overlapping and t.staged and t.swap_ab
    a, b = (np.random.default_rng(1).integers(-1, 2, s).astype(np.float16) for s in ((m, k), (k, n)))
    got = matmul(a, b, bias=np.full(n, 3, np.float16), target={"kind": "cuda", "arch": "sm_90a"}, execution_backend="simulator")
    assert got.dtype == np.float16 and np.array_equal(got, a.astype(np.float64) @ b.astype(np.float64) + 3)
