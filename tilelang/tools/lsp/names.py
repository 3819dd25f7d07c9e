"""What the names of the language are: signatures, documentation, the places of their definitions."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tilelang.ir.record import record
from tilelang.language.whole import ALONE

from .texts import Outline, outline

_ROOMS = {"tilelang", "tilelang.language", "tilelang.library"}


@record
class Name:
    """A public name.  kind: "function", "class", "type" or "value".  signature: "(a, b=1)", "" for what is not called."""

    name: str
    kind: str
    signature: str
    doc: str


@cache
def public(module: str) -> dict[str, Name]:
    """The public names of tilelang, tilelang.language or tilelang.library; {} for other modules, which are never imported."""
    if module not in _ROOMS:
        return {}
    found = import_module(module)
    further = ALONE if module == "tilelang.language" else ()  # functions of whole tensors
    return {n: _described(n, getattr(found, n)) for n in (*found.__all__, *sorted(further)) if not n.startswith("_")}


def _described(name: str, value: Any) -> Name:
    kind = "class" if inspect.isclass(value) else "function" if callable(value) else "value"
    if type(value).__name__ == "dtype":
        return Name(name, "type", "", f"element type {value}")
    try:
        signature = str(inspect.signature(value)) if kind != "value" else ""
    except (TypeError, ValueError):
        signature = ""
    return Name(name, kind, signature, inspect.getdoc(value) or "" if kind != "value" else "")


def module_of(prefix: str, aliases: dict[str, str]) -> str:
    """The module that a prefix names in a file: T is tilelang.language."""
    first, _, rest = prefix.partition(".")
    return ".".join(filter(None, (aliases.get(first, ""), rest)))


def described(word: str, aliases: dict[str, str]) -> Name | None:
    """The public name that a dotted word is, if it is one."""
    module, _, name = module_of(word, aliases).rpartition(".")
    return public(module).get(name)


def markdown(n: Name, prefix: str = "") -> str:
    """A name as an editor shows it."""
    return f"```python\n{prefix}{n.name}{n.signature}\n```\n\n{n.doc}".strip()


def place_of(word: str, text: str, path: str, about: Outline) -> tuple[str, int] | None:
    """(file, line from 1) of the definition of a word: in this text, in a module beside it, or in the language."""
    if here := _line_of(text, word):
        return path, here
    where = module_of(word, about.aliases)
    module, _, name = where.rpartition(".")
    if described(word, about.aliases) is not None:
        value = inspect.unwrap(getattr(import_module(module), name))
        try:
            return inspect.getsourcefile(value) or "", inspect.getsourcelines(value)[1]
        except (TypeError, OSError):
            return None
    level = len(module) - len(module.lstrip("."))
    file = Path(path).parents[max(0, level - 1)].joinpath(*module[level:].split(".")).with_suffix(".py")
    line = _line_of(file.read_text(encoding="utf-8"), name) if module and file.is_file() else 0
    return (str(file), line) if line else None


def _line_of(text: str, name: str) -> int:
    """The line of the function or class of this name, 0 without one; it need not parse."""
    found = re.search(rf"^[ \t]*(?:def|class) {re.escape(name)}\b", text, re.MULTILINE)
    return text.count("\n", 0, found.end()) + 1 if found else 0


def outline_of(text: str) -> Outline:
    """The outline of a text; of one that does not parse, that of its imports."""
    try:
        return outline(ast.parse(text))
    except (SyntaxError, ValueError):
        imports = re.findall(r"^(?:import [\w., ]*\w|from [\w.]+ import [\w, ]*\w)$", text, re.MULTILINE)
        return outline(ast.parse("\n".join(imports)))
