"""Records which actor touched which shared memory of a block, for the synchronisation model.

Tiles touched by copies and MMAs are intervals of bytes with the last time of each component.  Accesses by threads are
recorded by pattern and warp: a pattern is the set of granules and threads of an access, one object for all accesses of a
launch that have the same, so that which threads meet in two patterns is computed once.  A conflicting access that the
accessor's row does not know is a fault.  An access by the async proxy (TMA, wgmma) to memory with ordinary writes that were
not fenced is a fault too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
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


class Pattern:
    """The granules that an access touches, each with a thread; one below 0 stands for any of those from ~thread on in its warp.

    lanes, warps: of a warp, and of all blocks.  lo, hi: first granule and the end.
    """

    def __init__(self, g: Any, thread: Any, lanes: int, warps: int) -> None:
        self.g, self.thread, self.warps = g, thread, warps
        self.warp = np.where(thread < 0, ~thread, thread) // lanes
        self.lo, self.hi = int(np.minimum.reduce(g)), int(np.maximum.reduce(g)) + 1
        self.bits, self.numbers = self._bits(g), frozenset(distinct(self.warp).tolist())
        self._meets: dict[tuple[int, bool], tuple[Pattern, Any]] = {}
        self._within: dict[tuple[int, int], Any] = {}

    def _bits(self, g: Any) -> int:
        """A bit for each granule."""
        flags = np.zeros(self.hi, bool)
        flags[g] = True
        return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")

    @cached_property
    def of_warps(self) -> dict[int, int]:
        """The granules of each warp, as bits."""
        return {w: self._bits(self.g[self.warp == w]) for w in self.numbers}

    def meets(self, other: Pattern, several: bool) -> Any:
        """For each of its warps and each of another's whether different threads touch one granule; None where none do.

        several: whether the other's granules count as touched by several threads.
        """
        key = id(other), several
        if key not in self._meets:
            out = np.zeros((self.warps, self.warps), bool)
            if not self.bits & other.bits:
                pass
            elif several or (self.thread < 0).all() or (other.thread < 0).all():
                for w, bits in self.of_warps.items():
                    out[w, [v for v, others in other.of_warps.items() if bits & others]] = True
            else:
                i, j = self.pairs(other)
                differ = (self.thread[i] != other.thread[j]) | (self.thread[i] < 0)
                out[self.warp[i[differ]], other.warp[j[differ]]] = True
            self._meets[key] = other, out if out.any() else None  # which must live as long as its id is used
        return self._meets[key][1]

    def pairs(self, other: Pattern) -> tuple[Any, Any]:
        """The places in both patterns of all pairs with one granule."""
        order = np.argsort(other.g, kind="stable")
        first, end = (np.searchsorted(other.g[order], self.g, side) for side in ("left", "right"))
        n = end - first
        ends = np.cumsum(n)
        return np.repeat(np.arange(n.size), n), order[np.arange(ends[-1]) - np.repeat(ends - n - first, n)]

    def within(self, lo: int, hi: int) -> Any:
        """Which warps touch granules lo .. hi-1."""
        if (lo, hi) not in self._within:
            self._within[lo, hi] = np.isin(np.arange(self.warps), self.warp[(self.g >= lo) & (self.g < hi)])
        return self._within[lo, hi]


class _Touched:
    """The last access in one mode with each pattern: time (0: none) and component by warp, site.

    A row is a pattern, and whether its granules count as touched by several threads.  row: a clock's row.
    """

    def __init__(self, row: Row, warps: int) -> None:
        self.latest = row  # of all patterns
        self.rows: dict[tuple[int, bool], int] = {}
        self.patterns: list[tuple[Pattern, bool]] = []
        self.last: dict[int, tuple[Site, int]] = {}  # site and number of the access of a row
        self.lo, self.hi = np.zeros((2, 32), np.int64)
        self.time, self.component = np.zeros((2, 32, warps), np.int32)

    def note(self, p: Pattern, several: bool, stamps: dict[int, tuple[int, int]], site: Site, order: int) -> None:
        """Record an access.  stamps: component and time by warp."""
        row = self.rows.setdefault((id(p), several), len(self.patterns))
        if row == len(self.patterns):
            self.patterns.append((p, several))
            if row == len(self.lo):
                self.lo, self.hi, self.time, self.component = (
                    np.concatenate([x, np.zeros_like(x)]) for x in (self.lo, self.hi, self.time, self.component))
            self.lo[row], self.hi[row] = p.lo, p.hi
        self.last[row] = site, order
        for w, (c, t) in stamps.items():
            if w in p.numbers:
                self.component[row, w], self.time[row, w] = c, t
                self.latest[c] = max(self.latest[c], t)

    def near(self, lo: int, hi: int) -> Any:
        """The rows with granules between lo and hi."""
        n = len(self.patterns)
        return ((self.lo[:n] < hi) & (self.hi[:n] > lo)).nonzero()[0]


class Memory:
    """The shared memory of one block.

    granule: bytes.  warps, lanes: that access it, and threads of each.  names: (first byte, end, name) of the buffers.
    report: what is done with a fault.
    """

    def __init__(self, granule: int, warps: tuple[int, int], clocks: Clocks, names: list[tuple[int, int, str]],
                 report: Callable[[Fault], None]) -> None:
        (self.warps, self.lanes), self.granule = warps, granule
        self.clocks, self.names, self.report = clocks, names, report
        self.tiles: dict[tuple[int, int], _Tile] = {}
        self.touched: dict[str, _Touched] = {}  # by mode
        self.flying: list[tuple[Pattern, Site]] = []  # cp.async in flight
        self.checked: dict[Any, tuple[int, int]] = {}
        self.count = 0  # accesses by threads

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
        for p, site in self.flying if version != t.touched else ():
            if p.within(lo // self.granule, -(-hi // self.granule)).any():
                self._fault("copy", lo, span, *site[:2])
                break
        if self.touched and version != t.touched:
            self._threads(mode, lo, hi, seen, fenced, span)
        self.checked[key] = t.touched, t.written
        t.records[mode, component] = time, span

    def group_reads(self, lo: int, hi: int, active: list[tuple[Warp, int]], component: int, time: int, span: Any) -> None:
        """Check and record an MMA of some warps that reads bytes lo .. hi-1: of all that they have seen, the earliest times."""
        t = self.tiles.get((lo, hi))
        key = (lo, hi, component)
        if t is None or self.checked.get(key) != (t.touched, t.written):
            rows = [w.known(lanes) for w, lanes in active]
            seen, fenced = (np.minimum.reduce([row[k] for row in rows]) for k in (0, 1))
            self.tile("r", lo, hi, (seen, fenced), (component, time), span, component)
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
        for m, got in self.touched.items():
            if m == mode == "r":
                continue
            near = None
            for what, known in (("order", seen), ("unread" if m == "r" else "proxy", fenced)):
                if (known >= got.latest).all():
                    continue
                near = got.near(a, b) if near is None else near
                late = known[got.component[near]] < got.time[near]
                for k in np.flatnonzero(late.any(1)):
                    p = got.patterns[near[k]][0]
                    bad = late[k] & p.within(a, b)
                    if bad.any():
                        at = np.minimum.reduce(p.g[(p.g >= a) & (p.g < b) & bad[p.warp]])
                        text = what if known is fenced else "again" if mode == "w" else "early"
                        self._fault(text, int(at) * self.granule, span, *got.last[near[k]][0][:2])
                        break

    # ---- cp.async ---------------------------------------------------------------------------------------------------

    def fly(self, p: Pattern, active: list[tuple[Warp, int]], site: Site) -> None:
        """Start copies by threads; no access may touch their granules until `land`."""
        self.threads("w", p, active, site)
        self.flying.append((p, site))

    def land(self, p: Pattern) -> None:
        """Complete copies, for the threads that issued them."""
        self.flying = [x for x in self.flying if x[0] is not p]

    def signalled(self, copies: list[tuple[Pattern, Site]], stamp: tuple[int, int]) -> None:
        """Complete copies for those who see an mbarrier's phase.  stamp: component and time of it."""
        got = self.touched["w"]
        for p, site in copies:
            self.land(p)
            for row in got.near(p.lo, p.hi):  # what the copies overwrite
                its = got.patterns[row][0].of_warps
                got.time[row, [w for w, bits in p.of_warps.items() if not its.get(w, 0) & ~bits]] = 0
            self.count += 1
            got.note(p, True, dict.fromkeys(p.numbers, stamp), site, self.count)
            self._touched(p)

    # ---- threads ----------------------------------------------------------------------------------------------------

    def threads(self, mode: str, p: Pattern, active: list[tuple[Warp, int]], site: Site) -> None:
        """Check and record ordinary accesses by threads; active: their warps."""
        if site.atomic is not None:
            mode = "a?" if site.atomic.waits else f"a{site.atomic.family}"
        rows = {w.number: w.known(lanes)[0] for w, lanes in active}
        for t in self._touched(p):
            self._against(t, mode, p, rows, site)
        for other, its in self.flying:
            if p.bits & other.bits and not site.disjoint(its):
                at = int(p.g[int(np.argmax(np.isin(p.g, other.g)))]) * self.granule
                self._fault("copy", at, site.span, its.span, site.exact and its.exact)
                break
        self._conflict(mode, p, rows, site)
        stamps = {}
        for w, lanes in active:
            c = w.component(lanes)
            stamps[w.number] = c, self.clocks.now[c]
        if mode not in self.touched:
            self.touched[mode] = _Touched(self.clocks.row(), self.warps)
        self.count += 1
        self.touched[mode].note(p, False, stamps, site, self.count)

    def _touched(self, p: Pattern) -> list[_Tile]:
        """The tiles near a pattern, which is touched."""
        found = [t for t in self.tiles.values() if t.lo < p.hi * self.granule and p.lo * self.granule < t.hi]
        for t in found:
            t.touched += 1
        return found

    def _against(self, t: _Tile, mode: str, p: Pattern, rows: dict[int, Row], site: Site) -> None:
        for (m, c), (when, where) in t.records.items():
            if mode == "r" and m == "r":
                continue
            late = [n for n, seen in rows.items() if seen[c] < when]
            lo, hi = t.lo // self.granule, -(-t.hi // self.granule)
            if late and p.within(lo, hi)[late].any():
                inside = (p.g >= lo) & (p.g < hi) & np.isin(p.warp, late)
                at = int(p.g[int(np.argmax(inside))]) * self.granule
                self._fault("copy" if m == "w" else "late", at, site.span, where, site.exact)

    def _conflict(self, mode: str, p: Pattern, rows: dict[int, Row], site: Site) -> None:
        warps, known = list(rows), np.stack(list(rows.values()))
        for m, got in self.touched.items():
            if m == mode and m != "w" or (known >= got.latest).all():
                continue
            near = got.near(p.lo, p.hi)
            late = known[:, got.component[near]] < got.time[near]
            found = []
            for k in np.flatnonzero(late.any((0, 2))):
                q, several = got.patterns[near[k]]
                meets, (other, order) = p.meets(q, several), got.last[near[k]]
                if meets is None or not (bad := late[:, k] & meets[warps]).any():
                    continue
                ordered = site.atomic and other.atomic and not site.atomic.misses_order(other.atomic)
                if not ordered and not site.disjoint(other):
                    i, j = p.pairs(q)
                    those = np.isin(p.warp[i], np.array(warps)[bad.any(1)]) & bad.any(0)[q.warp[j]] & (
                        several | (p.thread[i] != q.thread[j]) | (p.thread[i] < 0))
                    found.append((int(q.warp[j[those]].min()), int(i[those].min()), -order, other))
            if found:
                _, first, _, other = min(found, key=lambda x: x[:3])
                self._fault("order", int(p.g[first]) * self.granule, site.span, other.span, site.exact and other.exact)
                return
