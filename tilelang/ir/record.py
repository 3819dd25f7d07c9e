"""Dataclass decorators with a short import time: a compilation imports dozens of these classes before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from functools import cache
from operator import attrgetter
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # dataclass_transform exists from Python 3.11 on; it only informs type checkers
    def dataclass_transform(**_: Any) -> Any:
        return lambda decorator: decorator

C = TypeVar("C", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: C) -> C:
    """Class decorator: a dataclass with immutable instances, equal by value and hashable.

    `dataclass(frozen=True)` compiles its methods for each class; all records share theirs.  Assignment to a field is diagnosed
    by mypy only, not at run time.  Raises TypeError for fields that are keyword-only or not in `__init__`.
    """
    return _with(with_init(cls), __eq__=_equal, __hash__=_hash, __repr__=_repr)


@dataclass_transform(field_specifiers=(field,))
def state(cls: C) -> C:
    """Class decorator: a dataclass with mutable instances, equal by value and not hashable.  Raises TypeError as `record`."""
    return _with(with_init(cls), __eq__=_equal, __hash__=None, __repr__=_repr)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def entity(cls: C) -> C:
    """Class decorator: a dataclass with mutable instances, compared by identity.  Raises TypeError as `record`."""
    return _with(with_init(cls), __repr__=_repr)


def _with(cls: Any, **methods: Any) -> Any:
    """Add to the class those of the methods that it does not define itself."""
    own = vars(cls)
    if "__eq__" in methods:
        compared = [f.name for f in cls.__dataclass_fields__.values() if f.compare]
        cls._compared = staticmethod(attrgetter(*compared) if compared else lambda _: ())
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)
    return cls


def with_init(cls: C, guarded: bool = False) -> C:
    """The class as a dataclass with a generated `__init__` only.  guarded: assigning to a field raises FrozenInstanceError."""
    cls.__doc__ = cls.__doc__ or cls.__name__  # otherwise dataclass generates a docstring from the signature
    out: Any = dataclass(init=False, eq=False, repr=False)(cls)
    if guarded and "span" in out.__dataclass_fields__:  # after the fields that a derived class adds
        out.__dataclass_fields__["span"] = out.__dataclass_fields__.pop("span")
    if "__init__" not in cls.__dict__:
        out.__init__ = _init_of(out, guarded)
    if guarded:
        out.__setattr__, out.__delattr__ = _reject_assignment, _reject_deletion
    return out


class _Left:
    """Default of an argument whose value is made by a factory."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __repr__(self) -> str:
        return "<factory>"


def _init_of(cls: Any, guarded: bool) -> Any:
    """The `__init__` of a class.  Classes whose fields have the same kinds share one code object, with the names replaced."""
    all_fields, kinds, defaults = fields(cls), "", []
    for f in all_fields:
        if not f.init or f.kw_only:
            raise TypeError(f"field {f.name} of {cls.__qualname__}: records have fields that are given in order")
        if f.default is not MISSING or f.default_factory is not MISSING:
            defaults.append(f.default if f.default is not MISSING else _Left(cast(Any, f.default_factory)))
        elif defaults:
            raise TypeError(f"non-default argument {f.name!r} follows default argument")
        kinds += "v" if f.default_factory is MISSING else "f"
    code = _code(kinds, hasattr(cls, "__post_init__"), guarded)
    real = {f"field{k}": f.name for k, f in enumerate(all_fields)}
    named = code.replace(co_varnames=tuple(real.get(n, n) for n in code.co_varnames),
                         co_names=tuple(real.get(n, n) for n in code.co_names),
                         co_consts=tuple(real.get(c, c) if isinstance(c, str) else c for c in code.co_consts))
    out = FunctionType(named, _GLOBALS, "__init__", tuple(defaults))
    out.__qualname__, out.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    out.__annotations__ = {**{f.name: f.type for f in all_fields}, "return": None}
    return out


_GLOBALS: dict[str, Any] = {"__name__": __name__, "Left_": _Left, "store_": object.__setattr__}


@cache
def _code(kinds: str, ends: bool, guarded: bool) -> CodeType:
    """The code of an `__init__` with fields named field0, field1, ...

    kinds: for each field "v" (a value) or "f" (a value made by a factory).  ends: calls `__post_init__`.
    """
    lines = []
    for k, kind in enumerate(kinds):
        value = f"field{k}" if kind == "v" else f"field{k}.make() if field{k}.__class__ is Left_ else field{k}"
        lines.append(f"store_(self, 'field{k}', {value})" if guarded else f"self.field{k} = {value}")
    lines += ["self.__post_init__()"] * ends or ["pass"] * (not lines)
    names = ", ".join(["self", *(f"field{k}" for k in range(len(kinds)))])
    made: dict[str, Any] = {}
    exec(f"def __init__({names}):\n  " + "\n  ".join(lines), made)
    code: CodeType = made["__init__"].__code__
    return code


def _reject_assignment(self: Any, name: str, value: Any) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _reject_deletion(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _equal(self: Any, other: Any) -> Any:
    return self._compared(self) == self._compared(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _repr(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in self.__dataclass_fields__.values() if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"
