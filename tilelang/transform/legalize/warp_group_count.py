"""Launch the number of warp groups that the GEMMs of a program can use."""

from __future__ import annotations

from typing import Any

from tilelang.ir import (BARRIER, CLUSTER_BARRIER, FRAGMENT, Alloc, Buffer, Evaluate, Func, Launch, replace,
                         rewrite, walk, with_options)
from tilelang.ops import Gemm
from tilelang.ops.gemm.wgmma import GROUP, choose_wgmma
from tilelang.target.machine import REGISTERS

from ..analysis.effects import hangs_on_threads
from ..framework.pass_ import TILE, PassContext, pass_
from .hopper_features import hopper
from .transposed_operands import has_transposed, with_k_contiguous

_ROWS = 64  # of the accumulator of one warp group


@pass_(needs=TILE)
def warp_group_count(func: Func, cx: PassContext) -> Func:
    """Give a launch of three or more warp groups as many as its GEMMs have blocks of 64 rows, where fewer are enough.

        with T.Kernel(4, threads=384)               with T.Kernel(4, threads=256)
            T.gemm(a, b, c)  # c has 128 rows  ->       T.gemm(a, b, c)

    wgmma gives 64 rows to a warp group: of three groups over 128 rows none can use it, and four groups share the rows by
    columns, so that every reduction of a row crosses two of them. Applies to targets with wgmma, to programs that nothing
    tells how many threads run them: they name no thread, no warp role, no layout and no operation of single threads. The
    accumulators must fit in the registers of the groups that are left.
    """
    if not hopper(cx).wgmma:
        return func

    def launch(n: Any) -> Any:
        groups = n.num_threads // GROUP
        if groups < 3 or n.num_threads % GROUP or _tells(n):
            return None
        gemms = [op for op in walk(n.body, Gemm) if _by_wgmma(op, _rows(op))]
        best = max(map(_rows, gemms), default=groups)
        if best >= groups or not _fits(n, best) or not all(_by_wgmma(op, best) for op in gemms):
            return None
        why = (f"threads={best * GROUP} instead of {n.num_threads}: the GEMMs have 64 rows for each of {best} warp "
               f"group{'s' * (best > 1)}, and the program names no thread")
        return with_options(replace(n, threads=(best * GROUP, 1, 1)), report=(*n.plan.report, why))

    return rewrite(func, launch, Launch)


def _rows(op: Gemm) -> int:
    """The number of warp groups that have 64 rows each, at least one."""
    return max(1, *(x.m // _ROWS for x in _forms(op)))


def _forms(op: Gemm) -> list[Any]:
    """What wgmma may compute in place of a GEMM."""
    return [with_k_contiguous(op, x)[-1] for x in (False, True)] if has_transposed(op) else [op]


def _by_wgmma(op: Gemm, groups: int) -> bool:
    """Whether wgmma computes it in a block of this many warp groups."""
    return any(not isinstance(choose_wgmma(x, groups * GROUP), str) for x in _forms(op))


def _tells(n: Launch) -> bool:
    """Whether the program could tell how many threads run it."""
    plan = n.plan
    given = (plan.layouts, plan.producer_registers, plan.consumer_registers, plan.import_source, plan.cuda_source,
             plan.min_blocks_per_sm > 1, plan.keep_registers)
    return (any(given) or n.threads[1:] != (1, 1) or hangs_on_threads(n.body)
            or any(_names_them(x, n) for x in walk(n.body)))


def _names_them(x: Any, n: Launch) -> bool:
    if isinstance(x, Alloc):
        return x.buffer.scope_name in (BARRIER, CLUSTER_BARRIER)
    return x in n.thread_vars or isinstance(x, Evaluate) or isinstance(x, Gemm) and x.plan.wait is not None


def _fits(n: Launch, groups: int) -> bool:
    """Whether the fragments fit in the registers of this many consumer groups."""
    held: list[Buffer] = [x.buffer for x in walk(n.body, Alloc) if x.buffer.scope_name == FRAGMENT]
    if not all(b.is_static for b in held):
        return False
    bits = sum(b.size * b.dtype.bits for b in held)
    return bits // 32 // (groups * GROUP) <= REGISTERS.accumulator


__all__ = ["warp_group_count"]
