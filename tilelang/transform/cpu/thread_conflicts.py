"""Where one thread may access what another thread writes, so that a thread's whole statement cannot run before the next one's.

Threads of a block go through a statement together.  Running one thread after another is the same where each element that
is written is accessed by one thread alone; that is what is proven here (analysis/disjoint.py), for each pair of accesses:

    if c: for j: s[tx, j] = s[tx, j - 1]     disjoint: the first index differs between threads
    for i in range(tx, n, 64): s[i] = 0      disjoint: steps of 64 threads keep the remainder of the thread
    if c: for d: s[(tx + d) % 16] = tx       conflict: the last one to write is another thread, run thread after thread

What is not proven counts as a conflict.  An element that one access in no loop reaches alone needs no proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilelang.arith import Bounds, LaunchFacts
from tilelang.ir import (AddressOf, Binary, Bind, Call, Evaluate, Expr, For, If, Launch, Load, Stmt, Store, TileOp,
                         Var, While, contains, convert, free_vars, fresh, inner, rebuild, walk)
from tilelang.ir.record import record
from tilelang.target.atomics import commute, family
from tilelang.target.cpu_launch import ThreadValues, is_private

from ..analysis.disjoint import Disjoint, Place
from ..analysis.effects import Effect, own_effects, tile_of
from ..analysis.guards import conjuncts


@record
class Access:
    """One access of memory.  looped: it stands in a loop of the analysed statement.  used: the result of an atomic update is
    read."""

    effect: Effect
    looped: bool
    used: bool

    @property
    def writes(self) -> bool:
        return self.effect.writes and getattr(self.effect.node, "op", "") != "atomic_load"

    def meets(self, other: Access) -> bool:
        """Whether the order of the two matters where threads make them to one element."""
        if not (self.writes or other.writes) or self is other and not self.looped:
            return False
        both = self.effect.mode == other.effect.mode == "atomic" and not (self.used or other.used)
        return not (both and commute(*(family(x.effect.node.op) for x in (self, other))))  # type: ignore[attr-defined]


class Conflicts:
    """Finds conflicts in the statements of one launch."""

    def __init__(self, launch: Launch, values: ThreadValues) -> None:
        self.known = values
        self.threads = dict(zip(launch.thread_vars, map(int, launch.threads)))
        self.values = {n.var: n.value for n in walk(launch.body, Bind)}
        self.analyzer = LaunchFacts(launch, ()).analyzer
        self.same: dict[Expr, Var] = {}  # names of what is read and is the same for all threads

    def exist_in(self, s: Stmt) -> bool:
        """Whether threads that run s one after another may see other values than threads that run it together."""
        if isinstance(s, If) and s.orelse is None and self._selects_one(s.cond):
            return False
        return self._conflict(list(_accesses(s, False)), s)

    def overwrites(self, s: Stmt, data: Var) -> bool:
        """Whether the value of a store or an atomic update is read from where another thread stores in it."""
        return self._conflict([a for a in _accesses(s, False) if a.effect.storage is data], s)

    def _conflict(self, found: list[Access], s: Stmt) -> bool:
        """Whether two threads may access one element so that the order matters."""
        pairs = [(a, b) for k, a in enumerate(found) for b in found[k:]
                 if a.effect.storage is b.effect.storage and a.meets(b)]
        asked = {id(a): a for pair in pairs for a in pair}
        if any(tile_of(a.effect) is None or self.known.varies_place(a.effect.buffer) for a in asked.values()):
            return True
        places = {k: _Indices(self, s).place(a.effect) for k, a in asked.items()}
        for a, b in pairs:
            (one, inner_one), (two, inner_two) = places[id(a)], places[id(b)]
            if not Disjoint(self.analyzer, self.threads, {**inner_one, **inner_two}).proves(one, two):
                return True
        return False

    def _selects_one(self, cond: Expr) -> bool:
        """Whether a condition holds for one thread at most."""
        pinned: set[Expr] = set()
        for e, holds in conjuncts(cond):
            if isinstance(e, Binary) and e.op == ("eq" if holds else "ne"):
                for a, b in ((e.a, e.b), (e.b, e.a)):
                    if isinstance(a, Var) and not self.known.varies(b):
                        pinned.add(a if a in self.threads else self.values.get(a, a))
        return all(v in pinned for v, n in self.threads.items() if n > 1)


def _accesses(s: Stmt, looped: bool) -> Iterator[Access]:
    """The accesses below s of memory that threads share."""
    unused = s.call if isinstance(s, Evaluate) else None
    for e in own_effects(s):
        if not is_private(e.buffer) and "barrier" not in e.buffer.scope():
            yield Access(e, looped or isinstance(s, While), e.node is not unused)
    for x in inner(s):
        yield from _accesses(x, looped or isinstance(s, (For, While)))


class _Indices:
    """The indices of one access in s, from numbers of threads, variables that this access has for itself (those of
    places), and what is the same for all threads while they run s."""

    def __init__(self, of: Conflicts, s: Stmt) -> None:
        self.of, self.places = of, Disjoint(of.analyzer, of.threads, {})
        self.loops = {n.var: n for n in walk(s, For)}
        self.bound = {n.var for n in walk(s, Bind)} | set(self.loops)
        self.written = {n.buffer.data for n in walk(s, Store, AddressOf)} | {
            a.region.buffer.data for n in walk(s, TileOp) for a in n.accesses() if a.writes}
        self.names: dict[Var, Any] = {}

    def place(self, e: Effect) -> tuple[Place, dict[Var, Bounds]]:
        """Any element of an access, and the variables that it has for itself."""
        mins, extents = tile_of(e) or ((), ())
        return self.places.element(e.buffer, (self.value(convert(i)) for i in mins), extents), self.places.inner

    def unknown(self, dt: Any, low: int | None = None, high: int | None = None) -> Var:
        """A value between bounds that may differ between threads and iterations."""
        v = fresh("own", dt)
        self.places.add_inner(v, low, high)
        return v

    def value(self, e: Any) -> Any:
        if isinstance(e, tuple):
            return tuple(map(self.value, e))
        if isinstance(e, Var):
            if e not in self.names:
                self.names[e] = self.name(e)
            return self.names[e]
        if isinstance(e, (Load, Call)):
            return self.of.same.setdefault(e, fresh("same", e.dtype)) if self.steady(e) else self.unknown(e.dtype)
        return rebuild(e, self.value) if isinstance(e, Expr) else e

    def name(self, v: Var) -> Any:
        """The value of a variable: a thread index, another loop's, or one of this access for itself."""
        value = self.of.values.get(v)
        if v in self.of.threads:
            return v
        if (loop := self.loops.get(v)) is not None:
            high = self.of.analyzer.interval(self.value(loop.extent))[1]
            return self.value(loop.start) + self.unknown(v.dtype, 0, None if high is None else max(high - 1, 0))
        if value is not None and (v in self.bound or self.of.known.varies(v) and not contains(value, Load)):
            return self.value(value)  # what was read before s may have changed since
        return self.unknown(v.dtype) if v in self.bound or self.of.known.varies(v) else v

    def steady(self, e: Expr) -> bool:
        """Whether what is read is the same for all threads, and while they run s."""
        return not self.of.known.varies(e) and free_vars(e).isdisjoint(self.bound) and not contains(e, Call) and all(
            is_private(x.buffer) and x.buffer.data not in self.written for x in walk(e, Load))
