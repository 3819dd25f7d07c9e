"""Warp groups that take turns at the matrix unit start one after another.

    group 0:                              group 1:
        start P; wait for P                   bar.sync: group 0 has its first P
        bar.arrive (first iteration)          start P; wait for P
        …P…                                   …P…

Groups that wait for the same stage would multiply together and work on their sums together, and the matrix unit would
idle meanwhile.  Products are served in turns, so a lead of one product stays.  Each tile sets it up anew: a barrier's
128 arrivals and 128 waits are balanced in every loop.
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

BARRIERS = 5  # first of the named barriers 5 and 6; block barriers of roles have 1 to 4, copies through shared memory 8 up


def uses_ping_pong(r: WarpRoleLoop) -> bool:
    """Whether a loop is one product and work on its sums, by several groups.

    Not where the groups share a tile that one of them writes: the barrier of all groups that orders it takes the lead
    back, and in front of the product it would wait for groups that wait for their turn.  (Where that barrier only comes
    with layouts, of elements that another group holds, the pipeline gives the turns up: tl.ping_pong.)
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
    """Whether some launch may come to have warp groups that take turns."""
    return hopper(cx).roles and bool(cx.option(PassConfigKey.TL_PING_PONG)) and any(
        x.num_threads >= 2 * GROUP for x in walk(func.body, Launch))


def wait_for_own_group(r: WarpRoleLoop) -> Stmt:
    """In front of a loop that has an iteration: a group waits for the first product of the group before it."""
    return seq(*[If(_is_group(r, g), do("named_barrier", const(BARRIERS + g - 1), const(2 * GROUP)))
                 for g in range(1, r.groups)])


def signal_next_group(r: WarpRoleLoop, first: Expr) -> Stmt:
    """Behind the wait for a product: if it is the first one, the next group may start its own."""
    return If(first, seq(*[If(_is_group(r, g), do("named_barrier_arrive", const(BARRIERS + g), const(2 * GROUP)))
                           for g in range(r.groups - 1)]))


def has_iterations(r: WarpRoleLoop) -> Expr:
    """Whether the loop runs at all."""
    extent = convert(r.loop.extent)
    return binary("gt", extent, const(0, extent.dtype))


def _is_group(r: WarpRoleLoop, g: int) -> Expr:
    low, high = (const(x, r.thread.dtype) for x in (g * GROUP, (g + 1) * GROUP))
    return logical("and", binary("ge", r.thread, low), binary("lt", r.thread, high))


__all__ = ["BARRIERS", "signal_next_group", "has_iterations", "may_ping_pong", "uses_ping_pong", "wait_for_own_group"]
