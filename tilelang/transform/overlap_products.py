"""Two products in one loop, the second of what was made from the first: which schedule keeps the matrix unit busy.

    for k: S = A B[k]; …S…; C += P V[k]       ->     S = A B[0]; …S…
                                                     for k >= 1: start S = A B[k]; start C += P V[k-1]; wait for S
                                                                 …S… up to what touches C or P; wait for C; …rest…
                                                     C += P V[last]

The arithmetic and its order are those of the loop: only the waiting moves.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Buffer, Var, free_vars
from tilelang.ir.record import record
from tilelang.ops import Gemm

from .schedule import Body, Item, violations

FRAGMENT = "local.fragment"


_BESIDE = 44  # registers of a thread for addresses, row statistics and loop state


@record
class Pair:
    """Items of the loop body: the first product; the second; the first between them that must wait for the second."""

    first: int
    second: int
    waits: int


def two_products(body: Body, loads: set[int], rings: set[Buffer], registers: int, threads: int) -> Pair | None:
    """The two products of a loop whose second may run under the work on the first's result; None when there are none.

    rings: the buffers that the loads fill.  registers: what a thread may use; threads: that share an accumulator.
    """
    items = body.items
    rest = [i for i in range(len(items)) if i not in loads]
    found = [i for i in rest if isinstance(items[i].stmt, Gemm)]
    if len(found) != 2 or found[1] != rest[-1] or body.allocs or any(items[i].defines is not None for i in rest):
        return None
    first, second = found
    a: Any = items[first].stmt
    b: Any = items[second].stmt
    if a.b.buffer not in rings or b.b.buffer not in rings or a.b.buffer is b.b.buffer or a.c.buffer is b.c.buffer:
        return None
    if b.a.buffer.scope_name != FRAGMENT or free_vars(b) & {s.var for s in body.pure}:
        return None
    private: list[Var] = [b.c.buffer.data, b.a.buffer.data]
    if any(items[i].touches(v) for v in private for i in rest if i <= first):
        return None
    if any(e.writes and e.storage is a.a.buffer.data for i in rest for e in items[i].effects):
        return None
    held = sum(r.buffer.size * r.dtype.bits // 32 for r in (a.c, b.c, b.a)) // threads
    if held + _BESIDE > registers or not _allowed(items, rest, second):
        return None
    waits = next((i for i in rest if first < i < second and any(items[i].touches(v) for v in private)), second)
    return Pair(first, second, waits)


def _allowed(items: list[Item], rest: list[int], second: int) -> bool:
    """Whether the second product of an iteration may run right after the first of the next one."""
    chosen = [items[i] for i in rest]
    at = rest.index(second)
    first = next(k for k, x in enumerate(chosen) if isinstance(x.stmt, Gemm))
    order = [k if k <= first else first + 1 if k == at else k + 1 for k in range(len(chosen))]
    stage = [int(k == at) for k in range(len(chosen))]
    return not violations(chosen, stage, order, {})


__all__ = ["Pair", "two_products"]
