"""Decides which loops have to be followed iteration by iteration."""

from __future__ import annotations

from collections.abc import Container

from tilelang.ir import Bind, Binary, Const, For, Launch, Load, Node, Store, Var, walk, SHARED
from tilelang.ir.buffer import AddressOf
from tilelang.ir.children import children


def has_unknown_loops(launch: Launch) -> bool:
    """Whether the number of iterations of some loop is known only at run time."""
    return any(not isinstance(x.extent, Const) for x in walk(launch.body, For))


def places_by(s: For, followed: Container[Var]) -> bool:
    """Whether shared addresses may differ between iterations by more than a small modulus of the loop's variable.

    That is the case if they use the variable in another way, or if the loop changes variables of threads (followed: their
    storage), on which addresses may depend.
    """
    follows: set[Var] = set()

    def plain(e: Node) -> bool:
        if isinstance(e, Var):
            return e is s.var or e in follows
        if isinstance(e, Binary) and e.op == "floormod" and isinstance(e.b, Const) and 0 < e.b.value <= 16:
            return False
        return any(map(plain, children(e)))

    for x in walk(s.body):
        if isinstance(x, Bind) and plain(x.value):
            follows.add(x.var)
        elif isinstance(x, Store) and x.buffer.data in followed:
            return True
        elif isinstance(x, (Load, Store, AddressOf)) and x.buffer.scope_name in SHARED and any(map(plain, x.indices)):
            return True
    return False


def compared(s: For) -> set[int]:
    """Values of a loop's variable at and beside which a comparison with a constant in its body changes its result."""
    out: set[int] = set()
    for x in walk(s.body, Binary):
        if x.op in ("eq", "ne", "lt", "le", "gt", "ge"):
            for a, b in ((x.a, x.b), (x.b, x.a)):
                shift = 0
                if isinstance(a, Binary) and a.op in ("add", "sub") and isinstance(a.b, Const):
                    shift, a = int(a.b.value) * (1 if a.op == "add" else -1), a.a
                if a is s.var and isinstance(b, Const):
                    out.update(int(b.value) - shift + d for d in (-1, 0, 1))
    return out
