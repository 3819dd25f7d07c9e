"""How busy MFMA is in steady loops on gfx942 and gfx950, by the report and by a simulation of the machine code."""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import version

import isa_clock
import isa_hip
import isa_loops
import numpy as np
import pytest

pytestmark = isa_hip.needs_zig


def vector(**given: object) -> isa_clock.Op:
    return isa_clock.Op(**{"text": "v", "kind": "vector", "clocks": 4, **given})


def clocks(ops: list[isa_clock.Op], blocks: int, waves: int = 1) -> float:
    """Of one iteration of a workgroup of so many waves, one on a SIMD."""
    return isa_clock.Unit({n: ops for n in range(waves)}, blocks).run(64).clocks


def test_arithmetic_of_another_wave_runs_under_matrix_instructions() -> None:
    """16 clocks of MFMA and 12 of VALU: one wave takes 28, two take 16 each.  Packed arithmetic does not run under them."""
    matrix = vector(clocks=16, passes=4, hold=1)
    ops = [matrix, vector(), vector(), vector()]
    assert clocks(ops, 1) == pytest.approx(16, abs=0.5)  # its own arithmetic too, which does not wait for the result
    assert clocks([*ops, *[vector()] * 4], 2) / 2 == pytest.approx(32, abs=1)
    packed = [matrix, *[vector(packed=True)] * 3]
    assert clocks(packed, 1) > 30


def test_loads_of_lds_wait_for_each_other_and_for_banks() -> None:
    lanes = np.arange(64)
    assert [isa_clock.passes_of(lanes, lanes * 16, 16, False, chip) for chip in ("942", "950")] == [8, 4]
    assert isa_clock.passes_of(lanes, lanes * 4, 4, False) == 2 and isa_clock.passes_of(lanes, lanes * 128, 4, False) == 64
    read = isa_clock.Op("ds_read_b128", "local", 8)
    wait = isa_clock.Op("s_waitcnt", "wait", 0, local=0)
    assert clocks([read, wait], 1) == pytest.approx(8 + isa_clock.LDS_LATENCY, abs=12)
    assert clocks([read] * 64, 1, 4) == pytest.approx(64 * 4 * 8, rel=0.02)  # the port, not the latency


@pytest.mark.parametrize("name, chip, least, registers", [
    ("gemm", "gfx942", 0.85, 128), *((n, "gfx942", 0.6, 256) for n in ("attention 128x64", "attention", "attention causal")),
    ("attention", "gfx950", 0.45, 256)])
def test_a_steady_loop_keeps_mfma_busy(name: str, chip: str, least: float, registers: int) -> None:
    """By the schedule in the report and by the machine code, which differ by 20 % of the cycles at most; without spills.  MFMA
    of gfx950 is twice as fast beside the same arithmetic."""
    from tilelang.transform import Schedule

    kernel, timing = isa_loops.timed(name, chip)
    (loop,), facts = kernel.report_data["kernels"][0]["schedules"], kernel.report_data["kernels"][0]
    planned = Schedule.parse(loop)
    assert facts["spills"] == facts["scratch"] == 0 and facts["registers"] <= registers
    assert planned.resident == facts["occupancy"]["blocks"] == timing.blocks
    assert planned.busy >= least and timing.busy["MFMA"] >= least
    assert planned.cycles * timing.blocks == pytest.approx(timing.clocks, rel=0.2)
    assert f"MFMA busy {planned.busy:.2f}" in kernel.report()
    assert f"{planned.resident} blocks an SM" in str(kernel.schedule())


def test_short_rows_keep_mfma_busy_with_four_blocks() -> None:
    """Attention of d = 64 has twice the arithmetic for its MFMA: what stands beside its exponentials decides.  Four
    blocks share a compute unit."""
    kernel, timing = isa_loops.timed("attention 128x64", dim=64, heads=64)
    facts = kernel.report_data["kernels"][0]
    assert facts["spills"] == facts["scratch"] == 0 and timing.blocks == 4
    assert timing.blocks * timing.counts["MFMA"] * 16 / timing.clocks >= 0.6  # of 16 clocks each
    names = Counter(text.split()[0] for _, text in timing.listing)
    assert not any(x.startswith("v_pk_") and x.endswith("_f32") for x in names)  # these wait for MFMA
    assert names["v_exp_f32_e32"] == 34 and names["v_fma_mixhi_f16"] == 16 and not names["v_pack_b32_f16"]


def test_the_iteration_of_a_wave_has_the_matrix_instructions_of_its_tile() -> None:
    """128 x 128 x 32 of four waves: 32 of 16 x 16 x 16, eight loads of four columns of B and four of A, no conflicts."""
    _, timing = isa_loops.timed("gemm")
    assert timing.counts["MFMA"] == 32 and timing.counts["memory"] == 4 and timing.counts["barrier"] == 2
    names = Counter(text.split()[0] for _, text in timing.listing)
    assert names["ds_read_b128"] == 4 and names["ds_write_b128"] == 4 and names["global_load_dwordx4"] == 4


def test_the_page_of_inner_loops_is_of_these_binaries() -> None:
    text = isa_loops.PAGE.read_text(encoding="utf-8")
    if f"ziglang {version('ziglang')} " not in text:
        pytest.skip("the page is of another ziglang: python tests/amd/isa_loops.py writes it")
    assert text == isa_loops.page(), "run python tests/amd/isa_loops.py"


@pytest.mark.parametrize("keys, places", [(64, ("0", "16384")), (128, ("0", "0"))])
def test_a_loop_for_several_blocks_is_right_in_machine_code(keys: int, places: tuple[str, str]) -> None:
    """Priorities, an operand kept in registers and one version of each tile, of 128 keys that share bytes: two blocks of
    610, which share compute units."""
    import isa_elf
    import isa_launch
    import isa_machine
    from suite.plain.attention import attention
    from tilelang.target import Target
    from tilelang.transform.pipeline import lower

    import tilelang

    heads, seq, dim = 305, 256, 128
    func = attention("", 128, keys)(heads, seq, dim)
    lowered, kernel = lower(func.func, Target("gfx942"), {}), tilelang.compile(func, target="gfx942")
    source = kernel.get_kernel_source()
    assert "s_setprio(1)" in source and "q_kept" in source and "amdgpu_waves_per_eu(2)" in source
    assert re.findall(r"half_t\* const [kv] = reinterpret_cast<half_t\*>\(smem \+ (\d+)\)", source) == [*places]
    rng = np.random.default_rng(0)
    values = {b.name: np.zeros([int(getattr(n, "value", n)) for n in b.shape], str(b.dtype)) for _, b in lowered.host.buffers}
    for name in "QKV":
        values[name][0] = rng.standard_normal((seq, dim)).astype(np.float16)
    (k,) = lowered.kernels
    program = isa_machine.Program(isa_elf.read(kernel._built.files["kernel.hsaco"])[k.name])
    host = isa_launch.Host(lowered, [], values, None)
    program.run([seq // 128, 1, 1], k.threads, [host._argument(p) for p in k.params], lds=host.number(k.shared_bytes))
    q, k, v = (values[name][0].astype(np.float64) for name in "QKV")
    p = np.exp((q @ k.T) * dim**-0.5)
    np.testing.assert_allclose(values["O"][0], p / p.sum(1, keepdims=True) @ v, rtol=2e-2, atol=2e-3)
