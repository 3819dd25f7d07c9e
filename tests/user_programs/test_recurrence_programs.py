"""Linear attention, scans of states, transforms and compaction in sequence: written from the specification alone."""

import torch
from spec_harness import EVERY, HEAVY, close

import tilelang
import tilelang.language as T

F = torch.nn.functional


@tilelang.jit(out_idx=[3, 4])
def retention(B, H, S, D, C=32):
    @T.prim_func
    def main(
        Q: T.Tensor((B, S, H, D), "float16"),
        K: T.Tensor((B, S, H, D), "float16"),
        V: T.Tensor((B, S, H, D), "float16"),
        O: T.Tensor((B, S, H, D), "float16"),
        St: T.Tensor((B, H, D, D), "float32"),
    ):
        with T.Kernel(H, B, threads=128) as (h, b):
            q = T.alloc_shared((C, D), "float16")
            k = T.alloc_shared((C, D), "float16")
            v = T.alloc_shared((C, D), "float16")
            ss = T.alloc_shared((D, D), "float16")
            ps = T.alloc_shared((C, C), "float16")
            st = T.alloc_fragment((D, D), "float32")
            p = T.alloc_fragment((C, C), "float32")
            o = T.alloc_fragment((C, D), "float32")
            kd = T.alloc_shared((C, D), "float16")
            lg = T.log2(1.0 - T.exp2(-5.0 - T.cast(h, "float32")))
            T.clear(st)
            for t in T.serial(S // C):
                T.copy(Q[b, t * C : (t + 1) * C, h, :], q)
                T.copy(K[b, t * C : (t + 1) * C, h, :], k)
                T.copy(V[b, t * C : (t + 1) * C, h, :], v)
                T.gemm(q, k, p, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(C, C):
                    p[i, j] = T.if_then_else(i >= j, p[i, j] * T.exp2(T.cast(i - j, "float32") * lg), 0)
                T.copy(p, ps)
                T.copy(st, ss)
                T.gemm(q, ss, o, clear_accum=True)
                for i, j in T.Parallel(C, D):
                    o[i, j] = o[i, j] * T.exp2(T.cast(i + 1, "float32") * lg)
                T.gemm(ps, v, o)
                T.copy(o, O[b, t * C : (t + 1) * C, h, :])
                for i, j in T.Parallel(C, D):
                    kd[i, j] = k[i, j] * T.exp2(T.cast(C - 1 - i, "float32") * lg)
                for i, j in T.Parallel(D, D):
                    st[i, j] *= T.exp2(T.cast(C, "float32") * lg)
                T.gemm(kd, v, st, transpose_A=True)
            T.copy(st, St[b, h, :, :])

    return main


@HEAVY
def test_retention_chunks(case):
    B, H, S, D = 1, 1, 64, 32
    q, k, v = [case.randn(B, S, H, D, scale=0.5).half() for _ in range(3)]
    g = 1 - 2.0 ** (-5 - torch.arange(H).float())
    st = torch.zeros(B, H, D, D)
    ref = []
    for t in range(S):
        st = st * g[None, :, None, None] + k[:, t].float()[..., None] * v[:, t].float()[..., None, :]
        ref.append(torch.einsum("bhd,bhde->bhe", q[:, t].float(), st))
    case.run(retention(B, H, S, D), [q, k, v], [torch.stack(ref, 1).half(), st], 2e-2, 3e-2)


@tilelang.jit
def selective_scan(U, dt, A, Bm, Cm, Dp):
    B, L, Dm, N = T.const("B L Dm N")
    U: T.Tensor((B, L, Dm), "float32")
    dt: T.Tensor((B, L, Dm), "float32")
    A: T.Tensor((Dm, N), "float32")
    Bm: T.Tensor((B, L, N), "float32")
    Cm: T.Tensor((B, L, N), "float32")
    Dp: T.Tensor((Dm,), "float32")
    Y = T.empty((B, L, Dm), "float32")
    with T.Kernel(T.ceildiv(Dm, 32), B, threads=32) as (bx, b):
        tx = T.get_thread_binding()
        h = T.alloc_local((N,), "float32")
        d = bx * 32 + tx
        T.clear(h)
        for t in T.serial(L):
            y = T.alloc_var("float32", init=0.0)
            dl = T.alloc_var("float32")
            dl = dt[b, t, d]
            dl = T.if_then_else(dl > 20.0, dl, T.log1p(T.exp(dl)))
            for n in T.unroll(N):
                h[n] = h[n] * T.exp(dl * A[d, n]) + dl * Bm[b, t, n] * U[b, t, d]
                y += h[n] * Cm[b, t, n]
            Y[b, t, d] = y + Dp[d] * U[b, t, d]
    return Y


@EVERY
def test_mamba_selective_scan(case):
    B, L, Dm, N = 2, 12, 40, 8
    u, dt, a, bm, cm, dp = (
        case.randn(B, L, Dm),
        case.randn(B, L, Dm),
        -torch.rand(Dm, N),
        case.randn(B, L, N),
        case.randn(B, L, N),
        case.randn(Dm),
    )
    h = torch.zeros(B, Dm, N)
    ref = []
    sp = F.softplus(dt)
    for t in range(L):
        h = h * torch.exp(sp[:, t, :, None] * a) + sp[:, t, :, None] * bm[:, t, None] * u[:, t, :, None]
        ref.append((h * cm[:, t, None]).sum(-1) + dp * u[:, t])
    case.run(selective_scan.compile(u, dt, a, bm, cm, dp), [u, dt, a, bm, cm, dp], torch.stack(ref, 1), 1e-4, 1e-4)


@tilelang.jit
def delta_rule(Q, K, V, beta, G):
    B, S, H, DK, DV = T.const("B S H DK DV")
    Q: T.Tensor((B, S, H, DK), "float32")
    K: T.Tensor((B, S, H, DK), "float32")
    V: T.Tensor((B, S, H, DV), "float32")
    beta: T.Tensor((B, S, H), "float32")
    G: T.Tensor((B, S, H), "float32")
    O = T.empty((B, S, H, DV), "float32")
    with T.Kernel(H, B, threads=64) as (h, b):
        st = T.alloc_fragment((DK, DV), "float32")
        tmp = T.alloc_fragment((DK, DV), "float32")
        r = T.alloc_fragment((DV,), "float32")
        k = T.alloc_shared((DK,), "float32")
        q = T.alloc_shared((DK,), "float32")
        T.clear(st)
        for t in range(S):
            T.copy(K[b, t, h, :], k)
            T.copy(Q[b, t, h, :], q)
            g = T.exp(G[b, t, h])
            for i, j in T.Parallel(DK, DV):
                st[i, j] *= g
                tmp[i, j] = st[i, j] * k[i]
            T.reduce_sum(tmp, r, dim=0)
            for j in T.Parallel(DV):
                r[j] = (V[b, t, h, j] - r[j]) * beta[b, t, h]
            for i, j in T.Parallel(DK, DV):
                st[i, j] += k[i] * r[j]
                tmp[i, j] = st[i, j] * q[i]
            T.reduce_sum(tmp, r, dim=0)
            T.copy(r, O[b, t, h, :])
    return O


@EVERY
def test_gated_delta(case):
    B, S, H, DK, DV = 1, 10, 2, 16, 32
    q, k, v, be, g = (
        case.randn(B, S, H, DK),
        F.normalize(case.randn(B, S, H, DK), dim=-1),
        case.randn(B, S, H, DV),
        torch.rand(B, S, H),
        -torch.rand(B, S, H),
    )
    st = torch.zeros(B, H, DK, DV)
    ref = []
    for t in range(S):
        st = st * g[:, t].exp()[..., None, None]
        r = (v[:, t] - torch.einsum("bhkv,bhk->bhv", st, k[:, t])) * be[:, t][..., None]
        st = st + k[:, t][..., None] * r[..., None, :]
        ref.append(torch.einsum("bhkv,bhk->bhv", st, q[:, t]))
    case.run(delta_rule.compile(q, k, v, be, g), [q, k, v, be, g], torch.stack(ref, 1), 1e-4, 1e-4)


@tilelang.jit(out_idx=-1)
def hadamard(B, N, threads=32):
    per = N // threads
    L = per.bit_length() - 1

    @T.prim_func
    def main(A: T.Tensor((B, N), "float32"), O: T.Tensor((B, N), "float32")):
        with T.Kernel(B, threads=threads) as b:
            tx = T.get_thread_binding(0)
            x = T.alloc_local((per,), "float32")
            for i in T.vectorized(per):
                x[i] = A[b, tx * per + i]
            for s in T.unroll(L):
                h = 1 << s
                for i in T.unroll(per // 2):
                    lo = (i // h) * 2 * h + i % h
                    u = x[lo]
                    w = x[lo + h]
                    x[lo] = u + w
                    x[lo + h] = u - w
            for s in T.unroll(5):
                for i in T.unroll(per):
                    o = T.shfl_xor(x[i], 1 << s)
                    x[i] = T.if_then_else((tx >> s) & 1 == 1, o - x[i], x[i] + o)
            for i in T.vectorized(per):
                O[b, tx * per + i] = x[i] * (N**-0.5)

    return main


@EVERY
def test_hadamard_warp(case):
    N = 128
    H = torch.ones(1, 1)
    while H.shape[0] < N:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)], 0)
    a = case.randn(3, N)
    case.run(hadamard(3, N), [a], a @ H * N**-0.5, 1e-4, 1e-4)


@tilelang.jit
def compact(X, Y, cnt, thr: T.float32, threads: int = 128):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y: T.Tensor((N,), "float32")
    cnt: T.Tensor((1,), "int32")
    with T.Kernel(T.ceildiv(N, threads), threads=threads) as bx:
        tx = T.get_thread_binding()
        base = T.alloc_shared((threads // 32,), "int32")
        i = bx * threads + tx
        v = X[i]
        keep = (i < N) and (v > thr)
        bal = T.cast(T.ballot(keep), "uint32")
        lane = T.get_lane_idx()
        before = T.popcount(bal & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)))
        if lane == 0:
            base[T.get_warp_idx()] = T.atomic_add(cnt[0], T.popcount(bal), return_prev=True)
        T.sync_warp()
        if keep:
            Y[base[T.get_warp_idx()] + T.cast(before, "int32")] = v


@EVERY
def test_stream_compaction(case):
    x = case.randn(300)
    y = torch.zeros(300)
    n = torch.zeros(1, dtype=torch.int32)
    k = compact.compile(x, y, n, 0.3)
    _, (_, y, n, _) = case.call(k, x, y, n, 0.3)
    m = int(n)
    r = x[x > 0.3]
    assert m == len(r), (m, len(r))
    close(y[:m].sort().values, r.sort().values, 0, 0)
    assert not y[m:].any()
