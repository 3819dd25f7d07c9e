"""Element types by name: T.float16, T.int8x4, … and the predicates on them."""

from __future__ import annotations

from typing import Any

from tilelang.ir import dtype

from .tracing.state import error, example

AnyDType = Any
_LANES = (2, 4, 8, 16, 32, 64)
_SCALARS = ("bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
            "float32", "float64", "bfloat16", "tfloat32", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz",
            "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
            "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "float4_e2m1_unpacked")
_NO_VECTORS = ("bool", "int4", "float4_e2m1_unpacked")

TYPES: dict[str, dtype] = {n: dtype(n) for n in _SCALARS}
for _n in _SCALARS:
    if _n not in _NO_VECTORS:
        for _l in _LANES:
            TYPES[f"{_n}x{_l}"] = dtype(f"{_n}x{_l}")
TYPES.update(short=dtype("int16"), int=dtype("int32"), uint=dtype("uint32"), long=dtype("int64"), half=dtype("float16"),
             float=dtype("float32"), double=dtype("float64"))

globals().update(TYPES)
_all_dtypes = sorted(TYPES)


def __getattr__(name: str) -> Any:
    """Provide `_TORCH_DTYPE_TO_STR`, torch's types by name; it is lazy because it imports torch."""
    if name != "_TORCH_DTYPE_TO_STR":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    known = {n: getattr(torch, n, None) for n in _SCALARS}
    out = globals()[name] = {t: n for n, t in known.items() if isinstance(t, torch.dtype)}
    return out


@example('dt = T.get_tvm_dtype("float16")')
def get_tvm_dtype(x: Any) -> dtype:
    """Any spelling of a type (name, T dtype, Python, numpy or torch type) as a dtype."""
    return dtype(x)


def resolve_torch_storage_dtype(x: Any) -> Any:
    """The torch type of the tensors that hold a type: int8 for int4.  Raises ValueError where torch has none."""
    return dtype(x).as_torch()


@example("if T.is_float4(A.dtype):", "    T.clear(acc)")
def is_float4(x: Any) -> Any:
    """Whether a type is a 4-bit float of any form."""
    return dtype(x).is_float4()


@example("if T.is_float4_e2m1fn(A.dtype):", "    T.clear(acc)")
def is_float4_e2m1fn(x: Any) -> Any:
    """Whether a type is the packed 4-bit float."""
    return dtype(x).is_float4_e2m1fn()


@example("if T.is_float4_e2m1_unpacked(A.dtype):", "    T.clear(acc)")
def is_float4_e2m1_unpacked(x: Any) -> Any:
    """Whether a type is the 4-bit float stored as one value per byte."""
    return dtype(x).is_float4_e2m1_unpacked()


@example("if T.is_f8f6f4_family(A.dtype):", "    T.clear(acc)")
def is_f8f6f4_family(x: Any) -> Any:
    """Whether a type is any float8, float6 or float4."""
    return dtype(x).base.startswith(("float8", "float6", "float4"))


@example("T.validate_gemm_ab_dtypes(A.dtype, B.dtype)")
def validate_gemm_ab_dtypes(a: Any, b: Any, *, a_in_tmem: Any = False, allow_f8f6f4_mixed: Any = False) -> None:
    """Check that the operands of a gemm have one type, or are both of the f8f6f4 family where that is allowed."""
    a, b = dtype(a), dtype(b)
    if a == b:
        return
    if not (is_f8f6f4_family(a) and is_f8f6f4_family(b)):
        raise error("gemm-dtypes", "operands of two types are float8, float6 or float4 (Mixed-dtype GEMM only supports f8f6f4 "
                    f"family operands), found {a} and {b}", expected="two types of f8f6f4")
    if not allow_f8f6f4_mixed:
        raise error("gemm-dtypes", f"this GEMM needs one operand type, found {a} and {b}", expected="one type")


__all__ = ["AnyDType", "dtype", "get_tvm_dtype", "is_f8f6f4_family", "is_float4", "is_float4_e2m1_unpacked",
           "is_float4_e2m1fn", "validate_gemm_ab_dtypes"]
__all__ += sorted(TYPES)
