"""Loops, fragments, pipelines, host code, types: written from the specification alone."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from spec_harness import EVERY

import tilelang
import tilelang.language as T

F = torch.nn.functional


@tilelang.jit(out_idx=[-1])
def loops(n=20):
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), st: T.int32, O: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=1) as _:
            b = T.alloc_var("int32", init=4)
            c = T.alloc_var("int32")
            for _ in range(b):
                b = 2
                c += 1
            O[0] = c
            c = 0
            for i in range(10, 0, -3):
                c = c * 10 + i
            O[1] = c
            c = 0
            for i in T.serial(1, A[3], A[1]):
                c += i
            O[2] = c
            x, y, z = A[0], A[1], A[2]
            (p, q), r = (z, x), y
            p, q = q, p
            O[3] = p * 10000 + q * 100 + r
            O[4] = A[-1] + A[-64]
            s = T.alloc_var("int32")
            for i in range(3):
                s += A[i - 3] * (i + 1)
            O[5] = s
            u = w = A[5] + 1
            O[6] = u * w
            s = 0
            for i, j in T.grid(3, 4):
                if j == 2:
                    continue
                if i == 2:
                    break
                s += i * 10 + j
            O[7] = s
            t = [A[k] for k in (0, 1, 2)]
            O[8] = t[0] + t[1] * t[2]
            k = T.alloc_var("int32", init=7)
            while k > 0 and A[k] != 5 or k == 63:
                k -= 1
            O[9] = k
            O[10] = (m := A[2] * 2) + m
            O[11] = A[3] if A[0] else A[4]
            v = T.alloc_var("int32", A[0])
            v <<= 2
            v |= 1
            v ^= A[1]
            O[12] = v
            O[13] = 1 if A[0] == 3 or (A[1] > 0 and not A[2] < 0) else 0
            O[14] = T.Select(A[0] > A[1], A[0], A[1]) - T.bitwise_not(A[2])
            O[15] = A[A[A[0] % 8] % 8]

    return main


@EVERY
def test_loop_rules(case):
    a = case.randint(1, 60, (64,))
    a[1] = 7
    a[3] = 45
    a[0] = 3
    a[6] = 4
    a[5] = 5
    A = a.tolist()
    k = 7
    while k > 0 and A[k] != 5 or k == 63:
        k -= 1
    s7 = 0
    for i in range(3):
        for j in range(4):
            if j == 2:
                continue
            if i == 2:
                break
            s7 += i * 10 + j
    v = ((A[0] << 2) | 1) ^ A[1]
    c1 = 0
    for i in range(10, 0, -3):
        c1 = c1 * 10 + i
    p, q = A[0], A[2]
    ref = [
        4,
        c1,
        sum(range(1, 45, 7)),
        p * 10000 + q * 100 + A[1],
        A[63] + A[0],
        A[61] + 2 * A[62] + 3 * A[63],
        (A[5] + 1) ** 2,
        s7,
        A[0] + A[1] * A[2],
        k,
        A[2] * 4,
        A[3],
        v,
        1,
        max(A[0], A[1]) + A[2] + 1,
        A[A[A[0] % 8] % 8],
    ]
    case.run(loops(), [a, 3], torch.tensor(ref).int())


@tilelang.jit
def frag_shapes(X, th: int = 128):
    M, N = T.const("M N")
    X: T.Tensor((M, N), "float32")
    O = T.empty((6, M, N), "float32")
    with T.Kernel(1, threads=th) as _:
        f = T.alloc_fragment((M, N), "float32")
        g = T.alloc_fragment((M, N), "float32")
        r = T.alloc_fragment((M,), "float32")
        tr = T.alloc_fragment((N, M), "float32")
        cs = T.alloc_fragment((N,), "float32")
        T.copy(X, f)
        T.clear(r)
        for i, j in T.Parallel(M, N):
            r[i] += f[i, j]
        for i, j in T.Parallel(M, N):
            O[0, i, j] = r[i]
        for i, j in T.Parallel(M, N):
            g[i, j] = f[M - 1 - i, j] + T.if_then_else(j > 0, f[i, T.max(j - 1, 0)], 0.0)
        T.copy(g, O[1, :, :])
        for i, j in T.Parallel(M, N):
            tr[j, i] = f[i, j]
        for j, i in T.Parallel(N, M):
            O[2, i, j] = tr[j, i] * 2
        q = T.alloc_fragment((M,), "float32")
        T.copy(r, q)
        for i in T.Parallel(M // 2):
            r[i] = q[2 * i + 1] + 1.0
        for i, j in T.Parallel(M, N):
            O[3, i, j] = r[i]
        T.reduce_sum(f, cs, dim=0)
        for i, j in T.Parallel(M, N):
            f[i, j] = f[i, j] - cs[j] / M + r[i]
        T.copy(f, O[4, :, :])
        T.reduce_max(tr, r, dim=0)
        for i, j in T.Parallel(M, N):
            O[5, i, j] = r[i]
    return O


@EVERY
def test_fragment_shapes(case):
    for th, (M, N) in ((128, (8, 24)), (96, (10, 7)), (32, (16, 64))):
        x = case.randn(M, N)
        o = torch.zeros(6, M, N)
        r = x.sum(1)
        o[0] = r[:, None]
        o[1] = x.flip(0) + F.pad(x, (1, 0))[:, :-1]
        o[2] = 2 * x
        r2 = r.clone()
        r2[: M // 2] = r[1::2] + 1
        o[3] = r2[:, None]
        o[4] = x - x.mean(0) + r2[:, None]
        o[5] = x.max(1).values[:, None]

        case.run(frag_shapes.compile(x, th), [x], o, 1e-4, 1e-4)


@tilelang.jit
def pipes(A, n: T.int32, stages: int = 3):
    N = T.const("N")
    A: T.Tensor((N, 32), "float32")
    O = T.empty((4, 32), "float32")
    with T.Kernel(1, threads=32) as _:
        S = T.alloc_shared((32,), "float32")
        Q = T.alloc_shared((32,), "float32")
        acc = T.alloc_fragment((32,), "float32")
        T.clear(acc)
        T.clear(Q)
        for k in T.Pipelined(n, num_stages=stages):
            T.copy(A[k, :], S)
            for j in T.Parallel(32):
                acc[j] += S[j] * (k + 1)
            for j in T.Parallel(32):
                S[j] = acc[31 - j] if False else acc[j]  # read, then overwrite, then read across lanes
            for j in T.Parallel(32):
                Q[j] = Q[j] * 0.5 + S[31 - j]
        T.copy(acc, O[0, :])
        T.copy(Q, O[1, :])
        it = T.alloc_var("int32", init=0)
        T.clear(acc)
        while it < 3:
            for k in T.Pipelined(it, num_stages=2):
                T.copy(A[k, :], S)
                for j in T.Parallel(32):
                    acc[j] += S[31 - j]
            it += 1
        T.copy(acc, O[2, :])
        T.clear(Q)
        for k in T.Pipelined(n, num_stages=2):
            T.copy(A[k, :], S)
            for j in T.Parallel(32):
                T.atomic_add(Q[(j * 3) % 8], S[j])
            for j in T.Parallel(8):
                Q[j] = Q[j] * 0.5
        T.copy(Q, O[3, :])
    return O


@EVERY
def test_pipelines_hazards(case):
    a = case.randn(6, 32)
    for n in (0, 1, 2, 6):
        acc, q, q2, acc2 = torch.zeros(32), torch.zeros(32), torch.zeros(32), torch.zeros(32)
        for k in range(n):
            acc = acc + a[k] * (k + 1)
            q = q * 0.5 + acc.flip(0)
            q2.index_add_(0, (torch.arange(32) * 3) % 8, a[k])
            q2[:8] *= 0.5
        for it in range(3):
            for k in range(it):
                acc2 += a[k].flip(0)
        for st in (0, 3):
            case.run(pipes.compile(a, n, stages=st), [a, n], torch.stack([acc, q, acc2, q2]), 1e-4, 1e-4)


@tilelang.jit
def host_flow(A, big: bool):
    n = T.dynamic("n")
    A: T.Tensor((n, 16), "float32")
    B = T.empty((n, 16), "float32")
    with T.Kernel(n, threads=16) as b:
        for j in T.Parallel(16):
            B[b, j] = A[b, j]
    for s in range(3):
        with T.Kernel(n, threads=16) as b:
            for j in T.Parallel(16):
                B[b, j] = B[b, j] * 2 + s
    if n > 4:
        with T.Kernel(n, threads=16) as b:
            for j in T.Parallel(16):
                B[b, j] = -B[b, j]
    if big:
        with T.Kernel(1, 1, threads=16) as (bx, by):
            for j in T.Parallel(16):
                B[0, j] = 99.0
    return B


@EVERY
def test_host_control_flow(case):
    for n, big in ((3, True), (6, False)):
        a = case.randn(n, 16)
        r = a.clone()
        for s in range(3):
            r = r * 2 + s
        if n > 4:
            r = -r
        if big:
            r[0] = 99
        case.run(host_flow.compile(a, big), [a], r, 1e-5, 1e-5)


@tilelang.jit(out_idx=[-1])
def keywords(N=40):
    @T.prim_func
    def template(double: T.Tensor((N,), "float32"), register: T.int32, tx: T.float32, out: T.Tensor((N,), "float32")):
        """docstring"""
        with T.Kernel(T.ceildiv(N, 16), threads=16) as this:
            float = T.alloc_shared((16,), "float32")
            T.copy(double[this * 16], float)
            for operator in T.Parallel(16):
                new = float[operator] * tx
                α = new + register
                asm = T.alloc_var("float32", init=1.0)
                asm = asm + α
                out[this * 16 + operator] = asm

    return template


@EVERY
def test_cpp_keyword_names(case):
    a = case.randn(40)
    case.run(keywords(), [a, 3, 0.5], a * 0.5 + 4, 1e-5, 1e-5)


@tilelang.jit(out_idx=[1])
def threads3d():
    @T.prim_func
    def main(A: T.Tensor((2, 3, 4, 2, 4, 8), "int32"), O: T.Tensor((2, 3, 4, 2, 4, 8), "int32")):
        with T.Kernel(4, 3, 2, threads=(8, 4, 2)) as (bx, by, bz):
            tx, ty, tz = T.get_thread_bindings()
            lin = tx + 8 * (ty + 4 * tz) + 64 * (T.get_block_binding(0) + 4 * (by + 3 * T.get_block_bindings()[2]))
            O[bz, by, bx, tz, ty, tx] = (
                A[bz, by, bx, tz, ty, tx] * 10000 + lin + T.get_thread_extent(1) * 0 + T.get_block_extents()[0] * 0
            )

    return main


@EVERY
def test_threads_3d(case):
    a = case.randint(0, 9, (2, 3, 4, 2, 4, 8))
    case.run(threads3d(), [a], a * 10000 + torch.arange(2 * 3 * 4 * 64).reshape(a.shape).int())


class Model:
    scale = 3.0

    def __init__(self, n):
        self.n = n
        self.k = self.build(n)

    @staticmethod
    @functools.lru_cache
    def build(n):
        @T.prim_func
        def main(A: T.Tensor((n,), "float16"), B: T.Tensor((n,), "float16")):
            with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
                for i in T.Parallel(32):
                    B[bx * 32 + i] = A[bx * 32 + i] * Model.scale

        return tilelang.compile(main, out_idx=[-1])


@EVERY
def test_class_and_numpy_ints(case):
    m = Model(np.int64(50))
    a = case.randn(50).half()
    case.run(m.k, [a], (a.float() * 3).half())

    @tilelang.jit(out_idx=-1)
    def like(shape, dt):
        @T.prim_func
        def main(A: T.Tensor(shape, dt), B: T.Tensor(shape, dt)):
            with T.Kernel(1, threads=32) as _:
                for i, j in T.Parallel(*shape):
                    B[i, j] = A[i, j] + 1

        return main

    x = case.randn(3, 5).bfloat16()
    k = like(x.shape, x.dtype)
    case.run(k, [x], x + 1)
    case.run(k, [torch.nn.Parameter(x)], x + 1)
    if case.device == "cuda":  # NumPy arrays lie on the host
        return
    n = case.randn(3, 5).numpy()
    k32 = like((3, 5), np.float32)
    r = k32(n)
    assert np.allclose(np.asarray(r), n + 1)


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
