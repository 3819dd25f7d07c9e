"""Which warps of a launch take a branch, from a condition on thread numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.errors import TileLangError
from tilelang.ir import Call, Const, Expr, Launch, Load, Var, contains, free_vars, fresh, is_large, rewrite, substitute, walk
from tilelang.ir.evaluate import evaluate
from tilelang.target.warp_groups import GROUP, WARP_LANES, named, warps_in, warps_of

_NUMBERS = {"get_lane_idx": (), "get_warp_idx": (WARP_LANES,), "get_warp_idx_sync": (WARP_LANES,),
            "get_warp_group_idx": (WARP_LANES, GROUP // WARP_LANES)}  # defaults of their arguments


class WarpSets:
    """Evaluates conditions for all threads of a launch.  names: values computed from thread numbers, by variable."""

    def __init__(self, launch: Launch) -> None:
        x, y, _ = launch.threads
        self.linear = np.arange(launch.num_threads, dtype=np.int32)
        self.own = dict(zip(launch.thread_vars, (self.linear % x, self.linear // x % y, self.linear // (x * y))))
        self.warps = warps_in(launch)
        self.names: dict[Var, Expr] = {}

    def bind(self, v: Var, value: Expr) -> None:
        """v equals value from here on."""
        value = substitute(value, self.names)
        if self._plain(value) and not is_large(value):
            self.names[v] = value
        elif self._plain(value) and (known := self._each(value)) is not None:
            self.own[v] = known

    def follows(self, e: Expr) -> bool:
        """Whether a value depends on the numbers of threads."""
        e = substitute(e, self.names)
        return bool(free_vars(e) & self.own.keys()) or contains(e, Call)

    def threads(self, cond: Expr) -> Any:
        """For each thread whether a condition holds; None where that is unknown or the same for all."""
        e = substitute(cond, self.names)
        known = self._each(e) if self._plain(e) else None
        return None if known is None else known.astype(bool)

    def _each(self, e: Expr) -> Any:
        """The value of a plain expression for each thread; None where it has none."""
        env: dict[Var, Any] = dict(self.own)

        def number(c: Call) -> Expr:
            sizes = [int(a.value) for a in c.args if isinstance(a, Const)]
            v, got = fresh("number", c.dtype), warps_of(c)
            if got is not None:
                env[v] = (self.linear // WARP_LANES >= got[0]) & (self.linear // WARP_LANES < sum(got))
            elif c.op == "get_lane_idx":
                env[v] = self.linear % (*sizes, WARP_LANES)[0]
            else:
                env[v] = self.linear // np.prod((*sizes, *_NUMBERS[c.op][len(sizes):]), dtype=np.int32)
            return v

        try:
            return np.broadcast_to(np.asarray(evaluate(rewrite(e, number, Call), env)), self.linear.shape)
        except (TileLangError, TypeError, ZeroDivisionError):
            return None

    def taken(self, cond: Expr, here: frozenset[int]) -> frozenset[int] | None:
        """The warps among `here` that take a branch; None where that is unknown or differs within a warp."""
        holds = self.threads(cond)
        if holds is None:
            return None
        ways = {w: set(holds[w * WARP_LANES:(w + 1) * WARP_LANES].tolist()) for w in here}
        return None if any(len(x) > 1 for x in ways.values()) else frozenset(w for w, x in ways.items() if True in x)

    def found(self, cond: Expr) -> str:
        """The threads that take a branch, in words for a message; "" where they are unknown."""
        holds = self.threads(cond)
        if holds is None:
            return ""
        warps = self.taken(cond, frozenset(self.warps))
        if warps:
            return named(warps)
        return f"{int(holds.sum())} of {len(holds)} threads, which cut a warp" if holds.any() else ""

    def _plain(self, e: Expr) -> bool:
        calls = free_vars(e) <= self.own.keys() and not contains(e, Load) and all(
            warps_of(c) is not None or c.op in _NUMBERS and all(isinstance(a, Const) for a in c.args)
            for c in walk(e, Call))
        return calls and (bool(free_vars(e)) or contains(e, Call))


def by_warp(cond: Expr) -> bool:
    """Whether a condition consists of tests of the warp alone, so that its branch is a warp role."""
    tests = list(walk(cond, Call))
    return bool(tests) and all(map(warps_of, tests)) and not contains(cond, Load) and not free_vars(cond)


__all__ = ["WarpSets", "by_warp"]
