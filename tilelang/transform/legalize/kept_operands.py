"""Keeps an operand that a loop does not change in registers, where more blocks fit without its bytes.

    copy(Q, q)                              copy(Q, q); copy(q, q_kept)
    for k in T.Pipelined(n):         ->     for k in T.Pipelined(n):
        copy(K[k], t)                           copy(K[k], t)
        gemm(q, t, s)                           gemm(q_kept, t, s)

The loop's tiles then take the bytes of the tile.  A thread has registers for it where these are more than one block needs.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Buffer, For, Launch, Region, region_of, replace, rewrite, seq, stmts_of, walk, with_options,
                         FRAGMENT, SHARED)
from tilelang.ops import Copy, Gemm
from tilelang.ops.gemm.select import choose_gemm, computed_form
from tilelang.target.machine import REGISTERS
from tilelang.target.mma import row as row_of

from ..analysis.effects import effects
from ..analysis.pipeline_loops import inner_loops
from ..framework.config import PassConfigKey
from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE, of=Launch, when=lambda cx: getattr(cx.target, "loads_by_registers", False) and bool(
    cx.option(PassConfigKey.TL_ENABLE_ASYNC_COPY)))
def kept_operands(n: Launch, cx: PassContext) -> Launch | None:
    """Holds the operand of one GEMM of the launch's loop in registers, whole.

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
            held = sum(b.size * b.dtype.bits // 32 for b in tiles if b.scope_name == FRAGMENT and b.ndim > 1) // n.num_threads
            registers = held + _registers(op, side, n, cx) + REGISTERS.plain_loop + sum(
                b.size * b.dtype.bits // 32 for b in shared if b.data in used) // n.num_threads  # in flight
            before, after = (cx.target.limits.shared_per_sm // max(1, sum(b.size * b.dtype.bits // 8 for b in some))
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
