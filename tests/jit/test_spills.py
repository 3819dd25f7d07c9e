"""A kernel whose registers do not suffice says so and names the tile that takes them."""

import warnings

import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangWarning
from tilelang.jit.spills import THRESHOLD, warn_of_spills
from tilelang.runtime import nvrtc

SM80 = {"kind": "cuda", "arch": "sm_80"}


def gemm(threads):
    @T.prim_func
    def f(A: T.Tensor((256, 64), "float16"), B: T.Tensor((64, 256), "float16"), C: T.Tensor((256, 256), "float32")):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_shared((256, 64), "float16"), T.alloc_shared((64, 256), "float16")
            small = T.alloc_fragment((16,), "float32")
            large = T.alloc_fragment((256, 256), "float32")
            T.clear(small)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, large, clear_accum=True)
            for i, j in T.Parallel(256, 256):
                large[i, j] = large[i, j] + small[i % 16]
            T.copy(large, C)

    return f


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_spills_were_silent():
    with pytest.warns(TileLangWarning, match=r"spills: `f` spills \d+ bytes a thread: the fragment `large` "
                      r"\(256 x 256 float32\) takes 512 registers of each of 128 threads; take threads=256") as seen:
        tilelang.compile(gemm(128), target=SM80)
    assert seen[0].filename == __file__


def test_a_few_bytes_are_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_spills(gemm(128).func, THRESHOLD - 1)


def test_a_kernel_of_the_library_is_not_the_users_to_mend():
    import tilelang.jit.spills as spills

    program = gemm(128).func
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spills, "_PACKAGE", __file__.rpartition("/")[0])
            warn_of_spills(program, 500)
        with pytest.raises(TileLangWarning, match="spills 500 bytes"):
            warn_of_spills(program, 500)
