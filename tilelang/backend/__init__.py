"""Targets and execution backends as user code asks for them."""

from __future__ import annotations

from tilelang.jit.compiling import BACKENDS

from .target import determine_target


def list_backends() -> list[str]:
    """Names of execution backends, over all targets."""
    return sorted({b for names in BACKENDS.values() for b in names})


__all__ = ["determine_target", "list_backends"]
