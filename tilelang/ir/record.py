"""Frozen records that are cheap to define: a compilation imports dozens of them before it can begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # of Python 3.11; it only speaks to type checkers
    def dataclass_transform(**_: Any) -> Any:
        return lambda decorator: decorator

C = TypeVar("C", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: C) -> C:
    """Class decorator: a dataclass whose instances never change, equal by value and hashable.

    Of what `dataclass(frozen=True)` writes and compiles for each class only `__init__` is made, in a third of the time; all
    records share the rest.  That nobody assigns to a field is checked by mypy alone.
    """
    out: Any = dataclass(eq=False, repr=False)(cls)
    compared = [f.name for f in out.__dataclass_fields__.values() if f.compare]
    out._compared = staticmethod(attrgetter(*compared) if compared else lambda _: ())
    for name, method in (("__eq__", _equal), ("__hash__", _hash), ("__repr__", _repr)):
        if name not in cls.__dict__:
            setattr(out, name, method)
    return out


def _equal(self: Any, other: Any) -> Any:
    return self._compared(self) == self._compared(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _repr(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in self.__dataclass_fields__.values() if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


__all__ = ["record"]
