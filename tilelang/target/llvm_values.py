"""Values of LLVM IR text, whose operators write instructions, and the text of constants.

    x = Value.of("%x", "float", let)        %t1 = fmul float %x, %x
    y = (x * x).test("olt", 2.0)            %t2 = fcmp olt float %t1, 0x4000000000000000
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np


def splat(literal: str, ty: str) -> str:
    """A literal for ty, repeated over its lanes."""
    return f"splat ({ty[ty.index('x') + 2:-1]} {literal})" if ty[0] == "<" else literal


def float_literal(v: float, double: bool = False) -> str:
    """The LLVM text of a float constant (LLVM writes float constants as the double that equals them)."""
    if not double:
        with np.errstate(over="ignore"):
            v = float(np.float32(v))
    return f"0x{struct.unpack('<Q', struct.pack('<d', v))[0]:016X}"


def operand_text(x: Any, ty: str) -> str:
    """An operand of type ty: a value or text as it is, a number of Python for each lane."""
    if isinstance(x, str):
        return x
    floats = "double" in ty or "float" in ty
    return splat(float_literal(x, "double" in ty) if floats else str(x).lower(), ty)


def _operator(integer: str, of_floats: str = "") -> tuple[Callable[[Value, Any], Value], Callable[[Value, Any], Value]]:
    """The method of an operator, and the one with its operands exchanged."""
    def name(v: Value) -> str:
        return of_floats if "float" in v.ty or "double" in v.ty else integer

    def apply(self: Value, y: Any) -> Value:
        return self.op(name(self), y)

    def exchanged(self: Value, x: Any) -> Value:
        return Value.of(operand_text(x, self.ty), self.ty, self.let).op(name(self), self)

    return apply, exchanged


class Value(str):
    """The operand of an instruction, its type, and what writes instructions: text -> name.

    Operators take values of the same type and numbers.  Of integers, >> moves zeros in.
    """

    ty: str
    let: Callable[[str], str]

    @staticmethod
    def of(text: str, ty: str, let: Callable[[str], str]) -> Value:
        """A value by the text of its operand."""
        v = Value(text)
        v.ty, v.let = ty, let
        return v

    def op(self, name: str, y: Any) -> Value:
        """The instruction `name` of this value and y."""
        return Value.of(self.let(f"{name} {self.ty} {self}, {operand_text(y, self.ty)}"), self.ty, self.let)

    def to(self, name: str, ty: str) -> Value:
        """The value converted by an instruction."""
        return Value.of(self.let(f"{name} {self.ty} {self} to {ty}"), ty, self.let)

    def test(self, predicate: str, y: Any) -> Value:
        """The comparison with y, an i1 for each lane: by icmp for integers and pointers, by fcmp for floats."""
        scalar = self.ty.rpartition(" ")[2].rstrip(">")
        name = "fcmp" if scalar in ("float", "double") else "icmp"
        ty = self.ty.replace(scalar, "i1")
        return Value.of(self.let(f"{name} {predicate} {self.ty} {self}, {operand_text(y, self.ty)}"), ty, self.let)

    def select(self, a: Any, b: Any, ty: str = "") -> Value:
        """a where this i1 holds, else b.  ty: of both, where neither is a value."""
        ty = ty or next(x.ty for x in (a, b) if isinstance(x, Value))
        a, b = operand_text(a, ty), operand_text(b, ty)
        return Value.of(self.let(f"select {self.ty} {self}, {ty} {a}, {ty} {b}"), ty, self.let)

    def is_nan(self) -> Value:
        """Whether the float is NaN."""
        return self.test("uno", self)

    def __neg__(self) -> Value:
        return Value.of(self.let(f"fneg {self.ty} {self}"), self.ty, self.let)

    __add__, __radd__ = _operator("add", "fadd")  # type: ignore[assignment]
    __sub__, __rsub__ = _operator("sub", "fsub")
    __mul__, __rmul__ = _operator("mul", "fmul")  # type: ignore[assignment]
    __truediv__, __rtruediv__ = _operator("", "fdiv")
    __and__, __rand__ = _operator("and")
    __or__, __ror__ = _operator("or")
    __xor__, __rxor__ = _operator("xor")
    __lshift__ = _operator("shl")[0]
    __rshift__ = _operator("lshr")[0]
