"""What several threads store to one place in one instruction, for the synchronisation model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Bind, Call, Const, Expr, Launch, Load, Ramp, Store, Var, children, walk, LOCAL

AT_ONCE = "is written by two threads at once with what they read from different places"


def differ(at: Any, who: Any, values: Callable[[], list[Any]]) -> bool:
    """Whether two threads store different values to one place, in one instruction.

    at, who: places and threads, in rows.  values: what the stored values are computed from, each a row.
    """
    order = np.argsort(at, kind="stable")
    at, who = at[order], who[order]
    both = (at[1:] == at[:-1]) & (who[1:] != who[:-1])
    return bool(both.any()) and any(bool((both & (np.diff(v[order]) != 0)).any()) for v in values())


def made_of(value: Expr, known: Callable[[Expr], Any], names: dict[Var, Expr]) -> list[Any]:
    """The numbers that a value is computed from, per thread, with the indices of what it reads; empty when unknown.

    known: the value of an integer expression: a number, one per thread, or None.  names: the expressions that names and
    register storages hold (`held`).
    """
    out: list[Any] = []
    return [v for v in out if np.ndim(v)] if _made_of(value, known, names, out) else []


def _made_of(e: Expr, known: Callable[[Expr], Any], names: dict[Var, Expr], out: list[Any]) -> bool:
    """Append the numbers that a value is computed from; returns whether all of them are known."""
    if isinstance(e, Const):
        return True
    if isinstance(e, Load):
        at = [i.base if isinstance(i, Ramp) else i for i in e.indices]
        if not e.buffer.scope_name.startswith("local"):
            return all(_made_of(i, known, names, out) for i in at)
        alike = all((n := known(i)) is not None and not np.ndim(n) for i in at)
        return alike and e.buffer.data in names and _made_of(names[e.buffer.data], known, names, out)
    if e.dtype.lanes == 1 and not e.dtype.is_float:
        v = known(e)
        if v is not None:
            out.append(v)
            return True
    if isinstance(e, Var):
        return e in names and _made_of(names[e], known, names, out)
    if isinstance(e, (Call, AddressOf)):
        return False
    return all(_made_of(c, known, names, out) for c in children(e) if isinstance(c, Expr))


def held(launch: Launch) -> dict[Var, Expr]:
    """The expressions that names stand for, and the contents of registers that only one statement writes."""
    out: dict[Var, Any] = {}
    for x in walk(launch.body):
        if isinstance(x, Bind):
            out[x.var] = x.value
        elif isinstance(x, Store) and x.buffer.scope_name == LOCAL:
            out[x.buffer.data] = None if x.buffer.data in out else x.value
        elif isinstance(x, AddressOf):
            out[x.buffer.data] = None
    return {k: v for k, v in out.items() if v is not None}
