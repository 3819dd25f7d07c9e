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
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (Alloc, Bind, Buffer, Call, Const, Evaluate, Expr, For, If, Launch, Load, Parallel,
                         Stmt, Var, binary, call, const, contains, convert, dtype, free_vars, fresh, is_large, leaves,
                         replace, seq, statements, stmts_of, substitute, walk, with_options, FRAGMENT, GLOBAL, SHARED)
from tilelang.ops import Copy, Gemm, SparseGemm
from tilelang.ops.distribute import conjunction
from tilelang.ops.gemm.wgmma import choose_wgmma, wgmma_cycles
from tilelang.ops.bulk import row_boxes_unsupported
from tilelang.ops.tma import row_boxes, tma_bytes, tma_boxes, tma_unsupported, versions_unsupported
from tilelang.ops.tma_store import STEP_BYTES
from tilelang.target.machine import REGISTERS
from tilelang.target.thread_calls import CLOCKS

from .consumer_schedule import best_order, chosen_order, enough_stages, items_of
from .emit import consumer, producer, released
from .loop_order import ended_weight
from .loop_record import record_of
from .operand_versions import operand_versions, operands_in_registers, transposed_gemms, whole_loads
from ..analysis.copied_tiles import CopiedTiles, tf32_tiles
from ..analysis.effects import acts, effects, is_sync, may_wait
from ..legalize.hopper_features import hopper, unreadable
from ..analysis.liveness import Uses, has_views
from .outer_loops import Around, is_same
from ..analysis.cluster_pairs import rows_of
from ..framework.config import PassConfigKey
from ..framework.pass_ import TILE, PassContext, pass_
from .persistent import Tiles, Work, longest_first, order_of_tiles, plan_tiles, rasterisation, split_index
from ..analysis.statements import around_launch, do, initialised, rename
from ..analysis.pipeline_loops import inner_loops, is_load, is_pipelined, loop_items, ring_stages
from .rings import (GROUP, Handover, Ring, TakenTiles, WarpRoleLoop, WholeTile, barriers, counted_loops, counted_tiles,
                    registers_by_warp_role)
from ..analysis.shared_spans import Span, place, versioned, with_versions

BARRIER_BYTES = 1024  # upper bound for the barriers of all rings
MOST_STAGES = 8  # that a loop gets unasked
_FEW_COLUMNS = 64  # of a GEMM that takes less time than its loads
_MANY = 6  # tiles of an SM: a counter for them is allocated and cleared for each call
_GAIN = 0.97  # cycles with versions of operands, of those without: they take memory
_INITS = {"mbarrier_init", "fence_mbarrier_init"}
_NEVER = "thread_return", "in_warp_groups", "cluster_sync", "cluster_arrive", "cluster_wait"  # not behind the loop either


class _Declined(Exception):
    """A launch cannot be specialised; the message is the reason for the report."""


@pass_(needs=TILE, of=Launch, when=lambda cx: hopper(cx).warp_roles)
def specialize_warps(launch: Launch, cx: PassContext) -> Launch:
    """Specialises the warps of launches with a pipelined loop; see the module's docstring.

    Needs tl.enable_hopper and sm_90a; off with tl.disable_warp_specialized or tl.disable_tma_lower.  A launch that cannot be
    specialised is not changed, and its attr `report` gives the reason.
    Keeps: the result of the sequential loop, for every extent (0 too).
    """
    head, body, tail = _around(launch)
    out = _specialized(replace(launch, body=body) if head or tail else launch, cx)
    return replace(out, body=seq(*head, out.body, *tail, span=launch.body.span)) if head or tail else out


def _around(launch: Launch) -> tuple[list[Stmt], Stmt, list[Stmt]]:
    """around_launch, and what all threads of a program's own clusters do: first the initialisation of the program's barriers,
    after which blocks meet, and the last meeting."""
    head, body, tail = around_launch(launch)
    stmts = list(stmts_of(body))
    meets = [k for k, s in enumerate(stmts) if isinstance(s, Evaluate) and s.call.op == "cluster_sync"]
    if launch.plan.cluster is None or not meets:
        return head, body, tail
    if meets[-1] == len(stmts) - 1:
        tail.insert(0, stmts.pop())
    if meets[0] < len(stmts) and all(isinstance(s, Alloc) or isinstance(s, If) and {c.op for c in walk(s.then, Call)} <= _INITS
                                     for s in stmts[:meets[0]]):
        head, stmts = [*head, *stmts[:meets[0] + 1]], stmts[meets[0] + 1:]
    return head, seq(*stmts, span=body.span), tail


def _specialized(launch: Launch, cx: PassContext) -> Launch:
    """The launch with warp roles, or unchanged with the reason in its report."""
    loops = _looped(launch)
    if not loops:
        return launch
    forms: list[tuple[Launch, list[For]]] = [(launch, loops)]
    for form in (launch, transposed_gemms(launch)):
        got = operands_in_registers(form, _looped(form))
        if got[0] is not form:
            forms[:0] = [got]
    try:
        tried: list[_WarpRoles] = []
        for attempt in filter(None, (operand_versions(*whole_loads(*x)) for x in forms)):
            try:
                tried.append(_WarpRoles(*attempt, cx))
                return tried[-1].run()
            except _Declined:
                pass
        plain = _WarpRoles(launch, loops, {}, cx)
        for p, q in zip(plain.loops, tried[-1].loops if tried else ()):
            if [type(x.stmt) for x in p.body.items] == [type(x.stmt) for x in q.body.items]:  # only names of tiles differ
                p.body.search = q.body.search
        return plain.run()
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


def _bytes_of_versions(loops: list[_WarpRoles]) -> int:
    """Of all tiles that rings of the loops have: a tile has versions in each ring that loads it."""
    return sum(b.bits // 8 for b in {v for p in loops for r in p.rings for v in r.buffers.values()})


class _WarpRoles(WarpRoleLoop):
    """Rewrites one launch.  Raises _Declined if that is not possible."""

    def __init__(self, launch: Launch, loops: list[For], made: Mapping[Var, int], cx: PassContext) -> None:
        x, y, z = launch.threads
        if y != 1 or z != 1 or x % GROUP or not 1 <= x // GROUP <= 3:
            raise _Declined(f"{x} x {y} x {z} threads are no 1 to 3 warp groups")
        asked, plan = ring_stages(loops[0]), loops[0].plan
        grows = cx.option(PassConfigKey.TL_EXTRA_STAGES) and not (plan.order or plan.software_pipeline_order)
        if asked is None or asked < 2 and not grows:
            raise _Declined("no automatic pipeline of two stages or more")
        super().__init__(launch, loops[0], loop_items(stmts_of(loops[0].body)), [], x // GROUP, max(asked, 2),
                         launch.thread_vars[0], cx, made=made)
        self.asked, self.loops = asked, [self, *(_WarpRoles(launch, [x], made, cx) for x in loops[1:])]
        self.tf32 = tf32_tiles(launch, self.loop, self.body.items)
        self.values = {s.var: s.value for s in walk(launch.body, Bind)}
        self.used = {x.storage for x in effects(launch.body)}
        self.written = {x.storage for x in effects(launch.body) if x.writes}
        self.about = ""  # text for the report: how tiles are given to blocks
        self.scalars: set[Var] = set()  # storage of the program's variables that both warp roles keep

    def run(self) -> Launch:
        for n, x in enumerate(self.loops):
            try:
                _check(x)
                x.rings = _rings(x)
                if x.asked < x.stages and x._free() < 0:
                    raise _Declined(f"two stages do not fit in shared memory; the loop asks for {x.asked}")
            except _Declined as e:
                raise e if len(self.loops) == 1 else _Declined(f"pipelined loop {n + 1} of {len(self.loops)}: {e}") from None
        taken = _taken(self)
        stmts = stmts_of(self.launch.body)
        at = next((k for k, s in enumerate(stmts) if s is self.loop), None)
        # Variables of a thread that decide how often the loop runs may be kept by both warp roles.
        if len(self.loops) > 1 or at is None or not self._plain(convert(self.loop.extent)):
            return self._inside([p.loop for p in self.loops])
        _check_copied(self)
        common, before = self._common(stmts[:at])
        self._reachable()
        self.stages = _taken_stages(self)
        tiles = taken.tiles if taken is not None else _tiles(self, not any(map(acts, stmts[:at + 1])))
        self.repeated = tiles is not None and not tiles.once
        for ring in self.rings:
            self._make(ring, tiles)
        steps = None if tiles is None else counted_tiles(tiles, Analyzer().simplify(_inlined(
            convert(self.loop.extent), self.values)), self.stages, {*self.launch.block_vars} | self.bound)
        self.beside, self.base = 1 if self._alone() else 2, None if steps is None else steps.base
        _check_second_block(self)
        _check_versions(self)
        binds: list[Stmt] = [s for s in common if isinstance(s, Bind)]
        after = {e.storage for s in stmts[at + 1:] for e in effects(s)}
        first = {id(s): WholeTile(_by_group(self, s), self.groups, self.thread, tiles, s.dst.buffer.data in after)
                 for s in before if isinstance(s, Copy) and _fills_once(self, s)}
        idle = _common_alone(self, tiles, whole := [*first.values()])
        loading = producer(self, [x for w in whole for x in w.produce()], self.pure, self.tf32)
        # What the loop does not read is free in front of it: the producer fills it for the next tile while the loop runs.
        used = {e.storage for e in effects(self.loop)}
        early = {x: w for w in whole if not w.late and (x := w.copies[0].dst.buffer.data) not in used}
        read = {x: max(n for n, s in enumerate(before) for e in effects(s) if e.storage is x) for x in early}
        opening = [x for n, s in enumerate(before) for x in (*(first[id(s)].filled() if id(s) in first else [s]), *(
            y for b, w in early.items() if read[b] == n for y in w.release(self)))]
        # No block of a cluster may end, or start to load, while another one still accesses its shared memory.  If a block has
        # one tile, the blocks of its cluster are independent after the main loop, so the wait is at the very end.
        cluster = tiles is not None and tiles.cluster_map is not None
        done = [do("cluster_arrive")] if (parting := cluster and tiles is not None and tiles.once) else []
        ending = stmts[at + 1:]
        inside = conjunction(*(x for _, x in tiles.inside)) if tiles is not None and idle is None else None
        ending = (If(inside, seq(*ending)),) if inside is not None and ending else ending
        rest = [w for w in whole if w not in early.values()]
        computing = [*opening, *consumer(self, [x for w in rest if not w.late for x in w.release(self)],
                                         {w.copies[0].dst.buffer for w in rest}), *done, *ending,
                     *(x for w in whole if w.late for x in w.release(self))]
        computing = computing if idle is None else [If(idle, seq(*computing), seq(*released(self), *done))]
        if tiles is not None and steps is not None:
            loading, computing = ([*steps.begin, *tiles.before, tiles.loop(
                *(taken.begin(code is loading) if taken else ()), *steps.bind, *binds, *code, *steps.advance)]
                for code in (loading, computing))
            loading, binds = rename(loading), []
        end = do("cluster_wait" if parting else "cluster_sync") if cluster else None
        allocs, made = [s for s in common if isinstance(s, Alloc)], [b for w in whole for b in (w.full, w.empty)]
        if taken is not None:
            allocs, made = [*allocs, Alloc(taken.counter), Alloc(taken.slots)], [*made, taken.full, taken.empty]
        out = self._assembled(allocs, binds, made, loading, computing, end)
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
            p.scalars, p.visible, p.bound, p.repeated = around.scalars, around.visible, around.bound, True
            p._reachable()
        if not several:
            _check_copied(self)
            self.stages = _taken_stages(self)
        filled = {b for p in loops for b in p.filled}
        room = self.cx.target.limits.shared_per_block - BARRIER_BYTES - sum(
            b.bits // 8 for b in self._static() if b.scope_name in SHARED and b not in filled)
        counts, begin = counted_loops(self.loops, lambda n, r: self.loops[n]._make(r, None), room)
        for p, steps in zip(loops, counts):
            p.beside, p.base = 1 if self._alone() else 2, steps.base
            _check_versions(p)
        if not several:
            _check_second_block(self)
        new = {b: v for p in loops for r in p.rings for b, v in r.buffers.items()}
        if several and (taken := _bytes_of_versions(loops)) > room:
            raise _Declined(f"the stages of {len(loops)} pipelined loops take {taken} of {room} bytes of shared memory")
        handover = Handover(self) if not several and _hands_over(self, new) else None
        # A handover counts in the producer only.
        more, awaited, ready = ((handover.count,), handover.awaited, handover.ready) if handover else ((), [], [])
        loading = rename([*begin, *(x for s in (*counts, *more) for x in s.begin), *around.loading({id(p.loop): [
            *(x for s in (own, *more) for x in s.bind), *awaited, *producer(p, [], p.pure, p.tf32),
            *(x for s in (own, *more) for x in s.advance)] for p, own in zip(loops, counts)})])
        computing = [*begin, *(x for s in counts for x in s.begin), *around.computing(
            {id(p.loop): [*s.bind, *ready, *consumer(p), *s.advance] for p, s in zip(loops, counts)})]
        drained: list[Buffer | None] = [handover.drained] if handover else []
        out = self._assembled([*map(Alloc, around.allocs)], [], drained, loading, computing)
        out = with_versions(out, new.items()) if handover else out
        if guard is not None:
            allocs = [s for s in stmts_of(out.body) if isinstance(s, Alloc)]
            rest = [s for s in stmts_of(out.body) if not isinstance(s, Alloc)]
            out = replace(out, body=seq(*allocs, *common, replace(guard, then=seq(*rest))))
        turned = out if several else longest_first(out, _work(self, _unread(self)))
        own = f"{len(loops)} pipelined loops one after another" if several else "program's own loops around the pipeline"
        about = f"both warp roles run the {own}{handover.about if handover else ''}"
        return self._said(turned, about if turned is out else f"{about}; the longest blocks first")

    def _assembled(self, allocs: list[Alloc], binds: list[Stmt], more: list[Buffer | None], loading: list[Stmt],
                   computing: list[Stmt], end: Stmt | None = None) -> Launch:
        """The launch with the code of the two warp roles, and the initialisation of its barriers before them.

        allocs: of shared buffers, of which those that only rings replace are left out.  binds: values for both warp roles.
        more: barriers beside those of the rings.  end: the statement behind both warp roles, where blocks are in clusters.
        """
        # One thread of the producer group loads.  What another block of the cluster waits for does not wait for the loads.
        last = const(self.groups * GROUP + 32, self.thread.dtype)
        one = If(binary("lt", self.thread, last), If(call("elect_one", (), "bool"), seq(*loading)))
        parting = [do("cluster_arrive")] if end == do("cluster_wait") else []
        rings = [r for p in self.loops for r in p.rings]
        new, used = [x for r in rings for x in r.buffers.items()], {e.storage for s in computing for e in effects(s)}
        made = dict.fromkeys(b for b in (*(x for r in rings for x in (r.full, r.empty)), *more) if b is not None)
        filled = {b for b, _ in new}  # by several rings with versions of their own, where loops load it with other tiles
        body = seq(*(s for s in allocs if s.buffer not in filled or s.buffer.data in used),
                   *map(Alloc, dict.fromkeys(v for _, v in new)), *binds, *map(Alloc, made),
                   initialised(made, self.thread), do("sync_threads" if end is None else "cluster_sync"),
                   If(call("in_warp_groups", (), "bool", first=self.groups, count=1), seq(*_registers(self, 0), *parting, one),
                      seq(*_registers(self, 1), *computing), span=self.loop.span), end, span=self.launch.body.span)
        return replace(self.launch, body=body, threads=(self.launch.threads[0] + GROUP, 1, 1))

    def _said(self, out: Launch, about: str) -> Launch:
        """The launch with its attributes: layouts of all versions, number of consumer threads, and the reports."""
        rings = [(p, r) for p in self.loops for r in p.rings]
        new = list(dict.fromkeys(x for _, r in rings for x in r.buffers.items()))
        layouts = self.launch.plan.layouts
        if layouts:  # a layout that the user gave for a buffer also applies to its versions
            out = with_options(out, layouts=(*layouts, *((v, lay) for b, lay in layouts for x, v in new if x is b)))
        names = ", ".join(sorted({b.name for b, _ in new}))
        stages = tuple(dict.fromkeys((b.name, v.shape[0]) for _, r in rings for b, v in r.buffers.items()))
        overlap = self.overlap if len(self.loops) == 1 else "; ".join(
            f"pipelined loop {n + 1} of {len(self.loops)}: {p.overlap}" for n, p in enumerate(self.loops))
        kept = [s.call.options.n for warp_role in (0, 1) for s in _registers(self, warp_role)]  # type: ignore[attr-defined]
        return with_options(out, compute_threads=self.groups * GROUP, report=(*self.launch.plan.report, about), overlap=overlap,
                          schedules=tuple(str(record_of(x, kept)) for x in self.loops), stages=stages, pipeline_report=(
            f"warp groups: 1 loads {names} by TMA, {self.groups} compute{'s' * (self.groups == 1)}, "
            f"{' and '.join(dict.fromkeys(str(p.stages) for p in self.loops))} stages"))

    def _free(self) -> int:
        """Bytes of shared memory that are left beside the stages, barriers and what an epilogue stages."""
        return self.cx.target.limits.shared_per_block - self._shared() - self.groups * STEP_BYTES - BARRIER_BYTES

    def _coordinates(self, op: Any) -> tuple[Expr, ...]:
        """Where a copy reads, in terms of the block variables and loop variables."""
        return tuple(_inlined(convert(m), self.values) for m in op.src.mins)

    # ---- conditions -----------------------------------------------------------------------------------------------

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
        """Whether a value is the same in all threads and at any time."""
        return is_same(e, self.scalars, self.written)

    def _reachable(self) -> None:
        """Raises _Declined unless the producer can compute the loop's bounds and the coordinates of its copies."""
        inside: set[Var] = {self.loop.var}
        for s in self.body.pure:
            if self._plain(s.value) and not (free_vars(s.value) & self.bound) - self.visible - inside:
                inside.add(s.var)
        self.pure = [s for s in self.body.pure if s.var in inside]
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
        for i in ring.items:
            op: Any = self.body.items[i].stmt
            many, count = op.plan.iterations, self.stages
            # Loads of a version wait for the stage of the loop's iteration `stages` before: all that read it are over by then.
            extent = Analyzer().simplify(convert(self.loop.extent))
            fit = [n for n in range(1 + -(-(count - 1) // many), count + 1) if not self.repeated or
                   isinstance(extent, Const) and extent.value % (many * n) == 0]  # the next run begins with the first version
            if many > 1 and fit:
                self.lasting[op.dst.buffer], count = many, fit[0]
            ring.buffers[op.dst.buffer] = versioned(op.dst.buffer, count)
            same = frozenset() if cluster_map is None else frozenset(
                k for k in cluster_map.wide
                if not any(self.launch.block_vars[k] in free_vars(e) for e in self._coordinates(op)))
            if cluster_map is not None and same and op.dst.buffer.ndim > 1 and tma_boxes(op, len(cluster_map.sharers(same))):
                ring.common[i] = same
        ring.cluster_map = cluster_map if ring.common else None
        name = "_".join(b.name for b in ring.buffers)
        ring.full = barriers(f"{name}_full", (1,) * self.stages)
        fillers = ring.cluster_map.peers(ring.common.values())[0] if ring.cluster_map else 1  # blocks that fill its stages
        ring.empty = barriers(f"{name}_empty", (self.groups * 4 * fillers,) * self.stages)

    def _alone(self) -> bool:
        """Whether only one block fits an SM, because of its shared memory or the registers of its fragments."""
        if self.launch.plan.min_blocks_per_sm > 1:
            return False
        return not _fits_twice(self, self.groups + 1, self._shared())

    def _static(self) -> list[Buffer]:
        return [s.buffer for s in walk(self.launch.body, Alloc) if s.buffer.is_static and s.buffer.data in self.used]

    def _shared(self) -> int:
        """Bytes of shared memory with all stages, without the barriers."""
        ring = {b: p.stages for p in self.loops for b in p.filled}
        return sum(b.bits // 8 * ring.get(b, 1) for b in self._static() if b.scope_name.startswith("shared"))


def _common_alone(p: _WarpRoles, tiles: Tiles | None, whole: list[WholeTile]) -> Expr | None:
    """Lets blocks outside the grid load only their pieces of what the blocks of their cluster have in common: returns whether a
    block lies inside, None where all compute alike.

    In clusters of two dimensions such a block might load nothing for another one, which then would not wait for it before it
    releases the stage again.
    """
    team = None if tiles is None else tiles.cluster_map
    if tiles is None or team is None or len(tiles.inside) != 1 or len(team.wide) > 1 or whole or p.made:
        return None
    for ring in p.rings:
        ring.inside = tiles.inside
    return tiles.inside[0][1]


def _fits_twice(p: _WarpRoles, groups: int, shared: int) -> bool:
    """Whether two blocks of so many warp groups and bytes of shared memory fit an SM, with the fragments of this one."""
    fragments = sum(b.bits // 32 for b in p._static() if b.scope_name == FRAGMENT)
    limits = p.cx.target.limits
    few = limits.registers_per_sm // (2 * GROUP * groups) - REGISTERS.plain_loop
    return fragments <= few * p.groups * GROUP and 2 * shared <= limits.shared_per_sm


def _hands_over(p: _WarpRoles, new: dict[Buffer, Buffer]) -> bool:
    """Whether the launch fits in shared memory if rings share bytes with other tiles, and only then."""
    spans = [Span(new.get(b, b), 0, 0) for b in p._static() if b.scope_name in SHARED]
    limit, pairs = p.cx.target.limits.shared_per_block - BARRIER_BYTES, p.launch.plan.disjoint
    both = with_versions(p.launch, new.items()).plan.disjoint
    return place(spans, [x for x in pairs if not new.keys() & x]) > limit >= place(spans, both)


def _registers(p: _WarpRoles, warp_role: int) -> list[Stmt]:
    got = registers_by_warp_role(p.launch, p.groups)
    if got is None or not p._alone() or p.launch.plan.keep_registers:
        return []
    return [do("set_max_nreg", n=got[warp_role], inc=bool(warp_role))]


def _check(p: _WarpRoles) -> None:
    own, stmts = p.launch.plan.cluster is not None, list(stmts_of(p.launch.body))
    at = next((k for k, s in enumerate(stmts) if s is p.loop), None)
    if own and (at is None or len(p.loops) > 1):
        raise _Declined("the program launches clusters itself, and its pipelined loop stands inside another statement")
    # Behind the loop, blocks of a program's own cluster, which have one tile each, may exchange what the consumers computed.
    for k, x in ((k, c) for k, s in enumerate(stmts) for c in walk(s, Call)):
        free = own and at is not None and k > at
        if x.op in _NEVER or not free and is_sync(x) and x.op not in ("sync_threads", "sync_warp", *CLOCKS):
            raise _Declined(f"the program calls {x.op} itself")
    if any(is_sync(x) for x in walk(p.loop.body, Call)):
        raise _Declined("the loop orders threads itself")
    if not contains(p.loop.body, Gemm):
        raise _Declined("there is no GEMM in the loop: other blocks of the SM hide its loads")
    if leaves(p.loop.body):
        raise _Declined("break or continue in the loop")
    for op in walk(p.loop.body, Gemm):
        plan = choose_wgmma(op, p.groups * GROUP, p.tf32) if hopper(p.cx).wgmma else "it is off"
        if isinstance(plan, str):
            raise _Declined(f"a T.gemm is not computed by wgmma: {plan}")
    if any(isinstance(s, For) and is_pipelined(s) for s in statements(p.loop.body)):
        raise _Declined("a pipelined loop inside the pipelined loop")


def _rings(p: _WarpRoles) -> list[Ring]:
    items = p.body.items
    loads = [i for i, x in enumerate(items) if is_load(x.stmt)]
    if not loads:
        raise _Declined("no copy from global to shared memory in the loop")
    rings: dict[tuple[int, int], Ring] = {}
    for i in loads:
        op: Any = items[i].stmt
        b = op.dst.buffer
        users = [j for j, x in enumerate(items) if j != i and x.touches(b.data)]
        boxes = row_boxes_unsupported if b.ndim == 1 else tma_unsupported
        why = boxes(op, hopper(p.cx).strides) or (versions_unsupported(b) if b.ndim > 1 else "") or \
            Uses(p.launch.body).unversionable(p.loop, items, b) or unreadable(p.launch, op.src.buffer)
        if why:
            raise _Declined(why)
        # Parallel loops may change a tile in place.
        written = any(e.writes and e.storage is b.data and not isinstance(items[j].stmt, Parallel)
                      for j in users for e in items[j].effects)
        if not users or users[0] < i or written:
            raise _Declined(f"`{b.name}` is not only copied to and then used")
        rings.setdefault((users[0], users[-1]), Ring([], users[0], users[-1])).items.append(i)
    out: list[Ring] = []
    gemm = next((i for i, x in enumerate(items) if isinstance(x.stmt, Gemm)), len(items))
    metadata = {x.stmt.metadata.buffer.data for x in items if isinstance(x.stmt, SparseGemm)}
    for key in sorted(rings):
        ring = rings[key]
        for small in [x for x in out if x.last < ring.first == gemm and 8 * x.bytes(items) <= ring.bytes(items)]:
            made = {b.data for b in p.tiles(small)}  # and what follows from these tiles
            for x in items[small.first:ring.first]:
                made |= {e.storage for e in x.effects if e.writes and any(y.reads and y.storage in made for y in x.effects)}
            # The GEMM starts first, or takes only its metadata from them, while the GEMM before runs: one wait and one release
            # for both.
            if not any(map(items[ring.first].touches, made - metadata)):
                out.remove(small)
                ring = Ring(sorted(small.items + ring.items), small.first, ring.last)
        out.append(ring)
    return out


def _work(p: _WarpRoles, values: dict[Var, Expr], padded: bool = False) -> Work:
    """What a block does, with its names replaced by these values.  padded: see Work.padded."""
    copies: list[Any] = [p.body.items[i].stmt for ring in p.rings for i in ring.items]
    loads = [(tma_bytes(op), p._coordinates(op)) for op in copies]
    rest = [x.stmt for i, x in enumerate(p.body.items) if i not in p.loads]
    # The time of work other than GEMMs is not known: it may hide any load.
    cycles = sum(wgmma_cycles(x) for x in rest) if all(isinstance(x, Gemm) for x in rest) else 0
    rows = tuple(rows_of(op, at, p.loop.var) for op, (_, at) in zip(copies, loads))
    return Work(tuple(loads), _inlined(convert(p.loop.extent), values), p.launch.block_vars, cycles, rows, padded)


def _tiles(p: _WarpRoles, padded: bool) -> Tiles | None:
    """The loop over tiles of a persistent launch; None for one tile a block.  padded: see Work.padded."""
    got = plan_tiles(p.launch, _work(p, p.values, padded), p.cx, p._alone(), p._shared() > p.cx.target.limits.shared_per_block)
    p.about = f"one tile a block ({got})" if isinstance(got, str) else got.report
    if isinstance(got, str):
        _ordered(p, _work(p, p.values, padded))
    return None if isinstance(got, str) else got


def _ordered(p: _WarpRoles, work: Work) -> None:
    """Give blocks of a known number, which run at once, their tiles in the order in which they request the least of L2."""
    launch, blocks = p.launch, prod(g.value if isinstance(g, Const) else 0 for g in map(convert, p.launch.grid))
    if 1 < blocks <= p.cx.target.limits.sm_count and not (
            launch.plan.swizzle or launch.plan.cluster or may_wait(launch.body)) and longest_first(launch, work) is launch:
        p.launch = with_options(launch, swizzle=rasterisation(launch, work, blocks, (1,) * len(launch.grid), p.cx))


def _taken(p: _WarpRoles) -> TakenTiles | None:
    """Tiles that blocks take from a counter, where lengths, or whether blocks have work, are data and an SM gets many tiles."""
    launch, extent, asked = p.launch, convert(p.loop.extent), p.cx.option(PassConfigKey.TL_PERSISTENT)
    total = prod(int(e.value) if isinstance(e, Const) else 0 for e in map(convert, launch.grid))
    blocks = p.cx.target.limits.sm_count if asked is None or asked is True else int(asked)
    if len(p.loops) > 1 or may_wait(launch.body) or launch.plan.swizzle or launch.plan.cluster or not blocks or \
            not p._plain(extent) or total < (1 if asked else _MANY) * blocks or not (asked or p._alone()) or p._free() < 0 or \
            p.cx.option(PassConfigKey.TL_CLUSTER) is not None:
        return None
    binds, guard, body = _guarded(p)
    known = [_inlined(e, p.values) for e in (extent, *(() if guard is None else (guard.cond,)))]
    if not any(contains(e, Load) for e in known) or not any(s is p.loop for s in stmts_of(body)):
        return None
    own = tuple(fresh(v.name, v.dtype) for v in launch.block_vars)
    few = replace(launch, block_vars=own, body=seq(*map(Bind, launch.block_vars, own)))
    work = _work(p, _unread(p))
    turned, order = longest_first(few, work), order_of_tiles(launch, work, blocks, (1,) * len(own), p.cx)[0]
    p.launch = replace(launch, body=seq(*binds, *stmts_of(body)))
    p.about = f"persistent: {blocks} blocks take tiles from a counter{'' if turned is few else '; the longest blocks first'}"
    tiles = Tiles(const(blocks), Var("block", dtype("int32")), Var("tile_step", dtype("int32")), const(total + 1), (), p.about)
    return TakenTiles(p, tiles, total, order if turned is few else lambda t: [
        *split_index(turned, t, range(len(own))), *stmts_of(turned.body)], None if guard is None else (binds, guard.cond))


def _by_group(p: _WarpRoles, op: Any) -> list[Any]:
    """A copy, divided by rows if each warp group uses only its own rows, as A of a GEMM, and nothing else uses them."""
    b = op.dst.buffer
    used = [e.node for e in effects(p.launch.body) if e.storage is b.data and e.node is not op]
    alone = p.groups > 1 and all(
        isinstance(x, Gemm) and x.a.buffer is b is not x.b.buffer and x.a.extents[:-1] == b.shape[:-1] and not x.transpose_a
        and getattr(choose_wgmma(x, p.groups * GROUP, p.tf32), "warps", None) == (p.groups * 4, 1) for x in used)
    return (row_boxes(op, p.groups) if alone else None) or [op]


def _fills_once(p: _WarpRoles, op: Any) -> bool:
    """Whether the producer can do a copy that precedes the loop: nothing else writes its destination."""
    b = op.dst.buffer
    if not is_load(op) or tma_unsupported(op, hopper(p.cx).strides) or has_views(b, p.launch.body) or \
            unreadable(p.launch, op.src.buffer):
        return False
    writers = [e for e in effects(p.launch.body) if e.storage is b.data and e.writes]
    return len(writers) == 1 and all(p._plain(m) and not (free_vars(m) & p.bound) - p.visible
                                     for m in op.src.mins if isinstance(m, Expr))


def _taken_stages(p: _WarpRoles) -> int:
    """The number of stages: as asked for, or more if the loop would wait for loads and no other block needs the memory.

    GEMMs that wait for loads alone get all that is left beside two staging buffers a warp group (loads are late at times,
    which no simulation of a steady loop says).
    """
    size = sum(b.bits // 8 for b in p.filled)
    extent = Analyzer().simplify(convert(p.loop.extent))
    most = min(MOST_STAGES, p.stages + p._free() // size)
    short = isinstance(extent, Const) and int(extent.value) < 4 * p.stages
    alone = p._alone()
    # Blocks that only multiply and have an SM each wait for nothing but their first loads.
    blocks = prod(int(e.value) if isinstance(e, Const) else 0 for e in p.launch.grid)
    once = not alone and 0 < blocks <= p.cx.target.limits.sm_count and p.launch.plan.min_blocks_per_sm <= 1 and all(
        isinstance(x.stmt, (Copy, Gemm)) for x in p.body.items)
    if most <= p.stages or short or not p.cx.option(PassConfigKey.TL_EXTRA_STAGES) or not (alone or once):
        return p.stages
    if once:
        return most
    only = all(isinstance(x.stmt, Gemm) for i, x in enumerate(p.body.items) if i not in p.loads)
    left = min(most, p.stages + (p._free() - p.groups * STEP_BYTES) // size) if only else 0
    found = max(left, enough_stages(p, most))
    # Where metadata are loaded, the next GEMM waits for all that is between two: 128 x 256 tiles in five stages, whose numbers
    # are remainders, take 10 to 12 % more cycles than in four, though with half the staging too.
    sparse = any(isinstance(x.stmt, SparseGemm) for x in p.body.items)
    return max(p.stages, 1 << found.bit_length() - 1) if sparse else found


def _guarded(p: _WarpRoles) -> tuple[list[Bind], If | None, Stmt]:
    """(bindings, the condition around all that a block does, the rest of the body); no condition if it has none that all
    threads find alike."""
    *before, last = stmts_of(p.launch.body)
    binds, allocs = [s for s in before if isinstance(s, Bind)], [s for s in before if isinstance(s, Alloc)]
    if not isinstance(last, If) or last.orelse is not None or len(binds) + len(allocs) < len(before) or any(
            not p._plain(e) or p.thread in free_vars(e) for e in (last.cond, *(s.value for s in binds))):
        return [], None, p.launch.body
    return binds, last, seq(*allocs, *stmts_of(last.then))


def _check_versions(p: _WarpRoles) -> None:
    """Raises _Declined if versions of operands do not fit in shared memory, or let no GEMM run under more.

    Also if other blocks of the SM run meanwhile: registers and shared memory are theirs.  Also if a GEMM has few columns:
    weights for few rows are bound by memory, and the loops are short.
    """
    if not any(e.storage in p.made for x in p.body.items for e in x.effects):
        return
    more = sum(b.bits // 16 for b in p._static() if b.data in p.made and b.scope_name in SHARED)
    if p.launch.plan.min_blocks_per_sm > 1 or _fits_twice(p, p.groups + 1, p._shared() - more):
        raise _Declined("other blocks run while operands are made")
    if p._shared() + p.groups * STEP_BYTES + BARRIER_BYTES > p.cx.target.limits.shared_per_block:
        raise _Declined("there is no shared memory for versions of operands")
    order, items = chosen_order(p), items_of(p)
    if any(items.gemm(i).n < _FEW_COLUMNS for i in items.gemms):
        raise _Declined("the loop is bound by memory: its GEMMs have few columns")
    carried = order is not None and items.carries(order)
    alone = items_of(p, versions=False)
    one = best_order(p, alone)
    if order is None or order.cycles > one.cycles * (ended_weight(items) if carried and not alone.carries(one) else _GAIN):
        raise _Declined("versions of operands gain nothing")


def _check_copied(p: _WarpRoles) -> None:
    """Raises _Declined if the threads copy a large tile in a parallel loop: without warp roles it is loaded ahead too."""
    tiles, large = CopiedTiles(p.launch, p.cx), sum(b.size * b.dtype.bytes for b in p.filled) // 4
    for i, x in enumerate(p.body.items):
        if i not in p.loads and (b := tiles.gathered(x.stmt)) is not None and b.size * b.dtype.bytes >= large:
            raise _Declined(f"TMA does not load `{b.name}`, asynchronous copies of the threads do")


def _check_second_block(p: _WarpRoles) -> None:
    """Raises _Declined if the loop's threads do work that no GEMM of their block can run under, and two blocks without warp
    roles fit an SM: then each block runs under the GEMMs and loads of the other."""
    loads, filled = p.loads, p.filled
    static = [b for b in p._static() if b.scope_name in SHARED]
    shared = sum(b.bits // 8 * (max(p.asked, 1) if b in filled else 1) for b in static)
    if p.tf32 or not _fits_twice(p, p.groups, shared):  # only the loads of warp roles round to tf32
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
        if fed and (fed[0] in filled or p.groups == 1 and fed[0].scope_name in SHARED or chosen_order(p) is None):
            raise _Declined(f"threads make the operand `{fed[0].name}`: a second block on the SM runs under that")


def _unread(p: _WarpRoles) -> dict[Var, Expr]:
    """The values of names that do not read memory."""
    return {v: e for v, e in p.values.items() if not contains(e, Load)}


def _inlined(e: Expr, values: dict[Var, Expr]) -> Expr:
    """An expression with all bound variables replaced by their values.  Raises _Declined for a large one."""
    for _ in range(len(values)):
        if values.keys().isdisjoint(free_vars(e)):
            break
        e = substitute(e, values)
        if is_large(e):
            raise _Declined("a bound or an index of its loop is a large expression")
    return e
