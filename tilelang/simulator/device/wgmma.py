"""wgmma and warp-group operations: operands by descriptor or in registers, groups in flight, register reallocation.

The result is computed when the instruction is issued.  Until a wgmma_wait covers its group, the accumulators (and A in
registers) must not be accessed, and its shared operands count as being read by an agent of the warp group.
Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"; "setmaxnreg"; "elect.sync".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, numpy_dtype
from tilelang.ir.evaluate import Closure, Value
from tilelang.target.warp_groups import warps_of
from tilelang.target.wgmma import operand_addresses
from tilelang.target.thread_calls import WARP

from .asynchronous import GROUP
from .context import DeviceContext
from .counters import count_warps
from ..faults import fault
from ..lane_ops import effects, elect, nothing, own_threads
from ..lanes import Action, LaneFrame
from ..matrix import Registers
from ..wgmma import DescribedOperand, WgmmaRegisters, descriptor, wgmma_row
from .private_arrays import Issued, matrix_of


def _members(f: LaneFrame, what: str, span: Any) -> np.ndarray:
    """The lanes that execute: whole warps of one warp group, and all lanes of the frame."""
    active = f.active()
    lanes = np.flatnonzero(active)
    own = active if f.own is None else f.own
    if (active != own).any() or len(lanes) % WARP or lanes[0] // GROUP != lanes[-1] // GROUP or \
            (lanes[0] // GROUP + 1) * GROUP > f.block.first + f.block.threads:
        raise fault("sim-warp-divergence", f"{what} needs «all 128 threads of a warp group», found ‹{len(lanes)}› from thread "
                    f"{int(lanes[0]) - f.block.first}", span=span,
                    hint="a warp group is 4 warps whose first thread is a multiple of 128")
    return lanes


@lru_cache(maxsize=4096)
def _cells(descriptor: int, major: str, extent: int, item: int, k_bytes: int, granule: int) -> tuple[np.ndarray, np.ndarray]:
    """(element numbers [extent, k] in shared memory, granules) of an operand."""
    at = operand_addresses(descriptor, major, extent, item, k_bytes)
    return at // item, np.unique(at // granule)


class _SharedOperand(DescribedOperand):
    """An operand that is named by a descriptor.  site: of its accesses."""

    def __init__(self, c: DeviceContext, e: Call, number: int, row: Any, site: int) -> None:
        super().__init__(c, e, number, row)
        self.site = site

    def read(self, f: LaneFrame, lanes: np.ndarray) -> np.ndarray:
        """Elements [extent, k]; records the read as one by the warp group's agent."""
        descriptor = self.descriptor(f)
        block, shared = f.block, f.block.shared
        cells, g = _cells(descriptor, self.major, self.extent, self.dt.itemsize, self.k_bytes, shared.granule)
        if block.base:
            cells, g = cells + block.base // self.dt.itemsize, g + block.base // shared.granule
        if g[-1] >= len(shared.owner):
            raise fault("sim-out-of-bounds", f"a wgmma operand reaches ‹byte {(int(g[-1]) + 1) * shared.granule}› of "
                        f"{shared.store.nbytes} bytes of shared memory",
                        expected=f"an operand inside {shared.store.nbytes} bytes", span=self.span,
                        hint="check the address and the strides (lbo, sbo) of its descriptor")
        if self.c.check:
            if (shared.owner[g] < 0).any():
                raise fault("sim-uninitialized", "a wgmma reads shared memory that nothing has written, in block "
                            f"{block.where}", found="an operand that nothing has written", span=self.span,
                            hint="wait for the load of the tile; check the descriptor's address, lbo and sbo")
            agent, active = block.asynchronous.first_group + int(lanes[0]) // GROUP, f.active()
            shared.table.agent_reads_of(block.clocks, g, active, agent, self.site)
            shared.proxy.require(block.clocks, g, active, self.site, "wgmma")
        return shared.store.flat(self.dt)[cells]


def _wgmma(c: DeviceContext, e: Call) -> Action:
    row = wgmma_row(e)
    registers, site = WgmmaRegisters(c, e, row), c.accesses.site("a shared tile", e.span, "operand of wgmma")
    a = None if registers.a is not None else _SharedOperand(c, e, 1, row, site)
    b = _SharedOperand(c, e, 2, row, site)

    def run(f: LaneFrame) -> None:
        lanes, state = _members(f, row.name, e.span), matrix_of(f)
        f.block.counters.count(row.name, len(lanes) // WARP)
        group, warps = state.commits + 1, np.unique(lanes // WARP)
        if c.check and state.fences == 0:
            raise fault("sim-wgmma", "a wgmma with no wgmma_fence before it",
                        expected="wgmma_fence before the first wgmma", found="none", span=e.span,
                        hint="wgmma_fence() before the first wgmma and after registers have been written")
        now, agent = f.block.clocks.now, f.block.asynchronous.first_group + int(lanes[0]) // GROUP
        now[agent] = max(int(now[agent]), group)
        keep = registers.keeps(f)
        if registers.a is not None:
            _claim(f, registers.a, state, group, e, False)
        x = a.read(f, lanes)[registers.rows(warps)] if a is not None else registers.read_a(f, warps)
        y = b.read(f, lanes).T
        _claim(f, registers.accumulator, state, group, e, True)
        registers.multiply(f, warps, x, y, keep)

    return run


def _claim(f: LaneFrame, regs: Registers, state: Issued, group: int, e: Call, accumulates: bool) -> None:
    """Assign the registers to a wgmma of this group.  Raises sim-wgmma."""
    guard, cells = regs.guarded(f)
    if guard is None:
        return
    busy = guard.busy[cells] > 0
    if (busy & (guard.accumulator[cells] != accumulates)).any():
        raise fault("sim-wgmma", f"{guard.name} is an operand and an accumulator of wgmmas that are under way together",
                    expected="an operand whose instruction is done", found=f"`{guard.name}` as operand and accumulator",
                    span=e.span, hint="wgmma_wait for the group that computes it first")
    if (guard.stamp[cells] >= state.fences).any():
        raise fault("sim-wgmma", f"{guard.name} is written by ordinary code and then used by a wgmma with no wgmma_fence "
                    "between", expected="wgmma_fence between the write and the wgmma", found="none", span=e.span,
                    hint="wgmma_fence() after the registers are written")
    guard.busy[cells], guard.accumulator[cells] = group, accumulates
    state.guards.add(guard)


def _fence_or_commit(c: DeviceContext, e: Call) -> Action:
    def run(f: LaneFrame) -> None:
        _members(f, e.op, e.span)
        state = matrix_of(f)
        if e.op == "wgmma_fence":
            state.fences += 1
        else:
            state.commits += 1

    return run


def _wait(c: DeviceContext, e: Call) -> Action:
    pending = e.options.n

    def run(f: LaneFrame) -> None:
        lanes, state = _members(f, e.op, e.span), matrix_of(f)
        group, done = int(lanes[0]) // GROUP, state.commits - pending
        if len(lanes) < GROUP:  # a wgmma begins when all four warps have issued it
            mates = [p.frame for p in f.block.warp_roles.coroutines if int(p.frame.own.argmax()) // GROUP == group]
            f.block.warp_roles.wait(lambda: all(matrix_of(m).commits >= state.commits for m in mates),
                               lambda: f"for the other warps of warp group {group} to reach their wgmma", e.span)
        for guard in state.guards:
            guard.busy[guard.busy <= done] = 0
        f.block.clocks.learn(f.active(), f.block.asynchronous.first_group + group, done)

    return run


def _descriptor(c: DeviceContext, e: Call) -> Closure:
    base = e.args[0]
    if not isinstance(base, AddressOf) or not base.buffer.scope().startswith("shared"):
        raise fault("sim-unsupported", "wgmma_descriptor needs «the address of a shared element»", found="another operand",
                    span=e.span)
    item = numpy_dtype(base.buffer.dtype).itemsize
    return descriptor(c, e, c.memory.reach(base.buffer, base.indices, item, e.span, "wgmma operand"))


def _set_max_nreg(c: DeviceContext, e: Call) -> Action:
    n, inc = e.options.n, e.options.inc
    if n % 8 or not 24 <= n <= 256:
        raise fault("sim-nreg", f"set_max_nreg(‹{n}›): the count is «a multiple of 8 from 24 to 256»", span=e.span)

    def run(f: LaneFrame) -> None:
        work = f.block.asynchronous
        for w in np.unique(_members(f, e.op, e.span) // WARP):
            have = work.registers[w]
            if (n < have) if inc else (n > have):
                raise fault("sim-nreg", f"set_max_nreg {'raises' if inc else 'lowers'} warp {w} from {have} to ‹{n}› registers",
                            expected=f"a count {'above' if inc else 'below'} {have}", span=e.span)

            def free(w: int = w) -> int:
                mates = work.mates(w)
                return work.allocated - sum(work.registers[m] for m in mates) + work.registers[w]

            f.block.warp_roles.wait(lambda free=free: n <= free(),
                               lambda w=w, free=free: f"for {n} registers for warp {w}, {free()} are free", e.span)
            work.registers[w] = n

    return run


def _in_groups(c: DeviceContext, e: Call) -> Closure:
    first, count = warps_of(e) or (0, 0)

    def run(f: LaneFrame) -> Value:
        w = own_threads(f) // WARP
        return (w >= first) & (w < first + count)

    return run


WGMMA_OPS: dict[str, Callable[[DeviceContext, Call], Closure]] = {
    **effects({"wgmma": _wgmma}), **dict.fromkeys(("wgmma_pin", "wgmma_hold", "wgmma_used"), nothing),
    "wgmma_descriptor": _descriptor,
    **effects({"wgmma_fence": _fence_or_commit, "wgmma_commit": _fence_or_commit, "wgmma_wait": _wait,
               "set_max_nreg": _set_max_nreg}, count_warps), "elect_one": elect, "in_warp_groups": _in_groups}
