"""Turns pipelined loops into serial loops over versioned shared buffers, with asynchronous copies, commits and waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import field, replace as evolve

from tilelang.errors import InternalError
from tilelang.ir import (Alloc, Buffer, Call, Const, For, Launch, Region, Stmt, Var, is_const, leaves, replace, rewrite_stmts,
                         statements, stmts_of, walk, with_options, EMPTY, SHARED)
from tilelang.ir.record import state
from tilelang.ops import Copy, Gemm
from tilelang.ops.gemm.wgmma import choose_wgmma
from tilelang.ops.tma import tma_unsupported, versions_unsupported
from tilelang.target.machine import REGISTERS, RESERVED_SHARED
from tilelang.target.warp_groups import WARP_LANES

from ..framework.config import PassConfigKey
from ..analysis.copied_tiles import CopiedTiles
from ..analysis.effects import effects, orders
from ..legalize.hopper_features import hopper, no_warp_roles, unreadable
from ..analysis.liveness import Uses
from ..framework.pass_ import TILE, PassContext, pass_
from ..analysis.loop_schedule import Schedule
from ..analysis.vectorize import MAX_BYTES
from ..analysis.shared_spans import live_at_once, resident_blocks, versioned, with_versions
from .loop_record import record_of_blocks, record_of_threads
from .emit import CopiedAhead, Plan
from .rings import GROUP, barriers
from ..analysis.pipeline_loops import (SERIAL, Body, Item, check_flow, is_pipelined, loop_items, producer_first, ring_stages,
                                       scheduled_lists, stage_span, violations, wanted_stages)

_FEWER = 1.05  # weight of the cycles with one version of a tile, as of those with a stage less
_CARRIED = 4  # stages of a loop whose GEMM reads one while the next is waited for


@pass_(needs=TILE, of=Launch)
def plan_pipelines(launch: Launch, cx: PassContext) -> Launch:
    """Overlap the copies of later iterations with the computation of this one.

    Before:                                     After (num_stages = 3):
        for k in T.Pipelined(n, num_stages=3):      for step in 0, 1:                            (unrolled)
            T.copy(A[k], A_s)                           if step < n: async copy A[step] -> A_s[step]
            T.gemm(A_s, B_s, C)                         commit
                                                    for k in serial(n):
                                                        wait(1 group pending)
                                                        if k + 2 < n: async copy A[k + 2] -> A_s[(k + 2) % 3]
                                                        commit
                                                        T.gemm(A_s[k % 3], …, C)
    Keeps: the result of the sequential loop, for every n.  The loop stays sequential if a dependence would be broken
    (through any access: atomics, writes of a copied tensor, values carried to the next iteration or out of the loop).
    Attribute `pipeline_report` of the resulting loop tells what was done and why.  Barriers between threads are placed by a
    later pass.
    """
    return _Planner(launch, cx).run()


@state
class _Planner:
    launch: Launch
    cx: PassContext
    made: list[tuple[Buffer, Buffer]] = field(default_factory=list)  # tiles and their versions in a loop
    schedules: list[str] = field(default_factory=list)
    overlap: str = ""  # text for the report
    resident: int = 1  # blocks that an SM runs at once
    wanted: list[int] = field(default_factory=list)  # the same of each loop that is pipelined

    def __post_init__(self) -> None:
        self.uses = Uses(self.launch.body)
        self.tiles = CopiedTiles(self.launch, self.cx)
        self.async_copy = getattr(self.cx.target, "has_cp_async", True)
        self.by_step = int(getattr(self.cx.target, "loads_by_registers", False))

    def run(self) -> Launch:
        if not any(isinstance(s, For) and is_pipelined(s) for s in statements(self.launch.body)):
            return self.launch
        body = self.planned(self.launch.body)
        touched = {e.storage for e in effects(body)}
        gone = {b for b, _ in self.made if b.data not in touched}
        body = rewrite_stmts(body, lambda x: EMPTY if isinstance(x, Alloc) and x.buffer in gone else None) if gone else body
        layouts = self.launch.plan.layouts
        out = with_versions(replace(self.launch, body=body), self.made)
        if layouts:  # a layout that the user gave for a buffer also applies to its versions
            more = tuple((v, lay) for b, lay in layouts for a, v in self.made if a is b)
            out = with_options(out, layouts=tuple(layouts) + more)
        reports = [s.plan.pipeline_report for s in statements(body) if isinstance(s, For)]
        stages = {**dict(self.launch.plan.stages), **{b.name: int(v.shape[0]) for b, v in self.made}}
        off = no_warp_roles(self.cx)
        notes = (*self.launch.plan.report, *([f"no warp specialisation: {off}"] if off else []))
        if min(self.wanted, default=1) > 1 and self.launch.plan.min_blocks_per_sm == 1:
            out = with_options(out, min_blocks_per_sm=min(self.wanted))
        return with_options(out, pipeline_report="; ".join(r for r in reports if r) or None,
                          stages=tuple(stages.items()) or None, report=notes or None, overlap=out.plan.overlap or
                          self.overlap or None,
                          schedules=(*self.launch.plan.schedules, *self.schedules) or None)

    def planned(self, body: Stmt) -> Stmt:
        """A body with its pipelined loops turned into serial code, inner loops first."""
        return rewrite_stmts(body, lambda s: self.loop(s, self.planned(s.body))  # type: ignore[no-any-return]
                             if isinstance(s, For) and is_pipelined(s) else None)

    def loop(self, original: For, body: Stmt) -> Stmt:
        """Serial code of a pipelined loop whose body is already planned."""
        wanted = wanted_stages(original)
        plain = with_options(replace(original, kind="serial", body=body), **SERIAL)

        def serial(why: str) -> For:
            record(None)
            return with_options(plain, pipeline_report=f"sequential: {why}")

        def record(plan: Plan | None, boxed: Collection[int] = ()) -> None:
            self.schedules.append(str(self.recorded(original, loop_body.items, plan, boxed)))

        loop_body = loop_items(stmts_of(body))
        if isinstance(wanted, tuple):
            stage, order = scheduled_lists(original, loop_body, *wanted)
            check_flow(original, loop_body.items, stage, order)
        elif wanted == 0:
            record(None)
            return plain
        if leaves(body):
            return serial("break or continue in the body")
        if orders(original.body):
            return serial("the body orders threads or asynchronous copies itself")
        if not self.cx.option(PassConfigKey.TL_ENABLE_ASYNC_COPY):
            return serial("tl.enable_async_copy is off")
        if not self.by_step and not self.async_copy:
            return serial("no asynchronous copies on this target")
        if self.by_step:
            loop_body = loop_items([x for s in stmts_of(body) for x in (
                s.by_registers() if isinstance(s, Copy) and self.tiles.of(s) is not None else [s])])
            plan = self.by_steps(original, loop_body, wanted if isinstance(wanted, int) else 2)
        elif isinstance(wanted, tuple):
            stages = ring_stages(original)
            plan = self.manual(original, loop_body, *(
                (stage, order) if stages is None else producer_first(loop_body.items, stage, order, stages)))
            if isinstance(plan, str) and stages is not None:
                plan = self.automatic(original, loop_body, stages)
        else:
            plan = self.automatic(original, loop_body, wanted)
        if isinstance(plan, str):
            return serial(plan)
        asked, boxed = wanted if isinstance(wanted, int) else 0, dict[int, Buffer]()
        gemm = self.carried(loop_body.items, plan, asked) if asked and hopper(self.cx).wgmma else None
        if gemm is not None and not isinstance(more := self.automatic(original, loop_body, max(_CARRIED, asked)), str):
            plan = Plan([max(0, s - 1) for s in more.stage], more.order, more.ahead, more.versions, more.report)
            self.overlap = f"`{gemm.c.buffer.name}` is computed under the waits and copies of the next iteration"
            boxed = self.by_tma(original, loop_body.items, plan)
        elif hopper(self.cx).wgmma and not self.by_step and _is_fenced(loop_body.items, plan):
            boxed = self.by_tma(original, loop_body.items, plan)
        self.made += plan.versions.items()
        record(plan, boxed)
        self.wanted.append(self.resident)
        if self.resident > 1:
            _urgent(loop_body)
        return CopiedAhead(plan, plain, loop_body, gemm, boxed, self.launch.thread_vars[0]).code()

    def recorded(self, loop: For, items: list[Item], plan: Plan | None, boxed: Collection[int] = ()) -> Schedule:
        """The record of a loop.  ahead: copies that run ahead -> versions of their tiles; in two steps, these are stores."""
        stage, order, made, started = ([0] * len(items), range(len(items)), dict[Buffer, Buffer](), dict[int, Var]()) \
            if plan is None else (plan.stage, plan.order, plan.versions, plan.ahead)
        ahead = {i: next((int(v.shape[0]) for b, v in made.items() if b.data is t), 1) for i, t in started.items()}
        if self.by_step:
            ahead = {i: next((int(v.shape[0]) for b, v in made.items() if x.touches(b.data)), 1)
                     for i, x in enumerate(items) if isinstance(x.stmt, Copy) and x.stmt.plan.second}
            versions = {e.storage: n for i, n in ahead.items() for e in items[i].effects if e.writes}
            live = live_at_once(items, stage, order, versions, self.launch.num_threads)
            self.resident = resident_blocks(self.launch, loop, [x.stmt for x in items], live, self.cx.target)
            return record_of_blocks(self.launch, loop, items, stage, order, ahead, self.cx.target.machine, self.resident)
        return record_of_threads(self.launch, loop, items, stage, order, ahead, boxed, getattr(self.cx.target, "machine", 80))

    def by_steps(self, loop: For, loop_body: Body, wanted: int) -> Plan | str:
        """A plan of copies in two steps, that of least cycles: with two versions of each tile a block waits less, with one
        or tiles that share bytes, more blocks may fit.  Wide copies past the registers (lower/direct_loads.py) need two."""
        plans = [self.automatic(loop, loop_body, n) for n in ((1,) if wanted == 1 else (2, 1))]
        plans += [] if isinstance(plans[0], str) else self.one_after_another(loop, loop_body)
        able = [p for p in plans if not isinstance(p, str)]
        if len(able) < len(plans):
            return next(p for p in plans if isinstance(p, str))
        costs = [(self.recorded(loop, loop_body.items, p).cycles * (_FEWER if n else 1.0), n) for n, p in enumerate(able)]
        tiles = [x.stmt.dst for x in loop_body.items if isinstance(x.stmt, Copy) and x.stmt.plan.second]
        wide, best = all(t.buffer.size * t.dtype.bits >= 64 * self.launch.num_threads for t in tiles), able[min(costs)[1]]
        direct = bool(best.versions) and max(self.cx.target.async_load_bytes, default=0) == MAX_BYTES
        return evolve(best, again=wide and not direct)

    def one_after_another(self, loop: For, loop_body: Body) -> list[Plan]:
        """The plan where tiles that are used one after another share bytes: a tile is in flight under the last use of the one
        before, the first one's loads are an iteration ahead.  None where all are used at the same time.

            load K[0]; for k: store K[k]; load V[k]; S = Q K; store V[k]; …; load K[k + 1]; C += P V
        """
        items, groups = loop_body.items, list[tuple[list[int], int]]()  # stores of tiles, the last item that uses one
        tiles = {i: x.stmt.dst.buffer for i, x in enumerate(items) if isinstance(x.stmt, Copy) and x.stmt.plan.second}
        if any(_unwaited(items, tiles, i) or self.uses.unversionable(loop, items, b) for i, b in tiles.items()):
            return []
        uses = {i: [j for j, x in enumerate(items) if j != i and x.touches(b.data)] for i, b in tiles.items()}
        for i in sorted(tiles, key=lambda i: uses[i][0]):
            some, last = groups.pop() if groups and uses[i][0] <= groups[-1][1] else ([], -1)
            groups.append(([*some, i], max(last, uses[i][-1])))
        place = {i: (i, 1) for i in range(len(items))}
        for n, (some, _) in enumerate(groups):
            before = groups[n - 1][1]
            place |= {i - 1: (before, 0) for i in some} | {i: (before, 2) if n else (-1, 0) for i in some}
        ranked = sorted(place, key=lambda i: (place[i], i))
        order, stage = [ranked.index(i) for i in range(len(items))], [int(i + 1 not in groups[0][0]) for i in range(len(items))]
        versions = {b.data: 1 for b in tiles.values()}
        return [] if len(groups) < 2 or violations(items, stage, order, versions) else [
            self.plan(loop_body, stage, order, {}, versions)]

    def carried(self, items: list[Item], plan: Plan, stages: int) -> Gemm | None:
        """The GEMM of a block alone on its SM that stays in flight until that of the next iteration has begun, where it is all
        that the loop does with the tiles.  It reads one stage while the next ones are copied: four must fit."""
        own, tiles = [x.stmt for i, x in enumerate(items) if i not in plan.ahead], {*plan.ahead.values()}
        op, limits, threads, most = next(iter(own), None), self.cx.target.limits, self.launch.num_threads, max(_CARRIED, stages)
        shared = {s.buffer for s in walk(self.launch.body, Alloc) if s.buffer.is_static and s.buffer.scope_name in SHARED}
        few, all_ = (sum(b.bits // 8 * (n if b.data in tiles else 1) for b in shared) for n in (stages, most))
        if len(own) > 1 or not isinstance(op, Gemm) or not {op.a.buffer.data, op.b.buffer.data} <= tiles or threads % GROUP or \
                self.launch.plan.by_hand or any(x.op == "in_warp_groups" for x in walk(self.launch.body, Call)) or isinstance(
                    choose_wgmma(op, threads, frozenset()), str) or not is_const(op.clear_accum, 0) or op.sparsity > 1:
            return None
        alone = limits.shared_per_sm < 2 * few or limits.registers_per_sm < 2 * (op.m * op.n + REGISTERS.plain_loop * threads)
        return op if alone and all_ + 2 * RESERVED_SHARED <= limits.shared_per_block and (
            most == stages or self.cx.option(PassConfigKey.TL_EXTRA_STAGES)) and self.cx.option(
                PassConfigKey.TL_WGMMA_IN_FLIGHT) == "iterations" else None

    def by_tma(self, loop: For, items: list[Item], plan: Plan) -> dict[int, Buffer]:
        """The copies that the first thread makes by TMA, beside those of all threads -> the mbarriers of their tiles."""
        on, given, top = hopper(self.cx), dict(self.launch.plan.layouts), stmts_of(self.launch.body)
        if not on.tma or self.launch.threads[1:] != (1, 1) or self.launch.num_threads % WARP_LANES or not any(
                s is loop for s in top):
            return {}
        copies = {i: op for i in plan.ahead if isinstance(op := items[i].stmt, Copy) and op.dst.buffer in plan.versions and
                  op.dst.buffer not in given}
        tiles = {i: op.dst.buffer for i, op in copies.items() if not (tma_unsupported(
            op, on.strides, True) or versions_unsupported(op.dst.buffer) or unreadable(self.launch, op.src.buffer))}
        full = {b: barriers(f"{b.name}_full", (n,) * int(plan.versions[b].shape[0]))
                for b, n in Counter(tiles.values()).items()}
        return {i: full[b] for i, b in tiles.items()}

    # ---- the two kinds of schedule ----------------------------------------------------------------------------

    def automatic(self, loop: For, loop_body: Body, stages: int) -> Plan | str:
        """Copies from global to shared in stage 0, everything else in stage num_stages - 1.

        Of copies in two steps the loads go to the front and the stores behind everything else.
        """
        items, step = loop_body.items, self.by_step
        reasons, last = list[str](), max(stages - 1, step)
        loads = {i: b for i, x in enumerate(items) if (b := self.tiles.of(x.stmt)) is not None} if not step else {
            i: x.stmt.dst.buffer for i, x in enumerate(items) if isinstance(x.stmt, Copy) and x.stmt.plan.second}
        early = set(loads)
        for i in sorted(loads):
            buffer = loads[i]
            why = _unwaited(items, loads, i) or self.uses.unversionable(loop, items, buffer)
            if why:
                early.discard(i)
                reasons.append(why)
        while early:
            first = {i - step for i in early}
            stage = [0 if i in early or i in first else last for i in range(len(items))]
            ranked = sorted(range(len(items)), key=lambda i: (i not in first, step and i in early, i))
            order = [ranked.index(i) for i in range(len(items))]
            versions = {loads[i].data: stages for i in early}
            broken = violations(items, stage, order, versions)
            if not broken:
                return self.plan(loop_body, stage, order, {} if step else {i: loads[i] for i in sorted(early)}, versions)
            drop = early & {j for v in broken for i in (v.first, v.second) for j in (i, i + step)}
            if not drop:  # impossible: only statements that keep their order are involved
                raise InternalError(f"pipeline: statements in source order break {broken[0].what}")
            gone = {loads[i] for i in drop}
            reasons += [f"`{b.name}` cannot be copied ahead: `{broken[0].what}` is written in between" for b in gone]
            early = {i for i in early if loads[i] not in gone}
        return "; ".join(dict.fromkeys(reasons)) or "no copy from global to shared memory in the body"

    def manual(self, loop: For, loop_body: Body, stage: list[int], order: list[int]) -> Plan | str:
        """A schedule from the user's lists of orders and stages, or why the loop stays sequential."""
        items = loop_body.items
        versions: dict[Var, int] = {}
        for b in {e.buffer: None for x in items for e in x.effects if e.writes}:
            span = stage_span(items, stage, b.data)
            if span > 1 and b.scope_name in SHARED and not self.uses.unversionable(loop, items, b):
                versions[b.data] = span
        broken = violations(items, stage, order, versions)
        if broken:
            first, second = (items[k].stmt.span for k in (broken[0].first, broken[0].second))
            return f"the given order and stages would break a dependence on `{broken[0].what}`" + (
                f" between {first} and {second}" if first and second else "")
        loads = {i: t for i, x in enumerate(items) if (t := self.tiles.of(x.stmt)) is not None}
        ahead = {i: t for i, t in loads.items() if not _unwaited(items, loads, i) and all(
            stage[j] > stage[i] or (stage[j] == stage[i] and order[j] > order[i])
            for j, y in enumerate(items) if j != i and y.touches(t.data))}
        return self.plan(loop_body, stage, order, ahead, versions)

    def plan(self, loop_body: Body, stage: list[int], order: list[int], ahead: dict[int, Buffer],
             versions: dict[Var, int]) -> Plan:
        buffers = {e.buffer: None for x in loop_body.items for e in x.effects if versions.get(e.storage, 1) > 1}
        new = {b: versioned(b, versions[b.data]) for b in buffers}
        count = max(versions.values(), default=1)
        names = ", ".join(sorted({t.name for t in ahead.values()}))
        report = f"pipelined: {count} stage{'s' * (count != 1)}" + (f" of {names}" if names else "")
        return Plan(stage, order, {i: t.data for i, t in ahead.items()}, new, report)


def _is_fenced(items: list[Item], plan: Plan) -> bool:
    """Whether threads store, behind a GEMM of the loop, what another one may read by wgmma. The fence behind their stores waits
    for the copies of threads too, so that these would run under little else than the first GEMM."""
    read, behind = {g.b.buffer.data for x in items for g in walk(x.stmt, Gemm)}, False
    for i, x in enumerate(items):
        if behind and i not in plan.ahead and any(e.writes and e.storage in read for e in x.effects):
            return True
        behind = behind or any(True for _ in walk(x.stmt, Gemm))
    return False


def _urgent(body: Body) -> None:
    """Lets warps in a GEMM issue first, in a loop that has other arithmetic: that of other blocks then runs under it."""
    if not all(isinstance(x.stmt, (Copy, Gemm, Alloc)) for x in body.items):
        body.items = [evolve(x, stmt=with_options(x.stmt, urgent=True)) if isinstance(x.stmt, Gemm) else x for x in body.items]


# ---- conditions -----------------------------------------------------------------------------------------------------


def _unwaited(items: list[Item], loads: dict[int, Buffer], i: int) -> str:
    """Why copy i cannot be left in flight: no statement waits for it, or another copy writes the same elements.

    Copies in flight are not ordered with each other.  "" if it can.
    """
    tile, own = loads[i], items[i].stmt
    users = [j for j, x in enumerate(items) if j != i and x.touches(tile.data)]
    if any(e.reads and any(e.storage is loads[j].data for j in loads) for e in items[i].effects):
        return f"`{tile.name}` is copied from where a tile of this iteration says"
    if all(j in loads for j in users):
        return f"`{tile.name}` is not used in the body"
    for j in users:
        other = items[j].stmt
        if j in loads and not (isinstance(own, Copy) and isinstance(other, Copy) and _disjoint(own.dst, other.dst)):
            return f"`{tile.name}` is copied to twice"
    return ""


def _disjoint(a: Region, b: Region) -> bool:
    """Whether two regions of one buffer are known to be disjoint."""
    return any(x.value + n <= y.value or y.value + m <= x.value for x, n, y, m in zip(a.mins, a.extents, b.mins, b.extents)
               if isinstance(x, Const) and isinstance(y, Const) and isinstance(n, int) and isinstance(m, int))
