"""One function while it is printed: expressions as LLVM values, integers as exact i64, and accesses of memory.

The entry function of a program while it is printed: its Code, its workspaces, and the failures of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Alloc, Binary, Broadcast, Buffer, Call, Cast, Const, Expr, Func, Load, Ramp, Select,
                         Shuffle, Store, StringConst, Unary, Var, contains, dtype, GLOBAL)
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import CheckedAddress, CheckedLoad, CheckedStore
from tilelang.target.device_functions import known_function
from tilelang.target.machine import MOST_BYTES

from . import arithmetic, mathlib
from .state import BlockState, Bound, Storage
from .text import Fn, is_literal
from .types import convert, literal, load, memory_type, store, value_type

CallPrinter = Callable[["Code", Call], str]


@dataclass
class Code:
    """One function while it is printed.

    f: its text. analyzer: ranges of integers at this place. calls: printers of calls that use memory or threads. vars, storage:
    the values and storage of names. safe_values: the values of loads outside of a buffer. sources: C++ text that the launch
    puts in front of its kernel. span: the user's place.
    """

    f: Fn
    block: BlockState
    calls: Mapping[str, CallPrinter]
    analyzer: Analyzer = field(default_factory=Analyzer)
    vars: dict[Var, Bound] = field(default_factory=dict)
    storage: dict[Var, Storage] = field(default_factory=dict)
    safe_values: dict[Buffer, Expr] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    span: Any = None

    # ---- values -----------------------------------------------------------------------------------------------------

    def value(self, e: Expr) -> str:
        """The register value of an expression (LLVM type value_type(e.dtype))."""
        printer = _PRINT.get(type(e))
        if printer is None:
            raise unsupported(f"a {type(e).__name__} expression", span=e.span or self.span)
        return printer(self, e)

    def _var(self, e: Var) -> str:
        slot = self.block.slots.get(e)
        if slot is not None:
            return load(self.f, e.dtype, self.f.at(slot.base, memory_type(e.dtype), self.block.tid or self.block.first_thread))
        bound = self.vars.get(e)
        if bound is None:
            held = self.storage.get(e)  # the address of a buffer's storage
            if held is not None and held.copies == 1:
                return held.base
            raise unsupported(f"the variable {e.name} here", span=e.span or self.span,
                              hint="it has no value on the CPU target at this place")
        if bound.value is None:
            assert bound.wide is not None, "a Bound holds one of its two forms"
            narrow = e.dtype.bits != 64 and not is_literal(bound.wide)
            return self.f.let(f"trunc i64 {bound.wide} to i{e.dtype.bits}") if narrow else bound.wide
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
        any_amount = e.op in ("shl", "shr") and not self.analyzer.shifts_within(e)
        return (arithmetic.any_shift if any_amount else arithmetic.binary)(self.f, e.op, a, self.value(e.b), e.a.dtype)

    def _logical(self, e: Binary) -> str:
        a = self.value(e.a)
        if e.op == "and":
            return self.f.choose(a, "i1", lambda: self.value(e.b), lambda: "false")
        return self.f.choose(a, "i1", lambda: "true", lambda: self.value(e.b))

    def _select(self, e: Select) -> str:
        cond, ty = self.value(e.cond), value_type(e.dtype)
        if not e.lazy:
            a, b = self.value(e.a), self.value(e.b)
            return self.f.let(f"select {value_type(e.cond.dtype)} {cond}, {ty} {a}, {ty} {b}")
        return self.f.choose(cond, ty, lambda: self.value(e.a), lambda: self.value(e.b))

    def _call(self, e: Call) -> str:
        known = known_function(e, self.sources)
        if known is not None:
            return self.value(known)
        printer = self.calls.get(e.op)
        if printer is not None:
            return printer(self, e)
        return mathlib.call(self.f, e, [self.value(a) for a in e.args])

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

    def pack(self, scalars: list[str], dt: dtype) -> str:
        """A vector of dt from its lanes."""
        if dt.lanes == 1:
            return scalars[0]
        ty, scalar, out = value_type(dt), value_type(dt.scalar), "poison"
        for k, s in enumerate(scalars):
            out = self.f.let(f"insertelement {ty} {out}, {scalar} {s}, i64 {k}")
        return out

    def cast_value(self, e: Expr, dt: dtype) -> str:
        """The register value of an expression, converted to another type."""
        return convert(self.f, self.value(e), e.dtype, dt)

    def address_of(self, a: AddressOf) -> str:
        """The address that an AddressOf denotes."""
        return self.address(a.buffer, [self.index(i) for i in a.indices])

    # ---- integers ---------------------------------------------------------------------------------------------------
    # Index arithmetic in 64 bits, from the linear form of an index.  Where the 32-bit arithmetic of the program would wrap, the
    # index stays exact (and a guarded access is then out of range).

    def index(self, e: Expr | int) -> str:
        """The exact i64 value of an integer expression or Python int."""
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
            if e.op in ("min", "max") and self._exact(e.a) and self._exact(e.b):
                pick = self.f.smin if e.op == "min" else self.f.smax
                return pick(self.index(e.a), self.index(e.b))
            if e.op in ("floordiv", "floormod") and isinstance(e.b, Const) and e.b.value > 0 and self._exact(e.a):
                low = self.analyzer.bounds_of(self.analyzer.linear(e.a))[0]
                if low is not None and low >= 0:
                    if e.op == "floordiv":
                        return self.f.let(f"udiv i64 {self.index(e.a)}, {e.b.value}")
                    return self.f.hidden(self.f.let(f"urem i64 {self.index(e.a)}, {e.b.value}"))
        elif isinstance(e, Cast) and e.value.dtype.is_signed and e.dtype.is_signed:
            if e.dtype.bits >= e.value.dtype.bits:
                return self.index(e.value)
        return self._sized(e)

    def _exact(self, e: Expr) -> bool:
        """Whether e's 32-bit arithmetic certainly does not wrap. (The remainder of a wrapped value differs from that of the
        exact one.)"""
        return e.dtype.is_signed and self.analyzer.exact(self.analyzer.linear(e), e.dtype)

    def _sized(self, e: Expr) -> str:
        """The value computed in its own type, then extended."""
        return self.extended(self.value(e), e.dtype)

    def extended(self, v: str, dt: dtype) -> str:
        """A register value of an integer type, extended to i64."""
        wide = v
        if dt.bits != 64 or dt.is_bool:
            wide = self.f.let(f"{'sext' if dt.is_signed else 'zext'} {value_type(dt)} {v} to i64")
        return wide if is_literal(v) else self.f.hidden(wide)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def strides(self, b: Buffer) -> list[str]:
        """The strides of a buffer in elements, i64."""
        if b.strides_ is not None:
            return [self.index(s) for s in b.strides_]
        out, step = ["1"], "1"
        for d in reversed(b.shape[1:]):
            step = self.f.mul(step, self.index(d))
            out.append(step)
        return out[::-1] if b.shape else []

    def offset(self, b: Buffer, indices: list[str]) -> str:
        """The linear offset of b[indices] from the start of its storage, in elements."""
        at = self.index(b.offset)
        for i, s in zip(indices, self.strides(b)):
            at = self.f.add(self.f.mul(i, s), at)
        return at

    def base_of(self, b: Buffer) -> Storage:
        got = self.storage.get(b.data)
        if got is None:
            bound = self.vars.get(b.data)  # an untyped pointer parameter, or a pointer computed in the program
            if b.data in self.block.slots:
                return Storage(self.value(b.data))
            if bound is None or bound.value is None:
                raise unsupported(f"buffer {b.name} ({b.scope()}) here", span=b.span or self.span,
                                  hint="it has no storage on the CPU target at this place")
            return Storage(bound.value)
        return got

    def address(self, b: Buffer, indices: list[str]) -> str:
        """The address of an element, without a guard."""
        at, where = self.offset(b, indices), self.base_of(b)
        base, size = where.base, b.dtype.bytes
        if where.copies > 1:
            tid = self.block.tid or self.block.first_thread
            if where.unit > size:  # an element of a view: which bytes of which unit
                f, parts = self.f, str(where.unit // size)
                whole, part = (f.let(f"udiv i64 {at}, {parts}"), f.let(f"urem i64 {at}, {parts}")) if not at.isdigit() else map(
                    str, divmod(int(at), int(parts)))
                at = f.add(f.mul(f.add(f.mul(whole, str(where.copies)), tid), parts), part)
            else:
                at = self.f.add(self.f.mul(at, str(where.copies)), tid)
        return self.f.at(base, memory_type(b.dtype, self.span), at)

    def in_range(self, n: Load | Store | AddressOf, at: list[str]) -> str:
        """i1: whether the element of an access at indices `at` exists ("true" where that is known)."""
        b, f = n.buffer, self.f
        if b.scope() != GLOBAL:
            return "true"
        ok = "true"
        dims = n.guards if isinstance(n, (CheckedLoad, CheckedStore, CheckedAddress)) else range(len(at))
        for d in dims:
            ok = f.both(ok, f.let(f"icmp ult i64 {at[d]}, {self.index(b.shape[d])}"))
        return ok

    def safe_value(self, b: Buffer, dt: dtype) -> str:
        """The value of a load outside b's shape."""
        e = self.safe_values.get(b)
        return literal(0, dt) if e is None else self.cast_value(e, dt)

    def load(self, e: Load) -> str:
        b = e.buffer
        if any(i.dtype.lanes > 1 for i in e.indices):
            return self._load_lanes(e)
        at = [self.index(i) for i in e.indices]
        ok = self.in_range(e, at)
        if ok == "true":
            return load(self.f, e.dtype, self.address(b, at), e.span or self.span)
        return self.f.choose(ok, value_type(e.dtype), lambda: load(self.f, e.dtype, self.address(b, at)),
                             lambda: self.safe_value(b, e.dtype))

    def _load_lanes(self, e: Load) -> str:
        b, dt, f = e.buffer, e.buffer.dtype, self.f
        lanes = max(i.dtype.lanes for i in e.indices)
        if dt.lanes > 1:
            raise unsupported("a vector index into a buffer of vectors", span=e.span or self.span)
        run = self._run(b, e.indices)
        if run is not None:
            return load(f, e.dtype, self.address(b, run), e.span or self.span)
        return self.pack([f.choose(
            self.in_range(e, at), value_type(dt), lambda at=at: load(f, dt, self.address(b, at), self.span),  # type: ignore[misc]
            lambda: self.safe_value(b, dt)) for at in self._lane_indices(e.indices, lanes)], e.dtype)

    def _run(self, b: Buffer, indices: tuple[Expr, ...]) -> list[str] | None:
        """The first place of a vector access that is contiguous and needs no guard; None for others."""
        last = indices[-1]
        if (b.scope() == GLOBAL or not isinstance(last, Ramp) or not isinstance(last.stride, Const) or last.stride.value != 1
                or self.base_of(b).copies > 1 or any(i.dtype.lanes > 1 for i in indices[:-1])
                or b.strides_ is not None and b.strides_[-1] != 1):
            return None
        return [self.index(i) for i in (*indices[:-1], last.base)]

    def _lane_indices(self, indices: tuple[Expr, ...], lanes: int) -> list[list[str]]:
        """The scalar i64 indices of each lane of a vector access."""
        columns = []
        for e in indices:
            if e.dtype.lanes == 1:
                columns.append([self.index(e)] * lanes)
            else:
                ty, v = value_type(e.dtype), self.value(e)
                lane = [self.f.let(f"extractelement {ty} {v}, i64 {k}") for k in range(lanes)]
                columns.append([self.extended(x, e.dtype.scalar) for x in lane])
        return [list(c) for c in zip(*columns)]

    def store(self, s: Store) -> None:
        """Print buffer[indices] = value; skipped outside a global buffer's shape."""
        b, indices, value = s.buffer, s.indices, s.value
        v = self.value(value)
        if any(i.dtype.lanes > 1 for i in indices):
            self._store_lanes(s, v)
            return
        v = convert(self.f, v, value.dtype, b.dtype)
        at = [self.index(i) for i in indices]
        self.f.branch(self.in_range(s, at),
                      lambda: store(self.f, b.dtype, v, self.address(b, at), self.span))

    def _store_lanes(self, s: Store, v: str) -> None:
        b, indices, value = s.buffer, s.indices, s.value
        lanes = max(i.dtype.lanes for i in indices)
        dt = b.dtype.with_lanes(lanes)
        if value.dtype.lanes == 1:
            v = self.pack([v] * lanes, value.dtype.with_lanes(lanes))
        v = convert(self.f, v, value.dtype.with_lanes(lanes), dt)
        run = self._run(b, indices)
        if run is not None:
            store(self.f, dt, v, self.address(b, run), self.span)
            return
        for k, at in enumerate(self._lane_indices(indices, lanes)):
            one = self.f.let(f"extractelement {value_type(dt)} {v}, i64 {k}")
            self.f.branch(self.in_range(s, at), lambda at=at, one=one: store(  # type: ignore[misc]
                self.f, b.dtype, one, self.address(b, at), self.span))


def bind_value(cx: Code, v: Var, value: Expr) -> None:
    """Bind v = value. Pure integer values are also kept in 64 bits; values that read memory or have an effect are evaluated
    once."""
    bound = Bound(value=cx.value(value))
    if v.dtype.is_signed and value.dtype.is_signed and v.dtype.lanes == 1 and not contains(value, Load, Call):
        bound.wide = cx.index(value)
    cx.vars[v] = bound


def count_of(cx: Code, b: Buffer) -> str:
    """The number of elements of a buffer, i64."""
    out = "1"
    for d in b.shape:
        out = cx.f.mul(out, cx.index(d))
    return out


def check_size(host: HostFunction, b: Buffer, text: str) -> None:
    """Fail the call where a dimension known at run time is negative, or the bytes are more than any memory has."""
    f = host.code.f
    if all(isinstance(d, int) for d in b.shape):
        return
    total = f"{float(b.dtype.bytes)}"
    for d in b.shape:
        size = f.let(f"uitofp i64 {host.code.index(d)} to double")  # of a negative number: more than 2^63
        total = f.let(f"fmul double {total}, {size}")
    host.fail_if(f.let(f"fcmp ogt double {total}, {float(MOST_BYTES)}"), f.module.string(text))


class HostFunction:
    """The function `ptr entry(params…)`, which returns null or the text of the failure. launches: how many were printed so far.
    """

    def __init__(self, code: Code, func: Func) -> None:
        self.code, self.func, self.launches = code, func, 0
        self._workspaces: list[str] = []

    def fail(self, message: str) -> None:
        """End the call with an error text, given by its address."""
        self.release()
        self.code.f.end(f"ret ptr {message}")

    def fail_if(self, wrong: str, message: str) -> None:
        """End the call with an error text where `wrong` (i1) holds."""
        self.code.f.branch(wrong, lambda: self.fail(message))

    def release(self) -> None:
        """Free the workspaces."""
        f = self.code.f
        free = f.module.declare("free", "void", "ptr")
        for p in self._workspaces:
            f.do(f"call void {free}(ptr {f.let(f'load ptr, ptr {p}')})")

    def allocate(self, s: Alloc) -> None:
        """A workspace in global memory that lives until the call ends."""
        f, b = self.code.f, s.buffer
        if b.scope() != GLOBAL:
            raise unsupported(f"an allocation in scope {b.scope()} outside a kernel", span=s.span)
        check_size(self, b, "out of memory for a global workspace")
        size = f.smax(f.mul(count_of(self.code, b), str(b.dtype.bytes)), "1")
        slot = f.alloca("ptr", hint="work")
        f.allocas.append(f"  store ptr null, ptr {slot}")
        make = f.module.declare("aligned_alloc", "ptr", "i64, i64")
        padded = f.mul(f.let(f"udiv i64 {f.add(size, '63')}, 64"), "64")
        if f.loops:  # the workspace of the previous iteration is no longer used
            free = f.module.declare("free", "void", "ptr")
            f.do(f"call void {free}(ptr {f.let(f'load ptr, ptr {slot}')})")
        got = f.let(f"call ptr {make}(i64 64, i64 {padded})")
        f.do(f"store ptr {got}, ptr {slot}")
        self._workspaces.append(slot)
        self.code.storage[b.data] = Storage(got)
        memory = f.module.string("out of memory for a global workspace")
        self.fail_if(f.let(f"icmp eq ptr {got}, null"), memory)


_PRINT: dict[type, Callable[[Code, Any], str]] = {
    Var: Code._var, Const: Code._const, Cast: Code._cast, Unary: Code._unary,
    Binary: Code._binary, Select: Code._select, Call: Code._call, Load: Code.load,
    StringConst: Code._string, Broadcast: Code._broadcast, Ramp: Code._ramp,
    Shuffle: Code._shuffle, AddressOf: Code.address_of, CheckedLoad: Code.load,
    CheckedAddress: Code.address_of,
}


def pointed(cx: Code, e: Call, a: Expr) -> AddressOf:
    """An operand of a call, the address of an element. Raises cpu-unsupported for a computed pointer."""
    if not isinstance(a, AddressOf):
        raise unsupported(f"{e.op} on a computed pointer", span=e.span or cx.span)
    return a
