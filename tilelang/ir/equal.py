"""Compares programs up to renaming of the variables and buffers that they define."""

from __future__ import annotations

import enum
from typing import Any

from .buffer import Buffer
from .expr import Var
from .nodes import Node, fields_of
from .options import Options


def alpha_equal(a: Any, b: Any) -> bool:
    """Whether two nodes are the same program: their Vars and Buffers correspond one to one, everything else is equal."""
    return _Match().same(a, b)


class _Match:
    def __init__(self) -> None:
        self.forward: dict[int, Any] = {}
        self.back: dict[int, Any] = {}

    def pair(self, a: Any, b: Any) -> bool | None:
        """Pair a with b: True or False if one of them was paired before, None if the pair is new."""
        if id(a) in self.forward or id(b) in self.back:
            return self.forward.get(id(a)) is b and self.back.get(id(b)) is a
        self.forward[id(a)], self.back[id(b)] = b, a
        return None

    def same(self, a: Any, b: Any) -> bool:
        if isinstance(a, enum.Enum):
            a = a.value
        if isinstance(b, enum.Enum):
            b = b.value
        if isinstance(a, tuple):
            return isinstance(b, tuple) and len(a) == len(b) and all(map(self.same, a, b))
        if isinstance(a, Var):
            if not isinstance(b, Var) or a.dtype != b.dtype:
                return False
            return self.pair(a, b) is not False
        if isinstance(a, Buffer):
            if not isinstance(b, Buffer):
                return False
            decided = self.pair(a, b)
            if decided is not None:
                return decided
            return all(self.same(getattr(a, f), getattr(b, f)) for f in fields_of(Buffer) if f != "name")
        if isinstance(a, Node):
            return type(a) is type(b) and all(
                self.same(getattr(a, f), getattr(b, f)) for f in fields_of(type(a)))
        if isinstance(a, Options):
            return type(a) is type(b) and all(map(self.same, a.values(), b.values()))
        if isinstance(a, float) and isinstance(b, float):
            return repr(a) == repr(b)
        return type(a) is type(b) and bool(a == b)
