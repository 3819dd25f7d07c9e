"""Schedules of software pipelines: which iteration each statement of a loop body works on, and whether that is correct.

A schedule gives every scheduled statement i of the body a stage s_i and an order o_i. Step u of the pipeline runs, in
the order o, statement i for iteration u - s_i. A dependence from (i, iteration a) to (j, iteration a+d) is kept iff
    s_i < s_j + d   or   s_i == s_j + d and o_i < o_j.
A buffer with V versions (slot = iteration mod V) has dependences only between iterations whose distance is a multiple of V.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import Alloc, Bind, Expr, For, Load, Stmt, Var, const, free_vars, is_large, stmts_of, substitute, used_vars
from tilelang.ir.record import record, state

from .effects import Effect, acts, effects, expr_effects, touches
from .vectorize import stride_along


@record
class Item:
    """One scheduled statement: its accesses, the values it needs from scheduled bindings, and what it defines."""

    stmt: Stmt
    effects: tuple[Effect, ...]
    needs: frozenset[object]  # Vars and Buffers defined by other items
    defines: object | None  # Var of a Bind, Buffer of an Alloc

    def touches(self, storage: Var) -> bool:
        return any(e.storage is storage for e in self.effects)


@state
class Body:
    """The statements of a loop body by kind.

    items: scheduled statements in source order. pure: bindings that may be computed anywhere in their iteration. late:
    pure variables whose values depend on scheduled bindings, and so must follow those.
    allocs: allocations that may move before the loop. listed: per source statement that a user's order/stage
    list may count, the item's index or None for a pure binding. search: the search for the order of its items
    (schedule/loop_order.py), once there is one.
    """

    items: list[Item] = field(default_factory=list)
    pure: list[Bind] = field(default_factory=list)
    late: set[Var] = field(default_factory=set)
    allocs: list[Alloc] = field(default_factory=list)
    listed: list[int | None] = field(default_factory=list)
    search: Any = None


@record
class Violation:
    """A dependence that a schedule breaks: between items first and second, on `what`."""

    first: int
    second: int
    what: str
    storage: object
    flow: bool  # whether it goes from producer to consumer in one iteration


def loop_items(stmts: Iterable[Stmt]) -> Body:
    """Classify the statements of a loop body."""
    stmts = tuple(stmts)
    written = {e.storage for s in stmts for e in effects(s) if e.writes}
    body = Body()
    scheduled: set[object] = set()
    pure_needs: dict[object, frozenset[object]] = {}
    for s in stmts:
        if isinstance(s, Alloc) and s.init is None:
            body.allocs.append(s)
            continue
        used: frozenset[object] = frozenset(used_vars(s))
        needs = frozenset(x for v in used for x in pure_needs.get(v, ())) | (used & scheduled)
        own = tuple(effects(s))
        needs |= {e.buffer for e in own} & scheduled
        if isinstance(s, Bind):
            reads = tuple(expr_effects(s.value))
            if not acts(s) and not any(e.writes or e.storage in written for e in reads):
                body.pure.append(s)
                pure_needs[s.var] = needs
                if needs:
                    body.late.add(s.var)
                body.listed.append(None)
                continue
        defines = s.var if isinstance(s, Bind) else s.buffer if isinstance(s, Alloc) else None
        if defines is not None:
            scheduled.add(defines)
        body.listed.append(len(body.items))
        body.items.append(Item(s, own, needs, defines))
    return body


def violations(items: list[Item], stage: list[int], order: list[int], versions: dict[Var, int]) -> list[Violation]:
    """Dependences that a schedule breaks; empty when the schedule computes what the loop computes.

    versions: storage -> number of versions, for buffers that carry nothing across iterations.
    """
    out: list[Violation] = []
    for i, a in enumerate(items):
        for j in range(i, len(items)):
            b = items[j]
            if a.defines is not None and a.defines in b.needs and (stage[i] != stage[j] or order[i] > order[j]):
                out.append(Violation(i, j, getattr(a.defines, "name", "?"), a.defines, True))
            for storage, name, flow in _conflicts(a, b):
                v = versions.get(storage, 1)
                kept = _before(i, j, 0, stage, order) if i != j else True
                # The same pair when the slot is reused: a conflict from b in iteration x to a in iteration x + v.
                lap = _before(j, i, v, stage, order) and _before(i, j, v, stage, order)
                if not kept or not lap:
                    out.append(Violation(i, j, name, storage, flow and not kept))
    return out


def _before(i: int, j: int, distance: int, stage: list[int], order: list[int]) -> bool:
    """Whether item i in iteration a runs before item j in iteration a + distance."""
    return stage[i] < stage[j] + distance or (stage[i] == stage[j] + distance and order[i] < order[j])


def _conflicts(a: Item, b: Item) -> list[tuple[Var, str, bool]]:
    """Storages that both access, at least one writing: (storage, name, whether a writes what b reads)."""
    found: dict[Var, tuple[str, bool]] = {}
    for x in a.effects:
        for y in b.effects:
            if x.storage is y.storage and (x.writes or y.writes):
                name, flow = found.get(x.storage, (x.buffer.name, False))
                found[x.storage] = (name, flow or (x.writes and y.reads))
    return [(s, n, f) for s, (n, f) in found.items()]


def stage_span(items: list[Item], stage: list[int], storage: Var) -> int:
    """Number of stages from the first to the last statement that accesses a storage."""
    at = [stage[i] for i, x in enumerate(items) if x.touches(storage)]
    return max(at) - min(at) + 1 if at else 1


def needed_binds(pure: list[Bind], used: Iterable[object]) -> list[Bind]:
    """The pure bindings that values in `used` depend on, in order."""
    wanted = set(used)
    keep: list[Bind] = []
    for b in reversed(pure):
        if b.var in wanted:
            keep.append(b)
            wanted |= free_vars(b.value) if isinstance(b.value, Expr) else set()
    return keep[::-1]


def inlined_binds(loop: For) -> dict[Any, Any]:
    """The values of the variables that a loop's body binds, without such variables."""
    out: dict[Any, Any] = {}
    for s in loop_items(stmts_of(loop.body)).pure:
        value = substitute(s.value, out)
        if not is_large(value):
            out[s.var] = value
    return out


def tile_read(x: Load, ways: Iterable[Var], inline: dict[Any, Any], private: set[Var],
              analyzer: Analyzer) -> tuple[tuple[Var | None, ...], tuple[Expr, ...]] | None:
    """(the variable of `ways` along each dimension, the indices where all of them are 0) of a load; None where two stand along
    one dimension, one along two or in steps, or where an index hangs on private variables or on memory."""
    along: list[Var | None] = []
    mins: list[Expr] = []
    for given in x.indices:
        e = substitute(given, inline)
        strides = {v: c for v in ways if (c := stride_along(e, v, analyzer)) != 0}
        if len(strides) > 1 or touches(e) or any(c != 1 for c in strides.values()):
            return None
        along.append(next(iter(strides), None))
        mins.append(analyzer.simplify(substitute(e, {v: const(0, v.dtype) for v in strides})))
    named = [v for v in along if v is not None]
    alone = len(named) == len(set(named)) and not any(free_vars(m) & private for m in mins)
    return (tuple(along), tuple(mins)) if alone else None
