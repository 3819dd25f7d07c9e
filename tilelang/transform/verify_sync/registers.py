"""Registers that the wgmma instructions in flight of a warp group use, for the synchronisation model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tilelang.ir import Var

from .sync_fault import Fault, Found


@dataclass
class _Use:
    data: Var
    lo: int
    hi: int
    result: bool  # the accumulator, else the operand A
    span: Any


@dataclass
class MatrixRegisters:
    """Accumulators and register operands in use from a wgmma to the wait for its group; ordinary writes need a fence.

    time: of the wgmma instructions so far (in their component).  finished: time of the last group waited for.
    waits: the time of each warp when it issued that group; by then the warp had passed its earlier waits.
    """

    time: int = 1
    finished: int = 0
    open: list[_Use] = field(default_factory=list)
    same: set[tuple[Var, int, int, bool]] = field(default_factory=set)  # uses of the open group
    groups: list[tuple[int, list[_Use], dict[int, int]]] = field(default_factory=list)
    waits: dict[int, int] = field(default_factory=dict)
    flying: set[Var] = field(default_factory=set)
    written: dict[Var, Any] = field(default_factory=dict)
    fenced: bool = False

    def ordinary(self, touched: frozenset[Var], written: frozenset[Var], indices: Any, span: Any) -> None:
        """An ordinary statement touches these storages.  indices(data): (first, last) element touched, None: all."""
        for data in touched & self.flying:
            for u in self._in_flight():
                if u.data is not data or not u.result and data not in written:
                    continue
                at = indices(data)
                if at is None or at[0] < u.hi and u.lo <= at[1]:
                    raise Found(Fault(f"`{data.name}` is used while the wgmma that {'writes' if u.result else 'reads'} it "
                                      "may still run: no wgmma_wait for its group in between", span, u.span, kind="wgmma"))
        for data in written:
            self.written[data] = span
            self.same = {u for u in self.same if u[0] is not data}

    def issue(self, uses: list[tuple[Var, int, int, bool]], span: Any) -> None:
        """A wgmma uses registers lo .. hi-1 of storages."""
        if not self.fenced:
            raise Found(Fault("a wgmma has no wgmma_fence before it", span, kind="wgmma"))
        for use in uses:
            if use in self.same:
                continue
            self.same.add(use)
            data, lo, hi, result = use
            if data in self.written:
                raise Found(Fault(f"`{data.name}` is written by ordinary instructions and then used by a wgmma without a "
                                  "wgmma_fence in between", span, self.written[data], kind="wgmma"))
            for u in self._in_flight():
                if u.data is data and lo < u.hi and u.lo < hi and (u.result or result) and not (
                        u.result and result and (u.lo, u.hi) == (lo, hi)):
                    raise Found(Fault(f"`{data.name}` is used by a wgmma while another one that "
                                      f"{'writes' if u.result else 'reads'} it may still run", span, u.span, kind="wgmma"))
            self.open.append(_Use(data, lo, hi, result, span))
            self.flying.add(data)

    def fence(self) -> None:
        """wgmma.fence: the registers written so far may be used."""
        self.fenced = True
        self.written.clear()

    def commit(self, waits: dict[int, int]) -> None:
        """Close the group of the instructions since the last commit; all warps of the warp group issue it together."""
        self.groups.append((self.time, self.open, waits))
        self.open, self.same = [], set()

    def wait(self, n: int) -> None:
        """Wait until at most n groups are in flight."""
        done = self.groups[: max(0, len(self.groups) - n)]
        if done:
            self.groups = self.groups[len(done):]
            self.finished, self.waits = done[-1][0], done[-1][2]
            self.flying = {u.data for u in self._in_flight()}

    def _in_flight(self) -> Iterator[_Use]:
        yield from self.open
        for _, uses, _ in self.groups:
            yield from uses
