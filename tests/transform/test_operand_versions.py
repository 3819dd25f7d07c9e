"""operand_versions: operands that threads make or change run beside the GEMM of the iteration before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_lowered import lowered
from sync_mutants import is_faulty, mutants
from sync_mutants import lowered as unverified

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Launch, Load, rewrite, walk
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.transform.verify_sync.launch import check_launch

KINDS = ("converted", "scaled", "in place", "registers", "both", "two products")


def product(kind: str, steps: int = 5, stages: int = 3, m: int = 128, n: int = 64, bm: int = 128, bk: int = 32,
            threads: int = 256, late: bool = False, bn: int = 64) -> Any:
    """C = f(A) g(B)^T (+ f(A) D^T): A is changed in registers or in its tile, B converted from int8 through shared memory."""
    k = steps * bk - (8 if late else 0)
    b_dtype = "int8" if kind in ("converted", "scaled", "both") else "float16"

    @T.prim_func
    def main(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), b_dtype), D: T.Tensor((n, k), "float16"),
             V: T.Tensor((k,), "float32"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk), b_dtype)
            d, h = T.alloc_shared((bn, bk), "float16"), T.alloc_shared((bn, bk), "float16")
            f = T.alloc_fragment((bm, bk), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            T.clear(c)
            for step in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[by * bm, step * bk], a)
                T.copy(B[bx * bn, step * bk], b)
                if kind == "in place":
                    for i, j in T.Parallel(bm, bk):
                        a[i, j] = T.max(a[i, j], T.float16(0))
                if kind in ("registers", "both", "two products"):
                    for i, j in T.Parallel(bm, bk):
                        f[i, j] = a[i, j] * T.cast(V[step * bk + j], "float16")
                if kind in ("converted", "both"):
                    for i, j in T.Parallel(bn, bk):
                        h[i, j] = T.cast(b[i, j], "float16")
                if kind == "scaled":
                    for i, j in T.Parallel(bn, bk):
                        h[i, j] = T.cast(T.cast(b[i, j], "float32") * V[step * bk + j], "float16")
                if kind in ("converted", "scaled"):
                    T.gemm(a, h, c, transpose_B=True)
                elif kind == "both":
                    T.gemm(f, h, c, transpose_B=True)
                elif kind == "in place":
                    T.gemm(a, b, c, transpose_B=True)
                else:
                    T.gemm(f, b, c, transpose_B=True)
                if kind == "two products":
                    T.copy(D[bx * bn, step * bk], d)
                    T.gemm(f, d, c, transpose_B=True)
            T.copy(c, C[by * bm, bx * bn])

    return main


def inputs(func: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(-3, 4, [int(getattr(x, "value", x)) for x in b.shape]).astype(str(b.dtype)) for _, b in func.buffers]


def same(program: Any, *archs: str) -> None:
    args = inputs(program.func)
    want = run_tile(program.func, [x.copy() for x in args])
    for arch in archs:
        got = run_device(lowered(program, arch), [x.copy() for x in args]).outputs
        assert np.array_equal(got["C"], want["C"]), arch  # whole numbers: every sum is exact


@pytest.mark.parametrize("stages", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_changed_operands_are_those_of_the_reference(kind: str, stages: int):
    same(product(kind, stages=stages), "sm_90a", "sm_80")


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_loops_of_few_or_odd_steps_end_with_the_right_version(kind: str, steps: int):
    same(product(kind, steps=steps), "sm_90a")


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_that_do_not_divide(kind: str):
    same(product(kind, m=200, n=96, late=True), "sm_90a", "sm_80")


@pytest.mark.parametrize("kind", KINDS)
def test_one_warp_group(kind: str):
    same(product(kind, bm=64, threads=128), "sm_90a")


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_operand_was_made_behind_the_wait_for_the_gemm(kind: str, as_planned: Any):
    (kernel,) = lowered(product(kind, steps=16, n=256, m=256, bk=64, bn=128)).kernels
    assert "wgmma in flight" in kernel.launch.plan.overlap, kernel.launch.plan.report


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_ptxas_keeps_the_wgmmas_asynchronous(kind: str):
    (kernel,) = lowered(product(kind, steps=16, n=256, m=256, bk=64, bn=128)).kernels
    cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
    assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log


@pytest.mark.parametrize("kind", ["converted", "in place", "registers"])
def test_faulty_barriers_and_fences_of_the_versions_are_refuted(kind: str):
    program = product(kind, steps=5)
    func = unverified("sm_90a", program, {})
    assert check_launch(next(walk(func.body, Launch)))[0].startswith("ordered")
    args = inputs(program.func)
    want = run_device(func, [x.copy() for x in args]).outputs
    wanted = ("drop sync_threads", "drop named_barrier", "drop fence_proxy_async", "drop wgmma_wait", "wgmma_wait n+1")
    found = [(what, s, other) for what, s, other in mutants(next(walk(func.body, Launch))) if what in wanted]
    seen = 0
    for what, s, other in found:
        broken = rewrite(func, lambda x, s=s, other=other: other if x is s else None)
        if is_faulty(broken, [x.copy() for x in args], want):
            seen += 1
            assert not check_launch(next(walk(broken.body, Launch)))[0].startswith("ordered"), (what, s.span)
    assert seen > 2


def test_a_tile_made_of_the_result_of_a_gemm_keeps_one_version():
    """What a GEMM of the same iteration computes cannot be made under it."""
    @T.prim_func
    def main(A: T.Tensor((64, 256), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            p = T.alloc_shared((64, 64), "float16")
            s, c = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for step in T.Pipelined(4, num_stages=2):
                T.copy(A[0, step * 64], a)
                T.copy(B[step * 64, 0], b)
                T.gemm(a, b, s, clear_accum=True)
                T.copy(s, p)
                T.gemm(p, b, c)
            T.copy(c, C)

    (kernel,) = lowered(main).kernels
    assert "(&p[0])" in print_kernel(kernel)  # no offset that depends on the step
    same(main, "sm_90a")


def test_a_guarded_copy_from_global_memory_is_no_operand_that_threads_make():
    """Rows with a guard went to registers by loads of 2 bytes, 0.31 of the speed of 16-byte asynchronous copies."""
    @T.prim_func
    def main(X: T.Tensor((128, 256), "float16"), W: T.Tensor((256, 128), "float16"), C: T.Tensor((128, 128), "float32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 128), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for step in T.Pipelined(4, num_stages=3):
                for i, j in T.Parallel(128, 64):
                    row = i // 8 % 16 * 8 + i % 8 + (step * 64 + j) // 128 - 1
                    a[i, j] = T.if_then_else(T.And(row >= 0, row < 128), X[row, (step * 64 + j) % 256], T.float16(0))
                T.copy(W[step * 64, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    text = print_kernel(lowered(main).kernels[0])
    assert "cp_async" in text
    launch = lowered(main).kernels[0].launch
    assert not any(x.buffer.name.startswith("a_r") for x in walk(launch, Load))
