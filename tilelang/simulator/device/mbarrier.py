"""mbarriers on the device simulator: initialisation, arrivals, waits, and what the threads that pass have seen.

Source: PTX ISA, "Parallel synchronization and communication instructions: mbarrier".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call

from .context import DeviceContext
from .counters import count_warps
from ..faults import fault
from ..lane_ops import effects, spread
from ..lanes import Action, LaneFrame, uniform
from ..mbarrier import Phases, arrivals


class MBarrier(Phases):
    """An mbarrier that also keeps what its arrivals have seen (races.py) and who initialised it.

    agent: agent number, in the clocks of races.py, of the copies that signal it.
    """

    def __init__(self, name: str, count: int, agent: int, maker: int, made: int) -> None:
        super().__init__(name, count)
        self.agent, self.maker, self.made = agent, maker, made
        self.fenced = False  # whether its initialisation is visible to copies
        self.released = False  # whether fence_mbarrier_init released it, so that a relaxed cluster barrier shows it
        self.opened = 0  # phase of the cluster barrier after which it is visible to the threads of the cluster
        self.span: Any = None  # of the last copy that signals it
        self.seen: np.ndarray | None = None
        self.before: np.ndarray | None = None  # what the arrivals of the last completed phase had seen

    def know(self, seen: np.ndarray) -> None:
        """Add `seen` to what the threads that pass the current phase will have seen."""
        self.seen = seen.copy() if self.seen is None else np.maximum(self.seen, seen)

    def settle(self) -> bool:
        done = super().settle()
        if done:
            self.before, self.seen = self.seen, None
        return done


class Barrier:
    """An operand `AddressOf(barrier buffer, (index,))`."""

    def __init__(self, c: DeviceContext, a: Any, span: Any) -> None:
        if not isinstance(a, AddressOf) or not a.buffer.scope().startswith("shared"):
            raise fault("sim-unsupported", "an mbarrier is given as «the address of a shared.barrier element»",
                        found="another operand", span=span)
        self.buffer, self.span = a.buffer, span
        self.slot = c.slot(a.buffer.data)
        self.reach = c.memory.reach(a.buffer, a.indices, 8, span, "mbarrier")

    def each(self, f: LaneFrame) -> Iterator[tuple[int, np.ndarray]]:
        """(byte address, mask of the active lanes that name it)."""
        address, active = self.reach(f), f.active()
        for at in np.unique(address[active]):
            yield int(at), active & (address == at)

    def name(self, f: LaneFrame, at: int) -> str:
        cluster, start = f.block.cluster, int(f.slots[self.slot])
        if cluster is None:
            return f"{self.buffer.name}[{(at - start) // 8}]"
        rank = at // cluster.arena
        own = at - (rank - f.block.rank) * cluster.arena
        return f"{self.buffer.name}[{(own - start) // 8}] of block {cluster.names[rank]}"

    def get(self, f: LaneFrame, at: int, lanes: np.ndarray) -> MBarrier:
        """The mbarrier at this address.  Raises sim-mbarrier when its initialisation is not visible to these lanes."""
        bar = f.block.asynchronous.barriers.get(at)
        if bar is None:
            raise fault("sim-mbarrier", f"{self.name(f, at)} is used before mbarrier_init",
                        expected="mbarrier_init before its use", found="none", span=self.span)
        who = np.flatnonzero(lanes)
        late = (who != bar.maker) & (f.block.clocks.seen[who, bar.maker] < bar.made)
        if bar.opened:
            late &= f.block.cluster.own.waits[who] < bar.opened
        if late.any():
            raise fault("sim-mbarrier", f"{bar.name} is used by thread {int(who[late][0])}, which does not see its "
                        f"initialisation by thread {bar.maker}",
                        expected="a block barrier between mbarrier_init and the first use", found="none", span=self.span,
                        hint="put a block barrier between mbarrier_init and the first use")
        return bar


def _init(c: DeviceContext, e: Call) -> Action:
    at, count = Barrier(c, e.args[0], e.span), c.expr(e.args[1])

    def run(f: LaneFrame) -> None:
        block = f.block
        n = arrivals(uniform(count(f), f, "the count of an mbarrier", e.span), e.span)
        for address, lanes in at.each(f):
            if int(lanes.sum()) > 1 or address in block.asynchronous.barriers:
                raise fault("sim-mbarrier", f"{at.name(f, address)} is initialised more than once",
                            expected="one thread that initialises it, once", found="another initialisation", span=e.span,
                            hint="one thread initialises an mbarrier, once")
            t = int(lanes.argmax())
            block.asynchronous.add_barrier(address, at.name(f, address), n, t)

    return run


def _fence_init(c: DeviceContext, e: Call) -> Action:
    def run(f: LaneFrame) -> None:
        active = f.active()
        for bar in f.block.asynchronous.barriers.values():
            bar.released = bar.released or bool(active[bar.maker])
            bar.fenced = bar.fenced or bar.released

    return run


def _arrive(c: DeviceContext, e: Call) -> Action:
    """mbarrier_arrive, mbarrier_expect_tx, mbarrier_arrive_expect_tx."""
    at = Barrier(c, e.args[0], e.span)
    nbytes = c.expr(e.args[1]) if len(e.args) > 1 else None
    arrives = e.op != "mbarrier_expect_tx"

    def run(f: LaneFrame) -> None:
        more = None if nbytes is None else spread(nbytes(f), f.lanes)
        for address, lanes in at.each(f):
            bar = at.get(f, address, lanes)
            if more is not None:
                bar.tx += int(more[lanes].sum())
            if arrives:
                bar.know(f.block.clocks.arrive(lanes))
                bar.arrive(int(lanes.sum()), e.span)

    return run


def _wait(c: DeviceContext, e: Call) -> Action:
    at, parity = Barrier(c, e.args[0], e.span), c.expr(e.args[1])

    def run(f: LaneFrame) -> None:
        want = spread(parity(f), f.lanes).astype(np.int64)
        for address, lanes in at.each(f):
            bar = at.get(f, address, lanes)
            for p in np.unique(want[lanes]).tolist():
                if p not in (0, 1):
                    raise fault("sim-mbarrier", f"{bar.name}: a parity is 0 or 1, found {p}", expected="a parity of 0 or 1",
                                span=e.span)
                f.block.warp_roles.wait(lambda bar=bar, p=p: bar.passed(p),
                                        lambda bar=bar, p=p: f"for parity {p} of {bar.state()}", e.span)
                if bar.before is not None:
                    f.block.clocks.acquire(lanes & (want == p), bar.before)

    return run


MBARRIER_OPS = effects({
    "mbarrier_init": _init, "fence_mbarrier_init": _fence_init, "mbarrier_wait": _wait,
    **dict.fromkeys(("mbarrier_arrive", "mbarrier_expect_tx", "mbarrier_arrive_expect_tx"), _arrive)}, count_warps)
