"""Where the threads of a block access shared memory, for the walk of barriers.py."""

from __future__ import annotations

from math import gcd, prod
from typing import Any

import numpy as np

from tilelang.ir import Buffer, Const, Expr, Launch, Ramp, Var, convert
from tilelang.ir.evaluate import evaluate
from tilelang.layout.distinct import distinct

from .numbers import Numbers

_MOST_PLACES = 1024  # recorded places of repeated accesses


class Misaligned(Exception):
    """An access starts inside a piece of shared memory."""


class Places:
    """The granules that accesses touch.

    piece: bytes of a granule when negative, else an upper limit of them.  sizes: values of the symbols in sizes and offsets.
    """

    def __init__(self, launch: Launch, buffers: list[Buffer], numbers: Numbers, piece: int, sizes: dict[Var, int]) -> None:
        self.numbers = numbers
        self.offset = {b.data: _number(at, sizes) for b, at in launch.plan.shared_offsets}
        self.size = {b.data: prod(_number(n, sizes) for n in b.shape) * b.dtype.bytes for b in buffers}
        self.granule = abs(piece)
        for b in buffers:
            self.granule = gcd(self.granule, self.offset.get(b.data, 0))
            if piece > 0:
                self.granule = gcd(self.granule, b.dtype.bytes)
        self.total = max(self.offset.get(b.data, 0) + self.size[b.data] for b in buffers)  # bytes
        self.known: dict[tuple[Any, ...], tuple[tuple[Any, Any, bool], list[Any]]] = {}

    def granules(self, b: Buffer, indices: tuple[Expr, ...] | None, width: int, mask: Any) -> tuple[Any, Any, bool]:
        """(granules, their threads, whether the addresses are exact) of an access."""
        if indices is None or len(indices) != 1:
            return self.anywhere(b)
        e = indices[0]
        if isinstance(e, Ramp):
            width = e.lanes if isinstance(e.stride, Const) and e.stride.value == 1 else 0
            e = e.base
        if not width:
            return self.anywhere(b)
        on = self.numbers.hangs_on(e)
        if on is None:
            return self.placed(b, self.numbers.value(e), width, mask)
        at = [self.numbers.env.get(v) for v in on]
        key = (b, id(e), width, b"" if mask is None else mask.tobytes(), *(x if isinstance(x, int) else id(x) for x in at))
        hit = self.known.get(key)
        if hit is None:
            if len(self.known) == _MOST_PLACES:
                self.known.clear()
            # `at` keeps alive the arrays that the key names by id
            hit = self.known[key] = self.placed(b, self.numbers.value(e), width, mask), at
        return hit[0]

    def anywhere(self, b: Buffer) -> tuple[Any, Any, bool]:
        """Any place of a buffer, accessed by any thread."""
        base = self.offset.get(b.data, 0)
        at = distinct(np.arange(base, base + self.size.get(b.data, b.dtype.bytes)) // self.granule)
        return at, np.int32(-3 if self.numbers.n > 1 else 0), False

    def placed(self, b: Buffer, first: Any, width: int, mask: Any) -> tuple[Any, Any, bool]:
        """(granules, their threads, whether exact) of `width` elements from element `first`.

        first: a number for all threads or one for each; None: unknown.
        """
        if first is None:
            return self.anywhere(b)
        base, threads = self.offset.get(b.data, 0), self.numbers.threads
        first = np.broadcast_to(np.asarray(first), self.numbers.n)
        if mask is not None:
            first, threads = first[mask], threads[mask]
        at = base + first * b.dtype.bytes
        span = max(1, width * b.dtype.bytes // self.granule)
        if (at % self.granule).any() or width * b.dtype.bytes % self.granule:
            raise Misaligned
        g = (at // self.granule)[:, None] + np.arange(span) if span > 1 else at // self.granule
        g = g.ravel()
        t = np.repeat(threads, span) if span > 1 else threads
        first_piece, size = base // self.granule, max(1, -(-self.size.get(b.data, b.dtype.bytes) // self.granule))
        ok = (g >= first_piece) & (g < first_piece + size)  # others are accesses that never happen: a guard excludes them
        return (g, t, True) if ok.all() else (g[ok], t[ok], True)


def _number(e: Any, sizes: dict[Var, int]) -> int:
    return e if isinstance(e, int) else int(evaluate(convert(e), sizes))
