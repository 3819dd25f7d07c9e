"""Table of scalar intrinsics: for each the NumPy function that defines it, and its text in CUDA and LLVM.

A `Call(op, …)` in the IR names a row here.  Rows of device operations (barriers, async copies, matrix instructions)
are in target/instructions.py and joined into the same table.

A row has text for float32 and float64 (or "*", any type).  float16 and bfloat16 are computed in float32 and rounded
once, as the semantics of the IR require, unless the row has text for them.  The text is selected by the type of the first
argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir.numbers import beside_nan
from tilelang.ir.record import record

from .rounding import rounded

# effect: PURE value only; READS, WRITES memory through an AddressOf argument; SYNC orders threads;
# WARP exchanges values between the lanes of a warp: orders no memory, but must not move into or out of divergent code.
PURE, READS, WRITES, SYNC, WARP = "pure", "reads", "writes", "sync", "warp"


@record
class Intrinsic:
    """One intrinsic.

    name: the Call's op.  arity: number of arguments, -1 for any.
    effect: PURE | READS | WRITES | SYNC | WARP (above).
    reference: NumPy function of the argument arrays, with the Call's options as keywords.  Floats are passed in float32
        or wider and the caller rounds the result; integers are passed in their own type.  None if the simulator
        executes the intrinsic as a device operation.
    cuda: text by dtype name, "*" for any other: a format string over {0}, {1}, …  ("expf({0})").
    llvm: libm symbol or overloaded LLVM intrinsic ("llvm.…"; the code generator adds the type suffix) by dtype, "*" any.
    result: "same" as the first argument, or a dtype name.
    fast: CUDA text for float32 under `tl.enable_fast_math`, None when it does not differ.
    """

    name: str
    arity: int
    effect: str = PURE
    reference: Callable[..., Any] | None = None
    cuda: dict[str, str] | None = None
    llvm: dict[str, str] | None = None
    result: str = "same"
    fast: str | None = None


INTRINSICS: dict[str, Intrinsic] = {}


def add_intrinsic(row: Intrinsic) -> Intrinsic:
    """Register a row.  Raises KeyError when the name is taken."""
    if row.name in INTRINSICS:
        raise KeyError(f"intrinsic {row.name} is already registered")
    INTRINSICS[row.name] = row
    return row


def intrinsic(name: str) -> Intrinsic:
    """The row of an intrinsic.  Raises KeyError for unknown names."""
    return INTRINSICS[name]


def is_pure(name: str) -> bool:
    """Whether a Call of this name has no effect.  Unknown names (user functions) are assumed to have one."""
    row = INTRINSICS.get(name)
    return row is not None and row.effect == PURE


# ---- float functions ----------------------------------------------------------------------------------------------

def _args(arity: int) -> str:
    return ", ".join(f"{{{i}}}" for i in range(arity))


def _math(name: str, fn: Callable[..., Any], arity: int = 1, c: str | None = None, llvm: str | None = None,
          fast: str | None = None) -> None:
    """Add a row for a libm function: C name `c` (default: the row's name), with f appended for float32."""
    c, args = c or name, _args(arity)
    symbols = {"*": llvm} if llvm else {"float32": f"{c}f", "float64": c}
    add_intrinsic(Intrinsic(name, arity, PURE, fn, {"float32": f"{c}f({args})", "float64": f"{c}({args})"}, symbols,
                            fast=f"{fast}({args})" if fast else None))


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, which stays correctly rounded when the caller rounds the result to a narrower type."""
    return rounded("fmaf", "rn", a, b, c)


def _sigmoid(x: Any) -> Any:
    """The sigmoid, computed by exp(-|x|), which does not overflow, so that small results stay accurate."""
    t = np.exp(-np.abs(x))
    return np.where(x < 0, t, 1).astype(t.dtype) / (1 + t)


for _name, _fn, _llvm, _fast in (
    ("exp", np.exp, "llvm.exp", "__expf"), ("exp2", np.exp2, "llvm.exp2", "tl::fast_exp2"),
    ("exp10", lambda x: np.power(np.asarray(10.0, x.dtype), x), "llvm.exp10", "__exp10f"),
    ("log", np.log, "llvm.log", "__logf"), ("log2", np.log2, "llvm.log2", "__log2f"),
    ("log10", np.log10, "llvm.log10", "__log10f"), ("log1p", np.log1p, None, None),
    ("sin", np.sin, "llvm.sin", "__sinf"), ("cos", np.cos, "llvm.cos", "__cosf"),
    ("tan", np.tan, None, "__tanf"), ("sinh", np.sinh, None, None), ("cosh", np.cosh, None, None),
    ("tanh", np.tanh, None, None), ("asin", np.arcsin, None, None), ("acos", np.arccos, None, None),
    ("atan", np.arctan, None, None), ("asinh", np.arcsinh, None, None), ("acosh", np.arccosh, None, None),
    ("atanh", np.arctanh, None, None), ("erf", _erf, None, None), ("floor", np.floor, "llvm.floor", None),
    ("ceil", np.ceil, "llvm.ceil", None), ("trunc", np.trunc, "llvm.trunc", None),
    ("nearbyint", np.rint, "llvm.nearbyint", None),
):  # fmt: skip
    _math(_name, _fn, llvm=_llvm, fast=_fast)
_math("round", lambda x: np.trunc(x + np.copysign(np.nextafter(np.asarray(0.5, x.dtype), 0), x)), llvm="llvm.round")
_math("fabs", np.abs, llvm="llvm.fabs")
_math("pow", np.power, 2, llvm="llvm.pow", fast="__powf")
_math("atan2", np.arctan2, 2)
_math("fmod", np.fmod, 2)
_math("hypot", np.hypot, 2)
_math("copysign", np.copysign, 2, llvm="llvm.copysign")
_math("fma", _fma, 3, llvm="llvm.fma")
add_intrinsic(Intrinsic("sqrt", 1, PURE, np.sqrt, {"float32": "tl::square_root({0})", "float64": "sqrt({0})"},
                        {"*": "llvm.sqrt"}, fast="sqrtf({0})"))
add_intrinsic(Intrinsic("rsqrt", 1, PURE, lambda x: 1.0 / np.sqrt(x),
                        {"float32": "rsqrtf({0})", "float64": "rsqrt({0})"}))
add_intrinsic(Intrinsic("sigmoid", 1, PURE, _sigmoid, {
    "float32": "tl::sigmoid({0})", "float64": "tl::sigmoid({0})"},
    fast="__fdividef(1.0f, 1.0f + __expf(-({0})))"))
add_intrinsic(Intrinsic("nextafter", 2, PURE, np.nextafter, {
    "float32": "nextafterf({0}, {1})", "float64": "nextafter({0}, {1})", "float16": "tl::next_after({0}, {1})",
    "bfloat16": "tl::next_after({0}, {1})"}, {"float32": "nextafterf", "float64": "nextafter"}))
add_intrinsic(Intrinsic("ldexp", 2, PURE, np.ldexp, {"float32": "ldexpf({0}, {1})", "float64": "ldexp({0}, {1})"},
                        {"float32": "ldexpf", "float64": "ldexp"}))

# Fast functions that the language names: T.__exp and so on.  Their NumPy function is that of the exact function.
for _name in ("exp", "exp10", "log", "log2", "log10", "sin", "cos", "tan"):
    _row = INTRINSICS[_name]
    add_intrinsic(Intrinsic(f"__{_name}", 1, PURE, _row.reference, {"float32": f"__{_name}f({{0}})"}, _row.llvm))
add_intrinsic(Intrinsic("fast_rcp", 1, PURE, lambda x: 1.0 / x, {"float32": "tl::fast_rcp({0})"}))
add_intrinsic(Intrinsic("fast_exp2", 1, PURE, np.exp2, {"float32": "tl::fast_exp2({0})"}, INTRINSICS["exp2"].llvm))
add_intrinsic(Intrinsic("to_tf32", 1, PURE, None, {"*": "tl::to_tf32({0})"}))

# ---- intrinsics that device passes insert and codegen/cuda prints ------------------------------------------------------


def _dequantised(byte: Any, zero_point: Any = 0, *, low: int, high: int, mask: int) -> Any:
    weights = [(np.asarray(byte).astype(np.int32) >> shift & mask) - np.asarray(zero_point).astype(np.int32)
               for shift in (low, high)]
    return np.stack(weights, axis=-1).astype(np.float32)


def _taken(packed: Any, table: Any, high: bool = False) -> Any:
    packed, table = np.asarray(packed).view(np.uint8), np.asarray(table)
    packed = packed[..., None] if packed.ndim < table.ndim else packed  # one byte, of two codes
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return np.take_along_axis(table, codes.astype(np.int64), axis=-1)


# The entries of a table of 16 for the codes of four bits in neighbouring bytes, the low one of a byte first.
add_intrinsic(Intrinsic("codes_taken", 2, PURE, _taken, result="attr"))
# An operand of the functions of a Combine (ops/combine.py), which its lowering replaces.
add_intrinsic(Intrinsic("combine_operand", 2, PURE, result="attr"))
# Converts floats in neighbouring registers to 16-bit floats, one pair in each 32-bit register.
add_intrinsic(Intrinsic("pack_pairs", 1, PURE, lambda x: x, result="attr"))
# Converts an integer to a 16-bit float; it is at least `low`, and its range is not larger than the values of a significand.
add_intrinsic(Intrinsic("small_int_to_float", 1, PURE, lambda x, low: x, result="attr"))
# Converts two unsigned weights at bits `low` and `high` of a byte, minus a zero point from 0 to 255, to two
# 16-bit floats.
add_intrinsic(Intrinsic("dequantise_pair", -1, PURE, _dequantised, result="attr"))

# ---- predicates and integer functions ------------------------------------------------------------------------------

for _name, _fn in (("isnan", np.isnan), ("isinf", np.isinf), ("isfinite", np.isfinite)):
    _text = f"(bool){_name}({{0}})"
    add_intrinsic(Intrinsic(_name, 1, PURE, _fn, {"float32": _text, "float64": _text}, result="bool"))
add_intrinsic(Intrinsic("isnullptr", 1, PURE, lambda x: np.asarray(x) == 0, {"*": "(({0}) == nullptr)"}, result="bool"))


def _popcount(x: Any) -> Any:
    x = np.asarray(x)
    return np.bitwise_count(x.view(f"u{x.dtype.itemsize}")).astype(x.dtype)


def _clz(x: Any) -> Any:
    x = np.asarray(x)
    bits, rest = 8 * x.dtype.itemsize, x.view(f"u{x.dtype.itemsize}").astype(np.uint64)
    out = np.full(x.shape, bits)
    for shift in (32, 16, 8, 4, 2, 1):
        high = rest >> np.uint64(shift)
        some = high != 0
        out, rest = np.where(some, out - shift, out), np.where(some, high, rest)
    return (out - (rest != 0)).astype(x.dtype)


def _ffs(x: Any) -> Any:
    x = np.asarray(x)
    lowest = x & -x
    return np.where(x == 0, 0, 8 * x.dtype.itemsize - _clz(lowest)).astype(np.int32)


def _fns(mask: Any, base: Any, offset: Any) -> Any:
    """Position of the n-th set bit of a 32-bit mask counted from base (PTX ISA, "fns"); 0xffffffff when none."""
    def one(m: int, b: int, n: int) -> int:
        m &= 0xFFFFFFFF
        if n == 0:
            return b if m >> b & 1 else 0xFFFFFFFF
        order = range(b, 32) if n > 0 else range(b, -1, -1)
        hits = [i for i in order if m >> i & 1]
        return hits[abs(n) - 1] if len(hits) >= abs(n) else 0xFFFFFFFF

    return np.vectorize(lambda m, b, n: one(int(m), int(b), int(n)), otypes=[np.uint32])(mask, base, offset)


add_intrinsic(Intrinsic("abs", 1, PURE, np.abs, {"*": "tl::abs({0})"}, {"*": "llvm.abs"}))
add_intrinsic(Intrinsic("popcount", 1, PURE, _popcount, {"*": "tl::popcount({0})"}, {"*": "llvm.ctpop"}))
add_intrinsic(Intrinsic("clz", 1, PURE, _clz, {"*": "tl::clz({0})"}, {"*": "llvm.ctlz"}))
add_intrinsic(Intrinsic("__ffs", 1, PURE, _ffs, {"*": "tl::ffs({0})"}, result="int32"))
add_intrinsic(Intrinsic("__fns", 3, PURE, _fns, {"*": "(unsigned)__fns({0}, {1}, {2})"}, result="uint32"))
add_intrinsic(Intrinsic("assume", 1, PURE, lambda c: c, {"*": "__builtin_assume({0})"}, result="bool"))
add_intrinsic(Intrinsic("reinterpret", 1, PURE, None, {"*": "tl::reinterpret<{dtype}>({0})"}, result="attr"))


# ---- IEEE-rounded arithmetic ---------------------------------------------------------------------------------------

def _ieee(op: str) -> Callable[..., Any]:
    def reference(*args: Any, rounding_mode: str = "rn") -> Any:
        return rounded(op, rounding_mode, *args)

    return reference


for _name, _arity, _stem in (("add", 2, "add"), ("sub", 2, "sub"), ("mul", 2, "mul"), ("fdiv", 2, "div"),
                             ("fmaf", 3, "ma"), ("frcp", 1, "rcp"), ("fsqrt", 1, "sqrt")):
    _f32, _f64 = ("__fmaf", "__fma") if _stem == "ma" else (f"__f{_stem}", f"__d{_stem}")
    _half = {"add": "__hadd_rn", "sub": "__hsub_rn", "mul": "__hmul_rn", "div": "__hdiv", "ma": "__hfma", "rcp": "hrcp",
             "sqrt": "hsqrt"}[_stem]
    add_intrinsic(Intrinsic(f"ieee_{_name}", _arity, PURE, _ieee(_name), {
        "float32": f"{_f32}_{{rounding_mode}}({_args(_arity)})",
        "float64": f"{_f64}_{{rounding_mode}}({_args(_arity)})",
        "float16": f"{_half}({_args(_arity)})",
        "bfloat16": f"{'tl::fma_bfloat16' if _stem == 'ma' else _half}({_args(_arity)})"}))
add_intrinsic(Intrinsic("ieee_frsqrt", 1, PURE, _ieee("frsqrt"), {"float32": "__frsqrt_rn({0})"}))

# ---- packed pairs (float32x2, float16x2, bfloat16x2) -----------------------------------------------------------------

_PACKED: tuple[tuple[str, int, Callable[..., Any]], ...] = (
    ("add2", 2, np.add), ("sub2", 2, np.subtract), ("mul2", 2, np.multiply), ("max2", 2, beside_nan(np.fmax)),
    ("min2", 2, beside_nan(np.fmin)),
    ("abs2", 1, np.abs), ("fma2", 3, _fma))
for _name, _arity, _packed in _PACKED:
    add_intrinsic(Intrinsic(_name, _arity, PURE, _packed, {"*": f"tl::{_name}({_args(_arity)})"}))
