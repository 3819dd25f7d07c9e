"""All observers of a compilation: the registered ones, and the trace writer where TL_LOWER_TRACE asks for one."""

from __future__ import annotations

from typing import Any

from .observe import CodegenEvent, PassEventObserver, observers, trace_mode


def watchers() -> tuple[PassEventObserver, ...]:
    """The registered observers, and the trace writer where TL_LOWER_TRACE asks for one."""
    if trace_mode() not in ("html", "both"):
        return observers()
    from .trace import tracer  # 4 ms: only compilations that are traced write pages

    return (*observers(), tracer())


def announce_code(name: str, code: str, language: str, target: Any) -> None:
    """Send the observers a CodegenEvent for printed source."""
    for o in watchers():
        o.on_codegen(CodegenEvent(name, code, language, target))
