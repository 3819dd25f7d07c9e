"""Programs written in the language, compiled for the CPU: what the IR tests cannot say as the user writes it."""

import os
import subprocess
import sys

import numpy as np
import pytest
from completed import completed
from cpu_harness import Compiled, run_cpu

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import replace

rng = np.random.default_rng(4)


@pytest.mark.spec("L7:several")
def test_several_kernels_under_host_control_flow():
    n = T.dynamic("n")

    @T.prim_func
    def two(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32"), k: T.int32):
        with T.Kernel(T.ceildiv(n, 64), threads=64) as bx:
            for i in T.Parallel(64):
                B[bx * 64 + i] = A[bx * 64 + i] * 2
        if k > 1:
            with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
                for i in T.Parallel(32):
                    B[bx * 32 + i] = B[bx * 32 + i] + k

    a = rng.standard_normal(100).astype(np.float32)
    for k in (0, 5):
        b = np.zeros_like(a)
        Compiled(two)(a, b, k)
        np.testing.assert_array_equal(b, a * 2 + (np.float32(k) if k > 1 else np.float32(0)))


@pytest.mark.spec("L19:views")
def test_views_share_storage():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((4, 16), "float32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((64,), "int32")
            V = T.view(S, (4, 16), "float32")
            T.copy(A, S)
            for i, j in T.Parallel(4, 16):
                B[i, j] = V[i, j]

    a = rng.integers(0, 2**31 - 2**24, 64).astype(np.int32)
    assert np.array_equal(run_cpu(main, [a, None])["B"].view(np.int32).ravel(), a)


@pytest.mark.spec("L5:slice-value")
def test_vector_elements_and_slices():
    @T.prim_func
    def main(A: T.Tensor((4, 8), "float32"), B: T.Tensor((4, 8), "float32")):
        with T.Kernel(4, threads=1) as b:
            L = T.alloc_local((8,), "float32")
            for v in T.vectorized(8):
                L[v] = A[b, v]
            B[b, 0:4] = L[4:8] * T.float32(3)
            B[b, 4:8] = L[0:4] + L[4:8]

    a = rng.standard_normal((4, 8)).astype(np.float32)
    got = run_cpu(main, [a, None])["B"]
    np.testing.assert_array_equal(got, np.concatenate([a[:, 4:] * np.float32(3), a[:, :4] + a[:, 4:]], 1))


def test_private_temporary_and_while_inside_parallel():
    @T.prim_func
    def collatz(A: T.Tensor((100,), "int32"), B: T.Tensor((100,), "int32")):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(100):
                x = T.alloc_var("int32", init=A[i])
                steps = T.alloc_var("int32")
                while x > 1:
                    if x % 2 == 0:
                        x = x // 2
                    else:
                        x = 3 * x + 1
                    steps = steps + 1
                B[i] = steps

    def steps(x):
        n = 0
        while x > 1:
            x, n = x // 2 if x % 2 == 0 else 3 * x + 1, n + 1
        return n

    a = np.arange(100, dtype=np.int32)
    assert np.array_equal(run_cpu(collatz, [a, None])["B"], [steps(int(x)) for x in a])


@pytest.mark.spec("L6:alloc_shared")
def test_shared_memory_of_run_time_size():
    n = T.dynamic("n")

    @T.prim_func
    def reverse(A: T.Tensor((3, n), "float32"), B: T.Tensor((3, n), "float32")):
        with T.Kernel(3, threads=64) as b:
            S = T.alloc_shared((n,), "float32")
            for i in T.Parallel(n):
                S[i] = A[b, i]
            for i in T.Parallel(n):
                B[b, i] = S[n - 1 - i]

    for size in (1, 70, 3000):
        a = rng.standard_normal((3, size)).astype(np.float32)
        assert np.array_equal(run_cpu(reverse, [a, None])["B"], a[:, ::-1])


@pytest.mark.spec("L5:StridedTensor")
def test_strided_tensors():
    m, s = T.dynamic("m"), T.dynamic("s")

    @T.prim_func
    def double(X: T.StridedTensor((m, 7), (s, 1), "float32"), Y: T.Tensor((m, 7), "float32")):
        with T.Kernel(T.ceildiv(m, 4), threads=32) as b:
            S = T.alloc_shared((4, 8), "float32")
            T.copy(X[b * 4, 0], S)
            for i, j in T.Parallel(4, 7):
                Y[b * 4 + i, j] = S[i, j] * 2

    x = rng.standard_normal((10, 12)).astype(np.float32)[:, :7]
    y = np.zeros((10, 7), np.float32)
    Compiled(double)(x, y)
    assert np.array_equal(y, x * 2)


def test_tensors_that_may_alias_are_not_promised_apart():
    def program(annotate):
        @T.prim_func
        def shift(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=1):
                if annotate:
                    T.annotate_restrict_buffers(A, B)
                for i in T.serial(63):
                    B[i + 1] = A[i] + T.float32(1)

        return shift

    x = np.zeros(64, np.float32)
    Compiled(program(True))(x, x)
    assert np.array_equal(x, np.arange(64))
    assert "noalias %A_" not in Compiled(program(True)).program.llvm_ir
    assert "noalias %A_" in Compiled(program(False)).program.llvm_ir


@pytest.mark.spec("L6:alloc_global")
def test_global_workspace():
    @T.prim_func
    def main(A: T.Tensor((100,), "int32"), B: T.Tensor((100,), "int32")):
        W = T.alloc_global((100,), "int32")
        with T.Kernel(2, threads=64) as b:
            for i in T.Parallel(64):
                W[b * 64 + i] = A[b * 64 + i] + 1
        with T.Kernel(2, threads=64) as b:
            for i in T.Parallel(64):
                B[b * 64 + i] = W[99 - (b * 64 + i)]

    a = rng.integers(0, 99, 100).astype(np.int32)
    assert np.array_equal(run_cpu(main, [a, None])["B"], a[::-1] + 1)


PRINTS = """
import sys; sys.path.insert(0, {here!r})
import numpy as np
import tilelang.language as T
from cpu_harness import Compiled

@T.prim_func
def main(A: T.Tensor((2,), "float32")):
    with T.Kernel(1, threads=2) as b:
        F = T.alloc_fragment((2,), "float32")
        T.copy(A, F)
        T.print(F, msg="F")
        T.print(b + 5, msg="x")
Compiled(main)(np.array([1.5, -2], np.float32))
"""


@pytest.mark.spec("L20:print")
def test_printing_as_the_language_says():
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.path.join(os.path.dirname(os.path.dirname(here)))
    file = os.path.join(os.environ["TILELANG_CACHE_DIR"], "prints.py")
    os.makedirs(os.path.dirname(file), exist_ok=True)
    with open(file, "w") as f:
        f.write(PRINTS.format(here=here))
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join((path, os.path.dirname(here)))})
    place = "BlockIdx=(0, 0, 0), ThreadIdx=({}, 0, 0)"
    want = [f"msg='F' {place.format(0)}: buffer=F, index={k}, dtype=float value={v}" for k, v in
            enumerate(("1.500000", "-2.000000"))]
    want += [f"msg='x' {place.format(t)}: dtype=int value=5" for t in (0, 1)]
    assert done.stdout.splitlines() == want, done.stderr
    completed("cpu")  # in the other process


@pytest.mark.spec("L19:extern")
def test_foreign_functions_are_refused_at_their_line():
    @T.prim_func
    def main(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=1):
            A[0] = T.call_extern("float32", "mystery", A[1])

    with pytest.raises(TileLangError, match="call_extern") as e:
        Compiled(main)
    assert "mystery" in str(e.value)


@pytest.mark.spec("L5:ptr")
def test_a_table_of_addresses():
    @T.prim_func
    def gather(P: T.Tensor((3,), T.ptr), B: T.Tensor((3, 40), "float32")):
        with T.Kernel(3, threads=32) as b:
            row = T.make_tensor(P[b], (40,), "float32")
            for i in T.Parallel(64):
                B[b, i] = row[i] * 2

    rows = rng.standard_normal((3, 40)).astype(np.float32)
    table = np.array([r.ctypes.data for r in rows], np.int64)
    assert np.array_equal(run_cpu(gather, [table, None])["B"], rows * 2)


@pytest.mark.parametrize("masked", [False, True])
def test_indices_that_start_again_in_one_loop_at_different_widths(masked):
    """F[i % 4] beside G[(4 * j + i + 1) % 32]: the shorter one's turns are not taken for one run."""
    @T.prim_func
    def main(F: T.Tensor((4,), "float32"), G: T.Tensor((4, 32), "float32"), B: T.Tensor((9, 16), "float32")):
        with T.Kernel(1, threads=32):
            P = T.alloc_fragment((4,), "float32")
            T.copy(F, P)
            for j in T.serial(9):
                for i in T.serial(16):
                    B[j, i] = T.min(G[i % 4, (4 * j + i + 1) % 32], 100) - P[i & 3 if masked else i % 4]

    f, g = (rng.integers(-31, 32, s).astype(np.float32) for s in ((4,), (4, 32)))
    j, i = np.mgrid[0:9, 0:16]
    assert np.array_equal(run_cpu(main, [f, g, None])["B"], g[i % 4, (4 * j + i + 1) % 32] - f[i % 4])


def test_accesses_that_a_condition_guards_are_not_refused():
    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((32,), "float32")
            tx = T.get_thread_binding(0)
            for i in T.Parallel(64):
                if i >= 32:
                    continue
                S[i] = A[i]
            for i in T.Parallel(64):
                B[i] = T.if_then_else(i < 32, S[i], T.float32(-1))
            if tx < 32:
                S[tx] = S[tx] + T.float32(1)
            for i in T.Parallel(64):
                if i < 32 and S[i] > T.float32(0.5):
                    B[i + 32] = S[i]

    a = rng.random(64).astype(np.float32)
    want = np.concatenate([a[:32], a[:32] + np.float32(1)])
    assert np.array_equal(run_cpu(main, [a, None])["B"], want)


@pytest.mark.parametrize("name", ["free", "exp", "printf", "main", "tl_parallel_for", "a-b.c"])
def test_any_function_name_will_do(name):
    @T.prim_func
    def main(A: T.Tensor((8,), "float64"), B: T.Tensor((8,), "float64")):
        with T.Kernel(1, threads=8):
            for i in T.Parallel(8):
                B[i] = T.exp(A[i])

    a = rng.standard_normal(8)
    named = replace(main.func, name=name)
    np.testing.assert_allclose(run_cpu(named, [a, None])["B"], np.exp(a), rtol=1e-15)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("n", [70, 200])
def test_places_of_extremes_in_rows_longer_than_vectors(kind, n):
    @T.prim_func
    def place(X: T.Tensor((3, n), "float32"), Y: T.Tensor((3,), "int32")):
        with T.Kernel(1):
            x, y = T.alloc_fragment((3, n), "float32"), T.alloc_fragment((3,), "int32")
            T.copy(X, x)
            (T.reduce_argmax if kind == "max" else T.reduce_argmin)(x, y, dim=1)
            T.copy(y, Y)

    x = np.random.default_rng(0).integers(-9, 9, (3, n)).astype(np.float32)  # many are equal: the first one counts
    x[1, ::3] = np.nan
    want = (np.nanargmax if kind == "max" else np.nanargmin)(x, 1)
    assert np.array_equal(run_cpu(place, [x, None])["Y"], want)


@pytest.mark.parametrize("columns", [16, 70, 150])
@pytest.mark.parametrize("clear", [True, False])
def test_columns_are_reduced_in_vectors(columns, clear):
    @T.prim_func
    def total(X: T.Tensor((2, 9, columns), "float32"), Y: T.Tensor((2, columns), "float32"),
              Z: T.Tensor((2, columns), "int32")):
        with T.Kernel(1):
            x, y = T.alloc_fragment((2, 9, columns), "float32"), T.alloc_fragment((2, columns), "float32")
            z, w = T.alloc_fragment((2, columns), "int32"), T.alloc_fragment((2, 9, columns), "int32")
            T.copy(X, x)
            T.copy(X, w)
            T.fill(y, 5)
            T.fill(z, -2)
            T.reduce_sum(x, y, dim=1, clear=clear)
            T.reduce_max(w, z, dim=1, clear=clear)
            T.copy(y, Y)
            T.copy(z, Z)

    x = np.random.default_rng(0).integers(-9, 9, (2, 9, columns)).astype(np.float32)
    got = run_cpu(total, [x, None, None])
    assert np.array_equal(got["Y"], x.sum(1) + (0 if clear else 5))
    assert np.array_equal(got["Z"], x.max(1) if clear else np.maximum(x.max(1), -2))
