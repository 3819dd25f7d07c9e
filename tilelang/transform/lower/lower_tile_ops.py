"""Lowers tile operations and parallel loops to the program of one thread.

    S = alloc_shared((64, 32))                    S: shared[2048]  (physical elements of S's layout)
    F = alloc_fragment((64, 32))                  F: local[16]     (this thread's registers)
    copy(A[by*64, bx*32], S)               →      for r in unroll(4): cp_async / vector load and store, guarded
    for i, j in Parallel(64, 32):                 for r in unroll(16): F[r] = F[r] * 2
        F[i, j] = F[i, j] * 2

Needs the layouts of infer_layouts.  Block barriers are placed later, by place_sync.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang import errors
from tilelang.ir import (Alloc, Bind, Break, Buffer, Call, Const, Continue, Evaluate, Expr, For, Func, If, Launch, Load,
                         Parallel, Seq, Stmt, Store, TileOp, Var, While, binary, call, cast, const, contains, convert, dtype,
                         each_register, free_vars, fresh, rebuild, replace, rewrite_launches, seq, walk, with_options, EMPTY,
                         FRAGMENT, PRIVATE, SHARED)
from tilelang.ir.verify import THREADS_BOUND, TILE
from tilelang.ops.distribute import Distribution, counting
from tilelang.target.warp_groups import GROUP, WARP_LANES, warps_of

from .direct_loads import direct_loads
from .lower_parallel import lower_loop, private_loop, run_loop
from .lowered_accesses import KnownRanges, LoweredAccesses
from .lowered_buffers import LoweredBuffers
from .tma_stores import TmaStores
from .vector_lanes import async_copy
from ..analysis.distributed_loop import serial_axis
from ..analysis.divergence import Divergence
from ..analysis.statements import copied
from ..framework.pass_ import PassConfigKey, PassContext, pass_
from ..legalize.hopper_features import hopper
from ..memory.plan_shared_memory import planned_bytes
from ..memory.reuse_shared_memory import fits

_ALL = 1 << 16  # staging buffers


@pass_(needs=TILE, gives=THREADS_BOUND)
def lower_tile_ops(func: Func, cx: PassContext) -> Func:
    """Lower every Launch of func; host statements stay as they are.

    Keeps: each element of each tile op is computed by its owners and written to memory once.  Accesses of global memory
    outside a buffer read the safe value and write nothing.
    """
    return rewrite_launches(func, lambda s: _lowered(func, cx, s))  # type: ignore[no-any-return]


def _lowered(func: Func, cx: PassContext, launch: Launch) -> Stmt:
    """The launch with as much staging for TMA stores as shared memory has room for.

    A warp group gets one, two, or all staging buffers of its sub-tile, each one TMA box wide.  More than one is used only
    where that does not reduce the number of blocks per SM.  What a block stores at its end is staged where operands were.
    """
    limit = getattr(cx.target, "max_shared_bytes", None)
    if getattr(cx.target, "async_load_bytes", ()):
        launch = direct_loads(Lowering(func, cx, launch), launch)
    # register reallocation means that one block's registers fill an SM
    alone = any(x.op == "set_max_nreg" for x in walk(launch.body, Call))
    once = alone and limit is not None and TmaStores(launch, True, 0).once
    for staging_buffers in (_ALL, 2, 1) if once else (2, 1):
        lowering = Lowering(func, cx, launch, staging_buffers)
        out = lowering.launch_stmt()
        if staging_buffers == _ALL:
            if lowering.stores.stages and fits(out, cx):
                return out
            continue
        staging = sum(b.size * b.dtype.bytes for b in lowering.stores.stages.values())
        if not staging or limit is None:
            return out
        total, whole = planned_bytes(out, cx), cx.target.limits.shared_per_sm
        reserved = 1024  # reserved by the system in every block
        kept = whole // (total + reserved) == whole // (total - staging // staging_buffers * (staging_buffers - 1) + reserved)
        if total <= limit and (staging_buffers == 1 or alone or kept):
            steps = lowering.stores.steps
            if alone and staging_buffers == 2 < steps and total + (steps - 2) * staging // 2 <= limit:
                return Lowering(func, cx, launch, steps).launch_stmt()
            return out
    return Lowering(func, cx, launch, 0).launch_stmt()


class Lowering:
    """The lowering of one Launch; implements ops.base.LowerContext.

    buffers, known, access: what its buffers become, what is known of variables, and how accesses are lowered.  group: the
    warp group's index, once it was requested.  first_warp, warp_role: first warp and number of the warp role being lowered,
    0 for code of all threads.
    """

    def __init__(self, func: Func, cx: PassContext, launch: Launch, staging_buffers: int = 0) -> None:
        self.target, self.launch = cx.target, launch
        self.num_threads = launch.num_threads
        self.thread: Var = launch.thread_vars[0] if launch.threads[1] == launch.threads[2] == 1 else fresh("tid")
        self.known = KnownRanges(func, launch, self.thread)
        self.buffers = LoweredBuffers(cx, launch)
        self.access = LoweredAccesses(self.buffers, self.known, not cx.option(PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS))
        self.stores = TmaStores(launch, hopper(cx).tma, staging_buffers, hopper(cx).strides)
        # Methods of ops.base.LowerContext that buffers and accesses have.
        buffers, access = self.buffers, self.access
        self.layout_of, self.local_of, self.tensor_map = buffers.layout_of, buffers.local_of, buffers.tensor_map
        self.new_local, self.new_fragment, self.new_shared = buffers.new_local, buffers.new_fragment, buffers.new_shared
        self.physical, self.expr, self.guard = access.physical, access.expr, access.guard
        self.group: Var | None = None
        self.ahead: tuple[For | None, list[Stmt]] = None, []  # the serial loop around, and what is moved in front of it
        self._differing: Divergence | None = None
        self._named: set[Var] = set()
        self.first_warp = self.warp_role = self._warp_roles_seen = 0

    # ---- the launch -------------------------------------------------------------------------------------------------

    def launch_stmt(self) -> Launch:
        body = self.stores.of_warps(0, self.num_threads // WARP_LANES, self.thread, lambda: self._grouped(self.launch.body))
        body = seq(*[Alloc(self.buffers.shared_of(b)) for b in self.buffers.exchanges.values()], *self.stores.allocs(), body)
        if self.thread is not self.launch.thread_vars[0]:
            x, y, _ = self.launch.threads
            tx, ty, tz = self.launch.thread_vars
            body = seq(Bind(self.thread, tx + ty * x + tz * (x * y)), body)
        body = seq(*self._prefetched(), body)
        maps = (*self.launch.plan.tensor_maps, *((name, *key) for key, name in self.buffers.maps.items())) or None
        report = (*self.launch.plan.report, *self.stores.reports) or None
        return with_options(replace(self.launch, body=body), layouts=None, tensor_maps=maps, compute_threads=None,
                            report=report)

    def _prefetched(self) -> list[Stmt]:
        """Statements with which one thread prefetches the TMA descriptors while the other threads begin."""
        if not self.buffers.maps:
            return []
        first = self.launch.thread_vars[0]
        fetch = [Evaluate(call("tma_prefetch", (), "void", map=name)) for name in self.buffers.maps.values()]
        return [If(binary("eq", first, const(0, first.dtype)), seq(*fetch))]

    # ---- statements -------------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt) -> Stmt:
        """The statements of one thread for s."""
        match s:
            case Seq():
                return seq(*[self.stmt(x) for x in s.stmts], span=s.span)
            case Alloc():
                return self._alloc(s)
            case Bind():
                value = self.expr(s.value)
                self.known.bind_value(s.var, s.value)
                return s if value is s.value else replace(s, value=value)
            case Store():
                loop = self.access.loop
                alone = loop is not None and loop.is_async and loop.lane_var is None
                alone = alone and isinstance(copied(s.value)[1], Load)
                ahead = async_copy(self, loop, s, 1) if alone and s.value.dtype == s.buffer.dtype else None  # type: ignore
                return self.access.store(s) if ahead is None else ahead
            case If() if (warps := warps_of(s.cond)) is not None:
                return self._warp_role_branch(s, warps)
            case If():
                then = self.known.under(s.cond, True, lambda: self.stmt(s.then))
                no = s.orelse
                orelse = None if no is None else self.known.under(s.cond, False, lambda: self.stmt(no))
                return replace(s, cond=self.expr(s.cond), then=then, orelse=orelse)
            case For():
                if s.kind == "vectorized":
                    return self._vectorized(s)
                return self.loop_stmt(s, self.stmt)
            case While():
                return replace(s, cond=self.expr(s.cond), body=self.stores.inside(s, lambda: self.stmt(s.body)))
            case Parallel():
                extents = tuple(int(e.value) if isinstance(e, Const) else e for e in s.extents)
                return self.buffers.scratch(lambda: lower_loop(
                    self, s.vars, extents, s.body, loop_layout=s.plan.loop_layout, span=s.span,
                    width=s.plan.coalesced_width, is_async=s.plan.async_group))
            case TileOp():
                return self.buffers.scratch(lambda: s.lower(self))  # type: ignore[attr-defined]
            case Evaluate():
                return self.access.evaluate(s)
        return rebuild(s, self._rebuilt)

    def _warp_role_branch(self, s: If, warps: tuple[int, int]) -> Stmt:
        """Lower a branch by warp role.  Inside, "the block" means the warps of that warp role alone."""
        then = self._as_block(s.then, *warps)
        if s.orelse is None:
            return replace(s, then=then)
        first, end = self.first_warp, self.first_warp + self.num_threads // WARP_LANES
        rest = (first, warps[0]) if sum(warps) == end else (sum(warps), end)
        if warps[0] > first and sum(warps) != end:
            raise errors.InternalError(f"warps {warps[0]} .. {sum(warps) - 1} leave two pieces of {first} .. {end - 1}")
        return replace(s, then=then, orelse=self._as_block(s.orelse, rest[0], rest[1] - rest[0]))

    def _as_block(self, s: Stmt, first: int, count: int) -> Stmt:
        saved = self.num_threads, self.thread, self.known.analyzer, self.group, self.first_warp, self.warp_role
        self._warp_roles_seen += 1
        self.warp_role = self._warp_roles_seen
        lo = (first - self.first_warp) * WARP_LANES
        self.num_threads, self.first_warp = count * WARP_LANES, first
        self.known.bind(self.thread, self.num_threads, lo)
        binds: list[Stmt] = []
        if lo:
            self.thread = fresh("tid")
            self.known.bind(self.thread, self.num_threads)
            binds.append(Bind(self.thread, saved[1] - lo))
        self.group = None
        try:
            return seq(*binds, self.stores.of_warps(first, count, self.thread, lambda: self._grouped(s)), span=s.span)
        finally:
            self.num_threads, self.thread, self.known.analyzer, self.group, self.first_warp, self.warp_role = saved

    def _grouped(self, s: Stmt) -> Stmt:
        """The statements of one thread for s, which all threads of the block run, after a binding of the warp group's index."""
        body = self.stmt(s)
        if self.group is None:
            return body
        return seq(Bind(self.group, call("warp_uniform", (self.thread // GROUP,), "int32")), body, span=s.span)

    def warp_group(self) -> Expr:
        """The index of this thread's warp group, marked as uniform in each warp."""
        if self.num_threads <= GROUP:
            return const(0)
        if self.group is None:
            self.group = Var("wg", dtype("int32"))
        self.known.bind(self.group, self.num_threads // GROUP)
        return self.group

    def loop_stmt(self, s: For, body: Callable[[Stmt], Stmt]) -> Stmt:
        """A serial loop, lowered with the range of its variable known inside."""
        analyzer, loop, outer = self.known.analyzer, self.access.loop, self.ahead
        self.ahead = (s if s.kind == "serial" else None), []
        lo, _ = analyzer.interval(s.start)
        _, last = analyzer.interval(s.start + s.extent)
        self.known.analyzer = analyzer.bind(s.var, lo, None if last is None else last - 1)
        inner = loop.inner if loop is not None else []
        if loop is not None:
            loop.inner = [*inner, *serial_axis(s)]
        try:
            out = replace(s, start=self.expr(s.start), extent=self.expr(s.extent),
                          body=self.stores.inside(s, lambda: body(s.body)))
            return seq(*self.ahead[1], out)
        finally:
            self.ahead = outer
            if loop is not None:
                loop.inner = inner

    def _vectorized(self, s: For) -> Stmt:
        """Lower T.vectorized.

        In per-thread code it becomes vector accesses.  It becomes an unrolled loop inside a distributed loop, whose lanes are
        vectors already, and where some lanes are masked out.
        """
        extent = s.extent
        early = contains(s.body, Break, Continue)
        inside = self.access.loop is not None
        if inside or early or not isinstance(extent, Const) or not isinstance(s.start, Const) or s.start.value:
            return self.loop_stmt(replace(s, kind="unroll"), self.stmt)
        return self.buffers.scratch(lambda: private_loop(self, (s.var,), (int(extent.value),), s.body, s.span))

    def _rebuilt(self, v: Any) -> Any:
        if isinstance(v, Stmt):
            return self.stmt(v)
        if isinstance(v, Expr):
            return self.expr(v)
        return tuple(map(self._rebuilt, v)) if isinstance(v, tuple) else v

    def _alloc(self, s: Alloc) -> Stmt:
        scope = s.buffer.scope_name
        if scope == FRAGMENT:
            local = self.buffers.local_of(s.buffer)
            zeros = each_register(local, lambda r: Store(local, (r,), cast(const(0), local.dtype)))
            return seq(replace(s, buffer=local), zeros if s.buffer.data in self.buffers.padded else None)
        if scope in SHARED:
            return replace(s, buffer=self.buffers.shared_of(s.buffer))
        own = self.buffers.row_of(s.buffer) if scope in PRIVATE else s.buffer
        return s if s.init is None and own is s.buffer else replace(
            s, buffer=own, init=None if s.init is None else self.expr(s.init))

    # ---- called by ops ----------------------------------------------------------------------------------------------

    def parallel(self, extents: tuple[Any, ...], body: Callable[[tuple[Var, ...]], Stmt], loop_layout: Any = None, *,
                 is_async: bool = False, width: int | None = None, span: Any = None) -> Stmt:
        """The lowering of `for idx in T.Parallel(*extents): body(idx)`."""
        names = "ijklmnpq"
        vars = tuple(fresh(names[k] if k < len(names) else f"i{k}", counting(n)) for k, n in enumerate(extents))
        return lower_loop(self, vars, tuple(extents), body(vars), loop_layout=loop_layout, is_async=is_async,
                          width=width, span=span)

    def loop(self, var: Var, extent: int, body: Callable[[], Stmt]) -> Stmt:
        """A serial loop from 0, in whose body the range of the variable is known."""
        return self.loop_stmt(For(var, const(0), const(extent), "serial", EMPTY), lambda _: body())

    def private(self, extents: tuple[int, ...], body: Callable[[tuple[Var, ...]], Stmt], span: Any = None) -> Stmt:
        """Run the body at every point, in every thread by itself."""
        vars = tuple(fresh("ijklmnpq"[k]) for k in range(len(extents)))
        return private_loop(self, vars, extents, body(vars), span)

    def distributed(self, dist: Distribution, body: Callable[[tuple[Var, ...]], Stmt], span: Any = None) -> Stmt:
        """The lowering of body(coordinates) under a given distribution."""
        vars = tuple(fresh("ijklmnpq"[k]) for k in range(len(dist.extents)))
        return run_loop(self, vars, dist, body(vars), span=span)

    def vector_width(self, buffer: Buffer, start: tuple[Any, ...], elements: int) -> int:
        return self.buffers.widths.run_width(buffer, tuple(map(convert, start)), elements, self.known.analyzer,
                                             self.known.divisors)

    def same_for_all(self, e: Expr) -> bool:
        """Whether an expression of the tile program has one value for all threads of the block."""
        if self._differing is None:
            self._differing, self._named = Divergence(self.launch), {v for v in walk(self.launch, Var)}
        return free_vars(e) <= self._named and not self._differing.divergent(e)

    def simplified(self, es: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(self.known.analyzer.simplify(e) for e in es)

    def prepend(self, s: Stmt) -> None:
        self.buffers.before.append(s)

    def exchange(self, shape: tuple[int, ...], dt: Any) -> Buffer:
        return self.buffers.exchange(shape, dt, self.warp_role)
