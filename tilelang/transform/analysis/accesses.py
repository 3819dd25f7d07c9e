"""Records of a block's accesses to memory that other threads see, and of the loops around them; the order of atomic ones."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from tilelang.ir import AddressOf, Buffer, Call, Const, Evaluate, Expr, For, LoopPlan, Stmt, Var, While, const, fresh, walk
from tilelang.ir.record import entity, record
from tilelang.target.atomics import ARITHMETIC, commute, family

from .divergence import Divergence


@record
class Update:
    """An atomic operation. used: its result is used."""

    family: str
    used: bool


@record
class Matrix:
    """An operand of wgmma in shared memory: the wgmma and the descriptor."""

    call: Call
    descriptor: Call


@entity
class Loop:
    """A loop around an access. var: None for while. independent: its iterations are those of a parallel loop. while_loop: the
    While statement, for a while loop."""

    var: Var | None
    start: Expr | None
    extent: Expr | None
    independent: bool = False
    while_loop: While | None = None
    defined: set[Any] = field(default_factory=set)  # variables defined inside the loop

    @property
    def count(self) -> int | None:
        return int(self.extent.value) if isinstance(self.extent, Const) else None

    @property
    def first(self) -> int | None:
        return int(self.start.value) if isinstance(self.start, Const) else None


@entity
class Access:
    """One access to memory that other threads can see.

    indices: None when unknown (the whole buffer). width: consecutive elements in the last dimension. loops: enclosing
    loops, outermost first. conds: conditions under which it runs (only conditions on threads and loops are of use).
    """

    buffer: Buffer
    reads: bool
    writes: bool
    update: Update | None
    indices: tuple[Expr, ...] | None
    width: int
    loops: tuple[Loop, ...]
    conds: tuple[Expr, ...]
    is_async: bool
    span: Any
    lanes: int = 32  # lanes of a warp whose address is used
    signals: Buffer | None = None  # mbarrier that signals its completion (TMA loads)
    counted: AddressOf | None = None  # the mbarrier that counts its bytes
    by_wgmma: bool = False  # an asynchronous access that wgmma makes; the others are those of cp.async
    matrix: Matrix | None = None  # the operand, where wgmma reads it

    @property
    def is_shared(self) -> bool:
        """Whether it is in the block's shared memory (else global)."""
        return self.buffer.scope_name.startswith("shared")


@record
class Relation:
    """The loops that lie between a run of an earlier access and a run of a later one.

    carried: (loop, number of iterations in between; None = unknown), for runs in different iterations of a loop. entered:
    loops that only the later access is in, or that the earlier one was in before, with the number of the iteration, where
    that is known.
    """

    carried: tuple[Loop, int | None] | None = None
    entered: tuple[tuple[Loop, int], ...] = ()


# ---- order of atomic accesses -----------------------------------------------------------------------------------------------
# Which atomic operations of a block must keep their program order.
#
#     for i in T.Parallel(32):  T.atomic_min(S[i], x)         # all minima come first:
#     for i in T.Parallel(128): T.atomic_add(S[i % 32], y)    # min(s, x) + y is not min(s + y, x)
#
# Iterations of one atomic addition, and commuting statements whose old values are not used, may run in any order.


def update_of(c: Call, s: Stmt) -> Update:
    """The update that statement s makes by an atomic call."""
    return Update(family(c.op), not (isinstance(s, Evaluate) and s.call is c))


def waits(a: Access, divergence: Divergence) -> bool:
    """Whether an atomic access polls for what other threads do: a while loop that threads leave one by one uses its result."""
    while_loop = a.loops[-1].while_loop if a.loops else None
    return while_loop is not None and a.update is not None and a.update.used and divergence.left_one_by_one(while_loop)


def in_order(a: Access, b: Access, divergence: Divergence) -> bool:
    """Whether two atomic accesses of different threads to one element must keep their order, a before b in the program."""
    x, y = a.update, b.update
    assert x is not None and y is not None
    if any(map(divergence.divergent, a.conds)) and waits(a, divergence):
        return False  # the threads that skip the loop may be those it waits for: a barrier before their code would deadlock
    if not commute(x.family, y.family):
        return True
    if x.family == "load" or not (x.used or y.used):
        return False
    return a is not b and (a.span is None or a.span != b.span)  # old values: all of one statement comes before all of the other


def must_be_placed(a: Access, b: Access, divergence: Divergence) -> bool:
    """Whether a program must be rejected where no barrier can stand between two accesses to shared memory that need one.

    Diverged threads may synchronise by atomics themselves. Loads, stores and exchanges among each other, operations whose
    old value is used, and loops that wait have only the order that they make themselves, and are not rejected.
    """
    x, y = a.update, b.update
    if x is None or y is None:
        return True
    if commute(x.family, y.family) or not {x.family, y.family} & ARITHMETIC:
        return False
    return not (waits(a, divergence) or waits(b, divergence))


def as_iterations(body: Stmt, inner: Stmt, repeated: bool, span: Any) -> Stmt:
    """A thread's code for a parallel loop, wrapped in a loop of one iteration where the order of atomic operations in the body
    would otherwise matter: iterations have no order. repeated: a thread may run several iterations."""
    nodes = list(walk(body))
    alone = {id(x.call) for x in nodes if isinstance(x, Evaluate)}
    repeated = repeated or any(isinstance(x, (For, While)) for x in nodes)
    found: dict[Any, list[tuple[str, bool]]] = {}
    for x in nodes:
        if isinstance(x, Call) and x.op.startswith("atomic_") and x.args and isinstance(x.args[0], AddressOf):
            found.setdefault(x.args[0].buffer.data, []).append((family(x.op), id(x) not in alone))
    if not any(_has_order(calls, repeated) for calls in found.values()):
        return inner
    return For(fresh("once"), const(0), const(1), "unroll", inner, (), LoopPlan(independent=True, kept=True), span)


def _has_order(calls: list[tuple[str, bool]], repeated: bool) -> bool:
    """Whether the order of some of these (family, used) matters."""
    first = calls[0][0]
    if any(kind != first for kind, _ in calls):
        return True
    if len(calls) == 1:
        return repeated and not commute(first, first)
    return not commute(first, first) or first != "load" and any(used for _, used in calls)
