"""Operands of GEMMs that a loop does not change stay in registers: columns where wgmma are narrow, or all of them.  Behind the
loop their tiles in shared memory take results.

    for k in T.Pipelined(n):              copy(a[:, 0:w], f)
        gemm(a, b, c)              ->     for k in T.Pipelined(n):
                                              gemm(f, b[:, 0:w], c)
                                              gemm(a[:, w:], b[:, w:], c)

wgmma of 64 rows and N columns reads A from shared memory in 16 cycles and B in N / 4, and multiplies in N / 2: below 64 columns
shared memory limits it, and with A in registers it does not.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Buffer, Const, For, Launch, const, region_of, replace, rewrite, seq, stmts_of, walk,
                         with_options, FRAGMENT, GLOBAL, SHARED, Region)
from tilelang.ops import Copy, Fill, Gemm
from tilelang.ops.gemm.select import choose_gemm, computed_form
from tilelang.ops.gemm.wgmma import GROUP, choose_wgmma, wgmma_cycles
from tilelang.ops.tma_store import STEP_BYTES
from tilelang.target.machine import REGISTERS, RESERVED_SHARED, consumer_registers
from tilelang.target.mma import row as row_of
from tilelang.target.wgmma import WGMMA_ROWS

from ..analysis.effects import effects
from ..analysis.pipeline_loops import inner_loops, is_load, ring_stages
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_
from .hopper_features import hopper


@pass_(needs=TILE, of=Launch, when=lambda cx: hopper(cx).warp_roles)
def held_operands(n: Launch, cx: PassContext) -> Launch | None:
    """Holds columns of one operand in the registers that are left, in launches with warp roles whose blocks fill an SM.

    Keeps: every value and the order of additions.
    """
    loops = inner_loops(n.body)
    if len(loops) != 1 or ring_stages(loops[0]) is None or n.num_threads % GROUP or n.plan.by_hand:
        return None
    loop = loops[0]
    if 2 * (shared_bytes(n, loop) + RESERVED_SHARED) <= cx.target.limits.shared_per_sm:  # the registers are for a second block
        return None
    tiles = [x.buffer for x in walk(n.body, Alloc) if x.buffer.is_static and x.buffer.ndim > 1]
    used = sum(b.bits // 32 for b in tiles if b.scope_name == FRAGMENT) // n.num_threads
    left = consumer_registers(n.num_threads // GROUP) - REGISTERS.overlapped_gemms - used
    # An accumulator that only GEMMs touch stays in flight from one iteration to the next; with A in registers it would not.
    seen = {e.storage for s in stmts_of(loop.body) if not isinstance(s, (Gemm, Fill)) for e in effects(s)}
    forms = ((op, _held(op, loop, n.num_threads, left)) for op in stmts_of(loop.body)
             if isinstance(op, Gemm) and op.c.buffer.data in seen)
    op, form = next((x for x in forms if x[1] is not None), (None, None))
    if op is None or form is None:
        return None
    tile = form[0].dst.buffer
    body = rewrite(loop.body, lambda x: seq(*form[1:]) if x is op else None, Gemm)
    new = seq(Alloc(tile, span=op.span), form[0], replace(loop, body=body))
    said = f"{tile.shape[1]} columns of `{op.a.buffer.name}` stay in registers: wgmma into `{op.c.buffer.name}` are narrow"
    out = replace(n, body=rewrite(n.body, lambda x: new if x is loop else None, For))
    return with_options(out, report=(*n.plan.report, said))


def shared_bytes(n: Launch, loop: For) -> int:
    """Bytes of the shared tiles of a launch, with the stages of those that a loop loads."""
    loaded = {s.dst.buffer.data for s in walk(loop.body, Copy) if is_load(s)}
    tiles = [x.buffer for x in walk(n.body, Alloc) if x.buffer.is_static and x.buffer.scope_name in SHARED]
    return sum(b.bits // 8 * max(1, (ring_stages(loop) or 1) if b.data in loaded else 1) for b in tiles)


def _held(op: Any, loop: For, threads: int, left: int) -> list[Any] | None:
    """[the copy in front of the loop, the GEMMs in place of op] with at most `left` more registers of a thread; None where
    the tile changes in the loop or wgmma is as fast without."""
    a, plan, groups = op.a, choose_wgmma(op, threads), threads // GROUP
    if isinstance(plan, str) or a.buffer.scope_name not in SHARED or op.transpose_a or a.dtype.bits > 16 or (
            op.sparsity > 1):
        return None
    if op.plan.exchanged or op.plan.wait is not None or not all(isinstance(m, Const) for m in a.mins) or any(
            e.writes and e.storage is a.buffer.data for e in effects(loop.body)):
        return None
    step = WGMMA_ROWS[plan.instruction].shape[2]
    width = min(left * threads * 32 // (op.m * step * a.dtype.bits * plan.warps[1]) * step, op.k)
    if width < step:
        return None
    tile = region_of(Buffer(f"{a.buffer.name}_held", (op.m, width), a.dtype, FRAGMENT))
    first = _columns(op, 0, width)
    parts = [replace(first, a=tile)]
    if width < op.k:
        parts.append(replace(_columns(op, width, op.k - width), clear_accum=const(False)))
    if any(isinstance(p := choose_wgmma(x, threads), str) or p.warps != plan.warps for x in parts) or \
            wgmma_cycles(parts[0], groups) >= wgmma_cycles(first, groups):
        return None
    return [Copy(first.a, tile, span=op.span), *parts]


def _columns(op: Any, start: int, width: int) -> Any:
    """The GEMM over `width` columns of K from `start` on."""
    return replace(op, a=op.a.narrowed(-1, start, width), b=op.b.narrowed(-1 if op.transpose_b else -2, start, width))


@pass_(needs=TILE, of=Launch, when=lambda cx: getattr(cx.target, "loads_by_registers", False) and bool(
    cx.option(PassConfigKey.TL_ENABLE_ASYNC_COPY)))
def kept_operands(n: Launch, cx: PassContext) -> Launch | None:
    """Holds an operand that the launch's loop does not change in registers, whole, where more blocks fit without its bytes.

        copy(Q, q)                              copy(Q, q); copy(q, q_kept)
        for k in T.Pipelined(n):         ->     for k in T.Pipelined(n):
            copy(K[k], t)                           copy(K[k], t)
            gemm(q, t, s)                           gemm(q_kept, t, s)

    The loop's tiles then take the bytes of the tile.  A thread has registers for it where these are more than one block needs.

    Keeps: every value.  Off where nothing is copied ahead (tl.enable_async_copy), as the plainest form of a program.
    """
    loops = inner_loops(n.body)
    if len(loops) != 1 or loops[0].kind != "pipelined" or n.plan.by_hand:
        return None
    loop, tiles = loops[0], [x.buffer for x in walk(n.body, Alloc) if x.buffer.is_static]
    for op in stmts_of(loop.body):
        for side in ("a", "b"):
            tile = _kept(op, side, n, loop, cx) if isinstance(op, Gemm) else None
            if tile is None:
                continue
            r, kept = getattr(op, side), region_of(tile)
            used = {e.storage for e in effects(loop.body)} - {r.buffer.data}
            shared = [b for b in tiles if b.scope_name in SHARED]
            held = sum(b.bits // 32 for b in tiles if b.scope_name == FRAGMENT and b.ndim > 1) // n.num_threads
            registers = held + _registers(op, side, n, cx) + REGISTERS.plain_loop + sum(
                b.bits // 32 for b in shared if b.data in used) // n.num_threads  # in flight
            before, after = (cx.target.limits.shared_per_sm // max(1, sum(b.bits // 8 for b in some))
                             for some in (shared, [b for b in shared if b.data in used]))
            if after <= before or cx.target.blocks_by_registers(registers, n.num_threads) <= before:
                continue
            new = with_options(replace(op, **{side: kept}), kept=True)
            body = rewrite(loop.body, lambda x: new if x is op else None, Gemm)  # noqa: B023 - called at once
            whole = seq(Alloc(tile, span=op.span), Copy(r, kept, span=op.span), replace(loop, body=body))
            out = replace(n, body=rewrite(n.body, lambda x: whole if x is loop else None, For))  # noqa: B023
            return with_options(out, report=(*n.plan.report, f"`{r.buffer.name}` stays in registers over the loop"))
    return None


def _kept(op: Any, side: str, n: Launch, loop: For, cx: PassContext) -> Buffer | None:
    """The fragment for an operand that the loop only reads, in this GEMM; None for others."""
    r: Region = getattr(op, side)
    b, other = r.buffer, op.b if side == "a" else op.a
    if b.scope_name not in SHARED or not r.is_full or b.ndim != 2 or b.dtype.bits not in (8, 16) or op.plan.wait is not None:
        return None
    inside = [s for s in stmts_of(loop.body) if any(e.storage is b.data for e in effects(s))]
    plan = choose_gemm(computed_form(op, cx.target), cx.target, n.num_threads)
    if inside != [op] or other.buffer.scope_name not in SHARED or row_of(plan.instruction) is None or other.buffer is b:
        return None
    return Buffer(f"{b.name}_kept", b.shape, b.dtype, FRAGMENT, span=b.span)


def _registers(op: Any, side: str, n: Launch, cx: PassContext) -> int:
    """Registers of a thread for the operand: all warps beside each other hold the same part of it."""
    form = computed_form(op, cx.target)
    first = (side == "a") != (form is not op)  # whether it is a of the form
    plan, r = choose_gemm(form, cx.target, n.num_threads, True), getattr(op, side)
    return int(r.buffer.size * r.dtype.bits // 32 // n.num_threads * plan.warps[1 if first else 0])


@pass_(needs=TILE, of=Launch, when=lambda cx: hopper(cx).warp_roles)
def reused_tiles(n: Launch, cx: PassContext) -> Launch | None:
    """Send copies of fragments after the pipelined loop through tiles of their shape that only the loop reads, where no memory
    is left to stage them.

        for k in T.Pipelined(n): … gemm(q, …) …            for k in T.Pipelined(n): … gemm(q, …) …
        copy(c, Y)                                  ->     copy(c, q); copy(q, Y)

    From their registers, threads store four bytes of float16 each.  A tile goes by TMA.

    Keeps: every value that is stored.
    """
    body, loops = stmts_of(n.body), inner_loops(n.body)
    staging = n.num_threads // GROUP * STEP_BYTES
    if len(loops) != 1 or loops[0] not in body or n.plan.by_hand or \
            shared_bytes(n, loops[0]) + staging <= cx.target.max_shared_bytes:
        return None
    at = body.index(loops[0])
    busy = {e.storage for s in body[at + 1:] for e in effects(s)} | {e.storage for e in effects(loops[0]) if e.writes}
    free = [x.buffer for x in walk(n.body, Alloc) if x.buffer.scope_name in SHARED and x.buffer.data not in busy]

    out = list(body)
    for k, s in enumerate(body[at + 1:], at + 1):
        if isinstance(s, Copy) and s.src.buffer.scope_name == FRAGMENT and s.src.is_full and s.dst.buffer.scope_name == GLOBAL:
            tile = next((b for b in free if b.shape == s.src.buffer.shape and b.dtype == s.dst.buffer.dtype), None)
            if tile is not None:
                out[k] = seq(replace(s, dst=region_of(tile)), replace(s, src=region_of(tile)))
    return replace(n, body=seq(*out)) if out != list(body) else None
