"""Exports CUDA kernels as shared libraries that the module loader of TVM-FFI opens.

The library contains the device code and the host program.  It finds the driver (libcuda.so.1) when it is loaded; without a
driver, calls fail as for an unusable device.  The device code is loaded on a device at the first call there.  The library
cannot recompile: tensors whose addresses are not aligned for the kernel's vector accesses are rejected.
"""

from __future__ import annotations

import re
from typing import Any

from tilelang.target.cluster import PORTABLE

from .c_functions import NO_DRIVER
from .cpu_engine import cpu_engine
from .cuda_driver import ATTRIBUTES, FUNC_ATTRIBUTES, FUNC_MAX_DYNAMIC_SHARED, FUNC_NON_PORTABLE_CLUSTER
from .launchers import MAX_DEVICES
from .llvm_text import Writer
from .shared_library import export_name, ffi_entry, link_with_ffi, run_at_load

_DECLARED = re.compile(r"^declare i32 @(cu\w+)\(([^)]*)\)$", re.MULTILINE)
_LOADING = {"cuInit": "i32", "cuDeviceGet": "ptr, i32", "cuDevicePrimaryCtxRetain": "ptr, i32", "cuModuleLoadData": "ptr, ptr",
            "cuModuleGetFunction": "ptr, ptr, ptr", "cuFuncSetAttribute": "ptr, i32, i32",
            "cuFuncGetAttribute": "ptr, i32, ptr", "cuDeviceGetAttribute": "ptr, i32, i32"}

_DRIVER = """
@tl_text_driver = private unnamed_addr constant [13 x i8] c"libcuda.so.1\\00"
declare ptr @dlopen(ptr, i32)
declare ptr @dlsym(ptr, ptr)
define internal void @tl_find_driver() {{
  %driver = call ptr @dlopen(ptr @tl_text_driver, i32 2)
  %none = icmp eq ptr %driver, null
  br i1 %none, label %out, label %find
find:
{finds}
  br label %out
out:
  ret void
}}
"""
def write_cuda_library(path: Any, name: str, host_ir: str, kernels: list[dict[str, Any]], images: dict[str, bytes],
                       fingerprint: str) -> None:
    """Link the kernels of a program to a shared library.

    host_ir: text of the host module.  kernels: for each its name, file (a key of images), shared_bytes (None: run-time size)
    and cluster.  fingerprint: stored in the file and checked by open_library.  Raises kernel-export, kernel-link.
    """
    text = library_text(export_name(name), host_ir, kernels, images, fingerprint)
    link_with_ffi(path, name, {"host.o": cpu_engine().emit_object(text, opt=1)}, ("-ldl",))


def library_text(name: str, host_ir: str, kernels: list[dict[str, Any]], images: dict[str, bytes], fingerprint: str) -> str:
    """LLVM IR of the library."""
    text = host_ir.replace("@tl_make_array = external global ptr", "@tl_make_array = internal global ptr null")
    text = text.replace("@tl_default_device = external global i32\n", "").replace("load i32, ptr @tl_default_device",
                                                                                  "call i32 @tl_current_device()")
    text, called = with_device_code(text, kernels, images)
    driver = driver_text({**called, "cuCtxGetDevice": "ptr"}, "tl_start")
    return "\n".join([text, driver, current_device(), ffi_entry(name, fingerprint, "tl_find_driver")])


def with_device_code(host_ir: str, kernels: list[dict[str, Any]], images: dict[str, bytes]) -> tuple[str, dict[str, str]]:
    """(LLVM IR of a host program with its device code and what loads it, the driver functions that it calls: name -> types)."""
    called = dict(_LOADING)

    def note(m: re.Match[str]) -> str:
        called[m[1]] = m[2]
        return ""

    text = _DECLARED.sub(note, host_ir).replace("declare i32 @tl_load(i32)\n", "")
    functions, contexts = (f"internal global [{n * MAX_DEVICES} x ptr] zeroinitializer" for n in (max(1, len(kernels)), 1))
    for old, new in (("@tl_functions = external global ptr", f"@tl_functions = {functions}"),
                     ("@tl_contexts = external global ptr", f"@tl_contexts = {contexts}"),
                     ("@tl_status = external global i32", "@tl_status = internal global i32 0")):
        text = text.replace(old, new)
    return "\n".join([text, *(_constant(f"tl_image_{k}", images[f], 16) for k, f in enumerate(images)),
                      _loader(kernels, list(images)), _load()]), called


def driver_text(called: dict[str, str], start: str = "tl_find_driver") -> str:
    """Functions of the driver (name -> types of its parameters), found when the library is loaded.  start: runs then."""
    finds = "".join(f"  %at_{n} = call ptr @dlsym(ptr %driver, ptr @tl_name_{n})\n  store ptr %at_{n}, ptr @tl_at_{n}\n"
                    for n in called)
    return "\n".join([*(_forwarder(n, types) for n, types in called.items()), _DRIVER.format(finds=finds), run_at_load(start)])


def _constant(name: str, data: bytes, align: int = 1) -> str:
    body = "".join(f"\\{b:02X}" for b in data)
    return f'@{name} = private unnamed_addr constant [{len(data)} x i8] c"{body}", align {align}'


def _forwarder(name: str, types: str) -> str:
    """A wrapper of a driver function, which returns NO_DRIVER if the driver does not have the function."""
    args = [t.strip() for t in types.split(",")]
    given = ", ".join(f"{t} %a{k}" for k, t in enumerate(args))
    return "\n".join([_constant(f"tl_name_{name}", name.encode() + b"\0"), f"@tl_at_{name} = internal global ptr null",
                      f"define internal i32 @{name}({given}) {{", f"  %f = load ptr, ptr @tl_at_{name}",
                      "  %none = icmp eq ptr %f, null", "  br i1 %none, label %missing, label %there", "there:",
                      f"  %rc = call i32 %f({given})", "  ret i32 %rc", "missing:", f"  ret i32 {NO_DRIVER}", "}"])


def current_device() -> str:
    """tl_current_device: the number of the current device, 0 where there is none."""
    w = Writer()
    device = w.slot("i32")
    w.put(device, 0, "i32", "0")
    good = w.ins(f"icmp eq i32 {w.ins(f'call i32 @cuCtxGetDevice(ptr {device})')}, 0")
    found = w.at(device, 0, "i32")
    w.do(f"ret i32 {w.ins(f'select i1 {good}, i32 {found}, i32 0')}")
    return w.function("tl_current_device", "", "internal ")


def _load() -> str:
    """tl_load: loads the device code on a device, once."""
    w = Writer()
    slot = w.ins(f"getelementptr ptr, ptr @tl_contexts, i64 {w.ins('zext i32 %device to i64')}")
    with w.loop() as leave:
        leave(w.ins(f"extractvalue {{ i32, i1 }} {w.ins('cmpxchg ptr @tl_lock, i32 0, i32 1 acquire monotonic')}, 1"))
        w.do("call i32 @sched_yield()")
    there = w.ins(f"icmp ne ptr {w.at(slot, 0, 'ptr')}, null")
    rc = w.either(there, lambda: "0", lambda: w.ins(f"call i32 @tl_load_now(i32 %device, ptr {slot})"), "i32")
    w.do("store atomic i32 0, ptr @tl_lock release, align 4")
    w.do(f"ret i32 {rc}")
    return "@tl_lock = internal global i32 0\ndeclare i32 @sched_yield()\n" + w.function("tl_load", "i32 %device", "internal ")


def _loader(kernels: list[dict[str, Any]], files: list[str]) -> str:
    """tl_load_now: loads the modules on a device and stores their functions, then the context, which marks it as loaded."""
    w, names = Writer(), []

    def must(call: str, pop: bool = True) -> None:
        rc = w.ins(f"call i32 {call}")
        with w.when(w.ins(f"icmp eq i32 {rc}, 0"), unless=True):
            if pop:
                w.do(f"call i32 @cuCtxPopCurrent_v2(ptr {held})")
            w.do(f"store i32 {rc}, ptr @tl_status")
            w.do(f"ret i32 {rc}")

    device, context, held = w.slot("i32"), w.slot("ptr"), w.slot("ptr")
    must("@cuInit(i32 0)", False)
    must(f"@cuDeviceGet(ptr {device}, i32 %device)", False)
    ordinal = w.ins(f"load i32, ptr {device}")
    must(f"@cuDevicePrimaryCtxRetain(ptr {context}, i32 {ordinal})", False)
    made = w.ins(f"load ptr, ptr {context}")
    must(f"@cuCtxPushCurrent_v2(ptr {made})", False)
    modules = []
    for k, _ in enumerate(files):
        module = w.slot("ptr")
        must(f"@cuModuleLoadData(ptr {module}, ptr @tl_image_{k})")
        modules.append(w.ins(f"load ptr, ptr {module}"))
    index = w.ins("zext i32 %device to i64")
    for k, kernel in enumerate(kernels):
        names.append(_constant(f"tl_kernel_{k}", kernel["name"].encode() + b"\0"))
        at, size = w.slot("ptr"), w.slot("i32")
        must(f"@cuModuleGetFunction(ptr {at}, ptr {modules[files.index(kernel['file'])]}, ptr @tl_kernel_{k})")
        function = w.ins(f"load ptr, ptr {at}")
        shared = kernel["shared_bytes"]
        if shared is None:  # the maximum of the device for a block, minus static shared memory
            must(f"@cuDeviceGetAttribute(ptr {size}, i32 {ATTRIBUTES['max_shared_optin']}, i32 {ordinal})")
            most = w.ins(f"load i32, ptr {size}")
            must(f"@cuFuncGetAttribute(ptr {size}, i32 {FUNC_ATTRIBUTES['shared_bytes']}, ptr {function})")
            shared = w.ins(f"sub i32 {most}, {w.ins(f'load i32, ptr {size}')}")
        if not isinstance(shared, int) or shared > 48 * 1024:
            must(f"@cuFuncSetAttribute(ptr {function}, i32 {FUNC_MAX_DYNAMIC_SHARED}, i32 {shared})")
        if kernel.get("cluster", 1) > PORTABLE:
            must(f"@cuFuncSetAttribute(ptr {function}, i32 {FUNC_NON_PORTABLE_CLUSTER}, i32 1)")
        slot = w.ins(f"getelementptr ptr, ptr @tl_functions, i64 {w.ins(f'add i64 {index}, {k * MAX_DEVICES}')}")
        w.do(f"store ptr {function}, ptr {slot}")
    w.do(f"call i32 @cuCtxPopCurrent_v2(ptr {held})")
    w.do(f"store atomic ptr {made}, ptr %slot release, align 8")
    w.do("ret i32 0")
    return "\n".join([*names, w.function("tl_load_now", "i32 %device, ptr %slot", "internal ")])
