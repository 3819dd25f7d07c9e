"""Live ranges of shared buffers and their places in the bytes of shared memory; how many blocks have room on an SM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from tilelang.ir import FRAGMENT, SHARED, Buffer, Const, Launch, Stmt, Var, convert, replace, with_options
from tilelang.ir.record import state
from tilelang.ops import Gemm
from tilelang.target.machine import REGISTERS

from .effects import effects, fills_whole
from .pipeline_loops import Item

ALIGN = 128  # bytes: one row of the 32 banks, at whose multiples swizzle patterns start


@state
class Span:
    """A buffer with its live range: positions of the first and last statement of the block's body that touch it."""

    buffer: Buffer
    first: int
    last: int
    offset: int = 0

    @property
    def bytes(self) -> int:
        return self.buffer.size * self.buffer.dtype.bytes

    def meets(self, other: Span) -> bool:
        """Whether the places of two buffers have bytes in common."""
        return other.offset < self.offset + self.bytes and self.offset < other.offset + other.bytes


def place(spans: list[Span], pairs: Collection[tuple[Buffer, Buffer]] | None) -> int:
    """Place by first fit, largest buffer first; returns the bytes needed.  pairs: buffers that may share bytes; None: those
    with disjoint live ranges."""
    at = {s.buffer: k for k, s in enumerate(spans)}
    first, last = (np.array(x, np.int64) for x in ([s.first for s in spans], [s.last for s in spans]))
    low, high = np.zeros(len(spans), np.int64), np.array([s.bytes for s in spans], np.int64)
    apart = last[:, None] < first if pairs is None else np.zeros((len(spans),) * 2, bool)
    for a, b in pairs or ():
        if a in at and b in at:
            apart[at[a], at[b]] = True
    apart |= apart.T.copy()
    done: list[int] = []
    for s in sorted(spans, key=lambda s: (-s.bytes, s.first)):
        k, align = at[s.buffer], max(ALIGN, s.buffer.facts.align)
        busy = np.array(done, np.int64)[~apart[k, done]] if done else np.zeros(0, np.int64)
        busy = busy[np.argsort(low[busy], kind="stable")]
        free = np.concatenate(([0], np.maximum.accumulate(-(-high[busy] // align) * align)))  # after each number of them
        fits = np.append(free[:-1] + s.bytes <= low[busy], True)
        s.offset = low[k] = int(free[np.argmax(fits)])
        high[k] = s.offset + s.bytes
        done.append(k)
    return int(high.max(initial=0))


def versioned(b: Buffer, versions: int) -> Buffer:
    """A new buffer that holds `versions` tiles of the shape of b, one after another."""
    return replace(b, shape=(versions, *b.shape), data=Var(b.name, b.data.dtype, span=b.span))


def with_versions(launch: Launch, versions: Iterable[tuple[Buffer, Buffer]]) -> Launch:
    """The launch, where the versions of a tile are disjoint from what the tile is disjoint from."""
    of: dict[Buffer, list[Buffer]] = {}
    for b, v in versions:
        of.setdefault(b, [b]).append(v)
    more = tuple(pair for a, b in launch.plan.disjoint for pair in (
        ((v, v) for v in of.get(a, ())) if a is b else product(of.get(a, [a]), of.get(b, [b]))))
    return with_options(launch, disjoint=tuple(dict.fromkeys((*launch.plan.disjoint, *more)))) if more else launch


# ---- blocks of an SM -------------------------------------------------------------------------------------------------

def resident_blocks(launch: Launch, loop: Stmt, body: Collection[Stmt], live: tuple[int, int], target: Any) -> int:
    """Blocks of an SM, at least 1; no more than the grid has for each.

    body: the statements of the loop, with fragments of tiles in flight.  live: what it needs at once (live_at_once).  Tiles
    that only the code around the loop uses share their bytes.
    """
    inside = {e.storage for s in body for e in effects(s)}
    outside = {e.storage: e.buffer for e in effects(launch.body) if e.buffer.is_static and e.storage not in inside}
    other = sum(int(b.size) * b.dtype.bits // 8 for b in outside.values() if b.scope_name in SHARED)
    registers = REGISTERS.plain_loop + live[1] + sum(int(b.size) * b.dtype.bits // 32 for b in outside.values(
        ) if b.scope_name == FRAGMENT and b.ndim > 1) // launch.num_threads
    grid = [g.value for g in map(convert, launch.grid) if isinstance(g, Const)]
    most = -(-prod(grid) // max(1, target.limits.sm_count)) if len(grid) == len(launch.grid) else target.limits.blocks_per_sm
    return max(1, min(target.limits.shared_per_sm // max(1, live[0], other), most, target.blocks_by_registers(
        registers, launch.num_threads)))


def live_at_once(items: Sequence[Item], stage: Sequence[int], order: Sequence[int], versions: Mapping[Var, int],
                 threads: int) -> tuple[int, int]:
    """(bytes of shared tiles, registers of a thread for fragments of two dimensions and more) that a steady iteration needs.

    versions: storage of tiles that are copied ahead -> how many of it.  Fragments, and such tiles, that an item replaces whole
    before others read them are live from there to the last of these; all else always is.
    """
    size = len(items)
    most = [0.0] * size, [0.0] * size
    for storage, b in {e.storage: e.buffer for x in items for e in x.effects}.items():
        shared = b.scope_name in SHARED
        if not b.is_static or not shared and (b.scope_name != FRAGMENT or b.ndim < 2):
            continue
        users = sorted((stage[i], order[i], i) for i, x in enumerate(items) if x.touches(storage))
        (late, begin, i), (last, end, _) = users[0], users[-1]
        made = not any(e.reads and e.storage is storage for e in items[i].effects) and (
            fills_whole(items[i].stmt) or isinstance(items[i].stmt, Gemm) or shared) and (
                not shared or versions.get(storage) == 1)
        lasts = min(size, (last - late) * size + end - begin + 1) if made else size
        each = int(b.size) * b.dtype.bits / (8 / versions.get(storage, 1) if shared else 32 * threads)
        for n in range(begin, begin + lasts):
            most[not shared][n % size] += each
    return int(max(most[0], default=0)), int(max(most[1], default=0))
