"""Whole tensors while a program is traced: operators make nodes, what needs a value is an error at the user's line."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tilelang import errors
from tilelang.errors import error, register
from tilelang.ir import Expr, Span, Var, dtype, free_vars, int_range
from tilelang.ir.dtype import promote
from tilelang.language.tracing.state import span_of

from .graph import COMPARE, Dim, Node, Size, size_of, text_of

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
register("program-option", TypeError, "a function of whole tensors is called with arguments that it does not take",
         "the arguments stand in the reference: whole-tensor programs; an axis is `axis`, not `dim`")
register("program-shape", ValueError, "the shapes of tensors of a program do not fit each other",
         "sizes that are equal have one number or one T.dynamic symbol; reshape, or add axes of extent 1")
register("program-constant", ValueError, "integers are shifted by more bits than they have, or divided by 0",
         "convert to a wider type first: x.astype(\"int64\"), or choose another constant")
register("program-type", TypeError, "an operation of a program is given an element type that it does not have",
         "convert an operand: T.cast(x, dtype) or x.astype(dtype)")
register("program-axis", ValueError, "a tensor of a program does not have the axis",
         "axes count from 0, or from the end from -1")

SHOWN_FRAMES = 6  # of the call chain of a node
BOOL, I32, F32, F64 = dtype("bool"), dtype("int32"), dtype("float32"), dtype("float64")
HALVES = {dtype("float16"), dtype("bfloat16")}  # neither holds the other
Number: TypeAlias = "bool | int | float | Dim"

# ---- the trace -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Trace:
    """One run of a program's function.

    code: of the function, where call chains end.  outer: the trace around the step of a loop.  called: what `what` says.
    guards: sizes that a call checks not to be negative.  symbols: of T.dynamic -> the sizes that they stand for.
    """

    code: CodeType | None
    outer: Trace | None = None
    called: str = ""
    guards: list[Dim] = field(default_factory=list)
    symbols: Mapping[Var, Size] = field(default_factory=dict)

    @property
    def root(self) -> Trace:
        """The trace of the whole program."""
        return self if self.outer is None else self.outer.root


_CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Operations inside belong to the trace; its tensors cannot be used afterwards."""
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)


def current() -> Trace | None:
    """The trace that is running."""
    return _CURRENT.get()


@contextmanager
def running(name: str) -> Iterator[None]:
    """Errors inside say that this function of T, or operator, was called; inside of another one, they say that one."""
    trace = current()
    if trace is None or trace.called:
        yield
        return
    trace.called = name
    try:
        yield
    finally:
        trace.called = ""


def what() -> str:
    """The function of T, or the operator, that the user called, for messages."""
    trace = current()
    return trace.called if trace is not None and trace.called else "an operation"


def here() -> Span | None:
    """The user's line and the calls that lead to it, up to the program's function."""
    trace, calls = current(), []
    for call in errors.callers():
        calls.append(call)
        if trace is not None and call[0] is trace.code or len(calls) == SHOWN_FRAMES:
            break
    span: Span | None = None
    for call in reversed(calls):
        span = span_of(*call, span)
    return span


def make(op: str, *xs: Tensor, shape: Sequence[Size] | None = None, dt: dtype | None = None, **attrs: Any) -> Tensor:
    """The result of a primitive operation, which graph.py lists.  shape, dt: of the result, else those of the first operand."""
    size = xs[0].shape if shape is None else tuple(shape)
    return Tensor(Node(op, tuple(x.node for x in xs), MappingProxyType(attrs), size, dt or xs[0].dtype, here()))


# ---- operands --------------------------------------------------------------------------------------------------------

def constant(value: Number, dt: dtype) -> Tensor:
    """A number as a tensor without axes.  Raises program-type."""
    if dt.is_int and isinstance(value, int):
        low, high = int_range(dt)
        if not low <= value <= high:
            raise error("program-type", f"the number ‹{value}› does not fit {dt}", expected=f"{low} to {high}")
    if dt.is_float and isinstance(value, (bool, int)):
        value = float(value)
    return make("constant", shape=(), dt=dt, value=value)


def described(x: Any) -> str:
    """A value of Python, for messages."""
    return x.said() if isinstance(x, Tensor) else f"`{x!r}`" if isinstance(x, (str, bool, int, float, type(None))) \
        else f"a {type(x).__module__.partition('.')[0]} {type(x).__name__}".replace("a builtins ", "a ")


def operand(x: Any) -> Tensor | Number:
    """A tensor, or a number, whose type follows from the other operands.  Raises program-operand, program-leak."""
    x = sized(x)
    if isinstance(x, Tensor):
        return Tensor(x.node)
    if isinstance(x, np.generic) and x.dtype.kind in "biuf":
        return constant(x.item(), dtype(x.dtype.name))
    if isinstance(x, (bool, int, float, Dim)):
        return x
    array = hasattr(x, "shape") and hasattr(x, "dtype")
    raise error("program-operand", f"{what()} is given {described(x)}", found=described(x),
                hint="make the array a parameter of the program and pass it at the call" if array
                else "write a tensor of the program or a number")


def weak(x: Tensor | Number, beside: dtype | None = None) -> Tensor:
    """An operand as a tensor; a number in the type that it takes beside a tensor: the tensor's, if that holds such numbers."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool):
        return constant(x, beside or BOOL)
    if isinstance(x, (int, Dim)):
        return constant(x, I32 if beside is None or beside.is_bool else beside)
    return constant(x, beside if beside is not None and beside.is_float else F32)


def tensor(x: Any) -> Tensor:
    """An operand as a tensor; numbers are bool, int32 or float32."""
    return weak(operand(x))


def converted(x: Tensor, dt: dtype) -> Tensor:
    """The tensor in a type; itself where it has that type."""
    if x.dtype == dt:
        return x
    if x.node.op == "constant" and not isinstance(x.node.attrs["value"], Dim) and (dt.is_float or not x.dtype.is_float):
        return constant(x.node.attrs["value"], dt)
    return make("cast", x, dt=dt)


def wide(x: Tensor) -> Tensor:
    """A tensor in the type in which composed functions compute: float32, or float64 for float64."""
    return converted(x, x.dtype if x.dtype == F64 else F32)


def wrong_type(expected: str, *found: dtype) -> errors.TileLangError:
    """The error of operands of a type that an operation does not have."""
    types = " and ".join(map(str, found))
    return error("program-type", f"{what()} is not defined for ‹{types}›", expected=expected)


def matched(*xs: Any) -> list[Tensor]:
    """Operands in their common type.  Raises program-type where there is none, program-operand."""
    found = [operand(x) for x in xs]

    def common(a: dtype, b: dtype) -> dtype:
        try:
            return F32 if {a, b} == HALVES else promote(a, b)
        except TypeError:
            raise wrong_type("types of which one holds the other", *dict.fromkeys((a, b))) from None

    types = [x.dtype for x in found if isinstance(x, Tensor)]
    beside = functools.reduce(common, types) if types else None
    tensors = [weak(x, beside) for x in found]
    dt = functools.reduce(common, [x.dtype for x in tensors])
    return [converted(x, dt) for x in tensors]


# Element types of element-wise operations; those that stand nowhere take each type.
NUMBERS = ("add", "sub", "mul", "neg", "abs", "floordiv", "mod", "pow")  # bools become int32
FLOATS = ("div", "atan2", "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh", "erf",
          "sigmoid")  # integers and bools become float32
NO_BOOLS = ("sign", "floor", "ceil", "trunc", "round", "isnan", "isinf", "isfinite")
ROUNDING = ("floor", "ceil", "trunc", "round")  # integers stay
BITS, SHIFTS = ("and", "or", "xor", "not"), ("shl", "shr")
TESTS = (*COMPARE, "isnan", "isinf", "isfinite")  # give bools


def elementwise(op: str, *xs: Any) -> Tensor:
    """An element-wise operation: operands in a common type that it takes, shapes broadcast.  Raises program-type."""
    with running("~" if op == "not" else op):
        operands = matched(*xs)
        t = operands[0].dtype
        if op in ROUNDING and t.is_int:
            return operands[0]
        if op in NO_BOOLS and t.is_bool or op in BITS and t.is_float or op in SHIFTS and not t.is_int:
            raise wrong_type("numbers" if op in NO_BOOLS else "bool or integers" if op in BITS else "integers", t)
        by = operands[-1].node.attrs.get("value") if t.is_int and operands[-1].node.op == "constant" else None
        if by is not None and (op in SHIFTS and not 0 <= by < t.bits or op in ("floordiv", "mod") and by == 0):
            raise error("program-constant", f"{what()} of {t} by the constant ‹{by}›",
                        expected=f"an amount from 0 to {t.bits - 1}" if op in SHIFTS else "another divisor")
        want = F32 if op in FLOATS and not t.is_float else I32 if op in NUMBERS and t.is_bool else t
        shape = broadcast_shapes(*(x.shape for x in operands))
        return make(op, *(converted(x, want) for x in operands), shape=shape, dt=BOOL if op in TESTS else want)


# ---- axes and shapes -------------------------------------------------------------------------------------------------

def axis_of(x: Tensor | int, axis: Any) -> int:
    """An axis of a tensor, or of a rank, counted from 0.  Raises program-axis."""
    rank = x if isinstance(x, int) else x.ndim
    if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
        shape = f"rank {rank}" if isinstance(x, int) else f"the shape {text_of(x.shape)}"
        raise error("program-axis", f"{what()}: a tensor of {shape} has no axis ‹{axis!r}›",
                    expected=f"an integer from {-rank} to {rank - 1}" if rank else "a tensor that has axes")
    return axis % rank


def axes_of(x: Tensor, axis: Any) -> tuple[int, ...]:
    """The axes of a reduction, sorted: all where axis is None.  Raises program-axis."""
    if axis is None:
        return tuple(range(x.ndim))
    out = tuple(sorted(axis_of(x, a) for a in (axis if isinstance(axis, (tuple, list)) else (axis,))))
    if len(set(out)) != len(out):
        raise error("program-axis", f"{what()}: the axes {axis} name one axis twice", expected="different axes",
                    found=repr(axis))
    return out


def broadcast_shapes(*shapes: Sequence[Size]) -> tuple[Size, ...]:
    """The common shape by NumPy's rule.  Raises program-shape."""
    out: list[Size] = []
    for k in range(-max(map(len, shapes)), 0):
        found = dict.fromkeys(s[k] for s in shapes if len(s) >= -k and s[k] != 1)
        if len(found) > 1:
            unsure = " (not known to be equal)" if any(isinstance(s, Dim) for s in found) else ""
            raise error("program-shape", f"{what()}: the shapes {' and '.join(map(text_of, shapes))} do not broadcast",
                        expected="extents that are equal or 1, from the last axis on",
                        found=f"{' and '.join(map(str, found))} at axis {k}{unsure}")
        out.append(next(iter(found), 1))
    return tuple(out)


def sized(x: Any) -> Any:
    """An expression of T.dynamic symbols as a size; other values as they are.  Raises program-sizes."""
    trace = current()
    if not isinstance(x, Expr) or trace is None:
        return x
    for v in free_vars(x) - trace.root.symbols.keys():
        raise error("program-sizes", f"{what()} is given the size ‹{v.name}›, which no parameter has",
                    expected="a symbol of T.dynamic in the shape of a parameter", hint=f"give a parameter a dimension {v.name}")
    return size_of(x, trace.root.symbols)


def guard(size: Size, of: str) -> Size:
    """A size that may not be negative: checked now, or at the call.  Raises program-index."""
    if isinstance(size, Dim):
        trace = current()
        if trace is not None and any(n < 0 for _, n in size.terms):
            trace.root.guards.append(size)
    elif size < 0:
        raise error("program-index", f"{of} is outside the tensor", expected="a range inside the tensor",
                    found=f"{-size} elements too many", hint="pad the tensor first: T.pad")
    return size


# ---- functions and methods -------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # T.name in a program -> function of whole tensors (functions.py, composed.py)
METHODS: dict[str, Callable[..., Any]] = {}  # name of a method of tensors -> function that takes the tensor first
Fn = TypeVar("Fn", bound=Callable[..., Any])


def public(*names: str, in_float32: bool = False) -> Callable[[Fn], Fn]:
    """Decorator: the function is T.name in programs, under further names too.  Raises program-outside elsewhere.

    One whose first parameter is `x` gets it as a Tensor; it is a method of tensors, as is one whose first parameter is `a`.
    in_float32: x comes in float32 (float64 stays); the result has the type of the x given, float32 if that is none of floats.
    """
    def add(fn: Fn) -> Fn:
        name = fn.__name__.rstrip("_")
        signature = inspect.signature(fn)
        first = next(iter(signature.parameters))

        def apply(x: Any, *args: Any, **kwargs: Any) -> Any:
            given = tensor(x)
            if not in_float32:
                return fn(given, *args, **kwargs)
            return converted(fn(wide(given), *args, **kwargs), given.dtype if given.dtype.is_float else F32)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            if current() is None and not isinstance(args[0] if args else None, Tensor):
                given = f", with {described(args[0])}" if args else ""
                raise error("program-outside", f"T.{name} is called outside a program{given}",
                            found=described(args[0]) if args else f"T.{name}()")
            with running(f"T.{name}"):
                try:
                    return (apply if first == "x" else fn)(*args, **kwargs)
                except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as e:
                    if isinstance(e, errors.TileLangError) or not is_ours(e):
                        raise
                    raise error("program-option", f"{what()}: ‹{e}›", expected=f"T.{name}{errors.bare(signature)}",
                                hint=errors.keyword_hint(e, signature)) from None

        FUNCTIONS.update(dict.fromkeys((name, *names), call))
        METHODS.update(dict.fromkeys((name, *names) if first in ("x", "a") else (), call))
        return call  # type: ignore[return-value]

    return add


def is_ours(e: BaseException) -> bool:
    """Whether an error was raised in this package, not in a function that a user wrote."""
    trace = e.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("tilelang.")


_OPERATORS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "floor_divide": "floordiv", "remainder": "mod",
    "power": "pow", "matmul": "matmul", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "left_shift": "shl",
    "right_shift": "shr", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq",
    "not_equal": "ne"}  # NumPy's names of operators
Operator: TypeAlias = "Callable[[Tensor, Any], Tensor]"


def _operator(op: str) -> tuple[Operator, Operator]:
    """The method of an operator, and the one with its operands exchanged."""
    def apply(a: Any, b: Any) -> Tensor:
        return FUNCTIONS[op](a, b) if op in ("pow", "matmul") else elementwise(op, a, b)  # type: ignore[no-any-return]

    return apply, (lambda self, other: apply(other, self))


def _method(op: str) -> Callable[..., Any]:
    return lambda *operands: elementwise(op, *operands)


class Tensor:
    """A whole tensor of a program that is being traced: shape, dtype, operators, and the functions of T as methods.

    Example:
        @tilelang.program
        def scaled(x: T.Tensor((64, 32), "float32")):
            return x * 2 + x.sum(axis=1, keepdims=True)
    """

    __slots__ = ("_node", "_trace")

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

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
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
    def _no_value(self, asked: str, hint: str = "") -> errors.TileLangError:
        return error("program-condition", f"{asked} ‹{self.said()}›, whose values are not known while the program is traced",
                     hint=hint)

    def __bool__(self) -> bool:
        raise self._no_value("the truth of")

    def __int__(self) -> int:
        raise self._no_value("a number of Python from")

    __index__ = __float__ = __complex__ = __int__

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._no_value("a NumPy array of", "use the functions of tilelang.language: T.exp(x), x.sum(0)")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Operators with NumPy's numbers on the left; functions of NumPy need values."""
        op = _OPERATORS.get(ufunc.__name__)
        if op is None or method != "__call__" or kwargs:
            raise self._no_value(f"numpy.{ufunc.__name__} of", "use the functions of tilelang.language: T.exp(x), x.sum(0)")
        found, _ = _operator(op)
        return found(*(x[()] if isinstance(x, np.ndarray) and not x.ndim else x for x in inputs))  # type: ignore[arg-type]

    @classmethod
    def __torch_function__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise error("program-condition", f"torch.{fn.__name__} needs values, which are not known while the program is traced",
                    found=f"torch.{fn.__name__} of a tensor of the program",
                    hint="use the functions of tilelang.language: T.exp(x), x.sum(0)")

    def __contains__(self, x: Any) -> bool:
        raise self._no_value("`in` asks", "compare and reduce: T.any(x == value)")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise error("program-assignment", f"an element of {self.said()} is assigned", found="an assignment to elements")

    def __delitem__(self, index: Any) -> None:
        raise error("program-assignment", f"elements of {self.said()} are deleted", found="`del` of elements")

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        if not self.shape:
            raise error("program-axis", "a tensor without axes has no length", expected="a tensor that has axes",
                        found=self.said())
        return self.shape[0].__index__()

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
    __pow__, __rpow__ = _operator("pow")
    __matmul__, __rmatmul__ = _operator("matmul")
    __and__, __rand__ = _operator("and")
    __or__, __ror__ = _operator("or")
    __xor__, __rxor__ = _operator("xor")
    __lshift__, __rlshift__ = _operator("shl")
    __rshift__, __rrshift__ = _operator("shr")
    __neg__, __abs__, __round__, __invert__, __eq__, __ne__, __lt__, __le__, __gt__, __ge__ = map(
        _method, ("neg", "abs", "round", "not", "eq", "ne", "lt", "le", "gt", "ge"))


# ---- indexing --------------------------------------------------------------------------------------------------------

def _indexed(x: Tensor, index: tuple[Any, ...]) -> Tensor:
    """x[index]: integers, slices, None, ... and at most one integer tensor."""
    dots = [k for k, i in enumerate(index) if i is Ellipsis]
    taken = sum(i is not None for i in index) - len(dots)
    if taken > x.ndim or len(dots) > 1:
        raise error("program-index", f"{taken} indices for {x.said()}" if taken > x.ndim else "`...` stands twice in an index",
                    expected=f"at most {x.ndim} indices", found=str(index if len(dots) > 1 else taken), hint="index fewer axes")
    rest = (slice(None),) * (x.ndim - taken)
    full = (*index[:dots[0]], *rest, *index[dots[0] + 1:]) if dots else (*index, *rest)
    cuts: list[tuple[Size, int, Size]] = []
    shape: list[Size] = []
    gathers: list[tuple[Tensor, int]] = []
    for i in full:
        if i is None:
            shape.append(1)
            continue
        if isinstance(i, Tensor):
            if i.dtype.is_bool:
                raise error("program-data-shape", f"{x.said()} is indexed by a tensor of bool", found=i.said())
            gathers.append((i, len(shape)))
            i = slice(None)
        cuts.append(_cut(x, i, x.shape[len(cuts)]))
        shape += [cuts[-1][2]] if isinstance(i, slice) else []
    if len(gathers) > 1:
        raise error("program-index", f"‹{len(gathers)}› integer tensors index {x.said()}",
                    expected="at most one integer tensor", hint="gather along one axis after the other, or T.take_along")
    if cuts != [(0, 1, s) for s in x.shape]:
        starts, steps, sizes = zip(*cuts)
        x = make("slice", x, shape=sizes, starts=starts, steps=steps)
    x = x.reshape(tuple(shape))
    return x.gather(*gathers[0]) if gathers else x


def _cut(x: Tensor, i: Any, extent: Size) -> tuple[Size, int, Size]:
    """(start, step, extent) of an index of one axis."""
    i = sized(i)
    if isinstance(i, slice):
        return _range(i, extent)
    i = int(i) if isinstance(i, np.integer) else i
    if isinstance(i, bool) or not isinstance(i, (int, Dim)):
        raise error("program-index", f"‹{described(i)}› is no index of {x.said()}", expected="an integer, a slice, None, ... "
                    "or an integer tensor", hint="index by integers, slices, None, ... or a tensor of integers")
    if isinstance(i, int) and isinstance(extent, int) and not -extent <= i < extent:
        raise error("program-index", f"the index ‹{i}› is outside an axis of extent {extent}",
                    expected=f"an index from {-extent} to {extent - 1}", hint="index inside the tensor")
    start = extent + i if isinstance(i, int) and i < 0 else i
    guard(extent - start - 1, f"the index {i}")
    return start, 1, 1


def _range(s: slice, extent: Size) -> tuple[Size, int, Size]:
    """(start, step, extent) of a slice of an axis."""
    s = slice(*map(sized, (s.start, s.stop, s.step)))
    for end in (s.start, s.stop, s.step):
        if isinstance(end, bool) or not isinstance(end, (int, Dim, np.integer, type(None))):
            raise error("program-data-shape" if isinstance(end, Tensor) else "program-index", "a slice has the bound "
                        f"‹{described(end)}›", expected="integers",
                        hint="bounds of slices are known while the program is traced; choose elements by T.where")
    if isinstance(s.step, Dim) or s.step == 0:
        raise error("program-index", f"a slice has the step ‹{s.step}›", expected="a number other than 0",
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
