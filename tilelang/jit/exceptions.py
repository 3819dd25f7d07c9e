"""Exceptions of the jit layer that user code imports."""

from __future__ import annotations

from tilelang.errors import JITNoBuilderError


class EagerJITBuildError(RuntimeError):
    """An eager function could not be traced into a program."""


__all__ = ["EagerJITBuildError", "JITNoBuilderError"]
