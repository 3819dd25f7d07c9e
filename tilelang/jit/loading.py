"""Makes an artifact callable: loads its host code, and its device code at the first call on a device."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilelang.ir import deep
from tilelang.runtime import l2_window, nvshmem, workspaces, world
from tilelang.runtime.host_engine import HostLibrary, ffi_state
from tilelang.runtime.host_stub import modes_of
from tilelang.runtime.launchers import MAX_DEVICES
from tilelang.runtime.signature import Signature, TensorArg
from tilelang.runtime.tensor_maps import ENCODE, ENCODE_IM2COL
from tilelang.runtime.shared_library import open_library
from tilelang.runtime.cpu_engine import load_cpu_object

from .artifact import Artifact, Request
from .simulated import SimulatedEntry


TOO_LARGE = 720  # CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE


@dataclass
class Entry:
    """The entry points of a loaded kernel.  call: inputs -> outputs.  full: takes inputs and outputs.  check: takes inputs and
    an address, see runtime/host_stub.py.  source: the device code, which knows more of a failed call than the stub's short
    text."""

    call: Callable[..., Any]
    full: Callable[..., Any] | None = None
    check: Callable[..., Any] | None = None
    keep: list[Any] = field(default_factory=list)
    source: Any = None

    def diagnosed(self, problem: Exception) -> Exception | None:
        """The full error of a call that failed with `problem`; None where there is no more to say."""
        return self.source.diagnosed(problem) if self.source is not None else None


@deep()
def load(artifact: Artifact, sig: Signature, request: Request) -> Any:
    """Load the host code.  Raises RuntimeError when the target's device is absent (no GPU, no driver)."""
    if artifact.kind == "interpreted":
        return SimulatedEntry(request, sig, artifact.lowered)
    return load_cpu(artifact, sig) if artifact.kind == "cpu" else load_gpu(artifact, sig)


def _entry(library: HostLibrary, sig: Signature, keep: list[Any], source: Any, release_gil: bool) -> Entry:
    functions = {m: library.function(f"tl_{m}", *keep, release_gil=release_gil) for m in modes_of(sig)}
    return Entry(functions["call"], functions.get("full"), functions.get("check"), [library, *keep], source)


class GpuModules:
    """The device code of one kernel, loaded per device when first needed.

    functions, contexts: tables that the host code reads.  load: called by the host code for a device whose context
    slot is empty.
    """

    def __init__(self, artifact: Artifact) -> None:
        from tilelang.runtime.hip_driver import driver_of  # 3 ms

        self.driver: Any = driver_of(artifact.kind)
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
        api = self.driver.api
        # some are absent in old drivers, for which no kernel needs them
        for name in ("cuLaunchKernel", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", api.cooperative, ENCODE,
                     ENCODE_IM2COL, "cuLaunchKernelEx", *workspaces.NAMES, *l2_window.NAMES):
            function = getattr(self.driver.lib, api.name(name), None) if name else None
            if function is not None:
                out[api.name(name)] = ctypes.cast(function, ctypes.c_void_p).value or 0
        return out

    def diagnosed(self, problem: Exception) -> Exception | None:
        """The full error of a failed call, whose short text is `problem`: of the loader or the driver; None for others."""
        found, self.error = self.error, None
        rc, what = self.status.value, str(problem)
        if found is None and rc and (m := re.match(r"(kernel \S+: .*?) (?:failed|cannot be allocated)$", what)):
            found = self.driver.failure(rc, m[1] + self._fit(m[1]) if rc == TOO_LARGE else m[1])
        self.status.value = 0
        return found

    def _fit(self, what: str) -> str:
        """How many blocks of the kernel in `what` (… launch of NAME) the device runs at once."""
        k = next((k for k, facts in enumerate(self.artifact.meta["kernels"]) if what.endswith(f" {facts['name']}")), 0)
        facts, each, device = self.artifact.meta["kernels"][k], ctypes.c_int(), self.driver.current_device()
        if facts["shared_bytes"] is None:
            return " of blocks that wait for each other"
        self.driver.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(each), ctypes.c_void_p(
            self.functions[k * MAX_DEVICES + device]), ctypes.c_int(facts["threads"]), ctypes.c_size_t(facts["shared_bytes"]))
        count = each.value * self.driver.attribute("sm_count", device)
        return f" of blocks that wait for each other, of which {count} run at once on this device"

    def _load(self, device: int) -> int:
        """Load on a device; returns 0 on success.  The thread's current context stays as it was."""
        held = None
        try:
            held = self.driver.place()
            with self.lock:
                if not self.contexts[device]:
                    self._load_now(device)
            return 0
        except Exception as e:
            self.error = e
            return -1
        finally:
            self.driver.return_to(held)

    def _load_now(self, device: int) -> None:
        self.driver.ensure_context(device)
        place, modules = self.driver.place() or 1, []  # 0 is an AMD GPU too, and marks what is not loaded
        for k, facts in enumerate(self.artifact.meta["kernels"]):
            cubin = self.artifact.files[facts["file"]]
            module = self.driver.load(cubin)
            world.fill(self.driver, module, cubin, device)
            nvshmem.enter(module, cubin)
            function = module.function(facts["name"], facts["shared_bytes"], facts.get("cluster", 1))
            modules.append(module)
            self.functions[k * MAX_DEVICES + device] = function.handle.value
        if self.driver.api.name(workspaces.NAMES[0]).encode() in self.artifact.files.get("host.o", b""):
            workspaces.keep_memory(self.driver)
        self.modules += modules
        self.contexts[device] = place


def load_gpu(artifact: Artifact, sig: Signature) -> Entry:
    """Load the host object with the driver's entry points, or the library that holds host and device code.

    Device code is loaded at the first call on a device."""
    if "library" in artifact.meta:
        return _from_library(artifact, sig)
    modules = GpuModules(artifact)
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
        with ffi.module.use_raw_stream(ffi.module.device(driver.api.device, device), stream):
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
