"""User errors: each has a named kind, a source location, what was expected and found, and a hint.

Every kind is listed in KINDS with the Python class raised for it, so `except ValueError` written for the public
interface keeps working.  Each kind has one failing program and its full text under tests/errors/.  `expected`, `found` and
`hint` are given where the error is raised, or in the kind where they are the same for all its errors.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import linecache
import logging
import os
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar


class TileLangError(Exception):
    """Base of every error this package raises for a user's mistake.

    kind: name from KINDS.  message: one sentence.  expected, found: what was required and what was given.  span: the source
    location, or None.  call: the user's call that caused the error, shown where there is no span.  notes: further locations,
    each with a label.  hint: what to do.
    """

    kind: str = "error"
    label: str = ""  # of the span

    def __init__(self, message: str, *, kind: str = "error", expected: str = "", found: str = "", span: Any = None,
                 notes: Iterable[tuple[Any, str]] = (), hint: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.span = kind, message, span
        self.expected, self.found = expected, found
        self.notes, self.hint = tuple(notes), hint
        self.call = None if span is not None else caller()

    def __str__(self) -> str:
        return render(self)


@dataclass(frozen=True)
class Kind:
    """A kind of error.  name: its name; raises: its builtin base class; about: one line for the documentation.

    hint, expected, found: defaults for errors of this kind that do not give them.
    """

    name: str
    raises: type[Exception]
    about: str
    hint: str = ""
    expected: str = ""
    found: str = ""


KINDS: dict[str, Kind] = {}
_CLASSES: dict[type[Exception], type[TileLangError]] = {}


def register(name: str, raises: type[Exception], about: str, hint: str = "", expected: str = "", found: str = "") -> None:
    """Add an error kind."""
    KINDS[name] = Kind(name, raises, about, hint, expected, found)


def _class_for(base: type[Exception]) -> type[TileLangError]:
    if base not in _CLASSES:
        cls = type(f"TileLang{base.__name__}", (TileLangError, base), {"__module__": __name__})
        cls.__str__ = render  # type: ignore[assignment,method-assign]
        _CLASSES[base] = cls
    return _CLASSES[base]


def error(kind: str, message: str, *, expected: str = "", found: str | None = None, span: Any = None,
          notes: Iterable[tuple[Any, str]] = (), hint: str = "", label: str = "") -> TileLangError:
    """Make, but do not raise, an error of a kind:

        raise error("gemm-shape", "...", expected="K = 32", found="K = 64", span=op.span, hint="...")

    expected, found and hint may be omitted only if the kind was registered with them; otherwise TypeError is raised.
    expected and found may also stand in the message, in marks that are not shown: "T.f takes «an even number», not ‹3›"; found
    also at its end: "…, found K = 64".  tests/errors/test_error_sites.py finds such calls without running them.
    """
    if sys.excepthook is sys.__excepthook__ and sys.stderr is not None and sys.stderr.isatty():
        sys.excepthook = _show_uncaught
    k = KINDS[kind]
    message, marked = _unmarked(message, "‹›")
    if found is None:
        found = marked
    message, marked = _unmarked(message, "«»")
    expected, hint = expected or marked or k.expected, hint or k.hint
    if found is None:
        found = k.found or message.partition(", found ")[2] or message.partition(", got ")[2] or None
    if not (expected and hint) or found is None:
        raise TypeError(f"an error of kind {kind!r} says what was expected, what was found and what to do: {message}")
    out = _class_for(k.raises)(message, kind=kind, expected=expected, found=found or k.found or "nothing", span=span,
                               notes=notes, hint=hint)
    out.label = label
    return out


def _unmarked(message: str, marks: str) -> tuple[str, str | None]:
    """(a message without the first pair of these marks, what stands in them)."""
    before, opened, rest = message.partition(marks[0])
    inside, closed, after = rest.partition(marks[1])
    return (before + inside + after, inside) if opened and closed else (message, None)


class TileLangWarning(UserWarning):
    """Something that a program asks for and that has no effect, or that is probably not meant.

    code: its name from WARNINGS; the text starts with it, so that `warnings.filterwarnings("ignore", "config-no-effect")`
    switches one code off.  With TILELANG_STRICT=1, or the pass config tl.strict, the same text is an error of the kind
    strict-warning instead.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


WARNINGS: dict[str, str] = {}  # code -> one line for the documentation
WARNED: Counter[str] = Counter()  # code -> warnings of this process: a program that was warned of is not kept on disk
_SHOWN: dict[str, dict[Any, Any]] = {}  # file -> what warnings.warn_explicit keeps to show a text once for a line
register("strict-warning", RuntimeError, "a warning, where TILELANG_STRICT=1 or tl.strict makes warnings errors",
         expected="a program without warnings", found="a warning")


def register_warning(code: str, about: str) -> None:
    """Add a code of warnings."""
    WARNINGS[code] = about


register_warning("unwritten-output", "elements of an output are not written: they are what its memory held, or NaN or -1")

_STRICT: ContextVar[bool] = ContextVar("strict", default=False)


def is_strict() -> bool:
    """Whether warnings are errors: by TILELANG_STRICT, or for the program at hand by the pass config tl.strict."""
    return _STRICT.get() or os.environ.get("TILELANG_STRICT", "0").lower() in ("1", "true", "yes", "on")


@contextmanager
def strict(config: Mapping[Any, Any] | None) -> Iterator[None]:
    """Warnings inside are errors where these pass configs ask for it."""
    token = _STRICT.set(_STRICT.get() or any(str(k) == "tl.strict" and v for k, v in (config or {}).items()))
    try:
        yield
    finally:
        _STRICT.reset(token)


def warn(code: str, message: str, hint: str, span: Any = None, log: logging.Logger | None = None) -> None:
    """Warn the user once for each place: a TileLangWarning at the span, or at the user's call that led here.

    log: a line of this logger instead.  Raises strict-warning instead where `is_strict`.
    """
    if code not in WARNINGS:
        raise TypeError(f"no warning has the code {code!r}")
    if is_strict():
        raise error("strict-warning", f"{code}: {message}", span=span, hint=hint)
    if log is not None:
        log.warning("%s%s; %s", f"{span}: " if span is not None else "", message, hint)
        return
    WARNED[code] += 1
    file, line = "tilelang", 0
    if span is not None:
        file, line = span.file, span.line
    elif (call := caller()) is not None:
        file, line = call[0].co_filename, call[2]
    warnings.warn_explicit(TileLangWarning(code, f"{message}; {hint}"), TileLangWarning, file, line,
                           registry=_SHOWN.setdefault(file, {}))


def called_in_kernel(name: str, args: Iterable[Any]) -> TileLangError | None:
    """The error of a kernel that is called with buffers or values of a kernel being traced; None where no argument is one."""
    if not any(hasattr(x, "__tilelang_expr__") or hasattr(x, "same") and hasattr(x, "dtype") for x in args):
        return None
    return error("kernel-in-kernel", f"the kernel `{name}` is called inside a kernel function", found=f"the kernel `{name}`")


def keyword_hint(e: BaseException, signature: inspect.Signature) -> str:
    """`did you mean ...` for the keyword that a TypeError of a call names; "" where no parameter is similar."""
    given = re.search(r"unexpected keyword argument '(\w+)'", str(e))
    near = difflib.get_close_matches(given[1], signature.parameters, n=1, cutoff=0.5) if given else []
    return f"did you mean `{near[0]}`?" if near else ""


def _by_name(e: BaseException, signature: inspect.Signature) -> str:
    """The options that a call with too many positional arguments gives by their names."""
    named = [f"{p.name}=..." for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    return f"options are given by name: {', '.join(named)}" if named and "too many positional" in str(e) else ""


def bare(signature: inspect.Signature) -> str:
    """The parameters as source text, without types: (q, k, v, *, scale=None)."""
    return str(signature.replace(return_annotation=inspect.Signature.empty, parameters=[
        p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]))


F = TypeVar("F", bound=Callable[..., Any])
Explain = Callable[[str, inspect.Signature, "dict[str, Any]", Exception], "TileLangError | None"]


def named_arguments(kind: str, hint: str = "", room: str = "tilelang",
                    explain: Explain | None = None) -> Callable[[F], F]:
    """Decorator of a public function: arguments that it does not take are an error of the kind at the user's call.

    hint: what to write where no parameter is similar to the one that is given.  room: the module where users find it.
    explain(name, signature, arguments by name, what was raised): the error of arguments of a wrong kind, or None.
    """
    def wrap(fn: F) -> F:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except Exception as failed:
                if (nested := called_in_kernel(fn.__name__, args)) is not None:
                    raise nested from None
                if isinstance(failed, TileLangError) or explain is None and not isinstance(failed, TypeError):
                    raise
                try:
                    given = signature.bind(*args, **kwargs).arguments
                except TypeError as e:
                    raise error(kind, f"{room}.{fn.__name__}: {e}", expected=f"{fn.__name__}{bare(signature)}", found=str(e),
                                hint=keyword_hint(e, signature) or hint or _by_name(e, signature)
                                or f"see help({room}.{fn.__name__})") from None
                if explain is not None and (explained := explain(fn.__name__, signature, given, failed)) is not None:
                    raise explained from failed
                raise

        return call  # type: ignore[return-value]

    return wrap


def facts(err: BaseException, expected: str, found: str) -> Any:
    """Attach expected and found to a builtin exception: `raise facts(TypeError("..."), "an integer", str(dt))`.

    For modules that do not know the source location: the frontend reports it as an error of a kind at the user's line.
    """
    err.facts = (expected, found)  # type: ignore[attr-defined]
    return err


@functools.lru_cache(4096)
def positions(code: CodeType, lasti: int) -> tuple[int, int, int, int] | None:
    """(line, end line, column, end column) of an instruction, where this Python keeps them (3.11 and later)."""
    if not hasattr(code, "co_positions") or lasti < 0:
        return None
    for k, p in enumerate(code.co_positions()):
        if k == lasti // 2:
            return None if None in p else p  # type: ignore[return-value]
    return None


_STDLIB = os.path.dirname(os.__file__) + os.sep
_COMMAND = os.path.join(os.path.dirname(__file__), "__main__.py")  # runs under the name __main__


def _is_users(frame: Any) -> bool:
    """Whether a frame belongs to the user's code, not to this package, to Python's library or to one that calls us back."""
    name, file = frame.f_globals.get("__name__") or "", frame.f_code.co_filename
    if name.partition(".")[0] in ("tilelang", "tvm_ffi", "torch") or file.startswith("<frozen") or file == _COMMAND:
        return False
    return not file.startswith(_STDLIB) or f"{os.sep}site-packages{os.sep}" in file


def callers() -> Iterator[tuple[CodeType, int, int]]:
    """The calls in the user's code on this thread, innermost first: code, instruction and line."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if _is_users(frame):
            yield frame.f_code, frame.f_lasti, frame.f_lineno
        frame = frame.f_back


def caller() -> tuple[CodeType, int, int] | None:
    """The innermost call in the user's code on this thread: code, instruction and line; None when there is none."""
    return next(callers(), None)


def brought(err: BaseException) -> BaseException:
    """Add the user's call on this thread to an error that another thread of this package raised: `raise brought(e)`."""
    if isinstance(err, TileLangError) and err.span is None and err.call is None:
        err.call = caller()
    return err


def _place_of(call: tuple[CodeType, int, int]) -> Any:
    """The source location of a call; the whole line where this Python does not record columns."""
    code, lasti, at = call
    line, end_line, col, end_col = positions(code, lasti) or (at, 0, -1, 0)
    if col < 0:
        text = linecache.getline(code.co_filename, line)
        col = len(text) - len(text.lstrip())
    return _Place(code.co_filename, line, col, end_line, end_col)


@dataclass(frozen=True)
class _Place:
    file: str
    line: int
    col: int = 0
    end_line: int = 0
    end_col: int = 0


def _snippet(span: Any, label: str) -> list[str]:
    text = linecache.getline(span.file, span.line).rstrip("\n")
    col, end = (len(text.encode()[:n].decode(errors="ignore")) for n in (span.col, span.end_col))  # Python counts bytes
    lines = [f"  --> {span.file}:{span.line}:{(col if text else span.col) + 1}"]
    if text:
        number = str(span.line)
        end = end if span.end_line in (0, span.line) and end > col else len(text)
        marks = " " * col + "^" * max(1, end - col)
        lines.append(f"{number} | {text}")
        lines.append(f"{' ' * len(number)} | {marks}" + (f" {label}" if label else ""))
    return lines


def _shows_places() -> bool:
    return os.environ.get("TILELANG_ENABLE_IR_SPAN", "1").lower() in ("1", "true", "yes", "on")


def render(err: TileLangError) -> str:
    """The full text of an error: header, each location with a caret, call chain, expected, found, hint.

    The first line starts with the bare message after `error[kind]: `, so fragments match as users expect.
    """
    out = [f"error[{err.kind}]: {err.message}"]
    span = _place_of(err.call) if err.span is None and err.call is not None else err.span
    if span is not None and _shows_places():
        places = span.chain() if hasattr(span, "chain") else [span]
        out += _snippet(places[0], err.label)
        for p in places[1:]:
            out.append(f"  called from {p.file}:{p.line}:{p.col + 1}" + (f" in {p.function}" if p.function else ""))
    for place, label in err.notes:
        if place is not None:
            out += _snippet(place, label)
        elif label:
            out.append(f"note: {label}")
    out += [f"{what}: {text}" for what, text in (("expected", err.expected), ("found", err.found), ("hint", err.hint)) if text]
    return "\n".join(out)


_COLOURS = (("error[", "1;31"), ("expected:", "1"), ("found:", "1"), ("hint:", "1;32"), ("note:", "1;36"))


def in_colours(text: str) -> str:
    """The text of an error with colours of a terminal, if stderr is one and NO_COLOR is not set; else unchanged."""
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    out = []
    for line in text.split("\n"):
        head, code = next(((h, c) for h, c in _COLOURS if line.startswith(h)), ("", ""))
        if head:
            end = line.find(":") + 1
            line = f"\033[{code}m{line[:end]}\033[0m{line[end:]}"
        elif line.lstrip().startswith("--> "):
            line = f"\033[36m{line}\033[0m"
        else:
            line = re.sub(r"^( *\| *)(\^+.*)$", "\\1\033[1;31m\\2\033[0m", line)
        out.append(line)
    return "\n".join(out)


def _show_uncaught(cls: type[BaseException], err: BaseException, trace: Any) -> None:
    """sys.excepthook of a terminal: an error of this package that nobody catches has colours."""
    if isinstance(err, TileLangError) and (shown := str(err)) != in_colours(shown):
        lines = "".join(traceback.format_exception(cls, err, trace))
        sys.stderr.write(lines.replace(shown, in_colours(shown)))
    else:
        sys.__excepthook__(cls, err, trace)


def for_user(err: BaseException) -> BaseException:
    """An error without the frames and causes inside this package, which do not help a user.

    Public functions use `raise for_user(e)`.  TILELANG_DEBUG above 0 keeps everything.  The trace of an InternalError is in
    its report.
    """
    err = brought(err)
    if os.environ.get("TILELANG_DEBUG", "0") in ("", "0"):
        err.__cause__, err.__suppress_context__ = None, True
        return err.with_traceback(None)
    return err


_MARK = re.compile(r"\n?[ \t]*--> (?P<file>[^\n]+?):(?P<line>\d+)(?::(?P<col>\d+))?\s*\Z")


def enrich_error(exc: BaseException) -> BaseException:
    """Add the source line to an exception whose message ends with a location (`--> file:line[:col]`).

    Changes the message in place and returns the exception.  Without such a location, or if the file cannot be read, the
    message stays unchanged.
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
    """A fault of the compiler itself.  It names the folder of the report that reproduces it, if one could be written."""
