"""The text of one kernel while it is printed.

Text of expressions: one function for each class of node, registered by the printer that provides it.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tilelang.errors import InternalError
from tilelang.ir import Call, Const, Expr, If, Select, Span, StringConst, Var

from .text import ATOM, Namer, Text, quote
from .types import HALVES, RESERVED, literal, type_name
from .value_facts import ValueFacts


class Expressions:
    """Text of any expression. forms: class of node -> its text and precedence; other printers add theirs.

    fast_math: approximate float32 functions and divisions (`tl.enable_fast_math`).  condition: what is printed for the text of
    the condition of a branch or selection.
    """

    def __init__(self, page: Page, facts: ValueFacts, fast_math: bool = False) -> None:
        self.page, self.facts, self.fast_math = page, facts, fast_math
        self.condition: Callable[[If | Select, str], str] = lambda e, text: text
        self.forms: dict[type[Expr], Callable[[Any], Text]] = {
            Var: lambda e: (page.name(e, e.name), ATOM), StringConst: lambda e: (quote(e.value), ATOM), Const: self._literal}

    def expr(self, e: Expr) -> Text:
        """The text and precedence of an expression. A value of a 16-bit float type needs the type's own header."""
        if e.dtype.base in HALVES:
            self.page.worked_with.add(e.dtype.base)
        elif isinstance(e, Call) and e.op == "call_extern":
            self.page.worked_with.update(HALVES)  # the types of the user's function are unknown
        form = self.forms.get(type(e))
        if form is None:
            raise InternalError(f"a {type(e).__name__} reached the code generator: the program is not in phase DEVICE")
        return form(e)

    def top(self, e: Expr) -> str:
        """The text of an expression where no parentheses are ever needed."""
        return self.expr(e)[0]

    def at(self, e: Expr, level: int) -> str:
        """The text of an operand of an operator with this precedence."""
        text, own = self.expr(e)
        return text if own >= level else f"({text})"

    def _literal(self, e: Const) -> Text:
        type_name(e.dtype, e.span)  # raises for types without a form
        text, level = literal(e)
        if "TL_" in text:
            self.page.sections.add("infinity")
        return text, level


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
