"""Checks programs that order threads with block barriers and cp.async groups only.

The check follows the device program of one block, statement by statement, with the exact addresses of every thread but
without data.  For each piece of shared memory it records which threads touched it since the last block barrier and which
asynchronous copies to it are in flight.  Two accesses of different threads to one piece between the same two barriers, one
of them a write, are a fault; so is any access to a piece while a copy to it is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang.ir import (Alloc, Assert, Bind, Break, Buffer, Call, Continue, Evaluate, Expr, For, If, Launch, Load, Node,
                         Select, Seq, Stmt, Store, Var, While, SHARED)
from tilelang.ir.buffer import AddressOf
from tilelang.ir.children import children
from tilelang.layout.distinct import distinct
from tilelang.target.atomics import Atomic, Branch, Iterations, family

from .sync_fault import Fault
from .jumps import Jumps, is_return, jumps_that_matter
from .limits import possible
from .locals import Locals
from .numbers import SAMPLES, Numbers
from .places import Misaligned, Places
from .shadow import AT_ONCE, Shadow, differ, held, made_of, mode_of, slot_iterations, widest_piece
from .iterations import compared, has_unknown_loops, places_by

BUDGET = 6000  # evaluated accesses; beyond this, loops are cut short
_BUDGET_ALONE = 600  # of a block of one thread, where only copies in flight matter
MOST_ITERATIONS = 256  # iterations of a while loop
_WRITES_FIRST = ("cp_async", "ldmatrix", "stmatrix")
_BARRIERS = frozenset(("sync_threads", "sync_grid"))  # a grid barrier is also a barrier of each block
_ORDERING = _BARRIERS | {"cp_async_commit", "cp_async_wait"}


def check_barriers(launch: Launch, buffers: list[Buffer], sizes: dict[Var, int]) -> tuple[str, list[Fault]]:
    """(one-paragraph verdict, faults found); buffers: the shared ones, with planned places.

    sizes: the assumed values of symbols on which the sizes of buffers depend.
    """
    extents = (1, None) if has_unknown_loops(launch) else (None,)
    try:  # try pieces as wide as the accesses first; that works where accesses are aligned to their width
        runs = _walks(launch, buffers, sizes, extents, widest_piece(launch))
    except Misaligned:
        runs = _walks(launch, buffers, sizes, extents, 1 << 10)
    last = runs[-1]
    faults = [f for r in runs for f in r.faults]
    names = ", ".join(sorted({b.name for b in buffers}))
    scope = f"{last.accesses} accesses to {names} in {last.epoch + 1} barrier intervals"
    if last.cut:
        scope += f", loops followed for up to {last.cut} iterations"
    if sizes:
        scope += ", with " + ", ".join(f"{v.name} = {n}" for v, n in sizes.items())
    if last.unknown:
        scope += f"; {last.unknown} with addresses known only at run time, taken as anywhere"
    if not faults:
        return f"ordered: {scope}", []
    return f"not cleared: {faults[0].message} ({faults[0].span}); {scope}", faults


def _walks(launch: Launch, buffers: list[Buffer], sizes: dict[Var, int], extents: tuple[int | None, ...],
           piece: int) -> list[_Follower]:
    """Walks with every extent, and where conditions on unknown numbers were met, with every sample of those.

    If threads compared their numbers with kernel parameters (`i == n`) and a walk finds a fault, the walk is repeated with each
    parameter equal to each of those numbers, and to none of them.
    """
    out = []
    for n in extents:
        for trial in range(len(SAMPLES)):
            walk = _Follower(launch, buffers, sizes, n, piece, trial).run()
            others = list(walk.numbers.answers.others()) if walk.faults else []
            out += [_Follower(launch, buffers, sizes, n, piece, trial, given).run() for given in others] or [walk]
            if not walk.numbers.sampled:
                break
    return out


@dataclass
class _Follower:
    """One walk through the program of a block.

    extent: trip count given to loops of unknown extent.  trial: which of SAMPLES is used for unknown numbers in conditions;
    an unknown condition that is equal in all threads holds in the first walk and fails in the second.  given: values of
    parameters that threads compare with their numbers (`Answers`).
    """

    launch: Launch
    buffers: list[Buffer]
    sizes: dict[Var, int]
    extent: int | None
    piece: int  # bytes of a granule when negative, else an upper limit of them
    trial: int = 0
    given: dict[Var, int | None] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    accesses: int = 0
    unknown: int = 0
    epoch: int = 0
    cut: int = 0

    def run(self) -> _Follower:
        self.numbers = Numbers(self.launch, self.trial, self.given)
        self.numbers.env.update(self.sizes)
        self.budget = BUDGET if self.numbers.n > 1 else _BUDGET_ALONE
        self.places = Places(self.launch, self.buffers, self.numbers, self.piece, self.sizes)
        self.shadow = Shadow(self.places.total // self.places.granule + 1)
        # span, whether the address was known, what an atomic access does, the parallel loop (0: none)
        self.sites: list[tuple[Any, bool, Atomic | None, int]] = []
        self.path: tuple[Branch | Iterations, ...] = ()
        self.branches = 0  # number of branches and parallel loops entered
        self.turning = False  # the innermost loop is a while loop that threads leave one by one
        self.open: list[tuple[Any, Any, int]] = []  # copies of the group not yet committed
        self.groups: list[list[tuple[Any, Any, int]]] = []
        self.independent = 0  # number of the outermost parallel loop that is entered, 0 for none
        self.stored: set[int] = set()  # stores followed at least once
        self.shared_use: dict[int, bool] = {}
        self.below: dict[int, list[Any]] = {}
        self.slotted: dict[int, tuple[int, int]] = {}
        self.following = False
        self.maybe: dict[Var, tuple[Any, Any]] = {}
        self.unsure = 0  # depth of branches that a thread may take or not
        self.jumps = Jumps()
        self.jumping: set[int] = set()
        self.jumping = jumps_that_matter(self.launch, self.matters)
        self.shared_use.clear()
        self.locals = self.numbers.locals = Locals(self.launch, self.matters)
        self.shared_use.clear()  # setting a variable that is followed matters too
        self.following = True
        self.stmt(self.launch.body, None)
        return self

    def matters(self, x: Node) -> bool:
        """Whether a statement or value touches shared memory or orders threads; everything else is skipped."""
        hit = self.shared_use.get(id(x))
        if hit is None:
            if isinstance(x, Buffer):
                hit = x.scope_name in SHARED
            elif self.following and self.locals.changes(x):
                hit = True
            elif isinstance(x, Call) and (x.op in _ORDERING or x.op.startswith("syncthreads_")):
                hit = True
            elif isinstance(x, (Break, Continue)) or is_return(x):
                hit = id(x) in self.jumping or is_return(x)
            else:
                hit = any(map(self.matters, children(x)))
            self.shared_use[id(x)] = hit
        return hit

    def followed(self, n: Node) -> list[Any]:
        """The children of a sequence or an expression that are followed: bindings, and nodes that matter."""
        hit = self.below.get(id(n))
        if hit is None:
            hit = self.below[id(n)] = [x for x in children(n) if isinstance(x, Bind) or isinstance(x, (Expr, Stmt)) and
                                       self.matters(x)]
        return hit

    # ---- statements -----------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt, mask: Any) -> None:
        """Follow a statement.  mask: bool per thread, None for all."""
        match s:
            case Seq():
                for x in self.followed(s):
                    here = self.jumps.here(mask)
                    if here is False:
                        return
                    self.stmt(x, here)
            case Break() | Continue():
                self.jumps.jump(s, mask, np.ones(self.numbers.n, bool), not self.unsure)
            case Bind():
                self.reads(s.value, mask, s)
                if s.value.dtype.lanes == 1 and not s.value.dtype.is_float:
                    self.numbers.env[s.var] = self.numbers.value(s.value)
                    if s.value.dtype.is_bool and self.numbers.env[s.var] is None:
                        f, t = (possible(s.value, w, self.numbers.value, self.maybe) for w in (False, True))
                        self.maybe[s.var] = (f, t)
                self.barrier_value(s.value, mask, s)
            case Store():
                for e in (*s.indices, s.value):
                    self.reads(e, mask, s)
                if s.buffer.scope_name in SHARED:
                    self.touch("w", s.buffer, s.indices, 1, mask, s)
                    self.at_once(s, mask)
                elif self.locals.changes(s):
                    self.locals.store(s, self.numbers.value(s.value), mask)
            case Alloc() if self.locals.changes(s):
                self.locals.begin(s, None if s.init is None else self.numbers.value(s.init))
            case Evaluate():
                self.call(s, mask)
            case For():
                self.loop(s, mask)
            case While():
                self.while_loop(s, mask)
            case If():
                self.branch(s, mask)
            case Assert():
                self.reads(s.cond, mask, s)

    def branch(self, s: If, mask: Any) -> None:
        self.reads(s.cond, mask, s)
        c = self.numbers.truth(s.cond)
        # Where the condition is unknown a thread may take either branch, unless a known term of the condition excludes one.
        ways = [possible(s.cond, w, self.numbers.value, self.maybe) if c is None else np.asarray(c, dtype=bool) == w
                for w in (True, False)]
        path, unsure = self.path, self.unsure
        self.unsure += c is None
        self.branches = run = self.branches + 1
        for way, body, first in zip(ways, (s.then, s.orelse), (True, False)):
            if body is not None:
                way = np.broadcast_to(way, self.numbers.n)
                taken = way if mask is None else way & mask
                self.path = (*path, Branch(run, first))
                if taken.all():
                    self.stmt(body, None)
                elif taken.any():
                    self.stmt(body, taken)
        self.path, self.unsure = path, unsure

    def while_loop(self, s: While, mask: Any) -> None:
        """Follow a while loop as often as its condition holds; three times where the condition is unknown."""
        turning, self.turning = self.turning, self.numbers.in_common().iterations_differ(s)
        around = self.jumps.enter()
        self.while_iterations(s, mask, around)
        self.jumps.exit(around)
        self.turning = turning

    def while_iterations(self, s: While, mask: Any, around: tuple[Any, ...]) -> None:
        for k in range(MOST_ITERATIONS + 1):
            mask = self.jumps.here(mask)
            if mask is False:
                return
            self.reads(s.cond, mask, s)
            c = self.numbers.value(s.cond)
            if c is not None:
                inside = np.broadcast_to(np.asarray(c, dtype=bool), self.numbers.n) & (True if mask is None else mask)
                if not inside.any():
                    return
                mask = None if inside.all() else inside
            if k == MOST_ITERATIONS or k >= 3 and (c is None or self.accesses > self.budget):
                break
            self.stmt(s.body, mask)
            self.jumps.next_iteration(around)
        self.cut = max(self.cut, k)
        self.locals.forget(s)

    def loop(self, s: For, mask: Any) -> None:
        if not self.matters(s.body):
            return
        self.reads(s.start, mask, s)
        self.reads(s.extent, mask, s)
        start, extent = self.numbers.value(s.start), self.numbers.value(s.extent)
        assumed = s.start if start is None and isinstance(s.start, Var) else None
        start = 0 if start is None else start
        if assumed is not None:
            self.numbers.env[assumed] = start  # so that its difference from the loop's variable is known
        guessed = extent is None
        if extent is None:
            extent = self.extent if self.extent is not None else self.slots(s)[0]
            if isinstance(s.extent, Var):
                self.numbers.env[s.extent] = extent
        most = int(np.max(extent))
        first, period = self.slots(s)
        steps: Sequence[int] = range(most)
        if most > 2 * first + period and (self.accesses > self.budget or most > 64 or not places_by(s, self.locals.followed)):
            # The first iterations and the last, leaving out whole periods of the slots in between.
            left_out = (most - 2 * first) // period * period
            special = {k - start for k in compared(s)} if isinstance(start, int) else set()
            steps = sorted({*range(first), *range(first + left_out, most), *(k for k in special if 0 <= k < most)})
            self.cut = max(self.cut, len(steps))
        path, turning = self.path, self.turning
        self.turning = False
        independent = self.independent
        if s.plan.independent:
            self.branches += 1
            self.independent = independent or self.branches
            self.path = (*path, Iterations(self.branches))
        around = self.jumps.enter()
        for at, k in enumerate(steps):
            if k != at:  # iterations were left out
                self.locals.forget(s)
            self.numbers.env[s.var] = start + k
            inside = mask
            if np.ndim(extent):
                part = k < extent
                inside = part if mask is None else part & mask
                if not inside.any():
                    break
            inside = self.jumps.here(inside)
            if inside is False:
                break
            self.stmt(s.body, inside)
            self.jumps.next_iteration(around)
        self.jumps.exit(around)
        self.independent, self.path, self.turning = independent, path, turning
        self.numbers.env.pop(s.var, None)
        if assumed is not None:
            self.numbers.env.pop(assumed, None)
        if guessed or len(steps) < most:
            self.locals.forget(s)

    def slots(self, s: For) -> tuple[int, int]:
        """The result of slot_iterations, computed once per loop."""
        hit = self.slotted.get(id(s))
        if hit is None:
            hit = self.slotted[id(s)] = slot_iterations(s)
        return hit

    def call(self, s: Evaluate, mask: Any) -> None:
        c = s.call
        if c.op in _BARRIERS:
            self.barrier(mask, s)
        elif is_return(c):
            self.jumps.jump(s, mask, np.ones(self.numbers.n, bool), not self.unsure)
        elif c.op == "cp_async_commit":
            self.groups.append(self.open)
            self.open = []
        elif c.op == "cp_async_wait":
            over = max(0, len(self.groups) - c.options.n)
            done, self.groups = self.groups[:over], self.groups[over:]
            for g, t, site in (x for group in done for x in group):
                self.shadow.flying[g] = 0
                self.shadow.note("w", g, t, self.epoch, site)
        else:
            self.reads(c, mask, s)
            self.barrier_value(c, mask, s)

    def barrier_value(self, e: Expr, mask: Any, s: Stmt) -> None:
        if isinstance(e, Call) and e.op.startswith("syncthreads_"):
            self.barrier(mask, s)

    def barrier(self, mask: Any, s: Stmt) -> None:
        left = self.jumps.kernel  # threads that have left the kernel are not waited for
        absent = False if mask is None else (~mask if left is None else ~(mask | left)).any()
        if absent or self.jumps.doubt:
            come = "some" if not absent else int(mask.sum())
            self.faults.append(Fault(f"a block barrier is reached by {come} of {self.numbers.n} threads", s.span,
                                     self.jumps.where, bool(absent), kind="barrier"))
        self.epoch += 1

    # ---- accesses -------------------------------------------------------------------------------------------------

    def reads(self, e: Node, mask: Any, s: Stmt) -> None:
        """Record every access made while e is computed."""
        if not self.matters(e):
            return
        if isinstance(e, Load):
            for i in e.indices:
                self.reads(i, mask, s)
            if e.buffer.scope_name in SHARED:
                self.touch("r", e.buffer, e.indices, 1, mask, s)
        elif isinstance(e, Select) and e.lazy:
            self.reads(e.cond, mask, s)
            c = self.numbers.truth(e.cond)
            for side, value in ((e.a, True), (e.b, False)):
                way = mask
                if c is not None:
                    way = np.broadcast_to(np.asarray(c, bool) == value, self.numbers.n)
                    way = way if mask is None else way & mask
                self.reads(side, way, s)
        elif isinstance(e, Call):
            for k, a in enumerate(e.args):
                if isinstance(a, AddressOf):
                    for i in a.indices:
                        self.reads(i, mask, s)
                    if a.buffer.scope_name in SHARED:
                        self.through(e, k, a, mask, s)
                else:
                    self.reads(a, mask, s)
        else:
            for part in self.followed(e):
                self.reads(part, mask, s)

    def through(self, c: Call, k: int, a: AddressOf, mask: Any, s: Stmt) -> None:
        """Record an access through an address that is passed to an intrinsic."""
        size = a.buffer.dtype.bytes
        if c.op.startswith("atomic_"):
            used = not (isinstance(s, Evaluate) and s.call is c)
            self.touch("a", a.buffer, a.indices, {"atomic_addx2": 2, "atomic_addx4": 4}.get(c.op, 1), mask, s,
                       atomic=Atomic(family(c.op), used and self.turning, self.path))
        elif c.op == "cp_async":
            width = max(1, c.options.bytes // size)
            self.touch("async" if k == 0 else "r", a.buffer, a.indices, width, mask, s)
        elif c.op in ("ldmatrix", "stmatrix"):
            lanes = self.numbers.threads % 32 < 8 * c.options.num
            mode = "w" if c.op in _WRITES_FIRST and k == 0 else "r"
            self.touch(mode, a.buffer, a.indices, max(1, 16 // size), lanes if mask is None else lanes & mask, s)
        elif c.op == "wgmma_descriptor":  # a tile read by the whole warp group
            self.read_together(a.buffer, a.indices, c.options.count, mask, s)
        else:
            self.touch("w", a.buffer, None, 1, mask, s)

    def touch(self, mode: str, b: Buffer, indices: tuple[Expr, ...] | None, width: int, mask: Any, s: Stmt,
              atomic: Atomic | None = None) -> None:
        """Record an access by each thread of the mask at its own place."""
        self._met(mode, b, self.places.granules(b, indices, width, mask), s, atomic)

    def read_together(self, b: Buffer, indices: tuple[Expr, ...] | None, width: int, mask: Any, s: Stmt) -> None:
        """Record a read of the same place by all threads."""
        one = np.arange(self.numbers.n) == (0 if mask is None else int(np.argmax(mask)))
        g, _, exact = self.places.granules(b, indices, width, one)
        self._met("r", b, (g, np.int32(-3), exact), s, None)

    def _met(self, mode: str, b: Buffer, where: tuple[Any, Any, bool], s: Stmt, atomic: Atomic | None) -> None:
        """Check an access against earlier ones and record it.  where: granules, their threads, whether the address is known."""
        self.accesses += 1
        g, t, exact = where
        if not exact:
            self.unknown += 1
        site = len(self.sites)
        self.sites.append((s.span, exact, atomic, self.independent))
        kind = "w" if mode == "async" else mode if atomic is None else mode_of(atomic)
        flying = self.shadow.flying[g]
        other: int | None = None
        if flying.any():
            other = next((x - 1 for x in distinct(flying).tolist() if x and not self.disjoint(site, x - 1)), None)
        if other is not None:
            self.fault(b, "is touched while an asynchronous copy to it is in flight", s, other, exact, "copy")
        else:
            other = self.shadow.clash(kind, g, t, self.epoch, lambda x: self.meets(atomic, self.sites[x][2])
                                      and not self.disjoint(site, x))
            if other is not None:
                self.fault(b, "is touched by two threads without a barrier in between", s, other, exact)
        if mode == "async":
            self.shadow.flying[g] = site + 1
            self.open.append((g, t, site))
        else:
            self.shadow.note(kind, g, t, self.epoch, site)

    def disjoint(self, one: int, two: int) -> bool:
        """Whether two accesses are iterations of one parallel loop at an unknown address.

        The program guarantees that such iterations are disjoint.
        """
        (_, known, _, loop), (_, known2, _, loop2) = self.sites[one], self.sites[two]
        return loop == loop2 != 0 and not (known and known2)

    @staticmethod
    def meets(a: Atomic | None, b: Atomic | None) -> bool:
        """Whether two accesses without an order are a fault; for atomic ones that depends on what they do."""
        return a is None or b is None or a.misses_order(b)

    def at_once(self, s: Store, mask: Any) -> None:
        """Check a store in which several threads may store to one place in one instruction.

        Under a condition on data, as in `if count[tx] > k and count[tx + 1] <= k: found[0] = tx`, the data may let one thread
        through: that is a doubt, no certain fault.
        """
        if id(s) not in self.stored:
            self.stored.add(id(s))
            g, t, exact = self.places.granules(s.buffer, s.indices, 1, mask)
            if exact and differ(g, t, lambda: [v[t] for v in made_of(s.value, self.numbers.value, held(self.launch))]):
                self.fault(s.buffer, AT_ONCE, s, len(self.sites) - 1, not self.unsure)

    def fault(self, b: Buffer, what: str, s: Stmt, other: int, exact: bool, kind: str = "order") -> None:
        span, known, _, _ = self.sites[other]
        if len(self.faults) < 8 or exact and known and not any(f.exact for f in self.faults):
            self.faults.append(Fault(f"`{b.name}` {what}", s.span, span, exact and known, kind=kind))
