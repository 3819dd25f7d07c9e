"""Iterations of T.Parallel belong to no thread: what lanes tell each other, or wait for, cannot stand in one."""

from __future__ import annotations

from tilelang.errors import error, register
from tilelang.ir import Call, Func, Parallel, walk

from .pass_ import TILE, PassContext, pass_

register("parallel-exchange", ValueError, "T.Parallel holds what threads tell each other or wait for",
         "which thread runs an iteration, and with which others, is not fixed: write it for T.get_thread_binding(), "
         "or reduce a fragment", expected="work of single iterations")

# Calls -> the names that users wrote.
_NAMES = {
    "shfl_idx": "shfl_sync", "shfl_xor": "shfl_xor", "shfl_up": "shfl_up", "shfl_down": "shfl_down",
    **{op: op for op in ("any_sync", "all_sync", "ballot_sync", "ballot", "activemask", "match_any_sync", "match_all_sync",
                         "syncthreads_count", "syncthreads_and", "syncthreads_or", "sync_threads", "sync_warp", "sync_grid",
                         "named_barrier_arrive")},
    "named_barrier": "sync_threads", "ldmatrix": "ptx_ldmatrix", "stmatrix": "ptx_stmatrix", "mma": "ptx_mma",
}  # fmt: skip


@pass_(needs=TILE)
def check_iterations(func: Func, cx: PassContext) -> Func:
    """Refuse exchanges between lanes and barriers in T.Parallel (every target).  Changes nothing.

    Raises parallel-exchange.  The iterations that a warp runs together differ with the layout that is chosen.
    """
    for s in walk(func):
        if not isinstance(s, Parallel):
            continue
        for c in walk(s.body):
            if isinstance(c, Call) and c.op in _NAMES:
                name = f"T.{_NAMES[c.op]}"
                raise error("parallel-exchange", f"{name} is an act of several threads, and iterations of T.Parallel belong to "
                            "none", found=name, span=c.span, notes=((s.span, "the loop"),))
    return func


__all__ = ["check_iterations"]
