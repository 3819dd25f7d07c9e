"""The items that the consumers of a loop run: what each waits for, the orders that they may have, and what these cost."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from tilelang.errors import InternalError
from tilelang.ir import Buffer, Call, Var, contains, walk, FRAGMENT, SHARED
from tilelang.ir.record import record
from tilelang.ops import Gemm
from tilelang.target.machine import UNIT_RATES

from .effects import fills_whole, is_sync
from .item_cost import Cycles, item_cycles
from .pipeline_loops import Item, violations
from .simulate_loop import START, Event, Held, RingUse, Simulation, Wait

_MOST_SUBSETS = 6  # GEMMs of which all subsets are tried; of more, only those that end a loop


@record
class LoopOrder:
    """The order of a loop's steady iteration.

    events: in the order in which they run.  cycles: of an iteration of all groups, by the simulation.  path: of one group
    alone, without loads.  registers: of a thread, for fragments.  carry: whether GEMMs stay in flight from one iteration to
    the next.
    """

    events: tuple[Event, ...]
    cycles: float
    path: float
    registers: int
    carry: bool

    @property
    def depth(self) -> int:
        """The number of iterations that the last stage is late."""
        return max((e.stage for e in self.events), default=0)


class LoopItems:
    """The items that the consumers of a loop run, their conflicts, and what they cost.

    items: of the whole body.  own: those of the consumers, in the order of the program.  groups: number of warp groups.
    used_outside: storage that is accessed outside the loop.  rings: the rings of stages that the producer fills.  asked: the
    order that the program gives; () for none.  versions: storage -> number of tiles that iterations use in turn.  beside:
    blocks that an SM runs at once, this one included.  passed: cycles in which groups pass registers in front of an item.
    """

    def __init__(self, items: list[Item], own: Sequence[int], groups: int, used_outside: Container[Var],
                 rings: Sequence[RingUse] = (), asked: tuple[Event, ...] = (),
                 versions: Mapping[Var, int] | None = None) -> None:
        self.asked, self.beside, self.versions = asked, 1, dict(versions or {})
        self.items, self.own, self.groups, self.rings = items, tuple(own), groups, tuple(rings)
        self.gemms = tuple(i for i in self.own if isinstance(items[i].stmt, Gemm))
        self.cost: dict[int, Cycles] = {i: item_cycles(items[i].stmt) for i in self.own}
        # What orders threads itself or contains a GEMM: no GEMM may be in flight while it runs.
        self.opaque = {i for i in self.own if i not in self.gemms and (
            contains(items[i].stmt, Gemm) or any(is_sync(x) for x in walk(items[i].stmt, Call)))}
        self.unrolled = {e.storage for x in items for e in x.effects
                         if e.storage in self.versions and e.buffer.scope_name == FRAGMENT}
        self.meets, self.meets_later = ({(i, j): _meet(items[i], items[j], x) for n, i in enumerate(self.own)
                                         for j in self.own[n:]} for x in ((), self.tiles()))
        passed = {e.storage for i in self.own for e in items[i].effects if e.writes and e.buffer.scope_name in SHARED}
        self.exchanged = {i for i in self.own if any(e.storage in passed for e in items[i].effects)}
        self.passed: dict[int, float] = {}
        self.needed: dict[tuple[int, int, int, bool], bool] = {}
        self.live_outside = {e.storage for i in self.own for e in items[i].effects
                             if e.buffer.scope_name == FRAGMENT and e.storage in used_outside}

    def tiles(self, distance: int = 1, deep: bool = True) -> set[Var]:
        """The storages of which iterations at this distance have one each.  deep: items run late; a fragment has only one then,
        for its versions are those of a loop that is unrolled by two."""
        return {x for x, n in self.versions.items() if distance % n and not (deep and x in self.unrolled)}

    def gemm(self, i: int) -> Any:
        return self.items[i].stmt

    # ---- what an event waits for -----------------------------------------------------------------------------------

    def needs(self, i: int, g: int, distance: int = 0, deep: bool = True) -> bool:
        """Whether GEMM g, in flight, must be complete before item i runs, which is `distance` iterations later (see `tiles`).

        Registers of a wgmma in flight belong to the tensor cores: other statements may not even read them (PTX ISA, "wgmma").
        GEMMs that add to the same registers are ordered by the hardware.
        """
        key = i, g, distance, deep
        if key not in self.needed:
            self.needed[key] = i in self.opaque or self._needs(*key)
        return self.needed[key]

    def _needs(self, i: int, g: int, distance: int, deep: bool) -> bool:
        op, x = self.gemm(g), self.items[i]
        others = self.tiles(distance, deep)
        if i in self.gemms:
            other = self.gemm(i)
            mine, theirs = _operands(op), _operands(other)
            return op.c.buffer.data in theirs or other.c.buffer.data in mine or \
                other.c.buffer.data is op.c.buffer.data and other.c != op.c
        private = {op.c.buffer.data, *(b.data for b in held_in_registers(op))}
        return any(e.storage in private - others or e.writes and e.storage in _operands(op) - others for e in x.effects)

    def waits(self, events: Sequence[Event], cyclic: bool, carry: bool = True) -> dict[int, Wait]:
        """The waits of a sequence of events, by the place of the event that each precedes; len(events) stands for the end.

        cyclic: the sequence repeats.  With `carry`, a GEMM that no event needs is then waited for behind the run of GEMMs in
        which it starts again, so that a stage of a ring lasts one iteration more; else at the end of the iteration.
        """
        size, out = len(events), dict[int, Wait]()
        starts = {n for n, e in enumerate(events) if e.item in self.gemms}
        due: dict[int, list[tuple[int, int]]] = {}  # place -> (place of the GEMM, iterations between)
        for p in starts:
            q = self._due(events, p, starts, cyclic and carry)
            due.setdefault(q if q <= size else q - size, []).append((p, int(q > size)))
        flying: list[tuple[int, int]] = []  # (place, iteration)
        for step in range(3 if cyclic else 1):
            for q in range(size + 1):
                wanted = [flying.index((p, step - n)) for p, n in due.get(q, ()) if (p, step - n) in flying]
                if wanted:
                    done, flying = flying[:max(wanted) + 1], flying[max(wanted) + 1:]
                    out[q] = Wait(len(flying), tuple(p for p, t in done if t == step), tuple(p for p, t in done if t < step))
                if q in starts:
                    flying.append((q, step))
        return out

    def _due(self, events: Sequence[Event], p: int, starts: set[int], carry: bool) -> int:
        """Before which place the GEMM at place p has to be complete; len(events) is the end of the iteration, and places of
        the next iteration count from there on."""
        size = len(events)
        # ptxas serialises wgmmas whose A registers, or accumulators that threads touch, are in use at the end of an iteration
        # (C7514), unless two sets of A registers alternate.
        op, deep = self.gemm(events[p].item), any(e.stage for e in events)
        held = any(deep or b.data not in self.unrolled for b in held_in_registers(op))
        stays = carry and not held and not any(
            i not in self.gemms and self.items[i].touches(op.c.buffer.data) for i in self.own)
        for q in range(p + 1, p + size + 1 if stays else size):
            later = events[q % size]
            if self.needs(later.item, events[p].item, q // size + events[p].stage - later.stage, deep):
                return q
        if not stays:
            return size
        q = p + size + 1
        while q < 2 * size and q - size in starts:
            q += 1
        return q

    def carries(self, order: LoopOrder) -> bool:
        """Whether a GEMM stays in flight from one iteration to the next."""
        return any(w.carried for w in self.waits(order.events, True, order.carry).values())

    def held(self, events: Sequence[Event], waits: dict[int, Wait], ring: RingUse) -> Held:
        """How long the stages of a ring are in use."""
        until = {p: (0, q) for q, w in waits.items() for p in w.done} | {p: (1, q) for q, w in waits.items() for p in w.carried}
        mine = [n for n, e in enumerate(events) if e.item in ring.users]
        ends = [(events[n].stage + until[n][0], until[n][1], 0, n) if events[n].item in self.gemms else
                (events[n].stage, n, 1, n) for n in mine]
        (lag, end, plain, place), first = max(ends), min(mine, key=lambda n: (events[n].stage, n))
        return Held(first, lag - events[first].stage, place, not plain, end, (lag, end, bool(plain)))

    # ---- candidates ------------------------------------------------------------------------------------------------

    def candidates(self) -> Iterable[frozenset[int]]:
        """Sets of items that run one iteration late: some GEMMs, and what conflicts with them behind them.

        A sparse GEMM is not late: threads would then wait for it before they load the next metadata.
        """
        some = [frozenset(x) for n in range(len(self.gemms) + 1) for x in combinations(self.gemms, n)] \
            if len(self.gemms) <= _MOST_SUBSETS else [frozenset(self.gemms[n:]) for n in range(len(self.gemms) + 1)]
        return dict.fromkeys(x for x in map(self._closed, some) if not x or len(x) < len(self.own) and not any(
            self.gemm(i).sparsity > 1 for i in x & {*self.gemms}))

    def _closed(self, late: frozenset[int]) -> frozenset[int]:
        out = set(late)
        for n, j in enumerate(self.own):
            if any(i in out and self.meets[i, j] for i in self.own[:n]):
                out.add(j)
        return frozenset(out)

    def ordered(self, late: frozenset[int], at_once: bool) -> tuple[Event, ...]:
        """The steady iteration for a set of late items, by list scheduling.

        at_once: a GEMM starts as soon as its operands are complete; else what leads to more work goes first.
        """
        after: dict[int, set[int]] = {i: set() for i in self.own}
        for n, i in enumerate(self.own):
            for j in self.own[n + 1:]:
                behind = i not in late and j in late
                if self.meets_later[i, j] if behind else self.meets[i, j]:
                    first, second = (j, i) if behind else (i, j)
                    after[first].add(second)
        left: dict[int, int] = dict.fromkeys(self.own, 0)
        for later in after.values():
            for j in later:
                left[j] += 1
        tails: dict[int, float] = {}

        def tail(i: int) -> float:
            """Cycles of what follows an item in the iteration: of two GEMMs, that of the longer tail goes first."""
            if i not in tails:
                tails[i] = max((self.cost[j].tensor + self.cost[j].ordinary + tail(j) for j in after[i]), default=0.0)
            return tails[i]

        now = tensor = 0.0
        flying: dict[int, float] = {}  # GEMM -> when it is complete
        out: list[Event] = []
        while len(out) < len(self.own):
            ready = [i for i in self.own if left[i] == 0]
            begins = {i: max((t for g, t in flying.items() if self.needs(i, g, (g in late) - (i in late))),
                             default=0.0) for i in ready}
            free = [i for i in ready if begins[i] <= now]
            gemms = [i for i in free if i in self.gemms]
            others = [i for i in free if i not in self.gemms]
            # What takes no time is not worth another order than the program's.
            heavy = sum(self.cost[x].ordinary for x in others) >= START
            if gemms and (at_once or not heavy or all(
                    tail(i) + self.cost[i].ordinary <= max(map(tail, gemms)) for i in others)):
                i = max(gemms, key=tail)
            elif heavy or len(free) == len(ready):
                i = others[0]
            else:
                soon = min(begins[i] for i in ready if begins[i] > now)
                i = next(i for i in ready if begins[i] <= soon)
            now = max(now, begins[i])
            if i in self.gemms:
                tensor = max(tensor, now) + self.cost[i].tensor
                flying[i], now = tensor, now + START
            else:
                now += self.cost[i].ordinary
            left[i] = -1
            for j in after[i]:
                left[j] -= 1
            out.append(Event(i, int(i in late)))
        return tuple(out)

    # ---- what a candidate costs ------------------------------------------------------------------------------------

    def registers(self, events: Sequence[Event], waits: dict[int, Wait]) -> int:
        """Registers of a thread that the fragments of two dimensions and more take at once in a steady iteration."""
        size = len(events)
        until = {p: q + size * (q <= p) for q, w in waits.items() for p in w.done} | {
            p: q + size for q, w in waits.items() for p in w.carried}
        live = [0] * size
        alternate = not any(e.stage for e in events)
        tiles = {e.storage: e.buffer for i in self.own for e in self.items[i].effects
                 if e.buffer.scope_name == FRAGMENT and e.buffer.ndim > 1}
        for storage, b in tiles.items():
            here = [n for n, e in enumerate(events) if self.items[e.item].touches(storage)]
            busy = {n % size for n in range(size)} if storage in self.live_outside else set()
            for k, n in enumerate(here):
                following = here[(k + 1) % len(here)]
                end = following + size * (following <= n)
                if not self.overwrites(events[following].item, storage):
                    busy |= {q % size for q in range(n, end)}
                if n in until:
                    busy |= {q % size for q in range(n, until[n])}
            copies = 2 if alternate and storage in self.unrolled else 1
            for q in busy:
                live[q] += b.bits // 32 // (self.groups * 128) * copies
        return max(live, default=0)

    def overwrites(self, i: int, storage: Var) -> bool:
        """Whether an item replaces all of what a storage held."""
        x = self.items[i]
        return not any(e.reads for e in x.effects if e.storage is storage) and (i in self.gemms or fills_whole(x.stmt))

    def simulated(self, events: Sequence[Event], waits: dict[int, Wait], groups: int, rings: Sequence[RingUse],
                  delays: bool = False) -> Simulation:
        """The run of a steady iteration of so many warp groups that wait for these rings.  delays: see Simulation."""
        held = [self.held(events, waits, x) for x in rings]
        tensor = {n: (self.cost[e.item].tensor + self.crowded(events, waits, n)) / self.groups
                  for n, e in enumerate(events) if e.item in self.gemms}
        slow = 1.0 if self.groups > 1 else 1 / UNIT_RATES.one_group
        waited = [c.tensor and c.tensor + UNIT_RATES.drain * delays for e in events for c in [self.cost[e.item]]]
        ordinary = [self.cost[e.item].ordinary * slow + (0.0 if n in tensor else waited[n]) + self.passed.get(e.item, 0.0)
                    for n, e in enumerate(events)]
        meets = {n for n, e in enumerate(events) if e.item in self.exchanged}
        return Simulation(events, waits, tensor, ordinary, meets, list(zip(rings, held)), groups, delays)

    def crowded(self, events: Sequence[Event], waits: dict[int, Wait], p: int) -> float:
        """Cycles for which the GEMM at place p waits for stores under it, where it is the first of its group's in flight.  Half
        of shared memory's port is the threads': a GEMM whose operands take more of it gives the rest up."""
        cost, end = self.cost[events[p].item], next((q for q, w in waits.items() if p in w.done), len(events))
        first = not any(e.item in self.gemms for e in events[max((q for q in waits if q < p), default=0):p])
        stored = sum(self.cost[e.item].port for e in events[p + 1:end] if first and e.item not in self.gemms)
        return stored * max(0.0, 2 * cost.port / cost.tensor - 1) if stored else 0.0

    def checked(self, events: Sequence[Event]) -> None:
        """Raises InternalError if the order breaks a dependence: this asks the independent checker of pipelines."""
        places = {e.item: (e.stage, n) for n, e in enumerate(events)}
        stages, order = ([places[i][k] for i in self.own] for k in (0, 1))
        if found := violations([self.items[i] for i in self.own], stages, order, self.versions):
            raise InternalError(f"the order of a loop breaks a dependence on `{found[0].what}`")


def held_in_registers(op: Any) -> list[Buffer]:
    """The fragments that a wgmma reads while it runs: A, and metadata of a sparse A."""
    regions = (op.a, op.metadata) if op.sparsity > 1 else (op.a,)
    return [r.buffer for r in regions if r.buffer.scope_name == FRAGMENT]


def _operands(op: Any) -> set[Var]:
    return {op.a.buffer.data, op.b.buffer.data, *(b.data for b in held_in_registers(op))}


def _meet(a: Item, b: Item, versions: Container[Var]) -> bool:
    """Whether the order of two items matters, a standing in front of b, apart from tiles that have versions."""
    if a.defines is not None and a.defines in b.needs:
        return True
    return any(x.storage is y.storage and (x.writes or y.writes) and x.storage not in versions
               for x in a.effects for y in b.effects)
