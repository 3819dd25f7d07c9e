"""Which warps of a launch take a branch, from a condition on thread numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import Call, Expr, Launch, Load, Var, contains, free_vars, walk
from tilelang.target.warp_groups import WARP_LANES, named, warps_in, warps_of

from .lane_values import Kind, LaneValues


class WarpSets:
    """Evaluates conditions for all threads of a launch.  own: thread indices and variables computed from them."""

    def __init__(self, launch: Launch) -> None:
        self.values, self.own = LaneValues(launch), set(launch.thread_vars)
        self.warps = warps_in(launch)

    def bind(self, v: Var, value: Expr) -> None:
        """v equals value from here on."""
        known = self.values.env[v] = self.values.value(value)
        if not isinstance(known, Kind) and np.ndim(known):
            self.own.add(v)

    def follows(self, e: Expr) -> bool:
        """Whether a value depends on the numbers of threads."""
        return not self.own.isdisjoint(free_vars(e)) or contains(e, Call)

    def threads(self, cond: Expr) -> Any:
        """For each thread whether a condition holds; None where that is unknown or the same for all."""
        holds = self.values.value(cond)
        return None if isinstance(holds, Kind) or not np.ndim(holds) else np.asarray(holds, bool)

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


def by_warp(cond: Expr) -> bool:
    """Whether a condition consists of tests of the warp alone, so that its branch is a warp role."""
    tests = list(walk(cond, Call))
    return bool(tests) and all(map(warps_of, tests)) and not contains(cond, Load) and not free_vars(cond)
