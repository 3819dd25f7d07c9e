"""The children of a node, and the set of node classes below it.  Both are computed once and stored on the node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .nodes import NAME_BITS, Node, kinds_of, node_fields
from .options import Options

MOST_NODES, MOST_LEVELS = 2048, 96  # of an expression: those that people write have fewer


def below(n: Node) -> tuple[Node, ...]:
    """Direct child nodes in reverse order, from the last to the first."""
    known = n._below
    return _find_below(n) if known is None else known


def _find_below(n: Node) -> tuple[Node, ...]:
    out: list[Node] = []
    for f in node_fields(type(n)):
        v = getattr(n, f)
        if isinstance(v, Node):
            out.append(v)
        elif type(v) is tuple and v:
            _nodes_in(v, out)
        elif isinstance(v, Options):
            _nodes_in(v.held(), out)
    out.reverse()
    found = tuple(out)
    object.__setattr__(n, "_below", found)
    return found


def _nodes_in(values: tuple[Any, ...], out: list[Node]) -> None:
    for v in values:
        if isinstance(v, Node):
            out.append(v)
        elif type(v) is tuple and v:
            _nodes_in(v, out)


def children(n: Node) -> Iterator[Node]:
    """Direct child nodes in field order, including those in the options.  Includes Buffers and Vars, not a Buffer's fields."""
    return reversed(below(n))


def held(n: Node) -> int:
    """The bit set of the node classes and of the names at and below n.

    Classes: those of n and of all nodes below it; of a Buffer only its own class.  Names: all Vars and Buffers, including
    those in the storage and shape of the Buffers.
    """
    bits = n._held
    if bits:
        return bits
    stack = [n]
    while stack:  # by a stack: an expression may be deeper than Python's recursion
        at = stack[-1]
        bits = at._kind
        for c in below(at):
            if not c._held:
                stack.append(c)
            bits |= c._held
        if stack[-1] is at:
            if at._is_name:
                bits = at._kind | bits & _NAMES | name_bit(at)
            object.__setattr__(at, "_held", bits)
            stack.pop()
    return bits


def extent(n: Node) -> tuple[int, int]:
    """(nodes, levels) of the tree at and below n: a node counts as often as it is used.  Does not descend into Buffers."""
    stack = [n]
    while n._extent is None:
        at = stack[-1]
        left = [c for c in below(at) if c._extent is None]
        stack += left
        if not left:
            inner = [c._extent or (1, 1) for c in below(at)]
            object.__setattr__(at, "_extent", (1 + sum(e[0] for e in inner), 1 + max((e[1] for e in inner), default=0)))
            stack.pop()
    return n._extent


def is_large(n: Node, fraction: int = 1) -> bool:
    """Whether an expression has more than this fraction of the nodes or levels (1: all, 2: half) that one tree may have.

    Larger ones are kept in variables: walks cost their nodes, and recursion their levels.
    """
    nodes, levels = extent(n)
    return nodes * fraction > MOST_NODES or levels * fraction > MOST_LEVELS


_NAMES = (1 << NAME_BITS) - 1


def name_bit(n: Node) -> int:
    """The bit of a Var or Buffer in the bit set of `held`.

    Several names have the same bit, so that a test of the bit may give a false positive, but never a false negative.
    """
    return 1 << (hash(n) >> 4) % NAME_BITS


def contains(n: Node, *classes: type) -> bool:
    """Whether n, or a node below it, is an instance of one of these classes."""
    return held(n) & kinds_of(classes) != 0
