"""Loops with carried state: one kernel whose blocks walk over the steps, with the states in shared memory.

Axes along which no step mixes elements of a state are split over blocks.  Each new state and each result of a step is a nest of
its own (nest.Nest); new states are computed in full before they replace the old ones, and what a result needs of them it reads.
What a step reads of memory is copied ahead of it; what no step changes is computed in front of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from tilelang.library.gemm.tile import chip_of
from tilelang.target import Target

from .emit import allocation_lines, ensure_stage, head_lines
from .expand import Steps
from .expr import Axis, Scalar, Tensor
from .nest import Nest, Pass, Unfit, contraction, nest_of
from .plan import MOST, AxisUse, Plan, exactness, guess, static
from .text import Printer, unused, wide
from .writer import Facts, Tile, Writer, ceildiv, in_three_runs

TILE = (8, 16, 32)  # indices of the last independent axis of a block: least, of T.gemm, most; few make short steps
STAGES = 4  # steps whose reads are under way

Slot = tuple[int, int]  # (which result of a step, which of its axes); states are the first results


@dataclass
class StepsPlan:
    """A loop with state as a kernel.

    starts, results: of the first states, and of the results of a step.  split: the independent axes, each as the slots that
    count it, with the indices a block takes.
    """

    steps: Steps
    starts: list[Plan]
    results: list[Plan]
    split: list[tuple[frozenset[Slot], Axis, int]]
    notes: list[str] = field(default_factory=list)
    threads: int = 128

    def block(self, k: int, axes: Sequence[Axis]) -> tuple[dict[Axis, int], dict[Axis, str], list[str]]:
        """Of state or result k in these axes: indices that a block has of each, where more than one; the first index of axes
        over blocks; the indices of an element in the whole tensor."""
        inside: dict[Axis, int] = {}
        first: dict[Axis, str] = {}
        there = []
        for p, a in enumerate(axes):
            over, n = next(((s, n) for slots, s, n in self.split if (k, p) in slots), (None, 0))
            if over is not None:
                first[a] = over.name if n == 1 else f"{over.name} * {n}"
            if n != 1:
                inside[a] = n or _size(a)
            there.append(a.name if over is None else first[a] if n == 1 else f"{first[a]} + {a.name}")
        return inside, first, there


def plan_of_steps(items: Sequence[Tensor], stored: frozenset[Tensor], target: Target) -> StepsPlan:
    """The plan of a loop.  Raises Unfit."""
    steps: Steps = items[0].attrs["steps"]
    starts = [nest_of([Tensor(s.name, s.axes, s.dtype, "map", e)], stored) for s, e in steps.states]
    results = [nest_of([Tensor(f"result{k}", axes, "float32", "map", e)], stored) for k, (axes, e) in enumerate(steps.results)]
    plan = StepsPlan(steps, [], [], _split(results, target))
    plan.starts = [_plan(n, plan, k, target) for k, n in enumerate(starts)]
    plan.results = [_plan(n, plan, k, target) for k, n in enumerate(results)]
    names = " x ".join(str(a.extent) for _, a, _ in plan.split)
    plan.notes.append(f"the state lies in shared memory from step to step; blocks take {names} independent indices"
                      if names else "the state lies in the shared memory of one block: each step mixes all of it")
    return plan


def _split(results: list[Nest], target: Target) -> list[tuple[frozenset[Slot], Axis, int]]:
    """Axes that all states and results have, and along which states are only read at the index that is computed."""
    group: dict[Slot, set[Slot]] = {(k, p): {(k, p)} for k, n in enumerate(results) for p in range(len(n.axes))}
    mixed: set[Slot] = set()
    for k, nest in enumerate(results):
        for r in (r for e in nest.bodies() for r in e.reads if r.value.kind == "state"):
            for p, i in enumerate(r.args):
                slot = (r.value.attrs["index"], p)
                if i.op != "axis" or i.value not in nest.axes:
                    mixed.add(slot)
                    continue
                both = group[slot] | group[k, nest.axes.index(i.value)]
                for s in both:
                    group[s] = both
    free = [min(slots) for slots in {frozenset(g) for g in group.values()}
             if not slots & mixed and sorted(k for k, _ in slots) == list(range(len(results)))]
    out = [(frozenset(group[s]), Axis(f"s{s[1]}", results[s[0]].axes[s[1]].extent), 1) for s in sorted(free)][-3:]
    if out and (n := static(out[-1][1])) is not None and n > 1:
        kinds = {exactness(c.a.dtype, target) for nest in results for t in nest.stages if (c := contraction(t)) is not None}
        size = TILE[2 if target.is_cpu else 1 if kinds - {"threads"} else 0]
        others = prod(guess(a) for _, a, _ in out[:-1])
        while size < TILE[2] and others * -(-n // size) > 4 * chip_of(target).sms:
            size *= 2
        out[-1] = (*out[-1][:2], min(size, 1 << (n - 1).bit_length()))
    return out


def _plan(nest: Nest, plan: StepsPlan, k: int, target: Target) -> Plan:
    """Independent axes as the blocks take them, all others whole."""
    inside, first, _ = plan.block(k, nest.axes)
    uses = dict.fromkeys((plan.steps.step, *nest.axes), AxisUse("grid"))
    uses |= {a: AxisUse("tile" if a in first else "whole", n) for a, n in inside.items()}
    for a in (a for t in nest.stages for a in (*t.over, *t.axes) if a not in uses):
        uses[a] = AxisUse("whole", _size(a))
    made = Plan(nest, uses)
    for t in nest.stages:
        elements = prod(uses[a].size for a in (t.body.axes if t.body is not None else ()))
        if elements > MOST[target.is_gpu] and made.gemm_of(t) is None:
            raise Unfit("a step of a loop with more elements than a tile holds")
    return made


def _size(a: Axis) -> int:
    if (n := static(a)) is None:
        raise Unfit("a state with a size that is known at the call")
    return n


# ---- text ---------------------------------------------------------------------------------------------------------------


def steps_text(plan: StepsPlan, name: str, parameters: Sequence[tuple[str, Tensor]], target: Target) -> str:
    """The prim_func of a loop with state.  parameters: names and tensors, inputs first, then the loop's results in order."""
    text = _StepsText(plan, parameters, target)
    plan, body = text.plan, text.body()
    head = [*(f"# {n}" for n in plan.notes), "@T.prim_func", *head_lines(name, parameters)]
    grid = [(a.name, ceildiv(a.extent, n)) for _, a, n in reversed(plan.split)] or [(unused("block", text.used), "1")]
    shown = grid[0][0] if len(grid) == 1 else f"({', '.join(n for n, _ in grid)})"
    line = f"    with T.Kernel({', '.join(s for _, s in grid)}, threads={plan.threads}) as {shown}:"
    return "\n".join([*head, line, *body]) + "\n"


class _StepsText:
    def __init__(self, plan: StepsPlan, parameters: Sequence[tuple[str, Tensor]], target: Target) -> None:
        self.parameters, self.target = parameters, target
        self.used = {n for n, _ in parameters} | {"T"}
        split = [(slots, Axis(unused(a.name, self.used), a.extent), n) for slots, a, n in plan.split]
        self.plan = replace(plan, split=split)
        self.now_name = unused("t", self.used)  # of a step
        self.items = {t.attrs["index"]: n for n, t in parameters if t.kind == "item" and t.attrs["steps"] is plan.steps}
        self.allocations: list[str] = []
        self.loaded: dict[str, Tile] = {}  # what a step reads of memory -> the shared memory that it is copied to
        self.before: list[str] = []

    def body(self) -> list[str]:
        """The lines inside of T.Kernel."""
        plan, states = self.plan, self.plan.steps.states
        self.now = [self.buffer(k, f"state{k + 1}") for k in range(len(states))]
        self.new = [self.buffer(k, f"next{k + 1}") for k in range(len(states))]
        first = [x for k, p in enumerate(plan.starts) for x in self.nest(p, k, self.local(self.now[k], p, k), False)]
        loop: list[str] = []
        for k, p in enumerate(plan.results):
            if k < len(states):
                loop += self.nest(p, k, self.local(self.new[k], p, k), True)
            elif k in self.items:
                loop += self.nest(p, k, f"{self.items[k]}[{', '.join([self.now_name, *plan.block(k, p.nest.axes)[2]])}]", True)
        copies = [f"            T.copy({region}, {tile.name})" for region, tile in self.loaded.items()]
        loop += [f"            T.copy({new.name}, {now.name})" for now, new in zip(self.now, self.new)]
        last: list[str] = []
        for k in (k for k in range(len(states)) if k in self.items):
            axes = plan.results[k].nest.axes
            inside, _, there = plan.block(k, axes)
            extents = ", ".join(map(str, inside.values())) or "1"
            last += [f"        for {', '.join(a.name for a in inside) or 'i'} in T.Parallel({extents}):",
                     f"            {self.items[k]}[{', '.join(there) or '()'}] = {self.local(self.now[k], plan.results[k], k)}"]
        stages = f", num_stages={STAGES}" if copies and self.target.is_gpu else ""
        walk = f"        for {self.now_name} in T.Pipelined({plan.steps.step.extent}{stages}):"
        return [*self.allocations, *first, *self.before, walk, *copies, *loop, *last]

    def buffer(self, k: int, name: str) -> Tile:
        """Shared memory for a state: its axes but for those that a block has one index of."""
        state, _ = self.plan.steps.states[k]
        inside, _, _ = self.plan.block(k, state.axes)
        return self.shared(name, tuple(inside), tuple(inside.values()) or (1,), wide(state.dtype))

    def shared(self, name: str, axes: tuple[Axis, ...], shape: tuple[int, ...], dtype: str) -> Tile:
        name = unused(name, self.used)
        self.allocations.append(f"        {name} = T.alloc_shared({shape!r}, \"{dtype}\")")
        return Tile(name, axes, shape, dtype, "shared", -len(self.allocations))

    def local(self, tile: Tile, plan: Plan, k: int) -> str:
        """The element of a state that a nest computes."""
        return f"{tile.name}[{', '.join(a.name for a in self.plan.block(k, plan.nest.axes)[0]) or '0'}]"

    def state(self, e: Scalar, printer: Printer) -> str:
        """The text of an element of a state."""
        k = e.value.attrs["index"]
        inside, first, _ = self.plan.block(k, e.value.axes)
        places = [i.value.name if a in first else printer.text(i) for a, i in zip(e.value.axes, e.args) if a in inside]
        return f"{self.tile_of(e.value).name}[{', '.join(places) or '0'}]"

    def tile_of(self, state: Tensor) -> Tile:
        return (self.new if "new" in state.attrs else self.now)[state.attrs["index"]]

    def nest(self, plan: Plan, k: int, place: str, in_loop: bool) -> list[str]:
        """The statements that compute one result of a step."""
        (_, e), = plan.nest.outputs
        reads = {r for x in plan.nest.bodies() for r in x.reads}
        states = [r.value for r in reads if r.value.kind == "state"]

        def write(facts: Facts) -> Writer:
            w = Writer(plan, self.parameters, self.target, facts, ensure_stage)
            w.used_names |= self.used
            w.local = dict.fromkeys(states, self.state)
            for r in (r for r in reads if r.value.kind == "state" and all(i.op == "axis" for i in r.args)):
                tile = self.tile_of(r.value)  # which T.gemm reads as it is
                inside, _, _ = self.plan.block(r.value.attrs["index"], r.value.axes)
                axes = tuple(i.value for a, i in zip(r.value.axes, r.args) if a in inside)
                w.shared[r, axes, tile.dtype] = replace(tile, axes=axes)
            inside, first, there = self.plan.block(k, plan.nest.axes)
            w.bases |= first
            w.indices |= {a: i for a, i in zip(plan.nest.axes, there)} | {self.plan.steps.step: self.now_name}
            w.depth = 2
            if in_loop:
                w.depth, w.current, w.before = 3, Pass((self.plan.steps.step,), tuple(states), {}, {}), []
                for r in sorted(reads, key=repr):
                    self.load(w, r)
            w.ready(e)
            w.parallel(w.order(plan.nest.axes), f"{place} = {w.printer().text(e)}")
            return w

        w = in_three_runs(write)
        self.used |= w.used_names
        self.allocations += allocation_lines(w)
        self.before += w.before or []
        return w.lines

    def load(self, w: Writer, r: Scalar) -> None:
        """Copies ahead what a step reads of memory, where it is a plain piece of a tensor."""
        axes = w.order(r.axes)
        region = w.copyable(r, axes) if self.plan.steps.step in r.axes else None
        if region is None:
            return
        shape = tuple(w.size(a) for a in axes)
        if region not in self.loaded:
            self.loaded[region] = self.shared(f"{w.names[r.value]}_s", axes, shape, r.dtype)
            w.used_names.add(self.loaded[region].name)
        w.shared[r] = replace(self.loaded[region], axes=axes)
