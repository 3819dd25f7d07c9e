"""Sorting, scanning, selecting and hashing."""

import collections
import math

import numpy as np
import torch
from bounds import E32, equal, within
from spec_harness import EVERY, on

import tilelang
import tilelang.language as T

f16 = "float16"
f32 = "float32"
LONG = on("tile", "simulator", "cpu", "gpu", slow=("simulator",))


@tilelang.jit
def segred(X, Off, blk: int = 64):
    n = T.dynamic("n")
    S, D = T.const("S1 D")
    X: T.Tensor((n, D), f16)
    Off: T.Tensor((S,), "int32")
    Sum = T.empty((S - 1, D), f32)
    Mx = T.empty((S - 1, D), f16)
    Am = T.empty((S - 1, D), "int32")
    with T.Kernel(S - 1, threads=96) as b:
        beg = Off[b]
        end = Off[b + 1]
        acc = T.alloc_fragment((D,), f32)
        mx = T.alloc_fragment((D,), f16)
        am = T.alloc_fragment((D,), "int32")
        T.clear(acc)
        T.fill(mx, -T.infinity(f16))
        T.fill(am, -1)
        for r in T.serial(beg, end):
            for d in T.Parallel(D):
                acc[d] += X[r, d]
                if X[r, d] > mx[d]:
                    mx[d] = X[r, d]
                    am[d] = r - beg
        T.copy(acc, Sum[b, 0])
        T.copy(mx, Mx[b, :])
        T.copy(am, Am[b, 0:D])
    return Am, Sum, Mx


@EVERY
def test_segmented(case):
    n, D = 41, 50
    off = torch.tensor([0, 5, 5, 30, 41], dtype=torch.int32)
    X = case.randn(n, D, dt=torch.half)
    (am, sm, mx), _ = case.call(segred, X, off)
    for s in range(4):
        x = X[off[s] : off[s + 1]].double()
        within(sm[s], x.sum(0), x.abs().sum(0) * 64 * E32)
        if len(x):
            equal(mx[s], X[off[s] : off[s + 1]].max(0).values)
            equal(am[s], X[off[s] : off[s + 1]].max(0).indices.int())
        else:
            assert (mx[s] == -math.inf).all() and (am[s] == -1).all()


@T.macro
def welford(n: T.Ref, mean: T.Ref, m2: T.Ref, x):
    n = n + 1.0
    d = x - mean
    mean = mean + d / n
    m2 = m2 + d * (x - mean)


@T.macro
def merge(n: T.Ref, mean: T.Ref, m2: T.Ref, off):
    nb = T.shfl_xor(n, off)
    mb = T.shfl_xor(mean, off)
    m2b = T.shfl_xor(m2, off)
    tot = n + nb
    d = mb - mean
    f = T.if_then_else(tot > 0, nb / T.max(tot, 1.0), 0.0)
    m2 = m2 + m2b + d * d * n * f
    mean = mean + d * f
    n = tot


@tilelang.jit
def welford_rows(X, warps: int = 3):
    M, N = T.const("M N")
    X: T.Tensor((M, N), f32)
    O = T.empty((M, 2), f32)
    with T.Kernel(T.ceildiv(M, warps), threads=warps * 32) as b:
        row = b * warps + T.get_warp_idx()
        lane = T.get_lane_idx()
        n = T.alloc_var(f32, init=0.0)
        mean = T.alloc_var(f32, init=0.0)
        m2 = T.alloc_var(f32, init=0.0)
        for i in T.serial(T.ceildiv(N, 32)):
            if i * 32 + lane < N:
                welford(n, mean, m2, X[row, i * 32 + lane])
        merge(n, mean, m2, 16)
        merge(n, mean, m2, 8)
        merge(n, mean, m2, 4)
        merge(n, mean, m2, 2)
        merge(n, mean, m2, 1)
        if lane == 0:
            O[row, 0] = mean
            O[row, 1] = m2 / n
    return O


@EVERY
def test_welford_macro(case):
    X = case.randn(7, 70) + 100
    (o,), _ = case.call(welford_rows, X)
    within(o[:, 0], X.double().mean(1), 1e-4)
    within(o[:, 1], X.double().var(1, unbiased=False), 2e-3)


@tilelang.jit
def radix(X):
    Rr, N = T.const("R N")
    X: T.Tensor((Rr, N), "uint32")
    Y = T.empty((Rr, N), "uint32")
    P = T.empty((Rr, N), "int32")
    with T.Kernel(Rr, threads=128) as b:
        k0 = T.alloc_shared((N,), "uint32")
        k1 = T.alloc_shared((N,), "uint32")
        v0 = T.alloc_shared((N,), "int32")
        v1 = T.alloc_shared((N,), "int32")
        oh = T.alloc_shared((16, N), "int32")
        tot = T.alloc_shared((16,), "int32")
        T.copy(X[b, :], k0)
        for i in T.Parallel(N):
            v0[i] = i
        for p in T.serial(8):
            for d, i in T.Parallel(16, N):
                oh[d, i] = T.if_then_else(T.cast((k0[i] >> T.cast(p * 4, "uint32")) & T.uint32(15), "int32") == d, 1, 0)
            T.cumsum(oh, dim=1)
            for d in T.Parallel(16):
                tot[d] = oh[d, N - 1]
            T.cumsum(tot, dim=0)
            for i in T.Parallel(N):
                d = T.cast((k0[i] >> T.cast(p * 4, "uint32")) & T.uint32(15), "int32")
                at = oh[d, i] - 1 + T.if_then_else(d > 0, tot[T.max(d - 1, 0)], 0)
                k1[at] = k0[i]
                v1[at] = v0[i]
            T.copy(k1, k0)
            T.copy(v1, v0)
        T.copy(k0, Y[b, :])
        T.copy(v0, P[b, :])
    return Y, P


@LONG
def test_radix_sort(case):
    X = torch.from_numpy(np.random.default_rng(5).integers(0, 2**32, (2, 40), dtype=np.uint32))
    X[0, 5:25] = X[0, 4]
    (y, p), _ = case.call(radix, X)
    n = X.numpy()
    idx = np.argsort(n, 1, kind="stable")
    assert (y.numpy() == np.take_along_axis(n, idx, 1)).all() and (p.numpy() == idx).all()


@tilelang.jit
def lookback(X, ticket, status, aggr, incl, blk: int = 128):
    n = T.dynamic("n")
    NB = T.const("NB")
    X: T.Tensor((n,), "int32")
    ticket: T.Tensor((1,), "int32")
    status: T.Tensor((NB,), "int32")
    aggr: T.Tensor((NB,), "int32")
    incl: T.Tensor((NB,), "int32")
    Y = T.empty((n,), "int32")
    with T.Kernel(T.ceildiv(n, blk), threads=128) as _b:
        tx = T.get_thread_binding()
        my = T.alloc_shared((1,), "int32")
        pre = T.alloc_shared((1,), "int32")
        s = T.alloc_shared((blk,), "int32")
        if tx == 0:
            my[0] = T.atomic_add(ticket[0], 1, return_prev=True)
        T.sync_threads()
        b = my[0]
        T.copy(X[b * blk], s)
        T.cumsum(s, dim=0)
        if tx == 0:
            tot = s[blk - 1]
            run = T.alloc_var("int32", init=0)
            if b == 0:
                incl[b] = tot
                T.atomic_store(status[b], 2, memory_order="release")
            else:
                aggr[b] = tot
                T.atomic_store(status[b], 1, memory_order="release")
                j = T.alloc_var("int32", init=0)
                j = b - 1
                done = T.alloc_var("int32", init=0)
                while done == 0:
                    st = T.atomic_load(status[j], memory_order="acquire")
                    if st == 2:
                        run += incl[j]
                        done = 1
                    elif st == 1:
                        run += aggr[j]
                        j -= 1
                incl[b] = run + tot
                T.atomic_store(status[b], 2, memory_order="release")
            pre[0] = run
        T.sync_threads()
        for i in T.Parallel(blk):
            Y[b * blk + i] = s[i] + pre[0]
    return Y


@EVERY
def test_decoupled_lookback(case):
    X = case.randint(-9, 9, (500,))
    z = [torch.zeros(n, dtype=torch.int32) for n in (1, 4, 4, 4)]
    (y,), own = case.call(lookback, X, *z)
    equal(y, X.cumsum(0).int())
    assert own[1][0] == 4


@tilelang.jit
def bfs(ptr, adj, src):
    V1 = T.const("V1")
    E = T.dynamic("E")
    ptr: T.Tensor((V1,), "int32")
    adj: T.Tensor((E,), "int32")
    src: T.Tensor((1,), "int32")
    dist = T.empty((V1 - 1,), "int32")
    N = V1 - 1
    with T.Kernel(1, threads=64) as _:
        d = T.alloc_shared((N,), "int32")
        qa = T.alloc_shared((N,), "int32")
        qb = T.alloc_shared((N,), "int32")
        n = T.alloc_shared((2,), "int32")
        T.fill(d, 2**30)
        T.fill(qb, 0)
        T.fill(qa, 0)
        tx = T.get_thread_binding()
        if tx == 0:
            d[src[0]] = 0
            qa[0] = src[0]
            n[0] = 1
            n[1] = 0
        T.sync_threads()
        lev = T.alloc_var("int32", init=0)
        while n[0] > 0:
            for i in T.serial(T.ceildiv(n[0], 64)):
                if i * 64 + tx < n[0]:
                    u = qa[i * 64 + tx]
                    for e in T.serial(ptr[u], ptr[u + 1]):
                        v = adj[e]
                        old = T.atomic_min(d[v], lev + 1, return_prev=True)
                        if old == 2**30:
                            at = T.atomic_add(n[1], 1, return_prev=True)
                            qb[at] = v
            T.sync_threads()
            T.copy(qb, qa)
            if tx == 0:
                n[0] = n[1]
                n[1] = 0
            T.sync_threads()
            lev += 1
        T.copy(d, dist)
    return dist


@EVERY
def test_bfs_csr(case):

    V = 40
    rng = np.random.default_rng(5)
    nb = [sorted(set(rng.integers(0, V, 3).tolist())) for _ in range(V)]
    nb[7] = []
    ptr = torch.tensor(np.cumsum([0] + [len(x) for x in nb]), dtype=torch.int32)
    adj = torch.tensor(sum(nb, []), dtype=torch.int32)
    (d,), _ = case.call(bfs, ptr, adj, torch.tensor([3], dtype=torch.int32))
    w = torch.full((V,), 2**30, dtype=torch.int32)
    w[3] = 0
    q = collections.deque([3])
    while q:
        u = q.popleft()
        for v in nb[u]:
            if w[v] == 2**30:
                w[v] = w[u] + 1
                q.append(v)
    equal(d, w)


@tilelang.jit
def bloom(K, Qy, bits: int = 1024):
    n, q = T.dynamic("n, q")
    K: T.Tensor((n,), "uint64")
    Qy: T.Tensor((q,), "uint64")
    F = T.empty((bits // 32,), "uint32")
    Hit = T.empty((q,), "bool")
    Pop = T.empty((1,), "int32")
    Lz = T.empty((q,), "int32")
    with T.Kernel(1, threads=128) as _:
        s = T.alloc_shared((bits // 32,), "uint32")
        pc = T.alloc_fragment((bits // 32,), "int32")
        tot = T.alloc_fragment((1,), "int32")
        T.clear(s)
        for i in T.serial(T.ceildiv(n, 128)):
            for j in T.Parallel(128):
                if i * 128 + j < n:
                    h = mix(K[i * 128 + j])
                    for r in T.unroll(3):
                        b = T.cast((h >> T.cast(r * 20, "uint64")) & T.uint64(1023), "int32")
                        T.atomic_or(s[b // 32], T.uint32(1) << T.cast(b % 32, "uint32"))
        T.copy(s, F)
        for i in T.Parallel(bits // 32):
            pc[i] = T.cast(T.popcount(s[i]), "int32")
        T.reduce_sum(pc, tot)
        T.copy(tot, Pop)
        for i in T.serial(T.ceildiv(q, 128)):
            for j in T.Parallel(128):
                if i * 128 + j < q:
                    h = mix(Qy[i * 128 + j])
                    ok = T.alloc_var("bool", init=True)
                    for r in T.unroll(3):
                        b = T.cast((h >> T.cast(r * 20, "uint64")) & T.uint64(1023), "int32")
                        ok = ok and ((s[b // 32] >> T.cast(b % 32, "uint32")) & T.uint32(1)) != 0
                    Hit[i * 128 + j] = ok
                    Lz[i * 128 + j] = T.cast(T.clz(h), "int32")
    return F, Hit, Pop, Lz


@T.macro
def mix(x):
    a = x ^ (x >> T.uint64(33))
    b = a * T.uint64(0xFF51AFD7ED558CCD)
    d = b ^ (b >> T.uint64(33))
    e = d * T.uint64(0xC4CEB9FE1A85EC53)
    return e ^ (e >> T.uint64(33))


@EVERY
def test_bloom_filter(case):
    K = np.random.default_rng(5).integers(0, 2**63, 150).astype(np.uint64)
    Q = np.concatenate([K[:20], np.random.default_rng(5).integers(0, 2**63, 30).astype(np.uint64)])
    (F, hit, pop, lz), _ = case.call(bloom, torch.from_numpy(K), torch.from_numpy(Q))

    def mx(x):
        with np.errstate(over="ignore"):
            x = x ^ (x >> np.uint64(33))
            x = x * np.uint64(0xFF51AFD7ED558CCD)
            x = x ^ (x >> np.uint64(33))
            x = x * np.uint64(0xC4CEB9FE1A85EC53)
            return x ^ (x >> np.uint64(33))

    bits = np.zeros(1024, bool)

    def pos(h):
        return [((h >> np.uint64(20 * r)) & np.uint64(1023)).astype(int) for r in range(3)]

    for p in pos(mx(K)):
        bits[p] = True
    w = np.packbits(bits.reshape(32, 32), axis=1, bitorder="little").view(np.uint32).reshape(-1)
    assert (F.numpy() == w).all()
    assert int(pop[0]) == bits.sum()
    assert (hit.numpy() == np.all([bits[p] for p in pos(mx(Q))], 0)).all()
    assert lz.tolist() == [64 - int(x).bit_length() for x in mx(Q)]


@tilelang.jit
def warp_compact(X, thr: T.float32):
    R, N = T.const("R N")
    X: T.Tensor((R, N), f32)
    Y = T.empty((R, N), f32)
    Cn = T.empty((R,), "int32")
    with T.Kernel(T.ceildiv(R, 4), threads=(32, 4)) as b:
        lane = T.get_thread_binding(0)
        w = T.get_thread_binding(1)
        r = b * 4 + w
        base = T.alloc_var("int32", init=0)
        for i in T.serial(T.ceildiv(N, 32)):
            j = i * 32 + lane
            v = T.if_then_else(r < R and j < N, X[r, j], -T.infinity(f32))
            mask = T.cast(T.ballot(v > thr), "uint32")
            below = mask & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1))
            if v > thr:
                Y[r, base + T.cast(T.popcount(below), "int32")] = v
            base += T.cast(T.popcount(mask), "int32")
        for i in T.serial(T.ceildiv(N, 32)):
            j = i * 32 + lane
            if j >= base and j < N and r < R:
                Y[r, j] = 0.0
        if lane == 0 and r < R:
            Cn[r] = base
    return Y, Cn


@EVERY
def test_warp_compaction(case):
    X = case.randn(6, 75)
    (y, n), _ = case.call(warp_compact, X, 0.3)
    for r in range(6):
        k = X[r][X[r] > 0.3]
        assert n[r] == len(k)
        equal(y[r, : len(k)], k)
        assert (y[r, len(k) :] == 0).all()


@tilelang.jit
def grid_topk(X, NB: int = 3, K: int = 4):
    N = T.const("N")
    X: T.Tensor((N,), f32)
    V = T.empty((K,), f32)
    I = T.empty((K,), "int32")
    ws = T.alloc_global((NB, K), f32)
    wi = T.alloc_global((NB, K), "int32")
    P = T.ceildiv(N, NB)
    with T.Kernel(NB, threads=64) as b:
        x = T.alloc_fragment((P,), f32)
        m = T.alloc_fragment((1,), f32)
        ci = T.alloc_fragment((P,), "int32")
        im = T.alloc_fragment((1,), "int32")
        for i in T.Parallel(P):
            x[i] = T.if_then_else(b * P + i < N, X[b * P + i], -T.infinity(f32))
        for k in T.serial(K):
            T.reduce_max(x, m)
            for i in T.Parallel(P):
                ci[i] = T.if_then_else(x[i] == m[0], i, P)
            T.reduce_min(ci, im)
            for i in T.Parallel(P):
                if i == im[0]:
                    x[i] = -T.infinity(f32)
            for _i in T.Parallel(1):
                ws[b, k] = m[0]
                wi[b, k] = b * P + im[0]
        T.sync_grid()
        if b == 0:
            y = T.alloc_shared((NB * K,), f32)
            yi = T.alloc_shared((NB * K,), "int32")
            for i in T.Parallel(NB * K):
                y[i] = ws[i // K, i % K]
                yi[i] = wi[i // K, i % K]
            for i in T.Parallel(NB * K):
                r = T.alloc_var("int32", init=0)
                for j in T.serial(NB * K):
                    if y[j] > y[i] or (y[j] == y[i] and yi[j] < yi[i]):
                        r += 1
                if r < K:
                    V[r] = y[i]
                    I[r] = yi[i]
    return V, I


@EVERY
def test_grid_top_k(case):
    X = case.randn(100)
    (v, i), _ = case.call(grid_topk, X)
    w = X.topk(4)
    equal(v, w.values)
    equal(i, w.indices.int())
