"""Settings of the library: whether a call is tuned, and whether kernels take any sizes.

For calls that are not tuned, nothing of the tuner is loaded.
"""

from __future__ import annotations

from typing import Any

from tilelang.env import env, is_truthy
from tilelang.target import Target


def wanted(tune: bool | None, like: Any, target: Target, backend: str | None) -> bool | None:
    """Whether a call is tuned; None where it would be but is being captured in a CUDA graph.

    tune: the caller's argument; None reads TILELANG_LIBRARY_TUNING. like: a tensor of the call.
    """
    if not (is_truthy(env.TILELANG_LIBRARY_TUNING) if tune is None else tune):
        return False
    from . import tuning  # 291 ms

    return tuning.tuner.can(like, target, backend)


def dynamic_shapes() -> bool:
    """Whether kernels take any sizes where they can. Otherwise each shape has its own kernel."""
    return is_truthy(env.TILELANG_LIBRARY_DYNAMIC_SHAPES)
