"""Loads all vectors that a loop takes from shared memory before it stores any there.

    for it in unroll(4):                          for it in unroll(4): b_v[it*8 : it*8+8] = b[…it…]
        b_v[0:8] = b[…it…]                        for it in unroll(4):
        for v: h_v[v] = half(b_v[v])       ->         for v: h_v[v] = half(b_v[it*8 + v])
        h[…it…] = h_v[0:8]                            h[…it…] = h_v[0:8]

The device compiler does not know that the two tiles are different, or that iterations touch different elements. It keeps each
load behind the store before it, so that every iteration waits for the latency of shared memory.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Bind, Const, For, Func, Launch, Load, Ramp, Stmt, Store, Var, replace, rewrite,
                         rewrite_launches, seq, stmts_of, walk, with_inner, LOCAL, SHARED)

from ..analysis.statements import rename
from ..framework.pass_ import DEVICE, PassContext, pass_

MOST_BYTES = 128  # of a thread's registers that vectors loaded ahead take


@pass_(needs=DEVICE)
def loads_first(func: Func, cx: PassContext) -> Func:
    """Divide loops of parallel iterations that load from shared memory and store there.

    Keeps: every value. The iterations are independent: none reads what another one stores.
    """
    return rewrite_launches(func, lambda launch: _Loops(launch).visit(launch))


class _Loops:
    """Visits the loops of a launch."""

    def __init__(self, launch: Launch) -> None:
        self.uses: dict[Var, int] = {}
        for x in walk(launch.body, Load, Store):
            self.uses[x.buffer.data] = self.uses.get(x.buffer.data, 0) + 1

    def visit(self, s: Stmt) -> Any:
        if isinstance(s, For) and s.kind == "unroll" and s.plan.independent and isinstance(s.extent, Const):
            divided = self.divided(s, int(s.extent.value))
            if divided is not None:
                return divided
        return with_inner(s, self.visit)

    def divided(self, s: For, n: int) -> Stmt | None:
        """The two loops of a loop of n iterations; None for other loops."""
        body = stmts_of(s.body)
        opening = [x for x in body if isinstance(x, Bind) or self.fills(x, s.body)]
        fills: list[Any] = [x for x in opening if isinstance(x, Store)]
        rest = [x for x in body if all(x is not y for y in fills)]
        if n < 2 or not fills or any(x is not y for x, y in zip(opening, body)) or n * sum(
                x.buffer.size * x.buffer.dtype.bytes for x in fills) > MOST_BYTES or not any(
                x.buffer.scope_name in SHARED for y in rest for x in walk(y, Store)):
            return None
        wider = {b: replace(b, shape=(n * b.size,), data=Var(b.name, b.data.dtype)) for b in (x.buffer for x in fills)}

        def moved(x: Any) -> Any:
            at = wider.get(x.buffer)
            return None if at is None else replace(x, buffer=at, indices=(_behind(x.indices[0], s.var * x.buffer.size),))

        first, second = (rewrite(seq(*some), moved, Load, Store) for some in (opening, rest))
        return seq(*(Alloc(b) for b in wider.values()), *rename([replace(s, body=first)]), replace(s, body=second))

    def fills(self, x: Stmt, body: Stmt) -> bool:
        """Whether a statement of a loop loads a vector from shared memory into an array that is used in the body alone."""
        if not isinstance(x, Store) or x.buffer.scope_name != LOCAL or len(x.indices) != 1 or not isinstance(x.value, Load) or \
                x.value.buffer.scope_name not in SHARED or not isinstance(x.indices[0], Ramp):
            return False
        storage = x.buffer.data
        inside = [y for y in walk(body, Load, Store) if y.buffer.data is storage]
        filled = sum(isinstance(y, Store) for y in inside) * x.indices[0].lanes
        return len(inside) == self.uses[storage] and filled == x.buffer.size


def _behind(at: Any, offset: Any) -> Any:
    return replace(at, base=at.base + offset) if isinstance(at, Ramp) else at + offset
