"""Reject updates of one element of memory by several threads that a branch chooses, on every target.

    if tx < 32:
        s[0] = s[0] + 1     # update-by-every-thread: 32 threads read s[0] and write it back changed
"""

from __future__ import annotations

from typing import Any

from tilelang.errors import error
from tilelang.ir import (Bind, Call, For, Func, If, Launch, Load, Parallel, Seq, Stmt, Store, TileOp, While, contains,
                         free_vars, statements)

from ..analysis.access_values import rereads
from ..analysis.warp_sets import WarpSets, by_warp
from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE)
def check_updates(func: Func, cx: PassContext) -> Func:
    """Raise update-by-every-thread for `s[i] = f(s[i])` in shared or global memory, in a branch that several threads take by
    their numbers, where i is the same for all of them.

    What all threads, or all threads of a warp role, reach is run by one of them (single_updates). Branches on data are the
    program's choice of a thread.
    """
    for s in statements(func.body):
        if isinstance(s, Launch) and s.num_threads > 1:
            _check(s.body, WarpSets(s), None, set(s.thread_vars))
    return func


def _check(s: Stmt | None, sets: WarpSets, reached: Any, read: set[Any], here: Any = True) -> None:
    """reached: for each thread whether it takes the branches around s; None outside of branches by thread number.  here: for
    each thread whether it belongs to the warp role around s, whose threads all reach what no other branch surrounds.

    read: variables whose values may differ between threads: thread indices, and what is computed from them or from memory.
    """
    match s:
        case Seq():
            for x in s.stmts:
                _check(x, sets, reached, read, here)
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
        case For() | While():
            _check(s.body, sets, reached, read, here)
        case Parallel() | TileOp():
            return
        case Store() if reached is not None and s.buffer.scope_name.startswith(("global", "shared")) and rereads(s):
            count = int(reached.sum())
            if count > 1 and not any(sets.follows(i) or contains(i, Load, Call) or read & free_vars(i) for i in s.indices):
                raise error("update-by-every-thread", f"each of {count} threads reads an element of `{s.buffer.name}` here and "
                            "writes it back changed: some see what others wrote", span=s.span,
                            expected="one thread that changes the element", found=f"{count} threads that change it",
                            hint="to change it once, write it under `if T.get_thread_binding() == 0:`; to change it once for "
                                 "each thread, T.atomic_add by all of them")
