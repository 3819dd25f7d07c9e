"""Events of each pass run and of each printed kernel, and the registered observers that receive them.

Observers read programs and do not change them. An observer added by `add_observer` holds for the whole process, one added by
`observing` for the current thread inside a `with` block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tilelang.env import env, is_truthy
from tilelang.ir import Func
from tilelang.ir.record import record

TRACE_MODES = ("0", "1", "terminal", "html", "both")
_WORDS = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0", "": "0"}


@record
class PassEvent:
    """One run of a pass. before, after: the programs. seconds: its time. changed: whether after differs from before.

    index: place in its pipeline, from 0. phase: the name of the enclosing `pass_phase` block, "" without one.
    """

    name: str
    before: Func
    after: Func
    seconds: float
    changed: bool
    index: int
    target: Any = None
    phase: str = ""


@record
class CodegenEvent:
    """Source printed for one device kernel (language "cuda"), or for a whole program (language "llvm")."""

    name: str
    code: str
    language: str
    target: Any = None


def text_of(func: Func) -> str:
    """The program as text, or why it cannot be printed (a report must be possible for a broken program too)."""
    try:
        return repr(func)
    except Exception as e:
        return f"<not printable: {type(e).__name__}: {e}>"


class PassEventObserver:
    """Base class of observers: override the methods of interest. An exception that a method raises ends the compilation."""

    def on_pipeline_start(self, func: Func, target: Any) -> None:
        """A list of passes is about to run on a program."""

    def on_pass_start(self, name: str, func: Func) -> None:
        """A pass is about to run."""

    def on_pass(self, event: PassEvent) -> None:
        """A pass has run."""

    def on_pipeline_end(self, func: Func, target: Any) -> None:
        """All passes of the list have run; func: the result."""

    def on_codegen(self, event: CodegenEvent) -> None:
        """A kernel has been printed."""


_OPEN: ContextVar[tuple[PassEventObserver, ...]] = ContextVar("observers", default=())
_PHASES: ContextVar[tuple[str, ...]] = ContextVar("phases", default=())
_everywhere: list[PassEventObserver] = []
_guard = threading.Lock()


def add_observer(observer: PassEventObserver) -> None:
    """Observe all compilations of the process until remove_observer. Adding an observer twice has no further effect."""
    with _guard:
        if observer not in _everywhere:
            _everywhere.append(observer)


def remove_observer(observer: PassEventObserver) -> None:
    """Stop observing; no effect when the observer is not registered."""
    with _guard:
        if observer in _everywhere:
            _everywhere.remove(observer)


@contextmanager
def observing(*observers: PassEventObserver) -> Iterator[tuple[PassEventObserver, ...]]:
    """Observe the compilations of this thread inside the block."""
    token = _OPEN.set((*_OPEN.get(), *observers))
    try:
        yield observers
    finally:
        _OPEN.reset(token)


def observers() -> tuple[PassEventObserver, ...]:
    """The observers registered now: those of the process, then those of this thread's open blocks."""
    return (*_everywhere, *_OPEN.get())


_trace_writer: Callable[[], PassEventObserver] | None = None


def write_traces_by(writer: Callable[[], PassEventObserver]) -> None:
    """Set where the observer comes from that writes traces.  writer: called while TL_LOWER_TRACE asks for them."""
    global _trace_writer
    _trace_writer = writer


def watchers() -> tuple[PassEventObserver, ...]:
    """The registered observers, and the trace writer where TL_LOWER_TRACE asks for one."""
    return observers() if _trace_writer is None or trace_mode() not in ("html", "both") else (*observers(), _trace_writer())


def announce_code(name: str, code: str, language: str, target: Any) -> None:
    """Send the observers a CodegenEvent for printed source."""
    for o in watchers():
        o.on_codegen(CodegenEvent(name, code, language, target))


def trace_mode() -> str:
    """TL_LOWER_TRACE as one of TRACE_MODES. Raises ValueError for any other word."""
    word = str(env.get_lower_trace_mode()).strip().lower()
    word = _WORDS.get(word, word)
    if word not in TRACE_MODES:
        raise ValueError(f"TL_LOWER_TRACE is one of {', '.join(TRACE_MODES)}, found {word!r}")
    return word


def is_watched() -> bool:
    """Whether an observer or a trace needs to see the passes run; compiled programs must then not come from a cache."""
    return (bool(observers()) or trace_mode() != "0" or is_truthy(env.get_pass_diff_mode())
            or env.is_pass_profile_enabled())


@contextmanager
def pass_phase(name: str) -> Iterator[str]:
    """Name the passes that run inside the block; nested blocks give "outer/inner"."""
    token = _PHASES.set((*_PHASES.get(), name))
    try:
        yield name
    finally:
        _PHASES.reset(token)


def current_pass_phase() -> str:
    """The name of the open pass_phase blocks, "" outside them."""
    return "/".join(_PHASES.get())
