"""Loops, fragments, pipelines, host code, classes: written from the specification alone."""

from __future__ import annotations

import functools

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
