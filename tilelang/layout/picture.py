"""Draws layouts as image files: SVG and PDF are written directly, PNG through matplotlib."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .fragment import Fragment

CELL_W, CELL_H, MARGIN = 46, 30, 24  # points
FORMATS = ("pdf", "png", "svg")


def wanted_formats(formats: str) -> tuple[str, ...]:
    """The formats of "all" or of a comma list.  Raises ValueError for an unknown one."""
    wanted = FORMATS if formats == "all" else tuple(f.strip() for f in formats.split(","))
    unknown = [f for f in wanted if f not in FORMATS]
    if unknown:
        raise ValueError(f"unknown format {', '.join(unknown)}: one of {', '.join(FORMATS)}, all, or a comma list")
    return wanted


def draw_files(labels: list[list[list[str]]], colours: np.ndarray, directory: str, name: str,
               formats: tuple[str, ...]) -> list[str]:
    """Write <directory>/<name>.<format> for each format and return the paths.

    labels: lines of text of each cell, by row and column.  colours: [row, column, 3] in 0..1.
    """
    os.makedirs(directory, exist_ok=True)
    paths = []
    for kind in formats:
        paths.append(os.path.join(directory, f"{name}.{kind}"))
        {"svg": _svg, "pdf": _pdf, "png": _png}[kind](paths[-1], labels, colours)
    return paths


def cells(layout: Any, view: str, grid_shape: Any, colormap: Any) -> tuple[list[list[list[str]]], np.ndarray]:
    """Lines of text and colour of each cell, by row and column."""
    if isinstance(layout, Fragment):
        owners = layout.owners()
        registers = _flat(layout.register_table(), grid_shape)
        who = np.stack([_flat(o, grid_shape) for o in owners])
        labels = [[["T" + ",".join(str(t) for t in who[:2, i, j]) + (",…" if len(who) > 2 else ""), f"L{registers[i, j]}"]
                   for j in range(registers.shape[1])] for i in range(registers.shape[0])]
        return labels, colours_of(who[0], colormap)
    table = np.asarray(layout.table())
    if view == "output":
        inverse = np.full(max(int(layout.size), int(table.max()) + 1), -1)
        inverse[table.reshape(-1)] = np.arange(table.size)
        columns = table.shape[-1] if table.ndim > 1 else len(inverse)
        table = np.concatenate([inverse, np.full(-len(inverse) % columns, -1)]).reshape(-1, columns)
    values = _flat(table, grid_shape)
    return [[[str(v) if v >= 0 else ""] for v in row] for row in values], colours_of(values, colormap)


def _flat(table: np.ndarray, grid_shape: Any) -> np.ndarray:
    table = np.asarray(table)
    if grid_shape is not None:
        return table.reshape(grid_shape)
    return table.reshape(-1, table.shape[-1] if table.ndim else 1)


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


def _svg(path: str, labels: list[list[list[str]]], colours: np.ndarray) -> None:
    rows, columns = colours.shape[:2]
    w, h = columns * CELL_W + MARGIN, rows * CELL_H + MARGIN
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" font-family="Helvetica" font-size="9" '
           f'text-anchor="middle">']
    out += [f'<text x="{MARGIN + (j + 0.5) * CELL_W}" y="{MARGIN - 8}">{j}</text>' for j in range(columns)]
    out += [f'<text x="{MARGIN / 2}" y="{MARGIN + (i + 0.6) * CELL_H}">{i}</text>' for i in range(rows)]
    for i in range(rows):
        for j in range(columns):
            x, y = MARGIN + j * CELL_W, MARGIN + i * CELL_H
            r, g, b = (int(255 * c) for c in colours[i, j])
            out.append(f'<rect x="{x}" y="{y}" width="{CELL_W}" height="{CELL_H}" fill="rgb({r},{g},{b})" stroke="gray"/>')
            for k, line in enumerate(labels[i][j]):
                out.append(f'<text x="{x + CELL_W / 2}" y="{y + 13 + 11 * k}">{line}</text>')
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n".join([*out, "</svg>", ""]))


def _pdf(path: str, labels: list[list[list[str]]], colours: np.ndarray) -> None:
    """One page (ISO 32000-1, 7.5): rectangles and Helvetica text."""
    rows, columns = colours.shape[:2]
    w, h = columns * CELL_W + MARGIN, rows * CELL_H + MARGIN
    draw: list[str] = ["0.5 w"]

    def text(x: float, y: float, words: str) -> None:
        clean = words.replace("…", "...").replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
        draw.append(f"BT /F 8 Tf {x - 2.1 * len(clean):.1f} {h - y:.1f} Td ({clean}) Tj ET")

    for i in range(rows):
        text(MARGIN / 2, MARGIN + (i + 0.6) * CELL_H, str(i))
        for j in range(columns):
            x, y = MARGIN + j * CELL_W, MARGIN + i * CELL_H
            r, g, b = colours[i, j]
            draw.append(f"{r:.3f} {g:.3f} {b:.3f} rg 0.6 G {x} {h - y - CELL_H} {CELL_W} {CELL_H} re B 0 g")
            for k, line in enumerate(labels[i][j]):
                text(x + CELL_W / 2, y + 13 + 11 * k, line)
    for j in range(columns):
        text(MARGIN + (j + 0.5) * CELL_W, MARGIN - 8, str(j))
    stream = "\n".join(draw)
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
               f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {w} {h}] /Contents 4 0 R "
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
    with open(path, "wb") as f:
        f.write(body.encode("latin-1"))


def _png(path: str, labels: list[list[list[str]]], colours: np.ndarray) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("PNG pictures need matplotlib: pip install tilelang-py[vis], or draw svg or pdf") from None
    rows, columns = colours.shape[:2]
    figure, axes = pyplot.subplots(figsize=(columns * CELL_W / 72 + 0.4, rows * CELL_H / 72 + 0.4))
    axes.imshow(colours, aspect="auto")
    for i in range(rows):
        for j in range(columns):
            axes.text(j, i, "\n".join(labels[i][j]), ha="center", va="center", fontsize=6)
    figure.savefig(path, bbox_inches="tight", dpi=150)
    pyplot.close(figure)



__all__ = ["FORMATS", "cells", "colours_of", "draw_files", "wanted_formats"]
