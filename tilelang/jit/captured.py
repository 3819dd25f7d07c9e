"""Values that a kernel function reads besides run-time tensors; they are part of the key of a compiled kernel."""

from __future__ import annotations

from typing import Any

from .following import Guards, Names, Walk

_MOST_ARGUMENTS = 256


class Token:
    """Everything that one walk found, compared by identity: equal walks of one function share a token.

    again: the walk met something that cannot be followed; only a new trace tells whether the program is the same.  Its text
    is the same in other processes, as far as the objects have such a text."""

    __slots__ = ("again", "values")

    def __init__(self, values: Any, again: bool) -> None:
        self.values, self.again = values, again

    def __repr__(self) -> str:
        return repr(self.values)


class Captured:
    """What tracing a function may read: globals and closures, defaults, code and attributes, in the function, in functions
    nested in it, and in the user's functions, macros and methods that it reaches; also through objects given as arguments.

    Counted are numbers, strings and dtypes; the contents of containers, arrays and tensors; the attributes that the code
    names of the user's objects, classes and modules, at any depth; environment variables and context variables.
    Not counted: names that the functions assign themselves (counters), clocks and random numbers, and the inside of the
    libraries that kernels are written with.  A function that reads what cannot be followed (files, globals(), attributes of a
    module by computed names, tensors on a device) is traced at every call.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.names = Names()
        self.tokens: dict[Any, Token] = {}
        self.missed = 0  # tokens given so far that tell nothing (Token.again)
        self.found: Guards | None = None
        self.arguments: dict[int, tuple[Any, Guards]] = {}

    def token(self) -> Token:
        """Stands for the present values of everything that the function reads.  While found.hold(), it is found.token."""
        found = self._walk(self.fn)
        self.found = None if found.token.again else found
        return found.token

    def argument(self, value: Any) -> Token:
        """Stands for the present state of a function or object that is an argument."""
        held = self.arguments.get(id(value))
        if held is not None and held[0] is value and held[1].hold():
            return held[1].token
        found = self._walk(value)
        if len(self.arguments) >= _MOST_ARGUMENTS:
            self.arguments.clear()
        if not found.token.again:
            self.arguments[id(value)] = value, found
        return found.token

    def _walk(self, value: Any) -> Guards:
        """Walk until no function is met whose names are new.  Other walks ended with fewer names: they are forgotten."""
        names = self.names
        while True:
            before = len(names.codes), names.any_name
            walk = Walk(names)
            key = walk.key(value)
            if before == (len(names.codes), names.any_name):
                break
            self.found = None
            self.arguments.clear()
        if walk.again:
            self.missed += 1
        walk.guards.close(self.tokens.setdefault((key, walk.again, *before), Token(key, walk.again)))
        return walk.guards


__all__ = ["Captured", "Token"]
