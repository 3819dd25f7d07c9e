"""Kernels on several devices: one process for each rank, started by torchrun or torch.multiprocessing.

Example:

    import tilelang.distributed as dist
    dist.init_dist()                                  # in every process
    x = dist.create_tensor((n,), torch.bfloat16)      # symmetric: on every rank
    dist.all_reduce(x)
"""

from __future__ import annotations

from .attention import gathered_attention, ulysses_attention
from .collectives import all_gather, all_reduce, all_to_all, all_to_all_rows, reduce_scatter, send_rows
from .experts import combine, dispatch, moe
from .host import barrier, create_tensor, destroy_dist, init_dist, num_ranks, on_rank, rank, synchronize
from .llama import llama_block, llama_decode
from .overlap import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .streams import (LocalRanks, create_mapped_tensor, get, get_local_ipc_handle, init_local, perf_fn, put, set_signal,
                      wait_eq)

init_distributed = init_dist
create_dist_tensor = create_tensor

__all__ = ["all_gather", "all_gather_matmul", "all_reduce", "all_to_all", "all_to_all_rows", "barrier", "combine",
           "create_dist_tensor", "create_mapped_tensor", "create_tensor", "destroy_dist", "dispatch", "gathered_attention",
           "get", "get_local_ipc_handle", "init_dist", "init_distributed", "init_local", "llama_block", "llama_decode",
           "LocalRanks", "matmul_all_reduce", "matmul_reduce_scatter", "moe", "num_ranks", "on_rank", "perf_fn", "put", "rank",
           "reduce_scatter", "send_rows", "set_signal", "synchronize", "ulysses_attention", "wait_eq"]
