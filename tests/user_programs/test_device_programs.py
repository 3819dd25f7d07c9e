"""Synchronisation by hand, pointers, vectors, warps, sparse data, graphs: written from the specification alone."""

import numpy as np
import torch
from spec_harness import EVERY, close, on

import tilelang
import tilelang.language as T

F = torch.nn.functional


@tilelang.jit(out_idx=[2])
def ws_gemm(M, N, K, BM=64, BN=64, BK=32, S=2):
    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(N // BN, M // BM, threads=256) as (bx, by):
            As = T.alloc_shared((S, BM, BK), "float16")
            Bs = T.alloc_shared((S, BK, BN), "float16")
            Cf = T.alloc_fragment((BM, BN), "float32")
            full = T.alloc_barrier([128] * S)
            empty = T.alloc_barrier([128] * S)
            with T.ws(1):
                T.dec_max_nreg(24)
                for k in T.serial(K // BK):
                    T.mbarrier_wait_parity(empty[k % S], (k // S + 1) % 2)
                    T.tma_copy(A[by * BM : (by + 1) * BM, k * BK : (k + 1) * BK], As[k % S, :, :], barrier=full[k % S])
                    T.tma_copy(B[k * BK : (k + 1) * BK, bx * BN : (bx + 1) * BN], Bs[k % S, :, :], barrier=full[k % S])
                    T.mbarrier_arrive(full[k % S])
            with T.ws(0):
                T.inc_max_nreg(240)
                T.clear(Cf)
                for k in T.serial(K // BK):
                    T.mbarrier_wait_parity(full[k % S], (k // S) % 2)
                    T.wgmma_gemm(As[k % S, :, :], Bs[k % S, :, :], Cf)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(empty[k % S])
                T.copy(Cf, C[by * BM, bx * BN])

    return main


@on("tile", "hopper")
def test_hopper_ws(case):
    a, b = case.randn(128, 160).half(), case.randn(160, 64).half()
    case.run(ws_gemm(128, 64, 160), [a, b], a.float() @ b.float(), 1e-2, 1e-2)


@tilelang.jit(out_idx=[1])
def async_double(N, blk=128):
    nb = N // blk

    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), O: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=32) as _:
            S = T.alloc_shared((2, blk), "float32")
            T.async_copy(A[0:blk], S[0, :])
            for k in T.serial(nb):
                if k + 1 < nb:
                    T.async_copy(A[(k + 1) * blk : (k + 2) * blk], S[(k + 1) % 2, :])
                    T.ptx_wait_group(1)
                else:
                    T.ptx_wait_group(0)
                T.sync_threads()
                for i in T.Parallel(blk):
                    O[k * blk + i] = S[k % 2, i] * 2.0 + S[k % 2, blk - 1 - i]
                T.sync_threads()

    return main


@on("tile", "simulator", "hopper", "gpu")
def test_cp_async_double_buffer(case):
    a = case.randn(512)
    r = (a.reshape(4, 128) * 2 + a.reshape(4, 128).flip(1)).reshape(-1)
    case.run(async_double(512), [a], r, 1e-6, 1e-6)


@tilelang.jit
def grid_norm(X, P, nb: int = 4):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    P: T.Tensor((nb,), "float32")
    Y = T.empty((N,), "float32")
    per = T.ceildiv(N, nb)
    with T.Kernel(nb, threads=64) as b:
        f = T.alloc_fragment((per,), "float32")
        s = T.alloc_fragment((1,), "float32")
        for i in T.Parallel(per):
            f[i] = T.if_then_else(b * per + i < N, X[b * per + i] * X[b * per + i], 0.0)
        T.reduce_sum(f, s)
        if T.get_thread_binding() == 0:
            P[b] = s[0]
        T.sync_grid()
        tot = T.alloc_var("float32", init=0.0)
        for k in T.serial(nb):
            tot += P[k]
        for i in T.Parallel(per):
            if b * per + i < N:
                Y[b * per + i] = X[b * per + i] * T.rsqrt(tot)
    return Y


@on("tile", "simulator", "gpu")
def test_grid_sync_norm(case):
    x = case.randn(250)
    p = torch.zeros(4)
    case.run(grid_norm.compile(x, p), [x, p], x / x.norm(), 1e-4, 1e-5)


@tilelang.jit(out_idx=[-1])
def views(M, N):
    @T.prim_func
    def main(A: T.Tensor((M, N), "float32"), O: T.Tensor((N, M), "int32")):
        with T.Kernel(1, threads=64) as _:
            S = T.alloc_shared((M, N), "float32")
            T.copy(A, S)
            B = T.view(S, (M * N,), "int32")
            R = T.reshape(B, (N, M))
            for i, j in T.Parallel(N, M):
                R[i, j] = (R[i, j] >> 23) & 255
            G = T.reshape(O, (N * M,))
            for i in T.Parallel(M * N):
                G[i] = B[i]

    return main


@EVERY
def test_view_bits(case):
    a = case.randn(6, 10)
    case.run(views(6, 10), [a], ((a.view(torch.int32) >> 23) & 255).reshape(10, 6))


@tilelang.jit
def ptr_table(addrs, sizes, O, N: int = 16):
    G = T.const("G")
    addrs: T.Tensor((G,), T.ptr)
    sizes: T.Tensor((G,), "int32")
    O: T.Tensor((G, N), "float32")
    with T.Kernel(G, threads=32) as g:
        n = sizes[g]
        A = T.make_tensor(addrs[g], (n, N), "float32")
        acc = T.alloc_fragment((N,), "float32")
        T.clear(acc)
        for r in T.serial(n):
            for j in T.Parallel(N):
                acc[j] += A[r, j]
        T.copy(acc, O[g, :])


@on("cpu", "gpu")
def test_pointer_table(case):
    xs = [case.randn(n, 16).to(case.device) for n in (3, 1, 0, 6)]
    addrs = torch.tensor([x.data_ptr() for x in xs])
    sz = torch.tensor([3, 1, 0, 6], dtype=torch.int32)
    o = torch.zeros(4, 16)
    case.run(ptr_table.compile(addrs, sz, o), [addrs, sz, o], None, inplace={2: torch.stack([x.sum(0).cpu() for x in xs])})


def ptr_arg(N):
    @T.prim_func
    def main(p: T.ptr, q: T.handle("float32"), n: T.int32):
        A = T.make_tensor(p, (n, 2), "float32")
        B = T.match_buffer(q, (n,), "float32")
        with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
            for i in T.Parallel(32):
                B[bx * 32 + i] = A[bx * 32 + i, 0] - A[bx * 32 + i, 1]

    return main


@EVERY
def test_pointer_params(case):
    a, b = case.randn(40, 2), torch.zeros(40)
    case.run(tilelang.compile(ptr_arg(40)), [a, b, 40], None, inplace={1: a[:, 0] - a[:, 1]})


@tilelang.jit(out_idx=[2])
def vec_types(N):
    @T.prim_func
    def main(A: T.Tensor((N, 4), "float32"), H: T.Tensor((N, 2), "float16"), O: T.Tensor((N, 4), "float32")):
        with T.Kernel(T.ceildiv(N, 32), threads=32) as bx:
            i = bx * 32 + T.get_thread_binding()
            pairs = T.view(H, (N,), "float16x2")
            if i < N:
                h = pairs[i]
                v = T.alloc_local((4,), "float32")
                v[0:4] = A[i, 0:4] * 2.0
                x = T.add2(h, h)
                v[0] = v[0] + T.cast(T.extract_lane(x, 0), "float32")
                v[1] += T.cast(T.extract_lane(x, 1), "float32")
                O[i, 0:4] = v[0:4]

    return main


@EVERY
def test_vector_types(case):
    a, h = case.randn(50, 4), case.randn(50, 2).half()
    r = a * 2
    r[:, :2] += (h + h).float()
    case.run(vec_types(50), [a, h], r, 1e-3, 1e-3)


@tilelang.jit(out_idx=[1])
def ldst(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), O: T.Tensor((N,), "float32")):
        with T.Kernel(N // 128, threads=32) as bx:
            tx = T.get_thread_binding(0)
            S = T.alloc_shared((128,), "float32")
            v = T.ldg128(A[bx * 128 + tx * 4])
            T.sts128(S[(31 - tx) * 4], v)
            T.sync_threads()
            w = T.lds128(S[tx * 4])
            T.stg128(O[bx * 128 + tx * 4], w)

    return main


@EVERY
def test_vector_ldst(case):
    a = case.randn(256)
    case.run(ldst(256), [a], a.reshape(2, 32, 4).flip(1).reshape(-1), 0, 0)


@tilelang.jit(out_idx=[1])
def warp_zoo(N=64):
    @T.prim_func
    def main(A: T.Tensor((N,), "int32"), O: T.Tensor((12, N), "int32")):
        with T.Kernel(1, threads=N) as _:
            tx = T.get_thread_binding(0)
            v = A[tx]
            O[0, tx] = T.shfl_down(v, 3)
            O[1, tx] = T.shfl_up(v, 2, width=8)
            O[2, tx] = T.shfl_sync(v, 5)
            O[3, tx] = T.warp_reduce_sum(v)
            O[4, tx] = T.warp_reduce_max(v)
            O[5, tx] = T.any_sync(v > 90)
            O[6, tx] = T.all_sync(v > -100)
            O[7, tx] = T.cast(T.ballot_sync(v > 0), "int32")
            O[8, tx] = T.syncthreads_count(v > 0)
            O[9, tx] = T.cast(T.match_any_sync(v % 4), "int32")
            O[10, tx] = T.__ffs(v) + T.clz(v) * 100 + T.popcount(v) * 10000
            O[11, tx] = T.get_lane_idx() + 100 * T.get_warp_idx() + T.if_then_else(T.shuffle_elect(32), 10000, 0)

    return main


@on("tile", "simulator", "gpu")
def test_warp_primitives(case):
    a = case.randint(0, 100, (64,))
    w = a.reshape(2, 32).numpy()
    o = np.zeros((12, 2, 32), np.int64)
    l = np.arange(32)
    o[0] = np.where(l + 3 < 32, w[:, np.minimum(l + 3, 31)], w)
    o[1] = np.where(l % 8 >= 2, w[:, np.maximum(l - 2, 0)], w)
    o[2] = w[:, 5:6]
    o[3] = w.sum(1, keepdims=True)
    o[4] = w.max(1, keepdims=True)
    o[5] = (w > 90).any(1, keepdims=True)
    o[6] = 1
    o[7] = ((w > 0).astype(np.int64) << l).sum(1, keepdims=True)
    o[8] = (w > 0).sum()
    for x in range(2):
        for i in range(32):
            o[9, x, i] = sum(1 << j for j in range(32) if w[x, j] % 4 == w[x, i] % 4)
            v = int(w[x, i])
            o[10, x, i] = ((v & -v).bit_length()) + (32 - v.bit_length()) * 100 + bin(v).count("1") * 10000
            o[11, x, i] = i + 100 * x
    ref = torch.tensor(o.reshape(12, 64).astype(np.uint32).view(np.int32).astype(np.int32))
    k = warp_zoo()
    got = case.call(k, a)[0][0]
    e = got[11] // 10000
    assert e.reshape(2, 32).sum(1).tolist() == [1, 1]
    got[11] %= 10000
    close(got, ref)


@tilelang.jit
def dropout(X, p: float, seed: int):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((N,), "float32")
    Mk = T.empty((N,), "bool")
    with T.Kernel(T.ceildiv(N, 64), threads=64) as bx:
        T.rng_init(seed)
        i = bx * 64 + T.get_thread_binding()
        u = T.rng_rand_float()
        if i < N:
            Mk[i] = u > p
            Y[i] = T.if_then_else(u > p, X[i] / (1.0 - p), 0.0)
    return Y, Mk


@EVERY
def test_dropout_rng(case):
    x = torch.ones(1500)
    k = dropout.compile(x, 0.25, 42)
    y, m = case.call(k, x)[0]
    m2 = case.call(k, x)[0][1]
    assert torch.equal(m, m2)
    close(y, m.float() / 0.75, 1e-6, 0)
    assert abs(m.float().mean() - 0.75) < 0.05, m.float().mean()


@tilelang.jit(out_idx=[1, 2])
def lu_solve(B, n):
    @T.prim_func
    def main(A: T.Tensor((B, n, n), "float64"), Inv: T.Tensor((B, n, n), "float64"), ok: T.Tensor((B,), "int32")):
        with T.Kernel(B, threads=64) as b:
            W = T.alloc_shared((n, 2 * n), "float64")
            piv = T.alloc_var("int32")
            best = T.alloc_var("float64")
            good = T.alloc_var("int32", init=1)
            fac = T.alloc_shared((n,), "float64")
            for i, j in T.Parallel(n, 2 * n):
                W[i, j] = T.if_then_else(
                    j < n, A[b, i, T.min(j, n - 1)], T.if_then_else(j - n == i, T.float64(1), T.float64(0))
                )
            for k in T.serial(n):
                best = T.float64(0)
                piv = k
                for r in T.serial(k, n):
                    if T.abs(W[r, k]) > best:
                        best = T.abs(W[r, k])
                        piv = r
                if best < 1e-12:
                    good = 0
                    break
                if piv != k:
                    for j in T.Parallel(2 * n):
                        W[k, j], W[piv, j] = W[piv, j], W[k, j]
                for i in T.Parallel(n):
                    fac[i] = W[i, k] / W[k, k]
                for i, j in T.Parallel(n, 2 * n):
                    if i != k:
                        W[i, j] = W[i, j] - fac[i] * W[k, j]
            for i, j in T.Parallel(n, n):
                Inv[b, i, j] = W[i, n + j] / W[i, i]
            if T.get_thread_binding() == 0:
                ok[b] = good

    return main


@EVERY
def test_gauss_jordan(case):
    a = case.randn(3, 6, 6).double()
    a[1, 0, 0] = 0
    a[2, :, 3] = 0
    k = lu_solve(3, 6)
    inv, ok = case.call(k, a)[0]
    close(inv[:2], torch.linalg.inv(a[:2]), 1e-8, 1e-8)
    assert ok.tolist() == [1, 1, 0], ok


@tilelang.jit
def lev(X, Y, lx, ly):
    B, L = T.const("B L")
    X: T.Tensor((B, L), "int8")
    Y: T.Tensor((B, L), "int8")
    lx: T.Tensor((B,), "int32")
    ly: T.Tensor((B,), "int32")
    D = T.empty((B,), "int32")
    with T.Kernel(B, threads=32) as b:
        d = T.alloc_shared((3, L + 1), "int32")
        x = T.alloc_shared((L,), "int8")
        y = T.alloc_shared((L,), "int8")
        n = lx[b]
        m = ly[b]
        T.copy(X[b, :], x)
        T.copy(Y[b, :], y)
        for s in T.serial(0, n + m + 1):
            for i in T.Parallel(L + 1):
                j = s - i
                if i <= n and j >= 0 and j <= m:
                    if i == 0:
                        d[s % 3, i] = j
                    elif j == 0:
                        d[s % 3, i] = i
                    else:
                        sub = d[(s + 1) % 3, i - 1] + T.if_then_else(x[i - 1] == y[j - 1], 0, 1)
                        d[s % 3, i] = T.min(sub, T.min(d[(s + 2) % 3, i - 1], d[(s + 2) % 3, i]) + 1)
        for _ in T.Parallel(1):
            D[b] = d[(n + m) % 3, n]
    return D


@EVERY
def test_levenshtein_wavefront(case):
    def ld(a, b):
        p = list(range(len(b) + 1))
        for i, x in enumerate(a):
            q = [i + 1]
            for j, y in enumerate(b):
                q.append(min(p[j] + (x != y), q[-1] + 1, p[j + 1] + 1))
            p = q
        return p[-1]

    x, y = case.randint(0, 3, (4, 12), torch.int8), case.randint(0, 3, (4, 12), torch.int8)
    lx, ly = torch.tensor([12, 5, 0, 7]).int(), torch.tensor([12, 9, 4, 0]).int()
    case.run(
        lev.compile(x, y, lx, ly),
        [x, y, lx, ly],
        torch.tensor([ld(x[i, : lx[i]].tolist(), y[i, : ly[i]].tolist()) for i in range(4)]).int(),
    )


@tilelang.jit
def spmv(rowptr, col, val, x):
    M1, NNZ, N = T.const("M1 NNZ N")
    rowptr: T.Tensor((M1,), "int32")
    col: T.Tensor((NNZ,), "int32")
    val: T.Tensor((NNZ,), "float32")
    x: T.Tensor((N,), "float32")
    y = T.empty((M1 - 1,), "float32")
    with T.Kernel(T.ceildiv(M1 - 1, 4), threads=(32, 4)) as bx:
        lane = T.get_thread_binding(0)
        r = bx * 4 + T.get_thread_binding(1)
        acc = T.alloc_var("float32", init=0.0)
        if r < M1 - 1:
            for k in T.serial(rowptr[r] + lane, rowptr[r + 1], 32):
                acc += val[k] * x[col[k]]
        s = T.warp_reduce_sum(acc)
        if lane == 0 and r < M1 - 1:
            y[r] = s
    return y


@EVERY
def test_spmv_csr(case):
    d = case.randn(11, 60) * (torch.rand(11, 60) < 0.7)
    d[4] = 0
    sp = d.to_sparse_csr()
    x = case.randn(60)
    a = [sp.crow_indices().int(), sp.col_indices().int(), sp.values(), x]
    case.run(spmv.compile(*a), a, d @ x, 1e-4, 1e-4)


@tilelang.jit
def life(G, steps: int):
    H, W = T.const("H W")
    G: T.Tensor((H, W), "bool")
    O = T.empty((H, W), "bool")
    with T.Kernel(1, threads=64) as _:
        a = T.alloc_shared((H, W), "bool")
        b = T.alloc_shared((H, W), "bool")
        T.copy(G, a)
        for _ in T.serial(steps):
            for i, j in T.Parallel(H, W):
                n = T.alloc_var("int32", init=0)
                for di, dj in T.grid(3, 3):
                    if not (di == 1 and dj == 1):
                        n += T.cast(a[(i + di - 1) % H, (j + dj - 1 + W) % W], "int32")
                b[i, j] = (n == 3) or (a[i, j] and n == 2)
            T.copy(b, a)
        T.copy(a, O)
    return O


@EVERY
def test_game_of_life(case):
    g = torch.rand(9, 14) < 0.4
    r = g
    for _ in range(4):
        n = sum(torch.roll(r.int(), (di, dj), (0, 1)) for di in (-1, 0, 1) for dj in (-1, 0, 1) if (di, dj) != (0, 0))
        r = (n == 3) | (r & (n == 2))
    case.run(life.compile(g, 4), [g], [r])


@tilelang.jit
def grid_sample(X, G):
    N, C, H, W, P = T.const("N C H W P")
    X: T.Tensor((N, C, H, W), "float32")
    G: T.Tensor((N, P, 2), "float32")
    O = T.empty((N, C, P), "float32")
    with T.Kernel(T.ceildiv(P, 32), N, threads=64) as (bx, n):
        for c_, p_ in T.Parallel(C, 32):
            p = bx * 32 + p_
            if p < P:
                x = ((G[n, p, 0] + 1.0) * W - 1.0) / 2.0
                y = ((G[n, p, 1] + 1.0) * H - 1.0) / 2.0
                x0 = T.cast(T.floor(x), "int32")
                y0 = T.cast(T.floor(y), "int32")
                acc = T.alloc_var("float32", init=0.0)
                for dy in T.unroll(2):
                    for dx in T.unroll(2):
                        wx = 1.0 - T.abs(x - T.cast(x0 + dx, "float32"))
                        wy = 1.0 - T.abs(y - T.cast(y0 + dy, "float32"))
                        acc += X[n, c_, y0 + dy, x0 + dx] * wx * wy
                O[n, c_, p] = acc
    return O


@EVERY
def test_bilinear_grid_sample(case):
    x, g = case.randn(2, 3, 7, 9), torch.rand(2, 40, 2) * 2.6 - 1.3
    case.run(grid_sample.compile(x, g), [x, g], F.grid_sample(x, g[:, :, None], align_corners=False)[..., 0], 1e-4, 1e-4)


@tilelang.jit
def sched_gemm(A, B, W: int = 3):
    M, N, K = T.const("M N K")
    A: T.Tensor((M, K), "float16")
    B: T.Tensor((N, K), "float16")
    C = T.empty((M, N), "float32")
    with T.Kernel(W, threads=64) as b:
        s = T.PersistentTileScheduler(T.ceildiv(M, 32), T.ceildiv(N, 32), num_workers=W, swizzle_size=2)
        As = T.alloc_shared((32, 32), "float16")
        Bs = T.alloc_shared((32, 32), "float16")
        Cf = T.alloc_fragment((32, 32), "float32")
        s.init(b)
        while s.valid():
            T.clear(Cf)
            for k in T.Pipelined(T.ceildiv(K, 32), num_stages=2):
                T.copy(A[s.m_idx * 32, k * 32], As)
                T.copy(B[s.n_idx * 32, k * 32], Bs)
                T.gemm(As, Bs, Cf, transpose_B=True)
            T.copy(Cf, C[s.m_idx * 32, s.n_idx * 32])
            s.next_tile()
    return C


@EVERY
def test_tile_scheduler(case):
    a, b = case.randn(70, 40).half(), case.randn(100, 40).half()
    case.run(sched_gemm.compile(a, b), [a, b], a.float() @ b.float().t(), 1e-2, 1e-2)


@tilelang.jit(out_idx=-1)
def gemm_sp24(M, N, K, BM=64, BN=64, BK=64):
    @T.prim_func
    def main(
        A: T.Tensor((M, K // 2), "float16"),
        E: T.Tensor((M, K // 8), "uint8"),
        B: T.Tensor((K, N), "float16"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
            As = T.alloc_shared((BM, BK // 2), "float16")
            Es = T.alloc_shared((BM, BK // 8), "uint8")
            Bs = T.alloc_shared((BK, BN), "float16")
            Cf = T.alloc_fragment((BM, BN), "float32")
            T.clear(Cf)
            for k in T.Pipelined(K // BK, num_stages=2):
                T.copy(A[by * BM, k * BK // 2], As)
                T.copy(E[by * BM, k * BK // 8], Es)
                T.copy(B[k * BK, bx * BN], Bs)
                T.gemm_sp(As, Es, Bs, Cf)
            T.copy(Cf, C[by * BM, bx * BN])

    return main


@EVERY
def test_sparse_24(case):
    M, N, K = 64, 64, 128
    idx = torch.stack([torch.randperm(4)[:2].sort().values for _ in range(M * K // 4)]).reshape(M, K // 4, 2)
    vals = case.randn(M, K // 4, 2).half()
    dense = torch.zeros(M, K // 4, 4).half().scatter_(2, idx, vals).reshape(M, K)
    nib = (idx[..., 0] | (idx[..., 1] << 2)).reshape(M, K // 8, 2)
    e = (nib[..., 0] | (nib[..., 1] << 4)).to(torch.uint8)
    b = case.randn(K, N).half()
    case.run(gemm_sp24(M, N, K), [vals.reshape(M, K // 2), e, b], dense.float() @ b.float(), 1e-2, 1e-2)


@tilelang.jit(out_idx=-1)
def int4_gemm(M, N, K, BM=32, BN=32, BK=64):
    @T.prim_func
    def main(A: T.Tensor((M, K), "int4"), B: T.Tensor((N, K), "int4"), C: T.Tensor((M, N), "int32")):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=64) as (bx, by):
            As = T.alloc_shared((BM, BK), "int4")
            Bs = T.alloc_shared((BN, BK), "int4")
            Cf = T.alloc_fragment((BM, BN), "int32")
            T.clear(Cf)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
                T.copy(A[by * BM, k * BK], As)
                T.copy(B[bx * BN, k * BK], Bs)
                T.gemm(As, Bs, Cf, transpose_B=True)
            T.copy(Cf, C[by * BM, bx * BN])

    return main


@EVERY
def test_int4_packed_gemm(case):
    a, b = case.randint(-8, 8, (40, 128), torch.int8), case.randint(-8, 8, (36, 128), torch.int8)

    def pk(t):
        return ((t[:, ::2] & 15) | (t[:, 1::2] << 4)).to(torch.int8)

    case.run(int4_gemm(40, 36, 128), [pk(a), pk(b)], a.int() @ b.int().t())


SRC = """
template <typename V> __device__ V axpy2(V a, V x, V y) { return a * x + y; }
__device__ float myscale(float const* p, int i, float a) { return axpy2(a, p[i], 1.0f); }
__device__ void bump(float* p) { atomicAdd(p, 1.0f); }
"""


@tilelang.jit(out_idx=-1)
def extern_cuda(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), Cnt: T.Tensor((1,), "float32"), O: T.Tensor((N,), "float32")):
        with T.Kernel(T.ceildiv(N, 64), threads=64) as bx:
            T.import_source(SRC)
            i = bx * 64 + T.get_thread_binding()
            if i < N:
                O[i] = T.call_extern("float32", "myscale", A.data, i, T.float32(3.0))
                T.call_extern("handle", "bump", T.address_of(Cnt[0]))

    return main


@on("gpu")
def test_functions_of_the_users_own_source(case):
    a, count = case.randn(100), torch.zeros(1)
    case.run(extern_cuda(100), [a, count], 3 * a + 1, inplace={1: torch.full((1,), 100.0)})


def test_data_of_a_buffer_is_a_pointer_to_its_elements():
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        source = tilelang.lower(extern_cuda.get_tir(100)).kernel_source
    assert "void* A" not in source and "myscale(&A[0], i, 3.0f)" in source
    assert source.index("axpy2") < source.index("main_kernel")


RAW = """
extern "C" __global__ void doubled(const float* __restrict__ A, float* __restrict__ B) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  B[i] = A[i] * 2;
}
"""


@tilelang.jit(out_idx=-1)
def raw_cuda(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.CUDASourceCodeKernel(N // 64, threads=64, source_code_or_path=RAW, entry_name="doubled"):
            pass

    return main


@on("gpu")
def test_a_kernel_of_the_users_own_source(case):
    a = case.randn(128)
    case.run(raw_cuda(128), [a], a * 2)
