"""Stencils, transforms, sorts, scans, normalisations, losses: written from the specification alone."""

import math

import torch
from spec_harness import EVERY

import tilelang
import tilelang.language as T

F = torch.nn.functional


@tilelang.jit
def concat(A, B):
    m, n = T.dynamic("m, n")
    D = T.const("D")
    A: T.Tensor((m, D), "float32")
    B: T.Tensor((n, D), "float32")
    C = T.empty((m + n, D), "float32")
    with T.Kernel(T.ceildiv(m + n, 8), threads=64) as bx:
        for i, j in T.Parallel(8, D):
            r = bx * 8 + i
            if r < m:
                C[r, j] = A[r, j]
            elif r < m + n:
                C[r, j] = B[r - m, j]
    return C


@EVERY
def test_concat_dynamic(case):
    a, b = case.randn(13, 20), case.randn(6, 20)
    k = concat.compile(a, b)
    case.run(k, [a, b], torch.cat([a, b]), 0, 0)
    z = case.randn(0, 20)
    case.run(k, [z, b], b)
    case.run(k, [a, z], a)


def stencil3(N, blk=64):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), W: T.Tensor((3,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(T.ceildiv(N, blk), threads=64) as bx:
            S = T.alloc_shared((blk + 2,), "float32")
            T.copy(A[bx * blk - 1], S)
            for i in T.Parallel(blk):
                B[bx * blk + i] = W[0] * S[i] + W[1] * S[i + 1] + W[2] * S[i + 2]

    return main


@EVERY
def test_stencil_halo(case):
    n = 150
    a, w = case.randn(n), case.randn(3)
    ref = torch.nn.functional.conv1d(a[None, None], w[None, None], padding=1)[0, 0]
    case.run(tilelang.compile(stencil3(n), out_idx=-1), [a, w], ref, 1e-5, 1e-5)


@tilelang.jit(out_idx=[-1])
def jacobi(H, W, iters, b=16):
    @T.prim_func
    def main(A: T.Tensor((H, W), "float32"), O: T.Tensor((H, W), "float32")):
        with T.Kernel(1, threads=128) as _:
            P = T.alloc_shared((H, W), "float32")
            Q = T.alloc_shared((H, W), "float32")
            T.copy(A, P)
            T.copy(A, Q)
            it = T.alloc_var("int32", init=0)
            while it < iters:
                for i, j in T.Parallel(H - 2, W - 2):
                    Q[i + 1, j + 1] = 0.25 * (P[i, j + 1] + P[i + 2, j + 1] + P[i + 1, j] + P[i + 1, j + 2])
                T.copy(Q, P)
                it = it + 1
            T.copy(P, O)

    return main


@EVERY
def test_jacobi_while(case):
    a = case.randn(18, 30)
    r = a.clone()
    for _ in range(5):
        q = r.clone()
        q[1:-1, 1:-1] = 0.25 * (r[:-2, 1:-1] + r[2:, 1:-1] + r[1:-1, :-2] + r[1:-1, 2:])
        r = q
    case.run(jacobi(18, 30, 5), [a], r, 1e-5, 1e-5)


@tilelang.jit(out_idx=[2, 3])
def fft(B, N, threads=64):

    L = N.bit_length() - 1

    @T.prim_func
    def main(
        Re: T.Tensor((B, N), "float32"),
        Im: T.Tensor((B, N), "float32"),
        Or: T.Tensor((B, N), "float32"),
        Oi: T.Tensor((B, N), "float32"),
    ):
        with T.Kernel(B, threads=threads) as b:
            R = T.alloc_shared((N,), "float32")
            I = T.alloc_shared((N,), "float32")
            for i in T.Parallel(N):
                r = T.alloc_var("int32", init=0)
                for t in T.unroll(L):
                    r = r | (((i >> t) & 1) << (L - 1 - t))
                R[i] = Re[b, r]
                I[i] = Im[b, r]
            for s in T.serial(L):
                half = 1 << s
                for k in T.Parallel(N // 2):
                    pos = k % half
                    lo = (k // half) * 2 * half + pos
                    hi = lo + half
                    ang = -math.pi * T.cast(pos, "float32") / T.cast(half, "float32")
                    wr = T.cos(ang)
                    wi = T.sin(ang)
                    tr = R[hi] * wr - I[hi] * wi
                    ti = R[hi] * wi + I[hi] * wr
                    ur = R[lo]
                    ui = I[lo]
                    R[lo] = ur + tr
                    I[lo] = ui + ti
                    R[hi] = ur - tr
                    I[hi] = ui - ti
            T.copy(R, Or[b, :])
            T.copy(I, Oi[b, :])

    return main


@EVERY
def test_fft_radix2(case):
    re, im = case.randn(2, 64), case.randn(2, 64)
    f = torch.fft.fft(torch.complex(re, im))
    case.run(fft(2, 64), [re, im], [f.real, f.imag], 1e-4, 1e-4)


@tilelang.jit(out_idx=-1)
def bitonic(R, N, dt="int32"):
    L = N.bit_length() - 1

    @T.prim_func
    def main(A: T.Tensor((R, N), dt), B: T.Tensor((R, N), dt)):
        with T.Kernel(R, threads=N // 2) as r:
            S = T.alloc_shared((N,), dt)
            T.copy(A[r, 0:N], S)
            for a in range(1, L + 1):
                for bb in range(a):
                    j = 1 << (a - 1 - bb)
                    for t in T.Parallel(N // 2):
                        lo = (t // j) * 2 * j + t % j
                        hi = lo + j
                        up = ((lo >> a) & 1) == 0
                        x = S[lo]
                        y = S[hi]
                        if (x > y) == up:
                            S[lo], S[hi] = y, x
            T.copy(S, B[r, 0:N])

    return main


@EVERY
def test_bitonic_sort(case):
    a = case.randint(-1000, 1000, (3, 128))
    case.run(bitonic(3, 128), [a], a.sort(1).values)
    a = case.randn(2, 64)
    case.run(bitonic(2, 64, "float32"), [a], a.sort(1).values, 0, 0)


@tilelang.jit
def histogram(X, Hh, bins: int = 256, blk: int = 512, threads: int = 128):
    N = T.const("N")
    X: T.Tensor((N,), "uint8")
    Hh: T.Tensor((bins,), "int32")
    with T.Kernel(T.ceildiv(N, blk), threads=threads) as bx:
        local = T.alloc_shared((bins,), "int32")
        T.clear(local)
        for i in T.Parallel(blk):
            if bx * blk + i < N:
                T.atomic_add(local[X[bx * blk + i]], 1)
        for i in T.Parallel(bins):
            if local[i] != 0:
                T.atomic_add(Hh[i], local[i])


@EVERY
def test_histogram_shared(case):
    x = case.randint(0, 256, (1300,), torch.uint8)
    h = torch.zeros(256, dtype=torch.int32)
    case.run(histogram.compile(x, h), [x, h], None, inplace={1: torch.bincount(x.int(), minlength=256).int()})


@tilelang.jit(out_idx=[1])
def scan3(N, blk=128, dt="int32"):
    nb = (N + blk - 1) // blk

    @T.prim_func
    def main(A: T.Tensor((N,), dt), O: T.Tensor((N,), dt)):
        with T.Kernel(nb, threads=128) as bx:
            S = T.alloc_shared((blk,), dt)
            T.copy(A[bx * blk], S)
            T.cumsum(S)
            T.copy(S, O[bx * blk])
        with T.Kernel(1, threads=32) as _:
            acc = T.alloc_var(dt, init=0)
            carry = T.alloc_shared((blk,), dt)
            for b in T.serial(nb):
                T.copy(O[b * blk], carry)
                last = carry[blk - 1]
                for i in T.Parallel(blk):
                    if b * blk + i < N:
                        O[b * blk + i] = carry[i] + acc
                acc = acc + last

    return main


@EVERY
def test_scan_two_kernels(case):
    a = case.randint(-50, 50, (500,))
    case.run(scan3(500), [a], a.cumsum(0).int())


@tilelang.jit
def topk(X, k: int, R: int = 4):
    M, N = T.const("M N")
    X: T.Tensor((M, N), "float32")
    V = T.empty((M, k), "float32")
    I = T.empty((M, k), "int32")
    with T.Kernel(T.ceildiv(M, R), threads=128) as bx:
        x = T.alloc_fragment((R, N), "float32")
        mx = T.alloc_fragment((R,), "float32")
        idx = T.alloc_fragment((R, N), "int32")
        best = T.alloc_fragment((R,), "int32")
        T.copy(X[bx * R, 0], x)
        for t in T.serial(k):
            T.reduce_max(x, mx, dim=1)
            for i, j in T.Parallel(R, N):
                idx[i, j] = T.if_then_else(x[i, j] == mx[i], j, N)
            T.reduce_min(idx, best, dim=1)
            for i, j in T.Parallel(R, N):
                if j == best[i]:
                    x[i, j] = -T.infinity("float32")
            for i in T.Parallel(R):
                V[bx * R + i, t] = mx[i]
                I[bx * R + i, t] = best[i]
    return V, I


@EVERY
def test_topk_iter(case):
    x = case.randn(10, 40)
    v, i = x.topk(3, 1)
    case.run(topk.compile(x, 3), [x], [v, i.int()], 0, 0)


@tilelang.jit
def argmax64(X):
    M, N = T.const("M N")
    X: T.Tensor((M, N), "int32")
    O = T.empty((M,), "int64")
    with T.Kernel(M, threads=64) as bx:
        f = T.alloc_fragment((N,), "int64")
        m = T.alloc_fragment((1,), "int64")
        for j in T.Parallel(N):
            f[j] = (T.cast(X[bx, j], "int64") << 32) | T.cast(N - 1 - j, "int64")
        T.reduce_max(f, m)
        for j in T.Parallel(1):
            O[bx] = N - 1 - (m[j] & T.int64(0xFFFFFFFF))
    return O


@EVERY
def test_argmax_packed(case):
    x = case.randint(-5, 5, (4, 50))
    ref = torch.tensor([int((r == r.max()).nonzero()[0]) for r in x])
    case.run(argmax64.compile(x), [x], ref)


@tilelang.jit
def ln_fwd(X, G, Bt, eps: float = 1e-5):
    M, N = T.const("M N")
    X: T.Tensor((M, N), "bfloat16")
    G: T.Tensor((N,), "float32")
    Bt: T.Tensor((N,), "float32")
    Y = T.empty((M, N), "bfloat16")
    mean = T.empty((M,), "float32")
    rstd = T.empty((M,), "float32")
    with T.Kernel(M, threads=128) as r:
        x = T.alloc_fragment((N,), "float32")
        d = T.alloc_fragment((N,), "float32")
        s = T.alloc_fragment((1,), "float32")
        v = T.alloc_fragment((1,), "float32")
        T.copy(X[r, :], x)
        T.reduce_sum(x, s, dim=0)
        for j in T.Parallel(N):
            d[j] = (x[j] - s[0] / N) * (x[j] - s[0] / N)
        T.reduce_sum(d, v, dim=0)
        for j in T.Parallel(N):
            Y[r, j] = (x[j] - s[0] / N) * T.rsqrt(v[0] / N + eps) * G[j] + Bt[j]
        for j in T.Parallel(1):
            mean[r] = s[j] / N
            rstd[r] = T.rsqrt(v[j] / N + eps)
    return Y, mean, rstd


@tilelang.jit
def ln_bwd(DY, X, G, mean, rstd, dG, dB, R: int = 4):
    M, N = T.const("M N")
    DY: T.Tensor((M, N), "float32")
    X: T.Tensor((M, N), "float32")
    G: T.Tensor((N,), "float32")
    mean: T.Tensor((M,), "float32")
    rstd: T.Tensor((M,), "float32")
    dG: T.Tensor((N,), "float32")
    dB: T.Tensor((N,), "float32")
    DX = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(M, R), threads=128) as bx:
        xh = T.alloc_fragment((R, N), "float32")
        wdy = T.alloc_fragment((R, N), "float32")
        dy = T.alloc_fragment((R, N), "float32")
        t = T.alloc_fragment((R, N), "float32")
        c1 = T.alloc_fragment((R,), "float32")
        c2 = T.alloc_fragment((R,), "float32")
        T.copy(DY[bx * R, 0], dy)
        T.copy(X[bx * R, 0], xh)
        for i, j in T.Parallel(R, N):
            xh[i, j] = (xh[i, j] - mean[bx * R + i]) * rstd[bx * R + i]
            wdy[i, j] = dy[i, j] * G[j]
            t[i, j] = xh[i, j] * wdy[i, j]
        T.reduce_sum(t, c1, dim=1)
        T.reduce_sum(wdy, c2, dim=1)
        for i, j in T.Parallel(R, N):
            DX[bx * R + i, j] = (wdy[i, j] - (xh[i, j] * c1[i] + c2[i]) / N) * rstd[bx * R + i]
        g = T.alloc_fragment((N,), "float32")
        b = T.alloc_fragment((N,), "float32")
        for i, j in T.Parallel(R, N):
            t[i, j] = dy[i, j] * xh[i, j]
        T.reduce_sum(t, g, dim=0)
        T.reduce_sum(dy, b, dim=0)
        T.atomic_add(dG, g)
        T.atomic_add(dB[0:N], b)
    return DX


@EVERY
def test_layernorm_fwd(case):
    x = case.randn(5, 96, dt=torch.bfloat16)
    g, b = case.randn(96), case.randn(96)
    xf = x.float()
    mu = xf.mean(1)
    rs = (xf.var(1, unbiased=False) + 1e-5).rsqrt()
    case.run(ln_fwd.compile(x, g, b), [x, g, b], [((xf - mu[:, None]) * rs[:, None] * g + b).bfloat16(), mu, rs], 2e-2, 2e-2)


@EVERY
def test_layernorm_bwd(case):
    x, dy, g = case.randn(10, 64), case.randn(10, 64), case.randn(64)
    xx = x.clone().requires_grad_()
    gg = g.clone().requires_grad_()
    bb = torch.zeros(64, requires_grad=True)
    torch.nn.functional.layer_norm(xx, (64,), gg, bb).backward(dy)
    mu = x.mean(1)
    rs = (x.var(1, unbiased=False) + 1e-5).rsqrt()
    dg, db = torch.zeros(64), torch.zeros(64)
    case.run(
        ln_bwd.compile(dy, x, g, mu, rs, dg, db),
        [dy, x, g, mu, rs, dg, db],
        [xx.grad],
        1e-4,
        1e-4,
        inplace={5: gg.grad, 6: bb.grad},
    )


@tilelang.jit
def rms_res(X, Rs, W, eps: float = 1e-6, R: int = 2):
    m = T.dynamic("m")
    N = T.const("N")
    X: T.Tensor((m, N), "float16")
    Rs: T.Tensor((m, N), "float16")
    W: T.Tensor((N,), "float16")
    S = T.empty((m, N), "float16")
    Y = T.empty((m, N), "float16")
    with T.Kernel(T.ceildiv(m, R), threads=64) as bx:
        h = T.alloc_fragment((R, N), "float32")
        q = T.alloc_fragment((R, N), "float32")
        ss = T.alloc_fragment((R,), "float32")
        for i, j in T.Parallel(R, N):
            h[i, j] = T.cast(X[bx * R + i, j], "float32") + Rs[bx * R + i, j]
            q[i, j] = h[i, j] * h[i, j]
        T.reduce_sum(q, ss, dim=1)
        T.copy(h, S[bx * R, 0])
        for i, j in T.Parallel(R, N):
            h[i, j] = h[i, j] * T.rsqrt(ss[i] / N + eps) * W[j]
        T.copy(h, Y[bx * R, 0])
    return Y, S


@EVERY
def test_rmsnorm_residual(case):
    x, r, w = [case.randn(*s, dt=torch.float16) for s in ((7, 80), (7, 80), (80,))]
    h = x.float() + r.float()
    y = h * (h.square().mean(1, keepdim=True) + 1e-6).rsqrt() * w.float()
    case.run(rms_res.compile(x, r, w), [x, r, w], [y.half(), h.half()], 2e-3, 2e-3)


@tilelang.jit
def xent(L, Y, ignore: int = -100, BV: int = 32):
    M, V = T.const("M V")
    L: T.Tensor((M, V), "float32")
    Y: T.Tensor((M,), "int64")
    loss = T.empty((M,), "float32")
    with T.Kernel(M, threads=32) as r:
        x = T.alloc_fragment((BV,), "float32")
        m = T.alloc_fragment((1,), "float32")
        mo = T.alloc_fragment((1,), "float32")
        s = T.alloc_fragment((1,), "float32")
        l = T.alloc_fragment((1,), "float32")
        T.fill(m, -T.infinity("float32"))
        T.clear(l)
        for k in T.Pipelined(T.ceildiv(V, BV), num_stages=2):
            for j in T.Parallel(BV):
                x[j] = T.if_then_else(k * BV + j < V, L[r, k * BV + j], -T.infinity("float32"))
            T.copy(m, mo)
            T.reduce_max(x, m, dim=0, clear=False)
            for j in T.Parallel(BV):
                x[j] = T.exp(x[j] - m[0])
            T.reduce_sum(x, s, dim=0)
            for j in T.Parallel(1):
                l[j] = l[j] * T.exp(mo[j] - m[j]) + s[j]
        y = Y[r]
        for j in T.Parallel(1):
            if y == ignore:
                loss[r] = 0
            else:
                loss[r] = T.log(l[j]) + m[j] - L[r, y]
    return loss


@EVERY
def test_cross_entropy(case):
    l = case.randn(6, 100)
    y = torch.tensor([3, 99, -100, 0, 50, 7])
    case.run(xent.compile(l, y), [l, y], torch.nn.functional.cross_entropy(l, y, reduction="none"), 1e-4, 1e-4)
