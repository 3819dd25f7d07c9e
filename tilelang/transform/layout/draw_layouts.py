"""Draws the layouts of a launch when tl.layout_visualization_enable is set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..framework.config import PassConfigKey
from ..framework.pass_ import PassContext

FOLDER = "./tmp"


def draw_layouts(layouts: Iterable[tuple[str, Any]], cx: PassContext) -> None:
    """Report each layout as text, or write picture files.

    The pictures are <FOLDER>/<buffer>.<format>, for the formats in tl.layout_visualization_formats.  Raises ValueError for an
    unknown format.
    """
    from tilelang.layout.picture import draw_files, picture_of, wanted_formats  # 2 ms

    formats = str(cx.option(PassConfigKey.TL_LAYOUT_VISUALIZATION_FORMATS))
    words = ["txt", "pdf", "png", "svg"] if formats == "all" else [f.strip() for f in formats.split(",")]
    pictures = [w for w in words if w != "txt"]
    files = wanted_formats(",".join(pictures)) if pictures else ()
    for name, layout in layouts:
        if "txt" in words:
            cx.report(f"# {name}\n{layout}")
        if files:
            for path in draw_files(picture_of(layout, name), FOLDER, name, files):
                cx.report(f"# layout of {name}: {path}")
