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
from itertools import count
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Const, Expr, For, If, Parallel, Select, Stmt, Var, binary, call, cast,
                         const, convert, fresh, is_const, logical, replace, seq, substitute, unary, used_vars, with_options,
                         FRAGMENT, SHARED)
from tilelang.ir.record import record
from tilelang.ops import Reduce
from tilelang.ops.distribute import conjunction
from tilelang.ops.gemm.wgmma import choose_wgmma
from tilelang.ops.tma import tma_bytes
from tilelang.target.warp_groups import WARP_LANES

from ..analysis.effects import touches
from ..analysis.loop_items import LoopItems, LoopOrder, held_in_registers
from ..analysis.item_cost import Cycles
from ..analysis.pipeline_loops import SERIAL, Body, needed_binds
from ..analysis.simulate_loop import Event, Wait
from ..analysis.statements import do, initialised, rename
from .consumer_schedule import (LEAST_GROUPS, chosen_order, described, in_order_of_release, items_of, promoted_gemm, steady,
                                users_of)
from .rings import GROUP, Ring, WarpRoleLoop, pin, select_version

PING_PONG = 14, 15  # numbers of the named barriers at which one warp group waits for the GEMMs of the other
# Two groups alternate where the path of one, with a reduction, takes so many times the cycles of the tensor cores.  With less
# they wait for each other, with more the tensor cores are idle in any case.
LONG = 1.25, 2.1
UNROLL = 4  # iterations in one of a loop whose GEMMs alternate between two accumulators


def consumer(r: WarpRoleLoop, finished: Sequence[Stmt] = (), tiles: Iterable[Buffer] = ()) -> list[Stmt]:
    """The consumers' code: the loop without its copies, and what follows it.  Sets `r.overlap` to a text for the report.

    finished: statements to run after the last use of `tiles`, which the loop only reads.
    """
    r.overlap, order, promoted = described(r), chosen_order(r), promoted_gemm(r)
    if order is not None:
        return _Ordered(r, order).code(list(finished), set(tiles))
    if promoted is not None:
        return [*_Alternating(r, promoted[1]).code(), *finished]
    loop = items_of(r)
    plain = _Ordered(r, LoopOrder(tuple(Event(i, 0) for i in loop.own), 0.0, 0.0, 0, False), loop, steady(r, loop)[1])
    return plain.code(list(finished), set(tiles))


class _Emitter:
    """Emits items of a loop.

    loop, events, steady: its items, its steady iteration and the waits of that.
    """

    def __init__(self, r: WarpRoleLoop, loop: LoopItems, events: Sequence[Event], steady: dict[int, Wait]) -> None:
        self.r, self.loop, self.events, self.steady = r, loop, tuple(events), steady
        self.at = {e.item: n for n, e in enumerate(events)}
        self.first = {id(x): min(users_of(r, x), key=lambda i: (self.events[self.at[i]].stage, self.at[i])) for x in r.rings}
        self.carried: list[Buffer] = []  # accumulators in flight over the end of an iteration
        self.other: dict[Buffer, Buffer] = {}
        self.metadata = {b for i in loop.gemms if loop.gemm(i).sparsity > 1 for b in held_in_registers(loop.gemm(i))}
        self.awaited: list[Ring] = []  # rings of which an iteration waits for the stage of the next one
        self.opens = -1  # the first GEMM of an iteration, where two groups start their GEMMs one after the other
        self.held = -1  # the reduction behind which the next wait is held

    def run(self, items: Iterable[int], it: Expr) -> list[Stmt]:
        """Items of iteration `it`, on their own.  Their GEMMs stay in flight."""
        return rename(self.sequence([Event(i, 0) for i in items], {}, {0: it}, False))

    def sequence(self, events: Sequence[Event], waits: dict[int, Wait], its: dict[int, Expr], cyclic: bool) -> list[Stmt]:
        """Events in order, with their waits and releases.  its: stage -> iteration."""
        out: list[Stmt] = []
        bound: dict[int, dict[Any, Expr]] = {s: {} for s in its}
        flying: list[Buffer] = [b for b in self.carried] if cyclic else []
        begun = False  # whether this group starts GEMMs
        stages, joined = self.starts(events, waits)
        for n, e in enumerate((*events, None)):
            w = waits.get(n)
            if w is not None:
                if self.awaited and cyclic and n == max(waits):  # the next stage is waited for under the last GEMM
                    more = binary("lt", its[0] + 1, convert(self.r.loop.start) + convert(self.r.loop.extent))
                    out.append(If(more, seq(*self.full(self.awaited, its[0] + 1))))
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
            under = [x.item for x in events[n + 1:] if x.stage == e.stage and e.item in self.loop.gemms]
            *binds, s = self.bound(self.loop.items[e.item].stmt, it, bound[e.stage], under)
            out += binds
            out += self.full(stages[n], it)
            if e.item in self.loop.gemms:
                if cyclic and e.item == self.opens:
                    later = binary("gt", its[0], convert(self.r.loop.start) + 1)
                    out, begun = [*out, If(logical("or", self.second, later), self.ping_pong(0))], True
                c = self.loop.gemm(e.item).c.buffer
                out.append(with_options(s, wait=-1, in_flight=any(b.data is c.data for b in flying) or None,
                                        joined=n in joined or None))
                flying.append(c)
            else:
                out.append(s)
                if cyclic and self.held == e.item and (computed := self.computed(e.item)) is not None:
                    out.append(pin(computed, "wgmma_hold"))
                out += [x for m in self.releases(self.at[e.item], False) for x in self.r.release(m, it)]
        return out

    def bound(self, s: Stmt, it: Expr, known: dict[Any, Expr], under: Iterable[int]) -> list[Stmt]:
        """A statement of iteration `it`, behind the bindings that it needs.  known: those made for that iteration.

        under: items that follow a GEMM, whose single values from memory are loaded in front of it: they come under it.
        """
        body = self.r.body
        used = set().union(*(used_vars(self.loop.items[i].stmt) for i in under))
        loads = {b.var for b in needed_binds(body.pure, used) if touches(b.value) and b.var not in body.late}
        *binds, s = _bound(body.pure, self.r.loop.var, [s], it, known, loads)
        return [*binds, self.r.select(s, it)]

    def starts(self, events: Sequence[Event], waits: dict[int, Wait]) -> tuple[list[list[Ring]], set[int]]:
        """(the rings of which a stage is waited for in front of each event, places of GEMMs that need no fence).

        GEMMs of one iteration that follow each other start together, once all their tiles are there, where threads work on the
        result of the first: their path counts there, and ptxas lets the warps of a group meet after each wait.
        """
        gemms, items = self.loop.gemms, self.loop.items
        rings = [[x for x in self.r.rings if self.first[id(x)] == e.item and x not in self.awaited] for e in events]
        joined = set[int]()
        for n, e in enumerate(events):
            if n in joined or e.item not in gemms:
                continue
            run = [n]
            while (q := run[-1] + 1) < len(events) and events[q].item in gemms and q not in waits:
                run.append(q)
            same, c = [q for q in run[1:] if events[q].stage == e.stage], self.loop.gemm(e.item).c.buffer.data
            if same and any(i not in gemms and items[i].touches(c) for i in self.loop.own) and all(
                    self.loop.gemm(events[q].item).sparsity == 1 for q in run):
                joined.update(run[1:])
                rings[n] += [x for q in same for x in rings[q]]
                for q in same:
                    rings[q] = []
        return rings, joined

    def full(self, rings: Iterable[Ring], it: Expr) -> list[Stmt]:
        """The waits for the stages of an iteration."""
        slot, parity = self.r.slot(it)
        return [do("mbarrier_wait", AddressOf(x.full, (slot,)), parity) for x in rings if x.full is not None]

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

    def wait(self, events: Sequence[Event], w: Wait, its: dict[int, Expr]) -> list[Stmt]:
        """A wait for GEMMs, the pins of their registers and the releases of the stages that they have read."""
        freed = [(m, its[events[p].stage]) for p in w.done for m in self.releases(self.at[events[p].item], True)]
        # What orders the threads' own loads before a release waits for them while the GEMM runs, not behind it.
        fences = {str(s): s for m, it in freed for s in self.r.read_out(m.buffers, it)}
        out: list[Stmt] = [*fences.values(), do("wgmma_wait", n=w.pending)]
        gemms = [self.loop.gemm(events[p].item) for p in w.done]
        pinned = {b.data: b for op in gemms for b in (op.c.buffer, *held_in_registers(op))}
        out += [self.pinned(b) for b in pinned.values()]
        out += [self.pinned(self.other[b]) for b in dict.fromkeys(
            x for p in w.carried for x in held_in_registers(self.loop.gemm(events[p].item))) if b in self.other]
        r, k = self.r, self.r.loop.var
        for p in w.carried:
            before = (r.step(k) + (r.stages - 1)) % r.stages if r.base is not None else (r.step(k) - 1) % r.stages
            if events[p].stage:
                before = r.slot(k - 1 - events[p].stage)[0]
            begun = binary("gt", k, convert(r.loop.start) + 1 if any(e.stage for e in self.events) else convert(r.loop.start))
            out += [x for m in self.releases(self.at[events[p].item], True) for x in r.release_after_wait(m, before, begun)]
        return [*out, *(x for m, it in freed for x in r.release(m, it, True))]

    def pinned(self, b: Buffer) -> Stmt:
        """The pin of registers that a wgmma reads, behind the wait for it: of metadata, which ptxas does not know to be in use
        until then, a use that it cannot move."""
        return pin(b, "wgmma_used" if b in self.metadata or b in map(self.other.get, self.metadata) else "wgmma_pin")

    def releases(self, place: int, waited: bool) -> list[Ring]:
        """The rings that are free once the event at this place of the steady iteration is over."""
        found = [(x, self.loop.held(self.events, self.steady, use)) for x, use in zip(self.r.rings, self.loop.rings)]
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

    def __init__(self, r: WarpRoleLoop, order: LoopOrder, loop: LoopItems | None = None,
                 waits: dict[int, Wait] | None = None) -> None:
        loop = loop or items_of(r)
        super().__init__(r, loop, order.events, waits or loop.waits(order.events, True, order.carry))
        self.depth = order.depth
        flying = [self.loop.gemm(self.events[p].item) for w in self.steady.values() for p in w.carried]
        self.carried = list({op.c.buffer.data: op.c.buffer for op in flying}.values())
        self.other = {b: replace(b, data=Var(b.name, b.data.dtype)) for op in flying for b in held_in_registers(op)}
        self.path = order.path
        first = self.events[0].item
        gemms, sums = self.loop.gemms, {self.loop.gemm(i).c.buffer.data for i in self.loop.gemms}
        alone = not self.depth and not self.carried and len(gemms) > len(sums) == 1 and first in gemms
        self.awaited = [x for x in r.rings if alone and self.first[id(x)] == first]
        # Nothing hides what stands between a sum and the next GEMM: with a copy of the loop for each stage, addresses and
        # conditions of what the threads load are constants.
        self.unrolls = bool(self.awaited) and any(
            i not in gemms and not any(map(self.loop.items[i].touches, sums)) for i in self.loop.own)

    def code(self, finished: list[Stmt], tiles: set[Buffer]) -> list[Stmt]:
        """The consumers' code.  finished: statements to run after the last use of `tiles`, which the loop only reads."""
        r, k = self.r, self.r.loop.var
        start, extent = convert(r.loop.start), convert(r.loop.extent)
        late = any(self.loop.items[e.item].touches(b.data) for b in tiles for e in self.events if e.stage)
        pins = [pin(b) for b in self.carried]
        reduces = any(isinstance(self.loop.items[e.item].stmt, Reduce) for e in self.events)
        masks = sum(self.loop.cost[i].ordinary for i in self.loop.own if isinstance(x := self.loop.items[i].stmt, If)
                    and k in used_vars(x.cond))  # what some iterations do, such as those with a mask
        path = (self.path - masks) / (sum(self.loop.cost[i].tensor for i in self.loop.gemms) or 1.0)
        if r.groups == 2 and self.depth and reduces and LONG[0] < path < LONG[1] and self.by_rows():
            self.opens = next(e.item for e in self.events if e.item in self.loop.gemms)
        body = self.sequence(self.events, self.steady, {0: k, 1: k - 1} if self.depth else {0: k}, True)
        loop = with_options(replace(r.loop, kind="serial", start=start + self.depth if self.depth else r.loop.start,
                                    extent=extent - self.depth if self.depth else r.loop.extent, body=seq(*body)),
                            factor=r.stages if self.unrolls else None, **SERIAL)
        done = [do("wgmma_wait", n=0), *pins, *(self.pinned(b) for two in self.other.items() for b in two)] if pins else []
        some = binary("gt", extent, const(0, extent.dtype))
        last = start + extent - 1
        opens: list[Stmt] = []
        if not self.depth and not self.carried and r.groups >= LEAST_GROUPS and len(self.loop.gemms) > 1 and any(
                self.loop.gemm(i).a.buffer.scope_name == FRAGMENT for i in self.loop.gemms):  # see operand_pieces
            # Behind a branch of one group's warps ptxas takes the loop's variable for one that differs by lane.
            opens.append(do("sync_warp"))
            if any(isinstance(self.loop.items[i].stmt, If) for i in self.loop.own):  # a mask of the first iteration alone
                opens.append(If(some, seq(*rename(self.region(0, start)))))
                loop = replace(loop, start=start + 1, extent=extent - 1)
        if not self.depth:
            final, _ = r.slot(last)
            free = [y for _, x in self.carried_releases() for y in r.release_after_wait(x, final, some)] if r.repeated else []
            loops = self.unrolled(2, lambda at, n: self.alternated(loop.body, at, n)) if self.other else [loop]
            opening = [If(some, seq(*self.full(self.awaited, start)))] if self.awaited else []
            return [*r.body.allocs, *map(Alloc, self.other.values()), *opening, *pins, *opens, *loops, *done, *free, *finished]
        before, closing = self.region(0, start), self.region(1, last)
        left = [x for p, ring in self.carried_releases() for x in r.release(ring, last - self.events[p].stage) if r.repeated]
        several = logical("and", unary("not", self.second), binary("gt", extent, const(1, extent.dtype)))
        end = [If(several, self.ping_pong(0))] if self.opens >= 0 else []  # before the next tile
        whole = [*rename(before), *pins, loop, *done, *left, *([] if late else finished), *rename(closing),
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


class _Alternating(_Emitter):
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

    def __init__(self, r: WarpRoleLoop, versions: tuple[Buffer, ...]) -> None:
        loop = items_of(r)
        super().__init__(r, loop, *steady(r, loop))
        self.twins = {b: replace(b, name=f"{b.name}_2", data=Var(f"{b.name}_2", b.data.dtype)) for b in versions}

    def code(self) -> list[Stmt]:
        """The consumers' code of the loop, without its copies."""
        (gemm,), own = self.loop.gemms, self.loop.own

        def iteration(it: Expr, odd: int, running: int) -> list[list[Stmt]]:
            """(statements that start its GEMM, statements after it); `running` later GEMMs stay in flight during the latter."""
            parts = (self.run([i for i in own if i <= gemm], it), [
                *self.wait([Event(gemm, 0)], Wait(running, (0,)), {0: it}), *self.run([i for i in own if i > gemm], it)])
            return [[substitute(s, self.twins if odd else {}) for s in part] for part in parts]

        def several(begin: Expr, count: int) -> list[Stmt]:
            found = [iteration(begin + n if n else begin, n % 2, int(n + 1 < count)) for n in range(count)]
            return [*found[0][0], *(x for (_, rest), (start, _) in zip(found, [*found[1:], ([], [])]) for x in (*start, *rest))]

        return [*map(Alloc, self.twins.values()), *self.unrolled(UNROLL, several)]


def _bound(pure: list[Bind], k: Var, stmts: Sequence[Stmt], it: Expr, known: dict[Any, Expr],
           more: Iterable[Var] = ()) -> list[Stmt]:
    """Statements for iteration `it` of a loop over k, behind those of its pure bindings that they, or others, need (`more`).

    known: variables that are bound for that iteration -> their new ones; it gets those that are made here.
    """
    out: list[Stmt] = []
    for b in needed_binds(pure, set(more).union(*map(used_vars, stmts))):
        if b.var not in known:
            own = b.var if it is k else fresh(b.var.name, b.var.dtype)
            out.append(Bind(own, substitute(b.value, {k: it, **known}), span=b.span))
            known[b.var] = own
    return [*out, *(substitute(s, {**({} if it is k else {k: it}), **known}) for s in stmts)]


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
    order = chosen_order(r)
    late = [] if order is None else [x for x in r.rings if all(e.stage for e in order.events if e.item in users_of(r, x))]
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


def released(r: WarpRoleLoop) -> list[Stmt]:
    """What the consumers of a block outside the grid do: they release each stage once it is full."""
    k = Var(r.loop.var.name, r.loop.var.dtype)
    slot, parity = r.slot(k)
    each = [x for ring in r.rings if ring.full is not None
            for x in (do("mbarrier_wait", AddressOf(ring.full, (slot,)), parity), *r.release(ring, k))]
    return [For(k, convert(r.loop.start), convert(r.loop.extent), "serial", seq(*each), span=r.loop.span)]


def _loads(r: WarpRoleLoop, rings: list[Ring], k: Expr, pure: list[Bind], tf32: set[Var]) -> list[Stmt]:
    """The loads of iteration k into these rings."""
    known: dict[Any, Expr] = {}
    stmts = _bound(pure, r.loop.var, [], k, known, [s.var for s in pure])
    for ring in rings:
        assert ring.full is not None and ring.empty is not None
        slot, parity = r.slot(k)
        copies, none = list[Stmt](), const(0, "uint32")
        size: Expr = none
        for i in ring.items:
            op: Any = r.body.items[i].stmt
            b, own = op.dst.buffer, const(tma_bytes(op), "uint32")
            dst = r.select(replace(op.dst, mins=(const(0),) * b.ndim), k)
            way = {"bulk": True, "boxes": True} if b.ndim == 1 else {"tma": True}
            copy = with_options(replace(op, src=substitute(op.src, {r.loop.var: k, **known}), dst=dst), **way,
                                barrier=(ring.full, slot), tf32=b.data in tf32 or None, cluster_split=ring.cluster_split(i))
            when = conjunction(r.reads(b, k, False), *ring.needed(i))
            copies.append(copy if when is None else If(when, copy))
            size = size + (own if when is None else Select(when, own, none, own.dtype, False))
        stmts += [do("mbarrier_wait", AddressOf(ring.empty, (slot,)), binary("bitxor", parity, const(1, "uint32"))),
                  do("mbarrier_arrive_expect_tx", AddressOf(ring.full, (slot,)), size), *copies]
    return stmts


# ---- loops without warp roles: asynchronous copies of the threads run ahead --------------------------------------------


@record
class Plan:
    """A checked schedule.

    stage, order: per item.  ahead: items that become asynchronous copies -> storage of their tiles.  versions: buffer -> the
    same buffer with a leading dimension of versions.  report: one line.  again: the last iteration loads its own tiles once
    more, in place of a branch around loads and stores of the next ones."""

    stage: list[int]
    order: list[int]
    ahead: dict[int, Var]
    versions: dict[Buffer, Buffer]
    report: str
    again: bool = False


@record
class _Run:
    """Consecutive statements of the schedule that belong to the same iteration.  group: index of its async group, or None."""

    items: list[int]
    stage: int
    group: int | None


class CopiedAhead:
    """Emits the serial code of a pipelined `loop` (already of kind serial).

    gemm: all that is not copied ahead, if it stays in flight until the next one has begun.  boxed: items that TMA copies, by
    the first thread -> mbarriers.
    """

    def __init__(self, plan: Plan, loop: For, loop_body: Body, gemm: Any, boxed: dict[int, Buffer], thread: Var) -> None:
        self.plan, self.loop, self.loop_body, self.gemm, self.boxed, self.thread = plan, loop, loop_body, gemm, boxed, thread
        self.items = loop_body.items
        self.depth = max(plan.stage, default=0)
        self.runs = self.split()
        self.groups = sum(r.group is not None for r in self.runs)
        self.extent: Expr = loop.extent
        self.base: Expr = loop.var if is_const(loop.start, 0) else loop.var - loop.start
        self.known: dict[Any, Expr] = {}  # bindings at the top of the loop's body

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
        if same_step and all(i in p.ahead for i in ranked[: len(p.ahead)]):  # copies first: sort them by first use
            ranked[: len(p.ahead)] = sorted(ranked[: len(p.ahead)], key=lambda i: (first_use[i], p.order[i]))
        runs, last, groups = list[_Run](), None, count()
        for i in ranked:
            key: Any = p.stage[i], i in p.ahead, first_use[i] if i in same_step else None
            if key != last or i not in p.ahead and p.order[i] in starts:
                runs.append(_Run([], p.stage[i], next(groups) if i in p.ahead else None))
            runs[-1].items.append(i)
            last = key
        return runs

    # ---- one run ------------------------------------------------------------------------------------------------

    def run(self, r: _Run, iteration: Any, it: Expr, known: dict[Any, Expr]) -> list[Stmt]:
        """Statements of a run for one iteration: the 0-based `iteration`, where the loop variable is `it`."""
        k = self.loop.var
        boxed = [i for i in sorted(r.items) if r.group is not None and i in self.boxed]
        stmts = [self.by_tma(boxed)] * bool(boxed) + [
            with_options(self.items[i].stmt, async_group=True) if i in self.plan.ahead else self.items[i].stmt
            for i in sorted(r.items) if i not in boxed]
        if self.gemm is not None and r.group is None:
            stmts = [with_options(self.gemm, wait=-1, in_flight=True), do("wgmma_wait", n=1)]
        parts = [[s] for s in stmts] if self.loop_body.late else [stmts]  # late bindings follow the statements they depend on
        return [select_version(x, self.plan.versions, iteration) for part in parts
                for x in _bound(self.loop_body.pure, k, part, it, known)]

    def by_tma(self, items: list[int]) -> Stmt:
        """The start of copies by TMA, in a branch of the first warp, which others jump over."""
        out: list[Stmt] = []
        for i in items:
            s: Any = with_options(self.items[i].stmt, async_group=True)
            full, slot = self.boxed[i], self.base % self.boxed[i].shape[0]
            own = tma_bytes(s) * s.dst.extents[-2] // s.dst.buffer.shape[-2]  # of some rows of the tile
            out += [do("mbarrier_arrive_expect_tx", AddressOf(full, (slot,)), const(own, "uint32")),
                    with_options(s, tma=True, barrier=(full, slot))]
        return If(binary("lt", self.thread, const(WARP_LANES, self.thread.dtype)), If(call("elect_one", (), "bool"), seq(*out)))

    def at(self, r: _Run, u: int | None) -> list[Stmt]:
        """Statements of a run in step u of the prologue, or (None) in a step of the loop; none where it has no iteration."""
        loop, ahead = self.loop, self.depth - r.stage
        if u is None and not ahead:
            return self.run(r, self.base, loop.var, self.known)
        if u is not None and r.stage > u:
            return []
        iteration = self.base + ahead if u is None else const(u - r.stage, loop.var.dtype)
        if u is None and self.plan.again:
            return self.run(r, iteration, loop.start + binary("min", iteration, self.extent - 1), {})
        stmts, inside = self.run(r, iteration, loop.start + iteration, {}), iteration < self.extent
        stmts = stmts if u is None else rename(stmts)
        if isinstance(inside, Const):
            return stmts if inside.value else []
        return [If(inside, seq(*stmts), span=loop.span)]

    # ---- waits --------------------------------------------------------------------------------------------------

    def needed_group(self, r: _Run) -> int | None:
        """The newest async group that a run needs, relative to the first group of its own step (negative: earlier steps)."""
        return max(((q.stage - r.stage) * self.groups + q.group for q in self.runs if q.group is not None and any(
            j in r.items for i in q.items for j in self.consumers(i))), default=None)

    def step(self, u: int | None) -> list[Stmt]:
        """Step u of the prologue, or (None) a step of the loop: runs in order with their commits and waits.

        Of a run without statements there, only the commit is emitted.
        """
        out: list[Stmt] = []
        issued, waited = 0, None
        bodies = [(r, self.at(r, u)) for r in self.runs]
        # If a wait needs no group of this step, it is emitted first.  One barrier after it then also separates the readers
        # of the previous iteration from the copies that overwrite their slot.
        early = [g for r, body in bodies if body for g in (self.needed_group(r),) if g is not None and g < 0]
        if early:
            waited = max(early)
            out.append(do("cp_async_wait", n=-waited - 1))
            out += [do("mbarrier_wait", AddressOf(b, (self.base % b.shape[0],)), cast(self.base // b.shape[0] % 2, "uint32"))
                    for b in dict.fromkeys(self.boxed.values())]
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
        loop, k = self.loop, self.loop.var
        out: list[Stmt] = [Alloc(b, span=b.span) for b in self.plan.versions.values()]
        out += [a for a in self.loop_body.allocs if a.buffer not in self.plan.versions]
        if self.boxed:
            full = list(dict.fromkeys(self.boxed.values()))
            out.append(seq(*map(Alloc, full), initialised(full, self.thread), do("sync_threads")))
        if not isinstance(loop.extent, (Const, Var)):  # bounds are evaluated once
            n = fresh(f"{k.name}_extent", loop.extent.dtype)
            out.append(Bind(n, loop.extent, span=loop.span))
            self.extent = n
        for u in range(self.depth):
            out += self.step(u)
        used = {v for r in self.runs if r.stage == self.depth for i in r.items for v in used_vars(self.items[i].stmt)}
        top = [b for b in needed_binds(self.loop_body.pure, used) if b.var not in self.loop_body.late]
        self.known = {b.var: b.var for b in top}
        body = seq(*top, *self.step(None), span=loop.span)
        out.append(with_options(replace(loop, body=body, extent=self.extent), pipeline_report=self.plan.report))
        if self.depth and self.groups:  # no copy is left in flight (the last are guarded off); this wait tells later passes
            out.append(do("cp_async_wait", n=0))
        if self.gemm is not None:
            out = [pin(self.gemm.c.buffer), *out, do("wgmma_wait", n=0), pin(self.gemm.c.buffer)]
        return seq(*out, span=loop.span)
