"""Draws layouts and fragments into picture files."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.layout import Fragment, Layout
from tilelang.layout.picture import Picture, colours_of, draw_files, held_by, picture_of, wanted_formats


def plot_layout(layout: Any, save_directory: str = "./tmp", name: str = "layout", colormap: Any = None, verbose: bool = False,
                formats: str = "pdf", view: str = "input", grid_shape: tuple[int, int] | None = None) -> None:
    """Draw a Layout (each cell shows its physical element; view="output": the element stored there) or a Fragment (T thread,
    L register).

    formats: pdf, png, svg, all, or a comma list; files are <save_directory>/<name>.<format>.  colormap: a function of
    (row, column, value) -> (r, g, b) in 0..1, a colour map of matplotlib or its name, or None.  grid_shape: (rows, columns)
    of the picture of a 1-D layout.
    Raises TypeError for other objects, ValueError for an unknown format or view.
    """
    if not isinstance(layout, (Layout, Fragment)):
        raise TypeError(f"plot_layout draws a Layout or a Fragment, found {type(layout).__name__}")
    wanted = wanted_formats(formats)
    if view not in ("input", "output"):
        raise ValueError(f"view is 'input' or 'output', found {view!r}")
    if verbose:
        print(layout)
    _write(picture_of(layout, "", view, grid_shape, colormap), save_directory, name, wanted)


def plot_fragment_tv(fragment: Any, save_directory: str = "./tmp", name: str = "fragment_tv", colormap: Any = None,
                     verbose: bool = False, formats: str = "pdf") -> None:
    """Draw the elements of each thread of a Fragment: one row per thread, one column per register; cells show element indices.

    The cell of an unused register is empty.  colormap: a function of (thread, register, flat element) -> (r, g, b).
    Other arguments, files and errors are those of plot_layout.
    """
    if not isinstance(fragment, Fragment):
        raise TypeError(f"plot_fragment_tv draws a Fragment, found {type(fragment).__name__}")
    wanted = wanted_formats(formats)
    held = np.full((fragment.threads, fragment.registers), -1)
    registers = np.asarray(fragment.register_table())
    elements = np.arange(registers.size).reshape(registers.shape)
    for owner in np.asarray(fragment.owners()):
        held[owner, registers] = elements
    labels = [[[",".join(map(str, np.unravel_index(e, registers.shape)))] if e >= 0 else [""] for e in row] for row in held]
    if verbose:
        print(fragment)
    title = f"Fragment: {held_by(fragment)}"
    legend = "indices of the element" + ("" if colormap is not None else "; a hue for every four elements")
    _write(Picture(labels, colours_of(held, colormap), title, ("thread", "register"), legend), save_directory, name, wanted)


def _write(picture: Picture, directory: str, name: str, formats: tuple[str, ...]) -> None:
    for kind, path in zip(formats, draw_files(picture, directory, name, formats)):
        print(f"Saved {kind} format into {path}")
