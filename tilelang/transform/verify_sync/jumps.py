"""Threads that leave an iteration, a loop or the kernel early, for the walk of barriers.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tilelang.ir import Break, Call, Continue, Evaluate, For, If, Launch, Node, Seq, Stmt, While, walk


def jumps_of(body: Stmt) -> Iterator[Stmt]:
    """The breaks and continues in a loop's body that belong to this loop."""
    match body:
        case Break() | Continue():
            yield body
        case Seq():
            for x in body.stmts:
                yield from jumps_of(x)
        case If():
            yield from jumps_of(body.then)
            if body.orelse is not None:
                yield from jumps_of(body.orelse)


def jumps_that_matter(launch: Launch, matters: Callable[[Node], bool]) -> set[int]:
    """ids of the breaks and continues of loops that touch shared memory or order threads."""
    return {id(j) for s in walk(launch.body, For, While) if matters(s.body) for j in jumps_of(s.body)}


def is_return(s: Node) -> bool:
    """Whether a statement ends the threads that execute it."""
    return isinstance(s, Evaluate) and s.call.op == "thread_return" or isinstance(s, Call) and s.op == "thread_return"


@dataclass
class Jumps:
    """The threads that have left: a bool per thread, None for none.

    iteration: the current iteration of the innermost loop.  loop: that loop.  kernel: the kernel.  where: the span of the
    last jump of some threads only.  doubt: some threads may have left the iteration (1) or the loop (2); a condition that is
    unknown decides.
    """

    iteration: Any = None
    loop: Any = None
    kernel: Any = None
    where: Any = None
    doubt: int = 0

    def here(self, mask: Any) -> Any:
        """The threads of a mask that have not left; None for all, False for none."""
        if self.iteration is None and self.loop is None and self.kernel is None:
            return mask
        for gone in (self.iteration, self.loop, self.kernel):
            if gone is not None:
                mask = ~gone if mask is None else mask & ~gone
        return None if mask.all() else mask if mask.any() else False

    def jump(self, s: Stmt, mask: Any, everyone: Any, surely: bool) -> None:
        """The threads of a mask execute a jump.  everyone: all threads.  surely: false where they only may."""
        self.where = s.span
        name = "iteration" if isinstance(s, Continue) else "loop" if isinstance(s, Break) else "kernel"
        if not surely:
            self.doubt = max(self.doubt, ("kernel", "iteration", "loop").index(name))
            return
        mask = everyone if mask is None else mask
        before = getattr(self, name)
        setattr(self, name, mask if before is None else before | mask)

    def enter(self) -> tuple[Any, ...]:
        """Enter a loop; returns what `exit` needs.  Threads that have left the outer iteration do not get here."""
        kept = self.iteration, self.loop, self.doubt
        self.iteration = self.loop = None
        return kept

    def next_iteration(self, kept: tuple[Any, ...]) -> None:
        """Begin the next iteration of a loop entered with `kept`."""
        self.iteration = None
        self.doubt = kept[2] if self.doubt == 1 else self.doubt

    def exit(self, kept: tuple[Any, ...]) -> None:
        """Leave a loop, or return to the loop around it."""
        self.iteration, self.loop, self.doubt = kept
