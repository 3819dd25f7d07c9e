"""In the manner of kernels that give warps different work: roles by comparison, by warp index, by `T.ws`, small states."""

import numpy as np

import tilelang
import tilelang.language as T

from .catalogue import EXACT, Bound, Program, drawn, integers, uniform, wide, zeros

F16, BF16, F32, I32 = "float16", "bfloat16", "float32", "int32"
LOG2E = 1.44269504
NO_MBARRIER = {"cpu": "mbarriers are Hopper's", "sm_80": "mbarriers are Hopper's"}
PLAIN = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}


@tilelang.jit(out_idx=[1, 2])
def one_warp_of_three(n, threads=96):
    """The first warp scales in place a row's copy, the other two form sums of it."""

    @T.prim_func
    def main(A: T.Tensor((n, 64), F32), B: T.Tensor((n, 64), F32), S: T.Tensor((n,), F32)):
        with T.Kernel(n, threads=threads) as b:
            s = T.alloc_shared((64,), F32)
            T.copy(A[b, 0], s)
            if T.get_thread_binding() < 32:
                for i in T.Parallel(64):
                    B[b, i] = s[i] * 2
            else:
                f = T.alloc_fragment((64,), F32)
                t = T.alloc_fragment((1,), F32)
                T.copy(s, f)
                T.reduce_sum(f, t)
                for i in T.Parallel(1):
                    S[b + i] = t[0]

    return main


@tilelang.jit(out_idx=[2])
def loader_warp(M, N, K, BM=64, BN=64, BK=32, stages=2):
    """288 threads: two warp groups multiply, the ninth warp alone feeds them by TMA."""

    @T.prim_func
    def main(A: T.Tensor((M, K), F16), B: T.Tensor((K, N), F16), C: T.Tensor((M, N), F16)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, 2 * BM), threads=288) as (bx, by):
            tx = T.get_thread_binding()
            a = T.alloc_shared((stages, 2 * BM, BK), F16)
            b = T.alloc_shared((stages, BK, BN), F16)
            c = T.alloc_fragment((2 * BM, BN), F32)
            full = T.alloc_barrier([32] * stages)
            empty = T.alloc_barrier([256] * stages)
            if tx >= 256 and tx < 288:
                for k in T.serial(T.ceildiv(K, BK)):
                    T.mbarrier_wait_parity(empty[k % stages], (k // stages + 1) % 2)
                    T.tma_copy(
                        A[by * 2 * BM : (by + 1) * 2 * BM, k * BK : (k + 1) * BK], a[k % stages, :, :], barrier=full[k % stages]
                    )
                    T.tma_copy(B[k * BK : (k + 1) * BK, bx * BN : (bx + 1) * BN], b[k % stages, :, :], barrier=full[k % stages])
                    T.mbarrier_arrive(full[k % stages])
            else:
                T.clear(c)
                for k in T.serial(T.ceildiv(K, BK)):
                    T.mbarrier_wait_parity(full[k % stages], (k // stages) % 2)
                    T.gemm(a[k % stages, :, :], b[k % stages, :, :], c)
                    T.mbarrier_arrive(empty[k % stages])
                T.copy(c, C[by * 2 * BM, bx * BN])

    return main


@tilelang.jit(out_idx=[2])
def consumers_then_ws(M, N, K, BM=64, BN=64, BK=64, stages=2):
    """The producer behind a comparison and a `T.ws` of the same threads; the consumer behind the else."""
    CONS = 128

    @T.prim_func
    def main(A: T.Tensor((M, K), BF16), B: T.Tensor((N, K), BF16), C: T.Tensor((M, N), BF16)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=CONS + 128) as (bx, by):
            tx = T.get_thread_binding()
            a = T.alloc_shared((stages, BM, BK), BF16)
            b = T.alloc_shared((stages, BN, BK), BF16)
            c = T.alloc_fragment((BM, BN), F32)
            full = T.alloc_barrier([128] * stages)
            empty = T.alloc_barrier([CONS] * stages)
            if tx >= CONS:
                with T.ws(1):
                    for k in T.serial(T.ceildiv(K, BK)):
                        T.barrier_wait(empty[k % stages], (k // stages + 1) & 1)
                        T.copy(A[by * BM, k * BK], a[k % stages, :, :])
                        T.copy(B[bx * BN, k * BK], b[k % stages, :, :])
                        T.barrier_arrive(full[k % stages])
            else:
                with T.ws(0):
                    T.clear(c)
                    for k in T.serial(T.ceildiv(K, BK)):
                        T.barrier_wait(full[k % stages], (k // stages) & 1)
                        T.gemm(a[k % stages, :, :], b[k % stages, :, :], c, transpose_B=True)
                        T.barrier_arrive(empty[k % stages])
                    T.copy(c, C[by * BM, bx * BN])

    return main


@tilelang.jit(out_idx=[3])
def decode_by_warps(heads, dim, block=64):
    """One request: two warps fetch keys, two fetch values, all compute; a mask by position."""
    seq = T.dynamic("seq")
    scale = dim**-0.5 * LOG2E

    @T.prim_func
    def main(
        Q: T.Tensor((heads, dim), F16),
        K: T.Tensor((seq, dim), F16),
        V: T.Tensor((seq, dim), F16),
        O: T.Tensor((heads, dim), F16),
    ):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            q = T.alloc_shared((heads, dim), F16)
            k_s = T.alloc_shared((block, dim), F16)
            v_s = T.alloc_shared((block, dim), F16)
            s = T.alloc_fragment((heads, block), F32)
            p = T.alloc_shared((heads, block), F16)
            o = T.alloc_fragment((heads, dim), F32)
            m, m_old, corr, row, l = (T.alloc_fragment((heads,), F32) for _ in (0, 1, 2, 3, 4))
            T.copy(Q, q)
            T.clear(o)
            T.clear(l)
            T.fill(m, -1e30)
            for k in T.serial(T.ceildiv(seq, block)):
                if tx < 64:
                    T.copy(K[k * block, 0], k_s)
                if tx >= 64:
                    for i, j in T.Parallel(block, dim):
                        v_s[i, j] = T.if_then_else(k * block + i < seq, V[k * block + i, j], T.float16(0))
                T.sync_threads()
                T.gemm(q, k_s, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(heads, block):
                    s[i, j] = T.if_then_else(k * block + j < seq, s[i, j] * scale, -T.infinity(F32))
                T.copy(m, m_old)
                T.reduce_max(s, m, dim=1, clear=False)
                for i in T.Parallel(heads):
                    corr[i] = T.exp2(m_old[i] - m[i])
                for i, j in T.Parallel(heads, block):
                    s[i, j] = T.exp2(s[i, j] - m[i])
                T.reduce_sum(s, row, dim=1)
                for i in T.Parallel(heads):
                    l[i] = l[i] * corr[i] + row[i]
                for i, j in T.Parallel(heads, dim):
                    o[i, j] *= corr[i]
                T.copy(s, p)
                T.gemm(p, v_s, o)
            for i, j in T.Parallel(heads, dim):
                o[i, j] /= l[i]
            T.copy(o, O)

    return main


def decode_reference(q, k, v):
    q, k, v = wide(q, k, v)
    e = np.exp(q @ k.T * q.shape[1] ** -0.5)
    return e / e.sum(1, keepdims=True) @ v


@tilelang.jit(out_idx=[-1])
def norm_in_first_warp(N, eps=1e-5):
    """Warp 0 finds the scale of a row from partial sums of all warps and leaves it in shared memory."""
    M = T.dynamic("M")

    @T.prim_func
    def main(X: T.Tensor((M, N), F16), Y: T.Tensor((M, N), F16)):
        with T.Kernel(M, threads=128) as b:
            tx = T.get_thread_binding()
            part = T.alloc_shared((4,), F32)
            scale = T.alloc_shared((1,), F32)
            v = T.alloc_var(F32, init=0.0)
            for k in T.serial(T.ceildiv(N, 128)):
                if k * 128 + tx < N:
                    v += T.cast(X[b, k * 128 + tx], F32) * T.cast(X[b, k * 128 + tx], F32)
            total = T.warp_reduce_sum(v)
            if T.get_lane_idx() == 0:
                part[T.get_warp_idx()] = total
            T.sync_threads()
            if T.get_warp_idx_sync() == 0:
                f = T.alloc_fragment((4,), F32)
                s = T.alloc_fragment((1,), F32)
                T.copy(part, f)
                T.reduce_sum(f, s)
                for i in T.Parallel(1):
                    scale[i] = T.rsqrt(s[0] / N + eps)
            T.sync_threads()
            for i in T.Parallel(N):
                Y[b, i] = X[b, i] * scale[0]

    return main


@tilelang.jit(out_idx=[-1])
def roles_of_three(n, rows=16):
    """Fill, copy and reduce each by other warps of one block, then all threads join the three results."""

    @T.prim_func
    def main(A: T.Tensor((n, rows, 32), F32), O: T.Tensor((n, rows), F32)):
        with T.Kernel(n, threads=128) as b:
            warp = T.get_thread_binding() // 32
            ones = T.alloc_shared((rows,), F32)
            first = T.alloc_shared((rows, 32), F32)
            sums = T.alloc_shared((rows,), F32)
            if warp == 0:
                T.fill(ones, 1.0)
            elif warp == 1:
                T.copy(A[b, 0, 0], first)
            elif warp < 4:
                t = T.alloc_fragment((rows, 32), F32)
                r = T.alloc_fragment((rows,), F32)
                T.copy(A[b, 0, 0], t)
                T.reduce_sum(t, r, dim=1)
                T.copy(r, sums)
            T.sync_threads()
            for i in T.Parallel(rows):
                O[b, i] = sums[i] + ones[i] + first[i, 0]

    return main


@tilelang.jit(out_idx=[-1])
def half_blocks(n, iters=5):
    """The lower half of the threads normalises rows, the upper half columns, `iters` times, meeting in between."""

    @T.prim_func
    def main(A: T.Tensor((n, 2, 8, 8), F32), O: T.Tensor((n, 2, 8, 8), F32)):
        with T.Kernel(n, threads=64) as b:
            tx = T.get_thread_binding()
            if tx < 32:
                m = T.alloc_fragment((8, 8), F32)
                r = T.alloc_fragment((8,), F32)
                T.copy(A[b, 0, 0:8, 0:8], m)
                for _ in T.serial(iters):
                    T.reduce_sum(m, r, dim=1)
                    for i, j in T.Parallel(8, 8):
                        m[i, j] = m[i, j] / r[i] + 1e-3
                T.copy(m, O[b, 0, 0:8, 0:8])
            else:
                m2 = T.alloc_fragment((8, 8), F32)
                c = T.alloc_fragment((8,), F32)
                T.copy(A[b, 1, 0:8, 0:8], m2)
                for _ in range(iters):
                    T.reduce_sum(m2, c, dim=0)
                    for i, j in T.Parallel(8, 8):
                        m2[i, j] = m2[i, j] / c[j] + 1e-3
                T.copy(m2, O[b, 1, 0:8, 0:8])

    return main


def half_blocks_reference(a):
    (a,) = wide(a)
    out = a.copy()
    for _ in range(5):
        out[:, 0] = out[:, 0] / out[:, 0].sum(2, keepdims=True) + 1e-3
        out[:, 1] = out[:, 1] / out[:, 1].sum(1, keepdims=True) + 1e-3
    return out


@tilelang.jit
def counters(A, B):
    """Updates that every thread writes alike: a shared counter, a single element copied, a flag in global memory."""
    N = T.const("N")
    A: T.Tensor((N,), F32)
    B: T.Tensor((N,), F32)
    steps = T.empty((2,), I32)
    with T.Kernel(1, threads=64):
        count = T.alloc_shared((2,), I32)
        row = T.alloc_shared((N,), F32)
        T.fill(count, 0)
        T.copy(A, row)
        for k in T.serial(N // 2):
            T.copy(row[N - 1 - k], B[k])
            count[0] = count[0] + 1
        count[1] += 3
        T.copy(row[0 : N // 2], B[N // 2 : N])
        T.copy(count, steps)
    return steps


@tilelang.jit(out_idx=[-1])
def scatter_by_local(tokens, hidden, topk):
    """Positions of a token in an array of the thread, filled by T.copy; tiles move where one is not negative."""

    @T.prim_func
    def main(
        x: T.Tensor((tokens, hidden), BF16),
        pos: T.Tensor((tokens, topk), I32),
        w: T.Tensor((tokens, topk), F32),
        n: T.Tensor((1,), I32),
        out: T.Tensor((tokens, hidden), F32),
    ):
        with T.Kernel(tokens, threads=64) as t:
            p = T.alloc_local((topk,), I32)
            wt = T.alloc_local((topk,), F32)
            acc = T.alloc_fragment((hidden,), F32)
            T.copy(pos[t, 0], p)
            T.copy(w[t, 0], wt)
            T.clear(acc)
            for k in T.serial(topk):
                if p[k] >= 0 and p[k] < n[0]:
                    tile = T.alloc_shared((hidden,), BF16)
                    T.copy(x[p[k], 0], tile)
                    for i in T.Parallel(hidden):
                        acc[i] += tile[i] * wt[k]
            T.copy(acc, out[t, 0])

    return main


def scatter_by_local_reference(x, pos, w, n):
    x, w = wide(x, w)
    return (np.where((pos >= 0) & (pos < n[0]), w, 0)[..., None] * x[np.clip(pos, 0, len(x) - 1)]).sum(1)


@tilelang.jit(out_idx=[1])
def random_in_parallel(N, seed=3):
    """A generator for each iteration, begun inside of the parallel loop with the element's number as sequence."""

    @T.prim_func
    def main(X: T.Tensor((N,), F32), Y: T.Tensor((N,), F32)):
        with T.Kernel(T.ceildiv(N, 128), threads=128) as bx:
            for i in T.Parallel(128):
                if bx * 128 + i < N:
                    T.rng_init(seed, bx * 128 + i)
                    Y[bx * 128 + i] = X[bx * 128 + i] + T.rng_rand_float()

    return main


@tilelang.jit
def guarded_reducers(X, G, n):
    """Sums, largest and count of guarded elements in one pass, by the older reducers that all threads may read."""
    M, N = T.const("M N")
    X: T.Tensor((M, N), F32)
    G: T.Tensor((N,), F32)
    n: T.Tensor((1,), I32)
    with T.Kernel(T.ceildiv(M, 16), threads=128) as b:
        col = T.alloc_reducer((N,), F32, op="sum", replication="all")
        tile = T.alloc_fragment((16, N), F32)
        T.clear(col)
        T.copy(X[b * 16, 0], tile)
        for i, j in T.Parallel(16, N):
            if b * 16 + i < n[0]:
                tile[i, j] = tile[i, j] * 2.0
                col[j] += tile[i, j]
        T.finalize_reducer(col)
        for j in T.Parallel(N):
            T.atomic_add(G[j], col[j])


@tilelang.jit
def branch_reducer(A, flags):
    """An epoch of a reducer that begins before a uniform branch and ends in both arms of it."""
    B, N = T.const("B N")
    A: T.Tensor((B, N), F32)
    flags: T.Tensor((B,), I32)
    out = T.empty((B,), F32)
    with T.Kernel(B, threads=64) as b:
        acc = T.alloc_reducer((1,), F32, op="sum")
        r = T.alloc_fragment((1,), F32)
        if flags[b] > 0:
            T.reducer_init(acc)
            for i in T.Parallel(N):
                T.reducer_update(acc[0], A[b, i])
            T.finalize_reducer(acc, r)
        else:
            T.clear(r)
        for i in T.Parallel(1):
            out[b + i] = r[0]
    return out


@tilelang.jit(out_idx=[1])
def named_barriers(n):
    """Two pairs of warps, each with its own named barrier, exchange halves in shared memory."""

    @T.prim_func
    def main(A: T.Tensor((n, 128), F32), B: T.Tensor((n, 128), F32)):
        with T.Kernel(n, threads=128) as b:
            tx = T.get_thread_binding()
            s = T.alloc_shared((128,), F32)
            s[tx] = A[b, tx]
            if tx < 64:
                T.sync_threads(1, 64)
                B[b, tx] = s[63 - tx]
            else:
                T.sync_threads(2, 64)
                B[b, tx] = s[64 + (127 - tx)] * 2.0

    return main


PROGRAMS = [
    Program(
        "one_warp_of_three",
        one_warp_of_three,
        dict(n=4),
        drawn(uniform((4, 64))),
        lambda a: (wide(a)[0] * 2, wide(a)[0].sum(1)),
        (EXACT, Bound(F32, 64, 64.0)),
    ),
    Program(
        "loader_warp",
        loader_warp,
        dict(M=200, N=72, K=96),
        drawn(uniform((200, 96), F16), uniform((96, 72), F16)),
        lambda a, b: wide(a)[0] @ wide(b)[0],
        Bound(F16, 96, 96.0),
        absent=NO_MBARRIER,
    ),
    Program(
        "consumers_then_ws",
        consumers_then_ws,
        dict(M=100, N=72, K=192),
        drawn(uniform((100, 192), BF16), uniform((72, 192), BF16)),
        lambda a, b: wide(a)[0] @ wide(b)[0].T,
        Bound(BF16, 192, 192.0),
        absent=NO_MBARRIER,
    ),
    Program(
        "decode_by_warps",
        decode_by_warps,
        dict(heads=16, dim=64),
        drawn(uniform((16, 64), F16), uniform((150, 64), F16), uniform((150, 64), F16)),
        decode_reference,
        Bound(F16, via=((F16, 1.0),)),
    ),
    Program(
        "norm_in_first_warp",
        norm_in_first_warp,
        dict(N=300),
        drawn(uniform((5, 300), F16)),
        lambda x: wide(x)[0] / np.sqrt((wide(x)[0] ** 2).mean(1, keepdims=True) + 1e-5),
        Bound(F16, 300, 2.0),
    ),
    Program(
        "roles_of_three",
        roles_of_three,
        dict(n=3),
        drawn(uniform((3, 16, 32))),
        lambda a: wide(a)[0].sum(2) + 1 + wide(a)[0][:, :, 0],
        Bound(F32, 34, 34.0),
    ),
    Program(
        "half_blocks",
        half_blocks,
        dict(n=3),
        drawn(uniform((3, 2, 8, 8), low=0.1)),
        half_blocks_reference,
        Bound(F32, 64, 1.0),
    ),
    Program(
        "counters",
        counters,
        dict(N=40),
        drawn(uniform((40,)), zeros((40,))),
        lambda a, b: (np.array([20, 3]), np.concatenate([a[::-1][:20], a[:20]])),
        EXACT,
        changed=(1,),
    ),
    Program(
        "scatter_by_local",
        scatter_by_local,
        dict(tokens=6, hidden=96, topk=3),
        drawn(uniform((6, 96), BF16), integers((6, 3), -1, 6), uniform((6, 3)), np.array([5], np.int32)),
        scatter_by_local_reference,
        Bound(F32, 4, 3.0),
    ),
    Program(
        "random_in_parallel",
        random_in_parallel,
        dict(N=300),
        drawn(zeros((300,))),
        lambda x: np.ones(300),
        EXACT,
        arrange=lambda r: [((r[0] > 0) & (r[0] <= 1)) * (len(np.unique(r[0])) > 290) * 1.0],
    ),
    Program(
        "guarded_reducers",
        guarded_reducers,
        dict(M=40, N=24),
        drawn(uniform((40, 24)), zeros((24,)), np.array([35], np.int32)),
        lambda x, g, n: wide(x)[0][: n[0]].sum(0) * 2,
        Bound(F32, 80, 80.0),
        changed=(1,),
    ),
    Program(
        "branch_reducer",
        branch_reducer,
        dict(B=4, N=100),
        drawn(uniform((4, 100)), np.array([1, 0, 1, 0], np.int32)),
        lambda a, f: wide(a)[0].sum(1) * (f > 0),
        Bound(F32, 100, 100.0),
    ),
    Program(
        "named_barriers",
        named_barriers,
        dict(n=3),
        drawn(uniform((3, 128))),
        lambda a: np.concatenate([a[:, 63::-1], a[:, :63:-1] * 2], 1),
        EXACT,
    ),
]
