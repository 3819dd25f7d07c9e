"""Writes an HTML page that shows what each pass does to a program, and an outline of a program.

    python -m tilelang.tools.pass_visualizer.viewer FILE --set N=1024 --out passes.html
"""

from .data import build_pass_data, emit_html, inspect_structure

__all__ = ["build_pass_data", "emit_html", "inspect_structure"]
