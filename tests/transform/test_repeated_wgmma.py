"""Products that repeat an earlier one stay in the machine code: ptxas drops them unless a fence or a commit stands between."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Call, walk
from tilelang.layout import make_full_bank_swizzled_layout
from tilelang.runtime import nvrtc, sass
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
N = 16
f16, f32 = "float16", "float32"
assembled = pytest.mark.skipif(not nvrtc.available() or sass.find_nvdisasm() is None, reason="no NVRTC or nvdisasm")


@T.macro
def multiply(d, e, c, k=0, keep=1):
    T.ptx_wgmma_ss(f32, f"m64n{N}k16", True, True, f16, f16, f32, d, 2 * k, e, 2 * k, c.data, 0, keep)


@T.macro
def straight(d, e, c):
    [multiply(d, e, c) for _ in range(4)]


@T.macro
def alternating(d, e, c):
    [multiply(d, e, c, k) for k in (0, 1, 0, 1)]


@T.macro
def serial(d, e, c):
    for _ in T.serial(2):
        multiply(d, e, c)


@T.macro
def unrolled(d, e, c):
    for _ in T.unroll(3):
        multiply(d, e, c)


@T.macro
def periodic(d, e, c):
    for k in T.unroll(4):
        multiply(d, e, c, k % 2)


@T.macro
def long(d, e, c):
    for k in T.serial(100):
        multiply(d, e, c, k % 4)


@T.macro
def moving(d, e, c):
    multiply(d, e, c, 1)
    T.increase_descriptor_offset(d, 32)
    T.increase_descriptor_offset(e, 32)
    multiply(d, e, c)


@T.macro
def branching(d, e, c):
    multiply(d, e, c)
    if T.get_block_binding() == 0:
        T.warpgroup_arrive()
        multiply(d, e, c, 1)
    else:
        multiply(d, e, c, 2)
    multiply(d, e, c)


@T.macro
def distinct(d, e, c):
    [multiply(d, e, c, k) for k in range(4)]


@T.macro
def distinct_in_a_loop(d, e, c):
    for k in T.unroll(4):
        multiply(d, e, c, k)


def raw(body):
    @T.prim_func
    def main(A: T.Tensor((64, 64), f16), B: T.Tensor((N, 64), f16), C: T.Tensor((64, N), f32)):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((64, 64), f16)
            Bs = T.alloc_shared((N, 64), f16)
            T.annotate_layout({As: make_full_bank_swizzled_layout(As), Bs: make_full_bank_swizzled_layout(Bs)})
            c = T.alloc_local((N // 2,), f32)
            d, e = T.alloc_wgmma_desc(), T.alloc_wgmma_desc()
            t = T.get_thread_binding()
            T.copy(A, As)
            T.copy(B, Bs)
            T.fence_proxy_async()
            T.sync_threads()
            for i in T.unroll(N // 2):
                c[i] = 1.0
            T.initialize_wgmma_descriptor(d, As[0, 0], 1, 1, 64)
            T.initialize_wgmma_descriptor(e, Bs[0, 0], 1, 1, 64)
            T.warpgroup_arrive()
            body(d, e, c)
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            for i in T.serial(N // 2):
                row = t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2)
                C[row, i // 4 * 8 + t % 4 * 2 + i % 2] = c[i]

    return main


# steps of K, times each; products in the machine code: loops are unrolled, one block's branch is decided
RAW = {
    "straight": (straight, {0: 4}, 4), "alternating": (alternating, {0: 2, 1: 2}, 4), "serial": (serial, {0: 2}, 2),
    "unrolled": (unrolled, {0: 3}, 3), "periodic": (periodic, {0: 2, 1: 2}, 4), "moving": (moving, {1: 2}, 2),
    "branching": (branching, {0: 2, 1: 1}, 3), "long": (long, dict.fromkeys(range(4), 25), 100),
    "distinct": (distinct, dict.fromkeys(range(4), 1), 4),
    "distinct in a loop": (distinct_in_a_loop, dict.fromkeys(range(4), 1), 4),
}


def products(func):
    lowered = lower(func.func, SM90A)
    cubin = nvrtc.compile_cubin(print_kernel(lowered.kernels[0]), "sm_90a")
    assert "C75" not in cubin.log, cubin.log
    text = sass.disassemble(cubin.bytes)
    return sum("HGMMA" in line and "gdesc[URZ], RZ, !UPT" not in line for line in text.splitlines())


def fences(func):
    return sum(isinstance(c, Call) and c.op == "wgmma_fence" for c in walk(lower(func.func, SM90A).kernels[0].launch.body))


@assembled
@pytest.mark.parametrize("name", RAW)
def test_repeated_raw_products_are_not_dropped(name):
    body, _, count = RAW[name]
    assert products(raw(body)) == count


@pytest.mark.parametrize("name", RAW)
def test_results_of_repeated_products(name):
    body, steps, _ = RAW[name]
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, (n, 64)).astype(np.float16) for n in (64, N))
    got = run_device(lower(raw(body).func, SM90A), [a, b, np.zeros((64, N), np.float32)]).outputs["C"]
    a, b = (x.astype(np.float32).reshape(-1, 4, 16) for x in (a, b))
    assert np.array_equal(got, 1 + sum(n * (a[:, k] @ b[:, k].T) for k, n in steps.items()))


def test_one_fence_stands_in_front_of_each_product():
    assert [fences(raw(f)) for f in (straight, distinct)] == [4, 4], "the first has the program's own"
    assert fences(raw(distinct_in_a_loop)) == 2


@T.macro
def twice(A, B, C):
    T.wgmma_gemm(A, B, C, transpose_B=True)
    T.wgmma_gemm(A, B, C, transpose_B=True)


@T.macro
def in_a_serial_loop(A, B, C):
    for _ in T.serial(2):
        T.wgmma_gemm(A, B, C, transpose_B=True)


@T.macro
def in_an_unrolled_loop(A, B, C):
    for _ in T.unroll(2):
        T.wgmma_gemm(A, B, C, transpose_B=True)


@T.macro
def waited(A, B, C):
    for _ in T.unroll(2):
        T.gemm(A, B, C, transpose_B=True)


def by_tiles(body, in_registers=False):
    @T.prim_func
    def main(A: T.Tensor((64, 16), f16), B: T.Tensor((N, 16), f16), C: T.Tensor((64, N), f32)):
        with T.Kernel(1, threads=128):
            As = T.alloc_fragment((64, 16), f16) if in_registers else T.alloc_shared((64, 16), f16)
            Bs = T.alloc_shared((N, 16), f16)
            F = T.alloc_fragment((64, N), f32)
            T.copy(A, As)
            T.copy(B, Bs)
            T.fence_proxy_async()
            T.sync_threads()
            T.clear(F)
            body(As, Bs, F)
            T.wait_wgmma(0)
            T.copy(F, C)

    return main


@assembled
@pytest.mark.parametrize("in_registers", [False, True], ids=["shared", "registers"])
@pytest.mark.parametrize("body", [twice, in_a_serial_loop, in_an_unrolled_loop, waited])
def test_repeated_tile_products_are_not_dropped(body, in_registers):
    assert products(by_tiles(body, in_registers)) == 2
