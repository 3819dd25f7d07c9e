"""Reductions and scans by a function as loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilelang.ir import LOCAL, PRIVATE, Alloc, Buffer, Expr, For, Func, Parallel, Stmt, Store, const, fresh, load, rewrite, seq
from tilelang.ops.combine import Combine
from tilelang.ops.states import ELEMENT, LEFT, POSITION, RIGHT, bound, given
from tilelang.target.cpu import HostCpu, host_cpu

from ..framework.pass_ import TILE, PassContext, pass_

VECTORS = 2  # of partial results: one is combined while the other is stored


@pass_(needs=TILE)
def expand_combines(func: Func, cx: PassContext) -> Func:
    """Each Combine as a parallel loop over its lines, which are combined element after element.

        reduce_with(x, out, dim=1, joined=f)   ->   for i, j in T.Parallel(32, 1):
                                                    state = identity
                                                    for k in range(64): state = f(state, x[i, k])
                                                    out[i] = state

    Neighbours of a long line, in any order, are combined side by side:

        for k in range(64): for l in range(16): state[l] = f(state[l], x[i, k * 16 + l])
        for l in range(15): state[0] = f(state[0], state[l + 1])
    """
    host = cx.host or host_cpu()
    out: Func = rewrite(func, lambda op: side_by_side(op, host) or op.expanded(), Combine)
    return out


def side_by_side(op: Combine, host: HostCpu) -> Stmt | None:
    """A reduction with a partial result for each lane of vectors; None where they have an order, are few or no neighbours."""
    n, last = op.shape[op.dim], len(op.shape) - 1
    lanes = VECTORS * host.lanes(max(32, *(e.dtype.bits for e in op.identity)))
    if op.scan or not op.commutative or op.dim != last or n < 2 * lanes or op.srcs[0].buffer.scope_name in PRIVATE:
        return None
    states = [Buffer(f"state{k}", (lanes,), e.dtype, LOCAL, span=op.span) for k, e in enumerate(op.identity)]
    at = tuple(fresh("ijklmnpq"[d]) for d in range(len(op.shape)))
    zero = const(0)

    def element(place: Expr, lane: Expr) -> Stmt:
        new, elements = bound([load(s.buffer, (*at[:-1], place), span=op.span) for s in op.srcs])
        more, values = bound(given(op.first, {ELEMENT: elements, POSITION: [place]}))
        return seq(new, more, joined(lane, values))

    def joined(lane: Expr, right: Sequence[Expr]) -> Stmt:
        new, both = bound([*(load(s, (lane,)) for s in states), *right])
        values: dict[int, Sequence[Expr]] = {LEFT: both[:len(states)], RIGHT: both[len(states):]}
        more, out = bound(given(op.joined, values))
        return seq(new, more, *[Store(s, (lane,), v, span=op.span) for s, v in zip(states, out)])

    def each(count: int, body: Callable[[Expr], Stmt]) -> Stmt:
        v = fresh("l")
        return For(v, zero, const(count), "serial", body(v), span=op.span)

    rest = n % lanes
    body = seq(
        *[Alloc(s, None, span=op.span) for s in states],
        each(lanes, lambda lane: seq(*[Store(s, (lane,), e) for s, e in zip(states, op.identity)])),
        each(n // lanes, lambda k: each(lanes, lambda lane: element(k * lanes + lane, lane))),
        each(rest, lambda lane: element(const(n - rest) + lane, lane)) if rest else None,
        each(lanes - 1, lambda lane: joined(zero, [load(s, (lane + 1,)) for s in states])),
        op.stored([load(s, (zero,)) for s in states], at), span=op.span)
    return Parallel(at, tuple(map(const, op.lines)), body, span=op.span)
