"""Chooses the schedule of the consumer warp groups for a pipelined loop whose tiles a producer loads.

The schedules are: an order in which GEMMs run under other statements (loop_order.py); a GEMM into two accumulators in turn,
each under the promotion of the one before (`promoted_gemm`); or the loop as it stands, with waits and releases.
emit.py writes the code.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilelang.ir import Buffer, free_vars, is_const, FRAGMENT
from tilelang.ops import Gemm
from tilelang.target.machine import REGISTERS, consumer_registers

from ..analysis.loop_items import LoopItems, LoopOrder
from ..analysis.pipeline_loops import scheduled_lists, violations, wanted_stages
from ..analysis.liveness import Uses
from ..analysis.simulate_loop import Event, RingUse, Wait
from ..framework.config import PassConfigKey
from .loop_order import Search
from .rings import GROUP, Ring, WarpRoleLoop

# Warp groups from which on loops that compute an operand are divided between the steps of its GEMM: with two, the steps of one
# wait for the GEMMs of the other (attention of 128 columns forward: 959 for 791 us).
LEAST_GROUPS = 3

# ---- the order of items ---------------------------------------------------------------------------------------------------


def items_of(r: WarpRoleLoop, versions: bool = True) -> LoopItems:
    """The items that the consumers of a loop run.  versions: whether tiles that they write have several."""
    items = r.body.items
    own = [i for i in range(len(items)) if i not in r.loads]
    rings = [RingUse(users_of(r, x), x.bytes(items), r.stages) for x in r.rings]
    loaded = {b.data for b in r.filled}
    several = {**r.made, **{e.storage: r.stages for i in own for e in items[i].effects if e.writes and e.storage in loaded}}
    out = LoopItems(items, own, r.groups, r.outside, rings, _asked(r, own), several if versions else None)
    out.beside = r.beside
    return out


def _asked(r: WarpRoleLoop, own: list[int]) -> tuple[Event, ...]:
    """The order that the program gives the consumers' items; () where it gives none, or one that this loop cannot have."""
    wanted, items = wanted_stages(r.loop), r.body.items
    if isinstance(wanted, int):
        return ()
    stage, order = scheduled_lists(r.loop, r.body, *wanted)
    low, ranked = min(stage[i] for i in own), sorted(own, key=lambda i: order[i])
    stages, places = [stage[i] - low for i in own], [order[i] for i in own]
    plain = ranked == own and not any(stages)
    if plain or low < 0 or max(stages) > 1 or violations([items[i] for i in own], stages, places, {}):
        return ()
    return tuple(Event(i, stage[i] - low) for i in ranked)


def users_of(r: WarpRoleLoop, ring: Ring) -> frozenset[int]:
    """The items of the consumers that use a ring's tiles."""
    tiles = r.tiles(ring)
    return frozenset(i for i, x in enumerate(r.body.items) if i not in r.loads and any(x.touches(b.data) for b in tiles))


def best_order(r: WarpRoleLoop, items: LoopItems) -> LoopOrder:
    """The best order of the consumers' items, by the one search of the loop."""
    if r.body.search is None:
        r.body.search = Search(str(r.cx.option(PassConfigKey.TL_WGMMA_IN_FLIGHT)))
    return r.body.search.best(items, consumer_registers(r.groups))  # type: ignore[no-any-return]


def enough_stages(r: WarpRoleLoop, most: int) -> int:
    """The least number of stages, at most `most`, with which the loop waits for loads as little as it can.

    That is the loop's own number, unless more of them save a tenth of the cycles.  Where threads make operands a twentieth is
    enough: what they wait for at the beginning of an iteration comes in front of the GEMM.
    """
    items = items_of(r)

    def cycles(n: int) -> float:
        items.rings = tuple(RingUse(x.users, x.bytes, n) for x in items.rings)
        return best_order(r, items).cycles

    own, best = cycles(r.stages), cycles(most)
    saved = best <= (0.95 if r.made else 0.9) * own
    return next(n for n in range(r.stages, most + 1) if cycles(n) <= 1.05 * best) if saved else r.stages


def overlaps(loop: LoopItems, order: LoopOrder) -> bool:
    """Whether a GEMM of the loop runs under other statements, or under the wait for the next stage."""
    if not order.cycles:
        return False
    events, waits = order.events, loop.waits(order.events, True, order.carry)
    done = {p: q for q, w in waits.items() for p in w.done}
    return bool(order.depth) or loop.carries(order) or any(
        e.item not in loop.gemms for p, q in done.items() for e in events[p + 1:q])


def chosen_order(r: WarpRoleLoop) -> LoopOrder | None:
    """The order in which GEMMs of the loop run under other statements; None if another schedule is taken.

    A loop with two accumulators in turn keeps the order of the program.
    """
    if r.order is None:
        order = None if promoted_gemm(r) is not None else best_order(r, items_of(r))
        r.order = order if order is not None and overlaps(items_of(r), order) else False
    return r.order or None


def in_order_of_release(r: WarpRoleLoop) -> list[Ring]:
    """The rings in the order in which the consumers release their stages: no load waits behind one that can start later."""
    order = chosen_order(r)
    if order is None:
        return r.rings
    items = items_of(r)
    waits = items.waits(order.events, True, order.carry)
    return sorted(r.rings, key=lambda x: items.held(order.events, waits, RingUse(users_of(r, x), 0, r.stages)).released)


# ---- a GEMM that clears two accumulators in turn ---------------------------------------------------------------------------


def promoted_gemm(r: WarpRoleLoop) -> tuple[int, tuple[Buffer, ...]] | None:
    """(index of the only GEMM of a loop, what has two versions in turn), if the GEMM gets two accumulators, which it clears.

    Only statements behind it use its result, and nothing else its operands.  Fragments that statements in front of it fill
    (scales) have two versions too: they are loaded in the time of a GEMM.  There must be registers, and a third stage: two
    are in use at a time.
    """
    items = r.body.items
    rest = [i for i in range(len(items)) if i not in r.loads]
    found = [i for i in rest if isinstance(items[i].stmt, Gemm)]
    if len(found) != 1 or r.stages < 3 or r.body.allocs or any(items[i].defines is not None for i in rest):
        return None
    i, op = found[0], items[found[0]].stmt
    assert isinstance(op, Gemm)
    accumulator, others = op.c.buffer, [items[j] for j in rest if j != i]
    if not is_const(op.clear_accum, True) or free_vars(op) & {s.var for s in r.body.pure} or \
            not {op.a.buffer, op.b.buffer} <= set(r.versions) or any(x.last > i for x in r.rings):
        return None
    if any(x.touches(op.a.buffer.data) or x.touches(op.b.buffer.data) for x in others) or any(
            items[j].touches(accumulator.data) for j in rest if j < i):
        return None
    before = [e for j in rest if j < i for e in items[j].effects]
    twins = tuple(dict.fromkeys([accumulator, *(e.buffer for e in before if e.writes)]))
    if any(e.writes and e.storage in {x.storage for x in before} for j in rest if j > i for e in items[j].effects):
        return None
    uses, laid = Uses(r.launch.body), {b for b, _ in r.launch.plan.layouts}
    if any(b.scope_name != FRAGMENT or b in laid or uses.carried(b.data, r.loop) or b.data in r.outside for b in twins):
        return None
    held = {e.storage: e.buffer for x in items for e in x.effects if e.buffer.scope_name == FRAGMENT}
    size = sum(b.bits // 32 for b in (*held.values(), accumulator)) // (r.groups * GROUP)
    return None if size + REGISTERS.double_buffered > consumer_registers(r.groups) else (i, twins)


def steady(r: WarpRoleLoop, loop: LoopItems) -> tuple[tuple[Event, ...], dict[int, Wait]]:
    """The steady iteration of the schedule that the loop has: its events and waits."""
    order, promoted = chosen_order(r), promoted_gemm(r)
    if order is not None:
        return order.events, loop.waits(order.events, True, order.carry)
    if promoted is not None:
        events = tuple(Event(i, int(i > promoted[0])) for i in loop.own)
        return events, {loop.own.index(promoted[0]) + 1: Wait(1, (), (loop.own.index(promoted[0]),))}
    events = tuple(Event(i, 0) for i in loop.own)
    return events, {n + 1: Wait(0, (n,)) for n, e in enumerate(events) if e.item in loop.gemms}


def described(r: WarpRoleLoop) -> str:
    """One line for the report: which GEMMs run under what, or why none does."""
    order = chosen_order(r)
    if order is not None:
        return orders_in_words(items_of(r), order)
    if promoted_gemm(r) is not None:
        return "double-buffered accumulator: each GEMM runs under the promotion of the one before"
    return f"wgmma synchronous: {_why_synchronous(r)}"


def orders_in_words(loop: LoopItems, order: LoopOrder) -> str:
    """Which GEMMs of an order run under what."""
    late = dict.fromkeys(loop.gemm(e.item).c.buffer.name for e in order.events if e.stage and e.item in loop.gemms)
    waits = loop.waits(order.events, True, order.carry)
    carried = dict.fromkeys(loop.gemm(order.events[p].item).c.buffer.name for w in waits.values() for p in w.carried)
    out = []
    if late:
        out.append(f"{_gemms(late)} of an iteration {'runs' if len(late) == 1 else 'run'} under the next iteration")
    if carried:
        what = _gemms(carried) if len(loop.gemms) > 1 else "the GEMM of a step"
        out.append(f"wgmma in flight: {what} {'runs' if len(carried) == 1 else 'run'} while the next stage is waited for")
    return "; ".join(out) or "wgmma in flight: GEMMs run under the statements that do not need them"


def _gemms(names: Iterable[str]) -> str:
    found = [f"`{x}`" for x in names]
    return f"the GEMM{'s' * (len(found) > 1)} into {', '.join(found)}"


def _why_synchronous(r: WarpRoleLoop) -> str:
    """Why each wgmma of the loop is waited for where it is issued."""
    order = best_order(r, items_of(r))
    held, most = order.registers + REGISTERS.overlapped_least, consumer_registers(r.groups)
    if held > most:
        return f"its fragments and other values take {held} registers of a thread, more than {most}"
    if order.cycles and len(items_of(r).gemms) == 1:
        return f"the loop waits for loads: its {r.stages} stages are free sooner so"
    return "each statement needs the GEMM before it, or the loop waits for loads and its stages are free sooner so"
