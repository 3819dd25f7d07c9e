"""One warp group (or warp) of the synchronisation model, and its path through the program.

A stream follows the statements with integer values for all its threads and without data.  Statements that order threads or
touch shared memory are passed to the clocks and the memory of the block.  Everything else is skipped, except that registers
of wgmma in flight must not be touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilelang.ir import (Alloc, Assert, Bind, Break, Buffer, Const, Continue, Evaluate, Expr, For, If, Load, Ramp, Seq, Stmt,
                         Store, Var, While, walk, VARIABLE, SHARED)
from tilelang.ir.buffer import AddressOf
from tilelang.ir.expr import Call
from tilelang.target.atomics import Branch, Iterations, WarpRole

from .sync_fault import Fault, Found, Undecided
from .accesses import Accesses
from .clocks import Active, Warp
from .copies import EVENT_RULES
from .events import WAIT_RULES
from .registers import MatrixRegisters
from .values import distinct, one

_MOST = 64  # the longest non-ring or while loop that is followed completely


class _Left(Exception):
    """Break or continue."""

    def __init__(self, again: bool) -> None:
        self.again = again


class Stream(Accesses):
    """Threads first .. first+n-1 of a block.  block: the state they share with the others (model.Block)."""

    def __init__(self, block: Any, first: int, n: int) -> None:
        self.block, self.plan, self.values = block, block.plan, block.values
        self.first, self.n = first, n
        self.warps: list[Warp] = block.warps[first // 32: -(-(first + n) // 32)]
        self.threads = np.arange(first, first + n)
        self.ids = self.threads + 32 * self.warps[0].number - first  # numbers among all threads of a cluster
        x, y, _ = self.plan.launch.threads
        t = self.threads
        places = (t % x, t // x % y, t // (x * y)) if y > 1 or self.plan.launch.threads[2] > 1 else (t, 0, 0)
        self.env: dict[Var, Any] = {**block.env, **dict(zip(self.plan.launch.thread_vars, places))}
        self.mask: Any = None
        self.active: Active = [(w, w.full) for w in self.warps]
        self.everyone = self.active
        self.constants: dict[int, Any] = {}
        self.variables: dict[tuple[Var, Any], tuple[Any, Any]] = {}  # value, and for which threads it holds
        self.registers = MatrixRegisters()
        self.products = block.clocks.new()  # component of its wgmma instructions
        self.guess = 0  # depth of branches whose condition is not known
        self.independent = 0
        self.inside: tuple[Branch | Iterations | WarpRole, ...] = ()
        self.turning = False  # the innermost loop is a while loop
        self.axes = 0  # loops whose iterations are followed all at once
        self.tiles = 0  # depth of loops around ring loops
        self.path: tuple[int, ...] = ()  # their iterations
        # the threads that run the innermost loop, where not all do; False: they differ between iterations
        self.entry: Any = None
        self.open_copies: list[Any] = []  # cp.async not yet committed
        self.copy_groups: list[list[Any]] = []
        self.bulk: dict[tuple[Warp, int], Any] = {}
        self.nreg = block.registers
        self.cluster_turn: int | None = None  # phase of the cluster barrier that it arrived at and has not waited for
        self.waiting: Any = None  # the span of its wait, for messages

    # ---- used by Values --------------------------------------------------------------------------------------------

    def in_groups(self, first: int, count: int) -> Any:
        """Whether its threads are in warp groups first .. first+count-1."""
        lo, hi = first * 128, (first + count) * 128
        if lo <= self.first and self.first + self.n <= hi:
            return True
        return False if self.first >= hi or self.first + self.n <= lo else (self.threads >= lo) & (self.threads < hi)

    def elected(self) -> Any:
        """The lowest active lane of each warp."""
        out = np.zeros(self.n, bool)
        for w, lanes in self.active:
            out[32 * (w.number - self.warps[0].number) + (lanes & -lanes).bit_length() - 1] = True
        return out

    def variable(self, data: Var, at: Any) -> Any:
        """Value of a variable of the program, None when unknown."""
        if any(isinstance(i, np.ndarray) for i in at):
            return None
        value, mask = self.variables.get((data, at), (None, None))
        return value if mask is None or self.mask is not None and not (self.mask & ~mask).any() else None

    def memory(self, b: Buffer, at: Any) -> Any:
        """Integer read from a global tensor: the same for the same place."""
        return self.block.model.number(b, at)

    # ---- statements -------------------------------------------------------------------------------------------------

    def run(self, s: Stmt) -> Iterator[Any]:
        """Follow a statement that may block: a generator that yields while it waits."""
        match s:
            case Seq():
                for x in s.stmts:
                    try:
                        if self.plan.facts(x)[1]:
                            yield from self.run(x)
                        else:
                            self.do(x)
                    except Found as e:
                        raise e.under(x.span)  # noqa: B904 - the same one
            case If():
                for body in self._ways(s.cond, s.then, s.orelse, s):
                    yield from self.run(body)
            case For() | While():
                for body in self._turns(s) if isinstance(s, For) else self._rounds(s):
                    try:
                        yield from self.run(body)
                    except _Left as e:
                        if not e.again:
                            break
            case Evaluate() if s.call.op in WAIT_RULES:
                yield from WAIT_RULES[s.call.op](self, s.call, s.span)
            case _ if any(x.op.startswith("syncthreads_") for x in walk(s, Call)):
                self.do(s)
                yield from WAIT_RULES["sync_threads"](self, None, s.span)
            case _:
                self.do(s)

    def do(self, s: Stmt) -> None:
        """Follow a statement that does not block."""
        matters, _, _, registers = self.plan.facts(s)
        if registers and not isinstance(s, (Seq, If, For, While)) or registers and not matters:
            self._ordinary(s)
        if not matters:
            self._pass_by(s)
            return
        match s:
            case Seq():
                for x in s.stmts:
                    try:
                        self.do(x)
                    except Found as e:
                        raise e.under(x.span)  # noqa: B904 - the same one
            case If():
                for body in self._ways(s.cond, s.then, s.orelse, s):
                    self.do(body)
            case For() if self.plan.is_flat(s):
                self._all_at_once(s)
            case For() | While():
                for body in self._turns(s) if isinstance(s, For) else self._rounds(s):
                    try:
                        self.do(body)
                    except _Left as e:
                        if not e.again:
                            break
            case Bind():
                self.reads(s.value, s)
                self._bind(s)
            case Store():
                self._store(s)
            case Evaluate():
                rule = EVENT_RULES.get(s.call.op)
                if rule is not None:
                    if self.guess:
                        raise Undecided(f"{s.call.op} depends on data")
                    rule(self, s.call, s.span)
                    self.block.model.progress += 1
                else:
                    self.reads(s.call, s)
            case Alloc():
                if s.init is not None:
                    self._set(s.buffer, (0,) * s.buffer.ndim, s.init)
            case Assert():
                self.reads(s.cond, s)

    def _pass_by(self, s: Stmt) -> None:
        """Handle a statement that orders and touches nothing: record its bindings, and whether it leaves a loop."""
        if isinstance(s, Bind):
            self._bind(s)
        elif isinstance(s, (Break, Continue)):
            # All threads that run the loop leave it, if the threads that entered it are those active here.
            if self.guess or self.mask is not None and not (
                    isinstance(self.entry, np.ndarray) and np.array_equal(self.mask, self.entry)):
                raise Undecided("a loop is left by some of the threads")
            raise _Left(isinstance(s, Continue))
        elif isinstance(s, If) and self.plan.leaves(s):
            for body in self._ways(s.cond, s.then, s.orelse, s):
                self.do(body)
        elif isinstance(s, Seq) and self.plan.leaves(s):
            for x in s.stmts:
                self.do(x)
        elif isinstance(s, Seq):
            for x in s.stmts:
                if isinstance(x, Bind):
                    self._bind(x)

    def _bind(self, s: Bind) -> None:
        if s.value.dtype.lanes == 1 and not s.value.dtype.is_float:
            self.env[s.var] = self.values(s.value, self)

    def _store(self, s: Store) -> None:
        for e in (*s.indices, s.value):
            self.reads(e, s)
        scope = s.buffer.scope_name
        if scope in SHARED:
            self.touch("w", s.buffer, s.indices, 1, s)
            self.at_once(s)
        elif scope == VARIABLE and not s.buffer.dtype.is_float:
            self._set(s.buffer, tuple(self.values(i, self) for i in s.indices), s.value)

    def _set(self, b: Buffer, at: Any, value: Expr) -> None:
        if any(i is None or isinstance(i, np.ndarray) for i in at):
            self.variables = {k: v for k, v in self.variables.items() if k[0] is not b.data}
            return
        new = None if self.guess else self.values(value, self)
        old, mask = self.variables.get((b.data, at), (None, self.mask))
        if self.mask is not None and not (mask is not None and np.array_equal(mask, self.mask)):
            new = None if new is None or old is None else np.where(self.mask, new, old)
            mask = None
        else:
            mask = self.mask
        self.variables[b.data, at] = new, mask

    def _ways(self, cond: Expr, then: Any, orelse: Any, s: Any) -> Iterator[Any]:
        """Those of two branches (statements or values, None: absent) that are taken, each with its threads active."""
        self.reads(cond, s)
        c = self.values(cond, self)
        around = self.inside
        if c is None:  # any thread may take either branch
            if self.plan.facts(s)[2]:
                raise Undecided("synchronisation under a condition that is known only at run time")
            self.guess += 1
            for way, body in ((True, then), (False, orelse)):
                if body is not None:
                    self._enter(s, cond, way, around)
                    yield body
            self.guess -= 1
            self.inside = around
            return
        if not isinstance(c, np.ndarray):
            body = then if c else orelse
            if body is not None:
                self._enter(s, cond, bool(c), around)
                yield body
                self.inside = around
            return
        mask, active = self.mask, self.active
        for way, body in ((True, then), (False, orelse)):
            if body is not None:
                taken = c if way else ~c
                self.only(taken if mask is None else taken & mask)
                if self.active:
                    self._enter(s, cond, way, around)
                    yield body
                self.mask, self.active = mask, active
        self.inside = around

    def _enter(self, s: Any, cond: Expr, way: bool, around: tuple[Any, ...]) -> None:
        """Follow one branch."""
        if not self.plan.atomics:
            return
        self.inside = (*around, Branch(id(s), way))
        if way and isinstance(cond, Call) and cond.op == "in_warp_groups":
            self.inside = (*self.inside, WarpRole(cond.options.first, cond.options.count))

    def only(self, taken: Any) -> None:
        """Restrict the active threads to these."""
        if taken.all():
            self.mask, self.active = None, self.everyone
            return
        self.mask, self.active = taken, []
        bits = np.packbits(taken, bitorder="little")
        for k, w in enumerate(self.warps):
            lanes = int.from_bytes(bits[4 * k: 4 * k + 4].tobytes(), "little")
            if lanes:
                self.active.append((w, lanes))

    def _turns(self, s: For) -> Iterator[Stmt]:
        self.reads(s.start, s)
        self.reads(s.extent, s)
        start, extent = self.values(s.start, self), self.values(s.extent, self)
        ring = self.plan.is_ring_loop(s)
        outer = ring and self.plan.is_outer(s)
        self.tiles += outer
        if extent is None or start is None:
            if ring:
                raise Undecided("the number of iterations of a loop that orders threads depends on data")
            start, extent = start or 0, extent or 2
            self.block.model.cut = True
        mask, active, entry = self.mask, self.active, self.entry
        most = int(np.max(extent))
        around, turning = self.inside, self.turning
        self.turning = False
        if s.plan.independent:
            self.independent += 1
            self.inside = (*around, Iterations(id(s)))
        path = self.path
        steps = self._steps(s, start if isinstance(start, int) else 0, most, ring)
        self.entry = False if isinstance(extent, np.ndarray) else mask
        try:  # also when the loop is left early
            for k in steps:
                self.env[s.var] = start + k
                self.path = (*path, k) if outer else path
                self.mask, self.active = mask, active
                if isinstance(extent, np.ndarray):
                    inside = k < extent
                    self.only(inside if mask is None else inside & mask)
                    if not self.active:
                        break
                yield s.body
        finally:
            self.mask, self.active, self.path, self.entry = mask, active, path, entry
            self.inside, self.turning = around, turning
            self.tiles -= outer
            self.independent -= s.plan.independent

    def _all_at_once(self, s: For) -> None:
        """Follow independent iterations together: the iteration number becomes a further axis of all values."""
        self.axes += 1
        self.independent += 1
        around, self.inside = self.inside, (*self.inside, Iterations(id(s)))
        self.env[s.var] = (int(s.start.value) + np.arange(int(s.extent.value))).reshape(  # type: ignore[attr-defined]
            -1, *(1,) * self.axes)
        self.do(s.body)
        self.axes -= 1
        self.independent -= 1
        self.inside = around
        self.env.pop(s.var, None)

    def _steps(self, s: For, start: int, most: int, ring: bool) -> list[int] | range:
        """The iterations that are followed: all, or without whole periods of the rings in between."""
        model = self.block.model
        if not ring:
            if most <= _MOST:
                return range(most)
            model.cut = True
            return [*range(_MOST // 2), *range(most - 2, most)]
        way, outer = model.way, self.plan.is_outer(s)
        if most <= (way.whole if way.every_tile or not outer else 1):
            return range(most)
        # Inside a loop over tiles the rings continue from tile to tile, so fewer iterations of each tile suffice.
        stages, unit = self.plan.stages, self.plan.unit(s)
        stages += stages % 2  # loops may take two steps per iteration
        first, least = stages, (stages + 1 if self.tiles else 2 * stages + 2) + way.later
        if outer:
            first, least = min(1, way.tiles - 1), way.tiles
        # Loops of different warp roles over the same iterations leave out the same ones, wherever they start.
        skipped = start if 0 < start <= first else 0
        each, steps = s.plan.ring_steps or (1, most)  # ring steps of one iteration, and of the original loop
        left_out = model.left_out((id(self.block), *self.path, unit), steps + skipped, least) // each
        first = (first - skipped) // each
        if left_out <= 0 or first + left_out > most:
            return range(most)
        model.cut = True
        return [*range(first), *range(first + left_out, most)]

    def _rounds(self, s: While) -> Iterator[Stmt]:
        mask, active, entry, path, around, turning = (self.mask, self.active, self.entry, self.path, self.inside,
                                                      self.turning)
        self.entry, self.turning = mask, True
        try:
            for k in range(_MOST + 1):
                self.mask, self.active, self.path = mask, active, (*path, k)
                self.reads(s.cond, s)
                c = self.values(s.cond, self)
                if c is None and self.plan.is_ring_loop(s):
                    raise Undecided("the number of iterations of a loop that orders threads depends on data")
                if isinstance(c, np.ndarray):
                    here = c if mask is None else np.broadcast_to(c, self.n)[mask]
                    if here.any() and not here.all():
                        raise Undecided("a loop that some of the threads leave first")
                    c = bool(here.all())
                if c is False or c == 0 and c is not None or c is None and k >= 3:
                    return
                if k == _MOST:
                    break
                yield s.body
        finally:
            self.mask, self.active, self.entry, self.path = mask, active, entry, path
            self.inside, self.turning = around, turning
        # Every warp role with so many iterations stops here: the iterations left out are those at the end.
        if self.block.model.way.whole > 1:
            raise Undecided(f"a while loop of more than {_MOST} iterations")
        self.block.model.cut = True

    # ---- registers --------------------------------------------------------------------------------------------------

    def _ordinary(self, s: Stmt) -> None:
        touched, written = self.plan.registers(s)
        if touched:
            self.registers.ordinary(touched, written, lambda data: self._range(s, data), s.span)

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
            kept = {v: self.env.get(v) for v in used}
            self.env.update(zip(used, (g.ravel() for g in grids)))
            at = self.values(e, self)
            self.env.update(kept)
            if at is None:
                return None
            lo, hi = min(lo, int(np.min(at))), max(hi, int(np.max(at)) + int(lanes) - 1)
        return lo, hi

    # ---- used by the rules of events --------------------------------------------------------------------------------

    def uniform(self, e: Expr, what: str) -> int:
        """Value of an expression that is equal in all active threads."""
        v = self.values(e, self)
        if isinstance(v, np.ndarray) and self.mask is not None:
            v = np.broadcast_to(v, self.n)[self.mask]
        return one(v, what)

    def each_barrier(self, a: Expr, span: Any, block: Any = None) -> Iterator[tuple[Any, Active]]:
        """(mbarrier, warps and lanes that name it) of an operand.

        block: another block, for the mbarrier at the same place there.
        """
        block = block or self.block
        if not isinstance(a, AddressOf):
            raise Undecided("an mbarrier is not given as an element of a barrier buffer")
        at = self.values.address(a.buffer, a.indices, self)
        if at is None:
            raise Undecided(f"which mbarrier of `{a.buffer.name}` is used depends on data")
        if not isinstance(at, np.ndarray):
            yield block.barrier(at, a.buffer, span), self.active
            return
        mask, active = self.mask, self.active
        chosen = at if mask is None else at[mask]
        for value in distinct(chosen):
            taken = at == value
            self.only(taken if mask is None else taken & mask)
            yield block.barrier(int(value), a.buffer, span), self.active
        self.mask, self.active = mask, active

    def count(self) -> int:
        """Number of active threads."""
        return self.n if self.mask is None else int(self.mask.sum())

    def partial(self, what: str, span: Any) -> None:
        """Raises Found unless whole warps are active."""
        if any(lanes != w.full for w, lanes in self.active):
            n = self.plan.launch.num_threads
            raise Found(Fault(f"{what} is reached by {self.count()} of {n} threads", span, None))


__all__ = ["Stream"]
