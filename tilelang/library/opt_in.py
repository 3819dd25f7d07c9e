"""Whether a call asks to be tuned.  For calls that do not, nothing of the tuner is loaded."""

from __future__ import annotations

from typing import Any

from tilelang.env import env, is_truthy
from tilelang.target import Target


def wanted(tune: bool | None, like: Any, target: Target, backend: str | None) -> bool | None:
    """Whether a call is tuned; None: it would be, but is being captured in a graph.

    tune: what the caller says; None: as TILELANG_LIBRARY_TUNING does.  like: a tensor of the call.
    """
    if not (is_truthy(env.TILELANG_LIBRARY_TUNING) if tune is None else tune):
        return False
    from . import tuning

    return tuning.tuner.can(like, target, backend)


__all__ = ["wanted"]
