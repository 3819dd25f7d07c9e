"""What atomic operations do to an element, as far as the order of two of them matters."""

from __future__ import annotations

from collections.abc import Hashable

from tilelang.ir.record import record

_FAMILY = {"addx2": "add", "addx4": "add"}
ARITHMETIC = frozenset(("add", "max", "min", "or", "and", "xor"))


def family(op: str) -> str:
    """What an operation named "atomic_..." does: add (also of vectors), max, min, or, and, xor, exchange, load, store."""
    kind = op.removeprefix("atomic_")
    return _FAMILY.get(kind, kind)


def commute(a: str, b: str) -> bool:
    """Whether two operations of these families leave an element the same in either order, old values aside.

    Loads change nothing, but what they read would differ: they commute with each other alone.  Of two stores or exchanges
    the later one stays."""
    return a == b and (a in ARITHMETIC or a == "load")


@record
class Branch:
    """One way of a branch.  key: names the branch, and which run of it where that is known."""

    key: Hashable
    way: bool


@record
class Iterations:
    """A parallel loop: its iterations have no order."""

    key: Hashable


@record
class WarpRole:
    """A part of the program that these warp groups run, beside others."""

    first: int
    count: int


@record
class Atomic:
    """One place in a program that makes an atomic operation.

    waits: it looks for what other threads do: its result is used in a while loop.  path: what it stands in, outermost first.
    """

    family: str
    waits: bool = False
    path: tuple[Branch | Iterations | WarpRole, ...] = ()

    def misses_order(self, other: Atomic) -> bool:
        """Whether something is wrong when different threads make these two on one element and nothing orders them.

        Not where they commute; nor where threads synchronise by them: loads, stores and exchanges among themselves, and what
        waits; nor where the program leaves their order open (`unordered`)."""
        return not (commute(self.family, other.family) or self.waits or other.waits or not {
            self.family, other.family} & ARITHMETIC or unordered(self.path, other.path))


def unordered(a: tuple[Branch | Iterations | WarpRole, ...], b: tuple[Branch | Iterations | WarpRole, ...]) -> bool:
    """Whether a program has no order between two places: both ways of one branch, iterations of one parallel loop, roles
    without a warp group in common."""
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


__all__ = ["ARITHMETIC", "Atomic", "Branch", "Iterations", "WarpRole", "commute", "family", "unordered"]
