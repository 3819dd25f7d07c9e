"""Reject thread-level operations (exchanges, barriers, returns) in T.Parallel, whose iterations belong to no fixed thread."""

from __future__ import annotations

from tilelang.errors import error, register
from tilelang.ir import Call, Func, Parallel, walk
from tilelang.target.intrinsics import INTRINSICS, PURE, READS
from tilelang.target.thread_calls import public_name

from ..framework.pass_ import TILE, PassContext, pass_

register("parallel-exchange", ValueError, "T.Parallel holds what threads tell each other or wait for",
         "which thread runs an iteration, and with which others, is not fixed: write it for T.get_thread_binding(), "
         "or reduce a fragment", expected="work of single iterations")

# What an iteration may do besides computing and reading: change single elements, order its own accesses, print, stop.
_OF_ITERATIONS = frozenset((
    "atomic_add", "atomic_max", "atomic_min", "atomic_or", "atomic_and", "atomic_xor", "atomic_exchange", "atomic_store",
    "atomic_inc", "atomic_dec", "atomic_cas",
    "atomic_addx2", "atomic_addx4", "cp_async", "cluster_store", "tma_prefetch", "printf", "trap", "fence_gpu", "fence_block",
    "fence_proxy_async", "fence_proxy_async_global", "keep_branch"))
# Thread numbers: check_private.py rejects these where they differ between threads.
_NUMBERS = frozenset(("shuffle_elect", "elect_one", "warp_uniform"))


@pass_(needs=TILE)
def check_iterations(func: Func, cx: PassContext) -> Func:
    """Reject lane exchanges, barriers of every kind, and per-thread operations in T.Parallel, for every target.

    Per-thread operations are returns, waits for the thread's copies, and register reallocation. Which iterations a warp runs
    together, and how many a thread runs, depends on the chosen layout. Changes nothing. Raises parallel-exchange.
    """
    for s in walk(func, Parallel):
        for c in walk(s.body, Call):
            row = INTRINSICS.get(c.op)
            if row is None or row.effect in (PURE, READS) or row.name in _OF_ITERATIONS or row.name in _NUMBERS:
                continue
            name = public_name(row.name)
            if row.name == "thread_return":
                raise error("parallel-exchange", "T.thread_return ends a thread, and iterations of T.Parallel belong to none",
                            found=name, span=c.span, notes=((s.span, "the loop"),), hint="`continue` ends an iteration")
            several = "threads" if row.name.startswith("cp_async_") else "several threads"
            raise error("parallel-exchange", f"{name} is an act of {several}, and iterations of T.Parallel belong to none",
                        found=name, span=c.span, notes=((s.span, "the loop"),))
    return func
