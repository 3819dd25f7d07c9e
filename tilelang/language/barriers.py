"""Barriers in shared memory (mbarriers): allocation, arrivals, waits, expected bytes, fences."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Buffer, BufferFacts, Const, Expr, Load, Var, cast, const, convert, dtype as DType, BARRIER

from .tracing.builder import Emitted, need_builder
from .kernel import need_kernel
from .loops import IfThreadFrame
from .tracing.regions import BufferSlice
from .tracing.state import describe, error, example
from .thread import emit_call, event

MOST_ARRIVALS = (1 << 20) - 1  # PTX ISA, "mbarrier.init"
MOST_BARRIERS = 4096  # of 8 bytes each, in the shared memory of a block


def _counts(what: str, arrive_count: Any) -> tuple[int, ...]:
    items = list(arrive_count) if isinstance(arrive_count, (list, tuple)) else [arrive_count]
    _few(what, len(items))
    counts = [int(n) if isinstance(n, np.integer) else int(n.value) if isinstance(n, Const) else n for n in items]
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_ARRIVALS for n in counts):
        raise error("barrier-count", f"{what} takes the number of arrivals of each barrier (1 to {MOST_ARRIVALS}), found "
                    f"{arrive_count!r}")
    return tuple(counts)


def _few(what: str, n: int) -> int:
    if not 0 < n <= MOST_BARRIERS:
        raise error("barrier-count", f"{what} takes «1 to {MOST_BARRIERS}» barriers, found {n}",
                    hint="use few barriers again: bar[k % n]")
    return n


def _allocate(what: str, arrive_count: Any, cluster: bool) -> Buffer:
    b = need_builder(what)
    k, counts = need_kernel(what), _counts(what, arrive_count)
    if any(not f.once or isinstance(f, IfThreadFrame) for f in b.frames[b.frames.index(k) + 1:]):
        raise error("barrier-place", f"{what} inside a loop or branch: barriers live as long as the kernel")
    given = what != "T.create_barriers"  # those the program initialises
    facts = BufferFacts(arrive=counts if given else None, cluster=given and cluster)
    return b.allocate(Buffer(b.fresh_name("barrier"), (len(counts),), DType("uint64"), BARRIER, facts=facts, span=b.here()))


def alloc_barrier(arrive_count: Any) -> Buffer:
    """Barriers in shared memory (sm_90), one for each arrival count, set up before anything else runs: `bar[i]`.

    arrive_count: integer or list.  A phase completes when that many threads have arrived and all expected bytes were copied.
    Raises barrier-count, barrier-place; needs-arch for other targets.

    Example:
        bar = T.alloc_barrier(128)           # one barrier, 128 arrivals
        full = T.alloc_barrier([128, 128])   # two: full[0], full[1]
    """
    return _allocate("T.alloc_barrier", arrive_count, False)


def alloc_cluster_barrier(arrive_count: Any) -> Buffer:
    """T.alloc_barrier for barriers on which other blocks of the cluster arrive (T.mbarrier_arrive(bar, cta_id)).

    Example:
        full = T.alloc_cluster_barrier([256])   # the 128 threads of each of two blocks arrive
        T.mbarrier_arrive(full[0], 1)
    """
    return _allocate("T.alloc_cluster_barrier", arrive_count, True)


def create_barriers(n: int) -> Buffer:
    """n barriers that the program initialises: one thread calls T.ptx_init_barrier_thread_count and T.ptx_fence_barrier_init,
    then all call T.sync_threads().  T.alloc_barrier does all of this automatically.

    Example:
        bars = T.create_barriers(2)
        if tx == 0:
            T.ptx_init_barrier_thread_count(bars[0], 128)
            T.ptx_init_barrier_thread_count(bars[1], 128)
            T.ptx_fence_barrier_init()
        T.sync_threads()
    """
    return _allocate("T.create_barriers", [1] * _few("T.create_barriers", int(n)), False)


def barrier_of(x: Any, what: str) -> AddressOf:
    """The single barrier that an argument names.  Raises barrier-operand."""
    b = need_builder(what)
    if isinstance(x, Var) and id(x) in b.elements:
        x = b.elements[id(x)][1]
    if isinstance(x, BufferSlice) and all(n == 1 for n in x.region.extents):
        x = Load(x.region.buffer, x.region.mins, x.region.buffer.dtype)
    if isinstance(x, Buffer) and x.scope_name == BARRIER and tuple(x.shape) == (1,):
        return AddressOf(x, (const(0),))
    if isinstance(x, Load) and x.buffer.scope_name == BARRIER:
        return AddressOf(x.buffer, x.indices)
    if isinstance(x, AddressOf) and x.buffer.scope_name == BARRIER:
        return x
    raise error("barrier-operand", f"{what} takes one barrier: an element `bar[i]` of T.alloc_barrier, or a buffer of one, "
                f"found {describe(x)}")


def _u32(x: Any, what: str) -> Expr:
    e = convert(x)
    if not (e.dtype.is_int or e.dtype.is_bool) or e.dtype.lanes != 1:
        raise error("barrier-operand", f"{what} is «an integer», found {e.dtype}")
    return const(int(e.value), "uint32") if isinstance(e, Const) else cast(e, "uint32")


@example("T.mbarrier_arrive(bar[0])", "T.mbarrier_wait_parity(bar[0], 0)")
def mbarrier_arrive(bar: Any, cta_id: Any = None) -> Emitted:
    """Each executing thread arrives once; with cta_id, on the same barrier of that block of the cluster.

    Raises barrier-operand; barrier-cta for a cta_id with a barrier that T.alloc_cluster_barrier did not make.
    """
    bar = barrier_of(bar, "T.mbarrier_arrive")
    if cta_id is None:
        return emit_call("mbarrier_arrive", (bar,))
    if not bar.buffer.facts.cluster:
        raise error("barrier-cta", f"cta_id needs a barrier of T.alloc_cluster_barrier, `{bar.buffer.name}` is the block's own",
                    found=f"`{bar.buffer.name}` of T.alloc_barrier")
    return emit_call("mbarrier_arrive_remote", (bar, _u32(cta_id, "cta_id")))


@example("T.barrier_arrive(bar[0])")
def barrier_arrive(bar: Any) -> Emitted:
    """T.mbarrier_arrive on the barrier of the executing block."""
    return mbarrier_arrive(bar)


def mbarrier_wait_parity(bar: Any, parity: Any) -> Emitted:
    """Wait until the phase with this parity (0, 1) completed.  A wait for parity 1 on a fresh barrier returns at once.

    Example:
        for k in T.serial(4):
            T.mbarrier_arrive(bar[0])
            T.mbarrier_wait_parity(bar[0], k % 2)
    """
    return emit_call("mbarrier_wait", (barrier_of(bar, "T.mbarrier_wait_parity"), _u32(parity, "a parity")))


@example("T.barrier_arrive(bar[0])", "T.barrier_wait(bar[0], 0)")
def barrier_wait(bar: Any, parity: Any = 0) -> Emitted:
    """T.mbarrier_wait_parity."""
    return mbarrier_wait_parity(bar, parity)


@example("if tx == 0:", "    T.mbarrier_expect_tx(bar[0], 128 * 64 * 2)  # bytes of a (128, 64) float16 tile")
def mbarrier_expect_tx(bar: Any, bytes: Any) -> Emitted:
    """Add expected bytes of copies to the current phase, which completes only after them.  Each executing thread adds them."""
    return emit_call("mbarrier_expect_tx", (barrier_of(bar, "T.mbarrier_expect_tx"), _u32(bytes, "a byte count")))


@example("if tx == 0:", "    T.mbarrier_arrive_expect_tx(bar[0], 128 * 64 * 2)  # bytes of a (128, 64) float16 tile")
def mbarrier_arrive_expect_tx(bar: Any, bytes: Any) -> Emitted:
    """T.mbarrier_expect_tx and T.mbarrier_arrive in one."""
    bar = barrier_of(bar, "T.mbarrier_arrive_expect_tx")
    return emit_call("mbarrier_arrive_expect_tx", (bar, _u32(bytes, "a byte count")))


@example("if tx == 0:", "    T.ptx_init_barrier_thread_count(bars[0], 128)")
def ptx_init_barrier_thread_count(b: Any, n: Any) -> Emitted:
    """Initialise a barrier of T.create_barriers; one thread executes it."""
    bar = barrier_of(b, "T.ptx_init_barrier_thread_count")
    (n,) = _counts("T.ptx_init_barrier_thread_count", n)
    return emit_call("mbarrier_init", (bar, const(n, "uint32")))


ptx_fence_barrier_init = event("ptx_fence_barrier_init", "Make initialised barriers visible to copies and to the cluster.  "
                               "Barriers of T.alloc_barrier do not need it.", op="fence_mbarrier_init")
fence_proxy_async = event("fence_proxy_async", "Proxy fence: after a following barrier, this thread's writes to shared memory "
                          "are visible to TMA and wgmma.", "A_s[tx, 0] = 0\nT.fence_proxy_async()")


@example("T.ptx_arrive_barrier(bar[0])")
def ptx_arrive_barrier(b: Any) -> Emitted:
    """T.barrier_arrive."""
    return mbarrier_arrive(b)


@example("if tx == 0:", "    T.ptx_arrive_barrier_expect_tx(bar[0], 128 * 64 * 2)  # bytes of a (128, 64) float16 tile")
def ptx_arrive_barrier_expect_tx(b: Any, bytes: Any) -> Emitted:
    """T.mbarrier_arrive_expect_tx."""
    return mbarrier_arrive_expect_tx(b, bytes)


@example("T.ptx_arrive_cluster_barrier(cbar[0], 0)")
def ptx_arrive_cluster_barrier(b: Any, cta: Any) -> Emitted:
    """T.mbarrier_arrive on the same barrier of a block of the cluster."""
    return mbarrier_arrive(b, cta)


@example("T.ptx_arrive_barrier(bar[0])", "T.ptx_wait_barrier(bar[0], 0)")
def ptx_wait_barrier(b: Any, parity: Any = 0) -> Emitted:
    """T.mbarrier_wait_parity."""
    return mbarrier_wait_parity(b, parity)


__all__ = ["alloc_barrier", "alloc_cluster_barrier", "barrier_arrive", "barrier_wait", "create_barriers", "fence_proxy_async",
           "mbarrier_arrive", "mbarrier_arrive_expect_tx", "mbarrier_expect_tx", "mbarrier_wait_parity", "ptx_arrive_barrier",
           "ptx_arrive_barrier_expect_tx", "ptx_arrive_cluster_barrier", "ptx_fence_barrier_init",
           "ptx_init_barrier_thread_count", "ptx_wait_barrier"]
