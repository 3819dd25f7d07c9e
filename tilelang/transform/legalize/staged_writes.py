"""Stores the results of GEMMs that a parallel loop writes element by element as tiles, as T.copy does.

    for i, j in T.Parallel(128, 64):                     for i, j in T.Parallel(128, 64): tile[i, j] = c[i, j] / total[i]
        if m + i < n:                             ->     copy(tile[0 : n - m, 0 : 64], Y[m : n, 0 : 64])
            Y[m + i, j] = c[i, j] / total[i]

A thread has two neighbouring elements of an accumulator's row: its own stores have 4 bytes (float16), each with a condition.
"""

from __future__ import annotations

from typing import Any

from tilelang.arith import LaunchFacts
from tilelang.ir import (Alloc, Binary, Bind, Buffer, Call, Const, Expr, For, If, Launch, Load, Parallel, Region, Stmt,
                         Store, Var, binary, const, free_vars, fresh, load, replace, rewrite, seq,
                         substitute, walk, with_inner, FRAGMENT, GLOBAL)
from tilelang.ops import Copy, Gemm
from tilelang.ops.gemm.wgmma import choose_wgmma
from tilelang.target import is_pure

from ..analysis.effects import effects
from ..analysis.statements import inline_index_binds
from ..analysis.pipeline_loops import is_pipelined, tile_read
from ..analysis.vectorize import stride_along
from ..framework.config import PassConfigKey
from ..framework.pass_ import TILE, PassContext, pass_
from .hopper_features import hopper


@pass_(needs=TILE, of=Launch, when=lambda cx: hopper(cx).tma and hopper(cx).wgmma)
def staged_writes(launch: Launch, cx: PassContext) -> Launch:
    """Make copies of parallel loops that store what accumulators of wgmma hold, all rows or the first ones.

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
    whether loads outside of a tensor give a value: what is read behind a condition may be read in front of it."""

    def __init__(self, launch: Launch, checked: bool) -> None:
        self.results = {x.c.buffer for x in walk(launch.body, Gemm) if not isinstance(choose_wgmma(x, launch.num_threads), str)}
        self.written = {e.storage for e in effects(launch.body) if e.writes}
        self.checked, self.private, facts = checked, {*launch.thread_vars}, LaunchFacts(launch, ())
        for s in walk(launch.body, For, Bind):
            (facts.enter_loop if isinstance(s, For) else facts.enter_bind)(s)
        self.analyzer = facts.analyzer

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
