"""Decorators for deprecated names."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any


def deprecated(name: str, new_name: str, version: str | None = None) -> Callable[[Any], Any]:
    """Decorator: calling the function warns that `name` is replaced by `new_name` (and goes away in `version`)."""
    text = f"{name} is deprecated" + (f" and will be removed in {version}" if version else "") + f", use {new_name}"

    def wrap(fn: Any) -> Any:
        @functools.wraps(fn)
        def warned(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return fn(*args, **kwargs)

        return warned

    return wrap
