"""Loops whose own tiles fit in shared memory were rejected for versions of tiles, and for staging that the compiler adds."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

S80, S90 = ({"kind": "cuda", "arch": x} for x in ("sm_80", "sm_90a"))


def one_loop(**lists):
    @T.prim_func
    def f(A: T.Tensor((128, 512), "float16"), B: T.Tensor((512, 128), "float16"), C: T.Tensor((128, 128), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((128, 256), "float16"), T.alloc_shared((256, 128), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for k in T.Pipelined(2, **lists):
                T.copy(A[0, k * 256], a)
                T.copy(B[k * 256, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)
    return f


def two_loops_in_a_loop(second):
    """The accumulator of the first loop is an operand of the second one, in another layout: 64 KiB of staging on sm_80."""
    @T.prim_func
    def f(A: T.Tensor((128, 256), "float16"), B: T.Tensor((256, 128), "float16"), C: T.Tensor((128, 128), "float32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((128, 128), "float16"), T.alloc_shared((128, 128), "float16")
            w, out = T.alloc_shared((128, 128), "float16"), T.alloc_shared((128, 128), "float32")
            c, p, d = (T.alloc_fragment((128, 128), x) for x in ("float32", "float16", "float32"))
            for _ in T.serial(2):
                T.clear(c)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[0, k * 128], a)
                    T.copy(B[k * 128, 0], b)
                    T.gemm(a, b, c)
                for i, j in T.Parallel(128, 128):
                    c[i, j] *= 0.125
                T.copy(c, p)
                T.clear(d)
                for k in T.Pipelined(2, num_stages=second):
                    T.copy(B[k * 128, 0], w)
                    T.gemm(p, w, d)
                T.copy(d, out)
                T.copy(out, C)
    return f


def ran(f, *inputs):
    """The report of each simulator, whose results are those of the reference interpreter."""
    want, reports = np.zeros((128, 128), np.float32), {}
    tilelang.compile(f, target=S90, execution_backend="tile")(*inputs, want)
    for target in (S80, S90):
        kernel = tilelang.compile(f, target=target, execution_backend="simulator", pass_configs={"tl.resize_blocks": False})
        got = np.zeros((128, 128), np.float32)
        kernel(*inputs, got)
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)
        reports[target["arch"]] = kernel.report()
    return reports


def inputs(k):
    rng = np.random.default_rng(0)
    return rng.standard_normal((128, k)).astype(np.float16) * np.float16(0.2), rng.standard_normal((k, 128)).astype(np.float16)


@pytest.mark.parametrize("lists", [{"num_stages": 3}, {"order": [0, 1, 2], "stage": [0, 0, 1]},
                                   {"order": [-1, -1, 0], "stage": [-1, -1, 0]}], ids=["stages", "lists", "producer"])
def test_stages_that_do_not_fit_are_taken_off(lists):
    """One stage takes 128 KiB."""
    for report in ran(one_loop(**lists), *inputs(512)).values():
        assert "compiled without some pipeline stages: the kernel needs" in report
        assert "dynamic shared memory 1310" in report


def test_tiles_of_two_loops_and_staging_use_the_same_bytes():
    """The tiles take 160 of 163 KiB, versions and staging 192 KiB more."""
    reports = ran(two_loops_in_a_loop(4), *inputs(256))
    assert "2 of w" in reports["sm_90a"] or "2 of a" in reports["sm_90a"]


def test_an_error_names_tiles_of_the_program_alone():
    @T.prim_func
    def f(A: T.Tensor((256, 256), "float32"), B: T.Tensor((4, 32, 256), "float32")):
        with T.Kernel(1, threads=128):
            f, h = T.alloc_fragment((256, 256), "float32"), T.alloc_shared((32, 256), "float32")
            T.copy(A, f)
            for i, j in T.Parallel(32, 256):
                h[i, j] = f[255 - j, i] + f[i, j]
            T.copy(h, B[0, :, :])

    with pytest.raises(TileLangError) as e:
        tilelang.compile(f, target=S80, execution_backend="simulator")
    assert e.value.kind == "shared-memory" and "f_s" not in str(e.value)
    assert "h 32768, 262144 for staging and barriers that the compiler adds" in str(e.value)
