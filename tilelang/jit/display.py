"""What notebooks show of a kernel: its report as a table, pictures of its layouts, its source.  Draws schedules."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilelang.errors import error, register
from tilelang.layout import Fragment, Layout
from tilelang.layout.picture import picture_of, svg_of
from tilelang.transform.analysis.loop_schedule import Place, Schedule, number

from .artifact import Request
from .building import layouts_of

register("schedule-picture", ValueError, "a schedule cannot be drawn into such a file", "name a .svg, .png, .pdf or .json file",
         expected="a path that ends in .svg, .png, .pdf or .json")

MOST_CELLS = 16  # rows and columns of a picture in a notebook
SUFFIXES = (".svg", ".png", ".pdf", ".json")  # of pictures of schedules


class Report(str):
    """A report: a string that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = []
        for line in self.splitlines():
            what, colon, rest = line.strip().partition(": ")
            cell = '<td style="text-align:left">'
            rows.append(f'<tr>{cell}{html.escape(what)}</td>{cell}{html.escape(rest)}</td></tr>' if colon and line[:1] == " "
                        else f'<tr><th colspan="2" style="text-align:left">{html.escape(line)}</th></tr>')
        return f"<table>{''.join(rows)}</table>"


class Layouts(dict[str, Layout | Fragment]):
    """The layouts of a program's shared and fragment buffers by name; a notebook shows a picture of each.

    A second buffer of the same name is "KERNEL.NAME".
    """

    def _repr_html_(self) -> str:
        return layouts_html(self.items())


def kernel_layouts(request: Request) -> Layouts:
    """The layouts of the shared and fragment buffers of a request; none for the CPU, which keeps tiles row by row."""
    out = Layouts()
    for kernel, buffer, layout in layouts_of(request) if request.target.is_gpu else ():
        out[f"{kernel}.{buffer}" if buffer in out else buffer] = layout
    return out


def distinct(layouts: Iterable[tuple[str, Layout | Fragment]]) -> dict[str, Layout | Fragment]:
    """Each layout once, by the names of the buffers that have it: "As, Bs"."""
    names: dict[Layout | Fragment, str] = {}
    for name, x in layouts:
        names[x] = f"{names[x]}, {name}" if x in names else name
    return {name: x for x, name in names.items()}


def layouts_html(layouts: Iterable[tuple[str, Layout | Fragment]], most: int | None = MOST_CELLS, opened: str = "") -> str:
    """A picture of each layout, under its name.  most: rows and columns that are drawn.  opened: "open", or "" for a click."""
    out = ""
    for name, x in distinct(layouts).items():
        drawn = svg_of(picture_of(x, name, most=most, one_stage=True))
        out += f"<details {opened}><summary>{html.escape(f'{name}: {x!r}')}</summary>{drawn}</details>"
    return out or "no shared or fragment buffers"


def kernel_html(kernel: Any) -> str:
    """The report of a JITKernel, its layouts, and its device source."""
    source = html.escape(kernel.get_kernel_source())
    return (kernel.report()._repr_html_() + layouts_html(kernel.layouts.items())
            + f"<details><summary>source</summary><pre>{source}</pre></details>")


def draw_schedule(s: Schedule, path: Path, measured: float | None, predicted: float | None) -> Path:
    """Writes the picture.  measured: ms of a call.  predicted: us of one."""
    if path.suffix not in SUFFIXES:
        raise error("schedule-picture", f"a schedule is not drawn into {path.name}", found=path.suffix or "no suffix")
    title = f"loop {s.loop}: {number(s.cycles)} cycles predicted, at least {number(s.bound.cycles)} by {s.bound.term}"
    if measured is not None and predicted:
        title += f", {s.cycles * measured * 1e3 / predicted:.0f} measured"
    if path.suffix == ".json":
        path.write_text(json.dumps({"traceEvents": _events(s), "otherData": {"title": title}}), encoding="utf-8")
        return path
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures of schedules need matplotlib: pip install tilelang-py[vis], or write .json") from None
    rows = _rows(s)
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}):  # ids that do not change, text as text
        figure = Figure((9, 1.2 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for at, places in enumerate(rows.values()):
            for p in places:
                bars = [(x, min(y, s.cycles) - x) for x, y in ((p.begin, p.end), (0.0, p.end - s.cycles)) if y > x]
                axes.broken_barh(bars, (at - 0.4, 0.8), facecolor=f"C{(p.item * 3) % 10}", edgecolor="black", linewidth=0.5)
                begin, width = max(bars, key=lambda b: b[1], default=(0.0, 0.0))
                if width > s.cycles / 12:  # room for a word
                    axes.text(begin, at, f" {s.items[p.item].kind} {p.stage:+d}", va="center", fontsize=7, clip_on=True)
        axes.set(title=title, xlabel="cycles", xlim=(0, s.cycles), yticks=range(len(rows)), yticklabels=list(rows))
        axes.title.set_fontsize(9)
        axes.invert_yaxis()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _rows(s: Schedule) -> dict[str, list[Place]]:
    """The places by warp group and unit."""
    out: dict[str, list[Place]] = {}
    for p in sorted(s.places, key=lambda p: p.group):
        unit = s.items[p.item].unit
        out.setdefault(f"group {p.group}: {unit}" if p.group >= 0 else unit, []).append(p)
    return out


def _events(s: Schedule) -> list[dict[str, Any]]:
    """Complete events, one cycle as a microsecond, in a row for each group and unit."""
    out: list[dict[str, Any]] = []
    for row, (name, places) in enumerate(_rows(s).items()):
        out.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}})
        out += [{"ph": "X", "name": str(s.items[p.item]), "pid": 0, "tid": row, "ts": p.begin, "dur": p.end - p.begin,
                 "args": {"stage": p.stage, "item": p.item}} for p in places]
    return out
