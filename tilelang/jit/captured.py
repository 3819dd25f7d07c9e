"""Values that a function takes from around it: a kernel compiled for some of them is not the kernel for others."""

from __future__ import annotations

import dis
from types import CellType, CodeType, FunctionType
from typing import Any

from tilelang.ir import dtype
from tilelang.language.macro import Macro

_VALUES = (int, float, str, bool, type(None), dtype)
_STORES = ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF")
_GONE: Any = object()


class Captured:
    """Numbers, strings and dtypes that a function, what is defined in it and the user's functions and macros it calls read
    from closures and globals; also which functions those names stand for.

    What is inside containers and other objects is not followed.  Names that the functions assign themselves (counters)
    do not count.
    """

    def __init__(self, fn: Any) -> None:
        self.cells: list[CellType] = []
        self.globals: list[tuple[dict[str, Any], str]] = []
        self._seen: set[int] = set()
        self._follow(fn)

    def __bool__(self) -> bool:
        return bool(self.cells or self.globals)

    def values(self) -> tuple[Any, ...]:
        """What the names stand for now, hashable and with types told apart."""
        return tuple([_key(_of_cell(c)) for c in self.cells] + [_key(names.get(n, _GONE)) for names, n in self.globals])

    def _follow(self, fn: Any) -> None:
        while hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        if not isinstance(fn, FunctionType) or id(fn) in self._seen or _is_ours(fn):
            return
        self._seen.add(id(fn))
        read, stored = set[str](), set[str]()
        _names(fn.__code__, read, stored)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            if name not in stored and id(cell) not in self._seen and self._counts(_of_cell(cell)):
                self._seen.add(id(cell))
                self.cells.append(cell)
        for name in sorted(read - stored):
            at = (fn.__globals__, name)
            if self._counts(fn.__globals__.get(name, _GONE)) and not any(n == name and g is at[0] for g, n in self.globals):
                self.globals.append(at)

    def _counts(self, value: Any) -> bool:
        inner = value.orig_func if isinstance(value, Macro) else value
        if isinstance(inner, FunctionType):
            self._follow(inner)
            return not _is_ours(inner)
        return type(value) in _VALUES


def _is_ours(fn: FunctionType) -> bool:
    return (fn.__module__ or "").partition(".")[0] == "tilelang"


def _of_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _GONE


def _key(value: Any) -> Any:
    t = value.__class__
    return value.hex() if t is float else (t, value) if t in _VALUES else id(value)


def _names(code: CodeType, read: set[str], stored: set[str]) -> None:
    """Global names that code and what is nested in it may read, and names of its surroundings that they assign."""
    read.update(code.co_names)
    own = {*code.co_cellvars}
    for i in dis.get_instructions(code):
        if i.opname in _STORES and i.argval not in own:
            stored.add(i.argval)
    for c in code.co_consts:
        if isinstance(c, CodeType):
            inner = set[str]()
            _names(c, read, inner)
            stored.update(inner - own)


__all__ = ["Captured"]
