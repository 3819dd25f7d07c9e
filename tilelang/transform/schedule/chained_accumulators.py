"""Schedules several GEMMs that use one accumulator one after another; each result is promoted before the next GEMM starts.

    for k:                                     fill row for the first k
        fill row                               for k:
        P = A[k] B[k, 0]; …P * row…     ->         start P = A[k] B[k, 0]; take row, fill it for k+1; wait for P; …P…
        P = A[k] B[k, 1]; …P * row…                start P = A[k] B[k, 1]; wait for stage k+1; wait for P; …P…
                                               the last iteration, without the code that prepares a next one

(split_accumulators.py creates such loops.)  Only one accumulator P is in registers, so a warp group either runs an MMA or
promotes its result.  Meanwhile another warp group keeps the tensor cores busy, if promotion takes less time than an MMA.
Therefore this schedule moves as much other work as possible under the running MMA: small fragments (scales) are loaded one
iteration ahead, and the wait for the next stage happens during the last GEMM of an iteration.  The arithmetic and its order
do not change.

With fragments to load ahead, a GEMM is waited for in the iteration that starts it.  If it were started in the iteration
before, ptxas would emit the promotion as one uninterrupted sequence without a yield, and the next GEMM of the other warp
group would wait for it: promotion with factors then costs 5 % of the time.  Promotion without factors does not have this
problem, so without fragments to load, each iteration starts the first GEMM of the next one after its last promotion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tilelang.ir import (Alloc, Bind, Buffer, Const, Expr, For, If, Load, Region, Stmt, Store, Var, binary, const, convert,
                         free_vars, is_const, load, replace, seq, stmts_of, substitute, used_vars, walk, with_options, FRAGMENT,
                         VARIABLE)
from tilelang.ir.record import record
from tilelang.ops import Copy, Gemm

from ..analysis.effects import fills_whole, touches
from ..analysis.statements import rename
from ..analysis.statements import do
from ..analysis.pipeline_loops import SERIAL
from .rings import WarpRoleLoop, pin
from ..analysis.pipeline_schedule import needed_binds


@record
class Chain:
    """GEMMs of a loop that use one accumulator one after another.

    items: the GEMMs, as indices into the loop's items.  accumulator: their common one.  ahead: fragments that the statements in
    front of the first GEMM fill and that may be filled one iteration ahead.
    """

    items: tuple[int, ...]
    accumulator: Buffer
    ahead: tuple[Buffer, ...]


def accumulator_chain(r: WarpRoleLoop) -> Chain | None:
    """The GEMMs of a loop that use one accumulator one after another; None if there are fewer than two or they do not fit."""
    found = cleared_gemms(r)
    if len(found) < 2:
        return None
    return Chain(found, r.body.items[found[0]].stmt.c.buffer, filled_ahead(r, found[0]) or ())  # type: ignore[attr-defined]


def cleared_gemms(r: WarpRoleLoop) -> tuple[int, ...]:
    """The GEMMs of a loop, if each of them clears the same accumulator, and only the statements behind it use its result.

    Their operands come from rings that nothing else uses.  () if there is a GEMM of which that is not true.
    """
    items = r.body.items
    rest = [i for i in range(len(items)) if i not in r.loads]
    found = tuple(i for i in rest if isinstance(items[i].stmt, Gemm))
    if not found or r.body.allocs or any(items[i].defines is not None for i in rest):
        return ()
    ops: list[Any] = [items[i].stmt for i in found]
    accumulator = ops[0].c.buffer
    pure = {s.var for s in r.body.pure}
    for op in ops:
        if op.c.buffer is not accumulator or not is_const(op.clear_accum, True) or free_vars(op) & pure or \
                not {op.a.buffer, op.b.buffer} <= set(r.versions):
            return ()
    if any(x.last >= found[0] if x.iterations > 1 else x.first not in found or x.last not in found for x in r.rings):
        return ()
    others = [i for i in rest if i not in found]
    read = {e.storage for i in found for e in items[i].effects} - {accumulator.data}
    if any(e.writes and e.storage in read for i in others for e in items[i].effects) or any(
            items[i].touches(accumulator.data) for i in others if i < found[0]) or r.used_outside(accumulator.data):
        return ()
    return found


def filled_ahead(r: WarpRoleLoop, first: int) -> tuple[Buffer, ...] | None:
    """The fragments that the statements before the first GEMM fill for those after it, if that can be done one iteration ahead.

    They then get a second copy each, so that loads (of scales) have the time of a whole GEMM to arrive.  None if these
    statements cannot run ahead.
    """
    items = r.body.items
    before = [x for i, x in enumerate(items) if i < first and i not in r.loads]
    after = [x for i, x in enumerate(items) if i >= first and i not in r.loads]
    made: dict[Var, Buffer] = {}
    if not all(fills_whole(x.stmt) for x in before):
        return None
    for x in before:
        for e in x.effects:
            if e.writes and (e.buffer.scope_name != FRAGMENT or e.storage not in made and e.reads):
                return None
            if e.writes:
                made[e.storage] = e.buffer
    touched = {e.storage for x in before for e in x.effects}
    if any(e.writes and e.storage in touched for x in after for e in x.effects) or any(map(r.used_outside, made)):
        return None
    annotated = {b for b, _ in r.launch.plan.layouts}
    return None if annotated & set(made.values()) else tuple(made.values())


@record
class TileCode:
    """Code of a loop that runs once for each tile of a block, where the first GEMM of a tile starts during the tile before.

    made: allocations for all tiles.  ahead: the waits and loads before a tile's first GEMM.  start: that GEMM.
    body: function from `ahead` and `start` of the next tile to the rest of the loop.
    """

    made: list[Stmt]
    ahead: list[Stmt]
    start: list[Stmt]
    body: Callable[[list[Stmt], list[Stmt]], list[Stmt]]


def chained(r: WarpRoleLoop, chain: Chain) -> list[Stmt]:
    """The consumers' code of the loop: without its copies, with the code before and after the steady state."""
    return _Loop(r, chain).code()


def chained_tiles(r: WarpRoleLoop, chain: Chain) -> TileCode | None:
    """The same for the tiles of a block; None unless a tile has a constant number of at least two steps.

    None also if an iteration starts the first GEMM of the next one: ptxas then spills registers of the epilogue.
    """
    loop, extent = _Loop(r, chain), r.loop.extent
    return loop.tile_code() if loop.early and isinstance(extent, Const) and extent.value > 1 else None


class _Loop:
    """Generates the code of a chain.

    early: whether the statements before the first GEMM run one iteration ahead.  copies: (fragment that the promotion
    reads, fragment that is filled ahead).  loaded: bindings whose values are loads from memory, each with a variable for the
    current iteration and, if the promotion reads it, one for the next.
    """

    def __init__(self, r: WarpRoleLoop, chain: Chain) -> None:
        self.r, self.chain = r, chain
        copies = {id(r.body.items[i].stmt) for i in r.loads}
        kept = [s for s in stmts_of(r.loop.body) if id(s) not in copies]
        gemms = {id(r.body.items[i].stmt) for i in chain.items}
        places = [n for n, s in enumerate(kept) if id(s) in gemms]
        pure = {id(s) for s in r.body.pure}
        self.gemms = [kept[n] for n in places]
        self.before, *self.work = ([s for s in kept[a + 1:b] if id(s) not in pure]
                                   for a, b in zip([-1, *places], [*places, len(kept)]))
        used = _used(x for w in self.work for x in w)
        loaded = [s for s in r.body.pure if s.var in used and touches(s.value)]
        self.early = bool(chain.ahead or loaded and not self.before)
        read = {x.buffer for w in self.work for s in w for x in walk(s, Load, Region)}
        self.copies = [(b, _copy(b, "next")) for b in chain.ahead if b in read]
        self.loaded = [(s, _variable(s.var.name, s),
                        _variable(f"{s.var.name}_next", s) if self.early and s.var in used else None) for s in loaded]
        self.values: dict[Any, Any] = {s.var: load(b, _ZERO) for s, b, _ in self.loaded}

    def code(self) -> list[Stmt]:
        loop, extent = self.r.loop, convert(self.r.loop.extent)
        start, one = convert(loop.start), const(1, extent.dtype)
        last, opening = start + extent - one, self.opening(start)
        steady_loop, closing = self.steady_loop(start, extent - one), self.rest(last, None)
        if self.early:
            closing = [*self.start(0, last), *self.take(last), *closing]
        else:
            opening += self.start(0, start)
        whole = [*opening, steady_loop, *closing]
        if isinstance(extent, Const):
            return [*self.made(), *whole] if extent.value > 0 else []
        return [*self.made(), If(binary("gt", extent, const(0, extent.dtype)), seq(*whole), span=loop.span)]

    def tile_code(self) -> TileCode:
        """Code for two or more steps.  The first step is written separately, because its GEMM has already been started."""
        start, extent = convert(self.r.loop.start), convert(self.r.loop.extent)
        one = const(1, extent.dtype)
        last = start + extent - one

        def body(ahead: list[Stmt], gemm: list[Stmt]) -> list[Stmt]:
            first = [*self.take(start), *self.fill(start + one), *self.rest(start, start + one)]
            loop = self.steady_loop(start + one, extent - one - one)
            return [*first, loop, *self.start(0, last), *self.take(last), *self.rest(last, None, ahead), *gemm]

        return TileCode(self.made(), self.opening(start), self.start(0, start), body)

    def made(self) -> list[Stmt]:
        """Allocations."""
        made: list[Stmt] = [Alloc(b) for _, b in self.copies]
        return made + [Alloc(b) for _, now, after in self.loaded for b in (now, after) if b is not None]

    def opening(self, it: Expr) -> list[Stmt]:
        """What is filled ahead for the first GEMM of the loop, and the wait for its stage."""
        return [*self.fill(it), *self.r.filled(self.chain.items[0], it)]

    def steady_loop(self, start: Expr, extent: Expr) -> For:
        """The steady loop.  An iteration starts its own first GEMM, or that of the next one if nothing is filled ahead."""
        loop, k, one = self.r.loop, self.r.loop.var, const(1, extent.dtype)
        if self.early:
            iteration = [*self.start(0, k), *self.take(k), *self.fill(k + one), *self.rest(k, k + one)]
        else:
            iteration = [*self.rest(k, k + one), *self.fill(k + one), *self.start(0, k + one)]
        return with_options(replace(loop, kind="serial", start=start, extent=extent, body=seq(*iteration)), **SERIAL)

    def of(self, stmts: list[Stmt], it: Expr) -> list[Stmt]:
        """Statements of iteration `it`, after the bindings that they need."""
        binds = needed_binds([s for s in self.r.body.pure if s.var not in self.values], _used(stmts))
        mapping = {**self.values, self.r.loop.var: it}
        return rename([self.r.select(substitute(s, mapping), it) for s in (*binds, *stmts)])

    def fill(self, it: Expr) -> list[Stmt]:
        """The statements before the first GEMM, for iteration `it`."""
        values: list[Stmt] = [Store(now, _ZERO, s.value, span=s.span) for s, now, _ in self.loaded]
        ahead = {**dict(self.copies), **{now: b for _, now, b in self.loaded if b is not None}}
        first = [i for i in range(self.chain.items[0]) if i not in self.r.loads]
        return self.r.using([substitute(s, ahead) for s in self.of([*values, *self.before], it)], first, it)

    def take(self, it: Expr) -> list[Stmt]:
        """Copies what has been filled for iteration `it` to where the promotion reads it, so that it can be filled again."""
        return [*(Copy(_whole(after), _whole(now)) for now, after in self.copies),
                *(Store(now, _ZERO, load(after, _ZERO)) for _, now, after in self.loaded if after is not None)]

    def start(self, n: int, it: Expr) -> list[Stmt]:
        """Starts GEMM n of the chain and leaves it in flight."""
        return [with_options(s, wait=-1) for s in self.of([self.gemms[n]], it)]

    def rest(self, it: Expr, after: Expr | None, ahead: Sequence[Stmt] = ()) -> list[Stmt]:
        """The rest of an iteration whose first GEMM is in flight.

        after: the next iteration, None for the last one.  ahead: statements to run during the last GEMM.
        """
        r, end = self.r, len(self.chain.items) - 1
        slot, _ = r.slot(it)
        out: list[Stmt] = []
        for n, item in enumerate(self.chain.items):
            if n:
                out += [*r.filled(item, it), *self.start(n, it)]
            if after is not None and n == end:
                out += r.filled(self.chain.items[0], after)
            out += ahead if n == end else ()
            out += [do("wgmma_wait", n=0), pin(self.chain.accumulator)]
            out += [s for ring in r.rings if ring.last == item for s in r.release(ring, slot)]
            out += self.of(self.work[n], it)
        return out


_ZERO = (const(0),)


def _used(stmts: Iterable[Stmt]) -> set[Any]:
    return set().union(*(used_vars(s) for s in stmts))


def _variable(name: str, s: Bind) -> Buffer:
    return Buffer(name, (1,), s.var.dtype, VARIABLE, span=s.span)


def _copy(b: Buffer, what: str) -> Buffer:
    name = f"{b.name}_{what}"
    return replace(b, name=name, data=Var(name, b.data.dtype))


def _whole(b: Buffer) -> Region:
    return Region(b, tuple(const(0) for _ in b.shape), tuple(b.shape))
