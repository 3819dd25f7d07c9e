"""Options of nodes: frozen records that check the names and types of their fields when they are made.

A record class belongs to one kind of node: the plan of a loop, a launch or a tile operation, the options of an intrinsic, the
facts of a buffer or a function.  User annotations with other names stay in the `attrs` of the statement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from .nodes import Node, _hashable, _same_values
from .phases import CPU, DEVICE, SYNCED, THREADS_BOUND, TILE
from .record import dataclass_transform, record

if TYPE_CHECKING:
    from typing_extensions import Self

_TYPES: dict[str, type] = {
    "int": int, "bool": bool, "str": str, "tuple": tuple, "None": type(None), "Expr": Node, "Buffer": Node}
_PHASES = {"TILE": (TILE, CPU), "LOWERED": (THREADS_BOUND, SYNCED, DEVICE), "DEVICE": (DEVICE,)}
_LITERAL = frozenset("int bool str tuple None ... |".split())


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: Any) -> Any:
    """Class decorator of a record of options: every field has a type of _TYPES, and a default unless it is required."""
    out = record(cls)
    named = fields(out)
    out.names = tuple(f.name for f in named)
    out.literal = frozenset(f.name for f in named if _is_literal(str(f.type)))
    out._kinds = tuple((f.name, tuple(_TYPES[k] for k in _heads(str(f.type)))) for f in named if f.type != "Any")
    out._defaults = {f.name: f.default for f in named}
    out._holders = tuple(f.name for f in named if f.name not in out.literal)
    out._get = staticmethod(attrgetter(*out.names) if len(out.names) > 1 else lambda o: (getattr(o, out.names[0]),))
    return out


def _heads(annotation: str) -> list[str]:
    """Names of the alternatives of a type annotation, without their type arguments."""
    out, depth = "", 0
    for c in annotation:
        depth += (c == "[") - (c == "]")
        out += "" if depth or c == "]" else c
    return [x.strip() for x in out.split("|")]


def _is_literal(annotation: str) -> bool:
    """Whether values of the type are Python ints, bools and strings, or tuples of them, and so contain no nodes."""
    for c in "[],":
        annotation = annotation.replace(c, " ")
    return all(word in _LITERAL for word in annotation.split())


class Options:
    """Base class of option records.  Equality is structural, as for nodes.  A wrong name or type raises TypeError.

    Keywords of the class statement: the name of a set of phases (_PHASES) = the options that exist only in these phases.
    """

    phases: ClassVar[dict[str, tuple[str, ...]]] = {}
    names: ClassVar[tuple[str, ...]] = ()
    literal: ClassVar[frozenset[str]] = frozenset()  # names of the options whose values are Python literals
    _kinds: ClassVar[tuple[tuple[str, tuple[type, ...]], ...]] = ()
    _holders: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}
    _get: ClassVar[Any]  # returns the values of a record in order
    _hash: ClassVar[int | None] = None

    def __init_subclass__(cls, **phases: tuple[str, ...]) -> None:
        cls.phases = {name: _PHASES[some] for some, names in phases.items() for name in names}

    def __post_init__(self) -> None:
        for name, kinds in self._kinds:
            v = getattr(self, name)
            if not isinstance(v, kinds) or v.__class__ is bool and bool not in kinds:
                raise TypeError(f"{name} of {type(self).__name__} is {' or '.join(k.__name__ for k in kinds)}, found {v!r}")

    def values(self) -> tuple[Any, ...]:
        """The values of all options, in the order of the record."""
        return tuple(self._get(self))

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, by name in the order of the record."""
        return {k: v for k, v in zip(self.names, self._get(self)) if not _same_values(v, self._defaults[k])}

    def having(self, **changes: Any) -> Self:
        """A copy with some options changed; None resets an option to its default.  Raises TypeError for unknown names."""
        for name in changes:
            if name not in self._defaults:
                raise TypeError(f"{name} is no option of {type(self).__name__}")
        if all(getattr(self, k) is v for k, v in changes.items()):
            return self
        values = {k: v for k, v in {**self.given(), **changes}.items() if v is not None}
        new = type(self)(**values)
        return self if new == self else new

    def held(self) -> tuple[Any, ...]:
        """The values that may hold nodes."""
        return tuple(getattr(self, k) for k in self._holders)

    def rebuilt(self, visit: Callable[[Any], Any]) -> Self:
        """The record with visit applied to the values that may hold nodes; the same object when nothing changed."""
        changed = {}
        for k in self._holders:
            v = getattr(self, k)
            if isinstance(v, (Node, tuple)):
                got = visit(v)
                if got is not v:
                    changed[k] = got
        return type(self)(**{**self.given(), **changed}) if changed else self

    def __eq__(self, other: object) -> bool:
        return self is other or type(self) is type(other) and _same_values(
            self.values(), other.values())  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        h = self._hash
        if h is None:
            values = self._get(self)
            try:
                h = hash(values)
            except TypeError:  # an array or a list among the values
                h = hash(tuple(map(_hashable, values)))
            self.__dict__["_hash"] = h
        return h

    def __getstate__(self) -> dict[str, Any]:
        """The options alone; the cached hash is not copied, because it differs in another process."""
        return dict(zip(self.names, self._get(self)))
