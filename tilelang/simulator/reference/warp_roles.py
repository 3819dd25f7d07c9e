"""Warp roles in the reference interpreter: warps that run different code.

Warps that no `in_warp_groups` condition distinguishes form one warp role.  Each warp role runs the body on its own
and waits at barriers.  A tile op or barrier outside such conditions is executed once, by all warp roles that reach it; a
shared or fragment buffer declared there is one buffer.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (AddressOf, Alloc, Call, For, If, Launch, Load, Parallel, Region, Seq, Stmt, Store, TileOp, While, walk,
                         FRAGMENT, PRIVATE, SHARED)
from tilelang.target.thread_calls import BLOCK_VOTES
from tilelang.target.warp_groups import WARP_LANES, alike

from .block import TileScheduler, WarpRole, nth
from .context import TileContext
from .watch import Watch
from ..faults import fault
from ..lanes import Action, LaneFrame


def warp_roles_of(s: Launch) -> list[WarpRole]:
    """The warp roles of a launch, [] when nothing distinguishes its warps."""
    if not any(isinstance(n, Call) and n.op == "in_warp_groups" for n in walk(s.body)):
        return []
    return [WarpRole(i, warps, sum(min(WARP_LANES, s.num_threads - WARP_LANES * w) for w in warps))
            for i, warps in enumerate(alike(s))]


def executing(f: LaneFrame) -> int:
    """Number of threads that execute a statement: all of the warp role where threads are not distinguished."""
    if f.lanes == 1:
        return f.warp_role.threads
    return int(f.active().sum())


def whole_warp_role(f: LaneFrame, what: str, span: Any) -> None:
    """Raises sim-barrier unless all threads of the warp role that have not returned are active."""
    here, gone = executing(f), 0 if f.exited is None else int(f.exited.sum())
    if here + gone < f.warp_role.threads:
        came = f"{here} of {f.warp_role.threads - gone} threads"
        raise fault("sim-barrier", f"{came} of {f.warp_role.name} reach {what}", found=came, span=span,
                    hint="a barrier must not stand under a condition that differs between threads")


def together(c: TileContext, s: Any, action: Action, place: str = "") -> Action:
    """One action for all warp roles that reach a statement: the last one to arrive executes it, then all continue."""
    members = c.members
    if len(members) < 2:
        return action
    warp_roles, key = {r: c.launch.warp_roles[r].threads for r in members}, (id(s), members, place)

    def run(f: LaneFrame) -> None:
        if f.any_active():
            n = nth(f.warp_role, key)
            what = ("a statement" if place else f"T.{getattr(s, 'op_name', 'Parallel')}") + " of several warp roles"
            f.block.gather((key, n), f.warp_role, warp_roles, s.span, what, lambda: action(f))

    return run


_COMPOUND = (Seq, If, For, While, Launch)
_GATHER = ("in_warp_groups", "sync_threads", *BLOCK_VOTES)


def meets_around(c: TileContext, s: Stmt) -> bool:
    """Whether the warp roles that reach s synchronise before and after it.

    They do where s accesses memory that they share and contains nothing at which they synchronise anyway.  Enclosing statements
    are the same for all threads, and each warp role runs them by itself.
    """
    if len(c.members) < 2 or isinstance(s, (Alloc, Parallel)):
        return False
    if isinstance(s, TileOp):  # a per-thread tile op; other tile ops are one action of all warp roles
        return _touches_shared(c, s) and any(isinstance(n, Region) and n.buffer.scope_name in PRIVATE for n in walk(s))
    if not _touches_shared(c, s) or not isinstance(s, _COMPOUND):
        return _touches_shared(c, s)
    if any(isinstance(n, Call) and n.op in _GATHER for n in walk(s)):
        return False
    # In divergent code tile ops are per-thread; a warp role may have no thread that reaches them.
    return c.launch.divergence.at(s) or not any(isinstance(n, (TileOp, Parallel)) for n in walk(s)) and not _exchanges(c, s)


def _exchanges(c: TileContext, s: Stmt) -> bool:
    """Whether warp roles must synchronise inside a statement that all threads reach.

    True where two statements of a sequence access the same memory and one of them stores, and for a uniform loop that stores
    at all: an iteration may access what the one before stored.
    """
    if c.launch.divergence.at(s):
        return False
    if isinstance(s, If):
        return _exchanges(c, s.then) or s.orelse is not None and _exchanges(c, s.orelse)
    if isinstance(s, (For, While)):
        return bool(_stored(c, s.body))
    seen: set[Any] = set()
    stored: set[Any] = set()
    for x in s.stmts if isinstance(s, Seq) else ():
        touched, stores = {n.buffer.data for n in _places(c, x)}, _stored(c, x)
        if touched & stored or stores & seen or _exchanges(c, x):
            return True
        seen |= touched
        stored |= stores
    return False


def _places(c: TileContext, x: Any) -> list[Any]:
    """Accesses to what warp roles share: shared memory, fragments, a tensor that the launch stores to."""
    kinds = (Load, Store, AddressOf, Region)
    return [n for n in walk(x) if isinstance(n, kinds) and (
        n.buffer.scope() in (FRAGMENT, *SHARED) or n.buffer.data in c.launch.divergence.written)]


def _stored(c: TileContext, x: Any) -> set[Any]:
    """Memory that x may store to."""
    return {n.buffer.data for n in _places(c, x) if not isinstance(n, Load)}


def _touches_shared(c: TileContext, x: Any) -> bool:
    return bool(_places(c, x))


def asks_shared(c: TileContext, s: Stmt) -> bool:
    """Whether the condition or extent of a statement depends on memory that warp roles share."""
    asked = (s.cond,) if isinstance(s, (If, While)) else (s.start, s.extent) if isinstance(s, For) else ()
    return len(c.members) > 1 and any(_touches_shared(c, e) for e in asked)


def in_front(c: TileContext, s: Stmt, action: Action) -> Action:
    """An action of each warp role, after all warp roles that reach it have synchronised."""
    before = together(c, s, lambda f: None, "before")

    def run(f: LaneFrame) -> None:
        before(f)
        action(f)

    return run


def around(c: TileContext, s: Stmt, action: Action) -> Action:
    """An action of each warp role, with synchronisation before and after it.  The warp roles execute it one after another;
    raises sim-unsupported where that order affects the result (watch.py)."""
    before, behind = (together(c, s, lambda f: None, place) for place in ("before", "behind"))
    key = ("watch", id(s))

    def run(f: LaneFrame) -> None:
        before(f)
        if f.any_active():
            f.warp_role.watch = f.block.once(key, f.warp_role, Watch)
        action(f)
        f.warp_role.watch = None
        behind(f)

    return run


def run_warp_roles(blocks: list[LaneFrame], warp_roles: list[WarpRole], body: Action, random: Any = None) -> None:
    """Run one block, or the blocks of a cluster, with each warp role as a coroutine."""
    frames = []
    for g in blocks:
        for warp_role in warp_roles:
            f = LaneFrame(list(g.slots), g.lanes, g.mask, g.block)
            if g.lanes > 1:
                f.mask = warp_role.mask(g.lanes) & g.active()
            f.warp_role = WarpRole(warp_role.number, warp_role.warps, warp_role.threads)
            frames.append(f)
    scheduler = TileScheduler([g.block for g in blocks], frames, body)
    scheduler.random = random
    scheduler.run()
