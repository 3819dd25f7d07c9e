"""Delta debugging of a script: runs smaller and smaller candidates and keeps those that still fail."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from .freeze import SHARED, frozen_nodes, is_frozen, mark_frozen

Check = Callable[[str], bool]


class Reduction:
    """The state of a reduction.

    check: whether a text still shows the failure; called from `jobs` threads at once.  improved: called with each smaller
    text.  text: the smallest found.  tried: how many candidates were run.
    """

    def __init__(self, source: str, check: Check, jobs: int = 1, improved: Callable[[str], None] | None = None) -> None:
        self.tree = ast.parse(source)
        mark_frozen(self.tree, source)
        self.text = source
        self.check, self.jobs = check, max(1, jobs)
        self.improved = improved or (lambda text: None)
        self.seen: set[str] = set()
        self.tried = 0
        self.pool = ThreadPoolExecutor(max_workers=self.jobs)

    def run(self) -> str:
        """Reduce until no edit succeeds."""
        try:
            while True:
                before = self.text
                self._statements()
                self._nodes()
                if self.text == before:
                    return self.text
        finally:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, edits: Iterator[Edit]) -> int | None:
        """Try edits of the present tree, several in parallel.  Keep the first that still fails and return its number."""
        numbered = enumerate(edits)
        while batch := list(islice(numbered, self.jobs)):
            made = [(k, *found) for k, e in batch if (found := edited(self.tree, e)) is not None]
            new = {text: (k, tree) for k, tree, text in reversed(made) if text not in self.seen}
            self.seen |= new.keys()
            self.tried += len(new)
            texts = list(reversed(new))
            for text, fails in zip(texts, self.pool.map(self.check, texts)):
                if fails:
                    (k, self.tree), self.text = new[text], text
                    self.improved(text)
                    return k
        return None

    def _statements(self) -> None:
        """Remove runs of statements: halves, quarters, … single ones, outer lists first."""
        done = 0
        while done < len(lists := statement_lists(self.tree)):
            path, name = lists[done]
            size, at = len(removable(self.tree, path, name)), 0
            while size >= 1 and (path, name) in statement_lists(self.tree):
                part = set(removable(self.tree, path, name)[at:at + size])
                if not part:
                    size, at = size // 2, 0
                elif self._take(iter([remove(path, name, part)])) is None:
                    at += size
            done += 1

    def _nodes(self) -> None:
        """Replace single nodes by smaller ones."""
        start = 0
        while True:
            taken = self._take(islice(replacements(self.tree), start, None))
            if taken is None:
                return
            start += taken


def reduce_source(source: str, check: Check, jobs: int = 1, improved: Callable[[str], None] | None = None) -> str:
    """Reduce a script; returns the smallest text found for which check is still true.

    Raises ValueError when check is false for the source itself or its marks do not pair up, SyntaxError when the source is no
    valid program.
    """
    reduction = Reduction(source, check, jobs, improved)
    if not check(source):
        raise ValueError("the source does not show the failure")
    return reduction.run()


# ---- edits that make a syntax tree smaller ----------------------------------------------------------------------------

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
