"""Checks programs that order threads with block barriers and cp.async groups only.

The model follows them with all numbers unknown that they get at run time, except for block indices: those of the first block,
and of the last where it may differ.  A condition on unknown numbers that all threads have in common holds in one run and fails
in another; of other conditions both ways are followed by all threads that may take them.
"""

from __future__ import annotations

from itertools import product

from tilelang.ir import Const, For, Launch, Node, Var, walk

from .model import Model, Way
from .plan import Plan
from .sync_fault import Crowded, Fault, Found, Undecided
from .unknowns import SAMPLES, Unknowns
from .values import Values

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
