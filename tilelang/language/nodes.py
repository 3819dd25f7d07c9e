"""Classes of expressions (T.Add, T.IntImm, …): a call builds an expression, isinstance tests the kind of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang import ir
from tilelang.ir import binary, call, const, convert, logical, unary

from . import math
from .tracing.regions import subscript
from .tracing.state import describe, error
from .tensor import dtype_of


class NodeType(type):
    """The metaclass of these classes.  `build` makes an expression of the class; `holds` tests whether one belongs to it."""

    build: Callable[..., Any]
    holds: Callable[[Any], bool]
    of: type

    def __call__(cls, *args: Any, **kw: Any) -> Any:
        return cls.build(*args, **kw)

    def __instancecheck__(cls, x: Any) -> bool:
        return cls.holds(x)


def _node(name: str, doc: str, build: Callable[..., Any], of: type,
          holds: Callable[[Any], bool] = lambda x: True) -> NodeType:
    fields = {"__doc__": doc, "build": staticmethod(build), "of": of,
              "holds": staticmethod(lambda x: isinstance(x, of) and holds(x))}
    return NodeType(name, (), fields)


def _binary(name: str, *ops: str) -> NodeType:
    def build(a: Any, b: Any) -> Any:
        a, b = (v.vector() if hasattr(v, "vector") else v for v in (a, b))
        if ops[0] in ("and", "or"):
            return logical(ops[0], a, b)
        a, b = ir.match(math._py(a), math._py(b))
        return binary(ops[-1] if not a.dtype.is_float else ops[0], a, b)

    return _node(name, f"{name}(a, b): `{ops[0]}` of two values, operands promoted.", build, ir.Binary,
                 lambda x: x.op in ops)


Add, Sub, Mul = _binary("Add", "add"), _binary("Sub", "sub"), _binary("Mul", "mul")
Div, Mod = _binary("Div", "div", "truncdiv"), _binary("Mod", "truncmod")
FloorDiv, FloorMod = _binary("FloorDiv", "floordiv"), _binary("FloorMod", "floormod")
Min, Max = _binary("Min", "min"), _binary("Max", "max")
EQ, NE, LT, LE = _binary("EQ", "eq"), _binary("NE", "ne"), _binary("LT", "lt"), _binary("LE", "le")
GT, GE, And, Or = _binary("GT", "gt"), _binary("GE", "ge"), _binary("And", "and"), _binary("Or", "or")


def _not(a: Any) -> Any:
    return unary("not", ir.as_bool(a))


def _immediate(name: str, kind: str) -> NodeType:
    def belongs(dt: Any) -> bool:
        return dt.is_float if kind == "float" else not dt.is_float

    def build(dtype: Any, value: Any) -> Any:
        dt = dtype_of(dtype, f"T.{name}")
        if not belongs(dt):
            raise error("math-type", f"T.{name} holds a constant of {kind} type, found {dt}", expected=f"a {kind} type")
        return const(value, dt)

    return _node(name, f"{name}(dtype, value): a constant of {kind} type.", build, ir.Const,
                 lambda x: belongs(x.dtype))


def variable(name: str, dtype: Any = "int32") -> Any:
    """A fresh scalar variable.  Raises symbol-name for a name that is no string."""
    if not isinstance(name, str):
        raise error("symbol-name", f"the name of a variable is «a string», found {describe(name)}",
                    hint='write T.Var("v", "int32")')
    return ir.Var(name, ir.dtype("handle") if dtype == "handle" else dtype_of(dtype, "T.Var"))


def _text(text: Any) -> Any:
    if not isinstance(text, str):
        raise error("math-type", f"T.StringImm holds «a string», found {describe(text)}",
                    hint="T.IntImm and T.FloatImm hold numbers")
    return ir.StringConst(text)


def _element(buffer: Any, indices: Any) -> Any:
    if not isinstance(buffer, ir.Buffer):
        raise error("region-operand", f"T.BufferLoad reads «a buffer», found {describe(buffer)}")
    return subscript(buffer, indices)


def _call(dtype: Any, op: str, args: Any = ()) -> Any:
    return call(str(op), tuple(convert(a) for a in args), ir.dtype(dtype))


Not = _node("Not", "Not(a): logical negation.", _not, ir.Unary, lambda x: x.op == "not")
IntImm, FloatImm = _immediate("IntImm", "integer"), _immediate("FloatImm", "float")
StringImm = _node("StringImm", "StringImm(text): a text constant.", _text, ir.StringConst)
Var = _node("Var", "Var(name, dtype): a scalar variable.", variable, ir.Var)
SizeVar = _node("SizeVar", "SizeVar(name, dtype): a scalar variable that is not negative.", variable, ir.Var)
BufferLoad = _node("BufferLoad", "BufferLoad(buffer, indices): an element of a buffer.",
                   _element, ir.Load)
Call = _node("Call", "Call(dtype, op, args): an intrinsic by name.", _call, ir.Call)
Cast = _node("Cast", math.Cast_.__doc__ or "", math.Cast_, ir.Cast)
Select = _node("Select", math.Select_.__doc__ or "", math.Select_, ir.Select)
Ramp = _node("Ramp", math.Ramp_.__doc__ or "", math.Ramp_, ir.Ramp)
Broadcast = _node("Broadcast", math.Broadcast_.__doc__ or "", math.Broadcast_, ir.Broadcast)
Shuffle = _node("Shuffle", math.Shuffle_.__doc__ or "", math.Shuffle_, ir.Shuffle)

__all__ = ["Broadcast", "BufferLoad", "Call", "Cast", "Not", "Ramp", "Select", "Shuffle", "SizeVar", "StringImm", "Var"]
