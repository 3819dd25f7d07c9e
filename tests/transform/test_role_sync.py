"""Roles of warp groups with ordinary tile operations: each role's barriers are its own, the block's stand between."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda import print_kernel
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})


def both(f, *args):
    name = f.func.buffers[-1][1].name
    p = lower(f.func, SM90A)
    device = run_device(p, args).outputs[name]
    assert np.array_equal(device, run_tile(f, args)[name])
    text = print_kernel(p.kernels[0])
    if nvrtc.available():
        nvrtc.compile_cubin(text, "sm_90a")
    return device, text


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_role_reverses_rows_through_shared_memory_with_its_own_barrier(group):
    @T.prim_func
    def f(A: T.Tensor((4, 128), "float32"), B: T.Tensor((4, 128), "float32")):
        with T.Kernel(1, threads=384):
            S = T.alloc_shared((128,), "float32")
            with T.ws(group):
                for k in T.serial(4):
                    T.copy(A[k, :], S)
                    for i in T.Parallel(128):
                        B[k, i] = S[127 - i] + 1.0

    a = np.arange(512, dtype=np.float32).reshape(4, 128)
    got, text = both(f, a, np.zeros_like(a))
    assert np.array_equal(got, a[:, ::-1] + 1)
    assert f"named_barrier({group + 1}, 128)" in text and "__syncthreads" not in text


def test_work_of_the_block_before_between_and_after_roles():
    @T.prim_func
    def f(A: T.Tensor((3, 256), "float32"), B: T.Tensor((3, 256), "float32")):
        with T.Kernel(1, threads=256):
            S, R = T.alloc_shared((256,), "float32"), T.alloc_shared((256,), "float32")
            for k in T.serial(3):
                T.copy(A[k, :], S)
                with T.ws(1):
                    for i in T.Parallel(128):
                        R[i] = S[255 - i]
                with T.ws(0):
                    for i in T.Parallel(128):
                        R[128 + i] = S[127 - i] * 2.0
                for i in T.Parallel(256):
                    B[k, i] = R[255 - i]

    a = np.arange(768, dtype=np.float32).reshape(3, 256)
    r = np.concatenate([a[:, ::-1][:, :128], a[:, ::-1][:, 128:] * 2], axis=1)
    got, text = both(f, a, np.zeros_like(a))
    assert np.array_equal(got, r[:, ::-1])
    assert text.count("__syncthreads()") == 3  # in front of the roles, behind them, before the next round


def test_roles_of_different_size_have_fragments_of_their_own():
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float32"), B: T.Tensor((2, 64), "float32")):
        with T.Kernel(1, threads=384):
            F, G = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            rows, columns = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            with T.ws(0):
                T.copy(A, F)
                T.reduce_sum(F, rows, dim=1)
                T.copy(rows, B[0, :])
            with T.ws(1, 2):
                T.copy(A, G)
                T.reduce_max(G, columns, dim=0)
                T.copy(columns, B[1, :])

    a = np.arange(4096, dtype=np.float32).reshape(64, 64) % 37
    got, _ = both(f, a, np.zeros((2, 64), np.float32))
    assert np.array_equal(got, np.stack([a.sum(1), a.max(0)]))


def test_products_in_a_role_by_mma_and_numbers_that_the_program_names():
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            As, Bs = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            F = T.alloc_fragment((64, 64), "float32")
            with T.ws(0):
                T.copy(A, As)
                T.copy(B, Bs)
                T.named_barrier_arrive(2, 256)
            with T.ws(1):
                T.sync_threads(2, 256)
                T.clear(F)
                T.gemm(As, Bs, F)
                T.copy(F, C)

    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, (64, 64)).astype(np.float16) for _ in "ab")
    got, text = both(f, a, b, np.zeros((64, 64), np.float32))
    assert np.array_equal(got, a.astype(np.float32) @ b.astype(np.float32)) and "mma_m16n8k16" in text
