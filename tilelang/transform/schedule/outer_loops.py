"""Finds which loops and branches around pipelined loops the producer warp group has to run as well.

    for t in …:  x = f(t);  clear(C);  for k in T.Pipelined(n): …A[x, k]…;  copy(C, …);  s = s + 1

The consumers run all of it.  The producer keeps only what decides how often the pipelined loop runs and where its copies
read: loops, conditions, bindings, and the variables and arrays of a thread (`s`), of which every thread has its own copy.  This
requires that these values are the same in every thread.  They may depend on block variables, parameters, tensors that the
launch only reads, and each other, but not on thread indices, tiles or computed results.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from tilelang.ir import (EMPTY, Alloc, Bind, Break, Buffer, Continue, Expr, For, If, Launch, Seq, Stmt, Store, Var, While,
                         convert, free_vars, leaves, replace, rewrite_stmts, seq, statements, stmts_of, walk, GLOBAL,
                         PRIVATE, SHARED)

from ..analysis.statements import bound_by
from ..analysis.effects import effects, expr_effects, hangs_on_threads, own_effects


class Around:
    """The statements that surround the pipelined loops of a launch.

    scalars: storage of the variables and arrays of a thread that both warp roles keep.  visible: bound variables with the same
    value in both.  why: why the producer cannot follow, "" if it can.
    """

    def __init__(self, launch: Launch, loops: Sequence[For]) -> None:
        self.launch, self.loops = launch, {id(x): x for x in loops}
        self.written = {e.storage for e in effects(launch.body) if e.writes}
        self.bound = {v for x in walk(launch.body) for v in bound_by(x)}
        self.allocs: dict[Buffer, None] = {}
        self.scalars = {s.buffer.data for s in statements(launch.body)
                        if isinstance(s, Alloc) and s.buffer.scope_name in PRIVATE}
        self.uneven: set[int] = set()
        while True:  # repeat: dropping a scalar also drops the scalars computed from it
            known = len(self.uneven)
            self.visible, self.lost, self.reached = set(launch.block_vars), set[Var](), True
            self._scan(launch.body, True, None)
            if not self.lost & self.scalars and known == len(self.uneven):
                break
            self.scalars -= self.lost
        self.why = "" if self.reached else "how often the loop runs is computed by the threads that would not load"

    def same(self, e: Expr) -> bool:
        """Whether a value is the same in both warp roles."""
        hidden = (self.bound | set(self.launch.thread_vars)) - self.visible
        return not free_vars(e) & hidden and is_same(e, self.scalars, self.written)

    def _scan(self, s: Stmt, here: bool, loop: Stmt | None) -> None:
        """Collects what cannot be kept below s.

        here: whether both warp roles reach s equally often.  loop: the innermost loop around s.
        """
        if id(s) in self.loops:
            self.reached &= here
            self._lose(effects(s))
            return
        if isinstance(s, (For, While, If)):
            self._lose(own_effects(s))
        match s:
            case Seq():
                for x in s.stmts:
                    self._scan(x, here, loop)
            case Store() | Alloc() if s.buffer.data in self.scalars:
                values = (*s.indices, s.value) if isinstance(s, Store) else () if s.init is None else (convert(s.init),)
                if not (here and all(map(self.same, values))):
                    self.lost.add(s.buffer.data)
            case Bind():
                self._lose(own_effects(s))
                if here and self.same(s.value):
                    self.visible.add(s.var)
            case For() if s.kind in ("serial", "unroll"):
                here = here and id(s) not in self.uneven and self.same(convert(s.start)) and self.same(convert(s.extent))
                if here:
                    self.visible.add(s.var)
                self._scan(s.body, here, s)
            case While():
                self._scan(s.body, here and id(s) not in self.uneven and self.same(s.cond), s)
            case If():
                here = here and self.same(s.cond)
                for x in filter(None, (s.then, s.orelse)):
                    self._scan(x, here, loop)
            case Break() | Continue():
                if not here and loop is not None:  # the two warp roles would run different iterations of the loop
                    self.uneven.add(id(loop))
            case _:
                self._lose(effects(s))

    def _lose(self, found: Iterable[Any]) -> None:
        self.lost |= {e.storage for e in found if e.writes}

    # ---- code of the two warp roles -------------------------------------------------------------------------------

    def loading(self, loads: Mapping[int, list[Stmt]]) -> list[Stmt]:
        """The launch's body for the producer, with `loads` in place of the loops (by id)."""
        return list(stmts_of(self._kept(self.launch.body, loads) or seq()))

    def _kept(self, s: Stmt, loads: Mapping[int, list[Stmt]]) -> Stmt | None:
        if id(s) in loads:
            return seq(*loads[id(s)])
        match s:
            case Seq():
                return seq(*(x for x in (self._kept(y, loads) for y in s.stmts) if x is not None))
            case Alloc() | Store():
                return s if s.buffer.data in self.scalars else None
            case Bind():
                return s if s.var in self.visible else None
            case Break() | Continue():
                return s
            case For() | While() if self._matters(s):
                return replace(s, body=self._kept(s.body, loads) or seq())
            case If() if self._matters(s) or leaves(s):
                orelse = None if s.orelse is None else self._kept(s.orelse, loads)
                return replace(s, then=self._kept(s.then, loads) or seq(), orelse=orelse)
        return None

    def _matters(self, s: Stmt) -> bool:
        """Whether a pipelined loop, or a store of a scalar that is kept, is below s."""
        return any(id(x) in self.loops or isinstance(x, Store) and x.buffer.data in self.scalars for x in statements(s))

    def computing(self, stmts: Mapping[int, list[Stmt]]) -> list[Stmt]:
        """The launch's body for the consumers, with `stmts` in place of the loops (by id).

        Allocations of shared buffers are removed and collected in `allocs`.
        """
        def visit(s: Stmt) -> Stmt | None:
            if id(s) in stmts:
                return seq(*stmts[id(s)])
            if not isinstance(s, Alloc) or s.init is not None or s.buffer.scope_name not in SHARED:
                return None
            self.allocs[s.buffer] = None
            return EMPTY

        return list(stmts_of(rewrite_stmts(self.launch.body, visit)))


def is_same(e: Expr, scalars: Container[Var], written: Container[Var]) -> bool:
    """Whether a value is the same in all threads and at any time: no private or changing memory, no side effects.

    scalars: variables of a thread that are.  written: storage that the launch writes.
    """
    return not hangs_on_threads(e) and all(not x.writes and (
        x.storage in scalars or x.buffer.scope_name == GLOBAL and x.storage not in written) for x in expr_effects(e))
