"""The names that the code of a Python function reads: globals, attributes, modules that it imports."""

from __future__ import annotations
import __future__

import dis
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

_STORES = ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF")
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
_NO_EFFECT = ("CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "RESUME", "NOP", "NOT_TAKEN")

# Names of functions and attributes by which code reads attributes that it does not name.
_BY_ANY_NAME = frozenset({"vars", "dir", "__dict__", "asdict", "astuple", "fields", "getmembers", "attrgetter",
                          "methodcaller", "__getattribute__", "__getstate__", "model_dump"})


@dataclass
class Reads:
    """The names that a code object and the code nested in it read.

    names: globals (and builtins) read.  stored: names of enclosing scopes that the code assigns itself.
    attributes: names of attributes, also those given as strings (getattr(x, "name")).
    annotated: identifiers in annotations that are still texts.
    followed: name of a variable or attribute -> the attributes read directly from it.  whole: names whose value is also used
    in another way.  imports: (module, level) imported in the code.
    any_name: it may read attributes that it does not name.  any_name_of: variables whose attributes it reads by computed names.
    """

    names: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    annotated: set[str] = field(default_factory=set)
    followed: dict[str, set[str]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    imports: set[tuple[str, int]] = field(default_factory=set)
    any_name: bool = False
    any_name_of: set[str] = field(default_factory=set)

    def add(self, code: CodeType) -> set[str]:
        """Include a code object; returns the enclosing names that it assigns."""
        steps = [i for i in dis.get_instructions(code) if i.opname not in _NO_EFFECT]
        own, stored = {*code.co_cellvars}, set[str]()
        for k, i in enumerate(steps):
            op, name = i.opname, i.argval
            if op in _STORES and name not in own:
                stored.add(name)
            elif op in _LOADS or op in _ATTRIBUTES:
                if op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                    self.names.add(name)
                elif op in _ATTRIBUTES:
                    self.attributes.add(name)
                self._use(name, steps[k + 1] if k + 1 < len(steps) else None)
                if name == "getattr":
                    self._getattr(steps, k)
                elif name in _BY_ANY_NAME:
                    self.any_name = True
            elif op == "IMPORT_NAME":
                level = steps[k - 2].argval if k >= 2 else 0
                self.imports.add((name, level if isinstance(level, int) else 0))
        postponed = bool(code.co_flags & __future__.annotations.compiler_flag)
        for c in code.co_consts:
            if isinstance(c, CodeType):
                stored |= self.add(c) - own
        self._constants(code.co_consts, postponed)
        return stored

    def _use(self, name: str, after: dis.Instruction | None) -> None:
        if after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            self.followed.setdefault(name, set()).add(after.argval)
        else:
            self.whole.add(name)

    def _constants(self, constants: Any, postponed: bool) -> None:
        """Strings may name attributes (getattr, match, operator.attrgetter), and annotations that are not evaluated yet
        name globals."""
        for text in _strings(constants):
            found = set(identifiers(text)) if len(text) < 1000 else set[str]()
            if found and all(part.isidentifier() for part in text.split(".")):
                self.attributes |= found
                self.whole |= found
            if postponed:
                self.annotated |= found
                self.attributes |= found
                self.whole |= found

    def _getattr(self, steps: list[dis.Instruction], at: int) -> None:
        """Include getattr(x, name): a constant name is among the strings, any other may be any attribute of x."""
        call = _second_argument(steps, at)
        if call is None:
            self.any_name = True
            return
        constant, of = call
        if not constant:
            if of is None:
                self.any_name = True
            else:
                self.any_name_of.add(of)


def _strings(constants: Any) -> Iterator[str]:
    for c in constants:
        if isinstance(c, str):
            yield c
        elif isinstance(c, (tuple, frozenset)):
            yield from _strings(c)


def identifiers(text: str) -> list[str]:
    """The identifiers in a text."""
    return re.findall(r"[^\W\d]\w*", text)


def _second_argument(steps: list[dis.Instruction], at: int) -> tuple[bool, str | None] | None:
    """For the call of the function loaded at a place: (whether its second argument is a constant, the variable that is its
    first argument if it is one); None where the code is not a plain call of two or three arguments."""
    depth, starts = 0, {0: at + 1}
    for k in range(at + 1, len(steps)):
        i = steps[k]
        if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs or i.opname == "KW_NAMES":
            return None
        before, depth = depth, depth + (-1 - (i.arg or 0) if i.opname == "CALL" else  # in Python 3.11, PRECALL has a part of it
                                        dis.stack_effect(i.opcode, i.arg, jump=False))
        if depth < 1 and i.opname.startswith("CALL") and i.arg in (2, 3) and before >= i.arg:
            first, second = starts[0], starts.get(1, k)
            # Each argument starts where the one before it was complete.  An operator in the second argument ends lower.
            constant = steps[second].opname == "LOAD_CONST" and starts.get(2, second + 1) == second + 1 and (
                i.arg == 3 or k == second + 1)
            of = steps[first].argval if second == first + 1 and steps[first].opname in _LOADS else None
            return constant, of
        if depth < 1:
            return None
        starts[depth] = k + 1
    return None


@lru_cache(maxsize=4096)
def reads_of(code: CodeType) -> Reads:
    """The names that a function with this code reads."""
    out = Reads()
    out.stored = out.add(code)
    return out


__all__ = ["Reads", "identifiers", "reads_of"]
