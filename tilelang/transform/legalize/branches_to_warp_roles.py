"""Turn branches on the thread number that whole warp groups take into warp roles, as T.ws makes them.

    t = T.get_thread_binding()                if in_warp_groups(0): P
    if t < 128: P                       ->    if in_warp_groups(1, 2): C
    elif t >= 128 and t < 384: C              if in_warp_groups(3): L
    else: L

Only branches that hold tile operations, parallel loops or waits are changed; others stay code of single threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilelang.errors import TileLangError
from tilelang.ir import (EMPTY, Bind, Call, Expr, For, Func, If, Launch, Load, Parallel, Seq, Stmt, TileOp, Var, While, call,
                         free_vars, contains, logical, replace, rewrite, seq, substitute, walk, PRIVATE)
from tilelang.ir.evaluate import evaluate
from tilelang.target.warp_groups import GROUP
from tilelang.ops import Copy

from ..check.check_hopper import WAITS
from ..framework.pass_ import TILE, PassContext, pass_



@pass_(needs=TILE)
def branches_to_warp_roles(func: Func, cx: PassContext) -> Func:
    """Make warp roles of branches whose conditions depend only on the thread number and are uniform in each warp group.

    Applies to every target. The arms of an if/elif chain become separate branches; each thread takes one of them as before.
    """
    def launch(n: Any) -> Any:
        if not isinstance(n, Launch) or n.num_threads <= GROUP or n.num_threads % GROUP or n.threads[1:] != (1, 1):
            return None
        body = _Branches(n).stmt(n.body)
        return None if body is n.body else replace(n, body=body)

    return rewrite(func, launch, Launch)


class _Branches:
    def __init__(self, launch: Launch) -> None:
        self.thread, self.count = launch.thread_vars[0], launch.num_threads // GROUP
        self.flat = {v: np.zeros(1, np.int32) for v in launch.thread_vars[1:]}
        self.names: dict[Var, Expr] = {}  # values computed from the thread number

    def stmt(self, s: Stmt) -> Stmt:
        match s:
            case Bind():
                value = substitute(s.value, self.names)
                if self._plain(value):
                    self.names[s.var] = value
            case Seq():
                new = [self.stmt(x) for x in s.stmts]
                return s if all(a is b for a, b in zip(new, s.stmts)) else seq(*new, span=s.span)
            case For() | While():
                body = self.stmt(s.body)
                return s if body is s.body else replace(s, body=body)
            case If():
                return self.branch(s)
        return s

    def branch(self, s: If) -> Stmt:
        taken = self.taken(s.cond)
        if taken is None:
            if self._differs(s.cond):
                return s
            then, orelse = self.stmt(s.then), None if s.orelse is None else self.stmt(s.orelse)
            return s if then is s.then and orelse is s.orelse else replace(s, then=then, orelse=orelse)
        if not _works(s):
            return s
        arms = [If(_in(groups), body, None, span=s.span) for groups, body in self.arms(s, frozenset(range(self.count)))]
        return seq(*arms, span=s.span) if arms else EMPTY

    def arms(self, s: Stmt, groups: frozenset[int]) -> Iterator[tuple[frozenset[int], Stmt]]:
        """The arms of an if/elif chain that these warp groups run, each with its groups."""
        taken = self.taken(s.cond) if isinstance(s, If) else None
        if not isinstance(s, If) or taken is None:
            if groups:
                yield groups, s
            return
        yield from self.arms(s.then, groups & taken)
        if s.orelse is not None:
            yield from self.arms(s.orelse, groups - taken)

    def taken(self, cond: Expr) -> frozenset[int] | None:
        """The warp groups for which a condition holds; None where that is unknown or differs within a group."""
        e = substitute(cond, self.names)
        if not self._plain(e):
            return None
        try:
            threads = np.arange(self.count * GROUP, dtype=np.int32)
            holds = np.broadcast_to(np.asarray(evaluate(e, {self.thread: threads, **self.flat})), threads.shape)
        except (TileLangError, TypeError):
            return None
        rows = holds.reshape(self.count, GROUP).astype(bool)
        if (rows != rows[:, :1]).any():
            return None
        return frozenset(np.flatnonzero(rows[:, 0]).tolist())

    def _plain(self, e: Expr) -> bool:
        used = free_vars(e)
        return bool(used) and used <= {self.thread, *self.flat} and not contains(e, Load, Call)

    def _differs(self, e: Expr) -> bool:
        """Whether a condition is T.ws itself, or may differ between threads."""
        return self.thread in free_vars(substitute(e, self.names)) or any(
            isinstance(n, Call) or isinstance(n, Load) and n.buffer.scope_name in PRIVATE for n in walk(e))


def _works(s: If) -> bool:
    """Whether a branch holds block-wide work or waits."""
    for n in walk(s):
        if isinstance(n, Parallel) or isinstance(n, Call) and n.op in WAITS:
            return True
        if isinstance(n, TileOp) and not (isinstance(n, Copy) and n.plan.by_hand) and not any(
                a.region.buffer.scope_name in PRIVATE for a in n.accesses()):  # type: ignore[attr-defined]
            return True
    return False


def _in(groups: frozenset[int]) -> Expr:
    """A condition that holds exactly in these warp groups."""
    out: Expr | None = None
    for first in sorted(g for g in groups if g - 1 not in groups):
        count = next(n for n in range(1, len(groups) + 1) if first + n not in groups)
        test = call("in_warp_groups", (), "bool", first=first, count=count)
        out = test if out is None else logical("or", out, test)
    assert out is not None, "a part that no group takes is left out"
    return out


__all__ = ["branches_to_warp_roles"]
