"""Moves fragments that no layout distributes over threads into shared memory.

    F = alloc_fragment((34, 60))                   F = alloc_shared((34, 60))
    W = reshape(F, (60, 34))              ->       W = reshape(F, (60, 34))
    F[3, k] = F[4, k] + 1                          for _ in T.Parallel(1): F[3, k] = F[4, k] + 1

Every thread would hold the whole tile if it is viewed in shapes without common modes, or if every thread reads arbitrary
elements of it.  Up to `REGISTERS.replicated_tile` registers that is fastest; a larger copy in every thread would take too
many of its registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Buffer, Call, Const, Expr, For, If, Launch, Load, Parallel, Region, Stmt, Store,
                         TileOp, Var, While, const, controls, fresh, contains, inner, replace, stmts_of, substitute, walk,
                         with_inner, DYNAMIC, SHARED)
from tilelang.ops import Copy, Fill
from tilelang.target.machine import REGISTERS

from ..check.check_collective import ByThread


def is_large(b: Buffer) -> bool:
    """Whether a fragment is too large for every thread to hold all of it."""
    return b.is_static and b.bits > 32 * REGISTERS.replicated_tile


def staged(launch: Launch, data: Var, limit: int | None) -> Launch | None:
    """The launch with a fragment in shared memory; None where that could change the program's results.

    data: the fragment's storage.  limit: bytes of shared memory of a block.

    In shared memory threads see each other's elements.  So the fragment may only be used in these ways: tiles are copied to
    and from it; parallel loops write one element per iteration and read no other one; other statements write the same
    value in every thread, not under conditions that may differ between threads, and not where users order the threads.
    """
    if launch.plan.by_hand or launch.num_threads == 1 or any(b.data is data for b, _ in launch.plan.layouts):
        return None
    if not _same_for_all(launch.body, data, ByThread(launch)):
        return None
    views = {b for b in walk(launch.body, Buffer) if b.data is data}
    room = sum(x.buffer.size * x.buffer.dtype.bytes for x in walk(launch.body, Alloc)
               if x.buffer.scope_name in SHARED and x.buffer.is_static)
    root = next((x.buffer for x in walk(launch.body, Alloc) if x.buffer.data is data), None)
    if root is None or limit is not None and room + root.size * root.dtype.bytes > limit:
        return None
    there = Var(data.name, data.dtype)
    body = substitute(launch.body, {b: replace(b, scope_name=DYNAMIC, data=there) for b in views})
    return replace(launch, body=_once(body, there))


def _once(s: Any, data: Var) -> Any:
    """The node s with one thread for each store that every thread would make."""
    if isinstance(s, Store) and s.buffer.data is data:
        return Parallel((fresh("once"),), (const(1),), s, span=s.span)
    return s if isinstance(s, Parallel) else with_inner(s, lambda x: _once(x, data))


def _differs(e: Expr, among: ByThread) -> bool:
    """Whether threads may get different values of an expression."""
    return contains(e, Call) or among.divergent(e)


def _same_for_all(s: Stmt, data: Var, among: ByThread) -> bool:
    """Whether the accesses below s satisfy the conditions of `staged`.  among: what differs between threads."""
    if not any(b.data is data for b in walk(s, Buffer)):
        return True
    match s:
        case Parallel():
            return _by_element(s, data)
        case TileOp():
            own = sum(isinstance(x, Region) and x.buffer.data is data for x in walk(s))
            return isinstance(s, (Copy, Fill)) and own == 1 and not any(_accesses(s, data))
        case Store() if s.buffer.data is data:
            return not any(_differs(e, among) for e in (*s.indices, s.value)) and not _escapes(s, data)
        case If() | While() | For() if any(_differs(e, among) or contains(e, Load) for e in controls(s)):
            return False
    below = inner(s)
    if not below:
        return not _escapes(s, data)
    return all(_same_for_all(x, data, among) for x in below)


def _escapes(s: Stmt, data: Var) -> bool:
    """Whether the address of an element is taken, or a whole tile is passed to a call."""
    return any(isinstance(x, (AddressOf, Region)) and x.buffer.data is data or
               isinstance(x, Call) and any(isinstance(a, Buffer) and a.data is data for a in x.args) for x in walk(s))


def _by_element(s: Parallel, data: Var) -> bool:
    """Whether the iterations of a loop that writes the tile each write one element of it and touch no other one."""
    accesses = list(_accesses(s, data))
    if _escapes(s.body, data) or any(isinstance(x, Parallel) for y in stmts_of(s.body) for x in walk(y)):
        return False
    writes = [x for x in accesses if isinstance(x, Store)]
    if not writes:
        return True
    first = writes[0]
    if any(x.buffer is not first.buffer or x.indices != first.indices for x in accesses):
        return False
    used = [i for i in first.indices if not isinstance(i, Const)]
    wanted = [v for v, n in zip(s.vars, s.extents) if not (isinstance(n, Const) and n.value == 1)]
    return len(set(used)) == len(used) and set(used) == set(wanted)


def _accesses(s: Stmt, data: Var) -> Iterator[Load | Store]:
    """Accesses of single elements of the tile."""
    return (x for x in walk(s, Load, Store) if x.buffer.data is data)
