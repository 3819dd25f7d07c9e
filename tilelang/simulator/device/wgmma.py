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

from .asynchronous import GROUP
from .context import DeviceContext
from .counters import count_warps
from ..faults import fault
from ..lane_ops import WARP, elect, nothing, own_threads
from ..lanes import LaneFrame, uniform
from ..matrix import Registers, register_order
from ..wgmma import descriptor, wgmma_row
from .private_arrays import Issued, matrix_of


def _members(f: LaneFrame, what: str, span: Any) -> np.ndarray:
    """The lanes that execute: whole warps of one warp group, and all lanes of the frame."""
    active = f.active()
    lanes = np.flatnonzero(active)
    own = active if f.own is None else f.own
    if (active != own).any() or len(lanes) % WARP or lanes[0] // GROUP != lanes[-1] // GROUP or \
            (lanes[0] // GROUP + 1) * GROUP > f.block.first + f.block.threads:
        raise fault("sim-warp-divergence", f"{what} needs all 128 threads of a warp group, found {len(lanes)} from thread "
                    f"{int(lanes[0]) - f.block.first}", expected="all 128 threads of a warp group", found=str(len(lanes)),
                    span=span, hint="a warp group is 4 warps whose first thread is a multiple of 128")
    return lanes


@lru_cache(maxsize=4096)
def _cells(descriptor: int, major: str, extent: int, item: int, granule: int) -> tuple[np.ndarray, np.ndarray]:
    """(element numbers [extent, k] in shared memory, granules) of an operand."""
    at = operand_addresses(descriptor, major, extent, item)
    return at // item, np.unique(at // granule)


class _SharedOperand:
    """An operand that is named by a descriptor."""

    def __init__(self, c: DeviceContext, value: Any, dt: Any, major: str, extent: int, site: int, e: Call) -> None:
        self.c, self.value, self.dt, self.major, self.extent = c, c.expr(value), numpy_dtype(dt), major, extent
        self.site, self.e = site, e

    def read(self, f: LaneFrame, lanes: np.ndarray) -> np.ndarray:
        """Elements [extent, k]; records the read as one by the warp group's agent."""
        descriptor = int(uniform(self.value(f), f, "a wgmma descriptor", self.e.span))
        block, shared = f.block, f.block.shared
        cells, g = _cells(descriptor, self.major, self.extent, self.dt.itemsize, shared.granule)
        if block.base:
            cells, g = cells + block.base // self.dt.itemsize, g + block.base // shared.granule
        if g[-1] >= len(shared.owner):
            raise fault("sim-out-of-bounds", f"a wgmma operand reaches byte {(int(g[-1]) + 1) * shared.granule} of "
                        f"{shared.store.nbytes} bytes of shared memory",
                        expected=f"an operand inside {shared.store.nbytes} bytes",
                        found=f"byte {(int(g[-1]) + 1) * shared.granule}", span=self.e.span,
                        hint="check the address and the strides (lbo, sbo) of its descriptor")
        if self.c.check:
            if (shared.owner[g] < 0).any():
                raise fault("sim-uninitialized", "a wgmma reads shared memory that nothing has written, in block "
                            f"{block.where}", found="an operand that nothing has written", span=self.e.span,
                            hint="wait for the load of the tile; check the descriptor's address, lbo and sbo")
            agent, active = block.asynchronous.group_agent(int(lanes[0]) // GROUP), f.active()
            shared.table.agent_reads_of(block.clocks, g, active, agent, self.site)
            shared.proxy.require(block.clocks, g, active, self.site, "wgmma")
        return shared.store.flat(self.dt)[cells]


def _wgmma(c: DeviceContext, e: Call) -> Closure:
    row, from_registers = wgmma_row(e), isinstance(e.args[1], AddressOf)
    tc, ta = numpy_dtype(row.c_dtype), numpy_dtype(row.a_dtype)
    acc = Registers(c, e.args[0], row.c.registers * tc.itemsize, e.span)
    site = c.accesses.site("a shared tile", e.span, "operand of wgmma")
    a_regs = Registers(c, e.args[1], row.a.registers * ta.itemsize, e.span) if from_registers else None
    a_shared = None if from_registers else _SharedOperand(c, e.args[1], row.a_dtype, e.options.a_major, 64, site, e)
    b = _SharedOperand(c, e.args[2], row.b_dtype, e.options.b_major, row.shape[1], site, e)
    scale, orders = c.expr(e.args[3]), (register_order(row.c), register_order(row.a))

    def rows_of_lanes(x: np.ndarray, order: np.ndarray, registers: int, lanes: np.ndarray) -> np.ndarray:
        first = int(lanes[0]) % GROUP
        rows = order[first // 2:(first + len(lanes)) // 2] - first * registers
        return x.reshape(-1)[rows]

    def run(f: LaneFrame) -> Value:
        if not f.any_active():
            return np.int32(0)
        lanes, state = _members(f, row.name, e.span), matrix_of(f)
        f.block.counters.count(row.name, len(lanes) // WARP)
        group, warps = state.commits + 1, np.unique(lanes // WARP)
        if c.check and state.fences == 0:
            raise fault("sim-wgmma", "a wgmma with no wgmma_fence before it",
                        expected="wgmma_fence before the first wgmma", found="none", span=e.span,
                        hint="wgmma_fence() before the first wgmma and after registers have been written")
        now, agent = f.block.clocks.now, f.block.asynchronous.group_agent(int(lanes[0]) // GROUP)
        now[agent] = max(int(now[agent]), group)
        keep = bool(uniform(scale(f), f, "scale-d of a wgmma", e.span))
        if a_regs is not None:
            x = rows_of_lanes(_claim(f, a_regs, state, group, e, False).read(f, warps, ta), orders[1], row.a.registers, lanes)
        else:
            assert a_shared is not None, "A comes from registers or through a descriptor"
            first = int(lanes[0]) % GROUP
            x = a_shared.read(f, lanes)[first // 2:(first + len(lanes)) // 2]
        y = b.read(f, lanes).T
        _claim(f, acc, state, group, e, True)
        old = acc.read(f, warps, tc, keep)
        z = row.reference(x, y, rows_of_lanes(old, orders[0], row.c.registers, lanes), keep)
        first = int(lanes[0]) % GROUP
        rows = orders[0][first // 2:(first + len(lanes)) // 2] - first * row.c.registers
        out = np.empty(old.size, tc)
        out[rows.ravel()] = z.ravel()
        acc.write(f, warps, out.reshape(len(warps), -1))
        return np.int32(0)

    return run


def _claim(f: LaneFrame, regs: Registers, state: Issued, group: int, e: Call, accumulates: bool) -> Registers:
    """Assign the registers to a wgmma of this group.  Raises sim-wgmma."""
    guard, cells = regs.guarded(f)
    if guard is None:
        return regs
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
    return regs


def _fence_or_commit(c: DeviceContext, e: Call) -> Closure:
    def run(f: LaneFrame) -> Value:
        count_warps(f, e.op)
        if f.any_active():
            _members(f, e.op, e.span)
            state = matrix_of(f)
            if e.op == "wgmma_fence":
                state.fences += 1
            else:
                state.commits += 1
        return np.int32(0)

    return run


def _wait(c: DeviceContext, e: Call) -> Closure:
    pending = e.options.n

    def run(f: LaneFrame) -> Value:
        count_warps(f, e.op)
        if not f.any_active():
            return np.int32(0)
        lanes, state = _members(f, e.op, e.span), matrix_of(f)
        group, done = int(lanes[0]) // GROUP, state.commits - pending
        if len(lanes) < GROUP:  # a wgmma begins when all four warps have issued it
            mates = [p.frame for p in f.block.warp_roles.coroutines if int(p.frame.own.argmax()) // GROUP == group]
            f.block.warp_roles.wait(lambda: all(matrix_of(m).commits >= state.commits for m in mates),
                               lambda: f"for the other warps of warp group {group} to reach their wgmma", e.span)
        for guard in state.guards:
            guard.busy[guard.busy <= done] = 0
        f.block.clocks.learn(f.active(), f.block.asynchronous.group_agent(group), done)
        return np.int32(0)

    return run


def _descriptor(c: DeviceContext, e: Call) -> Closure:
    base = e.args[0]
    if not isinstance(base, AddressOf) or not base.buffer.scope().startswith("shared"):
        raise fault("sim-unsupported", "wgmma_descriptor needs the address of a shared element",
                    expected="the address of a shared element", found="another operand", span=e.span)
    item = numpy_dtype(base.buffer.dtype).itemsize
    return descriptor(c, e, c.memory.reach(base.buffer, base.indices, item, e.span, "wgmma operand"))


def _set_max_nreg(c: DeviceContext, e: Call) -> Closure:
    n, inc = e.options.n, e.options.inc
    if n % 8 or not 24 <= n <= 256:
        raise fault("sim-nreg", f"set_max_nreg({n}): the count is a multiple of 8 from 24 to 256",
                    expected="a multiple of 8 from 24 to 256", found=str(n), span=e.span)

    def run(f: LaneFrame) -> Value:
        count_warps(f, e.op)
        if not f.any_active():
            return np.int32(0)
        work = f.block.asynchronous
        for w in np.unique(_members(f, e.op, e.span) // WARP):
            have = work.registers[w]
            if (n < have) if inc else (n > have):
                raise fault("sim-nreg", f"set_max_nreg {'raises' if inc else 'lowers'} warp {w} from {have} to {n} registers",
                            expected=f"a count {'above' if inc else 'below'} {have}", found=str(n), span=e.span)

            def free(w: int = w) -> int:
                mates = work.mates(w)
                return work.allocated - sum(work.registers[m] for m in mates) + work.registers[w]

            f.block.warp_roles.wait(lambda free=free: n <= free(),
                               lambda w=w, free=free: f"for {n} registers for warp {w}, {free()} are free", e.span)
            work.registers[w] = n
        return np.int32(0)

    return run


def _in_groups(c: DeviceContext, e: Call) -> Closure:
    first, count = warps_of(e) or (0, 0)

    def run(f: LaneFrame) -> Value:
        w = own_threads(f) // WARP
        return (w >= first) & (w < first + count)

    return run


WGMMA_OPS: dict[str, Callable[[DeviceContext, Call], Closure]] = {
    "wgmma": _wgmma, "wgmma_fence": _fence_or_commit, "wgmma_commit": _fence_or_commit, "wgmma_wait": _wait,
    "wgmma_pin": nothing, "wgmma_hold": nothing,
    "wgmma_descriptor": _descriptor,
    "set_max_nreg": _set_max_nreg, "elect_one": elect, "in_warp_groups": _in_groups,
}  # fmt: skip
