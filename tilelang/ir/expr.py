"""Expressions: immutable values with a dtype.  See ir/__init__.py for the grammar and the semantics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .dtype import dtype, int_range, promote
from .span import Span

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Only a type checker needs it: `node` makes dataclasses."""
        return lambda f: f


_FIELDS: dict[type, tuple[str, ...]] = {}
_serial = itertools.count()


@dataclass_transform(frozen_default=True, eq_default=False)
def node(cls: Any) -> Any:
    """Class decorator of IR nodes: frozen dataclass, structural equality and hash (span excluded) from the base."""
    cls = dataclass(frozen=True, eq=False, repr=False)(cls)
    _FIELDS[cls] = tuple(f.name for f in fields(cls) if f.name != "span")
    return cls


def fields_of(cls: type) -> tuple[str, ...]:
    """Names of a node class's fields, in order, without `span`."""
    return _FIELDS[cls]


class Node:
    """Base of all IR nodes.  `==` compares by structure, without spans; Var and Buffer compare by identity."""

    span: Span | None

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f) for f in _FIELDS[type(self)])

    def same(self, other: object) -> bool:
        """Structural equality (what `==` means for statements and, under bool(), for expressions)."""
        return self is other or (type(self) is type(other) and hash(self) == hash(other) and
                                 _same_values(self._key(), other._key()))  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> Any:
        return self.same(other)

    def __ne__(self, other: object) -> Any:
        return not self.same(other)

    def __hash__(self) -> int:
        h = self.__dict__.get("_hash")
        if h is None:
            key = self._key()
            try:
                h = hash((type(self).__name__, *key))
            except TypeError:  # an array or a list among the attributes
                h = hash((type(self).__name__, *map(_hashable, key)))
            object.__setattr__(self, "_hash", h)
        return h

    def __repr__(self) -> str:
        from .printer import to_text  # repr is text, and the printer knows all node classes, this one included

        return to_text(self)


def _hashable(v: Any) -> Any:
    if isinstance(v, np.ndarray):
        return v.tobytes()
    try:
        hash(v)
    except TypeError:
        return id(v)
    return v


def _same_values(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Node):
        return a.same(b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_same_values, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b) or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


class Expr(Node):
    """A value of type `dtype`.  Operators build expressions with the promotion rules of the language."""

    dtype: dtype
    __hash__ = Node.__hash__

    def __add__(self, o: Any) -> Expr: return binary("add", self, o)
    def __radd__(self, o: Any) -> Expr: return binary("add", o, self)
    def __sub__(self, o: Any) -> Expr: return binary("sub", self, o)
    def __rsub__(self, o: Any) -> Expr: return binary("sub", o, self)
    def __mul__(self, o: Any) -> Expr: return binary("mul", self, o)
    def __rmul__(self, o: Any) -> Expr: return binary("mul", o, self)
    def __truediv__(self, o: Any) -> Expr: return _true_div(self, o)
    def __rtruediv__(self, o: Any) -> Expr: return _true_div(o, self)
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
        return _equality("eq", self, o)

    def __ne__(self, o: object) -> Any:
        return _equality("ne", self, o)

    def __bool__(self) -> bool:
        raise ValueError("Cannot use and / or / not operator to Expr, or an expression as a Python truth value: "
                         "its value is known only when the kernel runs")

    def __pow__(self, o: Any) -> Expr:
        raise TypeError("`**` is not defined on expressions: use T.pow")

    __rpow__ = __pow__

    def __index__(self) -> int:
        raise TypeError(f"`{self!r}` is a run-time value, a Python integer is needed here")

    __int__ = __index__

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"`{self!r}` is a run-time value and cannot be iterated")

    def astype(self, dt: Any) -> Expr:
        return cast(self, dt)

    def asobject(self) -> Expr:
        return self


@node
class Var(Expr):
    """A scalar (or handle) variable, bound once.  Compared by identity."""

    name: str
    dtype: dtype
    span: Span | None = None

    def same(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

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

    def _key(self) -> tuple[Any, ...]:
        v = self.value
        return ("nan" if v != v else v), self.dtype  # every NaN is the same literal

    def __index__(self) -> int:
        if self.dtype.is_float:
            raise TypeError(f"{self.value} is a float constant, an integer is needed here")
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

    # Set by the language module: refuses a user's `bool(a == b)` of sides whose values only the kernel knows.
    unlike: ClassVar[Any] = None

    def __bool__(self) -> bool:
        if self.op not in ("eq", "ne"):
            return Expr.__bool__(self)
        alike = self.a.same(self.b)
        if not alike and Binary.unlike is not None:
            Binary.unlike(self)
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
class Load(Expr):
    """buffer[indices], read as the buffer's element type.  indices: one per dimension, in elements.

    A Ramp as the last index reads a vector; dtype then has its lanes.
    """

    buffer: Buffer
    indices: tuple[Expr, ...]
    dtype: dtype
    span: Span | None = None


@node
class AddressOf(Expr):
    """Address of buffer[indices]; dtype handle."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    dtype: dtype = dtype("handle")
    span: Span | None = None


@node
class Call(Expr):
    """An intrinsic by name: a row of target/intrinsics.py.  attrs: compile-time parameters, sorted by key."""

    op: str
    args: tuple[Expr, ...]
    dtype: dtype
    attrs: tuple[tuple[str, Any], ...] = ()
    span: Span | None = None

    def attr(self, key: str, default: Any = None) -> Any:
        for k, v in self.attrs:
            if k == key:
                return v
        return default


@node
class Ramp(Expr):
    """Vector base, base+stride, … (lanes values)."""

    base: Expr
    stride: Expr
    lanes: int
    dtype: dtype
    span: Span | None = None


@node
class Broadcast(Expr):
    """Vector of `lanes` copies of value."""

    value: Expr
    lanes: int
    dtype: dtype
    span: Span | None = None


@node
class Shuffle(Expr):
    """Lanes picked from the concatenation of `vectors`; indices are compile-time."""

    vectors: tuple[Expr, ...]
    indices: tuple[int, ...]
    dtype: dtype
    span: Span | None = None


SCOPES = ("global", "shared", "shared.dyn", "local", "local.fragment", "local.var", "local.reducer",
          "shared.barrier", "shared.cluster_barrier", "shared.tmem")


@node
class Buffer(Node):
    """A named array.  Compared by identity; `data` identifies the storage, shared by all views of it.

    shape: per dimension a Python int or an Expr.  strides: in elements, None for compact row-major.
    scope: one of SCOPES.  offset: elements from the start of the storage to element 0.
    attrs: compile-time facts, sorted by key (e.g. align).
    """

    name: str
    shape: tuple[Any, ...]
    dtype: dtype
    scope_name: str = "global"
    strides_: tuple[Any, ...] | None = None
    offset: Any = 0
    data: Var = None  # type: ignore[assignment]
    attrs: tuple[tuple[str, Any], ...] = ()
    span: Span | None = None

    # Set by the language module when it is imported: what A[...] means there (loads, regions, aliases).
    subscript: ClassVar[Any] = None

    def __post_init__(self) -> None:
        if self.data is None:
            object.__setattr__(self, "data", Var(self.name, dtype("handle"), span=self.span))
        object.__setattr__(self, "shape", tuple(as_dim(d) for d in self.shape))
        if self.strides_ is not None:
            object.__setattr__(self, "strides_", tuple(as_dim(d) for d in self.strides_))

    def same(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def scope(self) -> str:
        """The scope as users see it: a variable that holds a hardware descriptor says so."""
        kind = self.attr("descriptor")
        return f"local.descriptor.{kind}" if kind else self.scope_name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def elem_offset(self) -> Any:
        return self.offset

    @property
    def strides(self) -> tuple[Any, ...]:
        """Strides in elements; computed row-major when none were declared."""
        if self.strides_ is not None:
            return self.strides_
        out: list[Any] = []
        step: Any = 1
        for d in reversed(self.shape):
            out.append(step)
            step = step * d
        return tuple(as_dim(s) for s in reversed(out))

    def attr(self, key: str, default: Any = None) -> Any:
        for k, v in self.attrs:
            if k == key:
                return v
        return default

    @property
    def is_static(self) -> bool:
        return all(isinstance(d, int) for d in self.shape)

    @property
    def size(self) -> int:
        """Number of elements; only for static shapes."""
        n = 1
        for d in self.shape:
            n *= int(d)
        return n

    def __getitem__(self, key: Any) -> Any:
        if Buffer.subscript is None:
            return load(self, key if isinstance(key, tuple) else (key,))
        return Buffer.subscript(self, key)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"Buffer {self.name} cannot be iterated: loop over its indices")

    def __bool__(self) -> bool:
        raise TypeError(f"Buffer {self.name} has no truth value: compare an element of it")


@node
class Region(Node):
    """buffer[min : min+extent, …], one (min, extent) per dimension.  extents: Python ints where static."""

    buffer: Buffer
    mins: tuple[Expr, ...]
    extents: tuple[Any, ...]
    span: Span | None = None

    @property
    def dtype(self) -> dtype:
        return self.buffer.dtype

    @property
    def tile_shape(self) -> tuple[Any, ...]:
        """Extents without the unit dimensions (at least one kept)."""
        out = tuple(e for e in self.extents if not (isinstance(e, int) and e == 1))
        return out or (1,)

    @property
    def is_full(self) -> bool:
        """Whether it is the whole buffer."""
        return all(is_const(m, 0) for m in self.mins) and all(
            a is b or (isinstance(a, int) and a == b) or (isinstance(a, Expr) and a.same(b))
            for a, b in zip(self.extents, self.buffer.shape))


# ---- construction -------------------------------------------------------------------------------------------------

I32, I64, F32, BOOL = dtype("int32"), dtype("int64"), dtype("float32"), dtype("bool")
TRUE, FALSE = Const(True, BOOL), Const(False, BOOL)


def as_dim(d: Any) -> Any:
    """A shape entry: Python int where known, else the Expr."""
    if isinstance(d, Const):
        return int(d.value)
    if isinstance(d, (bool, np.bool_)) or isinstance(d, float):
        raise TypeError(f"a shape or stride needs integers, found {d!r}")
    if isinstance(d, (int, np.integer)):
        return int(d)
    if isinstance(d, Expr):
        return d
    raise TypeError(f"a shape or stride needs integers or integer expressions, found {type(d).__name__}")


def is_const(e: Any, value: Any = None) -> bool:
    """Whether e is a literal (equal to value, when given)."""
    if isinstance(e, Const):
        return value is None or e.value == value
    return isinstance(e, (int, float, bool)) and (value is None or e == value)


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
                raise OverflowError(f"integer literal {value} does not fit int64")
            return Const(value, I32 if -(2**31) <= value < 2**31 else I64)
        if isinstance(value, float):
            return Const(value, F32)
        raise TypeError(f"no literal for {type(value).__name__}")
    dt = dtype(dt)
    if dt.is_bool:
        return TRUE if value else FALSE
    if dt.is_float:
        value = float(value)
        limit = _float_max(dt.base)
        if math.isfinite(value) and abs(value) > limit:
            raise ValueError(f"literal value {value} exceeds maximum of {dt}")
        return Const(value, dt)
    if dt.is_handle:
        return Const(int(value), dt)
    value = int(value)
    low, high = int_range(dt)
    if not low <= value <= high:
        raise ValueError(f"literal value {value} is outside {dt} [{low}, {high}]")
    return Const(value, dt)


_FLOAT_MAX = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
              "tfloat32": 3.4028234663852886e38, "float64": 1.7976931348623157e308, "float8_e4m3": 448.0,
              "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e4m3fnuz": 240.0, "float8_e5m2fnuz": 57344.0,
              "float4_e2m1fn": 6.0, "float4_e2m1_unpacked": 6.0}


def _float_max(base: str) -> float:
    return _FLOAT_MAX.get(base, 3.4028234663852886e38)


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
    raise TypeError(f"a {type(value).__name__} cannot be used as a value of a kernel expression")


def cast(value: Any, dt: Any) -> Expr:
    """value converted to dtype dt; literals that fit fold."""
    dt = dtype(dt)
    value = convert(value)
    if value.dtype == dt:
        return value
    if isinstance(value, StringConst):
        raise TypeError(f"the string {value.value!r} cannot be used as a {dt}")
    if dt.lanes > 1 and value.dtype.lanes == 1:
        inner = cast(value, dt.scalar)
        return Broadcast(inner, dt.lanes, dt)
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
        raise TypeError(f"`{op}` needs integer operands, found {dt}")
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
                return Const(v, dt)
    elif dt.is_int:
        if cb:
            if b.value == 0 and op in ("add", "sub", "shl", "shr", "bitor", "bitxor"):
                return a
            if b.value == 1:
                if op in ("mul", "floordiv", "truncdiv"):
                    return a
                if op in ("floormod", "truncmod"):
                    return Const(0, dt)
            if b.value == 0 and op in ("mul", "bitand"):
                return b
        elif ca:
            if a.value == 0 and op in ("add", "bitor", "bitxor"):
                return b
            if a.value == 1 and op == "mul":
                return b
            if a.value == 0 and op in ("mul", "floordiv", "floormod", "bitand"):
                return a
    return Binary(op, a, b, out, span=span)


def _true_div(a: Any, b: Any) -> Expr:
    a, b = match(a, b)
    if a.dtype.is_float:
        return Binary("div", a, b, a.dtype)
    if a.dtype.is_unsigned:
        return binary("truncdiv", a, b)
    raise RuntimeError("TVM supports multiple types of integer divisions: `/` of two integers is ambiguous, use "
                       "`//` (floor) or T.truncdiv, or cast to a float type first")


def _equality(op: str, a: Any, b: Any) -> Any:
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
            return (y if x.value else FALSE) if op == "and" else (TRUE if x.value else y)
    return Binary(op, a, b, BOOL.with_lanes(max(a.dtype.lanes, b.dtype.lanes)))


def as_bool(e: Any) -> Expr:
    """A condition: bools as they are, numbers as `!= 0`."""
    e = convert(e)
    if e.dtype.is_bool:
        return e
    if isinstance(e, Const):
        return TRUE if e.value else FALSE
    return Binary("ne", e, Const(0.0 if e.dtype.is_float else 0, e.dtype), BOOL)


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
            raise TypeError(f"unary minus is not defined on {a.dtype}")
        if isinstance(a, Const) and (a.dtype.is_float or -a.value <= int_range(a.dtype)[1]):
            return Const(-a.value, a.dtype)
    if op == "bitnot" and not a.dtype.is_int:
        raise TypeError(f"`~` needs an integer or bool, found {a.dtype}")
    return Unary(op, a, a.dtype)


def select(cond: Any, a: Any, b: Any, lazy: bool = True) -> Expr:
    """cond ? a : b, operands promoted; a literal condition picks its side."""
    cond = as_bool(cond)
    a, b = match(convert(a), convert(b)) if isinstance(a, Expr) or isinstance(b, Expr) is False else match(a, b)
    if isinstance(cond, Const):
        return a if cond.value else b
    return Select(cond, a, b, a.dtype, lazy)


def load(buffer: Buffer, indices: Any, span: Span | None = None) -> Load:
    """buffer[indices]; a vector index (Ramp) as the last one gives a vector."""
    idx = tuple(convert(i) for i in indices)
    lanes = max([i.dtype.lanes for i in idx], default=1)
    return Load(buffer, idx, buffer.dtype.with_lanes(buffer.dtype.lanes * lanes), span=span)


def call(op: str, args: Any, dt: Any, span: Span | None = None, **attrs: Any) -> Call:
    """The intrinsic `op` applied to args; keyword arguments become attrs."""
    return Call(op, tuple(convert(a) for a in args), dtype(dt), tuple(sorted(attrs.items())), span=span)


def construct(dt: dtype, values: tuple[Any, ...]) -> Expr:
    """What calling a dtype means: T.int32() variable, T.float32(1.5) constant, T.float16(expr) cast, vectors packed."""
    if not values:
        return Var("v", dt)
    if any(isinstance(v, str) for v in values):
        raise TypeError(f"{dt}() takes numbers or expressions, not strings")
    if dt.lanes > 1 and len(values) > 1:
        if len(values) != dt.lanes:
            raise TypeError(f"{dt}() takes 1 or {dt.lanes} values, found {len(values)}")
        lanes = tuple(cast(convert(v), dt.scalar) for v in values)
        return Shuffle(lanes, tuple(range(dt.lanes)), dt)
    if len(values) != 1:
        raise TypeError(f"{dt}() takes at most one value, found {len(values)}")
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
    raise TypeError(f"{dt}() takes a number or an expression, found {type(v).__name__}")


def fresh(name: str, dt: Any = "int32") -> Var:
    """A new variable."""
    return Var(name, dtype(dt))
