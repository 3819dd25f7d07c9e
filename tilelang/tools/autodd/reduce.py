"""Delta debugging of a script: runs smaller and smaller candidates and keeps those that still fail."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from .edits import Edit, edited, removable, remove, replacements, statement_lists
from .freeze import mark_frozen

Check = Callable[[str], bool]


class Reduction:
    """The state of a reduction.

    check: whether a text still shows the failure; called from `jobs` threads at once.  improved: called with each smaller
    text.  text: the smallest found.  tried: how many candidates were run.
    """

    def __init__(self, source: str, check: Check, jobs: int = 1, improved: Callable[[str], None] | None = None) -> None:
        self.tree = ast.parse(source)
        mark_frozen(self.tree, source)
        self.text = source
        self.check, self.jobs = check, max(1, jobs)
        self.improved = improved or (lambda text: None)
        self.seen: set[str] = set()
        self.tried = 0
        self.pool = ThreadPoolExecutor(max_workers=self.jobs)

    def run(self) -> str:
        """Reduce until no edit succeeds."""
        try:
            while True:
                before = self.text
                self._statements()
                self._nodes()
                if self.text == before:
                    return self.text
        finally:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, edits: Iterator[Edit]) -> int | None:
        """Try edits of the present tree, several in parallel.  Keep the first that still fails and return its number."""
        numbered = enumerate(edits)
        while batch := list(islice(numbered, self.jobs)):
            made = [(k, *found) for k, e in batch if (found := edited(self.tree, e)) is not None]
            new = {text: (k, tree) for k, tree, text in reversed(made) if text not in self.seen}
            self.seen |= new.keys()
            self.tried += len(new)
            texts = list(reversed(new))
            for text, fails in zip(texts, self.pool.map(self.check, texts)):
                if fails:
                    (k, self.tree), self.text = new[text], text
                    self.improved(text)
                    return k
        return None

    def _statements(self) -> None:
        """Remove runs of statements: halves, quarters, … single ones, outer lists first."""
        done = 0
        while done < len(lists := statement_lists(self.tree)):
            path, name = lists[done]
            size, at = len(removable(self.tree, path, name)), 0
            while size >= 1 and (path, name) in statement_lists(self.tree):
                part = set(removable(self.tree, path, name)[at:at + size])
                if not part:
                    size, at = size // 2, 0
                elif self._take(iter([remove(path, name, part)])) is None:
                    at += size
            done += 1

    def _nodes(self) -> None:
        """Replace single nodes by smaller ones."""
        start = 0
        while True:
            taken = self._take(islice(replacements(self.tree), start, None))
            if taken is None:
                return
            start += taken


def reduce_source(source: str, check: Check, jobs: int = 1, improved: Callable[[str], None] | None = None) -> str:
    """Reduce a script; returns the smallest text found for which check is still true.

    Raises ValueError when check is false for the source itself or its marks do not pair up, SyntaxError when the source is no
    valid program.
    """
    reduction = Reduction(source, check, jobs, improved)
    if not check(source):
        raise ValueError("the source does not show the failure")
    return reduction.run()
