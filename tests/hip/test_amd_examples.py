"""Every example and function of the library for AMD's chips: right on the simulator, assembled with tiles that fit.

A part runs each time; the rest each night.  What is refused stands here with its reason, and in the guide's page.
"""

import pathlib
import sys

import pytest

pytest.importorskip("ziglang", reason="the package ziglang is not installed: pip install ziglang")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "golden"))

import assembled
import checks
import harness

import tilelang
import tilelang.language as T
from tilelang.target import Target
from tilelang.target.hip import HIP_CHIPS

GENERAL = [c for c in checks.CHECKS if not c.hopper]
EVERY_CHIP = [(c, chip) for c in GENERAL for chip in HIP_CHIPS]


@pytest.mark.parametrize("check", GENERAL, ids=[c.id for c in GENERAL])
def test_an_example_is_right_on_the_simulator_of_gfx942(check):
    results = getattr(checks.load(check.file), check.function)(on=harness.Place("gfx942", "simulator"), **check.small)
    for result in results if isinstance(results, (list, tuple)) else [results]:
        assert result.ok, str(result)


@pytest.mark.parametrize("check, chip", EVERY_CHIP, ids=[f"{c.id}-{chip}" for c, chip in EVERY_CHIP])
def test_the_kernels_of_an_example_assemble(check, chip):
    rows = assembled.of_check(check, chip)
    assert rows and not [r for r in rows if "error" in r or r["spills"]]


# Examples whose tiles of real sizes were beyond the 64 KiB of LDS: function, sizes that decide the tiles.
LARGE = [("attention/flash_backward.py", dict(heads=2, kv_heads=1, seq=70)),
         ("attention/flash_varlen_backward.py", dict(lengths="7,70,1", prefix=30, heads=2, kv_heads=1)),
         ("attention/mla_decode.py", dict(batch=2, heads=20, seq=100, splits=3)),
         ("attention/mamba2_backward.py", dict(seq=64, heads=2, groups=1)),
         ("attention/kda.py", dict(heads=1, seq=70)), ("attention/kda_backward.py", dict(heads=1, seq=40))]


@pytest.mark.parametrize("file, sizes", LARGE, ids=[f.split("/")[1] for f, _ in LARGE])
def test_the_tiles_of_an_example_were_beyond_the_lds(file, sizes):
    rows = assembled.of_check(checks.Check(file, "check", sizes), "gfx942")
    assert rows and not [r for r in rows if "error" in r or r["spills"] or r["shared_bytes"] > 65536]


def reversed_rows(rows, columns=256):
    @T.prim_func
    def program(A: T.Tensor((rows, columns), "float32"), B: T.Tensor((rows, columns), "float32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((rows, columns), "float32")
            T.copy(A, s)
            for i, j in T.Parallel(rows, columns):
                B[i, j] = s[rows - 1 - i, j]

    return program


def test_the_first_sizes_that_fit_are_taken():
    for target, fits in {"gfx942": 64, "gfx950": 128, "sm_80": 128, "cpu": 256}.items():
        assert tilelang.first_fitting(reversed_rows, 256, 128, 64, target=target) == fits
    with Target("gfx942"):
        assert tilelang.first_fitting(reversed_rows, (128, 256), (64, 128)) == (64, 128)
        assert tilelang.first_fitting(reversed_rows, {"rows": 64, "columns": 256}, {"rows": 1}) == {"rows": 64, "columns": 256}
        assert tilelang.first_fitting(reversed_rows, 512, 256) == 256  # none: its compilation says what is missing
        with pytest.raises(AssertionError, match="not one that gives int"):
            tilelang.first_fitting(lambda n: n, 3)


def test_every_function_of_the_library_is_called():
    """But those that run no kernel, and the decode step of one launch, which is for sm_90a alone."""
    from library_calls import CALLS, others
    from tilelang import library

    called = {name.split()[0] for name in (*CALLS, *others())}
    assert set(library.__all__) - called == {"create_block_mask", "decode_plan", "interleave", "llama_decode", "mla_plan"}


def test_tiles_that_follow_each_other_share_bytes():
    """Each has more than half of the LDS of a block: the program fits, and with both at once it does not."""
    def program(together):
        @T.prim_func
        def main(A: T.Tensor((160, 64), "float32"), B: T.Tensor((160, 64), "float32")):
            with T.Kernel(1, threads=128):
                a, b = T.alloc_shared((160, 64), "float32"), T.alloc_shared((160, 64), "float32")
                T.copy(A, a)
                for i, j in T.Parallel(160, 64):
                    B[i, j] = a[159 - i, j]
                T.copy(A, b)
                for i, j in T.Parallel(160, 64):
                    B[i, j] += b[i, 63 - j] + (a[i, j] if together else 0)

        return main

    assert tilelang.first_fitting(program, False, True, target="gfx942") is False
    assert tilelang.first_fitting(program, True, False, target="gfx942") is False
    assert tilelang.first_fitting(program, True, False, target="gfx950") is True
    report = tilelang.compile(program(False), target="gfx942").report_data["kernels"][0]
    assert report["shared_bytes"] == 160 * 64 * 4


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("chip", HIP_CHIPS)
def test_every_call_of_the_library_assembles(chip, monkeypatch):
    """Or is refused: products of float8 formats that the chip has no instruction for."""
    from library_calls import CALLS, others
    from tilelang.errors import TileLangError
    from tilelang.jit.requests import make_request
    from tilelang.library import place

    rows = []

    def compiled(func, *args, target=None, pass_configs=None, **options):
        rows.append(assembled.assembled(make_request(func, target=target, pass_configs=pass_configs)))
        return lambda *args, **options: None

    monkeypatch.setattr(place, "compile", compiled)
    wrong = []
    for name, call in (*((name, call) for name, (call, _) in CALLS.items()), *others().items()):
        rows.clear()
        try:
            call({"kind": "hip", "mcpu": chip})
        except TileLangError as e:
            rows.append({"error": e.kind})
        refused = "e4m3" in name and chip != "gfx950"
        wrong += [(name, r) for r in rows if r.get("error") != ("matmul-target" if refused else None) or r.get("spills")]
    assert not wrong
