"""The frame of values that the functions of a host program pass to each other, and the DLPack types of arguments."""

from __future__ import annotations

from typing import Protocol

from tilelang.ir import Var, dtype
from tilelang.target.llvm_values import Value

from .llvm_text import Writer
from .signature import ScalarArg, Signature, TensorArg

NONE, INT, BOOL, FLOAT, POINTER, DLTENSOR, TENSOR = 0, 1, 2, 3, 4, 7, 70
CPU, CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 1, 2, 3, 10, 13
OBJECT_TO_DLTENSOR = 24

_FP8_FAMILY = {
    "float8_e4m3": ("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz"),
    "float8_e5m2": ("float8_e5m2", "float8_e5m2fnuz"),
    "tfloat32": ("float32",),
}


class Frame:
    """The int64 slots that `prepare` fills: device type and id, one slot per parameter (address or value), one per symbol."""

    def __init__(self, sig: Signature) -> None:
        self.sig = sig
        self.size = 2 + len(sig.args) + len(sig.symbols)

    def of_arg(self, index: int) -> int:
        """Byte offset of a parameter's slot."""
        return 8 * (2 + index)

    def of_symbol(self, k: int) -> int:
        return 8 * (2 + len(self.sig.args) + k)

    def values(self, w: Writer, frame: str) -> dict[Var, Value]:
        """Scalars and symbols loaded from a frame: i64, or double for float scalars."""
        out = {a.var: w.at(frame, self.of_arg(a.index), "double" if a.var.dtype.is_float else "i64")
               for a in self.sig.args if isinstance(a, ScalarArg)}
        out.update({v: w.at(frame, self.of_symbol(k), "i64") for k, v in enumerate(self.sig.symbols)})
        return out

    def addresses(self, w: Writer, frame: str) -> dict[Var, str]:
        """Storage variable of each tensor, and each pointer parameter, to its address."""
        return {a.buffer.data if isinstance(a, TensorArg) else a.var: w.at(frame, self.of_arg(a.index), "ptr")
                for a in self.sig.args if not isinstance(a, ScalarArg)}


class Launcher(Protocol):
    """Emits the code that runs the kernels after the checks; implemented for the CPU entry and for launches on GPUs."""

    device: int  # CPU, CUDA or ROCM

    def declarations(self) -> str:
        """Text of the external symbols used."""

    def alignment(self, arg: TensorArg) -> int:
        """Required alignment of the data pointer in bytes."""

    def emit(self, w: Writer, frame: Frame, sig: Signature) -> None:
        """Body of `launch`: %frame holds the values; w.check raises."""


def is_a_tensor(kind: Value) -> Value:
    """Whether an argument of this type (i32) is a tensor."""
    return kind.test("eq", TENSOR) | kind.test("eq", DLTENSOR)


def dltensor_of(w: Writer, kind: Value, raw: str) -> Value:
    """Address of the DLTensor of a tensor argument."""
    return w.place(raw, kind.test("eq", TENSOR).select(OBJECT_TO_DLTENSOR, 0, "i64"))


def data_of(w: Writer, d: str) -> Value:
    """Address of the first element of a DLTensor."""
    return w.place(w.at(d, 0, "ptr"), w.at(d, 40, "i64"))


def dtype_bits(dt: dtype) -> list[int]:
    """The DLPack type words (code | bits << 8 | lanes << 16) a buffer of this type accepts."""
    def word(code: int, bits: int, lanes: int = 1) -> int:
        return code | bits << 8 | lanes << 16

    if dt.base in _FP8_FAMILY:
        return [word(dtype(n).type_code, dtype(n).bits, dt.lanes) for n in _FP8_FAMILY[dt.base]]
    if dt.is_bool:
        return [word(6, 8, dt.lanes), word(0, 8, dt.lanes), word(1, 8, dt.lanes), word(1, 1, dt.lanes)]
    if dt.is_handle:
        return [word(0, 64), word(1, 64)]
    return [word(dt.type_code, dt.bits, dt.lanes)]


def allocated_bits(dt: dtype) -> int:
    """The DLPack type word for the allocation of an output.

    For float8_e4m3 it is that of float8_e4m3fn, because DLPack's type float8_e4m3 is a different one, which no framework has.
    """
    return dtype_bits(dtype("float8_e4m3fn") if dt.base == "float8_e4m3" and dt.lanes == 1 else dt)[0]


def is_packed(dt: dtype) -> bool:
    """Whether values are narrower than a byte, so that the caller packs several into one."""
    return dt.bits < 8
