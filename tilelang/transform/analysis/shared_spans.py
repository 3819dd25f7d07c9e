"""Live ranges of shared buffers and their places in the bytes of shared memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product

import numpy as np

from tilelang.ir import Buffer, Launch, Var, replace, with_options
from tilelang.ir.record import state

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
        free = np.concatenate(([0], np.maximum.accumulate(-(-high[busy] // align) * align)))  # behind each number of them
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
