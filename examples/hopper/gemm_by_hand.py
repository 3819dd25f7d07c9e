"""GEMM written out for Hopper (sm_90a): who loads, who computes, and the barriers between them.

T.gemm in a T.Pipelined loop comes to the same without these names; written out, every choice is the program's.

roles:   warp group 2 asks TMA for tiles, warp groups 0 and 1 multiply 64 rows each.  A slot of the ring is full when its
         bytes have come, and free when both groups have read it; one product stays under way while the next is issued.
cluster: two blocks along m share the columns of B: block 0 loads them for both, once both have room.
Sizes may be ragged; rows of A, B and C are multiples of 16 bytes, as TMA wants them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import HERE, Comparison, Place, compare, main, normal, product, product_bound, wide

import tilelang.language as T

f16, f32 = "float16", "float32"


def gemm_roles(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64, slots: int = 4):
    """C = A @ B.T; A: (m, k), B: (n, k), C: (m, n), float16, summed in float32."""
    steps = -(-k // bk)

    @T.prim_func
    def program(A: T.Tensor((m, k), f16), B: T.Tensor((n, k), f16), C: T.Tensor((m, n), f16)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=384) as (bx, by):
            As = T.alloc_shared((slots, bm, bk), f16)
            Bs = T.alloc_shared((slots, bn, bk), f16)
            Cf = T.alloc_fragment((bm, bn), f32)
            full = T.alloc_barrier([128] * slots)
            free = T.alloc_barrier([256] * slots)
            with T.ws(2):
                T.dec_max_nreg(24)
                for ko in T.serial(steps):
                    T.mbarrier_wait_parity(free[ko % slots], (ko // slots + 1) % 2)
                    T.tma_copy(A[by * bm, ko * bk], As[ko % slots, :, :], barrier=full[ko % slots])
                    T.tma_copy(B[bx * bn, ko * bk], Bs[ko % slots, :, :], barrier=full[ko % slots])
                    T.mbarrier_arrive(full[ko % slots])
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                T.clear(Cf)
                for ko in T.serial(steps):
                    T.mbarrier_wait_parity(full[ko % slots], ko // slots % 2)
                    T.wgmma_gemm(As[ko % slots, :, :], Bs[ko % slots, :, :], Cf, transpose_B=True)
                    T.wait_wgmma(1)  # all but the product just issued are done: the slot before is free
                    if ko > 0:
                        T.mbarrier_arrive(free[(ko - 1) % slots])
                T.wait_wgmma(0)
                T.copy(Cf, C[by * bm, bx * bn])

    return program


def gemm_cluster(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64, slots: int = 4):
    """C = A @ B.T with clusters of two blocks along m; the grid has an even number of rows of blocks."""
    steps, rows = -(-k // bk), -(-m // (2 * bm)) * 2

    @T.prim_func
    def program(A: T.Tensor((m, k), f16), B: T.Tensor((n, k), f16), C: T.Tensor((m, n), f16)):
        with T.ClusterKernel(T.ceildiv(n, bn), rows, cluster_dims=(1, 2), threads=384) as (bx, by):
            As = T.alloc_shared((slots, bm, bk), f16)
            Bs = T.alloc_shared((slots, bn, bk), f16)
            Cf = T.alloc_fragment((bm, bn), f32)
            full = T.alloc_barrier([128] * slots)
            free = T.alloc_barrier([256] * slots)
            free_in_both = T.alloc_cluster_barrier([512] * slots)  # that of block 0
            rank = T.block_rank_in_cluster()
            with T.ws(2):
                for ko in T.serial(steps):
                    T.mbarrier_wait_parity(free[ko % slots], (ko // slots + 1) % 2)
                    T.tma_copy(A[by * bm, ko * bk], As[ko % slots, :, :], barrier=full[ko % slots])
                    if rank == 0:
                        T.mbarrier_wait_parity(free_in_both[ko % slots], (ko // slots + 1) % 2)
                    T.tma_copy(B[bx * bn, ko * bk], Bs[ko % slots, :, :], barrier=full[ko % slots], cluster_mask=0b11)
                    T.mbarrier_arrive(full[ko % slots])
            with T.ws(0, 1):
                T.clear(Cf)
                for ko in T.serial(steps):
                    T.mbarrier_wait_parity(full[ko % slots], ko // slots % 2)
                    T.wgmma_gemm(As[ko % slots, :, :], Bs[ko % slots, :, :], Cf, transpose_B=True)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(free[ko % slots])
                    T.mbarrier_arrive(free_in_both[ko % slots], cta_id=0)
                T.copy(Cf, C[by * bm, bx * bn])

    return program


def _check(name: str, program, m: int, n: int, k: int, on: Place) -> Comparison:
    a, b = normal((m, k), f16), normal((n, k), f16, 1)
    got = on.compile(program(m, n, k), out_idx=[2])(a, b)
    on.peer("a @ b.T", lambda a, b: a @ b.T, a, b)
    return compare(name, np.asarray(got), product(a, b.T), product_bound(wide(a), wide(b.T), f16, f16))


def check_warp_roles(m: int = 4096, n: int = 4096, k: int = 4096, on: Place = HERE) -> Comparison:
    """Sums in float32, rounded once."""
    return _check("gemm by roles", gemm_roles, m, n, k, on)


def check_cluster(m: int = 4096, n: int = 4096, k: int = 4096, on: Place = HERE) -> Comparison:
    """Sums in float32, rounded once."""
    return _check("gemm in clusters", gemm_cluster, m, n, k, on)


if __name__ == "__main__":
    main(check_warp_roles, check_cluster)
