"""Clusters of tiles in launches of one round that the library asks for: which, their prices, their values."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tilelang.library import matmul, place
from tilelang.library.gemm import plan as matmul_plan
from tilelang.library.gemm.build import Place, compiled
from tilelang.library.gemm.kernels import Form, gemm
from tilelang.library.gemm.load_cost import cluster_sizes
from tilelang.library.gemm.plan import MatmulPlan
from tilelang.library.gemm.repack import Rows
from tilelang.library.gemm.kernels import gemm_split
from tilelang.library.gemm.tile import Tile, TileProblem, chip_of
from tilelang.library.gemm.tile_candidates import candidates
from tilelang.library.gemm.tile_cost import choose_tile, estimate_seconds, uses_pdl
from tilelang.library.gemm.tuning_candidates import config
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
H200 = replace(chip_of(SM90), sms=132)
HALVES = ("float16", "float16", "float16", "float32")


def lined(m, n, k, order, **more):
    """A product of 16-bit operands stored without gaps, as matmul asks for it."""
    a_k, b_k = order[0] == "n", order[1] == "t"
    return TileProblem(m, n, k, a_k=a_k, b_k=b_k, a_rows=math.gcd(2 * (k if a_k else m), 128),
                   b_rows=math.gcd(2 * (k if b_k else n), 128), may_swap_ab=True, may_overlap=True, **more)


def test_cluster_sizes_fit_the_grid_and_the_machine():
    p = lined(4184, 536, 408, "nn")
    assert cluster_sizes(H200, p, Tile(192, 112, 64, 5, 384, swap_ab=True, staged=True)) == [(2, 1), (4, 1)]  # 38 x 3 tiles
    assert (1, 4) in cluster_sizes(H200, p, Tile(128, 200, 64, 4, 256, wide=256))  # 33 x 3 tiles: 36 x 3
    assert cluster_sizes(H200, p, Tile(128, 136, 64, 4, 256, wide=192)) == [(2, 1)]  # 33 x 4, none over
    assert cluster_sizes(H200, lined(8192, 8192, 512, "nt"), Tile(128, 128, 64, 4, 256)) == []
    assert cluster_sizes(H200, lined(752, 736, 2928, "nt"), Tile(64, 96, 64, 8, 128)) == [(4, 2), (2, 4)]


def test_what_is_asked_for_decides_the_price():
    p, t = lined(2528, 456, 392, "nt"), Tile(64, 152, 64, 7, 128)  # 5.2 us alone, 4.6 in clusters of 1 x 4
    alone, four = (estimate_seconds(H200, p, replace(t, cluster=c)) for c in ((1, 1), (1, 4)))
    assert estimate_seconds(H200, p, t) == alone > 1.04 * four


@pytest.mark.parametrize("of", [{"kind": "int8", "bits": 8, "out_bits": 32}, {"two_level": True}, {"open_rows": True}], ids=str)
def test_other_products_keep_the_compilers_clusters(of):
    for shape in ((2528, 456, 392, "nt"), (1000, 1000, 1000, "nt")):
        assert not choose_tile(H200, lined(*shape, **of)).cluster


# Timed on an H200 (benchmarks/results/2026-11-23-h200-clusters.json): bm, bn, stages, threads, turned, moved, staged, wide,
# cluster, microseconds; all start soon.
TIMED = {
    (4184, 536, 408, "nn"): [
        (192, 112, 5, 384, "ts", (4, 1), 6.7), (192, 96, 5, 384, "ts", (2, 1), 6.8), (256, 96, 4, 256, "w", (2, 4), 8.5),
        (128, 168, 5, 256, "ts", (2, 1), 7.8), (192, 96, 5, 384, "ts", (1, 1), 8.7)],
    (2528, 456, 392, "nt"): [
        (64, 152, 7, 128, "", (1, 4), 4.7), (128, 80, 7, 256, "", (2, 2), 4.9), (64, 152, 7, 128, "", (1, 1), 5.2),
        (256, 48, 5, 256, "", (2, 4), 7.1), (128, 88, 7, 256, "ts", (1, 2), 5.5)],
    (104, 3832, 480, "tt"): [
        (64, 64, 8, 128, "", (4, 1), 3.5), (64, 64, 8, 128, "", (1, 1), 4.5), (64, 64, 8, 128, "", (1, 2), 4.9)],
    (3800, 208, 4544, "nn"): [
        (128, 64, 8, 256, "tms", (4, 2), 15.6), (128, 64, 8, 256, "tms", (2, 2), 17.6), (128, 64, 8, 256, "tms", (2, 1), 20.7),
        (64, 120, 8, 128, "tms", (1, 1), 18.4)],
    # 2026-11-23-h200-half-filled.json: rows that lie in few lines, tiles of 8 columns, one operand for each unit alone.
    (5632, 8, 728, "tn"): [(64, 16, 8, 128, "", (1, 4), 3.85), (64, 16, 8, 128, "", (1, 1), 4.8)],
    (15704, 8, 736, "tn"): [
        (128, 8, 8, 256, "", (1, 2), 7.3), (128, 8, 8, 256, "", (1, 1), 8.1), (128, 16, 8, 128, "", (1, 1), 9.6)],
    (64, 12776, 1248, "nn"): [(64, 128, 8, 128, "", (1, 1), 8.96), (64, 128, 8, 128, "", (4, 1), 9.85)],
    (5696, 40, 1752, "nt"): [(64, 40, 8, 128, "", (1, 4), 5.55), (64, 48, 8, 128, "", (1, 4), 6.7)],
    (752, 736, 2928, "nt"): [(64, 80, 8, 128, "tms", (2, 4), 8.2), (64, 80, 8, 128, "tms", (1, 4), 8.9)],
}


def timed(bm, bn, stages, threads, how, cluster):
    return Tile(bm, bn, 64, stages, threads, swap_ab="t" in how, overlapping="m" in how, staged="s" in how,
                wide=-(-bn // 64) * 64 if "w" in how else 0, cluster=cluster)


@pytest.mark.parametrize("shape", TIMED, ids=str)
def test_clusters_are_priced_in_their_order(shape):
    p = lined(*shape)
    priced = [(estimate_seconds(H200, p, timed(*t)) * 1e6, us) for *t, us in TIMED[shape]]
    assert min(priced)[1] <= 1.05 * min(us for _, us in priced)
    assert all(abs(math.log(x / us)) < 0.25 for x, us in priced)


def test_what_the_model_chooses():
    """Tiles in clusters that the compiler would not make; before them 8.6, 5.8, 4.5, 10.8 us."""
    for shape, size, cluster in (((4184, 536, 408, "nn"), (192, 112), (4, 1)), ((2528, 456, 392, "nt"), (64, 152), (1, 4)),
                                 ((104, 3832, 480, "tt"), (64, 64), (4, 2)), ((752, 736, 2928, "nt"), (64, 80), (2, 4))):
        t = choose_tile(H200, lined(*shape))
        assert (t.bm, t.bn) == size and t.cluster == cluster and t.pdl
    assert not choose_tile(H200, lined(1000, 1000, 4000, "nt")).cluster  # 64x128 15.2 us, in pairs 18.0
    assert not choose_tile(H200, lined(1024, 1024, 1024, "nt")).cluster


def test_tiles_of_half_of_the_machine_and_of_eight_columns():
    """What had not been offered: 6.7, 5.4, 4.2, 9.6 us by the tiles chosen before, 5.5, 4.8, 4.05, 7.3 by these."""
    for shape, size, batch in (((5696, 40, 1752, "nt"), (64, 40), 1), ((160, 520, 216, "nt"), (192, 80), 16),
                               ((4520, 88, 600, "tt"), (64, 88), 1), ((15704, 8, 736, "tn"), (128, 8), 1)):
        t = choose_tile(H200, lined(*shape, batch=batch))
        assert (t.bm, t.bn) == size


def test_rings_of_several_rounds_hold_the_next_tiles():
    """Beside all of a tile that leaves: 64 x 1x4096x128 18.3 us with 6 stages, 23.3 with the 3 of one tile; 128x192 at
    4808x2768x96 13.7, 11.9, 15.2 with 3, 4, 5."""
    t = choose_tile(H200, lined(1, 4096, 128, "nn", batch=64))
    assert (t.bm, t.bn, t.stages) == (256, 8, 6)
    rings = {(t.bm, t.bn, t.bk, t.swap_ab): t.stages for t in candidates(H200, lined(4808, 2768, 96, "nn"))}
    assert (rings[128, 192, 64, False], rings[192, 192, 64, False]) == (4, 3)
    # Steps that divide k are smaller, where both operands allow them; behind results that L2 does not hold, three tiles wait.
    found = {(t.bm, t.bn, t.bk, t.stages) for t in candidates(H200, lined(1008, 1448, 32, "tn", batch=158))}
    assert (256, 128, 32, 3) in found and all(bk == 32 or bk == 128 for *_, bk, _ in found)
    assert {t.stages for t in candidates(H200, lined(1024, 1024, 128, "nt")) if (t.bm, t.bn, t.bk) == (64, 128, 64)} == {3}


def test_panels_of_64_bytes_are_offered_in_one_round():
    """64x160 at 7320x160x496 NN 4.4 us, 4.6 with whole panels; over two rounds 128x160 at 320x14456x1648 TN 32.5, 31.5."""
    def loaded(bm, bn, *shape):
        return {t.wide for t in candidates(H200, lined(*shape)) if (t.bm, t.bn, t.swap_ab) == (bm, bn, shape[-1] == "tn")}

    assert loaded(64, 160, 7320, 160, 496, "nn") == {0, 192} and loaded(128, 160, 320, 14456, 1648, "tn") == {192}


def test_few_small_tiles_start_soon():
    """64x16 tiles, 72 of them, at 240x280x928 NN 3.7 us, then 3.1; 102 of 128x192 at 4184x536x408 8.9, then 9.9."""
    t = choose_tile(H200, lined(240, 280, 928, "nn"))
    assert (t.bm, t.pdl) == (64, True)
    assert not uses_pdl(H200, lined(4184, 536, 408, "nn"), Tile(128, 192, 64, 4, 256, cluster=(1, 1)))


TILE = Tile(64, 72, 64, 3, 128, panel_size=2, pdl=True)
PLACES = {
    "side_by_side": (130, 200, 136, replace(TILE, cluster=(2, 1)), False),
    "last_ones_lack_tiles": (190, 200, 136, replace(TILE, cluster=(2, 2)), True),
    "four": (250, 136, 200, replace(TILE, cluster=(1, 4)), True),
    "moved": (250, 136, 200, replace(TILE, cluster=(1, 2), overlapping=True, staged=True), True),
    "turned": (200, 128, 136, replace(TILE, cluster=(3, 2), swap_ab=True, staged=True), False),
    "parts": (120, 136, 512, replace(TILE, cluster=(2, 2), splits=2), True),
    "eight_columns": (300, 8, 200, Tile(128, 8, 64, 4, 256, pdl=True, cluster=(1, 3)), False),
    "panels_of_64_bytes": (130, 160, 200, Tile(64, 160, 64, 3, 128, cluster=(1, 3)), False),
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
    space = {"W": np.full(f.partials_shape, np.nan, np.float32)} if t.splits > 1 else {}
    program = lower((gemm_split if t.splits > 1 else gemm)(f).func, SM90, {"tl.enable_hopper": True, "tl.cluster": t.cluster})
    got = run_device(program, {"A": a, "B": np.ascontiguousarray(b.T) if tb else b, "bias": one, "sa": one, "sb": one, **space,
                               "C": np.full((m, n), np.nan, np.float16)})
    assert np.array_equal(got.outputs["C"], (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16))


def test_kernels_have_the_clusters_that_are_asked_for():
    f = Form(250, 136, 200, HALVES, replace(TILE, cluster=(1, 4)), tb=True)

    def report(form, copies=(None, None)):
        return str(compiled(form, False, Place(SM90, None), copies).report())

    assert "clusters of 4" in report(f) and "clusters of" not in report(replace(f, tile=TILE))
    copies = tuple(Rows(0, rows, 203, 0, 203, 208, "float16") for rows in (250, 136))
    odd = report(replace(f, k=203, a_strides=(208, 1), b_strides=(208, 1)), copies)
    assert odd.count("clusters of 4 x 1 x 1") == 1  # the GEMM's launch, not that of the copy


def test_a_choice_says_its_cluster():
    f = Form(250, 136, 200, HALVES, replace(TILE, cluster=(1, 4)), tb=True)
    assert config(MatmulPlan(f))["tile"]["cluster"] == [1, 4]
    assert "cluster" not in config(MatmulPlan(replace(f, tile=TILE)))["tile"]


def test_the_library_asks_for_them(monkeypatch):
    """Through matmul itself."""
    asked = []
    real = place.compile
    monkeypatch.setattr(place, "compile", lambda *a, **k: asked.append(k["pass_configs"]) or real(*a, **k))
    monkeypatch.setattr(matmul_plan, "choose_tile", lambda chip, p: replace(TILE, cluster=(1, 2), seconds=1e-6))
    a, b = (np.random.default_rng(1).integers(-1, 2, s).astype(np.float16) for s in ((130, 72), (72, 88)))
    got = matmul(a, b, target={"kind": "cuda", "arch": "sm_90a"}, execution_backend="simulator")
    assert np.array_equal(got, a.astype(np.float64) @ b.astype(np.float64))
    assert [x["tl.cluster"] for x in asked] == [(1, 2)]
