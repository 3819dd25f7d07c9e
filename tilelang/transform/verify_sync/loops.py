"""Which iterations of its loops a stream of the synchronisation model follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from tilelang.ir import For, Stmt, While
from tilelang.target.atomics import Iterations

from .sync_fault import Undecided
from .accesses import reads
from .stream_state import StreamState

_MOST = 64  # the longest non-ring or while loop that is followed completely


class Left(Exception):
    """Break or continue."""

    def __init__(self, again: bool) -> None:
        self.again = again


class Loops:
    """The loops around the present statement of a stream, and the iterations that it follows of a loop."""

    def __init__(self, st: StreamState) -> None:
        self.st = st
        self._axes = 0  # loops whose iterations are followed all at once
        self._tiles = 0  # depth of loops around ring loops
        self._path: tuple[int, ...] = ()  # their iterations
        # the threads that run the innermost loop, where not all do; False: they differ between iterations
        self._entry: Any = None

    def bodies(self, s: For | While) -> Iterator[Stmt]:
        """The body of a loop once for each iteration that is followed, with its threads active."""
        return self._turns(s) if isinstance(s, For) else self._rounds(s)

    def break_off(self, again: bool) -> NoReturn:
        """End the innermost loop, or its iteration, for the active threads.  Raises Left, or Undecided."""
        # All threads that run the loop leave it, if the threads that entered it are those active here.
        st = self.st
        if st.guess or st.mask is not None and not (
                isinstance(self._entry, np.ndarray) and np.array_equal(st.mask, self._entry)):
            raise Undecided("a loop is left by some of the threads")
        raise Left(again)

    def _turns(self, s: For) -> Iterator[Stmt]:
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
        mask, active, entry = st.mask, st.active, self._entry
        most = int(np.max(extent))
        around, turning = st.inside, st.turning
        st.turning = False
        if s.plan.independent:
            st.independent += 1
            st.inside = (*around, Iterations(id(s)))
        path = self._path
        steps = self._steps(s, start if isinstance(start, int) else 0, most, ring)
        self._entry = False if isinstance(extent, np.ndarray) else mask
        try:  # also when the loop is left early
            for k in steps:
                st.env[s.var] = start + k
                self._path = (*path, k) if outer else path
                st.mask, st.active = mask, active
                if isinstance(extent, np.ndarray):
                    st.only(k < extent)
                    if not st.active:
                        break
                yield s.body
        finally:
            st.mask, st.active, self._path, self._entry = mask, active, path, entry
            st.inside, st.turning = around, turning
            self._tiles -= outer
            st.independent -= s.plan.independent

    def all_at_once(self, s: For) -> Iterator[Stmt]:
        """The body once for all independent iterations: the iteration number becomes a further axis of all values."""
        st = self.st
        self._axes += 1
        st.independent += 1
        around, st.inside = st.inside, (*st.inside, Iterations(id(s)))
        st.env[s.var] = (int(s.start.value) + np.arange(int(s.extent.value))).reshape(  # type: ignore[attr-defined]
            -1, *(1,) * self._axes)
        yield s.body
        self._axes -= 1
        st.independent -= 1
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

    def _rounds(self, s: While) -> Iterator[Stmt]:
        st = self.st
        mask, active, entry, path, around, turning = st.mask, st.active, self._entry, self._path, st.inside, st.turning
        self._entry, st.turning = mask, True
        try:
            for k in range(_MOST + 1):
                st.mask, st.active, self._path = mask, active, (*path, k)
                reads(st, s.cond, s)
                c = st.values(s.cond, st)
                if c is None and st.plan.is_ring_loop(s):
                    raise Undecided("the number of iterations of a loop that orders threads depends on data")
                if isinstance(c, np.ndarray):
                    here = c if mask is None else np.broadcast_to(c, st.n)[mask]
                    if here.any() and not here.all():
                        raise Undecided("a loop that some of the threads leave first")
                    c = bool(here.all())
                if c is False or c == 0 and c is not None or c is None and k >= 3:
                    return
                if k == _MOST:
                    break
                yield s.body
        finally:
            st.mask, st.active, self._entry, self._path = mask, active, entry, path
            st.inside, st.turning = around, turning
        # Every warp role with so many iterations stops here: the iterations left out are those at the end.
        if st.block.model.way.whole > 1:
            raise Undecided(f"a while loop of more than {_MOST} iterations")
        st.block.model.cut = True


__all__ = ["Left", "Loops"]
