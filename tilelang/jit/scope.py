"""Pass configs that hold for a `with` block: what tvm.transform.PassContext(config=…) did."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

_local = threading.local()


class ConfigScope:
    """with ConfigScope({"tl.enable_fast_math": True}): compilations inside use these pass configs, under their own."""

    def __init__(self, config: Mapping[Any, Any] | None = None) -> None:
        self.config = dict(config or {})

    def __enter__(self) -> ConfigScope:
        _stack().append(self.config)
        return self

    def __exit__(self, *exc: object) -> None:
        _stack().pop()


def _stack() -> list[dict[Any, Any]]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def current_config() -> dict[Any, Any]:
    """The merged configs of the open blocks, inner ones last."""
    out: dict[Any, Any] = {}
    for config in getattr(_local, "stack", ()):
        out.update(config)
    return out
