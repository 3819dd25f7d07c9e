"""Checks of options that are known while tracing: switches, small integers, conditions, texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import Buffer, Const, Expr

from .builder import Builder
from .conditions import Conditions
from .regions import BufferSlice
from .state import describe, error


def flag(value: Any, name: str, hint: str = "") -> bool:
    """An option that is on or off: True, False, 1 or 0, also as constants of the language.

    Anything else, including strings and None, is rejected, because its truth value may mislead: `clear="no"` is true in Python.
    Raises option-type.
    """
    if isinstance(value, Const):
        value = value.value
    if isinstance(value, (bool, np.bool_)) or isinstance(value, (int, np.integer)) and value in (0, 1):
        return bool(value)
    raise error("option-type", f"{name} is «True or False», found {describe(value)}", hint or "write True or False")


def whole_number(value: Any, name: str, least: int, most: int) -> int:
    """An option that is an integer from least to most.  Raises option-type."""
    if isinstance(value, Const) and value.dtype.is_int:
        value = value.value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and least <= value <= most:
        return int(value)
    raise error("option-type", f"{name} is «an integer from {least} to {most}», found {describe(value)}",
                f"write a number from {least} to {most}")


def condition(b: Builder, value: Any, what: str) -> Any:
    """The condition of T.assume and T.device_assert: a Python bool, or a bool expression.

    Other Python objects, such as a message in the place of the condition, are rejected: they would be always or never true.
    Raises condition.
    """
    if isinstance(value, (bool, int, np.bool_, np.integer)) or isinstance(value, Buffer) or has_value(value):
        return Conditions(b).truth(value)
    raise error("condition", f"{what} needs a condition, found {describe(value)}",
                "write a comparison; the message is the second argument" if isinstance(value, str) else "write a comparison",
                expected="a bool or a bool expression")


def has_value(value: Any) -> bool:
    """Whether x is an expression, or a name or region that stands for one."""
    return isinstance(value, (Expr, BufferSlice)) or hasattr(value, "__tilelang_expr__")


def words(value: Any, name: str) -> str:
    """An option that is a text.  Raises option-type."""
    if isinstance(value, str):
        return str(value)
    raise error("option-type", f"{name} is «a string», found {describe(value)}", "write it in quotes")
