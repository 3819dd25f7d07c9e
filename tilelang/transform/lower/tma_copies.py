"""Copies whole tiles between global and shared memory by TMA, issued by one thread.

    copy(A[...], S)        ->   if thread 0:  arrive_expect_tx(bar, bytes); copy(A[...], S)     # TMA
                                wait(bar, phase); phase ^= 1                                    # every thread

    copy(S, C[...])        ->   if thread 0:  copy(S, C[...]); bulk_wait(0)                     # TMA
    atomic_add(C[...], S)  ->   the same, adding

Adjacent loads share an mbarrier.  The pass handles blocks without warp roles, and the consumer branch of blocks that
specialize_warps split; the tiles that the producer loads through rings are marked already.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, BufferFacts, Call, For, Func, If, Launch, Load, Parallel, Region, Seq,
                         Stmt, Store, While, binary, const, dtype, load, replace, rewrite_launches, seq, stmts_of, walk,
                         with_inner, with_options, BARRIER, GLOBAL, SHARED, VARIABLE)
from tilelang.layout import linear_layout
from tilelang.ops import AtomicTile, Copy, Transpose
from tilelang.ops.bulk import as_boxes, run_sum_unsupported, run_unsupported
from tilelang.ops.gemm.wgmma import shared_layout
from tilelang.ops.ldmatrix import in_tiles_of_bytes
from tilelang.ops.tma import tma_bytes, tma_unsupported
from tilelang.ops.tma_boxes import copied_tile
from tilelang.ops.tma_store import tile_unsupported
from tilelang.target.warp_groups import warps_of

from ..analysis.guards import with_ranges
from ..analysis.effects import effects
from ..analysis.statements import do, initialised
from ..legalize.hopper_features import hopper, unreadable
from ..framework.pass_ import TILE, PassContext, pass_
from .tma_stores import TmaStores, asks_for_tma
from ..analysis.vectorize import stride_along

GROUP, WARP = 128, 32
SMALLEST = 2048  # bytes of a tile; threads copy smaller tiles as fast as TMA


@pass_(needs=TILE)
def tma_copies(func: Func, cx: PassContext) -> Func:
    """Mark the copies that TMA can make.  The module docstring describes the rewrite.

    Unsuitable copies stay as they are; for larger tiles the Launch attr `report` gives the reason.  Needs tl.enable_hopper and
    sm_90a, and is off with tl.disable_tma_lower; atomics with use_tma=True need neither.
    Keeps: the order of all accesses (place_sync puts block barriers around copies that one thread issues).
    """
    on, strides = hopper(cx).tma, hopper(cx).strides

    return rewrite_launches(func, lambda x: _Copies(x, on, strides).run() if on or asks_for_tma(x) else x)


class _Copies:
    """The rewriting of one launch."""

    def __init__(self, launch: Launch, on: bool, strides: bool) -> None:
        self.launch, self.thread, self.on = launch, launch.thread_vars[0], on
        self.stores = TmaStores(launch, True, 0, strides)
        found = list(effects(launch.body))
        self.pointers = {a.buffer.data for x in walk(launch.body, Call) if not x.op.startswith("mbarrier")
                         for a in x.args if isinstance(a, AddressOf)}
        shared = {x.buffer for x in walk(launch.body, Alloc) if x.buffer.scope_name in SHARED}
        used = {e.buffer for e in found if e.buffer.scope_name in SHARED} | shared
        self.views = {b.data for b in used if any(x is not b and x.data is b.data for x in used)}
        self.given = dict(launch.plan.layouts)
        self.analyzer = with_ranges(Analyzer(), launch, Launch, For)
        self.setup: list[Stmt] = []
        self.barriers: list[Buffer] = []
        self.notes: dict[str, None] = {}

    def run(self) -> Launch:
        x, y, z = self.launch.threads
        if y != 1 or z != 1 or x % WARP or not self.stores.on or self.launch.plan.by_hand:
            return self.launch
        body = self.stmt(self.launch.body)
        if (init := initialised(self.barriers, self.thread)) is not None:
            self.setup.append(init)
            if self.launch.plan.compute_threads is None:  # the pass that made the warp roles has all threads meet before them
                self.setup.append(do("sync_threads"))
        out = self.launch if body is self.launch.body else replace(
            self.launch, body=seq(*self.setup, *stmts_of(body), span=body.span))
        return with_options(out, report=(*self.launch.plan.report, *self.notes) or None)

    # ---- walking --------------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt) -> Stmt:
        """The statement s, with the copies inside it that TMA can make converted."""
        match s:
            case Seq() | Copy() | AtomicTile():
                return self.block(s)
            case For() if s.kind not in ("serial", "unroll"):
                return s
            case For() | While():
                return with_inner(s, lambda body: self.stores.inside(s, lambda: self.stmt(body)))  # type: ignore[no-any-return]
            case If() if warps_of(s.cond) is not None:
                return self._warp_role_branch(s)
            case If():
                return with_inner(s, self.stmt)  # type: ignore[no-any-return]
        return s

    def _warp_role_branch(self, s: Any) -> Stmt:
        """Convert the consumer branch; the other branch was lowered by the pass that made the warp roles."""
        compute = self.launch.plan.compute_threads
        if compute is None or s.orelse is None or s.cond.options.first * GROUP != compute:
            return s
        return with_inner(s, lambda x: self.stmt(x) if x is s.orelse else x)  # type: ignore[no-any-return]

    def block(self, s: Stmt) -> Stmt:
        """Convert a sequence of statements."""
        stmts = list(stmts_of(s))
        out: list[Stmt] = []
        run: list[Copy] = []

        def flush() -> None:
            out.extend(self._loads(run))
            run.clear()

        for x in stmts:
            if isinstance(x, Copy) and self._is_load(x):
                if any(y.dst.buffer.data is x.dst.buffer.data for y in run):
                    flush()
                run.append(x)
                continue
            flush()
            if isinstance(x, (Copy, AtomicTile)):
                out.append(self._store(x) if self._is_store(x) else x)
            else:
                out.append(self.stmt(x))
        flush()
        return s if len(out) == len(stmts) and all(a is b for a, b in zip(out, stmts)) else seq(*out, span=s.span)

    # ---- loads ----------------------------------------------------------------------------------------------------

    def _is_load(self, c: Copy) -> bool:
        """Whether a copy can be a TMA load; if a larger one cannot, the report gives the reason."""
        if not self.on or c.plan.tma or c.plan.bulk or c.plan.async_group or c.src.buffer.scope_name != GLOBAL or \
                c.dst.buffer.scope_name not in SHARED or not _bytes(c.dst):
            return False
        strides = self.stores.strides
        one_row = c.dst.buffer.ndim == 1
        why = _few(c.dst) or (run_unsupported(c, c.dst, self._placed(c.src), self.analyzer, strides) if one_row
                              else tma_unsupported(c, strides)) or self._unfit(c.dst.buffer)
        if why := why or unreadable(self.launch, c.src.buffer):
            self.notes[f"`{c.dst.buffer.name}` is loaded by all threads: {why}"] = None
        return not why

    def _way(self, c: Copy | AtomicTile, tile: Region) -> dict[str, Any]:
        """The attributes that mark a copy as made by TMA."""
        if tile.buffer.ndim != 1:
            return {"tma": True}
        if isinstance(c, AtomicTile):
            return {"bulk": True, "boxes": True}
        run = c.src if tile is c.dst else c.dst
        return {"bulk": True, "boxes": as_boxes(tile, self._placed(run), self.analyzer) or None}

    def _placed(self, run: Region) -> Region:
        """A run of a tensor that other ranks reach, with the values of bound variables: it cannot be copied as boxes."""
        if not run.buffer.facts.symmetric:
            return run
        values = {x.var: x.value for x in walk(self.launch.body, Bind)}
        return replace(run, mins=tuple(self.stores.inlined(m, values) for m in run.mins))

    def _unfit(self, b: Buffer) -> str:
        """Why a shared tile cannot be laid out in swizzle atoms; "" when it can."""
        if b.data in self.pointers:
            return f"the address of `{b.name}` is taken"
        if b.data in self.views:
            return f"`{b.name}` is seen in another shape"
        if b.ndim > 1 and b in self.across:
            return f"`{b.name}` is accessed across its rows, which swizzle atoms make slow"
        given = self.given.get(b)
        if given is not None and given != (linear_layout(tuple(b.shape)) if b.ndim == 1 else shared_layout(b)):
            return f"the layout given for `{b.name}` is another one"
        return ""

    @cached_property
    def across(self) -> set[Buffer]:
        """Tiles of which neighbouring threads touch different rows: layouts other than swizzle atoms suit them better."""
        by_element = (x for x in walk(self.launch.body, Transpose) if not in_tiles_of_bytes(x.src, x.dst))
        out = {r.buffer for x in by_element for r in (x.src, x.dst)}
        for loop in walk(self.launch.body, Parallel):
            for x in walk(loop.body, Load, Store):
                if x.buffer.scope_name in SHARED and x.buffer.ndim > 1 and x.buffer not in out:
                    steps = [stride_along(i, loop.vars[-1], self.analyzer) for i in x.indices]
                    out |= {x.buffer} if any(steps[:-1]) or None in steps or steps[-1] not in (0, 1, -1) else set()
        return out

    def _loads(self, run: list[Copy]) -> list[Stmt]:
        """Loads that one thread issues together, and one wait by all threads."""
        if not run:
            return []
        bar = Buffer("_".join(c.dst.buffer.name for c in run) + "_ready", (1,), dtype("uint64"), BARRIER,
                     facts=BufferFacts(arrive=(1,)))
        at = AddressOf(bar, (const(0),))
        self.setup.append(Alloc(bar))
        self.barriers.append(bar)
        bytes_ = sum(tma_bytes(c) for c in run)
        asks = [do("mbarrier_arrive_expect_tx", at, const(bytes_, "uint32")),
                *(with_options(c, **self._way(c, c.dst), barrier=(bar, const(0))) for c in run)]
        out: list[Stmt] = [self._one(seq(*asks))]
        if not self.stores.loops:
            return [*out, do("mbarrier_wait", at, const(0, "uint32"))]
        phase = Buffer("phase", (1,), dtype("uint32"), VARIABLE)
        self.setup.append(Alloc(phase, const(0, "uint32")))
        now = load(phase, (const(0),))
        return [*out, do("mbarrier_wait", at, now), Store(phase, (const(0),), binary("bitxor", now, const(1, "uint32")))]

    # ---- stores ---------------------------------------------------------------------------------------------------

    def _is_store(self, c: Copy | AtomicTile) -> bool:
        """Whether a copy from shared to global memory, or an atomic with a shared tile, can be made by TMA."""
        src = source(c)
        if src is None or src.buffer.scope_name not in SHARED or c.dst.buffer.scope_name != GLOBAL or c.plan.tma or \
                c.plan.bulk:
            return False
        asked = c.plan.use_tma
        if not asked and not (self.on and _bytes(src)):
            return False
        if why := "" if asked else _few(src):
            pass
        elif src.buffer.ndim == 1:
            why = run_unsupported(c, src, self._placed(c.dst), self.analyzer, self.stores.strides) if isinstance(
                c, Copy) else run_sum_unsupported(c, self.analyzer, self.stores.strides)
        else:
            why = tile_unsupported(c, src, c.dst, isinstance(c, AtomicTile), self.stores.strides)
        why = why or self._unfit(src.buffer) or self.stores.unsupported(c, c.dst.buffer)
        if why:
            self.notes[f"`{c.dst.buffer.name}` is written by all threads: {why}"] = None
        return not why

    def _store(self, c: Copy | AtomicTile) -> Stmt:
        """One thread stores the tile and waits until shared memory has been read; until the store is complete where it may
        store the same elements again, or a signal may tell other ranks of it."""
        again = isinstance(c, Copy) and (c.dst.buffer.facts.symmetric or self.stores.again(c.dst))
        wait = do("bulk_wait", n=0) if again else do("bulk_wait", n=0, read=True)
        return self._one(seq(with_options(c, **self._way(c, copied_tile(c)), awaited=True), wait))

    def _one(self, s: Stmt) -> Stmt:
        """The statement s, executed by the first thread alone."""
        return If(binary("eq", self.thread, const(0, self.thread.dtype)), s)


def source(c: Copy | AtomicTile) -> Region | None:
    """The tile that is copied or added; None for a scalar."""
    got = c.src if isinstance(c, Copy) else c.value if c.by_tma else None
    return got if isinstance(got, Region) else None


def _few(tile: Region) -> str:
    """Why threads copy a small tile; "" for others."""
    return f"threads are as quick with {_bytes(tile)} bytes" if _bytes(tile) < SMALLEST else ""


def _bytes(region: Region) -> int:
    """Size of a tile in bytes, 0 when it is not static."""
    return math.prod(n if isinstance(n, int) else 0 for n in region.extents) * region.dtype.bits * region.dtype.lanes // 8
