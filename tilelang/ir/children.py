"""What is directly below a node, and which classes of nodes are anywhere below it; found once and kept on the node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .nodes import NAME_BITS, Node, kinds_of, node_fields
from .options import Options


def below(n: Node) -> tuple[Node, ...]:
    """Direct child nodes from the last to the first."""
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
    """Direct child nodes, in field order, also those in its options; Buffers and Vars included, a Buffer's own fields not."""
    return reversed(below(n))


def held(n: Node) -> int:
    """Bits of the classes of n and of all nodes below it, of a Buffer its own alone, and of all names: of Vars and Buffers, and
    of what the storage and shape of these Buffers name."""
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
    """The bit of a Var or Buffer among the names that nodes hold.  Several share one: who asks for a name may look at too much,
    never at too little."""
    return 1 << (hash(n) >> 4) % NAME_BITS


def contains(n: Node, *classes: type) -> bool:
    """Whether n, or a node below it, is an instance of one of these classes."""
    return held(n) & kinds_of(classes) != 0
