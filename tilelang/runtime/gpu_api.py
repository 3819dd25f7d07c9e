"""The drivers of GPUs as tables: what a launcher calls, by the names of each library.

Host code and the loader are written with CUDA's names.  HIP has functions with the same parameters, which the table names;
they differ in what a thread has current: a context of CUDA, which is pushed and popped, a device of HIP, which is set.
Sources: CUDA Driver API reference; HIP API reference ("Module management", "Device management", "Stream ordered memory
allocator"; its functions of contexts are deprecated).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from tilelang.ir.record import record

from .host_frame import CUDA as CUDA_DEVICE
from .host_frame import ROCM as ROCM_DEVICE

ENTERING = 1 << 16  # added to the result of setting a device, to tell it from that of the call that was to follow


@record
class GpuApi:
    """A driver.  device: DLPack's type of its devices.  place: LLVM type of what a thread has current.  cooperative: function
    of a launch whose blocks all run at once, with the parameters of cuLaunchKernel but for the last; "" where attributes of a
    launch say so (cuLaunchKernelEx).  names: function of CUDA -> the function with the same parameters."""

    title: str
    device: int
    place: str
    cooperative: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, function: str) -> str:
        """The name in this driver of a function of CUDA's."""
        return self.names.get(function, function)


CUDA = GpuApi("CUDA", CUDA_DEVICE, "ptr")
HIP = GpuApi("HIP", ROCM_DEVICE, "i32", "hipModuleLaunchCooperativeKernel", {
    "cuInit": "hipInit", "cuDriverGetVersion": "hipRuntimeGetVersion", "cuDeviceGetCount": "hipGetDeviceCount",
    "cuDeviceGet": "hipDeviceGet", "cuDeviceGetName": "hipDeviceGetName", "cuDeviceTotalMem_v2": "hipDeviceTotalMem",
    "cuDeviceGetAttribute": "hipDeviceGetAttribute", "cuCtxGetDevice": "hipGetDevice", "cuCtxGetCurrent": "hipGetDevice",
    "cuCtxSetCurrent": "hipSetDevice", "cuCtxPushCurrent_v2": "hipSetDevice", "cuCtxPopCurrent_v2": "hipSetDevice",
    "cuModuleLoadData": "hipModuleLoadData", "cuModuleUnload": "hipModuleUnload",
    "cuModuleGetFunction": "hipModuleGetFunction", "cuFuncGetAttribute": "hipFuncGetAttribute",
    "cuLaunchKernel": "hipModuleLaunchKernel", "cuMemAllocAsync": "hipMallocAsync", "cuMemFreeAsync": "hipFreeAsync",
    "cuMemsetD8Async": "hipMemsetD8Async", "cuDeviceGetDefaultMemPool": "hipDeviceGetDefaultMemPool",
    "cuMemPoolGetAttribute": "hipMemPoolGetAttribute", "cuMemPoolSetAttribute": "hipMemPoolSetAttribute"})
APIS = {"cuda": CUDA, "hip": HIP}  # by kind of target
