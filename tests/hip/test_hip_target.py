"""The target kind "hip": its forms, the records of its chips, and the errors that name a bad one."""

import pathlib
import re

import pytest

import tilelang

from tilelang.target import Target, determine_target
from tilelang.target.hip import HIP_CHIPS, blocks_by_registers


def test_forms_of_a_hip_target():
    t = Target({"kind": "hip", "mcpu": "gfx950"})
    assert t == Target({"kind": "hip", "arch": "gfx950"}) == Target("gfx950") == Target(str(t))
    assert t == Target("gfx950:sramecc+:xnack-")
    assert (str(t), t.arch, t.attrs, t.keys) == ("hip -mcpu=gfx950", "gfx950", {"mcpu": "gfx950"}, ("hip", "gpu"))
    assert t.is_hip and t.is_gpu and not t.is_cuda and not t.is_cpu and t.warp_size == 64
    with t:
        assert determine_target() == {"kind": "hip", "mcpu": "gfx950"}


def test_features_of_chips():
    chips = [Target(a) for a in HIP_CHIPS]
    assert [t.max_shared_bytes >> 10 for t in chips] == [64, 64, 160] and [max(t.async_load_bytes) for t in chips] == [4, 4, 16]
    assert [t.chip.fp8 for t in chips] == ["", "fnuz", "ocp"] and all(t.has_mfma for t in chips)
    assert not any(t.has_tma or t.has_wgmma or t.has_cp_async or t.has_ldmatrix or t.at_least(70) for t in chips)
    assert Target("cuda").async_load_bytes == () and not Target("sm_90a").has_mfma and Target("sm_80").chip is None


def test_registers_decide_how_many_waves_run():
    """The figures that the compiler prints for these kernels (88, 162, 246 and 350 registers)."""
    assert [blocks_by_registers(r, 256) for r in (88, 162, 246, 350)] == [5, 3, 2, 1]
    assert Target("gfx942").blocks_by_registers(350, 64) == 4 and Target("sm_80").blocks_by_registers(128, 256) == 2


@pytest.mark.parametrize("bad, said", [
    ("gfx1100", "waves of 32 lanes"), ({"kind": "hip", "mcpu": "gfx908"}, "MI200"), ("gfx941", "before its release"),
    ({"kind": "cuda", "mcpu": "gfx942"}, "architecture of AMD"),
    ({"kind": "hip", "arch": "sm_90"}, "MI200"),
    ({"kind": "hip", "mcpu": "gfx942", "arch": "gfx950"}, "two chips"), ({"kind": "hip", "thread_warp_size": 32}, "64 lanes")])
def test_a_chip_that_is_not_known_is_named(bad, said):
    with pytest.raises(ValueError, match=said):
        Target(bad)


def test_passes_and_tools_ask_for_features_and_not_for_the_kind():
    """What is of one kind of target alone stands in target/, the printer, the driver, the dialect and older import paths."""
    package = pathlib.Path(tilelang.__file__).parent
    own = ("target/", "codegen/hip/", "runtime/hip_", "runtime/gpu_api.py", "language/rocm.py", "compat/")
    asked = re.compile(r"\.is_hip\b|\.kind == .hip[\"']|\.arch (==|!=) |\.startswith\(.gfx")
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        text = path.read_text(encoding="utf-8")
        if not name.startswith(own) and (hit := asked.search(text)):
            found[name] = hit.group()
        elif name.startswith(("arith/", "ir/", "layout/", "ops/", "transform/", "simulator/", "library/")) and (
                hit := re.search(r"target\.is_cuda\b|\.kind == .cuda[\"']", text)):
            found[name] = hit.group()
    assert not found


def test_the_backend_is_small():
    """A printer with the sections that take the place of PTX, and tables, driver and compiler."""
    import backend_sizes

    for what, (_, most) in backend_sizes.FILES.items():
        assert most // 3 < backend_sizes.lines(what) <= most


def test_a_chip_of_none_is_no_part_of_the_target():
    """It stayed as an option, and the target differed from the one without it."""
    assert Target({"kind": "hip", "mcpu": None, "arch": "gfx950"}) == Target("gfx950")
