"""Counts what a simulated kernel executed: instructions, bytes, shared-memory bank conflicts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang.target.atomics import Atomic
from tilelang.target.banks import wavefronts
from tilelang.target.hip import WAVE
from tilelang.target.thread_calls import WARP

from ..lanes import LaneFrame


@dataclass(frozen=True)
class Site:
    """A place in the program that accesses memory: the user's span, the buffer's name, and a description.

    atomic: what an atomic operation does there, where its order matters."""

    span: Any
    name: str
    text: str
    atomic: Atomic | None = None


@dataclass
class BankCount:
    """Shared-memory traffic of one site.

    instructions: how often a warp executed it.  wavefronts: passes through shared memory that they took.  ideal: passes
    that they would take without conflicts.
    """

    site: Site
    instructions: int = 0
    wavefronts: int = 0
    ideal: int = 0

    @property
    def conflicts(self) -> int:
        """Passes lost to bank conflicts."""
        return self.wavefronts - self.ideal


class Counters:
    """The counts over all blocks of a run.  chip: FuncFacts.chip."""

    def __init__(self, sites: list[Site], chip: str = "") -> None:
        self.sites, self.chip, self.warp = sites, chip, WAVE if chip else WARP
        self.instructions: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.banks: dict[int, BankCount] = {}
        self._memo: dict[tuple[int, bool, bytes], tuple[int, int, int]] = {}

    def count(self, op: str, warps: int = 1) -> None:
        """An instruction executed by this many warps."""
        self.instructions[op] += warps

    def shared(self, site: int, address: np.ndarray, width: int, active: np.ndarray | None,
               writes: bool = False) -> tuple[int, int, int]:
        """Count an access of lanes to shared memory; returns what was counted.

        address: in bytes, shape (lanes,) with lanes a multiple of those of a warp.
        """
        if width > 16:  # a wider access is several of 16 bytes
            coroutines = [self.shared(site, address + chunk, 16, active, writes) for chunk in range(0, width, 16)]
            instructions, passes, ideal = map(sum, zip(*coroutines))
            return instructions, passes, ideal
        if active is not None:
            address = np.where(active, address, address[active.argmax()])
        base = int(address.min()) & ~255
        key = (width, writes, (address - base).tobytes() + (b"" if active is None else active.tobytes()))
        got = self._memo.get(key)
        if got is None:
            warps = (address - base).reshape(-1, self.warp)
            on = np.ones(warps.shape, bool) if active is None else active.reshape(-1, self.warp)
            got = self._memo[key] = (int(on.any(1).sum()), *wavefronts(warps, width, on, self.chip, writes))
        self.add_shared(site, *got)
        return got

    def add_shared(self, site: int, instructions: int, passes: int, ideal: int) -> None:
        """Add shared-memory traffic that has already been counted."""
        n = self.banks.setdefault(site, BankCount(self.sites[site]))
        n.instructions += instructions
        n.wavefronts += passes
        n.ideal += ideal


def active_warps(f: LaneFrame) -> int:
    """Number of warps with an active lane."""
    return f.lanes // f.warp if f.mask is None else int(f.mask.reshape(-1, f.warp).any(1).sum())


def count_warps(f: LaneFrame, op: str) -> None:
    """Count an instruction executed by the warps with an active lane."""
    f.block.counters.count(op, active_warps(f))
