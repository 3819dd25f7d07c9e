"""Writes an HTML page that shows what each pass does to a program, and an outline of a program.

    python -m tilelang.tools.pass_visualizer.viewer FILE --set N=1024 --out passes.html
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilelang.ir import Alloc, Buffer, Func, Node, Region, Stmt, children
from tilelang.tools.lower_trace import only_program, steps
from tilelang.jit.trace import page_of


def build_pass_data(func_or_mod: Any, target: Any = None, passes: Iterable[Any] | None = None,
                    context: int = 3) -> list[dict[str, Any]]:
    """Run the passes of the GPU pipeline on a program.

    Returns one record per pass: the fields of tools.lower_trace, seconds, phase (of the program after the pass) and structure
    (its outline, see inspect_structure).  passes: names or passes of the pipeline, in order; None: all.
    """
    return [{**record, "seconds": seconds, "phase": after.facts.phase, "structure": inspect_structure(after)}
            for record, after, seconds in steps(func_or_mod, passes, context, target)]


def emit_html(data: list[dict[str, Any]], out: Any = None, title: str = "Passes") -> str:
    """The HTML page of build_pass_data's records.  It is also written to `out`, if given."""
    page = page_of([(title, data)], title)
    if out is not None:
        path = Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    return page


def inspect_structure(func_or_mod: Any) -> dict[str, Any]:
    """Outline of a program: name, phase, params (name -> "dtype[shape]"), buffers (those allocated: name -> scope, dtype,
    shape), and body: nested {kind, line, children} of its statements.  line: of the source, 0 where unknown."""
    func = only_program(func_or_mod)
    buffers: dict[str, str] = {}
    body = _outline(func.body, buffers)
    params = {(b.name if (b := func.buffer_of(p)) is not None else p.name):
              _shape(b) if b is not None else f"{p.dtype}" for p in func.params}
    return {"name": func.name, "phase": func.facts.phase, "params": params, "buffers": buffers, "body": body}


def _shape(b: Buffer) -> str:
    return f"{b.dtype}[{', '.join(map(str, b.shape))}]"


def _outline(s: Node, buffers: dict[str, str]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if isinstance(s, Alloc):
        buffers[s.buffer.name] = f"{s.buffer.scope_name} {_shape(s.buffer)}"
    inner = [o for c in children(s) if isinstance(c, (Stmt, Region)) for o in _outline(c, buffers)]
    if isinstance(s, Stmt) and type(s).__name__ != "Seq":
        out.append({"kind": type(s).__name__, "line": getattr(s.span, "line", 0) or 0, "children": inner})
        return out
    return inner


def outline_text(func: Func) -> str:
    """inspect_structure as indented lines."""
    found = inspect_structure(func)
    lines = [f"{found['name']} ({found['phase']})"]
    lines += [f"  param {n}: {t}" for n, t in found["params"].items()]
    lines += [f"  buffer {n}: {t}" for n, t in found["buffers"].items()]

    def add(nodes: list[dict[str, Any]], depth: int) -> None:
        for n in nodes:
            lines.append("  " * depth + n["kind"] + (f"  line {n['line']}" if n["line"] else ""))
            add(n["children"], depth + 1)

    add(found["body"], 1)
    return "\n".join(lines)


__all__ = ["build_pass_data", "emit_html", "inspect_structure"]
