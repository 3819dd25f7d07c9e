"""What every IR node is: an immutable value with structural equality.  See ir/__init__.py for the grammar."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from .record import with_init
from .span import Span

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Only a type checker needs it: `node` makes dataclasses."""
        return lambda f: f


_FIELDS: dict[type, tuple[str, ...]] = {}


@dataclass_transform(frozen_default=True, eq_default=False)
def node(cls: Any) -> Any:
    """Class decorator of IR nodes: frozen dataclass, structural equality and hash (span excluded) from the base."""
    cls = with_init(cls, guarded=True)
    _FIELDS[cls] = tuple(f.name for f in fields(cls) if f.name != "span")
    return cls


def fields_of(cls: type) -> tuple[str, ...]:
    """Names of a node class's fields, in order, without `span`."""
    return _FIELDS[cls]


class Node:
    """Base of all IR nodes.  `==` compares by structure, without spans; Var and Buffer compare by identity."""

    span: Span | None

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f) for f in _FIELDS[type(self)])

    def same(self, other: object) -> bool:
        """Structural equality (what `==` means for statements and, under bool(), for expressions)."""
        return self is other or (type(self) is type(other) and hash(self) == hash(other) and
                                 _same_values(self._key(), other._key()))  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> Any:
        return self.same(other)

    def __ne__(self, other: object) -> Any:
        return not self.same(other)

    def __hash__(self) -> int:
        h = self.__dict__.get("_hash")
        if h is None:
            key = self._key()
            try:
                h = hash((type(self).__name__, *key))
            except TypeError:  # an array or a list among the attributes
                h = hash((type(self).__name__, *map(_hashable, key)))
            object.__setattr__(self, "_hash", h)
        return h

    def __repr__(self) -> str:
        from .printer import to_text  # repr is text, and the printer knows all node classes, this one included

        return to_text(self)


def _hashable(v: Any) -> Any:
    if isinstance(v, np.ndarray):
        return v.tobytes()
    try:
        hash(v)
    except TypeError:
        return id(v)
    return v


def _same_values(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Node):
        return a.same(b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_same_values, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b) or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)
