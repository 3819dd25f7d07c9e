"""Split branches of single threads beside warp roles, where threads read what others of the branch store.

    if 96 <= tx and tx < 160:                    taken = 96 <= tx and tx < 160
        S[tx - 96] = v                    ->     if taken: S[tx - 96] = v
        L[0] = S[159 - tx]                       if taken: L[0] = S[159 - tx]
    with T.ws(0): ...                            with T.ws(0): ...

The reference interpreter and the CPU backend run each warp role separately and synchronise them around statements on shared
memory, but not inside a branch; hence the split. A loop whose iterations exchange values is put around the conditions, if
all threads know its bounds. On a device a barrier stands between the pieces (place_sync), with or without this pass.

A store whose value another warp role may overwrite, `S[255 - tx] = S[tx]`, becomes two statements: the read and the store.
A uniform condition that reads shared memory is evaluated before a statement with warp roles that depends on it. Otherwise
one warp role would store to that memory while others still evaluate the condition:

    while S[0] < 4:                          asked = S[0] < 4
        with T.ws(1): S[0] = S[0] + 1        while asked:
        if c: continue                ->         with T.ws(1): S[0] = S[0] + 1
                                                 if c: asked = S[0] < 4; continue
                                                 asked = S[0] < 4
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Break, Buffer, Call, Continue, Evaluate, Expr, For, If, Launch, Load, Seq,
                         Stmt, Store, Var, While, const, contains, controls, free_vars, fresh, load, logical, replace, seq,
                         substitute, unary, walk, with_inner, GLOBAL, SHARED, VARIABLE)
from tilelang.target.warp_groups import names_warps

from ..analysis.divergence import Divergence
from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE, of=Launch)
def split_warp_role_branches(n: Launch, cx: PassContext) -> Any:
    """Split branches that some threads of several warp roles take, where two of their statements use one shared buffer and at
    least one of them stores to it (every target).

    Not split are branches with statements other than assignments, calls, branches and loops, and branches with a loop that
    exchanges values and is left early or has a bound that differs between threads.
    """
    return with_inner(n, _Splitter(n).stmt) if names_warps(n.body) else None


class _Splitter:
    def __init__(self, launch: Launch) -> None:
        self.divergence = Divergence(launch)
        self.written = {n.buffer.data for n in walk(launch.body) if isinstance(n, Store) and n.buffer.scope() == GLOBAL}

    def stmt(self, s: Stmt) -> Stmt:
        """Rewrite a statement that all warp roles reach."""
        if isinstance(s, (If, For, While)) and self.asks_first(s):
            return self.stmt(_asked_first(s))
        if isinstance(s, (Seq, For, While)):
            return with_inner(s, self.stmt)  # type: ignore[no-any-return]
        if isinstance(s, Store) and self.crosses(s):
            value = fresh(f"moved_{s.buffer.name}", s.value.dtype)
            return seq(Bind(value, s.value, span=s.span), replace(s, value=value), span=s.span)
        if not isinstance(s, If) or names_warps(s.cond):
            return s
        if self.divergence.divergent(s.cond):
            return self.parted(s)
        return with_inner(s, self.stmt)  # type: ignore[no-any-return]

    def asks_first(self, s: If | For | While) -> bool:
        """Whether s holds warp roles, and its uniform condition or bound reads memory to which they may store."""
        return any(isinstance(n, Load) and (n.buffer.scope_name in SHARED or n.buffer.data in self.written)
                   for e in controls(s) for n in walk(e)) and not any(
                       map(self.divergence.divergent, controls(s))) and names_warps(s)

    def crosses(self, s: Store) -> bool:
        """Whether a store's value is read from another element of the stored buffer, where another thread may store."""
        return s.buffer.scope() in (*SHARED, GLOBAL) and any(
            isinstance(n, Load) and n.buffer.data is s.buffer.data
            and not (len(n.indices) == len(s.indices) and all(a.same(b) for a, b in zip(n.indices, s.indices)))
            for n in walk(s.value))

    def exchanges(self, s: Stmt | None) -> bool:
        """Whether two statements on a path through s use one shared buffer and one stores to it; or one statement `crosses`."""
        if isinstance(s, Store):
            return self.crosses(s)
        if isinstance(s, If):
            return self.exchanges(s.then) or self.exchanges(s.orelse)
        if isinstance(s, (For, While)):  # an iteration may read or overwrite what the one before stored
            writes = _touched(s)[1]
            return bool(writes) and any(isinstance(n, Load) and n.buffer.data in writes for n in walk(s))
        if not isinstance(s, Seq):
            return False
        seen: set[Var] = set()
        stored: set[Var] = set()
        for x in s.stmts:
            touched, writes = _touched(x)
            if touched & stored or writes & seen or self.exchanges(x):
                return True
            seen |= touched
            stored |= writes
        return False

    def parted(self, s: If) -> Stmt:
        """The statements of a branch, each under the condition as evaluated before the first."""
        own = {x.var for x in walk(s) if isinstance(x, Bind)}
        if not self.exchanges(s) or not all(isinstance(x, _KNOWN) for x in walk(s, Stmt)) or not all(
                self.goes_around(x, own) for x in walk(s) if isinstance(x, (For, While)) and self.exchanges(x)):
            return s
        return seq(*self.ways(s, None), span=s.span)

    def goes_around(self, loop: For | While, own: set[Var]) -> bool:
        """Whether all threads can run a loop around the conditions: no bound depends on values of the branch."""
        if isinstance(loop, While) or loop.kind not in ("serial", "unroll"):
            return False
        return not any(isinstance(x, (Break, Continue)) for x in walk(loop.body)) and not any(
            self.divergence.divergent(e) or contains(e, Load, Call) or free_vars(e) & own for e in controls(loop))

    def ways(self, s: If, pred: Expr | None) -> list[Stmt]:
        """Both arms of a branch that the threads with pred reach (None: all threads)."""
        taken = fresh("taken", "bool")
        out: list[Stmt] = [Bind(taken, s.cond if pred is None else logical("and", pred, s.cond), span=s.span)]
        out += self.under(s.then, taken)
        if s.orelse is not None:
            other: Expr = unary("not", taken)
            if pred is not None:
                held = fresh("taken", "bool")  # evaluated before the arms: the first may change what s.cond reads
                out.insert(1, Bind(held, logical("and", pred, other), span=s.span))
                other = held
            out += self.under(s.orelse, other)
        return out

    def under(self, s: Stmt, pred: Expr) -> list[Stmt]:
        """The statements of s, each under pred; values that they bind are kept in private variables."""
        out: list[Stmt] = []
        known: dict[Var, Expr] = {}
        for x in s.stmts if isinstance(s, Seq) else (s,):
            if known:
                x = substitute(x, known)
            if isinstance(x, Bind):
                kept = Buffer(x.var.name, (1,), x.var.dtype, VARIABLE, span=x.span)
                known[x.var] = load(kept, (0,))
                out.append(Alloc(kept, span=x.span))
                x = Store(kept, (const(0),), x.value, span=x.span)
            if isinstance(x, Store) and self.crosses(x):
                moved = Buffer(f"moved_{x.buffer.name}", (1,), x.value.dtype, VARIABLE, span=x.span)
                out += [Alloc(moved, span=x.span), If(pred, Store(moved, (const(0),), x.value, span=x.span), span=x.span)]
                x = replace(x, value=load(moved, (0,)))
            if isinstance(x, If) and self.exchanges(x):
                out += self.ways(x, pred)
            elif isinstance(x, For) and self.exchanges(x):
                out.append(replace(x, body=seq(*self.under(x.body, pred), span=x.body.span)))
            else:
                out.append(If(pred, x, span=x.span))
        return out


def _asked_first(s: If | For | While) -> Stmt:
    """s with its condition or bounds evaluated by a statement before it; for a while loop also at the end of each iteration."""
    if isinstance(s, While):
        kept = Buffer("asked", (1,), s.cond.dtype, VARIABLE, span=s.span)
        ask = Store(kept, (const(0),), s.cond, span=s.span)
        again = replace(s, cond=load(kept, (0,)), body=seq(_before_continues(s.body, ask), ask, span=s.body.span))
        return seq(Alloc(kept, span=s.span), ask, again, span=s.span)
    names = ("start", "extent") if isinstance(s, For) else ("cond",)
    asked = [Bind(fresh("asked", getattr(s, f).dtype), getattr(s, f), span=s.span) for f in names]
    return seq(*asked, replace(s, **{f: b.var for f, b in zip(names, asked)}), span=s.span)


def _before_continues(s: Stmt, first: Stmt) -> Stmt:
    """The body of a loop with a statement before each `continue` of that loop."""
    if isinstance(s, Continue):
        return seq(first, s, span=s.span)
    return with_inner(s, lambda x: _before_continues(x, first)) if isinstance(s, (Seq, If)) else s


_KNOWN = (Seq, Bind, Store, Evaluate, If, For, While)


def _touched(s: Stmt) -> tuple[set[Var], set[Var]]:
    """(shared memory that a statement uses, shared memory that it stores to)."""
    places = [n for n in walk(s) if isinstance(n, (Load, Store, AddressOf)) and n.buffer.scope_name in SHARED]
    return {n.buffer.data for n in places}, {n.buffer.data for n in places if not isinstance(n, Load)}
