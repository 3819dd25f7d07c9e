"""Convolutions and other programs made of chained products."""

import torch
from bounds import E16, within
from spec_harness import EVERY, on

import tilelang
import tilelang.language as T

f16 = "float16"
bf = "bfloat16"
f32 = "float32"
LONG = on("tile", "simulator", "cpu", "gpu", slow=("simulator",))


@tilelang.jit
def dwpw(X, Wd, Wp, BP: int = 64):
    N, H, W_, C_, F = T.const("N H W C F")
    X: T.Tensor((N, H, W_, C_), f16)
    Wd: T.Tensor((3, 3, C_), f16)
    Wp: T.Tensor((C_, F), f16)
    OH, OW = (H + 2 - 3) // 2 + 1, (W_ + 2 - 3) // 2 + 1
    Y = T.empty((N, OH, OW, F), f32)
    with T.Kernel(T.ceildiv(OH * OW, BP), N, threads=128) as (bp, n):
        Ds = T.alloc_shared((BP, C_), f16)
        Ws = T.alloc_shared((C_, F), f16)
        acc = T.alloc_fragment((BP, F), f32)
        d = T.alloc_fragment((BP, C_), f32)
        T.clear(d)
        T.copy(Wp, Ws)
        for kh in T.serial(3):
            for kw in T.serial(3):
                for p, ch in T.Parallel(BP, C_):
                    oh = (bp * BP + p) // OW
                    ow = (bp * BP + p) % OW
                    ih = oh * 2 + kh - 1
                    iw = ow * 2 + kw - 1
                    if ih >= 0 and ih < H and iw >= 0 and iw < W_:
                        d[p, ch] += T.cast(X[n, ih, iw, ch], f32) * T.cast(Wd[kh, kw, ch], f32)
        for p, ch in T.Parallel(BP, C_):
            Ds[p, ch] = T.clamp(d[p, ch], 0.0, 6.0)
        T.gemm(Ds, Ws, acc, clear_accum=True)
        for p, f in T.Parallel(BP, F):
            if bp * BP + p < OH * OW:
                Y[n, (bp * BP + p) // OW, (bp * BP + p) % OW, f] = acc[p, f]
    return Y


@EVERY
def test_depthwise_pointwise(case):
    X, Wd, Wp = case.randn(2, 9, 11, 32, dt=torch.half), case.randn(3, 3, 32, dt=torch.half), case.randn(32, 24, dt=torch.half)
    (Y,), _ = case.call(dwpw, X, Wd, Wp)
    F = torch.nn.functional
    d = F.conv2d(X.double().permute(0, 3, 1, 2), Wd.double().permute(2, 0, 1)[:, None], stride=2, padding=1, groups=32).clamp(
        0, 6
    )
    w = torch.einsum("nchw,cf->nhwf", d, Wp.double())
    b_ = torch.einsum("nchw,cf->nhwf", d * E16 + 1e-5, Wp.double().abs()) * 1.05
    within(Y, w, b_)


@tilelang.jit
def nearest(X, Y, BM: int = 64, BN: int = 64):
    M, N, D = T.const("M N D")
    X: T.Tensor((M, D), bf)
    Y: T.Tensor((N, D), bf)
    I = T.empty((M,), "int32")
    Dist = T.empty((M,), f32)
    with T.Kernel(T.ceildiv(M, BM), threads=256) as b:
        Xs = T.alloc_shared((BM, D), bf)
        Ys = T.alloc_shared((BN, D), bf)
        S = T.alloc_fragment((BM, BN), f32)
        y2 = T.alloc_fragment((BN,), f32)
        yf = T.alloc_fragment((BN, D), f32)
        key = T.alloc_fragment((BM, BN), "int64")
        best = T.alloc_fragment((BM,), "int64")
        x2 = T.alloc_fragment((BM,), f32)
        xf = T.alloc_fragment((BM, D), f32)
        T.copy(X[b * BM, 0], Xs)
        T.copy(Xs, xf)
        for i, j in T.Parallel(BM, D):
            xf[i, j] *= xf[i, j]
        T.reduce_sum(xf, x2, dim=1)
        T.fill(best, T.max_value("int64"))
        for t in T.Pipelined(T.ceildiv(N, BN), num_stages=2):
            T.copy(Y[t * BN, 0], Ys)
            T.gemm(Xs, Ys, S, transpose_B=True, clear_accum=True)
            T.copy(Ys, yf)
            for i, j in T.Parallel(BN, D):
                yf[i, j] = yf[i, j] * yf[i, j]
            T.reduce_sum(yf, y2, dim=1)
            for i, j in T.Parallel(BM, BN):
                d = T.max(x2[i] + y2[j] - 2.0 * S[i, j], 0.0)
                bits = T.cast(T.reinterpret(d, "int32"), "int64")
                key[i, j] = T.if_then_else(
                    t * BN + j < N, (bits << T.int64(32)) | T.cast(t * BN + j, "int64"), T.max_value("int64")
                )
            T.reduce_min(key, best, dim=1, clear=False)
        for i in T.Parallel(BM):
            I[b * BM + i] = T.cast(best[i] & T.int64(0x7FFFFFFF), "int32")
            Dist[b * BM + i] = T.reinterpret(T.cast(best[i] >> T.int64(32), "int32"), f32)
    return I, Dist


@EVERY
def test_nearest_neighbour(case):
    X, Y = case.randn(70, 32, dt=torch.bfloat16), case.randn(100, 32, dt=torch.bfloat16)
    (i, d), _ = case.call(nearest, X, Y)
    w = torch.cdist(X.double(), Y.double()) ** 2
    within(d, w.min(1).values, 1e-3)
    within(w.gather(1, i.long()[:, None])[:, 0], w.min(1).values, 1e-3)


@tilelang.jit(out_idx=[-1])
def winograd(N, H, W, C_, F, BT_=16):
    TH, TW = H // 2, W // 2
    NT = N * TH * TW

    @T.prim_func
    def main(X: T.Tensor((N, H, W, C_), f32), U: T.Tensor((16, C_, F), f16), Y: T.Tensor((N, H, W, F), f32)):
        with T.Kernel(T.ceildiv(NT, BT_), threads=128) as b:
            V = T.alloc_shared((16, BT_, C_), f16)
            M = T.alloc_shared((16, BT_, F), f32)
            Us = T.alloc_shared((C_, F), f16)
            acc = T.alloc_fragment((BT_, F), f32)
            for t, ch in T.Parallel(BT_, C_):
                g = b * BT_ + t
                n = g // (TH * TW)
                y0 = (g // TW) % TH * 2 - 1
                x0 = g % TW * 2 - 1
                d = T.alloc_local((4, 4), f32)
                e = T.alloc_local((4, 4), f32)
                for i in T.unroll(4):
                    for j in T.unroll(4):
                        ok = g < NT and y0 + i >= 0 and y0 + i < H and x0 + j >= 0 and x0 + j < W
                        d[i, j] = T.if_then_else(ok, X[n, y0 + i, x0 + j, ch], 0)
                for j in T.unroll(4):
                    e[0, j] = d[0, j] - d[2, j]
                    e[1, j] = d[1, j] + d[2, j]
                    e[2, j] = d[2, j] - d[1, j]
                    e[3, j] = d[1, j] - d[3, j]
                for i in T.unroll(4):
                    V[i * 4, t, ch] = e[i, 0] - e[i, 2]
                    V[i * 4 + 1, t, ch] = e[i, 1] + e[i, 2]
                    V[i * 4 + 2, t, ch] = e[i, 2] - e[i, 1]
                    V[i * 4 + 3, t, ch] = e[i, 1] - e[i, 3]
            for q in T.serial(16):
                T.copy(U[q, :, :], Us)
                T.gemm(V[q, :, :], Us, acc, clear_accum=True)
                T.copy(acc, M[q, :, :])
            for t, f in T.Parallel(BT_, F):
                g = b * BT_ + t
                if g < NT:
                    for i in T.unroll(2):
                        for j in T.unroll(2):
                            s = T.alloc_var(f32, init=0.0)
                            for a in T.unroll(4):
                                for e_ in T.unroll(4):
                                    ca = T.if_then_else(
                                        i == 0,
                                        T.if_then_else(a < 3, 1.0, 0.0),
                                        T.if_then_else(a == 0, 0.0, T.if_then_else(a == 1, 1.0, -1.0)),
                                    )
                                    cb = T.if_then_else(
                                        j == 0,
                                        T.if_then_else(e_ < 3, 1.0, 0.0),
                                        T.if_then_else(e_ == 0, 0.0, T.if_then_else(e_ == 1, 1.0, -1.0)),
                                    )
                                    s += ca * cb * M[a * 4 + e_, t, f]
                            Y[g // (TH * TW), (g // TW) % TH * 2 + i, g % TW * 2 + j, f] = s

    return main


@EVERY
def test_winograd_conv(case):
    N, H, W, C_, F = 1, 6, 10, 16, 24
    X, Wt = case.randn(N, H, W, C_), case.randn(3, 3, C_, F)
    G = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    U = torch.einsum("ai,bj,ijcf->abcf", G, G, Wt).reshape(16, C_, F).half()
    (y,), _ = case.call(winograd(N, H, W, C_, F), X, U)
    w = torch.nn.functional.conv2d(X.double().permute(0, 3, 1, 2), Wt.double().permute(3, 2, 0, 1), padding=1).permute(
        0, 2, 3, 1
    )
    within(y, w, 0.08)


@tilelang.jit
def newton_schulz(X, steps: int = 3):
    B, N = T.const("B N")
    X: T.Tensor((B, N, N), f32)
    O = T.empty((B, N, N), f32)
    with T.Kernel(B, threads=128) as b:
        Xs = T.alloc_shared((N, N), bf)
        As = T.alloc_shared((N, N), bf)
        Bs = T.alloc_shared((N, N), bf)
        x = T.alloc_fragment((N, N), f32)
        a = T.alloc_fragment((N, N), f32)
        b2 = T.alloc_fragment((N, N), f32)
        rs = T.alloc_fragment((N,), f32)
        fro = T.alloc_fragment((1,), f32)
        T.copy(X[b, :, :], x)
        for i, j in T.Parallel(N, N):
            a[i, j] = x[i, j] * x[i, j]
        T.reduce_sum(a, rs, dim=1)
        T.reduce_sum(rs, fro)
        for i, j in T.Parallel(N, N):
            x[i, j] = x[i, j] * T.rsqrt(fro[0])
        for _s in T.serial(steps):
            T.copy(x, Xs)
            T.gemm(Xs, Xs, a, transpose_B=True, clear_accum=True)
            T.copy(a, As)
            T.gemm(As, As, b2, clear_accum=True)
            for i, j in T.Parallel(N, N):
                b2[i, j] = -4.7750 * a[i, j] + 2.0315 * b2[i, j]
            T.copy(b2, Bs)
            for i, j in T.Parallel(N, N):
                x[i, j] *= 3.4445
            T.gemm(Bs, Xs, x)
        T.copy(x, O[b, :, :])
    return O


def rounded(t):
    return t.float().bfloat16().double()


@LONG
def test_muon_newton_schulz(case):
    X = case.randn(2, 48, 48)
    (o,), _ = case.call(newton_schulz, X)
    x = X.double() / X.double().flatten(1).norm(dim=1)[:, None, None]
    for _ in range(3):
        xs = rounded(x)
        a = xs @ xs.mT
        A = rounded(a)
        b2 = -4.7750 * a + 2.0315 * (A @ A)
        x = 3.4445 * x + rounded(b2) @ xs
    within(o, x, 0.03)


@tilelang.jit(out_idx=[-1])
def conv3d(D, H, W, C_, F, K=3, BW=16):
    OD, OH, OW = D - K + 1, H - K + 1, W - K + 1

    @T.prim_func
    def main(X: T.Tensor((D, H, W, C_), f16), Wt: T.Tensor((K, K, K, C_, F), f16), Y: T.Tensor((OD, OH, OW, F), f16)):
        with T.Kernel(T.ceildiv(OW, BW), OH, OD, threads=32) as (bw, oh, od):
            xs = T.alloc_shared((BW, C_), f16)
            ws = T.alloc_shared((C_, F), f16)
            acc = T.alloc_fragment((BW, F), f32)
            T.clear(acc)
            for t in T.Pipelined(K * K * K, num_stages=2):
                T.copy(X[od + t // (K * K), oh + t // K % K, bw * BW + t % K, 0], xs)
                T.copy(Wt[t // (K * K), t // K % K, t % K, :, :], ws)
                T.gemm(xs, ws, acc)
            T.copy(acc, Y[od, oh, bw * BW, 0])

    return main


@LONG
def test_conv_3d(case):
    X, W = case.randn(4, 5, 21, 16, dt=torch.half), case.randn(3, 3, 3, 16, 8, dt=torch.half)
    (y,), _ = case.call(conv3d(4, 5, 21, 16, 8), X, W)
    w = torch.nn.functional.conv3d(X.double().permute(3, 0, 1, 2)[None], W.double().permute(4, 3, 0, 1, 2))[0].permute(
        1, 2, 3, 0
    )
    within(y, w, w.abs() * E16 * 1.01 + 2e-3)
