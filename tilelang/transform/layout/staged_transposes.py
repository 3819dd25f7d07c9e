"""Reads tensors along their rows where a parallel loop stores along other rows.

    for i, j in T.Parallel(64, 64):           for j, i in T.Parallel(64, 64): turned[j, i] = X[j0 + j, i0 + i]
        Y[i0 + i, j0 + j] = X[j0 + j, i0 + i]  ->  for i, j in T.Parallel(64, 64): Y[i0 + i, j0 + j] = turned[j, i]

A fragment that was loaded along rows of a tensor and is stored along other rows goes through shared memory in the same way.

The tile in shared memory gets the layout with the fewest transactions, as one of the program does.  Neighbouring blocks
go along the rows that they store, where the program has them go along the rows that they load.
"""

from __future__ import annotations

import math

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Expr, Func, If, Launch, Load, Parallel, Stmt, Store,
                         TileOp, Var, While, const, contains, convert, free_vars, fresh, load, replace, rewrite,
                         rewrite_launches, seq, substitute, walk, with_inner, DYNAMIC, FRAGMENT, GLOBAL)
from tilelang.ops import Copy, Fill, Gemm, Reduce
from tilelang.target import is_pure
from tilelang.target.machine import MAX_GRID

from ..analysis.effects import effects, may_wait
from ..analysis.vectorize import stride_along
from ..framework.pass_ import TILE, PassContext, pass_

FEWEST, MOST = 16, 32768  # elements along both rows, bytes of the tile


@pass_(needs=TILE)
def staged_transposes(func: Func, cx: PassContext) -> Func:
    """Stage what a parallel loop reads across its rows through shared memory.  The module docstring shows it."""
    def inside(launch: Launch) -> Launch:
        loaded = _loaded_in_rows(launch.body)

        def visit(s: Stmt) -> Stmt:
            if isinstance(s, (If, While)):  # which single warps may run
                return s
            return _staged(s, loaded) if isinstance(s, Parallel) else with_inner(s, visit)

        return _along_stores(with_inner(launch, visit))

    return rewrite_launches(func, lambda x: x if x.plan.by_hand else inside(x))


def _loaded_in_rows(body: Stmt) -> set[Var]:
    """Storage of the fragments that copies fill from tensors, and that no op lays out for itself."""
    ops = [*walk(body, TileOp)]
    copies = [x for x in ops if isinstance(x, Copy)]
    return {x.dst.buffer.data for x in copies if x.dst.buffer.scope_name == FRAGMENT and x.src.buffer.scope_name == GLOBAL} - {
        a.region.buffer.data for x in ops if not isinstance(x, (Copy, Fill, Reduce)) for a in x.accesses()}  # type: ignore[attr-defined]


def _along_stores(launch: Launch) -> Launch:
    """The launch, with the dimension of the grid first along which its stores go, if that one along which its loads go is."""
    ways: dict[bool, set[Var]] = {False: set(), True: set()}
    for e in effects(launch.body):
        at = e.region.mins if e.region is not None else e.indices or ()
        if e.buffer.scope_name == GLOBAL and at:
            ways[e.writes] |= {*free_vars(at[-1])} & {*launch.block_vars}
    order = [*range(len(launch.grid))]
    if ways[False] != {launch.block_vars[0]} or len(ways[True]) != 1 or ways[True] == ways[False] or launch.plan.cluster or \
            launch.plan.swizzle or launch.plan.cooperative or may_wait(launch.body) or any(
                True for _ in walk(launch.body, Gemm)) or not all(
                    isinstance(n, Const) and n.value <= MAX_GRID[1] for n in map(convert, launch.grid)):
        return launch
    first = launch.block_vars.index(*ways[True])
    order[0], order[first] = first, 0
    return replace(launch, grid=tuple(launch.grid[k] for k in order), block_vars=tuple(  # type: ignore[no-any-return]
        launch.block_vars[k] for k in order))


def _staged(s: Parallel, loaded: set[Var]) -> Stmt:
    extents = {v: int(n.value) for v, n in zip(s.vars, s.extents) if isinstance(n, Const)}
    if len(extents) < max(2, len(s.vars)) or s.plan.given() or any(
            isinstance(x, AddressOf) or not is_pure(x.op) for x in walk(s.body, AddressOf, Call)):
        return s
    stores = [*walk(s.body, Store)]
    along = {_row(x, extents) for x in stores if x.buffer.scope_name == GLOBAL}
    out = along.pop() if len(along) == 1 else None
    written = {x.buffer.data for x in stores}
    bound = {x.var for x in walk(s.body, Bind)}
    before: list[Stmt] = []
    tiles: dict[Expr, Expr] = {}
    for x in dict.fromkeys(walk(s.body, Load)):
        row = _row(x, extents)
        far = x.buffer.scope_name == GLOBAL or x.buffer.data in loaded and all(isinstance(i, Var) for i in x.indices)
        if out is None or row is None or row is out or not far or x.buffer.data in written or \
                x.buffer.dtype.bits % 8 or x.buffer.dtype.lanes > 1 or any(
                    contains(i, Load) or bound & {*free_vars(i)} for i in x.indices):
            continue
        used = [v for v in s.vars if v is not row and any(v in walk(i, Var) for i in x.indices)] + [row]
        shape = tuple(extents[v] for v in used)
        if out in used and min(extents[row], extents[out]) >= FEWEST and math.prod(shape) * x.buffer.dtype.bytes <= MOST:
            tile = Buffer(f"{x.buffer.name}_turned", shape, x.buffer.dtype, DYNAMIC, span=x.span)
            own = tuple(fresh(v.name, v.dtype) for v in used)
            copied = substitute(x, dict(zip(used, own)))
            before += [Alloc(tile), Parallel(own, tuple(const(n) for n in shape), Store(tile, own, copied), span=s.span)]
            tiles[x] = load(tile, tuple(used))
    return seq(*before, replace(s, body=rewrite(s.body, tiles.get, Load))) if tiles else s


def _row(x: Load | Store, extents: dict[Var, int]) -> Var | None:
    """The loop along which an access walks a row, if its indices are sums of different loops' variables."""
    a = Analyzer()
    steps = [{v: stride_along(i, v, a) for v in extents} for i in x.indices]
    if any(n not in (0, 1) for at in steps for n in at.values()) or any([at[v] for at in steps].count(1) > 1 for v in extents):
        return None
    rows = [v for v, n in steps[-1].items() if n] if steps else []
    return rows[0] if len(rows) == 1 else None
