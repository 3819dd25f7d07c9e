"""Loops with carried state: one kernel whose blocks walk over the steps, with the states in shared memory.

Axes along which no step mixes elements of a state are split over blocks.  Each state and each result of a step is a nest of its
own (nest.Nest); new states are computed in full before they replace the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilelang.target import Target

from .expand import Steps
from .expr import Axis, Scalar, Tensor
from .nest import Nest, Unfit, nest_of
from .plan import MOST, AxisUse, Plan, static

TILE = 32  # indices of the last independent axis that a block takes

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

    def use_of(self, slot: Slot) -> tuple[Axis, int] | None:
        """(the axis over blocks, indices of a block) of an axis of a state or result; None where it is whole."""
        return next(((a, n) for slots, a, n in self.split if slot in slots), None)


def plan_of_steps(items: Sequence[Tensor], stored: frozenset[Tensor], target: Target) -> StepsPlan:
    """The plan of a loop.  Raises Unfit."""
    steps: Steps = items[0].attrs["steps"]
    starts = [nest_of([_map(s.name, s.axes, e, s.dtype)], stored) for s, e in steps.states]
    results = [nest_of([_map(f"result{k}", axes, e, "float32")], stored) for k, (axes, e) in enumerate(steps.results)]
    split = _split(steps, results)
    plan = StepsPlan(steps, [], [], split)
    plan.starts = [_plan(n, plan, k, steps, target) for k, n in enumerate(starts)]
    plan.results = [_plan(n, plan, k, steps, target) for k, n in enumerate(results)]
    names = " x ".join(str(a.extent) for _, a, _ in split)
    plan.notes.append(f"the state lies in shared memory from step to step; blocks take {names or 'no'} independent indices"
                      if split else "the state lies in the shared memory of one block: each step mixes all of it")
    return plan


def _map(name: str, axes: tuple[Axis, ...], e: Scalar, dtype: str) -> Tensor:
    return Tensor(name, axes, dtype, "map", e)


def _split(steps: Steps, results: list[Nest]) -> list[tuple[frozenset[Slot], Axis, int]]:
    """Axes that all states and results have, and along which states are only read at the index that is computed."""
    where = {s: k for k, (s, _) in enumerate(steps.states)}
    group: dict[Slot, set[Slot]] = {(k, p): {(k, p)} for k, n in enumerate(results) for p in range(len(n.axes))}
    mixed: set[Slot] = set()
    for k, nest in enumerate(results):
        for e in nest.bodies():
            for r in (r for r in e.reads if r.value in where):
                for p, i in enumerate(r.args):
                    slot = (where[r.value], p)
                    if i.op != "axis" or i.value not in nest.axes:
                        mixed.add(slot)
                        continue
                    both = group[slot] | group[k, nest.axes.index(i.value)]
                    for s in both:
                        group[s] = both
    out = []
    for slots in {frozenset(g) for g in group.values()}:
        if not slots & mixed and sorted(k for k, _ in slots) == list(range(len(results))):
            k, p = min(slots)
            out.append((slots, Axis(f"s{p}", results[k].axes[p].extent)))
    out.sort(key=lambda x: min(x[0]))
    split = [(slots, a, 1) for slots, a in out]
    if split and (n := static(split[-1][1])) is not None and n > 1:
        split[-1] = (*split[-1][:2], min(TILE, 1 << (n - 1).bit_length()))
    return split


def _plan(nest: Nest, plan: StepsPlan, k: int, steps: Steps, target: Target) -> Plan:
    """Independent axes as the blocks take them, all others whole."""
    uses = {steps.step: AxisUse("grid")}
    for p, a in enumerate(nest.axes):
        found = plan.use_of((k, p))
        uses[a] = AxisUse("grid") if found and found[1] == 1 else AxisUse("tile", found[1]) if found else _whole(a)
    for t in nest.stages:
        for a in (*t.over, *t.axes):
            if a not in uses:
                uses[a] = _whole(a)
    made = Plan(nest, uses)
    for t in nest.stages:
        size = 1
        for a in t.body.axes if t.body is not None else ():
            size *= uses[a].size
        if size > MOST[target.is_gpu] and made.gemm_of(t) is None:
            raise Unfit("a step of a loop with more elements than a tile holds")
    return made


def _whole(a: Axis) -> AxisUse:
    if (n := static(a)) is None:
        raise Unfit("a state with a size that is known at the call")
    return AxisUse("whole", n)
