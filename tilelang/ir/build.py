"""Building expressions: literals, conversions, and operators with the promotion rules of the language."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from tilelang.errors import facts
from . import expr
from .children import contains
from .dtype import SCALE, dtype, int_range, promote
from .expr import (BOOL, COMPARISONS, F32, FALSE, I32, I64, LOGICAL, TRUE, Binary, Broadcast, Call, Cast, Const, Expr, Select,
                   Shuffle, StringConst, Unary, Var)
from .nodes import fields_of
from .span import Span


@lru_cache(maxsize=4096, typed=True)
def int_literal(value: int, dt: dtype) -> Const:
    """The literal of an integer type: nodes never change, and those of indices are the same few again and again."""
    return Const(value, dt)


def const(value: Any, dt: Any = None) -> Const:
    """Literal of a type; without one: bool, int32 (int64 if it does not fit) or float32.

    Raises ValueError when the value is outside the type's range, OverflowError for integers beyond int64.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if dt is None:
        if isinstance(value, bool):
            return TRUE if value else FALSE
        if isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise facts(OverflowError(f"integer literal {value} does not fit int64"),
                            "an integer of at most 64 bits", str(value))
            return int_literal(value, I32 if -(2**31) <= value < 2**31 else I64)
        if isinstance(value, float):
            return Const(value, F32)
        raise facts(TypeError(f"no literal for {type(value).__name__}"), "a bool, int or float", f"a {type(value).__name__}")
    dt = dtype(dt)
    if dt.is_bool:
        return TRUE if value else FALSE
    if dt.is_float:
        value = float(value)
        limit = float_max(dt.base)
        if math.isfinite(value) and abs(value) > limit:
            raise facts(ValueError(f"literal value {value} exceeds maximum of {dt}"), f"at most {limit:g}", str(value))
        return Const(scale_value(value) if dt.base == SCALE else value, dt)
    if dt.is_handle:
        return Const(int(value), dt)
    value = int(value)
    low, high = int_range(dt)
    if not low <= value <= high:
        raise facts(ValueError(f"literal value {value} is outside {dt} [{low}, {high}]"), f"{low} to {high}", str(value))
    return int_literal(value, dt)


_FLOAT_MAX = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
              "tfloat32": 3.4028234663852886e38, "float64": 1.7976931348623157e308, "float8_e4m3": 448.0,
              "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e4m3fnuz": 240.0, "float8_e5m2fnuz": 57344.0,
              "float4_e2m1fn": 6.0, "float4_e2m1_unpacked": 6.0, SCALE: 2.0**127}


def float_max(base: str) -> float:
    """Largest finite value of a floating-point type."""
    return _FLOAT_MAX.get(base, 3.4028234663852886e38)


def float_min(base: str) -> float:
    """Least finite value of a floating-point type; scales are positive."""
    return 2.0**-127 if base == SCALE else -float_max(base)


def scale_value(v: float) -> float:
    """The float8_e8m0fnu of a number: |v| rounded up to a power of two from 2**-127 to 2**127; NaN stays.

    A constant of the type always has this value: 0 is none of them, and rules about adding 0 must not see one.
    """
    if math.isnan(v):
        return v
    v = min(max(abs(v), 2.0**-127), 2.0**127)
    half, exponent = math.frexp(v)
    return 2.0**(exponent - (half == 0.5))


def convert(value: Any, dt: Any = None) -> Expr:
    """Python or NumPy scalar, or expression, to an expression (cast to dt when given)."""
    if isinstance(value, Expr):
        return value if dt is None or value.dtype == dt else cast(value, dt)
    if isinstance(value, str) and not isinstance(value, dtype):
        return StringConst(str(value)) if dt is None else cast(StringConst(str(value)), dt)
    if isinstance(value, (bool, int, float, np.generic)):
        return const(value, dt)
    as_expr = getattr(value, "__tilelang_expr__", None)  # alloc_var names, element aliases of the frontend
    if as_expr is not None:
        return convert(as_expr(), dt)
    raise facts(TypeError(f"a {type(value).__name__} cannot be used as a value of a kernel expression"),
                "a number, an expression or an element", f"a {type(value).__name__}")


def cast(value: Any, dt: Any) -> Expr:
    """value converted to dtype dt; literals that fit fold."""
    dt = dtype(dt)
    value = convert(value)
    if value.dtype == dt:
        return value
    if isinstance(value, StringConst):
        raise facts(TypeError(f"the string {value.value!r} cannot be used as a {dt}"),
                    "a number or an expression", repr(value.value))
    if dt.lanes > 1 and value.dtype.lanes == 1:
        inner = cast(value, dt.scalar)
        return Broadcast(inner, dt.lanes, dt)
    if value.dtype.lanes != dt.lanes:
        raise facts(TypeError(f"Cannot match type {value.dtype} vs {dt}: lane counts differ"),
                    f"{dt.lanes} lanes, or one", str(value.dtype))
    if isinstance(value, Const) and not value.dtype.is_handle and not dt.is_handle:
        if dt.is_int and value.dtype.is_int:
            low, high = int_range(dt)
            if low <= value.value <= high:
                return Const(value.value, dt)
        elif dt.is_float and (value.dtype.is_int or value.dtype.is_bool) and abs(value.value) <= 2048:
            return Const(float(value.value), dt)
        elif dt.is_bool:
            return TRUE if value.value else FALSE
        elif dt.is_int and value.dtype.is_float and math.isfinite(value.value):
            low, high = int_range(dt)
            if low <= int(value.value) <= high:
                return Const(int(value.value), dt)
    return Cast(value, dt)


def match(a: Any, b: Any) -> tuple[Expr, Expr]:
    """Both operands brought to their promoted type (spec/language.md 4.1)."""
    if not isinstance(a, Expr):
        b = convert(b)
        a = _literal_for(a, b)
    elif not isinstance(b, Expr):
        b = _literal_for(b, a)
    if a.dtype == b.dtype:
        return a, b
    target = promote(a.dtype, b.dtype)
    return cast(a, target), cast(b, target)


def _literal_for(value: Any, other: Expr) -> Expr:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and not isinstance(value, bool) and other.dtype.is_float:
        return const(float(value), other.dtype.scalar)
    return convert(value)


def _fold_int(op: str, x: int, y: int) -> int | bool | None:
    match op:
        case "add": return x + y
        case "sub": return x - y
        case "mul": return x * y
        case "floordiv": return x // y if y else None
        case "floormod": return x % y if y else None
        case "truncdiv": return int(math.trunc(x / y)) if y and abs(x) < 2**52 else None
        case "truncmod": return int(math.fmod(x, y)) if y and abs(x) < 2**52 else None
        case "min": return min(x, y)
        case "max": return max(x, y)
        case "bitand": return x & y
        case "bitor": return x | y
        case "bitxor": return x ^ y
        case "shl": return x << y if 0 <= y < 64 else None
        case "shr": return x >> y if 0 <= y < 64 else None
        case "eq": return x == y
        case "ne": return x != y
        case "lt": return x < y
        case "le": return x <= y
        case "gt": return x > y
        case "ge": return x >= y
    return None


def _bit_literal(value: Any, other: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool) or not isinstance(other, Expr) or not other.dtype.is_int:
        return value
    if -(2**31) <= value < 2**31 or other.dtype.bits == 64:
        return value
    return const(value, other.dtype.scalar)


_BOOL_ARITHMETIC = {"add": "bitor", "max": "bitor", "mul": "bitand", "min": "bitand", "sub": "bitxor"}


def binary(op: str, a: Any, b: Any, span: Span | None = None) -> Expr:
    """a op b with promotion and folding of integer literals and neutral elements (x+0, x*1, x*0, x//1).

    A Python int beside & | ^ does not widen the other operand: ValueError when it does not fit.  Arithmetic of bools
    gives whether the result of the same arithmetic on 0 and 1 is not zero.
    """
    if op in ("bitand", "bitor", "bitxor"):
        a, b = _bit_literal(a, b), _bit_literal(b, a)
    if type(a) is not type(b) or not isinstance(a, Expr) or a.dtype != b.dtype:
        a, b = match(a, b)
    dt = a.dtype
    if op in ("floordiv", "floormod", "truncdiv", "truncmod", "shl", "shr", "bitand", "bitor", "bitxor") and dt.is_float:
        raise facts(TypeError(f"`{op}` needs integer operands, found {dt}"), "integers", str(dt))
    if dt.is_bool and op in _BOOL_ARITHMETIC:  # in one bit: targets differ in what 1 + 1 is
        op = _BOOL_ARITHMETIC[op]
    elif dt.is_bool and op in ("shl", "shr", "floordiv", "floormod", "truncdiv", "truncmod"):
        a, b, dt = cast(a, I32), cast(b, I32), I32
    out = BOOL.with_lanes(dt.lanes) if op in COMPARISONS or op in LOGICAL else dt
    ca, cb = isinstance(a, Const), isinstance(b, Const)
    if ca and cb and not dt.is_float:
        v = _fold_int(op, a.value, b.value)
        if v is not None:
            if out.is_bool:
                return TRUE if v else FALSE
            low, high = int_range(dt)
            if low <= v <= high:
                return int_literal(v, dt)
    elif dt.is_int:
        if cb:
            if b.value == 0 and op in ("add", "sub", "shl", "shr", "bitor", "bitxor"):
                return a
            if b.value == 1:
                if op in ("mul", "floordiv", "truncdiv"):
                    return a
                if op in ("floormod", "truncmod") and can_go(a):
                    return int_literal(0, dt)
            if b.value == 0 and op in ("mul", "bitand") and can_go(a):
                return b
        elif ca:
            if a.value == 0 and op in ("add", "bitor", "bitxor"):
                return b
            if a.value == 1 and op == "mul":
                return b
            if a.value == 0 and op in ("mul", "floordiv", "floormod", "bitand") and can_go(b):
                return a
    return Binary(op, a, b, out, span=span)


_NOTHING: frozenset[int] = frozenset()


def called(e: Expr) -> frozenset[int]:
    """Calls of functions with effects inside e, by their numbers (T.call_extern): none may be lost, or be made twice."""
    if not contains(e, Call):
        return _NOTHING
    got = e._called
    if got is None:
        got = frozenset[int]()
        if isinstance(e, Call) and e.op == "call_extern":
            got = frozenset(v for k, v in e.attrs if k == "number")
        for f in fields_of(type(e)):
            v = getattr(e, f)
            for x in v if isinstance(v, tuple) else (v,):
                if isinstance(x, Expr):
                    got |= called(x)
        object.__setattr__(e, "_called", got)  # nodes never change
    return got


def can_go(e: Expr) -> bool:
    """Whether nobody sees that e is not evaluated."""
    return not called(e)


def true_div(a: Any, b: Any) -> Expr:
    """a / b of floats; of unsigned integers the truncated quotient.  Raises RuntimeError for signed ones."""
    a, b = match(a, b)
    if a.dtype.is_float:
        return Binary("div", a, b, a.dtype)
    if a.dtype.is_unsigned:
        return binary("truncdiv", a, b)
    raise facts(RuntimeError("TVM supports multiple types of integer divisions: `/` of two integers is ambiguous, use "
                             "`//` (floor) or T.truncdiv, or cast to a float type first"),
                "float operands, or `//`", "two integers")


def equality(op: str, a: Any, b: Any) -> Any:
    """a == b or a != b (op: eq, ne); a bool where b is no value of the language."""
    if b is None or isinstance(b, (str, tuple, list, dict, set, type)) and not isinstance(b, Expr):
        return op == "ne"
    try:
        a, b = match(a, b)
    except TypeError:
        if isinstance(b, Expr):  # values of types that do not go together: no answer is right
            raise
        return op == "ne"
    if isinstance(a, Const) and isinstance(b, Const):
        return TRUE if (a.value == b.value) == (op == "eq") else FALSE
    return Binary(op, a, b, BOOL.with_lanes(a.dtype.lanes))


def logical(op: str, a: Any, b: Any) -> Expr:
    """a and b / a or b, short-circuit.  Integer operands mean `!= 0`."""
    a, b = as_bool(a), as_bool(b)
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            if x.value == (op == "and"):
                return y
            if x is a or can_go(y):  # the first operand is evaluated, whatever the second one says
                return FALSE if op == "and" else TRUE
    return Binary(op, a, b, BOOL.with_lanes(max(a.dtype.lanes, b.dtype.lanes)))


def as_bool(e: Any) -> Expr:
    """A condition: bools as they are, numbers as `!= 0`."""
    e = convert(e)
    if e.dtype.is_bool:
        return e
    if isinstance(e, StringConst):
        raise facts(TypeError(f"the string {e.value!r} is no condition"), "a bool or a number", repr(e.value))
    if isinstance(e, Const):
        return TRUE if e.value else FALSE
    return Binary("ne", e, cast(0.0 if e.dtype.is_float else 0, e.dtype), BOOL.with_lanes(e.dtype.lanes))


def unary(op: str, a: Any) -> Expr:
    """op a, with literals folded and double negation removed.  op: neg, not, bitnot."""
    a = convert(a)
    if op == "not":
        a = as_bool(a)
        if isinstance(a, Const):
            return FALSE if a.value else TRUE
        if isinstance(a, Unary) and a.op == "not":
            return a.a
        return Unary("not", a, a.dtype)
    if op == "neg":
        if a.dtype.is_unsigned or a.dtype.is_bool:
            raise facts(TypeError(f"unary minus is not defined on {a.dtype}"), "a signed type", str(a.dtype))
        if isinstance(a, Const) and (a.dtype.is_float or -a.value <= int_range(a.dtype)[1]):
            return Const(-a.value, a.dtype)
    if op == "bitnot" and not a.dtype.is_int:
        raise facts(TypeError(f"`~` needs an integer or bool, found {a.dtype}"), "an integer or bool", str(a.dtype))
    return Unary(op, a, a.dtype)


def select(cond: Any, a: Any, b: Any, lazy: bool = True) -> Expr:
    """cond ? a : b, operands promoted; a literal condition picks its side, a vector one that of each lane."""
    cond = as_bool(cond)
    a, b = match(convert(a), convert(b)) if isinstance(a, Expr) or isinstance(b, Expr) is False else match(a, b)
    if isinstance(cond, Const):
        return a if cond.value else b
    if cond.dtype.lanes > 1:
        wide = a.dtype if a.dtype.lanes > 1 else a.dtype.with_lanes(cond.dtype.lanes)
        if wide.lanes != cond.dtype.lanes:
            raise facts(TypeError(f"a condition of {cond.dtype.lanes} lanes chooses between {a.dtype}"),
                        f"{cond.dtype.lanes} lanes", f"{wide.lanes}")
        a, b = cast(a, wide), cast(b, wide)
    return Select(cond, a, b, a.dtype, lazy)


def call(op: str, args: Any, dt: Any, span: Span | None = None, **attrs: Any) -> Call:
    """The intrinsic `op` applied to args; keyword arguments become attrs."""
    return Call(op, tuple(convert(a) for a in args), dtype(dt), tuple(sorted(attrs.items())), span=span)


def construct(dt: dtype, values: tuple[Any, ...]) -> Expr:
    """What calling a dtype means: T.int32() variable, T.float32(1.5) constant, T.float16(expr) cast, vectors packed."""
    if not values:
        return Var("v", dt)
    if any(isinstance(v, str) for v in values):
        raise facts(TypeError(f"{dt}() takes numbers or expressions, not strings"), "numbers or expressions", "a string")
    if dt.lanes > 1 and len(values) > 1:
        if len(values) != dt.lanes:
            raise facts(TypeError(f"{dt}() takes 1 or {dt.lanes} values, found {len(values)}"),
                        f"1 or {dt.lanes} values", str(len(values)))
        lanes = tuple(cast(convert(v), dt.scalar) for v in values)
        return Shuffle(lanes, tuple(range(dt.lanes)), dt)
    if len(values) != 1:
        raise facts(TypeError(f"{dt}() takes at most one value, found {len(values)}"), "at most one value", str(len(values)))
    v = values[0]
    if isinstance(v, Expr):
        return cast(v, dt)
    if isinstance(v, (bool, int, float, np.generic)):
        if dt.is_int and dt.lanes == 1:
            return const(int(v), dt)
        inner = const(v, dt.scalar)
        return inner if dt.lanes == 1 else Broadcast(inner, dt.lanes, dt)
    if getattr(v, "__tilelang_expr__", None) is not None:
        return cast(convert(v), dt)
    raise facts(TypeError(f"{dt}() takes a number or an expression, found {type(v).__name__}"),
                "a number or an expression", f"a {type(v).__name__}")


def fresh(name: str, dt: Any = "int32") -> Var:
    """A new variable."""
    return Var(name, dtype(dt))


expr.binary, expr.unary, expr.cast, expr.true_div, expr.equality = binary, unary, cast, true_div, equality
