"""T.annotate_l2_hit_ratio: the access policy window of a launch, against a driver made of Python functions."""

import struct

import numpy as np
import pytest
from fake_driver import OnGpu, P
from hosts import tensor
from test_cuda_launcher import built, copy_stmt, function, gpu, launch

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangWarning
from tilelang.ir import I32, Var, const

HALF = struct.unpack("<I", struct.pack("<f", 0.5))[0]


def copying(a, b, ratio=0.5, **plan):
    return built(function((a, b), launch((const(1),), copy_stmt(b, a), l2_hit_ratio=((a, ratio),), **plan)), [(P, P)])


def window(address, size):
    """(CUlaunchAttributeID, address, bytes, ratio, persisting hits, streaming misses)."""
    return (1, (address & 0xFFFFFFFF, address >> 32, size, 0, HALF, 2, 1))


def test_a_tensor_was_annotated_and_nothing_was_kept_in_l2():
    a, b = tensor("A", (1024,)), tensor("B", (1024,))
    call, driver = copying(a, b, pdl=True)
    u, v = gpu(1024), gpu(1024)
    call(u, v)
    call(u, v)
    address = u.array.ctypes.data
    assert driver.launches == [] and [x[5] for x in driver.extended] == [[(6, (1, 0, 0)), window(address, 4096)]] * 2
    assert driver.limits == {6: 4096} and driver.current == 0


@pytest.mark.parametrize("length,set_aside", [(2048, 8192), (1 << 17, 1 << 18)])
def test_l2_is_set_aside_up_to_what_the_device_has(length, set_aside):
    a, b = tensor("A", (length,)), tensor("B", (length,))
    call, driver = copying(a, b)
    u = gpu(length)
    call(u, gpu(length))
    assert driver.limits == {6: set_aside} and driver.extended[0][5] == [window(u.array.ctypes.data, length * 4)]


def test_windows_have_the_size_of_each_call_and_of_the_device():
    m = Var("m", I32)
    a, b = tensor("A", (m, 64)), tensor("B", (m, 64))
    call, driver = copying(a, b)
    driver.window = 1 << 16
    arrays = [OnGpu(np.zeros((n, 64), np.float32)) for n in (3, 1000)]
    for u in arrays:
        call(u, u)
    assert driver.limits == {6: 1 << 18}
    assert [x[5] for x in driver.extended] == [[window(u.array.ctypes.data, n)] for u, n in zip(arrays, (768, 1 << 16))]


def test_devices_without_windows_are_launched_without():
    a, b = tensor("A", (64,)), tensor("B", (64,))
    call, driver = copying(a, b)
    driver.window = driver.most_set_aside = 0
    call(gpu(64), gpu(64))
    assert driver.extended[0][5] == []


def annotated(second=0.0):
    @T.prim_func
    def f(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            T.annotate_l2_hit_ratio({A: 0.5, B: second})
            B[T.get_thread_binding()] = A[T.get_thread_binding()]

    return f


def test_what_has_no_window_is_said():
    with pytest.warns(TileLangWarning, match="l2-hint-unused: a launch keeps one tensor in L2"):
        program = annotated(0.5)
    for arch in ("sm_75", "gfx942"):
        with pytest.warns(TileLangWarning, match=f"l2-hint-unused: `A` is not kept in L2: {arch}"):
            tilelang.lower(program, target=arch)


@pytest.mark.filterwarnings("error")
def test_the_host_code_of_a_program_has_the_window():
    from tilelang.runtime.host_stub import stub_text
    from tilelang.runtime.launchers import GpuLauncher
    from tilelang.runtime.signature import signature_of
    from tilelang.target import Target
    from tilelang.transform.pipeline import lower as lowered

    program = annotated()
    out = lowered(program.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    sig = signature_of(program.func, None)
    text = stub_text(sig, GpuLauncher(out.host, out.kernels), set(sig.symbols), ("call",))
    assert "@cuLaunchKernelEx" in text and f"store i32 {HALF}, ptr" in text and "@cuCtxSetLimit(i32 6" in text
