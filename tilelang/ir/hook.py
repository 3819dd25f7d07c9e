"""Hooks: operations of a class that are implemented in a module which imports the module of the class.

For example, `repr(node)` needs the printer, which imports every node class, and `A[i, 0:4]` is defined by the language.
The class declares a Hook with the signature of the operation; the higher module provides the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Hook(Generic[F]):
    """A function that a higher module provides, once.  call: the provided function, or the default before that."""

    __slots__ = ("what", "call", "_open")
    call: F

    def __init__(self, what: str, default: F | None = None) -> None:
        def missing(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"nothing that is imported provides {what}")

        self.what, self._open = what, True
        self.call = missing if default is None else default  # type: ignore[assignment]

    def provide(self, f: F) -> F:
        """Decorator: sets the function that the hook calls.  Raises RuntimeError if a function was provided before."""
        if not self._open:
            raise RuntimeError(f"{self.what} is provided already, by {self.call.__module__}")
        self.call, self._open = f, False
        return f


LITERALS: dict[str, Callable[..., Any]] = {}


def register_literal(name: str, build: Callable[..., Any]) -> None:
    """Register the constructor for `T.name(...)`, the text that `__tilelang_text__` of a class prints."""
    LITERALS[name] = build
