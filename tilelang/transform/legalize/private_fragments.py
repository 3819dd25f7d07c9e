"""Fragments that an iteration or a thread uses as memory of its own."""

from __future__ import annotations

from tilelang.ir import (AddressOf, Alloc, Buffer, Const, For, Launch, Load, Parallel, Stmt, Store, TileOp, contains,
                         free_vars, replace, rewrite, seq, stmts_of, substitute, walk, EMPTY, FRAGMENT, LOCAL)

from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE, of=Launch)
def private_fragments(s: Launch, cx: PassContext) -> Launch | None:
    """Make per-thread memory of fragments that each iteration of one loop stores before it reads them, or that no loop uses.

        t = T.alloc_fragment((1,))            ->
        for i in T.Parallel(64):                  for i in T.Parallel(64):
            t[0] = X[i] * 2                           t = T.alloc_local((1,))
            Y[i] = t[0] + 1                           t[0] = X[i] * 2;  Y[i] = t[0] + 1

    An element of a tile is one value, which the iterations would share; such programs mean a value for each of them.
    """
    made = [x.buffer for x in walk(s.body, Alloc) if x.buffer.scope_name == FRAGMENT]
    if not made:
        return None
    loops = list(walk(s.body, Parallel))
    tiled = {b.data for x in walk(s.body, TileOp) for b in walk(x, Buffer)} | {b.data for b, _ in s.plan.layouts}
    moved: dict[Buffer, Parallel | None] = {}
    for b in made:
        if b.data in tiled or any(x is not b and x.data is b.data for x in walk(s.body, Buffer)) or any(
                x.buffer is b for x in walk(s.body, AddressOf)) or all(x.buffer is not b for x in walk(s.body, Load)):
            continue
        users = [p for p in loops if _count(p, b)]
        if not users or len(users) == 1 and _count(s.body, b) == _count(users[0], b) + 1 and _of_iteration(users[0], b):
            moved[b] = users[0] if users else None
    return _with_memory(s, moved) if moved else None


def _count(n: Stmt, b: Buffer) -> int:
    return sum(x is b for x in walk(n, Buffer))


def _of_iteration(p: Parallel, b: Buffer) -> bool:
    """Whether each iteration surely stores what it reads of b, at places that do not depend on the iteration."""
    counters = {x.var for x in walk(p.body, For)}
    places = [i for x in walk(p.body, Load, Store) if x.buffer is b for i in x.indices]
    return _stores_first(p.body, b) and all(free_vars(i) <= counters and not contains(i, Load) for i in places)


def _stores_first(s: Stmt, b: Buffer) -> bool:
    first = next((x for x in stmts_of(s) if _count(x, b)), None)
    if isinstance(first, For):
        return isinstance(first.extent, Const) and first.extent.value > 0 and _stores_first(first.body, b)
    return isinstance(first, Store) and first.buffer is b and _count(first, b) == 1


def _with_memory(s: Launch, moved: dict[Buffer, Parallel | None]) -> Launch:
    """The launch with per-thread buffers in place of `moved`: in the loop of each, or where the fragment was."""
    own = {b: Buffer(b.name, b.shape, b.dtype, LOCAL, span=b.span) for b in moved}

    def visit(x: Stmt) -> Stmt | None:
        if isinstance(x, Alloc):
            return None if x.buffer not in moved else EMPTY if moved[x.buffer] is not None else replace(x, buffer=own[x.buffer])
        mine = [b for b in moved if isinstance(x, Parallel) and _count(x, b)]
        memory = [Alloc(own[b], None, span=b.span) for b in mine]
        return replace(x, body=seq(*memory, x.body)) if memory else None  # type: ignore[attr-defined]

    return replace(s, body=substitute(rewrite(s.body, visit, Alloc, Parallel), dict(own)))
