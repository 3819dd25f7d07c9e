"""Which iterations of its loops a stream of the synchronisation model follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilelang.ir import For, Stmt, While
from tilelang.target.atomics import Iterations

from .sync_fault import Undecided
from .accesses import reads
from .stream_state import StreamState

_MOST = 64  # the longest non-ring or while loop that is followed completely


class Left(Exception):
    """No active thread is left in an iteration of the innermost loop."""


class Loops:
    """The loops around the present statement of a stream, and the iterations that it follows of a loop."""

    def __init__(self, st: StreamState) -> None:
        self.st = st
        self._axes = 0  # loops whose iterations are followed all at once
        self._tiles = 0  # depth of loops around ring loops
        self._path: tuple[int, ...] = ()  # their iterations
        # of the innermost loop: threads that left the iteration, and the loop (None: none)
        self.gone: Any = None
        self._broken: Any = None

    def bodies(self, s: For | While) -> Iterator[Stmt]:
        """The body of a loop once for each iteration that is followed, with its threads active."""
        return self._for_iterations(s) if isinstance(s, For) else self._while_iterations(s)

    def break_off(self, again: bool) -> None:
        """End the innermost loop, or its iteration (again), for the active threads.  Raises Left, or Undecided."""
        if self.st.guess:
            raise Undecided("a loop is left under a condition that is known only at run time")
        mask = np.ones(self.st.n, bool) if self.st.mask is None else self.st.mask
        self.gone = mask if self.gone is None else self.gone | mask
        if not again:
            self._broken = mask if self._broken is None else self._broken | mask
        if mask.all():
            raise Left

    def stay(self) -> bool:
        """Restrict the active threads to those that are still in the iteration; returns whether there are any."""
        if self.gone is not None:
            self.st.only(~self.gone)
        return bool(self.st.active)

    def _iteration(self) -> bool:
        """Begin an iteration with those active threads that have not left the loop; returns whether there are any."""
        self.gone = self._broken
        return self.stay()

    def _for_iterations(self, s: For) -> Iterator[Stmt]:
        st = self.st
        reads(st, s.start, s)
        reads(st, s.extent, s)
        start, extent = st.values(s.start, st), st.values(s.extent, st)
        ring = st.plan.is_ring_loop(s)
        outer = ring and st.plan.is_outer(s)
        self._tiles += outer
        if extent is None or start is None:
            if ring:
                raise Undecided("the number of iterations of a loop that orders threads depends on data")
            start, extent = start or 0, extent or 2
            st.block.model.cut = True
        mask, active, left = st.mask, st.active, (self.gone, self._broken)
        most = int(np.max(extent))
        around, turning = st.inside, st.turning
        st.turning = False
        independent = st.independent
        if s.plan.independent:
            st.enter_independent(s)
            st.inside = (*around, Iterations(id(s)))
        path = self._path
        steps = self._steps(s, start if isinstance(start, int) else 0, most, ring)
        self._broken = None
        try:
            for k in steps:
                st.env[s.var] = start + k
                self._path = (*path, k) if outer else path
                st.mask, st.active = mask, active
                if isinstance(extent, np.ndarray):
                    st.only(k < extent)
                if not self._iteration():
                    break
                yield s.body
        finally:
            st.mask, st.active, self._path, (self.gone, self._broken) = mask, active, path, left
            st.inside, st.turning = around, turning
            self._tiles -= outer
            st.independent = independent

    def all_at_once(self, s: For) -> Iterator[Stmt]:
        """The body once for all independent iterations: the iteration number becomes a further axis of all values."""
        st = self.st
        self._axes += 1
        independent = st.enter_independent(s)
        around, st.inside = st.inside, (*st.inside, Iterations(id(s)))
        st.env[s.var] = (int(s.start.value) + np.arange(int(s.extent.value))).reshape(  # type: ignore[attr-defined]
            -1, *(1,) * self._axes)
        yield s.body
        self._axes -= 1
        st.independent = independent
        st.inside = around
        st.env.pop(s.var, None)

    def _steps(self, s: For, start: int, most: int, ring: bool) -> list[int] | range:
        """The iterations that are followed: all, or without whole periods of the rings in between."""
        plan, model = self.st.plan, self.st.block.model
        if not ring:
            if most <= _MOST:
                return range(most)
            model.cut = True
            return [*range(_MOST // 2), *range(most - 2, most)]
        way, outer = model.way, plan.is_outer(s)
        if most <= (way.whole if way.every_tile or not outer else 1):
            return range(most)
        # Inside a loop over tiles the rings continue from tile to tile, so fewer iterations of each tile suffice.
        stages, unit = plan.stages, plan.unit(s)
        stages += stages % 2  # loops may take two steps per iteration
        first, least = stages, (stages + 1 if self._tiles else 2 * stages + 2) + way.later
        if outer:
            first, least = min(1, way.tiles - 1), way.tiles
        # Loops of different warp roles over the same iterations leave out the same ones, wherever they start.
        skipped = start if 0 < start <= first else 0
        each, steps = s.plan.ring_steps or (1, most)  # ring steps of one iteration, and of the original loop
        left_out = model.left_out((id(self.st.block), *self._path, unit), steps + skipped, least) // each
        first = (first - skipped) // each
        if left_out <= 0 or first + left_out > most:
            return range(most)
        model.cut = True
        return [*range(first), *range(first + left_out, most)]

    def _while_iterations(self, s: While) -> Iterator[Stmt]:
        st = self.st
        mask, active, path, around, turning = st.mask, st.active, self._path, st.inside, st.turning
        left = self.gone, self._broken
        self._broken, st.turning = None, True
        try:
            for k in range(_MOST + 1):
                st.mask, st.active, self._path = mask, active, (*path, k)
                if not self._iteration():
                    return
                reads(st, s.cond, s)
                c = st.values(s.cond, st)
                if c is None and st.plan.is_ring_loop(s):
                    raise Undecided("the number of iterations of a loop that orders threads depends on data")
                if isinstance(c, np.ndarray):
                    st.only(np.broadcast_to(c, st.n).astype(bool))
                    c = bool(st.active)
                    self._broken = None if st.mask is None else ~st.mask
                if c is False or c == 0 and c is not None or c is None and k >= 3:
                    return
                if k == _MOST:
                    break
                yield s.body
        finally:
            st.mask, st.active, self._path, (self.gone, self._broken) = mask, active, path, left
            st.inside, st.turning = around, turning
        # Every warp role with so many iterations stops here: the iterations left out are those at the end.
        if st.block.model.way.whole > 1:
            raise Undecided(f"a while loop of more than {_MOST} iterations")
        st.block.model.cut = True
