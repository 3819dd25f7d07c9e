"""Values that each step of a loop loads by itself, a few a row: a tile for several steps, which TMA can load.

    for k in T.Pipelined(n, num_stages=S):          for k in T.Pipelined(n, num_stages=S):
        copy(A[m, k * 128], A_s)                        copy(S[m:m+128, k//4*4 : k//4*4 + 4], S_s)      # turn=4
        for i in Parallel(128):                 ->      copy(A[m, k * 128], A_s)
            row[i] = S[m + i, k]                        for i in Parallel(128):
        gemm(A_s, B_s, P); …                                row[i] = S_s[i, k % 4]
                                                        gemm(A_s, B_s, P); …

Scales of blocks of k are such values.  Loaded by the threads that compute, a value a row and step, each touches a line of
its own and competes with the products for the unit that serves shared memory.  16 bytes of a row are the least that TMA
moves: they hold the values of several steps.  Where the rows are contiguous instead, eight steps make a tile that TMA
writes in panels.  The program stays what it was, with the same tile copied in each of these steps; the roles of warps
(specialize_warps.py) load it once for all of them, into a ring that turns so many times more slowly.

Values that are the same for all rows stay what they are: one access a warp.  Measured on an H200 with the scales of A in
such a ring, those of B in another gained nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tilelang.arith import Analyzer, known_divisor
from tilelang.ir import (Alloc, Bind, Buffer, Const, Expr, For, Func, Launch, Load, Parallel, Region, Stmt, Var, const, convert,
                         free_vars, load, replace, rewrite, seq, stmts_of, substitute, walk, with_options, DYNAMIC, GLOBAL)
from tilelang.ir.record import record
from tilelang.ops import Copy, Gemm
from tilelang.ops.tma import tma_unsupported

from ..framework.config import PassConfigKey
from ..analysis.effects import touches
from ..legalize.hopper_features import hopper
from ..framework.pass_ import PassContext
from ..analysis.pipeline_schedule import loop_items
from ..legalize.tma_columns import unaligned_columns
from ..analysis.vectorize import stride_along

PANEL_ROWS = 8  # steps of a tile whose rows are contiguous: rows of one pattern of a swizzle
MOST_STEPS = 16


@record
class _Place:
    """Where a value of step k and row i lies: dimension of the steps and of the rows, the variable of the rows, and the index
    of row 0 (of the steps' dimension: of any step)."""

    step: int
    row: int
    var: Var
    mins: tuple[Expr, ...]


def prefetch_scales(launch: Launch, loop: For, cx: PassContext) -> tuple[Launch, For] | None:
    """(launch, pipelined loop in it) with such values in tiles; None where there are none.

    Considered are loads in parallel loops in front of the loop's first product.  The copies carry attr turn: the steps that
    their tile is for, counted from the loop's first.  Keeps: the values, also those outside the tensor.
    """
    if not cx.option(PassConfigKey.TL_SCALE_PREFETCH) or loop.plan.counted:
        return None
    body = stmts_of(loop.body)
    first = next((n for n, s in enumerate(body) if isinstance(s, Gemm)), 0)
    finder = _Tiles(launch, loop, cx)
    new = [finder.visit(s) if n < first and isinstance(s, Parallel) else s for n, s in enumerate(body)]
    if not finder.made:
        return None
    copies = [copy for _, copy in finder.made.values()]
    tiled = replace(loop, body=seq(*copies, *new, span=loop.body.span))
    allocs = [Alloc(b, span=loop.span) for b, _ in finder.made.values()]
    stmts = [x for s in stmts_of(launch.body) for x in ([*allocs, tiled] if s is loop else [s])]
    return replace(launch, body=seq(*stmts, span=launch.body.span)), tiled


def may_prefetch_scales(func: Func, cx: PassContext) -> bool:
    """Whether a program, as its user wrote it, may come to have such tiles."""
    if not hopper(cx).roles or not cx.option(PassConfigKey.TL_SCALE_PREFETCH):
        return False
    loops = [x for x in walk(func.body, For) if x.plan.num_stages]
    return any(isinstance(s, Parallel) and any(x.buffer.scope_name == GLOBAL for x in walk(s.body, Load))
               for loop in loops for s in stmts_of(loop.body))


class _Tiles:
    """made: what is loaded (tensor, dimensions, first indices) -> (tile, copy that fills it)."""

    def __init__(self, launch: Launch, loop: For, cx: PassContext) -> None:
        self.loop, self.cx, self.analyzer = loop, cx, Analyzer()
        self.inline: dict[Any, Any] = {}
        for s in loop_items(stmts_of(loop.body)).pure:
            self.inline[s.var] = substitute(s.value, self.inline)
        self.private = set(launch.thread_vars) | set(_bound(loop.body))
        self.facts: dict[Expr, int] = {}
        for x in walk(launch.body):
            if isinstance(x, Bind) and x.var.dtype.is_int:
                self.facts[x.var] = known_divisor(x.value, self.facts)
        self.made: dict[Any, tuple[Buffer, Copy]] = {}

    def visit(self, s: Parallel) -> Stmt:
        """A loop with its values read from tiles."""
        def read(x: Any) -> Any:
            if not isinstance(x, Load) or x.buffer.scope_name != GLOBAL:
                return None
            place = self.place(x, s)
            return None if place is None else self.tiled(x, place, s)

        out: Stmt = rewrite(s, read)
        return out

    def place(self, x: Load, s: Parallel) -> _Place | None:
        """Where a load finds its value; None for one that is no step's value of a row."""
        k = self.loop.var
        step: list[int] = []
        row: list[tuple[int, Var]] = []
        mins: list[Expr] = []
        for d, given in enumerate(x.indices):
            e = substitute(given, self.inline)
            along = {v: stride_along(e, v, self.analyzer) for v in (k, *s.vars)}
            named = {v: c for v, c in along.items() if c != 0}
            if any(c != 1 for c in named.values()) or len(named) > 1 or touches(e):
                return None
            for v in named:
                if v is k:
                    step.append(d)
                else:
                    row.append((d, v))
                    e = self.analyzer.simplify(substitute(e, {v: const(0, v.dtype)}))
            if free_vars(e) & (self.private - {k}):
                return None
            mins.append(e)
        if len(step) != 1 or len(row) != 1 or x.dtype.lanes != 1:
            return None
        return _Place(step[0], row[0][0], row[0][1], tuple(mins))

    def tiled(self, x: Load, p: _Place, s: Parallel) -> Expr | None:
        """The value, read from a tile; None where TMA cannot load one."""
        rows, extent = s.extents[s.vars.index(p.var)], convert(self.loop.extent)
        if not isinstance(rows, Const):
            return None
        n = max(2, 128 // math.gcd(x.dtype.bits, 128)) if p.step == len(x.indices) - 1 else PANEL_ROWS
        if n > MOST_STEPS or isinstance(extent, Const) and int(extent.value) < n:
            return None
        k, start = self.loop.var, convert(self.loop.start)
        done = self.analyzer.simplify(k - start)
        key = (x.buffer, p.step, p.row, n, int(rows.value), p.mins)
        if key not in self.made:
            shape = tuple(m for _, m in sorted([(p.step, n), (p.row, int(rows.value))]))
            tile = Buffer(f"{x.buffer.name}_{n}_steps", shape, x.dtype, DYNAMIC, span=x.span)
            mins = [self.analyzer.simplify(substitute(m, {k: start + done // n * n})) if d == p.step else m
                    for d, m in enumerate(p.mins)]
            extents = tuple(n if d == p.step else int(rows.value) if d == p.row else 1 for d in range(len(mins)))
            src = Region(x.buffer, tuple(mins), extents, span=x.span)
            copy = Copy(src, Region(tile, (const(0), const(0)), shape, span=x.span), span=x.span)
            copy = with_options(copy, turn=n, unaligned_columns=unaligned_columns(src, self.facts) or None)
            if tma_unsupported(copy, hopper(self.cx).strides):
                return None
            self.made[key] = tile, copy
        at = {p.step: done % n, p.row: p.var}
        return load(self.made[key][0], tuple(at[d] for d in sorted(at)), span=x.span)


def _bound(body: Stmt) -> Iterator[Var]:
    """The variables that statements below bind."""
    for x in walk(body):
        if isinstance(x, (Bind, For)):
            yield x.var
        elif isinstance(x, Parallel):
            yield from x.vars


__all__ = ["MOST_STEPS", "PANEL_ROWS", "may_prefetch_scales", "prefetch_scales"]
