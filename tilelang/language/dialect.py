"""The dialects of targets that this version does not compile for: the common names, and their own as unavailable_names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import common
from .unavailable import unavailable_names


def dialect(name: str, reason: str = "", own: str = "") -> dict[str, Any]:
    """Contents of a dialect's module: the common language, its own names refused with the reason, __all__ and
    __tilelang_dialect__."""
    shared = {n: getattr(common, n) for n in common.__all__}
    refused: dict[str, Callable[..., Any]] = unavailable_names(reason, own)
    return {**shared, **refused, "__all__": sorted({*shared, *refused}), "__tilelang_dialect__": name}


__all__ = ["dialect"]
