"""Hooks that edit generated source before it is compiled: fn(code: str, target) -> str."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Hook = Callable[[str, Any], str]
_hooks: dict[str, Hook] = {}  # "cuda", "hip", "c" -> hook


def register_hook(kind: str, fn: Hook, override: bool = True) -> Hook:
    """Install a hook.  Raises ValueError when one of this kind is installed and override is False."""
    if not callable(fn):
        raise TypeError(f"a postprocessing hook is a function of (code, target), found {type(fn).__name__}")
    if kind in _hooks and not override:
        raise ValueError(f"a {kind} postprocessing hook is registered already; pass override=True to replace it")
    _hooks[kind] = fn
    return fn


def remove_hook(kind: str) -> None:
    """Remove a hook; nothing happens when none is installed."""
    _hooks.pop(kind, None)


def has_hook(kind: str) -> bool:
    """Whether a hook is installed."""
    return kind in _hooks


def apply_hook(kind: str, code: str, target: Any) -> str:
    """The code after the hook of its kind has edited it.  Raises TypeError when the hook does not return text."""
    hook = _hooks.get(kind)
    if hook is None:
        return code
    out = hook(code, target)
    if not isinstance(out, str):
        raise TypeError(f"the {kind} postprocessing hook must return the source as a string, found "
                        f"{type(out).__name__}")
    return out


def _registers(kind: str, about: str) -> Callable[..., Hook]:
    def register(fn: Hook, override: bool = True) -> Hook:
        return register_hook(kind, fn, override)

    register.__name__ = register.__qualname__ = f"register_{kind}_postproc"
    register.__doc__ = f"Install a hook {about}."
    return register


register_cuda_postproc = _registers("cuda", "that edits CUDA source before NVRTC compiles it")
register_hip_postproc = _registers("hip", "that edits HIP source before clang compiles it")
register_c_postproc = _registers("c", "that edits the CPU target's source, which is LLVM IR")
