"""Runs the blocks of a large grid one after another on few, where all add integers to the same elements.

    launch grid (32768,), b:                          launch grid (792,), block:
        fill(counts, 0)                                   fill(lanes, 0)
        ... atomic_add(counts[X[i]], 1)        ->         for step in serial(...): b = ...; atomic_add(lanes[X[i], tx % 32], 1)
        atomic_add(Y, counts)                             counts = sum of lanes; atomic_add(Y, counts)

Each of the few blocks adds its counts once.  Lanes that would wait for each other have copies.
"""

from __future__ import annotations

from math import prod

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Evaluate, For, Launch, Load, LoopPlan, Parallel, Region,
                         Stmt, Store, Var, While, binary, const, contains, convert, dtype, load, region_of, replace, rewrite,
                         seq, stmts_of, walk, with_options, DYNAMIC, FRAGMENT, SHARED)
from tilelang.ops import AtomicTile, Fill, Gemm
from tilelang.target.machine import RESERVED_SHARED

from ..analysis.effects import effects, fills_whole, may_wait, orders
from ..framework.config import PassConfigKey
from ..framework.pass_ import TILE, PassContext, pass_
from .persistent import split_index

LEAST = 4  # blocks that one stands for
COPIES = 32  # of a tile: one for each lane
FULL = 0.75  # of the threads that an SM can hold: those that may have 40 registers


def _wanted(cx: PassContext) -> bool:
    asked = cx.option(PassConfigKey.TL_PERSISTENT)
    return (asked is None or bool(asked)) and cx.target is not None and bool(cx.target.limits.sm_count)


@pass_(needs=TILE, of=Launch, when=_wanted)
def resident_blocks(launch: Launch, cx: PassContext) -> Launch:
    """Let the blocks that run at a time stand for those of the grid, with one update each of what all add to.

    Keeps: every value; integers are the same in any order.  Off with tl.persistent=False; a number above 1 is that of blocks.
    """
    limits, asked = cx.target.limits, int(cx.option(PassConfigKey.TL_PERSISTENT) or 0)
    p, grid = launch.plan, [g.value for g in map(convert, launch.grid) if isinstance(g, Const)]
    if len(grid) < len(launch.grid) or p.by_hand or p.cluster or p.swizzle or p.cooperative or p.cuda_source or \
            p.overlapping or p.may_alias or p.min_blocks_per_sm > 1 or may_wait(launch.body) or orders(launch.body) or \
            any(not isinstance(s, For) or s.kind == "pipelined" or s.plan.counted for s in walk(launch.body, For, While, Gemm)):
        return launch
    allocs = [s for s in stmts_of(launch.body) if isinstance(s, Alloc) and s.init is None]
    body = [s for s in stmts_of(launch.body) if not isinstance(s, Alloc) or s.init is not None]
    if (merged := _merged(launch, body)) is None:
        return launch
    tile, fill, add = merged
    shared = RESERVED_SHARED + sum(s.buffer.size * s.buffer.dtype.bytes for s in allocs if s.buffer.scope_name in SHARED)
    each = max(1, min(int(FULL * limits.threads_per_sm) // launch.num_threads, limits.shared_per_sm // shared))
    blocks, total = asked if asked > 1 else limits.sm_count * each, prod(grid)
    if not (1 if asked > 1 else LEAST) * blocks <= total <= 1 << 30:
        return launch
    before, own, behind = _by_lane(launch, tile, [s for s in body if s is not fill and s is not add], (
        limits.shared_per_sm // each - shared))
    block, step, number = (Var(n, dtype("int32")) for n in ("block", "step", "number"))
    binds = Bind(number, binary("min", block + step * blocks, const(total - 1))), *split_index(launch, number, range(len(grid)))
    twice = bool(before) and not any(contains(s, For, While) for s in own)  # loads of two blocks are in flight together
    loop = For(step, const(0), (const(total + blocks - 1) - block) // blocks, "unroll" if twice else "serial", seq(
        *binds, *own), plan=LoopPlan(factor=2 if twice else None))
    out = replace(launch, grid=(const(blocks),), block_vars=(block,), body=seq(
        *allocs, *(before or (fill,)), loop, *behind, add))
    report = *p.report, f"persistent: {blocks} blocks run {total} one after another"
    return with_options(out, report=report, min_blocks_per_sm=each)  # type: ignore[no-any-return]


def _merged(launch: Launch, body: list[Stmt]) -> tuple[Buffer, Stmt, Stmt] | None:
    """A shared tile, the statement that clears it, and the one that adds it to global memory, if blocks only add integers to
    the tile between them, and all add it to the same elements."""
    add = body[-1] if body else None
    match add:
        case AtomicTile(kind="add", dst=to, value=Region(buffer=tile) as r) if r.is_full and add.plan.memory_order in (
                None, "relaxed"):
            pass
        case Parallel(body=Evaluate(call=Call(op="atomic_add", args=(AddressOf() as to, Load(buffer=tile))))):
            pass
        case _:
            return None
    bound = {*launch.block_vars, *launch.thread_vars, *(s.var for s in body if isinstance(s, Bind))}
    fill = next(s for s in body if any(e.storage is tile.data for e in effects(s)))
    if not fills_whole(fill) or tile.scope_name not in SHARED or tile.dtype != to.buffer.dtype or not tile.dtype.is_int or \
            [isinstance(x.value, Const) and x.value.value == 0 for x in walk(fill, Fill, Store)] != [True] or \
            bound & {*walk(add, Var)} or len([*walk(add, Load)]) != isinstance(add, Parallel):
        return None
    for e in (e for s in body if s is not fill and s is not add for e in effects(s)):
        adds = e.mode == "atomic" and isinstance(e.node, Call) and e.node.op == "atomic_add" and e.buffer.dtype == tile.dtype
        if e.storage is to.buffer.data or e.storage is tile.data and not adds:
            return None
    return tile, fill, add


def _by_lane(launch: Launch, tile: Buffer, own: list[Stmt], room: int) -> tuple[list[Stmt], list[Stmt], list[Stmt]]:
    """What is done in front of all blocks' work, for each block, and behind it, where lanes have copies of the tile if what
    they read says where they add.  own: the work of a block.  room: bytes for the copies."""
    copies = min(COPIES, 1 << (room // (tile.size * tile.dtype.bytes)).bit_length() >> 1)
    places = [x for s in own for x in walk(s, AddressOf) if x.buffer.data is tile.data]
    if copies < 2 or any(x.buffer is not tile for x in places) or not any(contains(i, Load) for x in places for i in x.indices):
        return [], own, []
    lanes = Buffer(f"{tile.name}_of_lanes", (*tile.shape, copies), tile.dtype, DYNAMIC, span=tile.span)
    at = tuple(Var(f"i{k}", dtype("int32")) for k in range(len(tile.shape)))
    total, k = Buffer(f"{tile.name}_total", tile.shape, tile.dtype, FRAGMENT, span=tile.span), Var("k", dtype("int32"))
    # Neighbouring threads begin at different copies, which lie in different banks.
    more = Store(total, at, load(total, at) + load(lanes, (*at, (at[-1] + k) % copies)))
    one = {x: AddressOf(lanes, (*x.indices, launch.thread_vars[0] % copies), span=x.span) for x in places}
    return [Alloc(lanes), Fill(region_of(lanes), const(0, tile.dtype))], [rewrite(s, one.get, AddressOf) for s in own], [
        Alloc(total), Parallel(at, tuple(map(const, tile.shape)), seq(
            Store(total, at, const(0, tile.dtype)), For(k, const(0), const(copies), "unroll", more),
            Store(tile, at, load(total, at))), span=tile.span)]
