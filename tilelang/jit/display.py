"""What notebooks show of a kernel: its report as a table, pictures of its layouts, its source."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from tilelang.layout import Fragment, Layout
from tilelang.layout.picture import picture_of, svg_of

from .artifact import Request
from .building import layouts_of

MOST_CELLS = 16  # rows and columns of a picture in a notebook


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
    for kernel, buffer, layout in layouts_of(request) if request.target.is_cuda else ():
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


__all__ = ["Layouts", "Report", "distinct", "kernel_html", "kernel_layouts", "layouts_html"]
