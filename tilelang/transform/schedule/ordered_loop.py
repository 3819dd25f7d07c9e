"""Emits a pipelined loop of the consumers in the order that loop_order.py has chosen: prologue, steady iterations, drain.

    for k: S = A B[k]; …S…; C += P V[k]       ->     S = A B[0]; …S…                                          # prologue
                                                     for k >= 1: start S = A B[k]; start C += P V[k-1]; wait(1)
                                                                 …S…; wait(0); what touches C or P
                                                     C += P V[last]                                           # drain

A wgmma is waited for in front of the first statement that needs it, and the stages of the rings that it reads are released
there.  Where nothing needs it, it stays in flight until it has started again one iteration later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Const, Expr, For, If, Stmt, Var, binary, const, convert, fresh,
                         replace, seq, stmts_of, substitute, used_vars, with_options, FRAGMENT)
from tilelang.ops import Reduce

from ..analysis.pipeline_loops import SERIAL, scheduled_lists, wanted_stages
from ..analysis.pipeline_schedule import needed_binds, violations
from ..analysis.statements import do, rename
from ..framework.config import PassConfigKey
from .loop_order import LoopItems, LoopOrder, best_order
from .rings import Ring, WarpRoleLoop, hold, pin
from ..analysis.simulate_loop import Event, RingUse, Wait


def order_of(r: WarpRoleLoop) -> LoopOrder:
    """The order of the consumers' statements of a loop."""
    return best_order(items_of(r), r.consumer_registers, _flight(r))


def _flight(r: WarpRoleLoop) -> str:
    return str(r.cx.option(PassConfigKey.TL_WGMMA_IN_FLIGHT))


def enough_stages(r: WarpRoleLoop, most: int) -> int:
    """The least number of stages, at most `most`, with which the loop waits for loads as little as it can.

    That is the loop's own number, unless more of them save a tenth of the cycles.  Where threads make operands a twentieth is
    enough: what they wait for at the beginning of an iteration comes in front of the GEMM.
    """
    items = items_of(r)
    cycles: dict[int, float] = {}
    for n in range(r.stages, most + 1):
        items.rings = tuple(RingUse(x.users, x.bytes, n) for x in items.rings)
        cycles[n] = best_order(items, r.consumer_registers, _flight(r)).cycles
    best = min(cycles.values())
    enough = best > (0.95 if r.made else 0.9) * cycles[r.stages]
    return r.stages if enough else next(n for n, c in cycles.items() if c <= 1.05 * best)


def items_of(r: WarpRoleLoop) -> LoopItems:
    """The items that the consumers of a loop run."""
    items = r.body.items
    own = [i for i in range(len(items)) if i not in r.loads]
    rings = [RingUse(_users(r, x), x.bytes(items), r.stages) for x in r.rings if x.iterations == 1]
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


def _users(r: WarpRoleLoop, ring: Ring) -> frozenset[int]:
    """The items of the consumers that use a ring's tiles."""
    items = r.body.items
    filled = [items[i].stmt.dst.buffer.data for i in ring.items]  # type: ignore[attr-defined]
    return frozenset(i for i, x in enumerate(items) if i not in r.loads and any(map(x.touches, filled)))


def overlaps(loop: LoopItems, order: LoopOrder) -> bool:
    """Whether a GEMM of the loop runs under other statements, or under the wait for the next stage."""
    if not order.cycles:
        return False
    events, waits = order.events, loop.waits(order.events, True, order.carry)
    if order.depth or loop.carries(order):
        return True
    at = {p: q for q, w in waits.items() for p in w.done}
    return any(e.item not in loop.gemms for p, q in at.items() for e in events[p + 1:q])


def described(loop: LoopItems, order: LoopOrder) -> str:
    """One line for the report: which GEMMs run under what."""
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


def late_rings(r: WarpRoleLoop, order: LoopOrder) -> list[Ring]:
    """The rings whose stages the consumers first read one iteration later than the others."""
    stage = {e.item: e.stage for e in order.events}
    return [x for x in r.rings if x.iterations == 1 and all(stage[i] for i in _users(r, x))]


def ordered(r: WarpRoleLoop, order: LoopOrder, finished: list[Stmt], tiles: set[Buffer]) -> list[Stmt]:
    """The consumers' code.  finished: statements to run after the last use of `tiles`, which the loop only reads."""
    return _Emitter(r, order).code(finished, tiles)


def within_iteration(r: WarpRoleLoop, registers: int) -> tuple[list[Stmt], str] | None:
    """The statements of an iteration without warp roles, where GEMMs run under those that do not need them, and a text for the
    report; None where they all wait.  registers: how many a thread may use."""
    loop = items_of(r)
    order = best_order(loop, registers, "iteration") if _flight(r) != "statement" else None
    if order is None or not overlaps(loop, order):
        return None
    emitter = _Emitter(r, order)
    return emitter.sequence(order.events, emitter.steady, {0: r.loop.var}, True), described(loop, order)


class _Emitter:
    def __init__(self, r: WarpRoleLoop, order: LoopOrder) -> None:
        self.r, self.loop, self.events = r, items_of(r), order.events
        self.depth = order.depth
        copies = {id(r.body.items[i].stmt) for i in r.loads}
        kept = [s for s in stmts_of(r.loop.body) if id(s) not in copies]
        self.position = {id(s): n for n, s in enumerate(kept)}
        self.allocs = [s for s in kept if any(s is a for a in r.body.allocs)]
        self.steady = self.loop.waits(self.events, True, order.carry)
        at = {e.item: n for n, e in enumerate(self.events)}
        self.first = {id(x): min(_users(r, x), key=lambda i: (self.events[at[i]].stage, at[i])) for x in r.rings}
        carried = [self.loop.gemm(self.events[p].item).c.buffer for w in self.steady.values() for p in w.carried]
        self.carried = list({b.data: b for b in carried}.values())
        a = [self.loop.gemm(self.events[p].item).a.buffer for w in self.steady.values() for p in w.carried]
        # A fragment in flight over the end of an iteration, and the one that alternates with it.
        self.other = {b: replace(b, data=Var(b.name, b.data.dtype)) for b in a if b.scope_name == FRAGMENT}
        self.held = -1  # the reduction behind which the next wait is held

    def code(self, finished: list[Stmt], tiles: set[Buffer]) -> list[Stmt]:
        r, k = self.r, self.r.loop.var
        start, extent = convert(r.loop.start), convert(r.loop.extent)
        late = any(self.loop.items[e.item].touches(b.data) for b in tiles for e in self.events if e.stage)
        pins = [pin(b) for b in self.carried]
        body = self.sequence(self.events, self.steady, {0: k, 1: k - 1} if self.depth else {0: k}, True)
        loop = with_options(replace(r.loop, kind="serial", start=start + self.depth if self.depth else r.loop.start,
                                    extent=extent - self.depth if self.depth else r.loop.extent, body=seq(*body)), **SERIAL)
        done = [do("wgmma_wait", n=0), *pins, *(pin(b) for two in self.other.items() for b in two)] if pins else []
        some = binary("gt", extent, const(0, extent.dtype))
        last = start + extent - 1
        if not self.depth:
            final, _ = r.slot(last)
            free = [y for _, x in self.carried_releases() for y in r.release_after_wait(x, final, some)] if r.repeated else []
            loops = [loop] if not self.other else self.in_pairs(loop)
            return [*self.allocs, *map(Alloc, self.other.values()), *pins, *loops, *done, *free, *finished]
        opening = self.region(0, start)
        closing = self.region(1, last)
        left = [x for p, ring in self.carried_releases() for x in r.release(ring, r.slot(
            last - self.events[p].stage)[0])] if r.repeated else []
        whole = [*rename(opening), *pins, loop, *done, *left, *([] if late else finished), *rename(closing),
                 *(finished if late else ())]
        return [*self.allocs, If(some, seq(*whole), seq(*finished) if finished else None, span=r.loop.span)]

    def in_pairs(self, loop: For) -> list[Stmt]:
        """A loop unrolled by two: two fragments alternate as A of the GEMMs that stay in flight."""
        start, extent = convert(loop.start), convert(loop.extent)
        swap: dict[Any, Any] = {**self.other, **{b: a for a, b in self.other.items()}}
        pair, *own = (fresh(loop.var.name, loop.var.dtype) for _ in range(3))
        body = [x for n, k in enumerate(own) for x in (Bind(k, start + pair * 2 + n), *rename(
            [substitute(loop.body, {loop.var: k, **(swap if n else {})})]))]
        two = replace(loop, var=pair, start=const(0, extent.dtype), extent=extent // 2, body=seq(*body))
        if isinstance(extent, Const) and extent.value % 2 == 0:
            return [two]
        left = rename([substitute(loop.body, {loop.var: start + extent - 1})])
        return [two, If(binary("eq", extent % 2, const(1, extent.dtype)), seq(*left))]

    def carried_releases(self) -> list[tuple[int, Ring]]:
        """(place of a GEMM that stays in flight at the end of an iteration, ring that is free once it is complete)."""
        return [(p, x) for w in self.steady.values() for p in w.carried for x in self.releases(p, True)]

    def region(self, stage: int, at: Expr) -> list[Stmt]:
        """The items of one stage for one iteration, on their own."""
        events = [e for e in self.events if e.stage == stage]
        return self.sequence(events, self.loop.waits(events, False), {stage: at}, False)

    def sequence(self, events: Sequence[Event], waits: dict[int, Wait], its: dict[int, Expr], cyclic: bool) -> list[Stmt]:
        """Events in order, with their waits and releases.  its: stage -> iteration."""
        out: list[Stmt] = []
        bound: dict[int, dict[Any, Expr]] = {s: {} for s in its}
        flying: list[Buffer] = [b for b in self.carried] if cyclic else []
        for n, e in enumerate((*events, None)):
            w = waits.get(n)
            if w is not None:
                out += self.wait(events, w, its)
                ended = {self.loop.gemm(events[p].item).c.buffer.data for p in (*w.done, *w.carried)}
                flying = [b for b in flying if b.data not in ended or self.still(b, events, n, waits)]
                if w.pending and self.depth and cyclic:
                    end = next((q for q in range(n + 1, len(events) + 1) if q in waits), len(events))
                    self.held = next((x.item for x in events[n:end] if self.reduces(x.item)), -1)
            if e is None:
                break
            out += self.binds(e, its[e.stage], bound[e.stage])
            s = substitute(self.loop.items[e.item].stmt, {**({} if its[e.stage] is self.r.loop.var else {
                self.r.loop.var: its[e.stage]}), **bound[e.stage]})
            s = self.r.select(s, its[e.stage])
            out += [do("mbarrier_wait", AddressOf(x.full, (slot,)), parity) for x in self.r.rings
                    if self.first[id(x)] == e.item and x.full is not None for slot, parity in [self.r.slot(its[e.stage])]]
            if e.item in self.loop.gemms:
                c = self.loop.gemm(e.item).c.buffer
                out.append(with_options(s, wait=-1, in_flight=any(b.data is c.data for b in flying) or None))
                flying.append(c)
            else:
                out.append(s)
                if cyclic and self.held == e.item:
                    out.append(hold(s.dst.buffer))
                out += [x for m in self.releases(self.place(e), False) for x in self.r.release(
                    m, self.r.slot(its[e.stage])[0])]
        return out

    def still(self, b: Buffer, events: Sequence[Event], n: int, waits: dict[int, Wait]) -> bool:
        """Whether a later GEMM into the same accumulator is in flight behind the wait at place n."""
        done = waits[n].done
        return any(self.loop.gemm(x.item).c.buffer.data is b.data for q, x in enumerate(events[:n])
                   if x.item in self.loop.gemms and q not in done and not any(q in w.done for m, w in waits.items() if m < n))

    def reduces(self, i: int) -> bool:
        """Whether an item is a reduction to float32 registers.

        ptxas would move the next wait in front of it: that frees the registers of a GEMM sooner, and ptxas does not count the
        cycles spent waiting.  A reduction over the lanes of a row has the longest latency, so the wait is held behind it.
        """
        s: Any = self.loop.items[i].stmt
        return isinstance(s, Reduce) and s.dst.buffer.scope_name == FRAGMENT and s.dst.dtype == "float32"

    def place(self, e: Event) -> int:
        return next(n for n, x in enumerate(self.events) if x.item == e.item)

    def binds(self, e: Event, it: Expr, bound: dict[Any, Expr]) -> list[Stmt]:
        """Bindings that an item needs and that are not made yet for its iteration; `bound` maps them to their new variables."""
        out: list[Stmt] = []
        for b in needed_binds(self.r.body.pure, used_vars(self.loop.items[e.item].stmt)):
            if b.var in bound:
                continue
            own = b.var if it is self.r.loop.var else fresh(b.var.name, b.var.dtype)
            out.append(Bind(own, substitute(b.value, {self.r.loop.var: it, **bound}), span=b.span))
            bound[b.var] = own
        return out

    def wait(self, events: Sequence[Event], w: Wait, its: dict[int, Expr]) -> list[Stmt]:
        """A wait for GEMMs, the pins of their registers and the releases of the stages that they have read."""
        out: list[Stmt] = [do("wgmma_wait", n=w.pending)]
        gemms = [self.loop.gemm(events[p].item) for p in w.done]
        pinned: dict[Any, Buffer] = {}
        for op in gemms:
            pinned[op.c.buffer.data] = op.c.buffer
            if op.a.buffer.scope_name == FRAGMENT:
                pinned[op.a.buffer.data] = op.a.buffer
        out += [pin(b) for b in pinned.values()]
        out += [pin(self.other[b]) for b in dict.fromkeys(self.loop.gemm(events[p].item).a.buffer for p in w.carried)
                if b in self.other]
        r, k = self.r, self.r.loop.var
        for p in w.carried:
            before = (r.step(k) + (r.stages - 1)) % r.stages if r.base is not None else (r.step(k) - 1) % r.stages
            if events[p].stage:
                before = r.slot(k - 1 - events[p].stage)[0]
            begun = binary("gt", k, convert(r.loop.start) + self.depth if self.depth else convert(r.loop.start))
            out += [x for m in self.releases(self.place(events[p]), True) for x in r.release_after_wait(m, before, begun)]
        for p in w.done:
            for m in self.releases(self.place(events[p]), True):
                out += r.release(m, r.slot(its[events[p].stage])[0])
        return out

    def releases(self, place: int, waited: bool) -> list[Ring]:
        """The rings that are free once the event at this place of the steady iteration is over."""
        rings = [x for x in self.r.rings if x.iterations == 1]
        found = [(x, self.loop.held(self.events, self.steady, use)) for x, use in zip(rings, self.loop.rings)]
        return [x for x, h in found if h.place == place and h.waited == waited]
