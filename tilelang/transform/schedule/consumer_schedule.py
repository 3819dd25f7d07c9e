"""Chooses and emits the schedule of the consumer warp groups for a pipelined loop whose tiles a producer loads.

The schedules are: an order in which GEMMs run under other statements (loop_order.py, ordered_loop.py); a cleared accumulator
in two buffers, so that a GEMM runs during the promotion of the one before (double_buffered_accumulator.py); several GEMMs
that use one accumulator in turn (chained_accumulators.py); or the loop as it stands, with waits and releases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilelang.ir import Buffer, Stmt, replace, seq, stmts_of, with_options
from tilelang.target.machine import REGISTERS

from ..analysis.pipeline_loops import SERIAL
from .chained_accumulators import Chain, accumulator_chain, chained
from .double_buffered_accumulator import alternate, double_buffered_accumulator
from .loop_order import LoopItems, LoopOrder
from .ordered_loop import described, items_of, order_of, ordered, overlaps
from .ordered_loop import late_rings as order_late_rings
from .rings import Ring, WarpRoleLoop
from ..analysis.simulate_loop import Event, Wait


def consumer(r: WarpRoleLoop, finished: Sequence[Stmt] = (), tiles: Iterable[Buffer] = ()) -> list[Stmt]:
    """The consumers' code: the loop without its copies, and what follows it.  Sets `r.overlap` to a text for the report.

    finished: statements to run after the last use of `tiles`, which the loop only reads.
    """
    order = chosen_order(r)
    if order is not None:
        r.overlap = described(items_of(r), order)
        return ordered(r, order, list(finished), set(tiles))
    chain = chain_of(r)
    if chain is not None:
        r.overlap = "chunks of a GEMM alternate in the same registers, each under the promotion of the one before"
        return [*chained(r, chain), *finished]
    parts = double_buffered_accumulator(r)
    if parts is not None:
        r.overlap = "double-buffered accumulator: each GEMM runs under the promotion of the one before"
        return [*alternate(r, parts), *finished]
    r.overlap = f"wgmma synchronous: {_why_synchronous(r)}"
    return [*_plain(r), *finished]


def chosen_order(r: WarpRoleLoop) -> LoopOrder | None:
    """The order in which GEMMs of the loop run under other statements; None if another schedule is taken.

    Loops with slow rings or with one accumulator for several GEMMs keep the order of the program.
    """
    if r.order is None:
        other = r.slow or accumulator_chain(r) is not None or double_buffered_accumulator(r) is not None
        order = None if other else order_of(r)
        r.order = order if order is not None and overlaps(items_of(r), order) else False
    return r.order or None


def steady(r: WarpRoleLoop, loop: LoopItems) -> tuple[tuple[Event, ...], dict[int, Wait]]:
    """The steady iteration of the schedule that the loop has: its events and waits."""
    order = chosen_order(r)
    if order is not None:
        return order.events, loop.waits(order.events, True, order.carry)
    parts = None if chain_of(r) is not None or r.slow else double_buffered_accumulator(r)
    events = tuple(Event(i, int(parts is not None and i > parts.item)) for i in loop.own)
    if chain_of(r) is not None:
        return events, loop.waits(events, True, False)
    at = [n for n, e in enumerate(events) if e.item in loop.gemms]
    return events, {n + 1: Wait(0, (n,)) if parts is None else Wait(1, (), (n,)) for n in at}


def _why_synchronous(r: WarpRoleLoop) -> str:
    """Why each wgmma of the loop is waited for where it is issued."""
    if r.slow:
        return "prefetched scales are used in the order of the program"
    held = order_of(r).registers + REGISTERS.overlapped_least
    if held > r.consumer_registers:
        return f"its fragments and other values take {held} registers of a thread, more than {r.consumer_registers}"
    if order_of(r).cycles and len(items_of(r).gemms) == 1:
        return f"the loop waits for loads: its {r.stages} stages are free sooner so"
    return "each statement needs the GEMM before it, or the loop waits for loads and its stages are free sooner so"


def chain_of(r: WarpRoleLoop) -> Chain | None:
    """The chain of GEMMs in one accumulator, if that is the schedule of the loop; else None."""
    return None if chosen_order(r) is not None else accumulator_chain(r)


def late_rings(r: WarpRoleLoop) -> list[Ring]:
    """The rings whose stages the consumers read one iteration later than the others."""
    order = chosen_order(r)
    return [] if order is None else order_late_rings(r, order)


def takes_slow_rings(r: WarpRoleLoop) -> bool:
    """Whether the schedule supports stages that last several iterations: it must keep their uses in program order."""
    return chosen_order(r) is None


def _kept(r: WarpRoleLoop) -> tuple[list[Stmt], dict[int, int]]:
    """(the body without its copies, id of a statement -> index of its item)."""
    copies = {id(r.body.items[i].stmt) for i in r.loads}
    return ([s for s in stmts_of(r.loop.body) if id(s) not in copies],
            {id(x.stmt): i for i, x in enumerate(r.body.items)})


def _plain(r: WarpRoleLoop) -> list[Stmt]:
    k = r.loop.var
    slot, _ = r.slot(k)
    kept, index = _kept(r)
    out: list[Stmt] = []
    for s in kept:
        i = index.get(id(s), -1)
        out += r.filled(i, k)
        out += r.using([r.select(s, k)], [i], k)
        for ring in r.rings:
            if ring.last == i and ring.iterations == 1:
                out += r.release(ring, slot)
    return [with_options(replace(r.loop, kind="serial", body=seq(*out)), **SERIAL)]
