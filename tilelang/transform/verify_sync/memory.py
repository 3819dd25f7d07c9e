"""Records which actor touched which shared memory of a block, for the synchronisation model.

Tiles touched by copies and MMAs are intervals of bytes with the last time of each component.  Accesses by threads are
recorded by granule and warp.  A conflicting access that the accessor's row does not know is a fault.  An access by the async
proxy (TMA, wgmma) to memory with ordinary writes that were not fenced is a fault too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tilelang.layout.distinct import distinct
from tilelang.target.atomics import Atomic

from .sync_fault import Fault
from .clocks import Clocks, Row, Warp

MESSAGES = {"order": "is touched by two threads without a barrier in between",
            "copy": "is touched while an asynchronous copy to it is in flight",
            "again": "is overwritten by a copy while something that reads or writes it is not known to be over",
            "early": "is read by a copy or a matrix instruction before what was written there is known to be complete",
            "late": "is written while a copy or a matrix instruction may still read it",
            "proxy": "was written by ordinary stores that no fence_proxy_async of the writer follows: copies and matrix "
                     "instructions may not see them",
            "unread": "is overwritten by a copy after ordinary loads that no fence_proxy_async of the reader follows: they may "
                      "still be under way"}
KINDS = {"order": "order", "proxy": "proxy", "unread": "proxy", "again": "reuse", "late": "reuse", "copy": "copy",
         "early": "copy"}


class Site(NamedTuple):
    """An access in the program: its span, whether its address is known, and what an atomic one does.

    loop: the execution of a parallel loop that it belongs to.
    """

    span: Any
    exact: bool = True
    atomic: Atomic | None = None
    loop: Any = None

    def disjoint(self, other: Site) -> bool:
        """Whether the program guarantees that two accesses, not both at known addresses, are disjoint.

        It does for the iterations of one parallel loop, and for one statement of several threads.
        """
        if self.exact and other.exact:
            return False
        if self.loop is not None and self.loop == other.loop:
            return True
        return not self.exact and not other.exact and self.span is not None and self.span == other.span


@dataclass
class _Tile:
    """An interval of bytes with the accesses to it: (mode, component) -> (time, span)."""

    lo: int
    hi: int
    records: dict[tuple[str, int], tuple[int, Any]] = field(default_factory=dict)
    meets: list[_Tile] = field(default_factory=list)
    written: int = 0  # how often a copy wrote an overlapping tile
    touched: int = 0  # how often threads, or copies that they issued, touched bytes of it


class _Touched:
    """Last accesses in one mode of each granule by each warp: time (0: none), component, thread (-2: several), site."""

    def __init__(self, warps: int, granules: int, row: Row) -> None:
        self.time, self.component, self.thread, self.site = np.zeros((4, warps, granules), np.int32)
        self.latest = row  # of all granules
        self.lo, self.hi = granules, 0  # first granule touched and the end
        self.first, self.end = warps, 0  # first warp that touched one and the end


class Memory:
    """The shared memory of one block.

    size, granule: bytes.  warps, lanes: that access it, and threads of each.  names: (first byte, end, name) of the buffers.
    report: what is done with a fault.  alike: whether all that orders anything is a barrier of all threads.
    """

    def __init__(self, size: int, granule: int, warps: tuple[int, int], clocks: Clocks, names: list[tuple[int, int, str]],
                 report: Callable[[Fault], None], alike: bool) -> None:
        (self.warps, self.lanes), self.granule = warps, granule
        self.clocks, self.names, self.report, self.alike = clocks, names, report, alike
        self.granules = size // granule + 1
        self.tiles: dict[tuple[int, int], _Tile] = {}
        self.touched: dict[tuple[str, int], _Touched] = {}  # by mode; 0: the last ones, 1 and on: earlier ones that stay
        self.flying: Any = None  # for each granule the number of the site of the cp.async in flight to it
        self.checked: dict[Any, tuple[int, int]] = {}
        self.sites = [Site(None)]

    def name(self, at: int) -> str:
        """Name of the buffer that holds a byte."""
        return next((f"`{n}`" for lo, hi, n in self.names if lo <= at < hi), "shared memory")

    def _fault(self, what: str, at: int, span: Any, other: Any, exact: bool = True) -> None:
        self.report(Fault(f"{self.name(at)} {MESSAGES[what]}", span, other, exact, kind=KINDS[what]))

    # ---- copies and MMAs --------------------------------------------------------------------------------------------

    def tile(self, mode: str, lo: int, hi: int, known: tuple[Row, Row], stamp: tuple[int, int], span: Any, who: Any) -> None:
        """Check and record an asynchronous access of bytes lo .. hi-1 by an actor `who`.

        known: the rows that it has seen, and those of fenced writes.  stamp: component and time of the access.
        """
        (seen, fenced), (component, time) = known, stamp
        t = self._tile(lo, hi)
        if mode == "w":
            for other in t.meets:
                other.written += 1
        key = (lo, hi, mode, who)
        version, written = self.checked.get(key, (-1, -1))  # what was known once stays known
        if version == t.touched and written == t.written:
            t.records[mode, component] = time, span
            return
        for other in t.meets:
            for (m, c), (when, where) in other.records.items():
                if (mode == "w" or m == "w") and seen[c] < when:
                    self._fault("again" if mode == "w" else "early", max(lo, other.lo), span, where)
        if self.flying is not None and version != t.touched:
            over = self.flying[lo // self.granule: -(-hi // self.granule)]
            if over.any():
                self._fault("copy", lo, span, *self.sites[int(over[int(np.argmax(over > 0))])][:2])
        if self.touched and version != t.touched:
            self._threads(mode, lo, hi, seen, fenced, span)
        self.checked[key] = t.touched, t.written
        t.records[mode, component] = time, span

    def group_reads(self, lo: int, hi: int, active: list[tuple[Warp, int]], component: int, time: int, span: Any) -> None:
        """Check and record an MMA of some warps that reads bytes lo .. hi-1."""
        t = self.tiles.get((lo, hi))
        key = (lo, hi, component)
        if t is None or self.checked.get(key) != (t.touched, t.written):
            for w, lanes in active:
                self.tile("r", lo, hi, w.known(lanes), (component, time), span, (w, lanes))
            t = self.tiles[lo, hi]
            self.checked[key] = t.touched, t.written
            return
        t.records["r", component] = time, span

    def _tile(self, lo: int, hi: int) -> _Tile:
        t = self.tiles.get((lo, hi))
        if t is None:
            t = _Tile(lo, hi)
            for other in self.tiles.values():
                if other.lo < hi and lo < other.hi:
                    other.meets.append(t)
                    t.meets.append(other)
            t.meets.append(t)
            self.tiles[lo, hi] = t
        return t

    def _threads(self, mode: str, lo: int, hi: int, seen: Row, fenced: Row, span: Any) -> None:
        a, b = lo // self.granule, -(-hi // self.granule)
        for (m, _), got in self.touched.items():
            if m == mode == "r":
                continue
            for what, known in (("order", seen), ("unread" if m == "r" else "proxy", fenced)):
                if b <= got.lo or got.hi <= a or (known >= got.latest).all():
                    continue
                those = slice(got.first, got.end)
                bad = known[got.component[those, a:b]] < got.time[those, a:b]
                if bad.any():
                    row, at = (int(x[0]) for x in np.nonzero(bad))
                    row += got.first
                    text = what if known is fenced else "again" if mode == "w" else "early"
                    self._fault(text, (a + at) * self.granule, span, *self.sites[got.site[row, a + at]][:2])

    # ---- cp.async ---------------------------------------------------------------------------------------------------

    def fly(self, g: Any, thread: Any, active: list[tuple[Warp, int]], site: Site) -> None:
        """Start copies to granules g by threads; no access may touch the granules until `land`."""
        if self.flying is None:
            self.flying = np.zeros(self.granules, np.int32)
        self.threads("w", g, thread, active, site)
        self.flying[g] = len(self.sites) - 1

    def land(self, g: Any) -> None:
        """Complete the copies to these granules, for the threads that issued them."""
        self.flying[g] = 0

    def signalled(self, copies: list[tuple[Any, Any, Site]], active: list[tuple[Warp, int]], stamp: tuple[int, int]) -> None:
        """Complete copies (granules, threads, site) for those who see an mbarrier's phase.  stamp: component and time of it."""
        g, thread = np.concatenate([np.ravel(c[0]) for c in copies]), np.concatenate([np.ravel(c[1]) for c in copies])
        site = np.repeat(np.arange(len(copies)) + len(self.sites), [np.size(c[0]) for c in copies])
        self.sites += [c[2] for c in copies]
        self.land(g)
        at = g if self.warps == 1 else np.where(thread < 0, ~thread, thread) // self.lanes * self.granules + g
        component, time = (np.full(g.shape, n, np.int32) for n in stamp)
        rows = {w.number: w.mine(lanes) for w, lanes in active}
        self._note(("w", 0), at, (time, component, np.full(g.shape, -2), site), rows)
        first, end = int(np.minimum.reduce(g)) * self.granule, (int(np.maximum.reduce(g)) + 1) * self.granule
        for t in self.tiles.values():
            t.touched += t.lo < end and first < t.hi

    # ---- threads ----------------------------------------------------------------------------------------------------

    def threads(self, mode: str, g: Any, thread: Any, active: list[tuple[Warp, int]], site: Site) -> None:
        """Check and record ordinary accesses of granules g by threads (same shape); active: their warps.

        A thread below 0 stands for any of those from ~thread on in its warp.
        """
        if site.atomic is not None:
            mode = "a?" if site.atomic.waits else f"a{site.atomic.family}"
        first, end = int(np.minimum.reduce(g)), int(np.maximum.reduce(g)) + 1
        warp = np.where(thread < 0, ~thread, thread) // self.lanes if self.warps > 1 else 0
        rows = {w.number: w.known(lanes) for w, lanes in active}
        for t in self.tiles.values():
            if t.lo < end * self.granule and first * self.granule < t.hi:
                t.touched += 1
                self._against(t, mode, g, warp, rows, site)
        if self.flying is not None:
            over = self.flying[g]
            if over.any():
                for n in distinct(over).tolist():
                    other = self.sites[n]
                    if n and not site.disjoint(other):
                        at = int(g[int(np.argmax(over == n))]) * self.granule
                        self._fault("copy", at, site.span, other.span, site.exact and other.exact)
                        break
        self._conflict(mode, g, thread, warp, rows, site)
        times, components = np.zeros((2, self.warps), np.int32)
        for w, lanes in active:
            c = components[w.number] = w.component(lanes)
            times[w.number] = self.clocks.now[c]
        at = g if self.warps == 1 else warp * self.granules + g
        self._note((mode, 0), at, (times[warp], components[warp], thread, len(self.sites)), rows)
        self.sites.append(site)

    def _note(self, key: tuple[str, int], at: Any, new: tuple[Any, ...], rows: dict[int, tuple[Row, Row]]) -> None:
        """Record accesses by warps, whose rows are given: their time, component, thread and site.

        Earlier ones of other threads that nothing orders before them stay on record.
        """
        got = self.touched.get(key)
        if got is None:
            got = self.touched[key] = _Touched(self.warps, self.granules, self.clocks.row())
        g = at % self.granules
        got.lo, got.hi = min(got.lo, int(np.minimum.reduce(g))), max(got.hi, int(np.maximum.reduce(g)) + 1)
        got.first, got.end = min(got.first, *rows), max(got.end, max(rows) + 1)
        when, component, who, site = records = [x.reshape(-1) for x in (got.time, got.component, got.thread, got.site)]
        time, mine, thread, where = new
        np.maximum.at(got.latest, mine, time)
        several = (when[at] > 0) & (who[at] != thread)
        if several.any():
            several &= self._seen(rows)[at // self.granules, component[at]] < when[at]
            if not self.alike:  # what has seen the new ones may not have seen these
                apart = several & ((component[at] != mine) | (when[at] != time))
                if apart.any():
                    places = distinct(at[apart])
                    self._note((key[0], key[1] + 1), places, tuple(x[places] for x in records), rows)
                    several &= ~apart
        when[at], component[at], who[at], site[at] = time, mine, thread, where
        several |= (who[at] != thread) | (thread < 0)
        if several.any():
            who[at[several]] = -2

    def _seen(self, rows: dict[int, tuple[Row, Row]]) -> Any:
        """What each warp has seen."""
        out = np.zeros((self.warps, self.clocks.size), np.int32)
        for n, (seen, _) in rows.items():
            out[n] = seen
        return out

    def _against(self, t: _Tile, mode: str, g: Any, warp: Any, rows: dict[int, tuple[Row, Row]], site: Site) -> None:
        for (m, c), (when, where) in t.records.items():
            if mode == "r" and m == "r":
                continue
            late = [n for n, (seen, _) in rows.items() if seen[c] < when]
            if late:
                inside = ((g + 1) * self.granule > t.lo) & (g * self.granule < t.hi) & np.isin(warp, late)
                if inside.any():
                    at = int(g[int(np.argmax(inside))]) * self.granule
                    self._fault("copy" if m == "w" else "late", at, site.span, where, site.exact)

    def _conflict(self, mode: str, g: Any, thread: Any, warp: Any, rows: dict[int, tuple[Row, Row]], site: Site) -> None:
        known: Any = None
        for (m, _), got in self.touched.items():
            if m == mode and m != "w" or all((seen >= got.latest).all() for seen, _ in rows.values()):
                continue
            if known is None:
                known = self._seen(rows)
            component, time, who, where = (x[got.first:got.end] for x in (got.component, got.time, got.thread, got.site))
            bad = known[warp, component.take(g, axis=1)] < time.take(g, axis=1)
            if not bad.any() or not (bad := bad & (who.take(g, axis=1) != thread)).any():
                continue
            sites = where.take(g, axis=1)
            bad &= self._meets(site, sites, bad)
            if not bad.any():
                continue
            row, at = (int(x[0]) for x in np.nonzero(bad))
            other = self.sites[int(sites[row, at])]
            self._fault("order", int(g[at]) * self.granule, site.span, other.span, site.exact and other.exact)
            return

    def _meets(self, site: Site, sites: Any, among: Any) -> Any:
        """Which of these accesses should have been ordered with this one."""
        out = np.zeros(sites.shape, bool)
        for k in distinct(sites[among]).tolist():
            other = self.sites[k]
            ordered = site.atomic and other.atomic and not site.atomic.misses_order(other.atomic)
            if not ordered and not site.disjoint(other):
                out |= sites == k
        return out
