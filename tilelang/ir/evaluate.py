"""Evaluates scalar expressions in NumPy, on many values at once.

A value is a NumPy array (or NumPy scalar) of `numpy_dtype(expr.dtype)`.  Its shape is () for a value that is the same
everywhere, or (n,) for one value per lane (a lane is a thread, or one iteration of a Parallel loop).  A vector
expression (dtype.lanes > 1) has one more axis, at the end.

`ExprCompiler` turns an expression into a Python function of a frame, so that a repeated evaluation costs only the NumPy
calls.  The arithmetic of operations and conversions is in numbers.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilelang.errors import error, register
from .dtype import numpy_dtype
from .buffer import AddressOf, Load
from .expr import Binary, Broadcast, Call, Cast, Const, Expr, Ramp, Select, Shuffle, StringConst, Unary, Var
from .numbers import Value, binary_function, call_function, round_tf32, to_dtype, unary_function
from .stmt import replace
from .visitor import walk

Closure = Callable[[Any], Value]  # of a Frame or a subclass of it

register("eval-unbound", RuntimeError, "an expression uses a variable that has no value", expected="a variable with a value")
_UNEVALUABLE = "only values, loads and intrinsics with a NumPy reference can be evaluated"

register("eval-unsupported", NotImplementedError, "an expression cannot be evaluated here",
         expected="values, loads and intrinsics with a NumPy reference")


class Frame:
    """The run-time state of compiled expressions.

    slots: values of variables, by the slot number of the compiler.  mask: one bool per lane, or None when all lanes are
    active.  Loads and calls read the mask, so that a guarded load accesses no memory in inactive lanes.
    """

    __slots__ = ("slots", "mask", "__dict__")

    def __init__(self, slots: list[Value], mask: np.ndarray | None = None) -> None:
        self.slots, self.mask = slots, mask


# ---- expressions to functions -------------------------------------------------------------------------------------

class ExprCompiler:
    """Compiles expressions to functions of a Frame.  Each variable gets one slot for all expressions of a compiler.

    rows: intrinsics by name.  The `reference` of each is a NumPy function of the arguments, with the options of the Call as
    keywords, or None.  handlers: by node type, what compiles a node; EXPRESSIONS has no memory and no device intrinsics.
    place: span of the statement around, for errors about loads and calls that have none.
    """

    def __init__(self, rows: Mapping[str, Any] | None = None, handlers: Mapping[type, Handler] | None = None) -> None:
        self.rows, self.handlers = rows or {}, EXPRESSIONS if handlers is None else handlers
        self.place: Any = None
        self.slot_of: dict[int, int] = {}
        self.vars: list[Var] = []
        self._memo: dict[int, tuple[Expr, Closure]] = {}
        self._reads: dict[int, tuple[Expr, bool]] = {}

    def slot(self, v: Var) -> int:
        """Slot number of a variable."""
        at = self.slot_of.get(id(v))
        if at is None:
            at = self.slot_of[id(v)] = len(self.vars)
            self.vars.append(v)
        return at

    def new_slots(self, values: Mapping[Var, Any] | None = None) -> list[Value]:
        """A new slot list for a Frame, with the given variables set to values converted to their dtype."""
        for v in values or ():
            self.slot(v)
        slots: list[Value] = [None] * len(self.vars)
        for v, x in (values or {}).items():
            slots[self.slot(v)] = np.asarray(x, numpy_dtype(v.dtype))
        return slots

    def expr(self, e: Expr) -> Closure:
        """The function that computes e.  Memoised by identity."""
        hit = self._memo.get(id(e))
        if hit is not None:
            return hit[1]
        handler = self.handlers.get(type(e))
        if handler is None:
            raise error("eval-unsupported", f"{type(e).__name__} has no value",
                        found=f"a {type(e).__name__}", span=e.span, hint=_UNEVALUABLE)
        placed = e.span is None and self.place is not None and isinstance(e, (Load, Call))
        fn = handler(self, replace(e, span=self.place) if placed else e)
        self._memo[id(e)] = (e, fn)
        return fn

    def reference(self, op: str) -> Callable[..., Value] | None:
        """The NumPy function of an intrinsic, None when it has none."""
        return getattr(self.rows.get(op), "reference", None)

    def touches(self, e: Expr) -> bool:
        """Whether the evaluation of e contains a load or a call that reads the mask."""
        hit = self._reads.get(id(e))
        if hit is None:
            answer = any(isinstance(n, Load) or (isinstance(n, Call) and self.reference(n.op) is None) for n in walk(e))
            hit = self._reads[id(e)] = (e, answer)
        return hit[1]


Handler = Callable[[ExprCompiler, Any], Closure]


# ---- a handler for each node type -------------------------------------------------------------------------------------


def _load(c: ExprCompiler, e: Load) -> Closure:
    raise error("eval-unsupported", f"load of {e.buffer.name} where there is no memory", expected="memory to load from",
                found=f"a load of `{e.buffer.name}`", span=e.span, hint=_UNEVALUABLE)


def _address(c: ExprCompiler, e: AddressOf) -> Closure:
    raise error("eval-unsupported", f"address of {e.buffer.name} used as a value",
                found=f"the address of `{e.buffer.name}` as a value", span=e.span, hint=_UNEVALUABLE)


def intrinsic_call(c: ExprCompiler, e: Call) -> Closure:
    """Compile a Call by the NumPy reference of its row.  Two bit-level intrinsics depend on the result type as well."""
    if e.op == "reinterpret":
        return _reinterpret(c, e)
    fn = round_tf32 if e.op == "to_tf32" else c.reference(e.op)
    if fn is None:
        raise error("eval-unsupported", f"intrinsic {e.op} has no NumPy reference and cannot be evaluated here",
                    found=f"the intrinsic {e.op}", span=e.span,
                    hint="it runs on a GPU alone: compile for a CUDA target, or write it in T.* operations")
    if e.options is not None and e.options.given():
        fn = functools.partial(fn, **e.options.given())
    args = [c.expr(a) for a in e.args]
    run = call_function(fn, tuple(a.dtype for a in e.args), e.dtype)
    if len(args) == 1:
        a0 = args[0]
        return lambda f: run(a0(f))
    return lambda f: run(*[a(f) for a in args])


def _reinterpret(c: ExprCompiler, e: Call) -> Closure:
    value, source = c.expr(e.args[0]), e.args[0].dtype
    target, src_lanes, dst_lanes = numpy_dtype(e.dtype), source.lanes, e.dtype.lanes

    def run(f: Frame) -> Value:
        x = np.asarray(value(f))
        if src_lanes == 1:
            x = x[..., None]
        x = np.ascontiguousarray(x).view(target)
        return x if dst_lanes > 1 else x[..., 0]

    return run


def variable(c: ExprCompiler, e: Var) -> Closure:
    """The value of a variable."""
    at, name, span = c.slot(e), e.name, e.span

    def run(f: Frame) -> Value:
        try:
            v = f.slots[at]
        except IndexError:
            v = None
        if v is None:
            raise error("eval-unbound", f"variable {name} is used before it has a value", found=f"`{name}` without one",
                        span=span, hint="bind it before this place, or pass it as an argument")
        return v

    return run


def _const(c: ExprCompiler, e: Const) -> Closure:
    exact = e.dtype.kind in "iubh" or e.dtype.base == "float8_e5m2" and np.isinf(e.value)  # else a conversion, which saturates
    v = to_dtype(np.asarray(e.value, numpy_dtype(e.dtype) if exact else np.float64), e.dtype)
    if e.dtype.lanes > 1:
        v = np.full(e.dtype.lanes, v)
    v.setflags(write=False)
    return lambda f: v


def _string(c: ExprCompiler, e: StringConst) -> Closure:
    return lambda f: e.value


def _cast(c: ExprCompiler, e: Cast) -> Closure:
    value, dt = c.expr(e.value), e.dtype
    return lambda f: to_dtype(value(f), dt)


def _binary(c: ExprCompiler, e: Binary) -> Closure:
    a, b = c.expr(e.a), c.expr(e.b)
    if e.op in ("and", "or") and c.touches(e.b):
        return _short_circuit(a, b, e.op == "and")
    fn = binary_function(e.op, e.a.dtype.scalar)
    return lambda f: fn(a(f), b(f))


def _unary(c: ExprCompiler, e: Unary) -> Closure:
    a, fn = c.expr(e.a), unary_function(e.op, e.a.dtype.scalar)
    return lambda f: fn(a(f))


def _select(c: ExprCompiler, e: Select) -> Closure:
    cond, a, b = c.expr(e.cond), c.expr(e.a), c.expr(e.b)
    widen = e.dtype.lanes > 1 and e.cond.dtype.lanes == 1
    if e.lazy and (c.touches(e.a) or c.touches(e.b)) and e.cond.dtype.lanes == 1:
        return _lazy_select(cond, a, b, widen)

    def run(f: Frame) -> Value:
        c = cond(f)
        return np.where(c[..., None] if widen else c, a(f), b(f))

    return run


def _ramp(c: ExprCompiler, e: Ramp) -> Closure:
    base, stride = c.expr(e.base), c.expr(e.stride)
    steps = np.arange(e.lanes, dtype=numpy_dtype(e.dtype))
    return lambda f: base(f)[..., None] + stride(f)[..., None] * steps


def _broadcast(c: ExprCompiler, e: Broadcast) -> Closure:
    value, lanes = c.expr(e.value), e.lanes

    def run(f: Frame) -> Value:
        v = np.asarray(value(f))
        return np.broadcast_to(v[..., None], (*v.shape, lanes))

    return run


def _shuffle(c: ExprCompiler, e: Shuffle) -> Closure:
    parts = [(c.expr(v), v.dtype.lanes) for v in e.vectors]
    pick = e.indices[0] if len(e.indices) == 1 else list(e.indices)

    def run(f: Frame) -> Value:
        vs = [np.asarray(fn(f)) for fn, _ in parts]
        vs = [v[..., None] if lanes == 1 else v for v, (_, lanes) in zip(vs, parts)]
        lead = np.broadcast_shapes(*(v.shape[:-1] for v in vs))
        return np.concatenate([np.broadcast_to(v, (*lead, v.shape[-1])) for v in vs], axis=-1)[..., pick]

    return run


def _short_circuit(a: Closure, b: Closure, conjunction: bool) -> Closure:
    """`a and b` or `a or b` where b contains a load: b is evaluated only in the lanes that need it."""

    def run(f: Frame) -> Value:
        x = a(f)
        need = x if conjunction else np.logical_not(x)
        if x.ndim == 0:
            return b(f) if need else x
        old = f.mask
        inner = need if old is None else need & old
        if not inner.any():
            return x
        f.mask = inner
        try:
            y = b(f)
        finally:
            f.mask = old
        return np.logical_and(x, y) if conjunction else np.logical_or(x, y)

    return run


def _lazy_select(cond: Closure, a: Closure, b: Closure, widen: bool) -> Closure:
    """cond ? a : b where a or b contains a load: each of them is evaluated only in the lanes that select it."""

    def run(f: Frame) -> Value:
        c = cond(f)
        if c.ndim == 0:
            return a(f) if c else b(f)
        old = f.mask
        try:
            f.mask = c if old is None else c & old
            x = a(f)
            no = np.logical_not(c)
            f.mask = no if old is None else no & old
            y = b(f)
        finally:
            f.mask = old
        return np.where(c[..., None] if widen else c, x, y)

    return run


EXPRESSIONS: Mapping[type, Handler] = {
    Var: variable, Const: _const, StringConst: _string, Cast: _cast, Binary: _binary, Unary: _unary, Select: _select,
    Ramp: _ramp, Broadcast: _broadcast, Shuffle: _shuffle, Load: _load, AddressOf: _address, Call: intrinsic_call,
}  # fmt: skip


# ---- evaluation of a single expression ------------------------------------------------------------------------------

LoadFn = Callable[[Any, tuple[Value, ...], "np.ndarray | None", Load], Value]


def _load_by(load: LoadFn, c: ExprCompiler, e: Load) -> Closure:
    indices = [c.expr(i) for i in e.indices]
    return lambda f: load(e.buffer, tuple(i(f) for i in indices), f.mask, e)


def evaluate(e: Expr, values: Mapping[Var, Any] | None = None, load: LoadFn | None = None,
             rows: Mapping[str, Any] | None = None) -> Value:
    """The value of e, given variables (Python or NumPy scalars, or arrays that broadcast together).

    load(buffer, indices, mask, node) -> array reads memory; mask selects the lanes that need the element (None: all).
    rows: intrinsic rows by name (see ExprCompiler).  Raises eval-unbound, eval-unsupported.

    >>> from tilelang.ir import Var, dtype
    >>> x = Var("x", dtype("int8"))
    >>> int(evaluate(x + x, {x: 100}))
    -56
    """
    compiler = ExprCompiler(rows, EXPRESSIONS if load is None else {**EXPRESSIONS, Load: functools.partial(_load_by, load)})
    fn = compiler.expr(e)
    with np.errstate(all="ignore"):
        return fn(Frame(compiler.new_slots(values)))
