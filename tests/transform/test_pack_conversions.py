"""Conversions to 16-bit floats in pairs and of small integers: the same bits as one by one, on the simulator."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Call, numpy_dtype, walk
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform import pipeline
from tilelang.transform.registers.pack_conversions import pack_conversions

SM80 = Target({"kind": "cuda", "arch": "sm_80"})


def converted(dt, first=0, view=False):
    """C[t, 0:8] = 8 floats of a thread; C[t, 8] a small integer, C[t, 9] a large one."""
    @T.prim_func
    def main(A: T.Tensor((128, 8), "float32"), C: T.Tensor((128, 12), dt)):
        with T.Kernel(1, threads=128):
            t = T.get_thread_binding()
            x, y = T.alloc_local((8,), "float32"), T.alloc_local((12,), dt)
            for v in T.serial(8):
                x[v] = A[t, v]
            for v in T.unroll(8):
                y[v + first] = T.cast(x[v], dt)
            for v in T.serial(8):
                C[t, v] = y[v + first]
            C[t, 8] = T.cast(t % 100, dt)
            C[t, 9] = T.cast(t * 100 - 5, dt)
            C[t, 10] = T.cast(t % 8 - 4, dt)
            C[t, 11] = T.cast(0, dt)

    return main


def result(program, dt):
    a = np.random.default_rng(0).standard_normal((128, 8)).astype(np.float32) * 100
    a[3, :4] = np.inf, -np.inf, np.nan, -0.0
    lowered = pipeline.lower(program.func, SM80)
    ops = [x.op for x in walk(lowered.kernels[0].launch, Call) if x.op in ("pack_pairs", "small_int_to_float")]
    out = run_device(lowered, {"A": a, "C": np.zeros((128, 12), numpy_dtype(dt))}).outputs["C"]
    return ops, out.view(np.uint16)


@pytest.mark.parametrize("dt, first, ops", [
    ("float16", 0, ["pack_pairs", "small_int_to_float", "small_int_to_float"]),
    ("float16", 2, ["pack_pairs", "small_int_to_float", "small_int_to_float"]),
    ("bfloat16", 0, ["pack_pairs", "small_int_to_float", "small_int_to_float"]),
    ("float16", 1, ["small_int_to_float", "small_int_to_float"])])
def test_the_same_bits(monkeypatch, dt, first, ops):
    """From an odd element on nothing is packed: a pair is one register."""
    found, got = result(converted(dt, first), dt)
    monkeypatch.setattr(pipeline, "DEVICE_PASSES", tuple(p for p in pipeline.DEVICE_PASSES if p is not pack_conversions))
    without, want = result(converted(dt, first), dt)
    assert found == ops and without == []
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("arch, packs", [("sm_90", True), ("sm_89", True), ("sm_80", False)])
@pytest.mark.parametrize("source", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dt", ["float16", "bfloat16"])
def test_float8_by_pairs(source, dt, arch, packs):
    """Every float8, where there is an instruction for two; text that NVRTC takes."""
    @T.prim_func
    def main(A: T.Tensor((16, 16), source), C: T.Tensor((16, 16), dt)):
        with T.Kernel(1, threads=32):
            a = T.alloc_shared((16, 16), source)
            T.copy(A, a)
            T.copy(a, C)

    lowered = pipeline.lower(main.func, Target({"kind": "cuda", "arch": arch}))
    assert packs == any(x.op == "pack_pairs" for x in walk(lowered.kernels[0].launch, Call))
    a = np.arange(256, dtype=np.uint8).reshape(16, 16).view(numpy_dtype(source))
    got = run_device(lowered, {"A": a, "C": np.zeros((16, 16), numpy_dtype(dt))}).outputs["C"]
    np.testing.assert_array_equal(got.astype(np.float32), a.astype(np.float32))
    if packs and nvrtc.available():
        nvrtc.compile_cubin(print_kernel(lowered.kernels[0]), arch)


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
@pytest.mark.parametrize("dt", ["uint8", "int8"])
def test_idle_threads_read_no_registers_that_they_have_not_written(dt, arch):
    """Conversions of a whole vector were moved out of the selection that lets only some threads take part."""
    @T.prim_func
    def main(A: T.Tensor((3, 64), dt), C: T.Tensor((3,), "float32")):
        with T.Kernel(1, threads=128):
            a, c = T.alloc_fragment((3, 64), dt), T.alloc_fragment((3,), "float32")
            for i, j in T.Parallel(3, 64):
                a[i, j] = A[i, j]
            T.reduce_absmax(a, c, dim=1)
            T.copy(c, C)

    lowered = pipeline.lower(main.func, Target(arch))
    assert any(x.op == "pack_pairs" for x in walk(lowered.kernels[0].launch, Call))
    a = np.random.default_rng(0).integers(0, 128, (3, 64)).astype(dt)
    np.testing.assert_array_equal(run_device(lowered, {"A": a, "C": np.zeros(3, np.float32)}).outputs["C"], a.max(1))
