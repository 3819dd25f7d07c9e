"""Schedules of software pipelines: which iteration each statement of a loop body works on, and whether that is correct.

What a user's T.Pipelined asks for (stages, order and stage lists), and whether it fits the loop body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any

from tilelang.arith import Analyzer
from tilelang.errors import InternalError, error, register
from tilelang.ir import (Alloc, Bind, Expr, For, Load, Stmt, Var, const, free_vars, inner, is_large, stmts_of, substitute,
                         used_vars, GLOBAL, SHARED, VARIABLE)
from tilelang.ir.record import record, state
from tilelang.ops import Copy

from .effects import Effect, acts, effects, expr_effects, touches
from .vectorize import stride_along

# ---- schedules -------------------------------------------------------------------------------------------------------

# A schedule gives every scheduled statement i of the body a stage s_i and an order o_i. Step u of the pipeline runs, in
# the order o, statement i for iteration u - s_i. A dependence from (i, iteration a) to (j, iteration a+d) is kept iff
#     s_i < s_j + d   or   s_i == s_j + d and o_i < o_j.
# A buffer with V versions (slot = iteration mod V) has dependences only between iterations whose distance is a multiple of V.

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


register("pipeline-annotation", InternalError, "order/stage lists of T.Pipelined do not fit the loop body",
         "give each scheduled statement another order and a stage from 0",
         expected="one entry per scheduled statement")
register("pipeline-order", ValueError, "order/stage of T.Pipelined would run a consumer before its producer",
         expected="a consumer after its producer")
register("pipeline-arguments", ValueError, "T.Pipelined with a bad num_stages, order or stage",
         "give num_stages >= 0, or order and stage with one entry per scheduled statement",
         expected="num_stages from 0, or order and stage with one integer per statement")

# What takes the request for a pipeline off a loop.
SERIAL: dict[str, Any] = dict.fromkeys(("num_stages", "order", "stage", "group", "software_pipeline_stage",
                                        "software_pipeline_order"))


def is_load(s: object) -> bool:
    """Whether a statement copies from global to shared memory."""
    return isinstance(s, Copy) and s.src.buffer.scope_name == GLOBAL and s.dst.buffer.scope_name in SHARED


def is_pipelined(s: For) -> bool:
    """Whether the user asked for a pipeline."""
    return s.kind == "pipelined" or s.plan.software_pipeline_stage is not None


def inner_loops(body: Stmt, wanted: Callable[[For], bool] = is_pipelined) -> list[For]:
    """The outermost loops of a kind, pipelined ones if none is given, below a launch's body."""
    out: list[For] = []
    stack = [body]
    while stack:
        s = stack.pop()
        if isinstance(s, For) and wanted(s):
            out.append(s)
        else:
            stack += reversed(inner(s))
    return out


def wanted_stages(s: For) -> int | tuple[Any, Any]:
    """num_stages, or the (order, stage) lists. Raises "pipeline-arguments"."""
    order = s.plan.order or s.plan.software_pipeline_order
    stage = s.plan.stage or s.plan.software_pipeline_stage
    if stage is not None:
        return order, stage
    if order is not None:
        return 0
    n = s.plan.num_stages
    if n < 0:
        raise error("pipeline-arguments", f"num_stages of T.Pipelined must be «an integer >= 0», found {n}", span=s.span,
                    hint="0 is a plain loop, n keeps n versions of each shared buffer filled by copies")
    return n


def ring_stages(s: For) -> int | None:
    """How many stages of a tile a loop asks for: num_stages, or at least 2 with lists that leave copies to the producer; None
    with other lists."""
    wanted = wanted_stages(s)
    if isinstance(wanted, int):
        return wanted
    return (s.plan.num_stages or max(2, max(wanted[1]) + 1)) if -1 in wanted[1] else None


def scheduled_lists(s: For, loop_body: Body, order: Any, stage: Any) -> tuple[list[int], list[int]]:
    """(stage, order) per item, -1 in both for the copies that are left to the producer.

    Raises "pipeline-annotation" for lists that do not fit the body.
    """
    ranks = [v if v == -1 else k for k, v in enumerate(stage)] if order is None else order
    stages, orders = _per_item(s, loop_body, "stage", stage), _per_item(s, loop_body, "order", ranks)
    own = [v for v in orders if v[0] != -1]
    if len(set(own)) != len(own):
        raise error("pipeline-annotation", f"two statements of the pipeline have the same order: {list(ranks)}",
                    expected="a different order for each statement", found=f"{list(ranks)}",
                    span=s.span, hint="`order` is a permutation of the statements")
    for x, (at, _), (place, _) in zip(loop_body.items, stages, orders):
        if at < -1 or (at == -1) != (place == -1):
            raise error("pipeline-annotation", f"pipeline stages start at 0, found {at} with order {place}",
                        expected="stages from 0; -1 as stage and order of a copy left to the producer",
                        found=f"stage {list(stage)}, order {list(ranks)}", span=x.stmt.span or s.span)
        if at == -1 and not _loads(x):
            raise error("pipeline-annotation", "stage -1 leaves a copy from global to shared memory to the producer, and this "
                        "statement is none", expected="-1 for copies from global to shared memory", found="-1 here",
                        span=x.stmt.span or s.span)
    low = min((at for at, _ in stages if at >= 0), default=0)
    ranked = sorted(own)
    return [max(at - low, -1) for at, _ in stages], [-1 if at < 0 else ranked.index(v) for (at, _), v in zip(stages, orders)]


def _per_item(s: For, loop_body: Body, name: str, given: Any) -> list[tuple[int, int]]:
    """(entry of a list, place in its group) of each item.  The list has an entry for each statement or for each group."""
    values, listed, count = [int(v) for v in given], loop_body.listed, len(loop_body.items)
    groups = _groups(s.plan.group)
    numbers = sorted(k for g in groups for k in g)
    if groups and numbers not in (list(range(count)), list(range(len(listed)))):
        raise error("pipeline-annotation", f"`group` of the pipeline does not list each of its {count} statements once",
                    expected=f"the numbers 0 to {count - 1}", found=f"{s.plan.group}", span=s.span)
    if groups and len(values) == len(groups):
        of = {k: (v, at) for v, g in zip(values, groups) for at, k in enumerate(g)}
        return [of[k] for k in range(len(of)) if len(of) == count or listed[k] is not None]
    if len(values) == len(listed):  # the lists count pure bindings too: their entries are ignored
        values = [v for v, k in zip(values, listed) if k is not None]
    if len(values) == count:
        return [(v, 0) for v in values]
    what = f"; `group` lists {len(numbers)} statements in {len(groups)} groups" if groups else ""
    raise error("pipeline-annotation", f"pipeline annotation size: `{name}` has {len(given)} entries, the loop body has "
                f"{count} statements to schedule{what}", expected=f"{count} entries", found=f"{len(given)}", span=s.span,
                hint="list one entry per copy, fill, gemm, reduction or store of the body, in source order; or give `group`, "
                "lists of the numbers of all statements, and one entry per list")


def _groups(group: Any) -> list[tuple[int, ...]]:
    """The lists of statements of a loop's `group`; none for other values, which have no effect."""
    ok = isinstance(group, tuple) and all(isinstance(g, tuple) and g and all(isinstance(k, int) for k in g) for g in group)
    return list(group) if ok else []


def _loads(x: Item) -> bool:
    """Whether a statement only copies from global to shared memory."""
    return all(e.buffer.scope_name in SHARED if e.writes else e.buffer.scope_name in (GLOBAL, VARIABLE) for e in x.effects) \
        and any(e.writes for e in x.effects)


def producer_first(items: list[Item], stage: list[int], order: list[int], stages: int) -> tuple[list[int], list[int]]:
    """Lists without -1: what is left to the producer comes first, `stages` - 1 iterations ahead of its last user where that is
    not after the first."""
    left = [i for i, at in enumerate(stage) if at == -1]
    ahead = list(stage)
    for i in left:
        users = [stage[j] for j, x in enumerate(items) if stage[j] >= 0 and any(
            e.writes and x.touches(e.storage) for e in items[i].effects)] or [0]
        ahead[i] = min(*users, max(users) + 1 - stages) if len(users) > 1 else users[0] + 1 - stages
    low = min(ahead, default=0)
    return [at - low for at in ahead], [left.index(k) if k in left else v + len(left) for k, v in enumerate(order)]


def check_flow(s: For, items: list[Item], stage: list[int], order: list[int]) -> None:
    """Raise "pipeline-order" when a consumer would run before its producer of the same iteration."""
    own = [k for k, at in enumerate(stage) if at >= 0]
    items, stage, order = ([x[k] for k in own] for x in (items, stage, order))  # type: ignore[assignment]
    for v in violations(items, stage, order, {e.storage: 1 << 30 for x in items for e in x.effects}):
        if not v.flow:
            continue
        first, second = items[v.first].stmt, items[v.second].stmt
        if stage[v.second] < stage[v.first]:
            what = f"is in stage {stage[v.second]}, before stage {stage[v.first]} of its producer"
        elif stage[v.second] == stage[v.first] and order[v.second] < order[v.first]:
            what = "comes before its producer in `order`, in the same stage"
        else:
            continue
        raise error("pipeline-order", f"a consumer of `{v.what}` {what}",
                    found=f"`{v.what}` used before", span=second.span or s.span,
                    notes=((first.span, "the producer"),), hint="give the consumer a later stage or a later order")
