"""Values that a kernel function reads besides run-time tensors; they are part of the key of a compiled kernel."""

from __future__ import annotations

from typing import Any

from .following import Guards, Known, Unfollowed, Walk
from .keys import Same

_MOST = 256  # states and arguments that are kept


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
            if len(self.arguments) >= _MOST:
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
            if len(self.tokens) >= _MOST:
                self.tokens.clear()
            walk.guards.token = self.tokens.setdefault(key, Token(key))
        except (Unfollowed, RecursionError):
            self.failed += 1
            self.waits = min(2 ** self.failed, 1000)
            return None
        return walk.guards
