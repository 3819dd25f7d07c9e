"""Finds the names that a piece of code assigns, and those that it may read before it assigns them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
           ast.GeneratorExp)
_LEAVES = (*_SCOPES, ast.Constant, ast.expr_context, ast.operator)  # nothing is bound in them


def assigned_names(nodes: Iterable[ast.AST]) -> list[str]:
    """Names bound by statements or targets, in order of first appearance (inner scopes excluded).

    The result is cached on each statement, because every enclosing level asks for it.  Call this before a body is rewritten.
    """
    out: dict[str, None] = {}
    for n in nodes:
        out.update(_bound_in(n))
    return list(out)


def _bound_in(root: ast.AST) -> dict[str, None]:
    known: dict[str, None] | None = root.__dict__.get("_bound")
    if known is not None:
        return known
    out: dict[str, None] = {}
    stack: list[Any] = [root]
    while stack:
        n = stack.pop()
        if isinstance(n, ast.Name):
            if isinstance(n.ctx, ast.Store):
                out[n.id] = None
            continue
        if not isinstance(n, ast.AST) or isinstance(n, _LEAVES):
            continue
        if isinstance(n, ast.stmt) and n is not root:
            out.update(_bound_in(n))
            continue
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            for a in n.names:
                out[(a.asname or a.name).split(".")[0]] = None
        elif isinstance(n, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and n.name:
            out[n.name] = None
        children: list[Any] = []
        for f in n._fields:
            v = getattr(n, f, None)
            if isinstance(v, list):
                children += v
            else:
                children.append(v)
        stack += reversed(children)
    if isinstance(root, ast.stmt):
        root._bound = out  # type: ignore[attr-defined]
    return out


def _reads(n: ast.AST, defined: set[str], out: set[str]) -> None:
    for x in ast.walk(n):
        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load) and x.id not in defined:
            out.add(x.id)


def read_before_assigned(stmts: list[ast.stmt]) -> set[str]:
    """Names that some path through the statements may read before it assigns them."""
    out: set[str] = set()

    def block(body: list[ast.stmt], defined: set[str]) -> set[str]:
        for s in body:
            defined = stmt(s, defined)
        return defined

    def stmt(s: ast.stmt, d: set[str]) -> set[str]:
        if isinstance(s, ast.If):
            _reads(s.test, d, out)
            return d | (block(s.body, set(d)) & block(s.orelse, set(d)))
        if isinstance(s, ast.While):
            _reads(s.test, d, out)
            block(s.body, set(d))
            return d
        if isinstance(s, ast.For):
            _reads(s.iter, d, out)
            block(s.body, d | set(assigned_names([s.target])))
            return d
        if isinstance(s, ast.With):
            for item in s.items:
                _reads(item.context_expr, d, out)
            names = [i.optional_vars for i in s.items if i.optional_vars is not None]
            return block(s.body, d | set(assigned_names(names)))
        _reads(s, d, out)
        if isinstance(s, ast.AugAssign) and isinstance(s.target, ast.Name) and s.target.id not in d:
            out.add(s.target.id)
        return d | set(assigned_names([s]))

    block(stmts, set())
    return out
