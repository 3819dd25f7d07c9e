"""One distributed loop: from `for i, j in T.Parallel(...)` to the loop of one thread.

    for i, j in T.Parallel(64, 32):            for r in unroll(4):
        C[by*64 + i, bx*32 + j] = S[i, j]   →      i = r*16 + tx//8;  j0 = tx%8*4
                                                   if by*64 + i < M and bx*32 + j0 < N:
                                                       C[by*64 + i, ramp(bx*32 + j0, 4)] = S[ramp(…, 4)]

Keeps: every point is executed by its owners, stores to global and shared memory and other effects by exactly one of
them; a fragment element is read and written only by threads that own it, or the access is staged through shared memory.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from tilelang import errors
from tilelang.arith import known_divisor
from tilelang.ir import (EMPTY, AddressOf, Alloc, Bind, Break, Broadcast, Buffer, Call, Const, Continue, Evaluate, Expr,
                         For, If, Load, Node, Ramp, Select, Seq, Stmt, Store, Var, While, binary, call, cast, const,
                         fresh, load, rebuild, replace, seq, stmts_of, substitute, unary, walk)
from tilelang.layout import Mode
from tilelang.ops.distribute import Distribution, bind_ranges, conjunction, flat, from_fragment, private

from .fragment_access import Grid, Touch, resolve, shared_elements
from .vectorize import MAX_BYTES, power_of_two_in, stride_along

UNROLL_LIMIT = 16  # longer loops over memory only stay loops: code size, not registers, is what they would cost

for _name, _about, _hint in (
    ("parallel-carried", "a variable carries a value from one T.Parallel iteration to the next",
     "accumulate into a fragment and reduce it with T.reduce_*, or use T.serial"),
    ("fragment-access", "a fragment element that the executing thread does not own",
     "index it with the variables of a T.Parallel loop, or copy it to shared memory first"),
    ("parallel-race", "T.Parallel iterations accumulate into one element",
     "use T.reduce_*, T.atomic_add, or a serial loop inside the parallel one"),
):
    errors.register(_name, ValueError, _about, _hint)


@dataclass(frozen=True)
class LoopShare:
    """A Fragment-like share of a loop nest: `modes` per loop, `copies`, `threads` (ops.distribute.from_fragment)."""

    shape: tuple[int, ...]
    modes: tuple[Any, ...]
    copies: tuple[Any, ...]
    threads: int


@dataclass
class Loop:
    """A distributed loop while it is lowered.

    vars: user's loop variables, bound to a point's coordinates.  base: variable of the first lane along the lane
    dimension.  touches: how each fragment access resolves.  vloads / vstores: accesses moved to vectors around the
    lane loop, to the staging array that replaces them.  values: what the bound coordinates equal.
    loose: vectors may pass the end of a row, a run-time test picks between them and scalars.  scalar: that test failed.
    """

    vars: tuple[Var, ...]
    dist: Distribution
    grid: Grid | None
    is_async: bool = False
    base: Var | None = None
    staged: dict[Buffer, Buffer] = field(default_factory=dict)
    touches: dict[tuple[Buffer, tuple[Expr, ...], bool], Touch] = field(default_factory=dict)
    vloads: dict[Load, Buffer] = field(default_factory=dict)
    vstores: dict[int, Buffer] = field(default_factory=dict)
    inner: list[tuple[Var, int]] = field(default_factory=list)
    values: dict[Any, Any] = field(default_factory=dict)
    loose: bool = False
    scalar: bool = False

    @property
    def lane_var(self) -> Var | None:
        return self.vars[self.dist.lane_dim] if self.dist.lanes and self.vars else None

    def touch(self, lw: Any, buffer: Buffer, indices: tuple[Expr, ...], is_write: bool) -> Touch:
        """How a fragment access resolves; computed once."""
        key = (buffer, indices, is_write)
        got = self.touches.get(key)
        if got is None:
            if self.grid is None:
                got = Touch(None, f"`{buffer.name}` is indexed in a loop of run-time extent")
            else:
                used = {x for i in indices for x in walk(i) if isinstance(x, Var)}
                grid = self.grid.with_inner([(v, n) for v, n in self.inner if v in used])
                got = resolve(lw.layout_of(buffer), buffer, indices, grid, is_write)
            self.touches[key] = got
        return got


# ---- entry ---------------------------------------------------------------------------------------------------------


def lower_loop(lw: Any, vars: tuple[Var, ...], extents: tuple[Any, ...], body: Stmt, *, loop_layout: Any = None,
               is_async: bool = False, width: int | None = None, span: Any = None) -> Stmt:
    """The statements of one thread for `for vars in T.Parallel(extents): body`."""
    if any(isinstance(n, int) and n == 0 for n in extents):
        return EMPTY
    body = drop_continue(body, span)
    refuse_carried(body, span)
    body = inline_index_binds(body)
    dist, loose = choose_distribution(lw, vars, extents, body, loop_layout, width, is_async)
    return run_loop(lw, vars, dist, body, is_async=is_async, loose=loose, span=span)


def run_loop(lw: Any, vars: tuple[Var, ...], dist: Distribution, body: Stmt, *, is_async: bool = False,
             loose: bool = False, span: Any = None) -> Stmt:
    """Lower body under a given distribution, staging fragment accesses that are not direct through shared memory.

    loose: see Loop.
    """
    saved = lw.analyzer, lw.loop
    lw.analyzer = bind_ranges(dist, lw.analyzer)
    for v, n in zip(vars, dist.extents):
        hi = n if isinstance(n, int) else lw.analyzer.interval(n)[1]
        lw.analyzer = lw.analyzer.bind(v, 0, None if hi is None else hi - 1)
    if dist.exists is not None and not isinstance(dist.exists, Const):
        # Bounds of the loop variables already say all that matters; the condition itself may decide a guard.
        lw.analyzer = lw.analyzer.assuming(dist.exists)
    grid = Grid(dist, vars, lw.thread) if dist.is_static and vars else None
    loop = Loop(vars, dist, grid, is_async, loose=loose)
    try:
        if grid is not None:
            _refuse_races(loop, body, span)
        before, after = _stage(lw, loop, body, span)
        lw.loop = loop
        inner = _emit_points(lw, loop, body)
    finally:
        lw.analyzer, lw.loop = saved
    return seq(*before, _wrap_axes(dist, inner, _touches_registers(lw, body), span), *after)


def _touches_registers(lw: Any, body: Stmt) -> bool:
    return any(isinstance(x, Buffer) and x.scope_name.startswith("local") for x in walk(body))


def _wrap_axes(dist: Distribution, inner: Stmt, registers: bool, span: Any) -> Stmt:
    count = 1
    for v, n in reversed(dist.axes):
        unroll = isinstance(n, int) and (registers or count * n <= UNROLL_LIMIT)
        count *= n if isinstance(n, int) else 1 << 30
        inner = For(v, const(0), n if isinstance(n, Expr) else const(n), "unroll" if unroll else "serial", inner,
                    (("independent", True),), span)
    return inner


def _emit_points(lw: Any, loop: Loop, body: Stmt) -> Stmt:
    """Binds of the coordinates, existence predicate, and the body (in lanes) of one step of the axes loops."""
    dist = loop.dist
    binds: list[Bind] = []
    used = {x for x in walk(body) if isinstance(x, Var)}
    lane_var = loop.lane_var
    for v, index in zip(loop.vars, dist.indices):
        if v not in used:
            continue
        if v is lane_var:
            lanes_v, width = dist.lanes  # type: ignore[misc]
            start = lw.analyzer.simplify(substitute(index, {lanes_v: const(0)}))
            loop.base = fresh(v.name + "0", v.dtype)
            binds.append(Bind(loop.base, cast(start, v.dtype)))
            lw.bind_range(loop.base, start, divisor=width)
            lw.divisors[v] = 1
            loop.values[loop.base] = start
        else:
            binds.append(Bind(v, cast(index, v.dtype)))
            loop.values[v] = index
            lw.divisors[v] = known_divisor(index, lw.divisors, lw.analyzer)
    if dist.lanes is None:
        inner = lw.stmt(body)
    elif not loop.loose:
        inner = _emit(lw, loop, body)
    else:
        inside = _whole_vector_inside(lw, loop, body)
        inner = _emit(lw, loop, body)
        if inside is not None:
            loop.scalar = True
            inner = If(inside, inner, _emit(lw, loop, renamed(body)))
            loop.scalar = False
    exists = dist.exists
    if exists is not None and dist.lanes is not None:
        # Padding is in whole lanes or per point; per point stays inside the lane loop.
        exists = exists if dist.lanes[0] not in {x for x in walk(exists) if isinstance(x, Var)} else None
    if exists is not None:
        inner = If(exists, inner)
    left = {x for x in walk(inner) if isinstance(x, Var)}
    return seq(*[b for b in binds if b.var in left], inner)


def _whole_vector_inside(lw: Any, loop: Loop, body: Stmt) -> Expr | None:
    """Whether all lanes lie inside every row that the body walks along the lanes; None when that is proven."""
    out: Expr | None = None
    seen: set[Any] = set()
    for x, _ in accesses(body):
        if x.buffer.scope_name != "global" or stride_along(x.indices[-1], loop.lane_var, lw.analyzer) != 1:
            continue
        last = lw.analyzer.simplify(_at_lane(loop, x.indices[-1:], loop.dist.lanes[1] - 1)[0])  # type: ignore[index]
        cond = binary("lt", last, x.buffer.shape[-1])
        if cond not in seen and not lw.analyzer.can_prove(cond):
            seen.add(cond)
            out = conjunction(out, cond)
    return out


def renamed(body: Stmt) -> Stmt:
    """A copy of body that binds variables and buffers of its own."""
    mapping: dict[Any, Any] = {}
    for x in walk(body):
        if isinstance(x, (Bind, For)):
            mapping[x.var] = fresh(x.var.name, x.var.dtype)
        elif isinstance(x, Alloc):
            b = x.buffer
            mapping[b] = Buffer(b.name, b.shape, b.dtype, b.scope_name, b.strides_, b.offset, attrs=b.attrs, span=b.span)
    return substitute(body, mapping)


# ---- lanes: vectors around a scalar body -----------------------------------------------------------------------------


def _emit(lw: Any, loop: Loop, s: Stmt) -> Stmt:
    """s for all lanes of a point: lane-invariant control around vector statements."""
    var = loop.lane_var
    if var is None:
        return _leaf(lw, loop, s)
    if isinstance(s, If) and not _depends(s.cond, var) and not _has_fragment_load(s.cond):
        then = lw.under(s.cond, True, lambda: _emit(lw, loop, s.then))
        orelse = None if s.orelse is None else lw.under(s.cond, False, lambda: _emit(lw, loop, s.orelse))
        return replace(s, cond=lw.expr(s.cond), then=then, orelse=orelse)
    if isinstance(s, For) and s.kind in ("serial", "unroll") and not _depends(s.start, var) and \
            not _depends(s.extent, var):
        return lw.loop_stmt(s, lambda body: _emit(lw, loop, body))
    if isinstance(s, Seq) and all(_splits(x) for x in s.stmts):
        return seq(*[_emit(lw, loop, x) for x in s.stmts])
    return _leaf(lw, loop, s)


def _splits(s: Stmt) -> bool:
    """Whether a statement may be run for all lanes before the next one: no private state crosses statements."""
    return not any(isinstance(x, (Bind, Alloc, Evaluate, While, Break)) or
                   (isinstance(x, Store) and x.buffer.scope_name in ("local", "local.var")) for x in walk(s))


def _depends(e: Node, var: Var) -> bool:
    return any(x is var for x in walk(e))


def _has_fragment_load(e: Node) -> bool:
    return any(isinstance(x, Load) and x.buffer.scope_name == "local.fragment" for x in walk(e))


def _leaf(lw: Any, loop: Loop, s: Stmt) -> Stmt:
    """A scalar body run per lane, with its contiguous accesses as vectors before and after, or as one vector copy."""
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
    for site, w in loads:
        tmp = lw.new_local(f"{site.buffer.name}_v", width, site.buffer.dtype)
        for at in range(0, width, w):
            value = _vector_load(lw, loop, site, at, w)
            before.append(Store(tmp, (_ramp(const(at), w),), value))
        loop.vloads[site] = tmp
    for site, w in stores:
        tmp = lw.new_local(f"{site.buffer.name}_v", width, site.buffer.dtype)
        for at in range(0, width, w):
            after.append(_vector_store(lw, loop, site, at, w, load(tmp, (_ramp(const(at), w),))))
        loop.vstores[id(site)] = tmp
    try:
        scalar = lw.stmt(s)
    finally:
        loop.vloads, loop.vstores = saved
    point = [Bind(var, loop.base + cast(lanes_v, var.dtype))] if _depends(scalar, var) else []
    exists = loop.dist.exists
    if exists is not None and _depends(exists, lanes_v):
        scalar = If(exists, scalar)
    # A loop may have several leaves: each binds lane variables of its own.
    own = {lanes_v: fresh(lanes_v.name), var: fresh(var.name, var.dtype)}
    scalar = substitute(seq(*point, scalar), own)
    return seq(*before, For(own[lanes_v], const(0), const(width), "unroll", scalar), *after)


def _ramp(base: Expr, lanes: int) -> Expr:
    return base if lanes == 1 else Ramp(base, Const(1, base.dtype), lanes, base.dtype.with_lanes(lanes))


def _at_lane(loop: Loop, indices: tuple[Expr, ...], at: int) -> tuple[Expr, ...]:
    """Indices of lane `at`: the lane variable replaced by base + at."""
    var, base = loop.lane_var, loop.base
    return tuple(substitute(i, {var: base + at}) for i in indices)


def _vector_load(lw: Any, loop: Loop, site: Load, at: int, w: int) -> Expr:
    indices = _at_lane(loop, site.indices, at)
    guard = lw.guard(site.buffer, indices, width=w, inside=loop.loose)
    buffer, physical = lw.physical(site.buffer, lw.exprs(indices))
    value: Expr = load(buffer, (*physical[:-1], _ramp(physical[-1], w)), span=site.span)
    if guard is None:
        return value
    safe = lw.safe_value(site.buffer)
    return Select(guard, value, safe if w == 1 else Broadcast(safe, w, value.dtype), value.dtype, True)


def _vector_store(lw: Any, loop: Loop, site: Store, at: int, w: int, value: Expr) -> Stmt:
    indices = _at_lane(loop, site.indices, at)
    guard = conjunction(loop.dist.first, lw.guard(site.buffer, indices, width=w, inside=loop.loose))
    buffer, physical = lw.physical(site.buffer, lw.exprs(indices))
    out: Stmt = Store(buffer, (*physical[:-1], _ramp(physical[-1], w)), value, span=site.span)
    return out if guard is None else If(guard, out)


def _vector_accesses(lw: Any, loop: Loop, s: Stmt) -> tuple[list[tuple[Load, int]], list[tuple[Store, int]]]:
    """Unconditional global and shared accesses of s that may be moved to vectors around the lane loop, with widths.

    A load moves up when nothing before it stores to its storage; a store moves down when nothing after it touches its
    storage and no other store of s does.
    """
    if loop.dist.exists is not None and _depends(loop.dist.exists, loop.dist.lanes[0]):  # type: ignore[index]
        return [], []
    order: list[tuple[Node, bool]] = []
    _in_order(s, False, order)
    private = {x.var for x in walk(s) if isinstance(x, (Bind, For))}
    first_store: dict[Var, int] = {}
    last_touch: dict[Var, int] = {}
    stores_of: dict[Var, int] = {}
    for k, (x, _) in enumerate(order):
        data = x.buffer.data  # type: ignore[attr-defined]
        last_touch[data] = k
        if not isinstance(x, Load):
            first_store.setdefault(data, k)
            stores_of[data] = stores_of.get(data, 0) + 1
    loads: dict[Load, int] = {}
    stores: list[tuple[Store, int]] = []
    late: set[Load] = set()
    for k, (x, conditional) in enumerate(order):
        if conditional or isinstance(x, AddressOf):
            continue
        if not _is_memory(x.buffer):  # type: ignore[attr-defined]
            continue
        if any(v in private for i in x.indices for v in walk(i)):  # type: ignore[attr-defined]
            continue
        data = x.buffer.data  # type: ignore[attr-defined]
        if isinstance(x, Load):
            if first_store.get(data, k) < k:
                late.add(x)
            elif x not in loads:
                w = _width(lw, loop, x)
                if w > 1:
                    loads[x] = w
        elif isinstance(x, Store) and stores_of[data] == 1 and last_touch[data] == k:
            w = _width(lw, loop, x)
            if w > 1:
                stores.append((x, w))
    return [(x, w) for x, w in loads.items() if x not in late], stores


def _is_memory(buffer: Buffer) -> bool:
    return buffer.scope_name in ("global", "shared", "shared.dyn")


def _width(lw: Any, loop: Loop, x: Any) -> int:
    if any(isinstance(n, Load) for i in x.indices for n in walk(i)):
        return 1
    return lw.widths.width(x.buffer, x.indices, loop.lane_var, loop.dist.lanes[1], lw.analyzer, lw.divisors,
                           loop.loose)


def _in_order(n: Any, conditional: bool, out: list[tuple[Node, bool]]) -> None:
    """Memory accesses below n in order of evaluation, with whether they may be skipped or repeated."""
    match n:
        case Store():
            for i in n.indices:
                _in_order(i, conditional, out)
            _in_order(n.value, conditional, out)
            out.append((n, conditional))
        case Load() | AddressOf():
            for i in n.indices:
                _in_order(i, conditional, out)
            out.append((n, conditional))
        case If():
            _in_order(n.cond, conditional, out)
            _in_order(n.then, True, out)
            if n.orelse is not None:
                _in_order(n.orelse, True, out)
        case Select():
            _in_order(n.cond, conditional, out)
            _in_order(n.a, True, out)
            _in_order(n.b, True, out)
        case For() | While():
            inner: list[tuple[Node, bool]] = []
            for f in ("start", "extent", "cond"):
                if hasattr(n, f):
                    _in_order(getattr(n, f), conditional, inner)
            _in_order(n.body, True, inner)
            out.extend(inner * 2)  # a second round: what follows the loop body is its own beginning
        case Node():
            short = getattr(n, "op", "") in ("and", "or")
            for f in type(n).__dataclass_fields__:
                if f not in ("span", "buffer", "attrs"):
                    _in_order(getattr(n, f), conditional or (short and f == "b"), out)
        case tuple():
            for x in n:
                _in_order(x, conditional, out)


def _vector_statement(lw: Any, loop: Loop, s: Stmt) -> Stmt | None:
    """A store of a load, or of a lane-invariant value, as vector statements; None when s is anything else."""
    if not isinstance(s, Store) or loop.dist.lanes is None:
        return None
    exists = loop.dist.exists
    if exists is not None and _depends(exists, loop.dist.lanes[0]):
        return None
    width = loop.dist.lanes[1]
    target = _vector_target(lw, loop, s)
    if target < 2:
        return None
    value = s.value
    if isinstance(value, Load) and _is_memory(value.buffer) and value.buffer.dtype == s.buffer.dtype:
        if value.buffer.data is s.buffer.data:
            return None
        w = min(target, _width(lw, loop, value))
        if w < 2:
            return None
        if loop.is_async:
            copied = _async_copy(lw, loop, s, value, w)
            if copied is not None:
                return copied
        return seq(*[_put(lw, loop, s, at, w, _vector_load(lw, loop, value, at, w)) for at in range(0, width, w)])
    if isinstance(value, Load) and value.buffer.scope_name == "local.fragment" and value.buffer.dtype == s.buffer.dtype:
        reg = _fragment_run(lw, loop, value.buffer, value.indices, False)
        if reg is None or s.buffer.data is value.buffer.data:
            return None
        w = min(target, power_of_two_in(reg[1], target))
        if w < 2:
            return None
        local = lw.local_of(value.buffer)
        return seq(*[_put(lw, loop, s, at, w, load(local, (_ramp(reg[0] + at, w),))) for at in range(0, width, w)])
    if not _depends(value, loop.lane_var) and not any(isinstance(x, (Load, Call)) for x in walk(value)):  # type: ignore[arg-type]
        wide = s.buffer.dtype.with_lanes(target)
        inner = lw.expr(value)
        return seq(*[_put(lw, loop, s, at, target, Broadcast(inner, target, wide)) for at in range(0, width, target)])
    return None


def _vector_target(lw: Any, loop: Loop, s: Store) -> int:
    """Vector width of the destination of a store (1: none)."""
    if _is_memory(s.buffer):
        return _width(lw, loop, s)
    if s.buffer.scope_name != "local.fragment" or s.buffer in loop.staged:
        return 1
    run = _fragment_run(lw, loop, s.buffer, s.indices, True)
    bits = s.buffer.dtype.bits
    if run is None or bits % 8:
        return 1
    return power_of_two_in(run[1], min(loop.dist.lanes[1], MAX_BYTES * 8 // bits))  # type: ignore[index]


def _fragment_run(lw: Any, loop: Loop, buffer: Buffer, indices: tuple[Expr, ...],
                  is_write: bool) -> tuple[Expr, int] | None:
    """(register of lane 0, its known divisor) when the lanes lie in consecutive registers; None otherwise."""
    if buffer in loop.staged or buffer.dtype.lanes > 1:
        return None
    lanes_v, _ = loop.dist.lanes  # type: ignore[misc]
    touch = loop.touch(lw, buffer, indices, is_write)
    if touch.register is None or stride_along(touch.register, lanes_v, lw.analyzer) != 1:
        return None
    start = lw.analyzer.simplify(substitute(touch.register, {lanes_v: const(0)}))
    return start, known_divisor(start, lw.divisors, lw.analyzer) or 1 << 10


def _put(lw: Any, loop: Loop, s: Store, at: int, w: int, value: Expr) -> Stmt:
    if s.buffer.scope_name == "local.fragment":
        run = _fragment_run(lw, loop, s.buffer, s.indices, True)
        return Store(lw.local_of(s.buffer), (_ramp(run[0] + at, w),), value, span=s.span)  # type: ignore[index]
    return _vector_store(lw, loop, s, at, w, value)


def _async_copy(lw: Any, loop: Loop, s: Store, value: Load, w: int) -> Stmt | None:
    """cp.async of each run, zero-filled where the source is out of range; None when the width has none."""
    if w * s.buffer.dtype.bytes not in (4, 8, 16) or value.buffer.scope_name != "global" or \
            not s.buffer.scope_name.startswith("shared") or lw.has_safe_value(value.buffer):
        return None
    width = loop.dist.lanes[1] if loop.dist.lanes else 1
    return seq(*[_one_async(lw, loop, s, value, at, w) for at in range(0, width, w)])


def _one_async(lw: Any, loop: Loop, s: Store, value: Load, at: int, w: int) -> Stmt:
    def place(x: Any) -> tuple[Buffer, tuple[Expr, ...], tuple[Expr, ...]]:
        indices = _at_lane(loop, x.indices, at) if loop.lane_var is not None else x.indices
        buffer, physical = lw.physical(x.buffer, lw.exprs(indices))
        return buffer, physical, indices

    dst, dst_at, _ = place(s)
    src, src_at, indices = place(value)
    guard = lw.guard(value.buffer, indices, width=w)
    args: tuple[Expr, ...] = (AddressOf(dst, dst_at), AddressOf(src, src_at))
    if guard is not None:
        args += (guard,)
    out: Stmt = Evaluate(call("cp_async", args, "void", span=s.span, bytes=w * s.buffer.dtype.bytes), span=s.span)
    return out if loop.dist.first is None else If(loop.dist.first, out)


def scalar_async(lw: Any, loop: Loop, s: Store) -> Stmt | None:
    """An element copied by cp.async (4- and 8-byte elements); None where it must be a load and a store."""
    value = s.value
    if not loop.is_async or not isinstance(value, Load) or value.buffer.dtype != s.buffer.dtype or \
            s.buffer.dtype.bytes not in (4, 8) or value.buffer.scope_name != "global" or \
            not s.buffer.scope_name.startswith("shared") or lw.has_safe_value(value.buffer):
        return None
    dst, dst_at = lw.physical(s.buffer, lw.exprs(s.indices))
    src, src_at = lw.physical(value.buffer, lw.exprs(value.indices))
    guard = lw.guard(value.buffer, value.indices)
    args: tuple[Expr, ...] = (AddressOf(dst, dst_at), AddressOf(src, src_at))
    out: Stmt = Evaluate(call("cp_async", args if guard is None else (*args, guard), "void", span=s.span,
                              bytes=s.buffer.dtype.bytes), span=s.span)
    return out if loop.dist.first is None else If(loop.dist.first, out)


def private_loop(lw: Any, vars: tuple[Var, ...], extents: tuple[int, ...], body: Stmt, span: Any = None) -> Stmt:
    """Every point run by every thread for itself (copies of private arrays, T.vectorized), in vectors where they fit."""
    body = inline_index_binds(body)
    limit = power_of_two_in(extents[-1], 64)
    w = 1
    for x, _ in accesses(body):
        if _is_memory(x.buffer) and x.buffer.dtype.bits % 8 == 0 and x.indices:
            w = max(w, lw.widths.width(x.buffer, x.indices, vars[-1], limit, lw.analyzer_for(vars, extents), lw.divisors))
    return run_loop(lw, vars, private(extents, lw.thread, lw.num_threads, w), body, span=span)


# ---- distribution ----------------------------------------------------------------------------------------------------


def choose_distribution(lw: Any, vars: tuple[Var, ...], extents: tuple[Any, ...], body: Stmt, loop_layout: Any,
                        width: int | None, is_async: bool) -> tuple[Distribution, bool]:
    """(share of the loop, loose): loop_layout if there is one, else the share of a fragment the body writes or reads,
    else a flat share.  loose: its lanes pass the ends of rows (Loop.loose)."""
    static = all(isinstance(n, int) for n in extents)
    if not static:
        lane_dim, w = wanted_width(lw, vars, extents, body, is_async)
        return flat(extents, lw.thread, lw.num_threads, w, lane_dim), False
    shares = [loop_layout] if loop_layout is not None else []
    shares += fragment_shares(lw, vars, extents, body)
    lane_dim, w = wanted_width(lw, vars, extents, body, is_async)
    if width is not None:
        w = power_of_two_in(extents[lane_dim], width)
    for share in shares:
        dist = from_fragment(share, lw.thread, extents, w if lane_dim == len(vars) - 1 else 1)
        if share is shares[-1] or _accumulates_well(lw, vars, dist, body):
            return dist, False
    serial = accumulated_dims(vars, extents, body)
    if serial:
        return _serial_inside(lw, extents, serial), False
    loose = False
    if w == 1 and width is None and not is_async:
        dim, more = wanted_width(lw, vars, extents, body, is_async, loose=True)
        if more > 1:
            lane_dim, w, loose = dim, more, True
    while w > 1 and not is_async and extents[lane_dim] * _others(extents, lane_dim) < lw.num_threads * w:
        w //= 2
    return flat(extents, lw.thread, lw.num_threads, w, lane_dim), loose and w > 1


def _others(extents: tuple[int, ...], dim: int) -> int:
    out = 1
    for d, n in enumerate(extents):
        out *= 1 if d == dim else n
    return out


def _accumulates_well(lw: Any, vars: tuple[Var, ...], dist: Distribution, body: Stmt) -> bool:
    """Whether no fragment that the loop accumulates into (several points, one element) needs staging."""
    loop = Loop(vars, dist, Grid(dist, vars, lw.thread))
    for x, inner in accesses(body):
        if isinstance(x, Store) and x.buffer.scope_name == "local.fragment":
            loop.inner = inner
            touch = loop.touch(lw, x.buffer, x.indices, True)
            if touch.register is None and touch.repeated:
                return False
    return True


def fragment_shares(lw: Any, vars: tuple[Var, ...], extents: tuple[int, ...], body: Stmt) -> list[LoopShare]:
    """Shares that make an access with plain loop indices direct: written fragments first, most dimensions first."""
    found: list[tuple[tuple[int, int], LoopShare]] = []
    for x, _ in accesses(body):
        if x.buffer.scope_name != "local.fragment":
            continue
        frag = lw.layout_of(x.buffer)
        dim_of: dict[int, int] = {}
        for d, i in enumerate(x.indices):
            if isinstance(i, Var) and i in vars and frag.shape[d] == extents[vars.index(i)]:
                dim_of[vars.index(i)] = d
            elif not (frag.shape[d] == 1 and isinstance(i, Const)):
                break
        else:
            share = _share_of(frag, dim_of, extents)
            found.append(((0 if isinstance(x, Store) else 1, -len(dim_of)), share))
    found.sort(key=lambda f: f[0])
    return [s for _, s in found]


def _share_of(frag: Any, dim_of: dict[int, int], extents: tuple[int, ...]) -> LoopShare:
    modes: list[Any] = []
    for d, n in enumerate(extents):
        if d in dim_of:
            modes.append(tuple(frag.modes[dim_of[d]]))
        else:
            modes.append((Mode(n, "register", 1),) if n > 1 else ())
    # Registers are only walked here, so their strides just give the order of the loops: row-major.
    step = 1
    out: list[Any] = []
    for ms in reversed(modes):
        row: list[Any] = []
        for m in reversed(ms):
            if m.to == "register":
                row.append(Mode(m.size, "register", step))
                step *= m.size
            else:
                row.append(m)
        out.append(tuple(reversed(row)))
    return LoopShare(tuple(extents), tuple(reversed(out)), tuple(frag.copies), frag.threads)


def wanted_width(lw: Any, vars: tuple[Var, ...], extents: tuple[int, ...], body: Stmt,
                 is_async: bool, loose: bool = False) -> tuple[int, int]:
    """(dimension, lanes): along which most memory accesses are contiguous, and how many elements a thread should take
    there: the narrowest of their vectors, since elements beyond it would spread the lanes of a warp apart."""
    best = (len(vars) - 1, 1)
    score = 0
    found = [x for x, _ in accesses(body) if _is_memory(x.buffer) and x.buffer.dtype.bits % 8 == 0 and x.indices]
    for d in reversed(range(len(vars))):
        limit = power_of_two_in(extents[d], 64) if isinstance(extents[d], int) else 1
        own = narrowest = 0
        for x in found:
            n = lw.widths.width(x.buffer, x.indices, vars[d], limit, lw.analyzer_for(vars, extents), lw.divisors, loose)
            if n > 1 or (n == 1 and stride_along(x.indices[-1], vars[d], lw.analyzer) == 1):
                own += 4 if x.buffer.scope_name == "global" else 1
                if n > 1 or x.buffer.scope_name == "global":
                    narrowest = min(narrowest or n, n)
        if own > score:
            score = own
            best = (d, narrowest or 1)
    return best


def accumulated_dims(vars: tuple[Var, ...], extents: tuple[int, ...], body: Stmt) -> list[int]:
    """Dimensions that an element `X[…] = X[…] op …` of shared or global memory does not depend on: one thread must run
    them in order."""
    out: set[int] = set()
    for x, _ in accesses(body):
        if isinstance(x, Store) and _is_memory(x.buffer):
            same = any(isinstance(y, Load) and y.buffer is x.buffer and y.indices == x.indices for y in walk(x.value))
            if same:
                used = {v for i in x.indices for v in walk(i)}
                out |= {d for d, v in enumerate(vars) if v not in used and extents[d] > 1}
    return sorted(out)


def _serial_inside(lw: Any, extents: tuple[int, ...], serial: list[int]) -> Distribution:
    kept = [d for d in range(len(extents)) if d not in serial]
    base = flat(tuple(extents[d] for d in kept) or (1,), lw.thread, lw.num_threads)
    indices: list[Expr] = [const(0)] * len(extents)
    for d, i in zip(kept, base.indices):
        indices[d] = i
    own = [(d, fresh("r")) for d in serial]
    for d, v in own:
        indices[d] = v
    axes = base.axes + tuple((v, extents[d]) for d, v in own)
    return dataclasses.replace(base, extents=extents, axes=axes, indices=tuple(indices))


# ---- staging ---------------------------------------------------------------------------------------------------------


def _stage(lw: Any, loop: Loop, body: Stmt, span: Any) -> tuple[list[Stmt], list[Stmt]]:
    """Copies before and after the loop for fragments whose accesses are not all direct."""
    need: dict[Buffer, Touch] = {}
    stored: dict[Buffer, bool] = {}
    for x, inner in accesses(body):
        if x.buffer.scope_name != "local.fragment":
            continue
        loop.inner = inner
        writes = not isinstance(x, Load)
        touch = loop.touch(lw, x.buffer, x.indices, writes)
        if touch.register is None:
            if writes and touch.repeated and loop.grid is not None:
                raise errors.error("parallel-race", f"iterations of the parallel loop accumulate into one element of "
                                   f"`{x.buffer.name}` from several threads", span=x.span or span)
            need.setdefault(x.buffer, touch)
        if writes:
            stored[x.buffer] = True
    loop.inner = []
    before: list[Stmt] = []
    after: list[Stmt] = []
    for buffer in need:
        scratch = lw.new_shared(f"{buffer.name}_s", tuple(buffer.shape), buffer.dtype)
        loop.staged[buffer] = scratch
        if buffer not in stored or _reads_or_skips(buffer, body, loop):
            before.append(lw.parallel(buffer.shape, lambda v, b=buffer, t=scratch: Store(t, v, load(b, v)),
                                      lw.layout_of(buffer)))
        if buffer in stored:
            after.append(lw.parallel(buffer.shape, lambda v, b=buffer, t=scratch: Store(b, v, load(t, v)),
                                     lw.layout_of(buffer)))
    return before, after


def _refuse_races(loop: Loop, body: Stmt, span: Any) -> None:
    """Raise parallel-race where threads accumulate into one element of shared or global memory.

    What the block and serial loops around contribute to an index is the same for all points: any value will do.
    """
    grid = loop.grid

    def visit(s: Any, conds: tuple[Expr, ...]) -> None:
        if isinstance(s, Seq):
            for x in s.stmts:
                visit(x, conds)
        elif isinstance(s, If):
            visit(s.then, (*conds, s.cond))
            if s.orelse is not None:
                visit(s.orelse, (*conds, unary("not", s.cond)))
        elif isinstance(s, (For, While)):
            visit(s.body, conds)
        elif isinstance(s, Store) and _is_memory(s.buffer) and shared_elements(grid, s, conds):
            raise errors.error("parallel-race", f"iterations of the parallel loop accumulate into one element of "
                               f"`{s.buffer.name}` from several threads", span=s.span or span)

    visit(body, ())


def _reads_or_skips(buffer: Buffer, body: Stmt, loop: Loop) -> bool:
    """Whether some element may keep its old value: the buffer is read, written under a condition, or not all of it."""
    order: list[tuple[Node, bool]] = []
    _in_order(body, False, order)
    for x, conditional in order:
        if getattr(x, "buffer", None) is buffer and (conditional or not isinstance(x, Store)):
            return True
    points = 1
    for n in loop.dist.extents:
        points *= int(n) if isinstance(n, int) else 0
    return points < buffer.size


def accesses(body: Any) -> list[tuple[Any, list[tuple[Var, int]]]]:
    """Loads, stores and addresses below body, each with the static serial loops around it."""
    out: list[tuple[Any, list[tuple[Var, int]]]] = []

    def visit(n: Any, inner: list[tuple[Var, int]]) -> None:
        if isinstance(n, tuple):
            for x in n:
                visit(x, inner)
        elif isinstance(n, Node):
            if isinstance(n, (Buffer, Var, Const)):
                return
            if isinstance(n, (Load, Store, AddressOf)):
                out.append((n, inner))
            if isinstance(n, For):
                visit(n.start, inner)
                visit(n.extent, inner)
                if isinstance(n.extent, Const) and isinstance(n.start, Const) and n.start.value == 0:
                    inner = [*inner, (n.var, int(n.extent.value))]
                visit(n.body, inner)
                return
            for f in type(n).__dataclass_fields__:
                if f not in ("span", "buffer", "attrs"):
                    visit(getattr(n, f), inner)

    visit(body, [])
    return out


# ---- the body --------------------------------------------------------------------------------------------------------


def inline_index_binds(body: Stmt) -> Stmt:
    """Scalar integer bindings made of loop variables only are written where they are used: accesses then show how
    they depend on the loop."""
    names: dict[Any, Any] = {}

    def pure(e: Expr) -> bool:
        return e.dtype.is_int and e.dtype.lanes == 1 and \
            not any(isinstance(x, (Load, Call, AddressOf)) for x in walk(e))

    def visit(n: Any) -> Any:
        if isinstance(n, Seq):
            out: list[Stmt] = []
            for s in n.stmts:
                if isinstance(s, Bind) and pure(s.value):
                    names[s.var] = visit_expr(s.value)
                else:
                    out.append(visit(s))
            return seq(*out, span=n.span)
        if isinstance(n, Bind) and pure(n.value):
            return EMPTY
        if isinstance(n, Stmt):
            return rebuild(n, visit)
        if isinstance(n, tuple):
            return tuple(visit(x) for x in n)
        return visit_expr(n) if isinstance(n, Expr) else n

    def visit_expr(e: Expr) -> Expr:
        return substitute(e, names) if names else e

    return visit(body) if any(isinstance(x, Bind) for x in walk(body)) else body


def drop_continue(body: Stmt, span: Any = None) -> Stmt:
    """`continue` of the parallel loop itself, turned into conditions around what follows it."""
    if not any(isinstance(x, Continue) for x in walk(body)):
        return body
    return seq(*_without_continue(list(stmts_of(body))))


def _own_continue(s: Stmt) -> bool:
    """Whether s contains a `continue` of the loop around s (not of a loop inside it)."""
    if isinstance(s, Continue):
        return True
    if isinstance(s, Seq):
        return any(map(_own_continue, s.stmts))
    if isinstance(s, If):
        return _own_continue(s.then) or (s.orelse is not None and _own_continue(s.orelse))
    return False


def _without_continue(stmts: list[Stmt]) -> list[Stmt]:
    out: list[Stmt] = []
    for k, s in enumerate(stmts):
        if isinstance(s, Continue):
            return out
        if not _own_continue(s):
            out.append(s)
            continue
        rest = stmts[k + 1:]
        if not isinstance(s, If):
            return out + _without_continue([*stmts_of(s), *rest])
        then, orelse = list(stmts_of(s.then)), list(stmts_of(s.orelse)) if s.orelse is not None else []
        if _ends(then):
            then_new, else_new = _without_continue(then), _without_continue(orelse + rest)
        elif orelse and _ends(orelse):
            then_new, else_new = _without_continue(then + rest), _without_continue(orelse)
        else:
            # Neither branch always leaves: what follows is written in both.
            then_new, else_new = _without_continue(then + rest), _without_continue(orelse + rest)
        if then_new:
            out.append(If(s.cond, seq(*then_new), seq(*else_new) if else_new else None, span=s.span))
        elif else_new:
            out.append(If(unary("not", s.cond), seq(*else_new), span=s.span))
        return out
    return out


def _ends(stmts: list[Stmt]) -> bool:
    return bool(stmts) and isinstance(stmts[-1], Continue)


def refuse_carried(body: Stmt, span: Any) -> None:
    """Raise parallel-carried where a variable outlives an iteration (`break` is refused before)."""
    order: list[tuple[Node, bool]] = []
    _in_order(body, False, order)
    own = {x.buffer for x in walk(body) if isinstance(x, Alloc)}
    read: set[Buffer] = set()
    written: set[Buffer] = set()
    for x, _ in order:
        buffer = x.buffer  # type: ignore[attr-defined]
        if buffer.scope_name != "local.var" or buffer in own:
            continue
        if isinstance(x, Load):
            if buffer not in written:
                read.add(buffer)
        else:
            written.add(buffer)
            if buffer in read:
                raise errors.error("parallel-carried", f"`{buffer.name}` carries a value from one iteration of "
                                   "T.Parallel to the next", span=getattr(x, "span", None) or span)


__all__ = ["Loop", "LoopShare", "accesses", "choose_distribution", "lower_loop", "private_loop", "run_loop", "scalar_async"]
