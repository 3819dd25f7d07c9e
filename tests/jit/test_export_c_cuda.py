"""Exported CUDA kernels: against a driver of C functions that says what it is asked, without a driver, and on a GPU."""

import ctypes
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tilelang
import tilelang.language as T
from tilelang.runtime import nvrtc

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# Device memory is host memory above 1 << 20 that is not the guarded address.  CC: the device's compute capability.
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
static void *current = 0;
#define SAY(...) (printf(__VA_ARGS__), putchar('\n'), fflush(stdout), 0)
static int given(const char *name) { const char *s = getenv(name); return s ? atoi(s) : 0; }
int cuInit(unsigned flags) { return given("INIT"); }
int cuDeviceGet(int *out, int n) { *out = 70 + n; return 0; }
int cuDeviceGetAttribute(int *out, int what, int dev) {
  *out = what == 75 ? given("CC") / 10 : what == 76 ? given("CC") % 10 : 232448;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **out, int dev) { *out = (void *)(intptr_t)(7000 + dev); return 0; }
int cuCtxGetCurrent(void **out) { *out = current; return 0; }
int cuCtxPushCurrent_v2(void *c) { current = c; return 0; }
int cuCtxPopCurrent_v2(void **out) { *out = current; current = 0; return 0; }
int cuCtxGetDevice(int *out) { return 201; }
int cuPointerGetAttribute(int *out, int what, uint64_t p) { *out = given("DEVICE"); return what != 9 || p >> 60 ? 1 : 0; }
int cuCtxSetCurrent(void *c) { current = c; return 0; }
int cuCtxSynchronize(void) { return SAY("synchronize"); }
int cuMemAlloc_v2(uint64_t *out, size_t n) { *out = (intptr_t)aligned_alloc(4096, (n + 4095) / 4096 * 4096); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t n) {
  memcpy((void *)(intptr_t)to, from, n);
  return SAY("copy %zu", n);
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) {
  memcpy(to, (void *)(intptr_t)from, n);
  return SAY("copy %zu", n);
}
int cuModuleLoadData(void **out, const char *image) {
  *out = (void *)9;
  return SAY("load %s", memcmp(image, "\177ELF", 4) ? strstr(image, ".target sm_80") ? "PTX 80" : "?" : "cubin");
}
int cuModuleGetFunction(void **out, void *mod, const char *name) { *out = (void *)5; return SAY("function %s", name); }
int cuFuncSetAttribute(void *f, int what, int value) { return SAY("set %d %d", what, value); }
int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *p, const uint64_t *dims, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *steps, int il, int swizzle, int l2, int fill) {
  return SAY("map of %llu x %llu in boxes of %u x %u", (long long)dims[1], (long long)dims[0], box[1], box[0]);
}
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared,
                   void *stream, void **params, void **extra) {
  if (given("LAUNCH")) return given("LAUNCH");
  return SAY("launch %u %u %u by %u on stream %ld in %ld", x, y, z, a, (long)(intptr_t)stream, (long)(intptr_t)current);
}
"""
SCRIPT = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.matmul_error.restype = ctypes.c_char_p
for call in sys.argv[2:]:
    a, b, c, m = (int(x) for x in call.split(","))
    code = library.matmul(ctypes.c_void_p(a), ctypes.c_void_p(b), ctypes.c_void_p(c), ctypes.c_int64(m), ctypes.c_void_p(33))
    print(code, library.matmul_error().decode() if code else "", flush=True)
"""
XLA = """
import ctypes, sys
sys.path.insert(0, sys.argv[2])
from test_jax_calls import CODES, I64, P, Buffer, call_of
import numpy as np
def stream(request):  # XLA_FFI_Stream_Get
    P.from_address(request + 24).value = 44
    return None
stream = ctypes.CFUNCTYPE(P, P)(stream)
CODES[np.dtype("float16")] = 10
a, b, c = np.zeros((70, 256), np.float16), np.zeros((256, 256), np.float16), np.zeros((70, 256), np.float32)
frame, errors, keep = call_of((a, b), (c,), {})
frame.api.contents.rest[3] = ctypes.cast(stream, P).value
call = ctypes.CDLL(sys.argv[1]).matmul_xla
call.restype = P
print(call(P(ctypes.addressof(frame))), errors)
"""
FINE = "4096,8192,16384,100"


def matmul(n=256, k=256):
    m = T.dynamic("M")

    @T.prim_func
    def matmul(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, 64), T.ceildiv(m, 64), threads=128) as (bx, by):
            S, R = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            F = T.alloc_fragment((64, 64), "float32")
            T.clear(F)
            for s in T.Pipelined(k // 64, num_stages=2):
                T.copy(A[by * 64, s * 64], S)
                T.copy(B[s * 64, bx * 64], R)
                T.gemm(S, R, F)
            T.copy(F, C[by * 64, bx * 64])

    return matmul


def exported(folder, arch, **options):
    kernel = tilelang.compile(matmul(), out_idx=[2], target={"kind": "cuda", "arch": "sm_90a"})
    return kernel.export(folder, arch=arch, **options)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A library for two architectures and PTX, beside a libcuda.so.1 of the functions above."""
    folder = tmp_path_factory.mktemp("bundle")
    exported(folder, ["sm_80", "sm_90a"], ptx=True)
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    return folder


def called(folder, *calls, **environ):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder / "libmatmul.so"), *calls], capture_output=True, text=True,
                          env={**os.environ, "LD_LIBRARY_PATH": str(folder), **{k: str(v) for k, v in environ.items()}})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_compiler
@pytest.mark.parametrize("capability, image, threads", [(80, "cubin", 128), (86, "cubin", 128), (90, "cubin", 256),
                                                        (100, "PTX 80", 128), (120, "PTX 80", 128)])
def test_a_call_takes_the_code_for_its_device(bundle, capability, image, threads):
    said = called(bundle, FINE, "4096,8192,16384,130", CC=capability, DEVICE=1)
    assert [x for x in said if x.startswith(("load", "function", "launch", "0"))] == [
        f"load {image}", "function matmul_kernel", f"launch 4 2 1 by {threads} on stream 33 in 7071", "0 ",
        f"launch 4 3 1 by {threads} on stream 33 in 7071", "0 "]
    assert ("map of 100 x 256 in boxes of 64 x 64" in said) == (capability == 90)


@needs_compiler
def test_wrong_calls_have_codes_and_messages(bundle):
    host = 1 << 60
    assert called(bundle, "4096,0,16384,100", f"4096,8192,{host},100", "4096,8192,16384,-1", "4096,8194,16384,100", CC=80) == [
        "1 kernel matmul input B data pointer is NULL", "1 kernel matmul input C is no memory of a GPU",
        "1 kernel matmul size M is not in the range from 0 to 2147483647",
        "1 kernel matmul input B byte_offset violates packed ABI constraint: its data must be aligned to 16 bytes"]
    assert called(bundle, FINE, CC=80, LAUNCH=719)[-1] == "3 kernel matmul: launch of matmul_kernel failed (CUresult 719)"
    assert called(bundle, FINE, CC=75) == [
        "3 kernel matmul: the library has no code for this device, only for sm_90a, sm_80, compute_80"]
    assert called(bundle, FINE, CC=80, INIT=100) == ["3 kernel matmul: the CUDA driver cannot be used (CUresult 100)"]


@needs_compiler
def test_the_handler_for_xla_launches_on_the_stream_of_the_call(bundle):
    library, here = str(bundle / "libmatmul.so"), str(Path(__file__).parent)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(bundle), "CC": "80"}
    run = lambda **more: subprocess.run([sys.executable, "-c", XLA, library, here], capture_output=True, text=True,  # noqa: E731
                                        env={**environ, "PYTHONPATH": str(Path(tilelang.__file__).parents[1]), **more})
    done = run()
    assert done.stdout.splitlines() == ["load cubin", "function matmul_kernel", "launch 4 2 1 by 128 on stream 44 in 7070",
                                        "None []"], done.stderr
    assert run(LAUNCH="700").stdout.splitlines()[-1] == (
        "77 [(13, 'kernel matmul: launch of matmul_kernel failed (CUresult 700)')]")


@needs_compiler
def test_without_a_driver_a_call_fails_with_a_code(bundle):
    if find_spec("torch") and __import__("torch").cuda.is_available():
        pytest.skip("this machine has a driver")
    (bundle / "alone").mkdir(exist_ok=True)
    shutil.copy(bundle / "libmatmul.so", bundle / "alone")
    assert called(bundle / "alone", FINE) == ["3 kernel matmul: there is no CUDA driver (libcuda.so.1)"]


@needs_compiler
def test_the_launch_of_each_architecture_is_described(bundle):
    import json

    facts = json.loads((bundle / "matmul.json").read_text())
    assert facts["targets"] == ["sm_90a", "sm_80", "compute_80"]
    first, second = (x["kernels"][0] for x in facts["launches"][:2])
    assert first["name"] == "matmul_kernel" and first["block"] == [256, 1, 1] and second["block"] == [128, 1, 1]
    assert first["grid"] == second["grid"] == [4, "((M + 63) // 64)"] and first["registers"] > 0
    assert first["dynamic_shared_bytes"] > 32768 and second["dynamic_shared_bytes"] == 32768
    rows = {p["name"]: p for p in facts["parameters"]}
    assert list(rows) == ["A", "B", "C", "M", "stream"] and rows["A"]["alignment"] == 16 and rows["C"]["output"]


def built_sample(folder):
    """The sample beside a library, as a program; no header and no library of CUDA is at hand."""
    subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", "main.c", "matmul.o", "-ldl", "-o", "sample"], cwd=folder, check=True)
    return folder / "sample"


@needs_compiler
def test_the_sample_needed_a_header_of_cuda_that_the_library_does_not(bundle):
    run = lambda **more: subprocess.run([built_sample(bundle)], capture_output=True, text=True,  # noqa: E731
                                        env={**os.environ, "LD_LIBRARY_PATH": str(bundle), "CC": "80", **more})
    done = run()
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "C[0] = 0", done.stderr
    assert done.stdout.count("copy ") == 4 and "launch 4 16 1 by 128 on stream 0" in done.stdout
    assert run(LD_LIBRARY_PATH="").returncode in (0, 1)  # a driver, or a message
    assert run(INIT="100").stderr == "CUDA: CUresult 100\n"


@needs_compiler
def test_cmake_builds_the_sample_without_a_toolkit(bundle):
    text = (bundle / "CMakeLists.txt").read_text()
    assert "CUDAToolkit" not in text and "cudart" not in text and "target_link_libraries(matmul_sample matmul)" in text


def test_ptx_needs_an_architecture_whose_ptx_runs_elsewhere(tmp_path):
    with pytest.raises(NotImplementedError, match="PTX of these architectures runs on no other device"):
        exported(tmp_path, "sm_90a", ptx=True)


def library_for_a_gpu(folder):
    """The library; where there is no compiler, that in EXPORTED_MATMUL, which `python test_export_c_cuda.py FOLDER` made."""
    if os.environ.get("EXPORTED_MATMUL"):
        return Path(os.environ["EXPORTED_MATMUL"]).resolve() / "libmatmul.so"
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler, or a library in EXPORTED_MATMUL")
    return exported(folder, ["sm_80", "sm_90a"], ptx=True)


@pytest.mark.gpu
def test_an_exported_kernel_on_a_gpu(tmp_path):
    """The C function through ctypes, and as a C program where there is a compiler and a toolkit."""
    torch = pytest.importorskip("torch")
    device = torch.cuda.current_device()
    path = library_for_a_gpu(tmp_path)
    library = ctypes.CDLL(str(path))
    library.matmul_error.restype = ctypes.c_char_p

    def call(a, b, c, m, stream=0):
        at = [ctypes.c_void_p(x if isinstance(x, int) else x.data_ptr()) for x in (a, b, c)]
        return library.matmul(*at, ctypes.c_int64(m), ctypes.c_void_p(stream))

    b = torch.randn(256, 256, device="cuda").half()
    for m in (1, 63, 64, 100, 1000, 4097):
        a, c = torch.randn(m, 256, device="cuda").half(), torch.full((m, 256), float("nan"), device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        assert call(a, b, c, m, stream.cuda_stream) == 0, library.matmul_error()
        stream.synchronize()
        torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-2)
    assert call(a, b, c, 0) == 0
    assert call(a, 0, c, 100) == 1 and library.matmul_error() == b"kernel matmul input B data pointer is NULL"
    assert call(a.data_ptr() + 2, b, c, 100) == 1 and b"aligned to 16 bytes" in library.matmul_error()
    host = torch.empty(100, 256)
    assert call(a, b, host, 100) == 1 and library.matmul_error() == b"kernel matmul input C is no memory of a GPU"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert call(a, b, c, 4097, torch.cuda.current_stream().cuda_stream) == 0
    c.zero_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-2)
    assert torch.cuda.current_device() == device
    if shutil.which("cc"):
        done = subprocess.run([built_sample(path.parent)], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "C[0] = 0\n"), done.stderr


if __name__ == "__main__":
    print(exported(sys.argv[1], ["sm_80", "sm_90a"], ptx=True))
