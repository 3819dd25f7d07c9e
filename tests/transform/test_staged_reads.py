"""Tiles of global memory that parallel loops of a pipelined loop read element by element: staged_reads copies them ahead."""

import re

import numpy as np
import pytest
from awkward_loops import SM80, SM90, agrees, keeps_warp_roles

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.target import Target
from tilelang.transform.pipeline import lower


@pytest.mark.parametrize("target", [SM90, SM80], ids=["sm_90a", "sm_80"])
def test_a_loop_that_adds_a_bias_agrees_with_the_reference(target, as_planned):
    agrees("bias", target)


def test_a_bias_was_loaded_by_the_threads_that_multiply(as_planned):
    assert "X_map" in {n for n, *_ in keeps_warp_roles("bias").plan.tensor_maps}


def test_an_edge_tile_of_what_is_added_reads_zeros(as_planned):
    """192 keys in tiles of 128: both forms read 0 behind the end."""
    @T.prim_func
    def f(A: T.Tensor((128, 64), "float16"), B: T.Tensor((256, 64), "float16"), X: T.Tensor((128, 192), "float16"),
          C: T.Tensor((128, 256), "float32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((128, 64), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            T.copy(A, a)
            for j in T.Pipelined(2, num_stages=2):
                T.copy(B[j * 128, 0], b)
                T.gemm(a, b, c, transpose_B=True, clear_accum=True)
                for x, y in T.Parallel(128, 128):
                    c[x, y] += T.cast(X[x, j * 128 + y], "float32")
                T.copy(c, C[0:128, j * 128:(j + 1) * 128])

    rng = np.random.default_rng(3)
    a, b, x = (rng.integers(-2, 3, n).astype(np.float16) for n in ((128, 64), (256, 64), (128, 192)))
    c = np.zeros((128, 256), np.float32)
    tilelang.compile(f, target=SM90, execution_backend="simulator")(a, b, x, c)
    np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32).T + np.pad(x, ((0, 0), (0, 64))))


@pytest.mark.parametrize("keys", [256, 200])
def test_a_table_that_is_read_by_distances_is_a_run_in_each_step(keys: int):
    """Each element was loaded from global memory by the threads that multiply; behind the last key runs end outside."""
    @T.prim_func
    def f(A: T.Tensor((256, 64), "float16"), B: T.Tensor((keys, 64), "float16"), X: T.Tensor((2, 448), "float32"),
          C: T.Tensor((256, keys), "float32")):
        with T.Kernel(2, threads=256) as n:
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((128, 64), "float32")
            T.copy(A[n * 128, 0], a)
            for k in T.Pipelined(T.ceildiv(keys, 64), num_stages=2):
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, c, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(128, 64):
                    c[i, j] += X[1, k * 64 + j - (n * 128 + i) + 255]
                T.copy(c, C[n * 128:(n + 1) * 128, k * 64:(k + 1) * 64])

    (kernel,) = lower(f.func if hasattr(f, "func") else f, Target(SM90), {}).kernels
    text = print_kernel(kernel)
    assert "X_run" in text and "&X_map" in text
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-2, 3, n).astype(np.float16) for n in ((256, 64), (keys, 64)))
    x, c = rng.standard_normal((2, 448)).astype(np.float32), np.zeros((256, keys), np.float32)
    tilelang.compile(f, target=SM90, execution_backend="simulator")(a, b, x, c)
    at = np.arange(keys)[None] - np.arange(256)[:, None] + 255
    added = np.where(at < 448, x[1][np.minimum(at, 447)], 0)
    np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32).T + added)


@pytest.mark.parametrize("rows", [128, 100])
def test_scales_of_rows_and_steps_were_loaded_behind_the_product(rows: int):
    """Two loops read them: each scale is loaded once, in front of the GEMM; what depends on no step stays where it is."""
    @T.prim_func
    def f(A: T.Tensor((rows, 256), "float16"), B: T.Tensor((64, 256), "float16"), S: T.Tensor((rows, 4), "float32"),
          W: T.Tensor((4,), "float32"), V: T.Tensor((64,), "float32"), C: T.Tensor((rows, 64), "float32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 64), "float16")
            p, c = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128, 64), "float32")
            d = T.alloc_fragment((128, 64), "float32")
            T.clear(c)
            T.clear(d)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[0, k * 64], a)
                T.copy(B[0, k * 64], b)
                T.gemm(a, b, p, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(128, 64):
                    c[i, j] += p[i, j] * S[i, k] * W[k]
                for i, j in T.Parallel(128, 64):
                    d[i, j] += S[i, k] * W[3 - k] + V[j]
            for i, j in T.Parallel(128, 64):
                c[i, j] += d[i, j]
            T.copy(c, C[0, 0])

    rng = np.random.default_rng(4)
    a, b, s, w, v = (rng.integers(-2, 3, n).astype(t) for n, t in (
        ((rows, 256), "float16"), ((64, 256), "float16"), ((rows, 4), "float32"), ((4,), "float32"), ((64,), "float32")))
    want = sum(a[:, i:i + 64].astype(np.float32) @ b[:, i:i + 64].astype(np.float32).T * s[:, k:k + 1] * w[k] +
               s[:, k:k + 1] * w[3 - k] + v for k, i in enumerate(range(0, 256, 64)))
    c = np.zeros((rows, 64), np.float32)
    tilelang.compile(f, target=SM90, execution_backend="simulator")(a, b, s, w, v, c)
    np.testing.assert_array_equal(c, want)
    text = print_kernel(lower(f.func, Target(SM90)).kernels[0])
    loop = re.sub("//.*", "", text[text.rindex("for (int k = 0"):])
    assert 0 < loop.index("W_1 = W[") < loop.index("wgmma_m64") < loop.index("S_steps[") < loop.index("wgmma_wait")
    assert loop.count("S_row[r] = ") == 1 and re.search(r"\bV\[", loop) and not re.search(r"\bS\[", loop)
