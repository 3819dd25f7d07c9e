"""The schedule of a pipelined loop as a value: what runs when, on which unit, and the least time an iteration can take.

Its text is what a kernel keeps: `Schedule.parse(str(s)) == s`.
"""

from __future__ import annotations

import re
from typing import Any

from tilelang.errors import error, register
from tilelang.ir.record import record

register("schedule-text", ValueError, "the text is no schedule of a loop", "pass what str(schedule) gives, unchanged",
         expected="the text of a schedule")


@record
class Item:
    """A statement of the loop: the kind of operation, and the names of the buffers that it reads and writes.

    unit: the one that it keeps busy longest, for `cycles` of an SM in an iteration.  is_async: it runs while its warps go on.
    registers: of a thread, for the fragments that it writes.
    """

    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    unit: str
    cycles: float
    is_async: bool
    registers: int

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.reads)}) -> {', '.join(self.writes)}"


@record
class Place:
    """Where an item stands in the steady iteration.

    group: the warp group that runs it; -1 for loads, which no compute group runs.  stage: by how many iterations it is late;
    below 0 it runs ahead.  begin, end: cycles from the start of the iteration; a time beyond its end is in the next one.
    """

    item: int
    group: int
    stage: int
    begin: float
    end: float


@record
class Bound:
    """The cycles that an iteration takes at least, by each unit, and by values that one iteration hands to the next."""

    terms: tuple[tuple[str, float], ...]

    @property
    def term(self) -> str:
        """The unit that binds."""
        return max(self.terms, key=lambda x: x[1])[0]

    @property
    def cycles(self) -> float:
        return max(c for _, c in self.terms)


@record
class Schedule:
    """The schedule of one pipelined loop.

    loop: name of its variable.  iterations: of a block, the mean of all blocks; 0 where calls decide it.  blocks: of the grid,
    before blocks take several tiles; 0 where calls decide it.  groups: warp groups that compute; 0: all threads also load.
    items: in the order of the program.  places: in the order of the steady iteration, one group after another.  versions:
    (shared tile, stages of it).  split: (accumulator, "M" or "N": what its warp groups divide).  loads: (tile, "tma",
    "cp.async" or "threads").  registers: of a thread of the producer and of the others, where they differ.  cycles: of a steady
    iteration, by simulation; near: of one whose tiles come from L2, where memory limits the others.  resident: blocks of an SM
    whose warps use its units in turn: `cycles` are then those of all of them divided by their number; 0: not simulated so.

    >>> from tilelang.transform import Schedule
    >>> from tilelang.transform.analysis.loop_schedule import Bound
    >>> s = Schedule("k", 8, 64, 1, (), (), (("As", 2),), (), (("As", "tma"),), (), Bound((("tensor cores", 64.0),)), 70.5, 70)
    >>> Schedule.parse(str(s)) == s
    True
    """

    loop: str
    iterations: float
    blocks: int
    groups: int
    items: tuple[Item, ...]
    places: tuple[Place, ...]
    versions: tuple[tuple[str, int], ...]
    split: tuple[tuple[str, str], ...]
    loads: tuple[tuple[str, str], ...]
    registers: tuple[int, ...]
    bound: Bound
    cycles: float
    near: float
    resident: int = 0

    @property
    def busy(self) -> float:
        """The part of the cycles in which the tensor cores multiply."""
        return dict(self.bound.terms).get("tensor cores", 0.0) / self.cycles if self.cycles else 0.0

    def __str__(self) -> str:
        out = [f"loop {self.loop}: {number(self.iterations)} iterations of {self.blocks} blocks, {self.groups} groups, "
               f"{number(self.cycles)} cycles, {number(self.near)} by L2"
               + (f", {self.resident} blocks an SM" if self.resident else ""),
               _pairs("bound", self.bound.terms), _pairs("versions", self.versions), _pairs("split", self.split),
               _pairs("loads", self.loads), f"registers: {', '.join(map(str, self.registers))}"]
        out += [f"item {n}: {x}; {number(x.cycles)} cycles of {x.unit}, {x.registers} registers"
                f"{', async' if x.is_async else ''}" for n, x in enumerate(self.items)]
        out += [f"{f'group {p.group}' if p.group >= 0 else 'loads'}: item {p.item} in stage {p.stage}, {number(p.begin)} to "
                f"{number(p.end)}: {self.items[p.item]} on {self.items[p.item].unit}" for p in self.places]
        return "\n  ".join(out)

    @staticmethod
    def parse(text: str) -> Schedule:
        """The schedule that has this text.  Raises schedule-text (ValueError) for other texts."""
        lines = iter(text.split("\n  "))
        loop, iterations, blocks, groups, cycles, near, _, resident = _match(
            r"loop (.*): (\S+) iterations of (\d+) blocks, (\d+) groups, (\S+) cycles, (\S+) by L2(, (\d+) blocks an SM)?",
            next(lines))
        found = {name: _read(name, next(lines, "")) for name in ("bound", "versions", "split", "loads", "registers")}
        items, places = [], []
        for line in lines:
            if line.startswith("item "):
                kind, reads, writes, at, unit, n, how = _match(
                    r"item \d+: (.*?)\((.*?)\) -> (.*?); (\S+) cycles of (.*?), (\d+) registers(, async)?", line)
                items.append(Item(kind, _names(reads), _names(writes), unit, float(at), bool(how), int(n)))
            else:
                group, k, stage, begin, end = _match(
                    r"(group \d+|loads): item (\d+) in stage (-?\d+), (\S+) to (\S+): .*", line)
                places.append(Place(int(k), int(group[6:]) if group != "loads" else -1, int(stage), float(begin), float(end)))
        return Schedule(loop, float(iterations), int(blocks), int(groups), tuple(items), tuple(places),
                        tuple((n, int(v)) for n, v in found["versions"]), found["split"], found["loads"],
                        tuple(int(v) for (v,) in found["registers"]),
                        Bound(tuple((n, float(v)) for n, v in found["bound"])), float(cycles), float(near), int(resident or 0))


def number(x: float) -> str:
    """A number as short as it can be read back."""
    return str(int(x)) if x == int(x) else repr(x)


def _pairs(name: str, pairs: Any) -> str:
    return f"{name}: " + ", ".join(f"{n} {number(v) if isinstance(v, (int, float)) else v}" for n, v in pairs)


def _read(name: str, line: str) -> Any:
    (text,) = _match(rf"{name}: (.*)", line)
    return tuple(tuple(x.rsplit(" ", 1)) for x in text.split(", ")) if text else ()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


def _match(pattern: str, line: str) -> tuple[str, ...]:
    m = re.fullmatch(pattern, line, re.S)
    if m is None:
        raise error("schedule-text", f"a line of a schedule is not understood: {line[:60]}", found=line[:60])
    return m.groups()
