"""Find the branches and loops of a launch in which the threads of a block may diverge."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Bind, Break, Call, Continue, For, If, Launch, Load, Seq, Stmt, Store, Var, While, walk, GLOBAL, PRIVATE
from tilelang.target.intrinsics import INTRINSICS, PURE
from tilelang.target.thread_calls import BLOCK_VOTES



class Divergence:
    """Branches and loops of a launch that may be divergent; outside of a launch nothing is.

    written: tensors that the launch stores to.  vars: variables and private arrays whose values differ between threads.
    """

    def __init__(self, s: Launch | None = None) -> None:
        self.written: set[Any] = set()
        self.vars: set[Any] = set()
        if s is None:
            return
        self.written |= {n.buffer.data for n in walk(s.body) if isinstance(n, Store) and n.buffer.scope() == GLOBAL}
        self.vars |= set(s.thread_vars)
        size = 0
        while size != len(self.vars):
            size = len(self.vars)
            self._spread(s.body, False)

    def _spread(self, s: Stmt, some: bool) -> None:
        """Mark what differs between threads.  some: threads may execute s a different number of times."""
        if isinstance(s, Bind) and self.of(s.value):
            self.vars.add(s.var)
        elif isinstance(s, Store) and s.buffer.scope_name in PRIVATE and (some or self.of(s.value)):
            self.vars.add(s.buffer.data)
        elif isinstance(s, Seq):
            for x in s.stmts:
                self._spread(x, some)
        elif isinstance(s, If):
            inner = some or self.of(s.cond)
            self._spread(s.then, inner)
            if s.orelse is not None:
                self._spread(s.orelse, inner)
        elif isinstance(s, (For, While)):
            if isinstance(s, For) and self.at(s):
                self.vars.add(s.var)
            self._spread(s.body, some or self.at(s))

    def of(self, e: Any) -> bool:
        """Whether the value of an expression may differ between threads."""
        return any(n in self.vars if isinstance(n, Var) else isinstance(n, Load) and n.buffer.data in self.vars
                   or isinstance(n, Call) and n.op not in BLOCK_VOTES and not _pure(n) for n in walk(e))

    def at(self, s: Stmt) -> bool:
        """Whether threads may diverge at s: by its condition or extent, or because some leave a loop or an iteration early."""
        asked = (s.cond,) if isinstance(s, (If, While)) else (s.start, s.extent) if isinstance(s, For) else ()
        return any(map(self.of, asked)) or isinstance(s, (For, While)) and self._left(s.body, False)

    def _left(self, s: Stmt | None, some: bool) -> bool:
        """Whether some threads, but not all, may reach a break or continue of the loop around s."""
        if isinstance(s, If):
            inner = some or self.of(s.cond)
            return self._left(s.then, inner) or self._left(s.orelse, inner)
        return some if isinstance(s, (Break, Continue)) else isinstance(s, Seq) and any(self._left(x, some) for x in s.stmts)


def _pure(e: Call) -> bool:
    row = INTRINSICS.get(e.op)
    return row is not None and row.effect == PURE and not e.op.startswith("get_")
