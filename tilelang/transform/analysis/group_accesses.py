"""Tells whether accesses of shared memory meet between threads of different warp groups, by lines of 128 bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, Expr, Var, const
from tilelang.target.warp_groups import PER_GROUP, WARP_LANES
from tilelang.target.wgmma import WGMMA_ROWS, encode_descriptor, operand_addresses

from .access_table import Reach, Tables
from .access_values import Evaluation, Unknown
from .accesses import Access, Loop, Matrix, Relation

GROUP = PER_GROUP * WARP_LANES
_LINE = 128  # bytes: swizzling stays within a line, and wgmma reads whole rows of a line's width


class GroupTables:
    """Answers like Tables, for conflicts between threads of different warp groups only.

    The lines of an access are those of all iterations of its loops.  Where they are not known, the groups count as meeting.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables, self.divergence, self.sharing = tables, tables.divergence, tables.sharing
        self.num_threads, self.thread = tables.num_threads, tables.thread
        self.binds: dict[Var, Expr] = {v: e.args[0] if isinstance(e, Call) and e.op == "warp_uniform" else e
                                       for v, e in tables.binds.items()}
        self.known: dict[Access, list[int] | None] = {}

    def collide(self, a: Access, b: Access, how: Relation) -> bool:
        """Whether threads of different warp groups may access one element, at least one writing."""
        return self.tables.collide(a, b, how) and self.meet(a, b)

    def meet(self, a: Access, b: Access) -> bool:
        """Whether a line of one group is also one of another group."""
        if a.buffer.data is not b.buffer.data:
            return True
        one, two = self.lines(a), self.lines(b)
        return one is None or two is None or any(x & y for g, x in enumerate(one) for h, y in enumerate(two) if g != h)

    def rotates(self, loop: Loop, accesses: list[Access]) -> bool:
        return self.tables.rotates(loop, accesses)

    def reach(self, a: Access) -> Reach | None:
        return self.tables.reach(a)

    def vars_of(self, e: Expr) -> frozenset[Var]:
        return self.tables.vars_of(e)

    def period(self, v: Var, accesses: tuple[Access, ...]) -> int | None:
        return self.tables.period(v, accesses)

    def lines(self, a: Access) -> list[int] | None:
        """Per warp group the lines from the start of the storage, as bits; None if they are not known."""
        if a not in self.known:
            try:
                self.known[a] = self._lines(a)
            except Unknown:
                self.known[a] = None
        return self.known[a]

    def _lines(self, a: Access) -> list[int]:
        b, size = a.buffer, a.buffer.dtype.bits * a.buffer.dtype.lanes // 8
        if not a.is_shared or b.ndim != 1 or b.offset != 0 or not size:
            raise Unknown
        indices = a.indices if a.matrix is None else (_start(a.matrix, size),)
        if indices is None:
            raise Unknown
        got = Evaluation(self, replace(a, indices=indices), {}, frozenset()).footprint()
        if got.terms[0]:
            raise Unknown
        keys: Any = np.asarray(got.keys[0]).astype(np.int64)
        on = np.ones(keys.shape, bool) if got.mask is None else got.mask
        out = []
        for g in range(0, self.num_threads, GROUP):
            starts = np.unique(keys[g:g + GROUP][on[g:g + GROUP]])
            if a.matrix is None:
                first, last = starts * size // _LINE, (starts * size + a.width * size - 1) // _LINE
                lines = [n for x, y in set(zip(first.tolist(), last.tolist())) for n in range(x, y + 1)]
            else:
                lines = [n for x in starts for n in _operand(a.matrix, int(x))]
            if any(n < 0 for n in lines):
                raise Unknown
            out.append(sum(1 << n for n in set(lines)))
        return out


def _start(m: Matrix, size: int) -> Expr:
    """The byte where an operand of wgmma starts in its storage."""
    at: Any = m.descriptor.args[0]
    if not isinstance(at, AddressOf) or len(at.indices) != 1:
        raise Unknown
    more = m.descriptor.args[1] if len(m.descriptor.args) > 1 else const(0)
    start: Expr = at.indices[0] * size + more + m.descriptor.options.offset
    return start


def _operand(m: Matrix, start: int) -> list[int]:
    """The lines that an operand touches."""
    row, o, left = WGMMA_ROWS[m.call.options.row], m.descriptor.options, m.call.args[1] is m.descriptor
    major = m.call.options.a_major if left else m.call.options.b_major
    extent, dt = (64, row.a_dtype) if left else (row.shape[1], row.b_dtype)
    base = start // 1024 * 1024  # a descriptor holds 18 bits of an address
    at = operand_addresses(encode_descriptor(start - base, o.lbo, o.sbo, o.swizzle), major, extent, -(-dt.bits // 8))
    return [int(n) for n in np.unique((at + base) // _LINE)]
