"""Draws layouts as pictures with a title, names of the axes and a legend: SVG and PDF directly, PNG through matplotlib."""

from __future__ import annotations

import hashlib
import html
import os
from typing import Any

import numpy as np

from tilelang.ir.record import state

from .draw import two_d

CELL_W, CELL_H, LEFT, TOP, BOTTOM, RIGHT = 46, 30, 44, 62, 30, 12  # points
CELL_CHARACTERS = 8  # the characters that a line of a cell has room for
CHARACTER = 5.6  # width of a character of the title in points
FORMATS = ("pdf", "png", "svg")
_Text = tuple[float, float, int, str]  # x of the middle, y of the base line, size, words


@state
class Picture:
    """A grid of coloured cells.

    labels: lines of text of each cell, by row and column.  colours: [row, column, 3] in 0..1.  axes: names of the rows and of
    the columns.  legend: what the text and the colour of a cell say.
    """

    labels: list[list[list[str]]]
    colours: np.ndarray
    title: str = ""
    axes: tuple[str, str] = ("", "")
    legend: str = ""


def wanted_formats(formats: str) -> tuple[str, ...]:
    """The formats of "all" or of a comma list.  Raises ValueError for an unknown one."""
    wanted = FORMATS if formats == "all" else tuple(f.strip() for f in formats.split(","))
    unknown = [f for f in wanted if f not in FORMATS]
    if unknown:
        raise ValueError(f"unknown format {', '.join(unknown)}: one of {', '.join(FORMATS)}, all, or a comma list")
    return wanted


def draw_files(picture: Picture, directory: str, name: str, formats: tuple[str, ...]) -> list[str]:
    """Write <directory>/<name>.<format> for each format and return the paths."""
    os.makedirs(directory or ".", exist_ok=True)
    paths = []
    for kind in formats:
        paths.append(os.path.join(directory, f"{name}.{kind}"))
        if kind == "png":
            _png(paths[-1], picture)
        else:
            with open(paths[-1], "wb") as f:
                f.write(svg_of(picture).encode() if kind == "svg" else _pdf(picture))
    return paths


def picture_of(layout: Any, name: str = "", view: str = "input", grid_shape: Any = None, colormap: Any = None,
               most: int | None = None, one_stage: bool = False) -> Picture:
    """The picture of a Layout or Fragment.  name: for its title.  most: draw only so many of the first rows and columns.
    one_stage: of equal stages (a first dimension that only adds to the place), draw one.

    view, grid_shape, colormap: those of tools.plot_layout.
    """
    distributed = hasattr(layout, "owners")  # a Fragment, whose file imports this one
    *lead, last = list("ijklmnpq"[:len(layout.shape)]) or ["i"]
    axes = ("row", "column") if grid_shape is not None else (", ".join(lead), last)
    if distributed:
        registers = _flat(layout.register_table(), grid_shape)
        who = np.stack([_flat(o, grid_shape) for o in layout.owners()])
        values, what = who[0], f"Fragment {_by(layout.shape)}: {held_by(layout)}"
        legend, group = "T: thread, L: its register", "threads"
    else:
        values = np.asarray(layout.table())
        what, legend, group = f"Layout {_by(layout.shape)}: {layout.size} places", "number: place of the element", "places"
        if view == "output":
            inverse = np.full(max(int(layout.size), int(values.max()) + 1), -1)
            inverse[values.reshape(-1)] = np.arange(values.size)
            columns = values.shape[-1] if values.ndim > 1 else len(inverse)
            values = np.concatenate([inverse, np.full(-len(inverse) % columns, -1)]).reshape(-1, columns)
            axes, legend, group = (f"place / {columns}", f"place % {columns}"), "number: element at the place", "elements"
        elif one_stage and values.ndim > 2 and (step := _stage_step(values)) is not None:
            what += f", one of {len(values)} equal stages, places + {step}"
            axes, values = (", ".join(lead[1:]), last), values[0]
        values = _flat(values, grid_shape)
    if most is not None and max(values.shape) > most:
        values, what = values[:most, :most], f"{what} (the first {min(most, values.shape[0])} x {min(most, values.shape[1])})"
    rows, columns = values.shape
    if distributed:
        labels = [[["T" + ",".join(str(t) for t in who[:2, i, j]) + (",…" if len(who) > 2 else ""), f"L{registers[i, j]}"]
                   for j in range(columns)] for i in range(rows)]
    else:
        labels = [[[str(v) if v >= 0 else ""] for v in row] for row in values]
    if colormap is None:
        legend += f"; a hue for every four {group}"
    return Picture(labels, colours_of(values, colormap), f"{name}: {what}" if name else what, axes, legend)


def _stage_step(table: np.ndarray) -> int | None:
    """What each stage of a table adds to the places of the one before; None where stages differ."""
    steps = table[1:] - table[:-1]
    return int(steps.flat[0]) if len(table) > 1 and (steps == steps.flat[0]).all() else None


def held_by(f: Any) -> str:
    """The threads, registers and copies of a fragment in words."""
    return f"{f.threads} threads, {f.registers} registers each" + (f", {f.replicas} copies" if f.replicas > 1 else "")


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _flat(table: np.ndarray, grid_shape: Any) -> np.ndarray:
    return two_d(table) if grid_shape is None else table.reshape(grid_shape)


def colours_of(values: np.ndarray, colormap: Any) -> np.ndarray:
    """RGB of each cell: light colours, equal for equal values, from eight hues that repeat with the thread.

    colormap: a function of (row, column, value) -> (r, g, b), a colour map of matplotlib or its name, or None.
    Raises ValueError for a name that matplotlib does not know, ImportError where it is not installed.
    """
    rows, columns = values.shape
    if isinstance(colormap, str):
        colormap = _named(colormap)
    if hasattr(colormap, "N"):  # matplotlib's: of a number from 0 to 1
        scale, ramp_of = max(1, int(values.max(initial=0))), colormap
        colormap = lambda i, j, v: ramp_of(max(v, 0) / scale)[:3]  # noqa: E731
    out = np.ones((rows, columns, 3))
    for i in range(rows):
        for j in range(columns):
            v = int(values[i, j])
            if colormap is not None:
                out[i, j] = colormap(i, j, v)
            elif v >= 0:
                hue = (v // 4 % 8) / 8 * 6
                ramp = [max(0.0, min(1.0, abs((hue + k) % 6 - 3) - 1)) for k in (0, 4, 2)]
                out[i, j] = [0.72 + 0.28 * c - 0.05 * (v % 4) for c in ramp]
    return np.clip(out, 0, 1)


def _named(name: str) -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ImportError(f"the colour map {name!r} is matplotlib's: pip install tilelang-py[vis], or pass a function of "
                          "(row, column, value)") from None
    try:
        return matplotlib.colormaps[name]
    except KeyError:
        raise ValueError(f"matplotlib has no colour map {name!r}") from None


def _texts(p: Picture) -> tuple[float, float, list[_Text]]:
    """(width, height, words around the grid and the numbers of its rows and columns) of a picture."""
    rows, columns = p.colours.shape[:2]
    longest = max(len(p.title), len(p.legend))
    w, h = max(columns * CELL_W, longest * CHARACTER) + LEFT + RIGHT, rows * CELL_H + TOP + BOTTOM
    middle = (w + LEFT - RIGHT) / 2
    around: list[_Text] = [(middle, 16, 11, p.title), (LEFT + columns * CELL_W / 2, 36, 10, p.axes[1]),
           (LEFT - 12, 36, 10, p.axes[0]), (middle, h - 10, 9, p.legend)]
    around += [(LEFT + (j + 0.5) * CELL_W, TOP - 8, 9, str(j)) for j in range(columns)]
    around += [(LEFT - 12, TOP + (i + 0.6) * CELL_H, 9, str(i)) for i in range(rows)]
    return w, h, [t for t in around if t[3]]


def svg_of(p: Picture) -> str:
    """The text of an SVG file.  A line of labels is one text of equal characters; rows of equal colours are written once."""
    rows, columns = p.colours.shape[:2]
    w, h, around = _texts(p)

    def drawn(text: _Text) -> str:
        x, y, size, words = text
        return f'<text x="{x:g}" y="{y:g}"' + (f' font-size="{size}"' if size != 9 else "") + f">{html.escape(words)}</text>"

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{w:g}" height="{h:g}" font-family="Helvetica" font-size="9" '
           f'text-anchor="middle">', f"<title>{html.escape(p.title)}</title>"]
    written: set[str] = set()
    for i, colours in enumerate((255 * p.colours).astype(int).tolist()):
        paths: dict[str, str] = {}
        for j, (r, g, b) in enumerate(colours):
            fill = f"#{r:02x}{g:02x}{b:02x}"
            paths[fill] = paths.get(fill, "") + f"M{LEFT + j * CELL_W} 0h{CELL_W}v{CELL_H}h-{CELL_W}z"
        row = "".join(f'<path fill="{fill}" d="{path}"/>' for fill, path in paths.items())
        name = f"c{hashlib.sha1(row.encode()).hexdigest()[:12]}"  # by contents: a page may hold many pictures
        if name not in written:
            out.append(f'<defs><g id="{name}" stroke="gray">{row}</g></defs>')
        written.add(name)
        out.append(f'<use href="#{name}" y="{TOP + i * CELL_H}"/>')
    wide = max([CELL_CHARACTERS, *(len(line) + 1 for row in p.labels for cell in row for line in cell)])
    size = CELL_W / wide / 0.6  # the width of a character is 0.6 of its height
    out.append(f'<g font-family="monospace" font-size="{size:.3g}" text-anchor="start">')
    for i, cells in enumerate(p.labels):
        for k in range(max(map(len, cells), default=0)):
            text = "".join((cell[k] if k < len(cell) else "").center(wide) for cell in cells).replace(" ", "\u00a0")
            y = TOP + i * CELL_H + 13 + 11 * k
            out.append(f'<text x="{LEFT}" y="{y}" textLength="{columns * CELL_W}">{html.escape(text)}</text>')
    return "\n".join([*out, "</g><g>", *map(drawn, around), "</g>", "</svg>", ""])


def _pdf(p: Picture) -> bytes:
    """One page (ISO 32000-1, 7.5): rectangles and Helvetica text."""
    rows, columns = p.colours.shape[:2]
    w, h, around = _texts(p)
    cells = [(LEFT + (j + 0.5) * CELL_W, TOP + i * CELL_H + 13 + 11 * k, 9, line)
             for i in range(rows) for j in range(columns) for k, line in enumerate(p.labels[i][j])]
    draw: list[str] = ["0.5 w"]
    for i in range(rows):
        for j in range(columns):
            r, g, b = p.colours[i, j]
            draw.append(f"{r:.3f} {g:.3f} {b:.3f} rg 0.6 G {LEFT + j * CELL_W} {h - TOP - (i + 1) * CELL_H} {CELL_W} {CELL_H} "
                        "re B 0 g")
    for x, y, size, words in (*cells, *around):
        clean = words.replace("…", "...").replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
        draw.append(f"BT /F {size - 1} Tf {x - 0.25 * size * len(words):.1f} {h - y:.1f} Td ({clean}) Tj ET")
    stream = "\n".join(draw)
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
               f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {w:g} {h:g}] /Contents 4 0 R "
               "/Resources << /Font << /F 5 0 R >> >> >>",
               f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
               "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    body, places = "%PDF-1.4\n", []
    for k, obj in enumerate(objects, 1):
        places.append(len(body))
        body += f"{k} 0 obj\n{obj}\nendobj\n"
    table = "".join(f"{p:010d} 00000 n \n" for p in places)
    body += (f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n"
             f"<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(body)}\n%%EOF\n")
    return body.encode("latin-1", "replace")


def _png(path: str, p: Picture) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("PNG pictures need matplotlib: pip install tilelang-py[vis], or draw svg or pdf") from None
    rows, columns = p.colours.shape[:2]
    figure, axes = pyplot.subplots(figsize=(columns * CELL_W / 72 + 1, rows * CELL_H / 72 + 1.4))
    axes.imshow(p.colours, aspect="auto")
    axes.set(title=p.title, xlabel=f"{p.axes[1]}\n{p.legend}", ylabel=p.axes[0])
    for i in range(rows):
        for j in range(columns):
            axes.text(j, i, "\n".join(p.labels[i][j]), ha="center", va="center", fontsize=6)
    figure.savefig(path, bbox_inches="tight", dpi=150)
    pyplot.close(figure)
