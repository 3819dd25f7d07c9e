"""Every shared and fragment buffer of a launch gets a layout.

    Launch(attrs: layouts=(user's…))              Launch(attrs: layouts=((A_s, Layout), (C_f, Fragment), …))
      Gemm(A_s, B_s, C_f)                    ->     Gemm(A_s, B_s, C_f, attrs: instruction, warps)
      Parallel(i, j): C_f[i, j] = …                 Parallel(i, j, attrs: loop_layout=Fragment)

Fragments are settled by strictness.  *Strict*: what the user annotated and what a matrix instruction demands.
*Common*: what follows through copies between fragments, reductions and parallel loops.  *Free*: the rest, largest
buffer first, dealt out so that memory is read in the widest vectors; after each choice the common rules run again.
Then shared buffers are laid out by the accesses made to them (shared_layouts.py).

Where a fragment is asked for in two ways the first wins and the other use goes through shared memory when it is
lowered: no program is left without a layout.  A large fragment that every thread would hold whole is kept in shared memory
where that means the same (staged_fragments.py).  A Parallel that touches fragments carries `loop_layout`; without one the
lowering deals its points out in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilelang.arith import Analyzer, extent_bounds
from tilelang.errors import TileLangError, error, register
from tilelang.ir import (
    Alloc,
    Buffer,
    Call,
    Const,
    Expr,
    For,
    Func,
    If,
    Launch,
    Load,
    Node,
    Parallel,
    Seq,
    Stmt,
    Store,
    TileOp,
    Var,
    fields_of,
    rebuild,
    replace,
    walk,
    with_attrs,
)
from tilelang.layout import Fragment, Layout, replicated_fragment, row_fragment, viewed_fragment
from tilelang.ops import AtomicTile, Copy, Gemm
from tilelang.ops.gemm.select import SIMT, GemmPlan, choose_gemm, with_warps_of
from tilelang.ops.gemm.wgmma import choose_wgmma, operand_layouts, shared_layout, wgmma_fragments
from tilelang.ops.tma_copy import is_row
from tilelang.ops.tma_store import moved_tile
from tilelang.target.wgmma import WGMMA_ROWS

from .config import PassConfigKey
from .draw_layouts import draw_layouts
from .hopper import hopper
from .loop_layouts import Loop, Touch, over_loops, projected, row_groups, serial_dims, touch, usable, with_registers
from .loop_shares import rereads, spread_thin
from .pass_ import TILE, PassContext, pass_
from .shared_layouts import Access, choose_shared_layout, memory_accesses, vector_elements
from .staged_fragments import is_large, staged
from .tf32_tiles import rounded_tiles
from .written_roles import role_of

register("layout-conflict", ValueError, "a buffer is asked for two layouts that cannot both hold")
register("wgmma-gemm", ValueError, "a T.wgmma_gemm that no warp-group instruction computes",
         "M in multiples of 64 for each warp group, operands in shared memory with K in whole instructions; T.gemm multiplies "
         "any tiles")
register("layout-shape", ValueError, "a shared or fragment buffer needs a static shape")

FRAGMENT, GROUP = "local.fragment", 128
SHARED = ("shared", "shared.dyn")


@pass_(needs=TILE)
def infer_layouts(func: Func, cx: PassContext) -> Func:
    """Choose layouts for all launches of a program.  See the module's text."""

    def visit(s: Any) -> Any:
        if isinstance(s, Launch):
            while True:
                try:
                    return _Inference(s, cx).run()
                except _Staged as e:
                    s = e.launch
        if isinstance(s, (Seq, If, For)):
            return rebuild(s, lambda v: visit_field(v))
        return s

    def visit_field(v: Any) -> Any:
        if isinstance(v, Stmt):
            return visit(v)
        if isinstance(v, tuple) and v and isinstance(v[0], Stmt):
            out = tuple(visit(x) for x in v)
            return v if all(a is b for a, b in zip(out, v)) else out
        return v

    body = visit(func.body)
    return func if body is func.body else replace(func, body=body)


def _run_time_shape(b: Buffer, span: Any) -> Exception:
    return error("layout-shape", f"`{b.name}` ({b.scope_name}) has a run-time shape, its tile must be static", span=span,
                 hint="allocate the largest tile and guard what lies outside")


@dataclass
class Known:
    """What ops are asked with (ops.base: infer_layout), and why each layout was chosen."""

    threads: int
    layouts: dict[Buffer, Any] = field(default_factory=dict)
    why: dict[Buffer, str] = field(default_factory=dict)

    def settle(self, buffer: Buffer, layout: Any, why: str) -> None:
        """Give a buffer its layout."""
        self.layouts[buffer] = layout
        self.why[buffer] = why

    def get(self, buffer: Buffer) -> Any:
        """The layout of a buffer, None while it has none."""
        return self.layouts.get(buffer)


class _Staged(Exception):
    """No layout deals a large fragment out: `launch` has it in shared memory."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch


class _Inference:
    """Layouts of one launch.  Raises _Staged."""

    def __init__(self, launch: Launch, cx: PassContext) -> None:
        self.launch, self.cx = launch, cx
        self.whole = self.role = launch.attr("compute_threads") or launch.num_threads
        self.by_hand = launch.attr("compute_threads") is None  # roles are the user's: each has threads of its own
        self.forced: dict[Var, GemmPlan] = {}  # accumulators of T.wgmma_gemm: the plan that lays each out
        self.threads_of: dict[int, int] = {}  # of the role that an op or parallel loop belongs to
        self.known = Known(self.whole)
        self.ops: list[TileOp] = []
        self.loops: dict[int, Loop] = {}
        self.buffers: dict[Buffer, None] = {}  # shared and fragment buffers, in order of appearance
        self.alone: set[Buffer] = set()  # fragments touched element by element outside any parallel loop
        self.pointers: set[Var] = set()  # storage whose address is taken: user code may index it itself
        self.analyzer = Analyzer()
        self.accesses: list[Access] = []
        self.gemms: dict[int, Gemm] = {}
        self.reasons: list[str] = []  # why a faster strategy was declined
        self.demanded: dict[Buffer, tuple[Any, Any]] = {}  # fragment -> (layout, the node that asked first)

    def run(self) -> Launch:
        a = self.analyzer
        launch = self.launch
        for v, n in (*zip(launch.block_vars, launch.grid), *zip(launch.thread_vars, launch.threads)):
            a = a.bind(v, *extent_bounds(a, 0, n))
        self.analyzer = a
        self._collect(self.launch.body, None)
        self._check_shapes()
        self._annotated()
        self._strict()
        self._common()
        self._free()
        self._loops()
        self._shared()
        body = self._rewritten(self.launch.body)
        order = {b: k for k, b in enumerate(self.buffers)}
        layouts = tuple(sorted(((b, lay) for b, lay in self.known.layouts.items() if b in order),
                               key=lambda p: order[p[0]]))
        self._report(layouts)
        report = (*self.launch.attr("report", ()), *self.reasons) or None
        return with_attrs(replace(self.launch, body=body), layouts=layouts, report=report)

    def _report(self, layouts: tuple[tuple[Buffer, Any], ...]) -> None:
        """Level 4 of the debug trace: each layout and why; pictures where the config asks for them."""
        if self.cx.debug >= 4:
            for b, lay in layouts:
                self.cx.report(f"# layout of {b.name} ({self.known.why[b]}): {lay!r}")
        if self.cx.option(PassConfigKey.TL_LAYOUT_VISUALIZATION_ENABLE):
            draw_layouts([(b.name, lay) for b, lay in layouts], self.cx)

    # ---- what is there --------------------------------------------------------------------------------------------

    def _collect(self, s: Any, loop: Parallel | None) -> None:
        if isinstance(s, Seq):
            for x in s.stmts:
                self._collect(x, loop)
        elif isinstance(s, Alloc):
            self._see(s.buffer)
        elif isinstance(s, If) and self.by_hand and role_of(s.cond) is not None:
            count = (role_of(s.cond) or (0, 0))[1] * GROUP
            saved = self.role
            for part, n in ((s.then, count), (s.orelse, saved - count)):
                self.role = n
                if part is not None:
                    self._collect(part, loop)
            self.role = saved
        elif isinstance(s, TileOp):
            self.ops.append(s)
            self.threads_of[id(s)] = self.role
            for y in walk(s):
                if isinstance(y, Buffer):
                    self._see(y)
                    self._belongs(y)
                elif isinstance(y, Load) and y.buffer.scope_name == FRAGMENT:
                    self.alone.add(y.buffer)  # a run-time bound or value read from a fragment
        elif isinstance(s, Parallel):
            self._collect_loop(s)
        elif isinstance(s, For):
            self.analyzer = self.analyzer.bind(s.var, *extent_bounds(self.analyzer, s.start, s.extent))
            self._collect_exprs(s)
            self._collect(s.body, loop)
        else:
            self._collect_exprs(s)
            for f in ("then", "orelse", "body"):
                inner = getattr(s, f, None)
                if isinstance(inner, Stmt):
                    self._collect(inner, loop)

    def _collect_exprs(self, s: Stmt) -> None:
        """Buffers used by the expressions of a statement that every thread executes by itself."""
        for v in (getattr(s, f) for f in fields_of(type(s)) if f != "attrs"):
            for e in v if isinstance(v, tuple) else (v,):
                if isinstance(e, Buffer):
                    self._see(e)
                    if isinstance(s, Store) and e.scope_name == FRAGMENT:
                        self.alone.add(e)
                elif isinstance(e, Node) and not isinstance(e, Stmt):
                    self._collect_expr(e)

    def _collect_expr(self, e: Node) -> None:
        for x in walk(e):
            if isinstance(x, Buffer):
                self._see(x)
            elif isinstance(x, Load) and x.buffer.scope_name == FRAGMENT:
                self.alone.add(x.buffer)
            elif isinstance(x, Call):
                self._see_call(x)

    def _see_call(self, c: Call) -> None:
        if not c.op.startswith("atomic"):
            for x in c.args:
                if type(x).__name__ == "AddressOf":
                    self.pointers.add(x.buffer.data)  # type: ignore[attr-defined]

    def _see(self, b: Buffer) -> None:
        if b.scope_name in SHARED and not b.is_static:
            self.pointers.add(b.data)  # stored row by row (layout.RowMajor), and so are views of it
        elif b.scope_name == FRAGMENT or b.scope_name in SHARED:
            self.buffers.setdefault(b)

    def _belongs(self, b: Buffer) -> None:
        """A fragment lives in the registers of the role that uses it."""
        if b.scope_name == FRAGMENT:
            self.threads_of[id(b)] = self.role

    def _for(self, x: Any) -> Known:
        """What is known, for an op, loop or fragment of a role."""
        self.known.threads = self.threads_of.get(id(x), self.whole)
        return self.known

    def _collect_loop(self, s: Parallel) -> None:
        self.threads_of[id(s)] = self.role
        extents = tuple(int(n.value) if isinstance(n, Const) else n for n in s.extents)
        touches: list[Touch] = []
        written: list[tuple[Buffer, tuple[Expr, ...]]] = []
        for x in walk(s.body):
            if isinstance(x, Buffer):
                self._see(x)
                self._belongs(x)
            elif isinstance(x, Call):
                self._see_call(x)
            elif isinstance(x, (Load, Store)):
                if isinstance(x, Store):
                    written.append((x.buffer, x.indices))
                if x.buffer.scope_name == FRAGMENT:
                    touches.append(touch(x, s.vars, extents))
        for v, n in zip(s.vars, s.extents):
            self.analyzer = self.analyzer.bind(v, *extent_bounds(self.analyzer, 0, n))
        given = s.attr("loop_layout")
        if given is not None and (not isinstance(given, Fragment) or given.shape != extents):
            raise error("layout-conflict", f"loop_layout of a parallel loop over {extents} must be a Fragment of that "
                        f"shape, found {given!r}", span=s.span,
                        hint="give the Fragment one index per loop, with its extent")
        static = tuple(n for n in extents if isinstance(n, int))
        if touches and len(static) == len(extents):
            self.loops[id(s)] = Loop(s, static, touches, serial_dims(s, static, written))
        self.accesses += memory_accesses(s, self.analyzer)

    def _check_shapes(self) -> None:
        for b in self.buffers:
            if not b.is_static:
                raise _run_time_shape(b, b.span)

    # ---- strict ---------------------------------------------------------------------------------------------------

    def _annotated(self) -> None:
        for b, lay in self.launch.attr("layouts", ()):
            want = Fragment if b.scope_name == FRAGMENT else Layout
            if not isinstance(lay, want):
                raise error("layout-conflict", f"`{b.name}` ({b.scope_name}) needs a {want.__name__}, found "
                            f"{type(lay).__name__}", span=self.launch.span)
            lead = len(b.shape) - len(lay.shape)
            if lead < 0 or tuple(b.shape[lead:]) != tuple(lay.shape):
                raise error("layout-conflict", f"the layout of `{b.name}` has shape {lay.shape}, the buffer "
                            f"{tuple(b.shape)}", span=self.launch.span)
            if isinstance(lay, Fragment) and lay.threads != self._for(b).threads:
                if lay.threads > self.known.threads:
                    raise error("layout-conflict", f"the layout of `{b.name}` uses {lay.threads} threads, the block "
                                f"has {self.known.threads}", span=self.launch.span)
                lay = lay.with_threads(self.known.threads)
            self.known.settle(b, lay.expand(b.shape[:lead]) if lead else lay, "given by the user")
            self.buffers.setdefault(b)
            self.demanded[b] = (lay, self.launch)

    def _strict(self) -> None:
        gemms = [op for op in self.ops if isinstance(op, Gemm)]
        for op in gemms:
            for b in (op.a.buffer, op.b.buffer, op.c.buffer):
                if not b.is_static:
                    raise _run_time_shape(b, op.span)
        rows_first = row_groups(gemms, self.ops, self.loops.values())
        arch = getattr(self.cx.target, "arch_number", 0) or 80
        self._by_tma()
        by_groups = self._by_wgmma(gemms)
        plans = [(op, by_groups.get(id(op)) or choose_gemm(op, arch, self._for(op).threads, op.c.buffer in rows_first))
                 for op in gemms]
        first: dict[Buffer, GemmPlan] = {}
        asked: list[tuple[Gemm, GemmPlan, dict[Buffer, Any]]] = []
        # Those that take what layout there is come last; mma.sync works on the rows that wgmma gives each warp.
        for op, plan in sorted(plans, key=lambda p: (p[1].instruction == SIMT, p[1].instruction not in WGMMA_ROWS)):
            plan = with_warps_of(plan, first.setdefault(op.c.buffer, plan))
            new = self.gemms[id(op)] = with_attrs(op, instruction=plan.instruction, warps=plan.warps)
            asked.append((op, plan, new.infer_layout(self._for(op))))
        for op, plan, layouts in asked:  # accumulators before operands: those can be staged
            lay, old = layouts.get(op.c.buffer), self.known.layouts.get(op.c.buffer)
            if old is None:
                self._demand(op, plan, op.c.buffer, lay)
            elif plan.instruction != SIMT and old != lay and (plan.instruction in WGMMA_ROWS or op.c.buffer.data not in
                                                              self.forced):  # mma.sync moves what lies in another way
                self._conflict(op.c.buffer, old, lay, op)
        for op, plan, layouts in asked:
            for b, lay in layouts.items():
                if b not in self.known.layouts:
                    self._demand(op, plan, b, lay)

    def _demand(self, op: Gemm, plan: GemmPlan, b: Buffer, lay: Any) -> None:
        """Give a fragment the layout an instruction works on; where it is seen in shapes that have no form of that, the
        product moves it."""
        if lay is not None and self._suits_views(b, lay):
            self.known.settle(b, lay, f"{plan.instruction} on {plan.warps[0]}x{plan.warps[1]} warps{_at(op)}")
            self.demanded[b] = (lay, op)

    def _by_tma(self) -> None:
        """What TMA fills or reads lies in panels."""
        for op in self.ops:
            if isinstance(op, Copy) and (op.attr("dst_block") is not None or op.attr("tma") and is_row(op)):
                self.pointers.update((op.src.buffer.data, op.dst.buffer.data))  # moved as bytes: rows in order
            elif isinstance(op, (Copy, AtomicTile)) and op.attr("tma"):
                b = moved_tile(op).buffer
                lay = shared_layout(b)
                given = self.known.layouts.get(b)
                if lay is None or given is not None and given != lay:
                    raise error("layout-conflict", f"`{b.name}` is moved by TMA, its layout must be in panels, found "
                                f"{given!r}", span=op.span, hint="leave the layout out, or move it by T.copy with "
                                "disable_tma=True")
                self.known.settle(b, lay, f"moved by TMA{_at(op)}")

    def _by_wgmma(self, gemms: list[Gemm]) -> dict[int, GemmPlan]:
        """The gemms that warp-group instructions compute; the layouts of their operands in shared memory are settled.

        Gemms into one accumulator go one way: its layout depends on the instruction.
        """
        if not hopper(self.cx).wgmma:  # only what asks for it by name
            gemms = [op for op in gemms if op.attr("wait") is not None]
        plans: dict[int, GemmPlan] = {}
        declined: set[Var] = set()
        rounded = rounded_tiles(self.ops)
        for op in sorted(gemms, key=lambda op: not self._is_forced(op)):
            first = self.forced.get(op.c.buffer.data)
            plan = choose_wgmma(op, self._for(op).threads, rounded, first)
            why = plan if isinstance(plan, str) else self._unpanelled(op)
            if isinstance(plan, GemmPlan) and not why:
                plans[id(op)] = plan
                if self._is_forced(op):
                    self.forced.setdefault(op.c.buffer.data, plan)
                continue
            if self._is_forced(op):
                raise error("wgmma-gemm", "T.wgmma_gemm() requires Hopper WGMMA lowering, but constraints were not "
                            f"satisfied: {why}", span=op.span)
            if first is None:
                declined.add(op.c.buffer.data)
            self.reasons.append(f"T.gemm{_at(op)} by mma.sync: {why}")
        shared_out: dict[Var, tuple[Any, ...]] = {}
        for op in gemms:
            if id(op) in plans and op.attr("wait") != -1 and op.c.buffer.data not in self.forced:
                plan = plans[id(op)]
                how = WGMMA_ROWS[plan.instruction].shape[:2], plan.warps
                acc = wgmma_fragments(op, WGMMA_ROWS[plan.instruction], plan.warps, self._for(op).threads)[2]
                if not self._suits_views(op.c.buffer, acc):
                    declined.add(op.c.buffer.data)
                    self.reasons.append(f"T.gemm{_at(op)} by mma.sync: its accumulator is seen in another shape")
                elif shared_out.setdefault(op.c.buffer.data, how) != how:
                    declined.add(op.c.buffer.data)
                    self.reasons.append(f"T.gemm{_at(op)} by mma.sync: other products lay out its accumulator in another way")
        for op in gemms:
            if op.c.buffer.data in declined:
                plans.pop(id(op), None)
            elif id(op) in plans:
                for b, lay in operand_layouts(op).items():
                    self.known.settle(b, lay, f"{plans[id(op)].instruction}{_at(op)}")
        return plans

    def _is_forced(self, op: Gemm) -> bool:
        """Whether the user wrote T.wgmma_gemm."""
        return self.by_hand and bool(op.attr("wait") == -1)

    def _unpanelled(self, op: Gemm) -> str:
        """Why the shared operands of a gemm cannot lie in panels; "" when they can."""
        for b, lay in operand_layouts(op).items():
            if b.data in self.pointers:
                return f"the address of `{b.name}` is taken"
            if any(x is not b and x.data is b.data for x in self.buffers):
                return f"`{b.name}` is seen in another shape"
            if b in self.known.layouts and self.known.layouts[b] != lay:
                return f"the layout given for `{b.name}` is not that of panels"
        return ""

    def _conflict(self, b: Buffer, old: Any, new: Any, op: Gemm) -> None:
        asked = self.demanded.get(b)
        who = asked[1] if asked else None
        raise error("layout-conflict", f"Layout infer conflict between two uses of `{b.name}` as an accumulator: "
                    f"{old!r} and {new!r}", span=op.span, notes=((getattr(who, "span", None), "first asked for here"),),
                    hint=f"copy `{b.name}` to a second fragment, or give both the same warp policy")

    # ---- common ---------------------------------------------------------------------------------------------------

    def _common(self) -> None:
        """Propagate until nothing changes.  Linear in practice: each round settles a buffer or is the last."""
        changed = True
        while changed:
            changed = False
            for op in self.ops:
                if isinstance(op, Gemm) or not hasattr(op, "infer_layout"):
                    continue
                for b, lay in op.infer_layout(self._for(op)).items():
                    if b.scope_name == FRAGMENT and b not in self.known.layouts and b not in self.alone \
                            and self._suits_views(b, lay):
                        self.known.settle(b, lay, f"follows T.{op.op_name}{_at(op)}")
                        changed = True
            for loop in self.loops.values():
                changed |= self._through_loop(loop)
            for group in self._views():
                changed |= self._through_views(group)

    def _views(self) -> list[list[Buffer]]:
        """Fragments that are the same registers under several shapes."""
        groups: dict[Var, list[Buffer]] = {}
        for b in self.buffers:
            if b.scope_name == FRAGMENT:
                groups.setdefault(b.data, []).append(b)
        return [g for g in groups.values() if len(g) > 1]

    def _suits_views(self, b: Buffer, lay: Any) -> bool:
        """Whether all other shapes that b is seen in have a form of this layout, and none has got another one."""
        for v in self.buffers:
            if v.data is b.data and v is not b:
                seen = _seen_as(lay, b, v)
                if seen is None or self.known.layouts.get(v, seen) != seen:
                    return False
        return True

    def _through_views(self, group: list[Buffer]) -> bool:
        have = next((b for b in group if b in self.known.layouts), None)
        if have is None:
            return False
        changed = False
        for b in group:
            if b is have:
                continue
            lay = _seen_as(self.known.layouts[have], have, b)
            if lay is None:
                raise error("layout-no-structure", f"`{have.name}` with the layout {self.known.layouts[have]!r} cannot be seen "
                            f"as {tuple(b.shape)} of {b.dtype} (`{b.name}`)", span=b.span or self.launch.span,
                            hint="copy the tile through shared memory, and reshape it there")
            old = self.known.layouts.get(b)
            if old is not None and old != lay:
                raise error("layout-conflict", f"Layout infer conflict between `{have.name}` and its view `{b.name}`: "
                            f"{self.known.layouts[have]!r} and {old!r}", span=b.span or self.launch.span,
                            hint="copy the view to a fragment of its own")
            if old is None:
                self.known.settle(b, lay, f"is `{have.name}` in another shape")
                changed = True
        return changed

    def _through_loop(self, loop: Loop) -> bool:
        settled = self.known.layouts.keys() | self.alone
        unknown = [t for t in loop.touches if t.plain and t.exact and t.buffer not in settled]
        if not unknown:
            return False
        layout = self._loop_layout(loop, full=True)
        if layout is None:
            return False
        changed = False
        for t in unknown:
            if t.buffer in self.known.layouts:
                continue
            lay = projected(layout, t)
            if lay is not None and self._suits_views(t.buffer, lay):
                self.known.settle(t.buffer, lay, f"follows the parallel loop{_at(loop.node)}")
                changed = True
        return changed

    def _loop_layout(self, loop: Loop, full: bool) -> Fragment | None:
        """The user's layout of a loop, or that of the known fragments it touches: written ones first, then those with
        most dimensions.

        full: only when a fragment tells where every parallel loop goes."""
        given = loop.node.attr("loop_layout")
        if given is not None:
            return given
        best: tuple[tuple[int, int, int], Touch, Fragment] | None = None
        for t in loop.touches:
            lay = self.known.layouts.get(t.buffer)
            if lay is None or not usable(lay, t):
                continue
            moved = sum(d is not None and loop.extents[d] > 1 for d in t.dims)
            key = (0 if t.writes else 1, -moved, lay.replicas)
            if best is None or key < best[0]:
                best = (key, t, lay)
        if best is None:
            return None
        _, t, lay = best
        left = [d for d, n in enumerate(loop.extents) if d not in t.dims and n > 1 and d not in loop.serial]
        if full and left:
            return None
        if left and not t.writes and spread_thin(loop.extents, [d for d in t.dims if d is not None], lay.replicas):
            return None
        return over_loops(lay, t, loop.extents)

    # ---- free -----------------------------------------------------------------------------------------------------

    def _free(self) -> None:
        for loop in self.loops.values():
            self._free_serial(loop)
        order = {b: k for k, b in enumerate(self.buffers)}
        waiting = [b for b in self.buffers if b.scope_name == FRAGMENT and b not in self.known.layouts]
        waiting.sort(key=lambda b: (b in self.alone, -b.size, order[b]))
        for b in waiting:
            if b not in self.known.layouts:
                self.known.settle(b, self._choose(b), "free")
                self._common()

    def _free_serial(self, loop: Loop) -> None:
        """A loop that accumulates along some dimensions: the others are dealt out to threads."""
        if not loop.serial or self._loop_layout(loop, full=False) is not None:
            return
        for t in loop.touches:
            whole = t.plain and t.exact and not t.inside
            if t.writes and whole and t.buffer not in self.known.layouts and t.buffer not in self.alone:
                rows = row_fragment(t.buffer.shape, self._for(t.buffer).threads)
                if not self._suits_views(t.buffer, rows):
                    continue
                self.known.settle(t.buffer, rows, f"free; accumulated along a loop{_at(loop.node)}")
                self._common()
                return

    def _choose(self, b: Buffer) -> Fragment:
        shape, threads = tuple(b.shape), self._for(b).threads
        if b in self.alone:  # every thread may ask for any element
            return self._whole(b)
        inside = {d for lp in self.loops.values() for t in lp.touches if t.buffer is b and t.plain for d in t.inside}
        if inside and len(inside) < len(shape):
            kept = [d for d in range(len(shape)) if d not in inside]
            rows = with_registers(row_fragment([shape[d] for d in kept], threads), shape, inside, kept)
            if self._suits_views(b, rows):
                return rows
        fast, vector = vector_elements(b, self.ops, [lp.node for lp in self.loops.values()], self.analyzer)
        total = b.size
        while vector > 1 and total < threads * vector:
            vector //= 2
        while vector > 1 and shape[fast] % vector:
            vector //= 2
        order = [d for d in range(len(shape)) if d != fast] + [fast] if shape else []
        out = row_fragment(shape, threads, vector, order)
        if not self._suits_views(b, out):
            out = viewed_fragment(shape, self._cuts(b), threads, vector if fast == len(shape) - 1 else 1)
        return out if self._suits_views(b, out) and not out.replicas == threads > 1 else self._whole(b)

    def _whole(self, b: Buffer) -> Fragment:
        """Every thread holds the tile.  Raises _Staged for one that is better kept in shared memory."""
        if is_large(b):
            launch = staged(self.launch, b.data, getattr(self.cx.target, "max_shared_bytes", None))
            if launch is not None:
                raise _Staged(launch)
        return replicated_fragment(b.shape, self._for(b).threads)

    def _cuts(self, b: Buffer) -> list[int]:
        """Elements inside the dimensions of b and of its views, in elements of b."""
        out = []
        for v in self.buffers:
            if v.data is b.data:
                bits = _bits(v)
                out.append(bits // _bits(b))
                for n in reversed(v.shape):
                    bits *= n
                    out.append(bits // _bits(b))
        return out

    # ---- loops and shared -----------------------------------------------------------------------------------------

    def _loops(self) -> None:
        for loop in self.loops.values():
            loop.layout = self._loop_layout(loop, full=False)
            if loop.layout is not None and loop.layout.replicas > 1 and rereads(loop.node.body):
                loop.layout = None

    def _shared(self) -> None:
        roots: dict[Var, Buffer] = {}
        for b in self.buffers:
            if b.scope_name in SHARED:
                roots.setdefault(b.data, b)
        by_storage: dict[Var, list[Access]] = {}
        for op in self.ops:
            self.accesses += memory_accesses(self.gemms.get(id(op), op), self.analyzer)
        for a in self.accesses:
            by_storage.setdefault(a.buffer.data, []).append(a)
        for data, root in roots.items():
            if root not in self.known.layouts:
                uses = [a for a in by_storage.get(data, ()) if a.buffer is root]
                viewed = len(uses) != len(by_storage.get(data, ()))
                plain = data in self.pointers or viewed
                self.known.settle(root, choose_shared_layout(root, uses, self._share_of, plain),
                                  "address taken or seen in another shape" if plain else f"{len(uses)} accesses")
        for b in self.buffers:
            if b.scope_name in SHARED and b not in self.known.layouts:
                root = roots[b.data]
                self.known.settle(b, _view_of(self.known.layouts[root], root, b), f"is `{root.name}` in another shape")

    def _share_of(self, a: Access) -> Fragment | None:
        if isinstance(a.share, Buffer):
            return self.known.layouts.get(a.share)
        loop = self.loops.get(id(a.share))
        return None if loop is None else loop.layout

    # ---- the program with the decisions ---------------------------------------------------------------------------

    def _rewritten(self, s: Any) -> Any:
        if isinstance(s, Gemm):
            return self.gemms[id(s)]
        if isinstance(s, Parallel):
            loop = self.loops.get(id(s))
            return s if loop is None or loop.layout is None else with_attrs(s, loop_layout=loop.layout)
        if isinstance(s, (Seq, For, If)) or hasattr(s, "body"):
            return rebuild(s, self._rewritten_field)
        return s

    def _rewritten_field(self, v: Any) -> Any:
        if isinstance(v, Stmt):
            return self._rewritten(v)
        if isinstance(v, tuple) and v and isinstance(v[0], Stmt):
            out = tuple(self._rewritten(x) for x in v)
            return v if all(a is b for a, b in zip(out, v)) else out
        return v


def _seen_as(lay: Fragment, b: Buffer, view: Buffer) -> Fragment | None:
    """The layout of another Buffer over a fragment's registers; None where its digits or elements would be cut."""
    if lay.replicas == lay.threads and lay == replicated_fragment(b.shape, lay.threads):  # row-major, whole in each thread
        return replicated_fragment(view.shape, lay.threads)
    try:
        return lay.reshape(view.shape, _bits(b), _bits(view))
    except TileLangError:
        return None


def _view_of(layout: Layout, root: Buffer, b: Buffer) -> Layout:
    """The layout of another Buffer over a shared buffer's storage."""
    return layout.reshape(b.shape, _bits(root), _bits(b))


def _bits(b: Buffer) -> int:
    return b.dtype.bits * b.dtype.lanes


def _at(s: Stmt) -> str:
    return "" if s.span is None else f" at line {s.span.line}"
