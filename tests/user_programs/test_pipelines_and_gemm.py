"""Pipelines and GEMMs (language.md 8, 11)."""

import ml_dtypes
import numpy as np
import pytest
from completed import caught
from user_harness import BF, F8, agree, mark, refused

import tilelang.language as T

RNG = np.random.default_rng(5)
I32, F32, F16 = np.int32, np.float32, np.float16


def f16(*shape):
    return (RNG.integers(-8, 9, shape) / 8).astype(F16)


@pytest.mark.spec("L8:Pipelined")
@pytest.mark.parametrize("order, stage", [([0, 1, 2, 3], [0, 0, 1, 1]), ([0, 1, 3, 2], [0, 0, 2, 2]),
                                          ([2, 3, 0, 1], [0, 0, 1, 1]), ([0, 3, 1, 2], [0, 0, 1, 1])])
def test_user_order_and_stage(order, stage):
    n, t = 16, 7

    def build():
        @T.prim_func
        def f(A: T.Tensor((t, n), "int32"), B: T.Tensor((t, n), "int32"), O: T.Tensor((n,), "int32"),
              P: T.Tensor((t, n), "int32")):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((n,), "int32")
                Z = T.alloc_shared((n,), "int32")
                F = T.alloc_fragment((n,), "int32")
                T.clear(F)
                for k in T.Pipelined(t, order=order, stage=stage):
                    T.copy(A[k, 0:n], S)
                    T.copy(B[k, 0:n], Z)
                    for i in T.Parallel(n):
                        F[i] = F[i] * 2 + S[i] * Z[n - 1 - i]
                    for i in T.Parallel(n):
                        P[k, i] = S[i] - Z[i]
                T.copy(F, O)
        return f

    a, b = RNG.integers(-5, 5, (2, t, n)).astype(I32)
    o = np.zeros(n, I32)
    for k in range(t):
        o = o * 2 + a[k] * b[k, ::-1]
    agree(build(), [a, b, mark(n, I32), mark((t, n), I32)], {2: o, 3: a - b})


@pytest.mark.spec("L8:Pipelined")
@pytest.mark.parametrize("order, stage", [([0, 1, 2], [0, 0, 1, 1]), ([0, 0, 1, 2], [0, 0, 1, 1]), ([0, 1, 2, 3], [1, 1, 0, 0]),
                                          ([2, 3, 0, 1], [0, 0, 0, 0])])
def test_bad_order_and_stage_are_refused(order, stage):
    n, t = 16, 7

    def build():
        @T.prim_func
        def f(A: T.Tensor((t, n), "int32"), O: T.Tensor((t, n), "int32"), P: T.Tensor((t, n), "int32")):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((n,), "int32")
                Z = T.alloc_shared((n,), "int32")
                for k in T.Pipelined(t, order=order, stage=stage):
                    T.copy(A[k, 0:n], S)
                    T.copy(A[k, 0:n], Z)
                    T.copy(S, O[k, 0:n])
                    T.copy(Z, P[k, 0:n])
        return f

    refused(build, "pipeline")  # check_pipelines: on every execution


@pytest.mark.parametrize("outer, inner", [(0, 2), (2, 0), (2, 2), (3, 3)])
def test_nested_pipelines(outer, inner):
    n, t, u = 16, 3, 4

    @T.prim_func
    def f(A: T.Tensor((t, n), "int32"), B: T.Tensor((t, u, n), "int32"), O: T.Tensor((t, n), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((n,), "int32")
            Z = T.alloc_shared((n,), "int32")
            F = T.alloc_fragment((n,), "int32")
            for k in T.Pipelined(t, num_stages=outer):
                T.copy(A[k, 0:n], S)
                T.clear(F)
                for q in T.Pipelined(u, num_stages=inner):
                    T.copy(B[k, q, 0:n], Z)
                    for i in T.Parallel(n):
                        F[i] += Z[n - 1 - i] * S[(i + q) % n]
                T.copy(F, O[k, 0:n])

    a, b = RNG.integers(-5, 5, (t, n)).astype(I32), RNG.integers(-5, 5, (t, u, n)).astype(I32)
    o = sum(b[:, q, ::-1] * np.roll(a, -q, 1) for q in range(u))
    agree(f, [a, b, mark((t, n), I32)], {2: o})


@pytest.mark.spec("L8:Pipelined")
@pytest.mark.parametrize("stages", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 9])
def test_pipeline_of_run_time_length_carrying_state(stages, n):
    """The copy of the next iteration reads what an earlier one does not change; a shared accumulator is not versioned."""
    w = 8

    def g_build():
        @T.prim_func
        def g(n: T.int32, A: T.Tensor((16, w), "float32"), idx: T.Tensor((16,), "int32"), O: T.Tensor((w,), "float32")):
            with T.Kernel(1, threads=16):
                S = T.alloc_shared((w,), "float32")
                acc = T.alloc_shared((w,), "float32")
                T.clear(acc)
                for k in T.Pipelined(n, num_stages=stages):
                    row = idx[k]
                    T.copy(A[row, 0:w], S)
                    if k % 3 != 1:
                        for i in T.Parallel(w):
                            acc[i] = acc[i] * 0.5 + S[w - 1 - i]
                T.copy(acc, O)
        return g

    a, idx = RNG.integers(-4, 5, (16, w)).astype(F32), RNG.permutation(16).astype(I32)
    o = np.zeros(w, F32)
    for k in range(n):
        if k % 3 != 1:
            o = o * F32(0.5) + a[idx[k], ::-1]
    agree(g_build(), [n, a, idx, mark(w, F32)], {3: o})


@pytest.mark.spec("T.Pipelined")
@pytest.mark.spec("M:stages-read-overwrite")
@pytest.mark.parametrize("stages", [2, 3])
def test_pipeline_whose_copy_reads_what_the_loop_writes(stages):
    """O[k] is written in iteration k and read in iteration k + 1: prefetching it would be wrong."""
    w, t = 8, 6

    @T.prim_func
    def f(A: T.Tensor((t + 1, w), "int32")):
        with T.Kernel(1, threads=16):
            S = T.alloc_shared((w,), "int32")
            for k in T.Pipelined(t, num_stages=stages):
                T.copy(A[k, 0:w], S)
                for i in T.Parallel(w):
                    A[k + 1, i] = S[w - 1 - i] + A[k + 1, i]

    a = RNG.integers(-5, 5, (t + 1, w)).astype(I32)
    o = a.copy()
    for k in range(t):
        o[k + 1] = o[k, ::-1] + o[k + 1]
    agree(f, [a], {0: o})


@pytest.mark.parametrize("stages", [2, 3])
def test_pipeline_with_break(stages):
    w, t = 8, 7

    def build():
        @T.prim_func
        def f(A: T.Tensor((t, w), "int32"), stop: T.int32, O: T.Tensor((w,), "int32")):
            with T.Kernel(1, threads=16):
                S = T.alloc_shared((w,), "int32")
                F = T.alloc_fragment((w,), "int32")
                T.clear(F)
                for k in T.Pipelined(t, num_stages=stages):
                    T.copy(A[k, 0:w], S)
                    if k == stop:
                        break
                    for i in T.Parallel(w):
                        F[i] += S[i]
                T.copy(F, O)
        return f

    a = RNG.integers(-5, 5, (t, w)).astype(I32)
    for stop in (0, 3, 100):
        agree(build(), [a, stop, mark(w, I32)], {2: a[:stop].sum(0)})


def test_pipelined_copies_of_odd_width_and_stored_tile():
    """Rows of 3 halves (6 bytes) cannot be copied asynchronously; the tile is also changed in place."""
    t, m, n = 5, 4, 3

    @T.prim_func
    def f(A: T.Tensor((t, m, n), "float16"), O: T.Tensor((t, m, n), "float16")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((m, n), "float16")
            for k in T.Pipelined(t, num_stages=3):
                T.copy(A[k, 0:m, 0:n], S)
                for i, j in T.Parallel(m, n):
                    S[i, j] = S[i, j] * 2
                T.copy(S, O[t - 1 - k, 0:m, 0:n])

    a = f16(t, m, n)
    agree(f, [a, mark((t, m, n), F16)], {1: a[::-1] * 2})


@pytest.mark.spec("L11:gemm")
@pytest.mark.parametrize("a_scope", ["shared", "fragment"])
@pytest.mark.parametrize("b_scope", ["shared", "fragment"])
@pytest.mark.parametrize("ta, tb", [(False, False), (True, True), (False, True), (True, False)])
def test_gemm_operand_scopes(a_scope, b_scope, ta, tb):
    m, n, k = 32, 16, 48
    alloc = {"shared": T.alloc_shared, "fragment": T.alloc_fragment}
    sa, sb = ((k, m) if ta else (m, k)), ((n, k) if tb else (k, n))

    @T.prim_func
    def f(A: T.Tensor(sa, "float16"), B: T.Tensor(sb, "float16"), O: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=64):
            a = alloc[a_scope](sa, "float16")
            b = alloc[b_scope](sb, "float16")
            c = T.alloc_fragment((m, n), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_A=ta, transpose_B=tb, clear_accum=True)
            T.gemm(a, b, c, transpose_A=ta, transpose_B=tb)
            T.copy(c, O)

    a, b = f16(*sa), f16(*sb)
    w = (a.T if ta else a).astype(F32) @ (b.T if tb else b).astype(F32)
    agree(f, [a, b, mark((m, n), F32)], {2: 2 * w}, tol=1e-5)


GEMM_TYPES = [("float16", "float16", F16), ("bfloat16", "float32", BF), ("int8", "int32", np.int8),
              ("uint8", "int32", np.uint8), ("float8_e4m3fn", "float32", F8), ("float8_e5m2", "float32", ml_dtypes.float8_e5m2),
              ("float64", "float64", np.float64),
              ("float32", "float32", F32)]


@pytest.mark.spec("L11:gemm")
@pytest.mark.parametrize("dtype, acc, np_type", GEMM_TYPES, ids=[x[0] for x in GEMM_TYPES])
def test_gemm_types_exact_or_refused(dtype, acc, np_type):
    m, n, k = 32, 32, 64

    @T.prim_func
    def f(A: T.Tensor((m, k), dtype), B: T.Tensor((n, k), dtype), O: T.Tensor((m, n), acc)):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((m, k), dtype)
            b = T.alloc_shared((n, k), dtype)
            c = T.alloc_fragment((m, n), acc)
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c, transpose_B=True)
            T.copy(c, O)

    low = 0 if dtype == "uint8" else -3
    a, b = (RNG.integers(low, 4, s).astype(np_type) for s in ((m, k), (n, k)))
    w = a.astype(np.float64) @ b.astype(np.float64).T
    from tilelang.errors import TileLangError
    from user_harness import run
    for execution in ("tile", "simulator", "cpu"):
        try:
            got = run(f, [a, b, mark((m, n), F32).astype(acc if acc != "bfloat16" else BF)], execution)[2]
        except TileLangError as e:
            caught(e)
            continue
        np.testing.assert_array_equal(got.astype(np.float64), w, err_msg=execution)


@pytest.mark.spec("L11:gemm")
def test_gemm_on_subregions_and_versions():
    m, n, k = 32, 32, 32

    @T.prim_func
    def f(A: T.Tensor((2, m, k), "float16"), B: T.Tensor((k, 2 * n), "float16"), O: T.Tensor((2, m, n), "float32")):
        with T.Kernel(1, threads=32):
            a = T.alloc_shared((2, m, k), "float16")
            b = T.alloc_shared((k, 2 * n), "float16")
            c = T.alloc_fragment((m, n), "float32")
            T.copy(A, a)
            T.copy(B, b)
            for v in range(2):
                T.gemm(a[v, :, :], b[0:k, n:2 * n], c, clear_accum=(v == 0))
                T.copy(c, O[v, 0:m, 0:n])

    a, b = f16(2, m, k), f16(k, 2 * n)
    w = a.astype(F32) @ b[:, n:].astype(F32)
    agree(f, [a, b, mark((2, m, n), F32)], {2: np.stack([w[0], w[0] + w[1]])}, tol=1e-5)


def test_chained_gemms_of_the_accumulator():
    m, k, n, d = 32, 32, 64, 16

    @T.prim_func
    def f(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), C: T.Tensor((n, d), "float16"),
          O: T.Tensor((m, d), "float32"), P: T.Tensor((n, m), "float16")):
        with T.Kernel(1, threads=64):
            a = T.alloc_shared((m, k), "float16")
            b = T.alloc_shared((k, n), "float16")
            c = T.alloc_shared((n, d), "float16")
            x = T.alloc_fragment((m, n), "float32")
            h = T.alloc_fragment((m, n), "float16")
            o = T.alloc_fragment((m, d), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.copy(C, c)
            T.clear(x)
            T.clear(o)
            T.gemm(a, b, x)
            for i, j in T.Parallel(m, n):
                x[i, j] = T.max(x[i, j] * 0.125, 0.0) if j % 2 == 0 else x[i, j] * 0.125
            T.copy(x, h)
            T.gemm(h, c, o)
            T.copy(o, O)
            for i, j in T.Parallel(n, m):
                P[i, j] = h[j, i]

    a, b, c = f16(m, k), f16(k, n), f16(n, d)
    x = (a.astype(F32) @ b.astype(F32)) / 8
    x[:, ::2] = np.maximum(x[:, ::2], 0)
    h = x.astype(F16)
    agree(f, [a, b, c, mark((m, d), F32), mark((n, m), F16)], {3: h.astype(F32) @ c.astype(F32), 4: h.T}, tol=1e-4)


def square_gemm(change):
    d = dict(m=32, n=32, k=16, acc="float32", threads=64) | change
    m, n, k, acc = d["m"], d["n"], d["k"], d["acc"]

    @T.prim_func
    def f(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), O: T.Tensor((m, n), acc)):
        with T.Kernel(1, threads=d["threads"]):
            a = T.alloc_shared((m, k), "float16")
            b = T.alloc_shared((d.get("bk", k), n), "float16")
            c = T.alloc_fragment((m, n), acc)
            T.copy(A, a)
            T.copy(B[0, 0], b)
            T.clear(c)
            T.gemm(a, b, c)
            T.copy(c, O)

    return f


@pytest.mark.spec("L11:gemm")
@pytest.mark.parametrize("change, text", [(dict(bk=32), "K shape check failed"), (dict(acc="int32"), ""),
                                          (dict(acc="bfloat16"), "")], ids=str)
def test_gemm_refusals(change, text):
    refused(lambda: square_gemm(change), text or None, on=("simulator",))


@pytest.mark.spec("L11:gemm")
@pytest.mark.parametrize("change", [dict(m=24), dict(k=24), dict(k=8), dict(threads=1024)], ids=str)
def test_gemm_shapes_that_instructions_and_warps_do_not_divide(change):
    f = square_gemm(change)
    m, k = change.get("m", 32), change.get("k", 16)
    a, b = f16(m, k), f16(k, 32)
    agree(f, [a, b, mark((m, 32), F32)], {2: a.astype(F32) @ b.astype(F32)}, tol=1e-4)


@pytest.mark.spec("T.reduce_min")
def test_accumulator_fragment_used_everywhere():
    """The accumulator is reduced in both directions, scanned, shifted, and copied in pieces."""
    m = n = k = 32

    @T.prim_func
    def f(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), R: T.Tensor((4, 32), "float32"),
          O: T.Tensor((2, m, n), "float32")):
        with T.Kernel(1, threads=64):
            a = T.alloc_shared((m, k), "float16")
            b = T.alloc_shared((k, n), "float16")
            c = T.alloc_fragment((m, n), "float32")
            d = T.alloc_fragment((m, n), "float32")
            row = T.alloc_fragment((m,), "float32")
            col = T.alloc_fragment((n,), "float32")
            s = T.alloc_shared((m,), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.reduce_max(c, row, dim=1)
            T.reduce_sum(c, col, dim=0)
            T.copy(row, R[0, 0:32])
            T.copy(col, R[1, 0:32])
            T.reduce_min(c, s, dim=1)
            T.copy(s, R[2, 0:32])
            for i in T.Parallel(m):
                R[3, i] = row[i] + s[i] + col[i]
            for i, j in T.Parallel(m, n):
                d[i, j] = c[j, i] - row[i] + col[j]
            T.copy(d, O[0, 0:m, 0:n])
            T.cumsum(c, dim=1)
            T.copy(c[8:24, 0:n], O[1, 0:16, 0:n])

    a, b = f16(m, k), f16(k, n)
    c = a.astype(F32) @ b.astype(F32)
    o = mark((2, m, n), F32)
    o[0] = c.T - c.max(1)[:, None] + c.sum(0)
    o[1, :16] = np.cumsum(c, 1)[8:24]
    r = np.stack([c.max(1), c.sum(0), c.min(1), c.max(1) + c.min(1) + c.sum(0)])
    agree(f, [a, b, mark((4, 32), F32), mark((2, m, n), F32)], {2: r, 3: o}, tol=1e-4)
