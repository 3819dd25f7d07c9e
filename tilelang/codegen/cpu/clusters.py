"""Blocks of a cluster: their barrier, and shared memory of one another.

The blocks of a cluster are one group of coroutines (actors.py), or follow each other in the group of the grid.  Their
storage lies one `%stride` bytes behind the other, so a place in the block of another rank is the own one, moved by so
many strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import AddressOf, Call

from .actors import CLUSTER, PROGRESS, add_word, barrier_at, get_word, signal, wait_until
from .exprs import Storage
from .types import store, unsupported, value_type

CLUSTER_CALLS = ("cluster_rank", "cluster_size", "cluster_arrive", "cluster_wait", "cluster_sync", "cluster_store",
                 "mbarrier_arrive_remote")


def _in_cluster(cx: Any, e: Any, what: str) -> None:
    if cx.coroutine is None:
        raise unsupported(f"{what} in a launch without clusters", span=e.span or cx.span, hint="launch with T.ClusterKernel")


def there(cx: Any, base: str, rank: str) -> str:
    """The place in the block of a rank (i64) that base is in this block."""
    f = cx.f
    return str(f.at(base, "i8", f.mul(f.sub(rank, "%rank"), "%stride")))


def _rank(cx: Any, e: Call) -> str:
    if e.op == "cluster_size" and cx.coroutine is None:
        return "1"
    _in_cluster(cx, e, e.op)
    if e.op == "cluster_size":
        return str(cx.cluster[0])
    ty = value_type(e.dtype)
    return "%rank" if ty == "i64" else str(cx.f.let(f"trunc i64 %rank to {ty}"))


def _barrier(cx: Any, e: Call) -> str:
    """All threads of the cluster come; cluster_arrive goes on, cluster_wait waits for as many phases as it was called."""
    _in_cluster(cx, e, e.op)
    if cx.tid is not None:
        raise unsupported(f"{e.op} under a condition or loop that depends on the thread", span=e.span or cx.span,
                          hint="move the barrier out of the thread-dependent branch")
    f = cx.f
    if e.op != "cluster_wait":
        come = add_word(f, "%cluster", CLUSTER, "1")
        add_word(f, "%group", PROGRESS, "1")

        def turn() -> None:
            f.do(f"store i64 0, ptr {f.at('%cluster', 'i64', str(CLUSTER))}")
            add_word(f, "%cluster", CLUSTER + 1, "1")

        blocks, roles = cx.cluster
        f.branch(f.let(f"icmp sge i64 {come}, {blocks * roles}"), turn)
    if e.op != "cluster_arrive":
        if cx.waited is None:
            cx.waited = f.alloca("i64", hint="waited")
            f.allocas.append(f"  store i64 0, ptr {cx.waited}")
        phase = add_word(f, cx.waited, 0, "1")
        wait_until(cx, lambda: f.let(f"icmp sge i64 {get_word(f, '%cluster', CLUSTER + 1)}, {phase}"))
    return "0"


def _store(cx: Any, e: Call) -> str:
    """cluster_store(address, cta, value)."""
    _in_cluster(cx, e, e.op)
    where = e.args[0]
    if not isinstance(where, AddressOf):
        raise unsupported(f"{e.op} on a computed pointer", span=e.span or cx.span)
    at = cx.address(where.buffer, [cx.index(i) for i in where.indices])
    v = cx.cast_value(e.args[2], where.buffer.dtype)
    store(cx.f, where.buffer.dtype, v, there(cx, at, cx.index(e.args[1])), e.span)
    return "0"


def _arrive(cx: Any, e: Call) -> str:
    """mbarrier_arrive_remote(bar, cta), by each thread that executes it."""
    _in_cluster(cx, e, e.op)
    where = e.args[0]
    if not isinstance(where, AddressOf):
        raise unsupported("an mbarrier that is not an element of T.alloc_cluster_barrier", span=e.span or cx.span)
    bar = barrier_at(cx, where.buffer, where.indices[0])
    signal(cx, there(cx, bar, cx.index(e.args[1])), "1", "0")
    return "0"


def copy_there(cx: Any, op: Any, emit: Callable[[], None]) -> None:
    """A Copy with attr dst_block: into that block's buffer, counted by the barrier of attr `barrier` at the same place."""
    _in_cluster(cx, op, "T.copy_cluster")
    rank, b = cx.index(op.attr("dst_block")), op.dst.buffer
    own = cx.storage[b.data]
    cx.storage[b.data] = Storage(there(cx, own.base, rank), own.copies)
    emit()
    cx.storage[b.data] = own
    if op.attr("barrier") is not None:
        nbytes = str(b.dtype.bytes)
        for n in op.dst.extents:
            nbytes = cx.f.mul(nbytes, cx.index(n))
        bar = barrier_at(cx, *op.attr("barrier"))
        signal(cx, there(cx, bar, rank), "0", cx.f.sub("0", nbytes))


CLUSTER_EFFECTS: dict[str, Callable[[Any, Call], str]] = {
    "cluster_rank": _rank, "cluster_size": _rank, "cluster_arrive": _barrier, "cluster_wait": _barrier,
    "cluster_sync": _barrier, "cluster_store": _store, "mbarrier_arrive_remote": _arrive}  # fmt: skip

__all__ = ["CLUSTER_CALLS", "CLUSTER_EFFECTS", "copy_there"]
