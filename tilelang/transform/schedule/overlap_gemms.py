"""Finds two GEMMs in a loop, the second of which can run during the next iteration (attention: S = Q Kᵀ, then P V).

    for k: S = A B[k]; …S…; C += P V[k]       ->     S = A B[0]; …S…
                                                     for k >= 1: start S = A B[k]; start C += P V[k-1]; wait for S
                                                                 …S… up to what touches C or P; wait for C; …rest…
                                                     C += P V[last]

The arithmetic and its order do not change: only the waits move.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Buffer, Var, free_vars, FRAGMENT
from tilelang.ir.record import record
from tilelang.ops import Gemm
from tilelang.target.machine import REGISTERS

from ..analysis.pipeline_schedule import Body, Item, violations




@record
class Pair:
    """Items of the loop body: the first GEMM; the second; the first item between them that must wait for the second."""

    first: int
    second: int
    waits: int


def two_gemms(body: Body, loads: set[int], rings: set[Buffer], registers: int, threads: int) -> Pair | str:
    """The two GEMMs of a loop, if the second may run during the work on the first one's result.

    Else the reason why not, or "" if the loop does not have two GEMMs.  rings: the buffers that the loads fill.
    registers: how many a thread may use.  threads: how many hold an accumulator together.
    """
    items = body.items
    rest = [i for i in range(len(items)) if i not in loads]
    found = [i for i in rest if isinstance(items[i].stmt, Gemm)]
    if len(found) != 2:
        return ""
    if found[1] != rest[-1]:
        return "work follows it"
    if body.allocs or any(items[i].defines is not None for i in rest):
        return "the loop binds values that are not the same for all threads"
    first, second = found
    a: Any = items[first].stmt
    b: Any = items[second].stmt
    if a.c.buffer is b.c.buffer:
        return "both add to one accumulator"
    if a.b.buffer not in rings or b.b.buffer not in rings or a.b.buffer is b.b.buffer:
        return "its tiles have no ring of their own"
    if b.a.buffer.scope_name != FRAGMENT or free_vars(b) & {s.var for s in body.pure}:
        return f"`{b.a.buffer.name}` is not in registers"
    private: list[Var] = [b.c.buffer.data, b.a.buffer.data]
    if any(items[i].touches(v) for v in private for i in rest if i <= first):
        return "what it uses is touched before the first one"
    if any(e.writes and e.storage is a.a.buffer.data for i in rest for e in items[i].effects):
        return f"`{a.a.buffer.name}` is written in the loop"
    held = sum(r.buffer.size * r.dtype.bits // 32 for r in (a.c, b.c, b.a)) // threads
    beside = REGISTERS.overlapped_gemms
    if held + beside > registers:
        return f"both results take {held} registers of a thread and {beside} beside them, more than {registers}"
    if not _allowed(items, rest, second):
        return "the work in between depends on it"
    waits = next((i for i in rest if first < i < second and any(items[i].touches(v) for v in private)), second)
    return Pair(first, second, waits)


def _allowed(items: list[Item], rest: list[int], second: int) -> bool:
    """Whether the second GEMM of an iteration may run right after the first GEMM of the next one."""
    chosen = [items[i] for i in rest]
    at = rest.index(second)
    first = next(k for k, x in enumerate(chosen) if isinstance(x.stmt, Gemm))
    order = [k if k <= first else first + 1 if k == at else k + 1 for k in range(len(chosen))]
    stage = [int(k == at) for k in range(len(chosen))]
    return not violations(chosen, stage, order, {})


__all__ = ["Pair", "two_gemms"]
