"""`tilelang puzzles`: lists the puzzles, writes the learner's files, shows hints, checks, draws, and keeps the progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilelang.ir.record import record

from .book import Puzzle, learners_file, puzzle, puzzles

PROGRESS, NOTEBOOK = "progress.json", "puzzles.ipynb"


@record
class Desk:
    """A learner's folder."""

    folder: Path

    @property
    def progress(self) -> dict[str, Any]:
        """{"solved": names, "hints": name -> number seen}; a file that somebody damaged counts as none."""
        try:
            known = json.loads((self.folder / PROGRESS).read_text(encoding="utf-8"))
            return {"solved": list(known["solved"]), "hints": dict(known["hints"])}
        except (OSError, ValueError, KeyError, TypeError):
            return {"solved": [], "hints": {}}

    def write(self, name: str, text: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text, encoding="utf-8")
        return self.folder / name

    def keep(self, progress: dict[str, Any]) -> None:
        self.write(PROGRESS, json.dumps(progress, indent=1) + "\n")

    def file(self, p: Puzzle) -> Path:
        return self.folder / learners_file(p)

    def next(self) -> Puzzle | None:
        """The first puzzle that is not solved."""
        return next((p for p in puzzles() if p.function not in self.progress["solved"]), None)


def list_all(desk: Desk, _: Puzzle | None) -> int:
    """The puzzles, and which are solved."""
    solved = desk.progress["solved"]
    for p in puzzles():
        print(f"{'[x]' if p.function in solved else '[ ]'} {p.number:2}. {p.title:32} {desk.file(p)}")
    after = desk.next()
    how = f"tilelang puzzles check {after.number}" if after and desk.file(after).exists() else "tilelang puzzles start"
    print(f"{len(solved)} of {len(puzzles())} solved." + (f" Next: puzzle {after.number}; {how}" if after else ""))
    return 0


def start(desk: Desk, _: Puzzle | None) -> int:
    """Write the files that do not exist yet."""
    for p in puzzles():
        if not desk.file(p).exists():
            print(f"written: {desk.write(learners_file(p), p.source)}")
    print(f"Read {desk.file(puzzles()[0])}, complete it, then: tilelang puzzles check 1")
    return 0


def show(desk: Desk, p: Puzzle) -> int:
    """Print a statement."""
    print(f"{p.number}. {p.title}\n\n{p.statement}\n\nfile: {desk.file(p)}")
    return 0


def hint(desk: Desk, p: Puzzle) -> int:
    """Print the hints seen so far and one more."""
    progress = desk.progress
    seen = min(progress["hints"].get(p.function, 0) + 1, len(p.hints))
    desk.keep({**progress, "hints": {**progress["hints"], p.function: seen}})
    for k in range(seen):
        print(f"hint {k + 1} of {len(p.hints)}: {p.hints[k]}")
    return 0


def check(desk: Desk, p: Puzzle) -> int:
    """Check a learner's file, and remember that it is solved."""
    from .checking import check_file  # 600 ms

    v = check_file(desk.file(p), p.function)
    print(v)
    if not v.ok:
        return 1
    progress = desk.progress
    desk.keep({**progress, "solved": [*dict.fromkeys([*progress["solved"], p.function])]})
    after = desk.next()
    print(f"Next: puzzle {after.number}, {after.title}." if after else "All puzzles are solved.")
    return 0


def draw(desk: Desk, p: Puzzle) -> int:
    """Draw what the solution of a puzzle does into an SVG file."""
    from .notebook import picture_of  # 600 ms

    print(f"picture: {desk.write(f'{desk.file(p).stem}.svg', picture_of(p))} (open it in a browser)")
    return 0


def solution(_: Desk, p: Puzzle) -> int:
    """Print the solution."""
    text, code = p.solution
    print(f"{code}\n# {text}")
    return 0


def notebook(desk: Desk, _: Puzzle | None) -> int:
    """Write all puzzles as a notebook."""
    from .notebook import notebook_text  # 600 ms

    if (desk.folder / NOTEBOOK).exists():
        print(f"{desk.folder / NOTEBOOK} exists already and is kept", file=sys.stderr)
        return 1
    print(f"written: {desk.write(NOTEBOOK, notebook_text())}")
    return 0


WHOLE: dict[str, Callable[[Desk, Puzzle | None], int]] = {"list": list_all, "start": start, "notebook": notebook}
SINGLE: dict[str, Callable[[Desk, Puzzle], int]] = {
    "show": show, "hint": hint, "check": check, "picture": draw, "solution": solution}


def run(action: str, which: str, folder: str) -> int:
    """One action.  which: a puzzle's number or name, "" for the first that is not solved.  Raises LookupError for another."""
    desk = Desk(Path(folder))
    if action in WHOLE:
        return WHOLE[action](desk, None)
    return SINGLE[action](desk, puzzle(which) if which else desk.next() or puzzles()[-1])
