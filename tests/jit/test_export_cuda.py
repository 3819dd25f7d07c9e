"""CUDA kernels as shared libraries: against a driver of C functions that says what it is asked, and on a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.runtime import nvrtc

SM90A = {"kind": "cuda", "arch": "sm_90a"}
pytestmark = [pytest.mark.spec("R3:JITKernel"),
              pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
              pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")]

# Every call is printed; a launch copies its first parameter's memory to the second's, as many bytes as the grid has blocks.
DRIVER = r"""
#include <stdio.h>
#include <string.h>
#include <stdint.h>
static void *current = 0;
#define SAY(...) (printf(__VA_ARGS__), putchar('\n'), fflush(stdout), 0)
int cuInit(unsigned flags) { return SAY("init %u", flags); }
int cuDeviceGet(int *out, int n) { *out = 70 + n; return n > 1 ? 101 : SAY("device %d", n); }
int cuDevicePrimaryCtxRetain(void **out, int dev) { *out = (void *)(intptr_t)(7000 + dev); return SAY("retain %d", dev); }
int cuCtxGetCurrent(void **out) { *out = current; return 0; }
int cuCtxPushCurrent_v2(void *c) { current = c; return 0; }
int cuCtxPopCurrent_v2(void **out) { *out = current; current = 0; return 0; }
int cuCtxGetDevice(int *out) { *out = 0; return 201; }
int cuModuleLoadData(void **out, const char *image) { *out = (void *)9; return SAY("load %d", !memcmp(image, "\177ELF", 4)); }
int cuModuleGetFunction(void **out, void *mod, const char *name) { *out = (void *)5; return SAY("function %s", name); }
int cuFuncSetAttribute(void *f, int what, int value) { return SAY("set %d %d", what, value); }
int cuFuncGetAttribute(int *out, int what, void *f) { *out = 1024; return SAY("get %d", what); }
int cuDeviceGetAttribute(int *out, int what, int dev) { *out = 232448; return SAY("attribute %d of %d", what, dev); }
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared,
                   void *stream, void **params, void **extra) {
  memcpy(*(void **)params[1], *(void **)params[0], x);
  return SAY("launch %u %u %u by %u with %u shared in %ld", x, y, z, a, shared, (long)(intptr_t)current);
}
"""
SCRIPT = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
import numpy as np, tvm_ffi
from fake_driver import OnGpu
turn = tvm_ffi.load_module({library!r})["turn"]
a, b = np.arange(12, dtype=np.int8), np.zeros(12, np.int8)
for device in (0, 0, 1):
    b[:] = 0
    turn(OnGpu(a, device), OnGpu(b, device), 40)
    assert (a == b).all()
for x, device in ((OnGpu(a.astype(np.int16)), 0), (a, 0), (OnGpu(a, 2), 2)):
    try:
        turn(x, OnGpu(b, device), 40)
    except RuntimeError as e:
        print(e)
"""


def turn():
    m = T.dynamic("m")

    @T.prim_func
    def turn(A: T.Tensor((m,), "int8"), B: T.Tensor((m,), "int8"), n: T.int32):
        with T.Kernel(m, threads=32) as b:
            S = T.alloc_shared((n,), "int8")
            for i in T.Parallel(n):
                S[i] = A[b]
            B[b] = S[n - 1]

    return turn


def in_process(tmp_path, **environ):
    tests, root = Path(__file__).parent.parent / "runtime", Path(tilelang.__file__).parent.parent
    text = SCRIPT.format(tests=str(tests), root=str(root), library=str(tmp_path / "turn.so"))
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env={**os.environ, **environ})


def test_the_library_loads_its_code_on_each_device(tmp_path):
    tilelang.compile(turn(), target=SM90A).export_library(tmp_path / "turn.so")
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True)
    done = in_process(tmp_path, LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr

    def loaded(n):
        return [f"device {n}", f"retain {70 + n}", "load 1", "function turn_kernel", f"attribute 97 of {70 + n}", "get 1",
                "set 8 231424"]

    def launched(n):
        return [f"launch 12 1 1 by 32 with 48 shared in {7070 + n}"]

    assert done.stdout.splitlines() == [
        "init 0", *loaded(0), *launched(0), *launched(0), "init 0", *loaded(1), *launched(1),
        "kernel turn input A dtype mismatch, expected int8", "kernel turn input A device_type mismatch, expected cuda",
        "init 0", "kernel turn cannot be loaded on its device"]
    silent = in_process(tmp_path, LD_LIBRARY_PATH="/nonexistent")  # no driver: as for a device that cannot be used
    if "cannot be loaded on its device" not in silent.stderr:
        pytest.skip("this machine has a driver")


def test_a_library_is_read_back_for_its_own_program(tmp_path):
    kernel = tilelang.compile(turn(), target=SM90A)
    kernel.export_library(tmp_path / "turn.so")
    load = tilelang.JITKernel.from_database
    again = load(turn(), "host", "device", tmp_path / "turn.so", kernel.params, SM90A, None, None, "tvm_ffi")
    with pytest.raises(RuntimeError, match="kernel turn input A device_type mismatch, expected cuda"):
        again(np.zeros(4, np.int8), np.zeros(4, np.int8), 3)
    with pytest.raises(NotImplementedError, match="was not compiled here"):
        again.export_library(tmp_path / "other.so")
    with pytest.raises(ValueError, match="made of another program"):
        load(turn(), kernel_lib_path=tmp_path / "turn.so", target="cpu")(np.zeros(4, np.int8), np.zeros(4, np.int8), 3)


@pytest.mark.gpu
def test_a_library_on_a_gpu(tmp_path):
    torch, tvm_ffi = pytest.importorskip("torch"), pytest.importorskip("tvm_ffi")

    @T.prim_func
    def twice(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            S, F = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, S)
            T.gemm(S, S, F, transpose_B=True, clear_accum=True)
            T.copy(F, B)

    kernel = tilelang.compile(twice, out_idx=[1], target="cuda")
    kernel.export_library(tmp_path / "twice.so")
    a = torch.randn(64, 64).half().cuda()
    got = tvm_ffi.load_module(str(tmp_path / "twice.so"))["twice"](a)
    assert torch.equal(got, kernel(a))
