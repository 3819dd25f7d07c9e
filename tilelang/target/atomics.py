"""Decides whether the order of two atomic operations on one element matters, and whether the program fixes it."""

from __future__ import annotations

from collections.abc import Hashable

from tilelang.ir.record import record

_FAMILY = {"addx2": "add", "addx4": "add"}
ARITHMETIC = frozenset(("add", "max", "min", "or", "and", "xor", "inc", "dec"))


def family(op: str) -> str:
    """The family of an operation "atomic_...": that of ARITHMETIC (add also of vectors), cas, exchange, load, store."""
    kind = op.removeprefix("atomic_")
    return _FAMILY.get(kind, kind)


def commute(a: str, b: str) -> bool:
    """Whether two operations of these families give an element the same final value in either order.

    The returned old values are ignored, except those of loads: a load commutes only with a load.  Two stores or exchanges do
    not commute, because the value of the later one remains.  inc and dec of one element are taken to have one limit.
    """
    return a == b and (a in ARITHMETIC or a == "load")


@record
class Branch:
    """One side of a branch.  key: identifies the branch and, where known, its execution."""

    key: Hashable
    way: bool


@record
class Iterations:
    """A parallel loop: its iterations have no order."""

    key: Hashable


@record
class WarpRole:
    """A section of the program that only `count` warps from `first` on execute, concurrently with other sections."""

    first: int
    count: int


@record
class Atomic:
    """One atomic operation in the text of a program.

    waits: its result is used in a while loop, so that it waits for other threads.  path: the branches, parallel loops and warp
    roles around it, outermost first.
    """

    family: str
    waits: bool = False
    path: tuple[Branch | Iterations | WarpRole, ...] = ()

    def misses_order(self, other: Atomic) -> bool:
        """Whether it is an error that different threads execute these two on one element without an order between them.

        It is no error if the two commute; if threads synchronise by them (loads, stores and exchanges among themselves, and
        operations that wait); or if the program itself leaves their order open (`unordered`).
        """
        return not (commute(self.family, other.family) or self.waits or other.waits or not {
            self.family, other.family} & ARITHMETIC or unordered(self.path, other.path))


def unordered(a: tuple[Branch | Iterations | WarpRole, ...], b: tuple[Branch | Iterations | WarpRole, ...]) -> bool:
    """Whether the program leaves the order of two paths open: they are the two sides of one branch, iterations of one parallel
    loop, or warp roles without a common warp."""
    for x in a:
        for y in b:
            if isinstance(x, WarpRole) and isinstance(y, WarpRole) and (
                    x.first + x.count <= y.first or y.first + y.count <= x.first):
                return True
    for x, y in zip(a, b):
        if x == y and isinstance(x, Iterations):
            return True
        if x != y:
            return isinstance(x, Branch) and isinstance(y, Branch) and x.key == y.key
    return False
