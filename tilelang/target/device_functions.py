"""CUDA's library functions that programs call by name (T.call_extern), as expressions with the same values.

Backends without a device compiler execute them by these expressions. A name that the source of the launch itself defines is not
in the table for that launch, because only the device compiler knows that definition. Functions that exchange values between
threads are in language/device_calls.py. Semantics: CUDA Math API, CUDA C++ Programming Guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial

from tilelang.ir import CALL_OPTIONS, AddressOf, Call, Expr, StringConst, binary, call, cast, const, dtype, load, select, unary
from tilelang.ir.record import record

from .conversions import F64, INTO_INTEGERS, towards
from .intrinsics import INTRINSICS, PURE

EXTERNS = ("call_extern", "call_pure_extern")
_PLAIN = re.compile(r"(\w+)\(\{0\}(?:, \{\d\})*\)")
_MODES = {"rn": "rn", "rz": "rz", "ru": "rp", "rd": "rm"}  # suffix of a function -> mode of a conversion
_HALVES = ("float16", "bfloat16")


@record
class DeviceFunction:
    """One form of a CUDA function.  params: element types, or "*" for a pointer to elements of the result's type.

    build: the expression of the arguments, of type result.
    """

    params: tuple[str, ...]
    result: str
    build: Callable[..., Expr]


def _into_integer(e: Expr, mode: str, target: str) -> Expr:
    rounded = call(INTO_INTEGERS[mode], (e,), e.dtype) if mode in INTO_INTEGERS else e
    out = cast(rounded, target)
    if e.dtype == "float64" or dtype(target).bits == 64:  # there NaN becomes the integer whose highest bit alone is set
        bits = dtype(target).bits
        none = -(1 << bits - 1) if dtype(target).base.startswith("int") else 1 << bits - 1
        out = select(call("isnan", (e,), "bool"), const(none, target), out)
    return out


def _into_float(e: Expr, mode: str, target: str) -> Expr:
    if mode == "rn":
        return cast(e, target)
    return towards(cast(e, F64) if e.dtype.is_int else e, dtype(target), mode)


def _bits_of(e: Expr, target: str) -> Expr:
    return call("reinterpret", (e,), target)


def _reversed_bits(e: Expr) -> Expr:
    bits, out, step = e.dtype.bits, e, 1
    while step < bits:
        mask = sum(((1 << step) - 1) << at for at in range(0, bits, 2 * step))
        low = binary("shl", binary("bitand", out, const(mask, e.dtype)), const(step, e.dtype))
        out = binary("bitor", low, binary("bitand", binary("shr", out, const(step, e.dtype)), const(mask, e.dtype)))
        step *= 2
    return out


def _joined(high: Expr, low: Expr) -> Expr:
    return binary("bitor", binary("shl", cast(high, "uint64"), const(32, "uint64")), cast(low, "uint64"))


def _chosen_bytes(x: Expr, y: Expr, selector: Expr) -> Expr:
    both, out = _joined(y, x), const(0, "uint32")
    for k in range(4):
        at = binary("bitand", binary("shr", selector, const(4 * k, "uint32")), const(7, "uint32"))
        byte = binary("bitand", binary("shr", both, cast(at * 8, "uint64")), const(255, "uint64"))
        out = binary("bitor", out, binary("shl", cast(byte, "uint32"), const(8 * k, "uint32")))  # type: ignore[assignment]
    return out


def _funnel(left: bool, clamped: bool, low: Expr, high: Expr, shift: Expr) -> Expr:
    by = binary("min", shift, const(32, "uint32")) if clamped else binary("bitand", shift, const(31, "uint32"))
    moved = binary("shl" if left else "shr", _joined(high, low), cast(by, "uint64"))
    return cast(binary("shr", moved, const(32, "uint64")) if left else moved, "uint32")


def _high_word(wide: str, a: Expr, b: Expr) -> Expr:
    product = binary("mul", cast(a, wide), cast(b, wide))
    return cast(binary("shr", product, const(32, wide)), a.dtype)


def _low24(e: Expr) -> Expr:
    eight = const(8, e.dtype)
    return binary("shr", binary("shl", e, eight), eight)


def _dot_of_bytes(a: Expr, b: Expr, total: Expr) -> Expr:
    signed = a.dtype == "int32"

    def byte(e: Expr, k: int) -> Expr:
        if signed:
            return binary("shr", binary("shl", e, const(24 - 8 * k, e.dtype)), const(24, e.dtype))
        return binary("bitand", binary("shr", e, const(8 * k, e.dtype)), const(255, e.dtype))

    for k in range(4):
        total = binary("add", total, binary("mul", byte(a, k), byte(b, k)))
    return total


def _saturated(x: Expr) -> Expr:
    zero, one = const(0.0, "float32"), const(1.0, "float32")
    return select(binary("ge", x, one), one, select(binary("gt", x, zero), x, zero))  # NaN becomes 0


def _pointed(where: Expr) -> Expr:
    assert isinstance(where, AddressOf), "known_function has checked it"
    return load(where.buffer, where.indices)


Add = Callable[[str, str, str, Callable[..., Expr]], None]  # (CUDA name, element types of the parameters, of the result, build)


def _printed_as_they_are(add: Add) -> None:
    """Functions that a row of INTRINSICS prints as they are."""
    names: set[str] = set()
    for row in INTRINSICS.values():
        if row.effect == PURE and row.reference is not None and row.name not in CALL_OPTIONS and row.result == "same":
            for kind, text in (row.cuda or {}).items():
                found = _PLAIN.fullmatch(text)
                if found and kind in ("float32", "float64") and found[1] not in names:
                    names.add(found[1])
                    add(found[1], " ".join([kind] * row.arity), kind,
                        lambda *args, op=row.name, kind=kind: call(op, args, kind))


def _conversions(add: Add) -> None:
    """Conversions between numbers, with the rounding mode in the name, and between bits and numbers."""
    reals = {"float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16"}
    integers = {"int": "int32", "uint": "uint32", "ll": "int64", "ull": "uint64"}
    for suffix, mode in _MODES.items():
        for a, real in reals.items():
            for b, integer in integers.items():
                add(f"__{a}2{b}_{suffix}", real, integer, partial(_into_integer, mode=mode, target=integer))
                if suffix == "rn" or dtype(integer).bits == 32 and a != "double":
                    add(f"__{b}2{a}_{suffix}", integer, real, partial(_into_float, mode=mode, target=real))
            for b in ("float",) if a == "double" else ("half", "bfloat16"):
                if dtype(reals[b]).bits < dtype(real).bits:
                    add(f"__{a}2{b}_{suffix}", real, reals[b], partial(_into_float, mode=mode, target=reals[b]))
    for a, b in (("float", "half"), ("float", "bfloat16"), ("double", "half"), ("double", "bfloat16")):
        add(f"__{a}2{b}", reals[a], reals[b], lambda x, to=reals[b]: cast(x, to))
    add("__half2float", "float16", "float32", lambda x: cast(x, "float32"))
    add("__bfloat162float", "bfloat16", "float32", lambda x: cast(x, "float32"))
    for name, a, b in (("__float_as_int", "float32", "int32"), ("__float_as_uint", "float32", "uint32"),
                       ("__double_as_longlong", "float64", "int64"), ("__half_as_short", "float16", "int16"),
                       ("__half_as_ushort", "float16", "uint16"), ("__bfloat16_as_short", "bfloat16", "int16"),
                       ("__bfloat16_as_ushort", "bfloat16", "uint16")):
        add(name, a, b, partial(_bits_of, target=b))
        add("__{1}_as_{0}".format(*name[2:].split("_as_")), b, a, partial(_bits_of, target=a))


def _rounded_arithmetic(add: Add) -> None:
    """Arithmetic with the rounding mode in the name."""
    for suffix in _MODES:
        for real, letter in (("float32", "f"), ("float64", "d")):
            for op, arity, name in (("add", 2, "add"), ("sub", 2, "sub"), ("mul", 2, "mul"), ("div", 2, "fdiv"),
                                    ("rcp", 1, "frcp"), ("sqrt", 1, "fsqrt"), ("ma", 3, "fmaf")):
                cuda = {"fma": "fmaf"}.get(letter + op, "fma" if op == "ma" else letter + op)
                add(f"__{cuda}_{suffix}", " ".join([real] * arity), real, lambda *args, name=name, real=real, suffix=suffix:
                    call(f"ieee_{name}", args, real, rounding_mode=suffix))
    add("__frsqrt_rn", "float32", "float32", lambda x: call("ieee_frsqrt", (x,), "float32"))


def _bit_functions(add: Add) -> None:
    """Bits, 24-bit and high multiplications, and dot products of bytes."""
    for end, bits in (("", 32), ("ll", 64)):
        for name, op in (("__popc", "popcount"), ("__clz", "clz"), ("__ffs", "__ffs")):
            add(name + end, f"uint{bits}" if op == "popcount" else f"int{bits}", "int32",
                lambda x, op=op: cast(call(op, (x,), "int32" if op == "__ffs" else x.dtype), "int32"))
        add("__brev" + end, f"uint{bits}", f"uint{bits}", _reversed_bits)
    add("__byte_perm", "uint32 uint32 uint32", "uint32", _chosen_bytes)
    for name, left, clamped in (("l", True, False), ("r", False, False), ("lc", True, True), ("rc", False, True)):
        add(f"__funnelshift_{name}", "uint32 uint32 uint32", "uint32", partial(_funnel, left, clamped))
    for prefix, kind, wide in (("", "int32", "int64"), ("u", "uint32", "uint64")):
        add(f"__{prefix}mulhi", f"{kind} {kind}", kind, partial(_high_word, wide))
        add(f"__{prefix}mul24", f"{kind} {kind}", kind, lambda a, b: binary("mul", _low24(a), _low24(b)))
        add("__dp4a", f"{kind} {kind} {kind}", kind, _dot_of_bytes)


def _float_functions(add: Add) -> None:
    """Approximations, and extrema and absolute values by C names."""
    add("sqrtf", "float32", "float32", lambda x: call("sqrt", (x,), "float32"))
    add("__saturatef", "float32", "float32", _saturated)
    add("__fdividef", "float32 float32", "float32", lambda a, b: binary("div", a, b))
    add("__powf", "float32 float32", "float32", lambda a, b: call("pow", (a, b), "float32"))
    for op in ("max", "min"):
        for kind in ("int32", "uint32", "int64", "uint64", "float32", "float64"):
            add(op, f"{kind} {kind}", kind, partial(binary, op))
        add(f"f{op}f", "float32 float32", "float32", partial(binary, op))
        add(f"f{op}", "float64 float64", "float64", partial(binary, op))
    add("abs", "int32", "int32", lambda x: call("abs", (x,), "int32"))


def _half_functions(add: Add) -> None:
    """Arithmetic of float16 and bfloat16."""
    for kind in _HALVES:
        for op in ("add", "sub", "mul", "div", "max", "min"):
            add(f"__h{op}", f"{kind} {kind}", kind, partial(binary, op))
        add("__hfma", f"{kind} {kind} {kind}", kind, lambda *args, kind=kind: call("ieee_fmaf", args, kind, rounding_mode="rn"))
        add("__hneg", kind, kind, partial(unary, "neg"))
        add("__habs", kind, kind, lambda x, kind=kind: call("fabs", (x,), kind))
        for op in ("eq", "ne", "lt", "le", "gt", "ge"):
            add(f"__h{op}", f"{kind} {kind}", "bool", partial(binary, op))
        for op in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil", "trunc"):
            add(f"h{op}", kind, kind, lambda x, op=op, kind=kind: call(op, (x,), kind))
        add("hrint", kind, kind, lambda x, kind=kind: call("nearbyint", (x,), kind))
        add("hrcp", kind, kind, lambda x, kind=kind: binary("div", const(1.0, kind), x))


def _cached_loads(add: Add) -> None:
    """Loads with a cache hint."""
    for name in ("__ldg", "__ldca", "__ldcg", "__ldcs", "__ldlu", "__ldcv"):
        for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64", *_HALVES):
            add(name, "*", kind, _pointed)


@lru_cache(maxsize=1)
def _table() -> dict[str, list[DeviceFunction]]:
    """CUDA function name -> its overloads."""
    out: dict[str, list[DeviceFunction]] = {}

    def add(name: str, params: str, result: str, build: Callable[..., Expr]) -> None:
        out.setdefault(name, []).append(DeviceFunction(tuple(params.split()), result, build))

    for rows in (_printed_as_they_are, _conversions, _rounded_arithmetic, _bit_functions, _float_functions,
                 _half_functions, _cached_loads):
        rows(add)
    return out


def device_function(e: Call) -> DeviceFunction | None:
    """The form of a CUDA function that an extern call names: for its arguments' types, else the only one they convert to."""
    if e.op not in EXTERNS or not e.args or not isinstance(e.args[0], StringConst):
        return None
    forms = [f for f in _table().get(e.args[0].value, ()) if len(f.params) == len(e.args) - 1]
    kinds = [a.dtype for a in e.args[1:]]
    exact = [f for f in forms if all(isinstance(a, AddressOf) and a.buffer.dtype == f.result if p == "*" else a.dtype == p
                                     for a, p in zip(e.args[1:], f.params))]
    if exact:
        return exact[0]
    converted = len(forms) == 1 and "*" not in forms[0].params and all(
        k.lanes == 1 and (k.is_int or k.is_bool or k in ("float32", "float64")) for k in kinds)
    return forms[0] if converted and not any(p in _HALVES for p in forms[0].params) else None


def known_function(e: Call, sources: tuple[str, ...] = ()) -> Expr | None:
    """The expression that is equivalent to an extern call of a CUDA function; None for other functions.

    sources: texts that the launch prints before its kernel.  None also if the types of the operands are not the function's.
    """
    form = device_function(e)
    if form is None:
        return None
    name, *args = e.args
    assert isinstance(name, StringConst), "device_function has looked at it"
    if any(name.value in s for s in sources):
        return None
    return cast(form.build(*(a if p == "*" else cast(a, p) for a, p in zip(args, form.params))), e.dtype)
