"""Gives two versions to tiles that threads make for a GEMM of what is loaded: the next one is made while the GEMM runs.

    for k in T.Pipelined(n):                        for k in T.Pipelined(n):
        copy(Q[k], q)                                   copy(Q[k], q)
        for i, j in T.Parallel(N, K):       ->          for i, j in T.Parallel(N, K):
            w[i, j] = float16(q[i, j])                      w[k % 2, i, j] = float16(q[i, j])
        gemm(a, w, c)                                   gemm(a, w[k % 2], c)

A fragment keeps its name: the loop is then unrolled by two, because registers have no index (emit.py).

A tile that threads make, or change in place, and only GEMMs read as A, becomes a fragment first: nothing is stored, no warp
group waits for another one, and wgmma reads less of shared memory, whose bandwidth such loops need.  For B the GEMM is
transposed before: c^T = w a^T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilelang.ir import (Alloc, Bind, Buffer, For, Launch, Load, Node, Parallel, Stmt, Store, Var, region_of, replace, rewrite,
                         rewrite_stmts, seq, stmts_of, walk, FRAGMENT, GLOBAL, SHARED)
from tilelang.ops import Copy, Gemm

from ..analysis.effects import effects
from ..analysis.pipeline_loops import Item, is_load, loop_items
from ..analysis.loop_items import held_in_registers
from ..analysis.liveness import Uses, filled
from ..analysis.shared_spans import versioned, with_versions
from ..legalize.transposed_operands import with_k_contiguous
from .rings import select_version

VERSIONS = 2


def operand_versions(launch: Launch, loops: Sequence[For]) -> tuple[Launch, list[For], dict[Var, int]] | None:
    """(the launch, its pipelined loops, storage of such tiles -> their versions); None where there is no such tile.

    Keeps the values: an iteration reads nothing that an earlier one left in such a tile, and nothing outside the loops does.
    """
    uses, laid = Uses(launch.body), {b for b, _ in launch.plan.layouts}
    inside = {id(s) for x in loops for s in walk(x.body)}
    outside = {s.buffer for s in walk(launch.body, Alloc) if id(s) not in inside}
    within = [e.storage for x in loops for e in effects(x)]
    whole = [e.storage for e in effects(launch.body)]
    found: list[Buffer] = []
    for loop in loops:
        items = loop_items(stmts_of(loop.body)).items
        gemms = [x.stmt for x in items if isinstance(x.stmt, Gemm)]
        fed = [b for g in gemms for b in (g.a.buffer, g.b.buffer, *held_in_registers(g))]
        loaded = {x.stmt.dst.buffer for x in items if is_load(x.stmt)}  # type: ignore[attr-defined]
        found += [b for b in dict.fromkeys(fed) if b in outside - loaded and b not in laid and _made_of_loads(items, b.data)
                  and whole.count(b.data) == within.count(b.data) and not (
                      uses.unversionable(loop, items, b) if b.scope_name in SHARED else uses.carried(b.data, loop))]
    if not found:
        return None
    made = {b: versioned(b, VERSIONS) for b in found if b.scope_name in SHARED}
    out, new = _rewritten(launch, loops, lambda x: select_version(x, made, x.var),
                          lambda s: replace(s, buffer=made[s.buffer]) if s.buffer in made else None)
    return with_versions(out, made.items()), new, {made.get(b, b).data: VERSIONS for b in found}


def _rewritten(launch: Launch, loops: Sequence[For], loop: Callable[[For], For],
               alloc: Callable[[Alloc], Stmt | None] = lambda s: None) -> tuple[Launch, list[For]]:
    """(the launch, its loops), with changes of the loops and of the allocations around them."""
    new = {id(x): loop(x) for x in loops}
    body = rewrite_stmts(launch.body, lambda s: alloc(s) if isinstance(s, Alloc) else new.get(id(s)))
    return replace(launch, body=body), [*new.values()]


def transposed_gemms(launch: Launch) -> Launch:
    """The launch with c^T += w a^T for c += a w^T where threads make w; the accumulator keeps its shape (decision 102)."""
    made = {_changed(s) for s in walk(launch.body, Parallel)}
    into: dict[Var, list[Gemm]] = {}
    for g in walk(launch.body, Gemm):
        into.setdefault(g.c.buffer.data, []).append(g)
    new = {id(g): with_k_contiguous(g, True)[-1] for some in into.values() for g in some if all(
        x.b.buffer in made and x.a.buffer not in made and x.a.buffer.scope_name in SHARED and x.transpose_b and
        not x.transpose_a and not x.plan.exchanged and x.c.is_full for x in some)}
    return replace(launch, body=rewrite_stmts(launch.body, lambda s: new.get(id(s)))) if new else launch


def operands_in_registers(launch: Launch, loops: Sequence[For]) -> tuple[Launch, list[For]]:
    """(the launch, its pipelined loops) with a fragment for each tile that becomes one."""
    uses, laid = Uses(launch.body), {b for b, _ in launch.plan.layouts}
    whole, made = [e.storage for e in effects(launch.body)], dict[Buffer, Buffer]()
    for loop in loops:
        items = loop_items(stmts_of(loop.body)).items
        within = [e.storage for x in items for e in x.effects]
        for at, x in enumerate(items):
            b = _changed(x.stmt)
            if b is None or b in laid or b in made or whole.count(b.data) != within.count(b.data) or \
                    uses.unversionable(loop, items, b) or not _made_of_loads(items, b.data) or not _is_only_a(items, at, b):
                continue
            made[b] = replace(b, name=f"{b.name}_r", data=Var(f"{b.name}_r", b.data.dtype), scope_name=FRAGMENT)
    if not made:
        return launch, list(loops)
    new = {id(x): replace(x, body=rewrite_stmts(x.body, lambda s: _with_fragments(s, made))) for x in loops}
    left = {e.storage for x in new.values() for e in effects(x)}
    return _rewritten(launch, loops, lambda x: new[id(x)], lambda s: seq(*[s] * (s.buffer.data in left), Alloc(made[s.buffer]))
                      if s.buffer in made else None)


def _changed(s: Any) -> Buffer | None:
    """The shared tile of 16-bit elements that a parallel loop stores whole, reading of it only the element that it stores."""
    stores = [x for x in walk(s, Store)] if isinstance(s, Parallel) and not _copies(s) else []
    b = stores[0].buffer if len(stores) == 1 else None
    if b is None or b.scope_name not in SHARED or b.dtype.bits != 16 or b.ndim != 2 or b.data not in filled(s) or any(
            x.buffer.data is b.data and x.indices != stores[0].indices for x in walk(s, Load)):
        return None
    return b


def _copies(s: Parallel) -> bool:
    """Whether what differs from element to element comes from global memory alone: such a loop should keep its wide loads."""
    over: dict[Var, set[Var]] = {v: {v} for v in s.vars}

    def varies(n: Node) -> set[Var]:
        return {v for x in walk(n, Var) for v in over.get(x, ())}

    for bind in walk(s, Bind):
        over[bind.var] = varies(bind.value)
    return {x.buffer.scope_name for x in walk(s, Load) if varies(x) >= {*s.vars}} == {GLOBAL}


def _is_only_a(items: list[Item], at: int, b: Buffer) -> bool:
    """Whether a tile that item `at` makes is read by GEMMs behind it as A alone, and before it only filled by a load."""
    users = [(k, x.stmt) for k, x in enumerate(items) if k != at and x.touches(b.data)]
    return any(k > at for k, _ in users) and all(
        is_load(s) if k < at else isinstance(s, Gemm) and s.a.buffer is b and s.a.is_full and not s.transpose_a and
        s.b.buffer is not b for k, s in users)


def _with_fragments(s: Any, made: dict[Buffer, Buffer]) -> Any:
    """A GEMM that reads fragments, or the loop that makes one; None for other statements."""
    if isinstance(s, Gemm) and s.a.buffer in made:
        return replace(s, a=replace(s.a, buffer=made[s.a.buffer]))
    b = _changed(s)
    return rewrite(s, lambda x: replace(x, buffer=made[b]) if x.buffer is b else None, Store) if b in made else None


def whole_loads(launch: Launch, loops: Sequence[For]) -> tuple[Launch, list[For]]:
    """(the launch, its pipelined loops) where a tile is copied to a fragment A, by ldmatrix, before a loop changes it there."""
    read = {x.a.buffer for loop in loops for x in walk(loop.body, Gemm)
            if x.a.buffer.scope_name == FRAGMENT and not x.transpose_a}

    def copied(s: Any) -> Any:
        stores = [x for x in walk(s, Store)] if isinstance(s, Parallel) else []
        f: Any = stores[0].buffer if len(stores) == 1 else None
        loads = [x for x in walk(s, Load) if x.buffer.scope_name in SHARED]
        if f not in read or f.data not in filled(s) or any(x.buffer is f for x in walk(s, Load)) or not loads:
            return None
        a = loads[0].buffer
        if any(x.buffer is not a or x.indices != stores[0].indices for x in loads) or a.shape != f.shape or \
                a.dtype != f.dtype or a.dtype.bits != 16:
            return None
        return seq(Copy(region_of(a), region_of(f), span=s.span),
                   rewrite(s, lambda x: replace(x, buffer=f) if x.buffer is a else None, Load))

    return _rewritten(launch, loops, lambda x: replace(x, body=rewrite_stmts(x.body, copied)))


def _made_of_loads(items: list[Item], storage: Var) -> bool:
    """Whether threads write a tile in an iteration, and no GEMM's result of the iteration takes part in that."""
    makers = [x for x in items if not is_load(x.stmt) and any(e.writes and e.storage is storage for e in x.effects)]
    if any(_copies(s) for x in makers for s in walk(x.stmt, Parallel)):
        return False
    sums: set[Var] = set()
    for x in items:
        if isinstance(x.stmt, Gemm) or any(e.reads and e.storage in sums for e in x.effects):
            sums |= {e.storage for e in x.effects if e.writes}
    return bool(makers) and storage not in sums
