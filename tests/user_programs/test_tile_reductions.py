"""Reductions, scans, reducers, votes and atomics of tiles (language.md 12, 13, 15)."""

import numpy as np
import pytest
from user_harness import NP, RUNS, agree, drawn, mark

import tilelang.language as T


RNG = np.random.default_rng(11)
data = drawn(RNG)
I32, F32, F16 = np.int32, np.float32, np.float16


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


@pytest.mark.parametrize("dtype, out", [("int32", "int32"), ("uint8", "uint8"), ("int64", "int64"), ("float16", "float32"),
                                        ("bfloat16", "bfloat16"), ("float64", "float64"), ("bool", "bool")])
@pytest.mark.parametrize("scope, dim, threads", [("f", 1, 64), ("s", 0, 128), ("f", 0, 32)])
def test_elements_multiplied_and_prefixes(dtype, out, scope, dim, threads):
    m, n = 37, 20
    kept = n if dim == 0 else m
    alloc = {"f": T.alloc_fragment, "s": T.alloc_shared}[scope]

    @T.prim_func
    def f(X: T.Tensor((m, n), dtype), Y: T.Tensor((kept,), out), Z: T.Tensor((m, n), out), W: T.Tensor((m, n), out)):
        with T.Kernel(1, threads=threads):
            s = alloc((m, n), dtype)
            y = alloc((kept,), out)
            z = T.alloc_shared((m, n), out)
            T.copy(X, s)
            T.reduce_prod(s, y, dim=dim)
            T.reduce_prod(s, y, dim=dim, clear=False)
            T.copy(y, Y)
            T.copy(X, z)
            T.cumprod(z, dim=dim)
            T.copy(z, Z)
            T.copy(X, z)
            T.cummin(z, dim=dim, reverse=True)
            T.copy(z, W)

    x = RNG.random((m, n)) < 0.97 if dtype == "bool" else (1 + (RNG.random((m, n)) < 0.2)).astype(NP[dtype])
    wide, multiply = x.astype(NP[out]), np.logical_and if dtype == "bool" else np.multiply
    with np.errstate(over="ignore"):
        once = multiply.reduce(wide, dim, dtype=NP[out])
        want = {1: multiply(once, once), 2: multiply.accumulate(wide, dim, dtype=NP[out]),
                3: np.flip(np.minimum.accumulate(np.flip(wide, dim), dim), dim)}
    agree(f, [x, mark(kept, NP[out]), mark((m, n), NP[out]), mark((m, n), NP[out])], want, on=tuple(RUNS))


@pytest.mark.parametrize("call", [lambda x: T.reduce_prod(x, x), lambda x: T.cumprod(x, dim=2), lambda x: T.cummin(x, dim=-3)])
def test_reductions_and_scans_of_wrong_shapes_or_dimensions_are_errors(call):
    with pytest.raises(ValueError, match="output shape|out of bounds"):
        @T.prim_func
        def f():
            with T.Kernel(1, threads=32):
                x = T.alloc_shared((8, 8), "float32")
                call(x)
