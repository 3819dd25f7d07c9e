"""Kernels whose warps have work of their own: guards on the thread, producer and consumer groups, orders by hand."""

import tilelang.language as T

from . import program

F16, F32, I32 = "float16", "float32", "int32"


@program("guarded_stores_then_branches")
def guarded_stores_then_branches(n=32):
    """The first warp stores a tile, then reads it, while the others do something else."""
    @T.prim_func
    def main(X: T.Tensor((n,), F32), Y: T.Tensor((n,), F32), Z: T.Tensor((128,), I32)):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            f, s = T.alloc_fragment((n,), F32), T.alloc_shared((n,), F32)
            if tx < 32:
                T.copy(X, f)
                T.copy(f, s)
            if tx < 32:
                Y[tx] = s[31 - tx]
            else:
                Z[tx] = tx
    return main


@program("groups_take_turns")
def groups_take_turns(steps=8, rows=64, dim=64):
    """A group loads a tile, the other reads it, in every turn of a loop."""
    @T.prim_func
    def main(A: T.Tensor((steps, rows, dim), F16), B: T.Tensor((steps, rows, dim), F16)):
        with T.Kernel(1, threads=256):
            s = T.alloc_shared((rows, dim), F16)
            for k in T.serial(steps):
                with T.ws(0):
                    T.copy(A[k, :, :], s)
                with T.ws(1):
                    T.copy(s, B[k, :, :])
    return main


@program("copies_left_to_the_producer")
def copies_left_to_the_producer(seq=1024, dim=128, block_m=128, block_n=128):
    """Attention whose copies belong to the producer: -1 in the lists of the pipeline."""
    @T.prim_func
    def main(Q: T.Tensor((seq, dim), F16), K: T.Tensor((seq, dim), F16), V: T.Tensor((seq, dim), F16),
             O: T.Tensor((seq, dim), F16)):
        with T.Kernel(seq // block_m, threads=256) as b:
            q, k_s, v_s = T.alloc_shared((block_m, dim), F16), T.alloc_shared((block_n, dim), F16), T.alloc_shared(
                (block_n, dim), F16)
            s, p = T.alloc_fragment((block_m, block_n), F32), T.alloc_fragment((block_m, block_n), F16)
            o, m, m_old, l, row = T.alloc_fragment((block_m, dim), F32), *(T.alloc_fragment((block_m,), F32) for _ in range(4))
            T.copy(Q[b * block_m, 0], q)
            T.clear(o)
            T.clear(l)
            T.fill(m, -T.infinity(F32))
            for k in T.Pipelined(seq // block_n, num_stages=2, order=[-1, 0, 3, 1, -1, 2], stage=[-1, 0, 0, 1, -1, 1],
                                 group=[[0], [1, 2], [3, 4, 5, 6, 7, 8, 9], [10], [11], [12]]):
                T.copy(K[k * block_n, 0], k_s)
                T.clear(s)
                T.gemm(q, k_s, s, transpose_B=True)
                T.copy(m, m_old)
                T.reduce_max(s, m, dim=1, clear=False)
                for i in T.Parallel(block_m):
                    m[i] = T.max(m[i], m_old[i])
                for i, j in T.Parallel(block_m, block_n):
                    s[i, j] = T.exp2(s[i, j] - m[i])
                T.reduce_sum(s, row, dim=1)
                for i in T.Parallel(block_m):
                    l[i] = l[i] * T.exp2(m_old[i] - m[i]) + row[i]
                T.copy(s, p)
                for i, d in T.Parallel(block_m, dim):
                    o[i, d] *= T.exp2(m_old[i] - m[i])
                T.copy(V[k * block_n, 0], v_s)
                T.gemm(p, v_s, o)
            for i, d in T.Parallel(block_m, dim):
                o[i, d] /= l[i]
            T.copy(o, O[b * block_m, 0])
    return main


@program("product_with_a_producer")
def product_with_a_producer(M=512, N=512, K=512, BM=128, BN=128, BK=64):
    """The shortest form of the same lists: two copies and a product."""
    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((K, N), F16), C: T.Tensor((M, N), F32)):
        with T.Kernel(N // BN, M // BM, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((BM, BK), F16), T.alloc_shared((BK, BN), F16), T.alloc_fragment((BM, BN), F32)
            T.clear(c)
            for k in T.Pipelined(K // BK, num_stages=3, order=[-1, -1, 0], stage=[-1, -1, 0], group=[[0], [1], [2]]):
                T.copy(A[by * BM, k * BK], a)
                T.copy(B[k * BK, bx * BN], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * BM, bx * BN])
    return main


@program("a_barrier_nobody_waits_for")
def a_barrier_nobody_waits_for(steps=4, rows=64, dim=64):
    """Two barriers order the tile; a third only counts arrivals."""
    @T.prim_func
    def main(A: T.Tensor((steps, rows, dim), F16), B: T.Tensor((steps, rows, dim), F16)):
        with T.Kernel(1, threads=256):
            s = T.alloc_shared((rows, dim), F16)
            seen, full, free = T.alloc_barrier(256), T.alloc_barrier(128), T.alloc_barrier(128)
            with T.ws(0):
                for k in T.serial(steps):
                    T.mbarrier_wait_parity(free, (k & 1) ^ 1)
                    T.copy(A[k, :, :], s)
                    T.mbarrier_arrive(seen)
                    T.mbarrier_arrive(full)
            with T.ws(1):
                for k in T.serial(steps):
                    T.mbarrier_wait_parity(full, k & 1)
                    T.copy(s, B[k, :, :])
                    T.mbarrier_arrive(seen)
                    T.mbarrier_arrive(free)
    return main


@program("one_element_of_a_role")
def one_element_of_a_role(n=64):
    """A warp group adds one value to the last element of its tile."""
    @T.prim_func
    def main(X: T.Tensor((n,), F32), Y: T.Tensor((n,), F32)):
        with T.Kernel(1, threads=256):
            s = T.alloc_shared((n,), F32)
            with T.ws(1):
                T.copy(X, s)
                s[n - 1] += X[0]
                T.copy(s, Y)
    return main


@program("cluster_positions")
def cluster_positions(N=1024):
    """Blocks of a cluster find their place by the names of the launch."""
    @T.prim_func
    def main(X: T.Tensor((N,), I32), Y: T.Tensor((16, 6), I32)):
        with T.ClusterKernel(16, cluster_dims=(2, 1, 1), threads=128) as bx:
            dims = T.get_cluster_dims()
            if T.get_thread_binding() == 0:
                Y[bx, 0] = T.get_cluster_id(0) + X[0]
                Y[bx, 1] = T.get_cluster_ids()[0]
                Y[bx, 2] = T.get_cluster_extent(0)
                Y[bx, 3] = T.get_cluster_extents()[0]
                Y[bx, 4] = T.get_cluster_size()
                Y[bx, 5] = dims[0]
    return main


@program("depth_of_a_pipeline")
def depth_of_a_pipeline(M=256, N=256, K=512, BK=64):
    """The author says how many versions the schedule keeps of a tile."""
    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((K, N), F16), C: T.Tensor((M, N), F32)):
        with T.Kernel(N // 128, M // 128, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((128, BK), F16), T.alloc_shared((BK, 128), F16), T.alloc_fragment((128, 128), F32)
            T.annotate_ws_pipeline_depth({a: 3, b: 2})
            T.clear(c)
            for k in T.Pipelined(K // BK, num_stages=2):
                T.copy(A[by * 128, k * BK], a)
                T.copy(B[k * BK, bx * 128], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 128, bx * 128])
    return main
