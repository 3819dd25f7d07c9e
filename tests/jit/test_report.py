"""Reports: what a kernel was made into, what was declined, what may be expected of it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.jit.report import facts_of, text_of, vector_instructions
from tilelang.jit.work import work_of
from tilelang.runtime import nvrtc
from tilelang.runtime.cpu_engine import thread_count
from tilelang.target import Target
from tilelang.target.machine import CPU_CHIP, chip_of
from tilelang.transform.pipeline import lower

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from programs import attention, gemm

SM80, SM90, SM75 = (Target({"kind": "cuda", "arch": a}) for a in ("sm_80", "sm_90a", "sm_75"))
ON = {"tl.enable_hopper": True}


def large():
    return gemm(m=4096, n=4096, k=4096, bm=128, bn=256, bk=64, stages=4, threads=256, tb=True).func


def facts(func, target=SM90, config=None, **resources):
    program = lower(func, target, ON if config is None else config)
    return facts_of(program, func, target, [resources] * len(program.kernels) if resources else None)[0]


def test_instructions_schedule_and_limits_of_a_gemm():
    f = facts(large(), registers=168, spills=0, static_shared=0)
    assert f["grid"] == [132] and f["threads"] == 384
    assert list(f["instructions"]["MMAs"]) == ["wgmma.m64n256k16.f32.f16.f16"]
    assert set(f["instructions"]["loads"]) == {"tma_load by A_map", "tma_load by B_map"}
    assert "warp groups: 1 loads As, Bs by TMA, 2 compute, 4 stages" in f["schedule"]
    assert f["occupancy"] == {"blocks": 1, "warps": 12, "of_warps": 64, "limited_by": "shared memory"}
    limits = f["limits"]
    assert limits["flops"] == 2 * 4096**3 and limits["bytes"] >= 3 * 4096**2 * 2 and limits["bound"] == "arithmetic"
    assert limits["seconds"]["arithmetic"] == pytest.approx(2 * 4096**3 / 989e12)
    assert limits["moved_by_tiles"] >= 32 * 16 * 64 * (128 + 256) * 64 * 2
    text = "\n".join(text_of(f))
    for part in ("registers 168", "1 block an SM, 12 of 64 warps", "wgmma.m64n256k16", "boxes of 128 x 64 of `A`",
                 "137 GFLOP of GEMMs", "bound by arithmetic", "synchronisation: ordered", "persistent: 132 blocks"):
        assert part in text, part
    json.dumps(f)


def test_roles_stages_and_what_runs_under_what():
    f = facts(large())
    assert f["warp_roles"] == [{"warp_groups": [0, 2], "threads": 256, "registers": 240, "does": ["MMAs", "stores"]},
                          {"warp_groups": [2, 1], "threads": 128, "registers": 24, "does": ["loads"]}]
    assert f["stages"] == {"As": 4, "Bs": 4} and f["overlap"] == (
        "wgmma in flight: the GEMM of a step runs while the next stage is waited for")
    text = "\n".join(text_of(f))
    for part in ("warp role: warp groups 0 to 1, 256 threads: MMAs, stores, 240 registers a thread", "stages: 4 of As, 4 of Bs",
                 "role: warp group 2, 128 threads: loads, 24 registers a thread",
                 "overlap: wgmma in flight: the GEMM of a step runs"):
        assert part in text, part
    f = facts(attention(1, 2, 1024, 128, bm=128, bn=128, threads=256).func)
    assert f["overlap"] == "the GEMM into `Of` of an iteration runs under the next iteration"
    f = facts(large(), config={"tl.enable_hopper": False})
    assert f["warp_roles"] == [{"warp_groups": [0, 2], "threads": 256, "registers": None, "does": ["loads", "MMAs"]}]
    assert f["stages"] == {"As": 4, "Bs": 4} and "no warp specialisation: tl.enable_hopper is off" in f["declined"]
    assert f["overlap"] is None and "role:" not in "\n".join(text_of(f))


def test_why_these_instructions():
    by_row = facts(large())["why"]
    assert ("wgmma.m64n256k16.f32.f16.f16: whole warp groups; A in shared memory with K contiguous, B in shared memory with K "
            "contiguous") in by_row and any(w.startswith("tma_load: tiles whose boxes") for w in by_row)
    both = facts(attention(1, 2, 1024, 128, bm=128, bn=128, threads=256).func)["why"]
    assert any("A in registers, B in shared memory with N contiguous" in w for w in both)
    old = facts(gemm(m=256, n=256, k=256).func, SM80, {})
    assert "cp.async: sm_80 has no TMA" in old["why"] and any(w.endswith("sm_80 has no wgmma") for w in old["why"])
    odd = facts(gemm(m=128, n=128, k=101, tb=True).func)
    assert odd["instructions"]["loads"] == {"loads of 2 bytes by threads": 8} or "by threads" in str(odd["instructions"])


@pytest.mark.parametrize("rows, said", [(64, "of an iteration runs under the next iteration"),
                                        (192, "wgmma synchronous: its fragments and other values take")])
def test_why_products_do_not_overlap(rows, said):
    """One warp group, whose registers hold the results of 64 rows, not of 192."""
    f = facts(attention(1, 2, 1024, 128, bm=rows, bn=64, threads=128).func, config={**ON, "tl.resize_blocks": False})
    assert said in f["overlap"]


def test_what_was_declined_is_said():
    func = gemm(m=128, n=128, k=100, tb=True).func
    f = facts(func)
    assert any("multiple of 16" in line for line in f["declined"])
    assert any("note: no warp specialisation" in line for line in text_of(f))


def test_causal_attention_counts_the_tiles_it_visits():
    (full,), (causal,) = (work_of(attention(1, 2, 1024, 64, causal=c, bm=128, bn=128, threads=256).func) for c in (False, True))
    assert full.flops == {16: 4.0 * 2 * 1024 * 1024 * 64}
    assert causal.flops[16] == full.flops[16] * 36 / 64  # 1 + 2 + .. + 8 of 8 * 8 tiles


def test_memory_bound_and_unknown_work():
    @T.prim_func
    def scale(A: T.Tensor((1 << 20,), "float32"), B: T.Tensor((1 << 20,), "float32")):
        with T.Kernel(1 << 10, threads=128) as bx:
            for i in T.Parallel(1 << 10):
                B[bx * 1024 + i] = A[bx * 1024 + i] * 2.0

    f = facts(scale.func, SM80, {})
    assert f["limits"]["bytes"] == 8 << 20 and f["limits"]["bound"] == "memory"
    assert f["limits"]["seconds"]["memory"] == pytest.approx((8 << 20) / chip_of(80).bandwidth)
    n = T.dynamic("n")

    @T.prim_func
    def later(A: T.Tensor((n,), "float32")):
        with T.Kernel(n, threads=32) as bx:
            A[bx] = 1.0

    f = facts(later.func, SM80, {})
    assert f["limits"]["flops"] is None and "work: known at calls only" in "\n".join(text_of(f))
    assert "device" not in facts(scale.func, SM75, {})["limits"]


def test_rates_are_those_of_data_sheets():
    assert chip_of(90).peak(16, True) == 989e12 and chip_of(90).peak(16, False) == 67e12 and chip_of(80).peak(4, True) is None


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_report_of_a_compiled_kernel():
    kernel = tilelang.compile(gemm(m=256, n=256, k=256, bm=64, bn=64, bk=32), target=SM80)
    data = kernel.report_data
    (f,) = data["kernels"]
    assert f["registers"] == kernel.n_regs and f["spills"] == 0 and "mma" in next(iter(f["instructions"]["MMAs"]))
    assert kernel.report().startswith("kernel main for cuda") and "occupancy:" in kernel.report()
    assert not data["unaligned"] and json.loads(json.dumps(data)) == data


def test_report_of_a_simulated_kernel():
    kernel = tilelang.compile(gemm(m=64, n=64, k=64, bm=64, bn=64, bk=32), execution_backend="simulator", target=SM80)
    assert "MMAs: mma" in kernel.report()
    cpu = tilelang.compile(gemm(m=64, n=64, k=64, bm=64, bn=64, bk=32), target="cpu")
    assert len(cpu.report_data["kernels"]) == 1 and np.isfinite(sum(cpu.report_data["times"].values()))


# ---- the CPU -----------------------------------------------------------------------------------------------------------
def test_the_report_of_a_cpu_kernel_was_one_line_of_times():
    kernel = tilelang.compile(gemm(m=256, n=256, k=256, bm=64, bn=64, bk=32, stages=2, threads=128).func, target="cpu")
    f, = kernel.report_data["kernels"]
    json.dumps(f)
    assert f["grid"] == [4, 4] and f["threads"] == min(16, thread_count())
    assert any(kind.startswith("FMAs of ") for kind in f["instructions"]["vectors"])
    limits = f["limits"]
    assert limits["flops"] == 2 * 256**3 and limits["bytes"] >= 3 * 256**2 * 2 and limits["bound"] == "arithmetic"
    assert limits["seconds"]["arithmetic"] == pytest.approx(2 * 256**3 / (CPU_CHIP.fp32 * f["threads"]))
    assert limits["seconds"]["memory"] == pytest.approx(limits["bytes"] / (CPU_CHIP.bandwidth * f["threads"]))
    text = kernel.report()
    for part in ("compiled in", "grid 4 x 4", "vectors: FMAs of", "0.0336 GFLOP of GEMMs", "common CPU core",
                 "bound by arithmetic"):
        assert part in text, part


@tilelang.jit(target="cpu")
def two_launches(X):
    n = T.dynamic("n")
    X: T.Tensor((n,), "float32")
    Y = T.empty((n,), "float32")
    with T.Kernel(T.ceildiv(n, 128), threads=128) as b:
        for i in T.Parallel(128):
            Y[b * 128 + i] = X[b * 128 + i] * 2
    with T.Kernel(1, threads=32):
        Y[0] = 1
    return Y


def test_launches_of_run_time_size_on_the_cpu():
    first, second = two_launches.compile().report_data["kernels"]
    assert first["threads"] == thread_count() and first["limits"]["flops"] is None and "work: known at calls only" in "\n".join(
        text_of(first))
    assert second["grid"] == [1] and second["threads"] == 1 and second["name"] == "two_launches_1"
    assert any(kind.startswith(("arithmetic of", "moves of")) for kind in first["instructions"]["vectors"])


def test_vector_instructions_of_two_processors():
    text = "\tvfmadd231ps\t(%rax), %zmm1, %zmm2\n\tvaddss\t%xmm0, %xmm1, %xmm2\n\tvmovups\t%ymm1, (%rdi)\n\taddq\t$1, %rax\n"
    assert vector_instructions(text) == {"FMAs of 64 bytes": 1, "moves of 32 bytes": 1}
    assert vector_instructions("\tfmla\tv0.4s, v1.4s, v2.4s\n\tfadd\tv0.2d, v1.2d, v2.2d\n\tfmul\ts0, s1, s2\n") == {
        "FMAs of 16 bytes": 1, "arithmetic of 16 bytes": 1}
    assert vector_instructions("\tret\n") == {"none": 1}
