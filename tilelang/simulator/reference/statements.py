"""Statements whose meaning in the reference interpreter depends on warp roles, and tile ops and Parallel loops.

TMA copies (Copy with tma, barrier) complete at once and signal their bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Buffer, Call, Evaluate, Expr, For, If, Load, Node, Parallel, Region,
                         Stmt, Store, TileOp, Var, children, convert, free_vars, is_const, numpy_dtype, remember, substitute,
                         walk, PRIVATE)
from tilelang.ir.evaluate import Closure
from tilelang.ops import Copy
from tilelang.target.warp_groups import holds_in

from ..lane_ops import occurrence, spread
from ..memory import Storage
from .barriers import SYNC_OPS, TileBarrier
from .cluster import to_block
from .context import TileContext
from .env import TileEnv, scalar_elements
from .warp_roles import around, asks_shared, in_front, meets_around, together
from .. import control_flow
from ..expressions import call
from ..faults import fault
from ..lanes import Action, LaneFrame, uniform

# ---- loops of T.Parallel ---------------------------------------------------------------------------------------------

# Reference semantics of a Parallel loop: all iterations run at once, each as one lane.
#
# Iterations are independent, with one exception that programs rely on: several iterations may accumulate into one element
# (`F[i] += A[i, j]` over i, j).  Iterations that update the same element then run in successive groups, in iteration order.
# Where the updated elements are known only at run time, the iterations run one after another.

@dataclass
class _Private:
    """A per-thread buffer of the enclosing code that the loop body uses."""

    buffer: Buffer
    slot: int
    read: bool
    written: bool


class ParallelLoop:
    """Compiles one Parallel statement."""

    def __init__(self, c: TileContext, s: Parallel) -> None:
        self.s, self.c = s, c
        for n in walk(s.body):
            if isinstance(n, (Parallel, TileOp)):
                raise fault("sim-unsupported", f"{type(n).__name__} inside T.Parallel",
                            expected="statements of single elements", found=f"a {type(n).__name__}", span=n.span)
        self.extents = [c.expr(e) for e in s.extents]
        self.var_slots = [(c.slot(v), numpy_dtype(v.dtype)) for v in s.vars]
        own = {id(v) for v in s.vars}
        deciding = _deciding(s.body, set())  # printed text may name a thread: the first one is used
        self.outer = [(c.slot(v), v, v in deciding) for v in free_vars(s.body) if id(v) not in own]
        self.alloced = {id(n.buffer.data) for n in walk(s.body, Alloc)}
        self.private = self._private_buffers()
        self.one_by_one = False
        self.keys = self._accumulation_keys()
        threads, c.launch.threads = c.launch.threads, sys.maxsize  # a lane is an iteration here, and all lanes exist
        self.body = c.stmt(s.body)
        c.launch.threads = threads

    def _private_buffers(self) -> list[_Private]:
        found: dict[int, _Private] = {}
        for n in walk(self.s.body):
            b = getattr(n, "buffer", None)
            if isinstance(b, Buffer) and b.scope_name in PRIVATE and id(b.data) not in self.alloced:
                p = found.setdefault(id(b.data), _Private(b, self.c.slot(b.data), False, False))
                p.read |= isinstance(n, (Load, AddressOf))
                p.written |= isinstance(n, (Store, AddressOf))
        return list(found.values())

    # -- which iterations update the same element

    def _accumulation_keys(self) -> list[list[Closure]]:
        """Index functions of stores whose buffer the body also reads and whose index may repeat.

        Where such an index is known only while the body runs, the iterations run one by one.
        """
        loaded = {id(n.buffer.data) for n in walk(self.s.body) if isinstance(n, Load)}
        binds: dict[Var, Expr] = {}
        for s in walk(self.s.body, Bind):
            remember(binds, s)
        inner = {n.var for n in walk(self.s.body) if isinstance(n, For)}
        out: list[list[Closure]] = []
        for n in walk(self.s.body):
            if not isinstance(n, Store) or id(n.buffer.data) not in loaded or id(n.buffer.data) in self.alloced:
                continue
            if n.buffer.scope_name in PRIVATE:
                continue
            indices = [substitute(i, binds) for i in n.indices]
            if self._distinct(indices, inner):
                continue
            if any(isinstance(x, (Load, Call)) or x in inner for i in indices for x in walk(i)):
                self.one_by_one = True
                return []
            out.append([self.c.expr(i) for i in indices])
        return out

    def _distinct(self, indices: list[Expr], inner: set[Var]) -> bool:
        """Whether the index tuple differs between any two iterations: in some dimension each loop variable stands alone, plus a
        term that is the same for all iterations."""
        own = set(self.s.vars)
        seen: set[Var] = set()
        for i in indices:
            terms = [i.a, i.b] if isinstance(i, Binary) and i.op in ("add", "sub") else [i]
            mine = [t for t in terms if isinstance(t, Var) and t in own]
            rest = [t for t in terms if not (isinstance(t, Var) and t in own)]
            steady = all(not isinstance(x, (Load, Call)) and x not in own and x not in inner for t in rest
                         for x in walk(t))
            if len(mine) == 1 and steady:
                seen.add(mine[0])
        return all(v in seen or is_const(e, 1) for v, e in zip(self.s.vars, self.s.extents))

    def _groups(self, g: LaneFrame) -> Iterator[np.ndarray] | None:
        """Groups of lanes that may run together, in order; None when all lanes may."""
        if self.one_by_one:
            return (np.array([k]) for k in range(g.lanes))
        if not self.keys:
            return None
        ranks: list[np.ndarray] = []
        for indices in self.keys:
            key = np.zeros(g.lanes, np.int64)
            for fn in indices:  # equal elements get equal keys; other collisions only cost additional groups
                key = key * np.int64(1 << 20) + spread(fn(g), g.lanes).astype(np.int64)
            rank = occurrence(key)
            if rank.any() and not any((rank == r).all() for r in ranks):
                ranks.append(rank)
        if len(ranks) > 1:
            return (np.array([k]) for k in range(g.lanes))
        return (np.flatnonzero(ranks[0] == r) for r in range(int(ranks[0].max()) + 1)) if ranks else None

    # -- running

    def action(self) -> Action:
        """The action of the whole loop, executed once for the block."""
        s = self.s

        def run(f: LaneFrame) -> None:
            if not f.any_active():
                return
            extents = [max(int(uniform(e(f), f, "the extent of T.Parallel", s.span)), 0) for e in self.extents]
            n = int(np.prod(extents, dtype=np.int64))
            if n == 0:
                return
            points = np.indices(extents).reshape(len(extents), n)
            slots = list(f.slots)
            for at, v, decides in self.outer:
                if isinstance(slots[at], np.ndarray) and slots[at].ndim:
                    slots[at] = uniform(slots[at], f, f"{v.name}, used inside T.Parallel,", s.span) if decides else \
                        slots[at][0 if f.mask is None else int(np.argmax(f.mask))]
            groups = self._groups(self._frame(f, slots, points))
            if groups is None:
                self._run(f, slots, points, only=True)
            else:
                for lanes in groups:
                    self._run(f, slots, points[:, lanes], only=False)

        return run

    def _frame(self, f: LaneFrame, slots: list[Any], points: np.ndarray) -> LaneFrame:
        g = LaneFrame(list(slots), points.shape[1], None, f.block)
        for (at, dt), p in zip(self.var_slots, points):
            g.slots[at] = p.astype(dt)
        return g

    def _run(self, f: LaneFrame, slots: list[Any], points: np.ndarray, only: bool) -> None:
        g = self._frame(f, slots, points)
        for p in self.private:
            g.slots[p.slot] = self._enter(p, f, g.lanes)
        self.body(g)
        for p in self.private:
            if p.written:
                self._leave(f.slots[p.slot], g.slots[p.slot], only)

    def _enter(self, p: _Private, f: LaneFrame, lanes: int) -> Storage:
        """The private buffer as each iteration sees it: the values on which all threads that execute the loop agree.

        Rows of inactive lanes may differ: they pad a warp, or their threads have returned.
        """
        store: Storage = f.slots[p.slot]
        here = slice(None) if store.lanes == 1 or f.mask is None else f.mask
        raw = store.raw[here]
        same = store.lanes == 1 or bool((raw == raw[0]).all())
        if not same and p.read and not p.written:
            raise fault("sim-thread-dependent", f"{p.buffer.name} differs between threads and is read inside T.Parallel",
                        found=f"{p.buffer.name}, which differs between threads", span=self.s.span,
                        hint="which thread runs an iteration is not fixed: index by the loop variable")
        out = Storage(store.name, store.nbytes, store.granule, lanes if p.written else 1, known=store.known is None)
        out.raw[...] = raw[0]
        if store.known is not None:
            out.known = np.zeros((out.lanes, out.nbytes // out.granule), bool)
            out.known[...] = store.known[here].all(0) if same else False
        elif not same:
            out.known = np.zeros((out.lanes, out.nbytes // out.granule), bool)
        return out

    @staticmethod
    def _leave(store: Storage, inner: Storage, only: bool) -> None:
        """After the loop the buffer holds a value only where all iterations wrote the same one."""
        same = (inner.raw == inner.raw[0]).reshape(inner.lanes, -1, inner.granule).all((0, 2))
        known = same & (np.True_ if inner.known is None else inner.known.all(0)) & only
        store.raw[...] = inner.raw[0]
        if store.known is None and not known.all():
            store.known = np.zeros((store.lanes, store.nbytes // store.granule), bool)
        if store.known is not None:
            store.known[...] = known


def _deciding(n: Node, out: set[Var]) -> set[Var]:
    """The variables in n that influence more than printed text."""
    if isinstance(n, Var):
        out.add(n)
    elif isinstance(n, Buffer):
        out |= free_vars(n)
    elif not isinstance(n, Call) or n.op != "printf":
        for c in children(n):
            _deciding(c, out)
    return out


def synchronised(handler: Callable[[Any, Any], Action]) -> Callable[[Any, Any], Action]:
    """The handler of a statement; warp roles synchronise before and after a per-thread statement on shared memory."""

    def compile_synchronised(c: TileContext, s: Stmt) -> Action:
        if c.gathered or not meets_around(c, s):
            action = handler(c, s)
            return action if c.gathered or not asks_shared(c, s) else in_front(c, s, action)
        with c.having(gathered=True):
            action = handler(c, s)
            if isinstance(s, Store) and s.buffer.scope_name not in PRIVATE and not c.launch.divergence.of(s):
                # All threads do the same, as in S[0] = S[0] + 1: execute it once, not once for each warp role.
                return together(c, s, action)
            return around(c, s, action)

    return compile_synchronised


def compile_if(c: TileContext, s: If) -> Action:
    """A condition on warp groups determines which warp roles reach each branch."""
    reach = {r: holds_in(s.cond, c.launch.warp_roles[r].warps[0]) for r in c.members}
    if all(holds is None for holds in reach.values()):
        return control_flow.compile_if(c, s)
    cond = c.expr(s.cond)
    with c.having(members=tuple(r for r, holds in reach.items() if holds is not False)):
        then = c.stmt(s.then)
    with c.having(members=tuple(r for r, holds in reach.items() if holds is not True)):
        orelse = c.stmt(s.orelse) if s.orelse is not None else None
    return control_flow.branch(cond, then, orelse)


def evaluate(c: TileContext, s: Evaluate) -> Action:
    """A call whose result is not used."""
    if c.launch.warp_roles and s.call.op in SYNC_OPS:  # not c.expr, which caches: depends on the warp roles
        fn = call(c, s.call)
        return lambda f: fn(f) and None
    return control_flow.evaluate(c, s)


def parallel(c: TileContext, s: Parallel) -> Action:
    """Each warp role runs a loop that sets its variables; all other effects of a loop happen once."""
    with c.having(gathered=True):  # iterations belong to no warp role
        action = ParallelLoop(c, s).action()
    once = any(isinstance(n, Evaluate) or isinstance(n, Store) and n.buffer.scope_name not in PRIVATE for n in walk(s))
    return together(c, s, action) if once else action


def tile_op(c: TileContext, s: Any) -> Action:
    """A tile op by its NumPy reference: for each thread where it uses per-thread buffers, else once for the block."""
    if not hasattr(s, "reference"):
        raise fault("sim-unsupported", f"‹T.{s.op_name}› has no NumPy reference",
                    expected="a tile operation with a NumPy reference", span=s.span)
    s = scalar_elements(s)
    env = TileEnv.compile(c, s)
    private = any(isinstance(n, Region) and n.buffer.scope_name in PRIVATE for n in walk(s))

    def run(f: LaneFrame) -> None:
        if not f.any_active():
            return
        if private and f.lanes > 1:
            for lane in np.flatnonzero(f.active()):
                s.reference(env(f, int(lane)))
        else:
            s.reference(env(f, None))

    if private:
        return run
    action = run if not isinstance(s, Copy) or s.plan.dst_block is None else to_block(c, s, run)
    return together(c, s, _signalling(c, s, action) if isinstance(s, Copy) else action)


def _signalling(c: TileContext, s: Any, action: Action) -> Action:
    """A TMA Copy: signals its bytes on its barrier (`barrier` = (buffer, index)); with `expect` it announces them first.

    A copy that several blocks of a cluster do together (`cluster_split`) fills only the tile of its own block, and signals
    some of its bytes in each of the blocks.
    """
    if s.plan.barrier is None:
        return action
    buffer, index = s.plan.barrier
    bar, expects = TileBarrier(c, buffer, index, s.span), s.plan.expect
    cta = c.expr(s.plan.dst_block) if s.plan.dst_block is not None else None
    split = s.plan.cluster_split
    rank_in_split, mask = (None, None) if split is None else (c.expr(convert(split[0])), c.expr(convert(split[2])))
    item, extents = s.dst.dtype.bits, [c.expr(e) if isinstance(e, Expr) else e for e in s.dst.extents]

    def run(f: LaneFrame) -> None:
        action(f)
        if f.any_active():
            n = math.prod(e if isinstance(e, int) else int(uniform(e(f), f, "an extent", s.span))
                          for e in extents)
            if rank_in_split is not None and mask is not None:
                first = int(uniform(rank_in_split(f), f, "the rank of a block", s.span)) == 0
                each = n * item // 8 // split[1]
                mine = n * item // 8 - each * (split[1] - 1) if first else each
                to = int(uniform(mask(f), f, "a mask of blocks", s.span))
                for other in range(to.bit_length()):
                    if to >> other & 1:
                        bar.get(f, other).receive(mine)
                return
            rank = None if cta is None else int(uniform(cta(f), f, "the rank of a block", s.span))
            bar.get(f, rank).receive(0 if expects else n * item // 8)

    return run
