"""Lowers the lanes of a distributed loop: vector accesses around a scalar body, vector copies, cp.async."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.arith import known_divisor
from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Break, Broadcast, Buffer, Call, Cast, Const, Continue, Evaluate, Expr,
                         For, If, Load, Node, Select, Seq, Stmt, Store, Var, While, binary, call, cast, const, contains, dtype,
                         fresh, load, logical, ramp, replace, rewrite, seq, substitute, walk, F32, FRAGMENT, GLOBAL, PRIVATE)
from tilelang.ir.record import record
from tilelang.ops.distribute import conjunction

from ..analysis.distributed_loop import Loop, depends, in_order, is_memory
from ..analysis.guards import operands
from ..analysis.statements import copied
from ..analysis.vectorize import ACROSS, ANYWHERE, LaneForms, MAX_BYTES, power_of_two_in, stride_along


def emit_lanes(lw: Any, loop: Loop, s: Stmt) -> Stmt:
    """Lower s for all lanes of a point: lane-invariant control flow around vector statements."""
    var = loop.lane_var
    if var is None:
        return _leaf(lw, loop, s)
    if isinstance(s, If) and not _has_fragment_load(s.cond):
        uniform, rest = _of_all_lanes(lw, loop, s.cond)
        if rest is None:  # the bounds of each lane's own access follow from its own condition
            known = conjunction(uniform, s.cond) if depends(s.cond, var) else s.cond
            then = lw.known.under(known, True, lambda: emit_lanes(lw, loop, s.then))
            orelse = None if s.orelse is None else lw.known.under(uniform, False, lambda: emit_lanes(lw, loop, s.orelse))
            return replace(s, cond=lw.expr(uniform), then=then, orelse=orelse)
        if uniform is not None and s.orelse is None:
            inner = replace(s, cond=rest)
            return replace(s, cond=lw.expr(uniform), then=lw.known.under(uniform, True, lambda: emit_lanes(lw, loop, inner)))
    if isinstance(s, For) and s.kind in ("serial", "unroll") and not depends(s.start, var) and \
            not depends(s.extent, var) and not contains(s.body, Break, Continue):
        # An early exit ends an iteration for one lane only, so a loop with one is run lane after lane.
        return lw.loop_stmt(s, lambda body: emit_lanes(lw, loop, body))
    if isinstance(s, Seq) and all(_splits(x) for x in s.stmts) and not _shared_by_lanes(s, var):
        return seq(*[emit_lanes(lw, loop, x) for x in s.stmts])
    return _leaf(lw, loop, s)


def _of_all_lanes(lw: Any, loop: Loop, cond: Expr) -> tuple[Any, Expr | None]:
    """Split a conjunction into (terms with one value for all lanes of a point, without the lane variable; remaining terms).

    None: no such terms; at most one of the two is None.
    """
    uniform: list[Expr] = []
    rest: list[Expr] = []
    for part in operands(cond, "and"):
        same = _for_all(lw, loop, part)
        if same is None or rest and contains(part, Load, Call):  # which the terms before it may guard
            rest.append(part)
        else:
            uniform.append(same)
    same = conjunction(*uniform)
    return cond if same is None and not rest else same, conjunction(*rest)


def _for_all(lw: Any, loop: Loop, cond: Expr) -> Expr | None:
    """The condition of the first lane, if all other lanes have the same value: no bound falls between two lanes."""
    var, width = loop.lane_var, loop.dist.lanes[1]  # type: ignore[index]
    assert var is not None, "only a loop over lanes has lane conditions"
    if not depends(cond, var):
        return cond
    if contains(cond, Load, Call) or LaneForms(var, width, lw.known.analyzer, lw.known.divisors).of(cond) != (0, width):
        return None
    return at_lane(loop, (cond,), 0)[0]


def _splits(s: Stmt) -> bool:
    """Whether a statement may be run for all lanes before the next one: no private state crosses statements."""
    return not any(isinstance(x, (Bind, Alloc, Evaluate, While, Break)) or
                   (isinstance(x, Store) and x.buffer.scope_name in PRIVATE) for x in walk(s))


def _shared_by_lanes(s: Seq, var: Var) -> bool:
    """Whether an element that several lanes share is stored by one statement and accessed by another.

    An example is a running sum that is read while it is formed, in the order of the lanes.
    """
    for x in s.stmts:
        shared = {y.buffer.data for y in walk(x, Store) if not any(depends(i, var) for i in y.indices)}
        if shared and any(isinstance(z, (Load, Store, AddressOf)) and z.buffer.data in shared
                          for y in s.stmts if y is not x for z in walk(y)):
            return True
    return False


def _has_fragment_load(e: Node) -> bool:
    return any(x.buffer.scope_name == FRAGMENT for x in walk(e, Load))


def _leaf(lw: Any, loop: Loop, s: Stmt) -> Stmt:
    """A scalar body run per lane, with its contiguous accesses as vectors before and after it, or as one vector copy."""
    lanes_v, width = loop.dist.lanes  # type: ignore[misc]
    var = loop.lane_var
    if var is None:
        return For(lanes_v, const(0), const(width), "unroll", lw.stmt(s))
    direct = None if loop.scalar else _vector_statement(lw, loop, s)
    if direct is not None:
        return direct
    loads, stores = ([], []) if loop.scalar else _vector_accesses(lw, loop, s)
    before: list[Stmt] = []
    after: list[Stmt] = []
    saved = loop.vloads, loop.vstores
    loop.vloads, loop.vstores = {}, {}
    made: dict[Any, Buffer] = {}
    for site, run in loads:
        wide = _widened(s, site) and run.width % 2 == 0
        key = site.buffer, run.key, wide
        tmp = made.get(key)
        if tmp is None:
            steps = range(0, run.elements, run.width)
            values = [_vector_load(lw, loop, site, run.places(at), run.width) for at in steps]
            wide = wide and not any(isinstance(x, Select) for x in values)  # a cast would end each load in its branch
            tmp = made[key] = lw.new_local(f"{site.buffer.name}_v", run.elements, F32 if wide else site.buffer.dtype)
            for at, value in zip(steps, values):
                value = cast(value, F32.with_lanes(run.width)) if wide else value
                before.append(Store(tmp, (_ramp(const(at), run.width),), value))
        loop.vloads[site] = tmp, run.lane
    made = {}
    for target, run in stores:
        tmp = made.get((target.buffer, run.key))
        if tmp is None:
            tmp = made[target.buffer, run.key] = lw.new_local(f"{target.buffer.name}_v", run.elements, target.buffer.dtype)
            for at in range(0, run.elements, run.width):
                value = load(tmp, (_ramp(const(at), run.width),))
                after.append(_vector_store(lw, loop, target, run.places(at), run.width, value))
        loop.vstores[id(target)] = tmp, run.lane
    try:
        scalar = lw.stmt(s)
    finally:
        loop.vloads, loop.vstores = saved
    point = [Bind(var, loop.base + cast(lanes_v, var.dtype))] if depends(scalar, var) else []
    exists = loop.dist.exists
    if exists is not None and depends(exists, lanes_v):
        scalar = If(exists, scalar)
    # A loop may have several scalar bodies; each binds lane variables of its own.
    own = {lanes_v: fresh(lanes_v.name), var: fresh(var.name, var.dtype)}
    scalar = substitute(seq(*point, scalar), own)
    return seq(*before, For(own[lanes_v], const(0), const(width), "unroll", scalar), *after)


def _widened(s: Stmt, site: Load) -> bool:
    """Whether s casts all that it loads to float32, among it a bfloat16: quicker of a whole vector."""
    casts, loads = [x.value for x in walk(s, Cast) if x.dtype == F32], [*walk(s, Load)]
    return site.dtype.base == "bfloat16" and len(casts) == len(loads) and all(x.same(y) for x, y in zip(casts, loads))


def _ramp(base: Expr, lanes: int) -> Expr:
    return base if lanes == 1 else ramp(base, lanes)


def at_lane(loop: Loop, indices: tuple[Expr, ...], at: int) -> tuple[Expr, ...]:
    """Indices of lane `at`: the lane variable replaced by base + at."""
    var, base = loop.lane_var, loop.base
    assert var is not None and base is not None, "only a loop over lanes has lane indices"
    return tuple(substitute(i, {var: base + at}) for i in indices)


def _vector_load(lw: Any, loop: Loop, site: Load, indices: tuple[Expr, ...], w: int) -> Expr:
    guard = lw.access.guard(site.buffer, indices, width=w, inside=loop.loose)
    buffer, physical = lw.physical(site.buffer, lw.access.exprs(indices))
    value: Expr = load(buffer, (*physical[:-1], _ramp(physical[-1], w)), span=site.span)
    if loop.loose and w > 1 and lw.buffers.widths.run_width(
            site.buffer, indices, w, lw.known.analyzer, lw.known.divisors, ACROSS) < w:
        value = call("load_shifted", (AddressOf(buffer, physical),), value.dtype, span=site.span)
    if guard is None:
        return value
    safe = lw.buffers.safe_value(site.buffer)
    return Select(guard, value, safe if w == 1 else Broadcast(safe, w, value.dtype), value.dtype, True)


def _vector_store(lw: Any, loop: Loop, site: Store, indices: tuple[Expr, ...], w: int, value: Expr) -> Stmt:
    guard = conjunction(loop.dist.first, lw.access.guard(site.buffer, indices, width=w, inside=loop.loose))
    buffer, physical = lw.physical(site.buffer, lw.access.exprs(indices))
    out: Stmt = Store(buffer, (*physical[:-1], _ramp(physical[-1], w)), value, span=site.span)
    return out if guard is None else If(guard, out)


@record
class Run:
    """Neighbouring elements that the lanes access as vectors.

    places(k): the indices of element k.  elements: their number.  width: that of a vector.  lane: the element of a lane.
    """

    places: Callable[[int], tuple[Expr, ...]]
    elements: int
    width: int
    lane: Expr

    @property
    def key(self) -> Any:
        return self.places(0), self.elements


def _vector_accesses(lw: Any, loop: Loop, s: Stmt) -> tuple[list[tuple[Load, Run]], list[tuple[Store, Run]]]:
    """(loads, stores): accesses of global and shared memory in s that may be moved out of the lane loop as vectors.

    Only unconditional accesses qualify.  A load moves up when nothing before it stores to its storage; stores move down when
    nothing after the first of them reads its storage and they all are vectors of different elements.
    """
    if loop.dist.exists is not None and depends(loop.dist.exists, loop.dist.lanes[0]):  # type: ignore[index]
        return [], []
    order = list(in_order(s))
    private = {x.buffer.data if isinstance(x, Alloc) else x.var for x in walk(s, Alloc, Bind, For)}
    first_store: dict[Var, int] = {}
    last_read: dict[Var, int] = {}
    stores_of: dict[Var, int] = {}
    for k, (x, _) in enumerate(order):
        data = x.buffer.data  # type: ignore[attr-defined]
        if isinstance(x, Store):
            stores_of[data] = stores_of.get(data, 0) + 1
        else:
            last_read[data] = k
        if not isinstance(x, Load):
            first_store.setdefault(data, k)
    loads: dict[Load, Run] = {}
    stores: dict[Var, list[tuple[Store, Run]]] = {}
    late: set[Load] = set()
    for k, (x, conditional) in enumerate(order):
        if conditional or isinstance(x, AddressOf):
            continue
        if not is_memory(x.buffer):  # type: ignore[attr-defined]
            continue
        b: Buffer = x.buffer  # type: ignore[attr-defined]
        made = (*x.indices, b.data, *b.shape, *(b.strides_ or ()), b.offset)  # type: ignore[attr-defined]
        if any(v in private for i in made if isinstance(i, Expr) for v in walk(i)):
            continue
        data, read = b.data, {n.buffer.data for i in x.indices for n in walk(i, Load)}  # type: ignore[attr-defined]
        if private & read:
            continue
        if isinstance(x, Load):
            if any(first_store.get(d, k) < k for d in (data, *read)):
                late.add(x)
            elif x not in loads and (run := _run(lw, loop, x, data not in first_store)) is not None:
                loads[x] = run
        elif isinstance(x, Store) and read.isdisjoint(first_store) and last_read.get(data, -1) < first_store[data] and (
                run := _run(lw, loop, x, False)) is not None:
            stores.setdefault(data, []).append((x, run))
    return [(x, run) for x, run in loads.items() if x not in late], [
        y for data, found in stores.items() if len(found) == stores_of[data] and _disjoint(lw, loop, found) for y in found]


def _disjoint(lw: Any, loop: Loop, stores: list[tuple[Store, Run]]) -> bool:
    """Whether stores of all lanes write different elements, and together all elements of their runs."""
    covered: dict[Any, set[Expr]] = {}
    for x, run in stores:
        covered.setdefault((x.buffer, run.key), set()).add(run.lane)
    lanes = loop.dist.lanes[1]  # type: ignore[index]
    if sum(map(len, covered.values())) < len(stores) or any(len(at) * lanes != n for (_, (_, n)), at in covered.items()):
        return False
    runs = [(b, places, n) for b, (places, n) in covered]
    if len(runs) > 1 and any(stride_along(x.indices[-1], loop.lane_var, lw.known.analyzer) is None  # type: ignore[arg-type]
                             for x, _ in stores):
        return False  # runs with gaps, as of `i % 64`
    for k, (b, at, n) in enumerate(runs):
        for other, to, m in runs[k + 1:]:
            steps = [lw.known.analyzer.simplify(i - j) for i, j in zip(at, to)]
            if other is not b or not any(isinstance(d, Const) and (-n >= d.value or d.value >= m if i is at[-1] else d.value)
                                         for d, i in zip(steps, at)):
                return False
    return True


def _run(lw: Any, loop: Loop, x: Load | Store, beside: bool) -> Run | None:
    """The elements of an access, for all lanes; beside: those between them may be read too."""
    lanes_v, lanes = loop.dist.lanes  # type: ignore[misc]
    w, share = _shared_width(lw, loop, x) if isinstance(x, Load) else (_width(lw, loop, x), 1)
    if w * share > 1:
        lane = lanes_v if share == 1 else binary("floordiv", lanes_v, const(share))
        return Run(lambda k: at_lane(loop, x.indices, k * share), lanes // share, w, lane)
    if not x.indices:
        return None
    var, a, last = loop.lane_var, lw.known.analyzer, x.indices[-1]
    if loop.loose or var is None or any(depends(i, var) for i in x.indices[:-1]) or contains(last, Load):
        return None
    flip = next((n for n in walk(last, Binary) if n.op == "bitxor" and isinstance(n.b, Const) and 0 < n.b.value < lanes), None)
    if flip is not None and beside:  # i ^ 1: the same vector, in another order
        plain = replace(x, indices=(*x.indices[:-1], rewrite(last, lambda n: n.a if n is flip else None, Binary)))
        w = _width(lw, loop, plain)
        aligned = known_divisor(flip.a, {**lw.known.divisors, var: lanes}, a) % w == 0 and stride_along(flip.a, var, a) == 1
        return Run(lambda k: at_lane(loop, plain.indices, k), lanes, w, binary("bitxor", lanes_v, flip.b)) \
            if w > flip.b.value and aligned else None
    step = stride_along(last, var, a)
    if step not in (2, 3, 4) or isinstance(x, Load) and not beside:
        return None
    *lead, first = at_lane(loop, x.indices, 0)
    offset = a.linear(first).const % step
    start = (*lead, a.simplify(first - offset))
    w = lw.buffers.widths.run_width(x.buffer, start, step * lanes, a, lw.known.divisors)
    return Run(lambda k: (*start[:-1], start[-1] + k if k else start[-1]), step * lanes, w,
               lanes_v * step + offset if offset else lanes_v * step) if w > 1 else None


def _width(lw: Any, loop: Loop, x: Any) -> int:
    assert loop.dist.lanes is not None, "only a loop over lanes is vectorised"
    for n in (n for i in x.indices for n in walk(i, Load)):
        if n.buffer.scope_name == FRAGMENT and n.buffer not in loop.staged:
            register = loop.touch(lw.layout_of, n.buffer, n.indices, False).register
            if register is None or depends(register, loop.dist.lanes[0]):
                return 1
    return lw.buffers.widths.width(x.buffer, x.indices, loop.lane_var, loop.dist.lanes[1], lw.known.analyzer,
                                   lw.known.divisors, ANYWHERE if loop.loose and isinstance(x, Load) else int(loop.loose))


def _shared_width(lw: Any, loop: Loop, x: Load) -> tuple[int, int]:
    """(w, c): each run of c lanes reads one element, and w elements of consecutive runs are loaded at once.

    (1, 1): neither applies.
    """
    w = _width(lw, loop, x)
    lanes, var = loop.dist.lanes[1], loop.lane_var  # type: ignore[index]
    parts = [n for i in x.indices for n in walk(i)]
    if w > 1 or loop.loose or any(isinstance(n, Load) for n in parts):
        return w, 1
    if not any(isinstance(n, Binary) and n.op == "floordiv" and depends(n, var) for n in parts):  # type: ignore[arg-type]
        return 1, 1
    share = lanes
    while share > 1:
        run, lane = fresh("run", var.dtype), fresh("lane", var.dtype)  # type: ignore[union-attr]
        a = lw.known.analyzer.bind(lane, 0, share - 1)
        first = [substitute(i, {var: run * share}) for i in x.indices]
        if lanes % share == 0 and all(a.can_prove(binary("eq", substitute(i, {var: run * share + lane}), f))
                                      for i, f in zip(x.indices, first)):
            if share == lanes:
                return 1, share
            at = tuple(map(a.simplify, first))
            return lw.buffers.widths.width(x.buffer, at, run, lanes // share, a, lw.known.divisors), share
        share //= 2
    return 1, 1


def _vector_statement(lw: Any, loop: Loop, s: Stmt) -> Stmt | None:
    """A store of a load, of a lane-invariant value, or of either of two such, as vector statements; None for anything else."""
    if not isinstance(s, Store) or loop.dist.lanes is None:
        return None
    exists = loop.dist.exists
    if exists is not None and depends(exists, loop.dist.lanes[0]):
        return None
    if any(x.buffer.data is s.buffer.data for e in (*s.indices, s.value) for x in walk(e, Load)):
        return None
    width, limit = loop.dist.lanes[1], _vector_target(lw, loop, s)
    form = _vector_form(lw, loop, s.value, s.buffer.dtype, limit) if limit > 1 else None
    if form is None or form[0] < 2:
        return None
    w, lanes = form
    ahead = async_copy(lw, loop, s, w) if loop.is_async else None
    return ahead if ahead is not None else seq(*[_put(lw, loop, s, at, w, lanes(at, w)) for at in range(0, width, w)])


def _vector_form(lw: Any, loop: Loop, value: Expr, of: dtype, limit: int) -> tuple[int, Callable[[int, int], Expr]] | None:
    """(elements of a value that can be computed as one vector, at most `limit`; f(at, w): its lanes at .. at + w - 1).

    None for values that are no load, lane-invariant value, or choice of such by a condition that all lanes share.
    """
    if isinstance(value, Select) and not _has_fragment_load(value.cond) and not contains(value.cond, Call):
        cond = _for_all(lw, loop, value.cond)
        a, b = (_vector_form(lw, loop, x, of, limit) for x in (value.a, value.b))
        if cond is None or a is None or b is None:
            return None
        known = logical("and", cond, value.cond) if cond is not value.cond else cond
        return min(a[0], b[0]), lambda at, w: Select(
            lw.expr(cond), lw.known.under(known, True, lambda: a[1](at, w)), lw.known.under(cond, False, lambda: b[1](at, w)),
            of.with_lanes(w), True)
    if value.dtype != of:
        return None
    if isinstance(value, Load) and is_memory(value.buffer):
        return min(limit, _width(lw, loop, value)), lambda at, w: _vector_load(
            lw, loop, value, at_lane(loop, value.indices, at), w)
    if isinstance(value, Load) and value.buffer.scope_name == FRAGMENT:
        run = _fragment_run(lw, loop, value.buffer, value.indices, False)
        return None if run is None else (power_of_two_in(run[1], limit), lambda at, w: load(
            lw.local_of(value.buffer), (_ramp(run[0] + at, w),)))
    if depends(value, loop.lane_var) or contains(value, Load, Call):  # type: ignore[arg-type]
        return None
    return limit, lambda at, w: Broadcast(lw.expr(value), w, of.with_lanes(w))


def _vector_target(lw: Any, loop: Loop, s: Store) -> int:
    """Vector width of the destination of a store (1: none)."""
    if is_memory(s.buffer):
        return _width(lw, loop, s)
    if s.buffer.scope_name != FRAGMENT or s.buffer in loop.staged:
        return 1
    run = _fragment_run(lw, loop, s.buffer, s.indices, True)
    bits = s.buffer.dtype.bits
    if run is None or bits % 8:
        return 1
    return power_of_two_in(run[1], min(loop.dist.lanes[1], MAX_BYTES * 8 // bits))  # type: ignore[index]


def _fragment_run(lw: Any, loop: Loop, buffer: Buffer, indices: tuple[Expr, ...], is_write: bool) -> tuple[Expr, int] | None:
    """(register of lane 0, its known divisor) when the lanes lie in consecutive registers; None otherwise."""
    if buffer in loop.staged or buffer.dtype.lanes > 1:
        return None
    lanes_v, _ = loop.dist.lanes  # type: ignore[misc]
    touch = loop.touch(lw.layout_of, buffer, indices, is_write)
    if touch.register is None or stride_along(touch.register, lanes_v, lw.known.analyzer) != 1:
        return None
    start = lw.known.analyzer.simplify(substitute(touch.register, {lanes_v: const(0)}))
    return start, lw.known.divisor(start) or 1 << 10


def _put(lw: Any, loop: Loop, s: Store, at: int, w: int, value: Expr) -> Stmt:
    if s.buffer.scope_name == FRAGMENT:
        run = _fragment_run(lw, loop, s.buffer, s.indices, True)
        return Store(lw.local_of(s.buffer), (_ramp(run[0] + at, w),), value, span=s.span)  # type: ignore[index]
    return _vector_store(lw, loop, s, at_lane(loop, s.indices, at), w, value)


def async_copy(lw: Any, loop: Loop, s: Store, w: int) -> Stmt | None:
    """cp.async for each run, zero-filled where the source is out of range or the value is a zero; None where the target has no
    cp.async, or none of this width for this value."""
    conds, value = copied(s.value)
    if not getattr(lw.target, "has_cp_async", True) or w * s.buffer.dtype.bytes not in (4, 8, 16):
        return None
    if not isinstance(value, Load) or value.buffer.scope_name != GLOBAL or \
            not s.buffer.scope_name.startswith("shared") or value.buffer in lw.buffers.safe:
        return None
    width, source = loop.dist.lanes[1] if loop.dist.lanes else 1, value
    same = conjunction(*(conds if loop.lane_var is None else [_for_all(lw, loop, c) for c in conds]))

    def copies() -> Stmt:
        return seq(*[_one_async(lw, loop, s, source, same, at, w) for at in range(0, width, w)])

    return copies() if same is None else lw.known.under(conjunction(same, *conds), True, copies)


def _one_async(lw: Any, loop: Loop, s: Store, value: Load, cond: Expr | None, at: int, w: int) -> Stmt:
    def place(x: Any) -> tuple[Buffer, tuple[Expr, ...], tuple[Expr, ...]]:
        indices = at_lane(loop, x.indices, at) if loop.lane_var is not None else x.indices
        buffer, physical = lw.physical(x.buffer, lw.access.exprs(indices))
        return buffer, physical, indices

    dst, dst_at, _ = place(s)
    src, src_at, indices = place(value)
    guard = conjunction(None if cond is None else lw.expr(cond), lw.access.guard(value.buffer, indices, width=w))
    args: tuple[Expr, ...] = (AddressOf(dst, dst_at), AddressOf(src, src_at))
    if guard is not None:
        args += (guard,)
    out: Stmt = Evaluate(call("cp_async", args, "void", span=s.span, bytes=w * s.buffer.dtype.bytes), span=s.span)
    return out if loop.dist.first is None else If(loop.dist.first, out)
