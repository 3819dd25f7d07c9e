"""Shadow of shared memory: which threads touched each piece since the last block barrier.

Also the size of those pieces, and arithmetic on numbers of all threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, lcm
from typing import Any

import numpy as np

from tilelang.ir import Bind, Binary, Const, Expr, For, Launch, Load, Ramp, Store, Var, walk, LOCAL, SHARED
from tilelang.ir.buffer import AddressOf
from tilelang.ir.expr import Call
from tilelang.ir.children import children
from tilelang.ir.numbers import INTEGERS

from tilelang.target.atomics import Atomic


def widest_piece(launch: Launch) -> int:
    """Bytes that divide the width of every shared access."""
    piece = 0
    for x in walk(launch.body):
        if isinstance(x, (Load, Store)) and x.buffer.scope_name in SHARED:
            piece = gcd(piece, x.buffer.dtype.bytes * max([i.dtype.lanes for i in x.indices], default=1))
        elif isinstance(x, Call):
            for a in x.args:
                if isinstance(a, AddressOf) and a.buffer.scope_name in SHARED:
                    size = x.options.bytes if x.op == "cp_async" else {"ldmatrix": 16, "stmatrix": 16}.get(x.op)
                    piece = gcd(piece, size or a.buffer.dtype.bytes)
    return -piece or -1  # negative: must not be divided further


def slot_iterations(s: For) -> tuple[int, int]:
    """(iterations of a loop after which slots chosen by small moduli have all met each other, period of the slots)."""
    mods = [int(x.b.value) for x in walk(s.body, Binary) if x.op in ("floormod", "truncmod") and
            isinstance(x.b, Const) and 0 < x.b.value <= 16 and any(y is s.var for y in walk(x.a))]
    return max(mods, default=1) + 1, lcm(1, *mods)


class Shadow:
    """Which thread touched each granule of the block's shared memory, and when (epoch: number of barriers before).

    Modes: "r", "w", and for atomic operations "a" followed by their family; "a?" for those that wait.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.when: dict[str, Any] = {}
        self.who: dict[str, Any] = {}
        self.site: dict[str, Any] = {}
        self.flying = np.zeros(size, np.int32)  # site + 1 of the copy in flight

    def clash(self, mode: str, g: Any, t: Any, epoch: int, meets: Callable[[int], bool]) -> int | None:
        """Site of an earlier access that is not ordered with an access in `mode` of threads t to granules g; None: none."""
        for m in self.when:
            if m == mode and m != "w":
                continue
            bad = (self.when[m][g] == epoch) & (self.who[m][g] != t)
            if not bad.any():
                continue
            for site in dict.fromkeys(self.site[m][g[bad]].tolist()):
                if meets(site):
                    return int(site)
        return None

    def note(self, mode: str, g: Any, t: Any, epoch: int, site: int) -> None:
        """Record an access."""
        if mode not in self.when:
            self.when[mode] = np.full(self.size, -1, np.int32)
            self.who[mode], self.site[mode] = np.zeros(self.size, np.int32), np.zeros(self.size, np.int32)
        when, who = self.when[mode], self.who[mode]
        several = (when[g] == epoch) & (who[g] != t)
        who[g] = t
        several |= who[g] != t
        who[g[several]] = -2
        when[g] = epoch
        self.site[mode][g] = site


def mode_of(a: Atomic) -> str:
    """The mode in which memory records an atomic access."""
    return "a?" if a.waits else f"a{a.family}"


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


def combined(op: str, a: Any, b: Any) -> Any:
    """The result of a binary operation, None where it has none (a division by zero, an operation unknown here)."""
    if op in INTEGERS:
        return INTEGERS[op](a, b)
    if not (b if isinstance(b, int) else np.all(b)):
        return None
    if op in ("floordiv", "floormod"):
        return a // b if op == "floordiv" else a % b
    if op in ("truncdiv", "truncmod"):
        q = np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
        return q if op == "truncdiv" else a - q * b
    return None
