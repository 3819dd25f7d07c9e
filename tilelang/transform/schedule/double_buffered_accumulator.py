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

from tilelang.ir import (Alloc, Buffer, Const, Expr, For, If, Stmt, Var, binary, const, convert, fresh, logical, replace, seq,
                         stmts_of, substitute, with_options, FRAGMENT)
from tilelang.ir.record import record
from tilelang.target.machine import REGISTERS

from ..analysis.statements import do, rename
from .chained_accumulators import cleared_gemms, filled_ahead
from .rings import GROUP, WarpRoleLoop, pin

UNROLL = 4  # iterations of the original loop in one iteration of the new loop


@record
class DoubleBuffered:
    """item: the GEMM, as an index into the loop's items.  first, second: its two accumulator buffers."""

    item: int
    first: Buffer
    second: Buffer


def double_buffered_accumulator(r: WarpRoleLoop) -> DoubleBuffered | None:
    """The GEMM of a loop that may run one iteration ahead; None if there is none or no room for a second accumulator."""
    gemms = cleared_gemms(r)
    if len(gemms) != 1 or r.stages < 3:  # two stages are in use at a time
        return None
    at = gemms[0]
    accumulator = r.body.items[at].stmt.c.buffer  # type: ignore[attr-defined]
    if any(b is accumulator for b, _ in r.launch.plan.layouts) or _registers(r, accumulator) > r.consumer_registers:
        return None
    name = f"{accumulator.name}_2"
    return DoubleBuffered(at, accumulator, replace(accumulator, name=name, data=Var(name, accumulator.data.dtype)))


def _registers(r: WarpRoleLoop, accumulator: Buffer) -> int:
    """Registers that a thread needs with a second accumulator buffer."""
    held = {e.storage: e.buffer for x in r.body.items for e in x.effects if e.buffer.scope_name == FRAGMENT}
    size = sum(b.size * b.dtype.bits // 32 for b in (*held.values(), accumulator))
    return size // (r.groups * GROUP) + REGISTERS.double_buffered


def alternate(r: WarpRoleLoop, buffered: DoubleBuffered) -> list[Stmt]:
    """The consumers' code of the loop, without its copies: a loop over UNROLL iterations at a time, and the remainder."""
    items, k = r.body.items, r.loop.var
    copies = {id(items[i].stmt) for i in r.loads}
    kept = [s for s in stmts_of(r.loop.body) if id(s) not in copies]
    at = next(n for n, s in enumerate(kept) if s is items[buffered.item].stmt)
    early = filled_ahead(r, buffered.item)
    twins = [(b, replace(b, name=f"{b.name}_2", data=Var(f"{b.name}_2", b.data.dtype))) for b in early or ()]
    second: dict[Any, Any] = {buffered.first: buffered.second, **dict(twins)}

    def iteration(it: Expr, odd: int, running: int) -> tuple[list[Stmt], list[Stmt]]:
        """(statements that start its GEMM, statements after it); `running` later GEMMs stay in flight during the latter."""
        mapping: dict[Any, Any] = {k: it, **(second if odd else {})}
        done = [r.select(substitute(s, mapping), it) for s in kept]
        gemm = [*r.filled(buffered.item, it), with_options(done[at], wait=-1)]
        slot, _ = r.slot(it)
        released = [s for ring in r.rings if ring.iterations == 1 for s in r.release(ring, slot)]
        before = r.using(done[:at], list(range(buffered.item)), it)
        rest = [do("wgmma_wait", n=running), pin(buffered.second if odd else buffered.first), *released, *done[at + 1:]]
        if early is None:
            return gemm, rename([*before, *rest])
        whole = rename([*before, *rest])
        return [*whole[:len(before)], *gemm], whole[len(before):]

    def unrolled(it: Expr, count: int) -> Stmt:
        """`count` iterations from `it` on."""
        found = [iteration(it + n if n else it, n % 2, int(n + 1 < count)) for n in range(count)]
        out = list(found[0][0])
        for n in range(count):
            if n + 1 < count:
                out += found[n + 1][0]
            out += found[n][1]
        return seq(*out)

    def loop_of(begin: Expr, number: Expr, count: int) -> For:
        v = fresh(f"{k.name}_{count}", k.dtype)
        return For(v, const(0, number.dtype), number, "serial", unrolled(begin + v * count, count), span=r.loop.span)

    first, extent = convert(r.loop.start), convert(r.loop.extent)
    made: list[Stmt] = [Alloc(buffered.second), *(Alloc(b) for _, b in twins)]
    if isinstance(extent, Const):
        whole, left = divmod(max(0, int(extent.value)), UNROLL)
        out = list(made)
        if whole:  # verify_sync reads ring_steps to skip the same iterations of all loops
            out.append(with_options(loop_of(first, const(whole, extent.dtype), UNROLL),
                                    ring_steps=(UNROLL, int(extent.value))))
        if left:
            out.append(unrolled(first + whole * UNROLL, left))
        return out
    zero, one = const(0, extent.dtype), const(1, extent.dtype)
    extent = binary("max", extent, zero)  # a negative extent would leave a remainder
    done = extent // UNROLL * UNROLL
    return [*made, loop_of(first, extent // UNROLL, UNROLL), loop_of(first + done, extent % UNROLL // 2, 2),
            If(logical("and", binary("gt", extent, zero), binary("eq", extent % 2, one)), unrolled(first + (extent - 1), 1))]
