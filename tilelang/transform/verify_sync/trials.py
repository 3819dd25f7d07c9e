"""Chooses the runs of the synchronisation model that clear a launch.

Block variables, symbols, scalars and numbers read from tensors decide how often loops run.  For each of them that does, the
model runs with values that make ring loops run 0, 1, 2, S-1, S, S+1 and 2S+1 times (S: stages), so that every mbarrier phase
meets every stage at the start and at the end.  Some loops are left depending on such a value (`break`, `continue`,
`while`), and some branches that order threads depend on one.  Then the model also runs with values for which that happens in
the first, the second and the last iteration, in all and in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from tilelang.ir import Binary, Bind, Call, Const, For, If, Launch, Load, Node, Seq, Stmt, Var, While, walk, GLOBAL
from tilelang.target.warp_groups import WARP_LANES, cuts_groups

from .sync_fault import Crowded, Fault, Found, Undecided
from .model import Model, Way, GROUP, MUCH_ROOM, ROOM
from .plan import Plan
from .unknowns import SAMPLES, Unknowns
from .values import RANKS, Marked, Values, number

_MOST_TRIALS = 12
_MOST_LEAVING = 16
# Differences from a constant for which a comparison with it holds, and for which it does not.
_DECIDE = {"lt": (-1, 0), "le": (0, 1), "eq": (0, 1), "ne": (1, 0), "gt": (1, 0), "ge": (0, -1)}
_RANKS = 3  # how many run a program of several ranks
_ORDINARY = 4096  # value of a symbol or scalar without any other constraint
_LARGEST = 1 << 16  # largest value of one that decides how often a loop runs
_SCALE = 256  # scale of numbers read from tensors, unless they decide how often a loop runs


class _Probe:
    """A frame that computes the extents of ring loops without following the program."""

    def __init__(self, plan: Plan, values: Values, env: dict[Any, Any], scale: int) -> None:
        self.plan, self.values, self.env, self.scale = plan, values, dict(env), scale
        self.constants: dict[int, Any] = {}
        self.threads, self.rank = None, 0

    block = model = property(lambda self: self)
    blocks = property(lambda self: (self,))

    def elected(self) -> Any:
        """Unknown here."""
        return None

    def load(self, e: Load, at: tuple[Any, ...]) -> int | None:
        """The number that the model assumes; variables are unknown here."""
        return number(self.scale, at) if e.buffer.scope_name == GLOBAL else None

    def compared(self, e: Binary, a: Any, b: Any) -> None:
        """Unknown here."""

    def extents(self, s: Stmt) -> Iterator[tuple[For, Any]]:
        """(ring loop, extent or None) below a statement."""
        match s:
            case Seq():
                for x in self.plan.skeleton(s):
                    yield from self.extents(x)
            case Bind():
                if s.value.dtype.lanes == 1 and not s.value.dtype.is_float:
                    try:
                        self.env[s.var] = self.values(s.value, self)
                    except Undecided:  # the extent depends on the thread
                        self.env[s.var] = None
            case If():
                yield from self.extents(s.then)
                if s.orelse is not None:
                    yield from self.extents(s.orelse)
            case While():
                yield from self.extents(s.body)
            case For() if self.plan.is_ring_loop(s):
                start, extent = self.values(s.start, self), self.values(s.extent, self)
                yield s, extent
                if self.plan.is_outer(s) and isinstance(start, int) and isinstance(extent, int):
                    self.env[s.var] = start + max(0, extent - 1)  # the first and the last tile may have different lengths
                    yield from self.extents(s.body)
                self.env[s.var] = start
                yield from self.extents(s.body)


class _Trials:
    """The choices for one launch: (values of variables, scale of numbers read)."""

    def __init__(self, plan: Plan, values: Values) -> None:
        launch = plan.launch
        self.plan, self.values, self.body = plan, values, launch.body
        bound = {x.var for x in plan.of(Bind)} | {x.var for x in plan.of(For)} | set(launch.thread_vars)
        variables = dict.fromkeys(plan.of(Var))
        free = [x for x in variables if x not in bound and not x.dtype.is_float and x.dtype.bits in (8, 16, 32, 64)]
        self.base: dict[Any, int] = {v: _ORDINARY for v in free}
        self.base.update((v, 0) for v in launch.block_vars)
        self.most: dict[Any, int] = {}
        for v, n in zip(launch.block_vars, launch.grid):
            size = values(n, _Probe(plan, values, self.base, _SCALE))
            self.most[v] = max(0, int(size) - 1) if size is not None else _LARGEST
        self.base.update(zip(RANKS, (0, _RANKS)))
        self.most.update(dict.fromkeys(RANKS, 0))  # no drivers of their own: see all
        self.ranked = any(x.op in RANKS for x in plan.of(Call))
        self.reads = any(x.buffer.scope_name == GLOBAL and not x.dtype.is_float for x in plan.of(Load))

    def launches(self, driver: Any, value: int) -> bool:
        """Whether the launch has any block when a driver has a value."""
        probe = _Probe(self.plan, self.values, self.base if driver is None else {**self.base, driver: value}, _SCALE)
        sizes = [self.values(n, probe) for n in self.plan.launch.grid]
        return all(n is None or n > 0 for n in sizes)

    def extents(self, driver: Any, value: int) -> tuple[Any, ...]:
        """Extents of all ring loops when one driver (None: numbers read) has a value."""
        env = self.base if driver is None else {**self.base, driver: value}
        probe = _Probe(self.plan, self.values, env, value if driver is None else _SCALE)
        found = list(probe.extents(self.body))
        self.loops = [s for s, _ in found]
        return tuple(e for _, e in found)

    def all(self) -> list[tuple[dict[Any, int], int | Marked]]:
        """The ordinary choice, and for each driver (a value that decides loop extents) those that reach the wanted extents."""
        out: list[tuple[dict[Any, int], int | Marked]] = [(self.base, _SCALE)]
        s = self.plan.stages
        rings = [x for x in self.plan.of(For) if self.plan.is_ring_loop(x)]
        tiles = any(map(self.plan.is_outer, rings))
        # Over several tiles the rings continue wherever they are, so a few lengths of the inner loops suffice.
        wants = [0, 1, s + 1] if tiles else sorted({0, 1, 2, s - 1, s, s + 1, 2 * s + 1})
        if not rings:
            return [*out, *self._leaving(), *self._others()]
        drivers: list[Any] = [v for v in self.base if self.most.get(v, 1) > 0]
        if None not in self.extents(None, _SCALE):
            drivers = [v for v in drivers if v in self.plan.deciding]
        for d in [*drivers, *([None] if self.reads else [])]:
            for v in self._values(d, self.most.get(d, _LARGEST), wants):
                choice = (self.base, v) if d is None else ({**self.base, d: v}, _SCALE)
                if choice not in out:
                    out.append(choice)
        return [*out[:_MOST_TRIALS], *[c for c in self._leaving() if c not in out], *self._others()]

    def _others(self) -> list[tuple[dict[Any, int], int | Marked]]:
        """The ordinary choice on the other ranks."""
        return [({**self.base, RANKS[0]: r}, _SCALE) for r in range(1, _RANKS)] if self.ranked else []

    def _leaving(self) -> list[tuple[dict[Any, int], int | Marked]]:
        """Choices that leave ring loops early, and that take and skip branches that order threads.

        They exist where numbers read from tensors or variables of the launch decide that.
        """
        conds: list[Node] = []
        branches: list[Node] = []
        last = {self.plan.stages}
        for s in self.plan.nodes:
            if isinstance(s, If) and self.plan.facts(s)[2]:
                if not any(x.op == "thread_return" for x in walk(s, Call)):  # the model cannot follow it
                    branches.append(s.cond)
            elif isinstance(s, (For, While)) and self.plan.is_ring_loop(s):
                found = [x.cond for x in walk(s.body, If) if self.plan.leaves(x)]
                conds += [*found, *([s.cond] if isinstance(s, While) else [])]
                if found and isinstance(s, For) and isinstance(s.extent, Const):
                    last.add(int(s.extent.value) - 1)
        bound = {x.var: x.value for x in self.plan.of(Bind)}
        reads, used = False, set()
        pairs: dict[tuple[int, int], None] = {}
        for cond in (*conds, *branches):
            parts, names, asked = [cond], set(), []
            while parts:
                for x in walk(parts.pop()):
                    if isinstance(x, Var) and x not in names:
                        names.add(x)
                        parts += [bound[x]] if x in bound else []
                    elif isinstance(x, Load) and not x.dtype.is_float and x.buffer.scope_name == GLOBAL:
                        names.add(x.buffer.data)
                    elif isinstance(x, Binary) and x.op in _DECIDE and isinstance(x.b, Const) and x.b.dtype.is_int:
                        yes, no = _DECIDE[x.op]
                        asked.append((int(x.b.value) + yes, int(x.b.value) + no))
            used |= names
            if any(v.dtype.is_handle for v in names):  # numbers of a tensor
                reads = True
                pairs.update(dict.fromkeys(asked))
        places = sorted({0, 1, *sorted(last)[-2:]}) if conds else [0]
        out: list[tuple[dict[Any, int], int | Marked]] = []
        if reads:
            out += [(self.base, v) for v in (0, 1, self.plan.stages + 1)]
            for yes, no in list(pairs)[:3]:
                out += [(self.base, Marked(p, *held)) for p, *held in (
                    *((p, yes, no) for p in places), (-1, no, yes), (-1, yes, no))]
        for v in self.base:
            if v in used and self.most.get(v, 1) > 0 and v not in self.plan.launch.block_vars:
                out += [({**self.base, v: n}, _SCALE) for n in places if self.launches(v, n)]
        return out[:_MOST_LEAVING]

    def _values(self, driver: Any, most: int, wants: list[int]) -> list[int]:
        known: dict[int, tuple[Any, ...]] = {}

        def at(v: int) -> tuple[Any, ...]:
            if v not in known:
                known[v] = self.extents(driver, v)
            return known[v]

        found: dict[int, None] = {}
        least = 0 if self.launches(driver, 0) else 1
        low, high = at(least), at(most)
        samples = [max(least, most * k // 7) for k in range(8)]  # lengths need not grow with the driver
        for v in samples if most < _LARGEST else ():
            at(v)
        alike: set[tuple[int, ...]] = set()  # loops whose lengths differ by a constant need no values of their own
        for i, (a, b) in enumerate(zip(low, high)):
            curve = tuple(known[v][i] for v in sorted(known) if v in samples)
            if None in (a, b) and most < _LARGEST:  # depends on a variable of the program: the last block has other lengths
                found[most] = None
            if any(e is None for e in (*curve, a, b)) or len({*curve, a, b}) == 1 or any(
                    len(curve) == len(c) and len({x - y for x, y in zip(curve, c)}) == 1 for c in alike):
                continue
            alike.add(curve)
            longest = max(known, key=lambda v: known[v][i] or 0)
            if known[longest][i] < max(wants):  # a shorter loop than wanted: its greatest length
                found[longest] = None
            for want in (0, 1, 2) if self.plan.is_outer(self.loops[i]) else wants:
                there = next((v for v in samples if v in known and known[v][i] == want), None)
                if there is not None:
                    found[there] = None
                    continue
                lo, hi = least, most  # bisect for the smallest value whose extent reaches `want`
                while lo < hi and a != b:
                    mid = (lo + hi) // 2
                    e = at(mid)[i]
                    if e is None or (e >= want if b > a else e <= want):
                        hi = mid
                    else:
                        lo = mid + 1
                if at(lo)[i] == want:
                    found[lo] = None
        return list(found)


# Which iterations are followed, lowest cost first.  Warp roles may cover the same iterations with different loops (one handles
# its last iteration separately).  One of them may then leave out iterations that another follows, and the model deadlocks; with
# `later` this happens at other lengths.
_WAYS = (Way(), Way(later=1), Way(later=2), Way(later=3), Way(1 << 12, every_tile=False), Way(1 << 12))
_EXACT = 4  # first of the entries that leave out no iterations


def _in_words(scale: int | Marked) -> str:
    """The values that a trial assumes in tensors, in words."""
    if isinstance(scale, Marked):
        return f"{scale.there} at place {scale.place} and {scale.elsewhere} elsewhere"
    return f"{scale}, {2 * scale}, {3 * scale}, ..." if scale else "0"


def check_model(launch: Launch, nodes: list[Node]) -> tuple[str, list[Fault]]:
    """(one-paragraph verdict, faults found) of the model for a launch."""
    try:
        return _followed(launch, nodes, ROOM)
    except Crowded:
        return _followed(launch, nodes, MUCH_ROOM)


def _followed(launch: Launch, nodes: list[Node], room: int) -> tuple[str, list[Fault]]:
    """check_model with a given room.  Raises Crowded where `room` is too small and `MUCH_ROOM` may suffice."""
    plan = Plan(launch, nodes)
    values = Values(plan.places, launch.thread_vars)
    single = cuts_groups(nodes)
    width, cut, runs, accesses = WARP_LANES if single else GROUP, False, 0, 0
    names = ", ".join(sorted({b.name for b in plan.shared}))
    streams = f"{-(-launch.num_threads // width)} warp{'s' if single else ' groups'}"
    scope = f"{streams}, {sum(int(b.shape[0]) for b in plan.barriers)} mbarriers"
    scope += f", shared {names}" if names else ""
    doubt = ""
    try:
        for (env, scale), votes in product(_Trials(plan, values).all(), (True, False) if plan.votes else (True,)):
            way = 0
            while True:
                model = Model(plan, values, env, scale, width, replace(_WAYS[way], tiles=1 if runs else 3, room=room,
                                                                         votes=votes))
                try:
                    model.run()
                    break
                except Found as e:
                    doubt = f" (with iterations left out: {e.fault.message})"
                    # Iterations left out may matter, or warps of a group may wait for each other: run again in more detail.
                    if model.cut and way < len(_WAYS) - 1:
                        way = way + 1 if e.fault.stuck else max(way + 1, _EXACT)
                    elif e.fault.stuck and width == GROUP:
                        width = WARP_LANES
                    elif scale != _SCALE:
                        f = e.fault
                        told = f"{f.message} (where numbers read from tensors are {_in_words(scale)})"
                        raise Found(replace(f, message=told)) from None
                    else:
                        raise
            runs, cut, accesses = runs + 1, cut or model.cut, accesses + sum(b.accesses for b in model.blocks)
            model.forget()
    except Undecided as e:
        if isinstance(e, Crowded) and room < MUCH_ROOM:
            raise
        return f"not checked: {e}{doubt}", []
    except Found as e:
        at = f" ({e.fault.span})" if e.fault.span is not None else ""
        return f"not cleared: {e.fault.message}{at}; {scope}", [e.fault]
    text = f"ordered: model of {scope}, {runs} run{'s' * (runs > 1)} with loops of different lengths"
    return text + (", whole periods of the rings left out of long loops" if cut else ""), []


# ---- programs that block barriers order -------------------------------------------------------------------------------------
# The model follows programs that order threads with block barriers and cp.async groups only with all numbers unknown that
# they get at run time, except for block indices: those of the first block, and of the last where it may differ.  A condition
# on unknown numbers that all threads have in common holds in one run and fails in another; of other conditions both ways are
# followed by all threads that may take them.

_SOME = 3  # a block of a grid of unknown size
_ROOM = 256  # subsets of the threads whose accesses are tracked separately


def check_barriers(launch: Launch, nodes: list[Node], sizes: dict[Var, int]) -> tuple[str, list[Fault]]:
    """(one-paragraph verdict, faults found).  sizes: assumed values of symbols on which the sizes of shared buffers depend."""
    plan = Plan(launch, nodes, sizes)
    try:
        runs = _runs(plan, Values(plan.places, launch.thread_vars))
    except Undecided as e:
        return f"not checked: {e}", []
    faults = [f for r in runs for f in r.faults]
    (block,) = runs[-1].blocks[:1]
    names = ", ".join(sorted({b.name for b in plan.shared}))
    scope = f"{block.accesses} accesses to {names} in {block.named(0).phase + 1} barrier intervals"
    if any(r.cut for r in runs):
        scope += ", iterations left out of long loops"
    if sizes:
        scope += ", with " + ", ".join(f"{v.name} = {n}" for v, n in sizes.items())
    if block.unknown:
        scope += f"; {block.unknown} with addresses known only at run time, taken as anywhere"
    return (f"not cleared: {faults[0].message} ({faults[0].span}); {scope}" if faults else f"ordered: {scope}"), faults


def _runs(plan: Plan, values: Values) -> list[Model]:
    """Runs with one and with several iterations of loops of unknown length; where conditions on unknown numbers were met, with
    every sample of those.

    If threads compared their numbers with kernel parameters (`i == n`) and a run finds a fault, it is repeated with each
    parameter equal to each of those numbers, and to none of them.
    """
    unknown = any(not isinstance(x.extent, Const) for x in walk(plan.launch.body, For))
    out: list[Model] = []
    for block, extent in product(_blocks(plan), (1, None) if unknown else (None,)):
        env = {**block, **plan.sizes}
        for trial in range(len(SAMPLES)):
            run = _run(plan, values, env, Unknowns(plan.launch, plan.uniform, extent, trial, {}))
            assert run.unknowns is not None, "it got them"
            others = run.unknowns.others() if run.faults else ()
            out += [_run(plan, values, env, Unknowns(plan.launch, plan.uniform, extent, trial, x)) for x in others] or [run]
            if not run.unknowns.sampled:
                break
    return out


def _blocks(plan: Plan) -> list[dict[Var, int]]:
    """The numbers of the blocks that are followed: of the last one only where what it does with shared memory may differ."""
    launch = plan.launch
    last = {v: int(n.value) - 1 if isinstance(n, Const) else _SOME for v, n in zip(launch.block_vars, launch.grid)}
    first = dict.fromkeys(launch.block_vars, 0)
    return [last, first] if last != first and plan.asks_for_block else [first]


def _run(plan: Plan, values: Values, env: dict[Var, int], unknowns: Unknowns, room: int = _ROOM) -> Model:
    """One run, in which all threads of the block follow the program together."""
    model = Model(plan, values, env, 0, plan.launch.num_threads, Way(room=room), unknowns)
    try:
        model.run()
    except Found as e:
        model.faults.append(e.fault)
    except Crowded:
        return _run(plan, values, env, unknowns, 4 * room)
    return model
