"""Calls of kernels that return outputs, and the allocation of these outputs."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from tilelang.errors import error, register
from tilelang.ir import numpy_dtype
from tilelang.runtime.signature import TensorArg
from tilelang.runtime.host_engine import ffi_state
from tilelang.runtime.dlpack import Exported, exports_itself, in_package_of

register("kernel-output-device", RuntimeError, "no framework is at hand to allocate an output",
         expected="a torch tensor among the inputs, or outputs that are passed", found="neither")


class OutputCall:
    """Calls a kernel with outputs.  The framework of the first tensor argument that the kernel uses allocates them, or of the
    first given where it uses none."""

    def __init__(self, kernel: Any) -> None:
        self.sig, self.entry = kernel.signature, kernel._entry
        self.target = kernel.target
        inputs = self.sig.inputs
        self.first = next((k for k, a in enumerate(inputs) if isinstance(a, TensorArg) and a.used), None)
        self.spare = [k for k, a in enumerate(inputs) if isinstance(a, TensorArg) and not a.used]  # they may be None
        self.several = len(self.sig.outputs) > 1
        self.strict = bool(kernel.request.config.get("tl.strict"))  # outputs are filled, so that an unwritten element is seen
        self.native: set[type] = set()  # tensor types for which tvm_ffi can allocate outputs
        self.packed = any(a.buffer.dtype.bits < 8 for a in self.sig.outputs)
        self.plain = None if self.strict else self._plain_numpy()

    def _plain_numpy(self) -> list[tuple[tuple[int, ...], np.dtype]] | None:
        """(shape, dtype) of outputs that NumPy can allocate and export, when all shapes are static."""
        out = []
        for a in self.sig.outputs:
            dt = numpy_dtype(a.buffer.dtype)
            if not a.buffer.is_static or a.buffer.dtype.bits < 8 or not exports_itself(np.empty(0, dt)):
                return None
            out.append((a.buffer.shape, dt))
        return out

    def __call__(self, *args: Any) -> Any:
        k = self.first
        if k is not None and type(args[k]) in self.native:
            out = self.entry.call(*args)
            return list(out) if self.several else out
        if k is not None and self.plain is not None and type(args[k]) is np.ndarray:
            outs = [np.empty(shape, dt) for shape, dt in self.plain]
            self.entry.full(*args, *outs)
            return outs if self.several else outs[0]
        return self._elsewhere(args)

    def _elsewhere(self, args: tuple[Any, ...]) -> Any:
        first = args[self.first] if self.first is not None else next(
            (args[k] for k in self.spare if k < len(args) and args[k] is not None), None)
        if self.first is not None and hasattr(type(first), "__dlpack_c_exchange_api__") and not self.packed and not self.strict:
            self.native.add(type(first))
            return self(*args)
        outs = self._allocate(first, args)
        for o in outs if self.strict else ():
            o.fill()
        self.entry.full(*args, *(o.given for o in outs))
        results = [o.given if o.array is None else in_package_of(first, o.array) for o in outs]
        return results if self.several else results[0]

    def _dims(self, args: tuple[Any, ...]) -> list[list[int]]:
        """Output shapes.  The host stub computes symbolic ones from the arguments, and checks the arguments."""
        if self.entry.check is None:
            if len(args) != len(self.sig.inputs):
                raise ValueError("num_args")
            return [list(a.buffer.shape) for a in self.sig.outputs]
        count = sum(len(a.buffer.shape) for a in self.sig.outputs)
        room = (ctypes.c_int64 * (count + len(self.sig.symbols)))()
        self.entry.check(*args, ctypes.addressof(room))
        flat, out = list(room), []
        for a in self.sig.outputs:
            out.append(flat[:len(a.buffer.shape)])
            for k, n in enumerate(out[-1]):
                if n < 0:
                    raise RuntimeError(f"kernel {self.sig.name} output {a.name} shape[{k}] is negative")
            flat = flat[len(a.buffer.shape):]
        return out

    def _allocate(self, first: Any, args: tuple[Any, ...]) -> list[_Output]:
        dims = self._dims(args)
        torch = _torch_of(first, self.target)
        if torch is not None:
            device = first.device if isinstance(first, torch.Tensor) else (
                torch.device("cuda", torch.cuda.current_device()) if self.target.is_gpu else "cpu")
            return [_Output(torch.empty(packed_dims(a, d), dtype=a.buffer.dtype.as_torch(), device=device))
                    for a, d in zip(self.sig.outputs, dims)]
        if self.target.is_gpu:
            raise error("kernel-output-device", f"the outputs of kernel {self.sig.name} need a framework that allocates on the "
                        "GPU, and no torch tensor was passed", hint="import torch before calling, or pass the output tensors "
                        "yourself (no out_idx); tilelang.jax_call(kernel) takes and returns arrays of JAX")
        return [_numpy_output(a, d) for a, d in zip(self.sig.outputs, dims)]


class _Output:
    """One output.  given: the object passed to the stub.  array: its memory, which becomes the result once it is written: a
    package may copy it; None where the result is what was given."""

    def __init__(self, given: Any, array: np.ndarray | None = None) -> None:
        self.given, self.array = given, array

    def fill(self) -> None:
        """Poison: bytes of ones, NaN in every float type."""
        t = self.given if hasattr(self.given, "fill_") else getattr(self.given, "array", self.given)
        if hasattr(t, "fill_"):
            t.fill_(True) if str(t.dtype) == "torch.bool" else t.view(sys.modules["torch"].uint8).fill_(255)
        else:
            t.fill(True) if t.dtype == bool else t.view(np.uint8).fill(255)


def _torch_of(first: Any, target: Any) -> Any:
    """The torch module if the first tensor is torch's, or if there is no tensor and the program uses torch; else None."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return None
    if first is None:
        return torch if ffi_state().torch_in_use or target.is_gpu else None
    return torch if isinstance(first, torch.Tensor) else None


def packed_dims(a: TensorArg, dims: list[int]) -> list[int]:
    """Storage shape: for types narrower than a byte the last dimension counts bytes."""
    dt = a.buffer.dtype
    if dt.bits >= 8 or dt.lanes != 1:
        return dims
    per = 8 // dt.bits
    if dims[-1] % per:
        raise error("kernel-argument", f"output {a.name} of type {dt} has a last dimension of ‹{dims[-1]}›, which does not "
                    "fill bytes", expected=f"a multiple of {per}", hint=f"make it a multiple of {per}")
    return [*dims[:-1], dims[-1] // per]


def _numpy_output(a: TensorArg, dims: list[int]) -> _Output:
    dt = numpy_dtype(a.buffer.dtype)
    if a.buffer.dtype.bits < 8:
        dt = np.dtype(np.uint8 if a.buffer.dtype.is_unsigned else np.int8)
    array = np.empty(packed_dims(a, dims), dt)
    return _Output(array if exports_itself(array) else Exported(array), array)
