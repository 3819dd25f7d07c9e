"""Constructors of attribute values that other packages define (layouts, policies), by the name printed after `T.`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LITERALS: dict[str, Callable[..., Any]] = {}


def register_literal(name: str, build: Callable[..., Any]) -> None:
    """Register the constructor for `T.name(...)`, the text that `__tilelang_text__` of a class prints."""
    LITERALS[name] = build
