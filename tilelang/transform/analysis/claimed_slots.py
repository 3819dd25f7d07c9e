"""Slots that threads claim with a counter: the old value of an atomic addition is unique to a thread.

    at = atomic_add(n, 1)        # no two threads, and no two iterations of a loop, get the same number
    q[at] = x                    # so these stores never collide

This holds while the counter only grows. Where a plain store resets it, place_sync puts a block barrier between the store and
the additions of other threads. Therefore only loops that contain such a store are excluded.
"""

from __future__ import annotations

from tilelang.ir import AddressOf, Const, Expr, For, Launch, Store, Var, walk
from tilelang.ir.expr import Call

from .accesses import Access, Relation


class Claims:
    """The claimed slots of one launch. binds: the values of its variables."""

    def __init__(self, launch: Launch, binds: dict[Var, Expr]) -> None:
        self.launch, self.binds = launch, binds
        self.counts: dict[Var, bool] = {}  # by storage: whether atomics only add to it or read it
        self.loops: dict[Var, For] | None = None

    def disjoint(self, a: Access, b: Access, how: Relation) -> bool:
        """Whether two accesses by different threads, a before b as `how` says, always go to different slots."""
        slots = self.slots(a)
        if not slots or a.width != 1 or b.width != 1:
            return False
        there = self.slots(b)
        counter = next((c for k, (v, c) in slots.items() if k in there and there[k][0] is v), None)
        if counter is None or not self.only_grows(counter):
            return False
        return how.carried is None or self.kept(how.carried[0].var, counter)

    def slots(self, a: Access) -> dict[int, tuple[Var, Var]]:
        """Dimensions in which an access is indexed by a claimed number: (that variable, the storage of its counter)."""
        out: dict[int, tuple[Var, Var]] = {}
        for k, i in enumerate(a.indices or ()):
            e = self.binds.get(i) if isinstance(i, Var) else None
            if isinstance(e, Call) and _adds(e) and isinstance(e.args[0], AddressOf) and all(
                    isinstance(x, Const) for x in e.args[0].indices):
                out[k] = i, e.args[0].buffer.data  # type: ignore[assignment]
        return out

    def only_grows(self, counter: Var) -> bool:
        """Whether all uses of the counter's address are additions and reads."""
        if counter not in self.counts:
            self.counts[counter] = all(
                _adds(x) or x.op == "atomic_load" for x in walk(self.launch.body, Call) if any(
                    isinstance(y, AddressOf) and y.buffer.data is counter for y in x.args))
        return self.counts[counter]

    def kept(self, var: Var | None, counter: Var) -> bool:
        """Whether no plain store resets the counter inside the loop of a variable."""
        if self.loops is None:
            self.loops = {x.var: x for x in walk(self.launch.body, For)}
        loop = self.loops.get(var) if var is not None else None
        return loop is not None and not any(x.buffer.data is counter for x in walk(loop, Store))


def _adds(e: Call) -> bool:
    return e.op == "atomic_add" and len(e.args) > 1 and isinstance(e.args[1], Const) and e.args[1].dtype.lanes == 1 and \
        not e.args[1].dtype.is_float and e.args[1].value >= 1
