"""Layers of language models, against float64 with bounds from the types."""

import numpy as np
import torch
from bounds import E16, E32, EBF, equal, wide, within
from spec_harness import EVERY, on

import tilelang
import tilelang.language as T

f16 = "float16"
bf = "bfloat16"
f32 = "float32"
LONG = on("tile", "simulator", "cpu", "gpu", slow=("simulator",))


@tilelang.jit
def swiglu(X, Wg, Wu, Wd, Y, BM: int = 64, BH: int = 64, BK: int = 32, stages: int = 2):
    M, D, H = T.const("M D H")
    X: T.Tensor((M, D), f16)
    Wg: T.Tensor((H, D), f16)
    Wu: T.Tensor((H, D), f16)
    Wd: T.Tensor((H, D), f16)
    Y: T.Tensor((M, D), f32)
    with T.Kernel(T.ceildiv(H, BH), T.ceildiv(M, BM), threads=256) as (bh, bm):
        Xs = T.alloc_shared((BM, BK), f16)
        Gs = T.alloc_shared((BH, BK), f16)
        Us = T.alloc_shared((BH, BK), f16)
        Ds = T.alloc_shared((BH, BK), f16)
        Hs = T.alloc_shared((BM, BH), f16)
        g = T.alloc_fragment((BM, BH), f32)
        u = T.alloc_fragment((BM, BH), f32)
        y = T.alloc_fragment((BM, BK), f32)
        T.clear(g)
        T.clear(u)
        for k in T.Pipelined(T.ceildiv(D, BK), num_stages=stages):
            T.copy(X[bm * BM, k * BK], Xs)
            T.copy(Wg[bh * BH, k * BK], Gs)
            T.copy(Wu[bh * BH, k * BK], Us)
            T.gemm(Xs, Gs, g, transpose_B=True)
            T.gemm(Xs, Us, u, transpose_B=True)
        for i, j in T.Parallel(BM, BH):
            g[i, j] = g[i, j] * T.sigmoid(g[i, j]) * u[i, j]
        T.copy(g, Hs)
        for n in T.Pipelined(T.ceildiv(D, BK), num_stages=stages):
            T.copy(Wd[bh * BH, n * BK], Ds)
            T.gemm(Hs, Ds, y, clear_accum=True)
            T.atomic_add(Y[bm * BM, n * BK], y)


@LONG
def test_fused_swiglu(case):
    M, D, H = 70, 80, 100
    X, Wg, Wu, Wd = (
        case.randn(M, D, dt=torch.half, scale=0.5),
        case.randn(H, D, dt=torch.half, scale=0.2),
        case.randn(H, D, dt=torch.half, scale=0.2),
        case.randn(H, D, dt=torch.half, scale=0.2),
    )
    Y = torch.zeros(M, D)
    _, own = case.call(swiglu, X, Wg, Wu, Wd, Y)
    g, u = wide(X) @ wide(Wg).T, wide(X) @ wide(Wu).T
    h = torch.nn.functional.silu(g) * u
    want = h @ wide(Wd)
    dh = (
        h.abs() * E16 * 1.01
        + (wide(X).abs() @ wide(Wg).abs().T + wide(X).abs() @ wide(Wu).abs().T) * (1 + u.abs() + g.abs()) * 200 * E32
    )
    within(own[4], want, dh @ wide(Wd).abs() + 1e-5)


@tilelang.jit(out_idx=[-1])
def ssd(L, H, P, N, CH=64):
    @T.prim_func
    def main(
        X: T.Tensor((L, H, P), f16),
        A: T.Tensor((L, H), f32),
        B: T.Tensor((L, N), f16),
        C_: T.Tensor((L, N), f16),
        Y: T.Tensor((L, H, P), f32),
    ):
        with T.Kernel(H, threads=128) as h:
            Xs = T.alloc_shared((CH, P), f16)
            Bs = T.alloc_shared((CH, N), f16)
            Cs = T.alloc_shared((CH, N), f16)
            a = T.alloc_shared((CH,), f32)
            G = T.alloc_fragment((CH, CH), f32)
            Gs = T.alloc_shared((CH, CH), f16)
            St = T.alloc_fragment((N, P), f32)
            Ss = T.alloc_shared((N, P), f16)
            Bd = T.alloc_shared((CH, N), f16)
            y = T.alloc_fragment((CH, P), f32)
            T.clear(St)
            for t in T.Pipelined(T.ceildiv(L, CH), num_stages=2):
                T.copy(X[t * CH : (t + 1) * CH, h, :], Xs)
                T.copy(B[t * CH, 0], Bs)
                T.copy(C_[t * CH, 0], Cs)
                T.copy(A[t * CH : (t + 1) * CH, h], a)
                T.cumsum(a, dim=0)
                T.copy(St, Ss)
                T.gemm(Cs, Ss, y, clear_accum=True)
                for i, p in T.Parallel(CH, P):
                    y[i, p] *= T.exp(a[i])
                T.gemm(Cs, Bs, G, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(CH, CH):
                    G[i, j] = T.if_then_else(i >= j, G[i, j] * T.exp(a[i] - a[j]), 0)
                T.copy(G, Gs)
                T.gemm(Gs, Xs, y)
                for i, n in T.Parallel(CH, N):
                    Bd[i, n] = Bs[i, n] * T.exp(a[CH - 1] - a[i])
                for n, p in T.Parallel(N, P):
                    St[n, p] *= T.exp(a[CH - 1])
                T.gemm(Bd, Xs, St, transpose_A=True)
                T.copy(y, Y[t * CH : (t + 1) * CH, h, :])

    return main


@LONG
def test_mamba2_ssd(case):
    L, H, P, N = 100, 1, 32, 64
    X, B, C_ = (
        case.randn(L, H, P, dt=torch.half),
        case.randn(L, N, dt=torch.half, scale=0.3),
        case.randn(L, N, dt=torch.half, scale=0.3),
    )
    A = -torch.rand(L, H) * 0.2
    (y,), _ = case.call(ssd(L, H, P, N), X, A, B, C_)
    w = torch.zeros(L, H, P).double()
    st = torch.zeros(H, N, P).double()
    for t in range(L):
        st = st * A[t].double().exp()[:, None, None] + B[t].double()[None, :, None] * X[t].double()[:, None, :]
        w[t] = torch.einsum("n,hnp->hp", C_[t].double(), st)
    within(y, w, 0.05)


@tilelang.jit(out_idx=[-1])
def unpad(B, S, D):
    tot = T.dynamic("tot")

    @T.prim_func
    def main(
        X: T.Tensor((B, S, D), bf), cu: T.Tensor((B + 1,), "int32"), like: T.Tensor((tot,), "int8"), Y: T.Tensor((tot, D), bf)
    ):
        with T.Kernel(T.ceildiv(tot, 4), threads=128) as b:
            for i, d in T.Parallel(4, D):
                r = b * 4 + i
                if r < tot:
                    lo = T.alloc_var("int32", init=0)
                    hi = T.alloc_var("int32", init=B)
                    while hi - lo > 1:
                        mid = (lo + hi) // 2
                        if cu[mid] <= r:
                            lo = mid
                        else:
                            hi = mid
                    Y[r, d] = X[lo, r - cu[lo], d]

    return main


@EVERY
def test_unpad_search(case):
    lens = [3, 0, 7, 1]
    cu = torch.tensor(np.cumsum([0] + lens), dtype=torch.int32)
    X = case.randn(4, 8, 33, dt=torch.bfloat16)
    (y,), _ = case.call(unpad(4, 8, 33), X, cu, torch.zeros(11, dtype=torch.int8))
    equal(y, torch.cat([X[i, :n] for i, n in enumerate(lens)]))


@tilelang.jit
def kv_append(K, slot, cache, scale, page: int = 8):
    n = T.dynamic("n")
    H, D, NP = T.const("H D NP")
    K: T.Tensor((n, H, D), f16)
    slot: T.Tensor((n,), "int32")
    cache: T.Tensor((NP, H, page, D), "float8_e4m3fn")
    scale: T.Tensor((NP, H, page), f32)
    with T.Kernel(n, threads=64) as t:
        x = T.alloc_fragment((H, D), f32)
        a = T.alloc_fragment((H,), f32)
        T.copy(K[t, :, :], x)
        T.reduce_absmax(x, a, dim=1)
        s = slot[t]
        if s >= 0:
            for h in T.Parallel(H):
                a[h] = T.max(a[h], 1e-4) / 448.0
                scale[s // page, h, s % page] = a[h]
            for h, d in T.Parallel(H, D):
                cache[s // page, h, s % page, d] = x[h, d] / a[h]


@EVERY
def test_kv_append_fp8(case):
    K = case.randn(5, 3, 32, dt=torch.half)
    slot = torch.tensor([9, -1, 0, 23, 4], dtype=torch.int32)
    cache = torch.zeros(3, 3, 8, 32).to(torch.float8_e4m3fn)
    sc = torch.full((3, 3, 8), 5.0)
    _, o = case.call(kv_append, K, slot, cache, sc)
    wc, ws = cache.float(), sc.clone()
    for t, s in enumerate(slot.tolist()):
        if s >= 0:
            a = K[t].float().abs().amax(-1).clamp(min=1e-4) / 448
            ws[s // 8, :, s % 8] = a
            wc[s // 8, :, s % 8] = (K[t].float() / a[:, None]).to(torch.float8_e4m3fn).float()
    within(o[3], ws, ws.double() * E32 * 2)
    within(o[2], wc, wc.double().abs() / 8)


@tilelang.jit
def rms_quant(X, R, W, G: int = 128, ue8m0: bool = True, eps: float = 1e-6):
    M, N = T.const("M N")
    X: T.Tensor((M, N), bf)
    R: T.Tensor((M, N), bf)
    W: T.Tensor((N,), bf)
    Q = T.empty((M, N), "float8_e4m3fn")
    S = T.empty((M, N // G), f32)
    with T.Kernel(T.ceildiv(M, 2), threads=128) as b:
        x = T.alloc_fragment((2, N), f32)
        s = T.alloc_fragment((2,), f32)
        y = T.alloc_fragment((2, N), f32)
        a = T.alloc_fragment((2, N // G), f32)
        for i, j in T.Parallel(2, N):
            x[i, j] = T.cast(X[b * 2 + i, j], f32) + T.cast(R[b * 2 + i, j], f32)
        T.copy(x, R[b * 2, 0])
        for i, j in T.Parallel(2, N):
            y[i, j] = x[i, j] * x[i, j]
        T.reduce_sum(y, s, dim=1)
        for i, j in T.Parallel(2, N):
            y[i, j] = x[i, j] * T.rsqrt(s[i] / N + eps) * W[j]
        yv = T.view(y, (2, N // G, G))
        T.reduce_absmax(yv, a, dim=2)
        for i, g in T.Parallel(2, N // G):
            v = T.max(a[i, g], 1e-4) / 448.0
            if ue8m0:
                bits = T.reinterpret(v, "uint32")
                e = T.cast((bits >> T.uint32(23)) & T.uint32(255), "int32") + T.if_then_else(
                    (bits & T.uint32(0x7FFFFF)) != T.uint32(0), 1, 0
                )
                a[i, g] = T.reinterpret(T.cast(e << 23, "uint32"), f32)
            else:
                a[i, g] = v
        T.copy(a, S[b * 2, 0])
        for i, g, k in T.Parallel(2, N // G, G):
            yv[i, g, k] = T.clamp(yv[i, g, k] / a[i, g], -448.0, 448.0)
        T.copy(y, Q[b * 2, 0])
    return Q, S


@EVERY
def test_rmsnorm_fp8_groups(case):
    X, R, W = case.randn(5, 256, dt=torch.bfloat16), case.randn(5, 256, dt=torch.bfloat16), case.randn(256, dt=torch.bfloat16)
    (q, s), o = case.call(rms_quant, X, R.clone(), W)
    x = X.double() + R.double()
    within(o[1], x, x.abs() * EBF * 1.01)
    y = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * W.double()
    sc = 2.0 ** (y.view(5, 2, 128).abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil()
    within(s, sc, sc * 1e-6)
    within(
        (q.double().view(5, 2, 128) * s.double()[..., None]).view(5, 256),
        y,
        y.abs() / 15 + sc.repeat_interleave(128, 1) * 2.0**-9,
    )


@tilelang.jit(out_idx=[-2, -1])
def lstm(S, B, H):
    @T.prim_func
    def main(
        G: T.Tensor((S, B, 4 * H), f32), W: T.Tensor((4 * H, H), f16), Y: T.Tensor((S, B, H), f16), Cn: T.Tensor((B, H), f32)
    ):
        with T.Kernel(1, threads=128) as _:
            Ws = T.alloc_shared((4 * H, H), f16)
            Hs = T.alloc_shared((16, H), f16)
            g = T.alloc_fragment((16, 4 * H), f32)
            gs = T.alloc_shared((16, 4 * H), f32)
            cst = T.alloc_fragment((16, H), f32)
            h = T.alloc_fragment((16, H), f32)
            T.copy(W, Ws)
            T.clear(Hs)
            T.clear(cst)
            for t in T.serial(S):
                T.copy(G[t, 0:16, :], g)
                T.gemm(Hs, Ws, g, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(g, gs)
                for i, j in T.Parallel(16, H):
                    cst[i, j] = T.sigmoid(gs[i, H + j]) * cst[i, j] + T.sigmoid(gs[i, j]) * T.tanh(gs[i, 2 * H + j])
                    h[i, j] = T.sigmoid(gs[i, 3 * H + j]) * T.tanh(cst[i, j])
                T.copy(h, Hs)
                T.copy(Hs, Y[t, 0:16, :])
            T.copy(cst, Cn[0:16, :])

    return main


@EVERY
def test_lstm_cell(case):
    S, B, H = 5, 11, 32
    G, W = case.randn(S, B, 4 * H), case.randn(4 * H, H, dt=torch.half, scale=0.2)
    (y, cn), _ = case.call(lstm(S, B, H), G, W)
    h = torch.zeros(B, H).double()
    cs = torch.zeros(B, H).double()
    for t in range(S):
        g = G[t].double() + h.half().double() @ W.double().T
        i, f, gg, o = g.chunk(4, -1)
        cs = f.sigmoid() * cs + i.sigmoid() * gg.tanh()
        h = o.sigmoid() * cs.tanh()
        within(y[t], h, 3e-3)
    within(cn, cs, 3e-3)
