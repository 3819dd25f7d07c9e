"""A kernel whose registers do not suffice says so and names the tile that takes them."""

import re
import warnings

import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangWarning
from tilelang.jit.spills import THRESHOLD, warn_of_spills
from tilelang.runtime import nvrtc

SM80 = {"kind": "cuda", "arch": "sm_80"}


def gemm(threads, m=256, n=256):
    @T.prim_func
    def f(A: T.Tensor((m, 64), "float16"), B: T.Tensor((64, n), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_shared((m, 64), "float16"), T.alloc_shared((64, n), "float16")
            small = T.alloc_fragment((16,), "float32")
            large = T.alloc_fragment((m, n), "float32")
            T.clear(small)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, large, clear_accum=True)
            for i, j in T.Parallel(m, n):
                large[i, j] = large[i, j] + small[i % 16]
            T.copy(large, C)

    return f


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_spills_were_silent():
    with pytest.warns(TileLangWarning, match=r"spills: `f` spills \d+ bytes a thread: the fragment `large` "
                      r"\(256 x 256 float32\) takes 512 registers of each of 128 threads; take a tile of 128 x 128: it takes "
                      "128 registers") as seen:
        tilelang.compile(gemm(128), target=SM80)
    assert seen[0].filename == __file__


def advised(text, threads, m, n):
    """(threads, m, n) of the program that the text of a warning or an error says to write."""
    tile, more = re.search(r"take a tile of (\d+) x (\d+)", text), re.search(r"take threads=(\d+)", text)
    assert tile or more, text
    return (threads, int(tile[1]), int(tile[2])) if tile else (int(more[1]), m, n)


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("shape", [(256, 256, 256), (128, 256, 128), (384, 256, 256)], ids=str)
def test_the_advice_did_not_compile_or_spilled_again(arch, shape):
    with pytest.warns(TileLangWarning) as seen:
        warn_of_spills(gemm(*shape).func, 500)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tilelang.compile(gemm(*advised(str(seen[0].message), *shape)), target={"kind": "cuda", "arch": arch})


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_an_instruction_without_registers_was_a_fault_of_the_compiler():
    with pytest.raises(RuntimeError) as e:
        tilelang.compile(gemm(512), target={"kind": "cuda", "arch": "sm_90a"}, pass_configs={"tl.resize_blocks": False})
    assert e.value.kind == "register-limit" and "large = T.alloc_fragment((m, n)" in str(e.value)
    assert advised(e.value.hint, 512, 256, 256) == (512, 128, 256)


def test_few_registers_in_fragments_are_not_the_cause():
    with pytest.warns(TileLangWarning, match=r"keep fewer values at a time"):
        warn_of_spills(gemm(128, 64, 64).func, 500)


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
