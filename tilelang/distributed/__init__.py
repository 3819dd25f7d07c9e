"""Kernels on several devices: one process for each rank, started by torchrun or torch.multiprocessing.

Example:

    import tilelang.distributed as dist
    dist.init_dist()                                  # in every process
    x = dist.create_tensor((n,), torch.bfloat16)      # symmetric: on every rank
    dist.all_reduce(x)
"""

from __future__ import annotations

from .collectives import all_gather, all_reduce, reduce_scatter
from .host import barrier, create_tensor, destroy_dist, init_dist, num_ranks, on_rank, rank, synchronize
from .overlap import all_gather_matmul, matmul_reduce_scatter
from .streams import (LocalRanks, create_mapped_tensor, get_local_ipc_handle, init_local, perf_fn, set_signal,
                      wait_eq)

init_distributed = init_dist
create_dist_tensor = create_tensor

__all__ = ["all_gather", "all_gather_matmul", "all_reduce", "barrier", "create_dist_tensor", "create_mapped_tensor",
           "create_tensor", "destroy_dist", "get_local_ipc_handle", "init_dist", "init_distributed", "init_local",
           "LocalRanks", "matmul_reduce_scatter", "num_ranks", "on_rank", "perf_fn", "rank", "reduce_scatter",
           "set_signal", "synchronize", "wait_eq"]
