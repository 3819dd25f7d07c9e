"""The public description of a kernel's parameters."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Buffer, Func, Var, dtype
from tilelang.ir.record import state


@state
class KernelParam:
    """dtype: tilelang dtype.  shape: ints or symbol Vars; [] for scalars."""

    dtype: Any
    shape: list[Any]

    @classmethod
    def from_buffer(cls, buffer: Buffer) -> KernelParam:
        return cls(buffer.dtype, list(buffer.shape))

    @classmethod
    def from_var(cls, var: Var) -> KernelParam:
        return cls(var.dtype, [])

    def is_scalar(self) -> bool:
        return len(self.shape) == 0

    def tilelang_dtype(self) -> dtype:
        return dtype(self.dtype)

    def torch_dtype(self) -> Any:
        """The torch dtype; imports torch."""
        return dtype(self.dtype).as_torch()

    def is_unsigned(self) -> bool: return dtype(self.dtype).is_unsigned
    def is_float8(self) -> bool: return dtype(self.dtype).is_float8
    def is_float4(self) -> bool: return dtype(self.dtype).is_float4()
    def is_boolean(self) -> bool: return dtype(self.dtype).is_bool


def params_of(func: Func) -> list[KernelParam]:
    """One KernelParam per parameter, in signature order."""
    out = []
    for p in func.params:
        buffer = func.buffer_of(p)
        out.append(KernelParam.from_var(p) if buffer is None else KernelParam.from_buffer(buffer))
    return out
