"""Operations on nodes whose meaning stands in a module above the node's own.

`repr(node)` needs the printer, which knows every class of nodes; `A[i, 0:4]` means in the language what the language says.
The class that has the operation declares a Hook with its signature, and the module above provides the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Hook(Generic[F]):
    """A function that a module above provides, once.  call: that function, or the default until then."""

    __slots__ = ("what", "call", "_open")
    call: F

    def __init__(self, what: str, default: F | None = None) -> None:
        def missing(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"nothing that is imported provides {what}")

        self.what, self._open = what, True
        self.call = missing if default is None else default  # type: ignore[assignment]

    def provide(self, f: F) -> F:
        """Decorator: f is what the operation calls from now on.  Raises RuntimeError when there is one already."""
        if not self._open:
            raise RuntimeError(f"{self.what} is provided already, by {self.call.__module__}")
        self.call, self._open = f, False
        return f


__all__ = ["Hook"]
