"""Instrumentation of the compiler: observers of passes and of generated source, and tools that register observers.

    class Names(PassEventObserver):
        def on_pass(self, event):
            print(event.name, event.changed)

    with compile_pass_instrumentation(Names()):
        tilelang.lower(program, target="cuda")

An observed compilation does not use the kernel cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tilelang.transform.framework.observe import (CodegenEvent, PassEvent, PassEventObserver, add_observer, announce_code,
                                                  current_pass_phase, observers, observing, pass_phase, remove_observer)
from tilelang.transform.framework.scope import as_observer

_OPEN: ContextVar[tuple[StackedPassInstrument, ...]] = ContextVar("open", default=())
_tools: dict[str, PassInstrumentationTool] = {}
_guard = threading.Lock()


def _to_all(method: str) -> Callable[..., None]:
    def tell(self: StackedPassInstrument, *args: Any) -> None:
        for i in self.instruments:
            getattr(i, method)(*args)

    return tell


class StackedPassInstrument(PassEventObserver):
    """Several observers as one: each event goes to all of them in order."""

    def __init__(self, instruments: Any = ()) -> None:
        self.instruments = tuple(as_observer(i) for i in instruments)

    on_pipeline_start, on_pass_start, on_pass, on_pipeline_end, on_codegen = map(_to_all, (
        "on_pipeline_start", "on_pass_start", "on_pass", "on_pipeline_end", "on_codegen"))


class PassInstrumentationTool:
    """A named tool that makes one observer per compile_pass_instrumentation block.  Subclasses override create_instrument."""

    name = ""

    def create_instrument(self) -> PassEventObserver | None:
        """A fresh observer, or None when the tool observes nothing."""
        return None


def register_pass_instrumentation_tool(tool: PassInstrumentationTool, override: bool = False) -> PassInstrumentationTool:
    """Register a tool by its name.  Raises ValueError for an empty name, and for a registered one without override."""
    if not tool.name:
        raise ValueError("a tool needs a name")
    with _guard:
        if tool.name in _tools and not override:
            raise ValueError(f"a tool named {tool.name!r} is registered already; pass override=True to replace it")
        _tools[tool.name] = tool
    return tool


def unregister_pass_instrumentation_tool(name: Any) -> None:
    """Remove a tool, given itself or by name; nothing happens when it is not registered."""
    with _guard:
        _tools.pop(getattr(name, "name", name), None)


def create_pass_instruments() -> list[PassEventObserver]:
    """A fresh observer of every registered tool that returns one."""
    with _guard:
        made = [tool.create_instrument() for tool in _tools.values()]
    return [m for m in made if m is not None]


@contextmanager
def compile_pass_instrumentation(*instruments: Any) -> Iterator[StackedPassInstrument]:
    """Observe the compilations of this thread inside the block, by the given observers and those of registered tools."""
    stacked = StackedPassInstrument((*instruments, *create_pass_instruments()))
    token = _OPEN.set((*_OPEN.get(), stacked))
    try:
        with observing(stacked):
            yield stacked
    finally:
        _OPEN.reset(token)


def current_compile_pass_instrumentation() -> StackedPassInstrument | None:
    """The instrument of the innermost open block; None outside one."""
    return next(reversed(_OPEN.get()), None)


def active_stacked_pass_instruments() -> tuple[StackedPassInstrument, ...]:
    """The instruments of all open blocks of this thread, the outermost first."""
    return _OPEN.get()


@contextmanager
def pass_pipeline(name: str, *instruments: Any) -> Iterator[StackedPassInstrument]:
    """compile_pass_instrumentation whose events have the phase `name`."""
    with pass_phase(name), compile_pass_instrumentation(*instruments) as stacked:
        yield stacked


def run_codegen_with_instrumentation(codegen: Callable[[], str], name: str, language: str = "cuda",
                                     target: Any = None) -> str:
    """Run a function that prints source, report the source to the observers, and return it."""
    code = codegen()
    announce_code(name, code, language, target)
    return code


__all__ = ["CodegenEvent", "PassEvent", "PassEventObserver", "PassInstrumentationTool", "StackedPassInstrument",
           "active_stacked_pass_instruments", "add_observer", "compile_pass_instrumentation", "create_pass_instruments",
           "current_compile_pass_instrumentation", "current_pass_phase", "observers", "pass_phase", "pass_pipeline",
           "register_pass_instrumentation_tool", "remove_observer", "run_codegen_with_instrumentation",
           "unregister_pass_instrumentation_tool"]
