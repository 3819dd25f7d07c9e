"""`tvm.tirx`, `tvm.tir`: nodes and scalar functions under the names of another compiler's package.

Names that are not here are those of `tilelang.language`: exp, floordiv, if_then_else, Cast, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from tilelang import ir as _ir
from tilelang import language as _language
from tilelang.ir import Buffer, Call, Evaluate, For, Stmt, Var, While
from tilelang.ir import Expr as PrimExpr
from tilelang.ir import If as IfThenElse
from tilelang.ir import Load as BufferLoad
from tilelang.ir import Region as BufferRegion
from tilelang.ir import Seq as SeqStmt
from tilelang.ir import Store as BufferStore
from tilelang.ir import StringConst as StringImm
from tilelang.ir.visitor import mapped, rebuild
from tilelang.jit.artifact import program_of
from tilelang.language.nodes import FloatImm, IntImm, _node
from tilelang.language.tracing.prim_func import PrimFunc
from tilelang.language.tracing.state import error as _error


def const(value: Any, dtype: Any = "int32") -> Any:
    """A constant of a type."""
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


def _absent(*args: Any, **kwargs: Any) -> Any:
    raise _error("not-available", "programs here have no such node: they have the statements of T", found="a node of TVM")


SBlock = SBlockRealize = AttrStmt = _node("SBlock", "A node that no program has.", _absent, _ir.Stmt, lambda x: False)
Visit = Callable[[Any], Any]


def _visit(node: Any, before: Visit, after: Visit) -> None:
    seen: set[int] = set()  # a node that stands in several places is visited once

    def visit(n: Any) -> None:
        seen.add(id(n))
        if before(n) is not False:
            for c in _ir.children(n):
                if id(c) not in seen:
                    visit(c)
            after(n)

    root = program_of(node)
    visit(node if root is None else root.body)


def post_order_visit(node: Any, fn: Visit) -> None:
    """Call fn on every node once, children first."""
    _visit(node, lambda n: None, fn)


def pre_order_visit(node: Any, fn: Visit) -> None:
    """Call fn on every node once, parents first; children of a node for which it returns False are not visited."""
    _visit(node, fn, lambda n: None)


def _kinds(names: Sequence[Any]) -> tuple[Any, ...]:
    found = []
    for name in names:
        kind = globals().get(n := str(name).rpartition(".")[2]) or getattr(_language, n, None)
        if not isinstance(kind, type) or kind is SBlock:
            raise _error("not-available", f"ir_transform: programs have no nodes of kind ‹{name}›",
                         expected="kinds of nodes, such as tirx.For, tirx.Call and tirx.BufferStore")
        found.append(kind)
    return tuple(found)


def ir_transform(stmt: Any, preorder: Visit | None, postorder: Visit | None, only_enable: Sequence[Any] | None = None) -> Any:
    """A statement rewritten: preorder(node) gives a node that is taken as it is, or None to visit what is below; then
    postorder(new node) gives its replacement, or None to keep it.

    only_enable: the kinds of nodes that are passed to them ("tirx.For", "tirx.Call"), default all.  Raises not-available for
    a kind that no program has.  `func.with_body(ir_transform(func.body, …))` is the program with the new statement.
    """
    kinds = None if only_enable is None else _kinds(only_enable)
    memo: dict[int, Any] = {}

    def changed(v: Any) -> Any:
        asked = kinds is None or isinstance(v, kinds)
        got = preorder(v) if asked and preorder is not None else None
        if got is not None:
            return got
        out = v if isinstance(v, (_ir.Var, _ir.Buffer)) else rebuild(v, visit)
        got = postorder(out) if asked and postorder is not None else None
        return out if got is None else got

    def visit(v: Any) -> Any:
        if isinstance(v, tuple):
            return mapped(visit, v)
        if isinstance(v, _ir.Node):
            if id(v) not in memo:
                memo[id(v)] = changed(v)
            return memo[id(v)]
        return v

    return visit(stmt)


def substitute(node: Any, vmap: Mapping[Any, Any] | Callable[[Any], Any]) -> Any:
    """A statement or expression with variables replaced: a dict of variables, or a function that gives None to keep one."""
    if callable(vmap):
        vmap = {v: new for v in _ir.free_vars(node) if (new := vmap(v)) is not None}
    return _ir.substitute(node, {v: _ir.convert(e) for v, e in vmap.items()})


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_language, name)


__all__ = ["Buffer", "BufferLoad", "BufferRegion", "BufferStore", "Call", "Evaluate", "FloatImm", "For", "IfThenElse", "IntImm",
           "PrimExpr", "PrimFunc", "SBlock", "SeqStmt", "Stmt", "StringImm", "Var", "While", "all", "any", "const",
           "decl_buffer", "div", "indexdiv", "indexmod", "ir_transform", "post_order_visit", "power", "pre_order_visit",
           "substitute"]
