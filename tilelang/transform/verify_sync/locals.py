"""Follows integer variables of threads (T.alloc_var), on which shared addresses, branches and loops may depend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import Alloc, Bind, Evaluate, Expr, For, If, Launch, Load, Node, Stmt, Store, Var, While, walk, VARIABLE
from tilelang.ir.buffer import AddressOf


class Locals:
    """Values of the variables, one per thread or one for all; None where unknown.

    matters: whether a statement touches shared memory or orders threads.  Variables that no such statement depends on are
    not followed.
    """

    def __init__(self, launch: Launch, matters: Callable[[Node], bool]) -> None:
        nodes = list(walk(launch.body))
        taken = {x.buffer.data for x in nodes if isinstance(x, AddressOf)}
        self.plain = {x.buffer.data for x in nodes if isinstance(x, Alloc) and x.buffer.scope_name == VARIABLE
                      and x.buffer.size == 1 and not x.buffer.dtype.is_float and x.buffer.dtype.lanes == 1} - taken
        self.followed: set[Var] = set()
        if self.plain:
            for s in nodes:
                if isinstance(s, Bind) or isinstance(s, Stmt) and matters(s):
                    self._note(s)
            stores = [x for x in nodes if isinstance(x, Store) and x.buffer.data in self.plain]
            while True:  # also follow the variables that the followed ones are computed from
                before = len(self.followed)
                for x in stores:
                    if x.buffer.data in self.followed:
                        self._reads(x.value)
                if len(self.followed) == before:
                    break
        self.values: dict[Var, Any] = {}

    def _note(self, s: Stmt) -> None:
        match s:
            case If() | While():
                self._reads(s.cond)
            case For():
                self._reads(s.start)
                self._reads(s.extent)
            case Bind():
                self._reads(s.value)
            case Evaluate():
                self._reads(s.call)
            case Store():
                for e in (*s.indices, s.value):
                    self._reads(e)

    def _reads(self, e: Expr) -> None:
        self.followed.update(x.buffer.data for x in walk(e, Load) if x.buffer.data in self.plain)

    def changes(self, s: Node) -> bool:
        """Whether a statement itself sets a variable that is followed."""
        return isinstance(s, (Alloc, Store)) and s.buffer.data in self.followed

    def begin(self, s: Alloc, value: Any) -> None:
        """Record the allocation of a variable; without a value it starts as 0."""
        self.values[s.buffer.data] = 0 if s.init is None else value

    def store(self, s: Store, value: Any, mask: Any) -> None:
        """Record a store.  mask: the threads that store, None for all."""
        old = self.values.get(s.buffer.data)
        if mask is not None and value is not None:
            value = None if old is None else np.where(mask, value, old)
        self.values[s.buffer.data] = value

    def forget(self, s: Node) -> None:
        """Forget the variables that a statement sets, because not all of it was followed."""
        for x in walk(s):
            if isinstance(x, Store) and x.buffer.data in self.followed:
                self.values.pop(x.buffer.data, None)
