"""Kernels in files: shared libraries of CPU kernels, and entries of the disk cache read back."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.env import env
from tilelang.jit.kernel_cache import cache_key, disk
from tilelang.jit.requests import make_request
from tilelang.runtime import nvrtc

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a linker")
pytestmark = pytest.mark.spec("R3:JITKernel")


def program(name="waves", factor=2.0):
    m = T.dynamic("m")

    @T.prim_func
    def waves(A: T.Tensor((m, 64), "float32"), B: T.Tensor((m, 64), "float32"), C: T.Tensor((2 * m,), "int32"), k: T.int32):
        with T.Kernel(m, threads=32) as bx:
            S = T.alloc_shared((64,), "float32")
            T.copy(A[bx, 0], S)
            for i in T.Parallel(64):
                B[bx, i] = T.sin(S[63 - i]) * factor + k
            for i in T.Parallel(2):
                C[2 * bx + i] = k

    return waves.with_attr("global_symbol", name)


@needs_compiler
def test_a_library_is_loaded_where_the_package_is_not(tmp_path):
    torch = pytest.importorskip("torch")
    kernel = tilelang.compile(program(), out_idx=[2, 1], target="cpu")
    assert kernel.adapter.libpath is None
    kernel.export_library(tmp_path / "deep" / "waves.so")
    assert kernel.adapter.libpath == str(tmp_path / "deep" / "waves.so")
    a = torch.arange(640, dtype=torch.float32).reshape(10, 64)
    c, b = kernel(a, 3)
    code = f"""
import os, sys, torch, tvm_ffi
waves = tvm_ffi.load_module({str(tmp_path / "deep" / "waves.so")!r})["waves"]
a = torch.arange(640, dtype=torch.float32).reshape(10, 64)
c, b = waves(a, 3)
assert c.tolist() == [3] * 20, c
print(repr(b.double().sum().item()))
try:
    waves(a.half(), 3)
except RuntimeError as e:
    print(e)
child = os.fork()
ok = waves(a, 3)[1].equal(b)
if child == 0:
    os._exit(0 if ok else 1)
print(ok, os.waitpid(child, 0)[1], "tilelang" in sys.modules, os.environ["TILELANG_NUM_THREADS"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "TILELANG_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    total, message, last = done.stdout.splitlines()
    assert float(total) == b.double().sum().item() and c.tolist() == [3] * 20
    assert message == "kernel waves input A dtype mismatch, expected float32" and last == "True 0 False 2"


@needs_compiler
def test_a_library_is_read_back(tmp_path):
    kernel = tilelang.compile(program(), out_idx=[1], target="cpu")
    kernel.export_library(str(tmp_path / "w.so"))
    again = tilelang.JITKernel.from_database(program(), "host text", "device text", tmp_path / "w.so", kernel.params, "cpu",
                                             None, [1], "tvm_ffi")
    a, c = np.linspace(0, 9, 128, dtype=np.float32).reshape(2, 64), np.zeros(4, np.int32)
    assert np.array_equal(again(a, c, 7), kernel(a, c, 7)) and (c == 7).all()
    assert again.kernel_source == "device text" and again.get_host_source() == "host text"
    assert again.adapter.libpath == str(tmp_path / "w.so") and again.out_idx == [1] and again.target.is_cpu
    with pytest.raises(RuntimeError, match=r"kernel waves input A shape\[1\] violates"):
        again(a[:, :32].copy(), c, 7)

    def load(**changes):
        given = {"func": program(), "kernel_lib_path": tmp_path / "w.so", "target": "cpu", "out_idx": [1], **changes}
        return tilelang.JITKernel.from_database(**given)

    for other in ({"func": program(factor=3.0)}, {"out_idx": [2]}, {"func": program("other")}):
        with pytest.raises(ValueError, match="made of another program|no library of a kernel"):
            load(**other)
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(ValueError, match="no library of a kernel"):
        load(kernel_lib_path=tmp_path / "text.so")
    with pytest.raises(FileNotFoundError):
        load(kernel_lib_path=tmp_path / "none.so")
    with pytest.raises(ValueError, match="needs kernel_lib_path"):
        tilelang.JITKernel.from_database(program(), target="cpu")
    with pytest.raises(NotImplementedError, match="was not compiled here"):
        again.export_library(tmp_path / "v.so")


@pytest.mark.parametrize("target", ("cpu", "cuda"))
def test_an_entry_of_the_cache_is_read_wherever_it_lies(tmp_path, target):
    if target == "cuda":
        if not nvrtc.available():
            pytest.skip("needs NVRTC")
        target = {"kind": "cuda", "arch": "sm_90a"}
    options = {"out_idx": [1], "target": target, "pass_configs": {"tl.enable_fast_math": True}}
    with env.using(TILELANG_CACHE_DIR=str(tmp_path / "cache")):
        kernel = tilelang.compile(program("kept", 2.5), **options)
        key = cache_key(make_request(program("kept", 2.5), **options))
        shutil.copytree(disk.path(key), tmp_path / "moved" / key)
    load = tilelang.JITKernel.from_database
    for place in (tmp_path / "moved" / key, tmp_path / "moved" / key / "host.o"):
        again = load(program("kept", 2.5), kernel_lib_path=place, **options)
        assert again.kernel_source == kernel.kernel_source and again.cubin == kernel.cubin
    if target == "cpu":
        a, c = np.ones((3, 64), np.float32), np.zeros(6, np.int32)
        assert np.array_equal(again(a, c, 1), kernel(a, c, 1))
    with pytest.raises(ValueError, match="keeps no kernel of this program with these options"):
        load(program("kept", 2.5), kernel_lib_path=place, out_idx=[1], target=target)
    with pytest.raises(ValueError, match="keeps no kernel"):
        load(program("kept", 2.5), kernel_lib_path=tmp_path, **options)
    (tmp_path / "moved" / key / "host.o").write_bytes(b"broken")
    with pytest.raises(ValueError, match="keeps no kernel"):
        load(program("kept", 2.5), kernel_lib_path=place, **options)


def test_exports_that_cannot_be():
    for backend in ("cython", "tile"):
        with pytest.raises(AttributeError, match="exists for the tvm_ffi backend"):
            tilelang.compile(program(), target="cpu", execution_backend=backend).export_library("x.so")
    with pytest.raises(ValueError, match="path of the library is empty"):
        tilelang.compile(program(), target="cpu").export_library("")
