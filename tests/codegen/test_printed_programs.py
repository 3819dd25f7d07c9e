"""Every program of tests/programs.py: its printed CUDA assembles without local memory, and computes the right values
when the text is run on the host."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from programs import cases

from tilelang.arith import simplify
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Const, Var, const, numpy_dtype, substitute
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

sys.path.insert(0, str(Path(__file__).parent))
from host_cuda import available, run_on_host

CASES = {c.name: c for c in cases()}
QUICK = ("softmax_37x100_float16", "gemm_TN", "gemm_f32", "gemm_dyn", "attention_causal")


def lowered(case, arch="sm_80"):
    func = case.program().func
    (kernel,) = lower(func, Target({"kind": "cuda", "arch": arch}), {}).kernels
    return func, kernel


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("name, arch", [(n, "sm_80") for n in CASES] + [(n, "sm_90a") for n in QUICK])
def test_assembles_in_registers(name, arch):
    _, kernel = lowered(CASES[name], arch)
    cubin = nvrtc.compile_cubin(print_kernel(kernel), arch)
    assert cubin.spills == 0 and cubin.kernels[kernel.name].stack_bytes == 0, cubin.log


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_89", "sm_90", "sm_100a", "sm_120a"])
def test_every_generation_assembles(arch):
    for name in ("gemm_NN", "attention_causal"):
        _, kernel = lowered(CASES[name], arch)
        assert nvrtc.compile_cubin(print_kernel(kernel), arch).spills == 0


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_programs_of_the_gpu_runner_assemble():
    path = Path(__file__).parents[2] / "benchmarks" / "gpu_run.py"
    spec = importlib.util.spec_from_file_location("gpu_run", path)
    runner = sys.modules["gpu_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    for program in (runner.gemm_program(8192, 8192, 8192, **runner.GEMM_CONFIGS[0]), runner.add_program(2**28),
                    runner.attention_program(4, 16, 4096, 128, False, bm=64, bn=64)):
        (kernel,) = lower(program.func, Target({"kind": "cuda", "arch": "sm_90a"}), {}).kernels
        cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
        assert cubin.spills == 0 and cubin.registers <= 255


def value_of(e, env):
    if isinstance(e, int):
        return e
    got = simplify(substitute(e, {v: const(n, v.dtype) for v, n in env.items()}))
    assert isinstance(got, Const), got
    return int(got.value)


def bound_arguments(func, case, inputs, want):
    """(values by parameter name, outputs, sizes by symbol) for a launch."""
    values, outputs, sizes = {}, [], {}
    given, wanted = iter(inputs), iter(want)
    for i, (_, b) in enumerate(func.buffers):
        array = np.zeros(next(wanted).shape, numpy_dtype(b.dtype)) if i in case.out_idx \
            else np.ascontiguousarray(next(given))
        if i in case.out_idx:
            outputs.append(array)
        values[b.name] = array
        sizes |= {d: n for d, n in zip(b.shape, array.shape) if isinstance(d, Var)}
    return values | {v.name: n for v, n in sizes.items()}, outputs, sizes


@pytest.mark.skipif(not available(), reason="g++ and a CPU with F16C are needed")
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_text_computes_the_program(name, tmp_path):
    case = CASES[name]
    func, kernel = lowered(case)
    inputs = case.inputs(np.random.default_rng(0))
    want = case.reference(*inputs)
    values, outputs, sizes = bound_arguments(func, case, inputs, want)
    run_on_host(kernel, values, tuple(value_of(g, sizes) for g in kernel.grid), tmp_path)
    for got, expected in zip(outputs, want):
        assert (np.abs(got.astype(np.float64) - expected) <= case.bound(*inputs)).all()
