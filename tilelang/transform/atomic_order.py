"""Which atomic operations of a block keep the order in which the program has them.

    for i in T.Parallel(32):  T.atomic_min(S[i], x)         # all minima come first:
    for i in T.Parallel(128): T.atomic_add(S[i % 32], y)    # min(s, x) + y is not min(s + y, x)

Turns of one statement that counts, and statements of one kind whose old values nobody looks at, come in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilelang.ir import Evaluate, For, Stmt, While, const, fresh, walk
from tilelang.ir.expr import AddressOf, Call
from tilelang.ir.record import record
from tilelang.target.atomics import ARITHMETIC, commute, family

if TYPE_CHECKING:
    from .access_table import Access
    from .divergence import Divergence


@record
class Update:
    """An atomic operation.  used: something is made of its result.  waits: that in a while loop, which may go round until
    other threads have changed the element."""

    family: str
    used: bool
    waits: bool


def update_of(c: Call, s: Stmt, in_while: bool) -> Update:
    """What statement s does by an atomic call.  in_while: the innermost loop around it is one."""
    used = not (isinstance(s, Evaluate) and s.call is c)
    return Update(family(c.op), used, used and (in_while or isinstance(s, While)))


def in_order(a: Access, b: Access, divergence: Divergence) -> bool:
    """Whether two atomic accesses of different threads to one element keep their order, a before b in the program."""
    x, y = a.update, b.update
    assert x is not None and y is not None
    if x.waits and any(map(divergence.divergent, a.conds)):
        return False  # threads that go past may be those that it waits for: a barrier before what they do would hold them up
    if not commute(x.family, y.family):
        return True
    if x.family == "load" or not (x.used or y.used):
        return False
    return a is not b and (a.span is None or a.span != b.span)  # old values: other statements come before or after all of it


def must_be_placed(a: Access, b: Access) -> bool:
    """Whether a program cannot be compiled where no barrier can stand between two accesses to shared memory that need one.

    Threads that run apart may synchronise by atomics themselves: loads, stores and exchanges among each other, old values, and
    what waits in a loop have no other order there than the one they make."""
    x, y = a.update, b.update
    if x is None or y is None:
        return True
    return not (commute(x.family, y.family) or x.waits or y.waits) and bool({x.family, y.family} & ARITHMETIC)


def as_iterations(body: Stmt, inner: Stmt, repeated: bool, span: Any) -> Stmt:
    """What one thread does of a parallel loop, as a loop of one turn where the order of atomic operations in the body would
    matter elsewhere: iterations have none.  repeated: a thread may have several of them."""
    nodes = list(walk(body))
    alone = {id(x.call) for x in nodes if isinstance(x, Evaluate)}
    repeated = repeated or any(isinstance(x, (For, While)) for x in nodes)
    found: dict[Any, list[tuple[str, bool]]] = {}
    for x in nodes:
        if isinstance(x, Call) and x.op.startswith("atomic_") and x.args and isinstance(x.args[0], AddressOf):
            found.setdefault(x.args[0].buffer.data, []).append((family(x.op), id(x) not in alone))
    if not any(_has_order(calls, repeated) for calls in found.values()):
        return inner
    return For(fresh("once"), const(0), const(1), "unroll", inner, (("independent", True), ("kept", True)), span)


def _has_order(calls: list[tuple[str, bool]], repeated: bool) -> bool:
    """Whether the order of some of these (family, used) matters."""
    first = calls[0][0]
    if any(kind != first for kind, _ in calls):
        return True
    if len(calls) == 1:
        return repeated and not commute(first, first)
    return not commute(first, first) or first != "load" and any(used for _, used in calls)


__all__ = ["Update", "as_iterations", "in_order", "must_be_placed", "update_of"]
