"""What a kernel's report says for AMD's chips, without one: registers, LDS, occupancy, the predicted share of the roofline."""

import pathlib
import re
import sys

import pytest

pytest.importorskip("ziglang", reason="the package ziglang is not installed: pip install ziglang")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "gemm"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "attention"))

from flash_forward import flash_forward
from gemm import gemm

import tilelang

PROGRAMS = {"gemm": (gemm, dict(m=2048, n=2048, k=2048, bm=128, bn=128, bk=32, stages=2)),
            "attention": (flash_forward, dict(batch=1, heads=4, kv_heads=4, seq_q=1024, seq_kv=1024, dim=64))}
LINES = (r"resources: VGPRs \d+, of them AGPRs \d+, SGPRs \d+, SGPRs kept in VGPRs 0, spills 0, scratch 0 bytes, "
         r"dynamic LDS \d+ bytes", r"occupancy: \d+ blocks? a CU, \d+ of 32 waves, limited by (LDS|VGPRs)\n",
         r"MFMA: mfma\.", r"by (MFMA|VALU) \(MFMA \d+, loads \d+, LDS \d+, VALU \d+, .*; MFMA busy 0\.\d+, \d blocks? a CU\n",
         r"predicted: [\d.]+ us at \d+ MHz, at least [\d.]+ us; \d+% of the roofline")


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("chip", [pytest.param("gfx90a", marks=pytest.mark.slow), "gfx942",
                                  pytest.param("gfx950", marks=pytest.mark.slow)])
def test_the_report_of_a_kernel_that_spills_nothing(name, chip):
    make, sizes = PROGRAMS[name]
    kernel = tilelang.compile(make(**sizes), target=chip)
    text, (facts,) = kernel.report(), kernel.report_data["kernels"]
    assert not [line for line in LINES if not re.search(line, text)], text
    assert not re.search(r"\bSMs?\b|\bwarps?\b|tensor core|MMAs|shared memory|registers [0-9]", text), text
    assert facts["spills"] == facts["scratch"] == facts["scalar_spills"] == 0 and facts["agprs"] is not None
    assert 0 < facts["sgprs"] <= 102 and 0 < facts["registers"] <= 512
    assert facts["shared_bytes"] <= kernel.target.max_shared_bytes
    held = facts["occupancy"]
    waves = held["blocks"] * facts["threads"] // 64
    assert held["warps"] == waves and -(-waves // 4) * (-(-facts["registers"] // 8) * 8) <= 512  # registers of a SIMD
    limits, predicted = facts["limits"], facts["predicted"]
    assert max(limits["seconds"].values()) * 1e6 <= predicted["least"] * 1.05 <= predicted["us"] * 1.05
    assert {"kernel.hsaco", "kernel.s"} <= set(kernel._built.files) and "__builtin_amdgcn_mfma" in kernel.get_kernel_source()
