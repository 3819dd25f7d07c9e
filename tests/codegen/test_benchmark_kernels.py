"""The kernels of the benchmarks, assembled: no spills, and no matrix instruction that ptxas puts one after another.

ptxas says C7510 to C7514 (information, exit status 0) when it serialises wgmma.
"""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from programs import attention, gemm

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.runtime import nvrtc
from tilelang.runtime.sass import disassemble
from tilelang.target import Target
from tilelang.transform.pipeline import lower

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})
TILES = dict(m=4096, n=4096, k=4096, bm=128, bn=256, bk=64, stages=4, threads=256)
KERNELS = {
    **{f"gemm_{'nt' if tb else 'nn'}_{dt}": (lambda tb=tb, dt=dt: gemm(**TILES, tb=tb, dtype=dt, out=dt))
       for tb in (True, False) for dt in ("float16", "bfloat16")},
    **{f"attention_{bn}{'_causal' * c}": (lambda bn=bn, c=c: attention(1, 32, 8192, 128, causal=c, bm=128, bn=bn,
                                                                      threads=256))
       for bn in (128, 160) for c in (False, True)},
}


def source_of(name):
    (kernel,) = lower(KERNELS[name]().func, HOPPER, {"tl.enable_hopper": True}).kernels
    assert kernel.plan.sync_report.startswith("ordered:"), kernel.plan.sync_report
    return print_kernel(kernel)


@pytest.mark.parametrize("name", KERNELS)
def test_no_spills_and_no_serialised_products(name):
    cubin = nvrtc.compile_cubin(source_of(name), "sm_90a")
    assert re.search("Compiling entry function|Used [0-9]+ registers", cubin.log), "the assembler's log was not captured"
    assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log
    assert cubin.registers <= 168  # 384 threads of a multiprocessor's 65536 registers
    try:
        sass = disassemble(cubin.bytes)
    except Exception as e:  # no disassembler on this machine
        pytest.skip(f"no SASS: {e}")
    assert "HGMMA" in sass and "HMMA" not in sass.replace("HGMMA", "") and "STL" not in sass and "LDL" not in sass


def test_the_log_names_serialised_products():
    source = source_of("gemm_nt_float16")
    waited = re.sub(r"tl::wgmma_pin<\d+>\([^;]*\);", "", source)
    planted = re.sub(r"tl::wgmma_wait<\d+>\(\);", 'printf("%d", (int)threadIdx.x);', waited, count=1)
    assert planted != source
    assert "C75" in nvrtc.compile_cubin(planted, "sm_90a").log


def test_the_log_counts_what_is_spilled():
    """128 x 128 sums of 128 threads take 128 registers each: not for eight blocks at once."""
    program = gemm(m=512, n=512, k=256, bm=128, bn=128, bk=32, threads=128)
    (kernel,) = lower(program.func, Target({"kind": "cuda", "arch": "sm_80"})).kernels
    source = print_kernel(kernel)
    planted = re.sub(r"__launch_bounds__\((\d+)[^)]*\)", r"__launch_bounds__(\1, 8)", source)
    assert planted != source and nvrtc.compile_cubin(source, "sm_80").spills == 0
    cubin = nvrtc.compile_cubin(planted, "sm_80")
    assert cubin.spills > 0 and cubin.registers <= 64
