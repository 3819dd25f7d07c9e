"""Cubins kept by the text they were compiled from."""

import threading
from dataclasses import replace

import pytest

import tilelang
import tilelang.language as T
from tilelang.cache import CUDABinaryCache, clear_cache
from tilelang.env import env
from tilelang.runtime import nvrtc

SM90A = {"kind": "cuda", "arch": "sm_90a"}
pytestmark = [pytest.mark.spec("R9:TILELANG_CACHE_DIR"), pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")]


def doubled(source=None):
    @T.prim_func
    def doubled(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            T.import_source(source)
            for i in T.Parallel(64):
                B[i] = A[i] * 2

    return doubled


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Sources that NVRTC has been given (without the empty one that warms it up); the cache is a folder of the test's own."""
    seen, plain = [], nvrtc.Nvrtc.compile

    def compile(self, source, *rest):
        if source:
            seen.append(source)
        return plain(self, source, *rest)

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", compile)
    with env.using(TILELANG_CACHE_DIR=str(tmp_path), TILELANG_DISABLE_CACHE="0"):
        yield seen


def build(*args, **options):
    kernel = tilelang.compile(doubled(*args), target=SM90A, **options)
    for t in threading.enumerate():  # what writes the cache
        if t is not threading.current_thread() and not t.daemon:
            t.join(10)
    return kernel


def test_kernels_of_one_text_are_compiled_once(compiled):
    first, other = build(), build(out_idx=[1])
    assert len(compiled) == 1 and other.cubin == first.cubin and other.n_regs == first.n_regs and other.out_idx == [1]
    build(compile_flags=["-lineinfo"])
    assert len(compiled) == 2  # another option, another cubin
    assert len(list(CUDABinaryCache().disk.root.glob("*/kernel.cubin"))) == 2
    clear_cache()
    assert not CUDABinaryCache().disk.root.exists()
    build(out_idx=[1])
    assert len(compiled) == 3


def test_what_a_cubin_was_told_of_is_kept(compiled):
    (source, arch) = (build().get_kernel_source(), "sm_90a")
    want, cache = nvrtc.compile_cubin(source, arch), CUDABinaryCache()
    got = cache.compile(source, arch)
    assert replace(got, log="") == replace(want, log="") and "registers" in got.log and not cache.made
    assert cache.compile(source, arch, ["--use_fast_math"]).kernels and len(cache.made) == 1
    cache.flush()
    assert not cache.made and CUDABinaryCache().compile(source, arch, ["--use_fast_math"]).registers == want.registers


def test_sources_that_include_files_and_calls_without_the_cache_are_compiled_each_time(compiled, tmp_path):
    (tmp_path / "mine.h").write_text("#define MINE 1\n")
    for _ in range(2):
        build('#include "mine.h"\n', compile_flags=[f"-I{tmp_path}"], out_idx=[1] if compiled else None)
    assert len(compiled) == 2
    with env.using(TILELANG_DISABLE_CACHE="1"):
        build()
        build()
    assert len(compiled) == 4 and not CUDABinaryCache().disk.root.exists()
