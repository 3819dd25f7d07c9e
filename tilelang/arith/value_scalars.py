"""Which scalars of a call are numbers of their own, not sizes or places.

    O[i] = (seed * 31 + i) % 7        seed is a value: a remainder of what wraps
    O[start + i] = start % 7          start is a place: start + i is taken not to wrap
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilelang.ir import (
    AddressOf,
    Alloc,
    Binary,
    Bind,
    Buffer,
    Call,
    Cast,
    Evaluate,
    Expr,
    For,
    Launch,
    Load,
    Parallel,
    Region,
    Stmt,
    Store,
    Var,
    children,
    walk,
)

_REMAINDERS = ("floormod", "truncmod", "bitand")  # make indices of hashes


def value_scalars(stmt: Stmt, params: Iterable[Any]) -> list[Var]:
    """Those of `params` (others than integer variables are passed over) of which no place, size or number of turns in stmt
    is made but through a remainder.  Conditions do not count: what is compared may be any number.
    """
    scalars = [p for p in params if isinstance(p, Var) and p.dtype.is_int and p.dtype.lanes == 1]
    if not scalars:
        return []
    places: set[Var] = set()
    binds: list[Bind] = []
    for x in walk(stmt):
        if isinstance(x, Bind):
            binds.append(x)
        else:
            for e in _places(x):
                _add_vars(e, places)
    for b in reversed(binds):  # in the order of the program: what a value is made of stands before it
        if b.var in places:
            _add_vars(b.value, places)
    return [v for v in scalars if v not in places]


def _places(x: Any) -> Iterable[Any]:
    """Expressions of one node that say where or how often."""
    if isinstance(x, (Load, Store, AddressOf)):
        return *x.indices, *_sizes(x.buffer)
    if isinstance(x, Region):
        return *x.mins, *x.extents, *_sizes(x.buffer)
    if isinstance(x, For):
        return x.start, x.extent
    if isinstance(x, Launch):
        return x.grid
    if isinstance(x, Parallel):
        return x.extents
    if isinstance(x, Alloc):
        return _sizes(x.buffer)
    if isinstance(x, Evaluate) and not x.call.op.startswith("atomic_"):
        return x.call.args  # coordinates, sizes and phases of copies and barriers
    return ()


def _sizes(b: Buffer) -> tuple[Any, ...]:
    return *b.shape, *b.strides, b.offset


def _add_vars(e: Any, out: set[Var]) -> None:
    """The variables of an index, but for those below a remainder or a conversion from floats."""
    stack = [e]
    while stack:
        x = stack.pop()
        if isinstance(x, Var):
            out.add(x)
        elif isinstance(x, Binary) and x.op in _REMAINDERS or isinstance(x, (Load, Call)):
            continue  # the indices of a load are met by themselves
        elif isinstance(x, Cast) and not x.value.dtype.is_int:
            continue
        elif isinstance(x, Expr):
            stack += children(x)
