"""Source text of functions: of files, of notebooks, and of what Python reads from the command line, stdin or a string.

Python keeps no text for `python -c`, for a script on stdin and for the interactive prompt before 3.13.  It is taken from the
command line, from stdin where that is a file, and from the prompt's history.  A text is used only if it compiles to the
same code.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import CodeType
from typing import Any

from tilelang.errors import error

_number = count(1)


def lines_of(fn: Callable[..., Any]) -> list[str]:
    """The lines of the file or text that a function stands in; empty where there is none."""
    code = fn.__code__
    lines = linecache.getlines(code.co_filename, fn.__globals__)
    if lines:
        return lines
    for text in _texts(code):
        if _holds(text, code):
            keep(text, code.co_filename)
            return linecache.getlines(code.co_filename)
    return []


def keep(text: str, filename: str) -> None:
    """Make a text readable under a name, for tracebacks, carets and inspect.getsource."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


def _texts(code: CodeType) -> Iterator[str]:
    """Texts that a function of no file may come from."""
    if code.co_filename == "<string>" and "-c" in sys.orig_argv[:-1]:
        yield sys.orig_argv[sys.orig_argv.index("-c") + 1]
    if code.co_filename == "<stdin>":
        yield from (_stdin_file(), _prompt(code))


def _stdin_file() -> str:
    """All of stdin where it is a file, which may be read twice."""
    try:
        size = os.fstat(0).st_size
        return os.pread(0, size, 0).decode() if size else ""
    except (OSError, UnicodeDecodeError, AttributeError):
        return ""


def _prompt(code: CodeType) -> str:
    """What was typed at the prompt since the last line on which the function starts."""
    history = sys.modules.get("readline")
    if history is None:
        return ""
    typed = [history.get_history_item(k + 1) or "" for k in range(history.get_current_history_length())]
    starts = [k for k, line in enumerate(typed) if line.strip().startswith(f"def {code.co_name}(")]
    first = starts[-1] if starts else 0
    while starts and first > 0 and typed[first - 1].lstrip().startswith("@"):
        first -= 1
    return "\n".join(typed[first:]) + "\n" if starts else ""


def _holds(text: str, code: CodeType) -> bool:
    """Whether a text has the function at its line, with the same code."""
    try:
        stack: list[Any] = [compile(text, code.co_filename, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return False
    while stack:
        c = stack.pop()
        if c.co_name == code.co_name and c.co_firstlineno == code.co_firstlineno and c.co_code == code.co_code:
            return True
        stack += [k for k in c.co_consts if isinstance(k, CodeType)]
    return False


def from_source(text: str, name: str | None = None, /, **names: Any) -> Any:
    """Execute the text of a Python module and return the object called name; without a name, the last one that it defines.

        kernel = tilelang.from_source(text_of_a_kernel, "matmul")

    names: globals of the text beside those that it imports.  For generated programs: `exec` leaves Python without the
    source that kernel functions are read from.  Errors show lines of the text under the name `<tilelang source 1>`.  Raises
    source-name where the text defines nothing of that name; what the text itself raises.
    """
    filename = f"<tilelang source {next(_number)}>"
    keep(text, filename)
    scope: dict[str, Any] = {"__name__": filename, "__builtins__": __builtins__, **names}
    before = set(scope)
    exec(compile(text, filename, "exec", dont_inherit=True), scope)
    defined = [n for n, v in scope.items() if n not in before and not n.startswith("_")
               and getattr(v, "__module__", None) == filename]
    if name is None and defined:
        name = defined[-1]
    if name is None or name not in scope:
        raise error("source-name", f"the text defines no {f'`{name}`' if name else 'function'}", expected=name or "a function",
                    found=", ".join(defined) or "nothing", hint="give the name of a function that the text defines")
    return scope[name]
