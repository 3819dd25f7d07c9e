"""Errors a user can meet: a kind with a name, the place, what was expected and found, and something to do.

Every kind is listed in KINDS with the Python class raised for it, so `except ValueError` written for the public
interface keeps working.  Each kind has one failing program and its full text under tests/errors/.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class TileLangError(Exception):
    """Base of every error this package raises for a user's mistake.

    kind: name from KINDS.  message: one sentence, with what was expected and found.  span: the place, or None.
    notes: further places, each with a label.  hint: what to do.
    """

    kind: str = "error"

    def __init__(self, message: str, *, kind: str = "error", span: Any = None,
                 notes: Iterable[tuple[Any, str]] = (), hint: str = "", label: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.span = kind, message, span
        self.notes, self.hint, self.label = tuple(notes), hint, label

    def __str__(self) -> str:
        return render(self)


@dataclass(frozen=True)
class Kind:
    """name: what the error is called; raises: the builtin class it also is; about: one line for the documentation.

    hint: what to do, shown when an error of the kind brings no hint of its own.
    """

    name: str
    raises: type[Exception]
    about: str
    hint: str = ""


KINDS: dict[str, Kind] = {}
_CLASSES: dict[type[Exception], type[TileLangError]] = {}


def register(name: str, raises: type[Exception], about: str, hint: str = "") -> None:
    """Add an error kind."""
    KINDS[name] = Kind(name, raises, about, hint)


def _class_for(base: type[Exception]) -> type[TileLangError]:
    if base not in _CLASSES:
        cls = type(f"TileLang{base.__name__}", (TileLangError, base), {"__module__": __name__})
        cls.__str__ = render  # type: ignore[assignment,method-assign]
        _CLASSES[base] = cls
    return _CLASSES[base]


def error(kind: str, message: str, *, span: Any = None, notes: Iterable[tuple[Any, str]] = (),
          hint: str = "", label: str = "") -> TileLangError:
    """Build (not raise) the error of a kind:  `raise error("gemm-shape", "...", span=op.span, hint="...")`."""
    return _class_for(KINDS[kind].raises)(message, kind=kind, span=span, notes=notes, hint=hint or KINDS[kind].hint,
                                          label=label)


def _snippet(span: Any, label: str) -> list[str]:
    lines = [f"  --> {span.file}:{span.line}:{span.col + 1}"]
    text = linecache.getline(span.file, span.line).rstrip("\n")
    if text:
        number = str(span.line)
        end = span.end_col if span.end_line in (0, span.line) and span.end_col > span.col else len(text)
        marks = " " * span.col + "^" * max(1, end - span.col)
        lines.append(f"{number} | {text}")
        lines.append(f"{' ' * len(number)} | {marks}" + (f" {label}" if label else ""))
    return lines


def render(err: TileLangError) -> str:
    """The full text: header, each place with a caret, call chain, hint.

    The first line starts with the bare message after `error[kind]: `, so fragments match as users expect.
    """
    out = [f"error[{err.kind}]: {err.message}"]
    if err.span is not None and os.environ.get("TILELANG_ENABLE_IR_SPAN", "1").lower() in ("1", "true", "yes", "on"):
        places = err.span.chain() if hasattr(err.span, "chain") else [err.span]
        out += _snippet(places[0], err.label)
        for caller in places[1:]:
            out.append(f"  called from {caller.file}:{caller.line}:{caller.col + 1}" +
                       (f" in {caller.function}" if caller.function else ""))
    for place, label in err.notes:
        if place is not None:
            out += _snippet(place, label)
        elif label:
            out.append(f"note: {label}")
    if err.hint:
        out.append(f"hint: {err.hint}")
    return "\n".join(out)


def told(err: BaseException) -> BaseException:
    """The error as it leaves the package: without the frames and causes inside it, which say nothing to a user.

    `raise told(e)` at the border; TILELANG_DEBUG above 0 keeps everything.  Where an InternalError came from stands in its
    report.
    """
    if os.environ.get("TILELANG_DEBUG", "0") in ("", "0"):
        err.__cause__, err.__suppress_context__ = None, True
        return err.with_traceback(None)
    return err


_MARK = re.compile(r"\n?[ \t]*--> (?P<file>[^\n]+?):(?P<line>\d+)(?::(?P<col>\d+))?\s*\Z")


@dataclass(frozen=True)
class _Place:
    file: str
    line: int
    col: int = 0
    end_line: int = 0
    end_col: int = 0


def enrich_error(exc: BaseException) -> BaseException:
    """Show the source at the place that the message of an exception ends with (`--> file:line[:col]`).

    Rewrites the message in place and returns the exception; one without such an end, or whose file cannot be read, stays.
    """
    if isinstance(exc, TileLangError) or not exc.args or not isinstance(exc.args[0], str):
        return exc
    found = _MARK.search(exc.args[0])
    if found is None:
        return exc
    column = int(found["col"]) - 1 if found["col"] else 0
    text = linecache.getline(found["file"], int(found["line"])).rstrip("\n")
    if not text:
        return exc
    if not found["col"]:
        column = len(text) - len(text.lstrip())
    shown = _snippet(_Place(found["file"], int(found["line"]), max(0, column)), "")
    exc.args = ("\n".join([exc.args[0][:found.start()], *shown]).lstrip("\n"), *exc.args[1:])
    return exc


class JITNoBuilderError(RuntimeError):
    """A language construct that needs a kernel under construction was used outside one."""


class InternalError(RuntimeError):
    """A fault of the compiler itself; names the folder with the reproducible report when one could be written."""
