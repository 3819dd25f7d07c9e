"""Clusters on the CPU: the barrier of a cluster, and access to the shared memory of its other blocks.

The blocks of a cluster are one group of coroutines (coroutine.py), or neighbours in the group of the grid. Their storage lies
`%stride` bytes apart from each other, so an address in the block of another rank is this block's address plus the difference of
the ranks times the stride.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import Call
from tilelang.ops import Copy
from tilelang.target.cpu import unsupported

from .barriers import barrier_at, barrier_operand, need_all_threads, wait_until
from .coroutine import CLUSTER, PROGRESS, add_word, get_word, signal
from .code import CallPrinter, Code, pointed
from .state import WarpRoleState, Storage
from .types import store, value_type


def _in_cluster(cx: Code, what: str, span: Any) -> WarpRoleState:
    if cx.block.warp_role is None:
        raise unsupported(f"{what} in a launch without clusters", span=span or cx.span, hint="launch with T.ClusterKernel")
    return cx.block.warp_role


def address_in_rank(cx: Code, base: str, rank: str) -> str:
    """The address in the block of a rank (i64) that corresponds to `base` in this block."""
    f = cx.f
    return f.at(base, "i8", f.mul(f.sub(rank, "%rank"), "%stride"))


def _rank(cx: Code, e: Call) -> str:
    if e.op == "cluster_size" and cx.block.warp_role is None:
        return "1"
    warp_role = _in_cluster(cx, e.op, e.span)
    if e.op == "cluster_size":
        return str(warp_role.cluster[0])
    ty = value_type(e.dtype)
    return "%rank" if ty == "i64" else cx.f.let(f"trunc i64 %rank to {ty}")


def _barrier(cx: Code, e: Call) -> str:
    """The cluster barrier: all threads of the cluster arrive. cluster_arrive continues; each cluster_wait waits for one phase
    more."""
    warp_role = _in_cluster(cx, e.op, e.span)
    need_all_threads(cx, e.op, e.span)
    f = cx.f
    if e.op != "cluster_wait":
        arrived = add_word(f, "%cluster", CLUSTER, "1")
        add_word(f, "%group", PROGRESS, "1")

        def complete() -> None:
            f.do(f"store i64 0, ptr {f.at('%cluster', 'i64', str(CLUSTER))}")
            add_word(f, "%cluster", CLUSTER + 1, "1")

        blocks, warp_roles = warp_role.cluster
        f.branch(f.let(f"icmp sge i64 {arrived}, {blocks * warp_roles}"), complete)
    if e.op != "cluster_arrive":
        if warp_role.waits is None:
            warp_role.waits = f.alloca("i64", hint="waited")
            f.allocas.append(f"  store i64 0, ptr {warp_role.waits}")
        phase = add_word(f, warp_role.waits, 0, "1")
        wait_until(f, warp_role.coroutine, lambda: f.let(f"icmp sge i64 {get_word(f, '%cluster', CLUSTER + 1)}, {phase}"))
    return "0"


def _store(cx: Code, e: Call) -> str:
    """cluster_store(address, cta, value)."""
    _in_cluster(cx, e.op, e.span)
    where = pointed(cx, e, e.args[0])
    at = cx.address_of(where)
    v = cx.cast_value(e.args[2], where.buffer.dtype)
    store(cx.f, where.buffer.dtype, v, address_in_rank(cx, at, cx.index(e.args[1])), e.span)
    return "0"


def _arrive(cx: Code, e: Call) -> str:
    """mbarrier_arrive_remote(bar, cta), executed by each active thread."""
    _in_cluster(cx, e.op, e.span)
    bar = barrier_operand(cx, e.args[0], e.span or cx.span, "T.alloc_cluster_barrier")
    signal(cx.f, address_in_rank(cx, bar, cx.index(e.args[1])), "1", "0")
    return "0"


def copy_to_rank(cx: Code, op: Copy, emit: Callable[[], None]) -> None:
    """A Copy with attr dst_block: it writes that block's buffer and signals its mbarrier of attr `barrier`."""
    _in_cluster(cx, "T.copy_cluster", op.span)
    assert op.plan.dst_block is not None, "a copy to another block names it"
    rank, b = cx.index(op.plan.dst_block), op.dst.buffer
    own = cx.storage[b.data]
    cx.storage[b.data] = Storage(address_in_rank(cx, own.base, rank), own.copies)
    emit()
    cx.storage[b.data] = own
    if op.plan.barrier is not None:
        nbytes = str(b.dtype.bytes)
        for n in op.dst.extents:
            nbytes = cx.f.mul(nbytes, cx.index(n))
        bar = barrier_at(cx, *op.plan.barrier)
        signal(cx.f, address_in_rank(cx, bar, rank), "0", cx.f.sub("0", nbytes))


CLUSTER_CALL_PRINTERS: dict[str, CallPrinter] = {
    "cluster_rank": _rank, "cluster_size": _rank, "cluster_arrive": _barrier, "cluster_wait": _barrier,
    "cluster_sync": _barrier, "cluster_store": _store, "mbarrier_arrive_remote": _arrive}  # fmt: skip
