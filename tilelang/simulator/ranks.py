"""Several ranks in one simulation: each has its arguments, and all run the program at the same time.

The storages of a symmetric tensor follow one another in one storage; a slot of it holds a Section, which says whose part is
meant.  Plain accesses to the other parts are checked for races like those of one device.  Flags are atomics on symmetric
tensors.  Between devices memory is weak: a load of a flag may return any value that is not older than one the thread knows of
(views of PTX's memory model: causality order and coherence), and only a release of system scope and an acquire that reads it,
or fences of system scope, order other accesses.  Source: PTX ISA, "Memory Consistency Model".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from .faults import fault
from .lanes import LaneFrame
from .memory import Storage
from .releases import ACQUIRES, RELEASES

@dataclass
class Section:
    """What a slot of a symmetric tensor holds.  memory: of all ranks, one after another.  of: the storage of each rank in it.
    rank: whose is meant, one number or one for each lane."""

    memory: Any
    of: list[Storage]
    rank: Any

    def shift(self, item: int, vector: bool) -> Any:
        """How far this rank's elements of `item` bytes lie from the first rank's, in elements."""
        rank = np.asarray(self.rank, np.int64) * (self.of[0].nbytes // item)
        return rank[:, None] if vector and rank.ndim else rank


@dataclass
class Ranks:
    """The ranks of a run.  seed: None runs always the first block that can run; a number chooses blocks, and what loads of
    flags return, at random.  repeats: how often each rank launches the kernel, whatever the others have come to.  own: by rank,
    what the slots of its tensors hold."""

    size: int = 1
    seed: int | None = None
    repeats: int = 1
    own: list[dict[int, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = None if self.seed is None else Random(self.seed)
        self.flags = Flags(self.random)
        self.came = [0] * self.size  # how often a thread of each rank has come to the barrier of all PEs
        self.met: dict[int, np.ndarray] = {}  # by number of such a barrier: what those that came had seen

    def frames(self, f: LaneFrame) -> list[LaneFrame]:
        """The host's frame of each rank."""
        out = []
        for own in self.own or [{}]:
            g = LaneFrame(list(f.slots), f.lanes, f.mask, f.block)
            for slot, held in own.items():
                g.slots[slot] = held
            out.append(g)
        return out


def symmetric(c: Any, bindings: Sequence[Any], hold: Callable[[Storage], Any]) -> list[dict[int, Any]]:
    """By rank, what the slots of its tensors hold.  The storages of symmetric tensors become parts of one.  Raises sim-argument
    where the ranks pass other shapes or numbers."""
    out: list[dict[int, Any]] = [{} for _ in bindings]
    for tensors in zip(*(b.tensors for b in bindings)):
        b, at, first = tensors[0].buffer, c.slot(tensors[0].buffer.data), tensors[0].storage
        if any(t.shape != tensors[0].shape or t.strides != tensors[0].strides for t in tensors):
            raise fault("sim-argument", f"the ranks pass `{b.name}` of different shapes", expected=str(tensors[0].shape),
                        found=", ".join(str(t.shape) for t in tensors), span=b.span)
        whole = Storage(b.name, first.nbytes * len(bindings), first.granule, known=first.known is None) \
            if b.facts.symmetric else None
        for r, t in enumerate(tensors):
            if whole is None:
                out[r][at] = hold(t.storage)
                continue
            part = slice(r * first.nbytes, (r + 1) * first.nbytes)
            whole.raw[:, part] = t.storage.raw
            t.storage.place(whole.raw[:, part])
            if whole.known is not None:
                t.storage.known = whole.known[:, part.start // first.granule:part.stop // first.granule]
        if whole is not None:
            memory = hold(whole)
            for r in range(len(bindings)):
                out[r][at] = Section(memory, [t.storage for t in tensors], r)
    for v, x in bindings[0].values.items():
        if any(str(b.values[v]) != str(x) for b in bindings):  # one NaN is like another
            raise fault("sim-argument", f"the ranks pass different values of `{v.name}`", expected=str(x),
                        found=", ".join(str(b.values[v]) for b in bindings), span=v.span)
    return out


# ---- flags ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Message:
    """One value of a flag.  value: None while it is the one in memory.  thread: that wrote it, at its time `clock`; -1 before
    the kernel.  device: of the thread.  know: what an acquire that reads it learns, None for nothing.  system: whether other
    devices learn it.  readers: threads that have read it, and when."""

    value: Any
    thread: int = -1
    clock: int = 0
    device: int = -1
    know: np.ndarray | None = None
    system: bool = False
    readers: dict[int, int] = field(default_factory=dict)


class Flags:
    """The values that flags have had.  random: chooses among those that a load may return; None: the latest."""

    def __init__(self, random: Random | None) -> None:
        self.random = random
        self.of: dict[tuple[int, int], list[_Message]] = {}
        self.fenced: dict[int, np.ndarray] = {}  # by thread: what it had seen at its last fence
        self.read: dict[int, np.ndarray] = {}  # by thread: what relaxed loads have read, for its next fence
        self.order: np.ndarray | None = None  # what the fences so far have seen

    def history(self, flat: np.ndarray, at: int) -> list[_Message]:
        """The values of element `at`, the oldest first."""
        h = self.of.setdefault((flat.ctypes.data, at), [_Message(None)])
        if h[-1].value is None:
            h[-1].value = flat[at]
        elif h[-1].value != flat[at]:  # a plain store, which is ordered with all atomics or a race
            h[:] = [_Message(flat[at])]
        return h

    def choices(self, clocks: Any, t: int, h: list[_Message]) -> list[_Message]:
        """The values that thread t may read: from the latest on that it knows to be written or read."""
        for k in reversed(range(len(h))):
            m = h[k]
            if m.thread in (-1, t) or clocks.seen[t, m.thread] >= m.clock or any(
                    u == t or clocks.seen[t, u] >= at for u, at in m.readers.items()):
                return h[k:]
        return h

    def take(self, f: LaneFrame, t: int, m: _Message, acquires: bool, system: bool) -> Any:
        """Thread t reads m."""
        clocks = f.block.clocks
        m.readers.setdefault(t, int(clocks.now[t]))
        if m.know is not None and (m.device == f.block.device or m.system and system):
            if acquires:
                clocks.acquire(member(clocks, t), m.know)
            else:
                self.read[t] = joined(self.read.get(t), m.know)
        return m.value

    def load(self, f: LaneFrame, flat: np.ndarray, at: int, t: int, acquires: bool, system: bool) -> Any:
        """What a load by thread t returns."""
        choices = self.choices(f.block.clocks, t, self.history(flat, at))
        return self.take(f, t, self.random.choice(choices) if self.random else choices[-1], acquires, system)

    def cells(self, f: LaneFrame, flat: np.ndarray, cells: np.ndarray, order: Any) -> Any:
        """The elements that an atomic accesses, as Memory.cells returns them; a load gets the values that it may see.

        order: of the atomic (releases.Releases)."""
        on = f.active()
        if order.kind != "load":
            self.change(f, flat, cells, order.order or "relaxed", order.kind == "store", order.system)
            return flat, np.where(on, cells, 0)[:, None], on[:, None]
        seen = np.zeros(f.lanes, flat.dtype)
        for t in np.flatnonzero(on):
            seen[t] = self.load(f, flat, int(cells[t]), int(t), order.order in ACQUIRES, order.system)
        return seen, np.arange(f.lanes)[:, None], on[:, None]

    def change(self, f: LaneFrame, flat: np.ndarray, cells: np.ndarray, order: str, replaces: bool, system: bool) -> None:
        """The active lanes are about to change these elements.  replaces: without reading them."""
        clocks = f.block.clocks
        made: dict[int, list[_Message]] = {}  # by element
        for t in map(int, np.flatnonzero(f.active())):
            at = int(cells[t])
            if at in made:  # several lanes change it at once: their values are seen together
                h = made[at]
            else:
                h = made[at] = self.history(flat, at)
                know = None
                if not replaces:  # a chain of updates belongs to the release that it starts with
                    self.take(f, t, h[-1], order in ACQUIRES, system)
                    know = h[-1].know if h[-1].system == system else None
                h.append(_Message(None, t, int(clocks.now[t]), f.block.device, know, system))
            m = h[-1]
            m.readers[t] = int(clocks.now[t])
            if order in RELEASES:
                m.know = joined(m.know, clocks.arrive(member(clocks, t)))
            elif t in self.fenced:
                m.know = joined(m.know, self.fenced[t])

    def fence(self, f: LaneFrame) -> None:
        """The active threads execute a fence of system scope, one after another."""
        clocks = f.block.clocks
        for t in np.flatnonzero(f.active()):
            for know in (self.read.pop(int(t), None), self.order):
                if know is not None:
                    clocks.acquire(member(clocks, int(t)), know)
            self.fenced[int(t)] = clocks.arrive(member(clocks, int(t)))
            self.order = joined(self.order, self.fenced[int(t)])


def member(clocks: Any, t: int) -> np.ndarray:
    """The mask of one lane."""
    out = np.zeros(clocks.lanes, bool)
    out[t] = True
    return out


def joined(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
    """What both clocks know.  a: None for nothing."""
    return b if a is None else np.maximum(a, b)
