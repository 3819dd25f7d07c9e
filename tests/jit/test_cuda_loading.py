"""Loading CUDA kernels and launching them, against a driver made of Python functions."""

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.runtime import nvrtc
from tilelang.runtime.gpu_api import CUDA

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
from fake_driver import Driver, OnGpu

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
P = ctypes.c_void_p


class Library:
    """libcuda by attributes."""


class FakeDriver(Driver):
    """What runtime.cuda_driver.Driver offers the loader, with every call written down."""

    api = CUDA

    def __init__(self, types):
        super().__init__([None] * len(types), types)
        self.lib, self.log, self.fail = Library(), [], None
        for name, callback in self.callbacks.items():
            setattr(self.lib, name, callback)

    def place(self):
        return self.current or None

    def return_to(self, place):
        self.current = place or 0

    def failure(self, code, what):
        return RuntimeError(f"{what} failed: CUDA_ERROR_{code}")

    def ensure_context(self, device):
        self.log.append(("context", device))
        self.device, self.current = device, 7000 + device

    def current_device(self):
        return 0

    def load(self, cubin):
        if self.fail is not None:
            raise self.fail
        assert cubin[:4] == b"\x7fELF"
        outer = self

        class Module:
            def function(self, name, shared, cluster):
                outer.log.append((name, shared))
                return type("F", (), {"handle": P(1000 + 100 * outer.device + ("_1" in name))})()

        return Module()


@T.prim_func
def main(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32"), n: T.int32):
    with T.Kernel(2, threads=128) as bx:
        s = T.alloc_shared((128,), "float32")
        T.copy(A[bx * 128], s)
        for i in T.Parallel(128):
            B[bx * 128 + i] = s[i] * T.cast(n, "float32")
    with T.Kernel(n, threads=32) as bx:
        for i in T.Parallel(32):
            B[i] = B[i] + 1.0


@pytest.fixture
def loaded(monkeypatch):
    with tilelang.env.using(TILELANG_DISABLE_CACHE="1"):
        kernel = tilelang.compile(main, target={"kind": "cuda", "arch": "sm_80"})
    types = [(P, P, ctypes.c_int32), (P,)]
    driver = FakeDriver(types)
    from tilelang.runtime import cuda_driver

    monkeypatch.setattr(cuda_driver, "driver", lambda: driver)
    return kernel, driver


def arrays(device=0):
    return [OnGpu(np.zeros(256, np.float32), device) for _ in range(2)]


def test_modules_load_once_per_device_and_launch_there(loaded):
    kernel, driver = loaded
    assert driver.log == []
    for device in (0, 0, 2):
        a, b = arrays(device)
        assert kernel(a, b, 3) is None
    shared = kernel.resource_usage[0]["shared_bytes"]
    assert shared >= 512
    assert driver.log == [("context", 0), ("main_kernel", shared), ("main_kernel_1", 0),
                          ("context", 2), ("main_kernel", shared), ("main_kernel_1", 0)]
    assert [x[0] for x in driver.launches] == [1000, 1001, 1000, 1001, 1200, 1201]
    first, second = driver.launches[:2]
    assert first[1:4] == ((2, 1, 1), (128, 1, 1), shared) and first[5][2] == 3
    assert second[1:3] == ((3, 1, 1), (32, 1, 1)) and driver.current == 0
    assert {x[6] for x in driver.launches} == {7000, 7002}


def test_a_failing_load_is_told_in_full_and_may_succeed_later(loaded):
    kernel, driver = loaded
    driver.fail = RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        kernel(*arrays(), 1)
    driver.fail = None
    kernel(*arrays(), 1)
    assert len(driver.launches) == 2


def test_a_failed_launch_was_told_without_the_drivers_error(loaded):
    kernel, driver = loaded
    driver.result = 701
    with pytest.raises(RuntimeError, match="^kernel main: launch of main_kernel failed: CUDA_ERROR_701$"):
        kernel(*arrays(), 1)
    driver.result = 0
    kernel(*arrays(), 1)


def test_a_grid_whose_blocks_wait_was_rejected_without_how_many_fit(loaded, monkeypatch):
    kernel, driver = loaded
    asked = []

    def call(name, found, function, threads, shared):
        asked.append((name, function.value, threads.value, shared.value))
        found._obj.value = 2

    monkeypatch.setattr(driver, "call", call, raising=False)
    monkeypatch.setattr(driver, "attribute", lambda name, device: 132, raising=False)
    driver.result = 720
    with pytest.raises(RuntimeError, match="main_kernel of blocks that wait for each other, of which 264 run at once on this"):
        kernel(*arrays(), 1)
    shared = kernel.resource_usage[0]["shared_bytes"]
    assert asked == [("cuOccupancyMaxActiveBlocksPerMultiprocessor", 1000, 128, shared)]
    with pytest.raises(RuntimeError, match="device_type mismatch"):  # the old result is not told again
        kernel(np.zeros(256, np.float32), *arrays()[1:], 1)


def test_arguments_are_checked_before_anything_is_loaded(loaded):
    kernel, driver = loaded
    a, b = arrays()
    for bad, message in (((a, b), "Kernel expected 3 inputs, but 2"), ((a, b, 0.5), "scalar n expected integer"),
                         ((np.zeros(256, np.float32), b, 1), "input A device_type mismatch, expected cuda"),
                         ((a, OnGpu(np.zeros(256, np.float32), 1), 1), "input B device_id violates"),
                         ((a, OnGpu(np.zeros(255, np.float32)), 1), r"input B shape\[0\] violates")):
        with pytest.raises((RuntimeError, ValueError), match=message):
            kernel(*bad)
    assert driver.log == [] and driver.launches == []
    kernel(a, b, 0)  # the second grid is empty: one launch
    assert len(driver.launches) == 1


def test_outputs_on_a_gpu_need_a_framework(monkeypatch, loaded):
    _, driver = loaded
    kernel = tilelang.compile(main, out_idx=[1], target={"kind": "cuda", "arch": "sm_80"})
    with pytest.raises(RuntimeError, match="need a framework that allocates on the GPU"):
        kernel(OnGpu(np.zeros(256, np.float32)), 1)
