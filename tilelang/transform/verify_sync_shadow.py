"""Who touched which piece of shared memory since the last block barrier, how large those pieces may be, and arithmetic
on numbers and conditions of all threads at once."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np

from tilelang.ir import Binary, Expr, Launch, Load, Store, Unary, Var, walk
from tilelang.ir.expr import AddressOf, Call

from .sync_fault import SHARED


def widest_piece(launch: Launch) -> int:
    """Bytes that divide the width of every shared access."""
    piece = 0
    for x in walk(launch.body):
        if isinstance(x, (Load, Store)) and x.buffer.scope_name in SHARED:
            piece = gcd(piece, x.buffer.dtype.bytes * max([i.dtype.lanes for i in x.indices], default=1))
        elif isinstance(x, Call):
            for a in x.args:
                if isinstance(a, AddressOf) and a.buffer.scope_name in SHARED:
                    size = {"cp_async": int(x.attr("bytes", 16)), "ldmatrix": 16, "stmatrix": 16}.get(x.op)
                    piece = gcd(piece, size or a.buffer.dtype.bytes)
    return -piece or -1  # negative: not to be cut further


class Shadow:
    """Who touched each granule of the block's shared memory, and when (epoch: number of barriers before)."""

    def __init__(self, size: int) -> None:
        self.when = {m: np.full(size, -1, np.int32) for m in "rwa"}
        self.who = {m: np.zeros(size, np.int32) for m in "rwa"}
        self.site = {m: np.zeros(size, np.int32) for m in "rwa"}
        self.flying = np.zeros(size, np.int32)  # site + 1 of the copy in flight

    def clash(self, mode: str, g: Any, t: Any, epoch: int) -> int | None:
        """Site of an access that an access in `mode` of threads t to granules g is not ordered with."""
        for m in {"r": "wa", "w": "rwa", "a": "rw"}[mode]:
            bad = (self.when[m][g] == epoch) & (self.who[m][g] != t)
            if bad.any():
                return int(self.site[m][g[int(np.argmax(bad))]])
        return None

    def note(self, mode: str, g: Any, t: Any, epoch: int, site: int) -> None:
        when, who = self.when[mode], self.who[mode]
        several = (when[g] == epoch) & (who[g] != t)
        who[g] = t
        several |= who[g] != t
        who[g[several]] = -2
        when[g] = epoch
        self.site[mode][g] = site

_OPS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor, "shl": np.left_shift,
    "shr": np.right_shift, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or,
}


def combined(op: str, a: Any, b: Any) -> Any:
    """The result of a binary operation, None where it has none (a division by zero, an operation unknown here)."""
    if op in _OPS:
        return _OPS[op](a, b)
    if not (b if isinstance(b, int) else np.all(b)):
        return None
    if op in ("floordiv", "floormod"):
        return a // b if op == "floordiv" else a % b
    if op in ("truncdiv", "truncmod"):
        q = np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
        return q if op == "truncdiv" else a - q * b
    return None


def possible(e: Expr, want: bool, value: Callable[[Expr], Any], bound: dict[Var, tuple[Any, Any]]) -> Any:
    """The threads (a bool each, or one for all) for which a condition may have the truth value `want`.

    value: a condition's value where it is known, else None.  bound: this function's results for False and True, of names.
    """
    known = value(e)
    if known is not None:
        return np.asarray(known, dtype=bool) == want
    if isinstance(e, Var) and e in bound:
        return bound[e][want]
    if isinstance(e, Unary) and e.op == "not":
        return possible(e.a, not want, value, bound)
    if isinstance(e, Binary) and e.op in ("and", "or"):
        a, b = (possible(x, want, value, bound) for x in (e.a, e.b))
        return a & b if (e.op == "and") == want else a | b
    return np.True_


__all__ = ["Shadow", "combined", "possible", "widest_piece"]
