"""A tree of a launch's statements with the facts that barrier placement needs: accesses, loops, async groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import (AddressOf, Bind, Buffer, Call, Const, Evaluate, Expr, For, If, Launch, Load, Parallel, Ramp, Seq, Stmt,
                         Store, Var, While, dtype, inner, leaves, ways, BARRIER, SHARED)
from tilelang.ir.record import entity

from ..analysis.statements import barrier_in
from ..analysis.accesses import Access, Loop, Matrix, update_of
from ..analysis.effects import Effect, is_ordering, own_effects, written_globals

_ANYWHERE = Buffer("tensors that may overlap", (1,), dtype("uint8"))  # stands for all of them (transform/legalize/aliasing.py)
register("sync-divergent", ValueError, "a block barrier is needed where only some threads of the block arrive",
         expected="a place that all threads of the block reach alike")


@entity
class Place:
    """One statement.

    accesses: those that the statement makes itself.  before: a barrier goes in front of it.  body_end: a barrier goes to the
    end of its (while) body.  by_group: which of these barriers (by field) each warp group has for itself.
    """

    stmt: Stmt
    accesses: list[Access] = field(default_factory=list)
    inner: list[Place] = field(default_factory=list)
    loop: Loop | None = None
    before: bool = False
    body_end: bool = False
    # the barrier is needed for shared memory (other barriers are placed only where all threads reach them)
    for_shared: bool = False
    by_group: set[str] = field(default_factory=set)
    never: bool = False  # divergent code: only barriers that shared memory needs count

    def all(self) -> Iterator[Place]:
        """This place and those below it, in program order."""
        stack = [self]
        while stack:
            at = stack.pop()
            yield at
            stack += reversed(at.inner)

    def all_accesses(self) -> Iterator[Access]:
        for x in self.all():
            yield from x.accesses

    @cached_property
    def storages(self) -> frozenset[Var]:
        """Memory that is accessed inside."""
        return frozenset(a.buffer.data for a in self.accesses).union(*(x.storages for x in self.inner))

    @cached_property
    def orders(self) -> bool:
        """Whether something inside orders threads or asynchronous work."""
        return is_ordering(self.stmt) or barrier_in(self.stmt) or any(x.orders for x in self.inner)

    @cached_property
    def jumps(self) -> bool:
        """Whether a break or continue inside belongs to a loop around it."""
        return leaves(self.stmt)

    @property
    def has_barrier(self) -> bool:
        """Whether a barrier was placed strictly inside."""
        return self.body_end or any(x.before or x.has_barrier for x in self.inner)


class TreeBuilder:
    """Builds the tree; collects the launch's bindings."""

    def __init__(self, launch: Launch) -> None:
        self.binds: dict[Var, Expr] = {}
        # Global memory matters when this launch writes it and accesses it again afterwards.
        self.watched = written_globals(launch.body)
        self.overlapping = {b.data for b in launch.plan.overlapping}
        if self.overlapping & self.watched:
            self.watched |= self.overlapping
        self.root = self.place(launch.body, (), ())

    def place(self, s: Stmt, loops: tuple[Loop, ...], conds: tuple[Expr, ...]) -> Place:
        p = Place(s)
        own = list(own_effects(s))
        for e in own:
            a = self.access(e, s, loops, conds)
            if a is not None:
                p.accesses.append(a)
        match s:
            case Bind():
                self.binds[s.var] = s.value
                for loop in loops:
                    loop.defined.add(s.var)
            case For():
                p.loop = Loop(s.var, s.start, s.extent, s.plan.independent)
                for loop in (*loops, p.loop):
                    loop.defined.add(s.var)
                p.inner = [self.place(s.body, (*loops, p.loop), conds)]
            case While():
                p.loop = Loop(None, None, None, while_loop=s)
                p.inner = [self.place(s.body, (*loops, p.loop), conds)]
            case If():
                p.inner = [self.place(x, loops, (*conds, cond)) for cond, x in ways(s)]
            case Seq() | Parallel():
                p.inner = [self.place(x, loops, conds) for x in inner(s)]
        return p

    def access(self, e: Effect, s: Stmt, loops: tuple[Loop, ...], conds: tuple[Expr, ...]) -> Access | None:
        b = e.buffer
        if b.scope_name not in SHARED and e.storage not in self.watched or b.facts.ordered:
            return None
        update = update_of(e.node, s) if e.mode == "atomic" and isinstance(e.node, Call) else None
        if e.storage in self.overlapping:  # wherever each of them lies
            return Access(_ANYWHERE, e.reads, e.writes, update, None, 1, loops, conds, False, getattr(e.node, "span", None))
        indices, width, lanes, is_async, signals, counted = e.indices, 1, 32, False, None, None
        node = e.node
        if isinstance(node, Call):
            width, lanes, known = _extent(node, b)
            is_async = node.op in ("cp_async", "wgmma_descriptor") or node.op == "tma_load" and bool(node.options.in_group)
            counted = _counted(node) if e.writes else None
            signals = counted.buffer if counted is not None and tuple(counted.buffer.shape) == (1,) else None
            if not known:
                indices = None
        elif isinstance(node, (Load, Store)) and indices and isinstance(indices[-1], Ramp):
            last = indices[-1]
            if isinstance(last.stride, Const) and last.stride.value == 1:
                width = last.lanes
            else:
                indices = None
        if indices is not None and any(i.dtype.lanes > 1 for i in indices[:-1]):
            indices = None
        return Access(b, e.reads, e.writes, update, indices, width, loops, conds, is_async,
                      getattr(node, "span", None), lanes, signals, counted,
                      isinstance(node, Call) and node.op == "wgmma_descriptor", _matrix(s, node))


def _matrix(s: Stmt, node: Any) -> Matrix | None:
    """The operand of a wgmma that a descriptor among its arguments describes."""
    c = s.call if isinstance(s, Evaluate) else None
    return Matrix(c, node) if c is not None and c.op == "wgmma" and any(a is node for a in c.args) else None


def _counted(c: Call) -> AddressOf | None:
    """The mbarrier that counts the bytes of a TMA copy."""
    if c.op not in ("tma_load", "bulk_load"):
        return None
    return next((a for a in c.args if isinstance(a, AddressOf) and a.buffer.scope_name == BARRIER), None)


def _extent(c: Call, b: Buffer) -> tuple[int, int, bool]:
    """(elements, number of lanes whose address counts, whether that is known) of an intrinsic's access through an address."""
    size = max(1, b.dtype.bytes)
    if c.op == "cp_async":
        return max(1, c.options.bytes // size), 32, True
    if c.op in ("ldmatrix", "stmatrix"):
        return max(1, 16 // size), min(32, 8 * c.options.num), True
    if c.op.startswith("atomic_"):
        return {"atomic_addx2": 2, "atomic_addx4": 4}.get(c.op, 1), 32, True
    if c.op == "ldg":
        return 1, 32, True
    return 1, 32, False


class Unplaceable(Exception):
    """Barriers inside `place` cannot be reached by all threads."""

    def __init__(self, place: Place) -> None:
        super().__init__("barrier in divergent code")
        self.place = place


def unplaceable(p: Place) -> Exception:
    """The error for a barrier that cannot be placed inside p."""
    at = next((x for x in p.all() if x.before), p)
    touched = sorted(at.all_accesses(), key=lambda a: a.buffer.scope_name not in SHARED)
    what = next((a.buffer.name for a in touched), "shared memory")
    kind = "loop" if p.loop is not None else "branch"
    return error("sync-divergent",
                 f"the accesses of `{what}` need a block barrier inside a {kind} that not all threads run alike",
                 found=f"a {kind} that threads run differently",
                 span=at.stmt.span or p.stmt.span, notes=((p.stmt.span, f"threads differ in this {kind}"),),
                 hint="make the bounds and conditions around it the same for all threads, or write to another buffer")
