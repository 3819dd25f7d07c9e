"""Marks that protect code from the reduction: finds them in a script and in its syntax tree."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import Any

# The parser reuses one node of each of these classes for all programs, so that an attribute must not be set on it.
SHARED = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)
_MARK = re.compile(r"#\s*autodd:\s*(freeze-start|end-freeze|freeze)\b")


class _Freeze:
    """The class of `__freeze__`.  `with __freeze__:` and `__freeze__(x)` have no effect at run time; the reduction keeps their
    contents."""

    def __call__(self, value: Any = None) -> Any:
        """Return the argument, or without one this object, so that `with __freeze__():` works too."""
        return self if value is None else value

    def __enter__(self) -> _Freeze:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


__freeze__ = _Freeze()


def frozen_lines(source: str) -> tuple[set[int], list[tuple[int, int]]]:
    """(single marked lines, marked ranges of lines), counted from 1.  Raises ValueError for a start without an end."""
    single: set[int] = set()
    ranges: list[tuple[int, int]] = []
    start: int | None = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        mark = _MARK.match(token.string) if token.type == tokenize.COMMENT else None
        if mark is None:
            continue
        line = token.start[0]
        if mark[1] == "freeze":
            single.add(line)
        elif mark[1] == "freeze-start":
            if start is not None:
                raise ValueError(f"line {line}: a freeze-start within the one of line {start}")
            start = line
        elif start is None:
            raise ValueError(f"line {line}: an end-freeze without a freeze-start")
        else:
            ranges.append((start, line))
            start = None
    if start is not None:
        raise ValueError(f"line {start}: a freeze-start without an end-freeze")
    return single, ranges


def _names_freeze(e: ast.expr) -> bool:
    return isinstance(e, ast.Name) and e.id == "__freeze__" or isinstance(e, ast.Call) and _names_freeze(e.func)


def mark_frozen(tree: ast.AST, source: str) -> None:
    """Set the attribute `frozen` of all nodes that must not change."""
    single, ranges = frozen_lines(source)

    def freeze(node: ast.AST) -> None:
        for n in ast.walk(node):
            if not isinstance(n, SHARED):
                n.frozen = True  # type: ignore[attr-defined]

    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any(_names_freeze(i.context_expr) for i in node.items):
            freeze(node)
        elif isinstance(node, ast.Call) and _names_freeze(node.func):
            freeze(node)
        elif isinstance(node, ast.stmt):
            end = node.end_lineno or node.lineno
            body = getattr(node, "body", None)
            header_end = body[0].lineno - 1 if body and body[0].lineno > node.lineno else end
            if any(node.lineno <= n <= header_end for n in single):
                freeze(node)
            if any(low < node.lineno and end < high for low, high in ranges):
                freeze(node)


def is_frozen(node: ast.AST) -> bool:
    """Whether a node itself is frozen."""
    return getattr(node, "frozen", False)


def frozen_nodes(node: ast.AST) -> int:
    """How many nodes are frozen: a node and those inside it."""
    return sum(map(is_frozen, ast.walk(node)))
