"""Joins neighbouring loads of few bytes from shared memory that unrolled iterations make.

    for r in unroll(8):                              for m in unroll(4):
        t[0:2] = S[4*tx + 2*r : … + 2]        ->         u[0:4] = S[4*tx + 4*m : … + 4]
        K[2*r : … + 2] = half(t[0:2])                    for b in unroll(2):
                                                             K[4*m + 2*b : … + 2] = half(u[2*b : … + 2])

Shared memory takes as long for one byte of a lane as for four.  The registers of an operand may lie in any order, so loops over
them reach neighbours in iterations of any loop of a nest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilelang.arith import known_divisor, launch_analyzer
from tilelang.ir import (Alloc, Buffer, Cast, Const, Expr, For, Launch, Load, Ramp, Stmt, Store, cast, const, contains,
                         free_vars, fresh, is_const, load, ramp, replace, rewrite, rewrite_stmts, seq, stmts_of, substitute,
                         walk, LOCAL, SHARED)

from ..framework.pass_ import DEVICE, PassContext, pass_

MOST = 16  # bytes of a load


@pass_(needs=DEVICE, of=Launch)
def join_loads(launch: Launch, cx: PassContext) -> Any:
    """Join loads in nests of unrolled loops.  Keeps: every value."""
    if not any(x.buffer.scope_name in SHARED and x.dtype.bits <= 16 for x in walk(launch.body, Load)):
        return None
    return rewrite_stmts(launch, _Joined(launch).joined)


class _Nest(NamedTuple):
    """Loops (outermost first) around `held` = buffer[first : first + lanes], and the statements that use `held`."""

    loops: tuple[For, ...]
    buffer: Buffer
    first: Expr
    lanes: int
    held: Buffer
    uses: tuple[Stmt, ...]


class _Joined:
    def __init__(self, launch: Launch) -> None:
        self.launch, self.analyzer = launch, launch_analyzer(launch, free_vars(launch))

    def joined(self, s: Stmt) -> Stmt | None:
        """The nest that begins with s, with its loads joined as far as they are neighbours; None where none are."""
        nest = self._nest(s) if isinstance(s, For) else None
        return None if nest is None else self._join(nest)

    def _nest(self, s: For) -> _Nest | None:
        """The nest that begins with a loop; None for other loops."""
        loops, body = list[For](), tuple[Stmt, ...]((s,))
        while len(body) == 1 and isinstance(body[0], For):
            loop: Any = body[0]
            if loop.kind != "unroll" or loop.plan.registers or not (
                    is_const(loop.start, 0) and isinstance(loop.extent, Const)):
                return None
            loops.append(loop)
            body = stmts_of(loop.body) or (loop.body,)
        first, *rest = body
        value: Any = first.value if isinstance(first, Store) else None
        kept: Any = None
        if isinstance(value, Cast) and not rest:
            value, kept = value.value, value.dtype
        if not isinstance(first, Store) or not isinstance(value, Load) or first.buffer.scope_name != LOCAL:
            return None
        at, place, b = value.indices[0], first.indices[0], value.buffer
        if len(value.indices) != 1 or b.scope_name not in SHARED or b.dtype.bits not in (8, 16) or b.dtype.lanes > 1:
            return None
        lanes = at.dtype.lanes
        if lanes > 1 and not (isinstance(at, Ramp) and is_const(at.stride, 1)):
            return None
        held = Buffer(f"{b.name}_w", (lanes,), b.dtype, LOCAL)
        if not rest:  # the loaded value itself is kept
            if lanes > 1:
                return None
            rest = [replace(first, value=load(held, (const(0),)) if kept is None else cast(load(held, (const(0),)), kept))]
        elif first.buffer.size == lanes and self._only(first, rest):
            rest = [rewrite(x, lambda n: load(held, n.indices) if n.buffer is first.buffer else None, Load) for x in rest]
        else:
            return None
        stores = [x for r in rest for x in walk(r, Store)]
        written = {x.buffer.data for x in stores}
        if any(not isinstance(x, (For, Store)) for x in rest) or any(x.buffer.scope_name != LOCAL for x in stores) or any(
                x.buffer.data in written for r in rest for x in walk(r, Load)) or contains(place, Load):
            return None
        return _Nest(tuple(loops), b, at.base if isinstance(at, Ramp) else at, lanes, held, tuple(rest))

    def _only(self, first: Store, rest: list[Stmt]) -> bool:
        """Whether these statements alone use what the store leaves."""
        everywhere = sum(x.buffer.data is first.buffer.data for x in walk(self.launch.body, Load, Store))
        here = sum(x.buffer.data is first.buffer.data for r in rest for x in walk(r, Load, Store))
        return everywhere == here + 1 and not any(x.buffer.data is first.buffer.data for r in rest for x in walk(r, Store))

    def _join(self, n: _Nest) -> Stmt | None:
        """The nest with its loads joined as far as they are neighbours; None where none are."""
        known = n
        while True:
            for k, loop in enumerate(known.loops):
                if self._neighbours(known, loop):
                    known = self._doubled(known, k)
                    break
            else:
                break
        if known is n:
            return None
        first = self.analyzer.simplify(known.first)
        index: Expr = ramp(first, known.lanes)
        to = ramp(const(0), known.lanes)
        uses, made = _converted(known)
        body = seq(Store(known.held, (to,), load(known.buffer, (index,)), span=n.loops[0].span), *uses)
        for loop in reversed(known.loops):
            body = replace(loop, body=body)
        return seq(Alloc(known.held), *made, body)

    def _neighbours(self, n: _Nest, loop: For) -> bool:
        """Whether two iterations of a loop load neighbours, the first at a multiple of both."""
        extent = int(loop.extent.value)  # type: ignore[attr-defined]
        if extent % 2 or 2 * n.lanes * n.buffer.dtype.bits > 8 * MOST:
            return False
        a = self.analyzer

        def at(k: int) -> Expr:
            return a.simplify(substitute(n.first, {loop.var: const(k, loop.var.dtype)}))

        return all(is_const(a.simplify(at(k + 1) - at(k)), n.lanes) and
                   known_divisor(at(k), analyzer=a) % (2 * n.lanes) == 0 for k in range(0, extent, 2))

    def _doubled(self, n: _Nest, k: int) -> _Nest:
        """The nest in which each load takes the place of two in iterations of loop k."""
        loop = n.loops[k]
        half, way = fresh(loop.var.name, loop.var.dtype), fresh("b", loop.var.dtype)
        two = const(2, loop.var.dtype)
        held = Buffer(n.held.name, (2 * n.lanes,), n.held.dtype, LOCAL)

        def moved(x: Any) -> Any:
            if x.buffer is not n.held:
                return None
            (i,) = x.indices
            return load(held, (i + way * const(n.lanes, way.dtype),))

        uses = seq(*(rewrite(substitute(u, {loop.var: half * two + way}), moved, Load) for u in n.uses))
        inner: Stmt = replace(loop, var=way, extent=const(2, loop.extent.dtype), body=uses)
        first, outer = substitute(n.first, {loop.var: half * two}), tuple[For, ...]()
        if int(loop.extent.value) > 2:  # type: ignore[attr-defined]
            outer = (replace(loop, var=half, extent=const(int(loop.extent.value) // 2, loop.extent.dtype)),)  # type: ignore
        else:
            first, inner = (substitute(x, {half: const(0, half.dtype)}) for x in (first, inner))
        return n._replace(loops=(*n.loops[:k], *outer, *n.loops[k + 1:]), first=first, lanes=2 * n.lanes, held=held,
                          uses=(inner,))


def _converted(n: _Nest) -> tuple[list[Stmt], list[Stmt]]:
    """The uses of what was loaded, behind a conversion of all of it where each is one to the same type; their allocations."""
    casts = [x for u in n.uses for x in walk(u, Cast)]
    loads = [x for u in n.uses for x in walk(u, Load) if x.buffer is n.held]
    if not casts or len({x.dtype for x in casts}) > 1 or len(casts) != len(loads) or any(
            not isinstance(x.value, Load) or x.value.buffer is not n.held for x in casts):
        return [*n.uses], []
    all_of, i = Buffer(f"{n.held.name}_c", (n.lanes,), casts[0].dtype, LOCAL), fresh("v")
    first = For(i, const(0), const(n.lanes), "unroll", Store(all_of, (i,), cast(load(n.held, (i,)), all_of.dtype)))
    uses = [rewrite(u, lambda x: load(all_of, x.value.indices), Cast) for u in n.uses]
    return [first, *uses], [Alloc(all_of)]
