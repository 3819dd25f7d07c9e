"""Text of a loop with carried state (stateful.StepsPlan)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilelang.target import Target

from .emit import allocation_lines, ensure_stage, head_lines
from .expr import Scalar, Tensor
from .graph import Size
from .plan import Plan
from .stateful import StepsPlan
from .text import Printer, wide
from .tiles import Tile
from .writer import Facts, Writer, ceildiv


def steps_text(plan: StepsPlan, name: str, parameters: Sequence[tuple[str, Tensor]], target: Target) -> str:
    """The prim_func of a loop with state.  parameters: names and tensors, inputs first, then the loop's results in order."""
    text = _StepsText(plan, parameters, target)
    body = text.body()
    head = [*(f"# {n}" for n in plan.notes), "@T.prim_func", *head_lines(name, parameters)]
    grid = [(a.name, ceildiv(a.extent, n)) for _, a, n in plan.split]
    names, sizes = [a for a, _ in reversed(grid)] or ["block"], [s for _, s in reversed(grid)] or ["1"]
    if len(names) > 3:
        raise AssertionError("at most three independent axes are split")
    shown = names[0] if len(names) == 1 else f"({', '.join(names)})"
    return "\n".join([*head, f"    with T.Kernel({', '.join(sizes)}, threads={plan.threads}) as {shown}:", *body]) + "\n"


class _StepsText:
    def __init__(self, plan: StepsPlan, parameters: Sequence[tuple[str, Tensor]], target: Target) -> None:
        self.plan, self.parameters, self.target = plan, parameters, target
        self.used = {n for n, _ in parameters} | {a.name for _, a, _ in plan.split} | {"T", "t", "block"}
        self.items = {t.attrs["index"]: n for n, t in parameters if t.kind == "item" and t.attrs["steps"] is plan.steps}
        self.allocations: list[str] = []

    def body(self) -> list[str]:
        """The lines inside of T.Kernel."""
        plan, states = self.plan, self.plan.steps.states
        now = [self.buffer(k, f"state{k + 1}") for k in range(len(states))]
        new = [self.buffer(k, f"next{k + 1}") for k in range(len(states))]
        lines = [x for k, p in enumerate(plan.starts) for x in self.nest(p, k, now, 2, self.local_place(now[k], k))]
        loop = [f"        for t in T.serial({plan.steps.step.extent}):"]
        for k, p in enumerate(plan.results):
            if k >= len(states) and k not in self.items:
                continue
            place = self.local_place(new[k], k) if k < len(states) else self.result_place(k)
            loop += self.nest(p, k, now, 3, place)
        for k in range(len(states)):
            loop.append(f"            T.copy({new[k].name}, {now[k].name})")
        for k in range(len(states)):
            if k in self.items:
                loop += self.last(k, now[k])
        return [*self.allocations, *lines, *loop]

    def buffer(self, k: int, name: str) -> Tile:
        """Shared memory for a state: its axes but for those that a block has one index of."""
        axes, shape = [], []
        state, _ = self.plan.steps.states[k]
        for p, a in enumerate(state.axes):
            found = self.plan.use_of((k, p))
            if found is None or found[1] > 1:
                axes.append(a)
                shape.append(found[1] if found else _number(a.extent))
        while name in self.used:
            name += "_"
        self.used.add(name)
        tile = Tile(name, tuple(axes), tuple(shape) or (1,), wide(state.dtype), "shared")
        self.allocations.append(f"        {name} = T.alloc_shared({tile.shape!r}, \"{tile.dtype}\")")
        return tile

    def kept(self, k: int) -> list[int]:
        """Positions of the axes that a state has in shared memory."""
        state, _ = self.plan.steps.states[k]
        return [p for p in range(len(state.axes)) if (found := self.plan.use_of((k, p))) is None or found[1] > 1]

    def local_place(self, tile: Tile, k: int) -> Callable[[Writer, Plan], str]:
        kept = self.kept(k)
        return lambda w, plan: f"{tile.name}[{', '.join(plan.nest.axes[p].name for p in kept) or '0'}]"

    def result_place(self, k: int) -> Callable[[Writer, Plan], str]:
        return lambda w, plan: f"{self.items[k]}[{', '.join(['t', *(w.indices[a] for a in plan.nest.axes)])}]"

    def reader(self, tile: Tile, k: int) -> Callable[[Scalar, Printer], str]:
        """The text of an element of a state."""
        def text(e: Scalar, printer: Printer) -> str:
            places = []
            for p in self.kept(k):
                split = self.plan.use_of((k, p)) is not None
                places.append(e.args[p].value.name if split else printer.text(e.args[p]))
            return f"{tile.name}[{', '.join(places) or '0'}]"

        return text

    def nest(self, plan: Plan, k: int, states: list[Tile], depth: int, place: Callable[[Writer, Plan], str]) -> list[str]:
        """The statements that compute one result of a step."""
        facts = Facts()
        for run in range(3):
            w = Writer(plan, "", self.parameters, self.target, facts, ensure_stage)
            w.used_names |= self.used
            w.depth = depth
            w.local = {s: self.reader(states[j], j) for j, (s, _) in enumerate(self.plan.steps.states)}
            for p, a in enumerate(plan.nest.axes):
                if (found := self.plan.use_of((k, p))) is not None:
                    first = found[0].name if found[1] == 1 else f"{found[0].name} * {found[1]}"
                    w.bases[a] = first
                    w.indices[a] = first if found[1] == 1 else f"{first} + {a.name}"
            w.indices[self.plan.steps.step] = "t"
            (_, e), = plan.nest.outputs
            w.ensure(e)
            w.roots.append((e, None))
            w.reuse(e)
            text = w.printer().text(e)
            w.parallel(w.order(plan.nest.axes, e), f"{place(w, plan)} = {text}")
            facts = Facts(w.found_shared() if run == 0 else facts.shared, {} if run == 0 else w.last)
        self.used |= w.used_names
        self.allocations += allocation_lines(w)
        return w.lines

    def last(self, k: int, tile: Tile) -> list[str]:
        """Stores the last state."""
        state, _ = self.plan.steps.states[k]
        names, sizes, there = [], [], []
        for p, a in enumerate(self.plan.results[k].nest.axes):
            found = self.plan.use_of((k, p))
            if found is None or found[1] > 1:
                names.append(a.name)
                sizes.append(str(found[1] if found else _number(a.extent)))
            there.append(a.name if found is None else found[0].name if found[1] == 1 else
                         f"{found[0].name} * {found[1]} + {a.name}")
        here = ", ".join(names) or "0"
        return [f"        for {', '.join(names) or 'i'} in T.Parallel({', '.join(sizes) or '1'}):",
                f"            {self.items[k]}[{', '.join(there) or '()'}] = {tile.name}[{here}]"]


def _number(s: Size) -> int:
    assert isinstance(s, int)  # stateful.plan_of_steps has rejected open sizes
    return s

