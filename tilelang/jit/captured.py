"""Values that a kernel function reads besides run-time tensors; they are part of the key of a compiled kernel.

Of a variable, the attributes and items are followed that the code takes from it (`jit/reads.py`).  A value that is used in
another way (an argument, an operand) is followed with all that it holds.  A walk that gets long is given up.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import logging
import os
import sys
import threading
import types
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from tilelang.language.tracing.macro import Macro

from .keys import SIMPLE, Same
from .outside import (FACTS, UNSEEN_METHODS, UNSEEN_NAMES, contents_of, environment, facts_of, is_foreign, is_foreign_name,
                      is_immutable, is_tensor, is_unseen, state_of)
from .reads import WHOLE, Step, reads_of

KEPT = 256  # states and arguments that are kept


class Token(Same):
    """Everything that one walk found, compared by identity: equal walks of one function share a token.  Its text is the same in
    other processes, as far as the objects have such a text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(self.value)


class Captured:
    """What tracing a function may read: globals and closures, defaults, code and attributes, in the function, in functions
    nested in it, and in the user's functions, macros and methods that it reaches; also through objects given as arguments.

    Counted are the attributes and items that the code takes from objects, and all of an object that is used as a whole.  Not
    counted: variables that the functions assign themselves, clocks and random numbers, and the inside of the libraries that
    kernels are written with.  A function that reads what cannot be followed (files, globals(), a module in a variable, tensors
    on a device), or more than is followed in short time, is traced at every call; the text of its program tells the kernel.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.tokens: dict[Any, Token] = {}
        self.missed = 0  # tokens given so far that tell nothing
        self.failed = self.waits = 0  # walks that were given up; calls until the next attempt
        self.found: Guards | None = None
        self.arguments: dict[Any, tuple[Any, Guards]] = {}

    def token(self) -> Token:
        """Stands for the present values of everything that the function reads.  While found.hold(), it is found.token."""
        self.found = self._walk(self.fn, None)
        return self._unfollowed() if self.found is None else self.found.token

    def argument(self, value: Any, name: str | None = None) -> Token:
        """Stands for the present state of a function or object that is an argument.  name: of the parameter."""
        held = self.arguments.get((id(value), name))
        if held is None or held[0] is not value or not held[1].hold():
            found = self._walk(value, name)
            if found is None:
                return self._unfollowed()
            if len(self.arguments) >= KEPT:
                self.arguments.clear()
            held = self.arguments[id(value), name] = value, found
        return held[1].token

    def _unfollowed(self) -> Token:
        """Equal to no other, so that nothing is found by it."""
        self.missed += 1
        return Token(("traced again", Known(getattr(self.fn, "__code__", None))))

    def _walk(self, value: Any, name: str | None) -> Guards | None:
        """None: something cannot be followed.  It is mostly so at the next calls too, which attempt it ever more rarely."""
        if self.waits:
            self.waits -= 1
            return None
        code = getattr(self.fn, "__code__", None)
        walk = Walk()
        try:
            key = walk.of(value, name if code is not None and name in code.co_varnames else None, self.fn)
            if len(self.tokens) >= KEPT:
                self.tokens.clear()
            walk.guards.token = self.tokens.setdefault(key, Token(key))
        except (Unfollowed, RecursionError):
            self.failed += 1
            self.waits = min(2 ** self.failed, 1000)
            return None
        return walk.guards


# ---- one walk ---------------------------------------------------------------------------------------------------------

GONE: Any = object()
UNKNOWN: Any = object()  # a value that the walk does not have
MOST = 800  # values that a walk looks at, of simple ones in containers eight times as many; it takes some 2 ms
_ALIKE = frozenset({*SIMPLE, bytes, type(...), type(NotImplemented)})  # values that type and == distinguish
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_USUAL = (object.__getattribute__, types.SimpleNamespace.__getattribute__)
_METHODS = (FunctionType, classmethod, staticmethod, property, functools.cached_property, functools.partialmethod)
_SETTLED = (logging.Logger, logging.Handler, type(threading.Lock()), type(threading.RLock()), types.MemberDescriptorType,
            types.GetSetDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType, types.MethodWrapperType,
            types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType,
            type(vars(namedtuple("_Pair", "first"))["first"]))
_HELD: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    ((functools.partial, functools.partialmethod), lambda x: (x.func, x.args, x.keywords)),
    ((staticmethod, classmethod), lambda x: (x.__func__,)),
    (property, lambda x: (x.fget,)),
    (functools.cached_property, lambda x: (x.func,)),
    (slice, lambda x: (x.start, x.stop, x.step)),
    (weakref.ref, lambda x: (x(),)),
)


class Unfollowed(Exception):
    """Something cannot be followed, or not in short time: only a new trace tells what the program is."""


class Known(Same):
    """An object compared by identity in this process.  Its text is the same in another process if its code is the same: this
    holds for functions, and for classes, modules and objects, whose contents stand beside it in a key."""

    __slots__ = ()

    def __repr__(self) -> str:
        value = self.value
        if isinstance(value, CodeType):
            return f"{value.co_name}{_of_code(value)}"
        if isinstance(value, ModuleType):
            return value.__name__
        of = value if isinstance(value, (type, FunctionType)) else type(value)
        return repr(value) if is_library(type(value)) else f"{of.__module__}.{of.__qualname__}"


def _of_code(code: CodeType) -> tuple[Any, ...]:
    return (code.co_code, code.co_names, code.co_varnames,
            *[_of_code(c) if isinstance(c, CodeType) else c for c in code.co_consts])


class Guards:
    """What a walk looked at, in a form that is quickly compared with the present state.  While all of it is the same object,
    another walk would find the same.  token: what the walk gave."""

    __slots__ = ("checks", "entries", "functions", "token")

    def __init__(self) -> None:
        self.entries: list[tuple[Mapping[str, Any], str, Any]] = []
        self.functions: list[tuple[FunctionType, CodeType, Any, Any]] = []
        self.checks: list[Callable[[], bool]] = []
        self.token: Any = None

    def hold(self) -> bool:
        """Whether everything is as it was."""
        for names, name, value in self.entries:
            if names.get(name, GONE) is not value:
                return False
        for fn, code, defaults, named in self.functions:
            if fn.__code__ is not code or fn.__defaults__ is not defaults or fn.__kwdefaults__ is not named:
                return False
        for check in self.checks:
            if not check():
                return False
        return True


def of_cell(cell: CellType) -> Any:
    """What a cell of a closure holds; GONE for nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return GONE


class Walk:
    """One walk, for a key and its guards.  Raises Unfollowed."""

    def __init__(self) -> None:
        self.guards, self.left = Guards(), MOST
        self.seen: dict[Any, int] = {}
        self.alive: list[Any] = []  # so that no id is used twice
        self.attributes = set[str]()  # that any code reads, of foreign modules in variables
        self.modules = list[ModuleType]()

    def of(self, value: Any, name: str | None, fn: Any) -> Any:
        """The key of a value.  name: of the parameter of the function that it is the argument of; None for no such."""
        key = self.key(value) if name is None else self._paths(value, name, fn)
        key = key, *[self._in_module(m, n)[0] for m in self.modules for n in sorted(self.attributes & vars(m).keys())]
        try:
            hash(key)
        except TypeError:  # of a value of a library, such as a size of a fake tensor
            raise Unfollowed from None
        return key

    def key(self, value: Any) -> Any:
        """A hashable form of a value and of all that it holds."""
        t = type(value)
        if t in _ALIKE:
            return t, value
        if t is float:
            return value.hex()
        return self._foreign(value) if is_foreign(value) else self._once(value, None, self._other)

    def _once(self, value: Any, mark: Any, follow: Callable[[Any], Any]) -> Any:
        """follow(value), the first time that the value is met with this mark."""
        if (id(value), mark) in self.seen:
            return "seen", self.seen[id(value), mark]
        self._spend(1)
        self.seen[id(value), mark] = len(self.seen)
        self.alive.append(value)
        return follow(value)

    def _spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise Unfollowed

    # ---- what code reads of a variable ------------------------------------------------------------------------------
    def _paths(self, value: Any, name: str, fn: FunctionType) -> Any:
        """What a function reads of a value that one of its variables has."""
        if type(value) in _ALIKE or type(value) is float:
            return self.key(value)
        paths = reads_of(fn.__code__).paths.get(name, [])
        return self._once(value, (name, id(fn)), lambda _: tuple([self._path(value, p, fn, value, name) for p in paths]))

    def _path(self, value: Any, path: tuple[Step, ...], fn: FunctionType, start: Any = None, name: str = "") -> Any:
        """start, name: the variable that the path starts at, and its value."""
        out: list[Any] = []
        for step in path:
            if step == WHOLE:
                return *out, self.key(value)
            if isinstance(step, tuple) and len(step) > 1:
                if step[0] == "set":
                    out.append(self._assigned(value, step[1]))
                    continue
                to, parameter = (fn, step[1]) if len(step) == 2 else self._called(step, start if name == step[0] else GONE, fn)
                return *out, self.key(value) if parameter is None else self._paths(value, parameter, to)
            part, value = self._item(value, step[0]) if isinstance(step, tuple) else self._attribute(value, step)
            out.append(part)
            if value is UNKNOWN or value is GONE:
                break
        return *out, value is None, value is GONE

    def _called(self, step: Step, start: Any, fn: FunctionType) -> tuple[Any, str | None]:
        """The function that gets an argument, and its parameter; no parameter where it is not a plain function or method."""
        name, is_global, path, n = step
        if is_global:
            start = fn.__globals__.get(name)
        elif start is GONE and name in fn.__code__.co_freevars:
            start = of_cell((fn.__closure__ or ())[fn.__code__.co_freevars.index(name)])
        if len(path) == 1 and path[0] in getattr(start, "__dict__", {}):
            start, path = start.__dict__[path[0]], ()
        elif len(path) == 1:
            start, path, n = next((vars(c)[path[0]] for c in type(start).__mro__ if path[0] in vars(c)), None), (), n + 1
        plain = type(start) is FunctionType and not path and not is_foreign(start) and n < start.__code__.co_argcount
        return start, start.__code__.co_varnames[n] if plain else None

    def _item(self, value: Any, key: Any) -> tuple[Any, Any]:
        if _is_torch_module(value) and is_foreign(type(value)) and str(key) in value._modules:  # ModuleList, Sequential
            return None, self._entry(value._modules, str(key))
        if type(value) in (dict, list, tuple):
            return None, self._held(lambda: value.get(key, GONE) if type(value) is dict else
                                    value[key] if isinstance(key, int) and -len(value) <= key < len(value) else GONE)
        return self.key(value), UNKNOWN

    def _attribute(self, value: Any, name: str) -> tuple[Any, Any]:
        """(the key of what is looked at for an attribute, its value; UNKNOWN: all that it may read is in the key)."""
        t, inside = type(value), getattr(value, "__dict__", None)
        if isinstance(value, ModuleType):
            return self._in_module(value, name)
        if isinstance(value, type) and not is_foreign(value) and is_foreign(type(value)) and name[:2] != "__":
            found = self._in_class(value, name)
            return (self.key(value), UNKNOWN) if found is GONE else self._bound(found, value, value)
        if t is FunctionType and name in value.__dict__:
            return self.key(value), self._entry(value.__dict__, name)
        if name in FACTS and is_tensor(value):
            return self._data(lambda: facts_of(value)), UNKNOWN
        if (isinstance(inside, dict) or not is_foreign(t)) and name[:2] != "__" and not is_library(t) and (
                t.__getattribute__ in _USUAL and not is_tensor(value)):
            return self._in_instance(value, name, inside if isinstance(inside, dict) else {})
        return self.key(value), UNKNOWN

    def _assigned(self, value: Any, name: str) -> Any:
        """What of the user's classes runs when an attribute is assigned."""
        t = type(value)
        method, found = self._in_class(t, "__setattr__"), self._in_class(t, name)
        fn = [x for x in (method, getattr(found, "fset", None)) if type(x) is FunctionType and not is_foreign(x)]
        return Known(t), *[self._method(x, value) for x in fn], () if is_foreign(type(found)) else self.key((found, value))

    def _in_instance(self, value: Any, name: str, inside: dict[str, Any]) -> tuple[Any, Any]:
        t = type(value)
        self.guards.checks.append(lambda order=t.__mro__: value.__class__ is t and t.__mro__ is order)  # type: ignore[misc]
        found = self._in_class(t, name)
        if isinstance(found, types.MemberDescriptorType):
            return None, self._held(lambda: getattr(value, name, GONE))
        if found is GONE or not hasattr(type(found), "__set__"):
            here = self._entry(inside, name)
            for group in ("_parameters", "_buffers", "_modules") if found is GONE is here and _is_torch_module(value) else ():
                here = self._entry(inside.get(group, {}), name) if here is GONE else here
            if here is not GONE:
                return None, here
        if found is GONE:
            found = self._in_class(t, "__getattr__")
        return (None, GONE) if found is GONE or _is_torch_module(value) and is_foreign(found) else self._bound(found, value, t)

    def _bound(self, found: Any, obj: Any, of: type) -> tuple[Any, Any]:
        """What an attribute of a class gives for an object, or for the class itself."""
        if isinstance(found, staticmethod):
            return None, found.__func__
        if isinstance(found, classmethod):
            return self._method(found.__func__, of), UNKNOWN
        if obj is of and isinstance(found, FunctionType) or not hasattr(type(found), "__get__"):
            return None, found
        fn = (found.fget if type(found) is property else found.func if type(found) is functools.cached_property else
              _wrapped(found) if is_library(type(found)) else found)
        if isinstance(fn, FunctionType):
            return self._method(fn, obj), UNKNOWN
        return (self.key(found), self.key(obj)), UNKNOWN

    def _method(self, fn: Any, obj: Any) -> Any:
        """A function and the object that it gets as its first parameter."""
        code = getattr(fn, "__code__", None)
        if code is None or not code.co_argcount or is_foreign(fn):
            return self.key(fn), self.key(obj)
        return self.key(fn), self._paths(obj, code.co_varnames[0], fn)

    def _in_class(self, of: type, name: str) -> Any:
        """What a class or its bases have under a name."""
        for c in of.__mro__[:-1]:
            found = vars(c).get(name, GONE) if is_foreign(c) else self._entry(vars(c), name)
            if found is not GONE:
                return found
        return GONE

    def _in_module(self, module: ModuleType, name: str) -> tuple[Any, Any]:
        inside = vars(module)
        if module.__name__.partition(".")[0] == "tilelang":
            return Known(module), UNKNOWN
        value = self._entry(inside, name)
        if is_foreign(module) and (value is sys.modules or is_foreign(value) and not isinstance(value, ModuleType) or
                                   not isinstance(value, (list, dict, set, ContextVar, ModuleType, FunctionType))):
            return (Known(value), self._outside(module.__name__, name)), UNKNOWN
        if value is GONE and "__getattr__" in inside:
            return (Known(module), self.key(inside["__getattr__"])), UNKNOWN
        if type(module) is not ModuleType and (value is GONE or hasattr(type(module), name)):
            raise Unfollowed
        return Known(module), value

    # ---- values with all that they hold -----------------------------------------------------------------------------
    def _other(self, value: Any) -> Any:
        t = type(value)
        if t is FunctionType:
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, (ModuleType, threading.local)):  # another thread has other values
            raise Unfollowed
        if t is MethodType:
            return t, self._method(value.__func__, value.__self__)
        for kinds, parts in _HELD:
            if isinstance(value, kinds):
                return t, *[self.key(x) for x in parts(value)], None if is_foreign(t) else self._instance(value, t)
        if value is GONE or value is os.environ:
            return "none" if value is GONE else self._state(environment)
        if isinstance(value, ContextVar):
            return Known(value), self.key(self._held(lambda: value.get(GONE)))
        if is_tensor(value):
            if contents_of(value) is None:
                raise Unfollowed
            return self._data(lambda: contents_of(value))
        return self._foreign_instance(value, t) if is_foreign_name(t.__module__) else self._instance(value, t)

    def _function(self, fn: FunctionType) -> Any:
        code, names = fn.__code__, fn.__globals__
        known = reads_of.cache_info().misses
        reads = reads_of(code)
        self._spend(3 if reads_of.cache_info().misses == known else 20)
        self.attributes |= reads.attributes
        if not (UNSEEN_METHODS.isdisjoint(reads.attributes) and UNSEEN_NAMES.isdisjoint(reads.names)):
            raise Unfollowed
        self.guards.functions.append((fn, code, fn.__defaults__, fn.__kwdefaults__))
        out: list[Any] = ["function", Known(code), self.key(fn.__kwdefaults__)]
        defaults = fn.__defaults__ or ()
        out += [self._paths(x, n, fn) for n, x in zip(code.co_varnames[code.co_argcount - len(defaults):], defaults)]
        if fn.__dict__:
            out.append(self._container(fn.__dict__))
        for n, cell in zip(code.co_freevars, fn.__closure__ or ()):
            if n not in reads.stored:
                out.append(self._paths(self._held(lambda cell=cell: of_cell(cell)), n, fn))  # type: ignore[misc]
        for n in sorted(reads.names - reads.stored):
            value = self._entry(names, n)
            out.append(self._paths(self._entry(vars(builtins), n) if value is GONE else value, n, fn))
        for n, *path in sorted(reads.texts(fn)):
            if n in names:
                out.append(self._path(self._entry(names, n), (*path, WHOLE), fn))
        for (module, level), paths in reads.imports.items():
            if level:
                with suppress(ImportError, TypeError, ValueError):
                    module = importlib.util.resolve_name("." * level + module, names.get("__package__"))
            out += [self._path(self._entry(sys.modules, module), p, fn) for p in paths]
        return tuple(out)

    def _class(self, of: type) -> Any:
        out = [self._once(c, "class", self._in_full) for c in of.__mro__ if not is_foreign(c)]
        self.guards.checks.append(lambda order=of.__mro__: of.__mro__ is order)  # type: ignore[misc]
        return Known(of), *out, None if is_foreign(type(of)) else self.key(type(of))

    def _in_full(self, of: type) -> Any:
        self._whole(inside := vars(of))
        return tuple([(n, self.key(x)) for n, x in list(inside.items())
                      if isinstance(x, _METHODS) or n[:2] != "__" and n != "_abc_impl"])

    def _instance(self, value: Any, t: type) -> Any:
        self._spend(3)
        self.guards.checks.append(lambda: value.__class__ is t)
        own = t.__hash__ in (object.__hash__, None)
        out: list[Any] = [Known(value) if own else "value", Known(t) if is_foreign(t) else self.key(t)]
        out += [self.key(kind(value)) for kind in (str, int, float) if isinstance(value, kind)]
        if isinstance(value, _CONTAINERS):
            out.append(self._container(value))
        if isinstance(getattr(value, "__dict__", None), dict):
            out.append(self._container(value.__dict__))
        return *out, *[(n, self.key(self._held(lambda n=n: getattr(value, n, GONE))))  # type: ignore[misc]
                       for c in t.__mro__ if not is_foreign(c) for n, m in vars(c).items()
                       if isinstance(m, types.MemberDescriptorType)]

    def _container(self, value: Any) -> Any:
        self._whole(value)
        if isinstance(value, Mapping):
            made = getattr(value, "default_factory", None)
            return tuple([(self.key(k), self.key(x)) for k, x in list(value.items())]), made and self.key(made)
        if isinstance(value, (set, frozenset)):
            return frozenset([self.key(x) for x in value])
        return tuple([self.key(x) for x in value])

    # ---- foreign things ---------------------------------------------------------------------------------------------
    def _foreign(self, value: Any) -> Any:
        """Modules, classes and functions of libraries: compared by identity, apart from state that can be read."""
        if isinstance(value, ModuleType):
            self.modules.append(value)
            return Known(value)
        of = getattr(value, "__self__", None)
        if isinstance(value, types.BuiltinFunctionType) and of is not None and not isinstance(of, ModuleType):
            return value.__name__, self.key(of)  # a method of an object
        module = getattr(value, "__module__", None) or ""
        # A decorator of Python may hold functions of the user.
        holds = isinstance(value, FunctionType) and value.__closure__ and module.partition(".")[0] in sys.stdlib_module_names
        return (Known(value), self._outside(module, getattr(value, "__name__", "")),
                self._once(value, None, self._function) if holds else None)

    def _outside(self, module: str, name: str) -> Any:
        if is_unseen(module, name):
            raise Unfollowed
        read = state_of(module, name)
        return None if read is None else self._state(read)

    def _foreign_instance(self, value: Any, t: type) -> Any:
        if is_library(t):
            fn, obj = _wrapped(value), getattr(value, "__self__", None)
            return Known(value), None if fn is None else self.key(fn) if obj is None else self._method(fn, obj)
        if hasattr(value, "__wrapped__"):
            return Known(value), self.key(value.__wrapped__)
        if isinstance(value, (*_CONTAINERS, types.MappingProxyType)):
            return t, self._container(value)
        if isinstance(value, _SETTLED):
            return Known(value)
        if is_immutable(value):
            return t, value
        if not isinstance(getattr(value, "__dict__", None), dict) or isinstance(value, types.GeneratorType):
            raise Unfollowed
        return self._instance(value, t)

    # ---- what is compared later ---------------------------------------------------------------------------------------
    def _entry(self, inside: Mapping[str, Any], name: str) -> Any:
        value = inside.get(name, GONE)
        self.guards.entries.append((inside, name, value))
        return value

    def _whole(self, container: Any) -> None:
        self._spend(len(container) // 8)
        if type(container) not in (tuple, frozenset):
            held, is_map = tuple(container), isinstance(container, (dict, types.MappingProxyType))
            values = tuple(container.values()) if is_map else ()
            self.guards.checks.append(lambda: len(container) == len(held) and all(map(is_, container, held)) and (
                not is_map or all(map(is_, container.values(), values))))

    def _held(self, read: Callable[[], Any]) -> Any:
        value = read()
        self.guards.checks.append(lambda: read() is value)
        return value

    def _data(self, read: Callable[[], Any]) -> Any:
        value = read()
        self.guards.checks.append(lambda: read() == value)
        return value

    def _state(self, read: Callable[[], Any]) -> Any:
        value = self._data(read)
        return tuple(sorted(value.items())) if isinstance(value, dict) else (type(value), value)


def is_library(t: type) -> bool:
    """Whether a class is of this package."""
    return t.__module__.partition(".")[0] in ("tilelang", "tvm")


def _wrapped(value: Any) -> Any:
    """The user's function in a macro or a decorated function."""
    return value.orig_func if isinstance(value, Macro) else getattr(value, "__wrapped__", None)


def _is_torch_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)
