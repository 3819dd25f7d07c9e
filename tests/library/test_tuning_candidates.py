"""What the library has timed for a product: the model's choice first, all different, all right."""

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tilelang.library import flash_attention, flash_decode, grouped_matmul, matmul, tuning
from tilelang.library.attention.flash_decode import decode_splits, decode_tile, near_choices
from tilelang.library.attention.decode_problem import DecodeSizes
from tilelang.library.attention.problem import Mask, Sizes
from tilelang.library.attention.tile_cost import attention_tile, machine_of, near_tiles
from tilelang.library.attention.tuning_candidates import rounded
from tilelang.library.gemm import plan as matmul_plan, tuning_candidates as matmul_choices
from tilelang.library.gemm.build import Place
from tilelang.library.gemm.operands import operand
from tilelang.library.gemm.plan import plan_matmul, sized, tile_problem
from tilelang.library.gemm.problem import MatmulProblem
from tilelang.library.gemm.tile import chip_of
from tilelang.library.gemm.tuning_candidates import by_cost, choices, config, key, of_all_kinds
from tilelang.target import Target

SM90, SM80 = (Target({"kind": "cuda", "arch": x}) for x in ("sm_90a", "sm_80"))
H200 = replace(chip_of(SM90), sms=132)
HALF = ("float16",) * 3 + ("float32",)


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    chip = Place.chip.fget
    monkeypatch.setattr(Place, "chip", property(lambda self: H200 if self.target == SM90 else chip(self)))


def chip(target):
    return Place(target, None).chip


def asked(m, n, k, tb=False, kind="half", types=HALF, **more):
    """Of operands that lie compact."""
    a, b = (np.broadcast_to(np.zeros((), np.int8), s) for s in ((m, k), (n, k) if tb else (k, n)))
    a, b = (np.lib.stride_tricks.as_strided(x, x.shape, (x.shape[1], 1)) for x in (a, b))
    return MatmulProblem(m, n, k, types, kind, operand(a, "a", False), operand(b, "b", tb), **more)


SHAPES = {  # and what there is to choose for whatever the costs are
    "408x1240x10584 NT": (dict(tb=True), ()), "680x4000x1720 NN": ({}, ()), "4384x2232x2824 NN": ({}, ()),
    "15212x74x2692 NT": (dict(tb=True), ("copied", "plain")), "2x4097x4097 NT": (dict(tb=True), ("copied", "plain")),
    "1x4097x4097 NN": ({}, ("gemv", "copied", "plain")), "1000x1000x1000 sm_80": ({}, ("plain",))}


def kinds_of(names):
    return {k for n in names for k in (*n, *n.get("tile", {}))} | {"plain" for n in names if set(n) == {"tile"}}


@pytest.mark.parametrize("name", SHAPES)
def test_the_models_choice_and_others(name):
    options, has = SHAPES[name]
    machine = chip(SM80 if "sm_80" in name else SM90)
    r = asked(*map(int, name.split()[0].split("x")), **options)
    found = choices(r, machine)
    names = [config(c) for c in found]
    assert 3 <= len(found) <= tuning.MOST and names[0] == config(plan_matmul(r, machine))
    assert len({str(n) for n in names}) == len(names) and json.loads(json.dumps(names)) == names
    assert set(has) <= kinds_of(names) and choices(r, machine, 4) == found[:4]


def test_each_kind_is_a_candidate():
    """Where costs are near: tiles with split-K, swap-AB, overlapping and wide ones."""
    names = [config(c) for name in list(SHAPES)[:3] for c in choices(asked(*map(int, name.split()[0].split("x")),
                                                                             **SHAPES[name][0]), H200)]
    assert {"splits", "swap_ab", "overlapping", "staged", "wide"} <= kinds_of(names)


def test_tiles_are_by_cost_and_of_many_kinds():
    r = asked(680, 4000, 1720)
    ready, *counts = sized(r, matmul_plan.routes(r, H200)[0])
    tiles = by_cost(*tile_problem(ready, H200, *counts))
    assert [t.seconds for t in tiles] == sorted(t.seconds for t in tiles) and tiles[-1].seconds <= 1.5 * tiles[0].seconds
    first = list(of_all_kinds(tiles))
    assert sorted(map(str, first)) == sorted(map(str, tiles)) and first[0] == tiles[0]
    assert len({(t.bm, t.swap_ab, t.splits) for t in first[:12]}) > len({(t.bm, t.swap_ab, t.splits) for t in tiles[:6]})


def test_what_decides_a_choice():
    """Strides count as far as loads feel them; a batch, an epilogue and the order of storage do."""
    r = asked(136, 264, 200)
    first = key(r, plan_matmul(r, H200))
    wider = replace(r, left=replace(r.left, down=328))  # rows at multiples of 16 bytes as well
    assert key(wider, plan_matmul(wider, H200)) == first and json.dumps(first)
    for other in (asked(136, 264, 200, True), asked(137, 264, 200), asked(136, 264, 200, bias="float16"),
                  replace(r, left=replace(r.left, down=201)), replace(r, left=replace(r.left, down=256))):
        assert key(other, plan_matmul(other, H200)) != first
    many = [replace(r, m=m, dynamic=True) for m in (100, 120)]
    assert key(many[0], plan_matmul(many[0], H200)) == key(many[1], plan_matmul(many[1], H200))


class Clock:
    """Measures nothing, anywhere."""

    def __call__(self, like, target, backend):
        return self

    def measure(self, fn, n, flush):
        fn()
        return [1.0] * n

    def release(self):
        pass


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """Tuning anywhere, without times: tasks and how many candidates gave the model's result."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    found = []

    def race(measure, count):
        found.append(count)
        return count - 1, {k: 1.0 for k in range(count)}

    monkeypatch.setattr(tuning, "race", race)
    monkeypatch.setattr(tuning, "tuner", tuning.Tuner(Clock()))
    return found


def normal(shape, element=np.float16, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(element)


ON = dict(target=SM90, execution_backend="simulator", tune=True)


@pytest.mark.parametrize("m, n, k, tb, element", [(24, 40, 520, False, np.float16), (16, 19, 131, True, ml_dtypes.bfloat16),
                                                  (1, 37, 131, False, np.float16)])
def test_each_candidate_is_right(m, n, k, tb, element, seen, monkeypatch):
    """On the simulator, against the model's: the check that tuning makes."""
    r = asked(m, n, k, tb)
    kept = {}
    for c in choices(r, H200):  # one of a kind
        t = c.form.tile
        kept.setdefault((c.thin is None, any(c.copied), t.swap_ab, t.splits > 1, t.overlapping), config(c))
    wanted = list(kept.values())[:4]
    monkeypatch.setattr(matmul_choices, "choices", lambda *of: [c for c in choices(*of) if config(c) in wanted])
    a, b = normal((m, k), element), normal((n, k) if tb else (k, n), element, 1)
    before = a.copy(), b.copy()
    out = np.zeros((m, n), element)
    got = matmul(a, b, transpose_b=tb, out=out, **ON)
    assert seen == [len(wanted)] and len(wanted) >= 3 and got is out
    assert np.array_equal(a, before[0]) and np.array_equal(b, before[1])
    want = a.astype(np.float64) @ (b.T if tb else b).astype(np.float64)
    sums = np.abs(a.astype(np.float64)) @ np.abs((b.T if tb else b).astype(np.float64))
    eps = 2.0**-11 if element is np.float16 else 2.0**-8
    assert (np.abs(got.astype(np.float64) - want) <= k * 2.0**-24 * sums + eps * np.abs(want)).all()


def test_a_captured_call_is_the_models(monkeypatch):
    class Never(tuning.Tuner):
        def can(self, like, target, backend):
            return None

    monkeypatch.setattr(tuning, "tuner", Never(Clock()))
    a, b = normal((40, 64)), normal((64, 48), seed=1)
    sizes, q = np.int32([10, 30]), normal((1, 16, 1, 16))
    on = {k: v for k, v in ON.items() if k != "tune"}
    for call in (lambda **t: matmul(a, b, **on, **t), lambda **t: flash_attention(q, q, q, target="tile", **t),
                 lambda **t: grouped_matmul(a, np.stack([b, b]), sizes, **on, **t),
                 lambda **t: flash_decode(q[0, :1], q, q, np.int32([9]), target="tile", **t)):
        assert np.array_equal(call(tune=True), call(tune=False))
    assert not tuning.tuner.found


def test_groups(seen, monkeypatch):
    monkeypatch.setattr(matmul_choices, "choices", lambda *of: choices(*of)[:3])
    a, b, sizes = normal((60, 64)), normal((3, 64, 72), seed=1), np.int32([10, 0, 40])
    got = grouped_matmul(a, b, sizes, **ON)
    want = np.concatenate([a[:10].astype(np.float64) @ b[0], a[10:50].astype(np.float64) @ b[2], np.zeros((10, 72))])
    assert seen == [3] and np.allclose(got, want, atol=0.05)


def test_attention_and_decode(seen, monkeypatch):
    monkeypatch.setattr("tilelang.library.attention.tuning_candidates.MOST", 2)
    q, k, v = normal((1, 20, 1, 16)), normal((1, 24, 1, 16), seed=1), normal((1, 24, 1, 16), seed=2)
    got, logs = flash_attention(q, k, v, causal=True, return_lse=True, target=SM90, tune=True)
    want, expected = flash_attention(q, k, v, causal=True, return_lse=True)
    assert seen == [2] and np.allclose(got, want, atol=4e-3) and np.allclose(logs, expected, atol=1e-3)
    cache, table, lengths = normal((4, 16, 1, 16), seed=3), np.int32([[2, 0], [3, 1]]), np.int32([30, 9])
    one = normal((2, 1, 16), seed=4)
    got = flash_decode(one, cache, cache, lengths, block_table=table, target=SM90, tune=True)
    assert seen == [2, 3] and np.allclose(got, flash_decode(one, cache, cache, lengths, block_table=table), atol=4e-3)
    names = [json.loads(x) for x in tuning.tuner.found.values()]
    assert "splits" not in names[0] and names[1]["splits"] >= 1


def test_tiles_of_attention_that_are_timed():
    m, sizes = machine_of(SM90, 132), Sizes(1, 4096, 4096, 32, 32, 128, 128)
    tiles = near_tiles(m, sizes, Mask(None, 0), 8)
    assert len(tiles) == 8 == len(set(tiles)) and tiles[0] == attention_tile(m, sizes, Mask(None, 0))
    assert len({t.rows for t in tiles}) > 1 and len({t.keys for t in tiles}) > 2
    assert near_tiles(machine_of(Target("cpu")), sizes, Mask(), 1) == [attention_tile(machine_of(Target("cpu")), sizes, Mask())]


def test_splits_of_decode_steps_that_are_timed():
    m, sizes = machine_of(SM90, 132), DecodeSizes(4, 1, 32, 8, 128, 128, 1024, 64, 128)
    tile = decode_tile(m, sizes)
    model = tile, decode_splits(m, sizes, tile)
    found = near_choices(sizes, model, True)
    assert found[0] == model and len(set(found)) == len(found)
    assert len({n for _, n in found}) > 3 and len({t for t, _ in found}) > 1
    assert {n for _, n in near_choices(sizes, model, False)} == {model[1]}


def test_sizes_of_one_power_of_two_are_tuned_together():
    assert rounded((1, 64, 65)) == [1, 64, 128]
