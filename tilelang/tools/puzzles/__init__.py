"""Puzzles: graded exercises, checked by the reference interpreter and the device simulator.  No GPU is needed.

    tilelang puzzles                 # the list, and how far one is

    from tilelang.tools.puzzles import check
    check(copy)                      # in a notebook
"""

from __future__ import annotations

from .book import Puzzle, puzzle, puzzles
from .checking import Verdict, check, check_file
from .notebook import show_picture
from .pictures import picture
__all__ = ["Puzzle", "Verdict", "check", "check_file", "picture", "puzzle", "puzzles", "show_picture"]
