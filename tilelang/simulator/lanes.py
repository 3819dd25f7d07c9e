"""Execution of statements on many lanes at once; both simulators use it.

A lane is one thread of a block, or one iteration of a Parallel loop.  Statements are compiled once into Python
functions of a `LaneFrame` (context.py).  Divergent control flow keeps a mask of active lanes (None: all of them).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilelang.ir import Call, Stmt, contains as holds, walk
from tilelang.ir.evaluate import Frame, Value
from tilelang.target.thread_calls import WARP

from .faults import fault

Action = Callable[["LaneFrame"], None]


class LaneFrame(Frame):
    """State of one group of lanes.

    lanes: their number.  exited: lanes that have returned (None: none).  leaving: lanes that left the innermost loop by
    `break`.  block: the simulator's state of the block (memory, counters).  own: the lanes that this frame executes (None:
    all).  matrix: wgmma instructions of these lanes in flight (registers.Issued), None where there are none.
    warp_role: the warp role that executes this frame in a tile program (reference.block.WarpRole).  warp: lanes of a warp.
    """

    __slots__ = ("lanes", "exited", "leaving", "block", "own", "matrix", "warp_role", "warp")

    def __init__(self, slots: list[Value], lanes: int, mask: np.ndarray | None = None, block: Any = None) -> None:
        super().__init__(slots, mask)
        self.lanes, self.block, self.warp = lanes, block, getattr(block, "warp", WARP)
        self.exited: np.ndarray | None = None
        self.leaving: np.ndarray | None = None
        self.own: np.ndarray | None = None
        self.matrix: Any = None
        self.warp_role: Any = None

    def active(self) -> np.ndarray:
        """The mask of active lanes as an array."""
        return np.ones(self.lanes, bool) if self.mask is None else self.mask

    def running(self) -> np.ndarray:
        """The lanes of this frame that have not returned."""
        own = self.active() if self.own is None else self.own
        return own if self.exited is None else own & ~self.exited

    def any_active(self) -> bool:
        return self.mask is None or bool(self.mask.any())


def uniform(x: Value, f: LaneFrame, what: str, span: Any) -> Any:
    """The one value of all active lanes, of shape ().  Raises sim-thread-dependent if they differ."""
    x = np.asarray(x)
    if x.ndim == 0:
        return x
    y = x if f.mask is None or x.shape[0] != f.lanes else x[f.mask]
    if y.size and not (y == y[0]).all():
        raise fault("sim-thread-dependent", f"{what} must be the same in every thread, found values from {y.min()} to "
                    f"{y.max()}", span=span)
    return y[0] if y.size else x[0]


def is_address(x: Any) -> bool:
    """Whether a handle's slot holds an address (one number, or one for each lane) instead of a storage."""
    return isinstance(x, (np.generic, np.ndarray))


def contains(s: Stmt, kinds: tuple[type, ...], calls: tuple[str, ...] = ()) -> bool:
    """Whether a node of these kinds, or a Call with one of these names, occurs in s."""
    return bool(kinds) and holds(s, *kinds) or bool(calls) and any(c.op in calls for c in walk(s, Call))


@contextlib.contextmanager
def only(f: LaneFrame, which: np.ndarray) -> Iterator[np.ndarray]:
    """Context manager under which only some of the active lanes are active; its value is their mask."""
    old = f.mask
    f.mask = which if old is None else which & old
    try:
        yield f.mask
    finally:
        f.mask = old


def exit_lanes(f: LaneFrame) -> None:
    """Mark the active lanes as returned from the kernel."""
    f.exited = f.active() if f.exited is None else f.exited | f.active()
    f.mask = np.zeros(f.lanes, bool)
