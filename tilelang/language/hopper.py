"""Explicit Hopper operations: TMA copies, asynchronous wgmma, registers of warp groups, clusters, PDL."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Alloc, Buffer, BufferFacts, Const, Expr, Load, call, cast, const, convert, dtype as DType,
                         load, I32, FRAGMENT, GLOBAL, LOCAL, SHARED, VARIABLE, BARRIER)
from tilelang.ops import Copy, CopyPlan, Gemm, GemmSchedule, GemmWarpPolicy

from .barriers import barrier_of, mbarrier_arrive, mbarrier_wait_parity
from .tracing.builder import Emitted, need_builder
from .tracing.flags import flag
from .kernel import need_kernel
from .loops import Parallel, options_from
from .tracing.regions import check_inside, non_unit, operand, pair, whole_region
from .tracing.state import describe, error, example
from .thread import emit_call, event
from .tile import accumulator_clearing, check_policy, emit_op, warp_policy


# ---- copies ---------------------------------------------------------------------------------------------------------


def _mask(mask: Any, what: str) -> int | None:
    if mask is None:
        return None
    if isinstance(mask, (bool, float)) or not isinstance(mask, (int, np.integer)) or not 0 < int(mask) < 1 << 16:
        raise error("cluster-mask", f"{what}: cluster_mask is a positive bit mask of ranks in the cluster, found {mask!r}")
    k = need_kernel(what)
    dims = k.plan.cluster or (1, 1, 1)
    size = dims[0] * dims[1] * dims[2]
    if int(mask) >> size:
        raise error("cluster-mask", f"{what}: cluster_mask ‹{int(mask):#x}› names blocks beyond the {size} of the cluster",
                    expected=f"ranks 0 to {size - 1}", hint="launch with T.ClusterKernel(..., cluster_dims=...)")
    return int(mask)


def tma_copy(src: Any, dst: Any, *, barrier: Any = None, cluster_mask: Any = None, leader_scope_threads: Any = None,
             eviction_policy: str | None = None, annotations: dict[str, Any] | None = None) -> Emitted:
    """Start a copy by TMA (sm_90) without waiting for it.  One of the executing threads issues it.

    Global to shared: the bytes are expected on `barrier` (an element of T.alloc_barrier) and counted there when they have
    been copied; the copy is no arrival.  Shared to global: the copy is committed; T.tma_store_wait waits for it.
    cluster_mask (multicast): the block of the lowest rank in the mask loads for all blocks in the mask.  Each of them
    executes the same copy and expects the bytes on its barrier.  Blocks outside the mask load for themselves.
    leader_scope_threads: one thread of every group of this many issues the copy (default: one of all executing threads).
    Rows of a tile in a T.SymmTensor, of this rank or another, are copied one by one, or at once where they are whole rows of
    both sides: they lie in shared memory in order, and must not leave the tensor.
    Raises cluster-mask, leader-scope, barrier-operand, copy-option; tma-copy for tiles TMA cannot move.
    src, dst: a tile in shared memory and a region or start element of a global tensor, of equal extents and dtype.

    Example:
        T.tma_copy(A[by * 128, k * 64], A_s, barrier=bar[0])
        T.mbarrier_arrive(bar[0])
        T.mbarrier_wait_parity(bar[0], 0)
    """
    b = need_builder("T.tma_copy")
    check_policy((annotations or {}).get("eviction_policy", eviction_policy))
    mask = _mask(cluster_mask, "T.tma_copy")
    n = leader_scope_threads
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n <= 0 or n % 32):
        raise error("leader-scope", f"leader_scope_threads is a positive multiple of 32, found {n!r}")
    s, d = pair(src, dst, "tma_copy")
    loads = s.buffer.scope_name == GLOBAL and d.buffer.scope_name in SHARED
    if not loads and not (s.buffer.scope_name in SHARED and d.buffer.scope_name == GLOBAL):
        raise error("copy-option", f"T.tma_copy moves tiles between «global and shared memory», found {s.buffer.scope_name} to "
                    f"{d.buffer.scope_name}", hint="use T.copy")
    if loads != (barrier is not None):
        raise error("copy-option", "a load by T.tma_copy needs the barrier that its bytes arrive on" if loads else
                    "a store by T.tma_copy takes no barrier",
                    expected=f"{'barrier=bar[i]' if loads else 'no barrier'}", found=f"{'none' if loads else 'a barrier'}",
                    hint="barrier=bar[i] of T.alloc_barrier" if loads else
                    "T.tma_store_wait() waits for stores")
    if mask is not None and not loads:
        raise error("copy-option", "cluster_mask is for loads", expected="a load", found="a store with cluster_mask")
    bar = barrier_of(barrier, "T.tma_copy") if loads else None
    plan, attrs = options_from(
        CopyPlan, annotations, tma=True, by_hand=True, eviction_policy=eviction_policy, cluster_mask=mask, leader_scope=n,
        expect=True if loads else None, barrier=None if bar is None else (bar.buffer, bar.indices[0]))
    return emit_op(b, Copy(s, d, attrs, plan, span=b.here()))


tma_store_arrive = event("tma_store_arrive", "Commit this thread's bulk stores as a group.  T.tma_copy already does this.",
                         op="bulk_commit")


def tma_store_wait(count: int = 0, read: bool = True) -> Emitted:
    """Wait until at most `count` store groups of this thread still read shared memory (read=False: are incomplete).

    Example:
        T.fence_proxy_async()
        T.sync_threads()
        T.tma_copy(A_s, A[by * 128, 0])
        T.tma_store_wait(0)
    """
    return emit_call("bulk_wait", n=_small(count, "count", "T.tma_store_wait"), read=flag(read, "read"))


def _small(n: Any, name: str, what: str) -> int:
    if isinstance(n, Const):
        n = n.value
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
        raise error("wait-count", f"{what}: {name} is a number of groups known while compiling, found {describe(n)}")
    return int(n)


@example("T.copy_cluster(A[0, k * 64], A_s, cluster_mask=0b11)   # both blocks of the cluster receive the tile")
def copy_cluster(src: Any, dst: Any, *, dst_block: Any = None, cluster_mask: Any = None, remote_barrier: Any = None,
                 eviction_policy: str | None = None, coalesced_width: int | None = None,
                 annotations: dict[str, Any] | None = None, loop_layout: Any = None) -> Emitted:
    """dst = src within a cluster (sm_90), to the shared memory of other blocks; executed by all threads of the block.

    src: with cluster_mask, a region or start element in global memory; with dst_block, a tile in shared memory.
    dst: a tile in shared memory, of src's extents; of src's dtype with cluster_mask or remote_barrier.
    cluster_mask: one multicast load from global memory to the shared memory of all blocks in the mask; all wait for it.
    dst_block: a copy from shared memory to the shared memory of the block of that rank.  With remote_barrier these are bulk
    copies whose bytes that block's barrier expects and counts; the source must be written and fenced before.  Rows that are no
    multiples of 16 bytes are stored by threads, which count them there.  Without it, threads copy element by element, and the
    result is visible after T.cluster_sync().  Raises copy-option, cluster-mask, barrier-operand.
    """
    b, k = need_builder("T.copy_cluster"), need_kernel("T.copy_cluster")
    check_policy((annotations or {}).get("eviction_policy", eviction_policy))
    if (dst_block is None) == (cluster_mask is None):
        raise error("copy-option", "T.copy_cluster takes either «dst_block or cluster_mask»",
                    found=f"{'neither' if dst_block is None else 'both'}", hint="use T.copy for a copy within the block")
    if cluster_mask is not None:
        mask = _mask(cluster_mask, "T.copy_cluster")
        bar, parity = _own_barrier(b, k)
        cluster_sync()  # all blocks have finished using the destination
        tma_copy(src, dst, barrier=bar, cluster_mask=mask, eviction_policy=eviction_policy, annotations=annotations)
        mbarrier_arrive(bar)
        mbarrier_wait_parity(bar, parity)
        b.store(parity.buffer, parity.indices, parity ^ 1)
        return Emitted()
    s, d = pair(src, dst, "copy_cluster")
    if s.buffer.scope_name not in SHARED or d.buffer.scope_name not in SHARED:
        raise error("copy-option", "T.copy_cluster to another block moves «shared to shared memory», found "
                    f"{s.buffer.scope_name} to {d.buffer.scope_name}")
    rank = cast(convert(dst_block), "uint32")
    if remote_barrier is not None:
        there = barrier_of(remote_barrier, "T.copy_cluster")
        plan, attrs = options_from(CopyPlan, annotations, dst_block=rank, barrier=(there.buffer, there.indices[0]))
        return emit_op(b, Copy(s, d, attrs, plan, span=b.here()))
    wide, into = non_unit(s.extents), non_unit(d.extents)
    with Parallel(*[s.extents[i] for i in wide], coalesced_width=coalesced_width, loop_layout=loop_layout) as at:
        source, target = list(s.mins), list(d.mins)
        for v, i, j in zip(at, wide, into):  # one index unpacks to itself
            source[i], target[j] = source[i] + v, target[j] + v
        value = cast(s.buffer[tuple(source)], d.buffer.dtype)
        emit_call("cluster_store", (AddressOf(d.buffer, tuple(target)), rank, value))
    return Emitted()


def _own_barrier(b: Any, k: Any) -> tuple[Load, Load]:
    """A barrier for the blocking loads of one place in a kernel, and its phase parity.  Both stand at the kernel's top."""
    bar = Buffer(b.fresh_name("arrived"), (1,), DType("uint64"), BARRIER, facts=BufferFacts(arrive=(k.num_threads,)),
                 span=b.here())
    parity = Buffer(b.fresh_name("phase"), (1,), I32, VARIABLE, span=b.here())
    k.stmts[:0] = [Alloc(bar, span=b.here()), Alloc(parity, const(0), span=b.here())]
    return load(bar, (const(0),)), load(parity, (const(0),))


# ---- matrix multiplication --------------------------------------------------------------------------------------------


@example("T.wgmma_gemm(A_s, B_s, acc, clear_accum=True)   # (128, 64) @ (64, 128)", "T.wait_wgmma(0)")
def wgmma_gemm(A: Any, B: Any, C: Any, transpose_A: bool = False, transpose_B: bool = False,
               policy: GemmWarpPolicy = GemmWarpPolicy.Square, clear_accum: Any = False,
               annotations: dict[str, Any] | None = None) -> Emitted:
    """T.gemm by asynchronous wgmma (sm_90a), committed as one group.  It does not wait; T.wait_wgmma(n) does.

    Before the wait, the program must not access C, an A in registers, or the shared operands.  Raises wgmma-gemm when no
    instruction fits the tiles, and the errors of T.gemm.
    A: (M, K), shared or fragment; B: (K, N), shared; C: (M, N) fragment.  transpose_A, transpose_B: (K, M), (N, K).  An A of
    8 rows in shared memory stands for every 8 rows of C: row i of C gets row i % 8 of A, for GEMMs of few rows.
    """
    b = need_builder("T.wgmma_gemm")
    clearing = accumulator_clearing(clear_accum)
    a, b_, c = (whole_region(x, f"operand {n} of T.wgmma_gemm") for x, n in ((A, "A"), (B, "B"), (C, "C")))
    for r in (a, b_, c):
        check_inside(r)
    plan, attrs = options_from(GemmSchedule, annotations, wait=-1)
    return emit_op(b, Gemm(a, b_, c, flag(transpose_A, "transpose_A"), flag(transpose_B, "transpose_B"), warp_policy(policy),
                           clearing, attrs, plan, span=b.here()))


wgmma_mma = wgmma_gemm


@example("T.wgmma_gemm(A_s, B_s, acc, clear_accum=True)", "T.wait_wgmma(0)")
def wait_wgmma(n: int) -> Emitted:
    """Wait until at most n of this warp group's committed wgmma groups are in flight."""
    return emit_call("wgmma_wait", n=_small(n, "n", "T.wait_wgmma"))


warpgroup_arrive = event("warpgroup_arrive", "wgmma.fence: orders earlier writes of registers before the following wgmma, "
                         "which may then use them.", op="wgmma_fence")
warpgroup_commit_batch = event("warpgroup_commit_batch", "wgmma.commit_group: commits the wgmma issued so far as a group.",
                               op="wgmma_commit")


@example("T.wgmma_gemm(A_s, B_s, acc, clear_accum=True)", "T.warpgroup_wait(0)")
def warpgroup_wait(n: int) -> Emitted:
    """T.wait_wgmma."""
    return emit_call("wgmma_wait", n=_small(n, "n", "T.warpgroup_wait"))


@example("T.warpgroup_fence_operand(acc, num_regs=128)")
def warpgroup_fence_operand(buf_or_ptr: Any, offset: Any = 0, num_regs: Any = None, dtype: Any = None) -> Emitted:
    """Compiler fence: no access of these registers moves across it.

    buf_or_ptr: a fragment or local buffer of any shape, or the address of its first element.
    num_regs: 32-bit registers from element `offset` on (default: all).  Raises fence-operand.
    """
    need_builder("T.warpgroup_fence_operand")
    x = buf_or_ptr
    if isinstance(x, AddressOf):
        if num_regs is None:
            raise error("fence-operand", "T.warpgroup_fence_operand on an address needs num_regs",
                        expected="num_regs with an address", found="none")
        buffer, offset = x.buffer, x.indices[-1] + offset
    else:
        buffer = operand(x, "the operand of T.warpgroup_fence_operand").buffer
    if dtype is not None and DType(dtype) != buffer.dtype:
        raise error("fence-operand", f"T.warpgroup_fence_operand: `{buffer.name}` holds «{buffer.dtype}», dtype says ‹{dtype}›")
    if buffer.scope_name == FRAGMENT:
        return emit_call("wgmma_pin", (AddressOf(buffer, tuple(const(0) for _ in buffer.shape)),), count=0)
    if buffer.scope_name != LOCAL or not buffer.is_static or len(buffer.shape) != 1:
        raise error("fence-operand", f"T.warpgroup_fence_operand takes registers, `{buffer.name}` is in {buffer.scope_name} "
                                     "memory",
                    expected="a fragment or T.alloc_local((n,), …)", found=f"`{buffer.name}` in {buffer.scope_name} memory")
    n = num_regs * 32 // buffer.dtype.bits if isinstance(num_regs, int) else int(buffer.shape[0])
    if num_regs is not None and not isinstance(num_regs, int):
        raise error("fence-operand", f"num_regs is «a number known while compiling», found {describe(num_regs)}")
    return emit_call("wgmma_pin", (AddressOf(buffer, (cast(convert(offset), I32),)),), count=n)


# ---- registers, clusters, launches --------------------------------------------------------------------------------------


@example("T.set_max_nreg(240, 1)")
def set_max_nreg(n: int, is_inc: Any) -> Emitted:
    """Raise (is_inc) or lower the registers per thread of the executing warp group (setmaxnreg).  Raises register-count."""
    return emit_call("set_max_nreg", n=_registers(n), inc=flag(is_inc, "is_inc"))


def _registers(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n % 8 or not 24 <= n <= 256:
        raise error("register-count", f"a register count is a multiple of 8 from 24 to 256, found {n!r}")
    return n


@example("T.inc_max_nreg(240)")
def inc_max_nreg(n: int) -> Emitted:
    """T.set_max_nreg(n, True)."""
    return set_max_nreg(n, True)


@example("T.dec_max_nreg(24)")
def dec_max_nreg(n: int) -> Emitted:
    """T.set_max_nreg(n, False)."""
    return set_max_nreg(n, False)


@example("T.annotate_producer_reg_dealloc(24)")
def annotate_producer_reg_dealloc(n: int = 24) -> Emitted:
    """Registers per producer thread under warp specialisation (sm_90a).  A count that does not fit is ignored."""
    need_kernel("T.annotate_producer_reg_dealloc").set(producer_registers=_registers(n))
    return Emitted()


@example("T.annotate_consumer_reg_alloc(240)")
def annotate_consumer_reg_alloc(n: int = 240) -> Emitted:
    """Registers per consumer thread under warp specialisation (sm_90a).  A count that does not fit is ignored."""
    need_kernel("T.annotate_consumer_reg_alloc").set(consumer_registers=_registers(n))
    return Emitted()


@example("T.no_set_max_nreg()")
def no_set_max_nreg() -> Emitted:
    """Disable automatic register reallocation between warp groups."""
    need_kernel("T.no_set_max_nreg").set(keep_registers=True)
    return Emitted()


disable_warp_group_reg_alloc = no_set_max_nreg


cluster_arrive = event("cluster_arrive", "Arrive at the cluster's barrier.  This thread's earlier writes are visible to "
                       "threads that wait for it.", "T.cluster_arrive()\nT.cluster_wait()")
cluster_arrive_relaxed = event("cluster_arrive_relaxed", "Arrive at the cluster's barrier without making memory visible.",
                               "T.cluster_arrive_relaxed()\nT.cluster_wait()", op="cluster_arrive", relaxed=True)
cluster_wait = event("cluster_wait", "Wait until all threads of the cluster have arrived.",
                     "T.cluster_arrive()\nT.cluster_wait()")
cluster_sync = event("cluster_sync", "Barrier of all threads of the cluster.")


@example("rank = T.block_rank_in_cluster()")
def block_rank_in_cluster() -> Expr:
    """Rank of the block in its cluster: int32."""
    b = need_builder("T.block_rank_in_cluster")
    return cast(call("cluster_rank", (), "uint32", span=b.here()), I32)


pdl_trigger = event("pdl_trigger", "PDL: allow the next kernel on the stream to start (sm_90; elsewhere it starts after this "
                    "one ends).")


@example("T.pdl_sync()")
def pdl_sync() -> Emitted:
    """PDL: wait until the previous kernels on the stream have ended and their memory is visible.

    A kernel that calls it may start before they end (sm_90; elsewhere it starts after them), so its statements before this
    call must not depend on their results.
    """
    k = need_kernel("T.pdl_sync")
    k.set(pdl=True)
    return emit_call("pdl_sync")


__all__ = ["annotate_consumer_reg_alloc", "annotate_producer_reg_dealloc", "block_rank_in_cluster", "cluster_arrive",
           "cluster_arrive_relaxed", "cluster_sync", "cluster_wait", "copy_cluster", "dec_max_nreg",
           "disable_warp_group_reg_alloc", "inc_max_nreg", "no_set_max_nreg", "pdl_sync", "pdl_trigger", "set_max_nreg",
           "tma_copy", "tma_store_arrive", "tma_store_wait", "wait_wgmma", "warpgroup_arrive", "warpgroup_commit_batch",
           "warpgroup_fence_operand", "warpgroup_wait", "wgmma_gemm", "wgmma_mma"]
