"""Expressions of the language as LLVM values: variables, loads with their guards, index arithmetic in 64 bits.

Index arithmetic is done in 64 bits from the linear form of the index: where the 32-bit arithmetic of the program would
wrap, the index stays exact (and a guarded access is then out of range).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilelang import errors
from tilelang.arith import Analyzer
from tilelang.ir import (
    AddressOf,
    Binary,
    Broadcast,
    Buffer,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Ramp,
    Select,
    Shuffle,
    StringConst,
    Unary,
    Var,
    walk,
)
from tilelang.target.device_functions import known_function

from . import arithmetic, mathlib
from .host import HostCpu
from .text import Fn, is_literal
from .types import convert, from_memory, literal, load, memory_type, store, unsupported, value_type

errors.register("cpu-out-of-bounds", IndexError, "a program certainly accesses block memory outside its shape (CPU)",
                expected="an index inside the buffer")


@dataclass
class Bound:
    """What a Var stands for: its register value, or (integers) the i64 that equals it."""

    value: str | None = None
    wide: str | None = None


@dataclass
class Storage:
    """Where the elements of all buffers with one `data` live.

    base: address of element 0.  copies: how many threads have their own (1: one for the block); element e of thread t
    is then at e * copies + t, so that a loop over threads walks adjacent elements.
    """

    base: str
    copies: int = 1


class Expressions:
    """Emits expressions into one function.

    f: the function.  host: the processor.  vars, storage: what names stand for.  trusted: (node id, dimension) of
    global accesses known to be in range here.  tid: linear thread index (i64) inside a loop over threads, else None.
    """

    def __init__(self, f: Fn, host: HostCpu, analyzer: Analyzer) -> None:
        self.f, self.host, self.analyzer = f, host, analyzer
        self.vars: dict[Var, Bound] = {}
        self.storage: dict[Var, Storage] = {}
        self.slots: dict[Var, Storage] = {}  # values that each thread has one of
        self.safe_values: dict[Buffer, Expr] = {}
        self.trusted: set[tuple[int, int]] = set()
        self.sources: tuple[str, ...] = ()  # C++ that the launch puts ahead of its kernel
        self.guarded = True  # False: tl.disable_safe_memory_legalize
        self.tid: str | None = None
        self.span: Any = None
        self.maybe = 0  # > 0: the code being emitted may not be executed for every value of the loop variables
        self.swept: set[Var] = set()  # variables that certainly take every value of their analyzer range

    @property
    def first_thread(self) -> str:
        """Whose values stand for those of all threads where they agree."""
        return "0"

    # ---- scalars --------------------------------------------------------------------------------------------------

    def value(self, e: Expr) -> str:
        """Register value of an expression (LLVM type value_type(e.dtype))."""
        emit = _EMIT.get(type(e))
        if emit is None:
            raise unsupported(f"a {type(e).__name__} expression", span=e.span or self.span)
        return emit(self, e)

    def cast_value(self, e: Expr, dt: Any) -> str:
        return convert(self.f, self.value(e), e.dtype, dt)

    def _var(self, e: Var) -> str:
        bound = self.vars.get(e)
        if bound is None:
            held = self.storage.get(e)  # the address of a buffer's storage
            if held is not None and held.copies == 1:
                return held.base
            raise unsupported(f"the variable {e.name} here", span=e.span or self.span,
                              hint="it has no value on the CPU target at this place")
        if bound.value is None:
            assert bound.wide is not None, "a Bound holds one of its two forms"
            bits = e.dtype.bits
            bound_value = bound.wide
            if bits != 64 and not is_literal(bound_value):
                return self.f.let(f"trunc i64 {bound_value} to i{bits}")
            return bound_value
        return bound.value

    def _const(self, e: Const) -> str:
        return literal(e.value, e.dtype)

    def _cast(self, e: Cast) -> str:
        return convert(self.f, self.value(e.value), e.value.dtype, e.dtype)

    def _unary(self, e: Unary) -> str:
        a = self.value(e.a)
        return arithmetic.negate(self.f, a, e.dtype) if e.op == "neg" else arithmetic.invert(self.f, a, e.dtype)

    def _binary(self, e: Binary) -> str:
        if e.op in ("and", "or"):
            return self._logical(e)
        a = self.value(e.a)
        return arithmetic.binary(self.f, e.op, a, self.value(e.b), e.a.dtype)

    def _logical(self, e: Binary) -> str:
        a = self.value(e.a)
        if e.dtype.lanes > 1 or _is_cheap(e.b):
            return self.f.let(f"{e.op} {value_type(e.dtype)} {a}, {self.value(e.b)}")
        if e.op == "and":
            return self.f.choose(a, "i1", lambda: self.sometimes(e.b), lambda: "false")
        return self.f.choose(a, "i1", lambda: "true", lambda: self.sometimes(e.b))

    def sometimes(self, e: Expr) -> str:
        """Value of an expression that is evaluated only under a condition."""
        self.maybe += 1
        v = self.value(e)
        self.maybe -= 1
        return v

    def _select(self, e: Select) -> str:
        cond, ty = self.value(e.cond), value_type(e.dtype)
        if e.cond.dtype.lanes > 1 or not e.lazy or (_is_cheap(e.a) and _is_cheap(e.b)):
            a, b = self.value(e.a), self.value(e.b)
            return self.f.let(f"select {value_type(e.cond.dtype)} {cond}, {ty} {a}, {ty} {b}")
        return self.f.choose(cond, ty, lambda: self.sometimes(e.a), lambda: self.sometimes(e.b))

    def _call(self, e: Call) -> str:
        known = known_function(e, self.sources)
        if known is not None:
            return self.value(known)
        effect = self.effects().get(e.op)
        if effect is not None:
            return effect(self, e)
        return mathlib.call(self.f, e, [self.value(a) for a in e.args])

    def effects(self) -> dict[str, Callable[[Any, Call], str]]:
        """Calls that touch memory or threads (given by the statement emitter)."""
        return {}

    def _string(self, e: StringConst) -> str:
        return self.f.module.string(e.value)

    # ---- vectors --------------------------------------------------------------------------------------------------

    def _broadcast(self, e: Broadcast) -> str:
        if isinstance(e.value, Const):
            return literal(e.value.value, e.dtype)
        ty = value_type(e.dtype)
        one = self.f.let(f"insertelement {ty} poison, {value_type(e.value.dtype)} {self.value(e.value)}, i64 0")
        return self.f.let(f"shufflevector {ty} {one}, {ty} poison, <{e.lanes} x i32> zeroinitializer")

    def _ramp(self, e: Ramp) -> str:
        ty, scalar = value_type(e.dtype), value_type(e.base.dtype)
        base, stride, out = self.value(e.base), self.value(e.stride), "poison"
        for k in range(e.lanes):
            step = self.f.let(f"mul {scalar} {stride}, {k}")
            lane = self.f.let(f"add {scalar} {base}, {step}")
            out = self.f.let(f"insertelement {ty} {out}, {scalar} {lane}, i64 {k}")
        return out

    def _shuffle(self, e: Shuffle) -> str:
        lanes: list[tuple[Expr, str, int]] = []
        for v in e.vectors:
            got = self.value(v)
            lanes += [(v, got, k) for k in range(v.dtype.lanes)]
        picked = []
        for i in e.indices:
            v, got, k = lanes[i]
            picked.append(got if v.dtype.lanes == 1 else
                          self.f.let(f"extractelement {value_type(v.dtype)} {got}, i64 {k}"))
        return self.pack(picked, e.dtype)

    def pack(self, scalars: list[str], dt: Any) -> str:
        """A vector of dt from its lanes."""
        if dt.lanes == 1:
            return scalars[0]
        ty, scalar, out = value_type(dt), value_type(dt.scalar), "poison"
        for k, s in enumerate(scalars):
            out = self.f.let(f"insertelement {ty} {out}, {scalar} {s}, i64 {k}")
        return out

    def bind(self, v: Var, value: Expr) -> None:
        """v = value.  Pure integer values are also kept in 64 bits; what reads memory or has an effect happens once."""
        bound = Bound(value=self.value(value))
        if v.dtype.is_signed and value.dtype.is_signed and v.dtype.lanes == 1:
            if not any(isinstance(n, (Load, Call)) for n in walk(value)):
                bound.wide = self.index(value)
        self.vars[v] = bound

    # ---- indices --------------------------------------------------------------------------------------------------

    def index(self, e: Any) -> str:
        """An integer expression (or Python int) as an exact i64."""
        if isinstance(e, int):
            return str(e)
        if isinstance(e, Const):
            return str(int(e.value))
        if isinstance(e, Var):
            return self._atom(e)
        if e.dtype.is_unsigned or e.dtype.is_bool:
            return self._sized(e)
        form = self.analyzer.linear(e)
        out = str(form.const)
        for atom, c in form.terms.items():
            out = self.f.add(self.f.mul(self._atom(atom), str(c)), out)
        return out

    def _atom(self, e: Expr) -> str:
        if isinstance(e, Var):
            bound = self.vars.get(e)
            if bound is not None and bound.wide is not None:
                return bound.wide
        elif isinstance(e, Binary) and e.dtype.is_signed:
            if e.op == "mul":
                return self.f.mul(self.index(e.a), self.index(e.b))
            if e.op in ("min", "max") and self.exact(e.a) and self.exact(e.b):
                pick = self.f.smin if e.op == "min" else self.f.smax
                return pick(self.index(e.a), self.index(e.b))
            if e.op in ("floordiv", "floormod") and isinstance(e.b, Const) and e.b.value > 0 and self.exact(e.a):
                low = self.analyzer.bounds_of(self.analyzer.linear(e.a))[0]
                if low is not None and low >= 0:
                    if e.op == "floordiv":
                        return self.f.let(f"udiv i64 {self.index(e.a)}, {e.b.value}")
                    return self.f.hidden(self.f.let(f"urem i64 {self.index(e.a)}, {e.b.value}"))
        elif isinstance(e, Cast) and e.value.dtype.is_signed and e.dtype.is_signed:
            if e.dtype.bits >= e.value.dtype.bits:
                return self.index(e.value)
        return self._sized(e)

    def exact(self, e: Expr) -> bool:
        """Whether e's 32-bit arithmetic certainly does not wrap (a remainder of a wrapped value is another value)."""
        return e.dtype.is_signed and self.analyzer.exact(self.analyzer.linear(e), e.dtype)

    def _sized(self, e: Expr) -> str:
        """The value computed in its own type, extended."""
        return self._extended(self.value(e), e.dtype)

    def _extended(self, v: str, dt: Any) -> str:
        wide = v
        if dt.bits != 64 or dt.is_bool:
            wide = self.f.let(f"{'sext' if dt.is_signed else 'zext'} {value_type(dt)} {v} to i64")
        return wide if is_literal(v) else self.f.hidden(wide)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def strides(self, b: Buffer) -> list[str]:
        """Strides of a buffer in elements, i64."""
        if b.strides_ is not None:
            return [self.index(s) for s in b.strides_]
        out, step = ["1"], "1"
        for d in reversed(b.shape[1:]):
            step = self.f.mul(step, self.index(d))
            out.append(step)
        return out[::-1] if b.shape else []

    def offset(self, b: Buffer, indices: list[str]) -> str:
        """Linear element offset of b[indices] from the start of its storage."""
        at = self.index(b.offset)
        for i, s in zip(indices, self.strides(b)):
            at = self.f.add(self.f.mul(i, s), at)
        return at

    def base_of(self, b: Buffer) -> Storage:
        got = self.storage.get(b.data)
        if got is None:
            bound = self.vars.get(b.data)  # an untyped pointer parameter, or a pointer computed in the program
            if b.data in self.slots:
                return Storage(self._var(b.data))
            if bound is None or bound.value is None:
                raise unsupported(f"buffer {b.name} ({b.scope()}) here", span=b.span or self.span,
                                  hint="it has no storage on the CPU target at this place")
            return Storage(bound.value)
        return got

    def address(self, b: Buffer, indices: list[str]) -> str:
        """Address of an element, not guarded."""
        at, where = self.offset(b, indices), self.base_of(b)
        if where.copies > 1:
            at = self.f.add(self.f.mul(at, str(where.copies)), self.tid or self.first_thread)
        return self.f.at(where.base, memory_type(b.dtype, self.span), at)

    def in_range(self, n: Any, b: Buffer, indices: tuple[Expr, ...], at: list[str]) -> str:
        """i1: whether an access of node n is inside b's shape ("true" where known)."""
        ok = "true"
        if b.scope() != "global" or not self.guarded:
            return ok
        for d, (e, i, size) in enumerate(zip(indices, at, b.shape)):
            if (id(n), d) not in self.trusted and not self.proven(e, size):
                ok = self.f.both(ok, self.f.let(f"icmp ult i64 {i}, {self.index(size)}"))
        return ok

    def proven(self, e: Any, size: Any) -> bool:
        """Whether 0 <= e < size for certain."""
        if isinstance(e, int) or isinstance(e, Const):
            return isinstance(size, int) and 0 <= int(e) < size
        lo, hi = self.analyzer.bounds_of(self.analyzer.linear(e)) if e.dtype.is_signed else self.analyzer.interval(e)
        return isinstance(size, int) and lo is not None and hi is not None and lo >= 0 and hi < size

    def check_bounds(self, b: Buffer, indices: tuple[Expr, ...], span: Any, extents: tuple[Any, ...] = ()) -> None:
        """Refuse an access of block or thread memory that certainly leaves it: no guard stands there.

        extents: elements touched per dimension (default 1).  Only indices linear in variables that take all values of
        their range, where nothing can skip the access, are certain.
        """
        if self.maybe or b.scope() == "global" or len(indices) != len(b.shape):
            return
        for d, (e, size) in enumerate(zip(indices, b.shape)):
            more = extents[d] - 1 if extents and isinstance(extents[d], int) else 0
            if not isinstance(size, int) or not e.dtype.is_signed or e.dtype.lanes > 1:
                continue
            form = self.analyzer.linear(e)
            if not all(isinstance(t, Var) and t in self.swept for t in form.terms):
                continue
            low, high = self.analyzer.bounds_of(form)
            if low is None or high is None or low >= 0 and high + more < size:
                continue
            raise errors.error(
                "cpu-out-of-bounds",
                f"{b.name} is accessed at index {low if low < 0 else high + more} of dimension {d}, "
                f"which has {size} elements",
                expected=f"an index from 0 to {size - 1}", found=f"{low if low < 0 else high + more}", span=span or self.span,
                hint="memory of a block is not guarded: make it larger, or guard the access with a condition")

    def safe_value(self, b: Buffer, dt: Any) -> str:
        """What a load outside b's shape gives."""
        e = self.safe_values.get(b)
        return literal(0, dt) if e is None else self.cast_value(e, dt)

    def _load(self, e: Load) -> str:
        b = e.buffer
        if any(i.dtype.lanes > 1 for i in e.indices):
            return self._load_lanes(e)
        self.check_bounds(b, e.indices, e.span)
        at = [self.index(i) for i in e.indices]
        ok = self.in_range(e, b, e.indices, at)
        if ok == "true":
            return load(self.f, e.dtype, self.address(b, at), e.span or self.span)
        return self.f.choose(ok, value_type(e.dtype), lambda: load(self.f, e.dtype, self.address(b, at)),
                             lambda: self.safe_value(b, e.dtype))

    def _load_lanes(self, e: Load) -> str:
        b, dt = e.buffer, e.buffer.dtype
        lanes = max(i.dtype.lanes for i in e.indices)
        if dt.lanes > 1:
            raise unsupported("a vector index into a buffer of vectors", span=e.span or self.span)
        if self.is_run(b, e.indices):
            at = [self.index(i) for i in e.indices[:-1]] + [self.index(e.indices[-1].base)]  # type: ignore[attr-defined]
            return load(self.f, e.dtype, self.address(b, at), e.span or self.span)
        out = []
        for at in self.lane_indices(e.indices, lanes):
            ok = self.lane_in_range(b, at)
            one = partial(self._load_at, b, at)
            out.append(self.f.choose(ok, value_type(dt), one, lambda: self.safe_value(b, dt)))
        return self.pack(out, e.dtype)

    def is_run(self, b: Buffer, indices: tuple[Expr, ...]) -> bool:
        """Whether a vector access is one contiguous run that needs no guard."""
        last = indices[-1]
        copies = self.base_of(b).copies
        return (b.scope() != "global" and isinstance(last, Ramp) and isinstance(last.stride, Const) and copies == 1
                and last.stride.value == 1 and all(i.dtype.lanes == 1 for i in indices[:-1])
                and (b.strides_ is None or b.strides_[-1] == 1))

    def lane_indices(self, indices: tuple[Expr, ...], lanes: int) -> list[list[str]]:
        """Scalar i64 indices of each lane of a vector access."""
        columns = []
        for e in indices:
            if e.dtype.lanes == 1:
                columns.append([self.index(e)] * lanes)
            else:
                ty, v = value_type(e.dtype), self.value(e)
                lane = [self.f.let(f"extractelement {ty} {v}, i64 {k}") for k in range(lanes)]
                columns.append([self._extended(x, e.dtype.scalar) for x in lane])
        return [list(c) for c in zip(*columns)]

    def lane_in_range(self, b: Buffer, at: list[str]) -> str:
        ok = "true"
        if b.scope() == "global" and self.guarded:
            for i, size in zip(at, b.shape):
                ok = self.f.both(ok, self.f.let(f"icmp ult i64 {i}, {self.index(size)}"))
        return ok

    def store(self, node: Any, b: Buffer, indices: tuple[Expr, ...], value: Expr) -> None:
        """b[indices] = value; skipped outside a global buffer's shape."""
        v = self.value(value)
        if any(i.dtype.lanes > 1 for i in indices):
            self._store_lanes(b, indices, value, v)
            return
        v = convert(self.f, v, value.dtype, b.dtype)
        self.check_bounds(b, indices, node.span)
        at = [self.index(i) for i in indices]
        self.f.branch(self.in_range(node, b, indices, at),
                      lambda: store(self.f, b.dtype, v, self.address(b, at), self.span))

    def _store_lanes(self, b: Buffer, indices: tuple[Expr, ...], value: Expr, v: str) -> None:
        lanes = max(i.dtype.lanes for i in indices)
        dt = b.dtype.with_lanes(lanes)
        if value.dtype.lanes == 1:
            v = self.pack([v] * lanes, value.dtype.with_lanes(lanes))
        v = convert(self.f, v, value.dtype.with_lanes(lanes), dt)
        if self.is_run(b, indices):
            at = [self.index(i) for i in indices[:-1]] + [self.index(indices[-1].base)]  # type: ignore[attr-defined]
            store(self.f, dt, v, self.address(b, at), self.span)
            return
        for k, at in enumerate(self.lane_indices(indices, lanes)):
            one = self.f.let(f"extractelement {value_type(dt)} {v}, i64 {k}")
            self.f.branch(self.lane_in_range(b, at), partial(self._store_at, b, at, one))

    def _load_at(self, b: Buffer, at: list[str]) -> str:
        return load(self.f, b.dtype, self.address(b, at), self.span)

    def _store_at(self, b: Buffer, at: list[str], value: str) -> None:
        store(self.f, b.dtype, value, self.address(b, at), self.span)

    def _address_of(self, e: AddressOf) -> str:
        return self.address(e.buffer, [self.index(i) for i in e.indices])


def _is_cheap(e: Expr) -> bool:
    """Whether evaluating e where it is not needed is harmless: no loads, calls or divisions."""
    budget = 16
    for n in walk(e):
        budget -= 1
        if budget < 0 or isinstance(n, (Load, Call)) or isinstance(n, Binary) and n.op in (
                "floordiv", "floormod", "truncdiv", "truncmod"):
            return False
    return True


_EMIT: dict[type, Callable[[Expressions, Any], str]] = {
    Var: lambda cx, e: cx._var(e),  # statements look up values of each thread first
    Const: Expressions._const, Cast: Expressions._cast, Unary: Expressions._unary,
    Binary: Expressions._binary, Select: Expressions._select, Call: Expressions._call, Load: Expressions._load,
    StringConst: Expressions._string, Broadcast: Expressions._broadcast, Ramp: Expressions._ramp,
    Shuffle: Expressions._shuffle, AddressOf: Expressions._address_of,
}

__all__ = ["Bound", "Expressions", "Storage", "from_memory"]
