"""Edits that make a syntax tree smaller: removal of statements and of parts, and replacement of single nodes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

from .freeze import SHARED, frozen_nodes, is_frozen

Path = tuple[tuple[str, int | None], ...]
Edit = Callable[[ast.Module], None]
_LISTS = ("body", "orelse", "finalbody", "handlers")
# Lists of which elements of one number belong together, by the class that has them.
_TOGETHER = {ast.Dict: ("keys", "values"), ast.Compare: ("ops", "comparators"), ast.arguments: ("kwonlyargs", "kw_defaults")}


def at(tree: ast.AST, path: Path) -> Any:
    """The node at a path from the root."""
    node: Any = tree
    for name, index in path:
        node = getattr(node, name)
        if index is not None:
            node = node[index]
    return node


def paths(node: ast.AST, path: Path = ()) -> Iterator[tuple[Path, ast.AST]]:
    """All nodes with their paths, parents first."""
    yield path, node
    for name, value in ast.iter_fields(node):
        for k, x in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(x, ast.AST):
                yield from paths(x, (*path, (name, k)))


def edited(tree: ast.Module, edit: Edit) -> tuple[ast.Module, str] | None:
    """A copy of a tree with an edit applied, and its source text; None where that is no program, or a frozen node is lost."""
    out = copy.deepcopy(tree)
    edit(out)
    if frozen_nodes(out) != frozen_nodes(tree):
        return None
    try:
        text = ast.unparse(ast.fix_missing_locations(out)) + "\n"
        compile(text, "<candidate>", "exec")
    except (SyntaxError, ValueError):
        return None
    return out, text


def statement_lists(tree: ast.AST) -> list[tuple[Path, str]]:
    """(path of the owner, field) of every list of statements, outer ones first."""
    found = [(path, name) for path, node in paths(tree) for name in _LISTS
             if isinstance(getattr(node, name, None), list) and getattr(node, name)
             and isinstance(getattr(node, name)[0], (ast.stmt, ast.ExceptHandler))]
    return sorted(found, key=lambda f: len(f[0]))


def removable(tree: ast.AST, path: Path, name: str) -> list[int]:
    """Indices of the statements of a list that contain nothing frozen."""
    return [k for k, s in enumerate(getattr(at(tree, path), name)) if not frozen_nodes(s) and not isinstance(s, ast.Pass)]


def remove(path: Path, name: str, indices: set[int]) -> Edit:
    """Remove statements from a list; an empty body becomes `pass`."""
    def edit(tree: ast.Module) -> None:
        owner = at(tree, path)
        kept = [s for k, s in enumerate(getattr(owner, name)) if k not in indices]
        setattr(owner, name, kept or ([ast.Pass()] if name == "body" and not isinstance(owner, ast.Module) else []))

    return edit


def _replace(path: Path, *new: ast.AST) -> Edit:
    """Replace a node by another one, or by none; in a list also by several.  What belongs to a removed element goes too."""
    def edit(tree: ast.Module) -> None:
        *above, (name, index) = path
        owner = at(tree, tuple(above))
        if index is None:
            setattr(owner, name, new[0] if new else None)
            return
        together = _TOGETHER.get(type(owner), ())
        for part in together if name in together and not new else (name,):
            getattr(owner, part)[index:index + 1] = new

    return edit


def replacements(tree: ast.Module) -> Iterator[Edit]:
    """Edits of single nodes, those that remove most first."""
    nodes = [(p, n) for p, n in paths(tree) if p and not is_frozen(n)]
    for path, node in nodes:
        if path[-1][1] is not None:
            yield from (_replace(path, *found) for found in _shorter(node))
    for path, node in nodes:
        name, index = path[-1]
        if name in ("returns", "annotation") or index is not None and not isinstance(node, (ast.stmt, *SHARED)):
            yield _replace(path)
    for path, node in nodes:
        yield from (_replace(path, x) for x in _simpler(node, path[-1][0] == "value"))


def _shorter(node: ast.AST) -> Iterator[list[Any]]:
    """The bodies of a compound statement, the value of an assignment."""
    if isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)):
        yield from filter(None, (node.body, getattr(node, "orelse", None)))
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)) and node.value is not None:
        yield [ast.Expr(node.value)]


def _simpler(node: ast.AST, is_value: bool) -> Iterator[ast.expr]:
    """Subexpressions of an expression, smaller constants; None for a value."""
    if not isinstance(node, ast.expr) or isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        return
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Call, ast.Subscript)):
        skipped = getattr(node, "func", None) or getattr(node, "test", None) or getattr(node, "slice", None)
        yield from (x for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr) and x is not skipped)
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        n = node.value
        yield from (ast.Constant(x) for x in dict.fromkeys((0, 1, 2, n // 4, n // 2)) if abs(x) < abs(n))
    elif is_value and not isinstance(node, (ast.Constant, ast.Name, ast.Attribute)):
        yield ast.Constant(None)
