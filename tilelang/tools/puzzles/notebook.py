"""The puzzles as a Jupyter notebook: statement, program to start from, check; and the picture of each solution."""

from __future__ import annotations

import json
import linecache
from typing import Any

from .book import Puzzle, puzzle, puzzles
from .pictures import picture
from .tasks import TASKS

_INTRODUCTION = """# Puzzles

Complete each program and run its cell: the check says what is wrong with it. No GPU is needed. Hints and solutions:
`tilelang puzzles hint 1`, `tilelang puzzles solution 1`."""


def picture_of(p: Puzzle) -> str:
    """SVG of what one block of a puzzle's solution does."""
    code, file = p.solution[1], f"<solution {p.number}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "solution"}
    exec(compile(code, file, "exec"), names)
    return picture(names[p.function].get_tir(**TASKS[p.function].cases[0]))


def notebook_text(solved: bool = False) -> str:
    """The notebook as JSON (nbformat 4.5).  solved: with the solutions in place of the programs to start from."""
    cells = [_cell("markdown", "introduction", _INTRODUCTION), _cell(
        "code", "imports",
        "import tilelang\nimport tilelang.language as T\nfrom tilelang.tools.puzzles import check, show_picture")]
    for p in puzzles():
        code = p.solution[1].split("\n\n\n", 1)[1] if solved else p.start
        cells += [_cell("markdown", f"text-{p.number}", f"## {p.number}. {p.title}\n\n{p.statement}"),
                  _cell("code", f"picture-{p.number}", f"show_picture({p.number})  # what one block of the solution does"),
                  _cell("code", f"program-{p.number}", f"{code}\n\ncheck({p.function})")]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": about, "cells": cells}, indent=1) + "\n"


def _cell(kind: str, name: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []}


class Drawn:
    """A picture that a notebook shows."""

    def __init__(self, svg: str) -> None:
        self._repr_svg_ = lambda: svg

    def __repr__(self) -> str:
        return "a picture (SVG)"


def show_picture(which: Any) -> Drawn:
    """The picture of a puzzle's solution, by number or name, or of a program."""
    return Drawn(picture_of(puzzle(str(which))) if isinstance(which, (int, str)) else picture(which))
