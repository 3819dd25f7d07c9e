"""The CPU target: describes the processor (vector width, registers, conversions) and makes errors for unsupported programs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tilelang import errors
from tilelang.ir.record import record

errors.register("cpu-unsupported", NotImplementedError, "the CPU target cannot compile this construct (yet)",
                expected="a construct that the CPU target compiles")


def unsupported(what: str, *, span: Any = None, hint: str = "") -> errors.TileLangError:
    """The error for a construct that the CPU target does not compile."""
    return errors.error("cpu-unsupported", f"the CPU target does not support {what}", found=what, span=span,
                        hint=hint or "write it with tile operations, or compile for another target")


@record
class HostCpu:
    """A processor, by its LLVM name.

    name: LLVM cpu name.  features: comma-separated +feature list.  vector_bits: widest useful vector.
    registers: number of vector registers.  has_fma: fused multiply-add in hardware.
    has_pmadd: x86's multiply-add of 16-bit pairs at every vector width.  has_dot_bytes: that of four bytes, unsigned by signed.
    """

    name: str
    features: str
    vector_bits: int
    registers: int
    has_fma: bool
    has_pmadd: bool
    has_dot_bytes: bool = False

    def lanes(self, bits: int) -> int:
        """Number of elements of a width in bits in one vector."""
        return self.vector_bits // bits


def describe(name: str, features: frozenset[str], text: str, is_x86: bool) -> HostCpu:
    """HostCpu from a feature set; unknown processors count as 128-bit machines."""
    if not is_x86:
        return HostCpu(name, text, 128, 32, True, False)
    wide = {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= features
    bits = 512 if wide else 256 if "avx2" in features else 128
    return HostCpu(name, text, bits, 32 if wide else 16, "fma" in features, True, wide and "avx512vnni" in features)


@lru_cache(maxsize=1)
def host_cpu() -> HostCpu:
    """The processor of this machine."""
    import llvmlite.binding as llvm  # 22 ms

    found = llvm.get_host_cpu_features()
    return describe(llvm.get_host_cpu_name(), frozenset(k for k, on in found.items() if on), found.flatten(),
                    "x86_64" in llvm.get_process_triple())
