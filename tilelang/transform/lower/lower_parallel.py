"""Lowers one distributed loop: from `for i, j in T.Parallel(...)` to the loop of one thread.

    for i, j in T.Parallel(64, 32):            for r in unroll(4):
        C[by*64 + i, bx*32 + j] = S[i, j]   →      i = r*16 + tx//8;  j0 = tx%8*4
                                                   if by*64 + i < M and bx*32 + j0 < N:
                                                       C[by*64 + i, ramp(bx*32 + j0, 4)] = S[ramp(…, 4)]

Keeps: every point is executed by the threads that own it.  Exactly one of them makes the stores to global and shared
memory and the other effects.  A fragment element is read and written only by threads that own it, or the access is staged
through shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial, reduce
from itertools import combinations
from typing import Any

import numpy as np

from tilelang import errors
from tilelang.arith import Analyzer, Linear
from tilelang.arith.linear import emit
from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Buffer, BufferFacts, Call, Cast, Const, Evaluate, Expr, For, If, Load,
                         LoopPlan, Seq, Stmt, Store, Var, While, binary, cast, const, contains, free_vars, fresh, is_const,
                         load, logical, replace, rewrite, rewrite_stmts, seq, stmts_of, substitute, walk, ways, EMPTY, FRAGMENT,
                         GLOBAL, LOCAL, SHARED)
from tilelang.ir.numbers import may_wrap
from tilelang.ops.distribute import Distribution, bind_ranges, conjunction, index_values, private

from ..analysis.accesses import as_iterations
from ..analysis.distributed_loop import Grid, Loop, Touch, accesses, in_order, is_memory, serial_axis, shared_elements
from ..analysis.effects import effects, expr_effects
from ..analysis.statements import drop_continue, inline_index_binds, renamed, select_stores
from ..layout.loop_layouts import choose_distribution, serial_inside
from .vector_lanes import at_lane, emit_lanes
from ..analysis.vectorize import LaneForms, MAX_BYTES, power_of_two_in, stride_along

UNROLL_LIMIT = 16  # vectors that an unrolled loop may load at once: with more it only costs code size, and registers
STEPS_UNROLLED = 64  # longer loops whose variable selects no register are partly unrolled: otherwise ptxas takes minutes
PARTLY_UNROLLED = 8
MANY = 8  # elements of a thread for which a loop is written once more, without guards

errors.register("fragment-access", ValueError, "a fragment element that the executing thread does not own",
                "index it with the variables of a T.Parallel loop, or copy it to shared memory first",
                expected="elements that the executing thread owns")

class SharedUpdate(Exception):
    """Several threads would update one element under a work partition."""


def lower_loop(lw: Any, vars: tuple[Var, ...], extents: tuple[Any, ...], body: Stmt, *, loop_layout: Any = None,
               is_async: bool = False, width: int | None = None, span: Any = None) -> Stmt:
    """The statements of one thread for `for vars in T.Parallel(extents): body`."""
    if any(isinstance(n, int) and n == 0 for n in extents):
        return EMPTY
    body = drop_continue(body)
    body = inline_index_binds(body, vars)
    body = select_stores(body) if is_async else body
    allocated, laid_out = len(lw.buffers.allocs), set(lw.buffers.layouts)
    try:
        return _shared_out(lw, vars, extents, body, loop_layout, is_async, width, span)
    except SharedUpdate as e:
        shared = e
    for serial in serial_choices(extents):
        del lw.buffers.allocs[allocated:]
        for buffer in set(lw.buffers.layouts) - laid_out:
            del lw.buffers.layouts[buffer]
        try:
            return run_loop(lw, vars, serial_inside(lw, extents, serial), body, is_async=is_async, span=span)
        except SharedUpdate as e:
            shared = e
    raise errors.InternalError(f"iterations of a parallel loop update one element of `{shared}` from several threads")


def serial_choices(extents: tuple[Any, ...]) -> list[list[int]]:
    """The sets of dimensions that each thread may run in order, so that threads update elements of their own.

    Sets with few points come first; with the last, one thread runs all.  None where an extent is known at run time only.
    """
    dims = [d for d, n in enumerate(extents) if n != 1] if all(isinstance(n, int) for n in extents) else []
    sets = [list(ds) for k in range(len(dims) + 1) for ds in combinations(dims, k)] if dims else []
    return sorted(sets, key=lambda ds: math.prod(extents[d] for d in ds))


def _shared_out(lw: Any, vars: tuple[Var, ...], extents: tuple[Any, ...], body: Stmt, loop_layout: Any, is_async: bool,
                width: int | None, span: Any) -> Stmt:
    """The loop under the work partition that suits its accesses.

    Raises SharedUpdate where several threads accumulate into one element.
    """
    dist, loose = choose_distribution(lw, vars, extents, body, loop_layout, width, is_async)
    if dist.first is not None and _rereads_staged(lw, vars, dist, body):
        dist, loose = choose_distribution(lw, vars, extents, body, loop_layout, width, is_async, once=True)
    if dist.is_static and vars and any(x.register is None for _, x in _fragment_touches(lw, vars, dist, body)):
        over = OverFragment(Offsets(lw, vars, extents, body)).loop()
        if over is not None:
            return _shared_out(lw, *over, None, is_async, None, span)
    return run_loop(lw, vars, dist, body, is_async=is_async, loose=loose, span=span)


def _rereads_staged(lw: Any, vars: tuple[Var, ...], dist: Distribution, body: Stmt) -> bool:
    """Whether the loop reads and writes a fragment that this distribution stages through shared memory.

    Threads that run one iteration together would not see what the one of them that stores has stored.
    """
    found = list(_fragment_touches(lw, vars, dist, body))
    both = {x.buffer for x, _ in found if isinstance(x, Load)} & {x.buffer for x, _ in found if not isinstance(x, Load)}
    return any(x.buffer in both and touch.register is None for x, touch in found)


def _fragment_touches(lw: Any, vars: tuple[Var, ...], dist: Distribution, body: Stmt) -> Iterator[tuple[Any, Touch]]:
    """The accesses to fragments, and how each resolves under a distribution."""
    loop = Loop(vars, dist, Grid(dist, vars, lw.thread) if dist.is_static and vars else None)
    for x, inner in accesses(body):
        if x.buffer.scope_name == FRAGMENT:
            loop.inner = inner
            yield x, loop.touch(lw.layout_of, x.buffer, x.indices, not isinstance(x, Load))


def run_loop(lw: Any, vars: tuple[Var, ...], dist: Distribution, body: Stmt, *, is_async: bool = False,
             loose: bool = False, divides: bool = True, span: Any = None) -> Stmt:
    """Lower body under a given distribution, staging fragment accesses that are not direct through shared memory.

    loose: see Loop.  divides: whether the distribution divides the points among threads (in a private loop each thread runs
    all of them, at elements of its own).
    """
    body = _loops_of_iterations(body) if divides else body
    saved = lw.known.analyzer, lw.access.loop
    lw.known.analyzer = bind_ranges(dist, lw.known.analyzer)
    for v, n in zip(vars, dist.extents):
        hi = n if isinstance(n, int) else lw.known.analyzer.interval(n)[1]
        lw.known.analyzer = lw.known.analyzer.bind(v, 0, None if hi is None else hi - 1)
    if dist.exists is not None and not isinstance(dist.exists, Const):
        # The bounds of the loop variables already imply the condition; the condition itself may decide a guard.
        lw.known.analyzer = lw.known.analyzer.assuming(dist.exists)
    grid = Grid(dist, vars, lw.thread) if dist.is_static and vars else None
    loop = Loop(vars, dist, grid, is_async, loose=loose)
    try:
        before, after = _stage(lw, loop, body, span, outside=saved[0])
        if grid is not None and divides:
            _reject_races(loop, body, span)
        lw.access.loop = loop
        inside = None if is_async or dist.lanes is not None and not loose else _tile_inside(lw, loop, body)
        inner = _emit_points(lw, loop, body)
        if inside is not None:
            guarded, lw.access.guarded = lw.access.guarded, False
            whole = _emit_points(lw, loop, renamed(body))
            lw.access.guarded = guarded
    finally:
        lw.known.analyzer, lw.access.loop = saved
    registers = any(x.scope_name.startswith("local") for x in walk(body, Buffer))
    if is_async and (moved := _loaded_in_front(lw, inner, dist, span)) is not None:
        inner, registers = moved, True
    inner = _wrap_axes(dist, inner, registers, span)
    if inside is not None:
        inner = If(inside, _wrap_axes(dist, whole, registers, span), renamed(inner))
    inner = as_iterations(body, inner, bool(dist.axes or dist.lanes), span)
    return seq(*before, inner, *after)


def _loaded_in_front(lw: Any, inner: Stmt, dist: Distribution, span: Any) -> Stmt | None:
    """One step of asynchronous copies, with what their addresses read in shared memory loaded in front of the loop around them,
    if it is the same in all iterations.  The compiler moves no load over a copy: each copy would wait for its own."""
    (around, moved), (*binds, copy) = lw.ahead, stmts_of(inner)
    if around is None or len(dist.axes) != 1 or not isinstance(copy, Evaluate) or copy.call.op != "cp_async":
        return None
    (v, n), written = dist.axes[0], {e.storage for e in effects(around.body) if e.writes}
    held = {x: Buffer(f"{x.buffer.name}_v", (n,), x.dtype, LOCAL, facts=BufferFacts(align=16)) for x, skipped in in_order(
        copy.call.args[2] if len(copy.call.args) > 2 else copy)  # what the copy's condition guards may be out of range
            if not skipped and isinstance(x, Load) and x.buffer.scope_name in SHARED and written.isdisjoint(
                e.storage for e in expr_effects(x))}
    loads = renamed(_wrap_axes(dist, seq(*binds, *(Store(b, (v,), x) for x, b in held.items())), True, span))
    if not held or not isinstance(n, int) or n > UNROLL_LIMIT or free_vars(loads) - {lw.thread} or any(
            e.storage in written for s in binds for e in effects(s)):
        return None
    moved += [*map(Alloc, held.values()), loads]
    return rewrite(inner, lambda x: load(held[x], (v,)) if x in held else None, Load)  # type: ignore[no-any-return]


def _wrap_axes(dist: Distribution, inner: Stmt, registers: bool, span: Any) -> Stmt:
    loaded = sum(x.dtype.bits * x.dtype.lanes for x in walk(inner, Load) if is_memory(x.buffer))
    count = max(1, loaded // (8 * MAX_BYTES))
    for v, n in reversed(dist.axes):
        unroll = isinstance(n, int) and (registers or count * n <= UNROLL_LIMIT)
        count *= n if isinstance(n, int) else 1 << 30
        part = unroll and count > STEPS_UNROLLED and not _picks_register(inner, v)
        plan = LoopPlan(independent=True, factor=PARTLY_UNROLLED if part else None)
        steps = n if isinstance(n, Expr) else const(n, v.dtype)
        inner = For(v, const(0, v.dtype), steps, "unroll" if unroll else "serial", inner, plan=plan, span=span)
    return inner


def _loops_of_iterations(body: Stmt) -> Stmt:
    """A parallel loop's body whose loops need no barrier: what one of its iterations writes, no other one accesses."""
    def marked(s: Stmt) -> Stmt | None:
        return replace(s, plan=s.plan.having(independent=True)) if isinstance(s, For) and not s.plan.independent else None

    return rewrite_stmts(body, marked) if contains(body, For) else body


def _picks_register(body: Stmt, v: Var) -> bool:
    """Whether an index of a per-thread array depends on v.

    Such a loop must be fully unrolled, or the array moves from registers to local memory.
    """
    depend = {v}
    for x in walk(body):
        if isinstance(x, (Bind, For)):
            parts = (x.value,) if isinstance(x, Bind) else (x.start, x.extent)
            if any(y in depend for p in parts for y in walk(p, Var)):
                depend.add(x.var)
        elif isinstance(x, (Load, Store, AddressOf)) and x.buffer.scope_name.startswith("local") and \
                any(y in depend for i in x.indices for y in walk(i, Var)):
            return True
    return False


def _emit_points(lw: Any, loop: Loop, body: Stmt) -> Stmt:
    """Coordinate bindings, existence predicate and the body (in lanes) for one step of the axes loops."""
    dist = loop.dist
    binds: list[Bind] = []
    used = {x for x in walk(body, Var)}
    lane_var = loop.lane_var
    for v, index in zip(loop.vars, dist.indices):
        if v not in used:
            continue
        if v is lane_var:
            lanes_v, width = dist.lanes  # type: ignore[misc]
            start = lw.known.analyzer.simplify(substitute(index, {lanes_v: const(0)}))
            loop.base = fresh(v.name + "0", v.dtype)
            binds.append(Bind(loop.base, cast(start, v.dtype)))
            lw.known.bind_value(loop.base, start, divisor=width)
            lw.known.divisors[v] = 1
            loop.values[loop.base] = start
        else:
            binds.append(Bind(v, cast(index, v.dtype)))
            loop.values[v] = index
            lw.known.divisors[v] = lw.known.divisor(index)
    if dist.lanes is None:
        inner = lw.stmt(body)
    elif not loop.loose:
        inner = emit_lanes(lw, loop, body)
    else:
        inside = _whole_vector_inside(lw, loop, body)
        inner = emit_lanes(lw, loop, body)
        if inside is not None:
            loop.scalar = True
            inner = If(inside, inner, emit_lanes(lw, loop, renamed(body)))
            loop.scalar = False
    exists = dist.exists
    if exists is not None and dist.lanes is not None:
        # A padding predicate holds for whole lanes or differs per point; one that differs stays inside the lane loop.
        exists = exists if dist.lanes[0] not in {x for x in walk(exists, Var)} else None
    if exists is not None:
        inner = If(exists, inner)
    left = {x for x in walk(inner, Var)}
    return seq(*[b for b in binds if b.var in left], inner)


def _tile_inside(lw: Any, loop: Loop, body: Stmt) -> Expr | None:
    """The condition, one for all threads, that a loop which loads a tile from global memory needs no guard.

    None: it needs none anyway, or is another or a short loop.  Elements that are loaded one by one would otherwise each be
    guarded, where rows start at any address.
    """
    value = body.value if isinstance(body, Store) and body.buffer.scope_name != GLOBAL else None
    while isinstance(value, Cast):
        value = value.value
    each = [n for _, n in (*loop.dist.axes, *filter(None, [loop.dist.lanes]))]
    if not isinstance(value, Load) or not loop.dist.is_static or math.prod(map(int, each)) < MANY or \
            value.buffer.scope_name != GLOBAL or lw.access.guard(value.buffer, value.indices) is None:
        return None
    ends = {v: const(n - 1, v.dtype) for v, n in zip(loop.vars, loop.dist.extents)}
    starts = {v: const(0, v.dtype) for v in loop.vars}
    out: Expr | None = None
    for i, n in zip(value.indices, value.buffer.shape):
        steps = [stride_along(i, v, lw.known.analyzer) for v in loop.vars]
        if contains(i, Load, Call) or any(c is None or c < 0 for c in steps) or lw.thread in free_vars(i):
            return None
        for cond in (binary("ge", substitute(i, starts), const(0)), binary("lt", substitute(i, ends), n)):
            cond = lw.known.analyzer.simplify(cond)
            out = out if lw.known.analyzer.can_prove(cond) else conjunction(out, cond)
    return out


def _whole_vector_inside(lw: Any, loop: Loop, body: Stmt) -> Expr | None:
    """Condition that all lanes lie inside every row that the body walks along the lanes; None when that is proven."""
    out: Expr | None = None
    seen: set[Any] = set()
    assert loop.lane_var is not None, "only a loop over lanes has vectors"
    width = loop.dist.lanes[1]  # type: ignore[index]
    forms = LaneForms(loop.lane_var, width, lw.known.analyzer, lw.known.divisors)
    bound = {b.var for b in walk(body, Bind)}
    for x, _ in accesses(body) if lw.access.guarded else ():
        form = forms.of(x.indices[-1]) if x.buffer.scope_name == GLOBAL and x.indices else None
        if form is None or form[0] != 1:
            continue
        for k in range(0, width, form[1]):  # the run of lanes of one vector
            first, last = (lw.known.analyzer.simplify(at_lane(loop, x.indices[-1:], n)[0]) for n in (k, k + form[1] - 1))
            below = [binary("ge", first, const(0))] if lw.known.divisor(first) % form[1] else []  # others lie below 0
            for cond in (*below, binary("lt", last, x.buffer.shape[-1])):
                if cond not in seen and not lw.known.analyzer.can_prove(cond):
                    seen.add(cond)
                    out = conjunction(out, cond)
        if out is not None and not bound.isdisjoint(free_vars(out)):
            return const(False, "bool")  # the condition stands in front of the body
    return out


def private_loop(lw: Any, vars: tuple[Var, ...], extents: tuple[int, ...], body: Stmt, span: Any = None) -> Stmt:
    """A loop in which every thread runs all points (copies of private arrays, T.vectorized), vectorised if possible."""
    body = inline_index_binds(body, vars)
    limit = power_of_two_in(extents[-1], 64)
    w = 1
    for x, _ in accesses(body):
        if is_memory(x.buffer) and x.buffer.dtype.bits % 8 == 0 and x.indices:
            w = max(w, lw.buffers.widths.width(x.buffer, x.indices, vars[-1], limit, lw.known.over(vars, extents),
                                               lw.known.divisors))
    return run_loop(lw, vars, private(extents, lw.thread, lw.num_threads, w), body, divides=False, span=span)


def _stage(lw: Any, loop: Loop, body: Stmt, span: Any, outside: Any) -> tuple[list[Stmt], list[Stmt]]:
    """Copies before and after the loop for fragments whose accesses are not all direct.

    outside: the analyzer of the code around the loop.  The copies run there, in all threads, so facts that hold only in the
    threads with a point of the loop must not be used for them.
    """
    need: dict[Buffer, Touch] = {}
    stored: dict[Buffer, bool] = {}
    for x, inner in accesses(body):
        if x.buffer.scope_name != FRAGMENT:
            continue
        loop.inner = inner
        writes = not isinstance(x, Load)
        touch = loop.touch(lw.layout_of, x.buffer, x.indices, writes)
        if touch.register is None:
            if writes and touch.repeated and loop.grid is not None and not isinstance(x, Store):
                raise SharedUpdate(x.buffer.name)
            need.setdefault(x.buffer, touch)
        if writes:
            stored[x.buffer] = True
    loop.inner = []
    before: list[Stmt] = []
    after: list[Stmt] = []
    offsets = Offsets(lw, loop.vars, loop.dist.extents, body) if need else None
    windows = {b: offsets.window(b) for b in need} if offsets else {}
    inside, lw.known.analyzer = lw.known.analyzer, outside
    for buffer, window in windows.items():
        scratch = lw.new_shared(f"{buffer.name}_s", tuple(n for _, n in window), buffer.dtype)
        loop.staged[buffer] = scratch, tuple(low for low, _ in window)

        def exchanged(v: tuple[Var, ...], into: bool, b: Buffer = buffer, t: Buffer = scratch, w: Any = window) -> Stmt:
            at = tuple(x - low for x, (low, _) in zip(v, w))
            conds = [binary(op, i, const(n)) for i, (_, m), d in zip(at, w, b.shape) if m < d
                     for op, n in (("ge", 0), ("lt", m))]
            s = Store(t, at, load(b, v)) if into else Store(b, v, load(t, at))
            return If(reduce(partial(logical, "and"), conds), s) if conds else s

        under = _stored_under(buffer, body, loop) if buffer in stored and scratch.shape == buffer.shape else None

        def back(v: tuple[Var, ...], f: Any = exchanged, found: Any = under) -> Stmt:
            return If(substitute(found[1], dict(zip(found[0], v))), f(v, False)) if found else f(v, False)

        if under is None and (buffer not in stored or scratch.shape != buffer.shape or _reads_or_skips(buffer, body, loop)):
            before.append(lw.parallel(buffer.shape, lambda v, f=exchanged: f(v, True), lw.layout_of(buffer)))
        if buffer in stored:
            after.append(lw.parallel(buffer.shape, back, lw.layout_of(buffer)))
    lw.known.analyzer = inside
    return before, after


def _reject_races(loop: Loop, body: Stmt, span: Any) -> None:
    """Raise SharedUpdate where threads accumulate into one element of memory, or of a fragment staged through memory.

    Enclosing blocks and serial loops contribute the same to an index at all points, so any value will do for them.
    """
    grid: Any = loop.grid

    def visit(s: Any, conds: tuple[Expr, ...], inner: tuple[tuple[Var, int], ...]) -> None:
        if isinstance(s, Seq):
            for x in s.stmts:
                visit(x, conds, inner)
        elif isinstance(s, If):
            for cond, x in ways(s):
                visit(x, (*conds, cond), inner)
        elif isinstance(s, (For, While)):
            visit(s.body, conds, (*inner, *serial_axis(s)))
        elif isinstance(s, Store) and (is_memory(s.buffer) or s.buffer in loop.staged):
            axes = [(v, n) for v, n in inner if any(v in free_vars(e) for e in (*s.indices, *conds))]
            if shared_elements(grid.with_inner(axes), s, conds):
                raise SharedUpdate(s.buffer.name)

    visit(body, (), ())


def _reads_or_skips(buffer: Buffer, body: Stmt, loop: Loop) -> bool:
    """Whether some element may keep its old value: the buffer is read, written under a condition, or not written in full."""
    for x, conditional in in_order(body):
        if getattr(x, "buffer", None) is buffer and (conditional or not isinstance(x, Store)):
            return True
    return math.prod(n if isinstance(n, int) else 0 for n in loop.dist.extents) < buffer.size


def _stored_under(buffer: Buffer, body: Stmt, loop: Loop) -> tuple[tuple[Any, ...], Expr] | None:
    """(a loop variable for each dimension, condition): where it holds, and only there, a loop stores the element, before it
    reads it.  None for other loops, and for those without conditions."""
    found: list[tuple[tuple[Any, ...], tuple[Expr, ...]]] = []

    def visit(s: Stmt, conds: tuple[Expr, ...]) -> bool:
        if isinstance(s, Seq):
            return all(visit(x, conds) for x in s.stmts)
        reads = [x for x in walk(s.cond if isinstance(s, If) else s, Load) if x.buffer is buffer]
        if reads and (not found or conds[:len(found[0][1])] != found[0][1] or any(x.indices != found[0][0] for x in reads)):
            return False
        if isinstance(s, If) and s.orelse is None:
            return visit(s.then, (*conds, s.cond))
        if isinstance(s, Store) and s.buffer is buffer:
            found.append((s.indices, conds))
            return len(found) == 1
        return not any(x.buffer is buffer for x in walk(s, Store))

    if not visit(body, ()) or not found:
        return None
    indices, cond = found[0][0], conjunction(*found[0][1])
    sizes = dict(zip(loop.vars, loop.dist.extents))
    whole = len({*indices}) == len(indices) and tuple(sizes.get(i) for i in indices) == buffer.shape
    inside = ({*loop.vars} | {x.var for x in walk(body, Bind, For)}) - {*indices}
    return None if cond is None or not whole or contains(cond, Load) or free_vars(cond) & inside else (indices, cond)


# ---- loops that access fragments at an offset -------------------------------------------------------------------------------


_DIVIDES = ("floordiv", "floormod", "truncdiv", "truncmod")


class Offsets:
    """How the indices of a parallel loop's accesses differ between its iterations.

    own: the variables of the loop.  changed: the memory that it writes.  read: loads that it makes whatever it finds.
    """

    def __init__(self, lw: Any, vars: tuple[Var, ...], extents: tuple[Any, ...], body: Stmt) -> None:
        self.lw, self.vars, self.extents, self.body = lw, vars, extents, body
        self.own = {*vars, *(x.var for x in walk(body, Bind, For))}
        self.changed = {e.storage for e in effects(body) if e.writes}
        points = np.indices(extents, sparse=True) if all(isinstance(n, int) for n in extents) else ()
        self.read = set(_read_anyway(body, dict(zip(vars, points)), np.asarray(True))) if points else set()

    def of(self, index: Expr, analyzer: Analyzer) -> tuple[Linear, Expr | None]:
        """(the terms of an index that differ between iterations, the rest).

        None for a rest that may change within the loop or differ between threads, or that only some iterations may compute, and
        where the sum may wrap.
        """
        form = analyzer.linear(index)
        moving = Linear({t: c for t, c in form.terms.items() if free_vars(t) & self.own}, 0)
        rest = emit(form.plus(moving, -1), index.dtype)
        whole = not may_wrap(index.dtype) or analyzer.exact(form, index.dtype)
        return moving, rest if whole and self._fixed(rest) and self.lw.same_for_all(rest) else None

    def _fixed(self, e: Expr) -> bool:
        for x in walk(e, Load, Call, Binary):
            if isinstance(x, Call) or isinstance(x, Binary) and x.op in _DIVIDES and not isinstance(x.b, Const):
                return False
            if isinstance(x, Load) and (x.buffer.data in self.changed or x.buffer.scope_name == FRAGMENT or not (
                    x in self.read or x.buffer.scope_name == GLOBAL and self.lw.access.guarded)):
                return False
        return True

    def window(self, buffer: Buffer) -> list[tuple[Expr, int]]:
        """(first, number) of the elements that the loop accesses in each dimension of a fragment; all where unknown."""
        known = self.lw.known
        found = [(x.indices, known.over(*map(tuple, zip(*inner))) if inner else known.analyzer)
                 for x, inner in accesses(self.body) if x.buffer is buffer]
        out: list[tuple[Expr, int]] = [(const(0), int(n)) for n in buffer.shape]
        for d, (_, size) in enumerate(out):
            parts = [(*self.of(at[d], a), a) for at, a in found]
            rest, ends = parts[0][1], [n for moving, _, a in parts for n in a.bounds_of(moving)]
            if rest is not None and None not in ends and all(r is not None and r.same(rest) for _, r, _ in parts):
                n = max(ends) - min(ends) + 1
                out[d] = (rest + min(ends), n) if n < size else out[d]
        return out


def _read_anyway(s: Stmt, points: dict[Var, np.ndarray], reached: np.ndarray) -> Iterator[Load]:
    """The loads that some iteration makes, whatever memory and the variables from outside the loop hold."""
    if isinstance(s, Seq):
        for x in s.stmts:
            yield from _read_anyway(x, points, reached)
    elif isinstance(s, If) and (holds := index_values(s.cond, points)) is not None:
        if np.any(reached & holds):
            yield from _read_anyway(s.then, points, reached & holds)
    else:
        yield from (x for x, conditional in in_order(s) if not conditional and isinstance(x, Load))


class OverFragment:
    """A loop that accesses fragments at an offset as one over all their elements, so that the owner of each runs it.

    for i in T.Parallel(16): h[i] = F[i + c]     ->     for k in T.Parallel(64): if k >= c and k < c + 16: h[k - c] = F[k]

    found: (variable of the loop or None, offset, variable of the new loop) of the fragments' dimensions.
    """

    def __init__(self, offsets: Offsets) -> None:
        self.offsets, self.body, self.sizes = offsets, offsets.body, dict(zip(offsets.vars, offsets.extents))
        self.analyzer = offsets.lw.known.over(offsets.vars, offsets.extents)
        self.found: list[tuple[Var | None, Expr, Var]] = []
        self.at: dict[tuple[Buffer, tuple[Expr, ...]], tuple[Expr, ...]] = {}

    def loop(self) -> tuple[tuple[Var, ...], tuple[Any, ...], Stmt] | None:
        """(variables, extents, body); None for other loops, and where the offsets of two accesses differ."""
        for x in [x for x in walk(self.body, Load, Store, AddressOf) if x.buffer.scope_name == FRAGMENT]:
            at = None if isinstance(x, AddressOf) else self._indices(x)
            if at is None:
                return None
            self.at[x.buffer, x.indices] = at
        vars, moved, by = self.offsets.vars, [f for f in self.found if f[0] is not f[2]], {v: k for v, _, k in self.found}
        if not moved or sum(f[0] is None for f in moved) > 1 or any(self.sizes[v] != 1 and v not in by for v in vars) or \
                not self._has_all(moved):
            return None
        body = rewrite(self.body, lambda x: replace(x, indices=got) if (got := self.at.get((x.buffer, x.indices))) else None,
                       Load, Store)
        conds = [binary("eq", k, offset) for v, offset, k in moved if v is None]
        conds += [binary(op, k, at) for v, offset, k in moved if v is not None for op, at in (
            ("ge", offset), ("lt", offset + self.sizes[v]))]
        body = substitute(body, {v: k - offset for v, offset, k in moved if v is not None})
        loop = (*(k for v, _, k in self.found if v is None), *(by.get(v, v) for v in vars))
        return loop, tuple(self.sizes[v] for v in loop), If(reduce(partial(logical, "and"), conds), body, span=body.span)

    def _indices(self, x: Load | Store) -> tuple[Expr, ...] | None:
        """The indices of an access in the new loop."""
        new: list[Expr] = []
        for i, n in zip(x.indices, map(int, x.buffer.shape)):
            moving, offset = self.offsets.of(i, self.analyzer)
            v: Any = next(iter(moving.terms), None)
            if offset is None or v is not None and (v not in self.sizes or len(moving.terms) > 1 or moving.terms[v] != 1):
                return None
            same = next((f for f in self.found if f[0] is v and (
                v is not None or f[1].same(offset) and self.sizes[f[2]] == n)), None)
            if same is None and n > 1:
                plain = v is not None and is_const(offset, 0) and self.sizes[v] == n
                self.found.append(same := (v, offset, v if plain else fresh("k", i.dtype)))
                self.sizes[same[2]] = n
            if same and (not same[1].same(offset) or self.sizes[same[2]] != n or same[2] in new):
                return None
            new.append(same[2] if same else i)
        return tuple(new)

    def _has_all(self, moved: list[tuple[Var | None, Expr, Var]]) -> bool:
        """Whether the new loop has all iterations that do something: those outside of the fragments have no access to make.

        That holds for an access that is inside the fragment in all iterations, or that each iteration makes that does anything.
        """
        s: Stmt = self.body
        while isinstance(s, If) and s.orelse is None and not any(x.buffer.scope_name == FRAGMENT for x in walk(s.cond, Load)):
            s = s.then
        made: set[Any] = set()
        for x, conditional in in_order(s):
            if not conditional and isinstance(x, (Load, Store)):
                made.update(self.at.get((x.buffer, x.indices), ()))
        for v, offset, k in moved:
            low, high = self.analyzer.interval(offset if v is None else v + offset)
            if k not in made and (low is None or low < 0 or high is None or high >= self.sizes[k]):
                return False
        return True
