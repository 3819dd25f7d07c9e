"""Live ranges of shared buffers and their places in the bytes of shared memory."""

from __future__ import annotations

from collections.abc import Collection

from tilelang.ir import Buffer
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


def place(spans: list[Span], pairs: Collection[tuple[Buffer, Buffer]]) -> int:
    """Place by first fit, largest buffer first; returns the bytes needed.  pairs: buffers that may share bytes."""
    done: list[Span] = []
    for s in sorted(spans, key=lambda s: (-s.bytes, s.first)):
        align = max(ALIGN, s.buffer.facts.align)
        busy = sorted((d.offset, d.offset + d.bytes) for d in done
                      if (d.buffer, s.buffer) not in pairs and (s.buffer, d.buffer) not in pairs)
        at = 0
        for low, high in busy:
            if at + s.bytes <= low:
                break
            at = max(at, -(-high // align) * align)
        s.offset = at
        done.append(s)
    return max((s.offset + s.bytes for s in spans), default=0)


__all__ = ["Span", "place"]
