"""Copies, regions, fragments, reductions, scans, views, atomics (language.md 3-10, 12, 13, 18, 19)."""

import ml_dtypes
import numpy as np
import pytest
from user_harness import BF, F8, agree, mark, refused

import tilelang
import tilelang.language as T

RNG = np.random.default_rng(11)
I32, F32, F16 = np.int32, np.float32, np.float16
NP = {"float16": F16, "bfloat16": BF, "float32": F32, "float64": np.float64, "int8": np.int8, "int32": I32, "uint8": np.uint8,
      "int64": np.int64, "int16": np.int16, "float8_e4m3fn": F8, "float8_e5m2": ml_dtypes.float8_e5m2, "bool": np.bool_}


def data(shape, dtype="float32", low=-9, high=9):
    dt = np.dtype(NP.get(dtype, dtype))
    if dt == np.bool_:
        return RNG.random(shape) < 0.5
    if dt.kind in "iu":
        return RNG.integers(max(low, 0) if dt.kind == "u" else low, high, shape).astype(dt)
    return RNG.standard_normal(shape).astype(F32).astype(dt)


@pytest.mark.spec("L10:copy")
@pytest.mark.parametrize("src, dst", [("float16", "float32"), ("float32", "bfloat16"), ("float32", "float8_e4m3fn"),
                                      ("float8_e5m2", "float16"), ("int8", "float32"), ("float32", "int8"),
                                      ("bool", "float32"), ("uint8", "int32"), ("int64", "int32"), ("float64", "float16"),
                                      ("int32", "bool"), ("float8_e4m3fn", "float8_e4m3fn"), ("int16", "float64")])
def test_copy_chain_converts(src, dst):
    m, n = 13, 21

    @T.prim_func
    def f(A: T.Tensor((m, n), src), O: T.Tensor((m, n), dst)):
        with T.Kernel(T.ceildiv(n, 8), T.ceildiv(m, 8), threads=48) as (bx, by):
            S = T.alloc_shared((8, 8), src)
            R = T.alloc_fragment((8, 8), src)
            Q = T.alloc_fragment((8, 8), dst)
            Z = T.alloc_shared((8, 8), dst)
            T.copy(A[by * 8, bx * 8], S)
            T.copy(S, R)
            T.copy(R, Q)
            T.copy(Q, Z)
            T.copy(Z, O[by * 8, bx * 8])

    a = data((m, n), src) * (3 if src.startswith("float3") else 1)
    a = a.astype(NP[src])
    w = a.astype(F32).astype(NP[dst]) if src == "float64" and dst == "float16" else a.astype(NP[dst])
    if src.startswith("float") and dst.startswith("int"):
        w = np.trunc(a.astype(F32)).astype(NP[dst])
    agree(f, [a, mark((m, n), NP[dst])], {1: w}, tol=1e-3 if src == "float64" else 0)


@pytest.mark.spec("L6:alloc_fragment", "M:odd-threads", "M:odd-tile-width")
@pytest.mark.parametrize("threads", [1, 3, 32, 33, 100, 256])
@pytest.mark.parametrize("shape", [(7, 5), (16, 24), (1, 37), (33, 1)])
def test_odd_tiles_and_threads(threads, shape):
    bm, bn = shape
    m, n = 2 * bm + 1, 2 * bn - 1

    @T.prim_func
    def f(A: T.Tensor((m, n), "float32"), O: T.Tensor((m, n), "float32"), R: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, bm), threads=threads) as b:
            F = T.alloc_fragment((bm, n), "float32")
            s = T.alloc_fragment((bm,), "float32")
            T.copy(A[b * bm, 0], F)
            T.reduce_max(F, s, dim=1)
            for i, j in T.Parallel(bm, n):
                F[i, j] = F[i, j] - s[i]
            T.copy(F, O[b * bm, 0])
            T.copy(s, R[b * bm])

    a = data((m, n))
    mx = a.max(1)
    agree(f, [a, mark((m, n), F32), mark(m, F32)], {1: a - mx[:, None], 2: mx})


REDUCE = {"sum": np.sum, "max": np.max, "min": np.min, "abssum": lambda x, axis: np.abs(x).sum(axis),
          "absmax": lambda x, axis: np.abs(x).max(axis), "bitand": np.bitwise_and.reduce, "bitor": np.bitwise_or.reduce,
          "bitxor": np.bitwise_xor.reduce}


@pytest.mark.spec("L12.2:reduce")
@pytest.mark.parametrize("kind", list(REDUCE))
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("scopes", ["ff", "ss", "sf", "fs"])
def test_reductions(kind, dim, scopes):
    m, n = (12, 40) if dim == 0 else (24, 20)
    out = n if dim == 0 else m
    alloc = {"f": T.alloc_fragment, "s": T.alloc_shared}

    @T.prim_func
    def f(A: T.Tensor((m, n), "int32"), O: T.Tensor((out,), "int32"), P: T.Tensor((out,), "int32")):
        with T.Kernel(1, threads=64):
            X = alloc[scopes[0]]((m, n), "int32")
            Y = alloc[scopes[1]]((out,), "int32")
            T.copy(A, X)
            T.reduce(X, Y, kind, dim, True)
            T.copy(Y, O)
            if kind != "abssum":
                T.fill(Y, 6)
                T.reduce(X, Y, kind, dim, False)
            T.copy(Y, P)

    a = data((m, n), "int32")
    w = REDUCE[kind](a, axis=dim)
    with6 = {"sum": w + 6, "max": np.maximum(w, 6), "min": np.minimum(w, 6), "abssum": w, "absmax": np.maximum(w, 6),
             "bitand": w & 6, "bitor": w | 6, "bitxor": w ^ 6}[kind]
    agree(f, [a, mark(out, I32), mark(out, I32)], {1: w, 2: with6})


@pytest.mark.spec("T.reduce_sum")
@pytest.mark.spec("L12.2:reduce")
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_reduce_three_dimensions_and_kept_dimension(dim, keep):
    shape = (3, 10, 6)
    out = tuple(1 if d == dim else x for d, x in enumerate(shape) if keep or d != dim)

    @T.prim_func
    def f(A: T.Tensor(shape, "float16"), O: T.Tensor(out, "float32")):
        with T.Kernel(1, threads=96):
            X = T.alloc_fragment(shape, "float16")
            Y = T.alloc_fragment(out, "float32")
            T.copy(A, X)
            T.reduce_sum(X, Y, dim=dim)
            T.copy(Y, O)

    a = data(shape, "float16")
    agree(f, [a, mark(out, F32)], {1: a.astype(F32).sum(dim, keepdims=keep)}, tol=1e-5)


@pytest.mark.spec("L12.2:reduce")
def test_reduce_to_one_element_and_local():
    n = 50

    @T.prim_func
    def f(A: T.Tensor((n,), "float32"), O: T.Tensor((3,), "float32")):
        with T.Kernel(1, threads=32):
            X = T.alloc_fragment((n,), "float32")
            Y = T.alloc_fragment((1,), "float32")
            L = T.alloc_local((8,), "float32")
            v = T.alloc_var("float32")
            T.copy(A, X)
            T.reduce_max(X, Y, dim=0)
            T.copy(Y, O[0:1])
            T.reduce_min(X, Y)
            for _i in T.Parallel(1):
                O[1] = Y[0]
            for i in T.serial(8):
                L[i] = A[i]
            T.reduce_sum(L, v, dim=0)
            O[2] = v

    a = data(n)
    agree(f, [a, mark(3, F32)], {1: [a.max(), a.min(), a[:8].sum()]}, tol=1e-5)


@pytest.mark.spec("T.reduce_max")
@pytest.mark.spec("L12.2:reduce")
def test_reduction_nan_default_and_propagate():
    m, n = 4, 32

    @T.prim_func
    def f(A: T.Tensor((m, n), "float16"), O: T.Tensor((2, m), "float16")):
        with T.Kernel(1, threads=32):
            X = T.alloc_fragment((m, n), "float16")
            Y = T.alloc_fragment((m,), "float16")
            T.copy(A, X)
            T.reduce_max(X, Y, dim=1)
            T.copy(Y, O[0, 0:m])
            T.reduce_max(X, Y, dim=1, nan_propagate=True)
            T.copy(Y, O[1, 0:m])

    a = data((m, n), "float16")
    a[1, 5] = np.nan
    a[2, 31] = np.nan
    agree(f, [a, mark((2, m), F16)], {1: np.stack([np.nanmax(a, 1), a.max(1)])})


@pytest.mark.spec("T.cummax")
@pytest.mark.spec("L12.3:scan")
@pytest.mark.parametrize("dim, reverse, scope", [(0, False, "s"), (1, True, "s"), (1, False, "f"), (0, True, "f")])
def test_scans(dim, reverse, scope):
    m, n = 19, 35

    @T.prim_func
    def f(A: T.Tensor((m, n), "int32"), O: T.Tensor((m, n), "int32"), P: T.Tensor((m, n), "int32")):
        with T.Kernel(1, threads=64):
            X = T.alloc_shared((m, n), "int32") if scope == "s" else T.alloc_fragment((m, n), "int32")
            Y = T.alloc_shared((m, n), "int32") if scope == "s" else T.alloc_fragment((m, n), "int32")
            T.copy(A, X)
            T.cumsum(X, Y, dim=dim, reverse=reverse)
            T.copy(Y, O)
            T.cummax(X, dim=dim, reverse=reverse)
            T.copy(X, P)

    a = data((m, n), "int32")
    r = np.flip(a, dim) if reverse else a
    s, x = np.cumsum(r, dim), np.maximum.accumulate(r, dim)
    agree(f, [a, mark((m, n), I32), mark((m, n), I32)],
          {1: np.flip(s, dim) if reverse else s, 2: np.flip(x, dim) if reverse else x})


@pytest.mark.spec("T.cumsum")
@pytest.mark.spec("L12.3:scan")
def test_scan_of_region_in_place():
    @T.prim_func
    def f(A: T.Tensor((6, 16), "int32"), O: T.Tensor((6, 16), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((6, 16), "int32")
            T.copy(A, S)
            T.cumsum(S[2:5, 4:16], dim=1)
            T.copy(S, O)

    a = data((6, 16), "int32")
    w = a.copy()
    w[2:5, 4:16] = np.cumsum(a[2:5, 4:16], 1)
    agree(f, [a, mark((6, 16), I32)], {1: w})


@pytest.mark.spec("M:shifted-fragment")
@pytest.mark.parametrize("read", ["shift", "transposed", "reversed", "row", "div"])
def test_fragment_read_elsewhere(read):
    n = 16

    def build():
        @T.prim_func
        def f(A: T.Tensor((n, n), "int32"), O: T.Tensor((n, n), "int32")):
            with T.Kernel(1, threads=32):
                F = T.alloc_fragment((n, n), "int32")
                G = T.alloc_fragment((n, n), "int32")
                T.copy(A, F)
                for i, j in T.Parallel(n, n):
                    if read == "shift":
                        G[i, j] = F[i, (j + 3) % n] * 2
                    elif read == "transposed":
                        G[i, j] = F[j, i] * 2
                    elif read == "reversed":
                        G[i, j] = F[n - 1 - i, n - 1 - j] * 2
                    elif read == "row":
                        G[i, j] = F[i, 0] * 2
                    else:
                        G[i, j] = F[i // 2, j // 4] * 2
                T.copy(G, O)
        return f

    a = data((n, n), "int32")
    i, j = np.meshgrid(range(n), range(n), indexing="ij")
    w = {"shift": a[i, (j + 3) % n], "transposed": a.T, "reversed": a[::-1, ::-1], "row": a[i, 0 * j],
         "div": a[i // 2, j // 4]}[read] * 2
    agree(build(), [a, mark((n, n), I32)], {1: w})


@pytest.mark.spec("M:loops-of-extents")
def test_loops_of_different_extents_over_one_fragment():
    n = 48

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((n,), "int32")
            T.copy(A, F)
            for i in T.Parallel(16):
                F[i] = F[i] + 100
            for i in T.Parallel(20):
                F[i + 28] = F[i + 28] - 100
            for i in T.Parallel(n // 2):
                F[2 * i] = F[2 * i] * 2
            for i, j in T.Parallel(6, 8):
                F[i * 8 + j] = F[i * 8 + j] + i
            T.copy(F, O)

    a = data(n, "int32")
    w = a.copy()
    w[:16] += 100
    w[28:] -= 100
    w[::2] *= 2
    w += np.arange(n) // 8
    agree(f, [a, mark(n, I32)], {1: w})


@pytest.mark.spec("L8:Parallel")
def test_row_sum_into_fragment_by_parallel():
    m, n = 16, 24

    @T.prim_func
    def f(A: T.Tensor((m, n), "int32"), O: T.Tensor((m,), "int32")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((m,), "int32")
            T.clear(F)
            for i, j in T.Parallel(m, n):
                F[i] += A[i, j]
            T.copy(F, O)

    a = data((m, n), "int32")
    agree(f, [a, mark(m, I32)], {1: a.sum(1)})


@pytest.mark.spec("L8:Parallel")
@pytest.mark.parametrize("where", ["shared", "global"])
def test_row_sum_into_shared_by_parallel_is_exact_or_refused(where):
    m, n = 16, 24

    def build():
        @T.prim_func
        def f(A: T.Tensor((m, n), "int32"), O: T.Tensor((m,), "int32")):
            with T.Kernel(1, threads=64):
                S = T.alloc_shared((m,), "int32")
                T.clear(S)
                if where == "shared":
                    for i, j in T.Parallel(m, n):
                        S[i] += A[i, j]
                    T.copy(S, O)
                else:
                    T.copy(S, O)
                    for i, j in T.Parallel(m, n):
                        O[i] += A[i, j]
        return f

    a = data((m, n), "int32")
    for execution in ("tile", "simulator", "cpu"):
        try:
            agree(build(), [a, mark(m, I32)], {1: a.sum(1)}, on=(execution,))
        except AssertionError as e:
            assert "expected" not in str(e) or "Error" in str(e), str(e)


@pytest.mark.spec("T.reshape")
@pytest.mark.spec("L19:views")
def test_views_and_reshapes():
    @T.prim_func
    def f(A: T.Tensor((8, 12), "float32"), O: T.Tensor((12, 8), "float32"), P: T.Tensor((96,), "int32"),
          Q: T.Tensor((4, 24), "float32")):
        with T.Kernel(1, threads=24):
            S = T.alloc_shared((8, 12), "float32")
            F = T.alloc_fragment((8, 12), "float32")
            V = T.reshape(S, (12, 8))
            W = T.view(S, (96,), "int32")
            T.copy(A, S)
            T.copy(V, O)
            T.copy(W, P)
            T.copy(A, F)
            G = T.reshape(F, (4, 24))
            for i, j in T.Parallel(4, 24):
                G[i, j] = G[i, j] + 1
            T.copy(G, Q)

    a = data((8, 12))
    agree(f, [a, mark((12, 8), F32), mark(96, I32), mark((4, 24), F32)],
          {1: a.reshape(12, 8), 2: a.reshape(-1).view(I32), 3: a.reshape(4, 24) + 1})


@pytest.mark.spec("T.reinterpret", "T.view")
@pytest.mark.spec("L19:views", "L4.3:casts")
def test_view_of_bytes_and_reinterpret():
    @T.prim_func
    def f(A: T.Tensor((16, 4), "uint8"), O: T.Tensor((16,), "int32"), P: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=16):
            W = T.view(A, (16,), "int32")
            S = T.alloc_shared((16, 4), "uint8")
            T.copy(A, S)
            for i in T.Parallel(16):
                O[i] = W[i]
                P[i] = T.reinterpret(T.reinterpret(W[i], "float32"), "int32")

    a = data((16, 4), "uint8", 0, 100)
    w = a.reshape(-1).view(I32)
    agree(f, [a, mark(16, I32), mark(16, I32)], {1: w, 2: w})


@pytest.mark.spec("L9:operands")
def test_regions_of_nine():
    """Element bases, slices with unit dimensions, omitted bounds, regions of both sides."""
    @T.prim_func
    def f(A: T.Tensor((3, 20, 20), "int32"), O: T.Tensor((4, 20, 20), "int32")):
        with T.Kernel(1, threads=40):
            S = T.alloc_shared((2, 10, 12), "int32")
            F = T.alloc_fragment((10, 12), "int32")
            T.copy(A[1, 3, 5], S[0, :, :])
            T.copy(A[2, 15:25, 14:26], S[1, :, :])
            T.copy(S[0, :, :], O[0, 4:14, 2:14])
            T.copy(S[1, :, :], O[1, 0:10, :12])
            T.copy(S[1, :, :], F)
            T.copy(F, O[2, 12, 12])
            T.copy(A[0, 7, 0:20], O[3, 0, 0:20])
            T.copy(A[0, 0:20, 4], O[3, 1, 0:20])
            T.fill(O[3, 19:20, 5:9], 5)
            T.fill(O[3, 18, 18], 6)

    a = data((3, 20, 20), "int32")
    o = mark((4, 20, 20), I32)
    big = np.zeros((30, 30), I32)
    big[:20, :20] = a[2]
    s0, s1 = a[1, 3:13, 5:17], big[15:25, 14:26]
    o[0, 4:14, 2:14] = s0
    o[1, :10, :12] = s1
    o[2, 12:20, 12:20] = s1[:8, :8]
    o[3, 0] = a[0, 7]
    o[3, 1] = a[0, :, 4]
    o[3, 19, 5:9] = 5
    o[3, 18, 18] = 6
    agree(f, [a, mark((4, 20, 20), I32)], {1: o})


@pytest.mark.spec("L9:pairing")
def test_copy_of_run_time_extent_moves_the_base_space():
    @T.prim_func
    def f(n: T.int32, A: T.Tensor((40, 16), "int32"), O: T.Tensor((40, 16), "int32"), P: T.Tensor((40, 16), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((32, 16), "int32")
            T.copy(A[0:n, 0:16], S)
            T.copy(S, P[0:32, 0:16])
            T.copy(A[8:8 + n, 0:16], O[0:n, 0:16])

    a = data((40, 16), "int32")
    for n in (5, 0, 32):
        o, p = mark((40, 16), I32), mark((40, 16), I32)
        o[:n] = a[8:8 + n]
        p[:32] = a[:32]
        agree(f, [n, a, mark((40, 16), I32), mark((40, 16), I32)], {2: o, 3: p})


@pytest.mark.spec("T.vectorized")
@pytest.mark.spec("L2.3:bind-slice", "L5:slice-value")
def test_vector_slices_as_values():
    @T.prim_func
    def f(A: T.Tensor((4, 16), "float32"), O: T.Tensor((4, 16), "float32")):
        with T.Kernel(4, threads=1) as b:
            O[b, 4:8] = A[b, 0:4] * 2 + A[b, 15]
            O[b, 0:4] = A[b, 4:8]
            for v in T.vectorized(8):
                O[b, 8 + v] = A[b, 8 + v] + 1

    a = data((4, 16))
    o = mark((4, 16), F32)
    o[:, 4:8] = a[:, 0:4] * 2 + a[:, 15:]
    o[:, 0:4] = a[:, 4:8]
    o[:, 8:] = a[:, 8:] + 1
    agree(f, [a, mark((4, 16), F32)], {1: o}, tol=1e-6)


@pytest.mark.spec("L13:tile")
@pytest.mark.parametrize("dtype", ["float32", "int32", "float64", "float16", "int64"])
def test_atomics_tile_scalar_and_return(dtype):
    n = 24

    @T.prim_func
    def f(A: T.Tensor((4, n), dtype), O: T.Tensor((n,), dtype), X: T.Tensor((2,), dtype), H: T.Tensor((3,), "int32")):
        with T.Kernel(4, threads=32) as b:
            F = T.alloc_fragment((n,), dtype)
            S = T.alloc_shared((n,), dtype)
            T.copy(A[b, 0:n], F)
            T.atomic_add(O, F)
            T.copy(F, S)
            T.atomic_add(O[0:8], S[8:16])
            for i in T.Parallel(n):
                T.atomic_max(X[0], A[b, i])
                T.atomic_min(X[1], A[b, i])
                T.atomic_add(H[T.cast(A[b, i], "int32") % 3], 1)

    a = data((4, n), "int32").astype(NP[dtype])
    o = a.sum(0).astype(NP[dtype])
    o[:8] += a[:, 8:16].sum(0).astype(NP[dtype])
    h = np.bincount((a.astype(I32) % 3).reshape(-1), minlength=3)
    small = dtype in ("float16",)
    agree(f, [a, np.zeros(n, NP[dtype]), np.zeros(2, NP[dtype]), np.zeros(3, I32)],
          {1: o, 2: [max(a.max(), 0), min(a.min(), 0)], 3: h}, tol=1e-2 if small else 0)


def test_atomic_on_shared_histogram_and_old_value():
    n = 200

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((10,), "int32"), Z: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((10,), "int32")
            C = T.alloc_shared((1,), "int32")
            T.clear(S)
            T.clear(C)
            for i in T.Parallel(n):
                T.atomic_add(S[A[i]], 1)
                k = T.atomic_add(C[0], 1, return_prev=True)
                Z[k] = 1
            T.copy(S, O)

    a = data(n, "int32", 0, 10)
    agree(f, [a, mark(10, I32), mark(n, I32)], {1: np.bincount(a, minlength=10), 2: np.ones(n)})


def test_atomic_in_parallel_of_replicated_value_happens_once():
    m, n = 8, 64

    @T.prim_func
    def f(A: T.Tensor((m, n), "int32"), O: T.Tensor((m,), "int32")):
        with T.Kernel(3, threads=128):
            F = T.alloc_fragment((m, n), "int32")
            s = T.alloc_fragment((m,), "int32")
            T.copy(A, F)
            T.reduce_sum(F, s, dim=1)
            for i in T.Parallel(m):
                T.atomic_add(O[i], s[i])
            T.atomic_add(O, s)

    a = data((m, n), "int32")
    agree(f, [a, np.zeros(m, I32)], {1: a.sum(1) * 6})


@pytest.mark.spec("T.all_of", "T.any_of")
@pytest.mark.spec("L12.5:any-all")
def test_any_and_all_of():
    @T.prim_func
    def f(A: T.Tensor((4, 16), "int32"), O: T.Tensor((4, 2), "int32")):
        with T.Kernel(4, threads=32) as b:
            S = T.alloc_shared((16,), "int32")
            T.copy(A[b, 0:16], S)
            if T.any_of(S):
                O[b, 0] = 1
            else:
                O[b, 0] = 0
            if T.all_of(S[4:12]):
                O[b, 1] = 1
            else:
                O[b, 1] = 0

    a = np.zeros((4, 16), I32)
    a[1, 3] = 2
    a[2, 4:12] = 1
    a[3] = 1
    agree(f, [a, mark((4, 2), I32)], {1: [[0, 0], [1, 0], [1, 1], [1, 1]]})


@pytest.mark.spec("T.warp_reduce_max", "T.warp_reduce_sum")
@pytest.mark.spec("L12.5:warp-reduce")
def test_warp_reductions():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((3, 64), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            O[0, tx] = T.warp_reduce_sum(A[tx])
            O[1, tx] = T.warp_reduce_max(A[tx])
            O[2, tx] = T.shfl_xor(A[tx], 5)

    a = data(64, "int32")
    w = a.reshape(2, 32)
    agree(f, [a, mark((3, 64), I32)],
          {1: np.stack([np.repeat(w.sum(1), 32), np.repeat(w.max(1), 32), w[:, np.arange(32) ^ 5].reshape(-1)])},
          on=("tile", "simulator"))


@pytest.mark.spec("T.transpose")
@pytest.mark.spec("L10:transpose")
def test_transpose_op_and_broadcast_in_parallel():
    m, n = 12, 20

    @T.prim_func
    def f(A: T.Tensor((m, n), "float16"), v: T.Tensor((n,), "float16"), O: T.Tensor((n, m), "float16")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((m, n), "float16")
            Z = T.alloc_shared((n, m), "float16")
            r = T.alloc_fragment((n,), "float16")
            T.copy(A, S)
            T.copy(v, r)
            T.transpose(S, Z)
            F = T.alloc_fragment((n, m), "float16")
            T.copy(Z, F)
            for i, j in T.Parallel(n, m):
                F[i, j] = F[i, j] * r[i]
            T.copy(F, O)

    a, v = data((m, n), "float16"), data(n, "float16")
    agree(f, [a, v, mark((n, m), F16)], {2: (a * v).T})


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


@pytest.mark.spec("T.alloc_reducer", "T.finalize_reducer", "T.reducer_init", "T.reducer_update")
@pytest.mark.spec("L6:alloc_reducer", "L12.4:reducer-v2", "L12.4:reducer-v1")
def test_reducers_v1_and_v2():
    m, n = 16, 40

    @T.prim_func
    def f(A: T.Tensor((m, n), "int32"), O: T.Tensor((2, n), "int32")):
        with T.Kernel(1, threads=64):
            acc = T.alloc_reducer((n,), "int32", op="max")
            d = T.alloc_fragment((n,), "int32")
            T.reducer_init(acc, 3)
            for i, j in T.Parallel(m, n):
                T.reducer_update(acc[j], A[i, j])
            T.finalize_reducer(acc, d)
            T.copy(d, O[0, 0:n])
            old = T.alloc_reducer((n,), "int32", op="sum", replication="all")
            T.clear(old)
            for i, j in T.Parallel(m, n):
                old[j] += A[i, j]
            T.finalize_reducer(old)
            T.copy(old, O[1, 0:n])

    a = data((m, n), "int32")
    agree(f, [a, mark((2, n), I32)], {1: np.stack([np.maximum(a.max(0), 3), a.sum(0)])})


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


@pytest.mark.spec("L2.3:negative-index")
def test_negative_slice_bounds_mean_those_of_python():
    @T.prim_func
    def f(A: T.Tensor((16, 8), "int32"), O: T.Tensor((4, 8), "int32"), P: T.Tensor((16, 8), "int32")):
        with T.Kernel(1, threads=32):
            T.copy(A[-4:, :], O)
            T.copy(A[-6:-2, -3:], P[-4:, 1:4])

    a = data((16, 8), "int32")
    p = mark((16, 8), I32)
    p[-4:, 1:4] = a[-6:-2, -3:]
    agree(f, [a, mark((4, 8), I32), mark((16, 8), I32)], {1: a[-4:], 2: p})


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


def test_a_copy_onto_a_part_of_its_source_is_refused():
    def program(at):
        @T.prim_func
        def f(A: T.Tensor((64,), "float32"), n: T.int32):
            with T.Kernel(1, threads=32):
                s = T.alloc_shared((64,), "float32")
                T.copy(A, s)
                for k in T.serial(n):
                    T.copy(s[k : k + 16], s[k + at : k + at + 16])
                T.copy(s, A)

        return f

    for at in (1, 15, -8):
        refused(lambda at=at: program(at), "source and destination overlap in `s`")
    a = np.arange(64, dtype=F32)
    moved = a.copy()
    for k in range(2):
        moved[k + 16:k + 32] = moved[k:k + 16].copy()
    agree(program(16), [a, 2], {0: moved})
