"""Registers in use by wgmma instructions in flight, which ordinary code must not access.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: wgmma.fence, wgmma.wait_group".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..faults import fault
from ..lanes import LaneFrame


class Issued:
    """wgmma state of the lanes of one frame.

    fences: number of wgmma_fence executed.  commits: number of groups committed.  guards: arrays whose registers are in use.
    """

    def __init__(self) -> None:
        self.fences = self.commits = 0
        self.guards: set[Guard] = set()


class Guard:
    """State of the registers of one per-thread array.

    busy: for each granule, number of the wgmma group that uses it, 0 for none.  stamp: number of fences executed when ordinary
    code last wrote it, -1 for never.  accumulator: whether it is an accumulator of that group.
    """

    def __init__(self, name: str, granules: int) -> None:
        self.name = name
        self.busy = np.zeros(granules, np.int32)
        self.stamp = np.full(granules, -1, np.int32)
        self.accumulator = np.zeros(granules, bool)

    def touch(self, f: LaneFrame, cells: Any, writes: bool, span: Any) -> None:
        """Ordinary code reads or writes granules.  Raises sim-wgmma when a wgmma in flight uses them."""
        if self.busy[cells].any():
            raise fault("sim-wgmma", f"{self.name} is {'written' if writes else 'read'} while the wgmma that uses its "
                        "registers is under way", found=f"{self.name} {'written' if writes else 'read'} before wgmma_wait",
                        span=span, hint="wgmma_commit, then wgmma_wait for the group of that instruction first")
        if writes:
            self.stamp[cells] = f.matrix.fences if f.matrix is not None else 0


def matrix_of(f: LaneFrame) -> Issued:
    """The wgmma state of a frame."""
    if f.matrix is None:
        f.matrix = Issued()
    return f.matrix
