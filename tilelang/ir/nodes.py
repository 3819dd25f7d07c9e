"""The base class of IR nodes: immutable values with structural equality.  See ir/__init__.py for the grammar."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np

from .hook import Hook
from .record import dataclass_transform, with_init
from .span import Span

# Provided by printer.py, which knows all classes of nodes.
node_text: Hook[Callable[[Any], str]] = Hook("the text of a node")

_PLAIN = {"str", "int", "bool", "dtype", "tuple[int, ...]", "tuple[int, int, int]", "CallOptions", "LoopPlan", "ParallelPlan",
          "BufferFacts", "FuncFacts"}
_FIELDS: dict[type, tuple[str, ...]] = {}
_NODE_FIELDS: dict[type, tuple[str, ...]] = {}
NAME_BITS = 60  # the low bits of these bit sets represent the variables and buffers that a node names (children.py)
_KINDS: dict[type, int] = {}  # class -> bit set of the node classes that are this class or derived from it


@dataclass_transform(frozen_default=True, eq_default=False)
def node(cls: Any) -> Any:
    """Class decorator of IR nodes: a frozen dataclass whose equality and hash come from Node (structural, without span)."""
    cls = with_init(cls, guarded=True)
    bit = 1 << NAME_BITS + len(_FIELDS)
    named = [f for f in fields(cls) if f.name != "span"]
    _FIELDS[cls] = tuple(f.name for f in named)
    _NODE_FIELDS[cls] = tuple(f.name for f in named if f.type not in _PLAIN)
    cls._values = staticmethod(_getter(_FIELDS[cls]))
    for base in cls.__mro__:
        _KINDS[base] = _KINDS.get(base, 0) | bit
    cls._kind = bit
    if cls._below is not None and not cls._is_name:
        cls._held = bit
    return cls


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the values of these fields of an object as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda n: tuple(getattr(n, f) for f in names)


def fields_of(cls: type) -> tuple[str, ...]:
    """Names of a node class's fields, in order, without `span`."""
    return _FIELDS[cls]


def node_fields(cls: type) -> tuple[str, ...]:
    """Names of the fields of a node class that may hold nodes (by their annotation), in order."""
    return _NODE_FIELDS[cls]


def kinds_of(classes: tuple[type, ...]) -> int:
    """The bits of all node classes that are one of these or derived from one."""
    kinds = 0
    for c in classes:
        kinds |= _KINDS.get(c, 0)
    return kinds


class Node:
    """Base of all IR nodes.  `==` compares by structure, without spans; Var and Buffer compare by identity.

    Results of analyses are cached on the node, because nodes are immutable.  Read them as attributes, not through `__dict__`:
    once `__dict__` of a node has been accessed, each later access to one of its fields takes more than twice as long.
    """

    span: Span | None
    _values: ClassVar[Callable[[Any], tuple[Any, ...]]]
    _kind: ClassVar[int] = 0  # the bit of this class
    _hash: ClassVar[int | None] = None
    _below: ClassVar[tuple[Node, ...] | None] = None  # these three: see children.py
    _held: ClassVar[int] = 0
    _extent: ClassVar[tuple[int, int] | None] = None
    _is_name: ClassVar[bool] = False  # a Var or a Buffer
    _free: ClassVar[Any] = None  # see visitor.py
    _text: ClassVar[str] = ""  # of a program that was read from it
    _options: ClassVar[str] = ""  # the field that holds its record of options (options.py)
    _called: ClassVar[frozenset[int] | None] = None  # see expr.py
    _effects: ClassVar[Any] = None  # see transform/effects.py

    def _key(self) -> tuple[Any, ...]:
        return type(self)._values(self)

    def same(self, other: object) -> bool:
        """Structural equality (what `==` means for statements and, under bool(), for expressions)."""
        return self is other or (type(self) is type(other) and hash(self) == hash(other) and
                                 _same_values(self._key(), other._key()))  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> Any:
        return self.same(other)

    def __ne__(self, other: object) -> Any:
        return not self.same(other)

    def __hash__(self) -> int:
        h = self._hash
        if h is None:
            key = self._key()
            try:
                h = hash((type(self).__name__, key))
            except TypeError:  # an array or a list among the attributes
                h = hash((type(self).__name__, *map(_hashable, key)))
            object.__setattr__(self, "_hash", h)
        return h

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone.  Cached values, such as the hash, are dropped: a copy or another process may need other values."""
        return {f: getattr(self, f) for f in (*_FIELDS[type(self)], "span")}

    def __repr__(self) -> str:
        return node_text.call(self)


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
