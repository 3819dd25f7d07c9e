"""Loads scale factors of several steps by one TMA copy, instead of a few values per row in each step (scale prefetch).

    for k in T.Pipelined(n, num_stages=S):          for k in T.Pipelined(n, num_stages=S):
        copy(A[m, k * 128], A_s)                        copy(S[m:m+128, k//4*4 : k//4*4 + 4], S_s)      # iterations=4
        for i in Parallel(128):                 ->      copy(A[m, k * 128], A_s)
            row[i] = S[m + i, k]                        for i in Parallel(128):
        gemm(A_s, B_s, P); …                                row[i] = S_s[i, k % 4]
                                                        gemm(A_s, B_s, P); …

If the consumers load one scale per row and step themselves, each load touches a cache line of its own, and the loads compete
with the MMAs for the unit that serves shared memory.  TMA moves at least 16 bytes of a row, which hold the scales of several
steps.  If the rows are the contiguous dimension instead, eight steps make a tile that TMA writes in boxes.  This pass
adds the same copy to each of these steps, so the program computes the same.  specialize_warps.py then issues the copy once
for all of them, into a ring whose stages last that number of iterations.

Values that are the same for all rows are not changed: they take one access per warp.  Measured on an H200 with the scales of
A in such a ring: a second ring for the scales of B gained nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (Alloc, Buffer, Const, Expr, For, Func, Launch, Load, Parallel, Region, Stmt, Var, const, convert, load,
                         replace, rewrite, seq, stmts_of, substitute, walk, with_options, DYNAMIC, GLOBAL)
from tilelang.ops import Copy, Gemm
from tilelang.ops.tma import tma_unsupported

from ..framework.config import PassConfigKey
from ..legalize.hopper_features import hopper
from ..framework.pass_ import PassContext
from ..analysis.pipeline_schedule import inlined_binds, tile_read
from ..analysis.statements import bound_by
from ..legalize.given_boxes import unaligned_columns
from ..analysis.vectorize import bound_divisors, stride_along

ATOM_ROWS = 8  # steps of a tile whose rows are contiguous: the rows of one swizzle atom
MOST_STEPS = 16


def prefetch_scales(launch: Launch, loop: For, cx: PassContext) -> tuple[Launch, For] | None:
    """(launch, pipelined loop in it) with such values in tiles; None if there are none.

    Considers loads in parallel loops before the first GEMM of the loop.  The added copies carry the attr `iterations`: how
    many steps their tile is for, counted from the loop's first step.  Keeps the values, also those outside the tensor.
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
    """Whether a program, as the user wrote it, may get such tiles."""
    if not hopper(cx).warp_roles or not cx.option(PassConfigKey.TL_SCALE_PREFETCH):
        return False
    loops = [x for x in walk(func.body, For) if x.plan.num_stages]
    return any(isinstance(s, Parallel) and any(x.buffer.scope_name == GLOBAL for x in walk(s.body, Load))
               for loop in loops for s in stmts_of(loop.body))


class _Tiles:
    """Replaces loads by tiles.  made: (tensor, dimensions, first indices, …) of a load -> (tile, copy that fills it)."""

    def __init__(self, launch: Launch, loop: For, cx: PassContext) -> None:
        self.loop, self.cx, self.analyzer = loop, cx, Analyzer()
        self.inline = inlined_binds(loop)
        self.private = {*launch.thread_vars, *(v for x in walk(loop.body) for v in bound_by(x))}
        self.facts = bound_divisors(launch.body)
        self.made: dict[Any, tuple[Buffer, Copy]] = {}

    def visit(self, s: Parallel) -> Stmt:
        """A parallel loop that reads its values from tiles."""
        def read(x: Any) -> Any:
            if not isinstance(x, Load) or x.buffer.scope_name != GLOBAL:
                return None
            got = tile_read(x, s.vars, self.inline, self.private, self.analyzer) if x.dtype.lanes == 1 else None
            return None if got is None else self.tiled(x, s, *got)

        out: Stmt = rewrite(s, read)
        return out

    def tiled(self, x: Load, s: Parallel, along: Sequence[Var | None], mins: tuple[Expr, ...]) -> Expr | None:
        """The value, read from a tile; None unless it is one for each row and step, and TMA can load the tile.

        along, mins: see `tile_read`.
        """
        k, start, extent = self.loop.var, convert(self.loop.start), convert(self.loop.extent)
        strides, named = [stride_along(m, k, self.analyzer) for m in mins], [d for d, v in enumerate(along) if v is not None]
        if len(named) != 1 or strides.count(1) != 1 or strides.count(0) != len(mins) - 1 or strides[named[0]] != 0:
            return None
        step, row, var = strides.index(1), named[0], along[named[0]]
        rows = s.extents[s.vars.index(var)]  # type: ignore[arg-type]
        if not isinstance(rows, Const):
            return None
        n = max(2, 128 // math.gcd(x.dtype.bits, 128)) if step == len(x.indices) - 1 else ATOM_ROWS
        if n > MOST_STEPS or isinstance(extent, Const) and int(extent.value) < n:
            return None
        done = self.analyzer.simplify(k - start)
        key = (x.buffer, step, row, n, int(rows.value), mins)
        if key not in self.made:
            shape = tuple(m for _, m in sorted([(step, n), (row, int(rows.value))]))
            tile = Buffer(f"{x.buffer.name}_{n}_steps", shape, x.dtype, DYNAMIC, span=x.span)
            first = tuple(self.analyzer.simplify(substitute(m, {k: start + done // n * n})) if d == step else m
                          for d, m in enumerate(mins))
            extents = tuple({step: n, row: int(rows.value)}.get(d, 1) for d in range(len(mins)))
            src = Region(x.buffer, first, extents, span=x.span)
            copy = Copy(src, Region(tile, (const(0), const(0)), shape, span=x.span), span=x.span)
            copy = with_options(copy, iterations=n, unaligned_columns=unaligned_columns(src, self.facts) or None)
            if tma_unsupported(copy, hopper(self.cx).strides):
                return None
            self.made[key] = tile, copy
        at = {step: done % n, row: var}
        return load(self.made[key][0], tuple(at[d] for d in sorted(at)), span=x.span)
