"""cp.async: copies from global to shared memory that land at a later wait of the issuing thread.

Source: PTX ISA, "Data movement and conversion instructions: cp.async", `.commit_group`, `.wait_group`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call
from tilelang.target.hip import HIP_CHIPS

from .context import DeviceContext
from .counters import count_warps
from .mbarrier import Barrier
from ..faults import fault
from ..lane_ops import effects, spread
from ..lanes import Action, LaneFrame


@dataclass
class _Copy:
    """Copies that some lanes issued together.  All arrays have one row for each lane."""

    lanes: np.ndarray
    group: np.ndarray
    address: np.ndarray
    data: np.ndarray
    site: int
    slot: int  # slot of the destination buffer
    number: int  # number of the instruction, in order of issue
    order: np.ndarray  # how many copies the warp of each lane had issued before


class AsyncCopies:
    """The copies in flight in one block.  For each thread, committed: number of groups committed; loads: number of copies that
    its warp has issued."""

    def __init__(self, lanes: int) -> None:
        self.committed, self.loads = np.zeros(lanes, np.int32), np.zeros(lanes, np.int32)
        self.open: list[_Copy] = []
        self.issued = 0

    def commit(self, f: LaneFrame) -> None:
        """The copies that each active thread has issued since its last commit become its next group."""
        self.committed[f.active()] += 1

    def wait(self, f: LaneFrame, pending: int, check: bool) -> None:
        """All but the `pending` newest groups of each active thread land."""
        active = f.active()
        self._finish(f, lambda c: active[c.lanes] & (c.group < self.committed[c.lanes] - pending), check)

    def wait_loads(self, f: LaneFrame, pending: int, check: bool) -> None:
        """All but the `pending` newest copies of each warp with an active thread land."""
        warps = of_warps(f, f.active())
        self._finish(f, lambda c: warps[c.lanes] & (c.order < self.loads[c.lanes] - pending), check)

    def signalled(self, f: LaneFrame, active: np.ndarray, until: int, check: bool) -> None:
        """The first `until` issued copies of these threads land; an mbarrier orders them with the threads that read them."""
        self._finish(f, lambda c: active[c.lanes] & (c.number < until), check, False)

    def _finish(self, f: LaneFrame, ended: Callable[[_Copy], np.ndarray], check: bool, ordered: bool = True) -> None:
        rest: list[_Copy] = []
        for c in self.open:
            done = ended(c)
            if done.any():
                self._land(f, c, done, check, ordered)
            if not done.all():
                left = ~done
                rest.append(replace(c, lanes=c.lanes[left], group=c.group[left], address=c.address[left], data=c.data[left],
                                    order=c.order[left]))
        self.open = rest

    def _land(self, f: LaneFrame, c: _Copy, done: np.ndarray, check: bool, ordered: bool) -> None:
        """Write the copies `done` to shared memory.  ordered: the issuing threads see them from here on."""
        shared = f.block.shared
        width = c.data.shape[1]
        at, t = c.address[done], c.lanes[done]
        shared.store.flat(np.dtype(np.uint8))[at[:, None] + np.arange(width)] = c.data[done]
        if check:
            g = (at // shared.granule)[:, None] + np.arange(width // shared.granule)
            shared.pending[g] = False
            shared.owner[g] = c.slot
            if ordered:
                shared.table.record_write(f.block.clocks, g, t, c.site)
            if shared.proxy is not None:
                shared.proxy.land(g)


def of_warps(f: LaneFrame, lanes: np.ndarray) -> np.ndarray:
    """The mask of the warps that have one of these lanes."""
    return np.repeat(lanes.reshape(-1, f.warp).any(1), f.warp)


def _one_run(f: LaneFrame, address: np.ndarray, width: int, name: str, span: Any) -> None:
    """Raises sim-async unless lane i of each warp writes width bytes at the warp's base (M0) + i * width: AMD CDNA3 ISA,
    "Memory Buffer Load to LDS"."""
    base, on = (address - np.arange(f.lanes) % f.warp * width).reshape(-1, f.warp), f.active().reshape(-1, f.warp)
    bad = (base != base[np.arange(len(base)), on.argmax(1)][:, None]) & on
    if bad.any():
        t = int(bad.reshape(-1).argmax())
        raise fault("sim-async", f"thread {t} copies to {name} outside the run of {width} bytes a lane that its wave writes",
                    expected=f"lane i at the wave's base + {width} * i", found=f"thread {t} at byte {int(address[t])}",
                    span=span, hint="permute the global addresses of the lanes instead of their places in LDS")


def _cp_async(c: DeviceContext, e: Call) -> Action:
    dst, src = e.args[:2]
    if not (isinstance(dst, AddressOf) and isinstance(src, AddressOf)):
        raise fault("sim-unsupported", "‹cp_async between raw pointers›", span=e.span)
    pred = c.expr(e.args[2]) if len(e.args) > 2 else None
    width, check, machine = e.options.bytes, c.check, HIP_CHIPS.get(c.chip)
    if machine is not None and width not in machine.async_load_bytes:
        raise fault("sim-unsupported", f"{c.chip} has no load into LDS of ‹{width}› bytes a lane",
                    expected=f"{' or '.join(map(str, machine.async_load_bytes))} bytes", span=e.span)
    to = c.memory.reach(dst.buffer, dst.indices, width, e.span, "asynchronous copy into")
    # With a false predicate the source may be out of bounds; reach() checks active lanes only.
    take = c.memory.reach(src.buffer, src.indices, width, e.span, "asynchronous copy from")
    memory, accesses = c.memory, c.accesses
    dst_site = accesses.site(dst.buffer.name, e.span, "asynchronous copy")
    src_slot, dst_slot = c.slot(src.buffer.data), c.slot(dst.buffer.data)
    access = memory.access(src.buffer, width, e.span, "read", "ld.global.async")

    def run(f: LaneFrame) -> None:
        shared, active = f.block.shared, f.active()
        wanted = active if pred is None else active & spread(pred(f), f.lanes).astype(bool)
        address = to(f)
        if machine is not None:
            _one_run(f, address, width, dst.buffer.name, e.span)
        data = np.zeros((f.lanes, width), np.uint8)
        if wanted.any():
            old, f.mask = f.mask, wanted if not wanted.all() else None
            a = take(f)
            store = accesses.touch(f, memory.behind(f, src_slot), a, access)
            data[wanted] = store.flat(np.dtype(np.uint8))[a[wanted][:, None] + np.arange(width)]
            f.mask = old
        t = np.flatnonzero(active)
        block = f.block
        block.counters.bytes["st.shared.async"] += width * len(t)
        block.counters.shared(dst_site, address, width, f.mask, True)
        if check:
            g = (address[t] // shared.granule)[:, None] + np.arange(width // shared.granule)
            accesses.reject_pending(shared, g, dst.buffer, dst_site)
            block.shared.table.write(block.clocks, g, t, dst_site)
            shared.pending[g] = True
            shared.pending_site[g] = dst_site
        copies = block.copies
        copies.open.append(_Copy(t, copies.committed[t], address[t], data[t], dst_site, dst_slot, copies.issued,
                                 copies.loads[t]))
        copies.issued += 1
        copies.loads[of_warps(f, active)] += 1

    return run


def _commit(c: DeviceContext, e: Call) -> Action:
    return lambda f: f.block.copies.commit(f)


def _wait(c: DeviceContext, e: Call) -> Action:
    return lambda f: f.block.copies.wait(f, e.options.n, c.check)


def _wait_loads(c: DeviceContext, e: Call) -> Action:
    return lambda f: f.block.copies.wait_loads(f, e.options.n, c.check)


def _signal(c: DeviceContext, e: Call) -> Action:
    """cp_async_mbarrier_arrive: the threads arrive when their copies so far have landed, as late as possible."""
    at, counted, check = Barrier(c, e.args[0], e.span), e.options.noinc, c.check

    def run(f: LaneFrame) -> None:
        block = f.block
        for address, lanes in at.each(f):
            bar, n, until = at.get(f, address, lanes), int(lanes.sum()), block.copies.issued
            seen = block.clocks.arrive(lanes)
            if not counted:
                bar.pending += n  # the phase waits for these arrivals in addition to its count

            def land(bar: Any = bar, n: int = n, lanes: np.ndarray = lanes, until: int = until, seen: Any = seen) -> None:
                block.copies.signalled(f, lanes, until, check)
                bar.know(seen)
                bar.arrive(n, e.span)

            block.asynchronous.signal(bar, land, e.span)

    return run


ASYNC_OPS = effects({"cp_async": _cp_async, "cp_async_commit": _commit, "cp_async_wait": _wait,
                     "wait_loads": _wait_loads, **dict.fromkeys(
                         ("wait_shared", "wave_priority", "loads_between"), lambda c, e: lambda f: None),
                     "cp_async_mbarrier_arrive": _signal}, count_warps)
