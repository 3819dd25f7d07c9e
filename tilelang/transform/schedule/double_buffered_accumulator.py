"""Double-buffers an accumulator that is cleared in every iteration, so that a GEMM runs while the one before is promoted.

    for k: P = A[k] B[k]; …P…     ->     for k in steps of 4:
                                             start P = A[k] B[k]
                                             start Q = A[k+1] B[k+1]; wait for P; …P…
                                             start P = A[k+2] B[k+2]; wait for Q; …Q…
                                             …; wait for Q; …Q…
                                         the remaining iterations, in the same way

This is for accumulators that are scaled or promoted before they are added to a total (float8 with block scales).  Two
accumulators are in registers instead of one; the arithmetic and its order do not change.  No GEMM is in flight between two
iterations of the new loop: ptxas cannot handle accumulators that alternate across the end of a loop and serialises the
wgmma instructions (C7514).  So the tensor cores are idle once in each iteration of the new loop, which is why one covers
several iterations of the original loop.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Bind, Buffer, Const, Expr, For, If, Stmt, Var, binary, const, convert, free_vars, fresh,
                         is_const, logical, replace, seq, stmts_of, substitute, with_options, FRAGMENT)
from tilelang.ir.record import record
from tilelang.ops import Gemm
from tilelang.target.machine import REGISTERS

from ..analysis.effects import effects, fills_whole
from ..analysis.statements import rename
from ..analysis.statements import do
from .rings import GROUP, WarpRoleLoop, pin
from .pingpong_barriers import signal_next_group, uses_ping_pong, wait_for_own_group

UNROLL = 4  # iterations of the original loop in one iteration of the new loop


@record
class DoubleBuffered:
    """item: the GEMM, as an index into the loop's items.  first, second: its two accumulator buffers."""

    item: int
    first: Buffer
    second: Buffer


def double_buffered_accumulator(r: WarpRoleLoop) -> DoubleBuffered | None:
    """The GEMM of a loop that may run one iteration ahead; None if there is none or no room for a second accumulator."""
    items = r.body.items
    rest = [i for i in range(len(items)) if i not in r.loads]
    gemms = [i for i in rest if isinstance(items[i].stmt, Gemm)]
    if len(gemms) != 1 or r.body.allocs or any(items[i].defines is not None for i in rest):
        return None
    if r.stages < 3:  # two stages are in use at a time
        return None
    at = gemms[0]
    op: Any = items[at].stmt
    accumulator = op.c.buffer
    if not is_const(op.clear_accum, True) or not {op.a.buffer, op.b.buffer} <= set(r.versions):
        return None
    if any(x.last >= at if x.iterations > 1 else (x.first, x.last) != (at, at) for x in r.rings):
        return None
    if free_vars(op) & {s.var for s in r.body.pure}:
        return None
    others = [i for i in rest if i != at]
    read = {e.storage for e in items[at].effects} - {accumulator.data}
    if any(e.writes and e.storage in read for i in others for e in items[i].effects):
        return None
    if any(items[i].touches(accumulator.data) for i in others if i < at) or r.used_outside(accumulator.data):
        return None
    if any(b is accumulator for b, _ in r.launch.plan.layouts) or _registers(r, accumulator) > r.consumer_registers:
        return None
    name = f"{accumulator.name}_2"
    return DoubleBuffered(at, accumulator, replace(accumulator, name=name, data=Var(name, accumulator.data.dtype)))


def _registers(r: WarpRoleLoop, accumulator: Buffer) -> int:
    """Registers that a thread needs with a second accumulator buffer."""
    held = {e.storage: e.buffer for x in r.body.items for e in x.effects if e.buffer.scope_name == FRAGMENT}
    size = sum(b.size * b.dtype.bits // 32 for b in (*held.values(), accumulator))
    return size // (r.groups * GROUP) + REGISTERS.double_buffered


def _early(r: WarpRoleLoop, before: list[Stmt], after: list[Stmt]) -> list[Buffer] | None:
    """The fragments that the statements before the GEMM fill for those after it, if that can be done one iteration ahead.

    They then get a second copy each, so that loads (of scales) have the time of a whole GEMM to arrive.  None if these
    statements cannot run ahead.
    """
    if not all(isinstance(s, Bind) or fills_whole(s) for s in before):
        return None
    made: dict[Var, Buffer] = {}
    for s in before:
        for e in effects(s):
            if e.writes and (e.buffer.scope_name != FRAGMENT or e.storage not in made and e.reads):
                return None
            if e.writes:
                made[e.storage] = e.buffer
    inside = {id(x) for x in (*before, *after)}
    touched = {e.storage for e in (x for s in before for x in effects(s))}
    if any(e.writes and e.storage in touched for s in after for e in effects(s)):
        return None
    others = (s for s in stmts_of(r.loop.body) if id(s) not in inside)
    if any(map(r.used_outside, made)) or any(e.storage in made for s in others for e in effects(s)):
        return None
    annotated = {b for b, _ in r.launch.plan.layouts}
    return None if annotated & set(made.values()) else list(made.values())


def alternate(r: WarpRoleLoop, buffered: DoubleBuffered) -> list[Stmt]:
    """The consumers' code of the loop, without its copies: a loop over UNROLL iterations at a time, and the remainder."""
    items, k = r.body.items, r.loop.var
    copies = {id(items[i].stmt) for i in r.loads}
    kept = [s for s in stmts_of(r.loop.body) if id(s) not in copies]
    at = next(n for n, s in enumerate(kept) if s is items[buffered.item].stmt)
    early = _early(r, kept[:at], kept[at + 1:])
    twins = [(b, replace(b, name=f"{b.name}_2", data=Var(f"{b.name}_2", b.data.dtype))) for b in early or ()]
    second: dict[Any, Any] = {buffered.first: buffered.second, **dict(twins)}

    def iteration(it: Expr, odd: int, running: int, after_wait: list[Stmt]) -> tuple[list[Stmt], list[Stmt]]:
        """(statements that start its GEMM, statements after it); `running` later GEMMs stay in flight during the latter."""
        mapping: dict[Any, Any] = {k: it, **(second if odd else {})}
        done = [r.select(substitute(s, mapping), it) for s in kept]
        gemm = [*r.filled(buffered.item, it), with_options(done[at], wait=-1)]
        slot, _ = r.slot(it)
        released = [s for ring in r.rings if ring.iterations == 1 for s in r.release(ring, slot)]
        before = r.using(done[:at], list(range(buffered.item)), it)
        rest = [do("wgmma_wait", n=running), pin(buffered.second if odd else buffered.first), *released, *after_wait,
                *done[at + 1:]]
        if early is None:
            return gemm, rename([*before, *rest])
        whole = rename([*before, *rest])
        return [*whole[:len(before)], *gemm], whole[len(before):]

    def unrolled(it: Expr, count: int, once: list[Stmt]) -> Stmt:
        """`count` iterations from `it` on.  once: statements to run after the first GEMM."""
        found = [iteration(it + n if n else it, n % 2, int(n + 1 < count), once if n == 0 else []) for n in range(count)]
        out = list(found[0][0])
        for n in range(count):
            if n + 1 < count:
                out += found[n + 1][0]
            out += found[n][1]
        return seq(*out)

    def loop_of(begin: Expr, number: Expr, count: int, lead: bool) -> For:
        v = fresh(f"{k.name}_{count}", k.dtype)
        once = [signal_next_group(r, binary("eq", v, const(0, v.dtype)))] if lead else []
        return For(v, const(0, number.dtype), number, "serial", unrolled(begin + v * count, count, once), span=r.loop.span)

    first, extent, lead = convert(r.loop.start), convert(r.loop.extent), uses_ping_pong(r)
    made: list[Stmt] = [Alloc(buffered.second), *(Alloc(b) for _, b in twins)]
    if isinstance(extent, Const):
        whole, left = divmod(max(0, int(extent.value)), UNROLL)
        out = list(made)
        if lead and whole:
            out.append(wait_for_own_group(r))
        if whole:  # verify_sync reads ring_steps to skip the same iterations of all loops
            out.append(with_options(loop_of(first, const(whole, extent.dtype), UNROLL, lead),
                                    ring_steps=(UNROLL, int(extent.value))))
        if left:
            out.append(unrolled(first + whole * UNROLL, left, []))
        return out
    zero, one = const(0, extent.dtype), const(1, extent.dtype)
    extent = binary("max", extent, zero)  # a negative extent would leave a remainder
    whole_turns, done = extent // UNROLL, extent // UNROLL * UNROLL
    return [*made, *([If(binary("gt", whole_turns, zero), wait_for_own_group(r))] if lead else []),
            loop_of(first, whole_turns, UNROLL, lead), loop_of(first + done, extent % UNROLL // 2, 2, False),
            If(logical("and", binary("gt", extent, zero), binary("eq", extent % 2, one)),
               unrolled(first + (extent - 1), 1, []))]


__all__ = ["DoubleBuffered", "alternate", "double_buffered_accumulator"]
