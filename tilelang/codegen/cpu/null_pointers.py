"""Tensors made of an address (a table of T.ptr, a pointer parameter) that is null: the call fails, not the process.

Asked where the address is read, or the block begins, once, and only of tensors that are surely touched behind it: what stands
under a condition may be the user's own test for null.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tilelang.ir import (Bind, Break, Buffer, Continue, Evaluate, For, If, Launch, Load, Node, Parallel, Select, Seq, Stmt,
                         Store, TileOp, Var, While)
from tilelang.ir.expr import AddressOf
from tilelang.ir.visitor import children, walk

TEXT = "is made of the null pointer, and used"


def used_surely(launch: Launch, given: Iterable[Var]) -> dict[Var, str]:
    """Address -> tensor and place, of addresses that the launch reads, or is given, and whose tensors it surely touches."""
    out: dict[Var, str] = {}

    def note(v: Var, stmts: tuple[Stmt, ...]) -> None:
        found = _first(v, stmts)
        if found is not None:
            where = f" ({os.path.basename(found[1].file)}:{found[1].line})" if found[1] is not None else ""
            out[v] = f"{found[0].name}{where} {TEXT}"

    for v in given:
        note(v, (launch.body,))
    for s in walk(launch.body):
        if isinstance(s, Seq):
            for k, x in enumerate(s.stmts):
                if isinstance(x, Bind) and x.var.dtype.is_handle:
                    note(x.var, s.stmts[k + 1:])
    return out


def _first(v: Var, stmts: tuple[Stmt, ...]) -> tuple[Buffer, Any] | None:
    """(tensor at v, place) of the first use that every way through these statements comes to."""
    for s in stmts:
        match s:
            case Seq():
                found = _first(v, s.stmts)
            case For() if _some(s.extent):
                found = _first(v, (s.body,))
            case Parallel() if all(map(_some, s.extents)):
                found = _first(v, (s.body,))
            case If():
                found = _of_expr(v, s.cond, s)
            case TileOp():
                touched = [a.region for a in s.accesses() if a.region.buffer.data is v]  # type: ignore[attr-defined]
                sure = [r for r in touched if all(map(_some, r.extents))]
                found = (sure[0].buffer, s.span) if sure else None
            case Bind():
                found = _of_expr(v, s.value, s)
            case Evaluate():
                found = _of_expr(v, s.call, s)
            case Store():
                mine = (s.buffer, s.span) if s.buffer.data is v else None
                found = mine or next((f for e in (*s.indices, s.value) if (f := _of_expr(v, e, s)) is not None), None)
            case _:
                found = None
        if found is not None:
            return found
        if any(isinstance(x, (Break, Continue, While)) or isinstance(x, Evaluate) and x.call.op == "thread_return"
               for x in walk(s)):
            return None
    return None


def _some(extent: Any) -> bool:
    """Whether a loop surely has iterations."""
    n = getattr(extent, "value", extent)
    return isinstance(n, int) and n > 0


def _of_expr(v: Var, e: Node, s: Stmt) -> tuple[Buffer, Any] | None:
    if isinstance(e, Load) and e.buffer.data is v:
        return e.buffer, e.span or s.span
    if isinstance(e, AddressOf):
        return None
    parts = (e.cond,) if isinstance(e, Select) and e.lazy else children(e)
    return next((f for x in parts if isinstance(x, Node) and not isinstance(x, Buffer) and
                 (f := _of_expr(v, x, s)) is not None), None)


__all__ = ["TEXT", "used_surely"]
