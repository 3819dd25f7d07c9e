"""The builder of the function being traced in this thread, if any."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tilelang.errors import JITNoBuilderError

if TYPE_CHECKING:
    from .builder import Builder


class _State(threading.local):
    builder: Builder | None = None


_state = _State()


def current() -> Builder | None:
    """The active builder, or None outside a kernel function."""
    return _state.builder


def set_current(builder: Builder | None) -> Builder | None:
    """Make a builder the active one; returns the one it replaces."""
    old, _state.builder = _state.builder, builder
    return old


def need_builder(what: str) -> Builder:
    """The active builder.  Raises JITNoBuilderError naming `what` outside a kernel function."""
    b = _state.builder
    if b is None:
        raise JITNoBuilderError(f"{what} can only be used inside a function under construction (T.prim_func, T.macro or "
                                "tilelang.jit)")
    return b
