"""Hopper by hand: TMA copies, asynchronous matrix products, warp groups' registers, clusters, dependent launches."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import (I32, AddressOf, Alloc, Buffer, Const, Expr, Load, call, cast, const, convert, load, BufferFacts,
                         FRAGMENT, GLOBAL, LOCAL, SHARED, VARIABLE, BARRIER)
from tilelang.ir import dtype as DType
from tilelang.ops import Copy, Gemm, GemmWarpPolicy
from tilelang.ops.plans import CopyPlan, GemmSchedule

from .barriers import barrier_of, mbarrier_arrive, mbarrier_wait_parity
from .tracing.builder import Emitted, need_builder
from .tracing.flags import flag
from .kernel import need_kernel
from .loops import Parallel, options_from
from .tracing.regions import check_inside, non_unit, operand, pair, whole_region
from .tracing.state import describe, error
from .thread import emit_call
from .tile import accumulator_clearing, check_policy, emit_op, warp_policy



# ---- copies ---------------------------------------------------------------------------------------------------------


def _mask(mask: Any, what: str) -> int | None:
    if mask is None:
        return None
    if isinstance(mask, (bool, float)) or not isinstance(mask, (int, np.integer)) or not 0 < int(mask) < 1 << 16:
        raise error("cluster-mask", f"{what}: cluster_mask is a positive bit mask of ranks in the cluster, found {mask!r}",
                    found=repr(mask))
    k = need_kernel(what)
    dims = k.plan.cluster or (1, 1, 1)
    size = dims[0] * dims[1] * dims[2]
    if int(mask) >> size:
        raise error("cluster-mask", f"{what}: cluster_mask {int(mask):#x} names blocks beyond the {size} of the cluster",
                    expected=f"ranks 0 to {size - 1}", found=f"{int(mask):#x}",
                    hint="launch with T.ClusterKernel(..., cluster_dims=...)")
    return int(mask)


def tma_copy(src: Any, dst: Any, *, barrier: Any = None, cluster_mask: Any = None, leader_scope_threads: Any = None,
             eviction_policy: str | None = None, annotations: dict[str, Any] | None = None) -> Emitted:
    """A copy by TMA (sm_90), issued by one of the threads that execute it, and not waited for.

    Global to shared: `barrier` (an element of T.alloc_barrier) expects the bytes and counts them when they come; no
    arrival.  Shared to global: the copy is committed; T.tma_store_wait waits.  cluster_mask: the lowest rank in the mask
    loads for all of them, each of which executes the same copy and expects the bytes on its own barrier; others load for
    themselves.  leader_scope_threads: one thread of each so many issues it (default: of all that execute it).
    Raises cluster-mask, leader-scope, barrier-operand, copy-option; tma-copy for tiles TMA cannot move.
    """
    b = need_builder("T.tma_copy")
    check_policy((annotations or {}).get("eviction_policy", eviction_policy))
    mask = _mask(cluster_mask, "T.tma_copy")
    n = leader_scope_threads
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n <= 0 or n % 32):
        raise error("leader-scope", f"leader_scope_threads is a positive multiple of 32, found {n!r}",
                    found=repr(n))
    s, d = pair(src, dst, "tma_copy")
    loads = s.buffer.scope_name == GLOBAL and d.buffer.scope_name in SHARED
    if not loads and not (s.buffer.scope_name in SHARED and d.buffer.scope_name == GLOBAL):
        raise error("copy-option", f"T.tma_copy moves tiles between global and shared memory, found {s.buffer.scope_name} "
                                   f"to {d.buffer.scope_name}",
                    expected="global and shared memory", found=f"{s.buffer.scope_name} to {d.buffer.scope_name}",
                    hint="use T.copy")
    if loads != (barrier is not None):
        raise error("copy-option", "a load by T.tma_copy needs the barrier that its bytes arrive on" if loads else
                    "a store by T.tma_copy takes no barrier",
                    expected=f"{'barrier=bar[i]' if loads else 'no barrier'}", found=f"{'none' if loads else 'a barrier'}",
                    hint="barrier=bar[i] of T.alloc_barrier" if loads else
                    "T.tma_store_wait() waits for stores")
    if mask is not None and not loads:
        raise error("copy-option", "cluster_mask is for loads",
                    expected="a load", found="a store with cluster_mask")
    bar = barrier_of(barrier, "T.tma_copy") if loads else None
    plan, attrs = options_from(
        CopyPlan, annotations, tma=True, by_hand=True, eviction_policy=eviction_policy, cluster_mask=mask, leader_scope=n,
        expect=True if loads else None, barrier=None if bar is None else (bar.buffer, bar.indices[0]))
    return emit_op(b, Copy(s, d, attrs, plan, span=b.here()))


def tma_store_arrive() -> Emitted:
    """The bulk stores this thread has issued become its next group (T.tma_copy does so already)."""
    return emit_call("bulk_commit")


def tma_store_wait(count: int = 0, read: bool = True) -> Emitted:
    """Wait until at most `count` groups of this thread's stores still read shared memory (read=False: are under way)."""
    return emit_call("bulk_wait", n=_small(count, "count", "T.tma_store_wait"), read=flag(read, "read"))


def _small(n: Any, name: str, what: str) -> int:
    if isinstance(n, Const):
        n = n.value
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
        raise error("wait-count", f"{what}: {name} is a number of groups known while compiling, found {describe(n)}",
                    found=describe(n))
    return int(n)


def copy_cluster(src: Any, dst: Any, *, dst_block: Any = None, cluster_mask: Any = None, remote_barrier: Any = None,
                 eviction_policy: str | None = None, coalesced_width: int | None = None,
                 annotations: dict[str, Any] | None = None, loop_layout: Any = None) -> Emitted:
    """A copy within a cluster (sm_90).

    cluster_mask: global to shared memory of all blocks in the mask by one load, waited for by all.  dst_block: shared to
    shared memory of the block of that rank; with remote_barrier as bulk copies that its barrier expects and counts (the
    source must be written and fenced before); else element by element, visible after T.cluster_sync().
    """
    b, k = need_builder("T.copy_cluster"), need_kernel("T.copy_cluster")
    check_policy((annotations or {}).get("eviction_policy", eviction_policy))
    if (dst_block is None) == (cluster_mask is None):
        raise error("copy-option", "T.copy_cluster takes either dst_block or cluster_mask",
                    expected="dst_block or cluster_mask", found=f"{'neither' if dst_block is None else 'both'}",
                    hint="use T.copy for a copy within the block")
    if cluster_mask is not None:
        mask = _mask(cluster_mask, "T.copy_cluster")
        bar, parity = _own_barrier(b, k)
        cluster_sync()  # nobody uses the destination any more
        tma_copy(src, dst, barrier=bar, cluster_mask=mask, eviction_policy=eviction_policy, annotations=annotations)
        mbarrier_arrive(bar)
        mbarrier_wait_parity(bar, parity)
        b.store(parity.buffer, parity.indices, parity ^ 1)
        return Emitted()
    s, d = pair(src, dst, "copy_cluster")
    if s.buffer.scope_name not in SHARED or d.buffer.scope_name not in SHARED:
        raise error("copy-option", f"T.copy_cluster to another block moves shared to shared memory, found "
                                   f"{s.buffer.scope_name} to {d.buffer.scope_name}",
                    expected="shared to shared memory", found=f"{s.buffer.scope_name} to {d.buffer.scope_name}")
    rank = cast(convert(dst_block), "uint32")
    if remote_barrier is not None:
        there = barrier_of(remote_barrier, "T.copy_cluster")
        plan, attrs = options_from(CopyPlan, annotations, dst_block=rank, barrier=(there.buffer, there.indices[0]))
        return emit_op(b, Copy(s, d, attrs, plan, span=b.here()))
    wide, into = non_unit(s.extents), non_unit(d.extents)
    frame = Parallel(*[s.extents[i] for i in wide], coalesced_width=coalesced_width, loop_layout=loop_layout)
    got = b.enter(frame)
    at = got if isinstance(got, (tuple, list)) else (got,)
    source, target = list(s.mins), list(d.mins)
    for v, i, j in zip(at, wide, into):
        source[i], target[j] = source[i] + v, target[j] + v
    value = cast(s.buffer[tuple(source)], d.buffer.dtype)
    emit_call("cluster_store", (AddressOf(d.buffer, tuple(target)), rank, value))
    b.exit(frame)
    return Emitted()


def _own_barrier(b: Any, k: Any) -> tuple[Load, Load]:
    """A barrier for the blocking loads of one place in a kernel, and the parity of its phase; both at the kernel's top."""
    bar = Buffer(b.fresh_name("arrived"), (1,), DType("uint64"), BARRIER, facts=BufferFacts(arrive=(k.num_threads,)),
                 span=b.here())
    parity = Buffer(b.fresh_name("phase"), (1,), I32, VARIABLE, span=b.here())
    k.stmts[:0] = [Alloc(bar, span=b.here()), Alloc(parity, const(0), span=b.here())]
    return load(bar, (const(0),)), load(parity, (const(0),))


# ---- matrix products --------------------------------------------------------------------------------------------------


def wgmma_gemm(A: Any, B: Any, C: Any, transpose_A: bool = False, transpose_B: bool = False,
               policy: GemmWarpPolicy = GemmWarpPolicy.Square, clear_accum: Any = False,
               annotations: dict[str, Any] | None = None) -> Emitted:
    """T.gemm by warp-group instructions (sm_90a), committed as one group and not waited for: T.wait_wgmma(n) does.

    Until then C, A in registers and the shared operands must not be touched.  Raises wgmma-gemm when no instruction
    suits the tiles, and what T.gemm raises.
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


def wait_wgmma(n: int) -> Emitted:
    """Wait until at most n of this warp group's committed wgmma groups are in flight."""
    return emit_call("wgmma_wait", n=_small(n, "n", "T.wait_wgmma"))


def warpgroup_arrive() -> Emitted:
    """Registers that were written may be used by the following wgmma (wgmma.fence)."""
    return emit_call("wgmma_fence")


def warpgroup_commit_batch() -> Emitted:
    """The wgmma issued so far become a group (wgmma.commit_group)."""
    return emit_call("wgmma_commit")


def warpgroup_wait(n: int) -> Emitted:
    """T.wait_wgmma."""
    return emit_call("wgmma_wait", n=_small(n, "n", "T.warpgroup_wait"))


def warpgroup_fence_operand(buffer_or_ptr: Any, offset: Any = 0, num_regs: Any = None, dtype: Any = None) -> Emitted:
    """The compiler moves no access of these registers across.  buffer_or_ptr: fragment, local buffer, or its address.

    num_regs: 32-bit registers from element `offset` on (default: all).  Raises fence-operand.
    """
    need_builder("T.warpgroup_fence_operand")
    x = buffer_or_ptr
    if isinstance(x, AddressOf):
        if num_regs is None:
            raise error("fence-operand", "T.warpgroup_fence_operand on an address needs num_regs",
                        expected="num_regs beside an address", found="none")
        buffer, offset = x.buffer, x.indices[-1] + offset
    else:
        buffer = operand(x, "the operand of T.warpgroup_fence_operand").buffer
    if dtype is not None and DType(dtype) != buffer.dtype:
        raise error("fence-operand", f"T.warpgroup_fence_operand: `{buffer.name}` holds {buffer.dtype}, dtype says {dtype}",
                    expected=str(buffer.dtype), found=str(dtype))
    if buffer.scope_name == FRAGMENT:
        return emit_call("wgmma_pin", (AddressOf(buffer, tuple(const(0) for _ in buffer.shape)),), count=0)
    if buffer.scope_name != LOCAL or not buffer.is_static or len(buffer.shape) != 1:
        raise error("fence-operand", f"T.warpgroup_fence_operand takes registers, `{buffer.name}` is in {buffer.scope_name} "
                                     "memory",
                    expected="a fragment or T.alloc_local((n,), …)", found=f"`{buffer.name}` in {buffer.scope_name} memory")
    n = num_regs * 32 // buffer.dtype.bits if isinstance(num_regs, int) else int(buffer.shape[0])
    if num_regs is not None and not isinstance(num_regs, int):
        raise error("fence-operand", f"num_regs is a number known while compiling, found {describe(num_regs)}",
                    expected="a number known while compiling", found=describe(num_regs))
    return emit_call("wgmma_pin", (AddressOf(buffer, (cast(convert(offset), I32),)),), count=n)


# ---- registers, clusters, launches --------------------------------------------------------------------------------------


def set_max_nreg(reg_count: int, is_inc: Any) -> Emitted:
    """Registers of the executing warp group's threads from here on: raised (is_inc) or lowered.  Raises register-count."""
    return emit_call("set_max_nreg", n=_registers(reg_count), inc=flag(is_inc, "is_inc"))


def _registers(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n % 8 or not 24 <= n <= 256:
        raise error("register-count", f"a register count is a multiple of 8 from 24 to 256, found {n!r}",
                    found=repr(n))
    return n


def inc_max_nreg(reg_count: int) -> Emitted:
    """T.set_max_nreg(reg_count, True)."""
    return set_max_nreg(reg_count, True)


def dec_max_nreg(reg_count: int) -> Emitted:
    """T.set_max_nreg(reg_count, False)."""
    return set_max_nreg(reg_count, False)


def annotate_producer_reg_dealloc(reg_count: int = 24) -> Emitted:
    """Registers a thread of the producer keeps under warp specialisation (sm_90a); counts that do not fit are not used."""
    need_kernel("T.annotate_producer_reg_dealloc").set(producer_registers=_registers(reg_count))
    return Emitted()


def annotate_consumer_reg_alloc(reg_count: int = 240) -> Emitted:
    """Registers a thread of consumers gets under warp specialisation (sm_90a); counts that do not fit are not used."""
    need_kernel("T.annotate_consumer_reg_alloc").set(consumer_registers=_registers(reg_count))
    return Emitted()


def no_set_max_nreg() -> Emitted:
    """The compiler moves no registers between warp groups by itself."""
    need_kernel("T.no_set_max_nreg").set(keep_registers=True)
    return Emitted()


disable_warp_group_reg_alloc = no_set_max_nreg


def cluster_arrive() -> Emitted:
    """Arrive at the barrier of the cluster; what was written is visible to who waits."""
    return emit_call("cluster_arrive")


def cluster_arrive_relaxed() -> Emitted:
    """Arrive at the barrier of the cluster, making no memory visible."""
    return emit_call("cluster_arrive", relaxed=True)


def cluster_wait() -> Emitted:
    """Wait until all threads of the cluster have arrived."""
    return emit_call("cluster_wait")


def cluster_sync() -> Emitted:
    """Barrier of all threads of the cluster."""
    return emit_call("cluster_sync")


def block_rank_in_cluster() -> Expr:
    """Rank of the block in its cluster: int32."""
    b = need_builder("T.block_rank_in_cluster")
    return cast(call("cluster_rank", (), "uint32", span=b.here()), I32)


def pdl_trigger() -> Emitted:
    """Launches that depend on this one may start (sm_90; elsewhere they start after it ends)."""
    return emit_call("pdl_trigger")


def pdl_sync() -> Emitted:
    """Wait until the launches before have ended and their memory is visible.

    The kernel then may start before they end (sm_90; elsewhere it starts after them): what it does before this point must
    not depend on them.
    """
    k = need_kernel("T.pdl_sync")
    k.set(pdl=True)
    return emit_call("pdl_sync")


__all__ = ["annotate_consumer_reg_alloc", "annotate_producer_reg_dealloc", "block_rank_in_cluster", "cluster_arrive",
           "cluster_arrive_relaxed", "cluster_sync", "cluster_wait", "copy_cluster", "dec_max_nreg",
           "disable_warp_group_reg_alloc", "inc_max_nreg", "no_set_max_nreg", "pdl_sync", "pdl_trigger", "set_max_nreg",
           "tma_copy", "tma_store_arrive", "tma_store_wait", "wait_wgmma", "warpgroup_arrive", "warpgroup_commit_batch",
           "warpgroup_fence_operand", "warpgroup_wait", "wgmma_gemm", "wgmma_mma"]
