"""Keeps rows that fill the registers of an SM in shared memory, and computes them again after each reduction.

    copy(X[r, :], x)                                   copy(X[r, :], s); copy(s, x)                    # s: shared memory
    reduce_max(x, top)                                 reduce_max(x, top)
    x[j] = exp(x[j] - top)                     ->      copy(s, x); x[j] = exp(x[j] - top)
    reduce_sum(x, total)                               reduce_sum(x, total)
    x[j] = x[j] / total                                copy(s, x); x[j] = exp(x[j] - top); x[j] = x[j] / total
    copy(x, Y[r, :])                                   copy(x, Y[r, :])

The only block of an SM waits for memory and for its barriers, and the SM with it.  No element is live across a reduction, so
that two blocks fit.  Other tiles are loaded where they are used.
"""

from __future__ import annotations

from tilelang.ir import (Alloc, Buffer, Call, Launch, Parallel, Region, Stmt, region_of, replace, seq, stmts_of, walk, DYNAMIC,
                         FRAGMENT, GLOBAL, SHARED)
from tilelang.ops import Copy, Gemm, Reduce
from tilelang.target.machine import RESERVED_SHARED

from ..analysis.effects import acts, effects, fills_whole, may_wait, orders
from ..analysis.statements import rename
from ..framework.pass_ import TILE, PassContext, pass_

OTHERS = 24  # registers of a thread beside its elements of the largest fragment
LEAST = 48  # registers of a thread that two blocks must leave
MOST_CALLS = 2  # functions that are computed again for an element


@pass_(needs=TILE, of=Launch, when=lambda cx: getattr(cx.target, "has_cp_async", False))
def recomputed_rows(launch: Launch, cx: PassContext) -> Launch:
    """Keep rows in shared memory in the type in which they are loaded, where registers leave room for one block.

    Keeps: every value; what is computed again reads the same values.
    """
    body, limits = stmts_of(launch.body), cx.target.limits
    own = [s.buffer for s in body if isinstance(s, Alloc) and s.buffer.is_static]
    rows = max((b for b in own if b.scope_name == FRAGMENT), key=lambda b: b.size, default=None)
    few = limits.registers_per_sm // 2  # of one of two blocks
    if rows is None or rows.size + OTHERS * launch.num_threads <= few or LEAST * launch.num_threads > few or \
            launch.plan.by_hand or launch.plan.overlapping or launch.plan.may_alias or orders(launch.body) or may_wait(
                launch.body) or any(True for _ in walk(launch.body, Gemm)):
        return launch
    load = next((s for s in body if any(e.storage is rows.data for e in effects(s))), None)
    if not isinstance(load, Copy) or load.src.buffer.scope_name != GLOBAL or not load.dst.is_full:
        return launch
    tile = Buffer(f"{load.src.buffer.name}_rows", rows.shape, load.src.dtype, DYNAMIC, span=load.span)
    shared = sum(b.size * b.dtype.bytes for b in (*own, tile) if b.scope_name in SHARED)
    out = _behind_reductions(list(body), load, rows, region_of(tile))
    if out is None or 2 * (shared + 2 * RESERVED_SHARED) > limits.shared_per_sm:
        return launch
    return replace(launch, body=seq(Alloc(tile), *out))  # type: ignore[no-any-return]


def _behind_reductions(body: list[Stmt], load: Copy, rows: Buffer, tile: Region) -> list[Stmt] | None:
    """The statements, with the rows computed again where they are used after a reduction; None where they are not, where that
    would read other values, or take long."""
    again: list[Stmt] = [replace(load, src=tile)]
    out: list[Stmt] = []
    waiting: dict[Buffer, Stmt] = {}  # loads of other fragments
    reduced, calls = False, list[int]()
    for s in body:
        touched, written = ({e.storage for e in effects(s) if e.writes or not only} for only in (False, True))
        for b in [b for b, x in waiting.items() if acts(s) or b.data in touched or written & {e.storage for e in effects(x)}]:
            out.append(waiting.pop(b))
        if (written - {rows.data}) & {e.storage for x in again for e in effects(x)}:
            return None
        if s is load:
            out += [replace(load, dst=tile), *again]
            continue
        if isinstance(s, Copy) and s.src.buffer.scope_name == GLOBAL and s.dst.buffer.scope_name == FRAGMENT and \
                s.dst.is_full and rows.data not in touched:
            waiting[s.dst.buffer] = s
            continue
        if rows.data in touched and reduced:
            reduced = False
            out += rename(again)
            calls.append(sum(1 for x in again for _ in walk(x, Call)))
        out.append(s)
        if rows.data in written:
            if not isinstance(s, Parallel) or not fills_whole(s):
                return None
            again.append(s)
        reduced = reduced or isinstance(s, Reduce)
    return out if calls and sum(calls) <= MOST_CALLS else None
