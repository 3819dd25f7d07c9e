"""GEMM with quantised weights of four bits: any size on every backend, the tiles that are chosen, what raises an error."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tilelang.errors import TileLangError
from tilelang.library import dequant_matmul
from tilelang.library.gemm.tile import chip_of
from tilelang.library.quantised.dequant_matmul import DequantForm, DequantTile, choose_tile, dequant_gemm, seconds, tiles
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
H200 = replace(chip_of(SM90), sms=132)
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def arrays(m, n, k, group, element="float16", lut=False, zero_points=True):
    """The arguments, and the weights they stand for."""
    rng, dt = np.random.default_rng(0), NUMPY[element]
    q = rng.integers(0, 16, (n, k)).astype(np.uint8)
    a, scales = rng.standard_normal((m, k)).astype(dt), rng.uniform(0.5, 2, (n, k // group)).astype(dt)
    x = {"a": a, "w": q[:, 0::2] | q[:, 1::2] << 4, "scales": scales}
    wide = scales.astype(np.float32).repeat(group, 1)
    if lut:
        x["lut"] = rng.standard_normal(16).astype(dt)
        return x, (x["lut"].astype(np.float32)[q] * wide).astype(dt)
    if zero_points:
        x["zero_points"] = rng.integers(0, 16, scales.shape).astype(np.uint8)
    return x, ((q - x["zero_points"].astype(np.float32).repeat(group, 1) if zero_points else q) * wide).astype(dt)


def close(got, a, d, element="float16"):
    a, d = a.astype(np.float64), d.astype(np.float64).T
    assert np.all(abs(got.astype(np.float64) - a @ d) <= (abs(a) @ abs(d)) * 2.0**-20 + abs(a @ d) * EPS[element])


def run(f, x):
    """On the device simulator."""
    t = f.tile
    second = x.get("lut", x.get("zero_points", np.zeros(1, np.uint8)))
    c = np.full((f.m, f.n), np.nan, NUMPY[f.element])
    low = lower(dequant_gemm(f).func, SM90, {"tl.enable_hopper": True})
    p = np.full((t.splits, f.m, f.n) if t.splits > 1 else 1, np.nan, np.float32)
    return low, run_device(low, {"A": x["a"], "W": x["w"], "scales": x["scales"], "zeros": second, "P": p, "C": c}).outputs["C"]


@pytest.mark.parametrize("m, n, k, group, tile, options", [
    (16, 128, 512, 64, DequantTile(16, 64, 128, 4, 2), {}), (5, 200, 768, 32, DequantTile(16, 128, 64, 4, 3), {}),
    (70, 72, 320, 64, DequantTile(64, 64, 64, 2), {"zero_points": False}), (130, 128, 256, 128, DequantTile(128, 128, 64, 2),
                                                                                          {"lut": True}),
    (40, 70, 160, 32, DequantTile(32, 64, 64, 2), {}), (3, 9, 96, 48, DequantTile(16, 64, 64, 4), {"element": "bfloat16"})])
def test_tiles_on_the_simulator(m, n, k, group, tile, options):
    """Edges in every direction; splits of k add up; one warp group or two."""
    x, d = arrays(m, n, k, group, **options)
    form = {"element": "float16", "lut": False, "zero_points": True, **options}
    f = DequantForm(m, n, k, group, **{**form, "zero_points": form["zero_points"] and not form["lut"]}, tile=tile)
    low, got = run(f, x)
    assert str(low.kernels[0].launch.plan.sync_report).startswith("ordered:")
    close(got, x["a"], d, form["element"])


def test_dequantised_weights_stay_in_registers():
    f = DequantForm(16, 4096, 4096, 64, "float16", False, True, DequantTile(16, 64, 128, 4, 4))
    launch = lower(dequant_gemm(f).func, SM90, {"tl.enable_hopper": True}).kernels[0].launch
    assert {"W", "A"} <= {b.name[0] for b, _ in launch.plan.shared_offsets}
    assert not any(b.name[0] == "D" for b, _ in launch.plan.shared_offsets)
    assert ("Ws", 4) in launch.plan.stages and launch.plan.shared_bytes <= f.shared


@pytest.mark.parametrize("m, n, k, group, options", [
    (1, 1, 2, 2, {}), (1, 64, 256, 32, {}), (33, 65, 132, 12, {}), (7, 16, 128, 64, {"lut": True}),
    (7, 16, 128, 16, {"zero_points": False, "element": "bfloat16"}), (0, 4, 8, 8, {}), (64, 8, 4096, 64, {})])
def test_calls(m, n, k, group, options):
    x, d = arrays(m, n, k, group, **options)
    got = dequant_matmul(**x)
    assert got.shape == (m, n) and got.dtype == x["a"].dtype
    close(got, x["a"], d, options.get("element", "float16"))
    out = np.zeros((m, 2 * n), got.dtype)[:, ::2]
    assert dequant_matmul(**x, out=out) is out and np.array_equal(out, got)
    assert np.array_equal(dequant_matmul(**{**x, "a": np.asfortranarray(x["a"])}), got)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    x, _ = arrays(9, 48, 192, 32)
    got = dequant_matmul(**{name: torch.from_numpy(v) for name, v in x.items()})
    assert np.array_equal(got.numpy(), dequant_matmul(**x))


def test_costs():
    """Tiles fit, splits begin with groups, and what was timed on an H200 comes out within a sixth."""
    timed = {(1, 16, 64, 256, 3, 4): 7.7, (1, 16, 128, 128, 4, 4): 7.7, (1, 16, 64, 128, 4, 2): 9.7,
             (64, 64, 128, 128, 4, 4): 10.3, (64, 64, 64, 128, 4, 2): 11.9, (64, 64, 128, 128, 4, 8): 12.9,
             (256, 256, 128, 64, 4, 4): 21.8,
             (256, 64, 128, 128, 4, 2): 29.3, (256, 128, 128, 64, 4, 1): 33.6, (256, 256, 128, 64, 4, 1): 47.4,
             (4096, 256, 128, 128, 2, 1): 190.2, (4096, 128, 128, 64, 4, 1): 263.8}
    for (m, *t), us in timed.items():
        f = DequantForm(m, 4096, 4096, 64, "float16", False, True, DequantTile(*t))
        assert abs(np.log(seconds(f, H200) * 1e6 / us)) < 1 / 6
    for m, n, k, group in ((1, 4096, 4096, 64), (64, 14336, 4096, 128), (5, 100, 28672, 32), (4096, 4096, 11008, 48)):
        f = DequantForm(m, n, k, group, "float16", False, True, DequantTile(16, 64, 64, 2))
        for v in tiles(f, H200):
            own = v.steps * v.tile.bk
            splits = v.tile.splits
            assert v.shared <= H200.shared and (splits == 1 or own % group == 0 and 0 < k - own * (splits - 1) <= own)
        best = choose_tile(f, H200)
        assert best.tile.splits > 1 if m < 64 and n <= 4096 else best.tile.bm >= 64


@pytest.mark.parametrize("change, kind", [
    ({"a": "float32"}, "matmul-type"), ({"w": "int8"}, "matmul-type"), ({"scales": "bfloat16"}, "matmul-type"),
    ({"scales": (16, 3)}, "matmul-shape"), ({"zero_points": (16, 1)}, "matmul-shape"), ({"w": (16, 60)}, "matmul-shape"),
    ({"a": (128,)}, "matmul-shape"), ({"lut": (16,)}, "matmul-shape"), ({"a": None}, "matmul-type"),
    ({"out": (7, 17)}, "matmul-shape")])
def test_what_is_refused(change, kind):
    x, _ = arrays(7, 16, 128, 32)
    for name, what in change.items():
        old = x.get(name, x["scales"])
        x[name] = [[1]] if what is None else np.zeros(what, old.dtype) if isinstance(what, tuple) else old.astype(what)
    with pytest.raises(TileLangError) as e:
        dequant_matmul(**x)
    assert e.value.kind == kind and e.value.expected and e.value.found


def test_memory_in_common():
    x, _ = arrays(16, 16, 16, 16)
    for _ in range(2):  # also where the form is known
        with pytest.raises(TileLangError, match="out and a have memory in common"):
            dequant_matmul(**x, out=x["a"])
    both = np.zeros((32, 32), np.float16)  # rows between each other
    dequant_matmul(**{**x, "a": both[::2, ::2]}, out=both[1::2, 1::2])
