"""ctypes interface to the drivers of GPUs: contexts, modules, device properties.  `Driver` is CUDA's, hip_driver.py HIP's.

The import needs no driver; calls without a driver raise RuntimeError.  Source: CUDA Driver API reference.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

from tilelang.errors import TileLangError, error, register
from tilelang.ir.record import record
from tilelang.target.cluster import PORTABLE
from tilelang.target.probe import load_libcuda
from tilelang.log import phase

from .gpu_api import CUDA, ENTERING, GpuApi

register("cuda-missing", RuntimeError, "no CUDA driver or device is usable on this machine",
         expected="a CUDA driver and device")
register("cuda-driver", RuntimeError, "a CUDA driver call failed",
         "see the name of the error in the CUDA driver's documentation", expected="a call that succeeds")

# CUresult -> what to do
_ANY_HINT = "errors of kernels arrive at a later call: run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer"
_HINTS = {2: "free memory on the device, or use smaller tensors", 100: "check nvidia-smi and CUDA_VISIBLE_DEVICES",
          209: "the cubin is for another architecture: compile for this device's arch",
          218: "the cubin is damaged or newer than the driver: compile again, or update the driver",
          720: "launch fewer blocks, with a loop in each (T.Persistent)",
          701: "the kernel needs more registers or shared memory than a block may have: use smaller tiles"}
# CUdevice_attribute
ATTRIBUTES = {"max_threads_per_block": 1, "max_shared_per_block": 8, "warp_size": 10, "registers_per_block": 12,
              "clock_khz": 13, "sm_count": 16, "memory_clock_khz": 36, "bus_width_bits": 37, "l2_bytes": 38,
              "threads_per_sm": 39, "cc_major": 75, "cc_minor": 76, "shared_per_sm": 81, "registers_per_sm": 82,
              "max_shared_optin": 97, "persisting_l2_bytes": 108, "l2_window_bytes": 109}
# CUfunction_attribute
FUNC_MAX_DYNAMIC_SHARED, FUNC_NON_PORTABLE_CLUSTER = 8, 14
FUNC_ATTRIBUTES = {"max_threads": 0, "shared_bytes": 1, "const_bytes": 2, "local_bytes": 3, "registers": 4}


@record
class DeviceProperties:
    """One GPU.  Sizes in bytes, clocks in kHz."""

    index: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    total_memory: int
    l2_bytes: int
    shared_per_sm: int
    max_shared_optin: int
    threads_per_sm: int
    clock_khz: int
    arch: str = ""  # of an AMD GPU: "gfx942"


class Driver:
    """The loaded driver library, initialised.  Calls raise RuntimeError with the name and text of the driver's error."""

    api: GpuApi = CUDA
    attributes, hints, any_hint, kind = ATTRIBUTES, _HINTS, _ANY_HINT, "cuda-driver"

    def __init__(self) -> None:
        self.lib = self._open()
        with phase(self.api.name("cuInit")):
            self.call("cuInit", 0)

    def _open(self) -> Any:
        lib = load_libcuda()
        if lib is None:
            raise error("cuda-missing", "no CUDA driver was found on this machine", found="none",
                        hint="install the NVIDIA driver, or compile for target=\"cpu\"")
        return lib

    def check(self, rc: int, what: str) -> None:
        """Raise when a driver call's result is not success."""
        if rc != 0:
            raise self.failure(rc, what)

    def failure(self, rc: int, what: str) -> TileLangError:
        """The error for the result of a call.  what: its name."""
        if rc & ENTERING:
            rc, what = rc - ENTERING, f"{what} ({self.api.name('cuCtxSetCurrent')})"
        name, text = self._said(rc)
        return error(self.kind, f"{what} failed: ‹{(name or b'?').decode()} ({rc})›: {(text or b'unknown error').decode()}",
                     hint=self.hints.get(rc, self.any_hint))

    def _said(self, rc: int) -> tuple[bytes | None, bytes | None]:
        """Name and text of a result."""
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self.lib.cuGetErrorName(rc, ctypes.byref(name))
        self.lib.cuGetErrorString(rc, ctypes.byref(text))
        return name.value, text.value

    def call(self, name: str, *args: Any) -> None:
        """lib.<name>(*args), checked; the name is CUDA's."""
        name = self.api.name(name)
        function = getattr(self.lib, name, None)
        if function is None:
            raise error(self.kind, f"the {self.api.title} driver on this machine has no {name}", found=f"none of {name}",
                        hint="update the driver")
        self.check(function(*args), name)

    # ---- devices ------------------------------------------------------------------------------------------------
    def device_count(self) -> int:
        n = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(n))
        return n.value

    def version(self) -> tuple[int, int]:
        """CUDA version of the driver."""
        v = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(v))
        return v.value // 1000, v.value % 1000 // 10

    def attribute(self, name: str, device: int = 0) -> int:
        """A device attribute by its name in `attributes`."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), self.attributes[name], self._device(device))
        return value.value

    def _device(self, index: int) -> ctypes.c_int:
        dev = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(dev), index)
        return dev

    def properties(self, device: int = 0) -> DeviceProperties:
        name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
        dev = self._device(device)
        self.call("cuDeviceGetName", name, 256, dev)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), dev)
        at = {k: self.attribute(k, device) for k in self.attributes}
        return DeviceProperties(device, name.value.decode(), (at["cc_major"], at["cc_minor"]), at["sm_count"],
                                total.value, at["l2_bytes"], at["shared_per_sm"], at["max_shared_optin"],
                                at["threads_per_sm"], at["clock_khz"])

    # ---- contexts -----------------------------------------------------------------------------------------------
    def place(self) -> int | None:
        """What this thread has current: the address of a context, or the number of an AMD GPU; None for none, or for 0."""
        current = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        return current.value

    def return_to(self, place: int | None) -> None:
        """Make current what `place` gave.  Errors are not reported."""
        getattr(self.lib, self.api.name("cuCtxSetCurrent"))(ctypes.c_void_p(place))

    def ensure_context(self, device: int = 0) -> None:
        """Make the device's primary context current in this thread: the one that torch and the runtime API use."""
        primary = self._primary(device)
        if self.place() != primary:
            self.call("cuCtxSetCurrent", ctypes.c_void_p(primary))

    def _primary(self, device: int) -> int:
        return _primary_context(self, device)

    def current_device(self) -> int:
        """Index of the current context's device; 0 when no context is current."""
        current, dev = ctypes.c_void_p(), ctypes.c_int()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        if not current.value:
            return 0
        self.call("cuCtxGetDevice", ctypes.byref(dev))
        return dev.value

    # ---- modules ------------------------------------------------------------------------------------------------
    def load(self, binary: bytes) -> Module:
        """Load a cubin or code object on the current device."""
        handle = ctypes.c_void_p()
        with phase(self.api.name("cuModuleLoadData")):
            self.call("cuModuleLoadData", ctypes.byref(handle), binary)
        return Module(self, handle)


class Module:
    """A loaded cubin or code object.  Unloaded when dropped."""

    def __init__(self, driver: Driver, handle: ctypes.c_void_p) -> None:
        self.driver, self.handle = driver, handle

    def function(self, name: str, dynamic_shared: int | None = 0, cluster: int = 1) -> Function:
        """A kernel by name, enabled to use dynamic_shared bytes (including the opt-in above 48 KB).

        dynamic_shared None: the size depends on the call, and the kernel may use the maximum of the device.
        cluster: blocks in a cluster of its launches; sizes above the portable maximum are enabled here.
        """
        handle = ctypes.c_void_p()
        self.driver.call("cuModuleGetFunction", ctypes.byref(handle), self.handle, name.encode())
        if dynamic_shared is None:
            static = Function(self, name, handle, 0).attribute("shared_bytes")
            device = self.driver.current_device()
            dynamic_shared = self.driver.attribute("max_shared_optin", device) - static
        f = Function(self, name, handle, dynamic_shared)
        if dynamic_shared > 48 * 1024 and self.driver.api is CUDA:
            self.driver.call("cuFuncSetAttribute", handle, FUNC_MAX_DYNAMIC_SHARED, dynamic_shared)
        if cluster > PORTABLE:
            self.driver.call("cuFuncSetAttribute", handle, FUNC_NON_PORTABLE_CLUSTER, 1)
        return f

    def __del__(self) -> None:
        # At interpreter exit the context may already be destroyed; errors cannot be reported then.
        getattr(self.driver.lib, self.driver.api.name("cuModuleUnload"))(self.handle)


@dataclass
class Function:
    """A kernel.  dynamic_shared: bytes that it was enabled to use."""

    module: Module
    name: str
    handle: ctypes.c_void_p
    dynamic_shared: int

    def attribute(self, name: str) -> int:
        """A function attribute by its name in FUNC_ATTRIBUTES."""
        value = ctypes.c_int()
        self.module.driver.call("cuFuncGetAttribute", ctypes.byref(value), FUNC_ATTRIBUTES[name], self.handle)
        return value.value


_lock = threading.Lock()


@cache
def _driver() -> Driver:
    return Driver()


def driver() -> Driver:
    """The driver of this process, initialised once.  Raises RuntimeError without a driver or device."""
    with _lock:
        return _driver()


@cache
def _primary_context(d: Driver, device: int) -> int:
    ctx = ctypes.c_void_p()
    with phase("cuDevicePrimaryCtxRetain"):
        d.call("cuDevicePrimaryCtxRetain", ctypes.byref(ctx), d._device(device))
    return int(ctx.value or 0)


def is_available() -> bool:
    """Whether there is a driver with at least one device."""
    try:
        return driver().device_count() > 0
    except RuntimeError:
        return False
