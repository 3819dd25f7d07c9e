"""Targets and execution backends as user code asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang.jit.requests import BACKENDS, resolve_target
from tilelang.language.tracing.state import error
from tilelang.target import Target, determine_target


@dataclass(frozen=True)
class BackendModule:
    """An execution backend: its name, and the target kinds it runs."""

    name: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class BackendContext:
    """A compilation's target, host target and execution backend, resolved."""

    target: Target
    target_host: Any
    backend: BackendModule


def list_backends() -> list[str]:
    """Names of execution backends, over all targets."""
    return sorted({b for names in BACKENDS.values() for b in names})


def get_backend(name: str) -> BackendModule:
    """The execution backend of a name.  Raises ValueError that lists the names."""
    targets = tuple(kind for kind, names in BACKENDS.items() if name in names)
    if not targets:
        raise error("backend-name", f"Invalid execution backend '{name}'. Allowed: {', '.join(list_backends())}. "
                    "Tip: use execution_backend='auto'.",
                    expected=f"one of {', '.join(list_backends())}", found=repr(name), hint="leave execution_backend out")
    return BackendModule(name, targets)


def create_backend_context(target: Any = None, target_host: Any = None, backend: str | None = None) -> BackendContext:
    """The target and backend that compile resolves these arguments to.

    Raises what compile raises: AssertionError for a target, ValueError for a backend.
    """
    resolved, name = resolve_target(target, backend)
    return BackendContext(resolved, target_host, get_backend(name))


def auto_detect_target() -> Target:
    """The target "auto" means now: the current scope, else what the first detector finds."""
    return Target("auto")


def register_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Not available: execution backends are part of the package."""
    raise error("not-available", "user-defined execution backends are not available: a kernel runs by "
                f"{', '.join(list_backends())}", found="a user-defined execution backend",
                hint="tilelang.lower gives the generated source to run by other means")


__all__ = ["BackendContext", "BackendModule", "create_backend_context", "determine_target", "get_backend", "list_backends",
           "register_backend"]
