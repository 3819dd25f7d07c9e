"""Expression nodes and their operators, with type conversion, promotion and constant folding.

See ir/__init__.py for the grammar and the semantics.  Classes and operators are in one module because they depend on each
other: `a + b` of two expressions is an expression, and `a + 0` is a.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from numbers import Number
from typing import Any, ClassVar

import numpy as np

from tilelang.errors import facts
from .call_options import CALL_OPTIONS, CallOptions
from .children import contains
from .dtype import SCALE, dtype, float_max, int_range, promote, scale_value
from .hook import Hook
from .nodes import Node, fields_of, node
from .span import Span

# `bool(a == b)` of two different expressions: the language rejects it where the result is known only in the kernel.
unlike_sides: Hook[Callable[[Binary], None]] = Hook("the comparison of unlike sides", lambda comparison: None)

# Python asks for what only the kernel knows (hash, str, pickle, `==`, …): (value, what is asked, frames up to the asking one).
questions: Hook[Callable[[Any, str, int], None]] = Hook("a question of Python", lambda value, protocol, frames: None)


class Traces:
    """running: the threads that trace a function.  While there are none no question is looked at: hashes are computed often."""

    running = 0


class Expr(Node):
    """A value of type `dtype`.  Operators build expressions with the promotion rules of the language."""

    dtype: dtype

    def __hash__(self) -> int:
        if Traces.running:
            questions.call(self, "hash", 2)
        return Node.__hash__(self)

    def __format__(self, spec: str) -> str:
        questions.call(self, "text", 2)
        return format(str(self), spec)

    def __str__(self) -> str:
        questions.call(self, "str", 2)
        return Node.__repr__(self)

    def __repr__(self) -> str:
        if Traces.running:
            questions.call(self, "repr", 2)
        return Node.__repr__(self)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # names are compared by identity

    def __reduce_ex__(self, protocol: Any) -> Any:
        questions.call(self, "pickle", 2)
        return Node.__reduce_ex__(self, protocol)

    def __add__(self, o: Any) -> Expr: return binary("add", self, o)
    def __radd__(self, o: Any) -> Expr: return binary("add", o, self)
    def __sub__(self, o: Any) -> Expr: return binary("sub", self, o)
    def __rsub__(self, o: Any) -> Expr: return binary("sub", o, self)
    def __mul__(self, o: Any) -> Expr: return binary("mul", self, o)
    def __rmul__(self, o: Any) -> Expr: return binary("mul", o, self)
    def __truediv__(self, o: Any) -> Expr: return true_div(self, o)
    def __rtruediv__(self, o: Any) -> Expr: return true_div(o, self)
    def __floordiv__(self, o: Any) -> Expr: return binary("floordiv", self, o)
    def __rfloordiv__(self, o: Any) -> Expr: return binary("floordiv", o, self)
    def __mod__(self, o: Any) -> Expr: return binary("floormod", self, o)
    def __rmod__(self, o: Any) -> Expr: return binary("floormod", o, self)
    def __lshift__(self, o: Any) -> Expr: return binary("shl", self, o)
    def __rlshift__(self, o: Any) -> Expr: return binary("shl", o, self)
    def __rshift__(self, o: Any) -> Expr: return binary("shr", self, o)
    def __rrshift__(self, o: Any) -> Expr: return binary("shr", o, self)
    def __and__(self, o: Any) -> Expr: return binary("bitand", self, o)
    def __rand__(self, o: Any) -> Expr: return binary("bitand", o, self)
    def __or__(self, o: Any) -> Expr: return binary("bitor", self, o)
    def __ror__(self, o: Any) -> Expr: return binary("bitor", o, self)
    def __xor__(self, o: Any) -> Expr: return binary("bitxor", self, o)
    def __rxor__(self, o: Any) -> Expr: return binary("bitxor", o, self)
    def __lt__(self, o: Any) -> Expr: return binary("lt", self, o)
    def __le__(self, o: Any) -> Expr: return binary("le", self, o)
    def __gt__(self, o: Any) -> Expr: return binary("gt", self, o)
    def __ge__(self, o: Any) -> Expr: return binary("ge", self, o)
    def __neg__(self) -> Expr: return unary("neg", self)
    def __pos__(self) -> Expr: return self
    def __invert__(self) -> Expr: return unary("not" if self.dtype.is_bool else "bitnot", self)

    def __eq__(self, o: object) -> Any:
        return equality("eq", self, o)

    def __ne__(self, o: object) -> Any:
        return equality("ne", self, o)

    def __bool__(self) -> bool:
        raise facts(ValueError(f"the truth of `{self!r}` is known only when the kernel runs (Cannot use and / or / not "
                               "operator to Expr)"),  # programs test for the text in parentheses
                    "a value known while tracing", f"`{self!r}`")

    def __pow__(self, o: Any) -> Expr:
        raise facts(TypeError("`**` is not defined on expressions: use T.pow"), "T.pow", "`**`")

    __rpow__ = __pow__

    def __index__(self) -> int:
        raise facts(TypeError(f"`{self!r}` is a run-time value, a Python number is needed here"),
                    "a Python integer", f"`{self!r}`")

    __int__ = __index__

    def __iter__(self) -> Iterator[Any]:
        raise facts(TypeError(f"`{self!r}` is a run-time value and cannot be iterated"),
                    "a tuple, a list or a loop", f"`{self!r}`")

    def astype(self, dt: Any) -> Expr:
        """The value converted to another type.  For a vector, dt may also be the type of its lanes."""
        dt = dtype(dt)
        return cast(self, dt.with_lanes(self.dtype.lanes) if dt.lanes == 1 else dt)

    def asobject(self) -> Expr:
        return self


@node
class Var(Expr):
    """A scalar (or handle) variable, bound once.  Compared by identity."""

    name: str
    dtype: dtype
    span: Span | None = None
    _below: ClassVar[tuple[Node, ...] | None] = ()
    _is_name: ClassVar[bool] = True

    def same(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        if Traces.running:
            questions.call(self, "hash", 2)
        return object.__hash__(self)

    def __iter__(self) -> Iterator[Var]:
        yield self

    def __len__(self) -> int:
        return 1


@node
class Const(Expr):
    """A literal.  value: int for integer types, bool for bool, float for float types."""

    value: Any
    dtype: dtype
    span: Span | None = None
    _below: ClassVar[tuple[Node, ...] | None] = ()

    def _key(self) -> tuple[Any, ...]:
        v = self.value
        return ("nan" if v != v else v), self.dtype  # every NaN is the same literal

    def __hash__(self) -> int:
        return hash(self.value)  # that of the number it equals

    def __index__(self) -> int:
        if self.dtype.is_float:
            raise facts(TypeError(f"{self.value} is a float constant, an integer is needed here"),
                        "an integer", str(self.value))
        return int(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)


@node
class StringConst(Expr):
    """A string, as an argument of an intrinsic (print formats, extern names)."""

    value: str
    dtype: dtype = dtype("handle")
    span: Span | None = None
    _below: ClassVar[tuple[Node, ...] | None] = ()


@node
class Cast(Expr):
    """value converted to dtype: float to int truncates, narrowing floats rounds to nearest even."""

    value: Expr
    dtype: dtype
    span: Span | None = None


ARITHMETIC = ("add", "sub", "mul", "div", "floordiv", "floormod", "truncdiv", "truncmod", "min", "max",
              "bitand", "bitor", "bitxor", "shl", "shr")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
LOGICAL = ("and", "or")


@node
class Binary(Expr):
    """a op b, both of one dtype.  op: a name of ARITHMETIC, COMPARISONS or LOGICAL (these short-circuit)."""

    op: str
    a: Expr
    b: Expr
    dtype: dtype
    span: Span | None = None

    def __bool__(self) -> bool:
        if self.op not in ("eq", "ne"):
            return Expr.__bool__(self)
        alike = self.a.same(self.b)
        if not alike:
            unlike_sides.call(self)
        return alike == (self.op == "eq")


@node
class Unary(Expr):
    """op: neg (numbers), not (bool), bitnot (integers)."""

    op: str
    a: Expr
    dtype: dtype
    span: Span | None = None


@node
class Select(Expr):
    """cond ? a : b.  lazy: only the chosen side is evaluated (guards loads); otherwise both are."""

    cond: Expr
    a: Expr
    b: Expr
    dtype: dtype
    lazy: bool = True
    span: Span | None = None


@node
class Call(Expr):
    """A call of an intrinsic.  op: its name, a row of target/intrinsics.py.

    options: its compile-time parameters, a record of the class in CALL_OPTIONS (default: the defaults of the record); None for
    intrinsics without options.  Raises TypeError for a record of another class.
    """

    op: str
    args: tuple[Expr, ...]
    dtype: dtype
    options: CallOptions = None  # type: ignore[assignment] # None only for intrinsics without options, where it is not read
    span: Span | None = None
    _options: ClassVar[str] = "options"

    def __post_init__(self) -> None:
        record = CALL_OPTIONS.get(self.op)
        if self.options.__class__ is not record and (record is not None or self.options is not None):
            if record is None or self.options is not None:
                raise TypeError(f"{type(self.options).__name__} are not the options of {self.op}")
            object.__setattr__(self, "options", record())


@node
class Ramp(Expr):
    """The vector base, base + stride, base + 2 * stride, … of `lanes` values."""

    base: Expr
    stride: Expr
    lanes: int
    dtype: dtype
    span: Span | None = None


@node
class Broadcast(Expr):
    """A vector of `lanes` copies of a value."""

    value: Expr
    lanes: int
    dtype: dtype
    span: Span | None = None


@node
class Shuffle(Expr):
    """A vector of lanes selected from the concatenation of `vectors`.  indices: compile-time constants."""

    vectors: tuple[Expr, ...]
    indices: tuple[int, ...]
    dtype: dtype
    span: Span | None = None


I32, I64, U64, F32, BOOL = dtype("int32"), dtype("int64"), dtype("uint64"), dtype("float32"), dtype("bool")
TRUE, FALSE = Const(True, BOOL), Const(False, BOOL)


@lru_cache(maxsize=4096, typed=True)
def int_literal(value: int, dt: dtype) -> Const:
    """The literal of an integer type.  Cached: nodes are immutable, and indices use the same few literals again and again."""
    return Const(value, dt)


def const(value: Any, dt: Any = None) -> Const:
    """The literal of a type.  Without a type: bool, int32 (int64, then uint64, if the value does not fit) or float32.

    Raises ValueError when the value is outside the type's range, OverflowError for integers beyond 64 bits.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if dt is None:
        if isinstance(value, bool):
            return TRUE if value else FALSE
        if isinstance(value, int):
            if not -(2**63) <= value < 2**64:
                raise facts(OverflowError(f"integer literal {value} does not fit 64 bits"),
                            "an integer of at most 64 bits", str(value))
            return int_literal(value, I32 if -(2**31) <= value < 2**31 else I64 if value < 2**63 else U64)
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


def convert(value: Any, dt: Any = None) -> Expr:
    """A Python or NumPy scalar, or an expression, as an expression; cast to dt if dt is given."""
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
    """The value converted to dtype dt.  A literal that fits dt is folded."""
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
    """Both operands converted to their promoted type (reference, "Promotion of element types")."""
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
    if isinstance(value, int) and 2**63 <= value < 2**64 and other.dtype.is_int and not other.dtype.is_unsigned:
        raise facts(OverflowError(f"integer literal {value} does not fit int64, and the other operand is {other.dtype}"),
                    "a literal of at most 63 bits with a signed operand", str(value))  # uint64 would change its sign
    return convert(value)


def _fold_int(op: str, x: int, y: int, bits: int) -> int | bool | None:
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
        case "shl": return x << y if 0 <= y < bits else None  # check_operands rejects other amounts
        case "shr": return x >> y if 0 <= y < bits else None
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

    A Python int as an operand of & | ^ does not widen the other operand; raises ValueError when it does not fit.  Arithmetic
    on bools is that on 0 and 1; the result is true where it is not zero.
    """
    if op in ("bitand", "bitor", "bitxor"):
        a, b = _bit_literal(a, b), _bit_literal(b, a)
    if type(a) is not type(b) or not isinstance(a, Expr) or a.dtype != b.dtype:
        a, b = match(a, b)
    dt = a.dtype
    if op in ("floordiv", "floormod", "truncdiv", "truncmod", "shl", "shr", "bitand", "bitor", "bitxor") and dt.is_float:
        raise facts(TypeError(f"`{op}` needs integer operands, found {dt}"), "integers", str(dt))
    if dt.is_bool and op in _BOOL_ARITHMETIC:  # targets differ in the result of 1 + 1 in one bit
        op = _BOOL_ARITHMETIC[op]
    elif dt.is_bool and op in ("shl", "shr", "floordiv", "floormod", "truncdiv", "truncmod"):
        a, b, dt = cast(a, I32), cast(b, I32), I32
    out = BOOL.with_lanes(dt.lanes) if op in COMPARISONS or op in LOGICAL else dt
    ca, cb = isinstance(a, Const), isinstance(b, Const)
    if ca and cb and not dt.is_float:
        v = _fold_int(op, a.value, b.value, dt.bits)
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
    """The numbers of the calls with effects inside e (T.call_extern).  Each must be executed exactly once."""
    if not contains(e, Call):
        return _NOTHING
    got = e._called
    if got is None:
        got = frozenset[int]()
        if isinstance(e, Call) and e.op == "call_extern":
            got = frozenset(() if e.options.number is None else (e.options.number,))
        for f in fields_of(type(e)):
            v = getattr(e, f)
            for x in v if isinstance(v, tuple) else (v,):
                if isinstance(x, Expr):
                    got |= called(x)
        object.__setattr__(e, "_called", got)  # safe to cache: nodes are immutable
    return got


def can_go(e: Expr) -> bool:
    """Whether e may be dropped without an observable effect."""
    return not called(e)


def true_div(a: Any, b: Any) -> Expr:
    """a / b of floats, or the truncated quotient of unsigned integers.  Raises RuntimeError for signed integers."""
    a, b = match(a, b)
    if a.dtype.is_float:
        return Binary("div", a, b, a.dtype)
    if a.dtype.is_unsigned:
        return binary("truncdiv", a, b)
    raise facts(RuntimeError("`/` of two integers is ambiguous: use `//` (floor) or T.truncdiv, or cast to a float type first "
                             "(TVM supports multiple types of integer divisions)"),  # programs test for this
                "float operands, or `//`", "two integers")


def equality(op: str, a: Any, b: Any) -> Any:
    """a == b or a != b (op: eq, ne).  A Python bool if b is not a value of the language."""
    if b is None or isinstance(b, (str, tuple, list, dict, set, type)) and not isinstance(b, Expr):
        if b is not None and not isinstance(b, type):
            questions.call(a, f"equality with a {type(b).__name__}", 3)
        return op == "ne"
    try:
        a, b = match(a, b)
    except TypeError:
        if isinstance(b, Expr):  # the types have no common type, so neither True nor False would be correct
            raise
        if isinstance(b, (np.ndarray, Number)):
            questions.call(a, f"equality with a {type(b).__name__}", 3)
        return op == "ne"
    if isinstance(a, Const) and isinstance(b, Const):
        return TRUE if (a.value == b.value) == (op == "eq") else FALSE
    return Binary(op, a, b, BOOL.with_lanes(a.dtype.lanes))


def as_bool(e: Any) -> Expr:
    """An expression as a condition: a bool is returned as it is, a number x becomes `x != 0`."""
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


def as_dim(d: Any) -> Any:
    """A shape entry: a Python int if it is constant, else the Expr."""
    if isinstance(d, Const):
        return int(d.value)
    if isinstance(d, (bool, np.bool_)) or isinstance(d, float):
        raise facts(TypeError(f"a shape or stride needs integers, found {d!r}"), "integers", repr(d))
    if isinstance(d, (int, np.integer)):
        return int(d)
    if isinstance(d, Expr):
        return d
    raise facts(TypeError(f"a shape or stride needs integers or integer expressions, found {type(d).__name__}"),
                "integers or integer expressions", f"a {type(d).__name__}")


def is_const(e: Any, value: Any = None) -> bool:
    """Whether e is a literal (equal to value, when given)."""
    if isinstance(e, Const):
        return value is None or e.value == value
    return isinstance(e, (int, float, bool)) and (value is None or e == value)
