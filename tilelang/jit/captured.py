"""Values that a function takes from around it: a kernel compiled for some of them is not the kernel for others."""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from tilelang.ir import dtype
from tilelang.language.tracing.macro import Macro

from .keys import FOREIGN, Same, attributes, content, is_plain, is_settings

_SIMPLE = (int, str, bool, type(None), dtype)
_STORES = ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF")
_GONE: Any = object()


class Captured:
    """Values that a function, what is defined in it and the user's functions and macros it calls read from closures and
    globals: numbers, strings and dtypes; what lists, dicts, sets and arrays hold; attributes of the user's objects and
    classes, and those attributes of the user's modules that the reading function names.

    Torch tensors are not followed.  Names that the functions assign themselves (counters) do not count.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.reads: dict[int, _Reads] = {}  # of functions met, by id
        self.kept: dict[int, Known] = {}  # what counts by identity, by id
        self.found: _Found | None = None  # what the last look met, if nothing of it can change inside

    def values(self) -> tuple[Any, ...]:
        """What the names stand for now, hashable and with types told apart."""
        found = self.found
        if found is not None and found.is_so_still():
            return found.values
        walk = _Walk(self)
        walk.follow(self.fn)
        values = tuple(walk.out)
        self.found = _Found(values, walk.functions, walk.globals, walk.cells) if walk.steady else None
        return values


class _Found(NamedTuple):
    """Names that stood for numbers, strings and functions alone: while they stand for the same objects all is as it was.
    values: what Captured.values gave.  functions: that were followed."""

    values: tuple[Any, ...]
    functions: list[FunctionType]
    globals: list[tuple[dict[str, Any], str, Any]]
    cells: list[tuple[CellType, Any]]

    def is_so_still(self) -> bool:
        for names, name, value in self.globals:
            if names.get(name, _GONE) is not value:
                return False
        for cell, value in self.cells:
            if _of_cell(cell) is not value:
                return False
        return not any(["__wrapped__" in fn.__dict__ for fn in self.functions])


class _Reads:
    """Names that one function reads from around it.  Those that stand for what is foreign count once they stand for
    something else."""

    __slots__ = ("attributes", "cells", "fn", "foreign_cells", "foreign_globals", "globals")

    def __init__(self, fn: FunctionType) -> None:
        read, stored, attrs = set[str](), set[str](), set[str]()
        _names(fn.__code__, read, stored, attrs)
        self.fn, self.attributes = fn, sorted(attrs)
        cells = [c for n, c in zip(fn.__code__.co_freevars, fn.__closure__ or ()) if n not in stored]
        self.foreign_cells = [(c, value) for c in cells if _is_foreign(value := _of_cell(c))]
        self.cells = [c for c in cells if not _is_foreign(_of_cell(c))]
        names = fn.__globals__
        found = [n for n in sorted(read - stored) if n in names or not hasattr(builtins, n)]
        self.foreign_globals = [(n, names[n]) for n in found if n in names and _is_foreign(names[n])]
        self.globals = [n for n in found if n not in names or not _is_foreign(names[n])]

    def no_longer_foreign(self) -> list[Any]:
        """What now stands where something else, foreign, stood."""
        names = self.fn.__globals__
        return [(n, now) for n, value in self.foreign_globals if (now := names.get(n, _GONE)) is not value] + [
            (k, now) for k, (cell, value) in enumerate(self.foreign_cells) if (now := _of_cell(cell)) is not value]


class _Walk:
    """One look at all that a function reads, each function once."""

    def __init__(self, captured: Captured) -> None:
        self.captured, self.out, self.seen = captured, list[Any](), set[int]()
        self.steady = True  # nothing met can change but by another object in its place
        self.functions: list[FunctionType] = []
        self.globals: list[tuple[dict[str, Any], str, Any]] = []
        self.cells: list[tuple[CellType, Any]] = []

    def follow(self, fn: Any) -> None:
        while not isinstance(fn, FunctionType) or "__wrapped__" in fn.__dict__:
            self.steady = False
            try:
                fn = fn.__wrapped__
            except AttributeError:
                return
        me = id(fn)
        if me in self.seen:
            return
        self.seen.add(me)
        reads = self.captured.reads.get(me)
        if reads is None:
            if _is_foreign(fn):
                return
            reads = self.captured.reads[me] = _Reads(fn)
        out = self.out
        self.functions.append(fn)
        for cell in reads.cells:
            value = _of_cell(cell)
            self.cells.append((cell, value))
            t = value.__class__
            out.append((t, value) if t in _SIMPLE else value.hex() if t is float else self.key(value, reads))
        names = fn.__globals__
        for name in reads.globals:
            value = names.get(name, _GONE)
            self.globals.append((names, name, value))
            t = value.__class__
            out.append((t, value) if t in _SIMPLE else value.hex() if t is float else self.key(value, reads))
        self.globals += [(names, name, value) for name, value in reads.foreign_globals]
        self.cells += reads.foreign_cells
        changed = reads.no_longer_foreign()
        if changed:
            self.steady = False
            out.extend((where, self.key(value, reads)) for where, value in changed)

    def key(self, value: Any, reads: _Reads) -> Any:
        """Of what is no plain value."""
        if value.__class__ is FunctionType or value.__class__ is Macro:
            self.follow(value.orig_func if isinstance(value, Macro) else value)
            return self.identity(value)
        self.steady = False
        return content(value, lambda x: self.other(x, reads))

    def other(self, value: Any, reads: _Reads) -> Any:
        """The key of what is neither plain nor a container of such: identity, and what can be read through it."""
        if isinstance(value, (FunctionType, Macro)):
            return self.key(value, reads)
        if isinstance(value, ModuleType):
            inside = {} if _is_foreign(value) else vars(value)
            return tuple([(n, content(inside[n], lambda x: self.other(x, reads))) for n in reads.attributes if n in inside])
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
            return None
        if isinstance(value, partial):
            return self.key([value.func, value.args, value.keywords], reads)
        if isinstance(value, MethodType):
            return self.key([value.__func__, value.__self__], reads)
        if is_settings(value) or isinstance(value, type):
            of = value if isinstance(value, type) else type(value)
            if _is_foreign(of):
                return self.identity(value), attributes(value) if of is not value else ()
            for name in reads.attributes:
                f = getattr(of, name, None)
                if isinstance(f, (FunctionType, MethodType)):
                    self.follow(getattr(f, "__func__", f))
            return self.identity(value), attributes(value)
        self.follow(value)
        return self.identity(value)

    def identity(self, value: Any) -> Known:
        known = self.captured.kept.get(id(value))
        if known is None:
            known = self.captured.kept[id(value)] = Known(value)
        return known


class Known(Same):
    """Something that counts by identity in this process.  Its text is the same in another one where its code is: that of
    functions, and of classes and objects that hold plain values alone."""

    __slots__ = ()

    def __repr__(self) -> str:
        value = self.value.orig_func if isinstance(self.value, Macro) else self.value
        if isinstance(value, FunctionType):
            return f"{value.__qualname__}{_of_code(value.__code__)}{value.__defaults__}{value.__kwdefaults__}"
        of = value if isinstance(value, type) else type(value)
        if (of is value or is_settings(value)) and (of is value or is_plain([*vars(value).values()])):
            with suppress(OSError, TypeError):
                return "".join(inspect.getsource(c) for c in of.__mro__ if not _is_foreign(c))
        return object.__repr__(value)


def _of_code(code: CodeType) -> tuple[Any, ...]:
    return (code.co_code, code.co_names, code.co_varnames,
            *[_of_code(c) if isinstance(c, CodeType) else c for c in code.co_consts])


def _is_foreign(value: Any) -> bool:
    """A module, class or function of Python, of a library that kernels are written with, or of this package."""
    if isinstance(value, BuiltinFunctionType):
        return True
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(value, (ModuleType, type, FunctionType)) and (name or "").partition(".")[0] in FOREIGN


def _of_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _GONE


def _names(code: CodeType, read: set[str], stored: set[str], attrs: set[str]) -> None:
    """Names of globals that code and what is nested in it read, names of its surroundings that they assign, and names of
    attributes they ask for."""
    own = {*code.co_cellvars}
    for i in dis.get_instructions(code):
        if i.opname in _STORES and i.argval not in own:
            stored.add(i.argval)
        elif i.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(i.argval)
        elif i.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attrs.add(i.argval)
    for c in code.co_consts:
        if isinstance(c, CodeType):
            inner = set[str]()
            _names(c, read, inner, attrs)
            stored.update(inner - own)


__all__ = ["Captured"]
