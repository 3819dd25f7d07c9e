"""Runs the blocks of a large grid one after another on few, where that saves what each block does or waits for alone.

    launch grid (2048,), r:                           launch grid (132,), block:
        copy(X[r, :], x)                                  for step in pipelined(ceil((2048 - block) / 132), 2 stages):
        ...                                    ->             r = block + step * 132
        copy(x, Y[r, :])                                      copy(X[r, :], X_ahead); copy(X_ahead, x); ...; copy(x, Y[r, :])

    launch grid (32768,), b:                          launch grid (792,), block:
        fill(counts, 0)                                   fill(lanes, 0)
        ... atomic_add(counts[X[i]], 1)        ->         for step in serial(...): b = ...; atomic_add(lanes[X[i], tx % 32], 1)
        atomic_add(Y, counts)                             reduce(lanes, counts); atomic_add(Y, counts)

An SM whose only block waits for its loads waits too: those of the next block are copied ahead to shared memory.  Integers that
all blocks add to the same elements are added once by each resident block, and lanes that would wait for each other have copies.
"""

from __future__ import annotations

from math import prod

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Evaluate, For, Func, Launch, Load, LoopPlan, Parallel,
                         Region, Stmt, Store, Var, While, binary, const, contains, convert, dtype, free_vars, replace, rewrite,
                         rewrite_launches, seq, stmts_of, walk, with_options, DYNAMIC, FRAGMENT, GLOBAL, SHARED)
from tilelang.ops import AtomicTile, Copy, Fill, Gemm, Reduce
from tilelang.target.machine import RESERVED_SHARED

from ..analysis.effects import effects, fills_whole, orders
from ..framework.config import PassConfigKey
from ..framework.pass_ import TILE, PassContext, pass_
from .persistent import may_wait, split_index

LEAST = 4  # blocks that one stands for
STAGES = 2
COPIES = 32  # of a tile: one for each lane
FULL = 0.75  # of the threads that an SM can hold: those that may have 40 registers
OTHERS = 24  # registers of a thread beside those of its largest fragment


@pass_(needs=TILE)
def resident_blocks(func: Func, cx: PassContext) -> Func:
    """Let resident blocks run those of the grid one after another, with loads ahead or with one update of what all add to.

    Keeps: every value; integers are the same in any order.  Off with tl.persistent=False; a number above 1 is that of blocks.
    """
    asked = cx.option(PassConfigKey.TL_PERSISTENT)
    if asked is not None and not asked or cx.target is None or not cx.target.limits.sm_count or \
            not cx.option(PassConfigKey.TL_ENABLE_ASYNC_COPY):
        return func
    return rewrite_launches(func, lambda x: _fewer_blocks(x, cx))


def _fewer_blocks(launch: Launch, cx: PassContext) -> Launch:
    p, grid = launch.plan, [g.value for g in map(convert, launch.grid) if isinstance(g, Const)]
    if len(grid) < len(launch.grid) or p.by_hand or p.cluster or p.swizzle or p.cooperative or p.cuda_source or \
            p.overlapping or p.may_alias or p.min_blocks_per_sm > 1 or may_wait(launch.body) or orders(launch.body) or \
            any(not isinstance(s, For) or s.kind == "pipelined" or s.plan.counted for s in walk(launch.body, For, While, Gemm)):
        return launch
    body, total, asked = list(stmts_of(launch.body)), prod(grid), int(cx.option(PassConfigKey.TL_PERSISTENT) or 0)
    own = [s.buffer for s in body if isinstance(s, Alloc)]
    shared = RESERVED_SHARED + sum(b.size * b.dtype.bytes for b in own if b.scope_name in SHARED)
    first: list[Stmt] = [*map(Alloc, own)]
    last: list[Stmt] = []
    body = [s for s in body if not isinstance(s, Alloc)]
    limits, each, kind = cx.target.limits, 1, "serial"
    if (merged := _merged(launch, body)) is not None:
        each = max(1, min(int(FULL * limits.threads_per_sm) // launch.num_threads, limits.shared_per_sm // shared))
        tile, *ends = merged
        more, body, sums = _by_lane(launch, tile, [s for s in body if s not in ends], limits.shared_per_sm // each - shared)
        first, last = [*first, *(more or ends[:1])], [*sums, ends[1]]
    elif (ahead := _ahead(launch, body, limits.shared_per_block - shared)) and 2 * _registers(launch) > limits.registers_per_sm:
        kind, first = "pipelined", [*first, *map(Alloc, ahead.values())]
        body = [y for s in body for y in _through(s, ahead)]
    blocks = asked if asked > 1 else limits.sm_count * each
    if not (merged or kind == "pipelined") or not (1 if asked > 1 else LEAST) * blocks <= total <= 1 << 30:
        return launch
    block, step, number = (Var(n, dtype("int32")) for n in ("block", "step", "number"))
    binds = Bind(number, binary("min", block + step * blocks, const(total - 1))), *split_index(launch, number, range(len(grid)))
    loop = For(step, const(0), (const(total + blocks - 1) - block) // blocks, kind, seq(*binds, *body), plan=LoopPlan(
        num_stages=STAGES if kind == "pipelined" else 0))
    out = replace(launch, grid=(const(blocks),), block_vars=(block,), body=seq(*first, loop, *last))
    report = *p.report, f"persistent: {blocks} blocks run {total} one after another"
    return with_options(out, report=report, min_blocks_per_sm=each)  # type: ignore[no-any-return]


def _merged(launch: Launch, body: list[Stmt]) -> tuple[Buffer, Stmt, Stmt] | None:
    """A shared tile, the statement that clears it, and the one that adds it to global memory, if blocks only add integers to
    the tile between them, and all add it to the same elements."""
    add = body[-1]
    match add:
        case AtomicTile(kind="add", dst=to, value=Region(buffer=tile) as r) if r.is_full and add.plan.memory_order in (
                None, "relaxed"):
            pass
        case Parallel(body=Evaluate(call=Call(op="atomic_add", args=(AddressOf() as to, Load(buffer=tile))))):
            pass
        case _:
            return None
    bound = {*launch.block_vars, *launch.thread_vars, *(s.var for s in body if isinstance(s, Bind))}
    fill = next((s for s in body if fills_whole(s) and [e.storage for e in effects(s)] == [tile.data]), None)
    if fill is None or tile.scope_name not in SHARED or tile.dtype != to.buffer.dtype or not tile.dtype.is_int or \
            not all(isinstance(x.value, Const) and x.value.value == 0 for x in walk(fill, Fill, Store)) or \
            bound & {*walk(add, Var)}:
        return None
    for e in (e for s in body if s is not fill and s is not add for e in effects(s)):
        adds = e.mode == "atomic" and isinstance(e.node, Call) and e.node.op == "atomic_add"
        if e.storage is to.buffer.data or e.storage is tile.data and not adds:
            return None
    return tile, fill, add


def _by_lane(launch: Launch, tile: Buffer, own: list[Stmt], room: int) -> tuple[list[Stmt], list[Stmt], list[Stmt]]:
    """What is done in front of all blocks' work, for each block, and behind it, where lanes have copies of the tile if what
    they read says where they add.  own: the work of a block.  room: bytes for the copies."""
    copies = min(COPIES, 1 << (room // (tile.size * tile.dtype.bytes)).bit_length() >> 1)
    places = [x for s in own for x in walk(s, AddressOf) if x.buffer.data is tile.data]
    if copies < 2 or not any(contains(i, Load) for x in places for i in x.indices):
        return [], own, []
    lanes = Buffer(f"{tile.name}_of_lanes", (*tile.shape, copies), tile.dtype, DYNAMIC, span=tile.span)
    whole, out = (Region(b, (const(0),) * len(b.shape), b.shape) for b in (lanes, tile))
    one = {x: AddressOf(lanes, (*x.indices, launch.thread_vars[0] % copies), span=x.span) for x in places}
    return [Alloc(lanes), Fill(whole, const(0, tile.dtype))], [rewrite(s, one.get, AddressOf) for s in own], [
        Reduce(whole, out, "sum", len(tile.shape), span=tile.span)]


def _registers(launch: Launch) -> int:
    """Registers of a block, roughly: of its largest fragment and a few more."""
    sizes = [s.buffer.size for s in walk(launch.body, Alloc) if s.buffer.scope_name == FRAGMENT]
    return max(sizes, default=0) + OTHERS * launch.num_threads


def _ahead(launch: Launch, body: list[Stmt], room: int) -> dict[Stmt, Buffer]:
    """The copies of a block's own rows to fragments, each with a tile in shared memory; rows start at multiples of 16 bytes."""
    written, out = {e.storage for s in body for e in effects(s) if e.writes}, dict[Stmt, Buffer]()
    for s in body:
        if isinstance(s, Copy) and s.src.buffer.scope_name == GLOBAL and s.dst.buffer.scope_name == FRAGMENT and \
                s.src.buffer.data not in written and s.src.buffer.strides_ is None and \
                any({*launch.block_vars} & {*free_vars(i)} for i in s.src.mins) and \
                all(isinstance(n, int) for n in s.src.extents) and all(
                    isinstance(n, Const) and n.value * s.src.dtype.bits % 128 == 0
                    for n in map(convert, (s.src.buffer.shape[-1], s.src.extents[-1], s.src.mins[-1]))):
            tile = Buffer(f"{s.src.buffer.name}_ahead", s.src.extents, s.src.dtype, DYNAMIC, span=s.span)
            if (room := room - STAGES * tile.size * tile.dtype.bytes) >= 0:
                out[s] = tile
    return out


def _through(s: Stmt, ahead: dict[Stmt, Buffer]) -> tuple[Stmt, ...]:
    """A statement; a copy to a fragment by way of its tile."""
    if s not in ahead:
        return (s,)
    tile = Region(ahead[s], (const(0),) * len(ahead[s].shape), ahead[s].shape)
    return replace(s, dst=tile), replace(s, src=tile)
