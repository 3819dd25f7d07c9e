"""What the code of a Python function reads: variables, and the attributes and items that it takes from them."""

from __future__ import annotations
import __future__

import dis
import re
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

_STORES = ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_VARIABLES = (*_GLOBALS, "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_FAST", "LOAD_FAST_CHECK",
              "LOAD_FAST_BORROW", "LOAD_FAST_AND_CLEAR")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_NO_EFFECT = ("CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "RESUME", "NOP", "NOT_TAKEN", "COPY_FREE_VARS")

# A step of a path: the name of an attribute; (key,) for an item; ("set", name) where an attribute is assigned.  The last one
# may be ("=", variable) for what is assigned to a variable of the function, (variable, is global, path, n) for the n-th
# argument of the function there, WHOLE for every other use.  A path without one asks whether there is a value, not None.
Step = Any
WHOLE: Step = ()
Paths = dict[Any, list[tuple[Step, ...]]]


@dataclass
class Reads:
    """What a code object and the code nested in it read.

    names: globals (and builtins).  stored: names of enclosing scopes that the code assigns itself.  paths: variable -> what is
    read of it.  imports: (module, level) of the imports in it -> paths.  attributes: their names, of any value.
    annotated: dotted names in annotations that are still texts.
    """

    names: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    paths: Paths = field(default_factory=dict)
    imports: Paths = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    annotated: set[tuple[str, ...]] = field(default_factory=set)

    def add(self, code: CodeType) -> set[str]:
        """Include a code object; returns the enclosing names that it assigns."""
        steps = [i for i in dis.get_instructions(code) if i.opname not in _NO_EFFECT]
        own, stored, module, ends = {*code.co_cellvars}, set[str](), ("", 0), dict[int, tuple[Step, ...]]()
        for k, i in enumerate(steps):
            if i.opname in _STORES and i.argval not in own:
                stored.add(i.argval)
            elif i.opname == "IMPORT_NAME":
                level, names = (s.argval for s in steps[k - 2:k])
                module = i.argval if names else i.argval.partition(".")[0], level
                _add(self.imports, module, _path(steps, k + 1))
            elif i.opname == "IMPORT_FROM":
                _add(self.imports, module, _path(steps, k))
            elif i.opname in _VARIABLES or i.opname.startswith("LOAD_FAST"):
                ends.update(_arguments(steps, k))
                *first, last = i.argval if isinstance(i.argval, tuple) else (i.argval,)  # several from Python 3.13 on
                path = _path(steps, k + 1)
                _add(self.paths, last, path[:-1] + ends[k] if k in ends else path)
                for name in first:
                    _add(self.paths, name, (WHOLE,))
        self.names |= {i.argval for i in steps if i.opname in _GLOBALS and i.argval[0] != "@"}
        self.attributes |= {i.argval for i in steps if i.opname in _ATTRIBUTES}
        if "super" in code.co_names and code.co_argcount:  # it finds the object of the method by itself
            _add(self.paths, code.co_varnames[0], (WHOLE,))
        for c in code.co_consts:
            if isinstance(c, CodeType):
                stored |= self.add(c) - own
            elif code.co_flags & __future__.annotations.compiler_flag and isinstance(c, (str, tuple)):
                self.annotated |= {n for text in (c if isinstance(c, tuple) else (c,)) for n in _dotted(str(text))}
        return stored

    def texts(self, fn: FunctionType) -> set[tuple[str, ...]]:
        """Dotted names in annotations of a function, or in it, that are still texts."""
        return self.annotated.union(*[_dotted(a) for a in fn.__annotations__.values() if isinstance(a, str)])


def _add(paths: Paths, name: Any, path: tuple[Step, ...]) -> None:
    if path not in (found := paths.setdefault(name, [])):
        found.append(path)


def _path(steps: list[dis.Instruction], k: int) -> tuple[Step, ...]:
    """What is read of the value that the instruction before this one gave."""
    path: list[Step] = []
    while True:
        op, value, after = steps[k].opname, steps[k].argval, steps[min(k + 1, len(steps) - 1)].opname
        if op in _ATTRIBUTES:
            path.append(value)
        elif op in _CONSTANTS and _is_item(steps, k + 1) and isinstance(value, (str, int)):
            path.append((value,))
            k += 1
        elif op == "STORE_ATTR":
            return *path, ("set", value)
        elif op == "STORE_FAST":
            return *path, ("=", value)
        elif op.startswith("POP_JUMP") and op.endswith("NONE") or op == "LOAD_CONST" and value is None and after == "IS_OP":
            return tuple(path)
        elif op in ("COPY", "DUP_TOP") and after in _ATTRIBUTES:  # x.a += 1
            path.append(("set", steps[k + 1].argval))
        else:
            return *path, WHOLE
        k += 1


def _is_item(steps: list[dis.Instruction], k: int) -> bool:
    return steps[k].opname == "BINARY_SUBSCR" or steps[k].opname == "BINARY_OP" and steps[k].argrepr == "[]"


def _arguments(steps: list[dis.Instruction], k: int) -> dict[int, tuple[Step, ...]]:
    """For a call of what is loaded here, with constants and variables: the places of its arguments -> how their paths end."""
    starts, at = list[int](), _after(steps, k)
    while at and not steps[at].opname.startswith("CALL"):
        starts.append(at)
        at = _after(steps, at)
    if not at or steps[at].arg != len(starts) or steps[at].opname not in ("CALL", "CALL_FUNCTION", "CALL_METHOD"):
        return {}
    name, path = steps[k].argval, _path(steps, k + 1)[:-1]
    if name[0] == "@":  # of pytest, for the message of an assertion that fails
        return dict.fromkeys(starts, ())
    if name in ("getattr", "hasattr") and len(starts) > 1 and steps[starts[1]].opname == "LOAD_CONST":
        return {starts[0]: (steps[starts[1]].argval, *((WHOLE,) if name == "getattr" else ()))}
    return {start: ((name, steps[k].opname in _GLOBALS, path, n),) for n, start in enumerate(starts)}


def _after(steps: list[dis.Instruction], k: int) -> int:
    """The place after a constant, or a variable with its attributes and items; 0 for another expression."""
    if steps[k].opname not in (*_VARIABLES, *_CONSTANTS):
        return 0
    k += 1
    while steps[k].opname in _ATTRIBUTES or steps[k].opname in _CONSTANTS and _is_item(steps, k + 1):
        k += 1 if steps[k].opname in _ATTRIBUTES else 2
    return k


def _dotted(text: str) -> set[tuple[str, ...]]:
    return {tuple(name.split(".")) for name in re.findall(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*", text)}


@lru_cache(maxsize=4096)
def reads_of(code: CodeType) -> Reads:
    """What a function with this code reads."""
    out = Reads()
    out.stored = out.add(code)
    return out
