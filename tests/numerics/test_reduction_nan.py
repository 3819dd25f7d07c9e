"""NaN and infinities through every reduction, scan and reducer, in every float type; integers at the ends of their range."""

import numpy as np
import pytest
from everywhere import cuda_text, is_gpu
from numbers_of import EVERYWHERE, FLOATS, INTEGERS, assert_same, run_on

import tilelang.language as T
from tilelang.ir import dtype, numpy_dtype

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:All-NaN")
ROWS, COLUMNS = 12, 70
# kind, NaN propagates, combined with what is there
FORMS = [(k, p, c) for k in ("max", "min", "absmax") for p in (False, True) for c in (True, False)]
FORMS += [("sum", False, True), ("sum", False, False), ("abssum", False, True)]


def reductions(name, scope):
    """Every form of a reduction of a tile in `scope`: Y[form] from X, with O where what is there counts."""
    @T.macro
    def reduced(S, O, Y, k, form):
        kind, propagate, clear = form
        R = T.alloc_fragment((ROWS,), name)
        T.copy(O, R)
        T.reduce(S, R, kind, 1, clear, nan_propagate=propagate)
        T.copy(R, Y[k, 0:ROWS])

    @T.prim_func
    def f(X: T.Tensor((ROWS, COLUMNS), name), O: T.Tensor((ROWS,), name), Y: T.Tensor((len(FORMS), ROWS), name)):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((ROWS, COLUMNS), name) if scope == "shared" else T.alloc_fragment((ROWS, COLUMNS), name)
            T.copy(X, S)
            [reduced(S, O, Y, k, form) for k, form in enumerate(FORMS)]

    return f


def rows(name):
    """Rows with NaN first, last, in the middle, everywhere and nowhere, and with infinities; and contents of the result."""
    rng = np.random.default_rng(5)
    x = rng.integers(-2, 3, (ROWS, COLUMNS)).astype(np.float64)
    x[0, 0] = x[1, -1] = x[2, 33] = x[3, :] = x[4, 1:] = np.nan
    x[5, 3], x[6, 40], x[7, 5], x[7, 60], x[8, :] = np.inf, -np.inf, np.inf, -np.inf, -np.inf
    x[9, 10], x[9, 20] = np.nan, np.inf
    o = np.array([1, np.nan, -9, 5, np.nan, 0, 0, 1, 2, 3, 4, np.nan])
    with np.errstate(all="ignore"):
        return x.astype(numpy_dtype(name)), o.astype(numpy_dtype(name))


def meaning(x, o, form, name):
    kind, propagate, clear = form
    if dtype(name).bits == 8:  # what a type of 8 bits computes saturates
        greatest = float(T.max_value(name).value)
        x, o = (np.clip(v.astype(np.float64), -greatest, greatest) for v in (x, o))
    x, o = x.astype(np.float64), o.astype(np.float64)
    x = np.abs(x) if kind.startswith("abs") else x
    if kind.endswith("sum"):
        return x.sum(1) + (0 if clear else o)
    every = x if clear else np.concatenate([x, o[:, None]], 1)
    least = float(T.max_value(name).value) if dtype(name).bits == 8 else np.inf
    neutral = {"max": -least, "min": least, "absmax": 0}[kind]
    numbers = np.where(np.isnan(every), neutral, every)
    out = numbers.min(1) if kind == "min" else numbers.max(1)
    if kind == "absmax":
        out = np.maximum(out, 0)
    return np.where(np.isnan(every).any(1), np.nan, out) if propagate else out


@pytest.mark.spec("T.reduce_max", "T.reduce_min", "T.reduce_absmax", "T.reduce_sum", "T.reduce_abssum", "L12.2:reduce")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("name,scope", [(n, "fragment") for n in FLOATS] + [("float16", "shared"), ("float32", "shared")])
def test_reductions_of_nan_and_infinity(name, scope, on):
    x, o = rows(name)
    y = run_on(reductions(name, scope), x, o, on=on)[2]
    for got, form in zip(y, FORMS):
        want = meaning(x, o, form, name).astype(got.dtype)
        if form[0].endswith("sum") and dtype(name).bits <= 8:  # the order of a saturating sum is free: NaN is what is told
            assert np.array_equal(np.isnan(got.astype(float)), np.isnan(want.astype(float))), form
            continue
        got, want = (np.where(v.astype(float) == 0, np.zeros((), v.dtype), v) for v in (got, want))
        assert_same(got, want, f"{form} of {name}", np.arange(ROWS))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "bfloat16"])
def test_reductions_of_floats_assemble_for_a_gpu(name):
    cuda_text(reductions(name, "fragment"), "sm_90a")  # older devices convert 8-bit floats in software: slow to compile


def reducers(name):
    """reducer_update, warp_reduce_* and T.max over lanes, by the 32 lanes of a warp."""
    @T.macro
    def reduced(X, Y, r, k, op):
        acc = T.alloc_reducer((1,), name, op=op)
        out = T.alloc_fragment((1,), name)
        T.reducer_init(acc)
        for j in T.Parallel(COLUMNS):
            T.reducer_update(acc[0], X[r, j])
        T.finalize_reducer(acc, out)
        T.copy(out, Y[k, r:r + 1])

    @T.prim_func
    def f(X: T.Tensor((ROWS, COLUMNS), name), Y: T.Tensor((3, ROWS), name)):
        with T.Kernel(1, threads=32):
            for r in T.serial(ROWS):
                [reduced(X, Y, r, k, op) for k, op in enumerate(("max", "min", "sum"))]

    return f


@pytest.mark.spec("T.reducer_update", "L12.4:reducer-v2")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_reducers_leave_nan_out_of_extrema(name, on):
    x, o = rows(name)
    y = run_on(reducers(name), x, on=on)[1]
    for got, kind in zip(y, ("max", "min", "sum")):
        want = meaning(x, o, (kind, False, True), name).astype(got.dtype)
        got, want = (np.where(v.astype(float) == 0, np.zeros((), v.dtype), v) for v in (got, want))
        assert_same(got, want, f"{kind} of {name}", np.arange(ROWS))


def warps(name):
    @T.prim_func
    def f(X: T.Tensor((ROWS, COLUMNS), name), Y: T.Tensor((3, ROWS), name)):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            for r in T.serial(ROWS):
                a = T.warp_reduce_max(X[r, t])
                b = T.warp_reduce_min(X[r, t])
                c = T.warp_reduce_sum(X[r, t])
                if t == 0:
                    Y[0, r] = a
                    Y[1, r] = b
                    Y[2, r] = c

    return f


@pytest.mark.spec("T.warp_reduce_max", "T.warp_reduce_min", "L12.5:warp-reduce")
@pytest.mark.parametrize("on", ["tile", "simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_warp_reductions_leave_nan_out(name, on):
    x, _ = rows(name)
    y = run_on(warps(name), x, on=on)[1].astype(np.float64)
    w = x[:, :32].astype(np.float64)
    for got, fn in zip(y, (np.fmax, np.fmin, np.add)):  # of nothing but NaN they give NaN: there is no neutral element
        assert np.array_equal(got, fn.reduce(w, axis=1), equal_nan=True)


def scans(name):
    @T.prim_func
    def f(X: T.Tensor((ROWS, COLUMNS), name), Y: T.Tensor((6, ROWS, COLUMNS), name)):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((ROWS, COLUMNS), name)
            D = T.alloc_shared((ROWS, COLUMNS), name)
            T.copy(X, S)
            T.cumsum(S, D, dim=1)
            T.copy(D, Y[0, :, :])
            T.cummax(S, D, dim=1)
            T.copy(D, Y[1, :, :])
            T.cummax(S, D, dim=1, reverse=True)
            T.copy(D, Y[2, :, :])
            T.cummax(S, D, dim=0)
            T.copy(D, Y[3, :, :])
            T.cumsum(S, D, dim=0)
            T.copy(D, Y[4, :, :])
            T.cumsum(S, D, dim=1, reverse=True)
            T.copy(D, Y[5, :, :])

    return f


@pytest.mark.spec("T.cumsum", "T.cummax", "L12.3:scan")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("name", FLOATS)
def test_scans_of_nan_and_infinity(name, on):
    x, _ = rows(name)
    y = run_on(scans(name), x, on=on)[1]
    least = -float(T.max_value(name).value) if dtype(name).bits == 8 else -np.inf
    w = np.clip(x.astype(np.float64), least, -least)  # what a type of 8 bits computes saturates
    numbers = np.where(np.isnan(w), least, w)
    want = [np.cumsum(w, 1), np.maximum.accumulate(numbers, 1), np.maximum.accumulate(numbers[:, ::-1], 1)[:, ::-1],
            np.maximum.accumulate(numbers, 0), np.cumsum(w, 0), np.cumsum(w[:, ::-1], 1)[:, ::-1]]
    for k, (got, exact) in enumerate(zip(y, want)):
        exact = exact.astype(got.dtype)
        if k in (0, 4, 5) and dtype(name).bits == 8:
            assert np.array_equal(np.isnan(got.astype(float)), np.isnan(exact.astype(float))), k
            continue
        assert np.array_equal(got.astype(float), exact.astype(float), equal_nan=True), k


@pytest.mark.spec("T.reduce_max", "T.reduce_min", "L12.2:reduce")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("name", INTEGERS)
def test_reductions_of_integers_at_the_ends_of_their_range(name, on):
    kinds = ("max", "min", "sum", "absmax", "abssum", "bitand", "bitor", "bitxor")

    @T.macro
    def reduced(S, Y, k, kind):
        R = T.alloc_fragment((ROWS,), name)
        T.reduce(S, R, kind, 1, True)
        T.copy(R, Y[k, 0:ROWS])

    @T.prim_func
    def f(X: T.Tensor((ROWS, COLUMNS), name), Y: T.Tensor((len(kinds), ROWS), name)):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((ROWS, COLUMNS), name)
            T.copy(X, F)
            [reduced(F, Y, k, kind) for k, kind in enumerate(kinds)]

    info = np.iinfo(name)
    x = np.random.default_rng(0).integers(info.min, info.max, (ROWS, COLUMNS), dtype=name, endpoint=True)
    x[0], x[1], x[2, 5] = info.min, info.max, info.min
    y = run_on(f, x, on=on)[1]
    with np.errstate(over="ignore"):
        size = x if info.min == 0 else np.abs(x)  # the least number has no opposite
        want = [x.max(1), x.min(1), np.add.reduce(x, 1, dtype=x.dtype), np.maximum(size.max(1), 0),
                np.add.reduce(size, 1, dtype=x.dtype), np.bitwise_and.reduce(x, 1), np.bitwise_or.reduce(x, 1),
                np.bitwise_xor.reduce(x, 1)]
    for got, exact, kind in zip(y, want, kinds):
        kept = np.arange(ROWS) >= (kind == "absmax" and is_gpu(on))  # row 0 is of numbers without an absolute value
        assert_same(got[kept], exact[kept], f"{kind} of {name}", np.arange(ROWS)[kept])
