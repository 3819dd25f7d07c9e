"""Interpreting backends: "tile" is the reference interpreter, "simulator" runs the lowered program lane by lane.

The arguments pass the same compiled checks as on the other backends.  Then the interpreter runs on NumPy arrays, and the
arrays that it wrote are copied back into the caller's tensors.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from tilelang.errors import strict
from tilelang.ir import Func, Var, deep, dtype, free_vars, numpy_dtype, with_options
from tilelang.ir.evaluate import evaluate
from tilelang.runtime.dlpack import in_package_of
from tilelang.runtime.host_engine import HostLibrary, compile_object, ffi_state
from tilelang.runtime.host_frame import CPU, Frame
from tilelang.runtime.host_stub import stub_text
from tilelang.runtime.llvm_text import Writer
from tilelang.runtime.signature import PointerArg, ScalarArg, Signature, TensorArg, host_assumptions, needed_symbols

from .artifact import Request, disjoint_parameters
from .building import sizes_of

TILE, DEVICE = "tile", "simulator"


class _NoLaunch:
    """A launcher that launches nothing: the host program only checks arguments."""

    device = CPU

    def declarations(self) -> str:
        return ""

    def alignment(self, arg: TensorArg) -> int:
        return 1

    def emit(self, w: Writer, frame: Frame, sig: Signature) -> None:
        """Emit no code."""


class SimulatedEntry:
    """A kernel that an interpreter runs.  call: inputs -> outputs.  last_report: the report of the device simulator's last run.
    unsupported: the last exception of the argument checks, which is no fault of the interpreter."""

    full = None
    check = None
    unsupported: Exception | None = None

    def __init__(self, request: Request, sig: Signature, lowered: Func | None) -> None:
        self.request, self.sig = request, sig
        self.program = with_options(lowered or request.func, out_idx=sig.out_idx or None)
        disjoint, made = disjoint_parameters(request) if lowered is not None and request.backend != TILE else ((), {})
        needed = needed_symbols(request.func, sig)
        text = stub_text(sig, _NoLaunch(), needed, ("check",), host_assumptions(request.func, sig), disjoint,
                         made, sizes_of(request, sig))
        self.library = HostLibrary(compile_object(text), ("tl_check",))
        self.checks = self.library.function("tl_check")
        self.last_report: Any = None

    @deep()
    def diagnosed(self, problem: Exception) -> Exception | None:
        """Nothing: an interpreter's errors are full."""
        return None

    def call(self, *args: Any) -> Any:
        sig = self.sig
        count = sum(len(a.buffer.shape) for a in sig.outputs) + len(sig.symbols)
        room = (ctypes.c_int64 * max(1, count))()
        try:
            self.checks(*args, ctypes.addressof(room))
        except Exception as e:
            self.unsupported = e
            raise
        values = dict(zip(sig.symbols, room[count - len(sig.symbols):count]))
        given: dict[str, Any] = {}
        shared: dict[str, tuple[Any, np.ndarray]] = {}
        for a, x in zip(sig.inputs, args):
            if isinstance(a, TensorArg):
                if x is None:
                    x = np.zeros(_shape_of(a, values), numpy_dtype(stored_as(a.buffer.dtype)))
                array = as_numpy(x, stored_as(a.buffer.dtype))
                given[a.name] = array
                shared[a.name] = (x, array)
            elif isinstance(a, PointerArg):
                given[a.name] = _address(x)
            else:
                given[a.name] = x.value if isinstance(a, ScalarArg) and isinstance(x, ctypes.c_void_p) else x
        results = self._simulate(given)
        for name, (_, array) in shared.items():
            if array.flags.writeable and name in results:
                np.copyto(array, results[name])
        first = next((x for a, x in zip(sig.inputs, args) if isinstance(a, TensorArg) and x is not None), None)
        outs = [like_first(first, results[a.name], a.buffer.dtype) for a in sig.outputs]
        return None if not outs else outs[0] if len(outs) == 1 else outs

    def _simulate(self, given: dict[str, Any]) -> dict[str, np.ndarray]:
        with strict(self.request.config):
            if self.request.backend == TILE:
                from tilelang.simulator.reference.run import run_tile  # 103 ms

                return run_tile(self.program, given, aliased=True)
            from tilelang.simulator.device.run import run_device  # 95 ms

            self.last_report = run_device(self.program, given, aliased=True)
        return self.last_report.outputs


def _address(x: Any) -> int:
    """The address that an argument for a pointer parameter stands for."""
    if x is None or isinstance(x, int):
        return int(x or 0)
    if isinstance(x, ctypes.c_void_p):
        return int(x.value or 0)
    if hasattr(x, "array") and isinstance(x.array, np.ndarray):
        x = x.array  # runtime.dlpack.Exported
    return int(x.data_ptr() if hasattr(x, "data_ptr") else np.asarray(x).ctypes.data)


def stored_as(dt: dtype) -> dtype:
    """The type of a tensor's storage: for types narrower than a byte, bytes of two values each."""
    return dtype("uint8") if dt.bits < 8 else dt


def _shape_of(a: TensorArg, values: dict[Var, int]) -> list[int]:
    """Extents of a tensor that is left out: known from the other arguments, else 1."""
    out = []
    for d in a.buffer.shape:
        known = isinstance(d, int) or all(v in values for v in free_vars(d))
        out.append(d if isinstance(d, int) else max(0, int(evaluate(d, values))) if known else 1)
    return out


def as_numpy(x: Any, dt: dtype) -> np.ndarray:
    """The tensor as a NumPy array of the language's element type, without a copy wherever possible."""
    want = numpy_dtype(dt)
    if hasattr(x, "array") and isinstance(getattr(x, "array", None), np.ndarray):
        x = x.array  # runtime.dlpack.Exported
    if isinstance(x, np.ndarray):
        return x if x.dtype == want or x.itemsize != want.itemsize else x.view(want)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        x = x.detach()
        if x.dtype == torch.bfloat16 or x.dtype.itemsize == 1 or "float8" in str(x.dtype):
            raw = {1: torch.uint8, 2: torch.int16}[x.dtype.itemsize]
            return x.view(raw).numpy().view(want)
        return x.numpy()
    return np.from_dlpack(x) if want.kind in "biuf" else np.asarray(x).view(want)


def like_first(first: Any, array: np.ndarray, declared: dtype) -> Any:
    """A NumPy result in the package of the first tensor; where there is no tensor, in torch if the program uses it."""
    torch = sys.modules.get("torch")
    if torch is None or not (ffi_state().torch_in_use if first is None else isinstance(first, torch.Tensor)):
        return in_package_of(first, array.view(np.int8) if declared.bits < 8 else array)
    if declared.bits < 8:
        return torch.from_numpy(array).view(declared.as_torch())
    dt = dtype(array.dtype.name)
    if array.dtype.kind in "biuf" and dt.bits >= 8 and array.dtype.name != "bfloat16" and not dt.is_float8:
        return torch.from_numpy(array)
    raw = {1: np.uint8, 2: np.int16}[array.itemsize]
    return torch.from_numpy(array.view(raw)).view(dt.as_torch())
