"""What a file's text says before anything of it runs: its kernel functions, what they need, settings in comments, words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tilelang.ir.record import record

_SETTING = re.compile(r"#\s*tilelang:\s*(.+?)\s*$", re.MULTILINE)
_DECORATORS = {"jit", "autotune", "prim_func", "macro", "lazy_jit", "program"}
_NEAR = 3  # lines between a comment and the function below it


@record
class Outline:
    """A module's kernel functions.

    needed: top-level statements that kernels use, in order.  kernels: the functions to analyse, decorated or factories of a
    decorated one.  macros: functions under T.macro.  aliases: name -> what it was imported from.
    """

    needed: tuple[ast.stmt, ...]
    kernels: tuple[ast.FunctionDef, ...]
    macros: tuple[str, ...]
    aliases: dict[str, str]


def imports_of(body: Iterable[ast.stmt]) -> dict[str, str]:
    """name -> dotted origin of each import: {"T": "tilelang.language", "add": ".parts.add"}."""
    out = {}
    for node in body:
        if isinstance(node, ast.Import):
            for a in node.names:
                out[a.asname or a.name.partition(".")[0]] = a.name if a.asname else a.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            room = "." * node.level + (f"{node.module}." if node.module else "")
            out |= {a.asname or a.name: room + a.name for a in node.names}
    return out


def origin(e: ast.expr, aliases: dict[str, str]) -> str:
    """The dotted origin of an expression of names: T.prim_func is tilelang.language.prim_func; "" for others."""
    if isinstance(e, ast.Call):
        return origin(e.func, aliases)
    if isinstance(e, ast.Attribute):
        base = origin(e.value, aliases)
        return f"{base}.{e.attr}" if base else ""
    return aliases.get(e.id, "") if isinstance(e, ast.Name) else ""


def _mark(f: ast.FunctionDef, aliases: dict[str, str]) -> str:
    """The decorator of the language that a function has: "jit", "prim_func", "macro", ...; "" without one."""
    for d in f.decorator_list:
        where = origin(d, aliases)
        if where.startswith("tilelang.") and where.rpartition(".")[2] in _DECORATORS:
            return where.rpartition(".")[2]
    return ""


def outline(tree: ast.Module, text: str = "") -> Outline:
    """The kernels of a module and the statements that they need, directly or through others; the rest is never run.

    text: of the module, where comments give values to arguments: kernels need what these name.
    """
    inside = [list(ast.walk(n)) for n in tree.body]
    aliases = imports_of(x for nodes in inside for x in nodes if isinstance(x, (ast.Import, ast.ImportFrom)))
    kernels: list[ast.FunctionDef] = []
    macros: list[ast.FunctionDef] = []
    for n, nodes in zip(tree.body, inside):
        if isinstance(n, ast.FunctionDef):
            marks = [_mark(x, aliases) for x in nodes if isinstance(x, ast.FunctionDef)]
            (macros if marks[0] == "macro" else kernels if marks[0] or "prim_func" in marks else []).append(n)
    loads = {id(n): {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
             for n, nodes in zip(tree.body, inside)}
    binds = {id(n): set() if _is_main(n) else set(_binds(n)) for n in tree.body}
    wanted = {name for n in (*kernels, *macros) for name in (n.name, *loads[id(n)])}
    wanted |= {name for m in _SETTING.finditer(text) for name in re.findall(r"=([A-Za-z_]\w*)", m[1])}
    needed = {id(n) for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"}
    while more := {k for k, names in binds.items() if k not in needed and names & wanted}:
        needed |= more
        wanted |= {name for k in more for name in loads[k]}
    return Outline(tuple(n for n in tree.body if id(n) in needed), tuple(kernels), tuple(m.name for m in macros), aliases)


def _is_main(n: ast.stmt) -> bool:
    return isinstance(n, ast.If) and any(isinstance(x, ast.Name) and x.id == "__name__" for x in ast.walk(n.test))


def _binds(n: ast.stmt) -> Iterator[str]:
    """Names that a top-level statement defines."""
    if isinstance(n, (ast.FunctionDef, ast.ClassDef)):
        yield n.name
    elif isinstance(n, (ast.Import, ast.ImportFrom)):
        yield from (a.asname or a.name.partition(".")[0] for a in n.names)
    elif not isinstance(n, ast.Expr):
        for x in ast.walk(n):
            if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                yield x.id
            elif isinstance(x, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
                yield from _binds(x)


def consts_of(f: ast.FunctionDef) -> list[str]:
    """Names in the T.const calls of a function."""
    calls = [x for x in ast.walk(f) if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr == "const"]
    return [n for c in calls for a in c.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
            for n in a.value.replace(",", " ").split()]


def objects_of(f: ast.FunctionDef) -> set[str]:
    """Names that a function calls, indexes, goes over or takes attributes of: a number does not stand for these."""
    used = [n.func if isinstance(n, ast.Call) else n.iter if isinstance(n, (ast.For, ast.comprehension)) else n.value
            for n in ast.walk(f) if isinstance(n, (ast.Call, ast.For, ast.comprehension, ast.Subscript, ast.Attribute))]
    return {x.id for x in used if isinstance(x, ast.Name)}


def package_of(path: Path, needed: Iterable[ast.stmt]) -> tuple[str, Path]:
    """(package of a file, "" without relative imports; the folder that holds its outermost package)."""
    levels = max((x.level for n in needed for x in ast.walk(n) if isinstance(x, ast.ImportFrom)), default=0)
    names: list[str] = []
    folder = path.parent
    while levels and folder.name and (len(names) < levels or (folder / "__init__.py").is_file()):
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names), folder


def settings(text: str, f: ast.FunctionDef | None = None) -> dict[str, object]:
    """Values of comments `# tilelang: M=1024 dtype=float16`: those of the file, then those in or right above a function."""
    out: dict[str, object] = {}
    first = min([f.lineno, *(d.lineno for d in f.decorator_list)]) - _NEAR if f is not None else 0
    for k, line in enumerate(text.splitlines(), 1):
        found = _SETTING.search(line)
        mine = f is not None and first <= k <= (f.end_lineno or 0)
        if found and (mine or not line[:1].isspace()):
            for word in found[1].replace(",", " ").split():
                key, eq, value = word.partition("=")
                if eq and (mine or key not in out):
                    out[key] = _value(value)
    return out


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def word_at(line: str, column: int) -> str:
    """The dotted name under a column: T.copy."""
    for m in re.finditer(r"[A-Za-z_][\w.]*", line):
        if m.start() <= column <= m.end():
            end = line.find(".", column)
            return line[m.start():end if m.start() <= end < m.end() else m.end()]
    return ""


def diagnostic(code: str, text: str, line: int, place: Any = None, severity: int = 1, related: Any = ()) -> dict[str, Any]:
    """A finding as the worker tells it.  severity: 1 error, 2 warning, 3 information.  place: a Span, None for a whole line."""
    return {"code": code, "text": text, "severity": severity, "related": list(related), **place_in(line, place)}


def place_in(line: int, p: Any) -> dict[str, int]:
    """Lines from 1, columns in bytes from 0, as Python counts; end_column 0: to the end of the line."""
    found = (line, 0, line, 0) if p is None else (p.line, p.col, p.end_line or p.line, p.end_col)
    return dict(zip(("line", "column", "end_line", "end_column"), found))
