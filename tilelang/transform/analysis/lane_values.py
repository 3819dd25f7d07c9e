"""Values of scalar expressions per thread, as far as they decide which lanes of a warp reach a statement.

A value is a number, an array with one number per thread, or a `Kind` where it is unknown.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Binary, Call, Cast, Const, Expr, Launch, Load, Select, Unary, Var, children, contains,
                         free_vars, walk, FRAGMENT, PRIVATE)
from tilelang.ir.numbers import binary_function, to_dtype, unary_function
from tilelang.target.intrinsics import INTRINSICS, PURE
from tilelang.target.thread_calls import BLOCK_VOTES
from tilelang.target.warp_groups import named, warps_in, warps_of, GROUP, WARP_LANES

_NUMBERS = {"get_lane_idx": (WARP_LANES,), "get_warp_idx": (WARP_LANES,), "get_warp_idx_sync": (WARP_LANES,),
            "get_warp_group_idx": (WARP_LANES, GROUP // WARP_LANES)}  # defaults of their arguments
_OF_WARP = ("any_sync", "all_sync", "ballot_sync", "ballot", "warp_uniform")


class Kind(Enum):
    """The facts about a value that is not a known number."""

    ALIKE = "equal in all lanes of a warp"
    LANES = "the number of the lane and something that all lanes share, added"
    DATA = "read from memory at a place of each lane"
    OPEN = "unknown"


class LaneValues:
    """The values of names and private variables at one point of a launch.

    env: values of names; others are parameters, equal in all threads.  held: values of private variables of one element.
    """

    def __init__(self, launch: Launch) -> None:
        x, y, z = launch.threads
        self.n = x * y * z
        self.threads = t = np.arange(self.n)
        self.env: dict[Var, Any] = dict(zip(launch.thread_vars, (t % x, t // x % y, t // (x * y))))
        self.held: dict[Var, Any] = {}

    def value(self, e: Expr) -> Any:
        """The value of an expression."""
        match e:
            case Const():
                return e.value
            case Var():
                return self.env.get(e, Kind.ALIKE)
            case Load():
                return self._load(e)
            case Binary():
                return self._computed(e, (e.a, e.b), lambda a, b: binary_function(e.op, e.a.dtype.scalar)(a, b))
            case Unary():
                return self._computed(e, (e.a,), unary_function(e.op, e.a.dtype.scalar))
            case Cast():
                return self._computed(e, (e.value,), lambda a: to_dtype(a, e.dtype))
            case Select():
                return self._computed(e, (e.cond, e.a, e.b), np.where)
            case Call():
                return self._call(e)
        return self._computed(e, tuple(c for c in children(e) if isinstance(c, Expr)), None)

    def alike(self, v: Any) -> bool:
        """Whether a value is equal in all lanes of each warp."""
        if isinstance(v, Kind):
            return v is Kind.ALIKE
        v = np.asarray(v)
        return v.ndim == 0 or bool((v == v[self.threads // WARP_LANES * WARP_LANES]).all())

    def _load(self, e: Load) -> Any:
        b = e.buffer
        if b.scope_name in PRIVATE:
            return self.held.get(b.data, Kind.OPEN)
        if b.scope_name == FRAGMENT or b.data in self.env:
            return Kind.OPEN
        at = [self.value(i) for i in e.indices]
        if all(map(self.alike, at)):
            return Kind.ALIKE
        return Kind.OPEN if any(v is Kind.OPEN for v in at) else Kind.DATA

    def _computed(self, e: Expr, operands: tuple[Expr, ...], fn: Any) -> Any:
        values = [self.value(p) for p in operands]
        kinds = {v for v in values if isinstance(v, Kind)}
        if not kinds and fn is not None and e.dtype.lanes == 1:
            return fn(*map(np.asarray, values))
        if all(map(self.alike, values)):
            return Kind.ALIKE
        if Kind.OPEN in kinds:
            return Kind.OPEN
        if Kind.DATA in kinds:
            return Kind.DATA
        return Kind.LANES if isinstance(e, Binary) and e.op in ("add", "sub") else Kind.OPEN

    def _call(self, e: Call) -> Any:
        if e.op == "in_warp_groups":
            (first, count), warp = warps_of(e) or (0, 0), self.threads // WARP_LANES
            return (warp >= first) & (warp < first + count)
        if e.op in _NUMBERS and all(isinstance(a, Const) and a.value for a in e.args):
            given = [int(a.value) for a in e.args]  # type: ignore[attr-defined]
            size = math.prod((*given, *_NUMBERS[e.op][len(given):]))
            return self.threads % size if e.op == "get_lane_idx" else self.threads // size
        if e.op in BLOCK_VOTES:
            return Kind.ALIKE
        if e.op in _OF_WARP:
            whole = len(e.args) < 2 or isinstance(e.args[1], Const) and int(e.args[1].value) & 0xFFFFFFFF == 0xFFFFFFFF
            return Kind.ALIKE if whole else Kind.OPEN
        if e.op == "shfl_idx" and self.alike(self.value(e.args[1])) and e.options.width == WARP_LANES:
            return Kind.ALIKE
        row = INTRINSICS.get(e.op)
        if row is None or row.effect != PURE or any(isinstance(a, AddressOf) for a in e.args):
            return Kind.OPEN
        return self._computed(e, e.args, None)


# ---- warps that take a branch -----------------------------------------------------------------------------------------------


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
