"""NumPy meaning of scalar expressions: what every Expr node computes, for every dtype, on many values at once.

A value is a NumPy array (or NumPy scalar) of `numpy_dtype(expr.dtype)`.  Its shape is () for a value that is the same
everywhere, or (n,) for one value per lane (a lane is a thread, or one iteration of a Parallel loop).  A vector
expression (dtype.lanes > 1) has one more axis, at the end.

`ExprCompiler` turns an expression into a Python function of a frame once, so that running it again costs only the
NumPy calls.  The rules (wrapping integers, floor and truncating division, one rounding per operation, NaN in min and
max, cast truncation) are those of ir/__init__.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import error, register
from .dtype import SCALE, dtype, numpy_dtype
from .expr import AddressOf, Binary, Broadcast, Call, Cast, Const, Expr, Load, Ramp, Select, Shuffle, StringConst, Unary, Var
from .visitor import walk

Value = Any  # np.ndarray | np.generic
Closure = Callable[[Any], Value]  # of a Frame or a subclass of it

register("eval-unbound", RuntimeError, "an expression uses a variable that has no value", expected="a variable with a value")
_NO_MEANING = "only values, loads and intrinsics whose row has a meaning can be evaluated"

register("eval-unsupported", NotImplementedError, "an expression has no executable meaning here",
         expected="an expression with an executable meaning")


class Frame:
    """Where compiled expressions find values while they run.

    slots: values of variables, by the compiler's slot number.  mask: bool per lane, or None when all lanes are active;
    loads and calls look at it, so that a guarded load touches nothing in the lanes that do not need it.
    """

    __slots__ = ("slots", "mask", "__dict__")

    def __init__(self, slots: list[Value], mask: np.ndarray | None = None) -> None:
        self.slots, self.mask = slots, mask


# ---- numbers ------------------------------------------------------------------------------------------------------


def round_tf32(x: Value) -> Value:
    """float32 rounded to 10 mantissa bits, ties away from zero (PTX `cvt.rna.tf32.f32`); infinities and NaN stay."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x).astype(np.float32)


def _wrap4(x: Value) -> Value:
    return np.right_shift(np.left_shift(x, np.int8(4)), np.int8(4))


def _fit(dt: dtype) -> Callable[[Value], Value] | None:
    """What brings a result computed in the storage type back into dt, where the two differ."""
    return {"int4": _wrap4, "uint4": lambda x: np.bitwise_and(x, np.uint8(15))}.get(dt.base)


@functools.cache
def _finite_limit(name: str) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(numpy_dtype(name)).max)


def _to_odd32(x: Value) -> Value:
    """float64 as float32 rounded to odd: a second rounding, to a narrower type, is then the only one that counts."""
    near = x.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32) - (np.abs(back) > np.abs(x))
    inexact = (back != x) & ~np.isnan(x)
    return np.where(inexact, bits | np.uint32(1), near.view(np.uint32)).astype(np.uint32).view(np.float32)


def _for_narrow_float(x: Value) -> Value:
    """x as a float32 that rounds to a narrower float as x itself does."""
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        # Beyond 53 bits the low ones only say "not exact": bit 12 stands for them.
        low = x & np.asarray(4095, x.dtype)
        cut = (x - low) | np.where(low != 0, np.asarray(4096, x.dtype), np.asarray(0, x.dtype))
        x = np.where(np.abs(x.astype(np.float64)) < 2.0**53, x, cut)
    if x.dtype.kind in "iu" and x.dtype.itemsize >= 4 or x.dtype == np.float64:
        return _to_odd32(np.asarray(x, np.float64))
    return x.astype(np.float32)


def _to_scale(x: Value) -> Value:
    """float32 as float8_e8m0fnu: |x| rounded up to a power of two, at most 2**127; NaN stays (cvt.rp.satfinite.ue8m0x2)."""
    size = np.asarray(x, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    up = np.minimum(size + np.uint32(0x7FFFFF) >> np.uint32(23), np.uint32(254))
    code = np.where(size <= 0x400000, np.uint32(0), np.where(size > 0x7F800000, np.uint32(255), up))
    return np.asarray(code, np.uint8).view(numpy_dtype(SCALE))


def _to_int(x: Value, target: np.dtype) -> Value:
    """Floats cut towards zero; beyond the range its nearest end, NaN zero (PTX `cvt.rzi`)."""
    if x.dtype.kind != "f" or x.dtype == np.float16:
        x = x.astype(np.float32)
    info = np.iinfo(target)
    x = np.trunc(x)
    high = x.dtype.type(2.0 ** (info.bits - (info.min < 0)))  # first value past the range: exact in every float type
    low = x.dtype.type(info.min)
    inside = (x < high) & (x >= low)
    out = np.where(inside, x, 0).astype(target)
    # Of the target's type from the start: releases of NumPy differ in what Python's integers become here.
    most, least, none = (np.asarray(n, target) for n in (info.max, info.min, 0))
    return np.where(inside, out, np.where(x >= high, most, np.where(x < low, least, none)))


def to_dtype(x: Value, dt: dtype) -> Value:
    """x (any NumPy dtype) as a value of dt: float to int truncates and saturates, NaN becomes 0; narrowing rounds to nearest
    even, once; integers wrap.

    fp8 and narrower saturate to the largest finite value (PTX `cvt.satfinite`); NaN stays NaN where the type has one.
    float8_e8m0fnu takes the next power of two that |x| does not exceed, as the conversion of CUDA's header does.
    tfloat32 is stored as float32: only products round it.
    """
    target = numpy_dtype(dt)
    x = np.asarray(x)
    if dt.is_bool:
        x = x if x.dtype.kind in "biuf" else x.astype(np.float32)
        return x != np.zeros((), x.dtype)
    if x.dtype == target and dt.base not in ("int4", "uint4"):
        return x
    if dt.is_float:
        if dt.base == SCALE:
            return _to_scale(_for_narrow_float(x))
        if dt.bits <= 8:
            limit = np.float32(_finite_limit(dt.base))
            return np.clip(_for_narrow_float(x), -limit, limit).astype(target)
        if dt.base == "bfloat16":
            return _for_narrow_float(x).astype(target)
        return x.astype(target)
    x = x.astype(target) if x.dtype.kind in "biu" else _to_int(x, target)
    fit = _fit(dt)
    return x if fit is None else fit(x)


def _truncdiv(x: Value, y: Value) -> Value:
    return np.floor_divide(np.subtract(x, np.fmod(x, y)), y)


def _bool_arithmetic(fn: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    return lambda x, y: fn(x.astype(np.int32), y.astype(np.int32)) != 0


_PLAIN: dict[str, Callable[[Value, Value], Value]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "floormod": np.remainder,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor, "shl": np.left_shift,
    "shr": np.right_shift, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or,
}  # fmt: skip
_TRUTH = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or")


def _through_float32(fn: Callable[..., Value], dt: dtype) -> Callable[..., Value]:
    """fn on values of an 8-bit float type: computed in float32, then rounded and saturated like every conversion."""
    return lambda *values: to_dtype(fn(*(np.asarray(v).astype(np.float32) for v in values)), dt)


@functools.cache
def binary_function(op: str, dt: dtype) -> Callable[[Value, Value], Value]:
    """The meaning of Binary(op) on two values of dt (both operands have dt; comparisons give bool)."""
    if dt.is_float and dt.bits <= 8 and op not in _TRUTH:
        return _through_float32(binary_function(op, dtype("float32")), dt)
    if op in ("min", "max"):
        least = op == "min"
        if dt.is_float:
            return np.fmin if least else np.fmax  # the other operand when one is NaN
        return np.minimum if least else np.maximum
    if op == "div":
        fn: Callable[[Value, Value], Value] = np.true_divide if dt.is_float else _truncdiv
    elif op == "truncdiv":
        fn = (lambda x, y: np.trunc(np.true_divide(x, y))) if dt.is_float else _truncdiv
    elif op == "truncmod":
        fn = np.fmod
    else:
        fn = _PLAIN[op]
    if op in _TRUTH:
        return fn
    if dt.is_bool and not op.startswith("bit"):
        return _bool_arithmetic(fn)
    fit = _fit(dt)
    return fn if fit is None else lambda x, y: fit(fn(x, y))


def binary_value(op: str, dt: dtype, x: Value, y: Value) -> Value:
    """x op y for values of dt."""
    with np.errstate(all="ignore"):
        return binary_function(op, dt)(np.asarray(x), np.asarray(y))


def _unary_function(op: str, dt: dtype) -> Callable[[Value], Value]:
    fn = {"neg": np.negative, "not": np.logical_not, "bitnot": np.bitwise_not}[op]
    if dt.is_float and dt.bits <= 8:
        return _through_float32(fn, dt)
    fit = _fit(dt)
    return fn if fit is None else lambda x: fit(fn(x))


def call_function(fn: Callable[..., Value], args: tuple[dtype, ...], result: dtype) -> Callable[..., Value]:
    """An intrinsic's meaning with narrow floats computed in float32 and the result rounded once to `result`."""
    widen = [a.is_float and a.bits < 32 for a in args]

    def run(*values: Value) -> Value:
        wide = [np.asarray(v).astype(np.float32) if w else v for v, w in zip(values, widen)]
        return to_dtype(fn(*wide), result)

    return run


# ---- expressions to functions -------------------------------------------------------------------------------------

class ExprCompiler:
    """Compiles expressions to functions of a Frame.  Each variable gets one slot for all expressions of a compiler.

    rows: intrinsic by name, each with `.meaning` (NumPy function of the arguments, or None) and `.attrs` (names of the
    Call's attributes it takes as keywords).  Subclasses give Load, AddressOf and device Calls their meaning.
    """

    def __init__(self, rows: Mapping[str, Any] | None = None) -> None:
        self.rows = rows or {}
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
        """A slot list for a Frame, with the given variables set (as their dtype)."""
        for v in values or ():
            self.slot(v)
        slots: list[Value] = [None] * len(self.vars)
        for v, x in (values or {}).items():
            slots[self.slot(v)] = np.asarray(x, numpy_dtype(v.dtype))
        return slots

    def expr(self, e: Expr) -> Closure:
        """The function computing e.  Memoised by identity."""
        hit = self._memo.get(id(e))
        if hit is not None:
            return hit[1]
        method = _COMPILE.get(type(e))
        if method is None:
            raise error("eval-unsupported", f"{type(e).__name__} has no value",
                        found=f"a {type(e).__name__}", span=e.span, hint=_NO_MEANING)
        fn = method(self, e)
        self._memo[id(e)] = (e, fn)
        return fn

    def touches(self, e: Expr) -> bool:
        """Whether evaluating e loads or calls something that looks at the mask."""
        hit = self._reads.get(id(e))
        if hit is None:
            answer = any(isinstance(n, Load) or (isinstance(n, Call) and self._meaning(n.op) is None) for n in walk(e))
            hit = self._reads[id(e)] = (e, answer)
        return hit[1]

    # -- nodes whose meaning a subclass gives

    def compile_load(self, e: Load) -> Closure:
        """Meaning of a Load.  The base has no memory."""
        raise error("eval-unsupported", f"load of {e.buffer.name} where there is no memory",
                    expected="memory to load from", found=f"a load of `{e.buffer.name}`", span=e.span,
                    hint=_NO_MEANING)

    def compile_address(self, e: AddressOf) -> Closure:
        """Meaning of an address as a value."""
        raise error("eval-unsupported", f"address of {e.buffer.name} used as a value",
                    found=f"the address of `{e.buffer.name}` as a value", span=e.span, hint=_NO_MEANING)

    def _meaning(self, op: str) -> Callable[..., Value] | None:
        return getattr(self.rows.get(op), "meaning", None)

    def compile_call(self, e: Call) -> Closure:
        """Meaning of a Call: its row's, and the two bit-level ones whose meaning depends on the result type."""
        if e.op == "reinterpret":
            return self._reinterpret(e)
        fn = round_tf32 if e.op == "to_tf32" else self._meaning(e.op)
        if fn is None:
            raise error("eval-unsupported", f"intrinsic {e.op} has no executable meaning here",
                        found=f"the intrinsic {e.op}", span=e.span,
                        hint="it runs on a GPU alone: compile for a CUDA target, or write it in T.* operations")
        keywords = {k: v for k, v in e.attrs if k in getattr(self.rows.get(e.op), "attrs", ())}
        if keywords:
            fn = functools.partial(fn, **keywords)
        args = [self.expr(a) for a in e.args]
        run = call_function(fn, tuple(a.dtype for a in e.args), e.dtype)
        if len(args) == 1:
            a0 = args[0]
            return lambda f: run(a0(f))
        return lambda f: run(*[a(f) for a in args])

    def _reinterpret(self, e: Call) -> Closure:
        value, source = self.expr(e.args[0]), e.args[0].dtype
        target, src_lanes, dst_lanes = numpy_dtype(e.dtype), source.lanes, e.dtype.lanes

        def run(f: Frame) -> Value:
            x = np.asarray(value(f))
            if src_lanes == 1:
                x = x[..., None]
            x = np.ascontiguousarray(x).view(target)
            return x if dst_lanes > 1 else x[..., 0]

        return run

    # -- the rest

    def compile_var(self, e: Var) -> Closure:
        """The value of a variable."""
        at, name, span = self.slot(e), e.name, e.span

        def run(f: Frame) -> Value:
            try:
                v = f.slots[at]
            except IndexError:
                v = None
            if v is None:
                raise error("eval-unbound", f"variable {name} is used before it has a value",
                            found=f"`{name}` without one", span=span,
                            hint="bind it before this place, or pass it as an argument")
            return v

        return run

    def _const(self, e: Const) -> Closure:
        v = to_dtype(np.asarray(e.value, numpy_dtype(e.dtype) if e.dtype.kind in "iubh" else np.float64), e.dtype)
        if e.dtype.lanes > 1:
            v = np.full(e.dtype.lanes, v)
        v.setflags(write=False)
        return lambda f: v

    def _string(self, e: StringConst) -> Closure:
        return lambda f: e.value

    def _cast(self, e: Cast) -> Closure:
        value, dt = self.expr(e.value), e.dtype
        return lambda f: to_dtype(value(f), dt)

    def _binary(self, e: Binary) -> Closure:
        a, b = self.expr(e.a), self.expr(e.b)
        if e.op in ("and", "or") and self.touches(e.b):
            return _short_circuit(a, b, e.op == "and")
        fn = binary_function(e.op, e.a.dtype.scalar)
        return lambda f: fn(a(f), b(f))

    def _unary(self, e: Unary) -> Closure:
        a, fn = self.expr(e.a), _unary_function(e.op, e.a.dtype.scalar)
        return lambda f: fn(a(f))

    def _select(self, e: Select) -> Closure:
        cond, a, b = self.expr(e.cond), self.expr(e.a), self.expr(e.b)
        widen = e.dtype.lanes > 1 and e.cond.dtype.lanes == 1
        if e.lazy and (self.touches(e.a) or self.touches(e.b)) and e.cond.dtype.lanes == 1:
            return _lazy_select(cond, a, b, widen)

        def run(f: Frame) -> Value:
            c = cond(f)
            return np.where(c[..., None] if widen else c, a(f), b(f))

        return run

    def _ramp(self, e: Ramp) -> Closure:
        base, stride = self.expr(e.base), self.expr(e.stride)
        steps = np.arange(e.lanes, dtype=numpy_dtype(e.dtype))
        return lambda f: base(f)[..., None] + stride(f)[..., None] * steps

    def _broadcast(self, e: Broadcast) -> Closure:
        value, lanes = self.expr(e.value), e.lanes

        def run(f: Frame) -> Value:
            v = np.asarray(value(f))
            return np.broadcast_to(v[..., None], (*v.shape, lanes))

        return run

    def _shuffle(self, e: Shuffle) -> Closure:
        parts = [(self.expr(v), v.dtype.lanes) for v in e.vectors]
        pick = e.indices[0] if len(e.indices) == 1 else list(e.indices)

        def run(f: Frame) -> Value:
            vs = [np.asarray(fn(f)) for fn, _ in parts]
            vs = [v[..., None] if lanes == 1 else v for v, (_, lanes) in zip(vs, parts)]
            lead = np.broadcast_shapes(*(v.shape[:-1] for v in vs))
            return np.concatenate([np.broadcast_to(v, (*lead, v.shape[-1])) for v in vs], axis=-1)[..., pick]

        return run


def _short_circuit(a: Closure, b: Closure, conjunction: bool) -> Closure:
    """a and b / a or b where b loads: b is evaluated only in the lanes that need it."""

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
    """cond ? a : b where a side loads: each side runs only in its lanes."""

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


_COMPILE: dict[type, Callable[[Any, Any], Closure]] = {
    Var: lambda c, e: c.compile_var(e), Const: ExprCompiler._const, StringConst: ExprCompiler._string, Cast: ExprCompiler._cast,
    Binary: ExprCompiler._binary, Unary: ExprCompiler._unary, Select: ExprCompiler._select,
    Ramp: ExprCompiler._ramp, Broadcast: ExprCompiler._broadcast, Shuffle: ExprCompiler._shuffle,
    Load: lambda c, e: c.compile_load(e), AddressOf: lambda c, e: c.compile_address(e),
    Call: lambda c, e: c.compile_call(e),
}  # fmt: skip


# ---- one expression, once -----------------------------------------------------------------------------------------

LoadFn = Callable[[Any, tuple[Value, ...], "np.ndarray | None", Load], Value]


class _OneShot(ExprCompiler):
    def __init__(self, load: LoadFn | None, rows: Mapping[str, Any] | None) -> None:
        super().__init__(rows)
        self._load = load

    def compile_load(self, e: Load) -> Closure:
        load = self._load
        if load is None:
            return super().compile_load(e)
        indices = [self.expr(i) for i in e.indices]
        return lambda f: load(e.buffer, tuple(i(f) for i in indices), f.mask, e)


def evaluate(e: Expr, values: Mapping[Var, Any] | None = None, load: LoadFn | None = None,
             rows: Mapping[str, Any] | None = None) -> Value:
    """The value of e, given variables (Python or NumPy scalars, or arrays that broadcast together).

    load(buffer, indices, mask, node) -> array gives memory; mask is the lanes that need the element (None: all).
    rows: intrinsic rows by name (see ExprCompiler).  Raises eval-unbound, eval-unsupported.

    >>> from tilelang.ir import Var, dtype
    >>> x = Var("x", dtype("int8"))
    >>> int(evaluate(x + x, {x: 100}))
    -56
    """
    compiler = _OneShot(load, rows)
    fn = compiler.expr(e)
    with np.errstate(all="ignore"):
        return fn(Frame(compiler.new_slots(values)))


__all__ = ["Closure", "ExprCompiler", "Frame", "Value", "binary_function", "binary_value", "call_function", "evaluate",
           "round_tf32", "to_dtype"]
