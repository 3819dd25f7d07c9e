"""Exported CPU kernels: C programs call them, and errors come back as codes with messages."""

import ctypes
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import tilelang
import tilelang.language as T

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None or shutil.which("g++") is None, reason="needs a C compiler")

CALLER = r"""
#include <stdio.h>
#include <stdlib.h>
#include "gemm.h"

static float at(int i) { return (float)(i % 13) - 6; }

int main(void) {
    int64_t m = 37, k = 70, n = 45;
    float *a = malloc(m * k * 4), *b = malloc(k * n * 4), *c = malloc(m * n * 4);
    for (int i = 0; i < m * k; ++i) a[i] = at(i);
    for (int i = 0; i < k * n; ++i) b[i] = at(3 * i);
    if (gemm(a, b, c, 0.5f, m, k, n) != GEMM_OK) { puts(gemm_error()); return 1; }
    double sum = 0;
    for (int i = 0; i < m * n; ++i) sum += (i % 5) * (double)c[i];
    printf("%.1f %.1f\n", c[m * n - 1], sum);
    if (gemm(a, NULL, c, 1, m, k, n) == GEMM_ARGUMENT) puts(gemm_error());
    if (gemm(a, b, c, 1, -1, k, n) == GEMM_ARGUMENT) puts(gemm_error());
    if (gemm((float *)((char *)a + 2), b, c, 1, m, k, n) == GEMM_ARGUMENT) puts(gemm_error());
    if (gemm(a, b, c, 1, m, 3000000000, n) == GEMM_ARGUMENT) puts(gemm_error());
    printf("%d\n", gemm(NULL, NULL, NULL, 1, 0, 0, 0));
    return 0;
}
"""


def gemm():
    m, k, n = T.dynamic("m, k, n")

    @T.prim_func
    def gemm(A: T.Tensor((m, k), "float32"), B: T.Tensor((k, n), "float32"), C: T.Tensor((m, n), "float32"),
             scale: T.float32):
        with T.Kernel(T.ceildiv(n, 32), T.ceildiv(m, 32), threads=64) as (bx, by):
            F = T.alloc_fragment((32, 32), "float32")
            S, R = T.alloc_shared((32, 16), "float32"), T.alloc_shared((16, 32), "float32")
            T.clear(F)
            for s in T.serial(T.ceildiv(k, 16)):
                T.copy(A[by * 32, s * 16], S)
                T.copy(B[s * 16, bx * 32], R)
                T.gemm(S, R, F)
            for i, j in T.Parallel(32, 32):
                C[by * 32 + i, bx * 32 + j] = F[i, j] * scale

    return gemm


def loaded(path, name):
    library = ctypes.CDLL(str(path))
    getattr(library, f"{name}_error").restype = ctypes.c_char_p
    return library


def address(a):
    return ctypes.c_void_p(None if a is None else a.ctypes.data)


@needs_compiler
def test_a_c_program_calls_a_kernel_for_any_sizes(tmp_path):
    kernel = tilelang.compile(gemm(), out_idx=[2], target="cpu")
    library = kernel.export(tmp_path / "deep")
    (tmp_path / "deep" / "caller.c").write_text(CALLER)
    subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", "-std=c99", "caller.c", "-L.", "-lgemm", "-Wl,-rpath,$ORIGIN", "-o",
                    "caller"], cwd=tmp_path / "deep", check=True)
    out = subprocess.run([tmp_path / "deep" / "caller"], capture_output=True, text=True, check=True).stdout.splitlines()
    at = lambda n, step=1: (np.arange(n) * step % 13 - 6).astype(np.float32)  # noqa: E731
    c = at(37 * 70).reshape(37, 70) @ at(70 * 45, 3).reshape(70, 45) * 0.5
    assert out[0] == f"{c.flat[-1]:.1f} {(np.arange(37 * 45) % 5 * c.ravel().astype(float)).sum():.1f}"
    assert out[1] == "kernel gemm input B data pointer is NULL"
    assert out[2] == "kernel gemm size m is not in the range from 0 to 2147483647"
    assert "its data must be aligned to 4 bytes" in out[3]
    assert out[4] == "kernel gemm size k is not in the range from 0 to 2147483647"
    assert out[5] == "0"  # nothing to do
    assert library == tmp_path / "deep" / "libgemm.so"
    needed = subprocess.run(["ldd", library], capture_output=True, text=True).stdout
    assert "python" not in needed and "tvm" not in needed and "torch" not in needed


@needs_compiler
def test_the_sample_and_the_header_compile_as_they_stand(tmp_path):
    tilelang.compile(gemm(), out_idx=[2], target="cpu").export(tmp_path, name="product")
    strict = ("-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *strict, "main.c", "product.o", "-lm", "-lpthread", "-o", "sample"], cwd=tmp_path, check=True)
    said = subprocess.run([tmp_path / "sample"], capture_output=True, text=True, check=True).stdout
    a = (np.arange(1024 * 1024) % 7).astype(np.float32).reshape(1024, 1024)
    assert said == f"C[0] = {a[0] @ a[:, 0]:g}\n"
    (tmp_path / "use.cpp").write_text('#include "product.h"\nint (*p)(const float *, const float *, float *, float, int64_t, '
                                      'int64_t, int64_t) = product;\nint main() { return p == nullptr; }\n')
    subprocess.run(["g++", *strict, "use.cpp", "product.o", "-lm", "-lpthread", "-o", "use"], cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "use"], check=True)


@needs_compiler
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
@pytest.mark.parametrize("shared", ("OFF", "ON"))
def test_cmake_builds_the_sample(tmp_path, shared):
    tilelang.compile(gemm(), out_idx=[2], target="cpu").export(tmp_path)
    for command in (["-B", "build", f"-DBUILD_SHARED_LIBS={shared}"], ["--build", "build"]):
        subprocess.run(["cmake", *command], cwd=tmp_path, check=True, capture_output=True)
    assert subprocess.run([tmp_path / "build" / "gemm_sample"], capture_output=True, text=True).stdout.startswith("C[0] = ")


def every_kind():
    n, s = T.dynamic("n, s")

    @T.prim_func
    def kinds(A: T.StridedTensor((n, 8), (s, 1), "float32"), Unused: T.Tensor((n,), "float32"),
              H: T.Tensor((2 * n,), "float16"), M: T.Tensor((n,), "bool"), a: T.int8, b: T.uint64, c: T.bool, d: T.float64,
              e: T.float16, B: T.Tensor((n, 8), "float64")):
        with T.Kernel(n, threads=32) as x:
            for j in T.Parallel(8):
                top = T.cast(b >> T.uint64(60), "float64") + T.cast(H[2 * x + 1], "float64")
                B[x, j] = T.if_then_else(M[x] and c, T.cast(A[x, j], "float64") * d + T.cast(e, "float64"),
                                         T.cast(a, "float64") + top)

    return kinds


@needs_compiler
def test_every_kind_of_parameter_is_passed(tmp_path):
    kernel = tilelang.compile(every_kind(), out_idx=[9], target="cpu")
    kinds = loaded(kernel.export(tmp_path), "kinds").kinds
    wide = np.arange(7 * 11, dtype=np.float32).reshape(7, 11)
    h, m = np.arange(14).astype(np.float16), np.arange(7) % 2 == 0
    b = np.empty((7, 8))
    scalars = (ctypes.c_int8(-5), ctypes.c_uint64(2**64 - 1), ctypes.c_bool(True), ctypes.c_double(0.25), ctypes.c_float(1.5))
    rest = (address(b), ctypes.c_int64(7), ctypes.c_int64(11))
    assert kinds(address(wide), address(None), address(h), address(m), *scalars, *rest) == 0
    assert np.array_equal(b, kernel(wide[:, :8], None, h, m, -5, 2**64 - 1, True, 0.25, 1.5))
    want = np.where(m[:, None], wide[:, :8] * 0.25 + 1.5, -5 + 15 + h[1::2, None])
    assert np.array_equal(b, want)
    text = (tmp_path / "kinds.h").read_text()
    assert ("int kinds(const float *A, const float *Unused, const void *H, const bool *M, int8_t a, uint64_t b, bool c, "
            "double d, float e, double *B, int64_t n, int64_t s);") in text
    assert "H: float16, shape (2 * n,), row-major" in text and "Unused: float32, shape (n,), row-major, may be NULL" in text


@needs_compiler
def test_the_launch_is_described(tmp_path):
    tilelang.compile(every_kind(), out_idx=[9], target="cpu").export(tmp_path)
    facts = json.loads((tmp_path / "kinds.json").read_text())
    rows = {p["name"]: p for p in facts["parameters"]}
    assert list(rows) == ["A", "Unused", "H", "M", "a", "b", "c", "d", "e", "B", "n", "s"]
    assert rows["A"] == {"name": "A", "kind": "tensor", "c_type": "const float *", "dtype": "float32", "rank": 2,
                         "shape": ["n", 8], "strides": ["s", 1], "alignment": 4, "written": False, "output": False,
                         "optional": False}
    assert rows["B"]["output"] and rows["B"]["written"] and rows["Unused"]["optional"] and rows["H"]["shape"] == ["2 * n"]
    assert facts["launches"][0]["kernels"] == [{"name": "kinds", "grid": ["n"], "block": [32, 1, 1]}]
    assert facts["outputs"] == ["B"] and facts["symbols"] == ["kinds", "kinds_error", "kinds_xla"] and facts["target"] == "cpu"
    assert all((tmp_path / f).exists() for f in facts["files"].values())


@needs_compiler
def test_failures_have_a_code_and_a_message_of_their_thread(tmp_path):
    n = T.dynamic("n")

    @T.prim_func
    def careful(A: T.Tensor((n,), "int32"), B: T.Tensor((n,), "int32"), least: T.int32):
        T.assume(n % 4 == 0)
        with T.Kernel(1, threads=32):
            for i in T.serial(n):
                assert A[i] >= least, "too small"
                B[i] = A[i]

    library = loaded(tilelang.compile(careful, target="cpu").export(tmp_path), "careful")
    a, b = np.arange(8, dtype=np.int32), np.zeros(8, np.int32)
    call = lambda n, least: library.careful(address(a), address(b), ctypes.c_int32(least), ctypes.c_int64(n))  # noqa: E731
    assert call(8, 0) == 0 and np.array_equal(a, b)
    assert call(8, 1) == 2 and library.careful_error().endswith(b": too small")
    assert call(6, 0) == 1 and library.careful_error().startswith(b"careful: Assume: (n % 4) == 0 does not hold")
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as other:
        first, code, then = other.submit(lambda: (library.careful_error(), call(8, 5), library.careful_error())).result()
    assert first == b"" and code == 2 and then.endswith(b": too small")
    assert library.careful_error().startswith(b"careful: Assume")


@needs_compiler
@pytest.mark.parametrize("dtype, most", (("int32", 2**31 - 1), ("int64", 2**47)))
def test_sizes_whose_dimensions_would_wrap_are_rejected(tmp_path, dtype, most):
    """4 * 2**62 is 0 in 64 bits: such a call did nothing and returned 0."""
    m = T.dynamic("m", dtype)

    @T.prim_func
    def ones(A: T.Tensor((4 * m,), "int32")):
        with T.Kernel(m, threads=32) as b:
            for i in T.Parallel(4):
                A[b * 4 + i] = 1

    library = loaded(tilelang.compile(ones, target="cpu").export(tmp_path), "ones")
    a = np.zeros(12, np.int32)
    assert library.ones(address(a), ctypes.c_int64(3)) == 0 and a.all()
    for size in (2**62, most + 1, -(2**62)):
        assert library.ones(address(a), ctypes.c_int64(size)) == 1
        assert library.ones_error().endswith(f"to {most}".encode())


@needs_compiler
def test_kernels_of_one_name_are_linked_into_one_program(tmp_path):
    """Static libraries: nothing but the C functions may be seen of an object."""
    @tilelang.jit(target="cpu")
    def times(factor):
        @T.prim_func
        def main(A: T.Tensor((1000,), "float32"), B: T.Tensor((1000,), "float32")):
            with T.Kernel(10, threads=32) as b:
                for i in T.Parallel(100):
                    B[b * 100 + i] = A[b * 100 + i] * factor

        return main

    for name, factor in (("twice", 2.0), ("thrice", 3.0)):
        times(factor).export(tmp_path, name=name)
    (tmp_path / "both.c").write_text('#include <stdio.h>\n#include "twice.h"\n#include "thrice.h"\nint main(void) {\n'
                                     "  float a[1000], b[1000];\n  for (int i = 0; i < 1000; ++i) a[i] = i;\n"
                                     "  int bad = twice(a, b) || thrice(b, a);\n"
                                     '  printf("%d %g\\n", bad, a[999]);\n  return 0;\n}\n')
    subprocess.run(["cc", "both.c", "twice.o", "thrice.o", "-lm", "-lpthread", "-o", "both"], cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "both"], capture_output=True, text=True).stdout == "0 5994\n"


def test_what_runs_at_load_stands_where_every_linker_reads_it(tmp_path, monkeypatch):
    """lld does not read .ctors: libraries that it linked had one thread, and those for CUDA found no driver."""
    if not sys.platform.startswith("linux"):
        pytest.skip("sections of ELF")
    objects = []
    for module in ("tilelang.runtime.shared_library", "tilelang.jit.exporting"):
        monkeypatch.setattr(f"{module}.link", lambda path, name, files, *rest: objects.append(b"".join(files.values())))
        monkeypatch.setattr(f"{module}.find_compiler", lambda *_: ["cc"])
    kernel = tilelang.compile(gemm(), out_idx=[2], target="cpu")
    kernel.export(tmp_path)
    kernel.export_library(tmp_path / "gemm.so")
    assert len(objects) == 2 and all(b".init_array" in x and b".ctors" not in x for x in objects)


def test_without_a_compiler_the_object_is_written_and_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NotImplementedError, match=r"gemm.o is written: link it where there is one, by the CMakeLists.txt"):
        tilelang.compile(gemm(), out_idx=[2], target="cpu").export(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"gemm.o", "gemm.h", "gemm.json", "main.c", "CMakeLists.txt"}


def test_exports_to_c_that_cannot_be(tmp_path):
    @T.prim_func
    def main(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            A[0] = 1.0

    kernel = tilelang.compile(main, target="cpu")
    with pytest.raises(NotImplementedError, match="a C function cannot have the name 'main'"):
        kernel.export(tmp_path)
    with pytest.raises(NotImplementedError, match="cannot be the name of a function"):
        kernel.export(tmp_path, name="my-kernel")
    with pytest.raises(NotImplementedError, match="architectures of GPUs are given"):
        kernel.export(tmp_path, name="one", arch="sm_80")
    with pytest.raises(NotImplementedError, match="has no compiled code"):
        tilelang.compile(main, target="cpu", execution_backend="tile").export(tmp_path, name="one")
    assert not os.listdir(tmp_path)
