"""Sizes, layouts and guards of tiles: zero and run-time extents, swizzles, safe values, errors (language.md 5 to 9, 18)."""

import numpy as np
import pytest
from user_harness import agree, drawn, mark, refused

import tilelang
import tilelang.language as T


RNG = np.random.default_rng(11)
data = drawn(RNG)
I32, F32, F16 = np.int32, np.float32, np.float16


@pytest.mark.spec("T.annotate_safe_value")
@pytest.mark.spec("L9:guards", "L18:annotate_safe_value")
def test_safe_value_for_reads_outside():
    @T.prim_func
    def f(A: T.Tensor((10,), "float32"), O: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            T.annotate_safe_value({A: -3.0})
            S = T.alloc_shared((16,), "float32")
            T.copy(A[0:16], S)
            for i in T.Parallel(16):
                O[i] = S[i] + A[i + 2]

    a = data(10)
    p = np.full(18, -3, F32)
    p[:10] = a
    agree(f, [a, mark(16, F32)], {1: p[:16] + p[2:]})


@pytest.mark.spec("T.use_swizzle")
@pytest.mark.spec("L18:use_swizzle")
@pytest.mark.parametrize("order", ["row", "column"])
def test_swizzle_never_changes_results(order):
    @T.prim_func
    def f(O: T.Tensor((7, 5), "int32")):
        with T.Kernel(5, 7, threads=32) as (bx, by):
            T.use_swizzle(3, order=order)
            for _i in T.Parallel(1):
                O[by, bx] = O[by, bx] + by * 10 + bx

    i, j = np.meshgrid(range(7), range(5), indexing="ij")
    agree(f, [np.zeros((7, 5), I32)], {0: i * 10 + j})


@pytest.mark.spec("L18:annotate_layout")
def test_annotated_shared_layouts():
    n = 32

    @T.prim_func
    def f(A: T.Tensor((n, n), "float16"), O: T.Tensor((n, n), "float16")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((n, n), "float16")
            Z = T.alloc_shared((n, n), "float16")
            T.annotate_layout({S: T.Layout((n, n), lambda i, j: (j, i)), Z: lambda i, j: (i, j ^ (i % 8))})
            T.copy(A, S)
            for i, j in T.Parallel(n, n):
                Z[j, i] = S[i, j]
            T.copy(Z, O)

    a = data((n, n), "float16")
    agree(f, [a, mark((n, n), F16)], {1: a.T})


@pytest.mark.spec("L5:symbolic-shapes", "L7:Kernel")
@pytest.mark.parametrize("n", [0, 1, 31, 100])
def test_dynamic_sizes_with_zero(n):
    m = T.dynamic("m")

    @T.prim_func
    def f(A: T.Tensor((m, 5), "float32"), O: T.Tensor((m,), "float32"), Z: T.Tensor((2 * m + 1,), "float32")):
        with T.Kernel(T.ceildiv(m, 8), threads=32) as b:
            F = T.alloc_fragment((8, 5), "float32")
            s = T.alloc_fragment((8,), "float32")
            T.copy(A[b * 8, 0], F)
            T.reduce_sum(F, s, dim=1)
            T.copy(s, O[b * 8])
        with T.Kernel(1, threads=32):
            for i in T.serial(m):
                Z[i] = A[i, 4]
            for i in T.Parallel(m + 1):
                Z[m + i] = A[i, 0]

    a = data((n, 5))
    z = np.concatenate([a[:, 4], a[:, 0], [0]]).astype(F32)
    agree(f, [a, mark(n, F32), mark(2 * n + 1, F32)], {1: a.sum(1), 2: z}, tol=1e-5)


@pytest.mark.spec("T.dynamic")
@pytest.mark.spec("L9:guards")
def test_inner_zero_dimension_is_guarded():
    k = T.dynamic("k")

    @T.prim_func
    def f(A: T.Tensor((4, k), "float32"), O: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                O[i] = A[i, 0] + 1

    agree(f, [np.zeros((4, 0), F32), mark(4, F32)], {1: np.ones(4)})


@pytest.mark.spec("T.ceildiv")
@pytest.mark.spec("L7:Kernel")
def test_static_size_zero():
    @T.prim_func
    def f(A: T.Tensor((0,), "float32"), O: T.Tensor((3,), "float32")):
        with T.Kernel(T.ceildiv(0, 4), threads=32) as b:
            for i in T.Parallel(4):
                O[b * 4 + i] = A[b * 4 + i]

    agree(f, [np.zeros(0, F32), mark(3, F32)], {1: mark(3, F32)})


@pytest.mark.spec("L6:alloc_shared")
def test_run_time_sized_shared():
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((n,), "int32")
            for i in T.Parallel(n):
                S[i] = A[i]
            for i in T.Parallel(n):
                O[i] = S[n - 1 - i]

    for size in (1, 45):
        a = data(size, "int32")
        agree(f, [a, mark(size, I32)], {1: a[::-1]})


@pytest.mark.spec("L10:copy")
@pytest.mark.parametrize("build, text", [
    (lambda A, S, F: T.reduce_sum(A, F), "scope"),
    (lambda A, S, F: T.reduce_sum(S, F, dim=3), None),
    (lambda A, S, F: T.cumsum(S, dim=2), "out of bounds"),
    (lambda A, S, F: T.copy(A[0, 0:8], S), None),
    (lambda A, S, F: T.copy(A[0, 0], S[0, 0], 3), None),
    (lambda A, S, F: T.reduce_bitand(S, F, dim=1), None),
    (lambda A, S, F: T.gemm(S, S, F), None),
    (lambda A, S, F: T.view(S, (3,)), "shape check failed"),
    (lambda A, S, F: T.atomic_add(A[0, 0], 1.0, memory_order="sloppy"), None),
], ids=range(9))
def test_wrong_arguments_are_refused(build, text):
    @T.macro
    def use(A, S, F):
        build(A, S, F)

    def program():
        @T.prim_func
        def f(A: T.Tensor((16, 8), "float32")):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((16, 8), "float32")
                F = T.alloc_fragment((16,), "float32")
                T.clear(S)
                T.clear(F)
                use(A, S, F)
        return f

    refused(program, text)


def test_long_parallel_loops_are_unrolled_in_part():
    """2048 points a thread: unrolled whole, ptxas took half a minute; loops that pick registers are unrolled whole."""

    @T.prim_func
    def f(X: T.Tensor((2048, 32), "float32"), O: T.Tensor((2, 32), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_fragment((32,), "float32")
            g = T.alloc_fragment((128, 32), "float32")
            T.clear(s)
            for i, j in T.Parallel(2048, 32):
                s[j] += X[i, j]
            T.copy(s, O[0, :])
            for i, j in T.Parallel(128, 32):
                g[i, j] = X[i, j]
            T.reduce_max(g, s, dim=0)
            T.copy(s, O[1, :])

    source = tilelang.lower(f, target={"kind": "cuda", "arch": "sm_80"}).kernel_source
    pragma = {after.split(";")[1].split("<")[1].strip(): before.strip() for before, after in
              zip(source.splitlines(), source.splitlines()[1:]) if "#pragma unroll" in before and "<" in after}
    assert pragma["2048"] == "#pragma unroll 8", pragma
    assert pragma.get("128", "#pragma unroll") == "#pragma unroll", pragma
    x = RNG.standard_normal((2048, 32)).astype(np.float32)
    agree(f, [x, mark((2, 32), np.float32)], {1: np.stack([x.sum(0), x[:128].max(0)])}, tol=1e-3)
