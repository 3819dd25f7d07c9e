"""Sets of calls that several threads execute together: the lanes of a warp, the threads of a block or of a cluster.

A backend without GPU threads chooses how to run a statement by the threads that execute such a call in it together.
"""

from __future__ import annotations

from typing import Any

WARP = 32  # lanes

# Calls that read other lanes.  Source: PTX ISA, "shfl.sync", "vote.sync", "match.sync", "activemask".
SHUFFLES = ("shfl_xor", "shfl_up", "shfl_down", "shfl_idx")
VOTES = ("any_sync", "all_sync", "ballot_sync", "ballot")
MATCHES = ("match_any_sync", "match_all_sync")
EXCHANGES = (*SHUFFLES, *VOTES, *MATCHES, "activemask", "lanes_transposed")
# Votes of all threads of a block.
BLOCK_VOTES = ("syncthreads_count", "syncthreads_and", "syncthreads_or")
# Calls that return the position of a thread in the block.
LANE_NUMBERS = ("get_lane_idx", "get_warp_idx", "get_warp_idx_sync", "get_warp_group_idx", "shuffle_elect")
LANE_CALLS = EXCHANGES + LANE_NUMBERS
# Calls whose value depends on when a thread runs them: no statement is moved across them.
CLOCKS = ("clock", "clock64", "globaltimer")
# Instructions of a warp or a warp group on matrices.
MATRIX_CALLS = ("ldmatrix", "stmatrix", "mma", "wgmma")
# Calls that reach other blocks of a cluster.
CLUSTER_CALLS = ("cluster_rank", "cluster_size", "cluster_arrive", "cluster_wait", "cluster_sync", "cluster_store",
                 "mbarrier_arrive_remote")
# Calls whose meaning depends on the number of threads of a block.
COUNTS_THREADS = frozenset({
    *LANE_CALLS, *BLOCK_VOTES, *MATRIX_CALLS, *CLUSTER_CALLS, "in_warp_groups", "elect_one", "warp_uniform", "named_barrier",
    "named_barrier_arrive", "mbarrier_init", "mbarrier_arrive", "mbarrier_wait", "mbarrier_expect_tx",
    "mbarrier_arrive_expect_tx", "cp_async_mbarrier_arrive"})
# A condition and the text of the error if it is false: an assert statement of a kernel on the CPU target.
ASSERTION = "assertion"
# Calls whose effect happens once for each thread, even if their arguments do not depend on the thread.
PER_THREAD = frozenset({
    *(f"atomic_{kind}" for kind in ("add", "max", "min", "or", "and", "xor", "inc", "dec", "cas", "exchange",
                                   "addx2", "addx4")),
    "printf", "mbarrier_arrive", "mbarrier_arrive_expect_tx", "mbarrier_expect_tx", "cp_async_mbarrier_arrive",
    "mbarrier_arrive_remote", "tma_load"})

# Calls -> the names that users write, where the two differ.
_PUBLIC_NAMES = {
    "shfl_idx": "shfl_sync", "named_barrier": "sync_threads", "ldmatrix": "ptx_ldmatrix", "stmatrix": "ptx_stmatrix",
    "mma": "ptx_mma", "mbarrier_wait": "mbarrier_wait_parity", "mbarrier_init": "ptx_init_barrier_thread_count",
    "mbarrier_arrive_remote": "mbarrier_arrive", "cp_async_mbarrier_arrive": "cp_async_barrier_noinc",
    "cp_async_commit": "ptx_commit_group", "cp_async_wait": "ptx_wait_group", "bulk_commit": "tma_store_arrive",
    "bulk_wait": "tma_store_wait", "fence_mbarrier_init": "ptx_fence_barrier_init", "wgmma": "ptx_wgmma_ss",
    "wgmma_fence": "warpgroup_arrive", "wgmma_commit": "warpgroup_commit_batch", "wgmma_wait": "wait_wgmma",
    "wgmma_pin": "warpgroup_fence_operand", "wgmma_descriptor": "initialize_wgmma_descriptor",
    "cluster_rank": "block_rank_in_cluster", "cluster_store": "copy_cluster",
}  # fmt: skip


def public_name(op: str) -> str:
    """The name of a call as users write it: T.shfl_sync."""
    return f"T.{_PUBLIC_NAMES.get(op, op)}"


def linear_thread(launch: Any) -> Any:
    """The index of a thread in its block, over the dimensions that have more than one thread: tx + ty * X + tz * X * Y."""
    x, y, z = launch.threads
    tx, ty, tz = launch.thread_vars
    out = tx + ty * x if y > 1 else tx
    return out + tz * (x * y) if z > 1 else out
