"""C text of expressions: precedence, names, string literals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# C precedence; a higher number binds tighter.
ATOM, POSTFIX, PREFIX, MUL, ADD, SHIFT, REL, EQ, BAND, BXOR, BOR, LAND, LOR, COND = range(16, 2, -1)

Text = tuple[str, int]  # source text and its precedence


class Namer:
    """Chooses distinct identifiers that a C compiler accepts, close to the user's names and stable between runs."""

    def __init__(self, reserved: Iterable[str]) -> None:
        self.used = set(reserved)
        self.names: dict[Any, str] = {}
        self.scopes: list[list[Any]] = [[]]

    def __call__(self, key: Any, wanted: str) -> str:
        """The name of key; chosen at the first call from `wanted`."""
        got = self.names.get(key)
        if got is None:
            base = re.sub(r"[^A-Za-z0-9_]", "_", wanted)  # Python allows letters in names that C compilers reject
            if not base.strip("_") or base[0].isdigit() or base.startswith("__"):  # "__": compilers keep these names
                base = f"v{base}"
            got, n = base, 1
            while got in self.used:
                got, n = f"{base}_{n}", n + 1
            self.used.add(got)
            self.names[key] = got
            self.scopes[-1].append(key)
        return got

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A scope whose names are free again behind it."""
        self.scopes.append([])
        yield
        for key in self.scopes.pop():
            self.used.discard(self.names.pop(key))


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


def quote(text: str) -> str:
    """A C string literal."""
    def escaped(ch: str) -> str:
        return _ESCAPES.get(ch) or (ch if " " <= ch <= "~" else "".join(f"\\{b:03o}" for b in ch.encode()))

    return f'"{"".join(map(escaped, text))}"'
