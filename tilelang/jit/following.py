"""Follows everything that tracing a function may read, from one value on, and makes a key of it."""

from __future__ import annotations

import array
import builtins
import enum
import functools
import hashlib
import importlib.util
import logging
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
from .outside import UNSEEN_METHODS, environment, is_foreign, is_foreign_name, is_unseen, state_of
from .reads import Reads, identifiers, reads_of

GONE: Any = object()
MOST_VALUES, MOST_DEEP = 20_000, 60  # beyond these, a function is traced at every call
_ALIKE = frozenset({*SIMPLE, bytes, type(...), type(NotImplemented)})  # values that type and == distinguish
_FACTS = frozenset({"shape", "dtype", "device", "ndim", "size", "stride", "strides", "itemsize", "nbytes", "numel", "dim",
                    "element_size", "is_cuda", "is_contiguous", "layout", "requires_grad"})  # a tensor's, besides its values
_MAKING = frozenset({"__init__", "__new__", "__post_init__", "__del__", "__reduce__", "__reduce_ex__", "__setstate__",
                     "__init_subclass__", "__set_name__", "__class_getitem__", "__subclasshook__"})  # not for a made object
_CHILDREN = frozenset({"_parameters", "_buffers", "_modules", "children", "modules", "parameters", "buffers", "state_dict",
                       "named_children", "named_modules", "named_parameters", "named_buffers", "get_submodule",
                       "get_parameter", "get_buffer"})
_METHODS = (FunctionType, classmethod, staticmethod, property, functools.cached_property, functools.partialmethod)
_SETTLED = (logging.Logger, logging.Handler, type(threading.Lock()), type(threading.RLock()), types.MemberDescriptorType,
            types.GetSetDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType, types.MethodWrapperType,
            types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType,
            type(vars(namedtuple("_Pair", "first"))["first"]))


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
        return f"{of.__module__}.{of.__qualname__}"


class Hidden(Known):
    """An object whose contents are in no key."""

    __slots__ = ()

    def __repr__(self) -> str:
        return object.__repr__(self.value)


def _of_code(code: CodeType) -> tuple[Any, ...]:
    return (code.co_code, code.co_names, code.co_varnames,
            *[_of_code(c) if isinstance(c, CodeType) else c for c in code.co_consts])


class Names:
    """The names of attributes that the functions followed so far read.  They only become more."""

    def __init__(self) -> None:
        self.attributes = set[str]()
        self.followed: dict[str, set[str]] = {}
        self.whole = set[str]()
        self.any_name = False
        self.codes = set[CodeType]()

    def add(self, reads: Reads, generated: bool) -> None:
        """generated: by dataclass; such methods compare and print tensors, and a trace does neither."""
        self.attributes |= reads.attributes
        if generated:
            return
        for name, attrs in reads.followed.items():
            self.followed.setdefault(name, set()).update(attrs)
        self.whole |= reads.whole
        self.any_name = self.any_name or reads.any_name

    def contents_count(self, name: str | None) -> bool:
        """Whether the values of a tensor that is reached by a name may be read, not its shape and dtype only."""
        return name is None or name in self.whole or not self.followed.get(name, set()) <= _FACTS


class Guards:
    """What a walk looked at, in a form that is quickly compared with the present state.  While all of it is the same object,
    another walk would find the same."""

    __slots__ = ("cells", "checks", "classes", "entries", "functions", "rest", "token", "wholes")

    def __init__(self) -> None:
        self.entries: list[tuple[dict[str, Any], str, Any]] = []
        self.cells: list[tuple[CellType, Any]] = []
        self.functions: list[tuple[FunctionType, CodeType, Any, Any]] = []
        self.wholes: list[tuple[Any, tuple[Any, ...]]] = []  # containers and what iterating over them gives
        self.classes: list[tuple[Any, type]] = []
        self.checks: list[Callable[[], bool]] = []
        self.rest: Guards | None = self  # None: there are entries and functions only
        self.token: Any = None

    def hold(self) -> bool:
        """Whether everything is as it was."""
        for names, name, value in self.entries:
            if names.get(name, GONE) is not value:
                return False
        for fn, code, defaults, named in self.functions:
            if fn.__code__ is not code or fn.__defaults__ is not defaults or fn.__kwdefaults__ is not named:
                return False
        return self.rest is None or self._rest_holds()

    def _rest_holds(self) -> bool:
        for cell, value in self.cells:
            if of_cell(cell) is not value:
                return False
        for container, held in self.wholes:
            if len(container) != len(held) or not all(map(is_, container, held)):
                return False
        for value, of in self.classes:
            if value.__class__ is not of:
                return False
        for check in self.checks:
            if not check():
                return False
        return True

    def close(self, token: Any) -> None:
        """End the walk.  token: what it gave."""
        self.token = token
        self.rest = self if self.cells or self.wholes or self.classes or self.checks else None


def of_cell(cell: CellType) -> Any:
    """What a cell of a closure holds; GONE for nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return GONE


class Walk:
    """One walk.  names: grows with every function met; a caller repeats the walk until it no longer grows.

    again: something was met that cannot be followed, so that only a new trace tells what the program is."""

    def __init__(self, names: Names) -> None:
        self.names, self.guards, self.again = names, Guards(), False
        self.seen: dict[Any, int] = {}
        self.alive: list[Any] = []  # so that no id is used twice
        self.depth = 0

    def key(self, value: Any, name: str | None = None) -> Any:
        """A hashable form of a value and of all that it holds.  name: of the variable or attribute that it was read from."""
        t = value.__class__
        if t in _ALIKE:
            return t, value
        if t is float:
            return value.hex()
        if is_foreign(value):
            return self._foreign(value, name)
        mark = (id(value), name if isinstance(value, ModuleType) or _is_tensor(value) else None)
        if mark in self.seen:
            return "seen", self.seen[mark]
        if self.depth >= MOST_DEEP or len(self.seen) >= MOST_VALUES:
            self.again = True
            return None
        self.seen[mark] = len(self.seen)
        self.alive.append(value)
        self.depth += 1
        try:
            return self._other(value, name)
        finally:
            self.depth -= 1

    # ---- kinds of values --------------------------------------------------------------------------------------------
    def _other(self, value: Any, name: str | None) -> Any:
        t = type(value)
        if t is FunctionType:
            return self._function(value, name)
        if isinstance(value, type):
            return self._class(value, True)
        if isinstance(value, ModuleType):
            return self._module(value, name)
        for kinds, parts in _CONTAINED:
            if isinstance(value, kinds):
                return t, *[self.key(x) for x in parts(value)]
        if value is GONE:
            return "none"
        if value is sys.modules["os"].environ:
            return self._state(environment)
        if isinstance(value, ContextVar):
            return Known(value), self._held(lambda: value.get(GONE))
        if _is_tensor(value):
            return self._tensor(value, name)
        if isinstance(value, (bytearray, array.array, memoryview)):
            return t, self._data(lambda: (getattr(value, "typecode", ""), bytes(value)))
        if isinstance(value, threading.local):  # another thread has other values
            self.again = True
        if is_foreign_name(t.__module__):
            return self._foreign_instance(value, t)
        return self._instance(value, t)

    def _function(self, fn: FunctionType, name: str | None = None, generated: bool = False) -> Any:
        code = fn.__code__
        reads = reads_of(code)
        self._learn(code, reads, generated)
        self.guards.functions.append((fn, code, fn.__defaults__, fn.__kwdefaults__))
        out: list[Any] = ["function", Known(code)]
        if fn.__defaults__ or fn.__kwdefaults__:
            out.append(self.key((fn.__defaults__, fn.__kwdefaults__)))
        if name is not None and name in self.names.followed or fn.__dict__:
            out.append(self._chosen(fn.__dict__, self.names.attributes))
        annotated = _annotated(fn, reads)
        for n, cell in zip(code.co_freevars, fn.__closure__ or ()):
            if n not in reads.stored:
                value = of_cell(cell)
                self.guards.cells.append((cell, value))
                out.append(self._variable(n, value, reads))
        names = fn.__globals__
        for n in sorted(reads.names | annotated):
            if n in reads.stored:
                continue
            value = names.get(n, GONE)
            self.guards.entries.append((names, n, value))
            if value is GONE:
                value = getattr(builtins, n, GONE)
            out.append(self._variable(n, value, reads))
        for module, level in reads.imports:
            out.append(self._imported(module, level, names))
        return tuple(out)

    def _variable(self, name: str, value: Any, reads: Reads) -> Any:
        if name in reads.any_name_of and not (is_foreign(value) or value.__class__ in _ALIKE):
            self.names.any_name = True
        return self.key(value, name)

    def _learn(self, code: CodeType, reads: Reads, generated: bool) -> None:
        if code not in self.names.codes:
            self.names.codes.add(code)
            self.names.add(reads, generated)
        if not UNSEEN_METHODS.isdisjoint(reads.attributes):
            self.again = True

    def _imported(self, module: str, level: int, names: dict[str, Any]) -> Any:
        if level:
            with suppress(ImportError, TypeError, ValueError):
                module = importlib.util.resolve_name("." * level + module, names.get("__package__"))
        out = []
        for n in (module, module.partition(".")[0]):
            value = sys.modules.get(n, GONE)
            if not is_foreign_name(n):
                self.guards.entries.append((sys.modules, n, value))
            out.append(self.key(value))
        return tuple(out)

    def _class(self, of: type, made: bool) -> Any:
        """made: the trace may make objects of the class, so that its __init__ counts."""
        out: list[Any] = [Known(of)]
        names = self.names.attributes
        for c in of.__mro__:
            if is_foreign(c) or (c, made) in self.seen:
                continue
            self.seen[c, made] = len(self.seen)
            self._whole(inside := vars(c))
            generated = "__dataclass_fields__" in inside
            for n, x in list(inside.items()):
                special = n.startswith("__") and n.endswith("__")
                if special and isinstance(x, _METHODS) and (made or n not in _MAKING):
                    out.append((n, self._special(x, generated)))
                elif n in names or not special and self.names.any_name:
                    out.append((n, self.key(x, n)))
        self.guards.checks.append(lambda order=of.__mro__: of.__mro__ is order)  # type: ignore[misc]
        if not is_foreign(type(of)):
            out.append(self._class(type(of), False))
        return tuple(out)

    def _special(self, x: Any, generated: bool) -> Any:
        if type(x) is FunctionType and generated and x.__code__.co_filename == "<string>" and not is_foreign(x):
            mark = (id(x), None)
            if mark in self.seen:
                return "seen", self.seen[mark]
            self.seen[mark] = len(self.seen)
            return self._function(x, None, True)
        return self.key(x)

    def _module(self, module: ModuleType, name: str | None) -> Any:
        names, inside = self.names, vars(module)
        if name is None or name in names.whole:
            if names.any_name:
                self.again = True
            wanted = {n for n in names.attributes if n in inside}
            absent = names.attributes - wanted
            self.guards.checks.append(lambda: absent.isdisjoint(inside))
        else:
            wanted = names.followed.get(name, set())
        out: list[Any] = [Known(module)]
        for n in sorted(wanted):
            value = inside.get(n, GONE)
            self.guards.entries.append((inside, n, value))
            out.append((n, self.key(value, n)))
            if value is GONE and "__getattr__" in inside:
                out.append(self.key(inside["__getattr__"]))
        return tuple(out)

    def _instance(self, value: Any, t: type) -> Any:
        self.guards.classes.append((value, t))
        own = t.__hash__ in (object.__hash__, None)
        out: list[Any] = [Known(value) if own else "value", self._class(t, False)]
        if isinstance(value, enum.Enum):
            return (*out, value._name_, self.key(value._value_))
        for kind in (str, int, float):
            if isinstance(value, kind):
                out.append(self.key(kind(value)))
        if isinstance(value, _CONTAINERS):
            out.append(self._container(value))
        inside = getattr(value, "__dict__", None)
        if isinstance(inside, dict):
            out.append(self._chosen(inside, None if self.names.any_name or _keeps_state(t) else self.names.attributes))
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(value, torch.nn.Module):
                out.append(self._children(inside))
        out.append(self._slots(value, t))
        return tuple(out)

    def _children(self, inside: dict[str, Any]) -> Any:
        """Parameters, buffers and modules of a torch.nn.Module, which it gives as attributes."""
        names = self.names
        all_of = names.any_name or not names.attributes.isdisjoint(_CHILDREN)
        return tuple([self._chosen(inside[group], None if all_of else names.attributes)
                      for group in ("_parameters", "_buffers", "_modules") if isinstance(inside.get(group), dict)])

    def _slots(self, value: Any, t: type) -> Any:
        out = []
        for c in t.__mro__:
            for n, member in vars(c).items():
                if isinstance(member, types.MemberDescriptorType) and not is_foreign(c) and (
                        self.names.any_name or n in self.names.attributes):
                    out.append((n, self._held(lambda m=member: _slot(m, value), n)))  # type: ignore[misc]
        return tuple(out)

    def _chosen(self, inside: dict[str, Any], names: set[str] | None) -> Any:
        """Entries of the dict of an object's attributes.  names: those that count; None: all of them."""
        if names is None:
            self._whole(inside)
            return tuple([(n, self.key(x)) for n, x in list(inside.items())])
        self._keys(inside)
        out = []
        for n, x in list(inside.items()):
            if n in names:
                self.guards.entries.append((inside, n, x))
                out.append((n, self.key(x, n)))
        return tuple(out)

    def _container(self, value: Any) -> Any:
        self._whole(value)
        if isinstance(value, Mapping):
            made = getattr(value, "default_factory", None)
            return tuple([(self.key(k), self.key(x)) for k, x in list(value.items())]), made and self.key(made)
        if isinstance(value, (set, frozenset)):
            return frozenset([self.key(x) for x in value])
        return tuple([self.key(x) for x in value])

    # ---- foreign things ---------------------------------------------------------------------------------------------
    def _foreign(self, value: Any, name: str | None) -> Any:
        """Modules, classes and functions of libraries: compared by identity, apart from state that can be read."""
        if isinstance(value, ModuleType):
            return Known(value), *self._of_foreign_module(value, name)
        of = getattr(value, "__self__", None)
        if isinstance(value, types.BuiltinFunctionType) and of is not None and not isinstance(of, ModuleType):
            return value.__name__, self.key(of)  # a method of an object
        module = getattr(value, "__module__", None) or ""
        key = Known(value), self._outside(module, getattr(value, "__name__", ""))
        cells = value.__closure__ if isinstance(value, FunctionType) else None
        if not cells or module.partition(".")[0] not in sys.stdlib_module_names or id(value) in self.seen:
            return key
        self.seen[id(value)] = len(self.seen)
        for cell in cells:  # functions of the user that a decorator of Python holds
            self.guards.cells.append((cell, of_cell(cell)))
        return *key, *[self.key(of_cell(cell)) for cell in cells]

    def _of_foreign_module(self, module: ModuleType, name: str | None) -> list[Any]:
        if is_foreign_name(module.__name__) and module.__name__.partition(".")[0] == "tilelang":
            return []
        names = self.names
        wanted = names.attributes if name is None or name in names.whole else names.followed.get(name, set())
        out = []
        for n in sorted(wanted):
            value = vars(module).get(n, GONE)
            if isinstance(value, ModuleType) or isinstance(value, (list, dict, set, ContextVar)) and value is not sys.modules:
                if (id(value), n) not in self.seen:
                    self.seen[id(value), n] = len(self.seen)
                    out.append((n, self.key(value, n)))
            elif value is not GONE:
                out.append((n, self._outside(module.__name__, n)))
        return [x for x in out if x[1] is not None]

    def _outside(self, module: str, name: str) -> Any:
        read = state_of(module, name)
        if read is not None:
            return self._state(read)
        if is_unseen(module, name):
            self.again = True
        return None

    def _foreign_instance(self, value: Any, t: type) -> Any:
        of = t.__module__.partition(".")[0]
        if of in ("tilelang", "tvm"):
            fn = value.orig_func if isinstance(value, Macro) else getattr(value, "__wrapped__", None)
            return Hidden(value), None if fn is None else self.key((fn, getattr(value, "__self__", None)))
        if hasattr(value, "__wrapped__"):
            return Known(value), self.key(value.__wrapped__)
        if isinstance(value, _CONTAINERS):
            return t, self._container(value)
        if isinstance(value, _SETTLED):
            return (Hidden(value),)
        torch = sys.modules.get("torch")
        if of == "torch" and torch is not None and isinstance(value, torch.dtype):
            return t, value
        if isinstance(value, types.MappingProxyType):
            return t, self._container(value)
        if _is_hashed_by_value(value):
            return t, value
        inside = getattr(value, "__dict__", None)
        if not isinstance(inside, dict) or isinstance(value, types.GeneratorType):
            self.again = True
            return (t,)
        self.guards.classes.append((value, t))
        if torch is not None and isinstance(value, torch.nn.Module):
            all_of = isinstance(value, _torch_containers(torch))
            out = [self._chosen(inside, self.names.attributes)]
            if all_of:
                out += [self._chosen(inside[g], None) for g in ("_parameters", "_buffers", "_modules")]
            else:
                out.append(self._children(inside))
            return Known(value), *out
        return Known(value), self._chosen(inside, None)

    def _tensor(self, value: Any, name: str | None) -> Any:
        """An array's shape and element type, and its values where the code may read them."""
        contents = self.names.contents_count(name)
        try:
            if hasattr(value, "__array_interface__"):
                if value.dtype.hasobject:
                    return type(value), self._elements(value)
                if not contents:
                    return self._data(lambda: (str(value.dtype), value.shape, value.strides))
                return self._data(lambda: (str(value.dtype), value.shape, value.strides, _bytes(value)))
            if contents and value.device.type != "cpu":
                self.again, contents = True, False
            return self._data(lambda: (value.dtype, tuple(value.shape), value.stride(), value.device, value.requires_grad,
                                       _bytes_of_torch(value) if contents else None))
        except Exception:  # a tensor without such memory: sparse, quantised, a subclass
            self.again = True
            return (type(value),)

    def _elements(self, value: Any) -> Any:
        held = list(value.flat)
        self.guards.checks.append(lambda: len(held) == value.size and all(map(is_, value.flat, held)))
        return value.shape, tuple([self.key(x) for x in held])

    # ---- what is compared later ---------------------------------------------------------------------------------------
    def _whole(self, container: Any) -> None:
        if type(container) in (tuple, frozenset):
            return
        self._keys(container)
        if isinstance(container, (dict, types.MappingProxyType)):
            values = tuple(container.values())
            self.guards.checks.append(lambda: all(map(is_, container.values(), values)))

    def _keys(self, container: Any) -> None:
        self.guards.wholes.append((container, tuple(container)))

    def _held(self, read: Callable[[], Any], name: str | None = None) -> Any:
        value = read()
        self.guards.checks.append(lambda: read() is value)
        return self.key(value, name)

    def _data(self, read: Callable[[], Any]) -> Any:
        value = read()
        self.guards.checks.append(lambda: read() == value)
        return value

    def _state(self, read: Callable[[], Any]) -> Any:
        value = self._data(read)
        return tuple(sorted(value.items())) if isinstance(value, dict) else (type(value), value)


def _annotated(fn: FunctionType, reads: Reads) -> set[str]:
    """Globals named in annotations that are still texts."""
    texts = [a for a in fn.__annotations__.values() if isinstance(a, str)]
    return {n for n in {*reads.annotated, *[n for text in texts for n in identifiers(text)]} if n in fn.__globals__}


_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_STATELESS = (object, str, int, float, *_CONTAINERS, threading.local)


def _keeps_state(t: type) -> bool:
    """Whether methods of a foreign class, which are not followed, read attributes of a user's object."""
    return any(is_foreign(c) and c not in _STATELESS and c.__module__ not in ("abc", "typing", "enum", "collections.abc") and
               not c.__module__.startswith("torch.nn") for c in t.__mro__)


_CONTAINED: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (MethodType, lambda x: (x.__func__, x.__self__)),
    ((functools.partial, functools.partialmethod), lambda x: (x.func, x.args, x.keywords)),
    ((staticmethod, classmethod), lambda x: (x.__func__,)),
    (property, lambda x: (x.fget,)),
    (functools.cached_property, lambda x: (x.func,)),
    (slice, lambda x: (x.start, x.stop, x.step)),
    (complex, lambda x: (x.real, x.imag)),
    (weakref.ref, lambda x: (x(),)),
)


def _slot(member: Any, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return GONE


def _is_hashed_by_value(value: Any) -> bool:
    """Whether a foreign object is an immutable value."""
    try:
        return type(value).__hash__ is not object.__hash__ and hash(value) is not None
    except TypeError:
        return False


def _is_tensor(value: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) or
            torch is not None and isinstance(value, getattr(torch, "Tensor", ())))


def _torch_containers(torch: Any) -> tuple[type, ...]:
    nn = torch.nn
    return nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict


def _bytes(value: Any) -> bytes:
    data = value.tobytes()
    return data if len(data) <= 4096 else hashlib.blake2b(data, digest_size=32).digest()


def _bytes_of_torch(value: Any) -> bytes:
    torch = sys.modules["torch"]
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _bytes(flat.view(torch.uint8).numpy())


__all__ = ["GONE", "Guards", "Known", "Names", "Walk", "of_cell"]
