"""Warp specialisation: divides a pipelined loop between a producer warp group, which loads by TMA, and consumers.

    for k in T.Pipelined(n, num_stages=S):         if in warp group C (the last):            # producer
        copy(A[k], A_s)                                for k in n:                           # one elected thread
        copy(B[k], B_s)                                    wait(empty[k % S], k/S & 1 ^ 1)
        gemm(A_s, B_s, C)                       ->         arrive_expect_tx(full[k % S], bytes)
    copy(C, …)                                             copy A[k] -> A_s[k % S], B[k] -> B_s[k % S]   (TMA)
                                                   else:                                     # C groups of consumers
                                                       for k in n:
                                                           wait(full[k % S], k/S & 1)
                                                           gemm(A_s[k % S], B_s[k % S], C)
                                                           arrive(empty[k % S])              # each warp
                                                       copy(C, …)

Phase p (0, 1, …) of a barrier completes when its arrivals and bytes are complete.  Waiting for parity x returns once the
phase of that parity has completed; on a fresh barrier, waiting for parity 1 returns at once (PTX ISA, "mbarrier").  Copies
that the same statements use first and last share a ring.  All other code, before and after the loop, runs in the consumers.
pdl_trigger and pdl_sync at the top or the end of the body stay outside the branch between the two warp roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from operator import attrgetter
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Evaluate, Expr, For, Func, If, Launch, Load, Parallel,
                         Stmt, Var, binary, call, const, contains, convert, free_vars, is_const, is_large, leaves, replace,
                         rewrite_launches, seq, statements, stmts_of, substitute, walk, with_options, FRAGMENT, GLOBAL, SHARED)
from tilelang.ops import Copy, Gemm
from tilelang.ops.gemm.wgmma import choose_wgmma, wgmma_cycles
from tilelang.ops.bulk import row_boxes_unsupported
from tilelang.ops.tma import row_boxes, tma_bytes, tma_boxes, tma_unsupported, versions_unsupported
from tilelang.ops.tma_store import STEP_BYTES
from tilelang.target.machine import REGISTERS, WARP_ROLE_REGISTERS
from tilelang.target.thread_calls import CLOCKS

from .consumer_schedule import chosen_order, enough_stages, promoted_gemms, items_of
from .emit import consumer, producer
from .loop_order import ENDED, best_order
from .loop_record import record_of
from .operand_versions import operand_versions, operands_in_registers, transposed_gemms, whole_loads
from ..analysis.copied_tiles import CopiedTiles
from ..analysis.effects import acts, effects, expr_effects, hangs_on_threads, is_sync
from ..legalize.hopper_features import hopper, placed_in_kernel
from ..analysis.liveness import Uses, has_views
from .outer_loops import Around
from ..analysis.cluster_pairs import rows_of
from ..framework.config import PassConfigKey
from ..framework.pass_ import TILE, PassContext, pass_
from .persistent import Tiles, Work, longest_first, plan_tiles
from ..analysis.statements import around_launch, do, rename
from ..analysis.pipeline_loops import inner_loops, is_load, is_pipelined, ring_stages
from .plan_pipelines import unversionable, versioned
from .rings import (GROUP, SLOW_STAGES, Counted, Handover, Ring, RingsOf, WarpRoleLoop, WholeTile, asked_registers, barriers,
                    counted_loops, counted_tiles)
from ..analysis.pipeline_schedule import Body, Item, loop_items
from .prefetch_scales import prefetch_scales
from ..analysis.tf32_tiles import tf32_tiles
from ..analysis.shared_spans import Span, place, with_versions

BARRIER_BYTES = 1024  # upper bound for the barriers of all rings
MOST_STAGES = 8  # that a loop gets unasked
_FEW_COLUMNS = 64  # of a GEMM that takes less time than its loads
_GAIN = 0.97  # cycles with versions of operands, of those without: they take memory


class _Declined(Exception):
    """A launch cannot be specialised; the message is the reason for the report."""


@pass_(needs=TILE)
def specialize_warps(func: Func, cx: PassContext) -> Func:
    """Specialises the warps of launches with a pipelined loop; see the module's docstring.

    Needs tl.enable_hopper and sm_90a; off with tl.disable_warp_specialized or tl.disable_tma_lower.  A launch that cannot be
    specialised is not changed, and its attr `report` gives the reason.
    Keeps: the result of the sequential loop, for every extent (0 too).
    """
    return rewrite_launches(func, lambda x: _specialized(x, cx)) if hopper(cx).warp_roles else func


def _specialized(launch: Launch, cx: PassContext) -> Launch:
    """The launch with warp roles, or unchanged with the reason in its report."""
    head, body, tail = around_launch(launch)
    if head or tail:
        out = _specialized(replace(launch, body=body), cx)
        return replace(out, body=seq(*head, out.body, *tail, span=launch.body.span))
    loops = _looped(launch)
    alone = len(loops) == 1 and any(s is loops[0] for s in stmts_of(launch.body))
    tiled = prefetch_scales(launch, loops[0], cx) if alone else None
    if not loops:
        return launch
    # Without scale prefetch, the threads load the scales themselves and specialisation may work.
    forms: list[tuple[Launch, list[For]]] = [(launch, loops)]
    for form in (launch, transposed_gemms(launch)):
        got = operands_in_registers(form, _looped(form))
        if got[0] is not form:
            forms[:0] = [got]
    attempts = [*(operand_versions(*whole_loads(*x)) for x in forms), tiled and (tiled[0], [tiled[1]], {})]
    try:
        for attempt in (x for x in attempts if x):
            try:
                return _WarpRoles(*attempt, cx).run()
            except _Declined:
                pass
        return _WarpRoles(launch, loops, {}, cx).run()
    except _Declined as e:
        return with_options(launch, report=(*launch.plan.report, f"no warp specialisation: {e}"))


def _looped(launch: Launch) -> list[For]:
    """The loops that may get warp roles, pipelined ones if there are any: those at the launch's top, else those inside."""
    wanted = is_pipelined if any(isinstance(s, For) and is_pipelined(s) for s in statements(launch.body)) else _multiplies
    return [s for s in stmts_of(launch.body) if isinstance(s, For) and wanted(s)] or inner_loops(launch.body, wanted)


def _multiplies(s: For) -> bool:
    """Whether a loop that is not pipelined loads tiles and multiplies: it may get stages as if it asked for none."""
    inside = stmts_of(s.body)
    return s.kind == "serial" and any(isinstance(x, Gemm) for x in inside) and any(is_load(x) for x in inside)


class _WarpRoles:
    """Rewrites one launch.  Raises _Declined if that is not possible."""

    def __init__(self, launch: Launch, loops: list[For], made: Mapping[Var, int], cx: PassContext) -> None:
        self.launch, self.made, self.cx = launch, made, cx
        x, y, z = launch.threads
        if y != 1 or z != 1 or x % GROUP or not 1 <= x // GROUP <= 3:
            raise _Declined(f"{x} x {y} x {z} threads are no 1 to 3 warp groups")
        self.groups, self.thread = x // GROUP, launch.thread_vars[0]
        self.loop, self.loops = loops[0], [self, *(_WarpRoles(launch, [x], made, cx) for x in loops[1:])]
        self.rings: list[Ring] = []
        asked, plan = ring_stages(self.loop), self.loop.plan
        grows = cx.option(PassConfigKey.TL_EXTRA_STAGES) and not (plan.order or plan.software_pipeline_order)
        if asked is None or asked < 2 and not grows:
            raise _Declined("no automatic pipeline of two stages or more")
        self.asked, self.stages = asked, max(asked, 2)
        self.body: Body = loop_items(stmts_of(self.loop.body))
        self.tf32 = tf32_tiles(launch, self.loop, self.body.items)
        self.values = {s.var: s.value for s in walk(launch.body, Bind)}
        self.used = {x.storage for x in effects(launch.body)}
        self.written = {x.storage for x in effects(launch.body) if x.writes}
        self.scalars: set[Var] = set()  # storage of the program's variables that both warp roles keep

    def run(self) -> Launch:
        for n, x in enumerate(self.loops):
            try:
                x._check()
                x.rings = x._rings()
                if x.asked < x.stages and x._free() < 0:
                    raise _Declined(f"two stages do not fit in shared memory; the loop asks for {x.asked}")
            except _Declined as e:
                raise e if len(self.loops) == 1 else _Declined(f"pipelined loop {n + 1} of {len(self.loops)}: {e}") from None
        if len(self.loops) > 1:
            return self._inside([p.loop for p in self.loops])
        stmts = stmts_of(self.launch.body)
        at = next((k for k, s in enumerate(stmts) if s is self.loop), None)
        if at is None:
            return self._inside([self.loop])
        common, before = self._common(stmts[:at])
        if not self._plain(convert(self.loop.extent)):  # variables of a thread, which both warp roles may keep
            return self._inside([self.loop])
        self._reachable()
        self._room()
        self.stages = _taken_stages(self)
        tiles = self._tiles(not any(map(acts, stmts[:at + 1])))
        for ring in self.rings:
            self._make(ring, tiles)
        steps = {} if tiles is None else {t: self._steps(t, tiles) for t in sorted({1, *(r.iterations for r in self.rings)})}
        bases = {t: s.base for t, s in steps.items()}
        self.shared = _described(self, self._alone(), bases.pop(1, None), tiles is not None and not tiles.once, bases)
        _check_second_block(self)
        _check_versions(self)
        if self.shared.slow and chosen_order(self.shared) is not None:
            raise _Declined("GEMMs move past what uses prefetched scales")
        new = {b: v for r in self.rings for b, v in r.buffers.items()}
        used = {e.storage for k, s in enumerate(stmts) if k != at for e in effects(s)}
        dropped = {b for b in new if b.data not in used}
        once: list[Stmt] = [s for s in common if isinstance(s, Alloc) and s.buffer not in dropped]
        binds: list[Stmt] = [s for s in common if isinstance(s, Bind)]
        once += [Alloc(v) for v in new.values()]
        after = {e.storage for s in stmts[at + 1:] for e in effects(s)}
        once_loaded = [s for s in before if isinstance(s, Copy) and self._fills_once(s)]
        whole = [WholeTile(self._by_group(s), self.groups, self.thread, tiles, s.dst.buffer.data in after)
                 for s in once_loaded]
        made = [b for r in self.rings for b in (r.full, r.empty) if b is not None]
        made += [b for w in whole for b in (w.full, w.empty) if b is not None]
        loading = producer(self.shared, [x for w in whole for x in w.produce()], self._pure(), self.tf32)
        first = {id(s): w for s, w in zip(once_loaded, whole)}
        opening = [x for s in before for x in (first[id(s)].filled() if id(s) in first else [s])]
        # No block of a cluster may end, or start to load, while another one still accesses its shared memory.  If a block has
        # one tile, the blocks of its cluster are independent after the main loop, so the wait is at the very end.
        cluster = tiles is not None and tiles.cluster_map is not None
        parting = cluster and tiles is not None and tiles.once
        done = [do("cluster_arrive")] if parting else []
        ending = stmts[at + 1:] if tiles is None else tiles.of_the_grid(stmts[at + 1:])
        computing = [*opening, *consumer(self.shared, [x for w in whole if not w.late for x in w.release(self.shared)],
                                         {s.dst.buffer for s in once_loaded}), *done, *ending,
                     *(x for w in whole if w.late for x in w.release(self.shared))]
        if tiles is None:
            once += binds
        else:
            begin, bind, advance = ([x for s in steps.values() for x in part(s)]
                                    for part in (attrgetter("begin"), attrgetter("bind"), attrgetter("advance")))
            loading = rename([*begin, tiles.loop(*bind, *binds, *loading, *advance)])
            computing = [*begin, tiles.loop(*bind, *binds, *computing, *advance)]
        end = do("cluster_wait" if parting else "cluster_sync") if cluster else None
        out = self._assembled(once, made, [*done, _loader(self, loading)], computing, cluster, end)
        if tiles is not None:
            out = with_options(replace(out, grid=(tiles.grid,), block_vars=(tiles.block,)), swizzle=None,
                             cluster=None if tiles.cluster_map is None else (tiles.cluster_map.size, 1, 1))
        return self._said(out, self.about)

    def _inside(self, inner: list[For]) -> Launch:
        """The launch, if its pipelined loops are inside other loops or branches, which both warp roles run, or several.

        A condition around all that a block does stays around its barriers too: blocks that it switches off end at once.
        """
        common, guard, body = _guarded(self)
        around = Around(replace(self.launch, body=body), inner)
        if around.why:
            raise _Declined(around.why)
        loops, several = self.loops, len(self.loops) > 1
        for p in loops:
            p.scalars, p.visible, p.bound = around.scalars, around.visible, around.bound
            p._reachable()
        if not several:
            self.stages = _taken_stages(self)
        filled = {p._filled(i) for p in loops for r in p.rings for i in r.items}
        room = self.cx.target.limits.shared_per_block - BARRIER_BYTES - sum(
            b.size * b.dtype.bits // 8 for b in self._static() if b.scope_name in SHARED and b not in filled)
        counts, begin = counted_loops([RingsOf(p.loop, p.stages, p.rings, p._filled) for p in self.loops],
                                      lambda n, r: self.loops[n]._make(r, None), room)
        for p, steps in zip(loops, counts):
            p.shared = _described(p, self._alone(), steps.base, True, {})
            _check_versions(p)
        if not several:
            _check_second_block(self)
        new = {b: v for p in loops for r in p.rings for b, v in r.buffers.items()}
        made = list(dict.fromkeys(v for p in loops for r in p.rings for v in r.buffers.values()))
        taken = sum(b.size * b.dtype.bits // 8 for b in made)
        if several and taken > room:
            raise _Declined(f"the stages of {len(loops)} pipelined loops take {taken} of {room} bytes of shared memory")
        loads = {id(p.loop): producer(p.shared, [], p._pure(), p.tf32) for p in loops}
        handover = Handover(self.shared) if not several and self._hands_over(new) else None
        ready: list[Stmt] = []
        if handover:
            loads[id(self.loop)], ready = [*handover.awaited, *loads[id(self.loop)]], handover.ready
        counted, more = list(zip(loops, counts)), (handover,) if handover else ()
        of_loading = {id(p): (s, *(x.count for x in more)) for p, s in counted}  # a handover counts in the producer only
        loads = {id(p.loop): [*(x for s in of_loading[id(p)] for x in s.bind), *loads[id(p.loop)],
                              *(x for s in of_loading[id(p)] for x in s.advance)] for p in loops}
        start = [x for some in of_loading.values() for s in some for x in s.begin]
        loading = rename([*begin, *start, *around.loading(loads)])
        computing = [*begin, *(x for s in counts for x in s.begin), *around.computing(
            {id(p.loop): [*s.bind, *ready, *consumer(p.shared), *s.advance] for p, s in counted})]
        used = {e.storage for s in computing for e in effects(s)}
        once: list[Stmt] = [Alloc(b) for b in around.allocs if b not in new or b.data in used]
        once += [Alloc(v) for v in made]
        bars = list(dict.fromkeys(b for p in loops for r in p.rings for b in (r.full, r.empty) if b is not None))
        out = self._assembled(once, bars + [x.drained for x in more], [_loader(self, loading)], computing, False, None)
        out = with_versions(out, new.items()) if handover else out
        if guard is not None:
            allocs = [s for s in stmts_of(out.body) if isinstance(s, Alloc)]
            rest = [s for s in stmts_of(out.body) if not isinstance(s, Alloc)]
            out = replace(out, body=seq(*allocs, *common, replace(guard, then=seq(*rest))))
        return self._said(*_in_order(self, out, handover.about if handover else ""))

    def _hands_over(self, new: dict[Buffer, Buffer]) -> bool:
        """Whether the launch fits in shared memory if rings share bytes with other tiles, and only then."""
        spans = [Span(new.get(b, b), 0, 0) for b in self._static() if b.scope_name in SHARED]
        limit, pairs = self.cx.target.limits.shared_per_block - BARRIER_BYTES, self.launch.plan.disjoint
        both = with_versions(self.launch, new.items()).plan.disjoint
        return place(spans, [p for p in pairs if not new.keys() & p]) > limit >= place(spans, both)

    def _assembled(self, once: list[Stmt], made: list[Buffer], loading: list[Stmt], computing: list[Stmt], cluster: bool,
               end: Stmt | None) -> Launch:
        """The launch with the code of the two warp roles, and the initialisation of its barriers before them."""
        warp_roles = If(call("in_warp_groups", (), "bool", first=self.groups, count=1),
                   seq(*self._registers(0), *loading), seq(*self._registers(1), *computing), span=self.loop.span)
        body = seq(*once, *(Alloc(b) for b in made), self._setup(made, cluster), warp_roles, end, span=self.launch.body.span)
        return replace(self.launch, body=body, threads=(self.launch.threads[0] + GROUP, 1, 1))

    def _said(self, out: Launch, about: str) -> Launch:
        """The launch with its attributes: layouts of all versions, number of consumer threads, and the reports."""
        rings = [(p.shared, r) for p in self.loops for r in p.rings]
        new = list(dict.fromkeys(x for _, r in rings for x in r.buffers.items()))
        layouts = self.launch.plan.layouts
        if layouts:  # a layout that the user gave for a buffer also applies to its versions
            out = with_options(out, layouts=(*layouts, *((v, lay) for b, lay in layouts for x, v in new if x is b)))
        names = ", ".join(sorted({b.name for b, _ in new}))
        stages = tuple(dict.fromkeys((b.name, p.stages_of(r.iterations)) for p, r in rings for b in r.buffers))
        overlap = self.shared.overlap if len(self.loops) == 1 else "; ".join(
            f"pipelined loop {n + 1} of {len(self.loops)}: {p.shared.overlap}" for n, p in enumerate(self.loops))
        kept = [s.call.options.n for warp_role in (0, 1) for s in self._registers(warp_role)]  # type: ignore[attr-defined]
        return with_options(out, compute_threads=self.groups * GROUP, report=(*self.launch.plan.report, about), overlap=overlap,
                          schedules=tuple(str(record_of(x.shared, kept)) for x in self.loops), stages=stages, pipeline_report=(
            f"warp groups: 1 loads {names} by TMA, {self.groups} compute{'s' * (self.groups == 1)}, "
            f"{' and '.join(dict.fromkeys(str(p.stages) for p in self.loops))} stages"))

    def _steps(self, iterations: int, tiles: Tiles) -> Counted:
        """Counts the steps of the rings whose stages last `iterations` iterations."""
        extent = _inlined(convert(self.loop.extent), self.values)
        if iterations > 1:
            extent = (binary("max", extent, const(0, extent.dtype)) + (iterations - 1)) // iterations
        stages = self.stages if iterations == 1 else SLOW_STAGES
        return counted_tiles(tiles, Analyzer().simplify(extent), stages, set(self.launch.block_vars) | self.bound)

    def _room(self) -> None:
        """Raises _Declined if prefetched scales would take the shared memory of a second block on the SM or of the epilogue."""
        slow = sum(tma_bytes(self.body.items[i].stmt) for r in self.rings if r.iterations > 1 for i in r.items) * SLOW_STAGES
        whole = self._shared()
        if slow and (self._free() < 0 or 2 * (whole - slow) <= self.cx.target.limits.shared_per_sm < 2 * whole):
            raise _Declined("there is no shared memory for the scales of several steps")

    def _free(self) -> int:
        """Bytes of shared memory that are left beside the stages, barriers and what an epilogue stages."""
        return self.cx.target.limits.shared_per_block - self._shared() - self.groups * STEP_BYTES - BARRIER_BYTES

    def _tiles(self, padded: bool) -> Tiles | None:
        """The loop over tiles of a persistent launch; None for one tile a block.  padded: see Work.padded."""
        copies: list[Any] = [self.body.items[i].stmt for ring in self.rings for i in ring.items]
        loads = [(tma_bytes(op) // op.plan.iterations, self._coordinates(op)) for op in copies]
        loaded = {i for ring in self.rings for i in ring.items}
        rest = [x.stmt for i, x in enumerate(self.body.items) if i not in loaded]
        # The time of work other than GEMMs is not known: it may hide any load.
        cycles = sum(wgmma_cycles(x) for x in rest) if all(isinstance(x, Gemm) for x in rest) else 0
        rows = tuple(rows_of(op, at, self.loop.var) for op, (_, at) in zip(copies, loads))
        got = plan_tiles(self.launch, Work(tuple(loads), _inlined(convert(self.loop.extent), self.values),
                                           self.launch.block_vars, cycles, rows, padded),
                         self.cx, self._alone(), self._shared() > self.cx.target.limits.shared_per_block)
        self.about = f"one tile a block ({got})" if isinstance(got, str) else got.report
        return None if isinstance(got, str) else got

    def _coordinates(self, op: Any) -> tuple[Expr, ...]:
        """Where a copy reads, in terms of the block variables and loop variables."""
        return tuple(_inlined(convert(m), self.values) for m in op.src.mins)

    def _fills_once(self, op: Any) -> bool:
        """Whether the producer can do a copy that precedes the loop: nothing else writes its destination."""
        b = op.dst.buffer
        if not is_load(op) or tma_unsupported(op, hopper(self.cx).strides) or has_views(b, self.launch.body) or \
                self._unsafe(op.src.buffer):
            return False
        writers = [e for e in effects(self.launch.body) if e.storage is b.data and e.writes]
        return len(writers) == 1 and all(self._plain(m) and not (free_vars(m) & self.bound) - self.visible
                                         for m in op.src.mins if isinstance(m, Expr))

    def _by_group(self, op: Any) -> list[Any]:
        """A copy, divided by rows if each warp group uses only its own rows, as A of a GEMM, and nothing else uses them."""
        b = op.dst.buffer
        used = [e.node for e in effects(self.launch.body) if e.storage is b.data and e.node is not op]
        alone = self.groups > 1 and all(
            isinstance(x, Gemm) and x.a.buffer is b and x.b.buffer is not b and x.a.is_full and not x.transpose_a
            and getattr(choose_wgmma(x, self.groups * GROUP, self.tf32), "warps", None) == (self.groups * 4, 1) for x in used)
        return (row_boxes(op, self.groups) if alone else None) or [op]

    def _unsafe(self, b: Buffer) -> str:
        """Why TMA may not read a tensor; "" if it may."""
        if b.data in {e.storage for e in effects(self.launch.body) if e.writes and e.buffer.scope_name == GLOBAL}:
            return f"`{b.name}` is written by the kernel"
        if late := placed_in_kernel(self.launch)(b):
            return f"the {late} of `{b.name}` is known in the kernel only"
        safe = dict(self.launch.plan.safe_values)
        if b in safe and not is_const(safe[b], 0):
            return f"outside `{b.name}` reads as {safe[b]}"
        return ""

    # ---- conditions -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.launch.plan.cluster is not None:
            raise _Declined("the program launches clusters itself")
        for x in walk(self.launch.body, Call):
            if x.op in ("thread_return", "in_warp_groups") or is_sync(x) and x.op not in ("sync_threads", "sync_warp", *CLOCKS):
                raise _Declined(f"the program calls {x.op} itself")
        if any(is_sync(x) for x in walk(self.loop.body, Call)):
            raise _Declined("the loop orders threads itself")
        if not contains(self.loop.body, Gemm):
            raise _Declined("there is no GEMM in the loop: other blocks of the SM hide its loads")
        if leaves(self.loop.body):
            raise _Declined("break or continue in the loop")
        for x in walk(self.loop.body):
            if isinstance(x, Gemm):
                plan = choose_wgmma(x, self.groups * GROUP, self.tf32) if hopper(self.cx).wgmma else "it is off"
                if isinstance(plan, str):
                    raise _Declined(f"a T.gemm is not computed by wgmma: {plan}")
        if any(isinstance(s, For) and is_pipelined(s) for s in statements(self.loop.body)):
            raise _Declined("a pipelined loop inside the pipelined loop")

    def _rings(self) -> list[Ring]:
        items = self.body.items
        loads = [i for i, x in enumerate(items) if is_load(x.stmt)]
        if not loads:
            raise _Declined("no copy from global to shared memory in the loop")
        rings: dict[tuple[int, int, int], Ring] = {}
        for i in loads:
            op: Any = items[i].stmt
            b = op.dst.buffer
            users = [j for j, x in enumerate(items) if j != i and x.touches(b.data)]
            strides = hopper(self.cx).strides
            why = (row_boxes_unsupported(op, strides) if b.ndim == 1 else
                   tma_unsupported(op, strides) or versions_unsupported(b)) or \
                unversionable(Uses(self.launch.body), self.loop, items, b) or self._unsafe(op.src.buffer)
            if why:
                raise _Declined(why)
            if not users or users[0] < i or _is_written([items[j] for j in users], b):
                raise _Declined(f"`{b.name}` is not only copied to and then used")
            iterations = op.plan.iterations
            key = (users[0], users[-1], iterations)
            rings.setdefault(key, Ring([], users[0], users[-1], iterations=iterations)).items.append(i)
        return sorted(rings.values(), key=lambda r: (r.iterations > 1, r.first, r.last))

    def _common(self, stmts: Any) -> tuple[list[Stmt], list[Stmt]]:
        """Divides the statements before the loop: (bindings and shared buffers of both warp roles, the consumers' code)."""
        common: list[Stmt] = []
        rest: list[Stmt] = []
        seen = {*self.launch.block_vars, *self.launch.thread_vars}
        bound = {x.var for x in walk(self.launch.body, Bind, For)}
        for s in stmts:
            shared = isinstance(s, Alloc) and s.buffer.scope_name.startswith("shared") and s.init is None
            plain = isinstance(s, Bind) and self._plain(s.value) and not (free_vars(s.value) & bound) - seen
            if shared or plain:
                common.append(s)
                if isinstance(s, Bind):
                    seen.add(s.var)
            else:
                rest.append(s)
        self.visible, self.bound = seen, bound
        return common, rest

    def _plain(self, e: Expr) -> bool:
        """Whether a value is the same in all threads and at any time: no private or changing memory, no side effects."""
        if hangs_on_threads(e):
            return False
        return all(not x.writes and (x.storage in self.scalars or
                                     x.buffer.scope_name == GLOBAL and x.storage not in self.written)
                   for x in expr_effects(e))

    def _reachable(self) -> None:
        """Raises _Declined unless the producer can compute the loop's bounds and the coordinates of its copies."""
        inside: set[Var] = {self.loop.var}
        for s in self.body.pure:
            if self._plain(s.value) and not (free_vars(s.value) & self.bound) - self.visible - inside:
                inside.add(s.var)
        self.inside = inside
        needed: list[Any] = [self.loop.start, self.loop.extent]
        for ring in self.rings:
            for i in ring.items:
                op: Any = self.body.items[i].stmt
                needed += [m for m in op.src.mins if isinstance(m, Expr)]
        for e in needed:
            if not self._plain(e) or (free_vars(e) & self.bound) - self.visible - inside:
                raise _Declined(f"`{e}` is computed by the threads that would not load")
        if (free_vars(self.loop.start) | free_vars(self.loop.extent)) & set(self.launch.thread_vars):
            raise _Declined("the loop's extent differs between threads")

    # ---- rings, barriers and registers ----------------------------------------------------------------------------

    def _make(self, ring: Ring, tiles: Tiles | None) -> None:
        """Allocates the versions and barriers of a ring."""
        cluster_map = None if tiles is None else tiles.cluster_map
        stages = self.stages if ring.iterations == 1 else SLOW_STAGES
        for i in ring.items:
            op: Any = self.body.items[i].stmt
            ring.buffers[op.dst.buffer] = versioned(op.dst.buffer, stages)
            same = frozenset() if cluster_map is None else frozenset(
                k for k in cluster_map.wide
                if not any(self.launch.block_vars[k] in free_vars(e) for e in self._coordinates(op)))
            if cluster_map is not None and same and op.dst.buffer.ndim > 1 and tma_boxes(op, len(cluster_map.sharers(same))):
                ring.common[i] = same
        ring.cluster_map = cluster_map if ring.common else None
        name = "_".join(b.name for b in ring.buffers)
        ring.full = barriers(f"{name}_full", (1,) * stages)
        ring.empty = barriers(f"{name}_empty", (self.groups * 4 * ring.fillers,) * stages)

    def _setup(self, made: list[Buffer], cluster: bool) -> Stmt:
        inits = [Evaluate(call("mbarrier_init", (AddressOf(b, (const(k),)), const(n, "uint32")), "void"))
                 for b in made for k, n in enumerate(b.facts.arrive or ())]
        return seq(If(binary("eq", self.thread, const(0, self.thread.dtype)), seq(*inits, do("fence_mbarrier_init"))),
                   do("cluster_sync" if cluster else "sync_threads"))

    def _registers(self, warp_role: int) -> list[Stmt]:
        got = asked_registers(self.launch, self.groups) or WARP_ROLE_REGISTERS.get(self.groups)
        if got is None or not self._alone() or self.launch.plan.keep_registers:
            return []
        return [do("set_max_nreg", n=got[warp_role], inc=bool(warp_role))]

    def _alone(self) -> bool:
        """Whether only one block fits an SM, because of its shared memory or the registers of its fragments."""
        if self.launch.plan.min_blocks_per_sm > 1:
            return False
        return not self._fits_twice(self.groups + 1, self._shared())

    def _fits_twice(self, groups: int, shared: int) -> bool:
        """Whether two blocks of so many warp groups and bytes of shared memory fit an SM, with the fragments of this one."""
        fragments = sum(b.size * b.dtype.bits // 32 for b in self._static() if b.scope_name == FRAGMENT)
        limits = self.cx.target.limits
        few = limits.registers_per_sm // (2 * GROUP * groups) - REGISTERS.plain_loop
        return fragments <= few * self.groups * GROUP and 2 * shared <= limits.shared_per_sm

    def _static(self) -> list[Buffer]:
        return [s.buffer for s in walk(self.launch.body, Alloc) if s.buffer.is_static and s.buffer.data in self.used]

    def _shared(self) -> int:
        """Bytes of shared memory with all stages, without the barriers."""
        ring = {p._filled(i): p.stages if r.iterations == 1 else SLOW_STAGES
                for p in self.loops for r in p.rings for i in r.items}
        return sum(b.size * b.dtype.bits // 8 * ring.get(b, 1) for b in self._static() if b.scope_name.startswith("shared"))

    def _filled(self, item: int) -> Buffer:
        return self.body.items[item].stmt.dst.buffer  # type: ignore[attr-defined, no-any-return]

    def _pure(self) -> list[Bind]:
        return [s for s in self.body.pure if s.var in self.inside]


def _taken_stages(p: _WarpRoles) -> int:
    """The number of stages: as asked for, or more if the loop would wait for loads and no other block needs the memory.

    GEMMs that wait for loads alone get all that is left beside two staging buffers a warp group (loads are late at times,
    which no simulation of a steady loop says).
    """
    loaded = {i for r in p.rings if r.iterations == 1 for i in r.items}
    size = sum(b.size * b.dtype.bits // 8 for b in {p._filled(i) for i in loaded})
    extent = Analyzer().simplify(convert(p.loop.extent))
    most = min(MOST_STAGES, p.stages + p._free() // size)
    short = isinstance(extent, Const) and int(extent.value) < 4 * p.stages
    alone = p._alone()
    once = not alone and _starts_once(p.launch, p.body, p.cx.target.limits.sm_count)
    if most <= p.stages or short or not p.cx.option(PassConfigKey.TL_EXTRA_STAGES) or not (alone or once):
        return p.stages
    if once:
        return most
    only = all(isinstance(x.stmt, Gemm) for i, x in enumerate(p.body.items) if i not in loaded)
    left = min(most, p.stages + (p._free() - p.groups * STEP_BYTES) // size) if only else 0
    return max(left, enough_stages(_described(p, True, None, False, {}), most))


def _described(p: _WarpRoles, alone: bool, base: Expr | None, repeated: bool,
               slow: Mapping[int, Expr | None]) -> WarpRoleLoop:
    """A loop as its schedules see it.  alone: whether an SM runs one block.  base, repeated, slow: see WarpRoleLoop."""
    return WarpRoleLoop(p.launch, p.loop, p.body, p.rings, p.groups, p.stages, p.thread, p.cx, base, repeated, slow, p.made,
                        beside=1 if alone else 2)


def _guarded(p: _WarpRoles) -> tuple[list[Bind], If | None, Stmt]:
    """(bindings, the condition around all that a block does, the rest of the body); no condition if it has none that all
    threads find alike."""
    *before, last = stmts_of(p.launch.body)
    binds, allocs = [s for s in before if isinstance(s, Bind)], [s for s in before if isinstance(s, Alloc)]
    if not isinstance(last, If) or last.orelse is not None or len(binds) + len(allocs) < len(before) or any(
            not p._plain(e) or p.thread in free_vars(e) for e in (last.cond, *(s.value for s in binds))):
        return [], None, p.launch.body
    return binds, last, seq(*allocs, *stmts_of(last.then))


def _loader(p: _WarpRoles, loading: list[Stmt]) -> Stmt:
    """Statements run by one thread of the producer warp group."""
    last = p.groups * GROUP + 32
    return If(binary("lt", p.thread, const(last, p.thread.dtype)), If(call("elect_one", (), "bool"), seq(*loading)))


def _is_written(users: list[Item], b: Buffer) -> bool:
    """Whether others than parallel loops, which may change a tile in place, write it."""
    return any(e.writes and e.storage is b.data and not isinstance(x.stmt, Parallel) for x in users for e in x.effects)


def _check_versions(p: _WarpRoles) -> None:
    """Raises _Declined if versions of operands do not fit in shared memory, or let no GEMM run under more.

    Also if other blocks of the SM run meanwhile: registers and shared memory are theirs.  Also if a GEMM has few columns:
    weights for few rows are bound by memory, and the loops are short.
    """
    if not any(e.storage in p.made for x in p.body.items for e in x.effects):
        return
    more = sum(b.size * b.dtype.bits // 16 for b in p._static() if b.data in p.made and b.scope_name in SHARED)
    if p.launch.plan.min_blocks_per_sm > 1 or p._fits_twice(p.groups + 1, p._shared() - more):
        raise _Declined("other blocks run while operands are made")
    if p._shared() + p.groups * STEP_BYTES + BARRIER_BYTES > p.cx.target.limits.shared_per_block:
        raise _Declined("there is no shared memory for versions of operands")
    order, items = chosen_order(p.shared), items_of(p.shared)
    if any(items.gemm(i).n < _FEW_COLUMNS for i in items.gemms):
        raise _Declined("the loop is bound by memory: its GEMMs have few columns")
    carried = order is not None and items.carries(order)
    items.versions, items.unrolled, items.meets_later = {}, set(), items.meets
    one = best_order(items, p.shared.consumer_registers)
    if order is None or order.cycles > one.cycles * (ENDED if carried and not items.carries(one) else _GAIN):
        raise _Declined("versions of operands gain nothing")


def _starts_once(n: Launch, body: Body, sms: int) -> bool:
    """Whether blocks only multiply and have an SM each, so that all they wait for are their first loads."""
    blocks = prod(int(e.value) if isinstance(e, Const) else 0 for e in n.grid)
    return 0 < blocks <= sms and n.plan.min_blocks_per_sm <= 1 and all(isinstance(x.stmt, (Copy, Gemm)) for x in body.items)


def _check_second_block(p: _WarpRoles) -> None:
    """Raises _Declined if the loop's threads do work that no GEMM of their block can run under, and two blocks without warp
    roles fit an SM: then each block runs under the GEMMs and loads of the other.  Also if the threads copy a large tile in a
    parallel loop: without warp roles it is loaded ahead like the others."""
    loads = {i for r in p.rings for i in r.items}
    filled = {p._filled(i) for i in loads}
    tiles = CopiedTiles(p.launch, p.cx)
    large = sum(b.size * b.dtype.bytes for b in filled) // 4
    for i, x in enumerate(p.body.items):
        if i not in loads and (b := tiles.gathered(x.stmt)) is not None and b.size * b.dtype.bytes >= large:
            raise _Declined(f"TMA does not load `{b.name}`, asynchronous copies of the threads do")
    static = [b for b in p._static() if b.scope_name in SHARED]
    shared = sum(b.size * b.dtype.bits // 8 * (max(p.asked, 1) if b in filled else 1) for b in static)
    if p.tf32 or not p._fits_twice(p.groups, shared):  # only the loads of warp roles round to tf32
        return
    own = [x for i, x in enumerate(p.body.items) if i not in loads]
    for x in own:
        made = [e.buffer for e in x.effects if e.writes and e.buffer.scope_name in SHARED]
        if made and made[0].data not in p.made and any(e.reads and e.buffer.scope_name == GLOBAL for e in x.effects):
            raise _Declined(f"threads load `{made[0].name}`: a second block on the SM hides that")
        operands = [b for e in x.effects if e.writes and not isinstance(x.stmt, Gemm) for b in [e.buffer] if any(
            isinstance(g.stmt, Gemm) and b.data in (g.stmt.a.buffer.data, g.stmt.b.buffer.data) for g in own)]
        # One warp group that makes operands leaves most of the arithmetic units to a second block.
        fed = [b for b in operands if b.scope_name in SHARED or p.groups == 1 and any(
            e.reads and e.buffer.scope_name in SHARED for e in x.effects)]
        promoted = promoted_gemms(p.shared) if fed else None
        if fed and (fed[0] in filled or p.groups == 1 and fed[0].scope_name in SHARED or chosen_order(p.shared) is None and
                    (promoted is None or len(promoted.items) == 1)):
            raise _Declined(f"threads make the operand `{fed[0].name}`: a second block on the SM runs under that")


def _in_order(p: _WarpRoles, out: Launch, about: str) -> tuple[Launch, str]:
    """The launch with its longest blocks first, if its pipelined loop tells them, and the line of the report about both."""
    if len(p.loops) > 1:
        return out, f"both warp roles run the {len(p.loops)} pipelined loops one after another{about}"
    known = {v: e for v, e in p.values.items() if not contains(e, Load)}
    copies: list[Any] = [p.body.items[i].stmt for ring in p.rings for i in ring.items]
    loads = tuple((tma_bytes(op) // op.plan.iterations, tuple(map(convert, op.src.mins))) for op in copies)
    turned = longest_first(out, Work(loads, _inlined(convert(p.loop.extent), known), out.block_vars))
    about += "" if turned is out else "; the longest blocks first"
    return turned, f"both warp roles run the program's own loops around the pipeline{about}"


def _inlined(e: Expr, values: dict[Var, Expr]) -> Expr:
    """An expression with all bound variables replaced by their values.  Raises _Declined for a large one."""
    for _ in range(len(values)):
        if values.keys().isdisjoint(free_vars(e)):
            break
        e = substitute(e, values)
        if is_large(e):
            raise _Declined("a bound or an index of its loop is a large expression")
    return e
