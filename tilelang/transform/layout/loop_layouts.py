"""Derives layouts of parallel loops from the fragments they index, and the other way round; chooses work partitions.

The work partition of a loop is that of a fragment that it touches, or vectors distributed over the threads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Binary, Buffer, Call, Const, Evaluate, Expr, Load, Parallel, Stmt, Store, TileOp, Var,
                         binary, const, fresh, walk, FRAGMENT, GLOBAL)
from tilelang.ir.record import record, state
from tilelang.layout import REGISTER, Fragment, Mode
from tilelang.ops import Copy, Gemm, Reduce
from tilelang.ops.distribute import Distribution, flat, from_fragment

from ..analysis.distributed_loop import accesses, is_memory
from ..analysis.vectorize import ANYWHERE, MAX_BYTES, lane_dimension, power_of_two_in, stride_along


@state
class Touch:
    """A fragment access in a Parallel.

    dims: for each fragment dimension the loop that indexes it, else None.  repeats: how many neighbouring iterations of that
    loop use one element (index `v // repeats`).  inside: dimensions walked within one iteration (constant index, or that of a
    loop in the body), which must lie in registers.  plain: every dimension is inside, or is indexed by a loop that covers it.
    exact: the loops reach the end of every dimension, so they determine its whole layout.
    """

    buffer: Buffer
    dims: tuple[int | None, ...]
    repeats: tuple[int, ...]
    inside: tuple[int, ...]
    plain: bool
    exact: bool
    writes: bool


@state
class Loop:
    """A Parallel with its fragment accesses.

    serial: loops that some written element does not depend on, so that one thread has to run them in order.
    """

    node: Parallel
    extents: tuple[int, ...]
    touches: list[Touch]
    serial: tuple[int, ...]
    layout: Fragment | None = None


def touch(x: Load | Store, vars: tuple[Var, ...], extents: tuple[Any, ...]) -> Touch:
    """How an access indexes its fragment."""
    dims: list[int | None] = []
    repeats: list[int] = []
    inside: list[int] = []
    plain = x.buffer.is_static
    exact = True
    for d, (i, n) in enumerate(zip(x.indices, x.buffer.shape)):
        v, c = i, 1
        if isinstance(i, Binary) and i.op == "floordiv" and isinstance(i.b, Const) and i.b.value > 0:
            v, c = i.a, int(i.b.value)
        at = next((k for k, u in enumerate(vars) if u is v), None)
        walked = None if at is None or at in dims else extents[at]
        if isinstance(walked, int) and isinstance(n, int) and (walked == n * c or (c == 1 and walked < n)):
            dims.append(at)
            exact &= walked == n * c
        else:
            dims.append(None)
            if n != 1 and not any(y is u for y in walk(i) for u in vars):
                inside.append(d)
            else:
                plain &= n == 1
        repeats.append(c)
    return Touch(x.buffer, tuple(dims), tuple(repeats), tuple(inside), plain, exact, isinstance(x, Store))


def serial_dims(vars: tuple[Var, ...], extents: tuple[Any, ...], written: Iterable[tuple[Expr, ...]]) -> tuple[int, ...]:
    """Loops that one thread must run in order: those that one of the written elements (its indices) does not depend on."""
    used = [{v for i in at for v in walk(i, Var)} for at in written]
    return tuple(d for d, v in enumerate(vars) if extents[d] != 1 and any(v not in mine for mine in used))


def over_loops(lay: Fragment, t: Touch, extents: tuple[int, ...]) -> Fragment:
    """A fragment's layout expressed over the loops that index it.

    Loops that do not index it run in registers, and so do neighbouring iterations that share an element.
    """
    modes: list[list[Mode]] = [[] for _ in extents]
    step = 1
    for d, c in zip(t.dims, t.repeats):
        if d is not None and c > 1:
            modes[d] = [Mode(c, REGISTER, step)]
            step *= c
    inner = step
    for d, modes_of in zip(t.dims, lay.modes):
        if d is not None:
            modes[d] = [Mode(m.size, m.to, m.stride * inner) if m.to == REGISTER else m for m in modes_of] + modes[d]
    step = lay.registers * inner
    for d in reversed(range(len(extents))):
        if d not in t.dims and extents[d] > 1:
            modes[d] = [Mode(extents[d], REGISTER, step)]
            step *= extents[d]
    return Fragment(extents, [tuple(m) for m in modes], replicate=lay.copies, threads=lay.threads)


def projected(layout: Fragment, t: Touch) -> Fragment | None:
    """The fragment layout with which each thread of a loop holds the elements that it touches.

    None when iterations that share an element run in different threads.
    """
    modes, shape = list(layout.modes), list(layout.shape)
    for d, c in zip(t.dims, t.repeats):
        if d is not None and c > 1:
            less = _without_inner(modes[d], c)
            if less is None:
                return None
            modes[d], shape[d] = less, shape[d] // c
    kept = [d for d in t.dims if d is not None]
    lay = Fragment(shape, modes, replicate=layout.copies, threads=layout.threads).project(kept)
    return with_registers(lay, t.buffer.shape, t.inside, [d for d, at in enumerate(t.dims) if at is not None])


def with_registers(lay: Fragment, shape: tuple[int, ...], inside: Iterable[int], kept: list[int]) -> Fragment:
    """A layout of the dimensions `kept`, extended to the whole shape.

    The dimensions `inside` go to the fastest registers; all others have extent 1.
    """
    step = 1
    modes: list[tuple[Mode, ...]] = [()] * len(shape)
    for d in sorted(inside, reverse=True):
        modes[d] = (Mode(shape[d], REGISTER, step),)
        step *= shape[d]
    for d, ms in zip(kept, lay.modes):
        modes[d] = tuple(Mode(m.size, m.to, m.stride * step) if m.to == REGISTER else m for m in ms)
    return Fragment(shape, modes, replicate=lay.copies, threads=lay.threads)


def usable(lay: Fragment, t: Touch) -> bool:
    """Whether a fragment's layout can determine the loop of this access: the elements of one iteration lie in one thread."""
    return t.plain and not any(m.to != REGISTER for d in t.inside for m in lay.modes[d])


def _without_inner(modes: tuple[Mode, ...], c: int) -> tuple[Mode, ...] | None:
    """Modes of index // c, when the innermost modes that c covers are registers; else None."""
    out = list(modes)
    while c > 1:
        if not out or out[-1].to != REGISTER:
            return None
        m = out.pop()
        if m.size > c:
            if m.size % c:
                return None
            out.append(Mode(m.size // c, REGISTER, m.stride * c))
            return tuple(out)
        if c % m.size:
            return None
        c //= m.size
    return tuple(out)


def row_groups(gemms: list[Gemm], ops: list[TileOp], loops: Iterable[Loop]) -> set[Buffer]:
    """Accumulators whose rows should stay within one warp: reduced along rows, converted to an A operand, computed from one."""
    group: dict[Buffer, Buffer] = {}

    def find(b: Buffer) -> Buffer:
        while group.get(b, b) is not b:
            b = group[b]
        return b

    def join(bs: list[Buffer]) -> None:
        for b in bs[1:]:
            group[find(b)] = find(bs[0])

    def frags(bs: Iterator[Buffer]) -> list[Buffer]:
        return [b for b in bs if b.scope_name == FRAGMENT]

    for op in ops:
        if isinstance(op, (Copy, Reduce)):
            join(frags(iter((op.src.buffer, op.dst.buffer))))
    for loop in loops:
        join(frags(t.buffer for t in loop.touches))
    wanting = {find(op.a.buffer) for op in gemms if op.a.buffer.scope_name == FRAGMENT}
    for op in ops:
        if isinstance(op, Reduce) and op.src.buffer.scope_name == FRAGMENT and op.dim % op.src.buffer.ndim:
            wanting.add(find(op.src.buffer))
    made = {find(op.c.buffer) for op in gemms}
    return {op.c.buffer for op in gemms if find(op.c.buffer) in wanting or
            op.a.buffer.scope_name == FRAGMENT and find(op.a.buffer) in made}


# ---- work partitions -------------------------------------------------------------------------------------------------

@record
class LoopPartition:
    """A work partition of a loop nest: modes of each loop, copies and threads of a Fragment, which would join modes."""

    shape: tuple[int, ...]
    modes: tuple[Any, ...]
    copies: tuple[Any, ...]
    threads: int


def choose_distribution(lw: Any, vars: tuple[Var, ...], extents: tuple[Any, ...], body: Stmt, loop_layout: Any,
                        width: int | None, is_async: bool, once: bool = False) -> tuple[Distribution, bool]:
    """(work partition of the loop, loose): loop_layout if given, else from a fragment of the body, else in flat vectors.

    loose: vectors of lanes cross the ends of rows (Loop.loose).  once: each iteration runs in one thread only.
    """
    static = all(isinstance(n, int) for n in extents)
    once = once or rereads(body)
    if not static:
        lane_dim, w = wanted_width(lw, vars, extents, body)
        w = 1 if w > 1 and _atomics_along(body, vars[lane_dim], lw.known.analyzer) else w
        return flat(_one_negative(extents, lw.known.analyzer), lw.thread, lw.num_threads, w, lane_dim), False
    partitions = [] if loop_layout is None else [loop_layout.with_threads(lw.num_threads)]
    partitions += fragment_partitions(lw, vars, extents, body)
    partitions = [s for s in partitions if not (once and _replicas(s) > 1)]
    lane_dim, w = wanted_width(lw, vars, extents, body)
    loose = False
    if w == 1 and width is None and not is_async:
        dim, more = wanted_width(lw, vars, extents, body, loose=True)
        if more > 1:
            lane_dim, w, loose = dim, more, True
    if width is not None:
        w = power_of_two_in(extents[lane_dim], width)
    if partitions:
        dist = from_fragment(partitions[0], lw.thread, extents, w if lane_dim == len(vars) - 1 else 1)
        return dist, loose and dist.lanes is not None
    serial = serial_dims(vars, extents, [x.indices for x, _ in accesses(body) if isinstance(x, Store) and is_memory(x.buffer)
                                         and any(y.buffer is x.buffer and y.indices == x.indices for y in walk(x.value, Load))])
    if serial:
        return serial_inside(lw, extents, serial), False
    if loose and math.prod(extents) < lw.num_threads * w or w > 1 and width is None and _atomics_along(
            body, vars[lane_dim], lw.known.analyzer):
        w = 1
    while w > 1 and not is_async and math.prod(extents) < lw.num_threads * w:
        w //= 2
    return flat(extents, lw.thread, lw.num_threads, w, lane_dim), loose and w > 1


def _one_negative(extents: tuple[Any, ...], analyzer: Analyzer) -> tuple[Any, ...]:
    """The extents of a loop, of which at most one is negative: two such, multiplied, would be iterations of an empty loop."""
    unsure = [d for d, n in enumerate(extents) if not isinstance(n, int) and not analyzer.can_prove(n >= 0)]
    return tuple(binary("max", n, 0) if d in unsure[1:] else n for d, n in enumerate(extents))


def fragment_partitions(lw: Any, vars: tuple[Var, ...], extents: tuple[int, ...], body: Stmt) -> list[LoopPartition]:
    """Work partitions that make an access with plain loop indices direct; written fragments first, then most dims."""
    found: list[tuple[tuple[int, int], LoopPartition]] = []
    for x, _ in accesses(body):
        if x.buffer.scope_name != FRAGMENT:
            continue
        t = touch(x, vars, extents)
        dims = [d for d in t.dims if d is not None]
        if not t.plain or not t.exact or t.inside or max(t.repeats, default=1) > 1:
            continue
        partition = _row_by_row(over_loops(lw.layout_of(x.buffer), t, extents))
        if t.writes or not spread_thin(extents, dims, _replicas(partition)):
            found.append(((0 if t.writes else 1, -len(dims)), partition))
    found.sort(key=lambda f: f[0])
    return [s for _, s in found]


def spread_thin(extents: tuple[int, ...], followed: Iterable[int], replicas: int) -> bool:
    """Whether a fragment that a loop only reads is a poor choice for the loop's work partition.

    That is a vector along a larger tile that several threads replicate, or that few threads hold.  Then all threads take part
    in the tile, and the vector is staged through shared memory.
    """
    walked = {d for d, n in enumerate(extents) if n > 1}
    return not walked <= set(followed) and (replicas > 1 or not walked & set(followed))


def rereads(body: Stmt) -> bool:
    """Whether a loop reads memory outside registers that it also writes.

    The write may be a store, an atomic whose old value is used, or a call of a user's function, which may do anything.  Then
    only one thread may run an iteration: of several, one would overwrite what the others still have to read, or each would
    add its value once more.
    """
    alone = {id(s.call) for s in walk(body, Evaluate)}  # calls as statements: one thread runs them anyway
    if any((x.op.startswith("atomic_") or x.op == "call_extern") and id(x) not in alone for x in walk(body, Call)):
        return True
    memory = [x for x, _ in accesses(body) if is_memory(x.buffer)]
    written = {x.buffer.data for x in memory if isinstance(x, Store)}
    return any(isinstance(x, Load) and x.buffer.data in written for x in memory)


def _replicas(partition: Any) -> int:
    return math.prod(m.size for m in partition.copies)


def _row_by_row(partition: Fragment) -> LoopPartition:
    """A partition with the registers, which it only enumerates, in the order of the loops."""
    step, modes = 1, [list(ms) for ms in partition.modes]
    for ms in reversed(modes):
        for k in reversed(range(len(ms))):
            if ms[k].to == REGISTER:
                ms[k], step = Mode(ms[k].size, REGISTER, step), step * ms[k].size
    return LoopPartition(partition.shape, tuple(map(tuple, modes)), partition.copies, partition.threads)


def wanted_width(lw: Any, vars: tuple[Var, ...], extents: tuple[int, ...], body: Stmt, loose: bool = False) -> tuple[int, int]:
    """(dimension, lanes) of the vectors of a loop: see lane_dimension."""
    known = lw.known.over(vars, extents)
    stored = {x.buffer.data for x, _ in accesses(body) if not isinstance(x, Load)}

    def width(b: Buffer, at: tuple[Expr, ...], d: int, limit: int) -> tuple[bool, int]:
        n = lw.buffers.widths.width(b, at, vars[d], limit, known, lw.known.divisors,
                                       ANYWHERE if loose and b.data not in stored else int(loose))
        step = stride_along(at[-1], vars[d], lw.known.analyzer)
        if n > 1 or step == 1:
            return True, n if n > 1 or b.scope_name == GLOBAL else 0
        # vectors of pairs: 16 bytes for each lane
        return False, min(limit, max(1, 8 * MAX_BYTES // b.dtype.bits // step)) if step in (2, 4) else 0

    found = ((x.buffer, x.indices) for x, _ in accesses(body) if x.buffer.dtype.bits % 8 == 0 and x.indices)
    return lane_dimension(found, vars, extents, width)


def _atomics_along(body: Stmt, var: Var, analyzer: Analyzer) -> bool:
    """Whether neighbours along var are changed in global memory by an atomic each.

    One instruction of a warp should then change neighbours.  If each thread had a vector of 4, the same bytes of memory would
    be asked for by 4 instructions.
    """
    return any(isinstance(a, AddressOf) and a.buffer.scope_name == GLOBAL and stride_along(a.indices[-1], var, analyzer) == 1
               for c in walk(body, Call) if c.op.startswith("atomic_") for a in c.args[:1])


def serial_inside(lw: Any, extents: tuple[int, ...], serial: Sequence[int]) -> Distribution:
    """The points distributed over the threads, except for the serial dimensions, which each thread runs in order."""
    kept = [d for d in range(len(extents)) if d not in serial]
    base = flat(tuple(extents[d] for d in kept) or (1,), lw.thread, lw.num_threads)
    indices: list[Expr] = [const(0)] * len(extents)
    for d, i in zip(kept, base.indices):
        indices[d] = i
    own = [(d, fresh("r")) for d in serial]
    for d, v in own:
        indices[d] = v
    axes = base.axes + tuple((v, extents[d]) for d, v in own)
    return dataclasses.replace(base, extents=extents, axes=axes, indices=tuple(indices))
