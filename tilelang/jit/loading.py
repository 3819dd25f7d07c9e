"""Makes an artifact callable: loads its host code, and its device code at the first call on a device."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilelang.ir import deep
from tilelang.runtime import l2_window, workspaces
from tilelang.runtime.host_engine import HostLibrary, ffi_state
from tilelang.runtime.host_stub import modes_of
from tilelang.runtime.launchers import MAX_DEVICES
from tilelang.runtime.signature import Signature, TensorArg
from tilelang.runtime.tensor_maps import ENCODE
from tilelang.runtime.shared_library import open_library
from tilelang.runtime.cpu_engine import load_cpu_object

from .artifact import Artifact, Request
from .simulated import SimulatedEntry


@dataclass
class Entry:
    """The entry points of a loaded kernel.  call: inputs -> outputs.  full: takes inputs and outputs.  check: takes inputs and
    an address, see runtime/host_stub.py.  error: the exception of a callback of the last call; it is raised instead of the
    stub's short text."""

    call: Callable[..., Any]
    full: Callable[..., Any] | None = None
    check: Callable[..., Any] | None = None
    keep: list[Any] = field(default_factory=list)
    source: Any = None

    @property
    def error(self) -> Exception | None:
        return self.source.error if self.source is not None else None

    @error.setter
    def error(self, value: Exception | None) -> None:
        if self.source is not None:
            self.source.error = value


@deep()
def load(artifact: Artifact, sig: Signature, request: Request) -> Any:
    """Load the host code.  Raises RuntimeError when the target's device is absent (no GPU, no driver)."""
    if artifact.kind == "interpreted":
        return SimulatedEntry(request, sig, artifact.lowered)
    return load_cuda(artifact, sig) if artifact.kind == "cuda" else load_cpu(artifact, sig)


def _entry(library: HostLibrary, sig: Signature, keep: list[Any], source: Any, release_gil: bool) -> Entry:
    functions = {m: library.function(f"tl_{m}", *keep, release_gil=release_gil) for m in modes_of(sig)}
    return Entry(functions["call"], functions.get("full"), functions.get("check"), [library, *keep], source)


class CudaModules:
    """The device code of one kernel, loaded per device when first needed.

    functions, contexts: tables that the host code reads.  load: called by the host code for a device whose context
    slot is empty.
    """

    def __init__(self, artifact: Artifact) -> None:
        from tilelang.runtime.cuda_driver import driver  # 3 ms

        self.driver = driver()
        self.artifact = artifact
        kernels = artifact.meta["kernels"]
        self.functions = (ctypes.c_void_p * (max(1, len(kernels)) * MAX_DEVICES))()
        self.contexts = (ctypes.c_void_p * MAX_DEVICES)()
        self.status = ctypes.c_int32(0)
        self.error: Exception | None = None
        self.modules: list[Any] = []
        self.lock = threading.Lock()
        self.callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(self._load)

    def symbols(self) -> dict[str, int]:
        """Names the host code refers to -> addresses."""
        out = {"tl_functions": ctypes.addressof(self.functions), "tl_contexts": ctypes.addressof(self.contexts),
               "tl_status": ctypes.addressof(self.status),
               "tl_load": ctypes.cast(self.callback, ctypes.c_void_p).value or 0}
        for name in ("cuLaunchKernel", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"):
            out[name] = ctypes.cast(getattr(self.driver.lib, name), ctypes.c_void_p).value or 0
        # absent in old drivers, for which no kernel needs them
        for name in (ENCODE, "cuLaunchKernelEx", *workspaces.NAMES, *l2_window.NAMES):
            function = getattr(self.driver.lib, name, None)
            if function is not None:
                out[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
        return out

    def _load(self, device: int) -> int:
        """Load on a device; returns 0 on success.  The thread's current context stays as it was."""
        held = ctypes.c_void_p()
        try:
            self.driver.call("cuCtxGetCurrent", ctypes.byref(held))
            with self.lock:
                if not self.contexts[device]:
                    self._load_now(device)
            return 0
        except Exception as e:
            self.error = e
            return -1
        finally:
            self.driver.lib.cuCtxSetCurrent(held)

    def _load_now(self, device: int) -> None:
        self.driver.ensure_context(device)
        current = ctypes.c_void_p()
        self.driver.call("cuCtxGetCurrent", ctypes.byref(current))
        for k, facts in enumerate(self.artifact.meta["kernels"]):
            module = self.driver.load(self.artifact.files[facts["file"]])
            function = module.function(facts["name"], facts["shared_bytes"], facts.get("cluster", 1))
            self.modules.append(module)
            self.functions[k * MAX_DEVICES + device] = function.handle.value
        if workspaces.NAMES[0].encode() in self.artifact.files.get("host.o", b""):
            workspaces.keep_memory(self.driver)
        self.contexts[device] = current.value


def load_cuda(artifact: Artifact, sig: Signature) -> Entry:
    """Load the host object with the driver's entry points, or the library that holds host and device code.

    Device code is loaded at the first call on a device."""
    if "library" in artifact.meta:
        return _from_library(artifact, sig)
    modules = CudaModules(artifact)
    library = HostLibrary(artifact.files["host.o"], tuple(f"tl_{m}" for m in modes_of(sig)), modules.symbols())
    # A launch is short: keeping the GIL takes less time than releasing it.
    entry = _entry(library, sig, [modules], modules, release_gil=False)
    if not any(isinstance(a, TensorArg) and a.used for a in sig.inputs):
        entry.call = _on_current_device(entry.call, modules.driver)
    return entry


def _from_library(artifact: Artifact, sig: Signature) -> Entry:
    found = open_library(artifact.meta["library"], modes_of(sig), artifact.meta["fingerprint"])
    return Entry(found["call"], found.get("full"), found.get("check"))


def _on_current_device(call: Callable[..., Any], driver: Any) -> Callable[..., Any]:
    """A call without tensor arguments.  It uses the current device and stream, since no argument determines them."""
    ffi = ffi_state()

    def run(*args: Any) -> Any:
        device, stream = driver.current_device(), 0
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            device = torch.cuda.current_device()
            stream = torch.cuda.current_stream(device).cuda_stream
        ffi.default_device.value = device
        with ffi.module.use_raw_stream(ffi.module.device("cuda", device), stream):
            return call(*args)

    return run


def load_cpu(artifact: Artifact, sig: Signature) -> Entry:
    """Load the kernel object and the host object that calls it into the CPU engine, or the library that holds both."""
    if "library" in artifact.meta:
        return _from_library(artifact, sig)
    code = load_cpu_object(artifact.files["kernel.o"], artifact.meta["entry"])
    library = HostLibrary(artifact.files["host.o"], tuple(f"tl_{m}" for m in modes_of(sig)),
                          {"tl_cpu_entry": code.address})
    return _entry(library, sig, [code], None, release_gil=True)
