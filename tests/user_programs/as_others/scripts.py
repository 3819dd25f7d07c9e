"""In the manner of scripts that try a feature or generate a kernel: layouts by hand, Hopper's instructions, PTX names."""

import numpy as np

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from .catalogue import EXACT, HOPPER_ONLY, Bound, Program, drawn, integers, uniform, wide, zeros

F16, BF16, F32, I32 = "float16", "bfloat16", "float32", "int32"
LOG2E = 1.44269504
NO_MBARRIER = {"cpu": "mbarriers are Hopper's", "sm_80": "mbarriers are Hopper's"}
CUDA_TEXT = {name: "the function is CUDA text" for name in ("tile", "cpu", "sm_80", "sm_90a")}


def product(a, b):
    a, b = wide(a, b)
    return a @ b


def product_t(a, b):
    a, b = wide(a, b)
    return a @ b.T


def attention_reference(q, k, v):
    q, k, v = wide(q, k, v)
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    e = np.exp(s - s.max(3, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", e / e.sum(3, keepdims=True), v)


def generated_attention(batch, heads, seq, dim, block_m=64, block_n=32, threads=128):
    """As a generator of attention kernels prints it: state rows wholly in one thread, scores in a layout by hand."""
    shape, scale = (batch, seq, heads, dim), dim**-0.5

    def xor_layout(buf):
        width = 64 // DTYPE_BYTES
        return T.Layout(buf.shape, lambda i, j: [i, (j // 8 ^ i % (width // 8)) * 8 + j % 8])

    DTYPE_BYTES = 2

    @T.prim_func
    def main(Q: T.Tensor(shape, F16), K: T.Tensor(shape, F16), V: T.Tensor(shape, F16), O: T.Tensor(shape, F16)):
        with T.Kernel(T.ceildiv(seq, block_m), heads, batch, threads=threads) as (bx, by, bz):
            q_shared = T.alloc_shared([block_m, dim], F16)
            k_shared = T.alloc_shared([block_n, dim], F16)
            v_shared = T.alloc_shared([block_n, dim], F16)
            s_shared = T.alloc_shared([block_m, block_n], F32)
            scores = T.alloc_fragment([block_m, block_n], F32)
            cast = T.alloc_fragment([block_m, block_n], F16)
            rows = T.alloc_fragment([block_m, block_n], F32)
            acc_o = T.alloc_fragment([block_m, dim], F32)
            m = T.alloc_fragment([block_m], F32)
            m_old = T.alloc_fragment([block_m], F32)
            r = T.alloc_fragment([block_m], F32)
            T.annotate_layout(
                {
                    q_shared: make_swizzled_layout(q_shared),
                    k_shared: xor_layout(k_shared),
                    rows: T.Fragment(rows.shape, forward_thread_fn=lambda i, j: i, forward_index_fn=lambda i, j: j),
                }
            )
            T.copy(Q[bz, bx * block_m : (bx + 1) * block_m, by, :], q_shared)
            T.fill(acc_o, 0)
            T.fill(r, 0)
            T.fill(m, -T.infinity(F32))
            for k in T.Pipelined(T.ceildiv(seq, block_n), num_stages=1):
                T.copy(K[bz, k * block_n : (k + 1) * block_n, by, :], k_shared)
                T.clear(scores)
                T.gemm(q_shared, k_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(scores, s_shared)
                T.copy(s_shared, rows)
                for i, j in T.Parallel(block_m, block_n):
                    rows[i, j] = T.if_then_else(k * block_n + j < seq, rows[i, j] * scale, -T.infinity(F32))
                T.copy(m, m_old)
                T.reduce_max(rows, m, dim=1, clear=False)
                for i, j in T.Parallel(block_m, block_n):
                    rows[i, j] = T.exp(rows[i, j] - m[i])
                T.copy(rows, s_shared)
                for i in T.Parallel(block_m):
                    r[i] *= T.exp(m_old[i] - m[i])
                T.reduce_sum(rows, r, dim=1, clear=False)
                T.copy(s_shared, cast)
                for i, j in T.Parallel(block_m, dim):
                    acc_o[i, j] *= T.exp(m_old[i] - m[i])
                T.copy(V[bz, k * block_n : (k + 1) * block_n, by, :], v_shared)
                T.gemm(cast, v_shared, acc_o, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_m, dim):
                acc_o[i, j] /= r[i]
            T.copy(acc_o, O[bz, bx * block_m : (bx + 1) * block_m, by, :])

    return main


def row_in_a_thread(rows, cols, threads=64):
    """`T.Fragment` with a thread function alone: the rest of a row lies in its thread, in order."""

    @T.prim_func
    def main(A: T.Tensor((rows, cols), F32), B: T.Tensor((rows, cols), F32), S: T.Tensor((rows,), F32)):
        with T.Kernel(1, threads=threads):
            f = T.alloc_fragment((rows, cols), F32)
            s = T.alloc_fragment((rows,), F32)
            T.annotate_layout({f: T.Fragment(f.shape, forward_thread_fn=lambda i, j: i)})
            T.copy(A, f)
            T.reduce_sum(f, s, dim=1)
            for i, j in T.Parallel(rows, cols):
                f[i, j] /= s[i]
            T.copy(f, B)
            T.copy(s, S)

    return main


def sigmoid_attention(batch, heads, seq, dim, block_m=64, block_n=64):
    """A swizzle in the caller's own words on a tile that arrives four-dimensional, with stages (panels or none)."""
    shape, scale = (batch, seq, heads, dim), dim**-0.5

    @T.prim_func
    def main(Q: T.Tensor(shape, F16), K: T.Tensor(shape, F16), V: T.Tensor(shape, F16), O: T.Tensor(shape, F16)):
        with T.Kernel(T.ceildiv(seq, block_m), heads, batch, threads=128) as (bx, by, bz):
            q = T.alloc_shared((block_m, dim), F16)
            k_s = T.alloc_shared((block_n, dim), F16)
            v_s = T.alloc_shared((block_n, dim), F16)
            s = T.alloc_fragment((block_m, block_n), F32)
            p = T.alloc_fragment((block_m, block_n), F16)
            o = T.alloc_fragment((block_m, dim), F32)
            T.annotate_layout({q: make_swizzled_layout(q), k_s: make_swizzled_layout(k_s), v_s: make_swizzled_layout(v_s)})
            T.copy(Q[bz, bx * block_m : (bx + 1) * block_m, by, :], q)
            T.clear(o)
            for k in T.Pipelined(T.ceildiv(seq, block_n), num_stages=2):
                T.copy(K[bz, k * block_n : (k + 1) * block_n, by, :], k_s)
                T.gemm(q, k_s, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(block_m, block_n):
                    s[i, j] = T.if_then_else(k * block_n + j < seq, 0.5 * T.tanh(s[i, j] * scale * 0.5) + 0.5, 0.0)
                T.copy(s, p)
                T.copy(V[bz, k * block_n : (k + 1) * block_n, by, :], v_s)
                T.gemm(p, v_s, o, policy=T.GemmWarpPolicy.FullRow)
            T.copy(o, O[bz, bx * block_m : (bx + 1) * block_m, by, :])

    return main


def sigmoid_attention_reference(q, k, v):
    q, k, v = wide(q, k, v)
    return np.einsum("bhqk,bkhd->bqhd", 1 / (1 + np.exp(-np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5)), v)


def local_layouts(n=128):
    """A script that annotates everything, a thread's own array too."""

    @T.prim_func
    def main(A: T.Tensor((n, 8), F16), B: T.Tensor((n, 8), F16)):
        with T.Kernel(1, threads=n):
            t = T.get_thread_binding()
            own = T.alloc_local((8,), F16)
            T.annotate_layout({own: T.Fragment((8,), forward_thread_fn=lambda i: 0, forward_index_fn=lambda i: i)})
            for i in T.vectorized(8):
                own[i] = A[t, i]
            for i in T.vectorized(8):
                B[t, i] = own[7 - i]

    return main


@tilelang.jit(out_idx=[-1])
def hopper_gemm(M, N, K, BM=128, BN=128, BK=64, stages=2):
    """Producer and consumer by `T.ws`, wgmma without a wait in each step, the result stored by TMA."""

    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((N, K), F16), C: T.Tensor((M, N), F16)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=256) as (bx, by):
            a = T.alloc_shared((stages, BM, BK), F16)
            b = T.alloc_shared((stages, BN, BK), F16)
            c_s = T.alloc_shared((BM, BN), F16)
            c = T.alloc_fragment((BM, BN), F32)
            full = T.alloc_barrier([128] * stages)
            empty = T.alloc_barrier([128] * stages)
            with T.ws(1):
                T.dec_max_nreg(24)
                for k in T.serial(K // BK):
                    T.mbarrier_wait_parity(mbarrier=empty[k % stages], parity=((k // stages) & 1) ^ 1)
                    T.tma_copy(A[by * BM : (by + 1) * BM, k * BK : (k + 1) * BK], a[k % stages, :, :], barrier=full[k % stages])
                    T.tma_copy(B[bx * BN : (bx + 1) * BN, k * BK : (k + 1) * BK], b[k % stages, :, :], barrier=full[k % stages])
                    T.mbarrier_arrive(mbarrier=full[k % stages])
            with T.ws(0):
                T.inc_max_nreg(240)
                for k in T.serial(K // BK):
                    T.mbarrier_wait_parity(mbarrier=full[k % stages], parity=(k // stages) & 1)
                    T.wgmma_gemm(a[k % stages, :, :], b[k % stages, :, :], c, transpose_B=True, clear_accum=(k == 0))
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(mbarrier=empty[k % stages])
                T.copy(c, c_s)
                T.fence_proxy_async()
                T.copy(c_s, C[by * BM, bx * BN])

    return main


@tilelang.jit(out_idx=[-1])
def column_slices(M, N, BM=64):
    """TMA loads of column slices into one wide tile, one barrier for all of them; stores by TMA too."""

    @T.prim_func
    def main(A: T.Tensor((M, N), BF16), B: T.Tensor((M, N), BF16)):
        with T.Kernel(T.ceildiv(M, BM), threads=128) as bx:
            s = T.alloc_shared((BM, N), BF16)
            bar = T.alloc_barrier(128)
            for c in T.unroll(N // 64):
                T.tma_copy(A[bx * BM : (bx + 1) * BM, c * 64 : (c + 1) * 64], s[:, c * 64 : (c + 1) * 64], barrier=bar)
            T.barrier_arrive(bar)
            T.barrier_wait(bar, 0)
            for i, j in T.Parallel(BM, N):
                s[i, j] = s[i, j] * T.bfloat16(2)
            T.fence_proxy_async()
            T.sync_threads()
            T.tma_copy(s, B[bx * BM : (bx + 1) * BM, 0:N])
            T.tma_store_wait(0)

    return main


@tilelang.jit
def cluster_exchange(X, block: int = 128):
    """Two blocks of a cluster give each other a row of 20 floats (80 bytes) and add what came."""
    N = T.const("N")
    X: T.Tensor((N, 20), F32)
    Y = T.empty((N, 20), F32)
    with T.ClusterKernel(N, cluster_dims=2, threads=block) as bx:
        mine = T.alloc_shared((20,), F32)
        theirs = T.alloc_shared((20,), F32)
        rank = T.block_rank_in_cluster()
        T.copy(X[bx, 0], mine)
        T.cluster_sync()
        T.copy_cluster(mine, theirs, dst_block=1 - rank)
        T.cluster_sync()
        for i in T.Parallel(20):
            Y[bx, i] = mine[i] + theirs[i]
    return Y


@tilelang.jit
def cluster_barriers(X):
    """Barriers are set up, the cluster meets in the order arrive, wait, and each block signals its neighbour's barrier."""
    N = T.const("N")
    X: T.Tensor((N, 64), F32)
    Y = T.empty((N, 64), F32)
    with T.ClusterKernel(N, cluster_dims=(2, 1, 1), threads=64) as bx:
        got = T.alloc_shared((64,), F32)
        s = T.alloc_shared((64,), F32)
        ready = T.alloc_cluster_barrier([64])
        rank = T.block_rank_in_cluster()
        T.ptx_fence_barrier_init()
        T.cluster_arrive_relaxed()
        T.cluster_wait()
        T.copy(X[bx, 0], s)
        T.sync_threads()
        T.copy_cluster(s, got, dst_block=rank ^ 1)
        T.mbarrier_arrive(ready[0], cta_id=rank ^ 1)
        T.mbarrier_wait_parity(ready[0], 0)
        for i in T.Parallel(64):
            Y[bx, i] = got[i] * 2.0
        T.cluster_arrive()
        T.cluster_wait()
    return Y


def swap_pairs(x):
    return wide(x)[0].reshape(-1, 2, x.shape[1])[:, ::-1].reshape(x.shape)


@tilelang.jit(out_idx=[-1])
def manual_cp_async(M, N, block=64, stages=2):
    """cp.async by its PTX name, groups counted by hand: a copy that runs one tile ahead."""

    @T.prim_func
    def main(A: T.Tensor((M, N), F16), B: T.Tensor((M, N), F16)):
        with T.Kernel(M, threads=block // 8) as bx:
            tx = T.get_thread_binding()
            s = T.alloc_shared((stages, block), F16)
            T.ptx_cp_async(T.access_ptr(s[0, tx * 8], "w", 8), T.access_ptr(A[bx, tx * 8], "r", 8), 8)
            T.ptx_commit_group()
            for k in T.serial(N // block):
                if k + 1 < N // block:
                    T.ptx_cp_async(
                        T.access_ptr(s[(k + 1) % stages, tx * 8], "w", 8),
                        T.access_ptr(A[bx, (k + 1) * block + tx * 8], "r", 8),
                        8,
                    )
                T.ptx_commit_group()
                T.ptx_wait_group(1)
                T.sync_threads()
                for v in T.serial(8):
                    B[bx, k * block + tx * 8 + v] = s[k % stages, block - 1 - (tx * 8 + v)]
                T.sync_threads()

    return main


@tilelang.jit
def split_k(A, B, C, split: int = 3, BM: int = 64, BN: int = 64, BK: int = 32):
    M, N, K = T.const("M N K")
    A: T.Tensor((M, K), BF16)
    B: T.Tensor((K, N), BF16)
    C: T.Tensor((M, N), F32)
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), split, threads=128) as (bx, by, bz):
        a = T.alloc_shared((BM, BK), BF16)
        b = T.alloc_shared((BK, BN), BF16)
        c_s = T.alloc_shared((BM, BN), F32)
        c = T.alloc_fragment((BM, BN), F32)
        T.clear(c)
        steps = T.ceildiv(T.ceildiv(K, BK), split)
        for k in T.Pipelined(steps, num_stages=2):
            T.copy(A[by * BM, (bz * steps + k) * BK], a)
            T.copy(B[(bz * steps + k) * BK, bx * BN], b)
            T.gemm(a, b, c)
        T.copy(c, c_s)
        for i, j in T.Parallel(BM, BN // 2):
            if by * BM + i < M and bx * BN + 2 * j < N:
                T.atomic_addx2(C[by * BM + i, bx * BN + 2 * j], c_s[i, 2 * j])


@tilelang.jit(out_idx=[-1])
def stream_k(M, N, K, workers=5, BM=64, BN=64, BK=32):
    """Each worker takes an equal range of k-steps over all tiles; partial tiles are added atomically to a zeroed output."""
    tiles_n, steps = -(-N // BN), -(-K // BK)
    total = -(-M // BM) * tiles_n * steps
    per = -(-total // workers)

    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((N, K), F16), C: T.Tensor((M, N), F32)):
        with T.Kernel(T.ceildiv(M * N, 256), threads=256) as bx:
            flat = T.reshape(C, (M * N,))
            i = bx * 256 + T.get_thread_binding()
            if i < M * N:
                flat[i] = 0.0
        with T.Kernel(workers, threads=128) as w:
            a = T.alloc_shared((BM, BK), F16)
            b = T.alloc_shared((BN, BK), F16)
            c = T.alloc_fragment((BM, BN), F32)
            at = T.alloc_var(I32, init=w * per)
            last = T.min((w + 1) * per, total)
            while at < last:
                tile = at // steps
                first = at % steps
                count = T.min(steps - first, last - at)
                T.clear(c)
                for k in T.serial(count):
                    T.copy(A[tile // tiles_n * BM, (first + k) * BK], a)
                    T.copy(B[tile % tiles_n * BN, (first + k) * BK], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.atomic_add(C[tile // tiles_n * BM, tile % tiles_n * BN], c)
                at += count

    return main


@tilelang.jit(out_idx=[-1])
def persistent_gemm(M, N, K, sms=3, BM=64, BN=64, BK=32):
    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((K, N), F16), C: T.Tensor((M, N), F16)):
        with T.Kernel(sms, threads=128) as block_id:
            a = T.alloc_shared((BM, BK), F16)
            b = T.alloc_shared((BK, BN), F16)
            c = T.alloc_fragment((BM, BN), F32)
            c_s = T.alloc_shared((BM, BN), F16)
            for bx, by in T.Persistent([T.ceildiv(M, BM), T.ceildiv(N, BN)], sms, block_id):
                T.clear(c)
                for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
                    T.copy(A[bx * BM, k * BK], a)
                    T.copy(B[k * BK, by * BN], b)
                    T.gemm(a, b, c)
                T.copy(c, c_s)
                T.copy(c_s, C[bx * BM, by * BN])

    return main


@tilelang.jit
def vector_words(X, Y, threads: int = 32):
    """128-bit loads and stores by their names, then lanes turned with shuffles and a packed addition of halves."""
    N = T.const("N")
    X: T.Tensor((N,), F16)
    Y: T.Tensor((N,), F16)
    with T.Kernel(T.ceildiv(N, threads * 8), threads=threads) as bx:
        tx = T.get_thread_binding()
        own = T.alloc_local((8,), F16)
        pairs = T.view(own, (4,), T.float16x2)
        at = (bx * threads + tx) * 8
        if at < N:
            T.stg128(Y[at], T.ldg128(X[at]))
            for v in T.vectorized(8):
                own[v] = X[at + v]
            for v in T.unroll(4):
                pairs[v] = T.add2(pairs[v], T.float16x2(T.float16(1), T.float16(2)))
            for v in T.vectorized(8):
                Y[at + v] = Y[at + v] * own[v]


def vector_words_reference(x, y):
    (x,) = wide(x)
    return x * (x + np.tile([1.0, 2.0], len(x) // 2)).astype(np.float16)


@tilelang.jit
def text_of_cuda(X, Y):
    """A device function in CUDA text, called by name with pointers."""
    N = T.const("N")
    X: T.Tensor((N,), F32)
    Y: T.Tensor((N,), F32)
    with T.Kernel(T.ceildiv(N, 128), threads=128) as bx:
        T.import_source(
            "TL_DEVICE void twice(float *out, const float *in, int n) { for (int i = 0; i < n; ++i) out[i] = 2.f * in[i]; }"
        )
        i = bx * 128 + T.get_thread_binding()
        if i < N:
            T.call_extern("handle", "twice", T.address_of(Y[i]), T.address_of(X[i]), 1)


@tilelang.jit
def dependent_launches(X, tail: float = 1.0):
    """Two launches that overlap by programmatic dependence, the second one with a hint for L2."""
    N = T.const("N")
    X: T.Tensor((N,), F32)
    W = T.empty((N,), F32)
    Y = T.empty((N,), F32)
    with T.Kernel(T.ceildiv(N, 128), threads=128) as bx:
        for i in T.Parallel(128):
            if bx * 128 + i < N:
                W[bx * 128 + i] = X[bx * 128 + i] * 2.0
        T.pdl_trigger()
    with T.Kernel(T.ceildiv(N, 128), threads=128) as bx:
        T.annotate_l2_hit_ratio({X: 0.8})
        T.pdl_sync()
        for i in T.Parallel(128):
            if bx * 128 + i < N:
                Y[bx * 128 + i] = W[bx * 128 + i] + T.clamp(X[bx * 128 + i], min_val=0.0, max_val=tail)
    return Y, W


def shared_pressure(n, tile=96):
    """Six tiles of 96 x 96 floats, never more than two alive: 216 KiB in all, where a block has 163 KiB (sm_80)."""

    @T.prim_func
    def main(A: T.Tensor((6, n, tile, tile), F32), O: T.Tensor((n, tile, tile), F32)):
        with T.Kernel(n, threads=256) as b:
            acc = T.alloc_fragment((tile, tile), F32)
            T.clear(acc)
            t0, t1, t2, t3, t4, t5 = (T.alloc_shared((tile, tile), F32) for _ in (0, 1, 2, 3, 4, 5))
            T.copy(A[0, b, 0, 0], t0)
            T.copy(A[1, b, 0, 0], t1)
            for i, j in T.Parallel(tile, tile):
                acc[i, j] += t0[i, j] * t1[j, i]
            T.copy(A[2, b, 0, 0], t2)
            T.copy(A[3, b, 0, 0], t3)
            for i, j in T.Parallel(tile, tile):
                acc[i, j] += t2[i, j] * t3[j, i]
            T.copy(A[4, b, 0, 0], t4)
            T.copy(A[5, b, 0, 0], t5)
            for i, j in T.Parallel(tile, tile):
                acc[i, j] += t4[i, j] * t5[j, i]
            T.copy(acc, O[b, 0, 0])

    return main


def shared_pressure_reference(a):
    (a,) = wide(a)
    return sum(a[k] * a[k + 1].transpose(0, 2, 1) for k in (0, 2, 4))


@tilelang.jit
def reversed_windows(X, shift: T.int32, W: int = 4):
    """Vector indices whose start may be negative: element by element they wrap or read the safe value, like a scalar index."""
    N = T.const("N")
    X: T.Tensor((N,), F32)
    Y = T.empty((N, W), F32)
    with T.Kernel(T.ceildiv(N, 32), threads=32) as bx:
        i = bx * 32 + T.get_thread_binding()
        if i < N:
            Y[i, 0:W] = X[T.Ramp(i - shift, 1, W)]
    return Y


def reversed_windows_reference(x, shift, w=4):
    at = np.arange(len(x))[:, None] - shift + np.arange(w)
    return np.where((at >= 0) & (at < len(x)), x[np.clip(at, 0, len(x) - 1)], 0)


@tilelang.jit
def sum_into_one(A, B):
    """The total of a vector by a reducer that one branch finishes when the flag asks for it."""
    N = T.const("N")
    A: T.Tensor((N,), F32)
    B: T.Tensor((2,), F32)
    with T.Kernel(1, threads=128):
        total = T.alloc_reducer((1,), F32, op="sum")
        most = T.alloc_reducer((1,), F32, op="max")
        out = T.alloc_fragment((1,), F32)
        T.reducer_init(total)
        T.reducer_init(most, -1e30)
        for i in T.Parallel(N):
            T.reducer_update(total[0], A[i] * A[i])
            T.reducer_update(most[0], A[i])
        T.finalize_reducer(total, out)
        T.copy(out, B[0:1])
        T.finalize_reducer(most, out)
        T.copy(out, B[1:2])


@tilelang.jit(out_idx=[1])
def global_transpose(m, n):
    """`T.transpose` of shared tiles with leading axes, and a layout expanded by an integer for their stages."""

    @T.prim_func
    def main(A: T.Tensor((2, m, n), F16), B: T.Tensor((2, n, m), F16)):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((2, m, n), F16)
            t = T.alloc_shared((2, n, m), F16)
            T.annotate_layout({s: T.Layout((m, n), lambda i, j: [i, (j + 2 * i) % n]).expand(2)})
            T.copy(A, s)
            T.transpose(s, t)
            T.copy(t, B)

    return main


@tilelang.jit(out_idx=[-1])
def tensor_core_by_hand(M, N, K, BM=64, BN=64, BK=32):
    """ldmatrix and mma through the emitter, as examples of intrinsics do."""
    from tilelang.cuda.intrinsics import TensorCoreIntrinEmitter, make_mma_swizzle_layout

    emitter = TensorCoreIntrinEmitter(
        a_dtype=F16, b_dtype=F16, accum_dtype=F32, a_transposed=False, b_transposed=True,
        block_row_warps=2, block_col_warps=2, warp_row_tiles=BM // 2, warp_col_tiles=BN // 2, chunk=BK,
    )  # fmt: skip
    warp_rows, warp_cols = emitter.warp_rows, emitter.warp_cols

    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((N, K), F16), C: T.Tensor((M, N), F32)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
            a_s = T.alloc_shared((BM, BK), F16)
            b_s = T.alloc_shared((BN, BK), F16)
            c_s = T.alloc_shared((BM // 16, BN // 16, 16, 16), F32)
            a_l = T.alloc_local((warp_rows * emitter.local_size_a,), F16)
            b_l = T.alloc_local((warp_cols * emitter.local_size_b,), F16)
            c_l = T.alloc_local((warp_rows * warp_cols * emitter.local_size_out,), F32)
            T.annotate_layout({a_s: make_mma_swizzle_layout(a_s), b_s: make_mma_swizzle_layout(b_s)})
            T.use_swizzle(panel_size=10)
            T.clear(c_l)
            for ko in T.Pipelined(K // BK, num_stages=2):
                for i, k in T.Parallel(BM, BK):
                    a_s[i, k] = A[by * BM + i, ko * BK + k]
                for j, k in T.Parallel(BN, BK):
                    b_s[j, k] = B[bx * BN + j, ko * BK + k]
                for ki in T.serial(BK // 16):
                    emitter.ldmatrix_a(a_l, a_s, ki)
                    emitter.ldmatrix_b(b_l, b_s, ki)
                    emitter.mma(a_l, b_l, c_l)
            emitter.stmatrix(c_l, c_s)
            for i, j in T.Parallel(BM, BN):
                C[by * BM + i, bx * BN + j] = c_s[i // 16, j // 16, i % 16, j % 16]

    return main


@tilelang.jit
def packed_lengths(X, W):
    """int4 rows of a run-time distance: element loads, arithmetic in int32, results stored as int4 again."""
    m = T.dynamic("m")
    N = T.const("N")
    X: T.Tensor((m, N), "int4")
    W: T.Tensor((m, N), "int4")
    with T.Kernel(m, threads=32) as r:
        for j in T.Parallel(N):
            W[r, j] = T.cast(T.min(T.max(T.cast(X[r, j], I32) + 1, -8), 7), "int4")


def nibbles(packed):
    u = packed.view(np.uint8)
    codes = np.stack([u & 15, u >> 4], -1).reshape(len(u), -1).astype(np.int32)
    return np.where(codes > 7, codes - 16, codes)


def packed_lengths_reference(x, w):
    q = np.minimum(nibbles(x) + 1, 7) & 15
    return (q[:, 0::2] | (q[:, 1::2] << 4)).astype(np.uint8).view(np.int8)


@tilelang.jit(out_idx=[2])
def double_gemm(M, N, K):
    @T.prim_func
    def main(A: T.Tensor((M, K), "float64"), B: T.Tensor((K, N), "float64"), C: T.Tensor((M, N), "float64")):
        with T.Kernel(T.ceildiv(N, 32), T.ceildiv(M, 32), threads=128) as (bx, by):
            a = T.alloc_shared((32, 16), "float64")
            b = T.alloc_shared((16, 32), "float64")
            c = T.alloc_fragment((32, 32), "float64")
            T.clear(c)
            for k in T.serial(T.ceildiv(K, 16)):
                T.copy(A[by * 32, k * 16], a)
                T.copy(B[k * 16, bx * 32], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 32, bx * 32])

    return main


def quads(g, shape=(1, 70, 2, 64)):
    return [g.uniform(-1, 1, shape).astype(F16) for _ in range(3)]


PAIR = drawn(uniform((100, 96), F16), uniform((136, 96), F16))
PROGRAMS = [
    Program(
        "generated_attention",
        generated_attention,
        dict(batch=1, heads=2, seq=70, dim=64),
        quads,
        attention_reference,
        Bound(F16, via=((F16, 1.0),)),
        out_idx=[3],
    ),
    Program(
        "row_in_a_thread",
        row_in_a_thread,
        dict(rows=64, cols=24),
        drawn(uniform((64, 24), low=0.1), zeros((64, 24)), zeros((64,))),
        lambda a, *_: (wide(a)[0] / wide(a)[0].sum(1, keepdims=True), wide(a)[0].sum(1)),
        Bound(F32, 32, 24.0),
        changed=(1, 2),
    ),
    Program(
        "sigmoid_attention",
        sigmoid_attention,
        dict(batch=1, heads=2, seq=200, dim=128),
        lambda g: quads(g, (1, 200, 2, 128)),
        sigmoid_attention_reference,
        Bound(F16, via=((F16, 200.0),)),
        out_idx=[3],
    ),
    Program(
        "local_layouts",
        local_layouts,
        {},
        drawn(uniform((128, 8), F16)),
        lambda a: a[:, ::-1].astype(np.float64),
        EXACT,
        out_idx=[1],
    ),
    Program(
        "hopper_gemm",
        hopper_gemm,
        dict(M=128, N=128, K=256),
        drawn(uniform((128, 256), F16), uniform((128, 256), F16)),
        product_t,
        Bound(F16, 256, 256.0),
        absent=HOPPER_ONLY,
    ),
    Program(
        "column_slices",
        column_slices,
        dict(M=100, N=192),
        drawn(uniform((100, 192), BF16)),
        lambda a: wide(a)[0] * 2,
        EXACT,
        absent=NO_MBARRIER,
    ),
    Program(
        "cluster_exchange",
        cluster_exchange,
        dict(N=4),
        drawn(uniform((4, 20))),
        lambda x: wide(x)[0] + swap_pairs(x),
        absent=HOPPER_ONLY,
    ),
    Program(
        "cluster_barriers",
        cluster_barriers,
        dict(N=4),
        drawn(uniform((4, 64))),
        lambda x: swap_pairs(x) * 2,
        EXACT,
        absent=HOPPER_ONLY,
    ),
    Program(
        "manual_cp_async",
        manual_cp_async,
        dict(M=3, N=256),
        drawn(uniform((3, 256), F16)),
        lambda a: a.reshape(3, 4, 64)[:, :, ::-1].reshape(3, 256).astype(np.float64),
        EXACT,
    ),
    Program(
        "split_k",
        split_k,
        dict(M=100, N=72, K=192),
        drawn(uniform((100, 192), BF16), uniform((192, 72), BF16), zeros((100, 72))),
        lambda a, b, c: product(a, b),
        Bound(F32, 256, 192.0),
        changed=(2,),
    ),
    Program("stream_k", stream_k, dict(M=100, N=136, K=96), PAIR, product_t, Bound(F32, 128, 96.0)),
    Program(
        "persistent_gemm",
        persistent_gemm,
        dict(M=100, N=136, K=96),
        drawn(uniform((100, 96), F16), uniform((96, 136), F16)),
        product,
        Bound(F16, 96, 96.0),
    ),
    Program(
        "vector_words",
        vector_words,
        dict(N=320),
        drawn(uniform((320,), F16), zeros((320,), F16)),
        vector_words_reference,
        Bound(F16),
        changed=(1,),
    ),
    Program(
        "text_of_cuda",
        text_of_cuda,
        dict(N=200),
        drawn(uniform((200,)), zeros((200,))),
        lambda x, y: wide(x)[0] * 2,
        EXACT,
        changed=(1,),
        absent=CUDA_TEXT,
    ),
    Program(
        "dependent_launches",
        dependent_launches,
        dict(N=300),
        drawn(uniform((300,))),
        lambda x: (wide(x)[0] * 2 + np.clip(wide(x)[0], 0, 1), wide(x)[0] * 2),
    ),
    Program(
        "shared_pressure",
        shared_pressure,
        dict(n=2),
        drawn(uniform((6, 2, 96, 96))),
        shared_pressure_reference,
        Bound(F32, 3, 3.0),
        out_idx=[1],
    ),
    Program("reversed_windows", reversed_windows, dict(N=70), drawn(uniform((70,)), 2), reversed_windows_reference, EXACT),
    Program(
        "sum_into_one",
        sum_into_one,
        dict(N=300),
        drawn(uniform((300,)), zeros((2,))),
        lambda a, b: np.array([(wide(a)[0] ** 2).sum(), a.max()]),
        Bound(F32, 300, 300.0),
        changed=(1,),
    ),
    Program(
        "global_transpose",
        global_transpose,
        dict(m=24, n=40),
        drawn(uniform((2, 24, 40), F16)),
        lambda a: a.transpose(0, 2, 1).astype(np.float64),
        EXACT,
    ),
    Program(
        "tensor_core_by_hand",
        tensor_core_by_hand,
        dict(M=128, N=64, K=96),
        drawn(uniform((128, 96), F16), uniform((64, 96), F16)),
        product_t,
        Bound(F32, 96, 96.0),
    ),
    Program(
        "packed_lengths",
        packed_lengths,
        dict(N=46),
        drawn(integers((5, 23), -128, 128, "int8"), zeros((5, 23), "int8")),
        packed_lengths_reference,
        EXACT,
        changed=(1,),
    ),
    Program(
        "double_gemm",
        double_gemm,
        dict(M=40, N=50, K=70),
        drawn(uniform((40, 70), "float64"), uniform((70, 50), "float64")),
        product,
        Bound("float64", 70, 70.0, "float64"),
    ),
]
