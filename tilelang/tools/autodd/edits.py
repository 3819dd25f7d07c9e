"""Edits that make a syntax tree smaller: removal of statements, and replacement of single nodes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

from .freeze import holds_frozen, is_frozen

Path = tuple[tuple[str, int | None], ...]
Edit = Callable[[ast.Module], None]
_LISTS = ("body", "orelse", "finalbody", "handlers")


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
        if isinstance(value, ast.AST):
            yield from paths(value, (*path, (name, None)))
        elif isinstance(value, list):
            for k, x in enumerate(value):
                if isinstance(x, ast.AST):
                    yield from paths(x, (*path, (name, k)))


def edited(tree: ast.Module, edit: Edit) -> ast.Module:
    """A copy of a tree with an edit applied."""
    out = copy.deepcopy(tree)
    edit(out)
    return out


def source_of(tree: ast.Module) -> str | None:
    """The source text of a tree; None when it is no valid program."""
    try:
        text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
        compile(text, "<candidate>", "exec")
    except (SyntaxError, ValueError):
        return None
    return text


def statement_lists(tree: ast.AST) -> list[tuple[Path, str]]:
    """(path of the owner, field) of every list of statements, outer ones first."""
    found = [(path, name) for path, node in paths(tree) for name in _LISTS
             if isinstance(getattr(node, name, None), list) and getattr(node, name)
             and isinstance(getattr(node, name)[0], (ast.stmt, ast.ExceptHandler))]
    return sorted(found, key=lambda f: len(f[0]))


def removable(tree: ast.AST, path: Path, name: str) -> list[int]:
    """Indices of the statements of a list that contain nothing frozen."""
    return [k for k, s in enumerate(getattr(at(tree, path), name)) if not holds_frozen(s)
            and not isinstance(s, ast.Pass)]


def remove(path: Path, name: str, indices: set[int]) -> Edit:
    """Remove statements from a list; an empty body becomes `pass`."""
    def edit(tree: ast.Module) -> None:
        owner = at(tree, path)
        kept = [s for k, s in enumerate(getattr(owner, name)) if k not in indices]
        setattr(owner, name, kept or ([ast.Pass()] if name == "body" and not isinstance(owner, ast.Module) else []))

    return edit


def _replace(path: Path, new: ast.AST | list[Any]) -> Edit:
    """Replace a node by another one (in a list, by several)."""
    def edit(tree: ast.Module) -> None:
        *above, (name, index) = path
        owner = at(tree, tuple(above))
        if index is None:
            setattr(owner, name, new)
        else:
            getattr(owner, name)[index:index + 1] = new if isinstance(new, list) else [new]

    return edit


def _without(path: Path, name: str, index: int) -> Edit:
    def edit(tree: ast.Module) -> None:
        del getattr(at(tree, path), name)[index]

    return edit


def _clear(path: Path, name: str) -> Edit:
    def edit(tree: ast.Module) -> None:
        setattr(at(tree, path), name, None)

    return edit


def replacements(tree: ast.Module) -> Iterator[Edit]:
    """Edits of single nodes, those that remove most first."""
    nodes = [(p, n) for p, n in paths(tree) if p and not is_frozen(n)]
    for path, node in nodes:
        yield from _of_statement(path, node)
    for path, node in nodes:
        yield from _removed_children(path, node)
    for path, node in nodes:
        yield from _of_expression(path, node)


def _of_statement(path: Path, node: ast.AST) -> Iterator[Edit]:
    """Replace a compound statement by one of its bodies, an assignment by its value."""
    if path[-1][1] is None:
        return
    if isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)):
        yield _replace(path, list(node.body))
        other = getattr(node, "orelse", None)
        if other and not any(map(holds_frozen, node.body)):
            yield _replace(path, list(other))
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)) and node.value is not None:
        yield _replace(path, ast.Expr(node.value))


def _removed_children(path: Path, node: ast.AST) -> Iterator[Edit]:
    """Remove decorators, arguments, keywords, elements and annotations."""
    for name in ("decorator_list", "keywords", "args", "elts", "targets", "values", "names", "items", "comparators"):
        parts = getattr(node, name, None)
        if isinstance(node, ast.arguments) and name == "args":
            yield from _parameters(path, node)
        elif isinstance(parts, list) and not isinstance(node, (ast.Dict, ast.Compare, ast.BoolOp)):
            least = 1 if name in ("names", "items", "targets") else 0
            for k in range(len(parts)):
                if len(parts) > least and not holds_frozen(parts[k]):
                    yield _without(path, name, k)
    if isinstance(node, ast.BoolOp):
        for v in node.values:
            if not any(holds_frozen(w) for w in node.values if w is not v):
                yield _replace(path, v)
    if isinstance(node, ast.Dict):
        for k in range(len(node.keys)):
            if not holds_frozen(node.values[k]):
                yield lambda tree, k=k: [part.pop(k) for part in (at(tree, path).keys, at(tree, path).values)]  # type: ignore[misc]
    if getattr(node, "returns", None) is not None:
        yield _clear(path, "returns")
    if isinstance(node, ast.arg) and node.annotation is not None:
        yield _clear(path, "annotation")


def _parameters(path: Path, node: ast.arguments) -> Iterator[Edit]:
    """Remove a parameter and its default."""
    for k in range(len(node.args)):
        if holds_frozen(node.args[k]):
            continue

        def edit(tree: ast.Module, k: int = k) -> None:
            found = at(tree, path)
            first = len(found.args) - len(found.defaults)
            del found.args[k]
            if k >= first:
                del found.defaults[k - first]

        yield edit
    for k in range(len(node.kwonlyargs)):
        if not holds_frozen(node.kwonlyargs[k]):
            yield lambda tree, k=k: [part.pop(k) for part in (at(tree, path).kwonlyargs, at(tree, path).kw_defaults)]  # type: ignore[misc]


def _of_expression(path: Path, node: ast.AST) -> Iterator[Edit]:
    """Replace an expression by one of its subexpressions or by a smaller constant."""
    if not isinstance(node, ast.expr) or isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        return
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        parts = [node.operand]
    elif isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.Call):
        parts = [a for a in node.args if not isinstance(a, ast.Starred)]
    elif isinstance(node, ast.Subscript):
        parts = [node.value]
    for part in parts:
        others = [p for p in parts if p is not part]
        if not any(map(holds_frozen, others)):
            yield _replace(path, part)
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        n = node.value
        for smaller in dict.fromkeys((0, 1, 2, n // 4, n // 2)):
            if abs(smaller) < abs(n):
                yield _replace(path, ast.Constant(smaller))
    elif not isinstance(node, (ast.Constant, ast.Name, ast.Attribute)) and not holds_frozen(node) and path[-1][0] == "value":
        yield _replace(path, ast.Constant(None))
