"""One warp group (or warp) of the synchronisation model, and its path through the program.

A stream follows the statements with integer values for all its threads and without data.  Statements that order threads or
touch shared memory are passed to the clocks and the memory of the block.  Everything else is skipped, except that registers
of wgmma in flight must not be touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Alloc, Assert, Binary, Bind, Break, Const, Continue, Evaluate, For, If, Load, Node, Ramp,
                         Seq, Stmt, Store, Var, While, children, walk, SHARED, VARIABLE)

from .sync_fault import Found, Undecided
from .events import reads, EVENT_RULES, WAIT_RULES
from .stream_state import StreamState
from .touches import at_once, touch


class Stream:
    """Follows the statements of a program with the threads of st.  waiting: what it waits for, for messages."""

    def __init__(self, st: StreamState) -> None:
        self.st, self.plan, self.loops = st, st.plan, Loops(st)
        self.waiting: Any = None

    def run(self, s: Stmt) -> Iterator[Any]:
        """Follow a statement: a generator that yields while it waits."""
        if self.plan.waits_nowhere(s):
            self._without_waits(s, self.plan.facts(s))
            return
        if self.plan.facts(s)[3] and not isinstance(s, (Seq, If, For, While)):
            self._ordinary(s)
        match s:
            case Seq():
                for x, plain, facts in self.plan.followed(s):
                    if (self.loops.gone is not None or self.st.returned is not None) and not self.loops.stay():
                        return
                    try:
                        if plain:
                            self._without_waits(x, facts)
                        else:
                            yield from self.run(x)
                    except Found as e:
                        raise e.under(x.span)  # noqa: B904 - the same one
            case If():
                if self.plan.facts(s.cond)[1]:  # a vote of the block
                    yield from WAIT_RULES["sync_threads"](self.st, None, s.span)
                for body in self._branches(s):
                    yield from self.run(body)
            case For() if self.plan.is_flat(s):
                for body in self.loops.all_at_once(s):
                    yield from self.run(body)
            case For() | While():
                for body in self.loops.bodies(s):
                    try:
                        yield from self.run(body)
                    except Left:
                        pass
            case Evaluate() if s.call.op in WAIT_RULES:
                yield from WAIT_RULES[s.call.op](self.st, s.call, s.span)
            case _:
                self._simple(s)
                if self.plan.facts(s)[1]:  # a vote of the block
                    yield from WAIT_RULES["sync_threads"](self.st, None, s.span)

    def _without_waits(self, s: Stmt, facts: tuple[bool, bool, bool, bool]) -> None:
        """Follow a statement that orders and touches nothing, or one without statements in it that waits for nothing."""
        matters, _, _, registers = facts
        if registers:
            self._ordinary(s)
        if matters:
            self._simple(s)
        else:
            self._pass_by(s)

    def _simple(self, s: Stmt) -> None:
        """Follow a statement without statements in it."""
        match s:
            case Bind():
                reads(self.st, s.value, s)
                self.st.bind(s)
            case Store():
                self._store(s)
            case Evaluate():
                self._call(s)
            case Alloc():
                if s.init is not None:
                    self.st.assign(s.buffer, (0,) * s.buffer.ndim, s.init)
            case Assert():
                reads(self.st, s.cond, s)

    def _call(self, s: Evaluate) -> None:
        rule = EVENT_RULES.get(s.call.op)
        if rule is None:
            if any(isinstance(a, AddressOf) and "barrier" in a.buffer.scope_name for a in s.call.args):
                raise Undecided("a function of the program uses an mbarrier")
            reads(self.st, s.call, s)
            return
        if self.st.guess and self.st.unknowns is None:
            raise Undecided(f"{s.call.op} depends on data")
        for part in self.plan.asked(s):
            reads(self.st, part, s)
        rule(self.st, s.call, s.span)
        self.st.block.model.progress += 1

    def _branches(self, s: If) -> Iterator[Stmt]:
        reads(self.st, s.cond, s)
        return self.st.ways(s, s.cond, s.then, s.orelse)

    def _pass_by(self, s: Stmt) -> None:
        """Handle a statement that orders and touches nothing: record its bindings, and whether it leaves a loop."""
        if isinstance(s, Bind):
            self.st.bind(s)
        elif isinstance(s, (Break, Continue)):
            self.loops.break_off(s)
        elif isinstance(s, If) and self.plan.leaves(s):
            for body in self._branches(s):
                self._pass_by(body)
        elif isinstance(s, Seq) and self.plan.leaves(s):
            for x in s.stmts:
                if self.loops.stay():
                    self._pass_by(x)
        elif isinstance(s, Seq):
            for x in s.stmts:
                if isinstance(x, Bind):
                    self.st.bind(x)

    def _store(self, s: Store) -> None:
        for e in (*s.indices, s.value):
            reads(self.st, e, s)
        scope = s.buffer.scope_name
        if scope in SHARED:
            touch(self.st, "w", s.buffer, s.indices, 1, s)
            at_once(self.st, s)
        elif scope == VARIABLE and not s.buffer.dtype.is_float:
            self.st.assign(s.buffer, tuple(self.st.values(i, self.st) for i in s.indices), s.value)

    # ---- registers --------------------------------------------------------------------------------------------------

    def _ordinary(self, s: Stmt) -> None:
        touched, written = self.plan.registers(s)
        if touched:
            self.st.registers.ordinary(touched, written, lambda data: self._range(s, data), s.span)

    def _range(self, s: Stmt, data: Var) -> tuple[int, int] | None:
        """First and last element of a register array that a statement touches, None when not known."""
        loops = {x.var: x for x in walk(s, For)}
        lo, hi = 1 << 30, -1
        for x in walk(s):
            if isinstance(x, AddressOf) and x.buffer.data is data:
                return None
            if not (isinstance(x, (Load, Store)) and x.buffer.data is data):
                continue
            e: Any = x.indices[0]
            lanes = 1
            if isinstance(e, Ramp):
                e, lanes = e.base, e.lanes
            used = [v for v in dict.fromkeys(y for y in walk(e, Var)) if v in loops]
            if any(not isinstance(loops[v].extent, Const) or not isinstance(loops[v].start, Const) for v in used):
                return None
            grids = np.meshgrid(*(np.arange(int(loops[v].extent.value)) + int(loops[v].start.value)  # type: ignore
                                  for v in used), indexing="ij") if used else []
            kept = {v: self.st.env.get(v) for v in used}
            self.st.env.update(zip(used, (g.ravel() for g in grids)))
            at = self.st.values(e, self.st)
            self.st.env.update(kept)
            if at is None:
                return None
            lo, hi = min(lo, int(np.min(at))), max(hi, int(np.max(at)) + int(lanes) - 1)
        return lo, hi


# ---- iterations that are followed -------------------------------------------------------------------------------------------


_MOST = 64  # the longest non-ring or while loop that is followed completely
_MOST_WHILE = 256  # the longest while loop with unknown numbers, in which block barriers alone order threads
_BUDGET = 6000  # accesses of a stream with unknown numbers, after which loops are cut short


class Left(Exception):
    """No active thread is left in an iteration of the innermost loop."""


class Loops:
    """The loops around the present statement of a stream, and the iterations that it follows of a loop."""

    def __init__(self, st: StreamState) -> None:
        self.st = st
        self._axes = 0  # loops whose iterations are followed all at once
        self._tiles = 0  # depth of loops around ring loops
        self._path: tuple[int, ...] = ()  # their iterations
        # of the innermost loop: threads that left the iteration, and the loop (None: none)
        self.gone: Any = None
        self._broken: Any = None
        self._doubt = 0  # whether threads may have left an outer loop (StreamState.doubt)

    def bodies(self, s: For | While) -> Iterator[Stmt]:
        """The body of a loop once for each iteration that is followed, with its threads active."""
        return self._for_iterations(s) if isinstance(s, For) else self._while_iterations(s)

    def break_off(self, s: Stmt) -> None:
        """End the innermost loop, or its iteration, for the active threads.  Raises Left, or Undecided."""
        again = isinstance(s, Continue)
        self.st.left_at = s.span
        if self.st.guess:
            if self.st.unknowns is None:
                raise Undecided("a loop is left under a condition that is known only at run time")
            self.st.doubt = max(self.st.doubt, 1 if again else 2)
            return
        mask = np.ones(self.st.n, bool) if self.st.mask is None else self.st.mask
        self.gone = mask if self.gone is None else self.gone | mask
        if not again:
            self._broken = mask if self._broken is None else self._broken | mask
        if mask.all():
            raise Left

    def stay(self) -> bool:
        """Restrict the active threads to those that are still in the iteration; returns whether there are any."""
        for gone in (self.gone, self.st.returned):
            if gone is not None:
                self.st.only(~gone)
        return bool(self.st.active)

    def _iteration(self) -> bool:
        """Begin an iteration with those active threads that have not left the loop; returns whether there are any."""
        self.gone = self._broken
        self.st.doubt = self._doubt if self.st.doubt == 1 else self.st.doubt
        return self.stay()

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Keeps what holds around a loop."""
        st = self.st
        kept = (st.mask, st.active, st.inside, st.turning, st.independent, st.doubt,
                self.gone, self._broken, self._doubt, self._path, self._tiles, self._axes)
        self._broken, self._doubt = None, st.doubt
        try:
            yield
        finally:
            (st.mask, st.active, st.inside, st.turning, st.independent, st.doubt,
             self.gone, self._broken, self._doubt, self._path, self._tiles, self._axes) = kept

    def _for_iterations(self, s: For) -> Iterator[Stmt]:
        st = self.st
        reads(st, s.start, s)
        reads(st, s.extent, s)
        start, extent = st.values(s.start, st), st.values(s.extent, st)
        ring = st.plan.is_ring_loop(s)
        outer = ring and st.plan.is_outer(s)
        env, known = st.env, start is not None and extent is not None
        if not known:
            start, extent = self._assumed(s, start, extent, ring)
        most = int(np.max(extent))
        with self._around():
            mask, active, path = st.mask, st.active, self._path
            self._tiles += outer
            st.turning = False
            st.enter(s)
            steps = self._steps(s, start if isinstance(start, int) else 0, most, ring)
            for at, k in enumerate(steps):
                if at != k and st.unknowns is not None:
                    st.forget(s)
                st.env[s.var] = start + k
                self._path = (*path, k) if outer else path
                st.mask, st.active = mask, active
                if isinstance(extent, np.ndarray):
                    st.only(k < extent)
                if not self._iteration():
                    break
                yield s.body
        if not known:
            st.env = env
        if st.unknowns is not None and (not known or len(steps) < most):
            st.forget(s)

    def _assumed(self, s: For, start: Any, extent: Any, ring: bool) -> tuple[Any, Any]:
        """Bounds of a loop of which one is unknown; their names stand for them while it runs."""
        self.st.block.model.cut = True
        unknowns = self.st.unknowns
        if unknowns is None:
            if ring:
                raise Undecided("the number of iterations of a loop that orders threads depends on data")
            return start or 0, extent or 2
        many = self.st.plan.stages + 1 if unknowns.extent is None else unknowns.extent
        bounds = (0 if start is None else start), (many if extent is None else extent)
        self.st.env = {**self.st.env, **{e: v for e, v in zip((s.start, s.extent), bounds) if isinstance(e, Var)}}
        return bounds

    def all_at_once(self, s: For) -> Iterator[Stmt]:
        """The body once for all iterations: the iteration number becomes a further axis of all values."""
        st = self.st
        with self._around():
            self._axes += 1
            st.enter(s)
            numbers = int(s.start.value) + np.arange(int(s.extent.value))  # type: ignore[attr-defined]
            st.env[s.var] = numbers.reshape(-1, *(1,) * self._axes)
            yield s.body
        st.env.pop(s.var, None)

    def _steps(self, s: For, start: int, most: int, ring: bool) -> list[int] | range:
        """The iterations that are followed: all, or without whole periods of the rings in between."""
        plan, model = self.st.plan, self.st.block.model
        if self.st.unknowns is not None:
            return self._with_chosen(s, start, most)
        if not ring:
            if most <= _MOST:
                return range(most)
            model.cut = True
            return [*range(_MOST // 2), *range(most - 2, most)]
        way, outer = model.way, plan.is_outer(s)
        if most <= (way.whole if way.every_tile or not outer else 1):
            return range(most)
        # Inside a loop over tiles the rings continue from tile to tile, so fewer iterations of each tile suffice.
        stages, unit = plan.stages, plan.unit(s)
        stages += stages % 2  # loops may take two steps per iteration
        first, least = stages, (stages + 1 if self._tiles else 2 * stages + 2) + way.later
        if outer:
            first, least = min(1, way.tiles - 1), way.tiles
        # Loops of different warp roles over the same iterations leave out the same ones, wherever they start.
        skipped = start if 0 < start <= first else 0
        each, steps = s.plan.ring_steps or (1, most)  # ring steps of one iteration, and of the original loop
        left_out = model.left_out((id(self.st.block), *self._path, unit), steps + skipped, least) // each
        first = (first - skipped) // each
        if left_out <= 0 or first + left_out > most:
            return range(most)
        model.cut = True
        return [*range(first), *range(first + left_out, most)]

    def _with_chosen(self, s: For, start: int, most: int) -> list[int] | range:
        """The iterations that are followed with unknown numbers: besides the first and the last those that constants choose.

        Between them whole periods of the slots that small moduli choose are left out.
        """
        first, period = self.st.plan.slots(s)
        if most <= 2 * first + period or most <= _MOST and self.st.block.accesses <= _BUDGET and _places_by(s):
            return range(most)
        self.st.block.model.cut = True
        left_out = (most - 2 * first) // period * period
        chosen = {k - start for k in _compared(s)}
        return sorted({*range(first), *range(first + left_out, most), *(k for k in chosen if 0 <= k < most)})

    def _while_iterations(self, s: While) -> Iterator[Stmt]:
        st = self.st
        with self._around():
            mask, active, path, st.turning = st.mask, st.active, self._path, True
            most = _MOST if st.unknowns is None else _MOST_WHILE
            for k in range(most + 1):
                st.mask, st.active, self._path = mask, active, (*path, k)
                if not self._iteration():
                    return
                reads(st, s.cond, s)
                c = st.values(s.cond, st)
                if c is None and st.unknowns is None and st.plan.is_ring_loop(s):
                    raise Undecided("the number of iterations of a loop that orders threads depends on data")
                if isinstance(c, np.ndarray):
                    st.only(np.broadcast_to(c, st.n).astype(bool))
                    c = bool(st.active)
                    self._broken = None if st.mask is None else ~st.mask
                if c is not None and not c or c is None and k >= 3 and st.unknowns is None:
                    return
                if k == most or k >= 3 and (c is None or st.unknowns is not None and st.block.accesses > _BUDGET):
                    break
                yield s.body
        if st.unknowns is not None:
            st.forget(s)
        # Every warp role with so many iterations stops here: the iterations left out are those at the end.
        if st.block.model.way.whole > 1:
            raise Undecided(f"a while loop of more than {_MOST} iterations")
        st.block.model.cut = True


def _places_by(s: For) -> bool:
    """Whether shared addresses may differ between iterations by more than a small modulus of the loop's variable.

    That is the case if they use the variable in another way, or if the loop changes variables of threads, on which addresses
    may depend.
    """
    follows: set[Var] = set()

    def plain(e: Node) -> bool:
        if isinstance(e, Var):
            return e is s.var or e in follows
        if isinstance(e, Binary) and e.op == "floormod" and isinstance(e.b, Const) and 0 < e.b.value <= 16:
            return False
        return any(map(plain, children(e)))

    for x in walk(s.body):
        if isinstance(x, Bind) and plain(x.value):
            follows.add(x.var)
        elif isinstance(x, Store) and x.buffer.scope_name == VARIABLE and not x.buffer.dtype.is_float:
            return True
        elif isinstance(x, (Load, Store, AddressOf)) and x.buffer.scope_name in SHARED and any(map(plain, x.indices)):
            return True
    return False


def _compared(s: For) -> set[int]:
    """Values of a loop's variable at and beside which a comparison with a constant in its body changes its result."""
    out: set[int] = set()
    for x in walk(s.body, Binary):
        if x.op in ("eq", "ne", "lt", "le", "gt", "ge"):
            for a, b in ((x.a, x.b), (x.b, x.a)):
                shift = 0
                if isinstance(a, Binary) and a.op in ("add", "sub") and isinstance(a.b, Const):
                    shift, a = int(a.b.value) * (1 if a.op == "add" else -1), a.a
                if a is s.var and isinstance(b, Const):
                    out.update(int(b.value) - shift + d for d in (-1, 0, 1))
    return out
