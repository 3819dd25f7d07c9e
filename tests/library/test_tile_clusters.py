"""Clusters of tiles in launches of one round that the library asks for: which, their prices, their values."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tilelang.library import matmul, matmul_plan
from tilelang.library.matmul_choices import config
from tilelang.library.matmul_kernels import Form, gemm
from tilelang.library.matmul_plan import Choice, Place, _kernel
from tilelang.library.repack import Rows
from tilelang.library.split_kernels import gemm_split
from tilelang.library.tile_facts import Cut
from tilelang.library.tile_loads import cluster_sizes
from tilelang.library.tiles import Problem, Tile, chip_of, choose_tile, price
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
H200 = replace(chip_of(SM90), units=132)
HALVES = ("float16", "float16", "float16", "float32")


def lined(m, n, k, order, **more):
    """A product of 16-bit operands stored without gaps, as matmul asks for it."""
    a_k, b_k = order[0] == "n", order[1] == "t"
    return Problem(m, n, k, a_k=a_k, b_k=b_k, a_rows=math.gcd(2 * (k if a_k else m), 128),
                   b_rows=math.gcd(2 * (k if b_k else n), 128), may_turn=True, may_move=True, **more)


def test_cluster_sizes_fit_the_grid_and_the_machine():
    p = lined(4184, 536, 408, "nn")
    assert cluster_sizes(H200, p, Tile(192, 112, 64, 5, 384, turned=True, staged=True)) == [(1, 1), (2, 1), (4, 1)]  # 38 x 3
    assert (1, 4) in cluster_sizes(H200, p, Tile(128, 200, 64, 4, 256, wide=256))  # 33 x 3 tiles: 36 x 3
    assert cluster_sizes(H200, p, Tile(128, 136, 64, 4, 256, wide=192)) == [(1, 1), (2, 1)]  # 33 x 4, none over
    assert cluster_sizes(H200, lined(8192, 8192, 512, "nt"), Tile(128, 128, 64, 4, 256)) == []


def test_what_is_asked_for_decides_the_price():
    p, t = lined(2528, 456, 392, "nt"), Tile(64, 152, 64, 7, 128)  # 5.2 us alone, 4.6 in clusters of 1 x 4
    alone, four = (price(H200, p, replace(t, cluster=c)) for c in ((1, 1), (1, 4)))
    assert price(H200, p, t) == alone > 1.04 * four


@pytest.mark.parametrize("of", [{"kind": "int8", "bits": 8, "out_bits": 32}, {"two_level": True}, {"open_rows": True}], ids=str)
def test_other_products_keep_the_compilers_clusters(of):
    for shape in ((2528, 456, 392, "nt"), (1000, 1000, 1000, "nt")):
        assert not choose_tile(H200, lined(*shape, **of)).cluster


TILE = Tile(64, 72, 64, 3, 128, panel=2, soon=True)
PLACES = {
    "side_by_side": (130, 200, 136, replace(TILE, cluster=(2, 1)), False),
    "last_ones_lack_tiles": (190, 200, 136, replace(TILE, cluster=(2, 2)), True),
    "four": (250, 136, 200, replace(TILE, cluster=(1, 4)), True),
    "moved": (250, 136, 200, replace(TILE, cluster=(1, 2), moved=True, staged=True), True),
    "turned": (200, 128, 136, replace(TILE, cluster=(3, 2), turned=True, staged=True), False),
    "parts": (120, 136, 512, replace(TILE, cluster=(2, 2), parts=2), True),
    "wide": (130, 200, 136, replace(TILE, cluster=(1, 3), wide=128), False),
    "alone": (130, 200, 136, replace(TILE, cluster=(1, 1)), False),
}


@pytest.mark.parametrize("name", PLACES)
def test_values_in_clusters(name):
    """Products of small integers on the device simulator, which sees every element loaded and stored; the library's text."""
    m, n, k, t, tb = PLACES[name]
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((m, k), (k, n)))
    f = Form(m, n, k, HALVES, t, 0, False, tb)
    one = np.ones(1, np.float32)
    space = {"W": np.full(f.sums_shape, np.nan, np.float32)} if t.parts > 1 else {}
    program = lower((gemm_split if t.parts > 1 else gemm)(f).func, SM90, {"tl.enable_hopper": True, "tl.cluster": t.cluster})
    got = run_device(program, {"A": a, "B": np.ascontiguousarray(b.T) if tb else b, "bias": one, "sa": one, "sb": one, **space,
                               "C": np.full((m, n), np.nan, np.float16)})
    assert np.array_equal(got.outputs["C"], (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16))


def test_kernels_have_the_clusters_that_are_asked_for():
    f = Form(250, 136, 200, HALVES, replace(TILE, cluster=(1, 4)), tb=True)

    def report(form, copies=(None, None)):
        return str(_kernel.__wrapped__(form, False, Place(SM90, None), copies).report())

    assert "clusters of 4" in report(f) and "clusters of" not in report(replace(f, tile=TILE))
    copies = tuple(Rows(0, rows, 203, 0, 203, 208, "float16") for rows in (250, 136))
    odd = report(replace(f, k=203, a_strides=(208, 1), b_strides=(208, 1)), copies)
    assert odd.count("clusters of 4 x 1 x 1") == 1  # the product's launch, not that of the copy
    assert "clusters of" not in report(replace(f, cut=Cut(0, 128, TILE)))


def test_a_choice_says_its_cluster():
    f = Form(250, 136, 200, HALVES, replace(TILE, cluster=(1, 4)), tb=True)
    assert config(Choice(f))["tile"]["cluster"] == [1, 4] and "cluster" not in config(Choice(replace(f, tile=TILE)))["tile"]


def test_the_library_asks_for_them(monkeypatch):
    """Through matmul itself."""
    asked = []
    real = matmul_plan.compile_program
    monkeypatch.setattr(matmul_plan, "compile_program", lambda *a, **k: asked.append(k["pass_configs"]) or real(*a, **k))
    monkeypatch.setattr(matmul_plan, "choose_tile", lambda chip, p: replace(TILE, cluster=(1, 2), seconds=1e-6))
    monkeypatch.setattr(matmul_plan, "choose_cut", lambda chip, p, t: None)
    a, b = (np.random.default_rng(1).integers(-1, 2, s).astype(np.float16) for s in ((130, 72), (72, 88)))
    got = matmul(a, b, target={"kind": "cuda", "arch": "sm_90a"}, execution_backend="simulator")
    assert np.array_equal(got, a.astype(np.float64) @ b.astype(np.float64))
    assert [x["tl.cluster"] for x in asked] == [(1, 2)]
