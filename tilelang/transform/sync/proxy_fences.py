"""Places fences between generic-proxy accesses of shared memory and those of the async proxy (TMA, wgmma).

    S[...] = x              S[...] = x
    sync_threads()     ->   fence_proxy_async(); sync_threads()
    tma_store(S)            tma_store(S)

Every thread fences its own accesses before it signals other threads: its stores, which the async proxy may not see
otherwise, and its loads, which may still be under way when the async proxy writes (PTX ISA, "Proxies").
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilelang.ir import (AddressOf, Bind, Break, Call, Continue, Evaluate, For, If, Launch, Seq, Stmt, Var, While, call,
                         contains, inner, replace, rewrite_stmts, seq, walk, SHARED)

from ..analysis.effects import effects, own_effects

ASYNC_READERS = frozenset(("wgmma_descriptor", "tma_store", "tma_reduce_add", "bulk_store", "bulk_copy_cluster"))
ASYNC_WRITERS = frozenset(("tma_load", "bulk_load", "bulk_copy_cluster"))
_ASYNC = ASYNC_READERS | ASYNC_WRITERS | {"wgmma"}
_TELLS = frozenset(("sync_threads", "sync_warp", "named_barrier", "named_barrier_arrive", "mbarrier_arrive",
                    "mbarrier_arrive_expect_tx", "mbarrier_arrive_remote", "mbarrier_complete_remote",
                    "cp_async_mbarrier_arrive", "cluster_arrive", "cluster_sync"))


# ---- block barriers placed by place_sync --------------------------------------------------------------------------------


def fence_barriers(body: Stmt) -> Stmt:
    """The body with a fence in front of every block barrier, if it needs any.

    It needs them if wgmma or TMA reads shared memory, or if TMA writes shared memory after generic-proxy accesses.
    """
    calls = list(walk(body, Call))
    if not any(x.op in ASYNC_READERS for x in calls) and not (
            any(x.op in ASYNC_WRITERS for x in calls) and _order(body, False)[1]):
        return body

    def fenced(s: Stmt) -> Stmt | None:
        return _with_fence(s) if isinstance(s, Evaluate) and s.call.op == "sync_threads" else None

    return rewrite_stmts(body, fenced)


def _order(s: Stmt, touched: bool) -> tuple[bool, bool]:
    """(whether threads have accessed shared memory by the end of s, whether TMA writes some in s after such accesses).

    touched: whether threads have accessed shared memory before s.
    """
    if isinstance(s, (For, While)):  # the next iteration follows this one
        touched = touched or any(_is_ordinary(e) for e in effects(s))
    late = touched and isinstance(s, Evaluate) and s.call.op in ASYNC_WRITERS
    touched = touched or any(map(_is_ordinary, own_effects(s)))
    after = touched
    for x in inner(s):
        done, bad = _order(x, after if isinstance(s, Seq) else touched)
        after, late = after or done, late or bad
    return after, late


def _is_ordinary(e: Any) -> bool:
    """Whether an effect is an access of shared memory by threads (generic proxy)."""
    return e.buffer.scope_name in SHARED and not (isinstance(e.node, Call) and e.node.op in _ASYNC)


def fence_waits(body: Stmt) -> Stmt:
    """The body with a fence after each acquire from other ranks, where bulk copies access what these have stored or read.

    There is one in front of each bulk copy as well if threads of the block store elements of its type: a rank may be its own
    neighbour.
    """
    def ranked(c: Call) -> bool:
        return c.op in ("bulk_load", "bulk_store") and any(
            isinstance(a, AddressOf) and a.buffer.facts.symmetric for a in c.args)

    bulk = [c for c in walk(body, Call) if ranked(c)]
    if not bulk:
        return body
    stored = {e.buffer.dtype for e in effects(body) if e.buffer.facts.symmetric and e.writes and e.node not in bulk}

    def fenced(s: Stmt) -> Stmt | None:
        calls = list(walk(s, Call)) if isinstance(s, (Evaluate, Bind)) else []
        fence = Evaluate(call("fence_proxy_async_global", (), "void"), span=s.span)
        if any(c.op in ("wait_signal", "rank_barrier") or c.op.startswith("atomic_") and c.options.scope == "sys"
               for c in calls):
            return Seq((s, fence), span=s.span)
        mixed = any(ranked(c) and stored & {a.buffer.dtype for a in c.args if isinstance(a, AddressOf)} for c in calls)
        return Seq((fence, s), span=s.span) if mixed else None

    return rewrite_stmts(body, fenced)


# ---- barriers placed by users -------------------------------------------------------------------------------------------


def fence_arrivals(launch: Launch) -> Launch:
    """The launch with a fence in front of each arrival and barrier that follows generic-proxy accesses.

    These are stores to what wgmma and TMA access, and loads of what TMA fills, because an arrival at an mbarrier does not wait
    for loads under way.  Copies of cp.async that arrive at an mbarrier land after such a fence: there the threads that wait
    have the fence, behind their wait, and the copies' arrival has none of its own.
    """
    launch = _without_copies(launch)
    calls = list(walk(launch.body, Call))
    writers = _accessed((x.args[:1] for x in calls if x.op in ASYNC_WRITERS), launch)
    readers = _accessed((x.args for x in calls if x.op in ASYNC_READERS), launch)
    if writers == readers == set():
        return launch
    used = None if writers is None or readers is None else writers | readers
    body = _Arrivals(writers, used, any(x.op == "cp_async_wait" for x in calls)).stmt(launch.body, 0)[0]
    landing = {c.args[0].buffer.data for c in calls if c.op == "cp_async_mbarrier_arrive" and isinstance(c.args[0], AddressOf)}

    def awaited(s: Stmt) -> Stmt | None:
        if not isinstance(s, Evaluate) or s.call.op != "mbarrier_wait" or not landing & {e.storage for e in effects(s)}:
            return None
        return Seq((s, Evaluate(call("fence_proxy_async", (), "void"), span=s.span)), span=s.span)

    return replace(launch, body=rewrite_stmts(body, awaited) if landing else body)


def _without_copies(launch: Launch) -> Launch:
    """The launch with plain arrivals for those that wait for cp.async of the thread, if there is none.

    Plain arrivals release the stores before them; the others only tell that the thread's cp.async have landed.
    """
    if any(x.op == "cp_async" for x in walk(launch.body, Call)):
        return launch

    def plain(s: Stmt) -> Stmt | None:
        if not isinstance(s, Evaluate) or s.call.op != "cp_async_mbarrier_arrive" or not s.call.options.noinc:
            return None
        return replace(s, call=call("mbarrier_arrive", s.call.args, "void", span=s.call.span))

    return replace(launch, body=rewrite_stmts(launch.body, plain))


_ACCESSED, _COPIED = 1, 2  # by threads themselves; by their cp.async


def _accessed(args: Iterable[Iterable[Any]], launch: Launch) -> set[Var] | None:
    """The shared memory whose addresses instructions take, with what shares its bytes; None: any."""
    found = [[a.buffer.data for a in each if isinstance(a, AddressOf) and a.buffer.scope_name in SHARED] for each in args]
    named = {v for each in found for v in each}
    shared = {v.data for pair in launch.plan.reuse if any(x.data in named for x in pair) for v in pair}
    return named | shared if all(found) else None


class _Arrivals:
    """filled: storage that TMA fills.  used: that the async proxy accesses.  None: any shared memory.  awaited: whether threads
    wait for their own cp.async."""

    def __init__(self, filled: set[Var] | None, used: set[Var] | None, awaited: bool) -> None:
        self.filled, self.used, self.awaited = filled, used, awaited

    def stmt(self, s: Any, dirty: int) -> tuple[Any, int]:
        """(s with its fences, which accesses without a fence may precede the end of s).  dirty: the same before s."""
        own = self.among(own_effects(s))
        match s:
            case Evaluate() if s.call.op == "fence_proxy_async":
                return s, 0
            case Evaluate() if s.call.op == "cp_async_mbarrier_arrive":
                return (_with_fence(s), 0) if dirty & _ACCESSED else (s, dirty)
            case Evaluate() if s.call.op in _TELLS:
                return (_with_fence(s), 0) if dirty or own else (s, 0)
            case Seq():
                out = []
                for x in s.stmts:
                    x, dirty = self.stmt(x, dirty)
                    out.append(x)
                return seq(*out, span=s.span), dirty
            case For() | While():
                dirty |= own | (self.among(effects(s.body)) if contains(s.body, Break, Continue) else 0)
                body, after = self.stmt(s.body, dirty)
                while after & ~dirty:  # what the end of an iteration leaves precedes the next one
                    dirty |= after
                    body, after = self.stmt(s.body, dirty)
                return replace(s, body=body), dirty
            case If():
                # A block barrier orders what precedes the warp roles.
                outside = 0 if isinstance(s.cond, Call) and s.cond.op == "in_warp_groups" else dirty | own
                then, one = self.stmt(s.then, outside)
                orelse, other = (None, outside) if s.orelse is None else self.stmt(s.orelse, outside)
                return replace(s, then=then, orelse=orelse), one | other | outside
        if dirty and any(x.op.startswith("syncthreads_") for x in walk(s, Call)):
            return _with_fence(s), own
        return s, dirty | own

    def among(self, found: Any) -> int:
        """Which generic-proxy accesses that the async proxy must not overtake are among these effects."""
        used = [e for e in found if _is_ordinary(e) and any(
            v is None or e.storage in v for v in ((self.used, self.filled) if e.writes else (self.filled,)))]
        copied = [isinstance(e.node, Call) and e.node.op == "cp_async" for e in used]
        return _COPIED * (self.awaited and any(copied)) | _ACCESSED * (not all(copied))


def _with_fence(s: Stmt) -> Stmt:
    return Seq((Evaluate(call("fence_proxy_async", (), "void"), span=s.span), s), span=s.span)
