"""Counts what a simulated kernel executed: instructions, bytes, shared-memory bank conflicts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang.target.atomics import Atomic

from ..lane_ops import WARP
from ..lanes import LaneFrame

BANKS = 32


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


def wavefronts(address: np.ndarray, width: int, active: np.ndarray) -> tuple[int, int]:
    """(passes, passes without conflicts) of accesses by whole warps.

    address: bytes, shape (warps, 32); width: bytes for each lane (1 to 16); active: same shape as address.  There are 32 banks
    of 4 bytes.  A warp is served in one phase for up to 4 bytes a lane, in two phases of 16 lanes for 8 bytes, in four of 8
    lanes for 16 bytes.  Within a phase, lanes that access the same word need one pass.  Source: CUDA C++ Programming Guide,
    "Shared Memory" of compute capability 5.x and later, and the documented behaviour of 64- and 128-bit accesses.
    """
    per_phase = {8: 16, 16: 8}.get(width, 32)
    words = max(1, width // 4)
    phases = WARP // per_phase
    phase = (np.arange(address.shape[0])[:, None] * phases + np.arange(WARP) // per_phase)[active]
    word = (address[active] // 4)[:, None] + np.arange(words)
    span = int(word.max(initial=0)) + 1
    distinct = np.unique((phase[:, None] * span + word).ravel())
    by_bank = np.bincount(distinct // span * BANKS + distinct % span % BANKS)
    by_phase = np.pad(by_bank, (0, -len(by_bank) % BANKS)).reshape(-1, BANKS).max(1)
    return int(by_phase.sum()), int((by_phase > 0).sum())


class Counters:
    """The counts over all blocks of a run."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites
        self.instructions: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.banks: dict[int, BankCount] = {}
        self._memo: dict[tuple[int, bytes], tuple[int, int, int]] = {}

    def count(self, op: str, warps: int = 1) -> None:
        """An instruction executed by this many warps."""
        self.instructions[op] += warps

    def shared(self, site: int, address: np.ndarray, width: int, active: np.ndarray | None) -> tuple[int, int, int]:
        """Count an access of lanes to shared memory; returns what was counted.

        address: in bytes, shape (lanes,) with lanes a multiple of 32.
        """
        if width > 16:  # a wider access is several of 16 bytes
            coroutines = [self.shared(site, address + chunk, 16, active) for chunk in range(0, width, 16)]
            instructions, passes, ideal = map(sum, zip(*coroutines))
            return instructions, passes, ideal
        if active is not None:
            address = np.where(active, address, address[active.argmax()])
        base = int(address.min()) & ~127
        key = (width, (address - base).tobytes() + (b"" if active is None else active.tobytes()))
        got = self._memo.get(key)
        if got is None:
            warps = (address - base).reshape(-1, WARP)
            on = np.ones(warps.shape, bool) if active is None else active.reshape(-1, WARP)
            got = self._memo[key] = (int(on.any(1).sum()), *wavefronts(warps, width, on))
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
    return f.lanes // WARP if f.mask is None else int(f.mask.reshape(-1, WARP).any(1).sum())


def count_warps(f: LaneFrame, op: str) -> None:
    """Count an instruction executed by the warps with an active lane."""
    f.block.counters.count(op, active_warps(f))
