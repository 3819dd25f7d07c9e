"""Unrolled loops in CUDA text: loops that are unrolled, and those of which compilers would make too many copies."""

import pytest

import tilelang.language as T
from tilelang.codegen.device.printer import MOST_COPIES
from tilelang.codegen.cuda import print_kernel
from tilelang.library.gemm.kernels import Form, gemm
from tilelang.library.gemm.tile import Tile
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})


def filled(n, m):
    @T.prim_func
    def program(A: T.Tensor((n, m), "float32"), B: T.Tensor((n, m), "float32")):
        with T.Kernel(1, threads=32) as _:
            own = T.alloc_local((n, m), "float32")
            for i in T.unroll(n):
                for j in T.unroll(m):
                    own[i, j] = A[i, j] * 2.0
            for i in T.unroll(n):
                for j in T.unroll(m):
                    B[i, j] = own[n - 1 - i, j]

    return program


def text_of(program):
    kernel, = lower(program.func, SM90).kernels
    return print_kernel(kernel)


def test_an_array_that_fits_registers_is_unrolled_whole():
    text = text_of(filled(8, 8))
    assert "#pragma unroll\n" in text and "#pragma unroll 1" not in text


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
def test_an_array_of_64_times_64_elements_a_thread_compiles():
    """Unrolled into 4096 copies it kept NVRTC busy for minutes, and gigabytes of memory."""
    program = filled(64, 64)
    text = text_of(program)
    assert 64 * 64 > MOST_COPIES and text.count("#pragma unroll 1") == 2
    assert nvrtc.compile_cubin(text, "sm_90a").bytes


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
def test_the_loop_of_a_warp_that_only_loads_is_not_copied():
    """16 copies of it needed more than the 24 registers of such a warp, in clusters: ptxas spilt some."""
    form = Form(1000, 1000, 1000, ("float16",) * 3 + ("float32",), Tile(128, 64, 64, 8, 256), tb=True)
    kernel, = lower(gemm(form).func, SM90, {"tl.enable_hopper": True, "tl.cluster": 2}).kernels
    text = print_kernel(kernel)
    before, _, loop = text.partition("#pragma unroll 1\n")
    assert "set_max_nreg<24" in before and "tma_load" in loop.partition("}")[0] and "#pragma unroll 1" not in loop
    assert nvrtc.compile_cubin(text, "sm_90a").spills == 0
