"""Reject exchanges between the lanes of a warp that only some of its lanes reach.

    if tx % 2 == 0:
        x = T.shfl_xor(x, 1)          # rejected: lane 0 waits for lane 1
    if tx // 32 == 0:
        x = T.shfl_xor(x, 1)          # whole warps come
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilelang.errors import error, register
from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Break, Call, Continue, Evaluate, Expr, For, Func, If, Launch, Parallel,
                         Seq, Stmt, Store, TileOp, Unary, While, children, inner, walk, PRIVATE)
from tilelang.target.thread_calls import MATCHES, SHUFFLES, VOTES, public_name

from ..analysis.divergence import WARP_LANES, Kind, LaneValues
from ..framework.pass_ import TILE, PassContext, pass_

register("warp-divergent", RuntimeError, "an exchange between lanes of a warp stands where only some of them come",
         "let all lanes of the warp come, and choose by a condition what they do with the result; or pass the lanes that come: "
         "mask=...", expected="all lanes of the warp that the exchange names")

# Call -> the position of its mask; None: takes all lanes.
_MASKS: dict[str, int | None] = {**dict.fromkeys(SHUFFLES, 2), **dict.fromkeys((*VOTES, *MATCHES), 1),
                                 **dict.fromkeys(("ldmatrix", "stmatrix", "mma"))}
del _MASKS["ballot"]  # a vote of the lanes that come
_FULL = 0xFFFFFFFF
_STEPS = 1 << 11  # most statements of loops that are followed iteration by iteration


@pass_(needs=TILE)
def check_lanes(func: Func, cx: PassContext) -> Func:
    """Raise "warp-divergent" for a shuffle, vote, match or matrix instruction that only some lanes of a warp reach.

    Changes nothing.  A condition is known by the numbers of the threads, by constants and by what all lanes of a warp share;
    one that reads memory at a place of each lane counts as different in the lanes.  Other conditions are left to the run
    of the program: the simulator and the CPU check each exchange.  Lanes that have returned need not come.
    """
    for s in walk(func, Launch):
        if any(c.op in _MASKS for c in walk(s.body, Call)):
            _Walk(s).stmt(s.body, _Path(np.ones(s.num_threads, bool)))
    return func


@dataclass(frozen=True)
class _Path:
    """The threads that reach a statement.

    here: the threads that may.  certain: they do, once the block gets here; otherwise whole warps of them may be missing.
    unknown: DATA or OPEN where lanes may be missing by such a condition.  split: the statement that some lanes do not enter.
    """

    here: Any
    certain: bool = True
    unknown: Kind | None = None
    split: Any = None


class _Walk:
    """One walk through a launch.

    left, over: threads that have left the iteration and the loop.  returned: those that have returned, None: unknown.
    rest: why lanes may be missing in the rest of the loop.
    """

    def __init__(self, launch: Launch) -> None:
        self.at = LaneValues(launch)
        self.none = np.zeros(self.at.n, bool)
        self.left = self.over = self.none
        self.returned: Any = self.none
        self.rest: Kind | None = None
        self.split: Any = None
        self.steps = 0
        self.matters: dict[int, bool] = {}

    def stmt(self, s: Stmt, path: _Path) -> None:
        """Follow a statement."""
        here = path.here & ~(self.left | self.over)
        if self.returned is not None:
            here = here & ~self.returned
        if not here.any() or isinstance(s, (Parallel, TileOp)):
            return
        if self.rest is not None and path.unknown is None:
            path = replace(path, unknown=self.rest, split=self.split)
        path = replace(path, here=here, split=self.split if path.split is None else path.split)
        if not isinstance(s, Seq):
            for c in (c for e in children(s) if isinstance(e, Expr) for c in walk(e, Call)):
                if c.op in _MASKS:
                    self.check(c, s, path)
        match s:
            case Seq():
                for x in s.stmts:
                    self.stmt(x, path)
            case Bind():
                self.at.env[s.var] = self.at.value(s.value)
            case Alloc():
                if s.buffer.scope_name in PRIVATE and s.buffer.ndim <= 1 and all(n == 1 for n in s.buffer.shape):
                    self.at.held[s.buffer.data] = Kind.OPEN if s.init is None else self.at.value(s.init)
            case Store():
                if s.buffer.data in self.at.held:
                    self.store(s, path)
            case If() | For() | While() if not self.follows(s):
                self.forget(s)
            case If():
                for want, part in zip((True, False), inner(s)):
                    self.stmt(part, self.taken(s.cond, want, path, s))
            case For() | While():
                self.loop(s, path)
            case Break() | Continue():
                self.jump(s, path)
            case Evaluate() if s.call.op == "thread_return":
                sure = path.certain and path.unknown is None and self.returned is not None
                self.returned = self.returned | here if sure else None

    def store(self, s: Store, path: _Path) -> None:
        value, old = self.at.value(s.value), self.at.held[s.buffer.data]
        known = not isinstance(value, Kind) and not isinstance(old, Kind)
        if path.unknown is not None:
            new: Any = Kind.OPEN
        elif path.certain and path.here.all():
            new = value
        elif path.certain and known:
            new = np.where(path.here, value, old)
        else:
            new = Kind.ALIKE if self.at.alike(value) and self.at.alike(old) and self.at.alike(path.here) else Kind.OPEN
        self.at.held[s.buffer.data] = new

    def taken(self, cond: Expr, want: bool, path: _Path, s: Stmt) -> _Path:
        """The threads of a path for which a condition has the value `want`."""
        if isinstance(cond, Unary) and cond.op == "not":
            return self.taken(cond.a, not want, path, s)
        if isinstance(cond, Binary) and cond.op == ("and" if want else "or"):
            return self.taken(cond.b, want, self.taken(cond.a, want, path, s), s)
        v = self.at.value(cond)
        return self.entered(v if isinstance(v, Kind) else np.asarray(v, bool) == want, path, s)

    def entered(self, holds: Any, path: _Path, s: Stmt) -> _Path:
        """The threads of a path that enter a statement, by the value of what decides it."""
        if holds is Kind.ALIKE:
            return replace(path, certain=False)
        if isinstance(holds, Kind):
            worse = Kind.DATA if holds is Kind.DATA and path.unknown is not Kind.OPEN else Kind.OPEN
            return replace(path, unknown=worse, split=s)
        return replace(path, here=path.here & holds, split=path.split if self.at.alike(holds) else s)

    def loop(self, s: For | While, path: _Path) -> None:
        around = self.left, self.over, self.rest, self.split
        self.left, self.over = self.none, self.none
        if isinstance(s, For):
            self.counted(s, path)
        else:
            for _ in range(2):
                self.forget(s)
                self.iteration(s.body, self.taken(s.cond, True, path, s))
        self.forget(s)
        self.left, self.over, self.rest, self.split = around

    def counted(self, s: For, path: _Path) -> None:
        start, extent = self.at.value(s.start), self.at.value(s.extent)
        size = sum(1 for _ in walk(s.body, Stmt))
        known = not isinstance(start, Kind) and not isinstance(extent, Kind) and not np.ndim(start) and not np.ndim(extent)
        if known and self.steps + int(extent) * size <= _STEPS:
            self.steps += int(extent) * size
            for k in range(int(extent)):
                self.at.env[s.var] = int(start) + k
                self.iteration(s.body, path)
            return
        self.at.env[s.var] = Kind.ALIKE if self.at.alike(start) and self.at.alike(extent) else Kind.OPEN
        if isinstance(extent, Kind):
            ways = [self.entered(extent, path, s)]
        else:
            extent = np.broadcast_to(extent, self.at.n)
            ways = [self.entered(extent >= n, path, s) for n in sorted({*extent[path.here].tolist()}) if n > 0]
        for way in (*ways, *ways[:1]):  # the first again: after a `break` of its end
            self.forget(s)
            self.iteration(s.body, way)

    def iteration(self, body: Stmt, path: _Path) -> None:
        self.stmt(body, path)
        self.left = self.none

    def jump(self, s: Stmt, path: _Path) -> None:
        if path.unknown is not None or not path.certain and not self.at.alike(path.here):
            self.rest, self.split = path.unknown or Kind.OPEN, path.split or s
        elif path.certain:
            if isinstance(s, Break):
                self.over = self.over | path.here
            else:
                self.left = self.left | path.here
            self.split = path.split or s

    def follows(self, s: Stmt) -> bool:
        """Whether a statement holds an exchange, or a jump or return that may decide who comes to one."""
        hit = self.matters.get(id(s))
        if hit is None:
            hit = self.matters[id(s)] = any(
                isinstance(n, (Break, Continue)) or isinstance(n, Call) and (n.op in _MASKS or n.op == "thread_return")
                for n in walk(s))
        return hit

    def forget(self, s: Stmt) -> None:
        """Forget the private variables that a statement may change."""
        for n in walk(s, Store, AddressOf):
            if n.buffer.data in self.at.held:
                self.at.held[n.buffer.data] = Kind.OPEN

    def check(self, c: Call, s: Stmt, path: _Path) -> None:
        at = _MASKS[c.op]
        mask = _FULL if at is None or len(c.args) <= at else self.at.value(c.args[at])
        if isinstance(mask, Kind) or path.unknown is Kind.OPEN or self.returned is None:
            return
        named = np.broadcast_to(np.asarray(mask).astype(np.int64) & _FULL, self.at.n)
        if path.unknown is Kind.DATA:
            if (named[path.here] & (named[path.here] - 1)).any():
                self.reject(c, s, path, "names lanes in its mask that may not execute it: what is read for each lane decides")
            return
        lanes = self.at.threads % WARP_LANES
        for first in range(0, self.at.n, WARP_LANES):
            part = slice(first, first + WARP_LANES)
            come = path.here[part]
            if come.any():
                wanted = np.bitwise_or.reduce(named[part][come])
                missing = ~come & ~self.returned[part] & ((wanted >> lanes[part]) & 1 == 1)
                if int(wanted) >> len(come):
                    self.reject(c, s, path, f"names 32 lanes in its mask, and the last warp of {self.at.n} threads has "
                                f"{len(come)}: use a multiple of {WARP_LANES} threads, or pass the lanes that exist")
                if missing.any():
                    self.reject(c, s, path, f"names thread {first + int(np.argmax(missing))} in its mask, which does not "
                                f"execute it, as thread {first + int(np.argmax(come))} does")

    def reject(self, c: Call, s: Stmt, path: _Path, why: str) -> None:
        name = public_name(c.op)
        if _MASKS[c.op] is None:
            why = "takes all 32 lanes of a warp, and only some execute it"
        label = "some lanes leave here" if isinstance(path.split, (Break, Continue)) else "entered by some lanes of a warp only"
        raise error("warp-divergent", f"{name} {why}", found="some lanes of a warp", span=c.span or getattr(s, "span", None),
                    notes=((getattr(path.split, "span", None), label),))
