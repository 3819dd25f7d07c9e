"""Derives layouts of parallel loops from the fragments they index, and the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tilelang.ir import Binary, Buffer, Const, Expr, Load, Parallel, Store, TileOp, Var, walk, FRAGMENT
from tilelang.ir.record import state
from tilelang.layout import REGISTER, Fragment, Mode
from tilelang.ops import Copy, Gemm, Reduce


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
