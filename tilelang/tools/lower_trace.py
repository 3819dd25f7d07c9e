"""lower_trace: shows the changes that passes make to a program as text diffs, on the terminal, on a page, or as data.

    from tilelang.tools.lower_trace import lower_trace
    for step in lower_trace(program, None, mode="none"):
        print(step["name"], step["insertions"], step["deletions"])

`enable` traces every compilation that follows, as TL_LOWER_TRACE does.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tilelang.env import env
from tilelang.ir import Func
from tilelang.jit.artifact import program_of
from tilelang.target import Target
from tilelang.jit import trace
from tilelang.transform.framework.observe import TRACE_MODES
from tilelang.transform.framework.pass_ import PassContext, text_of
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES
from tilelang.transform.framework.scope import current_config

PIPELINE = (*TILE_PASSES, *DEVICE_PASSES)
_SHOWN = ("terminal", "html", "both", "none")


def lower_trace(func_or_mod: Any, passes: Iterable[Any] | None = None, mode: str = "terminal", context: int = 3,
                html_path: Any = "lower_trace_report.html", target: Any = None) -> list[dict[str, Any]]:
    """Run passes on a program one by one and record what each changed.

    passes: names of passes of the pipeline, passes themselves, or functions of a program; None: the whole pipeline.
    mode: "terminal" prints the differences, "html" writes html_path, "both" does both, "none" neither.  context: lines
    around a change.  target: default the current target scope, else CUDA.
    Returns one record per pass: name, before_script, after_script, diff_lines, insertions, deletions, changed.
    Raises ValueError for an unknown mode or name, TypeError for an argument that is no pass, and the errors of the passes.
    """
    if mode not in _SHOWN:
        raise ValueError(f"mode is one of {', '.join(_SHOWN)}, found {mode!r}")
    records = []
    for record, _, _ in steps(func_or_mod, passes, context, target):
        records.append(record)
        if mode in ("terminal", "both"):
            _print(record)
    if mode in ("html", "both"):
        path = Path(html_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(trace.page_of([(only_program(func_or_mod).name, records)], "Lowering"), encoding="utf-8")
        print(f"lower trace written to {path}")
    return records


def steps(func_or_mod: Any, passes: Iterable[Any] | None, context: int,
          target: Any) -> Iterator[tuple[dict[str, Any], Func, float]]:
    """(record of lower_trace, the program after it, seconds) of each pass."""
    func, cx = only_program(func_or_mod), PassContext(target_of(target), current_config())
    for p in PIPELINE if passes is None else passes:
        name, run = resolve_pass(p)
        before, start = func, time.perf_counter()
        out = run(func, cx)
        seconds = time.perf_counter() - start
        func = before if out is None else only_program(out)
        yield trace.difference(name, text_of(before), text_of(func), context), func, seconds


def only_program(func_or_mod: Any) -> Func:
    """The program of a PrimFunc, a Func, or a module that holds one.  Raises TypeError for anything else."""
    if hasattr(func_or_mod, "functions"):
        found = list(func_or_mod.functions.values())
        if len(found) != 1:
            raise ValueError(f"a module with one program is expected, found {len(found)}")
        func_or_mod = found[0]
    func = program_of(func_or_mod)
    if func is None:
        raise TypeError(f"a PrimFunc is expected, found {type(func_or_mod).__name__}")
    return func


def target_of(target: Any = None) -> Target:
    """The CUDA target for the passes: the given one, else that of the current scope, else the device's, else sm_80."""
    if target is not None:
        return Target(target)
    return Target.current() or Target("cuda")


def resolve_pass(p: Any) -> tuple[str, Any]:
    """(name, function of program and context) of a pass, given by its name, as a pass, or as a function of a program."""
    if isinstance(p, str):
        named = {q.__name__: q for q in PIPELINE}
        if p not in named:
            raise ValueError(f"no pass {p!r}: passes are {', '.join(named)}")
        return p, named[p]
    if hasattr(p, "needs"):
        return p.__name__, p
    if not callable(p):
        raise TypeError(f"a pass is a name or a function of a program, found {type(p).__name__}")
    name = getattr(p, "name", None) or getattr(p, "__name__", type(p).__name__)
    return str(name), lambda func, cx: p(func)


def _print(record: dict[str, Any]) -> None:
    changed = f"+{record['insertions']} -{record['deletions']}" if record["changed"] else "(unchanged)"
    print(f"# {record['name']} {changed}")
    if record["changed"]:
        print("\n".join(record["diff_lines"]))


def enable(mode: str = "html", trace_dir: Any = None, codegen_output: Any = None) -> None:
    """Trace every later compilation.  While tracing, kernels do not come from the cache.

    mode: "terminal" (also "1") prints programs after passes, "html" writes <trace_dir>/<script>/report.html, "both".
    trace_dir: default TL_LOWER_TRACE_DIR.  codegen_output: file of the generated sources (default codegen.cpp beside
    the report), kept as <file>.original of the first run and <file>.latest of the last; an edited <file> is left alone.
    """
    if mode not in TRACE_MODES or mode == "0":
        raise ValueError(f"mode is one of {', '.join(TRACE_MODES[1:])}, found {mode!r}")
    env.TL_LOWER_TRACE = mode
    if trace_dir is not None:
        env.TL_LOWER_TRACE_DIR = str(trace_dir)
    trace.start(str(codegen_output) if codegen_output is not None else None)


def disable() -> None:
    """Stop tracing, regardless of the environment.  The records stay."""
    env.TL_LOWER_TRACE = "0"


def reset() -> None:
    """Delete the records and undo enable and disable, so that the environment decides again."""
    for key in ("TL_LOWER_TRACE", "TL_LOWER_TRACE_DIR"):
        env.forget(key)
    trace.start(None)


def get_last_session() -> trace.TraceSession | None:
    """The last written session: directory, report_path, code_path, record_path, pipelines, sources.  None if there is none."""
    return trace.last_session()


class _CallableModule(types.ModuleType):
    """The class of this module, which makes `tilelang.tools.lower_trace(...)` callable too."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        return lower_trace(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

__all__ = ["disable", "enable", "get_last_session", "lower_trace", "only_program", "reset", "resolve_pass", "target_of"]
