"""The device simulator: runs a lowered program block by block, all threads of a block in lock step.

A program may be in phase THREADS_BOUND, SYNCED or DEVICE.  Divergent branches and loops run under a mask of active
lanes.  With checks on, an error at the user's line is raised at the first race, out-of-bounds access, read of memory that
was never written, misaligned vector, access to the destination of a copy in flight, barrier that not all threads reach, or
warp operation in a divergent warp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang.ir import Alloc, Buffer, Call, Func, Launch, numpy_dtype, walk, GLOBAL
from tilelang.ir.evaluate import Closure, Value

from .async_copy import ASYNC_OPS
from .block import Global
from .counters import BankCount, Site
from .launch import HOPPER_OPS, DeviceLaunch
from ..faults import fault
from ..grid import grid_barrier
from ..host import Arguments, bind_arguments
from ..lane_ops import BLOCK_VOTES, LANE_OPS, WARP, Printer, block_vote
from ..lanes import Action, LaneFrame, uniform
from .machine import ALIGN, MachineCompiler
from ..matrix import MATRIX_OPS
from ..memory import Storage, geometry, span_of
from .warp_roles import BLOCK_BARRIER, SplitGroups


@dataclass
class Report:
    """Result of a run on the device simulator.

    outputs: every tensor parameter after the run, by name.  instructions: executions by a warp, for each operation.  bytes:
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


class DeviceCompiler(MachineCompiler):
    """Compiles a lowered program."""

    def __init__(self, func: Func, check: bool) -> None:
        super().__init__(func, check)
        self.printer = Printer()
        self.globals: list[int] = []  # slots that hold Globals
        self.workspaces: list[Action] | None = None  # inside a launch: actions that allocate its buffers in global memory
        self.maps: dict[str, Any] = {}  # tensor maps of the launch being compiled
        self.split = False  # whether the warps of a warp group run independently

    def compile_call(self, e: Call) -> Closure:
        if e.op in BLOCK_VOTES:
            return _block_vote(self, e)
        table = _SYNC_OPS.get(e.op) or ASYNC_OPS.get(e.op) or MATRIX_OPS.get(e.op) or HOPPER_OPS.get(e.op)
        if table is not None:
            return table(self, e)
        if e.op in LANE_OPS:
            return self._counted(e, LANE_OPS[e.op](self, e))
        return super().compile_call(e)

    def _counted(self, e: Call, fn: Closure) -> Closure:
        def run(f: LaneFrame) -> Value:
            f.block.counters.count(e.op, _warps(f))
            return fn(f)

        return run

    def compile_alloc(self, s: Alloc) -> Action:
        if s.buffer.scope() != GLOBAL:
            return super().compile_alloc(s)
        b, at, geo = s.buffer, self.slot(s.buffer.data), geometry(self, s.buffer)
        item = numpy_dtype(b.dtype).itemsize * b.dtype.lanes
        self.globals.append(at)

        def workspace(f: LaneFrame) -> None:
            f.slots[at] = Global(Storage(b.name, span_of(*geo(f)) * item, self.granules[id(b.data)]))

        if self.workspaces is None:
            return workspace
        self.workspaces.append(workspace)  # one buffer for all blocks; the launch allocates it
        return lambda f: None

    def operand_site(self, span: Any) -> int:
        """Number of an access site whose buffer is known at run time only (an operand named by a descriptor)."""
        self.sites.append(Site(span, "a shared tile", "operand of wgmma"))
        return len(self.sites) - 1

    def extent_of(self, b: Buffer, f: LaneFrame) -> tuple[int, int]:
        """First byte and end of a shared buffer's storage."""
        start = int(f.slots[self.slot(b.data)])
        return start, start + self.shared_sizes[id(b.data)]

    def compile_launch(self, s: Launch) -> Action:
        self.threads, self.sources = s.num_threads, s.plan.import_source
        return DeviceLaunch(self, s, self._place_shared(s)).run

    def written_slots(self) -> set[int]:
        """Slots of the buffers that the program writes, as far as known by now."""
        return {self.slot_of[v] for v in self.written if v in self.slot_of}

    def _place_shared(self, s: Launch) -> Callable[[LaneFrame], tuple[int, list[tuple[int, int]]]]:
        """f(frame) -> (bytes of the arena, byte offset by slot).

        Buffers are placed as planned (attrs shared_offsets, shared_bytes); unplanned ones follow one after another.
        """
        planned = {id(b.data): (b, at) for b, at in s.plan.shared_offsets}
        total: Any = s.plan.shared_bytes
        total = 0 if total is None else total
        allocs = [n.buffer for n in walk(s.body) if isinstance(n, Alloc) and n.buffer.scope().startswith("shared")]
        sizes = {id(b.data): (geometry(self, b), numpy_dtype(b.dtype).itemsize * b.dtype.lanes, b) for b in allocs}
        number = self.expr(total) if not isinstance(total, int) else None

        def place(f: LaneFrame) -> tuple[int, list[tuple[int, int]]]:
            room = int(number(f)) if number is not None else total
            end, out = 0 if not planned else room, []
            for key, (geo, item, b) in sizes.items():
                nbytes = self.shared_sizes[key] = span_of(*geo(f)) * item
                if key in planned:
                    at = planned[key][1]
                    at = at if isinstance(at, int) else int(self.expr(at)(f))
                    if at + nbytes > room:
                        raise fault("sim-out-of-bounds", f"{b.name} is placed at bytes {at} to {at + nbytes} of {room} "
                                    "bytes of shared memory",
                                    expected=f"at most {room} bytes", found=f"{at + nbytes}",
                                    span=b.span, hint="the memory plan is too small")
                else:
                    align = max(ALIGN, b.facts.align, 1024 if self.maps else 0)
                    at = -(-end // align) * align
                    end = at + nbytes
                out.append((self.slot(b.data), at))
            return max(end, room), out

        return place


def _warps(f: LaneFrame) -> int:
    return f.lanes // WARP if f.mask is None else int(f.mask.reshape(-1, WARP).any(1).sum())


def _running(f: LaneFrame) -> np.ndarray:
    """Threads of the block that have not returned."""
    out = np.arange(f.lanes) < f.block.threads
    return out if f.exited is None else out & ~f.exited


def _sync_threads(c: DeviceCompiler, e: Call) -> Closure:
    def run(f: LaneFrame) -> Value:
        block = f.block
        block.counters.count("sync_threads", _warps(f))
        if block.roles is not None:
            if f.any_active():
                block.roles.wait_named(f, BLOCK_BARRIER, None, e.span)
            return np.int32(0)
        if f.mask is not None:
            missing = _running(f) & ~f.mask
            if missing.any() and f.mask.any():
                raise fault("sim-barrier", f"{int(f.mask.sum())} of {int(_running(f).sum())} threads reach this block "
                            f"barrier in block {block.where}; thread {int(missing.argmax())} does not",
                            found=f"{int(f.mask.sum())} of {int(_running(f).sum())} threads", span=e.span,
                            hint="a barrier must not stand under a condition or in a loop that differs between threads")
            if not f.mask.any():
                return np.int32(0)
        block.clocks.barrier()
        return np.int32(0)

    return run


def _block_vote(c: DeviceCompiler, e: Call) -> Closure:
    barrier, vote = _sync_threads(c, e), block_vote(c, e)

    def run(f: LaneFrame) -> Value:
        answer = vote(f)
        barrier(f)
        return answer()

    return run


def _sync_warp(c: DeviceCompiler, e: Call) -> Closure:
    def run(f: LaneFrame) -> Value:
        f.block.counters.count("sync_warp", _warps(f))
        active = f.active().reshape(-1, WARP)
        for w in np.flatnonzero(active.any(1)):
            members = np.zeros(f.lanes, bool)
            members[w * WARP:(w + 1) * WARP] = active[w]
            f.block.clocks.barrier(members)
        return np.int32(0)

    return run


def _named_barrier(c: DeviceCompiler, e: Call) -> Closure:
    """named_barrier and named_barrier_arrive: id, number of threads."""
    number, count = c.expr(e.args[0]), c.expr(e.args[1])
    waits = e.op == "named_barrier"

    def run(f: LaneFrame) -> Value:
        f.block.counters.count(e.op, _warps(f))
        if f.any_active():
            which, need = (int(uniform(np.asarray(x(f)), f, "a barrier's number", e.span)) for x in (number, count))
            roles = f.block.roles
            (roles.wait_named if waits else roles.signal)(f, which, need, e.span)
        return np.int32(0)

    return run


_SYNC_OPS: dict[str, Callable[[Any, Call], Closure]] = {
    "sync_grid": lambda c, e: grid_barrier(c, e, _sync_threads(c, e)),
    "sync_threads": _sync_threads, "sync_warp": _sync_warp, "named_barrier": _named_barrier,
    "named_barrier_arrive": _named_barrier,
}  # fmt: skip


def run_device(program: Any, args: Arguments, *, check: bool = True, aliased: bool = False) -> Report:
    """Run a lowered program on NumPy arrays and scalars.

    program: a Func or PrimFunc whose launches need no lowering, or the result of `transform.lower` (its `host`).  args: by
    name or in parameter order; outputs (`tilelang_out_idx`) may be left out; the given arrays are not changed.
    check: raise at the first race, uninitialised read or access to a copy in flight (bounds, alignment, barriers and
    warp divergence are always checked).  aliased: arrays that share memory do so in the program too.
    Raises sim-race, sim-async, sim-uninitialized, sim-out-of-bounds, sim-misaligned, sim-barrier, sim-warp-divergence,
    sim-argument, sim-unsupported; on Hopper sim-mbarrier, sim-proxy, sim-wgmma, sim-tma, sim-nreg.
    """
    func: Func = getattr(program, "host", None) or getattr(program, "func", program)
    try:
        return _run(func, args, check, aliased, False)
    except SplitGroups:
        return _run(func, args, check, aliased, True)


def _run(func: Func, args: Arguments, check: bool, aliased: bool, split: bool) -> Report:
    """split: run each warp of a warp group independently: slower, but needed where they wait in different places."""
    compiler = DeviceCompiler(func, check)
    compiler.split = split
    binding = bind_arguments(func, args, compiler.granules, aliased)
    compiler.addresses = binding.addresses
    compiler.globals += [compiler.slot(t.buffer.data) for t in binding.tensors]
    action = compiler.stmt(func.body)
    slots = compiler.new_slots(binding.values)
    for t in binding.tensors:
        slots[compiler.slot(t.buffer.data)] = Global(t.storage)
    with np.errstate(all="ignore"):
        action(LaneFrame(slots, 1))
    counters = compiler.counters
    banks = sorted(counters.banks.values(), key=lambda b: -b.conflicts)
    return Report(binding.outputs(), counters.instructions, counters.bytes, banks, compiler.printer.text)


__all__ = ["DeviceCompiler", "Report", "run_device"]
