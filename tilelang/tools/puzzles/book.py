"""The puzzles as texts: a Markdown file each, with statement, start and hints; each solution has a file of its own."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tilelang.ir.record import record

HERE = Path(__file__).parent
_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
_HEAD = "import tilelang\nimport tilelang.language as T\n\n\n"


@record
class Puzzle:
    """One puzzle.  file: stem of its files, "01-copy".  function: what the learner writes.  start: its beginning."""

    number: int
    title: str
    file: str
    function: str
    statement: str
    start: str
    hints: tuple[str, ...]

    @property
    def source(self) -> str:
        """The learner's file as it is given out: the statement as a docstring, imports, the program to start from."""
        text = f"{self.number}. {self.title}\n\n{self.statement}"
        return f'"""{text}\n\nCheck it: tilelang puzzles check {self.number}\n"""\n\n{_HEAD}{self.start}'

    @property
    def solution(self) -> tuple[str, str]:
        """(explanation, program) of the solution."""
        text = (HERE / "solutions" / f"{self.file}.md").read_text(encoding="utf-8")
        code = _CODE.search(text)
        assert code is not None, "each solution has a block of Python"
        return text[:code.start()].strip(), _HEAD + code[1]


@cache
def puzzles() -> tuple[Puzzle, ...]:
    """All puzzles, the easiest first."""
    return tuple(_read(p) for p in sorted((HERE / "texts").glob("*.md")))


def puzzle(which: str) -> Puzzle:
    """The puzzle with this number, function name, or file name.  Raises LookupError, which lists them."""
    stem = Path(which).stem
    for p in puzzles():
        if which in (str(p.number), p.function) or stem in (p.file, learners_file(p)[:-3]):
            return p
    raise LookupError(f"no puzzle {which}; puzzles are {', '.join(f'{p.number} ({p.function})' for p in puzzles())}")


def learners_file(p: Puzzle) -> str:
    """Name of the file that a learner edits: p01_copy.py."""
    return f"p{p.number:02}_{p.file[3:].replace('-', '_')}.py"


def _read(path: Path) -> Puzzle:
    head, *parts = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    title, _, statement = head.partition("\n")
    number, _, name = title.removeprefix("# ").partition(". ")
    start = next(_CODE.search(p) for p in parts if p.startswith("Start"))
    assert start is not None, "each puzzle has a block of Python to start from"
    function = re.findall(r"^def (\w+)", start[1], re.MULTILINE)[-1]
    hints = tuple(p.partition("\n")[2].strip() for p in parts if p.startswith("Hint"))
    return Puzzle(int(number), name, path.stem, function, statement.strip(), start[1], hints)
