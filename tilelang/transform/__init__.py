"""Passes: programs in, programs out.  `pipeline.py` is the one list of them, read top to bottom."""

from importlib import import_module
from typing import Any

from .analysis.loop_schedule import Schedule
from .framework.config import PassConfigKey
from .framework.scope import PassContext, get_pass_context, simplify_prim_func


def __getattr__(name: str) -> Any:
    if name[:1].isupper():  # passes of another compiler: each says so when it is called
        return getattr(import_module(f"{__name__}.other_passes"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["PassConfigKey", "PassContext", "Schedule", "get_pass_context", "simplify_prim_func"]
