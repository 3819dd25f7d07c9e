"""Hooks that edit generated source before it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.jit.hooks import register_c_postproc, register_cuda_postproc, register_hip_postproc


def _decorator(register: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(fn: Any = None, override: bool = True) -> Any:
        if isinstance(fn, bool):  # @register_..._callback(False)
            fn, override = None, fn
        if fn is None:
            return lambda f: register(f, override)
        return register(fn, override)

    return decorate


register_cuda_postproc_callback = _decorator(register_cuda_postproc)
register_hip_postproc_callback = _decorator(register_hip_postproc)
register_c_postproc_callback = _decorator(register_c_postproc)

__all__ = ["register_c_postproc", "register_c_postproc_callback", "register_cuda_postproc",
           "register_cuda_postproc_callback", "register_hip_postproc", "register_hip_postproc_callback"]
