"""Everybody who watches a compilation: the observers, and the writer of the trace where TL_LOWER_TRACE asks for one."""

from __future__ import annotations

from typing import Any

from .observe import CodegenEvent, PassEventObserver, observers, trace_mode


def watchers() -> tuple[PassEventObserver, ...]:
    """Observers, and the writer of the trace that TL_LOWER_TRACE asks for."""
    if trace_mode() not in ("html", "both"):
        return observers()
    from .trace import tracer  # 4 ms: only compilations that are traced write pages

    return (*observers(), tracer())


def announce_code(name: str, code: str, language: str, target: Any) -> None:
    """Tell the observers that source was printed."""
    for o in watchers():
        o.on_codegen(CodegenEvent(name, code, language, target))


__all__ = ["announce_code", "watchers"]
