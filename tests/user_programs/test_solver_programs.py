"""Linear systems, images, stencils and what a host decides."""

import numpy as np
import pytest
import torch
from bounds import equal, within
from spec_harness import EVERY

import tilelang
import tilelang.language as T

f16 = "float16"
f32 = "float32"


def relu_(x, j):
    return T.max(x, 0.0)


def sq_(x, j):
    return x * x


def alt_(x, j):
    return T.if_then_else(j % 2 == 0, x, -x)


@tilelang.jit(out_idx=[-1])
def fused_eltwise(M, N, fns, blk=8):
    @T.prim_func
    def main(A: T.Tensor((M, N), f32), B: T.Tensor((M, N), f16), O: T.Tensor((len(fns), M, N), f32)):
        with T.Kernel(T.ceildiv(M, blk), threads=96) as b:
            ts = {"a": (A, 1.0), "b": (B, 0.5)}
            fr = [T.alloc_fragment((blk, N), f32) for _ in fns]
            for i, j in T.Parallel(blk, N):
                s = sum((t[b * blk + i, j] * w for t, w in ts.values()), T.float32(0))
                [T.buffer_store(fr[n], f(s, j), [i, j]) for n, f in enumerate(fns)]
            [T.copy(f, O[n, b * blk, 0]) for n, f in enumerate(fr)]

    return main


@EVERY
def test_metaprogram(case):
    A, B = case.randn(13, 50), case.randn(13, 50, dt=torch.half)
    (o,), _ = case.call(fused_eltwise(13, 50, (relu_, sq_, alt_)), A, B)
    s = A.double() + B.double() * 0.5
    sgn = torch.where(torch.arange(50) % 2 == 0, 1.0, -1.0)
    within(o, torch.stack([s.clamp(min=0), s * s, s * sgn]), 1e-5)


@tilelang.jit
def q4(X, G: int = 32):
    M, N = T.const("M N")
    X: T.Tensor((M, N), f16)
    Q = T.empty((M, N // 2), "uint8")
    S = T.empty((M, N // G), f16)
    Y = T.empty((M, N), f16)
    with T.Kernel(M, N // G, threads=32) as (m, g):
        x = T.alloc_fragment((G,), f32)
        a = T.alloc_fragment((1,), f32)
        q = T.alloc_shared((G,), "int32")
        T.copy(X[m, g * G : (g + 1) * G], x)
        T.reduce_absmax(x, a)
        sc = T.cast(T.max(a[0], 1e-6) / 7.0, f16)
        for i in T.Parallel(G):
            q[i] = T.cast(T.clamp(T.round(x[i] / T.cast(sc, f32)), -8.0, 7.0), "int32") + 8
        for i in T.Parallel(G // 2):
            Q[m, g * (G // 2) + i] = T.cast(q[2 * i] | (q[2 * i + 1] << 4), "uint8")
        for _i in T.Parallel(1):
            S[m, g] = sc
    with T.Kernel(T.ceildiv(M, 4), threads=64) as b:
        for i, j in T.Parallel(4, N):
            if b * 4 + i < M:
                n = (Q[b * 4 + i, j // 2] >> T.cast(4 * (j & 1), "uint8")) & T.uint8(15)
                Y[b * 4 + i, j] = T.cast(T.cast(n, "int32") - 8, f16) * S[b * 4 + i, j // G]
    return Q, S, Y


@EVERY
def test_int4_roundtrip(case):
    X = case.randn(5, 96, dt=torch.half)
    (q, s, y), _ = case.call(q4, X)
    xs = X.float().reshape(5, 3, 32)
    sc = (xs.abs().amax(-1).clamp(min=1e-6) / 7).half()
    within(s, sc, sc.double() * 2**-10)
    qq = (xs / s.float()[..., None]).round().clamp(-8, 7).int() + 8
    qq = qq.reshape(5, 96)
    equal(q, (qq[:, ::2] | (qq[:, 1::2] << 4)).to(torch.uint8))
    equal(y, ((qq - 8).half().reshape(5, 3, 32) * s[..., None]).reshape(5, 96))


@tilelang.jit(out_idx=[-1])
def bshd(B, S, H, D, dt, b=32):
    @T.prim_func
    def main(X: T.Tensor((B, S, H, D), dt), Y: T.Tensor((B, H, D, S), dt)):
        with T.Kernel(T.ceildiv(S, b), T.ceildiv(D, b), B * H, threads=96) as (bs, bd, bh):
            s = T.alloc_shared((b, b), dt)
            t = T.alloc_shared((b, b), dt)
            T.copy(X[bh // H, bs * b : (bs + 1) * b, bh % H, bd * b : (bd + 1) * b], s)
            T.transpose(s, t)
            T.copy(t, Y[bh // H, bh % H, bd * b : (bd + 1) * b, bs * b : (bs + 1) * b])

    return main


@EVERY
def test_transpose_bshd(case):
    for dt, td in (("int8", torch.int8), ("float64", torch.float64)):
        X = case.randint(-99, 99, (1, 45, 2, 37), td)
        (y,), _ = case.call(bshd(1, 45, 2, 37, dt), X)
        equal(y, X.permute(0, 2, 3, 1).contiguous())


@tilelang.jit
def chol(A):
    b = T.dynamic("b")
    N = T.const("N")
    A: T.Tensor((b, N, N), f32)
    with T.Kernel(b, threads=64) as k:
        S = T.alloc_shared((N, N), f32)
        T.copy(A[k, 0:N, 0:N], S)
        for j in T.serial(N):
            for _i in T.Parallel(1):
                S[j, j] = T.sqrt(S[j, j])
            for i in T.Parallel(N):
                if i > j:
                    S[i, j] = S[i, j] / S[j, j]
            for i, l in T.Parallel(N, N):
                if i >= l and l > j:
                    S[i, l] -= S[i, j] * S[l, j]
        for i, j in T.Parallel(N, N):
            A[k, i, j] = T.if_then_else(i >= j, S[i, j], 0)


@EVERY
def test_cholesky(case):
    X = case.randn(3, 19, 19)
    A = X @ X.mT + 19 * torch.eye(19)
    _, own = case.call(chol, A.clone())
    within(own[0], torch.linalg.cholesky(A.double()), 1e-4)


@tilelang.jit(out_idx=[-1])
def pcr(Bt, N, dt=f32):
    1 << (N - 1).bit_length()

    @T.prim_func
    def main(
        a: T.Tensor((Bt, N), dt),
        b: T.Tensor((Bt, N), dt),
        c_: T.Tensor((Bt, N), dt),
        d: T.Tensor((Bt, N), dt),
        x: T.Tensor((Bt, N), dt),
    ):
        with T.Kernel(Bt, threads=96) as k:
            sa, sb, sc, sd = [T.alloc_shared((N,), dt) for _ in (0, 1, 2, 3)]
            fa, fb, fc, fd = [T.alloc_fragment((N,), dt) for _ in (0, 1, 2, 3)]
            T.copy(a[k, :], sa)
            T.copy(b[k, :], sb)
            T.copy(c_[k, :], sc)
            T.copy(d[k, :], sd)
            st = T.alloc_var("int32", init=1)
            while st < N:
                for i in T.Parallel(N):
                    al = T.if_then_else(i - st >= 0, -sa[i] / sb[T.max(i - st, 0)], 0.0)
                    be = T.if_then_else(i + st < N, -sc[i] / sb[T.min(i + st, N - 1)], 0.0)
                    fa[i] = T.if_then_else(i - st >= 0, al * sa[T.max(i - st, 0)], 0.0)
                    fc[i] = T.if_then_else(i + st < N, be * sc[T.min(i + st, N - 1)], 0.0)
                    fb[i] = (
                        sb[i]
                        + T.if_then_else(i - st >= 0, al * sc[T.max(i - st, 0)], 0.0)
                        + T.if_then_else(i + st < N, be * sa[T.min(i + st, N - 1)], 0.0)
                    )
                    fd[i] = (
                        sd[i]
                        + T.if_then_else(i - st >= 0, al * sd[T.max(i - st, 0)], 0.0)
                        + T.if_then_else(i + st < N, be * sd[T.min(i + st, N - 1)], 0.0)
                    )
                T.copy(fa, sa)
                T.copy(fb, sb)
                T.copy(fc, sc)
                T.copy(fd, sd)
                st = st * 2
            for i in T.Parallel(N):
                x[k, i] = sd[i] / sb[i]

    return main


@EVERY
def test_tridiagonal(case):
    N = 77
    a, cc, d = case.randn(2, N), case.randn(2, N), case.randn(2, N)
    b = 4 + torch.rand(2, N)
    a[:, 0] = 0
    cc[:, -1] = 0
    (x,), _ = case.call(pcr(2, N), a, b, cc, d)
    for k in range(2):
        A = torch.diag(b[k].double()) + torch.diag(a[k, 1:].double(), -1) + torch.diag(cc[k, :-1].double(), 1)
        within(x[k], torch.linalg.solve(A, d[k].double()), 1e-5)


@tilelang.jit(out_idx=[1, -1])
def split_ev(dt):
    n, k = T.dynamic("n, k")

    @T.prim_func
    def main(
        X: T.Tensor((2 * n + 1,), dt), E: T.Tensor((n + 1,), dt), P: T.Tensor((k,), f32), s: T.int32, O: T.Tensor((n, k), dt)
    ):
        with T.Kernel(T.ceildiv(n + 1, 32), threads=64) as b:
            for i in T.Parallel(32):
                if b * 32 + i < n + 1:
                    E[b * 32 + i] = X[2 * (b * 32 + i)] + T.cast(s, dt)
            for i, j in T.Parallel(32, k):
                if b * 32 + i < n:
                    O[b * 32 + i, j] = X[2 * (b * 32 + i) + 1] * P[j]

    return main


@EVERY
def test_out_shapes(case):
    for dt, td in (("float16", torch.half), ("int64", torch.int64)):
        X = case.randint(-9, 9, (75,), td)
        P = case.randint(1, 4, (5,), torch.float32)
        (e, o), _ = case.call(split_ev(dt), X, P, 3)
        equal(e, X[::2] + 3)
        equal(o, (X[1::2][:, None].float() * P).to(td))


@tilelang.jit
def heat(U, V, steps: int = 4, b: int = 8):
    X, Y, Z = T.const("X Y Z")
    U: T.Tensor((X, Y, Z), f32)
    V: T.Tensor((X, Y, Z), f32)
    for s in T.serial(steps):
        with T.Kernel(T.ceildiv(Z, b), T.ceildiv(Y, b), X, threads=(8, 8)) as (bz, by, x):
            t = T.alloc_shared((b + 2, b + 2), f32)
            for i, j in T.Parallel(b + 2, b + 2):
                yy = by * b + i - 1
                zz = bz * b + j - 1
                t[i, j] = T.if_then_else(s % 2 == 0, U[x, yy, zz], V[x, yy, zz])
            for i, j in T.Parallel(b, b):
                y = by * b + i
                z = bz * b + j
                if s % 2 == 0:
                    V[x, y, z] = (
                        t[i, j + 1] + t[i + 2, j + 1] + t[i + 1, j] + t[i + 1, j + 2] + U[x - 1, y, z] + U[x + 1, y, z]
                    ) / 6.0
                else:
                    U[x, y, z] = (
                        t[i, j + 1] + t[i + 2, j + 1] + t[i + 1, j] + t[i + 1, j + 2] + V[x - 1, y, z] + V[x + 1, y, z]
                    ) / 6.0


@EVERY
def test_heat_stencil(case):
    U = case.randn(3, 13, 17)
    V = torch.zeros(3, 13, 17)
    _, o = case.call(heat, U.clone(), V)
    u = U.double()
    for _ in range(4):
        p = torch.nn.functional.pad(u, (1,) * 6)
        u = (
            p[:-2, 1:-1, 1:-1]
            + p[2:, 1:-1, 1:-1]
            + p[1:-1, :-2, 1:-1]
            + p[1:-1, 2:, 1:-1]
            + p[1:-1, 1:-1, :-2]
            + p[1:-1, 1:-1, 2:]
        ) / 6
    within(o[0], u, 1e-6)


@tilelang.jit(out_idx=[-1])
def resid(M, N):
    @T.prim_func
    def main(X: T.Tensor((M, N), f16), B: T.Tensor((M, N), f16), flag: T.bool, alpha: T.float32, Y: T.Tensor((M, N), f16)):
        assert alpha >= 0.0, "alpha must not be negative"
        if flag:
            with T.Kernel(T.ceildiv(M, 8), threads=64) as b:
                for i, j in T.Parallel(8, N):
                    Y[b * 8 + i, j] = X[b * 8 + i, j] + alpha * B[b * 8 + i, j]
        else:
            with T.Kernel(T.ceildiv(M, 16), threads=128) as b:
                for i, j in T.Parallel(16, N):
                    Y[b * 16 + i, j] = X[b * 16 + i, j]

    return main


@EVERY
def test_host_branch(case):
    X, B = case.randn(19, 40, dt=torch.half), case.randn(19, 40, dt=torch.half)
    k = resid(19, 40)
    (y,), _ = case.call(k, X, B, True, 0.5)
    equal(y, (X.float() + 0.5 * B.float()).half())
    (y,), _ = case.call(k, X, B, False, 0.5)
    equal(y, X)
    with pytest.raises(RuntimeError, match="alpha must not be negative"):
        case.call(k, X, B, True, -1.0)


@tilelang.jit
def jpeg(I, Dm, Qt, zz):
    H, W = T.const("H W")
    I: T.Tensor((H, W), "uint8")
    Dm: T.Tensor((8, 8), f32)
    Qt: T.Tensor((8, 8), "uint8")
    zz: T.Tensor((64,), "uint8")
    O = T.empty((H // 8, W // 8, 64), "int16")
    with T.Kernel(W // 8, H // 8, threads=64) as (x, y):
        s = T.alloc_shared((8, 8), f32)
        t = T.alloc_shared((8, 8), f32)
        q = T.alloc_shared((8, 8), "int16")
        for i, j in T.Parallel(8, 8):
            s[i, j] = T.cast(I[y * 8 + i, x * 8 + j], f32) - 128.0
        for i, j in T.Parallel(8, 8):
            a = T.alloc_var(f32, init=0.0)
            for k in T.unroll(8):
                a += Dm[i, k] * s[k, j]
            t[i, j] = a
        for i, j in T.Parallel(8, 8):
            a = T.alloc_var(f32, init=0.0)
            for k in T.unroll(8):
                a += t[i, k] * Dm[j, k]
            q[i, j] = T.cast(T.round(a / T.cast(Qt[i, j], f32)), "int16")
        for i in T.Parallel(64):
            p = T.cast(zz[i], "int32")
            O[y, x, i] = q[p // 8, p % 8]
    return O


@EVERY
def test_jpeg_blocks(case):
    I = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (16, 24)).astype(np.uint8))
    k = np.arange(8)
    Dm = np.cos((2 * k[None] + 1) * k[:, None] * np.pi / 16) * np.where(k[:, None] == 0, np.sqrt(1 / 8), 0.5)
    Dm = torch.from_numpy(Dm.astype(np.float32))
    Q = torch.from_numpy((8 + k[:, None] * 3 + k[None] * 5).astype(np.uint8))
    zz = torch.from_numpy(
        np.array(sorted(range(64), key=lambda p: (p // 8 + p % 8, (p // 8 if (p // 8 + p % 8) % 2 else p % 8))), np.uint8)
    )
    (o,), _ = case.call(jpeg, I, Dm, Q, zz)
    w = torch.einsum("ik,ykxl,jl->yxij", Dm.double(), (I.double() - 128).reshape(2, 8, 3, 8), Dm.double()) / Q.double()
    w = w.reshape(2, 3, 64)[..., zz.long()]
    within(o, w, 0.5001)
