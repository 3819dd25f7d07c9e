"""Collects the buffers of a launch that need layouts, and how the launch uses them, for infer_layouts.

These are shared and fragment buffers, tile ops, parallel loops, the threads that each belongs to, and groups of fragments
that view the same registers in several shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Any

from tilelang.arith import Analyzer
from tilelang.errors import TileLangError, error, register
from tilelang.ir import (AddressOf, Alloc, Buffer, Call, Const, Expr, For, If, Launch, Load, Parallel, Stmt, Store, TileOp, Var,
                         children, inner, walk, FRAGMENT, SHARED)
from tilelang.ir.record import state
from tilelang.layout import Fragment, replicated_fragment
from tilelang.target.warp_groups import PER_GROUP, WARP_LANES, warps_of

from ..analysis.guards import with_ranges
from .loop_layouts import Loop, Touch, serial_dims, touch
from .shared_layouts import Access, memory_accesses

register("layout-shape", ValueError, "a shared or fragment buffer needs a static shape", expected="a static shape")


@state
class Known:
    """The layouts known so far, as passed to ops (ops.base: infer_layout), and the reason for each choice."""

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


class Uses:
    """The contents of one launch and its known layouts.  Raises layout-shape and layout-conflict."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.whole = self.current_threads = launch.plan.compute_threads or launch.num_threads
        self.by_hand = launch.plan.compute_threads is None  # the user wrote the warp roles: each has threads of its own
        self.cut, self.cutting = False, set[int]()  # ops of warp roles that begin inside a warp group
        self.threads_of: dict[int, int] = {}  # threads of the warp role that an op or parallel loop belongs to
        self.known = Known(self.whole)
        self.ops: list[TileOp] = []
        self.loops: dict[int, Loop] = {}
        self.buffers: dict[Buffer, None] = {}  # shared and fragment buffers, in order of appearance
        self.alone: set[Buffer] = set()  # fragments accessed element by element outside any parallel loop
        self.pointers: set[Var] = set()  # storage whose address is taken: user code may index it directly
        self.taken: dict[Var, Call] = {}  # what takes it, apart from cp.async, which moves no more than 16 bytes at an element
        self.analyzer = with_ranges(Analyzer(), launch, Launch, For, Parallel)
        self.accesses: list[Access] = []
        self._collect(launch.body)
        self._check_shapes()

    def _collect(self, s: Any) -> None:
        match s:
            case Alloc():
                self._allocated(s)
            case If() if self.by_hand and (warps := warps_of(s.cond)) is not None:
                saved = self.current_threads, self.cut
                own = warps[1] * WARP_LANES
                for part, n, start in ((s.then, own, warps[0]), (s.orelse, saved[0] - own, warps[0] or warps[1])):
                    self.current_threads, self.cut = n, bool(start % PER_GROUP)
                    if part is not None:
                        self._collect(part)
                self.current_threads, self.cut = saved
            case TileOp():
                self.ops.append(s)
                self.threads_of[id(s)] = self.current_threads
                self._check_threads(s)
                if self.cut:
                    self.cutting.add(id(s))
                self._collect_exprs((s,), belongs=True)  # a run-time bound or value may be read from a fragment
            case Parallel():
                for y in walk(s.body, Alloc):
                    self._allocated(y)
                self._collect_loop(s)
            case _:
                if isinstance(s, Store) and s.buffer.scope_name == FRAGMENT:
                    self.alone.add(s.buffer)
                self._collect_exprs(e for e in children(s) if not isinstance(e, Stmt))
                for x in inner(s):
                    self._collect(x)

    def _allocated(self, s: Alloc) -> None:
        """Raise an error unless a buffer in registers has a static size."""
        if s.buffer.scope_name.startswith("local") and not s.buffer.is_static:
            raise run_time_shape(s.buffer, s.buffer.span)
        self._see(s.buffer)

    def _collect_exprs(self, exprs: Iterable[Any], belongs: bool = False) -> None:
        """Collect the buffers of a tile op, or those in the expressions of a statement that every thread executes by itself."""
        for x in (x for e in exprs for x in walk(e, Buffer, Load, Call)):
            if isinstance(x, Buffer):
                self._see(x)
                if belongs:
                    self._belongs(x)
            elif isinstance(x, Load):
                self.alone |= {x.buffer} if x.buffer.scope_name == FRAGMENT else set()
            elif not belongs:
                self._see_call(x)

    def _see_call(self, c: Call) -> None:
        if not c.op.startswith("atomic"):
            for x in c.args:
                if isinstance(x, AddressOf):
                    self.pointers.add(x.buffer.data)
                    if c.op != "cp_async":
                        self.taken.setdefault(x.buffer.data, c)

    def _see(self, b: Buffer) -> None:
        if b.scope_name in SHARED and not b.is_static:
            self.pointers.add(b.data)  # stored row by row (layout.RowMajor), and so are views of it
        elif b.scope_name == FRAGMENT or b.scope_name in SHARED:
            self.buffers.setdefault(b)

    def _belongs(self, b: Buffer) -> None:
        """Record that a fragment lies in the registers of the warp role that uses it."""
        if b.scope_name == FRAGMENT:
            self.threads_of[id(b)] = self.current_threads

    def known_for(self, x: Any) -> Known:
        """The known layouts for the warp role of an op, loop or fragment."""
        self.known.threads = self.threads_of.get(id(x), self.whole)
        return self.known

    def _collect_loop(self, s: Parallel) -> None:
        self.threads_of[id(s)] = self.current_threads
        extents = tuple(int(n.value) if isinstance(n, Const) else n for n in s.extents)
        touches: list[Touch] = []
        written: list[tuple[Expr, ...]] = []
        for x in walk(s.body):
            if isinstance(x, Buffer):
                self._see(x)
                self._belongs(x)
            elif isinstance(x, Call):
                self._see_call(x)
            elif isinstance(x, (Load, Store)):
                if x.buffer.scope_name == FRAGMENT:
                    touches.append(touch(x, s.vars, extents))
                    written += [x.indices] if isinstance(x, Store) else []
        given = s.plan.loop_layout
        if given is not None and (not isinstance(given, Fragment) or given.shape != extents):
            raise error("layout-conflict", f"loop_layout of a parallel loop over {extents} must be a Fragment of that shape, "
                        f"found {given!r}", expected=f"a Fragment of shape {extents}", span=s.span,
                        hint="give the Fragment one index per loop, with its extent")
        self._check_threads(s)
        static = tuple(n for n in extents if isinstance(n, int))
        if touches and len(static) == len(extents):
            self.loops[id(s)] = Loop(s, static, touches, serial_dims(s.vars, static, written))
        self.accesses += memory_accesses(s, self.analyzer)

    def _check_threads(self, s: Any) -> None:
        given, most = getattr(getattr(s, "plan", None), "loop_layout", None), self.current_threads
        if isinstance(given, Fragment) and given.threads > most:  # no thread would run the other iterations
            raise error("layout-conflict", f"the loop_layout uses ‹{given.threads} threads›, here are {most}", span=s.span,
                        expected=f"at most {most} threads", hint="give a thread several iterations, or leave loop_layout out")

    def _check_shapes(self) -> None:
        for b in self.buffers:
            if not b.is_static:
                raise run_time_shape(b, b.span)

    # ---- fragments in several shapes ------------------------------------------------------------------------------

    def views(self) -> list[list[Buffer]]:
        """Groups of fragments that are the same registers under several shapes."""
        groups: dict[Var, list[Buffer]] = {}
        for b in self.buffers:
            if b.scope_name == FRAGMENT:
                groups.setdefault(b.data, []).append(b)
        return [g for g in groups.values() if len(g) > 1]

    def suits_views(self, b: Buffer, lay: Any) -> bool:
        """Whether this layout of b can be expressed in the shape of every view of b, and no view has a different layout."""
        for v in self.buffers:
            if v.data is b.data and v is not b:
                seen = seen_as(lay, b, v)
                if seen is None or self.known.layouts.get(v, seen) != seen:
                    return False
        return True

    def cuts(self, b: Buffer) -> list[int]:
        """Sizes, in elements of b, at which dimensions of b and of its views end."""
        out = []
        for v in self.buffers:
            if v.data is b.data:
                bits = bits_of(v)
                out.append(bits // bits_of(b))
                for n in reversed(v.shape):
                    bits *= n
                    out.append(bits // bits_of(b))
        return out


def run_time_shape(b: Buffer, span: Any) -> Exception:
    """The error for a buffer that needs a layout but has a run-time shape."""
    return error("layout-shape", f"`{b.name}` ({b.scope_name}) has a run-time shape, its tile must be static",
                 found=str(tuple(b.shape)), span=span, hint="allocate the largest tile and guard what lies outside")


def seen_as(lay: Fragment, b: Buffer, view: Buffer) -> Fragment | None:
    """The layout of a view of a fragment's registers; None where the view would cut modes or elements."""
    if lay.replicas == lay.threads and lay == replicated_fragment(b.shape, lay.threads):  # row-major, whole in each thread
        return replicated_fragment(view.shape, lay.threads)
    try:
        return lay.reshape(view.shape, bits_of(b), bits_of(view))
    except TileLangError:
        return None


def bits_of(b: Buffer) -> int:
    """Size of an element in bits."""
    return b.dtype.bits * b.dtype.lanes


def at_line(s: Stmt) -> str:
    """The source line of a statement for reports: " at line 12"."""
    return "" if s.span is None else f" at line {s.span.line}"
