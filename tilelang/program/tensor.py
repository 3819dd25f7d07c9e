"""Whole tensors while a program is traced: operators make nodes, what needs a value is an error at the user's line."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tilelang import errors
from tilelang.errors import error, register
from tilelang.ir import Span, dtype
from tilelang.ir.dtype import promote
from tilelang.language.tensor import dtype_of

from .graph import Dim, Node, Size
from .ops.rules import BOOL, F32, I32, RULES, axis_of, text_of, wrong_type

register("program-operand", TypeError, "an operation of a program is given something that is no tensor and no number",
         expected="a tensor of the program or a number")
register("program-condition", TypeError, "Python asks a tensor of a program for a value",
         "choose elements by T.where(condition, a, b), join conditions by & and |, repeat by T.loop",
         expected="a value that is known while the program is traced")
register("program-data-shape", TypeError, "the shape of a result would depend on the values of a tensor",
         "shapes follow from shapes: keep the extent and choose by T.where(mask, x, 0), or by T.topk(x, k)",
         expected="indices that give a shape: integers, slices, an integer tensor")
register("program-index", IndexError, "a tensor of a program is indexed by something that it does not have")
register("program-assignment", TypeError, "a tensor of a program is written to",
         "tensors do not change: make a new one, for example by T.where(mask, value, x), T.concat or T.pad",
         expected="an expression that makes a new tensor")
register("program-name", AttributeError, "a program uses a name that tensors or the language do not have",
         expected="a function of tilelang.language, or a method of tensors")
register("program-leak", RuntimeError, "a tensor of one trace of a program is used outside it",
         "return the tensor, or pass it as an argument", expected="tensors of this program")
register("program-outside", TypeError, "a function of whole tensors is called outside a program",
         "call it inside a function with @tilelang.program; on tiles of a kernel use T.reduce_sum, T.gemm, ...",
         expected="tensors of a program that is being traced")

SHOWN_FRAMES = 6  # of the call chain of a node
Number: TypeAlias = "bool | int | float | Dim"


@dataclass(eq=False)
class Trace:
    """One run of a program's function.  code: of the function, where call chains end.  outer: the trace around a loop."""

    code: CodeType | None
    outer: Trace | None = None
    guards: list[Dim] = field(default_factory=list)
    over: bool = False


_CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Operations inside belong to the trace; its tensors cannot be used afterwards."""
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)
        trace.over = True


def current() -> Trace | None:
    """The trace that is running."""
    return _CURRENT.get()


@functools.lru_cache(4096)
def _position(code: CodeType, lasti: int, line: int) -> tuple[int, int, int, int]:
    at = errors.positions(code, lasti)
    return (line, 0, line, 0) if at is None else (at[0], at[2], at[1], at[3])


def here() -> Span | None:
    """The user's line and the calls that lead to it, up to the program's function."""
    trace, calls = current(), []
    for call in errors.callers():
        calls.append(call)
        if trace is not None and call[0] is trace.code or len(calls) == SHOWN_FRAMES:
            break
    span: Span | None = None
    for code, lasti, at in reversed(calls):
        line, col, end_line, end_col = _position(code, lasti, at)
        span = Span(code.co_filename, line, col, end_line, end_col, code.co_name, span)
    return span


def make(op: str, inputs: Sequence[Node], attrs: dict[str, Any] | None = None, dt: dtype | None = None) -> Node:
    """The node of a primitive operation.  Raises what its type rule raises, at the user's line.  dt: of the result."""
    attrs = attrs or {}
    shape, found = RULES[op](inputs, attrs)
    attrs.pop("shape", None)
    return Node(op, tuple(inputs), MappingProxyType(attrs), shape, dt or found, here())


def constant(value: Number, dt: dtype) -> Node:
    """A number as a tensor without axes."""
    if dt.is_int and isinstance(value, int):
        info = np.iinfo(f"{'u' if dt.is_unsigned else ''}int{max(8, dt.bits)}")
        if not info.min <= value <= info.max:
            raise error("program-type", f"the number {value} does not fit {dt}", expected=f"{info.min} to {info.max}",
                        found=str(value))
    if dt.is_float and isinstance(value, (bool, int)):
        value = float(value)
    return Node("constant", (), MappingProxyType({"value": value}), (), dt, here())


def described(x: Any) -> str:
    """A value of Python, for messages."""
    return x.said() if isinstance(x, Tensor) else f"`{x!r}`" if isinstance(x, (str, bool, int, float, type(None))) \
        else f"a {type(x).__module__.partition('.')[0]} {type(x).__name__}".replace("a builtins ", "a ")


def operand(x: Any, what: str) -> Node | Number:
    """A tensor's node, or a number.  Raises program-operand, program-leak."""
    if isinstance(x, Tensor):
        return x.node
    if current() is None:
        raise error("program-outside", f"{what} is called outside a program, with {described(x)}", found=described(x))
    if isinstance(x, np.generic) and x.dtype.kind in "biuf":
        return constant(x.item(), dtype(x.dtype.name))
    if isinstance(x, (bool, int, float, Dim)):
        return x
    array = hasattr(x, "shape") and hasattr(x, "dtype")
    raise error("program-operand", f"{what} is given {described(x)}", found=described(x),
                hint="make the array a parameter of the program and pass it at the call" if array
                else "write a tensor of the program or a number")


def weak(x: Number, beside: dtype | None) -> Node:
    """A number in the type that it takes beside a tensor: the tensor's, wherever that holds such numbers."""
    if isinstance(x, bool):
        return constant(x, beside or BOOL)
    if isinstance(x, (int, Dim)):
        return constant(x, I32 if beside is None or beside.is_bool else beside)
    return constant(x, beside if beside is not None and beside.is_float else F32)


def node_of(x: Any, what: str) -> Node:
    """An operand as a node; numbers are bool, int32 or float32."""
    n = operand(x, what)
    return n if isinstance(n, Node) else weak(n, None)


def converted(n: Node, dt: dtype) -> Node:
    """The node in a type; itself where it has that type."""
    if n.dtype == dt:
        return n
    if n.op == "constant" and not isinstance(n.attrs["value"], Dim) and (dt.is_float or not n.dtype.is_float):
        return constant(n.attrs["value"], dt)
    return Node("cast", (n,), MappingProxyType({}), n.shape, dt, here())


def matched(what: str, *xs: Any) -> list[Node]:
    """Operands in their common type.  Raises program-type where there is none, program-operand."""
    found = [operand(x, what) for x in xs]
    types = [n.dtype for n in found if isinstance(n, Node)]
    common = types[0] if types else None
    for t in types[1:]:
        assert common is not None
        try:
            common = F32 if {common, t} == HALVES else promote(common, t)
        except TypeError:
            raise wrong_type(what, "types of which one holds the other", *dict.fromkeys((common, t))) from None
    nodes = [n if isinstance(n, Node) else weak(n, common) for n in found]
    for n in nodes:
        common = n.dtype if common is None else promote(common, n.dtype)
    assert common is not None
    return [converted(n, common) for n in nodes]


def floating(n: Node) -> Node:
    """The node in a float type: integers and bools become float32."""
    return n if n.dtype.is_float else converted(n, F32)


HALVES = {dtype("float16"), dtype("bfloat16")}  # neither holds the other
FLOATS = ("div", "atan2")  # integers become float32
NUMBERS = ("add", "sub", "mul", "neg", "abs", "floordiv", "mod", "pow")  # bools become int32
MOST_FACTORS = 8  # greatest exponent that is written as multiplications


def elementwise(op: str, *xs: Any) -> Tensor:
    """An element-wise operation with its conversions."""
    nodes = matched(op, *xs)
    if op in FLOATS:
        nodes = [floating(n) for n in nodes]
    elif op in NUMBERS and nodes[0].dtype.is_bool:
        nodes = [converted(n, I32) for n in nodes]
    return Tensor(make(op, nodes))


def power(x: Any, y: Any) -> Tensor:
    """x ** y; integer exponents up to 8 are multiplications, 0.5 and -0.5 roots."""
    if isinstance(x, Tensor) and isinstance(y, int) and not isinstance(y, bool) and 1 <= y <= MOST_FACTORS:
        out, base = None, x
        while y:
            if y & 1:
                out = base if out is None else out * base
            y >>= 1
            base = base * base if y else base
        assert out is not None
        return out
    if isinstance(x, Tensor) and isinstance(y, float) and abs(y) == 0.5:
        return Tensor(make("sqrt" if y > 0 else "rsqrt", [floating(x.node)]))
    if isinstance(y, float) or isinstance(y, int) and y < 0:
        x = Tensor(floating(node_of(x, "**")))
    return elementwise("pow", x, y)


FUNCTIONS: dict[str, Callable[..., Any]] = {}  # T.name in a program -> function of whole tensors (functions.py, composed.py)
METHODS: dict[str, Callable[..., Any]] = {}  # name of a method of tensors -> function that takes the tensor first
Fn = TypeVar("Fn", bound=Callable[..., Any])


def public(*names: str, methods: bool = True) -> Callable[[Fn], Fn]:
    """Decorator: the function is T.name in programs, and a method of tensors."""
    def add(fn: Fn) -> Fn:
        for name in (fn.__name__.rstrip("_"), *names):
            FUNCTIONS[name] = fn
            if methods:
                METHODS[name] = fn
        return fn

    return add


Operator: TypeAlias = "Callable[[Tensor, Any], Tensor]"


def _operator(op: str) -> tuple[Operator, Operator]:
    """The operator, and the one with its operands exchanged."""
    return (lambda self, other: elementwise(op, self, other)), (lambda self, other: elementwise(op, other, self))


def _comparison(op: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: elementwise(op, self, other)


class Tensor:
    """A whole tensor of a program that is being traced: shape, dtype, operators, and the functions of T as methods.

    Example:
        @tilelang.program
        def scaled(x: T.Tensor((64, 32), "float32")):
            return x * 2 + x.sum(axis=1, keepdims=True)
    """

    __slots__ = ("_node", "_trace")
    __array_ufunc__ = None  # NumPy leaves operators to this class

    def __init__(self, node: Node, trace: Trace | None = None) -> None:
        self._node, self._trace = node, trace or current()

    @property
    def node(self) -> Node:
        """The node, in the trace that it belongs to.  Raises program-leak elsewhere."""
        trace = current()
        while trace is not None and trace is not self._trace:
            trace = trace.outer
        if trace is None:
            raise error("program-leak", f"{self.said()} belongs to a trace that has ended", found="a tensor of another trace")
        return self._node

    @property
    def shape(self) -> tuple[Size, ...]:
        """Extents: numbers, or named sizes that are known at the call."""
        return self._node.shape

    @property
    def dtype(self) -> dtype:
        """The element type."""
        return self._node.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._node.ndim

    @property
    def T(self) -> Tensor:
        """The tensor with its axes in reverse order."""
        return self.transpose()

    def said(self) -> str:
        """The tensor, for messages."""
        return f"a tensor {self.dtype}{text_of(self.shape)}"

    def __repr__(self) -> str:
        return f"<{self.said()} of a program>"

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return functools.partial(METHODS[name], self)
        if name.startswith("_"):
            raise AttributeError(name)
        near = difflib.get_close_matches(name, [*METHODS, "shape", "dtype", "ndim", "T"], n=1)
        raise error("program-name", f"tensors of a program have no `{name}`", found=f"`.{name}`",
                    hint=f"did you mean `{near[0]}`?" if near else "see the reference: whole-tensor programs")

    def __tilelang_program__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """T.name(...) with a tensor among its arguments."""
        return FUNCTIONS[name](*args, **kwargs)

    # ---- what needs a value -----------------------------------------------------------------------------------------
    def _no_value(self, what: str, hint: str = "") -> errors.TileLangError:
        return error("program-condition", f"{what} {self.said()}, whose values are not known while the program is traced",
                     found=self.said(), hint=hint)

    def __bool__(self) -> bool:
        raise self._no_value("the truth of")

    def __int__(self) -> int:
        raise self._no_value("a number of Python from")

    __index__ = __float__ = __complex__ = __int__

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._no_value("a NumPy array of", "use the functions of tilelang.language: T.exp(x), x.sum(0)")

    def __contains__(self, x: Any) -> bool:
        raise self._no_value("`in` asks", "compare and reduce: T.any(x == value)")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise error("program-assignment", f"an element of {self.said()} is assigned", found="an assignment to elements")

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        if not self.shape:
            raise error("program-axis", "a tensor without axes has no length", expected="a tensor that has axes",
                        found=self.said())
        if isinstance(self.shape[0], Dim):
            self.shape[0].__index__()
        return self.shape[0]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Tensor:
        return _indexed(self, index if isinstance(index, tuple) else (index,))

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub")
    __mul__, __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("div")
    __floordiv__, __rfloordiv__ = _operator("floordiv")
    __mod__, __rmod__ = _operator("mod")
    __and__, __rand__ = _operator("and")
    __or__, __ror__ = _operator("or")
    __xor__, __rxor__ = _operator("xor")
    __lshift__, __rlshift__ = _operator("shl")
    __rshift__, __rrshift__ = _operator("shr")
    __eq__, __ne__ = _comparison("eq"), _comparison("ne")
    __lt__, __le__, __gt__, __ge__ = (_comparison(op) for op in ("lt", "le", "gt", "ge"))

    def __pow__(self, other: Any) -> Tensor:
        return power(self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return power(other, self)

    def __matmul__(self, other: Any) -> Tensor:
        out: Tensor = FUNCTIONS["matmul"](self, other)
        return out

    def __rmatmul__(self, other: Any) -> Tensor:
        out: Tensor = FUNCTIONS["matmul"](other, self)
        return out

    def __neg__(self) -> Tensor:
        return elementwise("neg", self)

    def __abs__(self) -> Tensor:
        return elementwise("abs", self)

    def __invert__(self) -> Tensor:
        return elementwise("not", self)


# ---- indexing --------------------------------------------------------------------------------------------------------

def guard(size: Size, what: str) -> Size:
    """A size that may not be negative: checked now, or at the call."""
    if isinstance(size, Dim):
        trace = current()
        while trace is not None and trace.outer is not None:
            trace = trace.outer
        if trace is not None and any(n < 0 for _, n in size.terms):
            trace.guards.append(size)
    elif size < 0:
        raise error("program-index", f"{what} is outside the tensor", expected="a range inside the tensor",
                    found=f"{-size} elements too many", hint="pad the tensor first: T.pad")
    return size


def _indexed(x: Tensor, index: tuple[Any, ...]) -> Tensor:
    """x[index]: integers, slices, None, ... and at most one integer tensor."""
    taken = sum(1 for i in index if i is not None and i is not Ellipsis)
    if taken > x.ndim:
        raise error("program-index", f"{taken} indices for {x.said()}", expected=f"at most {x.ndim} indices",
                    found=str(taken), hint="index fewer axes")
    at = next((k for k, i in enumerate(index) if i is Ellipsis), None)
    rest = (slice(None),) * (x.ndim - taken)
    full = (*index, *rest) if at is None else (*index[:at], *rest, *index[at + 1:])
    starts: list[Size] = []
    steps: list[int] = []
    cut: list[Size] = []
    shape: list[Size] = []
    gathers: list[tuple[int, Tensor]] = []
    for i in full:
        if i is None:
            shape.append(1)
            continue
        extent = x.shape[len(cut)]
        if isinstance(i, Tensor):
            if i.dtype.is_bool:
                raise error("program-data-shape", f"{x.said()} is indexed by a tensor of bool", found=i.said())
            gathers.append((len(shape), i))
            i = slice(None)
        start, step, size, kept = _cut(x, i, extent)
        starts.append(start)
        steps.append(step)
        cut.append(size)
        shape += [size] if kept else []
    n = x.node
    if any(s != 0 for s in starts) or any(s != 1 for s in steps) or tuple(cut) != n.shape:
        n = make("slice", [n], {"starts": tuple(starts), "steps": tuple(steps), "shape": tuple(cut)})
    if tuple(shape) != n.shape:
        n = make("reshape", [n], {"shape": tuple(shape)})
    if len(gathers) > 1:
        raise error("program-index", f"{len(gathers)} integer tensors index {x.said()}", expected="at most one integer tensor",
                    found=str(len(gathers)), hint="gather along one axis after the other, or T.take_along")
    for axis, i in gathers:
        n = make("gather", [n, i.node], {"axis": axis})
    return Tensor(n)


def _cut(x: Tensor, i: Any, extent: Size) -> tuple[Size, int, Size, bool]:
    """(start, step, extent, whether the axis stays) of an index of one axis."""
    if isinstance(i, slice):
        return (*_range(i, extent), True)
    if isinstance(i, np.integer):
        i = int(i)
    if isinstance(i, bool) or not isinstance(i, (int, Dim)):
        raise error("program-index", f"{described(i)} is no index of {x.said()}", found=described(i),
                    expected="an integer, a slice, None, ... or an integer tensor",
                    hint="index by integers, slices, None, ... or a tensor of integers")
    if isinstance(i, int) and isinstance(extent, int) and not -extent <= i < extent:
        raise error("program-index", f"the index {i} is outside an axis of extent {extent}",
                    expected=f"an index from {-extent} to {extent - 1}", found=str(i), hint="index inside the tensor")
    start = extent + i if isinstance(i, int) and i < 0 else i
    guard(extent - start - 1, f"the index {i}")
    return start, 1, 1, False


def _range(s: slice, extent: Size) -> tuple[Size, int, Size]:
    """(start, step, extent) of a slice of an axis."""
    for part in (s.start, s.stop, s.step):
        if part is not None and (isinstance(part, bool) or not isinstance(part, (int, Dim, np.integer))):
            raise error("program-data-shape" if isinstance(part, Tensor) else "program-index",
                        f"a slice has the bound {described(part)}", expected="integers", found=described(part),
                        hint="bounds of slices are known while the program is traced; choose elements by T.where")
    if s.step == 0 or isinstance(s.step, Dim):
        raise error("program-index", f"a slice has the step {s.step}", expected="a number other than 0", found=str(s.step),
                    hint="leave the step out")
    step = int(s.step or 1)
    if isinstance(extent, int) and not any(isinstance(b, Dim) for b in (s.start, s.stop)):
        r = range(*s.indices(extent))
        return (r.start if len(r) else 0), step, len(r)
    if step < 0:
        if s.start is not None or s.stop is not None:
            raise error("program-size", f"a slice with the step {step} of the size {extent}", found=f"bounds of {extent}",
                        hint="reverse the whole axis, then cut")
        return extent - 1, step, (extent + (-step - 1)) // -step
    start, stop = (b if b is not None else d for b, d in ((s.start, 0), (s.stop, extent)))
    start, stop = (b + extent if isinstance(b, int) and b < 0 else b for b in (start, stop))
    guard(extent - stop, f"the end {stop} of a slice")
    guard(start, f"the start {start} of a slice") if isinstance(start, Dim) else None
    count = guard(stop - start, f"the slice from {start} to {stop}")
    return start, step, (count + (step - 1)) // step


def axes_of(x: Node, axis: Any, what: str) -> tuple[int, ...]:
    """The axes of a reduction, sorted: all where axis is None.  Raises program-axis."""
    if axis is None:
        return tuple(range(x.ndim))
    given: Iterable[Any] = axis if isinstance(axis, (tuple, list)) else (axis,)
    out = tuple(sorted(axis_of(x, a, what) for a in given))
    if len(set(out)) != len(out):
        raise error("program-axis", f"{what}: the axes {axis} name one axis twice", expected="different axes", found=repr(axis))
    return out


def type_named(dt: Any, what: str) -> dtype:
    """An element type in any spelling; T.float32 and similar names, strings, NumPy's and torch's."""
    return dtype_of(dt, what)
