"""Splits a GEMM whose short-lived accumulator does not fit the registers into chunks of columns, one after another.

    gemm(A, B, P, clear)                            gemm(A, B[0:128], Q, clear)
    for i, j in Parallel(128, 256):          ->     for i, j in Parallel(128, 128): C[i, j] += Q[i, j] * s[i]
        C[i, j] += P[i, j] * s[i]                   gemm(A, B[128:256], Q, clear)
                                                    for i, j in Parallel(128, 128): C[i, j + 128] += Q[i, j] * s[i]

This is for float8 GEMMs whose accumulator is scaled or promoted every 128 elements of k.  A tile of 128 x 256 needs 128
registers per thread for C.  Another 128 for P would not fit, but 64 for Q do.  A wide tile needs fewer bytes from shared
memory per MMA than a narrow one.  The additions of each element and their order do not change.  C keeps the layout that it
would have with the whole GEMM: the chunks are consecutive ranges of a thread's registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilelang.ir import (Alloc, Buffer, Launch, Load, Parallel, Region, Stmt, Store, Var, const, contains, fresh, is_const,
                         replace, rewrite, rewrite_stmts, seq, stmts_of, substitute, walk, with_options, FRAGMENT)
from tilelang.ir.record import record
from tilelang.layout import Fragment
from tilelang.ops import Gemm
from tilelang.ops.gemm.wgmma import GROUP, choose_wgmma, wgmma_fragments
from tilelang.target.machine import MOST_REGISTERS, REGISTERS, REGISTERS_PER_SM, consumer_registers
from tilelang.target.wgmma import WGMMA_ROWS

from ..analysis.effects import effects, fills_whole
from ..legalize.hopper_features import hopper
from ..analysis.liveness import has_views
from .loop_layouts import over_loops, projected, serial_dims, touch
from ..framework.pass_ import TILE, PassContext, pass_
from ..analysis.statements import rename
from ..analysis.pipeline_loops import inner_loops

LEAST_COLUMNS = 64  # of a chunk: narrower instructions are less efficient, because reading A takes longer than the MMA


@record
class _User:
    """A parallel loop over the elements of the accumulator.  column: which of its variables is the column index."""

    loop: Parallel
    extents: tuple[int, ...]
    column: int


@pass_(needs=TILE, of=Launch, when=lambda cx: hopper(cx).wgmma)
def split_accumulators(launch: Launch, cx: PassContext) -> Launch | None:
    """Splits accumulators that do not fit the registers; see the module's docstring.

    Keeps: every element's value, bit by bit.  A launch is not changed if its accumulator fits, or if it is used in other
    ways than element by element in the iteration that computes it.
    """
    loops = inner_loops(launch.body)
    products: list[Any] = list(walk(launch.body, Gemm))
    if len(loops) != 1 or len(products) != 1 or loops[0].plan.counted:
        return None
    loop, op = loops[0], products[0]
    body = list(stmts_of(loop.body))
    at = next((n for n, s in enumerate(body) if s is op), None)
    if at is None or op.plan.exchanged or not is_const(op.clear_accum, True) or has_views(op.c.buffer, launch.body):
        return None
    users = _users(op.c.buffer, launch, body, at)
    if users is None:
        return None
    first, last = body.index(users[0].loop), body.index(users[-1].loop)
    read = {op.a.buffer.data, op.b.buffer.data}
    if last - first != len(users) - 1 or any(e.writes and e.storage in read for s in body[at + 1:last + 1] for e in effects(s)):
        return None
    chunks = _chunks(launch, body, op, users[-1].loop, cx)
    if chunks is None:
        return None
    width = op.n // chunks
    accumulator = replace(op.c.buffer, shape=(op.m, width), data=Var(op.c.buffer.name, op.c.buffer.data.dtype))
    ops = [_columns(op, accumulator, n * width, width) for n in range(chunks)]
    layouts = _layouts(launch, op, ops, users)
    if layouts is None:
        return None
    narrow = layouts.pop(accumulator)
    kept = [(b, layout) for b, layout in layouts.items() if b is not op.c.buffer]
    new = list(body[:at])
    for n in range(chunks):
        new += [ops[n], *(body[at + 1:first] if n == 0 else ()), *rename(
            [_chunk_loop(u, op.c.buffer, accumulator, n * width, width, narrow) for u in users])]
    new += body[last + 1:]
    done = replace(loop, body=seq(*new, span=loop.body.span))

    def changed(s: Stmt) -> Stmt | None:
        if isinstance(s, Alloc) and s.buffer is op.c.buffer:
            return replace(s, buffer=accumulator)
        return done if s is loop else None

    out = replace(launch, body=rewrite_stmts(launch.body, changed))
    return with_options(out, layouts=(*launch.plan.layouts, *kept),
                      report=(*launch.plan.report, f"`{accumulator.name}` is computed in {chunks} chunks of {width} columns"))


def _users(accumulator: Buffer, launch: Launch, body: list[Stmt], at: int) -> list[_User] | None:
    """The loops that use the accumulator, in order; None if it is used in any other way, or not at all."""
    mine = [s for s in body[at + 1:] if any(e.storage is accumulator.data for e in effects(s))]
    inside = {id(e.node) for s in mine for e in effects(s)}
    if not mine or any(e.storage is accumulator.data and e.node is not body[at] and id(e.node) not in inside
                       for e in effects(launch.body)):
        return None
    users: list[_User] = []
    for s in mine:
        user = _user(s, accumulator)
        if user is None:
            return None
        users.append(user)
    return users if len(users) == 1 or all(_own_columns(u, users) for u in users) else None


def _user(s: Stmt, accumulator: Buffer) -> _User | None:
    if not isinstance(s, Parallel) or s.plan.loop_layout is not None or contains(s.body, Alloc):
        return None
    extents = tuple(int(n.value) if is_const(n) else -1 for n in s.extents)  # type: ignore[attr-defined]
    found = [_places(x, s.vars) for x in _accesses(s) if x.buffer is accumulator]
    if not found or any(p != found[0] for p in found) or len(s.vars) != 2:
        return None
    places = [p for p in found[0] if p is not None]
    if sorted(places) != [0, 1] or any(extents[d] != n for d, n in zip(places, accumulator.shape)):
        return None
    column = places[1]
    written = [x.indices for x in _accesses(s) if isinstance(x, Store) and x.buffer.scope_name == FRAGMENT]
    return None if serial_dims(s.vars, extents, written) else _User(s, extents, column)


def _accesses(s: Stmt) -> Iterator[Any]:
    return (x for x in walk(s, Load, Store))


def _places(x: Any, names: tuple[Var, ...]) -> tuple[int | None, ...]:
    """For each index, which of the loop's variables it is; None for other expressions."""
    return tuple(next((k for k, v in enumerate(names) if i is v), None) for i in x.indices)


def _own_columns(u: _User, users: list[_User]) -> bool:
    """Whether all loops use what u writes only in the same column, so that the chunks are independent of each other."""
    for e in effects(u.loop):
        if not e.writes:
            continue
        places = set()
        for v in users:
            for f in effects(v.loop):
                if f.storage is e.storage:
                    if f.buffer is not e.buffer or f.indices is None:
                        return False
                    dims = [d for d, p in enumerate(_places(f.node, v.loop.vars)) if p == v.column]
                    places.add(tuple(dims))
        if len(places) != 1 or len(next(iter(places))) != 1:
            return False
    return True


def _chunks(launch: Launch, body: list[Stmt], op: Any, last: Parallel, cx: PassContext) -> int | None:
    """The number of chunks with which the accumulator fits beside the other fragments; None if it fits whole, or never."""
    groups = launch.num_threads // GROUP
    if not groups or launch.num_threads % GROUP:
        return None
    most = consumer_registers(groups) if hopper(cx).warp_roles else REGISTERS_PER_SM // launch.num_threads
    most = min(most, MOST_REGISTERS) - REGISTERS.split_accumulator
    held = {e.storage: e.buffer for s in body for e in effects(s) if e.buffer.scope_name == FRAGMENT}
    others = sum(b.bits // 32 for v, b in held.items() if v is not op.c.buffer.data and v is not _successor(body, last))
    sums = op.c.buffer.size * op.c.dtype.bits // 32
    fits = [n for n in range(1, op.n // LEAST_COLUMNS + 1) if op.n % n == 0 and op.n // n % 8 == 0
            and others + sums // n <= most * launch.num_threads]
    return fits[0] if fits and fits[0] > 1 else None


def _successor(body: list[Stmt], last: Parallel) -> Var | None:
    """The fragment whose elements take the registers of the accumulator's, which the loop `last` reads for the last time."""
    if not fills_whole(last):
        return None
    made = last.body.buffer.data  # type: ignore[attr-defined]
    earlier = [e for s in body[:body.index(last)] for e in effects(s)]
    return None if any(e.storage is made for e in (*earlier, *(e for e in effects(last) if e.reads))) else made


def _columns(op: Any, accumulator: Buffer, first: int, width: int) -> Any:
    """The GEMM for `width` columns of B, from column `first` on."""
    return replace(op, b=op.b.narrowed(-2 if op.transpose_b else -1, first, width),
                   c=Region(accumulator, op.c.mins, (op.m, width), span=op.c.span))


def _layouts(launch: Launch, op: Any, ops: list[Any], users: list[_User]) -> dict[Buffer, Fragment] | None:
    """Layouts of the accumulator, of one chunk of it, and of all fragments that have the same columns.

    None if a chunk is not computed by one instruction's width, if a row of it lies in several warp groups, or if the user
    gave one of the layouts.
    """
    threads = launch.num_threads
    plans = [choose_wgmma(x, threads) for x in ops]
    first = plans[0]
    if isinstance(first, str) or any(p != first for p in plans):
        return None
    row = WGMMA_ROWS[first.instruction]
    if first.warps[1] != 1 or row.shape[1] != ops[0].n:
        return None
    given = {b for b, _ in launch.plan.layouts}
    whole = wgmma_fragments(op, row, first.warps, threads)[2]
    out: dict[Buffer, Fragment] = {op.c.buffer: whole, ops[0].c.buffer: wgmma_fragments(ops[0], row, first.warps, threads)[2]}
    for u in users:
        mine = next(x for x in _accesses(u.loop) if x.buffer is op.c.buffer)
        over = over_loops(whole, touch(mine, u.loop.vars, u.extents), u.extents)
        for x in _accesses(u.loop):
            if x.buffer.scope_name != FRAGMENT or x.buffer is op.c.buffer or u.loop.vars[u.column] not in _used(x):
                continue
            t = touch(x, u.loop.vars, u.extents)
            layout = projected(over, t) if t.plain and t.exact and all(c == 1 for c in t.repeats) else None
            if layout is None or x.buffer in given or out.setdefault(x.buffer, layout) != layout:
                return None
    return None if op.c.buffer in given else out


def _used(x: Any) -> set[Any]:
    return {y for i in x.indices for y in walk(i)}


def _chunk_loop(u: _User, whole: Buffer, accumulator: Buffer, first: int, width: int, layout: Fragment) -> Stmt:
    """The iterations of a loop for `width` columns from column `first` on."""
    old, names = u.loop.vars[u.column], u.loop.vars
    new = fresh(old.name, old.dtype)
    mine = next(x for x in _accesses(u.loop) if x.buffer is whole)
    extents = tuple(width if d == u.column else n for d, n in enumerate(u.extents))
    over = over_loops(layout, touch(mine, names, u.extents), extents)

    def moved(x: Any) -> Any:
        if isinstance(x, (Load, Store)) and x.buffer is whole:
            return replace(x, buffer=accumulator, indices=tuple(new if i is old else i for i in x.indices))
        return None

    body = substitute(rewrite(u.loop.body, moved), {old: new + first if first else new})
    out = replace(u.loop, vars=tuple(new if v is old else v for v in names), body=body,
                  extents=tuple(const(width, e.dtype) if d == u.column else e for d, e in enumerate(u.loop.extents)))
    return with_options(out, loop_layout=over)
