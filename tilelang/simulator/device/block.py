"""State of a block of the device simulator while it runs: shared memory, clocks, and the global tensors it accesses."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.target.thread_calls import WARP

from .counters import Counters, Site
from ..memory import Storage
from .races import AccessTable, Clocks


class Shared:
    """The shared memory of one block.

    owner: for each granule, the slot of the buffer that wrote it last, -1 if none did.  Buffers may alias, and bytes that one
    has written are uninitialised for the other.  pending: whether an asynchronous copy into the granule is in flight.
    """

    def __init__(self, nbytes: int, granule: int, lanes: int, sites: list[Site]) -> None:
        self.store = Storage("shared", nbytes, granule, known=True)
        self.owner = np.full(self.store.nbytes // granule, -1, np.int32)
        self.table = AccessTable(self.store.nbytes // granule, lanes, WARP, sites, "shared memory")
        self.pending = np.zeros(self.store.nbytes // granule, bool)
        self.pending_site = np.zeros(self.store.nbytes // granule, np.int32)
        self.granule = granule
        self.proxy: Any = None  # asynchronous.Proxy, where TMA or wgmma access it


class Block:
    """State of the running block.  lanes: number of lanes of its cluster."""

    def __init__(self, lanes: int, threads: int, counters: Counters, printer: Any, where: str, agents: int = 0,
                 warp: int = WARP) -> None:
        self.lanes, self.threads, self.counters, self.where, self.warp = lanes, threads, counters, where, warp
        self.clocks = Clocks(lanes, agents)
        self.shared: Shared | None = None
        self.copies: Any = None
        # In a cluster (cluster.Cluster) the lanes are those of all its blocks: this one's start at `first`, and its section of
        # the arena of shared memory at byte `base`.
        self.cluster: Any = None
        self.rank = self.first = self.base = 0
        self.device = 0  # the rank of the program that runs it
        self.warp_roles: Any = None  # warp_roles.WarpRoles, where each warp runs independently
        self.asynchronous: Any = None  # asynchronous.Asynchronous, where TMA, wgmma or mbarriers are used
        self.print = printer.print


class Global:
    """A global tensor on the device: its storage, and its accesses during this launch (None: nothing writes it)."""

    def __init__(self, store: Storage) -> None:
        self.store = store
        self.table: AccessTable | None = None
        self.proxy: Any = None  # asynchronous.Proxy, where TMA reads what the launch writes
