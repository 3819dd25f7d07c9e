"""Which values may differ between the threads of a block, and which code only some of them reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Break, Buffer, Call, Cast, Const, Continue, Evaluate, Expr, For, If,
                         Launch, Load, Parallel, Select, Seq, Stmt, Store, TileOp, Unary, Var, While, children, contains,
                         controls, free_vars, inner, walk, FRAGMENT, GLOBAL, PRIVATE)
from tilelang.ir.numbers import binary_function, to_dtype, unary_function
from tilelang.target.intrinsics import INTRINSICS, PURE
from tilelang.target.thread_calls import BLOCK_VOTES
from tilelang.target.warp_groups import named, warps_in, warps_of, GROUP, WARP_LANES

from .effects import argument_mode, written_globals
from .statements import flattened


class Divergence:
    """Divergent variables and per-thread arrays of a launch, by fixpoint from "all uniform"."""

    def __init__(self, launch: Launch) -> None:
        self.vars: set[Var] = {v for v, n in zip(launch.thread_vars, launch.threads) if n > 1}
        self.locals: set[Var] = set()
        self.memo: dict[int, tuple[Expr, bool]] = {}
        # Other blocks may change global memory that this kernel writes between the reads of two threads.
        self.launch = launch  # keeps the loads alive whose ids are in `settled`
        self.unstable = written_globals(launch.body)
        self.settled = _settled(launch.body) if self.unstable else frozenset()
        while True:
            before = len(self.vars), len(self.locals)
            self.memo.clear()
            self.stmt(launch.body, False)
            if before == (len(self.vars), len(self.locals)):
                return

    def divergent(self, e: Expr) -> bool:
        """Whether the threads of a block may compute different values for e."""
        hit = self.memo.get(id(e))
        if hit is None:
            hit = self.memo[id(e)] = (e, self._expr(e))
        return hit[1]

    def _expr(self, e: Expr) -> bool:
        if isinstance(e, Var):
            return e in self.vars
        if isinstance(e, Load):
            if e.buffer.data in self.locals:
                return True
            if e.buffer.data in self.unstable:
                return id(e) not in self.settled or any(map(self.divergent, e.indices))
            return any(map(self.divergent, e.indices))
        if isinstance(e, Call):
            if e.op in BLOCK_VOTES:
                return False
            row = INTRINSICS.get(e.op)
            if row is None or row.effect != PURE or e.op.startswith("get_") or e.op == "in_warp_groups":
                return True
        return any(self.divergent(c) for c in children(e) if isinstance(c, Expr))

    def holds_divergent(self, b: Buffer) -> bool:
        """Whether the threads of a block may read different values from one element of a buffer."""
        return b.data in self.locals or b.data in self.unstable

    def stmt(self, s: Stmt, some: bool) -> None:
        """Follow a statement. some: only some threads may get here."""
        match s:
            case Bind():
                if self.divergent(s.value):
                    self.vars.add(s.var)
                self.addresses(s.value)
            case Alloc():
                if s.init is not None and self.divergent(s.init):
                    self.locals.add(s.buffer.data)
            case Store():
                if s.buffer.scope_name.startswith("local") and (
                        some or self.divergent(s.value) or any(map(self.divergent, s.indices))):
                    self.locals.add(s.buffer.data)
                self.addresses(s.value)
            case Evaluate():
                self.addresses(s.call)
            case Seq() | If() | For() | While() | Launch():
                if isinstance(s, For) and any(map(self.divergent, controls(s))):
                    self.vars.add(s.var)
                some = some or self.uneven(s)
                for x in inner(s):
                    self.stmt(x, some)
            case Parallel():
                self.vars.update(s.vars)
                self.stmt(s.body, True)
            case TileOp():
                own = s.accesses()  # type: ignore[attr-defined]
                differs = some or any(self.divergent(e) for e in walk(s, Expr)) or any(
                    a.reads and self.holds_divergent(a.region.buffer) for a in own)
                for b in (a.region.buffer for a in own if a.writes):
                    if b.scope_name == FRAGMENT or differs and b.scope_name.startswith("local"):
                        self.locals.add(b.data)

    def addresses(self, e: Expr) -> None:
        """Per-thread arrays written through an address hold divergent values; shared memory has one value for all threads."""
        for c in walk(e, Call):
            for k, a in enumerate(c.args):
                if (isinstance(a, AddressOf) and a.buffer.scope_name.startswith("local")
                        and argument_mode(c, k) != "read"):
                    self.locals.add(a.buffer.data)

    def left_one_by_one(self, s: While) -> bool:
        """Whether threads may run a different number of iterations of a while loop."""
        leaves = [x.cond for x in walk(s.body, If) if contains(x, Break)]
        return any(map(self.divergent, (s.cond, *leaves)))

    def uneven(self, s: Stmt) -> bool:
        """Whether threads may take different ways of a branch, or run a loop or a part of it a different number of times."""
        return any(map(self.divergent, controls(s))) or isinstance(s, (For, While)) and self.leaves_early(s.body)

    def leaves_early(self, s: Stmt, some: bool = False) -> bool:
        """Whether some threads may leave the loop around s, or its iteration, before the others."""
        return next(parted(s, self.divergent, some), None) is not None


def parted(s: Stmt, differs: Callable[[Any], bool], some: bool = False, loops: bool = False) -> Iterator[Stmt]:
    """The breaks and continues of the loop around s, and the returns, that only some threads reach.

    differs: whether a condition, or bounds, differ between threads.  some: only some threads reach s.  loops: also returns in
    loops inside.
    """
    if isinstance(s, (Break, Continue)) or isinstance(s, Evaluate) and s.call.op == "thread_return":
        yield from (s,) if some else ()
    elif isinstance(s, (Seq, If)):
        some = some or isinstance(s, If) and differs(s.cond)
        for x in inner(s):
            yield from parted(x, differs, some, loops)
    elif loops and isinstance(s, (For, While)):
        uneven = any(map(differs, controls(s))) or any(not isinstance(x, Evaluate) for x in parted(s.body, differs))
        yield from (x for x in parted(s.body, differs, some or uneven, True) if isinstance(x, Evaluate))


def _settled(body: Stmt) -> frozenset[int]:
    """ids of the loads of global memory that no block writes between the surrounding grid barriers: all threads read the same
    value there, whatever wrote it. Only grid barriers outside loops and branches count."""
    phases: list[list[Stmt]] = [[]]
    for s in flattened(body):
        if isinstance(s, Evaluate) and s.call.op == "sync_grid":
            phases.append([])
        else:
            phases[-1].append(s)
    if len(phases) == 1:
        return frozenset()
    still: set[int] = set()
    moving: set[int] = set()
    for phase in phases:
        changed = set().union(*map(written_globals, phase))
        for s in phase:
            for x in walk(s):
                if isinstance(x, Load) and x.buffer.scope_name == GLOBAL:
                    (moving if x.buffer.data in changed else still).add(id(x))
    return frozenset(still - moving)


# ---- values of threads -----------------------------------------------------------------------------------------------

# Expressions are evaluated as far as they decide which lanes of a warp reach a statement.  A value is a number, an array with
# one number per thread, or a `Kind` where it is unknown.

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
