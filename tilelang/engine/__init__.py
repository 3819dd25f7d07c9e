"""Lowering without running, parameters, and hooks on generated source."""

from __future__ import annotations

from . import callback, lower  # the module `lower` is callable: `tilelang.engine.lower(func)`
from .param import CompiledArtifact, KernelParam

__all__ = ["CompiledArtifact", "KernelParam", "callback", "lower"]
