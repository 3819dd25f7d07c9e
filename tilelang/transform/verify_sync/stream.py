"""One warp group (or warp) of the synchronisation model, and its path through the program.

A stream follows the statements with integer values for all its threads and without data.  Statements that order threads or
touch shared memory are passed to the clocks and the memory of the block.  Everything else is skipped, except that registers
of wgmma in flight must not be touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Alloc, Assert, Bind, Break, Const, Continue, Evaluate, For, If, Load, Ramp, Seq, Stmt,
                         Store, Var, While, walk, VARIABLE, SHARED)

from .sync_fault import Found, Undecided
from .accesses import reads
from .copies import EVENT_RULES
from .events import WAIT_RULES
from .loops import Left, Loops
from .stream_state import StreamState
from .touches import at_once, touch


class Stream:
    """Follows the statements of a program with the threads of st.  waiting: what it waits for, for messages."""

    def __init__(self, st: StreamState) -> None:
        self.st, self.plan, self.loops = st, st.plan, Loops(st)
        self.waiting: Any = None

    def run(self, s: Stmt) -> Iterator[Any]:
        """Follow a statement: a generator that yields while it waits."""
        matters, _, _, registers = self.plan.facts(s)
        if registers and not (matters and isinstance(s, (Seq, If, For, While))):
            self._ordinary(s)
        if not matters:
            self._pass_by(s)
            return
        match s:
            case Seq():
                for x in s.stmts:
                    if not self.loops.stay():
                        return
                    try:
                        yield from self.run(x)
                    except Found as e:
                        raise e.under(x.span)  # noqa: B904 - the same one
            case If():
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
        for a in s.call.args:
            for part in a.indices if isinstance(a, AddressOf) else (a,):
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
