"""Parallel loops that read a fragment much smaller than what they walk."""

import re

import numpy as np

import tilelang
import tilelang.language as T

SIMULATOR = {"target": {"kind": "cuda", "arch": "sm_80"}, "execution_backend": "simulator"}


def add_total(n=1024):
    @T.prim_func
    def program(X: T.Tensor((16,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment((16,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(X, x)
            T.reduce_sum(x, total)
            for i in T.Parallel(n):
                Y[i] += total[0]

    return program


def test_memory_read_and_written_beside_a_replicated_fragment_is_updated_by_one_thread():
    """16 threads hold the total: one of them stored Y[i] while the others still had to read it."""
    kernel = tilelang.compile(add_total(), **SIMULATOR)
    y = np.arange(1024, dtype=np.float32)
    kernel(np.ones(16, np.float32), y)
    np.testing.assert_array_equal(y, np.arange(1024) + 16)


def test_all_threads_share_a_loop_that_reads_a_scalar_fragment():
    """It ran in one thread, 256 vectors long."""
    text = tilelang.compile(add_total(), **SIMULATOR).get_kernel_source()
    assert max(int(n) for n in re.findall(r"T\.unroll\((\d+)", text)) <= 4


def test_all_threads_share_a_loop_over_rows_scaled_by_a_fragment():
    @T.prim_func
    def scale(X: T.Tensor((4, 512), "float32"), Y: T.Tensor((4, 512), "float32")):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment((4, 512), "float32")
            top = T.alloc_fragment((4,), "float32")
            T.copy(X, x)
            T.reduce_max(x, top, dim=1)
            for i, j in T.Parallel(4, 512):
                Y[i, j] = X[i, j] * top[i]

    kernel = tilelang.compile(scale, out_idx=[1], **SIMULATOR)
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    np.testing.assert_array_equal(kernel(x), x * x.max(1, keepdims=True))
    assert max(int(n) for n in re.findall(r"T\.unroll\((\d+)", kernel.get_kernel_source())) <= 16


def test_fragments_are_staged_by_all_threads_around_a_loop_that_few_threads_run():
    """What holds in the loop (thread < 4) was used to simplify the copy before it: every owner wrote element 0."""
    @T.prim_func
    def update(X: T.Tensor((4, 64), "float32"), Y: T.Tensor((4,), "float32"), Z: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment((4, 64), "float32")
            total = T.alloc_fragment((4,), "float32")
            T.copy(X, x)
            T.reduce_sum(x, total, dim=1)
            for i in T.Parallel(4):
                Y[i] += total[i]
                total[i] = Y[i] * 2
            T.copy(total, Z)

    x = np.arange(256, dtype=np.float32).reshape(4, 64)
    y, z = np.ones(4, np.float32), np.zeros(4, np.float32)
    tilelang.compile(update, **SIMULATOR)(x, y, z)
    np.testing.assert_array_equal(y, x.sum(1) + 1)
    np.testing.assert_array_equal(z, 2 * x.sum(1) + 2)
