"""An update of one element of memory that all threads of a block would run is run by one of them.

    s[0] = s[0] + f[k]     ->     f1 = f[k]
                                  if threadIdx.x == 0:
                                      s[0] = s[0] + f1

Threads that all read the element and write it back changed would see what others wrote. Interpreters and the CPU run the
statement once for the block, and so does the GPU by this pass; place_sync puts barriers around the store.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from tilelang.arith import simplify
from tilelang.errors import error, register, register_warning, warn
from tilelang.ir import (Bind, Call, Const, Expr, For, If, Launch, Load, Parallel, Seq, Stmt, Store, TileOp, While, binary,
                         const, contains, controls, convert, free_vars, fresh, inner, is_const, replace, rewrite, seq, walk,
                         with_inner, FRAGMENT)

from tilelang.target import is_pure
from tilelang.target.warp_groups import WARP_LANES, warps_in, ways_of_warps

from ..analysis.statements import BARRIERS
from ..analysis.divergence import WarpSets, by_warp
from ..check.check_collective import ByThread
from ..framework.pass_ import TILE, PassContext, pass_

register("update-by-every-thread", ValueError, "each thread of the block reads one element and writes it back changed",
         "write it under `if T.get_thread_binding() == 0:`, or with T.atomic_add",
         expected="one thread that changes the element")
register_warning("single-update", "all threads reach an update of one element of memory, and one of them runs it")


@pass_(needs=TILE, of=Launch)
def single_updates(n: Launch, cx: PassContext) -> Launch | None:
    """Let one thread run `s[i] = f(s[i])` outside T.Parallel where i and what is stored are the same in all threads.

    Raises update-by-every-thread where threads would store different values, and for tensors that other blocks may update at
    the same time.
    """
    return _rewritten(n, False)


@pass_(needs=TILE, of=Launch)
def warp_role_updates(n: Launch, cx: PassContext) -> Launch | None:
    """The same for updates in warp roles, by the first thread of each, for all targets: later passes may make plain branches of
    warp roles.

    Raises update-by-every-thread for `s[i] = f(s[i])` in shared or global memory also in a branch that several threads take by
    their numbers, where i is the same for all of them. Branches on data are the program's choice of a thread.

        if tx < 32:
            s[0] = s[0] + 1     # 32 threads read s[0] and write it back changed
    """
    if n.num_threads > 1:
        _check(n.body, WarpSets(n), None, set(n.thread_vars))
    return _rewritten(n, True)


def _rewritten(n: Launch, in_warp_roles: bool) -> Launch | None:
    asked = n.num_threads > 1 and in_warp_roles <= any(by_warp(x.cond) for x in walk(n.body, If))
    return with_inner(n, _Updates(n, in_warp_roles).stmt) if asked else None


class _Updates:
    """warps: of the warp role around.  in_warp_roles: whether updates in warp roles alone are changed."""

    def __init__(self, launch: Launch, in_warp_roles: bool) -> None:
        self.launch, self.d, self.warps, self.in_warp_roles = launch, ByThread(launch), warps_in(launch), in_warp_roles

    def stmt(self, s: Stmt) -> Stmt:
        """s with the updates in it that all threads reach run by one thread."""
        match s:
            case If() if by_warp(s.cond):
                around, done = self.warps, dict[int, Stmt]()
                for self.warps, part in ways_of_warps(s, around) or ():
                    done[id(part)] = self.stmt(part) if self.warps else part
                self.warps = around
                return with_inner(s, lambda x: done.get(id(x), x))  # type: ignore[no-any-return]
            case If() | For() | While() if any(map(self.d.divergent, controls(s))) or isinstance(s, If) and _by_lane(s.cond):
                return s
            case Seq() | If() | For() | While():
                return with_inner(s, self.stmt)  # type: ignore[no-any-return]
            case Store() if s.buffer.scope_name.startswith(("global", "shared")) and _rereads(s):
                outside = self.in_warp_roles and self.among == "block"
                return s if outside or any(map(self.d.divergent, s.indices)) else self.once(s)
        return s

    def once(self, s: Store) -> Stmt:
        """The update by the first thread of the block, or of the warp role around. What it reads of fragments is read before,
        by all threads together."""
        blocks = {v for v, n in zip(self.launch.block_vars, map(convert, self.launch.grid))
                  if not (isinstance(n, Const) and n.value == 1)} - set(s.indices)  # an index of its own: an element of its own
        shared = s.buffer.scope_name.startswith("shared")
        if self.d.divergent(s.value) or not all(is_pure(x.op) for x in walk(s.value, Call)) or blocks and not shared:
            threads = min(self.launch.num_threads, len(self.warps) * WARP_LANES)
            of, once = self.among, "write it" if shared else "T.atomic_add"
            raise _fault(s, threads, f"the {threads} threads of the {of}", f"to change it once for the {of}, {once} under `if "
                         "T.get_thread_binding() == 0:`")
        warn("single-update", f"`{s.buffer.name}` is updated once for the {self.among}, by its first thread, though all its "
             "threads reach the statement", "write it under `if T.get_thread_binding() == 0:`", span=s.span)
        before: list[Stmt] = []

        def held(e: Expr) -> Expr | None:
            if e.buffer.scope_name != FRAGMENT:  # type: ignore[attr-defined]
                return None
            v = fresh("v", e.dtype)
            before.append(Bind(v, e, span=s.span))
            return v

        value = rewrite(s.value, held, Load)
        (x, y, _), number = self.launch.threads, min(self.warps) * WARP_LANES
        first = [binary("eq", v, const(k)) for v, n, k in zip(
            self.launch.thread_vars, self.launch.threads, (number % x, number // x % y, number // (x * y))) if n > 1]
        return seq(*before, If(reduce(lambda a, b: binary("and", a, b), first), replace(s, value=value), span=s.span))

    @property
    def among(self) -> str:
        return "block" if self.warps == warps_in(self.launch) else "warp role"


def _by_lane(e: Expr) -> bool:
    """Whether an expression holds calls whose result differs between threads."""
    return any(x.op not in BARRIERS for x in walk(e, Call))


def _check(s: Stmt | None, sets: WarpSets, reached: Any, read: set[Any], here: Any = True) -> None:
    """reached: for each thread whether it takes the branches around s; None outside of branches by thread number.  here: for
    each thread whether it belongs to the warp role around s, whose threads all reach what no other branch surrounds.

    read: variables whose values may differ between threads: thread indices, and what is computed from them or from memory.
    """
    match s:
        case Bind():
            sets.bind(s.var, s.value)
            if contains(s.value, Load, Call) or read & free_vars(s.value):
                read.add(s.var)
        case If():
            cond = sets.threads(s.cond) if sets.follows(s.cond) else None
            if cond is None:
                if not sets.follows(s.cond):  # else a thread that data chooses
                    _check(s.then, sets, reached, read, here)
                    _check(s.orelse, sets, reached, read, here)
                return
            role = reached is None and by_warp(s.cond)
            for way, taken in ((s.then, cond), (s.orelse, ~cond)):
                _check(way, sets, None if role else here & taken if reached is None else reached & taken, read, here & taken)
        case Seq() | For() | While():
            for x in inner(s):
                _check(x, sets, reached, read, here)
        case Parallel() | TileOp():
            return
        case Store() if reached is not None and s.buffer.scope_name.startswith(("global", "shared")) and _rereads(s):
            count = int(reached.sum())
            if count > 1 and not any(sets.follows(i) or contains(i, Load, Call) or read & free_vars(i) for i in s.indices):
                raise _fault(s, count, f"{count} threads",
                             "to change it once, write it under `if T.get_thread_binding() == 0:`")


def _fault(s: Store, threads: int, who: str, once: str) -> Exception:
    return error("update-by-every-thread", f"each of {who} reads an element of `{s.buffer.name}` here and writes it back "
                 "changed: some see what others wrote", found=f"{threads} threads that change it", span=s.span,
                 hint=f"{once}; to change it once for each thread, T.atomic_add by all of them")


def _rereads(s: Store) -> bool:
    """Whether a store's value is computed from the element that it replaces."""
    return any(e.buffer is s.buffer and all(a is b or a.dtype == b.dtype and is_const(simplify(a - b), 0) for a, b in zip(
        e.indices, s.indices)) for e in walk(s.value, Load))
