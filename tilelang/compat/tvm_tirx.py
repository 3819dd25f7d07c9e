"""`tvm.tirx`, `tvm.tir`: nodes and scalar functions under the names of another compiler's package.

Names that are not here are those of `tilelang.language`: exp, floordiv, if_then_else, Cast, ...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from tilelang import ir as _ir
from tilelang import language as _language
from tilelang.ir import Buffer, Call, Evaluate, For, Stmt, Var, While
from tilelang.ir import Expr as PrimExpr
from tilelang.ir import Func as PrimFunc
from tilelang.ir import If as IfThenElse
from tilelang.ir import Load as BufferLoad
from tilelang.ir import Region as BufferRegion
from tilelang.ir import Seq as SeqStmt
from tilelang.ir import Store as BufferStore
from tilelang.ir import StringConst as StringImm
from tilelang.jit.artifact import program_of


def const(value: Any, dtype: Any = "int32") -> Any:
    """A constant of a type."""
    return _ir.const(value, dtype)


def IntImm(dtype: Any, value: int) -> Any:
    """An integer constant."""
    return _ir.const(value, dtype)


def FloatImm(dtype: Any, value: float) -> Any:
    """A floating-point constant."""
    return _ir.const(value, dtype)


def all(*conditions: Any) -> Any:
    """The conjunction of conditions; conditions on the right are not computed where one on the left is false."""
    return reduce(_language.And, conditions)


def any(*conditions: Any) -> Any:
    """The disjunction of conditions; conditions on the right are not computed where one on the left is true."""
    return reduce(_language.Or, conditions)


def div(a: Any, b: Any) -> Any:
    """a / b as C computes it: integers are divided towards zero."""
    return _language.truncdiv(a, b) if _ir.dtype(getattr(a, "dtype", "int32")).is_int else a / b


def indexdiv(a: Any, b: Any) -> Any:
    """a / b of indices that are not negative."""
    return _language.floordiv(a, b)


def indexmod(a: Any, b: Any) -> Any:
    """a % b of indices that are not negative."""
    return _language.floormod(a, b)


power = _language.pow


def decl_buffer(shape: Any, dtype: Any = "float32", name: str = "buffer", scope: str = "global", **_: Any) -> Buffer:
    """A buffer by itself."""
    return Buffer(name, tuple(shape), _ir.dtype(dtype), scope)


def post_order_visit(node: Any, fn: Callable[[Any], None]) -> None:
    """Call fn on every node, children first."""
    root = program_of(node)
    start = root.body if root is not None else node

    def visit(n: Any) -> None:
        for c in _ir.children(n):
            visit(c)
        fn(n)

    visit(start)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_language, name)


__all__ = ["Buffer", "BufferLoad", "BufferRegion", "BufferStore", "Call", "Evaluate", "FloatImm", "For", "IfThenElse", "IntImm",
           "PrimExpr", "PrimFunc", "SeqStmt", "Stmt", "StringImm", "Var", "While", "all", "any", "const", "decl_buffer", "div",
           "indexdiv", "indexmod", "post_order_visit", "power"]
