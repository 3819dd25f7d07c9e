"""The trace of a compilation: what each pass changed, as text differences, in a folder or on an HTML page.

TL_LOWER_TRACE=html (or both) writes it for every compilation of a script; tools.lower_trace is the user's interface.
"""

from __future__ import annotations

import difflib
import html
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilelang.env import env
from tilelang.ir import Func

from tilelang.transform.framework.observe import CodegenEvent, PassEvent, PassEventObserver, text_of


def difference(name: str, before: str, after: str, context: int = 3) -> dict[str, Any]:
    """The record of one pass: name, before_script, after_script, diff_lines (unified, with `context` lines around a
    change), insertions, deletions (lines) and changed."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), "before", f"after {name}", lineterm="",
                                      n=context))
    body = lines[2:]
    return {"name": name, "before_script": before, "after_script": after, "diff_lines": lines,
            "insertions": sum(x.startswith("+") for x in body), "deletions": sum(x.startswith("-") for x in body),
            "changed": before != after}


@dataclass
class Pipeline:
    """The trace of one program through a list of passes."""

    name: str
    target: str
    passes: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class TraceSession:
    """The compilations of one process: pipelines in order, and the printed sources. directory: where the trace is written."""

    directory: Path
    started: float
    pipelines: list[Pipeline] = field(default_factory=list)
    sources: list[tuple[str, str]] = field(default_factory=list)
    first_run: bool | None = None

    @property
    def report_path(self) -> Path:
        return self.directory / "report.html"

    @property
    def code_path(self) -> Path:
        """File of the generated sources: tools.lower_trace.enable(codegen_output=), else codegen.cpp in the directory."""
        return Path(_code_output) if _code_output else self.directory / "codegen.cpp"

    @property
    def record_path(self) -> Path:
        stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(self.started))
        return self.directory / ".run_records" / f"run_{stamp}_{os.getpid()}"

    def write(self) -> None:
        """Write report.html and the record of this run (passes.json, report.html)."""
        page = page_of([(f"{p.name} for {p.target}", p.passes) for p in self.pipelines])
        folder = self.record_path
        folder.mkdir(parents=True, exist_ok=True)
        self.report_path.write_text(page, encoding="utf-8")
        (folder / "report.html").write_text(page, encoding="utf-8")
        facts = [{"name": p.name, "target": p.target, "passes": [
            {k: r[k] for k in ("name", "changed", "insertions", "deletions")} for r in p.passes]} for p in self.pipelines]
        (folder / "passes.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    def write_code(self) -> None:
        """Write the sources: <file>.latest is this run's, <file>.original the first run's. <file> itself is overwritten by each
        run until the user edits it."""
        path = self.code_path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(f"// ---- {name}\n{code}" for name, code in self.sources)
        latest, original = (path.with_name(path.name + end) for end in (".latest", ".original"))
        untouched = not path.exists() or (latest.exists() and path.read_text(encoding="utf-8") == latest.read_text(
            encoding="utf-8"))
        if untouched:
            path.write_text(text, encoding="utf-8")
        if self.first_run is None:
            self.first_run = not original.exists()
        if self.first_run:
            original.write_text(text, encoding="utf-8")
        latest.write_text(text, encoding="utf-8")


class Tracer(PassEventObserver):
    """Collects what passes change and writes the session when a list of passes is done."""

    def __init__(self, session: TraceSession, context: int = 3) -> None:
        self.session, self.context = session, context
        self._local = threading.local()

    def on_pipeline_start(self, func: Func, target: Any) -> None:
        self._local.pipeline = Pipeline(func.name, str(target) if target is not None else "any target")

    def on_pass(self, event: PassEvent) -> None:
        before = text_of(event.before)
        after = text_of(event.after) if event.changed else before
        record = difference(event.name, before, after, self.context)
        self._local.pipeline.passes.append({**record, "seconds": event.seconds})

    def on_pipeline_end(self, func: Func, target: Any) -> None:
        with _guard:
            self.session.pipelines.append(self._local.pipeline)
            self.session.write()

    def on_codegen(self, event: CodegenEvent) -> None:
        with _guard:
            self.session.sources.append((event.name, event.code))
            self.session.write_code()


_guard = threading.Lock()
_tracer: Tracer | None = None
_code_output: str | None = None


def tracer() -> Tracer:
    """The tracer that writes below TL_LOWER_TRACE_DIR, in the folder of the running script."""
    global _tracer
    directory = Path(env.get_lower_trace_dir()) / script_name()
    with _guard:
        if _tracer is None or _tracer.session.directory != directory:
            _tracer = Tracer(TraceSession(directory, time.time()))
        return _tracer


def script_name() -> str:
    """Name of the running script without its suffix."""
    name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return name if name and name not in ("-c", "-m") else "interactive"


def last_session() -> TraceSession | None:
    """The session that TL_LOWER_TRACE wrote last, None before the first."""
    return _tracer.session if _tracer is not None else None


def start(code_output: str | None) -> None:
    """Begin a new session with the next compilation. code_output: file of the sources, None for the default."""
    global _tracer, _code_output
    with _guard:
        _tracer, _code_output = None, code_output


_STYLE = """body{font-family:sans-serif;margin:1.5em;max-width:110em}pre{background:#f6f8fa;padding:.6em;overflow:auto}
.add{background:#dafbe1}.del{background:#ffebe9}.at{color:#57606a}summary{cursor:pointer;padding:.15em}
.same summary{color:#8c959f}h2{border-bottom:1px solid #d0d7de}"""


def page_of(pipelines: list[tuple[str, list[dict[str, Any]]]], title: str = "Passes") -> str:
    """An HTML page of several programs: each pass with its difference, folded, and the program after it."""
    out = [f"<!doctype html><html><head><meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"
           f"</head><body><h1>{html.escape(title)}</h1>"]
    for name, passes in pipelines:
        changed = sum(r["changed"] for r in passes)
        out.append(f"<h2>{html.escape(name)}</h2><p>{len(passes)} passes, {changed} changed the program</p>")
        for k, r in enumerate(passes):
            time_ = f" {r['seconds'] * 1e3:.2f} ms" if "seconds" in r else ""
            count = f" +{r['insertions']} -{r['deletions']}" if r["changed"] else " (unchanged)"
            kind = "changed" if r["changed"] else "same"
            out.append(f"<details class='{kind}'><summary>{k}. {html.escape(r['name'])}{count}{time_}</summary>")
            if r["changed"]:
                out.append("<pre>" + "\n".join(map(_coloured, r["diff_lines"])) + "</pre>")
                out.append(f"<details><summary>program after it</summary><pre>{html.escape(r['after_script'])}</pre></details>")
            out.append("</details>")
    return "\n".join([*out, "</body></html>\n"])


def _coloured(line: str) -> str:
    kind = {"+": "add", "-": "del", "@": "at"}.get(line[:1])
    text = html.escape(line)
    return f"<span class='{kind}'>{text}</span>" if kind else text
