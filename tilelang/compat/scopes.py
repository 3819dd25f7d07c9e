"""Questions about where a buffer lives."""

from __future__ import annotations

from typing import Any
from tilelang.ir import DYNAMIC, FRAGMENT, TMEM


def _scope(buffer: Any) -> str:
    buffer = getattr(buffer, "buffer", buffer)  # a region or load
    scope = buffer.scope
    return scope() if callable(scope) else scope


def is_global(buffer: Any) -> bool:
    """Whether a buffer is in global memory."""
    return _scope(buffer) == "global"


def is_shared(buffer: Any, allow_dynamic: bool = True) -> bool:
    """Whether a buffer is in shared memory.  allow_dynamic: dynamic shared memory counts too."""
    return _scope(buffer) == "shared" or (allow_dynamic and is_shared_dynamic(buffer))


def is_shared_dynamic(buffer: Any) -> bool:
    """Whether a buffer is in dynamic shared memory."""
    return _scope(buffer) == DYNAMIC


def is_tensor_memory(buffer: Any) -> bool:
    """Whether a buffer is in tensor memory."""
    return _scope(buffer) == TMEM


def is_fragment(buffer: Any) -> bool:
    """A fragment: registers of a whole block."""
    return _scope(buffer) == FRAGMENT


def is_local(buffer: Any) -> bool:
    """Per-thread memory."""
    return _scope(buffer) == "local"
