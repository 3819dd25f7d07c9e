"""Source text of functions: of files, of notebooks, and of what Python reads from the command line, stdin or a string.

A text is used only if it compiles to the code at hand: names, constants and all.  A file may hold another text than the one
that was imported, and Python's line cache an older one.  What annotations in a body say is in no code, so the text is read
when a function is decorated.

Python keeps no text for `python -c`, for a script on stdin and for the interactive prompt before 3.13.  It is taken from the
command line, from stdin where that is a file, and from the prompt's history.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import os
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import count
from types import CodeType
from typing import Any, cast

from tilelang.errors import TileLangError, error
from tilelang.ir import Span

_number = count(1)
_read: dict[int, tuple[CodeType, str]] = {}  # id of a code -> the code, the text of its file when it was decorated
_files: dict[str, dict[str, str]] = {}  # file -> the texts that were read from it
_YOUNG = 3.0  # seconds; Python takes byte code for that of a file by the second of its last change and its size


def remember(fn: Any) -> None:
    """Read the text of a decorated function, for it and for the functions in it: at the first call it may be another."""
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if isinstance(code, CodeType) and id(code) not in _read:
        names = fn.__globals__
        text = next((t for t in _texts(code) if _line_in(t, code, names)), "") or _present(code.co_filename, names)
        text = _files.setdefault(code.co_filename, {}).setdefault(text, text)
        _read.update({id(c): (c, text) for c in codes_in(code)})


def lines_of(fn: Any) -> tuple[list[str], int]:
    """The lines of the text that a function was compiled from, and the number of its first one.

    Raises source-changed where the text is another now, source-unavailable where there is none."""
    code, names = fn.__code__, fn.__globals__
    old = "".join(linecache.getlines(code.co_filename, names))
    texts = [_read.get(id(code), (code, ""))[1], _present(code.co_filename, names), old, *_files.get(code.co_filename, ())]
    for text in (texts[0], *_texts(code), *texts[1:]):
        line = _line_in(text, code, names) if text else None
        if line is not None:
            if code.co_filename.startswith("<"):
                keep(text, code.co_filename)
            return text.splitlines(keepends=True), line
    raise _changed(fn) if any(texts) else _unavailable(fn)


def text_of(fn: Any, needed: bool = False) -> str:
    """The text of a function's definition, not indented; "" where there is none.  needed: raises an error there."""
    try:
        lines, first = lines_of(inspect.unwrap(fn))
    except (TileLangError, AttributeError):
        if needed:
            raise
        return ""
    return textwrap.dedent("".join(inspect.getblock(lines[first - 1:])))


def _unavailable(fn: Any) -> TileLangError:
    hint = ("define kernel functions in a file, a notebook cell or `python -c`; "
            "tilelang.from_source(text) takes them from a string")
    if fn.__code__.co_filename.startswith(("<stdin>", "/dev/")):
        hint = "Python keeps no text of a script from a pipe: save it and run `python FILE`, or `python - < FILE`; " + hint
    return error("source-unavailable", f"the source of `{fn.__name__}` is not available",
                 found=f"no source text for `{fn.__name__}`", hint=hint)


def _changed(fn: Any) -> TileLangError:
    file, line = fn.__code__.co_filename, fn.__code__.co_firstlineno
    return error("source-changed", f"the source of `{fn.__name__}` has changed since Python imported it",
                 span=Span(file, line) if linecache.getline(file, line) else None, found=f"{file} as it is now, which does not")


def _present(name: str, names: dict[str, Any]) -> str:
    """The present text of a file or cell; "" for what is none.  The byte code of a file that was written just now is removed,
    so that Python does not take it for that of the next text."""
    entry: Any = linecache.cache.get(name)
    if entry is not None and len(entry) > 1 and entry[1] is None:  # no file: a notebook's cell
        return "".join(entry[2])
    lines = linecache.updatecache(name, names)
    if not lines and entry is not None:
        linecache.cache[name] = entry  # the file is gone
    with suppress(OSError):  # there is none, or the folder is read-only
        if lines and os.stat(name).st_mtime > time.time() - _YOUNG:
            os.remove(getattr(names.get("__spec__"), "cached", None) or "")
    return "".join(lines)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code and those of the functions, lambdas and comprehensions inside it."""
    yield code
    for c in code.co_consts:
        if isinstance(c, CodeType):
            yield from codes_in(c)


def _line_in(text: str, code: CodeType, names: dict[str, Any]) -> int | None:
    """The line of a text on which a function of this code starts; None where there is none, or several elsewhere in it."""
    for loader in dict.fromkeys((None, names.get("__loader__"))):
        made = _compiled(text, code.co_filename, code.co_flags & __future__.annotations.compiler_flag, loader)
        found = [c for c in made if c.co_name == code.co_name]
        if code in found:
            return code.co_firstlineno
        moved = [c.co_firstlineno for c in found if _moved(c, code.co_firstlineno - c.co_firstlineno) == code]
        if len(moved) == 1:
            return moved[0]
    return None


def _moved(code: CodeType, by: int) -> CodeType:
    """The code that the same text some lines further down has."""
    return code.replace(co_firstlineno=code.co_firstlineno + by, co_consts=tuple(
        [_moved(c, by) if isinstance(c, CodeType) else c for c in code.co_consts]))


@lru_cache(maxsize=32)
def _compiled(text: str, file: str, flags: int, loader: Any) -> list[CodeType]:
    """The codes of a text.  loader: what compiles it, perhaps to another program: an import hook, or pytest for assertions."""
    tree: Any = text
    try:
        with warnings.catch_warnings():  # Python gave them when it compiled the text
            warnings.simplefilter("ignore")
            if hasattr(loader, "source_to_code"):
                return [*codes_in(loader.source_to_code(text.encode(), file))]
            if hasattr(rewriting := cast(Any, sys.modules.get(type(loader).__module__)), "rewrite_asserts"):
                tree = ast.parse(text)
                rewriting.rewrite_asserts(tree, text.encode(), file, loader.config)
            return [*codes_in(compile(tree, file, "exec", flags, dont_inherit=True))]
    except (SyntaxError, ValueError):
        return []


def keep(text: str, filename: str) -> None:
    """Make a text readable under a name, for tracebacks, carets and inspect.getsource."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


def _texts(code: CodeType) -> Iterator[str]:
    """Texts that a function of no file may come from."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and code.co_filename.startswith("<"):  # the line cache has no text of a cell with a magic (%%time)
        cells = reversed(shell.history_manager.input_hist_raw)
        yield from [cell.partition("\n")[2] for cell in cells if cell.startswith("%%")]
    if code.co_filename == "<string>" and "-c" in sys.orig_argv[:-1]:
        yield sys.orig_argv[sys.orig_argv.index("-c") + 1]
    if code.co_filename == "<stdin>":
        with suppress(OSError, UnicodeDecodeError, AttributeError):  # stdin is no file, which may be read twice
            yield os.pread(0, os.fstat(0).st_size, 0).decode()
        yield from _prompt(code.co_name)


def _prompt(name: str) -> Iterator[str]:
    """What was typed at the prompt since each line on which the function may start."""
    history = sys.modules.get("readline")
    count = 0 if history is None else history.get_current_history_length()
    typed = [history.get_history_item(k + 1) or "" for k in range(count)] if history is not None else []
    for k in reversed(range(count)):
        if typed[k].lstrip().startswith(("@", f"def {name}(")):
            yield "\n".join(typed[k:]) + "\n"


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
