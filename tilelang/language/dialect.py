"""Dialects of targets that this version does not compile for: the common names, and the target's names as errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import common
from .unavailable import unavailable_names


def dialect(name: str, reason: str = "", own: str = "") -> dict[str, Any]:
    """The contents of a dialect's module: the common language, the target's names, which raise not-available with the reason,
    __all__ and __tilelang_dialect__."""
    shared = {n: getattr(common, n) for n in common.__all__}
    refused: dict[str, Callable[..., Any]] = unavailable_names(reason, own)
    return {**shared, **refused, "__all__": sorted({*shared, *refused}), "__tilelang_dialect__": name}


__all__ = ["dialect"]
