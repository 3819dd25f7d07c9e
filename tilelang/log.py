"""The package's logger and the recorder of timed phases.

The logger `tilelang` has level INFO, does not propagate, and its handler does not break progress bars.
Phases are recorded after `start`.  Before it, `phase` records nothing and takes almost no time.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # not on Linux
    getrusage = None  # type: ignore[assignment]

FORMAT = "%(asctime)s  [TileLang:%(name)s:%(levelname)s] (%(filename)s:%(lineno)d): %(message)s"


class BarAwareHandler(logging.StreamHandler):
    """Writes to the current stderr; through tqdm when a program uses it, so that messages do not break progress bars."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        pass

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")
        if tqdm is None:
            super().emit(record)
            return
        try:
            tqdm.tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def _make_logger() -> logging.Logger:
    log = logging.getLogger("tilelang")
    if not any(isinstance(h, BarAwareHandler) for h in log.handlers):
        handler = BarAwareHandler()
        handler.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log


logger = _make_logger()


def set_log_level(level: str | int) -> None:
    """Set the level of the package's logger: a name in upper or lower case, or a number.  Raises ValueError for other names."""
    if isinstance(level, str):
        number = logging.getLevelName(level.upper())
        if not isinstance(number, int):
            raise ValueError(f"Unknown log level {level!r}; one of DEBUG, INFO, WARNING, ERROR, CRITICAL")
        level = number
    logger.setLevel(level)


# ---- timed phases, shown by tools/timeline.py ------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """One recorded phase.  begin, end: ms since `start`.  cpu: ms for which its thread ran.  reads: page faults that waited for
    a disk.  depth: number of enclosing phases of the same thread."""

    name: str
    thread: str
    begin: float
    end: float
    cpu: float
    reads: int
    depth: int


class _Recorder:
    """The phases recorded since `begun`."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.phases: list[Phase] = []
        self.local = threading.local()


class _Open:
    """A running phase.  name: may be changed until the phase ends; "" discards the phase."""

    def __init__(self, to: _Recorder, name: str) -> None:
        self.to, self.name = to, name

    def __enter__(self) -> _Open:
        self.depth = getattr(self.to.local, "depth", 0)
        self.to.local.depth = self.depth + 1
        self.reads, self.cpu, self.begin = _reads(), time.thread_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        end, cpu, to = time.perf_counter(), time.thread_time(), self.to
        to.local.depth = self.depth
        if self.name:
            to.phases.append(Phase(self.name, threading.current_thread().name, (self.begin - to.begun) * 1e3,
                                   (end - to.begun) * 1e3, (cpu - self.cpu) * 1e3, _reads() - self.reads, self.depth))


_NOTHING: AbstractContextManager[None] = nullcontext()  # what `phase` returns while nothing is recorded
_recorder: _Recorder | None = None


def _reads() -> int:
    return getrusage(RUSAGE_THREAD).ru_majflt if getrusage is not None else 0


def phase(name: str) -> Any:
    """A context manager that records a phase.  Several threads may record phases at the same time."""
    return _NOTHING if _recorder is None else _Open(_recorder, name)


def start(at_exit: Callable[[], None] | None = None) -> None:
    """Start recording, including imports and runs of the garbage collector.  A second call has no effect.

    at_exit: called when the process ends, to show the phases.
    """
    global _recorder
    if _recorder is not None:
        return
    _recorder = _Recorder()
    gc.callbacks.append(_collecting(_recorder))
    builtins.__import__ = _importing(_recorder, builtins.__import__)
    if at_exit is not None:
        atexit.register(at_exit)


def _importing(to: _Recorder, real: Callable[..., Any]) -> Callable[..., Any]:
    """The import function, with a recorded phase around imports that load modules."""
    def run(name: str, names: Any = None, local: Any = None, wanted: Any = (), level: int = 0) -> Any:
        before = len(sys.modules)
        with _Open(to, "") as under_way:
            try:
                return real(name, names, local, wanted, level)
            finally:
                new = len(sys.modules) - before
                if new > 0:
                    package = ((names or {}).get("__package__") or "").split(".")
                    above = package[:len(package) - level + 1] if level else []
                    under_way.name = f"import {'.'.join([*above, *filter(None, [name])])} ({new})"

    return run


def _collecting(to: _Recorder) -> Callable[[str, dict[str, int]], None]:
    """The garbage collector's callback, which records its runs as phases."""
    open_: list[_Open] = []

    def run(when: str, facts: dict[str, int]) -> None:
        if when == "start":
            open_.append(_Open(to, f"garbage, generation {facts['generation']}").__enter__())
        elif open_:
            open_.pop().__exit__()

    return run


def phases() -> list[Phase]:
    """The recorded phases, ordered by begin; empty before `start`."""
    return sorted(_recorder.phases, key=lambda p: (p.begin, p.depth)) if _recorder is not None else []
