"""Pass configs that hold for a `with` block, as user code writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

_local = threading.local()


class PassContext:
    """with PassContext(config={"tl.enable_fast_math": True}): compilations inside use these pass configs.

    What a program or a call sets itself wins over them.  opt_level and other arguments are accepted and change
    nothing.  (What passes are given is transform.pass_.PassContext, another class.)
    """

    def __init__(self, opt_level: int = 2, config: Mapping[Any, Any] | None = None, **_: Any) -> None:
        self.opt_level, self.config = opt_level, dict(config or {})

    def __enter__(self) -> PassContext:
        _stack().append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _stack().pop()


def _stack() -> list[PassContext]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def get_pass_context() -> PassContext:
    """The innermost open block of this thread, or one without configs."""
    return _stack()[-1] if _stack() else PassContext()


def current_config() -> dict[Any, Any]:
    """The merged configs of the open blocks, inner ones last."""
    out: dict[Any, Any] = {}
    for context in getattr(_local, "stack", ()):
        out.update(context.config)
    return out


def simplify_prim_func(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a PrimFunc factory.  Programs are simplified when they are compiled, so the factory is unchanged."""
    return func
