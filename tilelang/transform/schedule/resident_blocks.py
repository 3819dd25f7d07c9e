"""Runs the blocks of a large grid one after another on few blocks, where that saves what each block does or waits for alone.

    launch grid (2048,), r:                           launch grid (132,), block:
        copy(X[r, :], x)                                  for step in pipelined(ceil((2048 - block) / 132), 2 stages):
        ...                                    ->             r = block + step * 132
        copy(x, Y[r, :])                                      copy(X[r, :], X_ahead); copy(X_ahead, x); ...; copy(x, Y[r, :])

    launch grid (32768,), b:                          launch grid (1056,), block:
        fill(counts, 0)                                   fill(counts, 0)
        ... atomic_add(counts[...], 1)         ->         for step in serial(...): b = ...; ... atomic_add(counts[...], 1)
        atomic_add(Y, counts)                             atomic_add(Y, counts)

A block whose fragments fill an SM's registers waits for its loads, and the SM with it: the next block's are copied ahead to shared
memory.  Integers that every block adds to the same elements are added once for all blocks that it stands for.
"""

from __future__ import annotations

from math import prod

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Const, Evaluate, Expr, For, Func, If, Launch, Load, LoopPlan, Region, Stmt,
                         Var, While, binary, const, convert, dtype, free_vars, replace, rewrite_launches, seq, stmts_of, walk,
                         with_options, DYNAMIC, FRAGMENT, GLOBAL, SHARED)
from tilelang.ops import Copy, Fill
from tilelang.ops.atomic import AtomicTile
from tilelang.target.machine import RESERVED_SHARED

from ..analysis.effects import effects, orders
from ..framework.config import PassConfigKey
from ..framework.pass_ import TILE, PassContext, pass_
from .persistent import may_wait, split_index

LEAST = 4  # blocks that one stands for
STAGES = 2
OTHERS = 24  # registers of a thread beside its part of the largest fragment


@pass_(needs=TILE)
def resident_blocks(func: Func, cx: PassContext) -> Func:
    """Let resident blocks run those of the grid in turn, with loads ahead or with one atomic update of what all add to.

    Keeps: every value; integers are the same in any order.  tl.persistent: False turns it off, a number above 1 is that of blocks.
    """
    asked = cx.option(PassConfigKey.TL_PERSISTENT)
    if asked is not None and not asked or not getattr(cx.target, "has_cp_async", False) or \
            not cx.target.limits.sm_count or not cx.option(PassConfigKey.TL_ENABLE_ASYNC_COPY):
        return func
    return rewrite_launches(func, lambda x: _in_turn(x, cx))


def _in_turn(launch: Launch, cx: PassContext) -> Launch:
    body, plan, limits = list(stmts_of(launch.body)), launch.plan, cx.target.limits
    grid = [g.value for g in map(convert, launch.grid) if isinstance(g, Const)]
    if len(grid) < len(launch.grid) or plan.by_hand or plan.cluster or plan.swizzle or plan.cooperative or plan.cuda_source or \
            plan.overlapping or plan.may_alias or plan.min_blocks_per_sm > 1 or may_wait(launch.body) or orders(launch.body) or \
            any(True for _ in walk(launch.body, For, While, If)):
        return launch
    allocs = [s for s in body if isinstance(s, Alloc)]
    shared = sum(s.buffer.size * s.buffer.dtype.bytes for s in allocs if s.buffer.scope_name in SHARED)
    body = [s for s in body if not isinstance(s, Alloc)]
    first, last, blocks, stages = [], [], limits.sm_count, 0
    if (merged := _merged(launch, body)) is not None:
        fill, add = merged
        first, last, body = [fill], [add], [s for s in body if s is not fill and s is not add]
        blocks *= min(limits.threads_per_sm // launch.num_threads, limits.shared_per_sm // (shared + RESERVED_SHARED))
    elif (ahead := _ahead(launch, body, [s.buffer for s in allocs], limits.shared_per_block - shared - RESERVED_SHARED, cx)):
        allocs += [Alloc(b) for b in ahead.values()]
        body = [y for s in body for y in _through(s, ahead)]
        stages = STAGES
    else:
        return launch
    total, asked = prod(grid), int(cx.option(PassConfigKey.TL_PERSISTENT) or 0)
    blocks = asked if asked > 1 else blocks
    if total < (1 if asked > 1 else LEAST) * blocks:
        return launch
    block, step, turn = (Var(n, dtype("int32")) for n in ("block", "step", "turn"))
    binds = [Bind(turn, binary("min", block + step * blocks, const(total - 1))), *split_index(launch, turn, range(len(grid)))]
    loop = For(step, const(0), (const(total + blocks - 1) - block) // blocks, "pipelined" if stages else "serial",
               seq(*binds, *body), plan=LoopPlan(num_stages=stages))
    what = "loads of the next tile are copied ahead" if stages else "what all tiles add to is added once"
    out = replace(launch, grid=(const(blocks),), block_vars=(block,), body=seq(*allocs, *first, loop, *last))
    return with_options(out, report=(*plan.report, f"persistent: {blocks} blocks, {what}"))  # type: ignore[no-any-return]


def _merged(launch: Launch, body: list[Stmt]) -> tuple[Stmt, Stmt] | None:
    """(the statement that clears a shared tile, the one that adds it to global memory) of a launch whose blocks only add integers
    to the tile between them, and all add it to the same elements."""
    last = body[-1]
    if not isinstance(last, AtomicTile) or last.kind != "add" or not isinstance(last.value, Region) or not last.value.is_full or \
            last.plan.memory_order not in (None, "relaxed") or last.value.buffer.scope_name not in SHARED:
        return None
    tile, to = last.value.buffer, last.dst.buffer
    bound = {*launch.block_vars, *launch.thread_vars, *(s.var for s in body if isinstance(s, Bind))}
    fill = next((s for s in body if isinstance(s, Fill) and s.dst.buffer is tile), None)
    if fill is None or not fill.dst.is_full or not isinstance(fill.value, Const) or fill.value.value != 0 or \
            tile.dtype != to.dtype or not tile.dtype.is_int or any(bound & {*free_vars(i)} for i in last.dst.mins):
        return None
    added = {id(x.call.args[0]) for x in walk(seq(*body), Evaluate) if x.call.op == "atomic_add"}
    for s in body:
        for x in walk(s, Load, AddressOf, Region):
            if s is not fill and s is not last and x.buffer.data is tile.data and id(x) not in added:
                return None
            if s is not last and x.buffer.data is to.data:
                return None
    stored = {e.storage for s in body if s is not fill and s is not last for e in effects(s) if e.writes}
    return None if to.data in stored else (fill, last)


def _ahead(launch: Launch, body: list[Stmt], own: list[Buffer], room: int, cx: PassContext) -> dict[Stmt, Buffer]:
    """The copies to fragments that are made ahead, each with its tile in shared memory; none where two blocks fit an SM."""
    written = {e.storage for s in body for e in effects(s) if e.writes}
    registers = max((b.size for b in own if b.scope_name == FRAGMENT), default=0) + OTHERS * launch.num_threads
    out: dict[Stmt, Buffer] = {}
    for s in body:
        if isinstance(s, Copy) and s.src.buffer.scope_name == GLOBAL and s.dst.buffer.scope_name == FRAGMENT and \
                s.src.buffer.data not in written and any({*launch.block_vars} & {*free_vars(i)} for i in s.src.mins) and \
                _wide(s.src) and all(isinstance(n, int) for n in s.src.extents):
            tile = Buffer(f"{s.src.buffer.name}_ahead", s.src.extents, s.src.dtype, DYNAMIC, span=s.span)
            if (room := room - STAGES * tile.size * tile.dtype.bytes) >= 0:
                out[s] = tile
    return out if 2 * registers > cx.target.limits.registers_per_sm else {}


def _wide(r: Region) -> bool:
    """Whether the rows of a region start at multiples of 16 bytes."""
    sizes: tuple[Expr, ...] = tuple(map(convert, (r.buffer.shape[-1], r.extents[-1], r.mins[-1])))
    return r.buffer.strides_ is None and all(isinstance(n, Const) and n.value * r.dtype.bits % 128 == 0 for n in sizes)


def _through(s: Stmt, ahead: dict[Stmt, Buffer]) -> tuple[Stmt, ...]:
    if s not in ahead:
        return (s,)
    assert isinstance(s, Copy)
    tile = Region(ahead[s], tuple(const(0) for _ in s.src.extents), s.src.extents)
    return replace(s, dst=tile), replace(s, src=tile)


__all__ = ["resident_blocks"]
