"""Values that a kernel function reads from closures and globals; they are part of the key of a compiled kernel."""

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
    """The values that a function reads from closures and globals, directly, in nested functions, or in the user's functions
    and macros that it calls.

    Included: numbers, strings and dtypes; the contents of lists, dicts, sets and arrays; attributes of the user's objects and
    classes; and those attributes of the user's modules that the function names.
    Not included: the contents of torch tensors, and names that the functions assign themselves (counters).
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.reads: dict[int, _Reads] = {}  # id of a function met -> the names it reads
        self.kept: dict[int, Known] = {}  # id -> an object compared by identity
        self.found: _Found | None = None  # the result of the last walk, if it met only values that cannot change inside

    def values(self) -> tuple[Any, ...]:
        """The present values of the names, in a hashable form that distinguishes types."""
        found = self.found
        if found is not None and found.is_so_still():
            return found.values
        walk = _Walk(self)
        walk.follow(self.fn)
        values = tuple(walk.out)
        self.found = _Found(values, walk.functions, walk.globals, walk.cells) if walk.steady else None
        return values


class _Found(NamedTuple):
    """The result of a walk that met only numbers, strings and functions.  It stays valid while every name is bound to the
    same object.  values: the result of Captured.values.  functions: the functions that were followed."""

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
    """The names that one function reads from closures and globals.  A name bound to a foreign object (see _is_foreign) is
    ignored until it is bound to another kind of object."""

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
        """The present values of names that were bound to foreign objects before and no longer are."""
        names = self.fn.__globals__
        return [(n, now) for n, value in self.foreign_globals if (now := names.get(n, _GONE)) is not value] + [
            (k, now) for k, (cell, value) in enumerate(self.foreign_cells) if (now := _of_cell(cell)) is not value]


class _Walk:
    """One walk over everything that a function reads.  Each function is visited once."""

    def __init__(self, captured: Captured) -> None:
        self.captured, self.out, self.seen = captured, list[Any](), set[int]()
        self.steady = True  # every value met so far is immutable: it changes only when its name is bound to another object
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
        """The key of a value that is not plain (see keys.py)."""
        if value.__class__ is FunctionType or value.__class__ is Macro:
            self.follow(value.orig_func if isinstance(value, Macro) else value)
            return self.identity(value)
        self.steady = False
        return content(value, lambda x: self.other(x, reads))

    def other(self, value: Any, reads: _Reads) -> Any:
        """The key of an object that is neither plain nor a container of plain values: identity and readable contents."""
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
    """An object compared by identity in this process.  Its text is the same in another process if its code is the same: this
    holds for functions, and for classes and objects that hold plain values only."""

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
    """Whether x is a module, class or function of Python, of this package, or of a library that kernels are written with."""
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
    """(globals read, enclosing names assigned, attributes read) by a code object and the code nested in it."""
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
