"""Element types and literals of GPU C++; the error for constructs that it has no form for."""

from __future__ import annotations

import math
import re

import numpy as np

from tilelang.errors import error, register
from tilelang.ir import Const, Node, Span, dtype
from tilelang.ir.numbers import to_dtype
from tilelang.target import INTRINSICS

from .text import ATOM, POSTFIX, PREFIX, Text

register("codegen-unsupported", NotImplementedError, "the target's code generator has no form for this construct yet",
         expected="a construct that the target's code generator has a form for")

_OWN_FUNCTION = "write it another way, or call a function of your own through T.import_source and T.call_extern"


def unsupported(what: str, n: Node | None, hint: str = "", span: Span | None = None) -> Exception:
    """The error for a construct that CUDA has no form for, at the node's place or the span."""
    return error("codegen-unsupported", f"{what} is not supported by this target's code generator", found=what,
                 span=span or getattr(n, "span", None), hint=hint or _OWN_FUNCTION)


TYPES = {"bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short",
          "int32": "int", "uint32": "unsigned", "int64": "long long", "uint64": "unsigned long long",
          "float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float", "tfloat32": "float", "float64": "double",
          "handle": "void*", "float8_e4m3": "fp8_e4_t", "float8_e4m3fn": "fp8_e4_t", "float8_e5m2": "fp8_e5_t",
          "float8_e4m3fnuz": "tl::fp8_e4_fnuz", "float8_e5m2fnuz": "tl::fp8_e5_fnuz", "float8_e8m0fnu": "tl::fp8_e8m0"}
HALVES = ("float16", "bfloat16")
_LITERAL_SUFFIX = {"int32": "", "uint32": "u", "int64": "LL", "uint64": "ULL"}
KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const constexpr const_cast
continue decltype default delete do double dynamic_cast else enum explicit export extern false float for friend goto if
inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template this thread_local
throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq half half2
float2 float4 int2 int4 uint2 uint4 min max abs exp log sqrt printf memcpy threadIdx blockIdx blockDim gridDim warpSize
tl smem grid_barrier_ block_ panel_ start_ in_ width_ TL_DEVICE TL_INFINITY TL_NAN fmaxf fminf fmax fmin main half_t bfloat16_t
fp8_e4_t fp8_e5_t char8_t char16_t char32_t co_await co_return co_yield concept consteval constinit requires noinline typeof
NULL EOF NAN INFINITY HUGE_VAL HUGE_VALF NDEBUG assert offsetof errno stdin stdout stderr linux unix signbit isnan isinf
isfinite CHAR_BIT INT_MIN INT_MAX UINT_MAX LONG_MIN LONG_MAX ULONG_MAX LLONG_MIN LLONG_MAX ULLONG_MAX FLT_MIN FLT_MAX
FLT_EPSILON DBL_MIN DBL_MAX DBL_EPSILON M_PI M_E M_LN2 M_LOG2E M_SQRT2 CUDART_VERSION CUDART_INF_F CUDART_NAN_F CUDART_PI_F
""".split()  # the last five lines: keywords of C++20, and macros that headers of injected source may define

# Names that a variable must not have: it would hide a function that a row's text calls.
RESERVED = frozenset(KEYWORDS).union(re.findall(r"(?<![\w:{])([A-Za-z_]\w*)\(", "\n".join(
    t for row in INTRINSICS.values() for t in (row.cuda or {}).values())))


def type_name(dt: dtype, span: Span | None = None) -> str:
    """The C++ name of a type. Raises NotImplementedError at the span for types that CUDA has no form for."""
    name = TYPES.get(dt.base)
    if name is None:
        raise unsupported(f"element type {dt}", None, span=span)
    return name if dt.lanes == 1 else f"tl::vec<{name}, {dt.lanes}>"


def lane_args(dt: dtype) -> str:
    """The template arguments of a vector: element type and lanes."""
    return f"{type_name(dt.scalar)}, {dt.lanes}"


def literal(e: Const) -> Text:
    """A constant as C++ text.  Infinity and NaN are the macros TL_INFINITY and TL_NAN of the prelude."""
    dt, v = e.dtype, e.value
    if dt.is_bool:
        return ("true" if v else "false"), ATOM
    if dt.is_float:
        return _float_literal(dt, float(v))
    if dt.is_handle:
        return ("nullptr", ATOM) if v == 0 else (f"(void*){v}ULL", PREFIX)
    suffix = _LITERAL_SUFFIX.get(dt.base)
    if suffix is None:
        return f"({TYPES[dt.base]}){v}", PREFIX
    if v == -(2 ** (dt.bits - 1)):
        return f"(-{-v - 1}{suffix} - 1)", ATOM
    return f"{v}{suffix}", (PREFIX if v < 0 else ATOM)


def _float_literal(dt: dtype, v: float) -> Text:
    wrap = dt.base not in ("float32", "tfloat32")
    if TYPES[dt.base].startswith("tl::"):  # as float32 a value could round to the other neighbour
        v = float(to_dtype(np.float64(v), dt).astype(np.float64))
    if math.isinf(v) and dt.base == "float8_e5m2":  # the constructor saturates
        return f"tl::reinterpret<{TYPES[dt.base]}>((unsigned char){0x7C if v > 0 else 0xFC})", POSTFIX
    if math.isnan(v) or math.isinf(v):
        text = "TL_NAN" if math.isnan(v) else "TL_INFINITY" if v > 0 else "-TL_INFINITY"
        return (f"{TYPES[dt.base]}({text})", POSTFIX) if wrap else (text, PREFIX if v < 0 else ATOM)
    negative = math.copysign(1, v) < 0
    if dt == "float64":
        return repr(v), (PREFIX if negative else ATOM)
    text = f"{_short_float(v)}f"
    return (f"{TYPES[dt.base]}({text})", POSTFIX) if wrap else (text, PREFIX if negative else ATOM)


def _short_float(v: float) -> str:
    """The shortest decimal that reads back as the same float32, always with a point or exponent."""
    text = str(np.float32(v)) if abs(v) <= 3.4028235e38 else repr(v)
    return text if any(c in text for c in ".en") else text + ".0"


def is_small_float(dt: dtype) -> bool:
    """Whether arithmetic functions on the type go through float32."""
    return dt.base in HALVES or dt.is_float8
