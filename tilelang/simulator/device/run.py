"""The device simulator: runs a lowered program block by block, all threads of a block in lock step.

A program may be in phase THREADS_BOUND, SYNCED or DEVICE.  Divergent branches and loops run under a mask of active
lanes.  With checks on, an error at the user's line is raised at the first race, out-of-bounds access, read of memory that
was never written, misaligned vector, access to the destination of a copy in flight, barrier that not all threads reach, or
warp operation in a divergent warp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang.ir import BARRIER, Alloc, Call, Func, Launch, Load, Parallel, Store, TileOp, walk
from tilelang.ir.evaluate import Closure, Value

from .async_copy import ASYNC_OPS
from .barriers import BARRIER_OPS, SIGNAL_OPS
from .block import Global
from .context import DeviceContext
from .counters import BankCount, count_warps
from .launch import HOPPER_OPS, DeviceLaunch
from .matrix import MATRIX_OPS
from .memory_access import allocate, load, store
from .warp_roles import SplitGroups
from ..context import Context, Handlers
from ..control_flow import CONTROL_FLOW
from ..expressions import VALUES
from ..faults import fault
from ..host import Arguments, run_program
from ..lane_ops import LANE_OPS
from ..lanes import Action, LaneFrame
from ..rank_ops import RANK_OPS
from ..ranks import Ranks


def _counted(handler: Callable[[Context, Call], Closure]) -> Callable[[Context, Call], Closure]:
    """A handler that also counts how often the intrinsic is executed."""

    def counted(c: Context, e: Call) -> Closure:
        fn = handler(c, e)

        def run(f: LaneFrame) -> Value:
            count_warps(f, e.op)
            return fn(f)

        return run

    return counted


def _not_lowered(c: DeviceContext, s: Parallel | TileOp) -> Action:
    what, found, expected = ("a T.Parallel loop", "T.Parallel", "a loop of threads") if isinstance(s, Parallel) else \
        (f"tile op {s.op_name}", f"tile op {s.op_name}", "a lowered program")
    raise fault("sim-unsupported", f"{what} in a lowered program", expected=expected, found=found, span=s.span)


DEVICE = Handlers(
    exprs={**VALUES, Load: load},
    stmts={**CONTROL_FLOW, Store: store, Alloc: allocate, Launch: lambda c, s: DeviceLaunch(c, s).run,
           Parallel: _not_lowered, TileOp: _not_lowered},
    calls={**{op: _counted(h) for op, h in LANE_OPS.items()}, **HOPPER_OPS, **MATRIX_OPS, **ASYNC_OPS, **BARRIER_OPS,
           **RANK_OPS, **SIGNAL_OPS},
)


@dataclass
class Report:
    """Result of a run on the device simulator.

    outputs: every tensor parameter after the run, by name.  instructions: how often warps executed each operation.  bytes:
    moved by each operation.  bank_conflicts: shared-memory traffic of each access in the program, most conflicts first.
    printed: text of T.print.
    """

    outputs: dict[str, np.ndarray]
    instructions: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    bank_conflicts: list[BankCount] = field(default_factory=list)
    printed: str = ""

    @property
    def conflicts(self) -> int:
        """Additional passes through shared memory due to bank conflicts, over the whole run."""
        return sum(b.conflicts for b in self.bank_conflicts)

    def text(self) -> str:
        """The report as a readable table."""
        out = ["instructions (by warp):"]
        out += [f"  {n:>12}  {k}" for k, n in sorted(self.instructions.items(), key=lambda x: -x[1])]
        out += ["bytes:"] + [f"  {n:>12}  {k}" for k, n in sorted(self.bytes.items(), key=lambda x: -x[1])]
        out += [f"shared memory: {sum(b.wavefronts for b in self.bank_conflicts)} passes, "
                f"{self.conflicts} lost to bank conflicts"]
        out += [f"  {b.conflicts:>12}  {b.site.text} of {b.site.name}" + (f" at {b.site.span}" if b.site.span else "")
                for b in self.bank_conflicts if b.conflicts]
        return "\n".join(out)


def run_device(program: Any, args: Arguments, *, check: bool = True, aliased: bool = False) -> Report:
    """Run a lowered program on NumPy arrays and scalars.

    program: a Func or PrimFunc whose launches need no lowering, or the result of `transform.lower` (its `host`).  args: by
    name or in parameter order; outputs (`tilelang_out_idx`) may be left out; the given arrays are not changed.
    check: raise at the first race, uninitialised read or access to a copy in flight (bounds, alignment, barriers and
    warp divergence are always checked).  aliased: arrays that share memory do so in the program too.
    Raises sim-race, sim-async, sim-uninitialized, sim-out-of-bounds, sim-misaligned, sim-barrier, sim-warp-divergence,
    sim-argument, sim-unsupported; on Hopper sim-mbarrier, sim-proxy, sim-wgmma, sim-tma, sim-nreg.
    """
    return _run_split(program, (args,), Ranks(), check, aliased)[0]


def run_device_ranks(program: Any, args: Sequence[Arguments], *, seed: int | None = None, repeats: int = 1,
                     check: bool = True) -> list[Report]:
    """Run a lowered program on several devices at once; args: for each rank, as in run_device.

    Memory is weak between devices (simulator/ranks.py).  seed: None runs the first block that can run, and loads of flags
    return the latest value; a number chooses both at random.  repeats: each rank launches the kernel so often, and may be ahead
    of the others; the program has one launch, without mbarriers, and there are at least two ranks.  Raises what run_device
    raises, and sim-rank.
    """
    func = getattr(program, "host", None) or getattr(program, "func", program)
    launches = [n for n in walk(func) if isinstance(n, Launch)]
    if repeats > 1 and (len(launches) != 1 or len(args) < 2 or any(
            isinstance(n, Alloc) and n.buffer.scope() == BARRIER for n in walk(func))):
        raise fault("sim-unsupported", "repeats of a program that is no single launch of several ranks, or uses mbarriers",
                    expected="one launch without mbarriers, on two ranks or more", found=f"{len(launches)} launches on "
                    f"{len(args)} ranks", span=func.span)
    return _run_split(program, args, Ranks(len(args), seed, repeats), check, False)


def _run_split(program: Any, args: Sequence[Arguments], ranks: Ranks, check: bool, aliased: bool) -> list[Report]:
    func: Func = getattr(program, "host", None) or getattr(program, "func", program)
    try:
        return _run(func, args, ranks, check, aliased, False)
    except SplitGroups:
        return _run(func, args, Ranks(ranks.size, ranks.seed, ranks.repeats), check, aliased, True)


def _run(func: Func, args: Sequence[Arguments], ranks: Ranks, check: bool, aliased: bool, split: bool) -> list[Report]:
    """split: run each warp of a warp group independently: slower, but needed where they wait in different places."""
    c = DeviceContext(func, check, DEVICE, split, ranks)
    bindings = run_program(c, func, args, aliased, Global)
    counters = c.accesses.counters
    banks = sorted(counters.banks.values(), key=lambda b: -b.conflicts)
    return [Report(b.outputs(check), counters.instructions, counters.bytes, banks, c.printer.text) for b in bindings]
