"""Reject operations that only Hopper has, at the user's line, where the target has no instruction for them."""

from __future__ import annotations

from typing import Any

from tilelang.errors import error, register, warn
from tilelang.ir import (Alloc, Call, Evaluate, Expr, Func, If, Launch, Node, Parallel, TileOp, binary, const, inner, logical,
                         replace, rewrite, walk, with_options, BARRIER, EMPTY)
from tilelang.ops import Copy, Gemm
from tilelang.target.cluster import cluster_of
from tilelang.target.thread_calls import linear_thread, public_name
from tilelang.target.warp_groups import names_warps

from ..framework.pass_ import TILE, PassContext, pass_

register("needs-arch", ValueError, "an operation that the target does not have",
         "compile for {'kind': 'cuda', 'arch': 'sm_90a'}, or write it with T.copy, T.gemm and T.Pipelined",
         expected="a target that has the operation")

_SM90 = frozenset((
    "mbarrier_init", "mbarrier_arrive", "mbarrier_wait", "mbarrier_expect_tx", "mbarrier_arrive_expect_tx",
    "mbarrier_arrive_remote", "cp_async_mbarrier_arrive", "tma_load", "fence_proxy_async", "fence_mbarrier_init", "bulk_commit",
    "bulk_wait", "cluster_rank", "cluster_arrive", "cluster_wait", "cluster_sync", "cluster_store", "cluster_load"))
_SM90A = frozenset(("wgmma_wait", "wgmma_fence", "wgmma_commit", "wgmma", "wgmma_descriptor", "wgmma_pin", "set_max_nreg"))
_NOT_ON_CPU = "cluster_load"  # the others: codegen/cpu/barriers.py, clusters.py, and wgmma.py
WAITS = ("mbarrier_wait", "named_barrier", "named_barrier_arrive", "cluster_arrive", "cluster_wait", "cluster_sync")


@pass_(needs=TILE)
def check_hopper(func: Func, cx: PassContext) -> Func:
    """Reject operations for which the target has no instruction. Without a target (reference interpreter) none is rejected.

    On targets other than sm_90 and later, T.ws without tile operations becomes a test of thread numbers, and T.pdl_trigger
    and T.pdl_sync do nothing, since launches run one after another.
    """
    target = cx.target
    if target is None:
        return func
    new = target.at_least(90)
    if target.is_cpu:
        for c in walk(func, Call):
            if c.op == _NOT_ON_CPU:
                raise _lacks(public_name(c.op), "sm_90 or newer", target, c.span)
        return rewrite(func, _elsewhere)
    if not target.at_least(80):
        for b in (b for n in walk(func, Launch) for b, _ in n.plan.l2_hit_ratio):
            warn("l2-hint-unused", f"`{b.name}` is not kept in L2: {target.arch} has no part of L2 for it",
                 "leave T.annotate_l2_hit_ratio out", span=b.span)
    if not (new and target.has_wgmma):
        for n in walk(func):
            name = None if new and isinstance(n, Launch) else _name(n, not new)
            if name:
                raise _lacks(name, "sm_90a" if new or _name(n, False) else "sm_90 or newer", target, getattr(n, "span", None))
    return func if new else rewrite(func, _elsewhere)


def _lacks(name: str, wanted: str, target: Any, span: Any) -> Exception:
    got = f"{target.arch or target.kind}"
    return error("needs-arch", f"{name} requires {wanted}, got {got}", expected=wanted, found=got, span=span)


def _name(n: Node, any_: bool) -> str:
    """The name of an sm_90a operation (any_: or of an sm_90 operation)."""
    if isinstance(n, Gemm) and n.plan.wait is not None:
        return "T.wgmma_gemm"
    if isinstance(n, Call) and n.op in _SM90A:
        return public_name(n.op)
    if not any_:
        return ""
    if isinstance(n, Call):
        return public_name(n.op) if n.op in _SM90 else ""
    if isinstance(n, Copy) and (n.plan.by_hand or n.plan.dst_block is not None):
        return "T.tma_copy" if n.plan.by_hand else "T.copy_cluster"
    if isinstance(n, Alloc) and n.buffer.scope_name == BARRIER:
        return "T.alloc_cluster_barrier" if n.buffer.facts.cluster else "T.alloc_barrier"
    return "T.ClusterKernel" if isinstance(n, Launch) and cluster_of(n) is not None else ""


def _elsewhere(n: Node) -> Node | None:
    """The Launch with thread-number tests in place of in_warp_groups, and without PDL calls. Warp groups that run tile
    operations of their own or wait for each other stay warp roles, as on sm_90."""
    if not isinstance(n, Launch):
        return None
    thread = linear_thread(n)
    warp_roles = any(isinstance(s, Call) and s.op in WAITS or isinstance(s, If) and names_warps(s.cond) and any(
        isinstance(x, (TileOp, Parallel)) for part in inner(s) for x in walk(part)) for s in walk(n.body))

    def visit(x: Node) -> Node | None:
        if isinstance(x, Evaluate) and x.call.op in ("pdl_trigger", "pdl_sync"):
            return EMPTY
        return groups_test(x, thread) if isinstance(x, Call) and x.op == "in_warp_groups" and not warp_roles else None

    return with_options(replace(n, body=rewrite(n.body, visit)), pdl=False)


def groups_test(c: Call, thread: Expr) -> Expr:
    """in_warp_groups as a test of the thread index."""
    low, high = c.options.size * c.options.first, c.options.size * (c.options.first + c.options.count)
    below = binary("lt", thread, const(high, thread.dtype))
    return below if low == 0 else logical("and", binary("ge", thread, const(low, thread.dtype)), below)
