"""cp.async: copies from global to shared memory that land at a later wait of the issuing thread.

Source: PTX ISA, "Data movement and conversion instructions: cp.async", `.commit_group`, `.wait_group`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call
from tilelang.ir.evaluate import Closure, Value

from .faults import fault
from .lane_ops import spread
from .lanes import LaneFrame


@dataclass
class _Copy:
    """Copies of some lanes, issued together.  All arrays have one row a lane."""

    lanes: np.ndarray
    group: np.ndarray
    address: np.ndarray
    data: np.ndarray
    site: int
    slot: int  # of the buffer written


class AsyncCopies:
    """The copies under way in one block.  committed: groups closed so far, per thread."""

    def __init__(self, lanes: int) -> None:
        self.committed = np.zeros(lanes, np.int32)
        self.open: list[_Copy] = []

    def commit(self, f: LaneFrame) -> None:
        """The copies each active thread issued since its last commit become its next group."""
        self.committed[f.active()] += 1

    def wait(self, f: LaneFrame, pending: int, check: bool) -> None:
        """All but the `pending` newest groups of each active thread land."""
        active = f.active()
        rest: list[_Copy] = []
        for c in self.open:
            done = active[c.lanes] & (c.group < self.committed[c.lanes] - pending)
            if done.any():
                self._land(f, c, done, check)
            if not done.all():
                left = ~done
                rest.append(_Copy(c.lanes[left], c.group[left], c.address[left], c.data[left], c.site, c.slot))
        self.open = rest

    def _land(self, f: LaneFrame, c: _Copy, done: np.ndarray, check: bool) -> None:
        shared = f.block.shared
        width = c.data.shape[1]
        at, t = c.address[done], c.lanes[done]
        shared.store.flat(np.dtype(np.uint8))[at[:, None] + np.arange(width)] = c.data[done]
        if check:
            g = (at // shared.granule)[:, None] + np.arange(width // shared.granule)
            shared.pending[g] = False
            shared.owner[g] = c.slot
            shared.table.record_write(f.block.clocks, g, t, c.site)
            if shared.proxy is not None:
                shared.proxy.dirty[g] = True


def _cp_async(c: Any, e: Call) -> Closure:
    dst, src = e.args[:2]
    if not (isinstance(dst, AddressOf) and isinstance(src, AddressOf)):
        raise fault("sim-unsupported", "cp_async between raw pointers", span=e.span)
    pred = c.expr(e.args[2]) if len(e.args) > 2 else None
    width, check = int(e.attr("bytes")), c.check
    to = c.reach(dst.buffer, dst.indices, width, e.span, "asynchronous copy into")
    # The source may lie outside where the predicate is false; reach() looks at active lanes only.
    take = c.reach(src.buffer, src.indices, width, e.span, "asynchronous copy from")
    dst_site, src_site = c.site(dst.buffer, e.span, "asynchronous copy"), c.site(src.buffer, e.span, "read")
    src_slot, dst_slot = c.slot(src.buffer.data), c.slot(dst.buffer.data)

    def run(f: LaneFrame) -> Value:
        shared, active = f.block.shared, f.active()
        wanted = active if pred is None else active & spread(pred(f), f.lanes).astype(bool)
        address = to(f)
        data = np.zeros((f.lanes, width), np.uint8)
        if wanted.any():
            old, f.mask = f.mask, wanted if not wanted.all() else None
            a = take(f)
            store = c.touch(f, f.slots[src_slot], src.buffer, a, width, src_site, "read", "ld.global.async")
            data[wanted] = store.flat(np.dtype(np.uint8))[a[wanted][:, None] + np.arange(width)]
            f.mask = old
        t = np.flatnonzero(active)
        block = f.block
        block.counters.count("cp_async", int(active.reshape(-1, 32).any(1).sum()))
        block.counters.bytes["st.shared.async"] += width * len(t)
        block.counters.shared(dst_site, address, width, f.mask)
        if check:
            g = (address[t] // shared.granule)[:, None] + np.arange(width // shared.granule)
            c.refuse_pending(shared, g, dst.buffer, dst_site)
            block.shared.table.write(block.clocks, g, t, dst_site)
            shared.pending[g] = True
            shared.pending_site[g] = dst_site
        block.copies.open.append(_Copy(t, block.copies.committed[t], address[t], data[t], dst_site, dst_slot))
        return np.int32(0)

    return run


def _commit(c: Any, e: Call) -> Closure:
    def run(f: LaneFrame) -> Value:
        f.block.counters.count("cp_async_commit", int(f.active().reshape(-1, 32).any(1).sum()))
        f.block.copies.commit(f)
        return np.int32(0)

    return run


def _wait(c: Any, e: Call) -> Closure:
    pending, check = int(e.attr("n", 0)), c.check

    def run(f: LaneFrame) -> Value:
        f.block.counters.count("cp_async_wait", int(f.active().reshape(-1, 32).any(1).sum()))
        f.block.copies.wait(f, pending, check)
        return np.int32(0)

    return run


ASYNC_OPS = {"cp_async": _cp_async, "cp_async_commit": _commit, "cp_async_wait": _wait}

__all__ = ["ASYNC_OPS", "AsyncCopies"]
