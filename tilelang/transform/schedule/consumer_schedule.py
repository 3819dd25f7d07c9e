"""Chooses the schedule of the consumer warp groups for a pipelined loop whose tiles a producer loads.

The schedules are: an order in which GEMMs run under other statements (loop_order.py); GEMMs that clear one accumulator in
turn, each under the promotion of the one before (`PromotedGemms`); or the loop as it stands, with waits and releases.
emit.py writes the code.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilelang.ir import Buffer, Var, free_vars, is_const, FRAGMENT
from tilelang.ir.record import record
from tilelang.ops import Gemm
from tilelang.target.machine import REGISTERS

from ..analysis.effects import fills_whole
from ..analysis.pipeline_loops import scheduled_lists, wanted_stages
from ..analysis.pipeline_schedule import violations
from ..analysis.simulate_loop import Event, RingUse, Wait
from ..framework.config import PassConfigKey
from .loop_order import LoopItems, LoopOrder, best_order
from .rings import GROUP, Ring, WarpRoleLoop

# ---- the order of items ---------------------------------------------------------------------------------------------------


def items_of(r: WarpRoleLoop) -> LoopItems:
    """The items that the consumers of a loop run."""
    items = r.body.items
    own = [i for i in range(len(items)) if i not in r.loads]
    rings = [RingUse(users_of(r, x), x.bytes(items), r.stages) for x in r.rings if x.iterations == 1]
    loaded = {items[i].stmt.dst.buffer.data for i in r.loads}  # type: ignore[attr-defined]
    versions = {**r.made, **{e.storage: r.stages for i in own for e in items[i].effects if e.writes and e.storage in loaded}}
    out = LoopItems(items, own, r.groups, r.used_outside, rings, _asked(r, own), versions)
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
    items = r.body.items
    filled = [items[i].stmt.dst.buffer.data for i in ring.items]  # type: ignore[attr-defined]
    return frozenset(i for i, x in enumerate(items) if i not in r.loads and any(map(x.touches, filled)))


def flight_of(r: WarpRoleLoop) -> str:
    """How far wgmmas may stay in flight (tl.wgmma_in_flight)."""
    return str(r.cx.option(PassConfigKey.TL_WGMMA_IN_FLIGHT))


def _searched(r: WarpRoleLoop, items: LoopItems) -> LoopOrder:
    """The best order; each question about a loop body is answered by one search."""
    key = r.groups, items.rings, r.beside, frozenset(items.versions.items()), flight_of(r)
    if key not in r.body.searched:
        r.body.searched[key] = best_order(items, r.consumer_registers, flight_of(r))
    return r.body.searched[key]


def enough_stages(r: WarpRoleLoop, most: int) -> int:
    """The least number of stages, at most `most`, with which the loop waits for loads as little as it can.

    That is the loop's own number, unless more of them save a tenth of the cycles.  Where threads make operands a twentieth is
    enough: what they wait for at the beginning of an iteration comes in front of the GEMM.
    """
    items = items_of(r)
    cycles: dict[int, float] = {}
    for n in range(r.stages, most + 1):
        items.rings = tuple(RingUse(x.users, x.bytes, n) for x in items.rings)
        cycles[n] = _searched(r, items).cycles
    best = min(cycles.values())
    enough = best > (0.95 if r.made else 0.9) * cycles[r.stages]
    return r.stages if enough else next(n for n, c in cycles.items() if c <= 1.05 * best)


def overlaps(loop: LoopItems, order: LoopOrder) -> bool:
    """Whether a GEMM of the loop runs under other statements, or under the wait for the next stage."""
    if not order.cycles:
        return False
    events, waits = order.events, loop.waits(order.events, True, order.carry)
    if order.depth or loop.carries(order):
        return True
    at = {p: q for q, w in waits.items() for p in w.done}
    return any(e.item not in loop.gemms for p, q in at.items() for e in events[p + 1:q])


def chosen_order(r: WarpRoleLoop) -> LoopOrder | None:
    """The order in which GEMMs of the loop run under other statements; None if another schedule is taken.

    Loops with slow rings or with GEMMs in turn keep the order of the program.
    """
    if r.order is None:
        order = None if r.slow or _promoted(r) else _searched(r, items_of(r))
        r.order = order if order is not None and overlaps(items_of(r), order) else False
    return r.order or None


def late_rings(r: WarpRoleLoop) -> list[Ring]:
    """The rings whose stages the consumers first read one iteration later than the others."""
    order = chosen_order(r)
    stage = {} if order is None else {e.item: e.stage for e in order.events}
    return [x for x in r.rings if x.iterations == 1 and stage and all(stage[i] for i in users_of(r, x))]


def in_order_of_release(r: WarpRoleLoop) -> list[Ring]:
    """The rings in the order in which the consumers release their stages: no load waits behind one that can start later."""
    order = chosen_order(r)
    if order is None:
        return r.rings
    items = items_of(r)
    waits = items.waits(order.events, True, order.carry)
    return sorted(r.rings, key=lambda x: items.held(order.events, waits, RingUse(users_of(r, x), 0, r.stages)).released)


# ---- GEMMs that clear one accumulator in turn -----------------------------------------------------------------------------


@record
class PromotedGemms:
    """GEMMs of a loop that clear one accumulator; what follows each of them promotes its result, before the next one starts.

    items: the GEMMs, as indices into the loop's items.  accumulator: their common one.  ahead: the fragments that the
    statements in front of the first GEMM fill, one iteration ahead; None if these statements cannot run ahead.
    """

    items: tuple[int, ...]
    accumulator: Buffer
    ahead: tuple[Buffer, ...] | None


def promoted_gemms(r: WarpRoleLoop) -> PromotedGemms | None:
    """The GEMMs that clear one accumulator, if that is the schedule of the loop; else None.

    A single one needs a second accumulator, for which there must be registers, and a third stage: two are in use at a time.
    """
    return None if chosen_order(r) is not None else _promoted(r)


def _promoted(r: WarpRoleLoop) -> PromotedGemms | None:
    found = _cleared_gemms(r)
    if not found:
        return None
    accumulator: Buffer = r.body.items[found[0]].stmt.c.buffer  # type: ignore[attr-defined]
    if len(found) == 1:
        held = {e.storage: e.buffer for x in r.body.items for e in x.effects if e.buffer.scope_name == FRAGMENT}
        size = sum(b.size * b.dtype.bits // 32 for b in (*held.values(), accumulator)) // (r.groups * GROUP)
        if r.stages < 3 or any(b is accumulator for b, _ in r.launch.plan.layouts) or \
                size + REGISTERS.double_buffered > r.consumer_registers:
            return None
    return PromotedGemms(found, accumulator, _filled_ahead(r, found[0]))


def _cleared_gemms(r: WarpRoleLoop) -> tuple[int, ...]:
    """The GEMMs of a loop, if each of them clears the same accumulator, and only the statements behind it use its result.

    Their operands come from rings that nothing else uses.  () if there is a GEMM of which that is not true.
    """
    items = r.body.items
    rest = [i for i in range(len(items)) if i not in r.loads]
    found = tuple(i for i in rest if isinstance(items[i].stmt, Gemm))
    if not found or r.body.allocs or any(items[i].defines is not None for i in rest):
        return ()
    accumulator, pure = items[found[0]].stmt.c.buffer, {s.var for s in r.body.pure}  # type: ignore[attr-defined]
    for i in found:
        op = items[i].stmt
        assert isinstance(op, Gemm)
        if op.c.buffer is not accumulator or not is_const(op.clear_accum, True) or free_vars(op) & pure or \
                not {op.a.buffer, op.b.buffer} <= set(r.versions):
            return ()
    if any(x.last >= found[0] if x.iterations > 1 else x.first not in found or x.last not in found for x in r.rings):
        return ()
    others = [i for i in rest if i not in found]
    read = {e.storage for i in found for e in items[i].effects} - {accumulator.data}
    if any(e.writes and e.storage in read for i in others for e in items[i].effects) or any(
            items[i].touches(accumulator.data) for i in others if i < found[0]) or r.used_outside(accumulator.data):
        return ()
    return found


def _filled_ahead(r: WarpRoleLoop, first: int) -> tuple[Buffer, ...] | None:
    """The fragments that the statements before the first GEMM fill for those after it, if that can be done one iteration ahead.

    They then get a second copy each, so that loads (of scales) have the time of a whole GEMM to arrive.  None if these
    statements cannot run ahead.
    """
    items = r.body.items
    before = [x for i, x in enumerate(items) if i < first and i not in r.loads]
    after = [x for i, x in enumerate(items) if i >= first and i not in r.loads]
    made: dict[Var, Buffer] = {}
    if not all(fills_whole(x.stmt) for x in before):
        return None
    for x in before:
        for e in x.effects:
            if e.writes and (e.buffer.scope_name != FRAGMENT or e.storage not in made and e.reads):
                return None
            if e.writes:
                made[e.storage] = e.buffer
    touched = {e.storage for x in before for e in x.effects}
    if any(e.writes and e.storage in touched for x in after for e in x.effects) or any(map(r.used_outside, made)):
        return None
    annotated = {b for b, _ in r.launch.plan.layouts}
    return None if annotated & set(made.values()) else tuple(made.values())


# ---- what the report and the record say ------------------------------------------------------------------------------------


def steady(r: WarpRoleLoop, loop: LoopItems) -> tuple[tuple[Event, ...], dict[int, Wait]]:
    """The steady iteration of the schedule that the loop has: its events and waits."""
    order, promoted = chosen_order(r), promoted_gemms(r)
    if order is not None:
        return order.events, loop.waits(order.events, True, order.carry)
    if promoted is not None and len(promoted.items) > 1:
        events = tuple(Event(i, 0) for i in loop.own)
        return events, loop.waits(events, True, False)
    late = promoted is not None and not r.slow
    events = tuple(Event(i, int(late and i > promoted.items[0])) for i in loop.own)  # type: ignore[union-attr]
    return events, {n + 1: Wait(1, (), (n,)) if late else Wait(0, (n,)) for n, e in enumerate(events) if e.item in loop.gemms}


def described(r: WarpRoleLoop) -> str:
    """One line for the report: which GEMMs run under what, or why none does."""
    order, promoted = chosen_order(r), promoted_gemms(r)
    if order is not None:
        return orders_in_words(items_of(r), order)
    if promoted is not None and len(promoted.items) > 1:
        return "chunks of a GEMM alternate in the same registers, each under the promotion of the one before"
    if promoted is not None:
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
    if r.slow:
        return "prefetched scales are used in the order of the program"
    order = _searched(r, items_of(r))
    held = order.registers + REGISTERS.overlapped_least
    if held > r.consumer_registers:
        return f"its fragments and other values take {held} registers of a thread, more than {r.consumer_registers}"
    if order.cycles and len(items_of(r).gemms) == 1:
        return f"the loop waits for loads: its {r.stages} stages are free sooner so"
    return "each statement needs the GEMM before it, or the loop waits for loads and its stages are free sooner so"
