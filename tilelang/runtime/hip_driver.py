"""ctypes interface to the driver of AMD GPUs, libamdhip64: what differs from CUDA's (cuda_driver.py).

Sources: HIP API reference, "Device management", "Error handling"; the numbers of hipDeviceAttribute_t.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from functools import cache
from typing import Any

from tilelang.errors import error, register
from tilelang.target.probe import hip_arch_of, load_rocm

from . import cuda_driver
from .cuda_driver import DeviceProperties, Driver
from .gpu_api import HIP

register("hip-missing", RuntimeError, "no HIP driver or AMD GPU is usable on this machine",
         expected="a HIP driver and an AMD GPU")
register("hip-driver", RuntimeError, "a HIP driver call failed", "see the name of the error in the HIP API reference",
         expected="a call that succeeds")
HOW = "install the amdgpu driver and ROCm, or a ROCm build of torch; ROCM_PATH names another folder than /opt/rocm"


class HipDriver(Driver):
    """The loaded library libamdhip64, initialised."""

    api, kind = HIP, "hip-driver"
    attributes = {"max_threads_per_block": 56, "max_shared_per_block": 74, "warp_size": 87, "registers_per_block": 71,
                  "clock_khz": 5, "sm_count": 63, "memory_clock_khz": 60, "bus_width_bits": 59, "l2_bytes": 19,
                  "threads_per_sm": 57, "cc_major": 23, "cc_minor": 61, "shared_per_sm": 76, "max_shared_optin": 74}
    any_hint = "errors of kernels arrive at a later call: run with AMD_SERIALIZE_KERNEL=3, which waits after each"
    hints = {2: "free memory on the device, or use smaller tensors", 100: "check rocm-smi and HIP_VISIBLE_DEVICES",
             101: "check rocm-smi and HIP_VISIBLE_DEVICES",
             209: "the code object is for another chip: compile for this device's mcpu (tilelang doctor names it)",
             200: "the code object is damaged or newer than the driver: compile again, or update ROCm",
             701: "the kernel needs more registers or LDS than a workgroup may have: use smaller tiles"}

    def _open(self) -> Any:
        lib = load_rocm()
        if lib is None:
            raise error("hip-missing", "no HIP driver (libamdhip64) was found on this machine: kernels for AMD GPUs compile "
                        "here, and do not run", found="none", hint=HOW)
        lib.hipGetErrorName.restype = lib.hipGetErrorString.restype = ctypes.c_char_p
        return lib

    def _said(self, rc: int) -> tuple[bytes | None, bytes | None]:
        return self.lib.hipGetErrorName(rc), self.lib.hipGetErrorString(rc)

    def version(self) -> tuple[int, int]:
        """Version of HIP."""
        v = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(v))
        return v.value // 10_000_000, v.value // 100_000 % 100

    def properties(self, device: int = 0) -> DeviceProperties:
        """A device, with its architecture."""
        return replace(super().properties(device), arch=hip_arch_of(self.lib, device) or "")

    def _primary(self, device: int) -> int:
        return device


_lock, _driver = threading.Lock(), cache(HipDriver)


def driver_of(kind: str) -> Driver:
    """The driver of a kind of target, "cuda" or "hip", initialised once.  Raises cuda-missing, hip-missing, cuda-driver,
    hip-driver."""
    with _lock:
        return _driver() if kind == "hip" else cuda_driver.driver()
