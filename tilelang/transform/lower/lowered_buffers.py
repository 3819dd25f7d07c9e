"""Lowered buffers of a launch: storage, layouts, tensor maps, guards, ranges of variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang import errors
from tilelang.arith import Analyzer, known_divisor
from tilelang.ir import (Alloc, Buffer, Call, Expr, Func, Launch, Load, Ramp, Stmt, Var, cast, const, contains, convert, dtype,
                         fresh, seq, substitute, walk, with_options, BufferFacts, DYNAMIC, FRAGMENT, GLOBAL, LOCAL, SHARED)
from tilelang.layout import RowMajor, linear_layout, swizzled_layout
from tilelang.ops import AtomicTile, Copy, Gemm
from tilelang.ops.distribute import conjunction
from tilelang.ops.gemm.mma import padded_operands
from tilelang.ops.tma_copy import is_row
from tilelang.ops.tma_store import PANEL, copied_tile
from tilelang.target.wgmma import WGMMA_ROWS

from ..framework.config import PassConfigKey
from ..analysis.distributed_loop import Loop
from ..analysis.guards import bounds_guard, tile_indices
from ..legalize.hopper_features import hopper
from ..framework.pass_ import PassContext
from ..analysis.assumptions import promised
from ..legalize.raw_hopper import alignment_by_hand
from .tma_stores import TmaStores
from ..analysis.vectorize import Widths

GROUP = 128  # threads of a warp group


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
    """Storage of a Launch's buffers after lowering, and known facts about indices into them.

    analyzer: ranges known here.  divisors: known divisors of bound variables.  loop: the distributed loop being
    lowered.
    """

    def __init__(self, func: Func, cx: PassContext, launch: Launch, panels: int = 0, width: int = PANEL) -> None:
        self.cx, self.target, self.launch = cx, cx.target, launch
        self.num_threads = launch.num_threads
        x, y, z = launch.threads
        self.thread: Var = launch.thread_vars[0] if y == z == 1 else fresh("tid")
        self.layouts: dict[Buffer, Any] = dict(launch.plan.layouts)
        self.safe: dict[Buffer, Expr] = dict(launch.plan.safe_values)
        self.analyzer, self.divisors = promised(func)
        self.loop: Loop | None = None
        self.group: Var | None = None  # the warp group's index, once it was requested
        self.in_role = False
        # role: number of the warp role being lowered, 0 for code of all threads; roles: number seen so far
        self.role = self.roles = 0
        self.lowered: dict[Buffer, Buffer] = {}
        self.allocs: list[Buffer] = []
        self.before: list[Stmt] = []
        self.exchanges: dict[tuple[Any, ...], Buffer] = {}
        self.widths = Widths(self.layout_of, int(cx.option(PassConfigKey.TL_GLOBAL_ALIGNMENT)))
        self.maps: dict[tuple[Any, ...], str] = {}  # (buffer, box, swizzle, fill, l2) -> name
        self.panelled = _read_by_hardware(launch)
        self.padded = padded_operands(launch.body, self.layout_of)
        self.aligned = alignment_by_hand(launch)
        self.stores = TmaStores(launch, hopper(cx).tma, panels, hopper(cx).strides, width)
        self.guarded = not cx.option(PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS)
        for v, n in zip(launch.thread_vars, launch.threads):
            self.analyzer = self.analyzer.bind(v, 0, n - 1)
        self.analyzer = self.analyzer.bind(self.thread, 0, self.num_threads - 1)
        for v, g in zip(launch.block_vars, launch.grid):
            hi = self.analyzer.interval(g)[1]
            self.analyzer = self.analyzer.bind(v, 0, None if hi is None else max(hi - 1, 0))

    def expr(self, e: Expr) -> Expr:
        """The expression e with every access in its lowered form."""
        raise NotImplementedError

    def fragment(self, buffer: Buffer, indices: tuple[Expr, ...], is_write: bool,
                 span: Any = None) -> tuple[Buffer, tuple[Expr, ...]]:
        """The register of a fragment element that this thread holds."""
        raise NotImplementedError

    # ---- buffers ----------------------------------------------------------------------------------------------------

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

    def physical(self, buffer: Buffer, indices: tuple[Expr, ...]) -> tuple[Buffer, tuple[Expr, ...]]:
        if buffer.scope_name in SHARED:
            if self.loop is not None and self.loop.values:
                # The offset shows its loop-invariant terms only when it is expressed in the thread and the loop variables.
                indices = tuple(substitute(i, self.loop.values) for i in indices)
            indices = tile_indices(indices)
            last = indices[-1] if indices else None
            if isinstance(last, Ramp):  # one aligned run (see _pieces): contiguous in storage too
                first = self.analyzer.simplify(convert(self.layout_of(buffer).offset((*indices[:-1], last.base))))
                one = const(1, first.dtype)
                return self.shared_of(buffer), (Ramp(first, one, last.lanes, first.dtype.with_lanes(last.lanes)),)
            at = self.layout_of(buffer).offset(indices)
            return self.shared_of(buffer), (self.analyzer.simplify(at) if isinstance(at, Expr) else const(int(at)),)
        if buffer.scope_name == FRAGMENT:
            return self.fragment(buffer, indices, False)
        return buffer, indices

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
        out = Buffer(name, shape, dtype(dt), DYNAMIC)
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

    def exchange(self, shape: tuple[int, ...], dt: Any) -> Buffer:
        """Shared memory through which threads exchange values within one op.  Ops of one shape reuse the same buffer.

        Each warp role has its own buffer, because its barriers do not order the other warp roles.
        """
        key = (self.role, shape, dtype(dt))
        got = self.exchanges.get(key)
        if got is None:
            got = self.exchanges[key] = Buffer("exchange", shape, dtype(dt), DYNAMIC)
            self.layouts[got] = linear_layout(tuple(int(n) for n in shape))
        return got

    def scratch(self, work: Callable[[], Stmt], span: Any = None) -> Stmt:
        """Run work, and allocate the buffers that it requests around its statements."""
        saved, self.allocs = self.allocs, []
        out = work()
        made, self.allocs = self.allocs, saved
        before, self.before = self.before, []
        return seq(*[Alloc(b) for b in made], *before, out, span=span) if made or before else out

    def tensor_map(self, buffer: Buffer, box: tuple[int, ...], swizzle: int, tf32: bool = False,
                   row_bytes: int = 128) -> str:
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

    def prepend(self, s: Stmt) -> None:
        """Add a statement that runs before those of the op being lowered."""
        self.before.append(s)

    def vector_width(self, buffer: Buffer, start: tuple[Any, ...], elements: int) -> int:
        """Elements per vector of an access to `elements` neighbours that start at these indices (Widths.run_width)."""
        return self.widths.run_width(buffer, tuple(map(convert, start)), elements, self.analyzer, self.divisors)

    def simplified(self, es: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """The expressions, simplified by the facts known here."""
        return tuple(self.analyzer.simplify(e) for e in es)

    def safe_value(self, buffer: Buffer) -> Expr:
        """The value that a load outside buffer returns."""
        value = self.safe.get(buffer)
        if value is not None:
            return cast(value, buffer.dtype)
        if buffer.dtype.is_bool:
            return const(False, buffer.dtype)
        return cast(const(0.0 if buffer.dtype.is_float else 0, buffer.dtype.scalar), buffer.dtype)

    def has_safe_value(self, buffer: Buffer) -> bool:
        return buffer in self.safe

    def guard(self, buffer: Buffer, indices: tuple[Expr, ...], width: int = 1, inside: bool = False) -> Expr | None:
        """Lowered condition that an access of `width` elements lies inside a global buffer.

        None: that is proven, or the buffer needs no guard.  indices: as in the tile program.  inside: the upper end of the last
        dimension was tested already.
        """
        cond = self._tile_guard(buffer, indices, width, inside)
        # The indices may read buffers; up to here those are fragments and tiles of the tile program.
        return None if cond is None else self.expr(cond)

    def _tile_guard(self, buffer: Buffer, indices: tuple[Expr, ...], width: int, inside: bool) -> Expr | None:
        if buffer.scope_name != GLOBAL or not self.guarded:
            return None
        if width > 1 and (inside or known_divisor(buffer.shape[-1], self.divisors, self.analyzer) % width):
            # The vectoriser chose this width because it proved the last dimension's upper end, or because a run-time test
            # checks it.  A vector starts at a multiple of its width, so it lies entirely below 0 or not at all.
            low = None if self.analyzer.can_prove(indices[-1] >= 0) else indices[-1] >= 0
            return conjunction(low, bounds_guard(self.analyzer, buffer.shape, indices, buffer.ndim - 1))
        return bounds_guard(self.analyzer, buffer.shape, indices)

    # ---- ranges -----------------------------------------------------------------------------------------------------

    def bind_range(self, var: Var, value: Expr, divisor: int = 1) -> None:
        """Record the range and divisor of a variable that equals value."""
        if var.dtype.is_int and var.dtype.lanes == 1:
            lo, hi = self.analyzer.interval(value)
            self.analyzer = self.analyzer.bind(var, lo, hi)
            known = known_divisor(value, self.divisors, self.analyzer)
            self.divisors[var] = known if known == 0 or known % divisor == 0 else divisor

    def analyzer_for(self, vars: tuple[Var, ...], extents: tuple[Any, ...]) -> Analyzer:
        """The analyzer that also knows the ranges of these loops."""
        out = self.analyzer
        for v, n in zip(vars, extents):
            out = out.bind(v, 0, n - 1 if isinstance(n, int) else None)
        return out

    def under(self, cond: Expr, holds: bool, work: Callable[[], Any]) -> Any:
        """The result of work(), run with the knowledge that cond holds (or does not)."""
        saved = self.analyzer
        if cond.dtype.is_bool and cond.dtype.lanes == 1 and not contains(cond, Load, Call):
            self.analyzer = saved.assuming(cond, holds)
        try:
            return work()
        finally:
            self.analyzer = saved
