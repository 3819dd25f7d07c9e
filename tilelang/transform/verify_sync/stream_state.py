"""The state of one stream of the synchronisation model: which of its threads are active, their values, what is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Binary, Bind, Buffer, Cast, Const, Expr, For, Load, Select, Stmt, Store, Unary, Var, walk,
                         GLOBAL)
from tilelang.target.atomics import Branch, Iterations, WarpRole
from tilelang.target.warp_groups import WARP_LANES, warps_of

from tilelang.layout.distinct import distinct

from .sync_fault import Fault, Found, Undecided
from .clocks import Active, Warp
from .plan import Plan
from .unknowns import Unknowns
from .values import Values, number, one


class StreamState:
    """Threads first .. first+n-1 of a block, which execute together.  block: what they share with others (model.Block).

    It is the frame in which Values computes, and what the rules of events change.  mask: the active threads, None: all;
    active: the same as lanes of warps.
    """

    def __init__(self, block: Any, first: int, n: int) -> None:
        self.block = block
        self.plan: Plan = block.plan
        self.values: Values = block.values
        self.unknowns: Unknowns | None = block.model.unknowns
        self.first, self.n = first, n
        self.lanes: int = block.lanes
        self.warps: list[Warp] = block.warps[first // self.lanes: -(-(first + n) // self.lanes)]
        self.threads = np.arange(first, first + n)
        self.ids = self.threads + self.lanes * self.warps[0].number - first  # numbers among all threads of a cluster
        x, y, _ = self.plan.launch.threads
        t = self.threads
        places = (t % x, t // x % y, t // (x * y)) if y > 1 or self.plan.launch.threads[2] > 1 else (t, 0, 0)
        self.env: dict[Var, Any] = {**block.env, **dict(zip(self.plan.launch.thread_vars, places))}
        self.mask: Any = None
        self.active: Active = [(w, w.full) for w in self.warps]
        self.everyone = self.active
        self.constants: dict[int, Any] = {}
        self.variables: dict[tuple[Var, Any], tuple[Any, Any]] = {}  # value, and for which threads it holds
        self.maybe: dict[Var, tuple[Any, Any]] = {}  # threads for which an unknown condition with a name may fail, and may hold
        # ---- the statements around the present one
        self.guess = 0  # depth of branches whose condition is not known
        self.independent: tuple[int, int] | None = None  # the outermost loop with independent iterations, and its execution
        self.entries: dict[int, int] = {}  # of such loops
        self.votes: dict[int, int] = {}  # how often conditions on votes were met
        self.inside: tuple[Branch | Iterations | WarpRole, ...] = ()
        self.turning = False  # the innermost loop is a while loop
        # (store, first thread of the stream) pairs that have been checked for conflicts within one instruction
        self.stored: set[tuple[int, int]] = self.plan.stored if self.unknowns is None else set()
        # ---- threads that left
        self.returned: Any = None  # a bool per thread
        self.doubt = 0  # under an unknown condition some may have left the iteration (1) or the loop (2)
        self.left_at: Any = None  # span of the last jump
        # ---- in flight
        self.registers = MatrixRegisters()
        self.wgmmas = block.clocks.new()  # component of its wgmma instructions
        self.open_copies: list[Any] = []  # cp.async not yet committed
        self.copy_groups: list[list[Any]] = []
        self.bulk: dict[tuple[Warp, int], Any] = {}
        self.nreg = block.registers
        self.cluster_phase: int | None = None  # phase of the cluster barrier that it arrived at and has not waited for

    # ---- used by Values --------------------------------------------------------------------------------------------

    def in_warps(self, first: int, count: int) -> Any:
        """Whether its threads are in warps first .. first+count-1."""
        lo, hi = first * WARP_LANES, (first + count) * WARP_LANES
        if lo <= self.first and self.first + self.n <= hi:
            return True
        return False if self.first >= hi or self.first + self.n <= lo else (self.threads >= lo) & (self.threads < hi)

    def elected(self) -> Any:
        """The lowest active lane of each warp, None when unknown."""
        if self.unknowns is not None:
            return None
        out = np.zeros(self.n, bool)
        for w, lanes in self.active:
            out[WARP_LANES * (w.number - self.warps[0].number) + (lanes & -lanes).bit_length() - 1] = True
        return out

    def load(self, e: Load, at: tuple[Any, ...]) -> Any:
        """Value of a variable of the program, or the integer that a tensor is assumed to hold; None when unknown."""
        if e.buffer.scope_name == GLOBAL and self.unknowns is None:
            return number(self.block.model.scale, at)
        if e.buffer.facts.numbers and isinstance(at[0], int):  # the first and the last one in turn
            return (0, e.buffer.facts.numbers - 1)[at[0] % 2]
        if e.buffer.scope_name.startswith("local") and not any(isinstance(i, np.ndarray) for i in at):
            value, mask = self.variables.get((e.buffer.data, at), (None, None))
            if value is not None and (mask is None or self.mask is not None and not (self.mask & ~mask).any()):
                return value
        return None if self.unknowns is None else self.unknowns.number(e)

    def compared(self, e: Binary, a: Any, b: Any) -> Any:
        """Value of an "eq" or "ne" with one known side, None when unknown."""
        return None if self.unknowns is None else self.unknowns.compared(e, a, b, self.env)

    # ---- values ----------------------------------------------------------------------------------------------------

    def bind(self, s: Bind) -> None:
        """Bind a variable of the program to the value that it has here."""
        if s.value.dtype.lanes == 1 and not s.value.dtype.is_float:
            value = self.env[s.var] = self.values(s.value, self)
            if value is None and s.value.dtype.is_bool:
                self.maybe[s.var] = self._possible(s.value, False), self._possible(s.value, True)

    def _possible(self, cond: Expr, way: bool) -> Any:
        return possible(cond, way, lambda e: self.values(e, self), self.maybe)

    def assign(self, b: Buffer, at: Any, value: Expr) -> None:
        """Assign a variable (T.alloc_var) in the active threads."""
        if any(i is None or isinstance(i, np.ndarray) for i in at):
            self.variables = {k: v for k, v in self.variables.items() if k[0] is not b.data}
            return
        new = None if self.guess or self.doubt or b.data in self.plan.addressed else self.values(value, self)
        old, where = self.variables.get((b.data, at), (None, self.mask))
        if self.mask is not None and where is not self.mask and not np.array_equal(where, self.mask):
            new = None if new is None or old is None else np.where(self.mask, new, old)
            where = None if where is None else where | self.mask
        else:
            where = self.mask
        self.variables[b.data, at] = new, where

    def forget(self, s: Stmt) -> None:
        """Forget the variables that a loop sets, where not all of its iterations were followed."""
        stored = {x.buffer.data for x in walk(s, Store)}
        self.variables = {k: v for k, v in self.variables.items() if k[0] not in stored}

    def uniform(self, e: Expr, what: str) -> int:
        """Value of an expression that is equal in all active threads."""
        v = self.values(e, self)
        if isinstance(v, np.ndarray) and self.mask is not None:
            v = np.broadcast_to(v, self.n)[self.mask]
        return one(v, what)

    # ---- active threads --------------------------------------------------------------------------------------------

    def only(self, taken: Any) -> None:
        """Restrict the active threads to these of them."""
        if self.mask is not None:
            taken = taken & self.mask
        if taken.all():
            self.mask, self.active = None, self.everyone
            return
        self.mask, self.active = taken, []
        if taken.ndim > 1:  # in a loop that is followed all at once: those of any iteration
            taken = np.broadcast_to(taken, (*taken.shape[:-1], self.n)).reshape(-1, self.n).any(0)
        bits = np.packbits(taken, bitorder="little")
        for k, w in enumerate(self.warps):
            lanes = int.from_bytes(bits[k * self.lanes // 8: (k + 1) * self.lanes // 8].tobytes(), "little")
            if lanes:
                self.active.append((w, lanes))

    def hits(self, at: Any, lo: int, hi: int) -> bool:
        """Whether the active threads' values (or the common one) lie in lo .. hi-1."""
        if self.mask is not None and isinstance(at, np.ndarray):
            at, mask = np.broadcast_arrays(at, self.mask)
            at = at[mask]
        at = np.asarray(at)
        return not at.size or lo <= np.minimum.reduce(at, axis=None) and bool(np.maximum.reduce(at, axis=None) < hi)

    def enter(self, loop: For) -> None:
        """Enter a loop, whose iterations may be independent."""
        if not loop.plan.independent:
            return
        self.inside = (*self.inside, Iterations(id(loop)))
        if self.independent is None:
            turn = self.entries[id(loop)] = self.entries.get(id(loop), 0) + 1
            self.independent = id(loop), turn

    def grouped(self, values: np.ndarray) -> Iterator[int]:
        """The distinct values of the active threads, each while the threads that have it are the active ones."""
        mask, active = self.mask, self.active
        for value in distinct(values if mask is None else values[mask]):
            self.only(values == value)
            yield int(value)
            self.mask, self.active = mask, active

    def ways(self, s: Any, cond: Expr, then: Any, orelse: Any) -> Iterator[Any]:
        """Those of two branches of s (statements or values, None: absent) that are taken, each with its threads active."""
        c = self.values(cond, self)
        if c is None and self.unknowns is not None:
            c = self.unknowns.truth(cond, self)
        around = self.inside
        if c is None and self.unknowns is None and self.plan.facts(s)[2]:
            c = self._voted(s, cond)
            if c is None:
                raise Undecided("synchronisation under a condition that is known only at run time")
        if c is not None and not isinstance(c, np.ndarray):
            body = then if c else orelse
            if body is not None:
                self._enter(s, cond, bool(c), around)
                yield body
                self.inside = around
            return
        mask, active = self.mask, self.active
        self.guess += c is None  # any thread may take either branch, unless a known term of the condition excludes it
        for way, body in ((True, then), (False, orelse)):
            if body is not None:
                taken = self._possible(cond, way) if c is None else c if way else ~c
                if taken is not np.True_:
                    self.only(taken if np.ndim(taken) else np.full(self.n, taken))
                if self.active:
                    self._enter(s, cond, way, around)
                    yield body
                self.mask, self.active = mask, active
        self.guess -= c is None
        self.inside = around

    def _voted(self, s: Any, cond: Expr) -> bool | None:
        """What this run takes a condition on a vote of the block to be, the same in all streams: each asks it as often.  None
        for other conditions."""
        if not self.plan.asks_vote(cond):
            return None
        n = self.votes[id(s)] = self.votes.get(id(s), -1) + 1
        return self.block.model.way.votes and n % 3 < 2

    def _enter(self, s: Any, cond: Expr, way: bool, around: tuple[Any, ...]) -> None:
        """Follow one branch."""
        if not self.plan.atomics:
            return
        self.inside = (*around, Branch(id(s), way))
        if way and (warps := warps_of(cond)) is not None:
            self.inside = (*self.inside, WarpRole(*warps))

    def count(self) -> int:
        """Number of active threads."""
        return self.n if self.mask is None else int(self.mask.sum())

    def leave(self) -> None:
        """The active threads return: block barriers do not wait for them any more."""
        gone = np.ones(self.n, bool) if self.mask is None else self.mask
        self.block.named(0).leave(self.count())
        self.returned = gone if self.returned is None else self.returned | gone
        for w, lanes in self.active:
            w.gone |= lanes
        self.everyone = [(w, lanes & ~w.gone) for w, lanes in self.everyone if lanes & ~w.gone]

    def partial(self, what: str, span: Any) -> None:
        """Reports a fault unless whole warps are active, but for threads that have returned."""
        if self.active is not self.everyone and not set(self.active) <= set(self.everyone):
            raise Found(Fault(f"{what} is reached by {self.count()} of {self.plan.launch.num_threads} threads", span,
                              self.left_at, kind="barrier"))
        if self.doubt:
            self.block.report(Fault(f"{what} is reached by some of {self.plan.launch.num_threads} threads", span,
                                    self.left_at, False, kind="barrier"))

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
        for value in self.grouped(at):
            yield block.barrier(value, a.buffer, span), self.active


# ---- registers that the wgmma instructions in flight of a warp group use ---------------------------------------------------

@dataclass
class _Use:
    data: Var
    lo: int
    hi: int
    result: bool  # the accumulator, else the operand A
    span: Any


@dataclass
class MatrixRegisters:
    """Accumulators and register operands in use from a wgmma to the wait for its group; ordinary writes need a fence.

    time: of the wgmma instructions so far (in their component).  finished: time of the last group waited for.
    waits: the time of each warp when it issued that group; by then the warp had passed its earlier waits.
    """

    time: int = 1
    finished: int = 0
    open: list[_Use] = field(default_factory=list)
    same: set[tuple[Var, int, int, bool]] = field(default_factory=set)  # uses of the open group
    groups: list[tuple[int, list[_Use], dict[int, int]]] = field(default_factory=list)
    waits: dict[int, int] = field(default_factory=dict)
    flying: set[Var] = field(default_factory=set)
    written: dict[Var, Any] = field(default_factory=dict)
    fenced: bool = False

    def ordinary(self, touched: frozenset[Var], written: frozenset[Var], indices: Any, span: Any) -> None:
        """An ordinary statement touches these storages.  indices(data): (first, last) element touched, None: all."""
        for data in touched & self.flying:
            for u in self._in_flight():
                if u.data is not data or not u.result and data not in written:
                    continue
                at = indices(data)
                if at is None or at[0] < u.hi and u.lo <= at[1]:
                    raise Found(Fault(f"`{data.name}` is used while the wgmma that {'writes' if u.result else 'reads'} it "
                                      "may still run: no wgmma_wait for its group in between", span, u.span, kind="wgmma"))
        for data in written:
            self.written[data] = span
            self.same = {u for u in self.same if u[0] is not data}

    def issue(self, uses: list[tuple[Var, int, int, bool]], span: Any) -> None:
        """A wgmma uses registers lo .. hi-1 of storages."""
        if not self.fenced:
            raise Found(Fault("a wgmma has no wgmma_fence before it", span, kind="wgmma"))
        for use in uses:
            if use in self.same:
                continue
            self.same.add(use)
            data, lo, hi, result = use
            if data in self.written:
                raise Found(Fault(f"`{data.name}` is written by ordinary instructions and then used by a wgmma without a "
                                  "wgmma_fence in between", span, self.written[data], kind="wgmma"))
            for u in self._in_flight():
                if u.data is data and lo < u.hi and u.lo < hi and (u.result or result) and not (
                        u.result and result and (u.lo, u.hi) == (lo, hi)):
                    raise Found(Fault(f"`{data.name}` is used by a wgmma while another one that "
                                      f"{'writes' if u.result else 'reads'} it may still run", span, u.span, kind="wgmma"))
            self.open.append(_Use(data, lo, hi, result, span))
            self.flying.add(data)

    def fence(self) -> None:
        """wgmma.fence: the registers written so far may be used."""
        self.fenced = True
        self.written.clear()

    def commit(self, waits: dict[int, int]) -> None:
        """Close the group of the instructions since the last commit; all warps of the warp group issue it together."""
        self.groups.append((self.time, self.open, waits))
        self.open, self.same = [], set()

    def wait(self, n: int) -> None:
        """Wait until at most n groups are in flight."""
        done = self.groups[: max(0, len(self.groups) - n)]
        if done:
            self.groups = self.groups[len(done):]
            self.finished, self.waits = done[-1][0], done[-1][2]
            self.flying = {u.data for u in self._in_flight()}

    def _in_flight(self) -> Iterator[_Use]:
        yield from self.open
        for _, uses, _ in self.groups:
            yield from uses


# ---- conditions and numbers whose values are unknown -------------------------------------------------------------------------
# Bounds of values tell which way a branch may go: `tx < min(n, 5)` holds for no thread from 5 on.

Limits = tuple[Any, Any]  # least and greatest value, a number or one per thread; None: unknown
_ORDERED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}  # operator -> its negation


def possible(e: Expr, want: bool, value: Callable[[Expr], Any], bound: dict[Var, tuple[Any, Any]]) -> Any:
    """The threads (a bool each, or one for all) for which a condition may have the truth value `want`.

    value: a condition's value where it is known, else None.  bound: this function's results for False and True, by name.
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
    if isinstance(e, Binary) and e.op in _ORDERED and not e.a.dtype.is_float:
        return _may(e.op if want else _ORDERED[e.op], limits(e.a, value), limits(e.b, value))
    return np.True_


def _may(op: str, a: Limits, b: Limits) -> Any:
    """Whether a op b may hold."""
    if op in ("gt", "ge"):
        return _may({"gt": "lt", "ge": "le"}[op], b, a)
    if op == "eq":
        return _may("le", a, b) & _may("le", b, a)
    if op == "ne" or a[0] is None or b[1] is None:
        return np.True_
    return np.asarray(a[0] < b[1] if op == "lt" else a[0] <= b[1])


def limits(e: Expr, value: Callable[[Expr], Any]) -> Limits:
    """Between which numbers an integer lies.  value: as in `possible`."""
    known = value(e)
    if known is not None:
        return known, known
    if isinstance(e, Cast) and not e.value.dtype.is_float and e.dtype.bits >= e.value.dtype.bits:
        return limits(e.value, value)
    if isinstance(e, Select):
        (low, high), (low2, high2) = limits(e.a, value), limits(e.b, value)
        return _both(np.minimum, low, low2), _both(np.maximum, high, high2)
    if not isinstance(e, Binary):
        return None, None
    if e.op in ("min", "max"):
        (low, high), (low2, high2) = limits(e.a, value), limits(e.b, value)
        pick = np.minimum if e.op == "min" else np.maximum
        if e.op == "min":
            return _both(pick, low, low2), _either(pick, high, high2)
        return _either(pick, low, low2), _both(pick, high, high2)
    if not isinstance(e.b, Const):
        return None, None
    c = int(e.b.value)
    if e.op == "floormod" and c > 0:
        return 0, c - 1
    if e.op == "bitand" and c >= 0:
        return 0, c
    low, high = limits(e.a, value)
    if e.op == "floordiv" and c > 0:
        return _both(np.floor_divide, low, c), _both(np.floor_divide, high, c)
    if low is None or high is None or not (e.op in ("add", "sub") or e.op == "mul" and c > 0):
        return None, None  # if one bound is unknown, the other may wrap
    act = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[e.op]
    return act(low, c), act(high, c)


def _both(pick: Any, a: Any, b: Any) -> Any:
    return None if a is None or b is None else pick(a, b)


def _either(pick: Any, a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else pick(a, b)
