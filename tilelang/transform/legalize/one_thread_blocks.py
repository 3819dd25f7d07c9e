"""On the CPU, a launch that leaves its number of threads open has one thread a block."""

from __future__ import annotations

from tilelang.ir import Func, Launch, replace, with_options
from tilelang.ir.visitor import rewrite_launches

from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE)
def one_thread_blocks(func: Func, cx: PassContext) -> Func:
    """Set the number of threads of a launch with the option any_threads, for a CPU target.

        with T.Kernel(4, threads=(128, 1, 1), any_threads=True)   ->   with T.Kernel(4, threads=(1, 1, 1))
            T.atomic_add(A[b], 1)                                          T.atomic_add(A[b], 1)

    GPU targets keep the default of 128 threads, and so does a program that is interpreted for no target.
    """
    if cx.target is None or cx.target.is_cuda:
        return func

    def launch(s: Launch) -> Launch | None:
        return replace(with_options(s, any_threads=None), threads=(1, 1, 1)) if s.plan.any_threads else None

    out: Func = rewrite_launches(func, launch)
    return out
