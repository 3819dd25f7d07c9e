"""Tile operations and parallel loops become the program of one thread.

    S = alloc_shared((64, 32))                    S: shared[2048]  (physical elements of S's layout)
    F = alloc_fragment((64, 32))                  F: local[16]     (this thread's registers)
    copy(A[by*64, bx*32], S)               →      for r in unroll(4): cp_async / vector load and store, guarded
    for i, j in Parallel(64, 32):                 for r in unroll(16): F[r] = F[r] * 2
        F[i, j] = F[i, j] * 2

Needs the layouts of infer_layouts.  Leaves block barriers to place_sync.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang import errors
from tilelang.arith import Analyzer, known_divisor
from tilelang.ir import (AddressOf, Alloc, Bind, Break, Buffer, Call, Const, Continue, Evaluate, Expr, For, Func, If,
                         Launch, Load, Parallel, Ramp, Select, Seq, Shuffle, Stmt, Store, TileOp, Var, While, binary, call,
                         cast, const, convert, dtype, fresh, load, rebuild, replace, seq, substitute, walk, with_attrs)
from tilelang.ir.verify import THREADS_BOUND, TILE
from tilelang.layout import RowMajor, linear_layout, swizzled_layout
from tilelang.ops import AtomicTile, Copy, Gemm
from tilelang.ops.distribute import Distribution, conjunction
from tilelang.ops.gemm.mma import padded_operands
from tilelang.ops.tma_copy import is_row
from tilelang.ops.tma_store import moved_tile
from tilelang.target.wgmma import WGMMA_ROWS

from .config import PassConfigKey
from .distributed_loop import Loop
from .guards import bounds_guard, tile_indices, vector_lanes_of
from .hopper import hopper
from .lower_parallel import lower_loop, private_loop, run_loop
from .pass_ import PassContext, pass_
from .plan_shared_memory import planned_bytes
from .promises import promised
from .raw_hopper import alignment_by_hand
from .tma_stores import TmaStores
from .vector_lanes import scalar_async
from .vectorize import Widths

SHARED = ("shared", "shared.dyn")
GROUP = 128  # threads of a warp group


@pass_(needs=TILE, gives=THREADS_BOUND)
def lower_tile_ops(func: Func, cx: PassContext) -> Func:
    """Lower every Launch of func; host statements stay as they are.

    Keeps: each element of each tile op is computed by its owners and written to memory once; accesses of global memory
    outside a buffer read the safe value and write nothing.
    """

    def visit(s: Any) -> Any:
        if isinstance(s, Launch):
            return _lowered(func, cx, s)
        return rebuild(s, visit) if isinstance(s, Stmt) else tuple(map(visit, s)) if isinstance(s, tuple) else s

    return replace(func, body=visit(func.body))


def _lowered(func: Func, cx: PassContext, launch: Launch) -> Stmt:
    """The launch with as much staging for stores by TMA as shared memory has room for; a second panel does not cost a
    multiprocessor one of its blocks."""
    limit = getattr(cx.target, "max_shared_bytes", None)
    alone = any(isinstance(x, Call) and x.op == "set_max_nreg" for x in walk(launch.body))  # its registers fill one
    for panels in (2, 1):
        lowering = Lowering(func, cx, launch, panels)
        out = lowering.launch_stmt()
        staging = sum(b.size * b.dtype.bytes for b in lowering.stores.stages.values())
        if not staging or limit is None:
            return out
        total, whole = planned_bytes(out, cx), cx.target.limits.shared_per_sm
        reserved = 1024  # by the system, in every block
        kept = whole // (total + reserved) == whole // (total - staging // 2 + reserved)
        if total <= limit and (panels == 1 or alone or kept):
            return out
    return Lowering(func, cx, launch, 0).launch_stmt()


def _read_by_hardware(launch: Launch) -> set[Var]:
    """Storage of shared buffers that descriptors and TMA address: it starts where the swizzle pattern does."""
    out: set[Var] = set()
    for s in walk(launch.body):
        if isinstance(s, Gemm) and s.attr("instruction", "") in WGMMA_ROWS:
            out.update(r.buffer.data for r in (s.a, s.b) if r.buffer.scope_name in SHARED)
        elif isinstance(s, (Copy, AtomicTile)) and s.attr("tma") and not (isinstance(s, Copy) and is_row(s)):
            out.add(moved_tile(s).buffer.data)
    return out


class Lowering:
    """The lowering of one Launch; implements ops.base.LowerContext.

    analyzer: ranges known here.  divisors: known divisors of bound variables.  loop: the distributed loop being
    lowered.
    """

    def __init__(self, func: Func, cx: PassContext, launch: Launch, panels: int = 0) -> None:
        self.cx, self.target, self.launch = cx, cx.target, launch
        self.num_threads = launch.num_threads
        x, y, z = launch.threads
        self.thread: Var = launch.thread_vars[0] if y == z == 1 else fresh("tid")
        self.layouts: dict[Buffer, Any] = dict(launch.attr("layouts", ()))
        self.safe: dict[Buffer, Expr] = dict(launch.attr("safe_values", ()))
        self.analyzer, self.divisors = promised(func)
        self.loop: Loop | None = None
        self.group: Var | None = None  # the warp group, when it was asked for
        self.in_role = False
        self.role = self.roles = 0  # number of the role being lowered, 0 for what all threads run; roles met so far
        self.lowered: dict[Buffer, Buffer] = {}
        self.allocs: list[Buffer] = []
        self.before: list[Stmt] = []
        self.exchanges: dict[tuple[Any, ...], Buffer] = {}
        self.widths = Widths(self.layout_of, int(cx.option(PassConfigKey.TL_GLOBAL_ALIGNMENT)))
        self.maps: dict[tuple[Any, ...], str] = {}  # (buffer, box, swizzle, fill, l2) -> name
        self.panelled = _read_by_hardware(launch)
        self.padded = padded_operands(launch.body, self.layout_of)
        self.aligned = alignment_by_hand(launch)
        self.stores = TmaStores(launch, hopper(cx).tma, panels, hopper(cx).strides)
        self.guarded = not cx.option(PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS)
        for v, n in zip(launch.thread_vars, launch.threads):
            self.analyzer = self.analyzer.bind(v, 0, n - 1)
        self.analyzer = self.analyzer.bind(self.thread, 0, self.num_threads - 1)
        for v, g in zip(launch.block_vars, launch.grid):
            hi = self.analyzer.interval(g)[1]
            self.analyzer = self.analyzer.bind(v, 0, None if hi is None else max(hi - 1, 0))

    # ---- the launch -----------------------------------------------------------------------------------------------

    def launch_stmt(self) -> Launch:
        body = self.stores.part(0, self.thread, lambda: self._grouped(self.launch.body))
        body = seq(*[Alloc(self.shared_of(b)) for b in self.exchanges.values()], *self.stores.allocs(), body)
        if self.thread is not self.launch.thread_vars[0]:
            x, y, _ = self.launch.threads
            tx, ty, tz = self.launch.thread_vars
            body = seq(Bind(self.thread, tx + ty * x + tz * (x * y)), body)
        body = seq(*self._prefetched(), body)
        maps = (*self.launch.attr("tensor_maps", ()), *((name, *key) for key, name in self.maps.items())) or None
        report = (*self.launch.attr("report", ()), *self.stores.reports) or None
        return with_attrs(replace(self.launch, body=body), layouts=None, tensor_maps=maps, compute_threads=None,
                          report=report)

    def _prefetched(self) -> list[Stmt]:
        """One thread has the descriptors fetched while the others begin."""
        if not self.maps:
            return []
        first = self.launch.thread_vars[0]
        fetch = [Evaluate(call("tma_prefetch", (), "void", map=name)) for name in self.maps.values()]
        return [If(binary("eq", first, const(0, first.dtype)), seq(*fetch))]

    # ---- buffers --------------------------------------------------------------------------------------------------

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
            got = Buffer(buffer.name, (frag.registers,), buffer.dtype, "local", data=buffer.data, attrs=buffer.attrs,
                         span=buffer.span)
            self.lowered[buffer] = got
        return got

    def shared_of(self, buffer: Buffer) -> Buffer:
        """The 1-D storage of a shared buffer."""
        got = self.lowered.get(buffer)
        if got is None:
            layout = self.layout_of(buffer)
            got = Buffer(buffer.name, (layout.size,), buffer.dtype, buffer.scope_name, data=buffer.data,
                         attrs=buffer.attrs, span=buffer.span)
            if buffer.data in self.panelled:  # the hardware swizzles bits of the address
                got = with_attrs(got, align=max(int(buffer.attr("align", 0) or 0), 8 * layout.swizzle.bytes))
            if buffer.data in self.aligned:
                got = with_attrs(got, align=max(int(got.attr("align", 0) or 0), self.aligned[buffer.data]))
            self.lowered[buffer] = got
        return got

    def physical(self, buffer: Buffer, indices: tuple[Expr, ...]) -> tuple[Buffer, tuple[Expr, ...]]:
        if buffer.scope_name in ("shared", "shared.dyn"):
            if self.loop is not None and self.loop.values:
                # The offset shows its invariant parts only in terms of the thread and the loops.
                indices = tuple(substitute(i, self.loop.values) for i in indices)
            indices = tile_indices(indices)
            last = indices[-1] if indices else None
            if isinstance(last, Ramp):  # one aligned run (see _pieces): contiguous in storage too
                first = self.analyzer.simplify(convert(self.layout_of(buffer).offset((*indices[:-1], last.base))))
                one = const(1, first.dtype)
                return self.shared_of(buffer), (Ramp(first, one, last.lanes, first.dtype.with_lanes(last.lanes)),)
            at = self.layout_of(buffer).offset(indices)
            return self.shared_of(buffer), (self.analyzer.simplify(at) if isinstance(at, Expr) else const(int(at)),)
        if buffer.scope_name == "local.fragment":
            return self._fragment(buffer, indices, False)
        return buffer, indices

    def new_local(self, name: str, size: int, dt: Any) -> Buffer:
        out = Buffer(name, (size,), dtype(dt), "local", attrs=(("align", 16),))
        self.allocs.append(out)
        return out

    def new_fragment(self, name: str, layout: Any, dt: Any) -> Buffer:
        """A fresh fragment of that layout, allocated around the op."""
        out = Buffer(name, layout.shape, dtype(dt), "local.fragment")
        self.layouts[out] = layout
        self.allocs.append(self.local_of(out))
        return out

    def new_shared(self, name: str, shape: tuple[int, ...], dt: Any, layout: Any = None) -> Buffer:
        out = Buffer(name, shape, dtype(dt), "shared.dyn")
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
        """Shared memory for values that threads hand to each other within one op: ops of one shape take turns in it.

        Each role has its own: its barriers order nobody else's turns.
        """
        key = (self.role, shape, dtype(dt))
        got = self.exchanges.get(key)
        if got is None:
            got = self.exchanges[key] = Buffer("exchange", shape, dtype(dt), "shared.dyn")
            self.layouts[got] = linear_layout(tuple(int(n) for n in shape))
        return got

    def scratch(self, work: Callable[[], Stmt], span: Any = None) -> Stmt:
        """Run work, with the buffers it asks for allocated around its statements."""
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
            names = {*self.maps.values(), *(entry[0] for entry in self.launch.attr("tensor_maps", ()))}
            base = name = f"{buffer.name}_map"
            while name in names:
                name = f"{base}_{len(names)}"
            self.maps[key] = name
        return self.maps[key]

    def prepend(self, s: Stmt) -> None:
        """A statement to run before those of the op being lowered."""
        self.before.append(s)

    def contiguous_width(self, buffer: Buffer) -> int:
        """Elements of a shared buffer's aligned runs along its last dimension that are contiguous in storage."""
        return self.widths.shared_width(buffer)

    def alignment(self, buffer: Buffer) -> int:
        """Bytes that the start of a global buffer is known to be a multiple of."""
        return self.widths.aligned(buffer)

    def divisor(self, e: Expr) -> int:
        """An integer known to divide e; 0 for zero."""
        return known_divisor(e, self.divisors, self.analyzer)

    def simplified(self, es: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """The expressions, shortened by what is known here."""
        return tuple(self.analyzer.simplify(e) for e in es)

    def safe_value(self, buffer: Buffer) -> Expr:
        """What a load outside buffer gives."""
        value = self.safe.get(buffer)
        if value is not None:
            return cast(value, buffer.dtype)
        if buffer.dtype.is_bool:
            return const(False, buffer.dtype)
        return cast(const(0.0 if buffer.dtype.is_float else 0, buffer.dtype.scalar), buffer.dtype)

    def has_safe_value(self, buffer: Buffer) -> bool:
        return buffer in self.safe

    def guard(self, buffer: Buffer, indices: tuple[Expr, ...], width: int = 1, inside: bool = False) -> Expr | None:
        """Condition, lowered, for an access of `width` elements from indices (as they stand in the tile program) to be
        inside a global buffer; None: proven, or not a buffer that is guarded.  inside: the last dimension's upper end
        was tested already."""
        cond = self._tile_guard(buffer, indices, width, inside)
        # Indices may read buffers: those are fragments and tiles of the tile program until here.
        return None if cond is None else self.expr(cond)

    def _tile_guard(self, buffer: Buffer, indices: tuple[Expr, ...], width: int, inside: bool) -> Expr | None:
        if buffer.scope_name != "global" or not self.guarded:
            return None
        if width > 1 and (inside or known_divisor(buffer.shape[-1], self.divisors, self.analyzer) % width):
            # Widths gave this width because it proved the last dimension's upper end, or a run-time test does.  A vector
            # starts at a multiple of its width, so all of it lies below 0 or none.
            low = None if self.analyzer.can_prove(indices[-1] >= 0) else indices[-1] >= 0
            return conjunction(low, bounds_guard(self.analyzer, buffer.shape, indices, buffer.ndim - 1))
        return bounds_guard(self.analyzer, buffer.shape, indices)

    # ---- ranges ---------------------------------------------------------------------------------------------------

    def bind_range(self, var: Var, value: Expr, divisor: int = 1) -> None:
        """Learn the range and divisor of a variable that equals value."""
        if var.dtype.is_int and var.dtype.lanes == 1:
            lo, hi = self.analyzer.interval(value)
            self.analyzer = self.analyzer.bind(var, lo, hi)
            known = known_divisor(value, self.divisors, self.analyzer)
            self.divisors[var] = known if known == 0 or known % divisor == 0 else divisor

    def analyzer_for(self, vars: tuple[Var, ...], extents: tuple[Any, ...]) -> Analyzer:
        """The analyzer that knows these loop ranges too."""
        out = self.analyzer
        for v, n in zip(vars, extents):
            out = out.bind(v, 0, n - 1 if isinstance(n, int) else None)
        return out

    def under(self, cond: Expr, holds: bool, work: Callable[[], Any]) -> Any:
        """work(), knowing that cond holds (or does not)."""
        saved = self.analyzer
        if cond.dtype.is_bool and cond.dtype.lanes == 1 and not any(isinstance(x, (Load, Call)) for x in walk(cond)):
            self.analyzer = saved.assuming(cond, holds)
        try:
            return work()
        finally:
            self.analyzer = saved

    # ---- statements -----------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt) -> Stmt:
        """One thread's statements for s."""
        match s:
            case Seq():
                return seq(*[self.stmt(x) for x in s.stmts], span=s.span)
            case Alloc():
                return self._alloc(s)
            case Bind():
                value = self.expr(s.value)
                self.bind_range(s.var, s.value)
                return s if value is s.value else replace(s, value=value)
            case Store():
                return self._store(s)
            case If() if isinstance(s.cond, Call) and s.cond.op == "in_warp_groups":
                return self._roles(s)
            case If():
                then = self.under(s.cond, True, lambda: self.stmt(s.then))
                no = s.orelse
                orelse = None if no is None else self.under(s.cond, False, lambda: self.stmt(no))
                return replace(s, cond=self.expr(s.cond), then=then, orelse=orelse)
            case For():
                if s.kind == "vectorized":
                    return self._vectorized(s)
                return self.loop_stmt(s, self.stmt)
            case While():
                return replace(s, cond=self.expr(s.cond), body=self.stores.inside(s, lambda: self.stmt(s.body)))
            case Parallel():
                extents = tuple(int(e.value) if isinstance(e, Const) else e for e in s.extents)
                return self.scratch(lambda: lower_loop(
                    self, s.vars, extents, s.body, loop_layout=s.attr("loop_layout"), span=s.span,
                    width=s.attr("coalesced_width")))
            case TileOp():
                return self.scratch(lambda: s.lower(self))  # type: ignore[attr-defined]
            case Evaluate():
                return self._evaluate(s)
        return rebuild(s, self._rebuild)

    def _roles(self, s: If) -> Stmt:
        """Warp groups with work of their own: inside, "the block" is theirs alone."""
        first, count = int(s.cond.attr("first")), int(s.cond.attr("count"))  # type: ignore[attr-defined]
        then = self._as_block(s.then, first, count)
        if s.orelse is None:
            return replace(s, then=then)
        groups = self.num_threads // GROUP
        rest = (0, first) if first + count == groups else (count, groups - count)
        if first and first + count != groups:
            raise errors.InternalError(f"warp groups {first} .. {first + count - 1} leave two pieces of {groups} groups")
        return replace(s, then=then, orelse=self._as_block(s.orelse, *rest))

    def _as_block(self, s: Stmt, first: int, count: int) -> Stmt:
        if self.in_role:  # warp groups told apart inside a role: no tile operations (written_roles.py)
            return self.stmt(s)
        saved = self.num_threads, self.thread, self.analyzer, self.group
        self.roles += 1
        self.role = self.roles
        lo = first * GROUP
        self.num_threads = count * GROUP
        self.analyzer = self.analyzer.bind(self.thread, lo, lo + self.num_threads - 1)
        self.in_role = True
        binds: list[Stmt] = []
        if first:
            self.thread = fresh("tid")
            self.analyzer = self.analyzer.bind(self.thread, 0, self.num_threads - 1)
            binds.append(Bind(self.thread, saved[1] - lo))
        self.group = None
        try:
            return seq(*binds, self.stores.part(first, self.thread, lambda: self._grouped(s)), span=s.span)
        finally:
            self.num_threads, self.thread, self.analyzer, self.group = saved
            self.in_role, self.role = False, 0

    def _grouped(self, s: Stmt) -> Stmt:
        """One thread's statements for s, which all threads of the block run, after the index of its warp group."""
        body = self.stmt(s)
        if self.group is None:
            return body
        return seq(Bind(self.group, call("warp_uniform", (self.thread // GROUP,), "int32")), body, span=s.span)

    def warp_group(self) -> Expr:
        """The index of this thread's warp group, known to be one per warp."""
        if self.num_threads <= GROUP:
            return const(0)
        if self.group is None:
            self.group = Var("wg", dtype("int32"))
        self.analyzer = self.analyzer.bind(self.group, 0, self.num_threads // GROUP - 1)
        return self.group

    def _rebuild(self, v: Any) -> Any:
        if isinstance(v, Stmt):
            return self.stmt(v)
        if isinstance(v, Expr):
            return self.expr(v)
        return tuple(map(self._rebuild, v)) if isinstance(v, tuple) else v

    def loop_stmt(self, s: For, body: Callable[[Stmt], Stmt]) -> Stmt:
        """A serial loop: its variable's range is known inside."""
        lo, _ = self.analyzer.interval(s.start)
        _, last = self.analyzer.interval(s.start + s.extent)
        self.analyzer = self.analyzer.bind(s.var, lo, None if last is None else last - 1)
        static = isinstance(s.extent, Const) and isinstance(s.start, Const) and s.start.value == 0
        if self.loop is not None and static:
            self.loop.inner = [*self.loop.inner, (s.var, int(s.extent.value))]  # type: ignore[attr-defined]
        try:
            return replace(s, start=self.expr(s.start), extent=self.expr(s.extent),
                           body=self.stores.inside(s, lambda: body(s.body)))
        finally:
            if self.loop is not None and static:
                self.loop.inner = self.loop.inner[:-1]

    def _vectorized(self, s: For) -> Stmt:
        """T.vectorized: vector accesses around the lanes in per-thread code; inside a distributed loop, whose lanes
        are vectors already, and where some lanes are left out, an unrolled loop."""
        extent = s.extent
        early = any(isinstance(x, (Break, Continue)) for x in walk(s.body))
        if self.loop is not None or early or not isinstance(extent, Const) or not isinstance(s.start, Const) or s.start.value:
            return self.loop_stmt(replace(s, kind="unroll"), self.stmt)
        return self.scratch(lambda: private_loop(self, (s.var,), (int(extent.value),), s.body, s.span))

    def _alloc(self, s: Alloc) -> Stmt:
        scope = s.buffer.scope_name
        if scope == "local.fragment":
            local = self.local_of(s.buffer)
            r = fresh("r")
            zeros = For(r, const(0), const(int(local.shape[0])), "unroll",
                        Store(local, (r,), cast(const(0), local.dtype))) if s.buffer.data in self.padded else None
            return seq(replace(s, buffer=local), zeros)
        if scope in ("shared", "shared.dyn"):
            return replace(s, buffer=self.shared_of(s.buffer))
        return s if s.init is None else replace(s, init=self.expr(s.init))

    def _pieces(self, buffer: Buffer, indices: tuple[Expr, ...]) -> list[tuple[Expr, ...]] | None:
        """The accesses that a vector access becomes, as indices; None: it stays as it is.

        Where a guard is needed its lanes are accessed one by one; elsewhere in the widest pieces that are aligned."""
        lanes = vector_lanes_of(indices)
        if not lanes:
            return None
        if any(self.guard(buffer, at) is not None for at in (lanes[0], lanes[-1])):
            return lanes  # indices are linear in the lane: what holds at both ends holds between
        return self.widths.pieces(buffer, indices, lanes, self.analyzer, self.divisors)

    def _store(self, s: Store) -> Stmt:
        loop = self.loop
        if loop is not None and id(s) in loop.vstores:
            return Store(loop.vstores[id(s)], (loop.dist.lanes[0],), self.expr(s.value), span=s.span)  # type: ignore
        if loop is not None and loop.is_async and loop.lane_var is None:
            copied = scalar_async(self, loop, s)
            if copied is not None:
                return copied
        value = self.expr(s.value)
        scope = s.buffer.scope_name
        if scope == "local.fragment":
            buffer, at = self._fragment(s.buffer, s.indices, True, s.span)
            out: Stmt = Store(buffer, at, value, span=s.span)
            if loop is not None and s.buffer in loop.staged and loop.dist.first is not None:
                out = If(loop.dist.first, out)
            return out
        pieces = self._pieces(s.buffer, s.indices)
        if pieces is not None:
            wide = fresh("lanes", value.dtype)
            n = value.dtype.lanes // len(pieces)
            stores = [self._store(replace(s, indices=at, value=Shuffle((wide,), tuple(range(k * n, k * n + n)),
                                                                       value.dtype.scalar.with_lanes(n))))
                      for k, at in enumerate(pieces)]
            return seq(Bind(wide, value, span=s.span), *stores)
        guard = None if vector_lanes_of(s.indices) else self.guard(s.buffer, s.indices)
        buffer, at = self.physical(s.buffer, self.exprs(s.indices))
        if loop is not None and scope in ("global", "shared", "shared.dyn"):
            guard = conjunction(loop.dist.first, guard)
        out = Store(buffer, at, value, span=s.span)
        return out if guard is None else If(guard, out, span=s.span)

    def _evaluate(self, s: Evaluate) -> Stmt:
        out: Stmt = replace(s, call=self._call(s.call))
        if s.call.op in ("wgmma_pin", "wgmma_hold") and isinstance(s.call.args[0], AddressOf) and \
                s.call.args[0].buffer.scope_name == "local.fragment":
            count = int(self.local_of(s.call.args[0].buffer).shape[0])
            out = replace(s, call=with_attrs(self._call(s.call), count=count))
        guard = self._atomic_guard(s.call)
        if self.loop is not None:
            guard = conjunction(self.loop.dist.first, guard)
        return out if guard is None else If(guard, out, span=s.span)

    def _atomic_guard(self, c: Call) -> Expr | None:
        if not c.op.startswith("atomic_"):
            return None
        out: Expr | None = None
        for a in c.args:
            if isinstance(a, AddressOf):
                out = conjunction(out, self.guard(a.buffer, a.indices))
        return out

    # ---- expressions ----------------------------------------------------------------------------------------------

    def exprs(self, es: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(self.expr(e) for e in es)

    def expr(self, e: Expr) -> Expr:
        """e with every access in its lowered form."""
        if isinstance(e, (Var, Const)):
            return e
        if isinstance(e, Load):
            return self._load(e)
        if isinstance(e, AddressOf):
            if e.buffer.scope_name == "local.fragment":  # the registers that hold it (wgmma_pin, wgmma_hold)
                return AddressOf(self.local_of(e.buffer), (const(0),), e.dtype, span=e.span)
            buffer, at = self.physical(e.buffer, self.exprs(e.indices))
            return AddressOf(buffer, at, e.dtype, span=e.span)
        if isinstance(e, Call):
            guard = self._atomic_guard(e)
            out = self._call(e)
            if guard is None:
                return out
            zero = const(0.0 if e.dtype.is_float else 0, e.dtype)
            return Select(guard, out, zero, e.dtype, True)
        return rebuild(e, self._rebuild)

    def _call(self, c: Call) -> Call:
        return rebuild(c, self._rebuild_arg)

    def _rebuild_arg(self, v: Any) -> Any:
        return self.expr(v) if isinstance(v, Expr) else tuple(map(self._rebuild_arg, v)) if isinstance(v, tuple) else v

    def _load(self, e: Load) -> Expr:
        loop = self.loop
        if loop is not None and loop.vloads:
            moved = loop.vloads.get(e)
            if moved is not None:
                (tmp, share), lane = moved, loop.dist.lanes[0]  # type: ignore[index]
                return load(tmp, (lane if share == 1 else binary("floordiv", lane, const(share)),), span=e.span)
        scope = e.buffer.scope_name
        if scope == "local.fragment":
            buffer, at = self._fragment(e.buffer, e.indices, False, e.span)
            return Load(buffer, at, e.dtype, span=e.span)
        pieces = self._pieces(e.buffer, e.indices)
        if pieces is not None:
            elements = tuple(self._load(load(e.buffer, at, span=e.span)) for at in pieces)
            return Shuffle(elements, tuple(range(e.dtype.lanes)), e.dtype, span=e.span)
        guard = None if vector_lanes_of(e.indices) else self.guard(e.buffer, e.indices)
        buffer, at = self.physical(e.buffer, self.exprs(e.indices))
        out: Expr = e if buffer is e.buffer and all(a is b for a, b in zip(at, e.indices)) else \
            Load(buffer, at, e.dtype, span=e.span)
        if guard is None:
            return out
        return Select(guard, out, cast(self.safe_value(e.buffer), e.dtype), e.dtype, True)

    def _fragment(self, buffer: Buffer, indices: tuple[Expr, ...], is_write: bool,
                  span: Any = None) -> tuple[Buffer, tuple[Expr, ...]]:
        loop = self.loop
        if loop is not None:
            if buffer in loop.staged:
                return self.physical(loop.staged[buffer], self.exprs(indices))
            touch = loop.touch(self, buffer, indices, is_write)
            if touch.register is not None:
                return self.local_of(buffer), (touch.register,)
            raise self._not_owned(buffer, touch.why, span)
        frag = self.layout_of(buffer)
        if frag.replicas == frag.threads and not any(m.to == "thread" for ms in frag.modes for m in ms):
            at = frag.register(tile_indices(self.exprs(indices)))
            return self.local_of(buffer), (at if isinstance(at, Expr) else const(int(at)),)
        raise self._not_owned(buffer, "each element lives in the registers of some threads only", span)

    def _not_owned(self, buffer: Buffer, why: str, span: Any) -> errors.TileLangError:
        return errors.error("fragment-access", f"Cannot lower access to thread-distributed fragment `{buffer.name}`: "
                            f"{why}",
                            found=why, span=span or buffer.span)

    # ---- what ops ask ---------------------------------------------------------------------------------------------

    def parallel(self, extents: tuple[Any, ...], body: Callable[[tuple[Var, ...]], Stmt], loop_layout: Any = None, *,
                 is_async: bool = False, width: int | None = None, span: Any = None) -> Stmt:
        """The lowering of `for idx in T.Parallel(*extents): body(idx)`."""
        names = "ijklmnpq"
        vars = tuple(fresh(names[k] if k < len(names) else f"i{k}") for k in range(len(extents)))
        return lower_loop(self, vars, tuple(extents), body(vars), loop_layout=loop_layout, is_async=is_async,
                          width=width, span=span)

    def private(self, extents: tuple[int, ...], body: Callable[[tuple[Var, ...]], Stmt], span: Any = None) -> Stmt:
        """body at every point, by every thread for itself."""
        vars = tuple(fresh("ijklmnpq"[k]) for k in range(len(extents)))
        return private_loop(self, vars, extents, body(vars), span)

    def distributed(self, dist: Distribution, body: Callable[[tuple[Var, ...]], Stmt], span: Any = None) -> Stmt:
        """body(coordinates) under a given distribution."""
        vars = tuple(fresh("ijklmnpq"[k]) for k in range(len(dist.extents)))
        return run_loop(self, vars, dist, body(vars), span=span)


__all__ = ["Lowering", "lower_tile_ops"]
