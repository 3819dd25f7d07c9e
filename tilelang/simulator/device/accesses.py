"""Records and checks the accesses of a program on the device simulator, and counts them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tilelang.ir import Buffer
from tilelang.target.atomics import Atomic

from .block import Global, Shared
from .counters import Counters, Site, active_warps
from ..faults import fault
from ..lanes import LaneFrame
from ..memory import Storage, uninitialized, without_storage


class Access(NamedTuple):
    """Static description of an access that a statement makes.

    slot: of the buffer's data.  width: bytes for each lane.  site: number of the access site.  mode: read, write or atomic.
    op: name it is counted under.
    """

    buffer: Buffer
    slot: int
    width: int
    site: int
    mode: str
    op: str


class Accesses:
    """The access sites of a program, and the checks of what its threads do there.

    check: look for races, uninitialised reads and accesses to the destination of a copy in flight; else count only.
    """

    def __init__(self, check: bool, chip: str = "") -> None:
        self.check = check
        self.sites: list[Site] = []
        self.counters = Counters(self.sites, chip)

    def site(self, name: str, span: Any, text: str, atomic: Atomic | None = None) -> int:
        """Number of a new access site.  name: of the buffer, or of what is accessed where that is known at run time only."""
        self.sites.append(Site(span, name, text, atomic))
        return len(self.sites) - 1

    def touch(self, f: LaneFrame, memory: Any, address: np.ndarray, access: Access, same: np.ndarray | None = None) -> Storage:
        """Record an access of the active lanes and check it; returns the storage.

        Counts it, and checks for races, uninitialised reads and copies in flight.  same: lanes that wrote the same value as all
        other lanes that wrote there.
        """
        b, slot, width, site, mode, op = access
        if memory is None:
            raise without_storage(b, self.sites[site].span)
        m, block = f.mask, f.block
        shared = not isinstance(memory, Global)
        store, table = (block.shared.store, block.shared.table) if shared else (memory.store, memory.table)
        repeated = table.repeated(block.clocks) if mode == "read" and self.check and table is not None else None
        key = None if repeated is None else (site, width, address.tobytes(), m if m is None else m.tobytes())
        if repeated is not None and (known := repeated.get(key)) is not None:
            warps, nbytes, banks = known
            self.counters.count(op, warps)
            self.counters.bytes[op] += nbytes
            if banks is not None:
                self.counters.add_shared(site, *banks)
            return store
        warps = active_warps(f)
        nbytes = width * (f.lanes if m is None else int(m.sum()))
        self.counters.count(op, warps)
        self.counters.bytes[op] += nbytes
        banks = self.counters.shared(site, address, width, m, mode == "write") if shared else None
        if not self.check:
            return store
        t = np.arange(f.lanes) if m is None else np.flatnonzero(m)
        first = (address if m is None else address[m]) // store.granule
        g = first[:, None] + np.arange(max(1, width // store.granule))
        if shared and block.shared.pending.any():
            self.reject_pending(block.shared, g, b, site)
        proxy = block.shared.proxy if shared else memory.proxy
        atomic = self.sites[site].atomic
        if mode == "write" or atomic is not None and atomic.family == "store":  # an atomic store does not read the old value
            if shared:
                block.shared.owner[g] = slot
            elif store.known is not None:
                store.known[0, g] = True
        elif not ((block.shared.owner[g] == slot).all() if shared else
                  store.known is None or store.known[0, g].all()):
            raise uninitialized(b, self.sites[site].span, f", in block {block.where}")
        if table is not None:
            if mode == "read":
                table.read(block.clocks, g, t, site)
                if repeated is not None:
                    repeated[key] = warps, nbytes, banks
            elif mode == "atomic":
                table.atomic(block.clocks, g, t, site)
            else:
                table.write(block.clocks, g, t, site, same)
        if proxy is not None and mode == "write":
            proxy.write(g)
        elif proxy is not None and mode == "atomic":
            proxy.update(g, t)
        return store

    def reject_pending(self, shared: Shared, g: np.ndarray, b: Buffer, site: int) -> None:
        """Raises sim-async when an asynchronous copy into one of the granules g of b is in flight."""
        busy = shared.pending[g]
        if busy.any():
            other = self.sites[int(shared.pending_site[g[busy][0]])]
            raise fault("sim-async", f"{self.sites[site].text} of {b.name} while an asynchronous copy into it is under way",
                        found=f"{b.name} touched before it has", span=self.sites[site].span,
                        notes=((other.span, "the copy was issued here"),))
