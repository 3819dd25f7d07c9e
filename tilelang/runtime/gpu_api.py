"""The drivers of GPUs as tables: what a launcher calls, by the names of each library.

Host code and the loader are written with CUDA's names.  HIP has functions with the same parameters, which the table names;
they differ in what a thread has current: a context of CUDA, which is pushed and popped, a device of HIP, which is set.
Sources: CUDA Driver API reference; HIP API reference ("Module management", "Device management", "Stream ordered memory
allocator"; its functions of contexts are deprecated).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field

from tilelang.ir.record import record
from tilelang.target.llvm_values import Value

from .host_frame import CUDA as CUDA_DEVICE
from .host_frame import ROCM as ROCM_DEVICE
from .llvm_text import Writer

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


# ---- calls on the device of a launch ---------------------------------------------------------------------------------

# PyTorch computes gradients in threads of its own, in which a kernel may be the first CUDA call.  Launches, allocations and
# tensor maps (cuTensorMapEncodeTiled) fail in a thread without a current context.  A thread of HIP always has a current device.

def in_context(w: Writer, context: str, call: Callable[[], str], api: GpuApi = CUDA) -> Value:
    """Emit `call` with this context (ptr) current, then restore the thread's previous context.  Returns the result of `call`.

    call: writes text, and returns the name of its result.  HIP: context is a device (i32); where making it current fails,
    `call` does not run, and the result is that failure and ENTERING.
    """
    if api is not CUDA:
        return _on_device(w, context, call, api)
    held = w.slot("ptr")
    w.do(f"store ptr null, ptr {held}")
    w.do(f"call i32 @cuCtxGetCurrent(ptr {held})")
    same = w.at(held, 0, "ptr").test("eq", context)
    with w.when(same, unless=True):
        w.do(f"call i32 @cuCtxPushCurrent_v2(ptr {context})")
    rc = w.of("i32", call())
    with w.when(same, unless=True):
        w.do(f"call i32 @cuCtxPopCurrent_v2(ptr {held})")
    return rc


def _on_device(w: Writer, device: str, call: Callable[[], str], api: GpuApi) -> Value:
    get, enter = api.name("cuCtxGetCurrent"), api.name("cuCtxPushCurrent_v2")
    held, failed = w.slot("i32"), w.slot("i32")
    w.do(f"store i32 -1, ptr {held}")
    w.do(f"store i32 {w.ins(f'call i32 @{get}(ptr {held})')}, ptr {failed}")
    before = w.at(held, 0, "i32")
    same = before.test("eq", device)
    with w.when(same, unless=True):
        w.do(f"store i32 {w.ins(f'call i32 @{enter}(i32 {device})')}, ptr {failed}")
    code = w.at(failed, 0, "i32")
    rc = w.either(code.test("eq", 0), call, lambda: code | ENTERING, "i32")
    with w.when(same, unless=True):
        w.do(f"call i32 @{enter}(i32 {before})")
    return rc
