"""T.reduce_with, T.scan_with, T.reduce_argmax, T.reduce_argmin, and reductions of regions."""

import numpy as np
import pytest
from user_harness import NP, RUNS, agree, drawn, mark

import tilelang.language as T

RNG = np.random.default_rng(17)
data = drawn(RNG)
ALLOC = {"f": T.alloc_fragment, "s": T.alloc_shared}
EVERY = tuple(RUNS)


def ties(shape, dtype):
    """Small values, so that many are equal."""
    if dtype == "bool":
        return RNG.random(shape) < 0.5
    return RNG.integers(0 if dtype.startswith("u") else -3, 4, shape).astype(NP[dtype])


@pytest.mark.parametrize("dtype, scope, dim, threads", [
    ("float32", "f", 1, 64), ("float16", "s", 0, 128), ("bfloat16", "f", 0, 32), ("int8", "s", 1, 96), ("float64", "s", 1, 64),
    ("bool", "f", 1, 128), ("int64", "f", -1, 48), ("uint8", "s", -2, 32)])
def test_index_of_the_greatest_and_least(dtype, scope, dim, threads):
    m, n = 37, 45
    kept = n if dim in (0, -2) else m

    @T.prim_func
    def f(X: T.Tensor((m, n), dtype), I: T.Tensor((kept,), "int32"), V: T.Tensor((kept,), dtype),
          J: T.Tensor((kept,), "int64")):
        with T.Kernel(1, threads=threads):
            x = ALLOC[scope]((m, n), dtype)
            i = T.alloc_fragment((kept,), "int32")
            j = T.alloc_shared((kept,), "int64")
            v = T.alloc_fragment((kept,), dtype)
            T.copy(X, x)
            T.reduce_argmax(x, i, dim=dim, values=v)
            T.reduce_argmin(x, j, dim)
            T.copy(i, I)
            T.copy(v, V)
            T.copy(j, J)

    x = ties((m, n), dtype)
    wide = x.astype(np.float64)
    agree(f, [x, mark(kept, np.int32), mark(kept, NP[dtype]), mark(kept, np.int64)],
          {1: wide.argmax(dim), 2: x.max(dim) if dtype == "bool" else wide.max(dim).astype(NP[dtype]), 3: wide.argmin(dim)},
          on=EVERY)


@pytest.mark.parametrize("propagate", [False, True])
def test_index_of_the_greatest_where_elements_are_nan(propagate):
    nan, inf = np.nan, np.inf

    @T.prim_func
    def f(X: T.Tensor((5, 4), "float32"), I: T.Tensor((5,), "int32"), V: T.Tensor((5,), "float32")):
        with T.Kernel(1, threads=32):
            x = T.alloc_fragment((5, 4), "float32")
            i = T.alloc_fragment((5, 1), "int32")
            v = T.alloc_fragment((5,), "float32")
            T.copy(X, x)
            T.reduce_argmax(x, i, values=v, nan_propagate=propagate)
            for r in T.Parallel(5):
                I[r] = i[r, 0]
            T.copy(v, V)

    x = np.array([[1, nan, 3, nan], [nan, -inf, nan, -inf], [nan] * 4, [-inf] * 4, [2, inf, inf, nan]], np.float32)
    want = {1: [2, 1, 0, 0, 1], 2: [3, -inf, -inf, -inf, inf]}
    if propagate:
        want = {1: [1, 0, 0, 0, 3], 2: [nan, nan, nan, -inf, nan]}
    agree(f, [x, mark(5, np.int32), mark(5, np.float32)], {k: np.array(v) for k, v in want.items()}, on=EVERY)


@T.macro
def welford(a, b):
    n = a[2] + b[2]
    part = b[2] / T.max(n, 1.0)
    d = b[0] - a[0]
    return a[0] + d * part, a[1] + b[1] + d * d * a[2] * part, n


@pytest.mark.parametrize("scope, dim, threads, commutative", [("f", 1, 64, True), ("s", 1, 128, False), ("f", 0, 96, False),
                                                              ("s", 0, 32, True)])
def test_welford_by_a_macro(scope, dim, threads, commutative):
    m, n = 33, 70
    kept = n if dim == 0 else m

    @T.prim_func
    def f(X: T.Tensor((m, n), "float16"), M: T.Tensor((kept,), "float32"), S: T.Tensor((kept,), "float32")):
        with T.Kernel(1, threads=threads):
            x = ALLOC[scope]((m, n), "float16")
            mean = T.alloc_fragment((kept,), "float32")
            square = T.alloc_shared((kept,), "float32")
            T.copy(X, x)
            T.reduce_with(x, (mean, square, None), welford, (0.0, 0.0, 0.0), dim=dim,
                          start=lambda v: (T.cast(v, "float32"), 0.0, 1.0), commutative=commutative)
            T.copy(mean, M)
            T.copy(square, S)

    x = data((m, n), "float16")
    wide = x.astype(np.float64)
    agree(f, [x, mark(kept, np.float32), mark(kept, np.float32)],
          {1: wide.mean(dim), 2: ((wide - wide.mean(dim, keepdims=True)) ** 2).sum(dim)}, tol=1e-5, on=EVERY)


def affine(a, b):
    """x -> a0 x + a1, then x -> b0 x + b1."""
    return a[0] * b[0], b[0] * a[1] + b[1]


def affine_prefixes(a, b, dim):
    """The maps of each prefix, in int32."""
    a, b = (np.moveaxis(v, dim, 0) for v in (a, b))
    out, p, q = [], np.ones_like(a[0]), np.zeros_like(b[0])
    for x, y in zip(a, b):
        p, q = p * x, x * q + y
        out.append((p, q))
    return tuple(np.moveaxis(np.stack(v), 0, dim) for v in zip(*out))


@pytest.mark.parametrize("scope, dim, threads", [("f", 1, 64), ("s", 1, 256), ("f", 0, 128), ("s", 0, 48), ("ss", 1, 32)])
def test_functions_that_do_not_commute(scope, dim, threads):
    m, n = 21, 67
    kept = n if dim == 0 else m

    @T.prim_func
    def f(A: T.Tensor((m, n), "int32"), B: T.Tensor((m, n), "int32"), P: T.Tensor((kept,), "int32"),
          Q: T.Tensor((kept,), "int32"), S: T.Tensor((m, n), "int32"), U: T.Tensor((m, n), "int32")):
        with T.Kernel(1, threads=threads):
            a = ALLOC[scope[0]]((m, n), "int32")
            b = ALLOC[scope[-1]]((m, n), "int32")
            p = T.alloc_fragment((kept,), "int32")
            q = T.alloc_fragment((kept,), "int32")
            T.copy(A, a)
            T.copy(B, b)
            T.reduce_with((a, b), (p, q), affine, (1, 0), dim=dim)
            T.copy(p, P)
            T.copy(q, Q)
            T.scan_with((a, b), (None, b), affine, (1, 0), dim=dim)
            T.copy(b, S)
            T.copy(B, b)
            T.scan_with((a, b), (a, b), affine, (1, 0), dim=dim, reverse=True)
            T.copy(b, U)

    a, b = RNG.integers(-3, 4, (m, n)).astype(np.int32), data((m, n), "int32")
    p, q = affine_prefixes(a, b, dim)
    back = np.flip(affine_prefixes(np.flip(a, dim), np.flip(b, dim), dim)[1], dim)
    agree(f, [a, b, mark(kept, np.int32), mark(kept, np.int32), mark((m, n), np.int32), mark((m, n), np.int32)],
          {2: p.take(-1, dim), 3: q.take(-1, dim), 4: q, 5: back}, on=EVERY)


def test_the_product_of_a_gemm_combined_in_the_order_of_its_columns():
    @T.prim_func
    def f(A: T.Tensor((64, 32), "float16"), B: T.Tensor((32, 64), "float16"), L: T.Tensor((64,), "float32"),
          Z: T.Tensor((64,), "float32"), W: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((64, 32), "float16")
            b = T.alloc_shared((32, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            last = T.alloc_fragment((64,), "float32")
            z = T.alloc_fragment((64,), "float32")
            w = T.alloc_fragment((64,), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            # the last element that is not 0
            T.reduce_with(c, last, lambda x, y: T.if_then_else(y != 0, y, x), 0.0, dim=1)
            T.reduce_with(c, (z, w), lambda x, y: (T.max(x[0], y[0]), x[1] * T.exp(x[0] - T.max(x[0], y[0]))
                                                   + y[1] * T.exp(y[0] - T.max(x[0], y[0]))), (-1e30, 0.0), dim=1,
                          start=lambda x: (x, 1.0), commutative=True)
            T.copy(last, L)
            T.copy(z, Z)
            T.copy(w, W)

    a = RNG.integers(-1, 2, (64, 32)).astype(np.float16) * (RNG.random((64, 32)) < 0.1)
    b = RNG.integers(-1, 2, (32, 64)).astype(np.float16)
    c = a.astype(np.float32) @ b.astype(np.float32)
    last = np.array([next((v for v in r[::-1] if v), 0) for r in c])
    agree(f, [a, b, *[mark(64, np.float32) for _ in range(3)]],
          {2: last, 3: c.max(1), 4: np.exp(c - c.max(1, keepdims=True)).sum(1)}, tol=1e-5, on=EVERY)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int16", "uint8", "bool"])
def test_a_maximum_kept_over_tiles_in_every_type(dtype):
    @T.prim_func
    def f(X: T.Tensor((3, 13, 34), dtype), Y: T.Tensor((13,), dtype), Z: T.Tensor((34,), dtype)):
        with T.Kernel(1, threads=64):
            x = T.alloc_shared((13, 34), dtype)
            y = T.alloc_fragment((13,), dtype)
            z = T.alloc_shared((1, 34), dtype)
            T.fill(y, 0)
            T.fill(z, 0)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(X[k, 0, 0], x)
                T.reduce_with(x, y, lambda a, b: T.max(a, b), 0, dim=1, clear=False)
                T.reduce_with(x, z, lambda a, b: T.max(a, b), 0, dim=0, clear=False, commutative=True)
            T.copy(y, Y)
            T.copy(z[0, :], Z)

    x = RNG.random((3, 13, 34)) < 0.03 if dtype == "bool" else np.abs(data((3, 13, 34), dtype))
    wide = x.astype(np.float64)
    agree(f, [x, mark(13, NP[dtype]), mark(34, NP[dtype])], {1: wide.max((0, 2)), 2: wide.max((0, 1))}, on=EVERY)


def test_arrays_of_each_thread_and_single_elements():
    @T.prim_func
    def f(X: T.Tensor((64, 9), "float32"), Y: T.Tensor((64,), "int32"), Z: T.Tensor((64, 9), "float32"),
          W: T.Tensor((2,), "float32")):
        with T.Kernel(1, threads=64):
            x = T.alloc_local((9,), "float32")
            z = T.alloc_local((9,), "float32")
            i = T.alloc_local((1,), "int32")
            tx = T.get_thread_binding(0)
            for k in T.serial(9):
                x[k] = X[tx, k]
            T.reduce_argmin(x, i)
            T.scan_with(x, z, lambda a, b: T.min(a, b), T.infinity("float32"))
            Y[tx] = i[0]
            for k in T.serial(9):
                Z[tx, k] = z[k]
            row = T.alloc_shared((100,), "float32")
            w = T.alloc_shared((1,), "float32")
            T.copy(X[2, 0:9], row[0:9])
            T.reduce_with(row[0:9], w, lambda a, b: a + b, 0, dim=0)
            T.copy(w, W[0:1])
            T.reduce_with(w, w, lambda a, b: a + b, 0, clear=False)
            T.copy(w, W[1:2])

    x = np.round(data((64, 9)) * 8)
    agree(f, [x, mark(64, np.int32), mark((64, 9), np.float32), mark(2, np.float32)],
          {1: x.argmin(1), 2: np.minimum.accumulate(x, 1), 3: np.array([1, 2]) * x[2].sum()}, on=EVERY)


@pytest.mark.parametrize("scope", ["f", "s"])
def test_reductions_of_regions(scope):
    @T.prim_func
    def f(X: T.Tensor((4, 24, 40), "float32"), Y: T.Tensor((16,), "float32"), Z: T.Tensor((2, 30), "float32"),
          W: T.Tensor((24,), "float32")):
        with T.Kernel(1, threads=64):
            x = ALLOC[scope]((4, 24, 40), "float32")
            y = T.alloc_fragment((16,), "float32")
            z = T.alloc_shared((2, 30), "float32")
            w = T.alloc_fragment((24,), "float32")
            T.copy(X, x)
            T.reduce_max(x[1, 3:19, 5:38], y, dim=1)
            T.fill(z, 1)
            for k in T.serial(2):
                T.reduce_sum(x[k + 1, :, k:k + 30], z[k, :], dim=0, clear=False)
            T.fill(w, 0)
            T.reduce_absmax(x[2, 4:20, 8:24], w[8:24], dim=0)
            T.copy(y, Y)
            T.copy(z, Z)
            T.copy(w, W)

    x = RNG.integers(-50, 50, (4, 24, 40)).astype(np.float32)
    w = np.zeros(24)
    w[8:24] = np.abs(x[2, 4:20, 8:24]).max(0)
    agree(f, [x, mark(16, np.float32), mark((2, 30), np.float32), mark(24, np.float32)],
          {1: x[1, 3:19, 5:38].max(1), 2: np.stack([x[k + 1, :, k:k + 30].sum(0) + 1 for k in range(2)]), 3: w}, on=EVERY)


@pytest.mark.parametrize("of, into", ["ff", "fs", "sf", "ss"])
@pytest.mark.parametrize("dtype, dim, threads", [("float32", 1, 64), ("float16", 0, 96)])
def test_elements_gathered_and_turned_around(of, into, dtype, dim, threads):
    m, n = 13, 37
    shape = (m, 20) if dim else (20, n)

    @T.prim_func
    def f(X: T.Tensor((m, n), dtype), I: T.Tensor(shape, "int32"), Y: T.Tensor(shape, "float32"), Z: T.Tensor((m, n), dtype),
          W: T.Tensor(shape, dtype)):
        with T.Kernel(1, threads=threads):
            x = ALLOC[of]((m, n), dtype)
            i = ALLOC[into](shape, "int32")
            y = ALLOC[into](shape, "float32")
            w = ALLOC[of](shape, dtype)
            T.copy(X, x)
            T.copy(I, i)
            T.gather(x, i, y, dim=dim)
            T.copy(y, Y)
            T.flip(x, x, dim)
            T.copy(x, Z)
            T.gather(X, i, w, dim=dim)
            T.copy(w, W)

    x, i = data((m, n), dtype), RNG.integers(0, (m, n)[dim], shape).astype(np.int32)
    taken = np.take_along_axis(x, i, dim)
    agree(f, [x, i, mark(shape, np.float32), mark((m, n), NP[dtype]), mark(shape, NP[dtype])],
          {2: taken.astype(np.float32), 3: np.flip(x, dim), 4: taken}, on=EVERY)


def test_gathered_from_outside_a_tensor_and_from_regions():
    @T.prim_func
    def f(X: T.Tensor((10,), "float32"), I: T.Tensor((8,), "int32"), Y: T.Tensor((8,), "float32"),
          Z: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            i = T.alloc_shared((8,), "int32")
            y = T.alloc_fragment((8,), "float32")
            z = T.alloc_shared((16,), "float32")
            T.copy(I, i)
            T.gather(X, i, y)
            T.copy(y, Y)
            T.fill(z, 5)
            for k in T.serial(2):
                T.flip(y[k * 4:k * 4 + 4], z[k * 8:k * 8 + 4])
            T.copy(z, Z)

    x, i = data((10,)), np.array([0, 9, 10, -1, 3, 500, 2, 7], np.int32)
    y = np.where((i >= 0) & (i < 10), x[i % 10], 0).astype(np.float32)
    five = np.full(4, 5)
    agree(f, [x, i, mark(8, np.float32), mark(16, np.float32)],
          {2: y, 3: np.concatenate([y[3::-1], five, y[:3:-1], five])}, on=EVERY)
