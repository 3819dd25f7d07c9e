"""The children of a node, and the set of node classes below it.  Both are computed once and stored on the node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .nodes import NAME_BITS, Node, kinds_of, node_fields
from .options import Options


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
    if not bits:
        bits = n._kind
        for c in below(n):
            bits |= c._held or held(c)
        if n._is_name:
            bits = n._kind | bits & _NAMES | name_bit(n)
        object.__setattr__(n, "_held", bits)
    return bits


_NAMES = (1 << NAME_BITS) - 1


def name_bit(n: Node) -> int:
    """The bit of a Var or Buffer in the bit set of `held`.

    Several names have the same bit, so that a test of the bit may give a false positive, but never a false negative.
    """
    return 1 << (hash(n) >> 4) % NAME_BITS


def contains(n: Node, *classes: type) -> bool:
    """Whether n, or a node below it, is an instance of one of these classes."""
    return held(n) & kinds_of(classes) != 0
