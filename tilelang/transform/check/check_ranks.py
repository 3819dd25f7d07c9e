"""Find tiles that ranks store on each other and read at home without a signal."""

from __future__ import annotations

from typing import Any

from tilelang.errors import error, register
from tilelang.ir import Bind, Call, Expr, For, If, Launch, Var, While, free_vars, inner, walk
from tilelang.ir.record import state

from ..analysis.effects import own_effects
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_

register("rank-order", RuntimeError, "ranks store a tile on each other and read it without a signal",
         "T.signal(flag, rank=r) follows the store and T.wait_ge(flag, n) precedes the read, or T.barrier_all stands between",
         expected="a signal after the store, and a wait before the read")


ACQUIRES = ("acquire", "acq_rel", "seq_cst")
COMPLETES = ("quiet", "fence", "barrier_all")  # in names of NVSHMEM: puts before them are delivered before a signal after them


@state
class _Event:
    """kind: stores (on another rank), reads (at home), signals, waits; puts (asynchronous ones of NVSHMEM), completes (T.quiet
    and its like).  path: (branch or loop around it, which part)."""

    kind: str
    path: tuple[tuple[Any, int], ...]
    node: Any = None
    storage: Any = None
    at: tuple[Expr, ...] = ()

    def meets(self, other: _Event, *kinds: type) -> bool:
        """Whether one statement of these kinds is around both."""
        return any(a is b and isinstance(a, kinds) for (a, _), (b, _) in zip(self.path, other.path))

    def excludes(self, other: _Event) -> bool:
        """Whether the two are in different branches of one if."""
        return any(a is b and m != n for (a, m), (b, n) in zip(self.path, other.path))


@pass_(needs=TILE, of=Launch)
def check_ranks(launch: Launch, cx: PassContext) -> Launch:
    """Raise "rank-order" where a rank stores elements on another one and then reads the same elements at home, and no wait
    comes before or no signal comes after the store.

    Likewise where signals follow an asynchronous put of NVSHMEM that nothing completes.  Changes nothing.  Sees elements at the
    same indices, none of which depends on the rank.  Off with tl.disable_data_race_check.
    """
    if any(c.op == "remote_address" for c in walk(launch.body, Call)) and not cx.config.get(
            PassConfigKey.TL_DISABLE_DATA_RACE_CHECK.value):
        events = _Events()
        events.follow(launch.body, ())
        for k, e in enumerate(events.found):
            if e.kind == "stores":
                _check(e, events, k)
            elif e.kind == "puts":
                _check_put(e, events, k)
    return launch


class _Events:
    """of_rank: variables whose value depends on the rank.  remote: (storage at home, whether the rank is this one), by
    address."""

    def __init__(self) -> None:
        self.found: list[_Event] = []
        self.of_rank: set[Var] = set()
        self.remote: dict[Var, tuple[Any, bool]] = {}

    def ranked(self, *es: Expr) -> bool:
        """Whether values depend on the rank."""
        return any(not self.of_rank.isdisjoint(free_vars(e)) or any(c.op == "world_rank" for c in walk(e, Call)) for e in es)

    def follow(self, s: Any, path: tuple[tuple[Any, int], ...]) -> None:
        """Collect what a statement does, in the order of the text."""
        if isinstance(s, If) and isinstance(s.cond, Call) and s.cond.op == "by_nvshmem":
            made = next(walk(s.then, Call))
            if any(word in made.options.name for word in COMPLETES):
                self.found.append(_Event("completes", path))
            self.follow(s.orelse, path)
            if "putmem_nbi" in made.options.name:
                self.found.append(_Event("puts", path, made))
            return
        calls = list(walk(s, Call)) if not inner(s) else []
        if isinstance(s, Bind):
            if isinstance(c := s.value, Call) and c.op == "remote_address":
                here = isinstance(r := c.args[1], Call) and r.op == "world_rank"
                self.remote[s.var] = c.args[0].buffer.data, here  # type: ignore[attr-defined]
            elif self.ranked(s.value):
                self.of_rank.add(s.var)
        for e in own_effects(s):
            far = self.remote.get(e.storage)
            kind = "stores" if far and e.mode == "write" else "reads" if not far and e.mode == "read" else ""
            at = e.indices if e.indices is not None else (*e.region.mins, *e.region.extents) if e.region is not None else ()
            if kind and at and e.buffer.facts.symmetric and not (far and far[1]) and not self.ranked(*(
                    x for x in at if isinstance(x, Expr))):
                self.found.append(_Event(kind, path, e.node, far[0] if far else e.storage, at))
        for c in calls:
            both, flag = c.op in ("rank_barrier", "fence_sys", "call_extern"), c.op.startswith("atomic_")
            if both or c.op == "wait_signal" or flag and (c.op == "atomic_load" or c.options.order in ACQUIRES):
                self.found.append(_Event("waits", path))
            if both or flag and c.op != "atomic_load":
                self.found.append(_Event("signals", path))
        for k, x in enumerate(inner(s)):
            self.follow(x, (*path, (s, k)) if isinstance(s, (If, For, While)) else path)


def _check(e: _Event, events: _Events, k: int) -> None:
    """Check the elements that event number k stores on another rank."""
    before, after = events.found[:k], [x for x in events.found[k + 1:] if not x.excludes(e)]
    told = any(x.kind == "signals" for x in after) or any(x.kind == "signals" and x.meets(e, For, While) for x in before)
    waited = any(x.kind == "waits" and not x.excludes(e) for x in before)
    for x in after:
        waited = waited or x.kind == "waits"
        own = [a for a, _ in x.path if isinstance(a, If) and not any(a is b for b, _ in e.path) and events.ranked(a.cond)]
        if x.kind == "reads" and x.storage is e.storage and not own and not (told and waited) and _alike(x.at, e.at):
            first, what = (e.node, "no signal follows this store on another rank") if waited else (
                x.node, "nothing is waited for before this read of what other ranks store")
            raise error("rank-order", f"{what}: ranks may read the tile before it has come", found="none", span=first.span,
                        notes=(((x if waited else e).node.span, "read here" if waited else "stored here"),))


def _check_put(e: _Event, events: _Events, k: int) -> None:
    """Check that something completes an asynchronous put before the signals that follow it."""
    after = [x for x in events.found[k + 1:] if not x.excludes(e)]
    again = [x for x in events.found[:k] if x.meets(e, For, While)]
    first = next((i for i, x in enumerate(after) if x.kind == "completes"), len(after))
    early, late = (any(x.kind == "signals" for x in xs) for xs in (after[:first], (*after[first:], *again)))
    if early and not (late and any(x.kind == "completes" for x in (*after, *again))):
        raise error("rank-order", "signals follow this asynchronous put, which nothing has completed: they do not tell of it",
                    expected="T.quiet between the put and the signal", found="none", span=e.node.span,
                    hint="T.quiet() completes it; T.putmem_signal_nbi_block and its like bring a signal of their own")


def _alike(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x.same(y) if isinstance(x, Expr) and isinstance(y, Expr) else x == y for x, y in zip(a, b))
