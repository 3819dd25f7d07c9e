"""Expressions of the language as LLVM values: scalars, vectors, and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import (AddressOf, Binary, Broadcast, Call, Cast, Const, Expr, Load, Ramp, Select, Shuffle, StringConst, Unary,
                         Var, dtype)
from tilelang.ir.children import contains
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import CheckedAddress, CheckedLoad
from tilelang.target.device_functions import known_function

from . import arithmetic, mathlib
from .state import Bound, Code
from .text import is_literal
from .types import convert, literal, load, memory_type, value_type


class ValuePrinter:
    """Prints expressions into the function of a Code."""

    def __init__(self, cx: Code) -> None:
        self.cx = cx

    def value(self, e: Expr) -> str:
        """The register value of an expression (LLVM type value_type(e.dtype))."""
        printer = _PRINT.get(type(e))
        if printer is None:
            raise unsupported(f"a {type(e).__name__} expression", span=e.span or self.cx.span)
        return printer(self, e)

    def _var(self, e: Var) -> str:
        cx = self.cx
        slot = cx.block.slots.get(e)
        if slot is not None:
            return load(cx.f, e.dtype, cx.f.at(slot.base, memory_type(e.dtype), cx.block.tid or cx.block.first_thread))
        bound = self.cx.vars.get(e)
        if bound is None:
            held = self.cx.storage.get(e)  # the address of a buffer's storage
            if held is not None and held.copies == 1:
                return held.base
            raise unsupported(f"the variable {e.name} here", span=e.span or self.cx.span,
                              hint="it has no value on the CPU target at this place")
        if bound.value is None:
            assert bound.wide is not None, "a Bound holds one of its two forms"
            bits = e.dtype.bits
            bound_value = bound.wide
            if bits != 64 and not is_literal(bound_value):
                return self.cx.f.let(f"trunc i64 {bound_value} to i{bits}")
            return bound_value
        return bound.value

    def _const(self, e: Const) -> str:
        return literal(e.value, e.dtype)

    def _cast(self, e: Cast) -> str:
        return convert(self.cx.f, self.value(e.value), e.value.dtype, e.dtype)

    def _unary(self, e: Unary) -> str:
        a = self.value(e.a)
        return arithmetic.negate(self.cx.f, a, e.dtype) if e.op == "neg" else arithmetic.invert(self.cx.f, a, e.dtype)

    def _binary(self, e: Binary) -> str:
        if e.op in ("and", "or"):
            return self._logical(e)
        a = self.value(e.a)
        any_amount = e.op in ("shl", "shr") and not self.cx.analyzer.shifts_within(e)
        return (arithmetic.any_shift if any_amount else arithmetic.binary)(self.cx.f, e.op, a, self.value(e.b), e.a.dtype)

    def _logical(self, e: Binary) -> str:
        a = self.value(e.a)
        if e.op == "and":
            return self.cx.f.choose(a, "i1", lambda: self.value(e.b), lambda: "false")
        return self.cx.f.choose(a, "i1", lambda: "true", lambda: self.value(e.b))

    def _select(self, e: Select) -> str:
        cond, ty = self.value(e.cond), value_type(e.dtype)
        if not e.lazy:
            a, b = self.value(e.a), self.value(e.b)
            return self.cx.f.let(f"select {value_type(e.cond.dtype)} {cond}, {ty} {a}, {ty} {b}")
        return self.cx.f.choose(cond, ty, lambda: self.value(e.a), lambda: self.value(e.b))

    def _call(self, e: Call) -> str:
        known = known_function(e, self.cx.sources)
        if known is not None:
            return self.value(known)
        printer = self.cx.calls.get(e.op)
        if printer is not None:
            return printer(self.cx, e)
        return mathlib.call(self.cx.f, e, [self.value(a) for a in e.args])

    def _string(self, e: StringConst) -> str:
        return self.cx.f.module.string(e.value)

    def _load(self, e: Load) -> str:
        return self.cx.memory.load(e)

    def _address_of(self, e: AddressOf) -> str:
        return self.cx.address_of(e)

    # ---- vectors --------------------------------------------------------------------------------------------------

    def _broadcast(self, e: Broadcast) -> str:
        if isinstance(e.value, Const):
            return literal(e.value.value, e.dtype)
        ty = value_type(e.dtype)
        one = self.cx.f.let(f"insertelement {ty} poison, {value_type(e.value.dtype)} {self.value(e.value)}, i64 0")
        return self.cx.f.let(f"shufflevector {ty} {one}, {ty} poison, <{e.lanes} x i32> zeroinitializer")

    def _ramp(self, e: Ramp) -> str:
        ty, scalar = value_type(e.dtype), value_type(e.base.dtype)
        base, stride, out = self.value(e.base), self.value(e.stride), "poison"
        for k in range(e.lanes):
            step = self.cx.f.let(f"mul {scalar} {stride}, {k}")
            lane = self.cx.f.let(f"add {scalar} {base}, {step}")
            out = self.cx.f.let(f"insertelement {ty} {out}, {scalar} {lane}, i64 {k}")
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
                          self.cx.f.let(f"extractelement {value_type(v.dtype)} {got}, i64 {k}"))
        return self.pack(picked, e.dtype)

    def pack(self, scalars: list[str], dt: dtype) -> str:
        """A vector of dt from its lanes."""
        if dt.lanes == 1:
            return scalars[0]
        ty, scalar, out = value_type(dt), value_type(dt.scalar), "poison"
        for k, s in enumerate(scalars):
            out = self.cx.f.let(f"insertelement {ty} {out}, {scalar} {s}, i64 {k}")
        return out


def bind_value(cx: Code, v: Var, value: Expr) -> None:
    """Bind v = value. Pure integer values are also kept in 64 bits; values that read memory or have an effect are evaluated
    once."""
    bound = Bound(value=cx.value(value))
    if v.dtype.is_signed and value.dtype.is_signed and v.dtype.lanes == 1 and not contains(value, Load, Call):
        bound.wide = cx.index(value)
    cx.vars[v] = bound


_PRINT: dict[type, Callable[[ValuePrinter, Any], str]] = {
    Var: ValuePrinter._var, Const: ValuePrinter._const, Cast: ValuePrinter._cast, Unary: ValuePrinter._unary,
    Binary: ValuePrinter._binary, Select: ValuePrinter._select, Call: ValuePrinter._call, Load: ValuePrinter._load,
    StringConst: ValuePrinter._string, Broadcast: ValuePrinter._broadcast, Ramp: ValuePrinter._ramp,
    Shuffle: ValuePrinter._shuffle, AddressOf: ValuePrinter._address_of, CheckedLoad: ValuePrinter._load,
    CheckedAddress: ValuePrinter._address_of,
}
