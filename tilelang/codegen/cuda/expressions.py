"""Text of expressions: one function for each class of node, registered by the printer that provides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.errors import InternalError
from tilelang.ir import Call, Const, Expr, StringConst, Var

from .page import Page
from .text import ATOM, Text, quote
from .types import HALVES, literal, type_name
from .value_facts import ValueFacts


class Expressions:
    """Text of any expression. forms: class of node -> its text and precedence; other printers add theirs.

    fast_math: approximate float32 functions and divisions (`tl.enable_fast_math`).
    """

    def __init__(self, page: Page, facts: ValueFacts, fast_math: bool = False) -> None:
        self.page, self.facts, self.fast_math = page, facts, fast_math
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
