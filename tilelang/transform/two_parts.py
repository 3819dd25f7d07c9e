"""A product that starts anew in every iteration: of two iterations the second's runs under the work on the first's sums.

    for k: P = A[k] B[k]; …P…     ->     for k in steps of 2:
                                             start P = A[k] B[k]; start Q = A[k+1] B[k+1]
                                             wait for P; …P…; wait for Q; …Q…
                                         the last iteration, of an odd number

So go sums of parts that are scaled or promoted before they are added to a total (float8 with block scales).  Two parts
are in registers instead of one; the arithmetic and its order are those of the loop.  No product is under way from one
turn to the next: ptxas gives up on accumulators that take turns over a loop's end and serialises them (C7514).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang.ir import (Alloc, Buffer, Const, Expr, For, If, Stmt, Var, binary, const, convert, free_vars, fresh, is_const,
                         logical, replace, seq, stmts_of, substitute, with_attrs)
from tilelang.ops import Gemm

from .effects import effects
from .pipeline_emit import rename, select_version
from .rings import GROUP, RoleLoop, do, pin
from .stagger import give_turn, staggered, wait_for_turn

FRAGMENT = "local.fragment"
_BESIDE = 32  # registers of a thread for addresses, barriers and loop state


@dataclass(frozen=True)
class Parts:
    """item: of the loop body, the product.  first, second: what it is summed in, in turns."""

    item: int
    first: Buffer
    second: Buffer


def two_parts(r: RoleLoop) -> Parts | None:
    """The product of a loop that may run an iteration ahead; None when there is none, or no room for a second part."""
    items = r.body.items
    rest = [i for i in range(len(items)) if i not in r.loads]
    products = [i for i in rest if isinstance(items[i].stmt, Gemm)]
    if len(products) != 1 or r.body.allocs or any(items[i].defines is not None for i in rest):
        return None
    if r.stages < 3:  # two are in use at a time
        return None
    at = products[0]
    op: Any = items[at].stmt
    part = op.c.buffer
    if not is_const(op.clear_accum, True) or not {op.a.buffer, op.b.buffer} <= set(r.versions):
        return None
    if any((x.first, x.last) != (at, at) for x in r.rings) or free_vars(op) & {s.var for s in r.body.pure}:
        return None
    others = [i for i in rest if i != at]
    read = {e.storage for e in items[at].effects} - {part.data}
    if any(e.writes and e.storage in read for i in others for e in items[i].effects):
        return None
    outside = (s for s in stmts_of(r.launch.body) if s is not r.loop)
    if any(items[i].touches(part.data) for i in others if i < at) or any(
            e.storage is part.data for s in outside for e in effects(s)):
        return None
    if any(b is part for b, _ in r.launch.attr("layouts") or ()) or _registers(r, part) > r.consumer_registers:
        return None
    return Parts(at, part, replace(part, name=f"{part.name}_2", data=Var(f"{part.name}_2", part.data.dtype)))


def _registers(r: RoleLoop, part: Buffer) -> int:
    """Of a thread, with a second part."""
    held = {e.storage: e.buffer for x in r.body.items for e in x.effects if e.buffer.scope_name == FRAGMENT}
    size = sum(b.size * b.dtype.bits // 32 for b in (*held.values(), part))
    return size // (r.groups * GROUP) + _BESIDE


def alternate(r: RoleLoop, parts: Parts) -> list[Stmt]:
    """The loop without its copies, two iterations at a time, and what ends it."""
    items, new, k = r.body.items, r.versions, r.loop.var
    copies = {id(items[i].stmt) for i in r.loads}
    kept = [s for s in stmts_of(r.loop.body) if id(s) not in copies]
    at = next(n for n, s in enumerate(kept) if s is items[parts.item].stmt)

    def of(stmts: list[Stmt], it: Expr, part: Buffer) -> list[Stmt]:
        mapping: dict[Any, Any] = {k: it, parts.first: part}
        return [select_version(substitute(s, mapping), new, r.step(it)) for s in stmts]

    def start(it: Expr, part: Buffer) -> list[Stmt]:
        return [*r.filled(parts.item, it), *(with_attrs(s, wait=-1) for s in of([kept[at]], it, part))]

    def rest(it: Expr, part: Buffer, running: int, *after_wait: Stmt) -> list[Stmt]:
        """The work of an iteration, its product done; `running` products stay under way."""
        slot, _ = r.slot(it)
        released = [s for ring in r.rings for s in r.release(ring, slot)]
        return rename([*of(kept[:at], it, part), do("wgmma_wait", n=running), pin(part), *released, *after_wait,
                       *of(kept[at + 1:], it, part)])

    p, q = parts.first, parts.second
    first, extent = convert(r.loop.start), convert(r.loop.extent)
    zero, pairs = const(0, extent.dtype), extent // 2
    turn = fresh(f"{k.name}_2", k.dtype)
    it, last = first + turn * 2, first + extent - 1
    turns = [give_turn(r, binary("eq", turn, zero))] if staggered(r) else []
    body = seq(*start(it, p), *start(it + 1, q), *rest(it, p, 1, *turns), *rest(it + 1, q, 0))
    loop = For(turn, zero, pairs, "serial", body, span=r.loop.span)
    if isinstance(extent, Const):  # for verify_sync, which leaves out the same iterations of all loops
        loop = with_attrs(loop, ring_steps=(2, int(extent.value)))
    opening = [If(binary("gt", pairs, zero), wait_for_turn(r))] if turns else []
    out: list[Stmt] = [Alloc(q), *opening, loop]
    single = seq(*start(last, p), *rest(last, p, 0))
    if not isinstance(extent, Const):
        out.append(If(logical("and", binary("gt", extent, zero), binary("eq", extent % 2, const(1, extent.dtype))), single))
    elif int(extent.value) % 2:
        out.append(single)
    return out


__all__ = ["Parts", "alternate", "two_parts"]
