"""Kernels that move elements to or from the next rank by bulk copies (TMA) with several tiles in flight; see distributed.py."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

# blocks, elements of a tile, stages, tiles whose load has been started before the first is stored
FORMS = ((32, 4096, 12, 8), (64, 4096, 12, 8), (132, 4096, 12, 8), (132, 8192, 6, 4), (132, 2048, 24, 16))


def bulk_mover(n: int, put: bool, blocks: int, chunk: int, stages: int, ahead: int) -> Any:
    """A kernel of one warp per block that moves n int32 elements (put: to the next rank, else from it).

    n: a multiple of chunk.  Both tensors are passed as rows of one tile, and both are symmetric, so that both sides are bulk
    copies of a whole tile.
    """
    tiles, each = n // chunk, -(-(n // chunk) // blocks)

    @T.prim_func
    def move(mine: T.SymmTensor((tiles, chunk), "int32"), theirs: T.SymmTensor((tiles, chunk), "int32")):
        with T.Kernel(blocks, threads=32) as b:
            held, full = T.alloc_shared((stages, chunk), "int32"), T.alloc_barrier([1] * stages)
            there = T.remote(theirs, (T.get_rank() + 1) % T.get_num_ranks())
            src, dst = (mine, there) if put else (there, mine)
            for k in T.serial(each + ahead):
                if k < each and k * blocks + b < tiles:
                    T.tma_store_wait(stages - 1 - ahead)
                    T.tma_copy(src[k * blocks + b, :], held[k % stages, :], barrier=full[k % stages])
                    if T.get_thread_binding() == 0:
                        T.mbarrier_arrive(full[k % stages])
                if k >= ahead and (k - ahead) * blocks + b < tiles:
                    T.mbarrier_wait_parity(full[(k - ahead) % stages], (k - ahead) // stages % 2)
                    T.tma_copy(held[(k - ahead) % stages, :], dst[(k - ahead) * blocks + b, :])
            T.tma_store_wait(0, read=False)

    return move
