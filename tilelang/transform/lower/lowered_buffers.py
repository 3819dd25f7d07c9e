"""Lowered buffers of a launch: storage, layouts, tensor maps."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from tilelang import errors
from tilelang.ir import (AddressOf, Alloc, Buffer, BufferFacts, Call, Expr, Launch, Stmt, Var, cast, const, dtype, replace, seq,
                         walk, with_options, DYNAMIC, FRAGMENT, LOCAL, SHARED)
from tilelang.layout import RowMajor, linear_layout, swizzled_layout
from tilelang.ops import AtomicTile, Copy, Gemm
from tilelang.ops.gemm.mma import padded_operands
from tilelang.ops.tma_copy import is_row
from tilelang.ops.tma_boxes import copied_tile
from tilelang.target.tensor_map import tensor_maps_of
from tilelang.target.wgmma import WGMMA_ROWS

from ..framework.pass_ import PassConfigKey, PassContext
from ..analysis.vectorize import Widths


def _read_by_hardware(launch: Launch) -> set[Var]:
    """Storage of the shared buffers that descriptors and TMA address.  It must start at a multiple of the swizzle pattern."""
    out: set[Var] = set()
    for s in walk(launch.body, Gemm, Copy, AtomicTile):
        if isinstance(s, Gemm) and s.plan.instruction in WGMMA_ROWS:
            out.update(r.buffer.data for r in (s.a, s.b) if r.buffer.scope_name in SHARED)
        elif isinstance(s, (Copy, AtomicTile)) and s.plan.tma and not (isinstance(s, Copy) and is_row(s)):
            out.add(copied_tile(s).buffer.data)
    return out


class LoweredBuffers:
    """Storage of a Launch's buffers after lowering.

    panelled: storage that descriptors and TMA address.  allocs, before: what the op being lowered asked for (scratch).
    """

    def __init__(self, cx: PassContext, launch: Launch) -> None:
        self.launch = launch
        self.layouts: dict[Buffer, Any] = dict(launch.plan.layouts)
        self.safe: dict[Buffer, Expr] = dict(launch.plan.safe_values)
        self.lowered: dict[Buffer, Buffer] = {}
        self.allocs: list[Buffer] = []
        self.before: list[Stmt] = []
        self.exchanges: dict[tuple[Any, ...], Buffer] = {}
        self.latest: dict[tuple[Any, ...], int] = {}
        self.widths = Widths(self.layout_of, int(cx.option(PassConfigKey.TL_GLOBAL_ALIGNMENT)))
        self.maps: dict[tuple[Any, ...], str] = {}  # (buffer, box, swizzle, fill, l2) -> name
        self.panelled = _read_by_hardware(launch)
        self.padded = padded_operands(launch.body, self.layout_of)
        self.aligned = alignment_by_hand(launch)

    def layout_of(self, buffer: Buffer) -> Any:
        got = self.layouts.get(buffer)
        if got is None and buffer.scope_name in SHARED and not buffer.is_static:
            got = self.layouts[buffer] = RowMajor(buffer.shape)
        if got is None:
            raise errors.InternalError(f"`{buffer.name}` ({buffer.scope_name}) has no layout: infer_layouts gives them")
        return got

    def local_of(self, buffer: Buffer) -> Buffer:
        got = self.lowered.get(buffer)
        if got is None:
            frag = self.layout_of(buffer)
            got = Buffer(buffer.name, (frag.registers,), buffer.dtype, LOCAL, data=buffer.data, facts=buffer.facts,
                         span=buffer.span)
            self.lowered[buffer] = got
        return got

    def shared_of(self, buffer: Buffer) -> Buffer:
        """The 1-D storage of a shared buffer."""
        got = self.lowered.get(buffer)
        if got is None:
            layout = self.layout_of(buffer)
            got = Buffer(buffer.name, (layout.size,), buffer.dtype, buffer.scope_name, data=buffer.data,
                         facts=buffer.facts, span=buffer.span)
            if buffer.data in self.panelled:  # the hardware swizzles bits of the address
                got = with_options(got, align=max(buffer.facts.align, 8 * layout.swizzle.bytes))
            if buffer.data in self.aligned:
                got = with_options(got, align=max(got.facts.align, self.aligned[buffer.data]))
            self.lowered[buffer] = got
        return got

    def row_of(self, buffer: Buffer) -> Buffer:
        """The array of one dimension that holds a thread's own array, row after row."""
        if buffer.ndim == 1:
            return buffer
        if buffer not in self.lowered:
            self.lowered[buffer] = replace(buffer, shape=(prod(buffer.shape),), strides_=None)
        return self.lowered[buffer]

    def new_local(self, name: str, size: int, dt: Any) -> Buffer:
        out = Buffer(name, (size,), dtype(dt), LOCAL, facts=BufferFacts(align=16))
        self.allocs.append(out)
        return out

    def new_fragment(self, name: str, layout: Any, dt: Any) -> Buffer:
        """A fresh fragment with the given layout, allocated around the op."""
        out = Buffer(name, layout.shape, dtype(dt), FRAGMENT)
        self.layouts[out] = layout
        self.allocs.append(self.local_of(out))
        return out

    def new_shared(self, name: str, shape: tuple[int, ...], dt: Any, layout: Any = None) -> Buffer:
        out = Buffer(name, shape, dtype(dt), DYNAMIC, facts=BufferFacts(scratch=True))
        dims = tuple(int(n) for n in shape)
        # A warp of an accumulator stores 8 rows of 4 lanes, two elements each: 16 or (4-byte elements) 32 bytes a row.
        chunk = 32 if out.dtype.bits == 32 else 16
        whole = len(dims) > 1 and dims[-1] * out.dtype.bits % (8 * chunk) == 0 and out.dtype.lanes == 1
        if layout is None:
            layout = swizzled_layout(dims, out.dtype.bits, chunk) if whole else linear_layout(dims)
        elif layout.swizzle is not None and layout.swizzle.bytes:
            self.panelled.add(out.data)
        self.layouts[out] = layout
        self.allocs.append(self.shared_of(out))
        return out

    def exchange(self, shape: tuple[int, ...], dt: Any, warp_role: int) -> Buffer:
        """Shared memory through which threads exchange values within one op.  Ops of one shape use two buffers alternately: the
        barrier of an op between them orders reads of one before the next writes to it.

        warp_role: each warp role has its own buffer, because its barriers do not order the other warp roles.
        """
        kind = (warp_role, shape, dtype(dt))
        self.latest[kind] = self.latest.get(kind, 1) ^ 1
        key = (*kind, self.latest[kind])
        got = self.exchanges.get(key)
        if got is None:
            got = self.exchanges[key] = Buffer("exchange", shape, dtype(dt), DYNAMIC, facts=BufferFacts(scratch=True))
            self.layouts[got] = linear_layout(tuple(int(n) for n in shape))
        return got

    def scratch(self, work: Callable[[], Stmt], span: Any = None) -> Stmt:
        """Run work, and allocate the buffers that it requests around its statements."""
        saved, self.allocs = self.allocs, []
        out = work()
        made, self.allocs = self.allocs, saved
        before, self.before = self.before, []
        return seq(*[Alloc(b) for b in made], *before, out, span=span) if made or before else out

    def tensor_map(self, buffer: Buffer, box: tuple[int, ...], swizzle: int, tf32: bool = False, row_bytes: int = 128) -> str:
        """Name of the tensor map of a global buffer for boxes of this form.

        row_bytes: contiguous bytes of the tensor that are wanted together; L2 fetches lines of up to as many.
        """
        promotion = next((n for n in (256, 128, 64) if row_bytes >= n), 0)
        key = (buffer, box, swizzle, "zero", promotion, *([True] if tf32 else []))
        if key not in self.maps:
            names = {*self.maps.values(), *(entry[0] for entry in self.launch.plan.tensor_maps)}
            base = name = f"{buffer.name}_map"
            while name in names:
                name = f"{base}_{len(names)}"
            self.maps[key] = name
        return self.maps[key]

    def safe_value(self, buffer: Buffer) -> Expr:
        """The value that a load outside buffer returns."""
        value = self.safe.get(buffer)
        if value is not None:
            return cast(value, buffer.dtype)
        if buffer.dtype.is_bool:
            return const(False, buffer.dtype)
        return cast(const(0.0 if buffer.dtype.is_float else 0, buffer.dtype.scalar), buffer.dtype)


def alignment_by_hand(launch: Launch) -> dict[Var, int]:
    """Alignment in bytes of the shared storage that a program passes to descriptors and TMA. The hardware swizzles address
    bits, and the swizzle pattern repeats after 8 rows of the swizzle's width."""
    maps = {m.name: m.swizzle for m in tensor_maps_of(launch)}
    out: dict[Var, int] = {}
    for c in walk(launch.body, Call):
        if c.op in ("wgmma_descriptor", "tma_load") and isinstance(c.args[0], AddressOf):
            swizzle = maps.get(c.options.map, 0) if c.op == "tma_load" else c.options.swizzle
            data = c.args[0].buffer.data
            out[data] = max(out.get(data, 0), 128, 8 * swizzle)
    return out
