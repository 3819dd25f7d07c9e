"""Conversions, reductions, scalars, parallel bodies, whole calculations: written from the specification alone."""

from __future__ import annotations

import math

import torch
from spec_harness import EVERY

import tilelang
import tilelang.language as T

F = torch.nn.functional


@tilelang.jit
def convs(X, I):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    I: T.Tensor((N,), "int32")
    b = T.empty((N,), "bfloat16")
    h = T.empty((N,), "float16")
    i8 = T.empty((N,), "int8")
    e5 = T.empty((N,), "float8_e5m2")
    bo = T.empty((N,), "bool")
    i64 = T.empty((N,), "int64")
    u16 = T.empty((N,), "uint16")
    f64 = T.empty((N,), "float64")
    with T.Kernel(1, threads=64) as _:
        f = T.alloc_fragment((N,), "float32")
        g = T.alloc_fragment((N,), "int32")
        T.copy(X, f)
        T.copy(I, g)
        T.copy(f, b)
        T.copy(f, h)
        T.copy(f, e5)
        T.copy(g, i8)
        T.copy(g, u16)
        T.copy(f, i64)
        T.copy(g, bo)
        T.copy(g, f64)
    return b, h, i8, e5, bo, i64, u16, f64


@EVERY
def test_conversions(case):
    x = case.randn(80, scale=30)
    x[0] = 1e6
    i = case.randint(-400, 400, (80,))
    i[3] = 0
    case.run(
        convs.compile(x, i),
        [x, i],
        [
            x.bfloat16(),
            x.half(),
            i.to(torch.int8),
            x.clamp(-57344, 57344).to(torch.float8_e5m2),
            i.bool(),
            x.long(),
            (i.long() & 0xFFFF).to(torch.uint16),
            i.double(),
        ],
        0,
        0,
    )


@tilelang.jit
def red3d(X):
    A, B, C = T.const("A B C")
    X: T.Tensor((A, B, C), "float32")
    O1 = T.empty((A, C), "float32")
    O2 = T.empty((A, B, 1), "float32")
    O3 = T.empty((A, B, C), "float32")
    O4 = T.empty((1,), "float32")
    with T.Kernel(1, threads=64) as _:
        f = T.alloc_fragment((A, B, C), "float32")
        a = T.alloc_fragment((A, C), "float32")
        b = T.alloc_fragment((A, B, 1), "float32")
        s = T.alloc_shared((A, C), "float32")
        v = T.alloc_fragment((A,), "float32")
        w = T.alloc_fragment((1,), "float32")
        T.copy(X, f)
        T.reduce_sum(f, a, dim=1)
        T.copy(a, O1)
        T.reduce_max(f, b, dim=2)
        T.copy(b, O2)
        for i, j, k in T.Parallel(A, B, C):
            O3[i, j, k] = f[i, j, k] - b[i, j, 0] + a[i, k]
        T.copy(a, s)
        T.reduce_min(s, v, dim=1)
        T.reduce_absmax(v, w)
        T.copy(w, O4)
    return O1, O2, O3, O4


@EVERY
def test_reductions_3d(case):
    x = case.randn(3, 5, 12)
    case.run(
        red3d.compile(x),
        [x],
        [
            x.sum(1),
            x.max(2, keepdim=True).values,
            x - x.max(2, keepdim=True).values + x.sum(1)[:, None],
            x.sum(1).min(1).values.abs().max()[None],
        ],
        1e-4,
        1e-5,
    )


@tilelang.jit
def cumdim(X):
    A, B = T.const("A B")
    X: T.Tensor((A, B), "float32")
    O = T.empty((4, A, B), "float32")
    with T.Kernel(1, threads=128) as _:
        s = T.alloc_shared((A, B), "float32")
        d = T.alloc_shared((A, B), "float32")
        f = T.alloc_fragment((A, B), "float32")
        T.copy(X, s)
        T.cumsum(s, d, dim=0)
        T.copy(d, O[0, :, :])
        T.cumsum(s, d, dim=1, reverse=True)
        T.copy(d, O[1, :, :])
        T.copy(X, f)
        T.cumsum(f, dim=1)
        T.copy(f, O[2, :, :])
        T.cummax(s[0 : A // 2, :], dim=1) if False else T.cummax(s, dim=0)
        T.copy(s, O[3, :, :])
    return O


@EVERY
def test_scans_2d(case):
    x = case.randn(9, 37)
    case.run(
        cumdim.compile(x),
        [x],
        torch.stack([x.cumsum(0), x.flip(1).cumsum(1).flip(1), x.cumsum(1), x.cummax(0).values]),
        1e-4,
        1e-4,
    )


@tilelang.jit
def dyn_shared(X):
    n, w = T.dynamic("n w")
    X: T.Tensor((n, w), "float32")
    O = T.empty((n, w), "float32")
    with T.Kernel(n, threads=32) as b:
        S = T.alloc_shared((w,), "float32")
        for j in T.Parallel(w):
            S[j] = X[b, j] * 2
        T.sync_threads()
        for j in T.Parallel(w):
            O[b, j] = S[w - 1 - j]
    return O


@EVERY
def test_dynamic_shared(case):
    for w in (7, 100):
        x = case.randn(3, w)
        case.run(dyn_shared.compile(x), [x], 2 * x.flip(1), 0, 0)


@tilelang.jit
def gemm_regions(A, B):
    A: T.Tensor((64, 64), "float16")
    B: T.Tensor((64, 64), "float16")
    O = T.empty((3, 32, 32), "float32")
    with T.Kernel(1, threads=128) as _:
        As = T.alloc_shared((2, 64, 64), "float16")
        Bs = T.alloc_shared((64, 64), "float16")
        c1 = T.alloc_fragment((32, 32), "float32")
        h = T.alloc_fragment((32, 32), "float16")
        af = T.alloc_fragment((32, 64), "float16")
        c2 = T.alloc_fragment((32, 32), "float32")
        T.copy(A, As[1, :, :])
        T.copy(B, Bs)
        T.clear(c1)
        T.gemm(As[1, 0:32, :], Bs[:, 32:64], c1)
        T.copy(c1, O[0, :, :])
        T.copy(c1, h)
        T.clear(c2)
        T.gemm(h, Bs[0:32, 0:32], c2)
        T.copy(c2, O[1, :, :])
        T.copy(As[1, 32:64, :], af)
        for i, j in T.Parallel(32, 64):
            af[i, j] = af[i, j] * T.float16(0.5)
        T.gemm(af, Bs[0:32, :], c2, transpose_B=True, clear_accum=True)
        T.copy(c2, O[2, :, :])
    return O


@EVERY
def test_gemm_operand_regions(case):
    a, b = case.randn(64, 64).half(), case.randn(64, 64).half()
    f = a[:32].float() @ b[:, 32:].float()
    case.run(
        gemm_regions.compile(a, b),
        [a, b],
        torch.stack([f, f.half().float() @ b[:32, :32].float(), (a[32:] * 0.5).float() @ b[:32].float().t()]),
        1e-2,
        3e-2,
    )


@tilelang.jit
def scalars(A, a: T.bool, b: T.int64, d: T.float64, e: T.uint8, h: T.float16 = 1.5):
    A: T.Tensor((8,), "float64")
    with T.Kernel(1, threads=1) as _:
        A[0] = T.if_then_else(a, 1.0, 2.0)
        A[1] = b
        A[2] = d
        A[3] = e
        A[4] = h
        A[5] = T.cast(b >> 33, "float64")
        A[6] = T.infinity("float64")
        A[7] = T.max_value("int8") + T.min_value("int16")


@EVERY
def test_scalar_params(case):
    x = torch.zeros(8).double()
    case.run(
        scalars.compile(x, True, 1 << 40, 0.1, 200),
        [x, True, 1 << 40, 0.1, 200, 1.5],
        None,
        inplace={0: torch.tensor([1, 2.0**40, 0.1, 200, 1.5, 128, math.inf, 127 - 32768]).double()},
    )


@tilelang.jit
def nested_par(A):
    M, N = T.const("M N")
    A: T.Tensor((M, N), "float32")
    O = T.empty((M, N), "float32")
    R = T.empty((M,), "float32")
    with T.Kernel(1, threads=64) as _:
        S = T.alloc_shared((M, N), "float32")
        for i in T.Parallel(M):
            for j in T.Parallel(N):
                if A[i, j] < 0:
                    continue
                S[i, j] = A[i, j]

        for i in T.Parallel(M):
            t = T.alloc_var("float32", init=0)
            for j in T.serial(N):
                if A[i, j] > 1.5:
                    break
                t += T.max(A[i, j], 0.0)
            R[i] = t
        for i, j in T.Parallel(M, N):
            O[i, j] = T.if_then_else(A[i, j] < 0, 0.0, S[i, j])
    return O, R


@EVERY
def test_parallel_bodies(case):
    a = case.randn(7, 19)
    r = []
    for row in a.tolist():
        t = 0
        for v in row:
            if v > 1.5:
                break
            t += max(v, 0)
        r.append(t)
    case.run(nested_par.compile(a), [a], [a.clamp(min=0), torch.tensor(r)], 1e-5, 1e-5)


@tilelang.jit(out_idx=[-1])
def unrolls(N=37):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), O: T.Tensor((4, N), "float32")):
        with T.Kernel(1, threads=1) as _:
            L = T.alloc_local((8,), "float32")
            for i in T.vectorized(N):
                O[0, i] = A[i] * 2
            for i in T.unroll(N, unroll_factor=4):
                O[1, i] = A[i] + 1
            for i in T.unroll(8, explicit=True):
                L[i] = A[i * 4]
            for i in T.serial(N):
                O[2, i] = L[i % 8]
            for i in T.Unroll(2, N):
                O[3, i] = A[i - 2]
            for i in T.vectorized(2):
                O[3, i] = 0.0

    return main


@EVERY
def test_unroll_vectorize(case):
    a = case.randn(37)
    case.run(
        unrolls(),
        [a],
        torch.stack([a * 2, a + 1, a[[4 * (i % 8) for i in range(37)]], torch.cat([torch.zeros(2), a[:-2]])]),
        0,
        0,
    )


@tilelang.jit
def sinkhorn(C, iters: int, eps: float):
    M, N = T.const("M N")
    C: T.Tensor((M, N), "float32")
    P = T.empty((M, N), "float32")
    with T.Kernel(1, threads=128) as _:
        k = T.alloc_fragment((M, N), "float32")
        t = T.alloc_fragment((M, N), "float32")
        u = T.alloc_fragment((M,), "float32")
        v = T.alloc_fragment((N,), "float32")
        for i, j in T.Parallel(M, N):
            k[i, j] = T.exp(-C[i, j] / eps)
        T.fill(u, 1.0)
        T.fill(v, 1.0)
        for _it in range(iters):
            for i, j in T.Parallel(M, N):
                t[i, j] = k[i, j] * v[j]
            T.reduce_sum(t, u, dim=1)
            for i in T.Parallel(M):
                u[i] = 1.0 / (M * u[i])
            for i, j in T.Parallel(M, N):
                t[i, j] = k[i, j] * u[i]
            T.reduce_sum(t, v, dim=0)
            for j in T.Parallel(N):
                v[j] = 1.0 / (N * v[j])
        for i, j in T.Parallel(M, N):
            P[i, j] = u[i] * k[i, j] * v[j]
    return P


@EVERY
def test_sinkhorn_ot(case):
    x = torch.rand(12, 20)
    k = torch.exp(-x / 0.3)
    v = torch.ones(20)
    for _ in range(6):
        u = 1 / (12 * (k @ v))
        v = 1 / (20 * (k.t() @ u))
    case.run(sinkhorn.compile(x, 6, 0.3), [x], u[:, None] * k * v, 1e-4, 1e-6)


@tilelang.jit
def kmeans(X, Cn, sums, counts, BM: int = 32):
    N, K, D = T.const("N K D")
    X: T.Tensor((N, D), "float16")
    Cn: T.Tensor((K, D), "float16")
    sums: T.Tensor((K, D), "float32")
    counts: T.Tensor((K,), "int32")
    L = T.empty((N,), "int32")
    with T.Kernel(T.ceildiv(N, BM), threads=128) as bx:
        xs = T.alloc_shared((BM, D), "float16")
        cs = T.alloc_shared((K, D), "float16")
        dot = T.alloc_fragment((BM, K), "float32")
        cn = T.alloc_fragment((K,), "float32")
        cf = T.alloc_fragment((K, D), "float32")
        mn = T.alloc_fragment((BM,), "float32")
        idx = T.alloc_fragment((BM, K), "int32")
        lab = T.alloc_fragment((BM,), "int32")
        ls = T.alloc_shared((BM,), "int32")
        T.copy(X[bx * BM, 0], xs)
        T.copy(Cn, cs)
        for i, j in T.Parallel(K, D):
            cf[i, j] = T.cast(cs[i, j], "float32") * cs[i, j]
        T.reduce_sum(cf, cn, dim=1)
        T.gemm(xs, cs, dot, transpose_B=True, clear_accum=True)
        for i, j in T.Parallel(BM, K):
            dot[i, j] = cn[j] - 2.0 * dot[i, j]
        T.reduce_min(dot, mn, dim=1)
        for i, j in T.Parallel(BM, K):
            idx[i, j] = T.if_then_else(dot[i, j] == mn[i], j, K)
        T.reduce_min(idx, lab, dim=1)
        T.copy(lab, ls)
        for i in T.Parallel(BM):
            if bx * BM + i < N:
                L[bx * BM + i] = ls[i]
                T.atomic_add(counts[ls[i]], 1)
        for i, j in T.Parallel(BM, D):
            if bx * BM + i < N:
                T.atomic_add(sums[ls[i], j], xs[i, j])
    return L


@EVERY
def test_kmeans_step(case):
    x, cn = case.randn(70, 32).half(), case.randn(16, 32).half()
    s, n = torch.zeros(16, 32), torch.zeros(16).int()
    lab = (cn.float().square().sum(1) - 2 * x.float() @ cn.float().t()).argmin(1)
    case.run(
        kmeans.compile(x, cn, s, n),
        [x, cn, s, n],
        lab.int(),
        1e-4,
        1e-3,
        inplace={2: torch.zeros(16, 32).index_add_(0, lab, x.float()), 3: torch.bincount(lab, minlength=16).int()},
    )
