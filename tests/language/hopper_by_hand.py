"""Programs written with Hopper's own names: producers and consumers, clusters, asynchronous products and stores."""

import tilelang.language as T

f16, f32 = "float16", "float32"


def gemm_ws(M, N, K, BM=128, BN=128, BK=64, S=3, parity=1):
    """A @ B, worked program 10 of the language: warp group 1 loads, warp group 0 computes.  parity=0 plants a fault."""

    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((K, N), f16), C: T.Tensor((M, N), f16)):
        with T.Kernel(N // BN, M // BM, threads=256) as (bx, by):
            As = T.alloc_shared((S, BM, BK), f16)
            Bs = T.alloc_shared((S, BK, BN), f16)
            Cf = T.alloc_fragment((BM, BN), f32)
            full = T.alloc_barrier([128] * S)
            empty = T.alloc_barrier([128] * S)
            with T.ws(1):
                for k in T.serial(K // BK):
                    T.mbarrier_wait_parity(empty[k % S], (k // S + parity) % 2)
                    T.tma_copy(A[by * BM:(by + 1) * BM, k * BK:(k + 1) * BK], As[k % S, :, :], barrier=full[k % S])
                    T.tma_copy(B[k * BK:(k + 1) * BK, bx * BN:(bx + 1) * BN], Bs[k % S, :, :], barrier=full[k % S])
                    T.mbarrier_arrive(full[k % S])
            with T.ws(0):
                T.clear(Cf)
                for k in T.serial(K // BK):
                    T.mbarrier_wait_parity(full[k % S], (k // S) % 2)
                    T.wgmma_gemm(As[k % S, :, :], Bs[k % S, :, :], Cf)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(empty[k % S])
                T.copy(Cf, C[by * BM, bx * BN])

    return main


def gemm_two_consumers(M, N, K, BM=128, BN=128, BK=64, S=4, registers=True):
    """A @ B.T with a product always under way, registers moved to two consumers, and a TMA store of the tile."""
    steps = K // BK

    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((N, K), f16), C: T.Tensor((M, N), f16)):
        with T.Kernel(N // BN, M // BM, threads=384) as (bx, by):
            As = T.alloc_shared((S, BM, BK), f16)
            Bs = T.alloc_shared((S, BN, BK), f16)
            Cs = T.alloc_shared((BM, BN), f16)
            Cf = T.alloc_fragment((BM, BN), f32)
            full, empty = T.alloc_barrier([1] * S), T.alloc_barrier([256] * S)
            tx = T.get_thread_binding()
            with T.ws(2):
                if registers:
                    T.dec_max_nreg(24)
                if tx == 256:
                    for k in T.serial(steps):
                        T.barrier_wait(empty[k % S], (k // S + 1) % 2)
                        T.tma_copy(A[by * BM, k * BK], As[k % S, :, :], barrier=full[k % S], leader_scope_threads=32)
                        T.tma_copy(B[bx * BN, k * BK], Bs[k % S, :, :], barrier=full[k % S], leader_scope_threads=128)
                        T.mbarrier_arrive(full[k % S])
            with T.ws(0, 1):
                if registers:
                    T.inc_max_nreg(240)
                T.clear(Cf)
                for k in T.serial(steps):
                    T.barrier_wait(full[k % S], k // S % 2)
                    T.wgmma_mma(As[k % S, :, :], Bs[k % S, :, :], Cf, transpose_B=True)
                    if k > 0:
                        T.wait_wgmma(1)
                        T.barrier_arrive(empty[(k - 1) % S])
                T.warpgroup_wait(0)
                T.copy(Cf, Cs)
                T.fence_proxy_async()
                T.sync_threads(5, 256)
                T.tma_copy(Cs, C[by * BM, bx * BN])
                T.tma_store_wait(0)

    return main


def gemm_cluster(M, N, K, BM=128, BN=128, BK=64, S=3, size=2, remote=True):
    """A @ B in clusters of blocks along M that share the tile of B: rank 0 loads it for all, when all have room for it.

    remote=False plants a fault: rank 0 does not wait for the others' room.
    """

    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((K, N), f16), C: T.Tensor((M, N), f16)):
        with T.ClusterKernel(N // BN, M // BM, cluster_dims=(1, size), threads=384) as (bx, by):
            As = T.alloc_shared((S, BM, BK), f16)
            Bs = T.alloc_shared((S, BK, BN), f16)
            Cf = T.alloc_fragment((BM, BN), f32)
            full, empty = T.alloc_barrier([128] * S), T.alloc_barrier([256] * S)
            free = T.alloc_cluster_barrier([256 * size] * S)  # of rank 0: the slot is free in all blocks
            rank = T.block_rank_in_cluster()
            with T.ws(2):
                for k in T.serial(K // BK):
                    T.mbarrier_wait_parity(empty[k % S], (k // S + 1) % 2)
                    T.tma_copy(A[by * BM, k * BK], As[k % S, :, :], barrier=full[k % S])
                    if rank == 0 and remote:
                        T.mbarrier_wait_parity(free[k % S], (k // S + 1) % 2)
                    T.tma_copy(B[k * BK, bx * BN], Bs[k % S, :, :], barrier=full[k % S], cluster_mask=(1 << size) - 1)
                    T.mbarrier_arrive(full[k % S])
            with T.ws(0, 1):
                T.clear(Cf)
                for k in T.serial(K // BK):
                    T.mbarrier_wait_parity(full[k % S], (k // S) % 2)
                    T.wgmma_gemm(As[k % S, :, :], Bs[k % S, :, :], Cf)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(empty[k % S])
                    T.mbarrier_arrive(free[k % S], cta_id=0)
                T.copy(Cf, C[by * BM, bx * BN])

    return main


def from_registers(M, N, K):
    """(A + 1) @ B.T with A in registers, one warp group, and the raw names around the product."""

    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((N, K), f16), C: T.Tensor((M, N), f32)):
        with T.Kernel(1, threads=128):
            As, Bs = T.alloc_shared((M, K), f16), T.alloc_shared((N, K), f16)
            Af, Cf = T.alloc_fragment((M, K), f16), T.alloc_fragment((M, N), f32)
            bar = T.alloc_barrier(128)
            T.tma_copy(A, As, barrier=bar, eviction_policy="evict_first")
            T.tma_copy(B, Bs, barrier=bar[0])
            T.mbarrier_arrive(bar)
            T.mbarrier_wait_parity(bar, 0)
            T.copy(As, Af)
            for i, j in T.Parallel(M, K):
                Af[i, j] = Af[i, j] + T.float16(1)
            T.warpgroup_fence_operand(Af)
            T.warpgroup_arrive()
            T.wgmma_gemm(Af, Bs, Cf, transpose_B=True, clear_accum=True)
            T.warpgroup_commit_batch()
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(Cf)
            T.copy(Cf, C)

    return main


def raw_barriers(setup=True):
    """Y = 2 X, handed from warp group 0 to warp group 1 through barriers that the program sets up."""

    @T.prim_func
    def main(X: T.Tensor((4, 128), "int32"), Y: T.Tensor((4, 128), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            S = T.alloc_shared((128,), "int32")
            bars = T.create_barriers(2)
            if setup and tx == 0:
                T.ptx_init_barrier_thread_count(bars[0], 128)
                T.ptx_init_barrier_thread_count(bars[1], 128)
                T.ptx_fence_barrier_init()
            T.sync_threads()
            with T.ws(0):
                for k in T.serial(4):
                    T.ptx_wait_barrier(bars[1], (k + 1) % 2)
                    S[tx] = X[k, tx]
                    T.ptx_arrive_barrier(bars[0])
            with T.ws(1):
                for k in T.serial(4):
                    T.ptx_wait_barrier(bars[0], k % 2)
                    Y[k, tx - 128] = S[255 - tx] + S[tx - 128] - S[255 - tx] + S[tx - 128]
                    T.ptx_arrive_barrier(bars[1])

    return main


def shift(way, size=4, meet=True):
    """B[block] = A[block - 1 in its cluster], a tile of 32 x 64; way: "elements", "bulk" or "rows" (bulk, by row)."""
    wide = 128 if way == "rows" else 64

    @T.prim_func
    def main(A: T.Tensor((8, 32, 64), f16), B: T.Tensor((8, 32, 64), f16)):
        with T.ClusterKernel(8, cluster_dims=size, threads=128) as bx:
            S, R = T.alloc_shared((32, 64), f16), T.alloc_shared((32, wide), f16)
            bar = T.alloc_cluster_barrier(128)
            rank = T.block_rank_in_cluster()
            T.copy(A[bx, 0:32, 0:64], S)
            if way == "elements":
                if meet:
                    T.cluster_sync()
                T.copy_cluster(S, R[0:32, 0:64], dst_block=(rank + 1) % size)
                T.cluster_arrive()
                T.cluster_wait()
            else:
                T.fence_proxy_async()
                T.sync_threads()
                if T.get_thread_binding() == 0:
                    T.mbarrier_expect_tx(bar, 4096)
                T.copy_cluster(S, R[0:32, 0:64], dst_block=(rank + 1) % size, remote_barrier=bar)
                T.mbarrier_arrive(bar)
                T.mbarrier_wait_parity(bar, 0)
            T.copy(R[0:32, 0:64], B[bx, 0:32, 0:64])

    return main


def broadcast(size=2, mask=3):
    """B[block] = A[cluster], one load for all blocks of the mask; twice, so that the barrier turns over."""

    @T.prim_func
    def main(A: T.Tensor((4, 64, 64), f16), B: T.Tensor((8, 64, 64), f16)):
        with T.ClusterKernel(4, cluster_dims=size, threads=128) as bx:
            S = T.alloc_shared((64, 64), f16)
            for half in T.serial(2):
                T.copy_cluster(A[bx // size + 2 * half, 0:64, 0:64], S, cluster_mask=mask)
                T.copy(S, B[bx + 4 * half, 0:64, 0:64])

    return main


def dependent(n=256):
    """B = A + 1, waiting for the launches before."""

    @T.prim_func
    def main(A: T.Tensor((n,), f32), B: T.Tensor((n,), f32)):
        with T.Kernel(n // 128, threads=128) as bx:
            T.pdl_sync()
            for i in T.Parallel(128):
                B[bx * 128 + i] = A[bx * 128 + i] + 1.0
            T.pdl_trigger()

    return main


def persistent(M, N, K, workers=3, BM=128, BN=64, BK=64, S=2):
    """A @ B.T; producer and consumer walk over tiles of their own, with rings that go on over tiles."""
    tiles_m, tiles_n, steps = M // BM, N // BN, K // BK

    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((N, K), f16), C: T.Tensor((M, N), f16)):
        with T.Kernel(workers, threads=256) as worker:
            As, Bs = T.alloc_shared((S, BM, BK), f16), T.alloc_shared((S, BN, BK), f16)
            Cf = T.alloc_fragment((BM, BN), f32)
            full, empty = T.alloc_barrier([128] * S), T.alloc_barrier([128] * S)
            with T.ws(1):
                it = T.alloc_var("int32", init=0)
                tile = T.PersistentTileScheduler(tiles_m, tiles_n, num_workers=workers, name="load")
                tile.init(worker)
                while tile.valid():
                    for k in T.serial(steps):
                        T.mbarrier_wait_parity(empty[it % S], (it // S + 1) % 2)
                        T.tma_copy(A[tile.m_idx * BM, k * BK], As[it % S, :, :], barrier=full[it % S])
                        T.tma_copy(B[tile.n_idx * BN, k * BK], Bs[it % S, :, :], barrier=full[it % S])
                        T.mbarrier_arrive(full[it % S])
                        it = it + 1
                    tile.next_tile()
            with T.ws(0):
                at = T.alloc_var("int32", init=0)
                place = T.PersistentTileScheduler(tiles_m, tiles_n, num_workers=workers, name="compute")
                place.init(worker)
                while place.valid():
                    T.clear(Cf)
                    for _k in T.serial(steps):
                        T.mbarrier_wait_parity(full[at % S], at // S % 2)
                        T.wgmma_gemm(As[at % S, :, :], Bs[at % S, :, :], Cf, transpose_B=True)
                        T.wait_wgmma(0)
                        T.mbarrier_arrive(empty[at % S])
                        at = at + 1
                    T.copy(Cf, C[place.m_idx * BM, place.n_idx * BN])
                    place.next_tile()

    return main


def persistent_loop(M, N, K, workers=3, BM=128, BN=64, BK=64, S=2):
    """The same by T.Persistent."""
    tiles, steps = [M // BM, N // BN], K // BK

    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((N, K), f16), C: T.Tensor((M, N), f16)):
        with T.Kernel(workers, threads=256) as worker:
            As, Bs = T.alloc_shared((S, BM, BK), f16), T.alloc_shared((S, BN, BK), f16)
            Cf = T.alloc_fragment((BM, BN), f32)
            full, empty = T.alloc_barrier([128] * S), T.alloc_barrier([128] * S)
            with T.ws(1):
                it = T.alloc_var("int32", init=0)
                for by, bx in T.Persistent(tiles, workers, worker):
                    for k in T.serial(steps):
                        T.mbarrier_wait_parity(empty[it % S], (it // S + 1) % 2)
                        T.tma_copy(A[by * BM, k * BK], As[it % S, :, :], barrier=full[it % S])
                        T.tma_copy(B[bx * BN, k * BK], Bs[it % S, :, :], barrier=full[it % S])
                        T.mbarrier_arrive(full[it % S])
                        it = it + 1
            with T.ws(0):
                at = T.alloc_var("int32", init=0)
                for by, bx in T.Persistent(tiles, workers, worker):
                    T.clear(Cf)
                    for _k in T.serial(steps):
                        T.mbarrier_wait_parity(full[at % S], at // S % 2)
                        T.wgmma_gemm(As[at % S, :, :], Bs[at % S, :, :], Cf, transpose_B=True)
                        T.wait_wgmma(0)
                        T.mbarrier_arrive(empty[at % S])
                        at = at + 1
                    T.copy(Cf, C[by * BM, bx * BN])

    return main


def rows(n, S=2, eviction=None):
    """B[k] = 2 A[k]: rows of n numbers brought and taken away by TMA, a ring of S."""

    @T.prim_func
    def main(A: T.Tensor((6, n), f32), B: T.Tensor((6, n), f32)):
        with T.Kernel(2, threads=128) as bx:
            R, W = T.alloc_shared((S, n), f32), T.alloc_shared((n,), f32)
            bar = T.alloc_barrier([128] * S)
            for k in T.serial(3):
                T.tma_copy(A[bx * 3 + k, 0:n], R[k % S, :], barrier=bar[k % S], eviction_policy=eviction)
                T.mbarrier_arrive(bar[k % S])
                T.mbarrier_wait_parity(bar[k % S], k // S % 2)
                for i in T.Parallel(n):
                    W[i] = R[k % S, i] * 2.0
                T.tma_copy(W, B[bx * 3 + k, :])
                T.tma_store_wait(0)

    return main
