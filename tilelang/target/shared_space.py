"""Virtual shared-memory addresses for wgmma descriptors and TMA boxes, on backends that store tiles row-major.

A descriptor contains an address in shared memory.  The reference interpreter and the CPU have no shared memory, so the buffers
whose addresses a launch uses get virtual addresses here.  Each starts at a multiple of 1024 bytes, where every swizzle repeats,
and its bytes are arranged by the layout of the program (T.annotate_layout, default row-major).  The backend stores the tile
row-major; `Placed.inverse` maps from the layout to the row-major tile.  The first 1024 bytes are unused, so that an
uninitialised descriptor refers to no buffer.

    address -> Placed, byte in the layout -> table of units -> byte in the row-major tile
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Alloc, Buffer, Call, Expr, Launch, Var, binary, cast, const, convert, walk, SHARED
from tilelang.ir.record import record
from tilelang.layout import Layout, view_layout

START = 1024  # the first address, and the alignment of every buffer, in bytes
LIMIT = 1 << 18  # end of the addresses that the 14 bits of a descriptor can express
UNIT = 16  # bytes that swizzles and TMA never split
NAMING = ("wgmma_descriptor", "tma_load")  # calls whose first operand is a shared-memory address

MakeError = Callable[[str, Any], Exception]


@record
class Placed:
    """A shared buffer with a virtual address.

    buffer: the allocated buffer.  start: its address in bytes.  nbytes: size of the tile in its layout.  layout: None for
    row-major.
    """

    buffer: Buffer
    start: int
    nbytes: int
    layout: Layout | None

    @property
    def item(self) -> int:
        """Size of an element in bytes."""
        return int(self.buffer.dtype.bytes)

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @cached_property
    def inverse(self) -> tuple[int, np.ndarray]:
        """(bytes of a unit, int64[units]: for each unit in the layout the number of the unit in the row-major tile).

        -1: no element (padding).  A unit has 16 bytes, or fewer if the layout splits 16-byte units.
        """
        if self.layout is None:
            return UNIT, np.arange(-(-self.nbytes // UNIT))
        back = np.full(self.layout.size, -1, np.int64)
        back[self.layout.table().ravel()] = np.arange(math.prod(self.layout.shape))
        item = self.item
        if item > UNIT:
            k = item // UNIT
            more = back[:, None] * k + np.arange(k)
            return UNIT, np.where(back[:, None] < 0, -1, more).ravel()
        for k in (n for n in (16, 8, 4, 2) if n * item <= UNIT and len(back) % n == 0):
            rows = back.reshape(-1, k)
            first = rows[:, :1]
            if ((first < 0) & (rows < 0) | (first >= 0) & (first % k == 0) & (rows == first + np.arange(k))).all():
                return k * item, np.where(first < 0, -1, first // k).ravel()
        return item, back

    @cached_property
    def period(self) -> tuple[int, int, np.ndarray]:
        """(bytes of a unit, period p of the table in units, its first p entries): table[i + p] == table[i] + p."""
        unit, table = self.inverse
        n = len(table)
        for p in (d for d in range(1, n) if n % d == 0):
            if (table[:p] >= 0).all() and (table[p:] == table[:-p] + p).all():
                return unit, p, table[:p]
        return unit, n, table

    def rows(self, offsets: np.ndarray) -> np.ndarray:
        """Byte offsets in the row-major tile for byte offsets in the layout; -1 where there is no element."""
        if self.layout is None:
            return offsets
        unit, table = self.inverse
        at = table[offsets // unit]
        return np.where(at < 0, -1, at * unit + offsets % unit)

    def address(self, b: Buffer, indices: tuple[Expr, ...]) -> Expr:
        """The virtual address of an element of b, a Buffer that uses the storage of this one."""
        size = int(b.dtype.bytes)
        if self.layout is None:
            element = convert(b.offset)
            for i, s in zip(indices, b.strides):
                element = element + cast(convert(i), "int64") * convert(s)
        else:
            layout = self.layout if b is self.buffer else view_layout(self.layout, self.buffer, b)
            element = convert(layout.offset(indices))
        return binary("add", binary("mul", cast(element, "int64"), const(size, "int64")), const(self.start, "int64"))


@record
class SharedSpace:
    """The buffers of a launch that have virtual addresses, in the order of the addresses."""

    placed: tuple[Placed, ...]

    def of(self, data: Var) -> Placed:
        """The entry for a storage variable."""
        return next(p for p in self.placed if p.buffer.data is data)

    def holding(self, address: int) -> Placed | None:
        """The entry whose buffer contains an address, None if there is none."""
        return next((p for p in self.placed if p.start <= address < p.end), None)


def named_storage(launch: Launch) -> dict[Var, Call]:
    """Storage variables whose shared-memory address a launch uses -> the first call that uses it."""
    out: dict[Var, Call] = {}
    for n in walk(launch.body):
        if isinstance(n, Call) and n.op in NAMING and n.args and isinstance(n.args[0], AddressOf):
            out.setdefault(n.args[0].buffer.data, n)
    return out


def shared_space(launch: Launch, make_error: MakeError) -> SharedSpace:
    """Assign virtual addresses to the shared buffers of a launch that descriptors and TMA boxes refer to.

    Raises make_error(why, span) for a buffer of run-time size, for a layout given only to a view, and if the buffers exceed
    LIMIT.
    """
    named = named_storage(launch)
    made = {n.buffer.data: n.buffer for n in walk(launch.body, Alloc)} if named else {}
    layouts = [(b, x) for b, x in launch.plan.layouts if b.data in named]
    at, out = START, []
    for data, where in named.items():
        b = made.get(data)
        if b is None or b.scope_name not in SHARED or not b.is_static:
            name = where.args[0].buffer.name  # type: ignore[attr-defined]
            raise make_error(f"the address of `{name}`, which is no shared buffer of constant shape of this kernel", where.span)
        given = next((x for v, x in layouts if v is b), None)
        if given is None and any(v.data is data for v, _ in layouts):
            raise make_error(f"a layout of a view of `{b.name}`: annotate the buffer that was allocated", where.span)
        if given is not None and tuple(given.shape) != tuple(b.shape):
            raise make_error(f"a layout of shape {tuple(given.shape)} for `{b.name}` of shape {tuple(b.shape)}", where.span)
        nbytes = (b.size if given is None else given.size) * b.dtype.bytes
        out.append(Placed(b, at, nbytes, given))
        at = -(-(at + nbytes) // START) * START
    if at > LIMIT:
        raise make_error(f"{at - START} bytes of shared memory named by descriptors: their addresses end at {LIMIT}",
                     next(iter(named.values())).span)
    return SharedSpace(tuple(out))
