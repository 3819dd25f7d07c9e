"""The text of one kernel while it is printed."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilelang.ir import Span

from .text import Namer
from .types import RESERVED


class Page:
    """The lines and names of a kernel's body, and what its header has to define.

    sections: prelude sections that are used without being named (operators). worked_with: 16-bit float types of which values
    are computed, not only moved.
    """

    def __init__(self, kernel_name: str, line_directives: bool) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.names = Namer((*RESERVED, kernel_name))
        self.sections: set[str] = set()
        self.worked_with: set[str] = set()
        self._line_directives = line_directives
        self._printed_place: tuple[str, int] | None = None

    def emit(self, text: str) -> None:
        """Add one line at the current depth."""
        self.lines.append("  " * self.depth + text)

    def name(self, key: Any, wanted: str) -> str:
        """The identifier of a variable or a storage, chosen at the first call from `wanted`."""
        return self.names(key, wanted)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Deeper lines. Names chosen in them are free again behind them."""
        self.depth += 1
        with self.names.scope():
            yield
        self.depth -= 1

    def comment(self, span: Span | None) -> None:
        """The user's line as a comment, once for consecutive statements from it."""
        if span is None or (span.file, span.line) == self._printed_place:
            return
        self._printed_place = (span.file, span.line)
        text = linecache.getline(span.file, span.line).strip().replace("\\", "/")
        where = f"{os.path.basename(span.file)}:{span.line}"
        self.emit(f"// {text}  ({where})" if text else f"// {where}")
        if self._line_directives and text:
            file = span.file.replace("\\", "/").replace('"', "'")
            self.lines.append(f'#line {span.line} "{file}"')
