"""Emits the code of the two warp roles for a pipelined loop: items in order, with their waits and releases, and the loads.

    for k: S = A B[k]; …S…; C += P V[k]       ->     S = A B[0]; …S…                                          # prologue
                                                     for k >= 1: start S = A B[k]; start C += P V[k-1]; wait(1)
                                                                 …S…; wait(0); what touches C or P
                                                     C += P V[last]                                           # drain

A wgmma is waited for in front of the first statement that needs it, and the stages of the rings that it reads are released
there.  Where nothing needs it, it stays in flight until it has started again one iteration later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Const, Expr, For, If, Load, Parallel, Region, Select, Stmt, Store, Var,
                         binary, const, convert, fresh, load, logical, replace, seq, substitute, unary, used_vars, walk,
                         with_options, FRAGMENT, SHARED, VARIABLE)
from tilelang.ir.record import record
from tilelang.ops import Copy, Reduce
from tilelang.ops.gemm.wgmma import choose_wgmma

from ..analysis.effects import touches
from ..analysis.item_cost import Cycles
from ..analysis.pipeline_loops import SERIAL
from ..analysis.pipeline_schedule import Body, needed_binds
from ..analysis.simulate_loop import Event, Wait
from ..analysis.statements import do, rename
from .consumer_schedule import (PromotedGemms, chosen_order, described, flight_of, in_order_of_release, items_of, late_rings,
                                orders_in_words, overlaps, promoted_gemms, steady, users_of)
from .loop_order import LoopItems, LoopOrder, best_order
from .rings import GROUP, Ring, WarpRoleLoop, hold, pin, select_version, whole_region

PING_PONG = 14, 15  # numbers of the named barriers at which one warp group waits for the GEMMs of the other
LONG = 1.25  # times the cycles of the tensor cores: the path of a group with a reduction from which on two groups alternate
UNROLL = 4  # iterations in one of a loop whose GEMMs alternate between two accumulators
_ZERO = (const(0),)


def consumer(r: WarpRoleLoop, finished: Sequence[Stmt] = (), tiles: Iterable[Buffer] = ()) -> list[Stmt]:
    """The consumers' code: the loop without its copies, and what follows it.  Sets `r.overlap` to a text for the report.

    finished: statements to run after the last use of `tiles`, which the loop only reads.
    """
    r.overlap, order, promoted = described(r), chosen_order(r), promoted_gemms(r)
    if order is not None:
        return _Ordered(r, order).code(list(finished), set(tiles))
    if promoted is not None:
        return [*(_Chain(r, promoted) if len(promoted.items) > 1 else _Alternating(r, promoted)).code(), *finished]
    loop = items_of(r)
    loop.gemms = ()  # each waits for itself
    plain = _Ordered(r, LoopOrder(tuple(Event(i, 0) for i in loop.own), 0.0, 0.0, 0, False), loop)
    return plain.code(list(finished), set(tiles))


def within_iteration(r: WarpRoleLoop, registers: int) -> tuple[list[Stmt], str] | None:
    """The statements of an iteration without warp roles, where GEMMs run under those that do not need them, and a text for the
    report; None where they all wait.  registers: how many a thread may use."""
    loop = items_of(r)
    order = best_order(loop, registers, "iteration") if flight_of(r) != "statement" else None
    if order is None or not overlaps(loop, order):
        return None
    emitter = _Ordered(r, order)
    return emitter.sequence(order.events, emitter.steady, {0: r.loop.var}, True), orders_in_words(loop, order)


class _Emitter:
    """Emits items of a loop.

    loop, events, steady: its items, its steady iteration and the waits of that.  values: variables whose values are loaded
    ahead -> their values in the current iteration.
    """

    def __init__(self, r: WarpRoleLoop, loop: LoopItems, events: Sequence[Event], steady: dict[int, Wait]) -> None:
        self.r, self.loop, self.events, self.steady = r, loop, tuple(events), steady
        self.at = {e.item: n for n, e in enumerate(events)}
        self.first = {id(x): min(users_of(r, x), key=lambda i: (self.events[self.at[i]].stage, self.at[i])) for x in r.rings}
        self.carried: list[Buffer] = []  # accumulators in flight over the end of an iteration
        self.other: dict[Buffer, Buffer] = {}
        self.values: dict[Any, Expr] = {}
        self.opens = -1  # the first GEMM of an iteration, where two groups start their GEMMs one after the other
        self.held = -1  # the reduction behind which the next wait is held

    def run(self, items: Iterable[int], it: Expr) -> list[Stmt]:
        """Items of iteration `it`, on their own.  Their GEMMs stay in flight."""
        return rename(self.sequence([Event(i, 0) for i in items], {}, {0: it}, False))

    def sequence(self, events: Sequence[Event], waits: dict[int, Wait], its: dict[int, Expr], cyclic: bool) -> list[Stmt]:
        """Events in order, with their waits and releases.  its: stage -> iteration."""
        out: list[Stmt] = []
        bound: dict[int, dict[Any, Expr]] = {s: dict(self.values) for s in its}
        flying: list[Buffer] = [b for b in self.carried] if cyclic else []
        begun = False  # whether this group starts GEMMs
        for n, e in enumerate((*events, None)):
            w = waits.get(n)
            if w is not None:
                if begun:
                    out, begun = [*out, self.ping_pong(1)], False
                out += self.wait(events, w, its)
                ended = {self.loop.gemm(events[p].item).c.buffer.data for p in (*w.done, *w.carried)}
                flying = [b for b in flying if b.data not in ended or self.still(b, events, n, waits)]
                if w.pending and any(x.stage for x in self.events) and cyclic:
                    end = next((q for q in range(n + 1, len(events) + 1) if q in waits), len(events))
                    long = [x.item for x in events[n:end] if self.computed(x.item) is not None]
                    self.held = next((i for i in long if isinstance(self.loop.items[i].stmt, Reduce)), long[-1] if long else -1)
            if e is None:
                break
            it = its[e.stage]
            *binds, s = self.bound(self.loop.items[e.item].stmt, it, bound[e.stage])
            out += binds
            out += [do("mbarrier_wait", AddressOf(x.full, (slot,)), parity) for x in self.r.rings
                    if self.first[id(x)] == e.item and x.full is not None and x.iterations == 1
                    for slot, parity in [self.r.slot(it)]]
            if e.item in self.loop.gemms:
                if cyclic and e.item == self.opens:
                    later = binary("gt", its[0], convert(self.r.loop.start) + 1)
                    out, begun = [*out, If(logical("or", self.second, later), self.ping_pong(0))], True
                c = self.loop.gemm(e.item).c.buffer
                out.append(with_options(s, wait=-1, in_flight=any(b.data is c.data for b in flying) or None))
                flying.append(c)
            else:
                out += self.r.using([s], [e.item], it)
                if cyclic and self.held == e.item and (computed := self.computed(e.item)) is not None:
                    out.append(hold(computed))
                out += [x for m in self.releases(self.at[e.item], False) for x in self.r.release(m, self.r.slot(it)[0])]
        return out

    def bound(self, s: Stmt, it: Expr, known: dict[Any, Expr]) -> list[Stmt]:
        """A statement of iteration `it`, behind the bindings that it needs.  known: those made for that iteration."""
        pure = [b for b in self.r.body.pure if b.var not in self.values]
        *binds, s = _bound(pure, self.r.loop.var, [s], it, known)
        return [*binds, self.r.select(s, it)]

    def still(self, b: Buffer, events: Sequence[Event], n: int, waits: dict[int, Wait]) -> bool:
        """Whether a later GEMM into the same accumulator is in flight behind the wait at place n."""
        done = waits[n].done
        return any(self.loop.gemm(x.item).c.buffer.data is b.data for q, x in enumerate(events[:n])
                   if x.item in self.loop.gemms and q not in done and not any(q in w.done for m, w in waits.items() if m < n))

    @property
    def second(self) -> Expr:
        """Whether a thread is in the second warp group."""
        return binary("ge", self.r.thread, const(GROUP, self.r.thread.dtype))

    def ping_pong(self, arrive: int) -> Stmt:
        """A warp group waits until the other one has started its GEMMs, or (1) lets that one start the next."""
        own, other = map(const, reversed(PING_PONG) if arrive else PING_PONG)
        return do("named_barrier_arrive" if arrive else "named_barrier", Select(self.second, other, own, own.dtype, False),
                  const(2 * GROUP))

    def computed(self, i: int) -> Buffer | None:
        """The float32 registers behind whose computation the next wait is held: by a reduction, or by functions that take
        longer than the instructions around them.

        ptxas would move the wait in front: that frees the registers of a GEMM sooner, and ptxas does not count the cycles
        spent waiting.  A reduction over the lanes of a row has the longest latency; many functions take as long as the GEMM.
        """
        item, cost = self.loop.items[i], self.loop.cost.get(i, Cycles())
        long = isinstance(item.stmt, Reduce) or isinstance(item.stmt, Parallel) and cost.special > cost.arithmetic
        return next((e.buffer for e in item.effects if long and e.writes and e.buffer.scope_name == FRAGMENT
                     and e.buffer.dtype == "float32"), None)

    def ended(self, item: int, it: Expr, pending: int = 0) -> list[Stmt]:
        """The wait for a GEMM of iteration `it`; so many later ones stay in flight."""
        return self.wait([Event(item, 0)], Wait(pending, (0,)), {0: it})

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
            begun = binary("gt", k, convert(r.loop.start) + 1 if any(e.stage for e in self.events) else convert(r.loop.start))
            out += [x for m in self.releases(self.at[events[p].item], True) for x in r.release_after_wait(m, before, begun)]
        for p in w.done:
            for m in self.releases(self.at[events[p].item], True):
                out += r.release(m, r.slot(its[events[p].stage])[0])
        return out

    def releases(self, place: int, waited: bool) -> list[Ring]:
        """The rings that are free once the event at this place of the steady iteration is over."""
        rings = [x for x in self.r.rings if x.iterations == 1]
        found = [(x, self.loop.held(self.events, self.steady, use)) for x, use in zip(rings, self.loop.rings)]
        return [x for x, h in found if h.place == place and h.waited == waited]

    def unrolled(self, most: int, several: Callable[[Expr, int], list[Stmt]]) -> list[Stmt]:
        """The loop in runs of `most` iterations, a power of two, and what is left.  several: the code of a run."""
        loop, runs = self.r.loop, list[Stmt]()
        start, extent = convert(loop.start), convert(loop.extent)

        def loop_of(begin: Expr, number: Expr, count: int) -> For:
            v = fresh(f"{loop.var.name}_{count}", loop.var.dtype)
            return with_options(replace(loop, var=v, start=const(0, number.dtype), extent=number, kind="serial", body=seq(
                *several(begin + v * count, count))), **SERIAL)

        if isinstance(extent, Const):
            steps = max(0, int(extent.value))
            whole, rest = divmod(steps, most)
            if whole:  # verify_sync reads ring_steps to skip the same iterations of all loops
                runs.append(with_options(loop_of(start, const(whole, extent.dtype), most), ring_steps=(most, steps)))
            return [*runs, *(several(start + whole * most, rest) if rest else ())]
        extent = binary("max", extent, const(0, extent.dtype))  # a negative extent would leave a remainder
        runs, count = [loop_of(start, extent // most, most)], most // 2
        while count > 1:
            both = 2 * count
            runs.append(loop_of(start + extent // both * both, extent % both // count, count))
            count //= 2
        return [*runs, If(binary("eq", extent % 2, const(1, extent.dtype)), seq(*several(start + (extent - 1), 1)))]


class _Ordered(_Emitter):
    """Emits a loop in an order that has been chosen for it.

    other: a fragment in flight over the end of an iteration -> the one that alternates with it.
    """

    def __init__(self, r: WarpRoleLoop, order: LoopOrder, loop: LoopItems | None = None) -> None:
        loop = loop or items_of(r)
        super().__init__(r, loop, order.events, loop.waits(order.events, True, order.carry))
        self.depth = order.depth
        gemms = [self.loop.gemm(self.events[p].item) for w in self.steady.values() for p in w.carried]
        self.carried = list({op.c.buffer.data: op.c.buffer for op in gemms}.values())
        self.other = {b: replace(b, data=Var(b.name, b.data.dtype)) for b in (op.a.buffer for op in gemms)
                      if b.scope_name == FRAGMENT}
        self.path = order.path

    def code(self, finished: list[Stmt], tiles: set[Buffer]) -> list[Stmt]:
        """The consumers' code.  finished: statements to run after the last use of `tiles`, which the loop only reads."""
        r, k = self.r, self.r.loop.var
        start, extent = convert(r.loop.start), convert(r.loop.extent)
        late = any(self.loop.items[e.item].touches(b.data) for b in tiles for e in self.events if e.stage)
        pins = [pin(b) for b in self.carried]
        reduces = any(isinstance(self.loop.items[e.item].stmt, Reduce) for e in self.events)
        long = self.path > LONG * sum(self.loop.cost[i].tensor for i in self.loop.gemms)
        if r.groups == 2 and self.depth and reduces and long and self.by_rows():
            self.opens = next(e.item for e in self.events if e.item in self.loop.gemms)
        body = self.sequence(self.events, self.steady, {0: k, 1: k - 1} if self.depth else {0: k}, True)
        loop = with_options(replace(r.loop, kind="serial", start=start + self.depth if self.depth else r.loop.start,
                                    extent=extent - self.depth if self.depth else r.loop.extent, body=seq(*body)), **SERIAL)
        done = [do("wgmma_wait", n=0), *pins, *(pin(b) for two in self.other.items() for b in two)] if pins else []
        some = binary("gt", extent, const(0, extent.dtype))
        last = start + extent - 1
        if not self.depth:
            final, _ = r.slot(last)
            free = [y for _, x in self.carried_releases() for y in r.release_after_wait(x, final, some)] if r.repeated else []
            loops = self.unrolled(2, lambda at, n: self.alternated(loop.body, at, n)) if self.other else [loop]
            return [*r.body.allocs, *map(Alloc, self.other.values()), *pins, *loops, *done, *free, *finished]
        opening, closing = self.region(0, start), self.region(1, last)
        left = [x for p, ring in self.carried_releases() for x in r.release(ring, r.slot(
            last - self.events[p].stage)[0])] if r.repeated else []
        several = logical("and", unary("not", self.second), binary("gt", extent, const(1, extent.dtype)))
        end = [If(several, self.ping_pong(0))] if self.opens >= 0 else []  # before the next tile
        whole = [*rename(opening), *pins, loop, *done, *left, *([] if late else finished), *rename(closing),
                 *(finished if late else ()), *end]
        return [*r.body.allocs, If(some, seq(*whole), seq(*finished) if finished else None, span=r.loop.span)]

    def by_rows(self) -> bool:
        """Whether each warp group computes rows of its own, so that neither waits for the other at a barrier of the block.

        A tile that the threads make in shared memory may need one, which stands in front of the GEMM that reads it.
        """
        items, gemms = self.loop.items, [self.loop.gemm(i) for i in self.loop.gemms]
        every = [e for i in self.loop.own for e in items[i].effects]
        plans = [choose_wgmma(x, self.r.groups * GROUP, {e.storage for e in every}) for x in gemms]
        return all(not isinstance(x, str) and x.warps[1] == 1 for x in plans) and all(
            x.dim % len(x.src.extents) == len(x.src.extents) - 1 for i in self.loop.own
            if isinstance(x := items[i].stmt, Reduce)) and not any(e.writes and e.buffer.scope_name in SHARED for e in every)

    def alternated(self, body: Stmt, begin: Expr, count: int) -> list[Stmt]:
        """Iterations that alternate between two fragments as A of the GEMMs that stay in flight."""
        k, swap = self.r.loop.var, {**self.other, **{b: a for a, b in self.other.items()}}
        own = [fresh(k.name, k.dtype) for _ in range(count)]
        return [x for n, v in enumerate(own) for x in (Bind(v, begin + n), *rename(
            [substitute(body, {k: v, **(swap if n else {})})]))]

    def carried_releases(self) -> list[tuple[int, Ring]]:
        """(place of a GEMM that stays in flight at the end of an iteration, ring that is free once it is complete)."""
        return [(p, x) for w in self.steady.values() for p in w.carried for x in self.releases(p, True)]

    def region(self, stage: int, at: Expr) -> list[Stmt]:
        """The items of one stage for one iteration, on their own."""
        events = [e for e in self.events if e.stage == stage]
        return self.sequence(events, self.loop.waits(events, False), {stage: at}, False)


class _Promotion(_Emitter):
    """Emits a loop whose GEMMs clear one accumulator in turn.

    before: the items in front of the first GEMM.  work: for each GEMM, what follows it.
    """

    def __init__(self, r: WarpRoleLoop, promoted: PromotedGemms) -> None:
        loop = items_of(r)
        super().__init__(r, loop, *steady(r, loop))
        self.promoted, self.gemms = promoted, promoted.items
        self.before = [i for i in loop.own if i < self.gemms[0]]
        self.work = [[i for i in loop.own if a < i < b] for a, b in zip(self.gemms, (*self.gemms[1:], len(loop.items)))]


class _Alternating(_Promotion):
    """Emits a GEMM into two accumulators in turn, so that it runs while the result of the one before is promoted.

        for k: P = A[k] B[k]; …P…     ->     for k in steps of 4:
                                                 start P = A[k] B[k]
                                                 start Q = A[k+1] B[k+1]; wait for P; …P…
                                                 start P = A[k+2] B[k+2]; wait for Q; …Q…
                                                 …; wait for Q; …Q…
                                             the remaining iterations, in the same way

    This is for accumulators that are scaled or promoted before they are added to a total (float8 with block scales).  The
    arithmetic and its order do not change.  No GEMM is in flight between two iterations of the new loop: ptxas cannot handle
    accumulators that alternate across the end of a loop and serialises the wgmma instructions (C7514).  So the tensor cores are
    idle once in each iteration of the new loop, which is why one covers several iterations of the original loop.
    """

    def code(self) -> list[Stmt]:
        """The consumers' code of the loop, without its copies."""
        twins = {b: _copy(b, "2") for b in (self.promoted.accumulator, *(self.promoted.ahead or ()))}

        def iteration(it: Expr, odd: int, running: int) -> list[list[Stmt]]:
            """(statements that start its GEMM, statements after it); `running` later GEMMs stay in flight during the latter."""
            (gemm,), ahead = self.gemms, self.promoted.ahead is not None
            parts = (self.run([*self.before, gemm] if ahead else [gemm], it), [
                *self.run([] if ahead else self.before, it), *self.ended(gemm, it, running), *self.run(self.work[0], it)])
            return [[substitute(s, twins if odd else {}) for s in part] for part in parts]

        def several(begin: Expr, count: int) -> list[Stmt]:
            found = [iteration(begin + n if n else begin, n % 2, int(n + 1 < count)) for n in range(count)]
            return [*found[0][0], *(x for (_, rest), (start, _) in zip(found, [*found[1:], ([], [])]) for x in (*start, *rest))]

        return [*map(Alloc, twins.values()), *self.unrolled(UNROLL, several)]


class _Chain(_Promotion):
    """Emits several GEMMs that use one accumulator one after another; each result is promoted before the next GEMM starts.

        for k:                                     fill row for the first k
            fill row                               for k:
            P = A[k] B[k, 0]; …P * row…     ->         start P = A[k] B[k, 0]; take row, fill it for k+1; wait for P; …P…
            P = A[k] B[k, 1]; …P * row…                start P = A[k] B[k, 1]; wait for stage k+1; wait for P; …P…
                                                   the last iteration, without the code that prepares a next one

    (split_accumulators.py creates such loops.)  Only one accumulator P is in registers, so a warp group either runs an MMA or
    promotes its result.  Meanwhile another warp group keeps the tensor cores busy, if promotion takes less time than an MMA.
    Therefore this schedule moves as much other work as possible under the running MMA: small fragments (scales) are loaded one
    iteration ahead, and the wait for the next stage happens during the last GEMM of an iteration.  The arithmetic and its order
    do not change.

    With fragments to load ahead, a GEMM is waited for in the iteration that starts it.  If it were started in the iteration
    before, ptxas would emit the promotion as one uninterrupted sequence without a yield, and the next GEMM of the other warp
    group would wait for it: promotion with factors then costs 5 % of the time.  Promotion without factors does not have this
    problem, so without fragments to load, each iteration starts the first GEMM of the next one after its last promotion.

    early: whether the statements before the first GEMM run one iteration ahead.  copies: fragment or variable that the
    promotion reads -> the one that is filled ahead.  loaded: (variable that holds a loaded value, its binding in the program).
    """

    def __init__(self, r: WarpRoleLoop, promoted: PromotedGemms) -> None:
        super().__init__(r, promoted)
        work = [self.loop.items[i].stmt for some in self.work for i in some]
        used = set().union(*map(used_vars, work))
        loads = [s for s in r.body.pure if s.var in used and touches(s.value)]
        self.early = bool(promoted.ahead or loads and not self.before)
        self.loaded = [(Buffer(s.var.name, (1,), s.var.dtype, VARIABLE, span=s.span), s) for s in loads]
        self.values = {s.var: load(b, _ZERO) for b, s in self.loaded}
        read = {x.buffer for s in work for x in walk(s, Load, Region)} | {b for b, _ in self.loaded if self.early}
        self.copies = {b: _copy(b, "next") for b in (*(promoted.ahead or ()), *(b for b, _ in self.loaded)) if b in read}
        self.awaited = [x for x in r.rings if self.first[id(x)] == self.gemms[0]]  # see `filled`
        self.first.update((id(x), -1) for x in self.awaited)

    def code(self) -> list[Stmt]:
        """The consumers' code of the loop: without its copies, with the code before and after the steady state."""
        loop, extent = self.r.loop, convert(self.r.loop.extent)
        start, one = convert(loop.start), const(1, extent.dtype)
        last, opening = start + extent - one, [*self.fill(start), *self.filled(start)]
        opening += [] if self.early else self.start(start)
        closing = [*(self.start(last) if self.early else ()), *self.rest(last, None)]
        whole = [*opening, self.steady_loop(start, extent - one), *closing]
        made = [*(Alloc(b) for b in self.copies.values()), *(Alloc(b) for b, _ in self.loaded)]
        return [*made, If(binary("gt", extent, const(0, extent.dtype)), seq(*whole), span=loop.span)]

    def steady_loop(self, start: Expr, extent: Expr) -> For:
        """The steady loop.  An iteration starts its own first GEMM, or that of the next one if nothing is filled ahead."""
        k, after = self.r.loop.var, self.r.loop.var + const(1, extent.dtype)
        iteration = [*self.start(k), *self.fill(after), *self.rest(k, after)] if self.early else \
            [*self.rest(k, after), *self.fill(after), *self.start(after)]
        return with_options(replace(self.r.loop, kind="serial", start=start, extent=extent, body=seq(*iteration)), **SERIAL)

    def filled(self, it: Expr) -> list[Stmt]:
        """The wait for the stages that the first GEMM of an iteration reads: it may come long before the GEMM starts."""
        slot, parity = self.r.slot(it)
        return [do("mbarrier_wait", AddressOf(x.full, (slot,)), parity) for x in self.awaited if x.full is not None]

    def fill(self, it: Expr) -> list[Stmt]:
        """The statements before the first GEMM, for iteration `it`, and the values that are loaded ahead."""
        known: dict[Any, Expr] = dict(self.values)
        loads = [x for b, s in self.loaded for x in self.bound(Store(b, _ZERO, s.value, span=s.span), it, known)]
        return [substitute(s, self.copies) for s in (*rename(loads), *self.run(self.before, it))]

    def take(self) -> list[Stmt]:
        """Copies what has been filled ahead to where the promotion reads it, so that it can be filled again."""
        return [Copy(whole_region(b), whole_region(now)) if now.scope_name == FRAGMENT else Store(now, _ZERO, load(b, _ZERO))
                for now, b in self.copies.items()]

    def start(self, it: Expr) -> list[Stmt]:
        """Starts the first GEMM of an iteration, and takes what has been filled for it."""
        return [*self.run(self.gemms[:1], it), *self.take()]

    def rest(self, it: Expr, after: Expr | None) -> list[Stmt]:
        """The rest of an iteration whose first GEMM is in flight.  after: the next iteration, None for the last one."""
        out: list[Stmt] = []
        for gemm, work in zip(self.gemms, self.work):
            if gemm != self.gemms[0]:
                out += self.run([gemm], it)
            if gemm == self.gemms[-1] and after is not None:
                out += self.filled(after)
            out += [*self.ended(gemm, it), *self.run(work, it)]
        return out


def _bound(pure: list[Bind], k: Var, stmts: Sequence[Stmt], it: Expr, known: dict[Any, Expr]) -> list[Stmt]:
    """Statements for iteration `it` of a loop over k, behind those of its pure bindings that they need.

    known: variables that are bound for that iteration -> their new ones; it gets those that are made here.
    """
    out: list[Stmt] = []
    for b in needed_binds(pure, set().union(*map(used_vars, stmts))):
        if b.var not in known:
            own = b.var if it is k else fresh(b.var.name, b.var.dtype)
            out.append(Bind(own, substitute(b.value, {k: it, **known}), span=b.span))
            known[b.var] = own
    return [*out, *(substitute(s, {**({} if it is k else {k: it}), **known}) for s in stmts)]


def _copy(b: Buffer, what: str) -> Buffer:
    name = f"{b.name}_{what}"
    return replace(b, name=name, data=Var(name, b.data.dtype))


# ---- the producer -------------------------------------------------------------------------------------------------------

def producer(r: WarpRoleLoop, whole: list[Stmt], pure: list[Bind], tf32: Iterable[Var]) -> list[Stmt]:
    """All loads of a tile, in the order in which the consumers release their stages.

    In another order, a load that waits for its stage could delay one whose stage is free.

    whole: loads that are done once per tile.  They come after the first stage of the first ring: that stage is released
    inside the consumers' loop, their buffers only after it.  pure: bindings of an iteration that its loads may need.
    tf32: storage of tiles that are rounded to tf32 by the copy.
    """
    loop, rings = r.loop, in_order_of_release(r)
    k = Var(loop.var.name, loop.var.dtype)
    start, extent = convert(loop.start), convert(loop.extent)

    def loads(some: list[Ring], at: Expr) -> list[Stmt]:
        return _loads(r, some, at, pure, set(tf32))

    if len(rings) == 1:
        return [*whole, For(k, start, extent, "serial", seq(*loads(rings, k)), span=loop.span)]
    late = late_rings(r)
    early = [x for x in rings if x not in late]
    once = [If(binary("eq", k, start), seq(*whole))] if whole else []
    body = seq(*loads(early[:1], k), *once, *loads(early[1:], k))
    if late:
        body = seq(body, If(binary("gt", k, start), seq(*loads(late, k - 1))))
    out: list[Stmt] = [For(k, start, extent, "serial", body, span=loop.span)]
    some = binary("gt", extent, const(0, extent.dtype))
    if late or whole:
        out.append(If(some, seq(*loads(late, start + extent - 1)), seq(*rename(whole)) if whole else None))
    return out


def _loads(r: WarpRoleLoop, rings: list[Ring], k: Expr, pure: list[Bind], tf32: set[Var]) -> list[Stmt]:
    """The loads of iteration k into these rings."""
    mapping: dict[Var, Expr] = {r.loop.var: k}
    stmts: list[Stmt] = []
    for s in pure:
        v = Var(s.var.name, s.var.dtype)
        stmts.append(Bind(v, substitute(s.value, dict(mapping)), span=s.span))
        mapping[s.var] = v
    made = stmts
    for ring in rings:
        assert ring.full is not None and ring.empty is not None
        slot, parity = r.slot(k, ring.iterations)
        stmts = made if ring.iterations == 1 else []
        full = AddressOf(ring.full, (slot,))
        stmts.append(do("mbarrier_wait", AddressOf(ring.empty, (slot,)), binary("bitxor", parity, const(1, "uint32"))))
        stmts.append(do("mbarrier_arrive_expect_tx", full, const(ring.bytes(r.body.items), "uint32")))
        for i in ring.items:
            op: Any = r.body.items[i].stmt
            new = ring.buffers[op.dst.buffer]
            dst = Region(new, (slot, *(const(0) for _ in op.dst.extents)), (1, *op.dst.extents), span=op.dst.span)
            src = replace(op.src, mins=tuple(substitute(m, dict(mapping)) if isinstance(m, Expr) else m
                                             for m in op.src.mins))
            way = {"bulk": True, "boxes": True} if op.dst.buffer.ndim == 1 else {"tma": True}
            stmts.append(with_options(replace(op, src=src, dst=dst), **way, barrier=(ring.full, slot),
                                    tf32=op.dst.buffer.data in tf32 or None,
                                    cluster_split=ring.cluster_split(i)))
        if ring.iterations > 1:
            at = r.done(k) % ring.iterations
            made.append(If(binary("eq", at, const(0, at.dtype)), seq(*stmts)))
    return made


# ---- loops without warp roles: asynchronous copies of the threads run ahead --------------------------------------------


@record
class Plan:
    """A checked schedule.

    stage, order: per item.  ahead: items that become asynchronous copies -> storage of their tiles.  versions: buffer -> the
    same buffer with a leading dimension of versions.  report: one line for `pipeline_report`.
    """

    stage: list[int]
    order: list[int]
    ahead: dict[int, Var]
    versions: dict[Buffer, Buffer]
    report: str


@record
class _Run:
    """Consecutive statements of the schedule that belong to the same iteration.  group: index of its async group, or None."""

    items: tuple[int, ...]
    stage: int
    group: int | None


def copied_ahead(plan: Plan, loop: For, loop_body: Body, rest: list[Stmt] | None = None) -> Stmt:
    """Serial code of the pipelined `loop` (already of kind serial).  rest: what replaces items that are not copied ahead."""
    return _Threads(plan, loop, loop_body, rest).code()


class _Threads:
    def __init__(self, plan: Plan, loop: For, loop_body: Body, rest: list[Stmt] | None) -> None:
        self.plan, self.loop, self.loop_body, self.rest = plan, loop, loop_body, rest
        self.items = loop_body.items
        self.depth = max(plan.stage, default=0)
        self.runs = self.split()
        self.groups = sum(r.group is not None for r in self.runs)
        self.extent: Expr = loop.extent

    # ---- structure ----------------------------------------------------------------------------------------------

    def consumers(self, i: int) -> set[int]:
        """Items, other than asynchronous copies, that access the destination of asynchronous copy i."""
        storage = self.plan.ahead[i]
        return {j for j, y in enumerate(self.items) if j != i and j not in self.plan.ahead and y.touches(storage)}

    def split(self) -> list[_Run]:
        """The runs, in schedule order.

        Copies with different first uses get separate async groups only if they are waited for in the iteration that issues
        them: then the later wait hides more latency.
        """
        p = self.plan
        ranked = sorted(range(len(self.items)), key=lambda i: p.order[i])
        same_step = {i for i in p.ahead if any(p.stage[j] == p.stage[i] for j in self.consumers(i))}
        first_use = {i: min((p.order[j] for j in self.consumers(i)), default=-1) for i in p.ahead}
        starts = {first_use[i] for i in same_step}
        runs: list[_Run] = []
        group = 0
        current: list[int] = []

        def key(i: int) -> tuple[Any, ...]:
            return (p.stage[i], i in p.ahead, first_use[i] if i in same_step else None)

        def close() -> None:
            nonlocal group
            if current:
                is_group = current[0] in p.ahead
                runs.append(_Run(tuple(current), p.stage[current[0]], group if is_group else None))
                group += is_group
                current.clear()

        if same_step and all(i in p.ahead for i in ranked[: len(p.ahead)]):  # copies first: sort them by first use
            ranked[: len(p.ahead)] = sorted(ranked[: len(p.ahead)], key=lambda i: (first_use[i], p.order[i]))
        for i in ranked:
            if current and (key(current[-1]) != key(i) or (i not in p.ahead and p.order[i] in starts)):
                close()
            current.append(i)
        close()
        return runs

    # ---- one run ------------------------------------------------------------------------------------------------

    def run(self, r: _Run, iteration: Any, it: Expr, known: dict[Any, Expr]) -> list[Stmt]:
        """Statements of a run for one iteration: the 0-based `iteration`, where the loop variable is `it`."""
        k = self.loop.var
        stmts = [with_options(self.items[i].stmt, async_group=True) if i in self.plan.ahead else self.items[i].stmt
                 for i in r.items]
        if it is k and self.rest is not None and len(r.items) == len(self.items) - len(self.plan.ahead):
            stmts = self.rest
        parts = [[s] for s in stmts] if self.loop_body.late else [stmts]  # late bindings follow the statements they depend on
        return [select_version(x, self.plan.versions, iteration) for part in parts
                for x in _bound(self.loop_body.pure, k, part, it, known)]

    def guarded(self, iteration: Any, stmts: list[Stmt], span: Any) -> list[Stmt]:
        inside = iteration < self.extent if isinstance(iteration, Expr) else const(iteration, self.dtype) < self.extent
        if isinstance(inside, Const):
            return stmts if inside.value else []
        return [If(inside, seq(*stmts), span=span)]

    @property
    def dtype(self) -> Any:
        return self.loop.var.dtype

    # ---- waits --------------------------------------------------------------------------------------------------

    def needed_group(self, r: _Run) -> int | None:
        """The newest async group that a run needs, relative to the first group of its own step (negative: earlier steps)."""
        newest: int | None = None
        for q in self.runs:
            if q.group is None:
                continue
            if any(j in r.items for i in q.items for j in self.consumers(i)):
                at = (q.stage - r.stage) * self.groups + q.group
                newest = at if newest is None else max(newest, at)
        return newest

    def step(self, run_of: Any) -> list[Stmt]:
        """One step: runs in order with their commits and waits.

        run_of: function from a run to its statements; if it returns none, only the run's commit is emitted.
        """
        out: list[Stmt] = []
        issued, waited = 0, None
        bodies = [(r, run_of(r)) for r in self.runs]
        # If a wait needs no group of this step, it is emitted first.  One barrier after it then also separates the readers
        # of the previous iteration from the copies that overwrite their slot.
        early = [g for r, body in bodies if body for g in (self.needed_group(r),) if g is not None and g < 0]
        if early:
            waited = max(early)
            out.append(do("cp_async_wait", n=-waited - 1))
        for r, body in bodies:
            if body:
                g = self.needed_group(r)
                if g is not None and (waited is None or g > waited):
                    out.append(do("cp_async_wait", n=issued - 1 - g))
                    waited = g
                out += body
            if r.group is not None:
                out.append(do("cp_async_commit"))
                issued += 1
        return out

    # ---- the whole loop -----------------------------------------------------------------------------------------

    def code(self) -> Stmt:
        loop = self.loop
        out: list[Stmt] = [Alloc(b, span=b.span) for b in self.plan.versions.values()]
        out += [a for a in self.loop_body.allocs if a.buffer not in self.plan.versions]
        if not isinstance(loop.extent, (Const, Var)):  # bounds are evaluated once
            n = fresh(f"{loop.var.name}_extent", loop.extent.dtype)
            out.append(Bind(n, loop.extent, span=loop.span))
            self.extent = n
        for u in range(self.depth):
            out += self.step(lambda r, u=u: self.prologue_run(r, u))
        k = loop.var
        base: Expr = k if isinstance(loop.start, Const) and loop.start.value == 0 else k - loop.start
        used = {v for r in self.runs if r.stage == self.depth for i in r.items for v in used_vars(self.items[i].stmt)}
        top = [b for b in needed_binds(self.loop_body.pure, used) if b.var not in self.loop_body.late]
        known: dict[Any, Expr] = {b.var: b.var for b in top}

        def main_run(r: _Run) -> list[Stmt]:
            ahead = self.depth - r.stage
            if ahead == 0:
                return self.run(r, base, k, known)
            return self.guarded(base + ahead, self.run(r, base + ahead, loop.start + (base + ahead), {}), loop.span)

        body = seq(*top, *self.step(main_run), span=loop.span)
        out.append(with_options(replace(loop, body=body, extent=self.extent), pipeline_report=self.plan.report))
        if self.depth:  # no copy is left in flight (the last ones are guarded off); this wait shows it to later passes
            out.append(do("cp_async_wait", n=0))
        return seq(*out, span=loop.span)

    def prologue_run(self, r: _Run, u: int) -> list[Stmt]:
        if r.stage > u:
            return []
        iteration = const(u - r.stage, self.dtype)
        return self.guarded(u - r.stage, rename(self.run(r, iteration, self.loop.start + iteration, {})), self.loop.span)
