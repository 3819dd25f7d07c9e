"""Emits the named barriers that make warp groups start their GEMMs one after another (ping-pong).

    group 0:                              group 1:
        start P; wait for P                   bar.sync: group 0 has its first P
        bar.arrive (first iteration)          start P; wait for P
        …P…                                   …P…

Without the barriers, groups that wait for the same stage would run their MMAs at the same time and promote their results at
the same time, and the tensor cores would be idle during promotion.  The tensor cores serve GEMMs alternately, so once one
group is ahead by one GEMM, it stays ahead.  The barriers are used once per tile: the 128 arrivals and 128 waits of a barrier
are balanced in every loop.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Expr, Func, If, Launch, Stmt, binary, const, convert, logical, seq, walk, SHARED
from tilelang.ops import Gemm

from ..framework.config import PassConfigKey
from ..legalize.hopper_features import hopper
from ..framework.pass_ import PassContext
from ..analysis.statements import do
from .rings import GROUP, WarpRoleLoop

BARRIERS = 5  # first of named barriers 5 and 6; block barriers of warp roles use 1 to 4, copies through shared memory 8 up


def uses_ping_pong(r: WarpRoleLoop) -> bool:
    """Whether a loop consists of one GEMM and work on its accumulator, done by several warp groups.

    False if the groups share a tile that one of them writes: the barrier of all groups that orders these accesses would
    remove the offset between the groups.  In front of the GEMM it would even wait for groups that are themselves waiting for
    the ping-pong barrier.  (If such a barrier is only found when layouts are known, because a group reads elements of
    another one, the pipeline is compiled again without ping-pong: tl.ping_pong.)
    """
    if not r.cx.option(PassConfigKey.TL_PING_PONG):
        return False
    items = [x for i, x in enumerate(r.body.items) if i not in r.loads]
    if any(e.writes and e.buffer.scope_name in SHARED for x in items for e in x.effects):
        return False
    rest = [x.stmt for x in items]
    products: list[Any] = [x for x in rest if isinstance(x, Gemm)]
    if r.groups < 2 or len(products) != 1:
        return False
    sums = products[0].c.buffer.data
    return any(x.touches(sums) for i, x in enumerate(r.body.items) if i not in r.loads and x.stmt is not products[0])


def may_ping_pong(func: Func, cx: PassContext) -> bool:
    """Whether some launch may use ping-pong."""
    return hopper(cx).warp_roles and bool(cx.option(PassConfigKey.TL_PING_PONG)) and any(
        x.num_threads >= 2 * GROUP for x in walk(func.body, Launch))


def wait_for_own_group(r: WarpRoleLoop) -> Stmt:
    """Before a loop that has an iteration: a group waits for the first GEMM of the group before it."""
    return seq(*[If(_is_group(r, g), do("named_barrier", const(BARRIERS + g - 1), const(2 * GROUP)))
                 for g in range(1, r.groups)])


def signal_next_group(r: WarpRoleLoop, first: Expr) -> Stmt:
    """After the wait for a GEMM: if it was the first one (`first`), lets the next group start its own."""
    return If(first, seq(*[If(_is_group(r, g), do("named_barrier_arrive", const(BARRIERS + g), const(2 * GROUP)))
                           for g in range(r.groups - 1)]))


def has_iterations(r: WarpRoleLoop) -> Expr:
    """Whether the loop has at least one iteration."""
    extent = convert(r.loop.extent)
    return binary("gt", extent, const(0, extent.dtype))


def _is_group(r: WarpRoleLoop, g: int) -> Expr:
    low, high = (const(x, r.thread.dtype) for x in (g * GROUP, (g + 1) * GROUP))
    return logical("and", binary("ge", r.thread, low), binary("lt", r.thread, high))


__all__ = ["BARRIERS", "signal_next_group", "has_iterations", "may_ping_pong", "uses_ping_pong", "wait_for_own_group"]
