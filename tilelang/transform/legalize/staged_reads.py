"""Copies tiles of global memory that a pipelined loop reads element by element, so that they are loaded ahead.

    for i, j in T.Parallel(128, 128):         ->     copy(X[m : m + 128, k * 128 : (k + 1) * 128], X_s)
        s[i, j] += X[m + i, k * 128 + j]             for i, j in T.Parallel(128, 128): s[i, j] += X_s[i, j]

A table that is read by a distance, X[h, j - i + n], is a run of its row in each iteration, which is copied alike (`diagonal`).

Threads that load such elements themselves wait for memory in each iteration, and lanes that hold an accumulator's rows load a
few bytes of each.  A copy is a stage of the loop's ring.  Scales of rows and steps that a loop after the first GEMM reads are
loaded in front of it:

    gemm(a, b, p)                             ->     for i in T.Parallel(128): S_row[i] = S[m + i, k]
    for i, j in T.Parallel(128, 128):                gemm(a, b, p)
        c[i, j] += p[i, j] * S[m + i, k]             for i, j in T.Parallel(128, 128): c[i, j] += p[i, j] * S_row[i]

Such scales of rows are read from tiles of several steps (scale prefetch): a load of one scale of each row touches as many cache
lines, and these loads compete with the MMAs for the unit that serves shared memory.  TMA moves at least 16 bytes of a row:

    for i in T.Parallel(128):                 ->     copy(S[m : m + 128, k // 4 * 4 : k // 4 * 4 + 4], S_steps)
        S_row[i] = S[m + i, k]                       for i in T.Parallel(128): S_row[i] = S_steps[i, k % 4]

Values that are the same for all rows are not changed: they take one access per warp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from tilelang.arith import Analyzer, divisible, launch_analyzer
from tilelang.ir import (Alloc, Bind, Buffer, Const, Expr, For, Func, Launch, Load, Parallel, Region, Stmt, Store, Var, convert,
                         free_vars, fresh, load, region_of, replace, rewrite, rewrite_stmts, seq, stmts_of, substitute, walk,
                         with_options, DYNAMIC, FRAGMENT, GLOBAL, SHARED, Binary, Call, If, binary, const, with_inner)
from tilelang.ops import Copy, Gemm
from tilelang.ops.bulk import row_boxes_unsupported
from tilelang.ops.gemm.wgmma import choose_wgmma
from tilelang.ops.tma import tma_unsupported
from tilelang.target import is_pure
from tilelang.target.machine import REGISTERS, RESERVED_SHARED

from ..analysis.copied_tiles import CopiedTiles
from ..analysis.effects import effects, touches
from ..analysis.statements import bound_by, inline_index_binds
from ..analysis.pipeline_loops import inlined_binds, is_pipelined, ring_stages, tile_read
from ..analysis.vectorize import bound_divisors, stride_along
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_
from .hopper_features import hopper
from .given_boxes import unaligned_columns

LEAST_BYTES = 4096  # of a tile: what is smaller waits for the loads of few lanes
ATOM_ROWS, MOST_STEPS = 8, 16  # steps of a tile of scales: where rows are contiguous, the rows of one swizzle atom; at most


def may_have_scales(func: Func, cx: PassContext) -> bool:
    """Whether a program, as the user wrote it, may get tiles of scales."""
    return hopper(cx).warp_roles and bool(cx.option(PassConfigKey.TL_SCALE_PREFETCH)) and any(
        isinstance(s, Parallel) and any(x.buffer.scope_name == GLOBAL for x in walk(s.body, Load))
        for loop in walk(func.body, For) if loop.plan.num_stages for s in stmts_of(loop.body))


@pass_(needs=TILE, of=Launch, when=lambda cx: hopper(cx).warp_roles)
def staged_reads(launch: Launch, cx: PassContext) -> Launch:
    """Copy what parallel loops of a pipelined loop with GEMMs read from global memory, where that is a tile that TMA loads.

    A tile is left in global memory where the kernel writes its tensor, and where its stages would not fit, or would cost a
    resident block.  Keeps: every value; outside the tensor both forms read 0.
    """
    made: list[Buffer] = []

    def visit(s: Stmt) -> Stmt | None:
        if not isinstance(s, For) or not is_pipelined(s) or s.plan.counted or (ring_stages(s) or 0) < 2 or \
                not any(isinstance(x, Gemm) for x in stmts_of(s.body)):
            return None
        tiles = _Tiles(launch, s, cx)
        body = [y for x in stmts_of(s.body) for y in (tiles.read(x) if isinstance(x, Parallel) else [x])]
        if tiles.made and not _fits(launch, s, cx, tiles.made):
            tiles.made, body = [], list(stmts_of(s.body))
        body, shared = tiles.ahead(body, s.var), list(tiles.made)
        if cx.option(PassConfigKey.TL_SCALE_PREFETCH):
            scaled = tiles.of_steps(body, s)
            body, tiles.made = (scaled, tiles.made) if _fits(launch, s, cx, tiles.made) else (body, shared)
        made.extend(tiles.made)
        return replace(s, body=seq(*body, span=s.body.span))

    body = rewrite_stmts(launch.body, visit)
    return replace(launch, body=seq(*(Alloc(b, span=b.span) for b in made), body)) if made else launch


def _fits(launch: Launch, loop: For, cx: PassContext, made: list[Buffer]) -> bool:
    """Whether the stages of more tiles fit in shared memory, beside as many blocks on an SM."""
    tiles, stages, limits = CopiedTiles(launch, cx), ring_stages(loop) or 1, cx.target.limits
    ahead, used = {tiles.of(s) for s in stmts_of(loop.body)}, {e.storage for e in effects(launch.body)}
    allocs = [s.buffer for s in walk(launch.body, Alloc) if s.buffer.is_static and s.buffer.data in used]
    own = 2 * RESERVED_SHARED + sum(b.size * b.dtype.bytes * (stages if b in ahead else 1)  # and the barriers
                                    for b in allocs if b.scope_name in SHARED)
    registers = sum(b.bits // 32 for b in allocs if b.scope_name == FRAGMENT) + REGISTERS.plain_loop * launch.num_threads
    blocks = max(1, min(limits.shared_per_sm // own, limits.registers_per_sm // registers))
    more = sum(b.size * b.dtype.bytes for b in made if b.scope_name in SHARED)
    return limits.shared_per_sm // (own + stages * more) >= blocks


class _Tiles:
    """The tiles that one loop reads.  made: the new buffers."""

    def __init__(self, launch: Launch, loop: For, cx: PassContext) -> None:
        self.cx, self.analyzer, self.facts = cx, Analyzer(), bound_divisors(launch.body)
        self.written = {e.storage for e in effects(launch.body) if e.writes} | {b.data for b, _ in launch.plan.safe_values}
        self.inline, self.made = inlined_binds(loop), list[Buffer]()
        self.private = {*launch.thread_vars, *(v for x in walk(loop.body, Bind, For, Parallel) for v in bound_by(x))}

    def read(self, s: Parallel) -> list[Stmt]:
        """The copies of what a parallel loop reads, and the loop that reads the copies."""
        found: dict[Any, tuple[Buffer, Copy] | None] = {}
        sizes = {v: int(n.value) for v, n in zip(s.vars, s.extents) if isinstance(n, Const)}

        def read(x: Any) -> Expr | None:
            place = self.place(x, sizes)
            if place is None:
                return self.diagonal(x, sizes, found)
            if len({*place[0]} - {None}) != 2 or place[0][-1] is None:
                return None
            along, mins = place
            if (key := (x.buffer, *place)) not in found:
                found[key] = self.copied(x, [sizes.get(v, 1) for v in along], mins, "tile", LEAST_BYTES)
            got = found[key]
            return None if got is None else load(got[0], tuple(v for v in along if v in sizes), span=x.span)

        out, copies = rewrite(s, read, Load), [x for x in found.values() if x is not None]
        self.made += [b for b, _ in copies]
        return [*(c for _, c in copies), out]

    def diagonal(self, x: Load, sizes: dict[Var, int], found: dict[Any, tuple[Buffer, Copy] | None]) -> Expr | None:
        """An element of a run of the last dimension along which several loop variables step together, as a distance of two of
        them does, from a tile of that run; None for another load, and where the loop reads few elements of it twice."""
        if x.buffer.scope_name != GLOBAL or x.buffer.data in self.written:
            return None
        *outer, last = (substitute(i, self.inline) for i in x.indices)
        steps = {v: c for v in sizes if (c := stride_along(last, v, self.analyzer)) != 0}
        unit = math.lcm(128, x.dtype.bits) // x.dtype.bits  # elements at whose multiples a box may start
        low = substitute(last, {v: const(0 if c > 0 else sizes[v] - 1, v.dtype) for v, c in steps.items() if c in (1, -1)})
        skipped = next((n for n in range(unit) if divisible(low - n, unit, self.facts)), None)
        if len(steps) < 2 or {*steps.values()} - {1, -1} or skipped is None or any(
                touches(e) or free_vars(e) & (self.private | sizes.keys()) for e in outer) or touches(last):
            return None
        first, length = self.analyzer.simplify(low - skipped), sum(sizes[v] - 1 for v in steps) + 1 + skipped
        length += -length % (8 * unit)
        if 16 * length > math.prod(sizes.values()) or free_vars(first) & self.private:
            return None
        mins, key = (*outer, first), (x.buffer, "run", *outer, first)
        if key not in found:
            tile = Buffer(f"{x.buffer.name}_run", (length,), x.dtype, DYNAMIC, span=x.span)
            copy = Copy(Region(x.buffer, mins, (*[1] * len(outer), length)), region_of(tile, x.span), span=x.span)
            found[key] = None if row_boxes_unsupported(copy, hopper(self.cx).strides) else (tile, copy)
        got = found[key]
        return None if got is None else load(got[0], (self.analyzer.simplify(last - first),), span=x.span)

    def ahead(self, body: Sequence[Stmt], step: Var) -> list[Stmt]:
        """The body with loads of what loops after its first GEMM read for each row or step, in front of that GEMM."""
        at, loads = next(n for n, s in enumerate(body) if isinstance(s, Gemm)), dict[Any, tuple[Any, Stmt]]()

        def loaded(x: Load, s: Parallel, rows: set[Any]) -> Expr | None:
            along, mins = self.place(x, s.vars) or ((), ())
            ways = [v for v in along if v is not None]
            if not any(step in free_vars(m) for m in mins) or len(ways) > 1 or not rows.issuperset(ways):
                return None
            sizes = {v: int(n.value) for v, n in zip(s.vars, s.extents) if v in ways}  # type: ignore[attr-defined]
            key = x.buffer, tuple(map(sizes.get, along)), mins
            if key not in loads and not ways:
                one = fresh(x.buffer.name, x.dtype)
                loads[key] = one, Bind(one, load(x.buffer, mins, span=x.span), span=s.span)
            elif key not in loads:
                i, n = fresh(ways[0].name, ways[0].dtype), s.extents[s.vars.index(ways[0])]
                row = Buffer(f"{x.buffer.name}_row", (sizes[ways[0]],), x.dtype, FRAGMENT, span=x.span)
                value = load(x.buffer, tuple(m + i if v is ways[0] else m for v, m in zip(along, mins)), span=x.span)
                loads[key] = row, Parallel((i,), (n,), Store(row, (i,), value, span=s.span), span=s.span)
                self.made.append(row)
            got = loads[key][0]
            return load(got, (ways[0],), span=x.span) if ways else got

        def changed(s: Stmt) -> Stmt:
            if not isinstance(s, Parallel):
                return s
            rows = {x.indices[0] for x in walk(s, Store) if x.buffer.scope_name == FRAGMENT}
            rows &= {v for v, n in zip(s.vars, s.extents) if isinstance(n, Const)}
            return rewrite(s, lambda x: loaded(x, s, rows), Load)

        rest = [changed(s) for s in body[at:]]
        return [*body[:at], *(s for _, s in loads.values()), *rest]

    def of_steps(self, body: Sequence[Stmt], loop: For) -> list[Stmt]:
        """The body whose loops in front of its first GEMM read scales of a row and step from tiles of several steps."""
        at, tiles = next(n for n, s in enumerate(body) if isinstance(s, Gemm)), dict[Any, tuple[Buffer, Copy]]()
        k, start, extent = loop.var, convert(loop.start), convert(loop.extent)
        done = self.analyzer.simplify(k - start)

        def scale(s: Parallel, x: Any) -> Expr | None:
            along, mins = self.place(x, s.vars) or ((), ())
            strides, rows = [stride_along(m, k, self.analyzer) for m in mins], [d for d, v in enumerate(along) if v is not None]
            if len(rows) != 1 or strides.count(1) != 1 or strides.count(0) != len(mins) - 1 or strides[rows[0]] != 0:
                return None
            step, row, size = strides.index(1), rows[0], s.extents[s.vars.index(along[rows[0]])]
            n = max(2, 128 // math.gcd(x.dtype.bits, 128)) if step == len(mins) - 1 else ATOM_ROWS
            if not isinstance(size, Const) or n > MOST_STEPS or isinstance(extent, Const) and int(extent.value) < n:
                return None
            sizes = [{step: n, row: int(size.value)}.get(d, 1) for d in range(len(mins))]
            if (key := (x.buffer, tuple(sizes), mins)) not in tiles:
                first = self.analyzer.simplify(substitute(mins[step], {k: start + done // n * n}))
                got = self.copied(x, sizes, (*mins[:step], first, *mins[step + 1:]), "steps")
                if got is None:
                    return None
                tiles[key] = got[0], with_options(got[1], iterations=n)
            return load(tiles[key][0], tuple(done % n if d == step else along[row] for d in sorted((step, row))), span=x.span)

        new = [rewrite(s, partial(scale, s), Load) if isinstance(s, Parallel) else s for s in body[:at]]
        self.made += [b for b, _ in tiles.values()]
        return [*(c for _, c in tiles.values()), *new, *body[at:]]

    def place(self, x: Load, ways: Iterable[Var]) -> tuple[tuple[Any, ...], tuple[Expr, ...]] | None:
        """See `tile_read`; None also for tensors that the kernel writes, and outside of which not 0 is read."""
        out = x.buffer.scope_name != GLOBAL or x.buffer.data in self.written
        return None if out else tile_read(x, ways, self.inline, self.private, self.analyzer)

    def copied(self, x: Load, sizes: list[int], mins: tuple[Expr, ...], what: str,
               least: int = 0) -> tuple[Buffer, Copy] | None:
        """The tile of a load and the copy that fills it; None where TMA cannot load it or it has less than `least` bytes."""
        shape = tuple(n for n in sizes if n > 1)
        if len(shape) != 2 or math.prod(shape) * x.dtype.bits // 8 < least:
            return None
        tile = Buffer(f"{x.buffer.name}_{what}", shape, x.dtype, DYNAMIC, span=x.span)
        src = Region(x.buffer, mins, tuple(sizes))
        copy = Copy(src, region_of(tile, x.span), span=x.span)
        copy = with_options(copy, unaligned_columns=unaligned_columns(src, self.facts) or None)
        return None if tma_unsupported(copy, hopper(self.cx).strides) else (tile, copy)


@pass_(needs=TILE, of=Launch, when=lambda cx: hopper(cx).tma and hopper(cx).wgmma)
def staged_writes(launch: Launch, cx: PassContext) -> Launch:
    """Make copies of parallel loops that store what accumulators of wgmma hold, all rows or the first ones.

        for i, j in T.Parallel(128, 64):                     for i, j in T.Parallel(128, 64): tile[i, j] = c[i, j] / total[i]
            if m + i < n:                             ->     copy(tile[0 : n - m, 0 : 64], Y[m : n, 0 : 64])
                Y[m + i, j] = c[i, j] / total[i]

    A thread has two neighbouring elements of an accumulator's row: its stores have 4 bytes (float16), each with a condition.

    Keeps: every value that is stored.
    """
    loops = _Loops(launch, not cx.option(PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS))

    def visit(s: Stmt) -> Stmt:
        if isinstance(s, Parallel):
            return loops.copied(s) or s
        return s if isinstance(s, For) and is_pipelined(s) else with_inner(s, visit)

    return with_inner(launch, visit) if loops.results and not launch.plan.by_hand else launch  # type: ignore[no-any-return]


class _Loops:
    """The parallel loops of a launch.  results: the accumulators of wgmma.  written: storage that the launch writes.  checked:
    whether loads outside of a tensor give a value: what is read under a condition may be read before it."""

    def __init__(self, launch: Launch, checked: bool) -> None:
        self.results = {x.c.buffer for x in walk(launch.body, Gemm) if not isinstance(choose_wgmma(x, launch.num_threads), str)}
        self.written = {e.storage for e in effects(launch.body) if e.writes}
        self.checked, self.private, self.analyzer = checked, {*launch.thread_vars}, launch_analyzer(launch)

    def copied(self, s: Parallel) -> Stmt | None:
        """The loop as one that fills a fragment, and a copy of it; None where it stores no tile of an accumulator."""
        body = inline_index_binds(s.body, s.vars)
        guard, out = (body.cond, body.then) if isinstance(body, If) and body.orelse is None else (None, body)
        if s.plan.given() or len(s.vars) != 2 or not isinstance(out, Store) or out.buffer.scope_name != GLOBAL or \
                guard is None and out.buffer.dtype.bits >= 32:  # four threads store a sector of 32 bytes, and need no tile
            return None
        loads, binds = [*walk(out.value, Load)], dict[Expr, Var]()
        shape = next((x.buffer.shape for x in loads if x.buffer in self.results and x.indices == s.vars), None)
        if shape is None or tuple(map(const, shape)) != s.extents or not all(is_pure(x.op) for x in walk(out.value, Call)) or \
                any(x.buffer.scope_name != FRAGMENT and (guard is not None or x.buffer.data in self.written) for x in loads):
            return None
        at = tuple(rewrite(i, lambda x: self._named(x, s.vars, binds), Load) for i in out.indices)
        place = tile_read(load(out.buffer, at), s.vars, {}, self.private, self.analyzer)
        rows = shape[0] if guard is None else self._rows(guard, s.vars)
        if binds and guard is not None and not self.checked:
            return None
        if place is None or rows is None or tuple(v for v in place[0] if v is not None) != s.vars or place[0][-1] is None:
            return None
        tile, sizes = Buffer(f"{out.buffer.name}_tile", shape, out.buffer.dtype, FRAGMENT, span=out.span), (rows, shape[1])
        to = Region(out.buffer, place[1], tuple(1 if v is None else sizes[s.vars.index(v)] for v in place[0]), span=out.span)
        fill = replace(s, body=Store(tile, s.vars, out.value, span=out.span))
        return seq(*(Bind(v, x) for x, v in binds.items()), Alloc(tile), fill, Copy(
            Region(tile, (const(0), const(0)), sizes, span=out.span), to, span=out.span), span=s.span)

    def _named(self, x: Any, vars: tuple[Var, ...], binds: dict[Expr, Var]) -> Expr:
        """A name for what is read from memory that nothing writes, and is one value for the whole loop."""
        return binds.setdefault(x, fresh(x.buffer.name, x.dtype)) if self._steady(x) and not free_vars(x) & {*vars} else x

    def _steady(self, x: Any) -> bool:
        return x.buffer.scope_name == GLOBAL and x.buffer.data not in self.written and not free_vars(x) & self.private

    def _rows(self, cond: Expr, vars: tuple[Var, ...]) -> Expr | None:
        """The number of first rows for which `first + row < end` holds; None for other conditions, and for a constant: a few
        rows are stored as quickly by their threads."""
        if not isinstance(cond, Binary) or cond.op != "lt" or free_vars(cond) & (self.private | {vars[1]}) or \
                vars[0] in free_vars(cond.b) or stride_along(cond.a, vars[0], self.analyzer) != 1 or \
                not all(map(self._steady, walk(cond, Load))):
            return None
        first = self.analyzer.simplify(substitute(cond.a, {vars[0]: const(0, vars[0].dtype)}))
        low, count = self.analyzer.interval(first)[0], self.analyzer.simplify(binary("max", cond.b, first) - first)
        return None if low is None or low < 0 or isinstance(count, Const) else count
