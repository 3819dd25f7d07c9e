"""Ordinary accesses of shared memory by the threads of a stream, for the synchronisation model."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import Buffer, Const, Evaluate, Expr, Load, Node, Ramp, Select, Store, SHARED
from tilelang.ir.buffer import AddressOf
from tilelang.ir.expr import Call
from tilelang.ir.children import children
from tilelang.target.atomics import Atomic, family

from .sync_fault import Fault, Found
from .copies import EVENT_RULES
from .memory import Site
from .shadow import AT_ONCE, differ, held, made_of


class Accesses:
    """The access handling of a Stream; works on the stream's state."""

    plan: Any
    values: Any
    block: Any
    first: int
    threads: Any
    ids: Any
    mask: Any
    active: Any
    n: int
    guess: int
    independent: int
    inside: Any
    turning: bool
    _ways: Any
    only: Any

    def reads(self, e: Node, s: Any) -> None:
        """Record every access made while e is computed."""
        if not self.plan.facts(e)[0]:
            return
        if isinstance(e, Load):
            for i in e.indices:
                self.reads(i, s)
            if e.buffer.scope_name in SHARED:
                self.touch("r", e.buffer, e.indices, 1, s)
        elif isinstance(e, Select) and e.lazy:
            for side in self._ways(e.cond, e.a, e.b, e):
                self.reads(side, s)
        elif isinstance(e, Call) and e.op in EVENT_RULES:
            EVENT_RULES[e.op](self, e, s.span)
        elif isinstance(e, Call):
            for k, a in enumerate(e.args):
                if isinstance(a, AddressOf):
                    for i in a.indices:
                        self.reads(i, s)
                    if a.buffer.scope_name in SHARED:
                        self._through(e, k, a, s)
                else:
                    self.reads(a, s)
        else:
            for c in children(e):
                if isinstance(c, Expr):
                    self.reads(c, s)

    def _through(self, c: Call, k: int, a: AddressOf, s: Any) -> None:
        """Record an access through an address that is passed to an intrinsic."""
        size = a.buffer.dtype.bytes
        if c.op.startswith("atomic_"):
            used = not (isinstance(s, Evaluate) and s.call is c)
            self.touch("a", a.buffer, a.indices, {"atomic_addx2": 2, "atomic_addx4": 4}.get(c.op, 1), s,
                       atomic=Atomic(family(c.op), used and self.turning, self.inside))
        elif c.op in ("ldmatrix", "stmatrix"):
            mask, active = self.mask, self.active
            lanes = self.threads % 32 < 8 * c.options.num
            self.only(lanes if mask is None else lanes & mask)
            self.touch("w" if c.op == "stmatrix" else "r", a.buffer, a.indices, max(1, 16 // size), s)
            self.mask, self.active = mask, active
        elif c.op != "wgmma_descriptor":
            self.touch("w", a.buffer, None, 1, s)

    def touch(self, mode: str, b: Buffer, indices: tuple[Expr, ...] | None, width: int, s: Any,
              memory: Any = None, atomic: Atomic | None = None) -> None:
        """Record an access of `width` elements by each active thread; indices None: anywhere in the buffer.

        memory: that of another block of the cluster.  atomic: what an atomic access does.
        """
        self.block.accesses += 1
        g, t, exact = self.granules(b, indices, width)
        if len(g):
            into = memory or self.block.memory
            into.threads(mode, g, t, self.active, Site(s.span, exact and not self.guess, atomic), bool(self.independent))

    def at_once(self, s: Store) -> None:
        """Check a store in which several threads may store to one place in one instruction.

        Raises Found where they store different values.
        """
        i = s.indices[0]
        at = self.values.address(s.buffer, (i.base if isinstance(i, Ramp) else i,), self)
        if (id(s), self.first) in self.plan.stored or self.guess or not isinstance(at, np.ndarray):
            return
        self.plan.stored.add((id(s), self.first))
        rows, who = np.broadcast_arrays(at, self.ids)
        if not differ(rows.ravel(), who.ravel(), lambda: [np.arange(rows.size)]):
            return
        parts = made_of(s.value, lambda e: self.values(e, self), held(self.plan.launch))
        # In loops whose iterations are followed all at once, each iteration is compared with itself.
        at, who, active, *parts = np.broadcast_arrays(at, self.ids, True if self.mask is None else self.mask, *parts)
        turn = np.arange(at.size) // at.shape[-1]
        on = active.ravel()
        key = (at.ravel().astype(np.int64) * (turn[-1] + 1) + turn)[on]
        if differ(key, who.ravel()[on], lambda: [p.ravel()[on] for p in parts]):
            raise Found(Fault(f"`{s.buffer.name}` {AT_ONCE}", s.span, s.span))

    def granules(self, b: Buffer, indices: tuple[Expr, ...] | None, width: int) -> tuple[Any, Any, bool]:
        """(granules, their threads, whether the addresses are known) of an access by the active threads."""
        granule = self.block.memory.granule
        at = None
        if indices is not None and len(indices) == 1:
            e = indices[0]
            if isinstance(e, Ramp):
                width = e.lanes if isinstance(e.stride, Const) and e.stride.value == 1 else 0
                e = e.base
            at = self.values.address(b, (e,), self) if width else None
        if at is None:
            base = self.plan.places[b.data]
            g = np.arange(base // granule, -(-(base + b.size * b.dtype.bytes) // granule))
            first = [w.number * 32 for w, _ in self.active]
            return np.tile(g, len(first)), np.repeat(np.array(first), len(g)), False
        at = np.asarray(at)
        at = np.broadcast_to(at, (*at.shape[:-1], self.n)) if at.ndim else np.full(self.n, at)
        threads = np.broadcast_to(self.ids, at.shape)
        if self.mask is not None and np.ndim(self.mask) == 1:
            at, threads = at[..., self.mask], threads[..., self.mask]
        elif self.mask is not None:  # in a loop that is followed all at once, other threads run other iterations
            at, threads, mask = np.broadcast_arrays(at, threads, self.mask)
            at, threads = at[mask], threads[mask]
        at, threads = at.ravel(), threads.ravel()
        span = max(1, width * b.dtype.bytes // granule)
        g = at // granule
        if span > 1:
            g, threads = (g[:, None] + np.arange(span)).ravel(), np.repeat(threads, span)
        inside = (g >= 0) & (g < self.block.memory.granules)
        return (g, threads, True) if inside.all() else (g[inside], threads[inside], True)


__all__ = ["Accesses"]
