"""Options of nvcc in compile_flags: translated for NVRTC, dropped where they concern other tools, named where unknown."""

import warnings

import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangWarning
from tilelang.runtime import nvrtc
from tilelang.runtime.nvcc_options import nvrtc_options

needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")


@pytest.mark.parametrize("given, wanted", [
    ("-O3", ""), ("-O0 -g -Wall -Wno-deprecated-declarations", ""), ("--expt-relaxed-constexpr --expt-extended-lambda", ""),
    ("-Xcompiler -fPIC -DX=1", "-DX=1"), ("--compiler-options=-Wall -U Y", "-U Y"), ("-t 4 -ccbin g++ -lineinfo", "-lineinfo"),
    ("--ptxas-options=-v,--register-usage-level=10", "--ptxas-options=-v --ptxas-options=--register-usage-level=10"),
    ("-Xptxas -O1,-v", "--ptxas-options=-O1 --ptxas-options=-v"), ("-Xptxas=-v", "--ptxas-options=-v"),
    ("-isystem /opt/include -I/usr/x", "-I/opt/include -I/usr/x"),
    ("-std=c++20 -maxrregcount=64", "-std=c++20 -maxrregcount=64"),
    ("-gencode arch=compute_90a,code=sm_90a -arch=sm_90a", ""), ("--use_fast_math -D A -D B=2", "--use_fast_math -D A -D B=2"),
    ("-O", ""), ("-isystem", "-I"), ("--something-of-nvrtc", "--something-of-nvrtc"),
])
def test_options_of_nvcc_for_nvrtc(given, wanted):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nvrtc_options(given.split(), "sm_90a") == wanted.split()


@pytest.mark.parametrize("given", ["-arch=sm_80", "-gencode arch=compute_75,code=sm_75", "-lcudart", "-dlto",
                                   "--default-stream=per-thread"])
def test_an_option_that_would_have_changed_the_result_is_named(given):
    with pytest.warns(TileLangWarning, match=f"compile-flag: {given}") as seen:
        assert nvrtc_options(given.split(), "sm_90a") == []
    assert seen[0].message.code == "compile-flag"


@T.prim_func
def fill(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=32):
        T.fill(A, 2)


@needs_nvrtc
def test_usual_flags_of_nvcc_compile():
    flags = ["-O3", "-Wno-deprecated-declarations", "-U__CUDA_NO_HALF_OPERATORS__", "--expt-relaxed-constexpr",
             "--expt-extended-lambda", "--ptxas-options=-v,--register-usage-level=10", "-DNDEBUG"]
    assert tilelang.compile(fill, target={"kind": "cuda", "arch": "sm_90a"}, compile_flags=flags).n_regs > 0


@needs_nvrtc
def test_an_unknown_flag_is_named_and_not_called_a_bug_of_the_compiler():
    with pytest.raises(RuntimeError, match="does not take the option --nonsense") as e:
        tilelang.compile(fill, target={"kind": "cuda", "arch": "sm_90a"}, compile_flags="--nonsense")
    assert e.value.kind == "nvrtc-option" and "compiler bug" not in str(e.value) and "compile_flags" in e.value.hint
