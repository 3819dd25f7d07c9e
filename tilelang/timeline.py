"""Where the time of a process goes: phases of imports and compilations by thread, as bars of text.

    TILELANG_TIMELINE=1 python program.py       phases of 1 ms and more, on stderr, when the process ends

Beside the time on the clock stands the time for which the phase's thread ran: the rest was spent waiting, for the
interpreter's lock, a disk or another thread.  Until `start` is called nothing is recorded and hardly anything spent.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # not on Linux
    getrusage = None  # type: ignore[assignment]

WIDTH = 40  # characters of the bars


@dataclass(frozen=True)
class Phase:
    """One recorded phase.  begin, end: ms since `start`.  cpu: ms for which its thread ran.  reads: pages that were waited
    for on a disk.  depth: open phases of the same thread around it."""

    name: str
    thread: str
    begin: float
    end: float
    cpu: float
    reads: int
    depth: int


class _Recorder:
    """What was recorded since `begun`."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.phases: list[Phase] = []
        self.local = threading.local()


class _Open:
    """A phase under way.  name: may be set until it ends, "" for one that is not kept."""

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


class _Nothing:
    """What `phase` gives while nothing is recorded."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_NOTHING = _Nothing()
_recorder: _Recorder | None = None


def _reads() -> int:
    return getrusage(RUSAGE_THREAD).ru_majflt if getrusage is not None else 0


def phase(name: str) -> Any:
    """A context manager around a phase.  Threads may be in phases at the same time."""
    return _NOTHING if _recorder is None else _Open(_recorder, name)


def start(least_ms: float | None = None) -> None:
    """Record from now on, imports and runs of the garbage collector too; a second call changes nothing.

    least_ms: what took so long or longer is printed at the end of the process; None prints nothing.
    """
    global _recorder
    if _recorder is not None:
        return
    _recorder = _Recorder()
    gc.callbacks.append(_collecting(_recorder))
    builtins.__import__ = _importing(_recorder, builtins.__import__)
    if least_ms is not None:
        atexit.register(lambda: print(text(least_ms), file=sys.stderr))


def _importing(to: _Recorder, real: Callable[..., Any]) -> Callable[..., Any]:
    """The import function with a phase around what loads modules."""
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
    """A callback of the garbage collector."""
    open_: list[_Open] = []

    def run(when: str, facts: dict[str, int]) -> None:
        if when == "start":
            open_.append(_Open(to, f"garbage, generation {facts['generation']}").__enter__())
        elif open_:
            open_.pop().__exit__()

    return run


def phases() -> list[Phase]:
    """What was recorded, in the order in which it began; nothing before `start`."""
    return sorted(_recorder.phases, key=lambda p: (p.begin, p.depth)) if _recorder is not None else []


def text(least_ms: float = 1.0) -> str:
    """Bars of the phases that took at least so long, by thread.  A number behind an import: modules that it loaded."""
    shown = [p for p in phases() if p.end - p.begin >= least_ms]
    if not shown:
        return f"timeline: no phase of {least_ms:g} ms"
    whole = max(p.end for p in shown)
    lines = [f"timeline of {whole:.1f} ms   (from, took, thread ran; pages read from a disk)"]
    for thread in dict.fromkeys(p.thread for p in shown):
        lines.append(f"{thread}:")
        for p in (p for p in shown if p.thread == thread):
            at = int(p.begin / whole * WIDTH)
            bar = (" " * at + "█" * max(1, round((p.end - p.begin) / whole * WIDTH)))[:WIDTH]
            reads = f", {p.reads} read" if p.reads else ""
            lines.append(f"{p.begin:8.1f} {p.end - p.begin:7.1f} {p.cpu:7.1f} |{bar:<{WIDTH}}| {'  ' * p.depth}{p.name}{reads}")
    return "\n".join(lines)


__all__ = ["WIDTH", "Phase", "phase", "phases", "start", "text"]
