"""Loops that compute an operand stay whole where a piece would come after what the program does in front of it."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
M, N, D, WIDE = 192, 64, 64, 128


def leaves(leave):
    """Fragments hold all elements where a loop is left between the operand's loop and its GEMM."""
    @T.prim_func
    def main(Q: T.Tensor((128, D), "float16"), K: T.Tensor((2 * N, D), "float16"), L: T.Tensor((2,), "int32"),
             O: T.Tensor((128, N), "float32")):
        with T.Kernel(1, threads=256):
            q, k = T.alloc_shared((128, D), "float16"), T.alloc_shared((N, D), "float16")
            s, a = T.alloc_fragment((128, N), "float32"), T.alloc_fragment((128, N), "float16")
            acc = T.alloc_fragment((128, D), "float32")
            T.copy(Q, q)
            T.clear(acc)
            T.clear(a)
            for n in T.serial(2):
                T.copy(K[n * N, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(128, N):
                    a[i, j] = T.cast(T.exp2(s[i, j] * 0.1), "float16")
                if L[n] == 1:
                    leave()
                T.gemm(a, k, acc)
            T.copy(a, O)

    return main


@pytest.mark.parametrize("leave", [T.loop_break, T.continue_loop])
def test_a_loop_that_is_left_in_front_of_the_gemm(leave):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(x).astype(np.float16) for x in ((128, D), (2 * N, D)))
    given = {"Q": q, "K": k, "L": np.array([0, 1], np.int32), "O": np.zeros((128, N), np.float32)}
    got = run_device(lower(leaves(leave).func, SM90A, {"tl.enable_fast_math": True}), given).outputs["O"]
    assert np.abs(got - np.exp2(q.astype(float) @ k[N:].astype(float).T * 0.1)).max() < 1e-2


@T.prim_func
def rotated(Q: T.Tensor((M, D), "float16"), K: T.Tensor((WIDE, D), "float16"), O: T.Tensor((M, D), "float32")):
    with T.Kernel(1, threads=384):
        q, k = T.alloc_shared((M, D), "float16"), T.alloc_shared((WIDE, D), "float16")
        s, acc = T.alloc_fragment((M, WIDE), "float32"), T.alloc_fragment((M, D), "float32")
        a, r = T.alloc_fragment((M, WIDE), "float16"), T.alloc_fragment((M, WIDE), "float16")
        T.copy(Q, q)
        T.copy(K, k)
        T.clear(acc)
        for _ in T.serial(2):
            T.gemm(q, k, s, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(M, WIDE):
                a[i, j] = T.cast(T.exp2(s[i, j] * 0.1), "float16")
            for i, j in T.Parallel(M, WIDE // 2):
                r[i, j] = a[i, j + WIDE // 2] * T.float16(0.5)
            for i, j in T.Parallel(M, WIDE // 2):
                r[i, j + WIDE // 2] = a[i, j] * T.float16(0.5)
            for i, j in T.Parallel(M, WIDE):
                a[i, j] = a[i, j] * T.float16(0.75) + r[i, j]
            T.gemm(a, k, acc)
        T.copy(acc, O)


def test_a_later_loop_writes_what_an_earlier_one_reads():
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal(x).astype(np.float16) for x in ((M, D), (WIDE, D)))
    given = {"Q": q, "K": k, "O": np.zeros((M, D), np.float32)}
    got = run_device(lower(rotated.func, SM90A, {"tl.enable_fast_math": True}), given).outputs["O"]
    a = np.exp2(q.astype(float) @ k.astype(float).T * 0.1)
    assert np.abs(got - 2 * (a * 0.75 + np.roll(a, -WIDE // 2, 1) * 0.5) @ k.astype(float)).max() < 0.2


@T.prim_func
def scaled(Q: T.Tensor((M, D), "float16"), K: T.Tensor((N, D), "float16"), V: T.Tensor((N, D), "float16"),
           O: T.Tensor((M, D), "float32")):
    with T.Kernel(1, threads=384):
        q, k, v = (T.alloc_shared(x, "float16") for x in ((M, D), (N, D), (N, D)))
        s, p = T.alloc_fragment((M, N), "float32"), T.alloc_fragment((M, N), "float32")
        a, acc = T.alloc_fragment((M, N), "float16"), T.alloc_fragment((M, D), "float32")
        there = T.alloc_barrier(384)
        T.copy(Q, q)
        T.copy(K, k)
        T.clear(acc)
        for n in T.serial(2):
            T.sync_threads()
            T.tma_copy(V, v, barrier=there)
            T.barrier_arrive(there)
            T.wgmma_gemm(q, k, s, transpose_B=True, clear_accum=True)
            T.wait_wgmma(0)
            for i, j in T.Parallel(M, N):
                p[i, j] = T.exp2(s[i, j] * 0.1)
            T.mbarrier_wait_parity(there, n % 2)
            for i, j in T.Parallel(M, N):
                a[i, j] = T.cast(p[i, j] * T.cast(v[j, 0], "float32"), "float16")
            T.wgmma_gemm(a, v, acc)
            T.wait_wgmma(0)
        T.copy(acc, O)


def test_a_loop_that_reads_a_tile_stays_behind_its_wait():
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal(x).astype(np.float16) for x in ((M, D), (N, D), (N, D)))
    given = {"Q": q, "K": k, "V": v, "O": np.zeros((M, D), np.float32)}
    got = run_device(lower(scaled.func, SM90A, {"tl.enable_fast_math": True}), given).outputs["O"]
    a = np.exp2(q.astype(float) @ k.astype(float).T * 0.1) * v[:, 0].astype(float)
    assert np.abs(got - 2 * a @ v.astype(float)).max() < 0.2
