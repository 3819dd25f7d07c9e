"""Programs that grow: each function makes a program of n parts of one kind, for measurements of compile time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T


def gemms(n: int) -> Any:
    """n GEMMs one after another in the source, as an unrolled loop over K leaves them."""
    parts = tuple(range(n))

    @T.macro
    def part(k, A, B, As, Bs, Cf, bx, by):
        T.copy(A[by * 128, k * 32], As)
        T.copy(B[k * 32, bx * 128], Bs)
        T.gemm(As, Bs, Cf)

    @T.prim_func
    def unrolled_gemms(A: T.Tensor((1024, 32 * n), "float16"), B: T.Tensor((32 * n, 1024), "float16"),
                       C: T.Tensor((1024, 1024), "float16")):
        with T.Kernel(8, 8, threads=128) as (bx, by):
            As = T.alloc_shared((128, 32), "float16")
            Bs = T.alloc_shared((32, 128), "float16")
            Cf = T.alloc_fragment((128, 128), "float32")
            T.clear(Cf)
            _ = [part(k, A, B, As, Bs, Cf, bx, by) for k in parts]
            T.copy(Cf, C[by * 128, bx * 128])
    return unrolled_gemms


def gemms_in_unroll(n: int) -> Any:
    """A T.unroll loop over n GEMMs."""
    @T.prim_func
    def unroll_loop(A: T.Tensor((1024, 32 * n), "float16"), B: T.Tensor((32 * n, 1024), "float16"),
                    C: T.Tensor((1024, 1024), "float16")):
        with T.Kernel(8, 8, threads=128) as (bx, by):
            As = T.alloc_shared((128, 32), "float16")
            Bs = T.alloc_shared((32, 128), "float16")
            Cf = T.alloc_fragment((128, 128), "float32")
            T.clear(Cf)
            for k in T.unroll(n):
                T.copy(A[by * 128, k * 32], As)
                T.copy(B[k * 32, bx * 128], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C[by * 128, bx * 128])
    return unroll_loop


def copies(n: int) -> Any:
    """n copies through one shared tile."""
    parts = tuple(range(n))

    @T.macro
    def part(k, A, B, s):
        T.copy(A[k * 64, 0], s)
        T.copy(s, B[k * 64, 0])

    @T.prim_func
    def many_copies(A: T.Tensor((n * 64, 64), "float32"), B: T.Tensor((n * 64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            s = T.alloc_shared((64, 64), "float32")
            _ = [part(k, A, B, s) for k in parts]
    return many_copies


def parallel_loops(n: int) -> Any:
    """n Parallel loops on a fragment and a shared tile."""
    parts = tuple(range(n))

    @T.macro
    def part(k, s, f):
        for i, j in T.Parallel(64, 64):
            s[i, j] = f[i, j] * 2.0 + k
        for i, j in T.Parallel(64, 64):
            f[i, j] = s[j, i] + 1.0

    @T.prim_func
    def many_parallel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            f = T.alloc_fragment((64, 64), "float32")
            s = T.alloc_shared((64, 64), "float32")
            T.copy(A, f)
            _ = [part(k, s, f) for k in parts]
            T.copy(f, B)
    return many_parallel


def fragments(n: int) -> Any:
    """n fragments, each from the one before, and their row sums."""
    parts = tuple(range(n))

    @T.macro
    def part(k, f, r):
        for i, j in T.Parallel(64, 64):
            f[k + 1][i, j] = f[k][i, j] + r[k][i]
        T.reduce_sum(f[k + 1], r[k + 1], dim=1)

    @T.prim_func
    def many_fragments(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128) as _:
            f = [T.alloc_fragment((64, 64), "float32") for _ in (*parts, n)]
            r = [T.alloc_fragment((64,), "float32") for _ in (*parts, n)]
            T.copy(A, f[0])
            T.clear(r[0])
            _ = [part(k, f, r) for k in parts]
            T.copy(r[n], B)
    return many_fragments


def shared_tiles(n: int) -> Any:
    """n shared tiles, each live from one loop to the next only."""
    parts = tuple(range(n))

    @T.macro
    def part(k, s):
        for i, j in T.Parallel(64, 64):
            s[k + 1][i, j] = s[k][j, i] + 1.0

    @T.prim_func
    def many_tiles(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            s = [T.alloc_shared((64, 64), "float32") for _ in (*parts, n)]
            T.copy(A, s[0])
            _ = [part(k, s) for k in parts]
            T.copy(s[n], B)
    return many_tiles


def buffers_with_loops(n: int) -> Any:
    """4 n shared buffers with a loop each."""
    parts = tuple(range(4 * n))

    @T.macro
    def part(k, A, B, s):
        T.copy(A[k, :], s[k])
        for r in range(4):
            for i in T.Parallel(64):
                s[k][i] += A[k, i] + r
            for i in T.Parallel(64):
                B[k, i] += s[k][i]

    @T.prim_func
    def many_buffers(A: T.Tensor((4 * n, 64), "float32"), B: T.Tensor((4 * n, 64), "float32")):
        with T.Kernel(1, threads=64) as _:
            s = [T.alloc_shared((64,), "float32") for _ in parts]
            _ = [part(k, A, B, s) for k in parts]
    return many_buffers


def nested_ifs(n: int) -> Any:
    """n conditions, one inside another, eight deep, n / 8 times."""
    parts = tuple(range(max(1, n // 8)))

    @T.macro
    def part(k, A, B, m, bx, tx):
        if m > 8 * k:
            B[bx * 128 + tx] = A[bx * 128 + tx] + k
            if m > 8 * k + 1:
                B[bx * 128 + tx] = A[bx * 128 + tx] + k
                if m > 8 * k + 2:
                    B[bx * 128 + tx] = A[bx * 128 + tx] + k
                    if m > 8 * k + 3:
                        B[bx * 128 + tx] = A[bx * 128 + tx] + k
                        if m > 8 * k + 4:
                            B[bx * 128 + tx] = A[bx * 128 + tx] + k
                            if m > 8 * k + 5:
                                B[bx * 128 + tx] = A[bx * 128 + tx] + k
                                if m > 8 * k + 6:
                                    B[bx * 128 + tx] = A[bx * 128 + tx] + k
                                    if m > 8 * k + 7:
                                        B[bx * 128 + tx] = A[bx * 128 + tx] + k

    @T.prim_func
    def many_ifs(A: T.Tensor((1024,), "float32"), B: T.Tensor((1024,), "float32"), m: T.int32):
        with T.Kernel(8, threads=128) as bx:
            tx = T.get_thread_binding()
            _ = [part(k, A, B, m, bx, tx) for k in parts]
    return many_ifs


def barriers(n: int) -> Any:
    """n exchanges through shared memory, with a barrier on both sides of each."""
    parts = tuple(range(n))

    @T.macro
    def part(k, s, tx):
        T.sync_threads()
        x = s[(tx + k + 1) % 128]
        T.sync_threads()
        s[tx] = x + 1.0

    @T.prim_func
    def many_barriers(A: T.Tensor((1024,), "float32"), B: T.Tensor((1024,), "float32")):
        with T.Kernel(8, threads=128) as bx:
            s = T.alloc_shared((128,), "float32")
            tx = T.get_thread_binding()
            s[tx] = A[bx * 128 + tx]
            _ = [part(k, s, tx) for k in parts]
            B[bx * 128 + tx] = s[tx]
    return many_barriers


def chain(n: int) -> Any:
    """n element-wise statements in one Parallel loop."""
    parts = tuple(range(n))

    @T.macro
    def part(k, f, g, i):
        f[i] = f[i] * g[i] + k
        g[i] = g[i] + f[i]

    @T.prim_func
    def long_chain(A: T.Tensor((8192,), "float32"), B: T.Tensor((8192,), "float32")):
        with T.Kernel(8, threads=128) as bx:
            f = T.alloc_fragment((1024,), "float32")
            g = T.alloc_fragment((1024,), "float32")
            T.copy(A[bx * 1024], f)
            T.clear(g)
            for i in T.Parallel(1024):
                _ = [part(k, f, g, i) for k in parts]
            T.copy(f, B[bx * 1024])
    return long_chain


def pipelined_loops(n: int) -> Any:
    """n pipelined GEMM loops one after another."""
    parts = tuple(range(n))

    @T.macro
    def part(p, A, B, C, As, Bs, Cf, bx, by):
        T.clear(Cf)
        for k in T.Pipelined(32, num_stages=2):
            T.copy(A[p * 1024 + by * 128, k * 32], As)
            T.copy(B[k * 32, bx * 128], Bs)
            T.gemm(As, Bs, Cf)
        T.copy(Cf, C[p * 1024 + by * 128, bx * 128])

    @T.prim_func
    def many_pipelines(A: T.Tensor((n * 1024, 1024), "float16"), B: T.Tensor((1024, 1024), "float16"),
                       C: T.Tensor((n * 1024, 1024), "float16")):
        with T.Kernel(8, 8, threads=128) as (bx, by):
            As = T.alloc_shared((128, 32), "float16")
            Bs = T.alloc_shared((32, 128), "float16")
            Cf = T.alloc_fragment((128, 128), "float32")
            _ = [part(p, A, B, C, As, Bs, Cf, bx, by) for p in parts]
    return many_pipelines


def kernels(n: int) -> Any:
    """n kernels in one program."""
    parts = tuple(range(n))

    @T.macro
    def part(k, A):
        with T.Kernel(8, threads=128) as bx:
            for i in T.Parallel(128):
                A[k + 1, bx * 128 + i] = A[k, bx * 128 + i] + 1.0

    @T.prim_func
    def many_kernels(A: T.Tensor((n + 1, 1024), "float32")):
        _ = [part(k, A) for k in parts]
    return many_kernels


def readme_gemm() -> Any:
    """The README's GEMM at 4096."""
    @T.prim_func
    def matmul(A: T.Tensor((4096, 4096), "float16"), B: T.Tensor((4096, 4096), "float16"),
               C: T.Tensor((4096, 4096), "float16")):
        with T.Kernel(32, 32, threads=128) as (bx, by):
            As = T.alloc_shared((128, 32), "float16")
            Bs = T.alloc_shared((32, 128), "float16")
            Cf = T.alloc_fragment((128, 128), "float32")
            T.clear(Cf)
            for k in T.Pipelined(128, num_stages=3):
                T.copy(A[by * 128, k * 32], As)
                T.copy(B[k * 32, bx * 128], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C[by * 128, bx * 128])
    return matmul


GROWING: dict[str, Callable[[int], Any]] = {f.__name__: f for f in (
    gemms, gemms_in_unroll, copies, parallel_loops, fragments, shared_tiles, buffers_with_loops, nested_ifs, barriers, chain,
    pipelined_loops, kernels)}
