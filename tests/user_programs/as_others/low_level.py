"""Kernels near the hardware, as people from CUDA write them: TMA, wgmma, votes, shuffles, vectors, pipelines by hand."""

import numpy as np

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from .catalogue import EXACT, HOPPER_ONLY, Bound, Program, drawn, integers, uniform, wide, zeros

F16, BF16, F32, I32 = "float16", "bfloat16", "float32", "int32"
LOG2E = 1.44269504
NO_MBARRIER = {"cpu": "mbarriers are Hopper's", "sm_80": "mbarriers are Hopper's"}


def product(a, b, *_):
    a, b = wide(a, b)
    return a @ b


def product_t(a, b, *_):
    a, b = wide(a, b)
    return a @ b.T


def attention_reference(causal):
    def reference(q, k, v):
        q, k, v = wide(q, k, v)
        s = np.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        if causal:
            s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
        e = np.exp(s - s.max(2, keepdims=True))
        return np.einsum("hqk,khd->qhd", e / e.sum(2, keepdims=True), v)

    return reference


@tilelang.jit(out_idx=[3])
def overlapped_attention(heads, seq, dim, block_m=64, block_n=64, stages=2):
    """Two consumer warp groups with rows of their own, and a producer warp group."""
    scale = dim**-0.5 * LOG2E
    shape = (seq, heads, dim)

    @T.macro
    def consume(group, q, k_s, v_s, full_k, full_v, free_k, free_v, O, bx, by):
        s = T.alloc_fragment((block_m, block_n), F32)
        p = T.alloc_fragment((block_m, block_n), F16)
        o = T.alloc_fragment((block_m, dim), F32)
        m = T.alloc_fragment((block_m,), F32)
        m_old = T.alloc_fragment((block_m,), F32)
        corr = T.alloc_fragment((block_m,), F32)
        row = T.alloc_fragment((block_m,), F32)
        l = T.alloc_fragment((block_m,), F32)
        T.clear(o)
        T.clear(l)
        T.fill(m, -T.infinity(F32))
        for k in T.serial(T.ceildiv(seq, block_n)):
            T.mbarrier_wait_parity(full_k[k % stages], (k // stages) & 1)
            T.wgmma_gemm(
                q[group * block_m : (group + 1) * block_m, :], k_s[k % stages, :, :], s, transpose_B=True, clear_accum=True
            )
            T.wait_wgmma(0)
            T.mbarrier_arrive(free_k[k % stages])
            for i, j in T.Parallel(block_m, block_n):
                s[i, j] = T.if_then_else(k * block_n + j < seq, s[i, j], -T.infinity(F32))
            T.copy(m, m_old)
            T.reduce_max(s, m, dim=1, clear=False)
            for i in T.Parallel(block_m):
                corr[i] = T.exp2(m_old[i] * scale - m[i] * scale)
            for i, j in T.Parallel(block_m, block_n):
                s[i, j] = T.exp2(s[i, j] * scale - m[i] * scale)
            T.reduce_sum(s, row, dim=1)
            for i in T.Parallel(block_m):
                l[i] = l[i] * corr[i] + row[i]
            for i, j in T.Parallel(block_m, dim):
                o[i, j] *= corr[i]
            T.copy(s, p)
            T.mbarrier_wait_parity(full_v[k % stages], (k // stages) & 1)
            T.wgmma_gemm(p, v_s[k % stages, :, :], o)
            T.wait_wgmma(0)
            T.mbarrier_arrive(free_v[k % stages])
        for i, j in T.Parallel(block_m, dim):
            o[i, j] /= l[i]
        row0 = (bx * 2 + group) * block_m
        T.copy(o, O[row0 : row0 + block_m, by, :])

    @T.prim_func
    def main(Q: T.Tensor(shape, F16), K: T.Tensor(shape, F16), V: T.Tensor(shape, F16), O: T.Tensor(shape, F16)):
        with T.Kernel(T.ceildiv(seq, 2 * block_m), heads, threads=384) as (bx, by):
            q = T.alloc_shared((2 * block_m, dim), F16)
            k_s = T.alloc_shared((stages, block_n, dim), F16)
            v_s = T.alloc_shared((stages, block_n, dim), F16)
            full_k = T.alloc_barrier([128] * stages)
            full_v = T.alloc_barrier([128] * stages)
            free_k = T.alloc_barrier([256] * stages)
            free_v = T.alloc_barrier([256] * stages)
            T.copy(Q[bx * 2 * block_m : (bx + 1) * 2 * block_m, by, :], q)
            with T.ws(0):
                consume(0, q, k_s, v_s, full_k, full_v, free_k, free_v, O, bx, by)
            with T.ws(1):
                consume(1, q, k_s, v_s, full_k, full_v, free_k, free_v, O, bx, by)
            with T.ws(2):
                T.dec_max_nreg(40)
                for k in T.serial(T.ceildiv(seq, block_n)):
                    T.mbarrier_wait_parity(free_k[k % stages], ((k // stages) & 1) ^ 1)
                    T.tma_copy(K[k * block_n : (k + 1) * block_n, by, :], k_s[k % stages, :, :], barrier=full_k[k % stages])
                    T.mbarrier_arrive(full_k[k % stages])
                    T.mbarrier_wait_parity(free_v[k % stages], ((k // stages) & 1) ^ 1)
                    T.tma_copy(V[k * block_n : (k + 1) * block_n, by, :], v_s[k % stages, :, :], barrier=full_v[k % stages])
                    T.mbarrier_arrive(full_v[k % stages])

    return main


@tilelang.jit(out_idx=[2])
def multicast_gemm(M, N, K, BM=64, BN=64, BK=64):
    """Two blocks of a cluster need the same rows of A: one of them loads them for both."""

    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((N, K), F16), C: T.Tensor((M, N), F16)):
        with T.ClusterKernel(N // BN, M // BM, cluster_dims=(2, 1, 1), threads=128) as (bx, by):
            a = T.alloc_shared((BM, BK), F16)
            b = T.alloc_shared((BN, BK), F16)
            c = T.alloc_fragment((BM, BN), F32)
            T.clear(c)
            for k in T.serial(K // BK):
                T.cluster_sync()
                T.copy_cluster(A[by * BM : (by + 1) * BM, k * BK : (k + 1) * BK], a, cluster_mask=3)
                T.copy(B[bx * BN, k * BK], b)
                T.gemm(a, b, c, transpose_B=True)
            T.cluster_sync()
            T.copy(c, C[by * BM, bx * BN])

    return main


@tilelang.jit
def bulk_reduction(A, B, C, split: int = 2, BM: int = 64, BN: int = 64, BK: int = 32):
    """Split over K with the sums added by the copy engine."""
    M, N, K = T.const("M N K")
    A: T.Tensor((M, K), F16)
    B: T.Tensor((N, K), F16)
    C: T.Tensor((M, N), F32)
    with T.Kernel(N // BN, M // BM, split, threads=128) as (bx, by, bz):
        a = T.alloc_shared((BM, BK), F16)
        b = T.alloc_shared((BN, BK), F16)
        c = T.alloc_fragment((BM, BN), F32)
        c_s = T.alloc_shared((BM, BN), F32)
        T.clear(c)
        for k in T.Pipelined(K // BK // split, num_stages=2):
            T.copy(A[by * BM, (bz * (K // BK // split) + k) * BK], a)
            T.copy(B[bx * BN, (bz * (K // BK // split) + k) * BK], b)
            T.gemm(a, b, c, transpose_B=True)
        T.copy(c, c_s)
        T.atomic_add(C[by * BM : (by + 1) * BM, bx * BN : (bx + 1) * BN], c_s, use_tma=True)


@tilelang.jit(out_idx=[2])
def register_wgmma(M, N, K, BM=64, BN=64, BK=64):
    """A is decoded to registers, B comes by copies; wgmma with A from registers, one group in flight."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "int8"), B: T.Tensor((K, N), F16), C: T.Tensor((M, N), F32)):
        with T.Kernel(N // BN, M // BM, threads=128) as (bx, by):
            a8 = T.alloc_shared((BM, BK), "int8")
            af = T.alloc_fragment((BM, BK), F16)
            b = T.alloc_shared((BK, BN), F16)
            c = T.alloc_fragment((BM, BN), F32)
            T.clear(c)
            for k in T.serial(K // BK):
                T.copy(A[by * BM, k * BK], a8)
                T.copy(B[k * BK, bx * BN], b)
                for i, j in T.Parallel(BM, BK):
                    af[i, j] = T.cast(a8[i, j], F16) * T.float16(0.0625)
                T.wgmma_gemm(af, b, c)
                T.wait_wgmma(0)
            T.copy(c, C[by * BM, bx * BN])

    return main


@tilelang.jit(out_idx=[2])
def async_copies(M, N, K, BM=64, BN=64, BK=32, stages=3):
    """`T.async_copy` with groups counted by hand, three stages."""

    @T.prim_func
    def main(A: T.Tensor((M, K), BF16), B: T.Tensor((N, K), BF16), C: T.Tensor((M, N), BF16)):
        with T.Kernel(N // BN, M // BM, threads=128) as (bx, by):
            a = T.alloc_shared((stages, BM, BK), BF16)
            b = T.alloc_shared((stages, BN, BK), BF16)
            c = T.alloc_fragment((BM, BN), F32)
            T.clear(c)
            for s in T.unroll(stages - 1):
                T.async_copy(A[by * BM : (by + 1) * BM, s * BK : (s + 1) * BK], a[s, :, :])
                T.async_copy(B[bx * BN : (bx + 1) * BN, s * BK : (s + 1) * BK], b[s, :, :])
            for k in T.serial(K // BK):
                T.ptx_wait_group(2)
                T.sync_threads()
                T.gemm(a[k % stages, :, :], b[k % stages, :, :], c, transpose_B=True)
                T.sync_threads()
                if k + stages - 1 < K // BK:
                    n = k + stages - 1
                    T.async_copy(A[by * BM : (by + 1) * BM, n * BK : (n + 1) * BK], a[n % stages, :, :])
                    T.async_copy(B[bx * BN : (bx + 1) * BN, n * BK : (n + 1) * BK], b[n % stages, :, :])
                else:
                    T.ptx_commit_group()
                    T.ptx_commit_group()
            T.copy(c, C[by * BM, bx * BN])

    return main


@tilelang.jit(out_idx=[2])
def annotated_pipeline(M, N, K, BM=64, BN=64, BK=32):
    """The raw annotations of a software pipeline on a serial loop, and copies with preferences."""

    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((K, N), F16), C: T.Tensor((M, N), F16)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
            a = T.alloc_shared((BM, BK), F16)
            b = T.alloc_shared((BK, BN), F16)
            c = T.alloc_fragment((BM, BN), F32)
            T.clear(c)
            for k in T.serial(
                T.ceildiv(K, BK), annotations={"software_pipeline_stage": [0, 0, 1], "software_pipeline_order": [0, 1, 2]}
            ):
                T.copy(A[by * BM, k * BK], a, prefer_instruction="cp_async", eviction_policy="evict_first")
                T.copy(B[k * BK, bx * BN], b, disable_tma=True, coalesced_width=8)
                T.gemm(a, b, c, policy=T.GemmWarpPolicy.FullCol)
            T.copy(c, C[by * BM, bx * BN], annotations={"eviction_policy": "evict_last"})

    return main


@tilelang.jit(out_idx=[1])
def loop_layouts(M, N):
    """A parallel loop whose iterations are given to threads by the caller."""

    @T.prim_func
    def main(A: T.Tensor((M, N), F32), B: T.Tensor((M, N), F32)):
        with T.Kernel(1, threads=128):
            layout = T.Fragment((M, N), forward_fn=lambda i, j: (i % 4 * 32 + j % 32, i // 4 * (N // 32) + j // 32))
            for i, j in T.Parallel(M, N, loop_layout=layout):
                B[i, j] = A[i, j] * 3.0
            for i, j in T.Parallel(M, N, coalesced_width=2):
                B[i, j] = B[i, j] + 1.0

    return main


@tilelang.jit
def compact_by_votes(X, threshold: T.float32):
    """Stream compaction: a vote for each warp, prefix counts by popcount, one atomic a warp."""
    N = T.const("N")
    X: T.Tensor((N,), F32)
    out = T.empty((N,), I32)
    count = T.empty((1,), I32)
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            out[i] = -1
        for i in T.Parallel(1):
            count[i] = 0
    with T.Kernel(T.ceildiv(N, 128), threads=128) as bx:
        i = bx * 128 + T.get_thread_binding()
        lane = T.get_lane_idx()
        keep = T.alloc_var("bool", init=False)
        if i < N:
            keep = X[i] > threshold
        votes = T.cast(T.ballot_sync(keep, 0xFFFFFFFF), "uint32")
        base = T.alloc_var(I32, init=0)
        if lane == 0:
            base = T.atomic_add(count[0], T.cast(T.popcount(votes), I32), return_prev=True)
        start = T.shfl_sync(base, 0)
        if keep:
            below = T.popcount(votes & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)))
            out[start + T.cast(below, I32)] = i
    return out, count


def compact_reference(x, threshold):
    kept = np.flatnonzero(x > np.float32(threshold))
    return np.concatenate([np.full(len(x) - len(kept), -1), kept]), np.array([len(kept)])


@tilelang.jit(out_idx=[1])
def bitonic_sort(n, size=64):
    @T.prim_func
    def main(A: T.Tensor((n, size), F32), B: T.Tensor((n, size), F32)):
        with T.Kernel(n, threads=size) as b:
            tx = T.get_thread_binding()
            s = T.alloc_shared((size,), F32)
            s[tx] = A[b, tx]
            width = T.alloc_var(I32, init=2)
            while width <= size:
                step = T.alloc_var(I32, init=width // 2)
                while step > 0:
                    T.sync_threads()
                    other = tx ^ step
                    if other > tx:
                        up = (tx & width) == 0
                        x, y = s[tx], s[other]
                        if (x > y) == up:
                            s[tx], s[other] = y, x
                    step = step // 2
                width = width * 2
            T.sync_threads()
            B[b, tx] = s[tx]

    return main


@tilelang.jit
def dot_of_bytes(A, B):
    """int8 rows by dp4a, four at a time, one thread a row."""
    M, K = T.const("M K")
    A: T.Tensor((M, K), "int8")
    B: T.Tensor((K,), "int8")
    C = T.empty((M,), I32)
    with T.Kernel(T.ceildiv(M, 32), threads=32) as bx:
        row = bx * 32 + T.get_thread_binding()
        a = T.alloc_local((4,), "int8")
        b = T.alloc_local((4,), "int8")
        c = T.alloc_local((1,), I32)
        c[0] = 0
        if row < M:
            for k in T.serial(K // 4):
                for v in T.vectorized(4):
                    a[v] = A[row, k * 4 + v]
                    b[v] = B[k * 4 + v]
                T.dp4a(a, b, c)
            C[row] = c[0]
    return C


@tilelang.jit(out_idx=[1])
def vector_slices(M, N):
    """Slices as vectors: loads of four, arithmetic with a scalar, lanes taken out, stores of eight bytes."""

    @T.prim_func
    def main(A: T.Tensor((M, N), F32), B: T.Tensor((M, N), F32)):
        with T.Kernel(M, threads=32) as r:
            tx = T.get_thread_binding()
            if tx < N // 4:
                v = A[r, tx * 4 : tx * 4 + 4] * 2.0 + 1.0
                B[r, tx * 4 : tx * 4 + 4] = v
                first = T.extract_lane(v, 0)
                last = T.extract_lane(v, 3)
                B[r, tx * 4 + 1 : tx * 4 + 3] = T.float32x2(last, first)

    return main


def vector_slices_reference(a):
    (a,) = wide(a)
    b = (a * 2 + 1).reshape(len(a), -1, 4)
    return b[:, :, [0, 3, 0, 3]].reshape(a.shape)


@tilelang.jit
def aliased_update(X, Y, W):
    """Two parameters that may be the same tensor, promised to the compiler; launch bounds with two blocks an SM."""
    N = T.const("N")
    X: T.Tensor((N,), F32)
    Y: T.Tensor((N,), F32)
    W: T.Tensor((N,), F32)
    with T.Kernel(T.ceildiv(N, 128), threads=128) as bx:
        T.annotate_restrict_buffers(X, Y)
        T.annotate_min_blocks_per_sm(2)
        for i in T.Parallel(128):
            if bx * 128 + i < N:
                Y[bx * 128 + i] = X[bx * 128 + i] * W[bx * 128 + i]


@tilelang.jit(out_idx=[3])
def sparse_rows(M, N, K, BM=64, BN=64, BK=64):
    """2:4 sparse A with int16 metadata."""

    @T.prim_func
    def main(
        A: T.Tensor((M, K // 2), F16), E: T.Tensor((M, K // 16), "int16"), B: T.Tensor((K, N), F16), C: T.Tensor((M, N), F32)
    ):
        with T.Kernel(N // BN, M // BM, threads=128) as (bx, by):
            a = T.alloc_shared((BM, BK // 2), F16)
            e = T.alloc_shared((BM, BK // 16), "int16")
            b = T.alloc_shared((BK, BN), F16)
            c = T.alloc_fragment((BM, BN), F32)
            T.clear(c)
            for k in T.Pipelined(K // BK, num_stages=1):
                T.copy(A[by * BM, k * BK // 2], a)
                T.copy(E[by * BM, k * BK // 16], e)
                T.copy(B[k * BK, bx * BN], b)
                T.gemm_sp(a, e, b, c)
            T.copy(c, C[by * BM, bx * BN])

    return main


def sparse_inputs(m, n, k):
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]

    def draw(g):
        choice = g.integers(0, 6, (m, k // 4))
        nibble = np.array([i | j << 2 for i, j in pairs])[choice].reshape(m, -1, 4)
        e = (nibble << np.array([0, 4, 8, 12])).sum(2).astype(np.uint16).view(np.int16)
        return [g.uniform(-1, 1, (m, k // 2)).astype(F16), e, g.uniform(-1, 1, (k, n)).astype(F16)]

    return draw


def sparse_reference(a, e, b):
    a, b = wide(a, b)
    m, k = a.shape[0], b.shape[0]
    nibble = (e.view(np.uint16)[:, :, None] >> np.array([0, 4, 8, 12])) & 15
    nibble = nibble.reshape(m, k // 4)
    dense = np.zeros((m, k // 4, 4))
    values = a.reshape(m, k // 4, 2)
    for slot in (0, 1):
        np.put_along_axis(dense, ((nibble >> 2 * slot) & 3)[..., None], values[:, :, slot : slot + 1], 2)
    return dense.reshape(m, k) @ b


@tilelang.jit(out_idx=[2])
def int4_product(M, N, K):
    """Products of packed int4 tiles with int32 sums."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "int4"), B: T.Tensor((N, K), "int4"), C: T.Tensor((M, N), I32)):
        with T.Kernel(N // 32, M // 64, threads=128) as (bx, by):
            a = T.alloc_shared((64, 64), "int4")
            b = T.alloc_shared((32, 64), "int4")
            c = T.alloc_fragment((64, 32), I32)
            T.clear(c)
            for k in T.Pipelined(K // 64, num_stages=2):
                T.copy(A[by * 64, k * 64], a)
                T.copy(B[bx * 32, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 32])

    return main


def nibbles(packed):
    u = packed.view(np.uint8)
    codes = np.stack([u & 15, u >> 4], -1).reshape(len(u), -1).astype(np.int64)
    return np.where(codes > 7, codes - 16, codes)


@tilelang.jit(out_idx=[1])
def shared_words(n):
    """Words of shared memory by the named loads and stores, halves turned inside of each."""

    @T.prim_func
    def main(A: T.Tensor((n, 256), F16), B: T.Tensor((n, 256), F16)):
        with T.Kernel(n, threads=32) as b:
            tx = T.get_thread_binding()
            s = T.alloc_shared((256,), F16)
            T.sts128(s[tx * 8], T.ldg128(A[b, tx * 8]))
            T.sync_threads()
            T.stg128(B[b, (31 - tx) * 8], T.lds128(s[tx * 8]))

    return main


@tilelang.jit(out_idx=[3], pass_configs={tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: False})
def two_products(M, N, K, L, BM=64, BK=32):
    """(A @ B) @ C with the intermediate tile kept in shared memory, its storage shared with the stages before it."""

    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((K, N), F16), C: T.Tensor((N, L), F16), D: T.Tensor((M, L), F16)):
        with T.Kernel(T.ceildiv(M, BM), threads=128) as by:
            a = T.alloc_shared((BM, BK), F16)
            b = T.alloc_shared((BK, N), F16)
            mid = T.alloc_shared((BM, N), F16)
            c = T.alloc_shared((BK, L), F16)
            ab = T.alloc_fragment((BM, N), F32)
            d = T.alloc_fragment((BM, L), F32)
            T.annotate_layout({mid: make_swizzled_layout(mid)})
            T.clear(ab)
            T.clear(d)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
                T.copy(A[by * BM, k * BK], a)
                T.copy(B[k * BK, 0], b)
                T.gemm(a, b, ab)
            T.copy(ab, mid)
            for k in T.Pipelined(N // BK, num_stages=2):
                T.copy(C[k * BK, 0], c)
                T.gemm(mid[:, k * BK : (k + 1) * BK], c, d)
            T.copy(d, D[by * BM, 0])

    return main


def two_products_reference(a, b, c):
    a, b, c = wide(a, b, c)
    return (a @ b) @ c


QKV = drawn(*(uniform((200, 2, 64), F16) for _ in range(3)))
PROGRAMS = [
    Program(
        "overlapped_attention",
        overlapped_attention,
        dict(heads=2, seq=200, dim=64),
        QKV,
        attention_reference(False),
        Bound(F16, via=((F16, 1.0),)),
        absent=HOPPER_ONLY,
    ),
    Program(
        "multicast_gemm",
        multicast_gemm,
        dict(M=64, N=128, K=128),
        drawn(uniform((64, 128), F16), uniform((128, 128), F16)),
        product_t,
        Bound(F16, 128, 128.0),
        absent=HOPPER_ONLY,
    ),
    Program(
        "bulk_reduction",
        bulk_reduction,
        dict(M=64, N=128, K=128),
        drawn(uniform((64, 128), F16), uniform((128, 128), F16), zeros((64, 128))),
        product_t,
        Bound(F32, 128, 128.0),
        changed=(2,),
        absent=HOPPER_ONLY,
    ),
    Program(
        "register_wgmma",
        register_wgmma,
        dict(M=64, N=64, K=128),
        drawn(integers((64, 128), -16, 16, "int8"), uniform((128, 64), F16)),
        lambda a, b: product(a / 16, b),
        Bound(F32, 128, 128.0),
        absent=HOPPER_ONLY,
    ),
    Program(
        "async_copies",
        async_copies,
        dict(M=64, N=64, K=192),
        drawn(uniform((64, 192), BF16), uniform((64, 192), BF16)),
        product_t,
        Bound(BF16, 192, 192.0),
    ),
    Program(
        "annotated_pipeline",
        annotated_pipeline,
        dict(M=70, N=72, K=128),
        drawn(uniform((70, 128), F16), uniform((128, 72), F16)),
        product,
        Bound(F16, 128, 128.0),
    ),
    Program(
        "loop_layouts",
        loop_layouts,
        dict(M=16, N=64),
        drawn(uniform((16, 64))),
        lambda a: wide(a)[0] * 3 + 1,
        Bound(F32, 2, 4.0),
    ),
    Program(
        "compact_by_votes",
        compact_by_votes,
        dict(N=300),
        drawn(uniform((300,)), 0.25),
        compact_reference,
        EXACT,
        arrange=lambda r: [np.sort(r[0]), r[1]],
    ),
    Program("bitonic_sort", bitonic_sort, dict(n=3), drawn(uniform((3, 64))), lambda a: np.sort(a, 1), EXACT),
    Program(
        "dot_of_bytes",
        dot_of_bytes,
        dict(M=40, K=64),
        drawn(integers((40, 64), -128, 128, "int8"), integers((64,), -128, 128, "int8")),
        lambda a, b: a.astype(np.int64) @ b.astype(np.int64),
        EXACT,
    ),
    Program(
        "vector_slices", vector_slices, dict(M=4, N=64), drawn(uniform((4, 64))), vector_slices_reference, Bound(F32, 2, 4.0)
    ),
    Program(
        "aliased_update",
        aliased_update,
        dict(N=300),
        drawn(uniform((300,)), zeros((300,)), uniform((300,))),
        lambda x, y, w: wide(x)[0] * wide(w)[0],
        changed=(1,),
    ),
    Program(
        "sparse_rows",
        sparse_rows,
        dict(M=64, N=64, K=128),
        sparse_inputs(64, 64, 128),
        sparse_reference,
        Bound(F32, 128, 128.0),
    ),
    Program(
        "int4_product",
        int4_product,
        dict(M=64, N=32, K=128),
        drawn(integers((64, 64), -128, 128, "int8"), integers((32, 64), -128, 128, "int8")),
        lambda a, b: nibbles(a) @ nibbles(b).T,
        EXACT,
    ),
    Program(
        "shared_words",
        shared_words,
        dict(n=2),
        drawn(uniform((2, 256), F16)),
        lambda a: a.reshape(2, 32, 8)[:, ::-1].reshape(2, 256).astype(float),
        EXACT,
    ),
    Program(
        "two_products",
        two_products,
        dict(M=100, N=128, K=96, L=64),
        drawn(uniform((100, 96), F16), uniform((96, 128), F16), uniform((128, 64), F16)),
        two_products_reference,
        Bound(F16, via=((F16, 600.0),)),
    ),
]
