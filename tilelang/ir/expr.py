"""Expressions: immutable values with a dtype.  See ir/__init__.py for the grammar and the semantics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tilelang.errors import facts
from .dtype import dtype
from .nodes import Node, node
from .span import Span

if TYPE_CHECKING:
    from .buffer import Buffer

# What the operators of an expression build: set by build.py, which knows the rules of promotion.
binary: Callable[..., Expr] = None  # type: ignore[assignment]
unary: Callable[..., Expr] = None  # type: ignore[assignment]
cast: Callable[..., Expr] = None  # type: ignore[assignment]
true_div: Callable[..., Expr] = None  # type: ignore[assignment]
equality: Callable[..., Any] = None  # type: ignore[assignment]


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
        raise facts(ValueError("Cannot use and / or / not operator to Expr, or an expression as a Python truth value: "
                               "its value is known only when the kernel runs"), "a value known while tracing", f"`{self!r}`")

    def __pow__(self, o: Any) -> Expr:
        raise facts(TypeError("`**` is not defined on expressions: use T.pow"), "T.pow", "`**`")

    __rpow__ = __pow__

    def __index__(self) -> int:
        raise facts(TypeError(f"`{self!r}` is a run-time value, a Python integer is needed here"),
                    "a Python integer", f"`{self!r}`")

    __int__ = __index__

    def __iter__(self) -> Iterator[Any]:
        raise facts(TypeError(f"`{self!r}` is a run-time value and cannot be iterated"),
                    "a tuple, a list or a loop", f"`{self!r}`")

    def astype(self, dt: Any) -> Expr:
        """The value in another type; a vector by the name of its elements' type too."""
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

    __hash__ = object.__hash__

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

    subscript: ClassVar[Any] = None

    buffer: Buffer
    indices: tuple[Expr, ...]
    dtype: dtype
    span: Span | None = None

    def __getitem__(self, key: Any) -> Any:
        """`obj.v[0]` in Python code that only runs while tracing, where the language knows v for a variable."""
        if Load.subscript is None:
            raise TypeError("'Load' object is not subscriptable")
        return Load.subscript(self, key)


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


I32, I64, F32, BOOL = dtype("int32"), dtype("int64"), dtype("float32"), dtype("bool")
TRUE, FALSE = Const(True, BOOL), Const(False, BOOL)


def as_dim(d: Any) -> Any:
    """A shape entry: Python int where known, else the Expr."""
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
