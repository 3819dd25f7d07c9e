"""Rows of the device operations in INTRINSICS: barriers, async copies, matrix moves, shuffles, votes, atomics.

The CUDA text of a row is a format string over {0}, {1}, … (arguments), {args} (all of them), {dtype} (result type) and
the Call's options by name; it calls the functions of codegen/prelude_*.cuh, which hold the PTX.  A pointer argument
(AddressOf) prints as a typed pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang.ir import AddressOf, Call, Launch, Node, Store, Var, walk

from .intrinsics import INTRINSICS, PURE, READS, SYNC, WARP, WRITES, Intrinsic, add_intrinsic
from .thread_calls import CLOCKS
from .mma import MmaRow
from .tensor_map import tensor_maps_of

ATOMIC_ORDERS = ("relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst")
ATOMIC_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "uint32", "int64", "uint64")


def _device(name: str, arity: int, effect: str, text: str) -> None:
    add_intrinsic(Intrinsic(name, arity, effect, None, {"*": text}))


def _functions(effect: str, rows: str) -> None:
    """Add rows "name arity", whose text calls the prelude's function of the same name."""
    words = rows.split()
    for name, arity in zip(words[::2], map(int, words[1::2])):
        _device(name, arity, effect, f"tl::{name}({', '.join(f'{{{k}}}' for k in range(arity))})" if arity >= 0
                else f"tl::{name}({{args}})")


# Block and warp barriers (PTX ISA, bar.sync / bar.arrive / bar.warp.sync).
_device("sync_threads", 0, SYNC, "__syncthreads()")
_functions(SYNC, "named_barrier 2  named_barrier_arrive 2")
_device("sync_warp", -1, SYNC, "__syncwarp({args})")
_device("sync_grid", 0, SYNC, "tl::sync_grid(grid_barrier_)")  # a parameter of cooperative kernels (device_program.py)
for _kind in ("count", "and", "or"):
    _device(f"syncthreads_{_kind}", 1, SYNC, f"__syncthreads_{_kind}({{0}})")

# cp.async (PTX ISA, "Non-bulk copy"): 16 bytes bypass L1 (.cg), 4 and 8 go through it (.ca).
_device("cp_async", -1, WRITES, "tl::cp_async<{bytes}>({args})")
_functions(SYNC, "cp_async_commit 0")
_device("cp_async_wait", 0, SYNC, "tl::cp_async_wait<{n}>()")
# AMD: all but the last n loads into LDS of this wave have landed (s_waitcnt vmcnt; other loads count too, so that it waits for
# more); the LDS accesses of this wave have completed (lgkmcnt).
for _name in ("wait_loads", "wait_shared"):
    add_intrinsic(Intrinsic(_name, 0, SYNC))
# AMD: the instructions of this wave are issued before those of waves of less priority (s_setprio).
add_intrinsic(Intrinsic("wave_priority", 0, SYNC))
# AMD: the compiler issues loads of LDS between the matrix instructions in front of this place, each so many of them early.
add_intrinsic(Intrinsic("loads_between", 0, SYNC))

# ldmatrix / stmatrix: lane 8*j + i gives the address of row i of matrix j.
for _name in ("ldmatrix", "stmatrix"):
    _device(_name, 2, WRITES, f"tl::{_name}_x{{num}}{{trans_suffix}}({{0}}, {{1}})")
_device("mma", 3, WRITES, "tl::{row_function}({0}, {1}, {2})")

# AMD: 16 lanes that load four elements each have them transposed: lane 4q + h gets element h of lanes q, q + 4, q + 8, q + 12.
add_intrinsic(Intrinsic("lanes_transposed", 1, WARP))

# Lanes of a warp: a value, a lane and, unless all lanes take part, the mask of those that do.
for _name, _fn in (("shfl_xor", "xor_sync"), ("shfl_up", "up_sync"), ("shfl_down", "down_sync"), ("shfl_idx", "sync")):
    _device(_name, -1, WARP, f"tl::shfl_{_fn}({{0}}, {{1}}, {{width}}, {{mask}})")
_functions(WARP, "any_sync -1  all_sync -1  ballot_sync -1  match_any_sync -1  match_all_sync -1  shuffle_elect 1")
_functions(WARP, "warp_uniform 1")  # returns its int32 argument, which is uniform in the warp
_device("ballot", 1, WARP, "tl::ballot_sync({0})")
_device("activemask", 0, WARP, "(unsigned long long)__activemask()")
for _name in CLOCKS:
    _device(_name, 0, WARP, f"tl::read_{_name}()")
for _name in ("lane_idx", "warp_idx", "warp_idx_sync", "warp_group_idx"):
    _device(f"get_{_name}", -1, PURE, f"tl::{_name}({{args}})")

# Atomics return the value before the operation.  The order becomes a fence before (release) and after (acquire).
for _name in ("add", "max", "min", "or", "and", "xor", "inc", "dec", "exchange", "store"):
    _device(f"atomic_{_name}", 2, WRITES, f"tl::atomic_{_name}{{scope_suffix}}<{{order_number}}>({{0}}, {{1}})")
# The new value, then the one that is compared.
_device("atomic_cas", 3, WRITES, "tl::atomic_cas{scope_suffix}<{order_number}>({0}, {1}, {2})")
_device("atomic_load", 1, READS, "tl::atomic_load{scope_suffix}<{order_number}>({0})")
_functions(WRITES, "atomic_addx2 2  atomic_addx4 2")

# Barriers in shared memory (PTX ISA, "mbarrier"): an argument `bar` is the address of an element of a shared.barrier
# buffer.  A wait on parity x returns when the phase of parity x has completed; a fresh barrier passes parity 1.
_functions(SYNC, """mbarrier_init 2  mbarrier_arrive 1  mbarrier_expect_tx 2  mbarrier_arrive_expect_tx 2  mbarrier_wait 2
                    fence_mbarrier_init 0  fence_proxy_async 0  fence_proxy_async_global 0""")
_device("cp_async_mbarrier_arrive", 1, SYNC, "tl::cp_async_mbarrier_arrive<{counted}>({0})")

# TMA and bulk copies (PTX ISA, "cp.async.bulk"), issued by one thread.  Tensor forms name a tensor map of the Launch in
# option `map` and have coordinates innermost first; the code generator prints them (codegen/cuda/hopper.py).  A tma_load with
# option `multicast` has a uint16 mask of CTA ranks after the coordinates: in every CTA of the mask the box is written to the
# same offset and counts on the barrier at the same offset.
TMA_CALLS = ("tma_load", "tma_store", "tma_reduce_add", "tma_prefetch")
for _name in TMA_CALLS:
    add_intrinsic(Intrinsic(_name, 0 if _name == "tma_prefetch" else -1, WRITES))
add_intrinsic(Intrinsic("tensor_map", 0, PURE))  # the map of option `map` as an argument of a function of the program
_functions(WRITES, "bulk_load 4  bulk_store 3  bulk_copy_cluster 5")  # dst, src, bytes, bar, cta
_functions(SYNC, "bulk_commit 0")
_device("bulk_wait", 0, SYNC, "tl::bulk_wait{read_suffix}<{n}>()")
CACHE_HINTS = {"evict_first": 0x12F0000000000000, "evict_last": 0x14F0000000000000, "evict_normal": 0x16F0000000000000,
               "evict_unchanged": 0x10F0000000000000}  # createpolicy.fractional of fraction 1.0

# Clusters: blocks (CTAs) that run together and reach each other's shared memory (PTX ISA, "Cluster of CTAs", "mapa",
# "barrier.cluster").  `cta` is a rank in the cluster.  The address of a shared element with a cta means the same place in
# that CTA's shared memory.  A cluster_arrive with option relaxed orders no memory.
_functions(PURE, "cluster_rank 0  cluster_size 0")
_device("cluster_arrive", 0, SYNC, "tl::cluster_arrive{relaxed_suffix}()")
_functions(SYNC, "cluster_wait 0  cluster_sync 0  mbarrier_arrive_remote 2  mbarrier_complete_remote 3")  # bar, cta, bytes
_functions(READS, "cluster_load 2")
_functions(WRITES, "cluster_store 3")

# Many devices: ranks run one program.  remote_address: where rank {1} has what this rank has at the address {0}, in a tensor
# that all ranks allocate together.  wait_signal: acquires the value at an address, of system scope, once it compares so.
SIGNAL_COMPARISONS = ("eq", "ne", "ge", "le", "gt", "lt")
_functions(PURE, "world_rank 0  world_size 0  remote_address 2")
_device("wait_signal", 2, SYNC, "tl::wait_signal<{compare_number}>({0}, {1}, {line})")
_device("rank_barrier", 1, SYNC, "tl::rank_barrier({0}, {words}, {line})")  # of the blocks of one number on all ranks
_functions(SYNC, "fence_sys 0")
# NVSHMEM: the branch where by_nvshmem holds has its call, the other one the same by the statements above (language/nvshmem.py).
# Code for CUDA keeps the first, everything else the second.  pe_barrier: one thread waits for one of each rank.
add_intrinsic(Intrinsic("by_nvshmem", 0, PURE))
_device("nvshmem", -1, WRITES, "tl::{name}({args})")
add_intrinsic(Intrinsic("pe_barrier", 0, SYNC))

# Warp groups: 128 threads, four warps whose first is a multiple of 4.
add_intrinsic(Intrinsic("in_warp_groups", 0, PURE))  # options first, count: whether this thread is in one of them
_functions(WARP, "elect_one 0")
_device("set_max_nreg", 0, SYNC, "tl::set_max_nreg<{n}, {increase}>()")
# c, a, b, whether c is added to, and for sparse rows a word of metadata; printed by codegen/cuda/wgmma.py.
add_intrinsic(Intrinsic("wgmma", -1, WRITES))
_functions(SYNC, "wgmma_fence 0  wgmma_commit 0")
_device("wgmma_wait", 0, SYNC, "tl::wgmma_wait<{n}>()")
_device("wgmma_pin", 1, WRITES, "tl::wgmma_pin<{count}>({0})")
_device("wgmma_hold", 1, WARP, "tl::wgmma_hold<{count}>({0})")
_device("wgmma_used", 1, WARP, "tl::wgmma_used<{count}>({0})")
add_intrinsic(Intrinsic("wgmma_descriptor", -1, PURE))  # address and, if any, bytes to add

# Others.
_device("source_kernel", -1, WRITES, "source_kernel({args})")  # placeholder of the user's kernel, which is printed instead
_device("keep_branch", 0, WARP, 'asm volatile("")')  # makes the `if` around it a branch instead of a selection
_device("thread_return", 0, WRITES, "return")
_device("printf", -1, WRITES, "printf({args})")
_device("trap", 0, WRITES, "__trap()")
_device("ldg", 1, READS, "__ldg({0})")
_functions(READS, "prefetch_l2 2")  # address, bytes: no thread waits for them
add_intrinsic(Intrinsic("load_shifted", 1, READS))  # 16 bytes from any element on; printed by codegen/cuda/memory.py
_functions(SYNC, "pdl_trigger 0  pdl_sync 0")  # programmatic dependent launch (PTX ISA, "griddepcontrol")
_device("fence_gpu", 0, SYNC, "__threadfence()")
_device("fence_block", 0, SYNC, "__threadfence_block()")


def call_fields(e: Call, args: Sequence[str] = ()) -> dict[str, Any]:
    """Format fields for the text of a device row: the options, and values derived from them and from the argument texts."""
    options, op = e.options, e.op
    out = {} if options is None else {k: getattr(options, k) for k in options.names}
    if op in ("ldmatrix", "stmatrix"):
        out["trans_suffix"] = "_bytes" if options.bytes else "_trans" if options.trans else ""
    elif op == "bulk_wait":
        out["read_suffix"] = "_read" if options.read else ""
    elif op == "cluster_arrive":
        out["relaxed_suffix"] = "_relaxed" if options.relaxed else ""
    elif op == "cp_async_mbarrier_arrive":
        out["counted"] = "true" if options.noinc else "false"
    elif op == "set_max_nreg":
        out["increase"] = "true" if options.inc else "false"
    elif op == "mma":
        out["row_function"] = options.row.replace(".", "_")
    elif op.startswith("atomic_") and options is not None:
        out["order_number"] = ATOMIC_ORDERS.index(options.order or "relaxed")
        out["scope_suffix"] = "_sys" if options.scope == "sys" else ""
    elif op == "wait_signal":
        out["compare_number"] = SIGNAL_COMPARISONS.index(options.compare)
    elif op.startswith("shfl_"):
        out["mask"] = args[2] if len(args) > 2 else "0xffffffffu"
    return out


_SOURCE_SECOND = ("cp_async", "ldmatrix", "bulk_load", "bulk_store", "bulk_copy_cluster",
                  "nvshmem")  # their second address is only read


def written_storages(n: Node) -> set[Var]:
    """Storages that a program or a launch may write: stored to, or given by address to anything but a copy's source."""
    out: set[Var] = set()
    maps: dict[str, Var] = {}
    for x in walk(n, Launch, Store, Call):
        if isinstance(x, Launch):
            maps |= {m.name: m.buffer.data for m in tensor_maps_of(x)}
        elif isinstance(x, Store):
            out.add(x.buffer.data)
        else:
            row = INTRINSICS.get(x.op)
            read_only = row is not None and row.effect in (PURE, READS)
            out |= {a.buffer.data for i, a in enumerate(x.args) if isinstance(a, AddressOf) and not read_only
                    and not (x.op in _SOURCE_SECOND and i == 1)}
            if x.op in ("tma_store", "tma_reduce_add", "tensor_map") and x.options.map in maps:
                out.add(maps[x.options.map])
    return out


def function_name(row: MmaRow) -> str:
    """C name of a row's wrapper: mma_m16n8k16_f16_f16_f32."""
    return row.name.replace(".", "_")
