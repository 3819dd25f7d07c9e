"""The sections of prelude files and those of them that a text needs.

Each section starts with a line "//@ name" with a name that it defines; its words are the names of the sections that it uses.
A line "//@ name=word;word name=word;word" starts a section for each of the names: $0 in its text is the name, $1, $2 its words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache

_HERE = os.path.dirname(__file__)
FLOATS, VALUES, THREADS = (os.path.join(_HERE, f"prelude_{name}.cuh") for name in ("floats", "values", "threads"))
_WORD = re.compile(r"\w+")
_PLACE = re.compile(r"\$(\d)")  # a word of the section's head
_TO_SPACES = {n: " " for n in range(128) if not (chr(n).isalnum() or chr(n) == "_")}


def words_of(text: str) -> set[str]:
    """The words (names, numbers) of a text."""
    if text.isascii():  # takes a third of the time
        return set(text.translate(_TO_SPACES).split())
    return set(_WORD.findall(text))


@cache
def sections_of(files: tuple[str, ...]) -> dict[str, str]:
    """The text of each section of these files by name, in their order.  A later section of the same name takes the place of
    an earlier one."""
    out: dict[str, str] = {}
    for file in files:
        with open(file, encoding="utf-8") as f:
            parts = re.split(r"^//@ (.+)\n", f.read(), flags=re.M)[1:]
        for heads, text in zip(parts[::2], parts[1::2]):
            for head in heads.split():
                row = re.split("[=;]", head)
                out[row[0]] = _PLACE.sub(lambda m, row=row: row[int(m[1])], text.rstrip() + "\n")
    return out


@cache
def _used_by(files: tuple[str, ...], name: str) -> list[str]:
    """The other sections that a section uses."""
    table = sections_of(files)
    words = words_of(table[name])
    return [w for w in table if w in words and w != name]


def needed(files: tuple[str, ...], words: Iterable[str], ordered: bool = True) -> list[str]:
    """The sections that words of a text name, and those that they use.

    ordered: in the files a section stands behind those that it uses; otherwise this puts it there.
    """
    table, seen = sections_of(files), dict[str, None]()
    out: list[str] = []

    def add(name: str) -> None:
        if name not in seen:
            seen[name] = None
            for other in _used_by(files, name):
                add(other)
            out.append(name)

    names = set(words)
    for name in table:
        if name in names:
            add(name)
    return [text for name, text in table.items() if name in seen] if ordered else [table[name] for name in out]
