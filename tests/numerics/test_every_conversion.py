"""Conversions between all element types: exhaustive for 8 and 16 bits, samples and edges of wider ones."""

import functools

import numpy as np
import pytest
from everywhere import cuda_text
from numbers_of import BLOCK, EVERYWHERE, FLOAT8, HALVES, INTEGERS, THREADS, assert_same, count, every, rounded, run_on

import tilelang.language as T
from tilelang.ir import dtype, numpy_dtype

TYPES = ("bool", *INTEGERS, *FLOAT8, *HALVES, "float32", "float64", "tfloat32")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")


COPIED = ("uint8", "int32", *FLOAT8, *HALVES, "float32")  # the vector forms of copies


def meaning(x, source, to):
    """Exact value, then what the type keeps of it."""
    kind = numpy_dtype(to)
    if to == "bool":
        return x.astype(np.longdouble) != 0
    if dtype(to).is_float:
        if source == to:
            return x
        if {source, to} == {"float32", "tfloat32"}:  # one storage; only products round
            return x
        exact = x.astype(np.float64) if dtype(source).is_float else x.astype(np.longdouble)
        return rounded(exact.astype(np.longdouble), to)
    if not dtype(source).is_float:
        return x.astype(kind)
    info = np.iinfo(kind)
    exact = np.nan_to_num(np.trunc(x.astype(np.float64)).astype(np.longdouble), nan=0, posinf=np.inf, neginf=-np.inf)
    low, high = np.longdouble(info.min), np.longdouble(info.max)
    out = np.where((exact > low) & (exact < high), exact, 0).astype(kind)
    return np.where(exact >= high, info.max, np.where(exact <= low, info.min, out)).astype(kind)


@functools.cache
def of_every(source, to):
    """What conversions of every(source) must give."""
    return meaning(every(source), source, to)


def by_cast(source):
    N = count(source)
    Y = [T.Tensor((N,), t) for t in TYPES]

    def apply(X, outs, i):
        for out in outs:
            T.buffer_store(out, T.cast(X[i], out.dtype), (i,))

    @T.prim_func
    def f(X: T.Tensor((N,), source), Y0: Y[0], Y1: Y[1], Y2: Y[2], Y3: Y[3], Y4: Y[4], Y5: Y[5], Y6: Y[6], Y7: Y[7],
          Y8: Y[8], Y9: Y[9], Y10: Y[10], Y11: Y[11], Y12: Y[12], Y13: Y[13], Y14: Y[14], Y15: Y[15]):
        with T.Kernel(N // BLOCK, threads=THREADS) as b:
            for i in T.Parallel(BLOCK):
                apply(X, (Y0, Y1, Y2, Y3, Y4, Y5, Y6, Y7, Y8, Y9, Y10, Y11, Y12, Y13, Y14, Y15), b * BLOCK + i)

    return f


def by_copy(source):
    N = count(source)
    Y = [T.Tensor((N,), t) for t in TYPES]

    @T.macro
    def apply(F, out, at):
        T.copy(F, out[at])

    @T.prim_func
    def f(X: T.Tensor((N,), source), Y0: Y[0], Y1: Y[1], Y2: Y[2], Y3: Y[3], Y4: Y[4], Y5: Y[5], Y6: Y[6], Y7: Y[7],
          Y8: Y[8], Y9: Y[9], Y10: Y[10], Y11: Y[11], Y12: Y[12], Y13: Y[13], Y14: Y[14], Y15: Y[15]):
        with T.Kernel(N // BLOCK, threads=THREADS) as b:
            F = T.alloc_fragment((BLOCK,), source)
            T.copy(X[b * BLOCK], F)
            [apply(F, out, b * BLOCK) for out in (Y0, Y1, Y2, Y3, Y4, Y5, Y6, Y7, Y8, Y9, Y10, Y11, Y12, Y13, Y14, Y15)]

    return f


@pytest.mark.spec("T.cast", "L4.3:casts")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("form,source", [(by_cast, s) for s in TYPES] + [(by_copy, s) for s in COPIED])
def test_conversions_to_every_type(source, form, on):
    x = every(source)
    for to, got in zip(TYPES, run_on(form(source), x, on=on)[1:]):
        assert_same(got, of_every(source, to), f"{source} to {to}", x)


def test_conversions_assemble_for_a_gpu():
    cuda_text(by_cast("float64"), "sm_90a")  # older devices convert 8-bit floats in software: slow to compile
    cuda_text(by_copy("bfloat16"), "sm_90a")


def test_a_float_outside_the_range_of_an_integer_gives_its_nearest_end():
    x = np.array([300.0, -300.0, np.nan, np.inf, -np.inf, -0.9, 127.9, -128.9], np.float32)
    want = {"int8": [127, -128, 0, 127, -128, 0, 127, -128], "uint8": [255, 0, 0, 255, 0, 0, 127, 0]}
    for to, values in want.items():
        assert meaning(x, "float32", to).tolist() == values
    text = cuda_text(by_cast("float32"), assemble=False)
    assert "tl::to_int<signed char>(" in text and "(unsigned long long)X" not in text


def shifted_into_halves():
    @T.macro
    def apply(half, k, i, Y, Z):
        Y[k, i] = T.cast(half, "uint64")
        Z[k, i] = T.cast(half, "float32")

    @T.prim_func
    def f(X: T.Tensor((256,), "uint8"), Y: T.Tensor((4, 256), "uint64"), Z: T.Tensor((4, 256), "float32")):
        with T.Kernel(1, threads=THREADS):
            for i in T.Parallel(256):
                u = T.cast(X[i] << 13, "float16")
                w = T.cast(T.cast(X[i], "uint64") << 40, "float16")
                s = T.cast((T.cast(X[i], "int32") - 128) << 12, "float16")
                d = T.cast((T.cast(X[i], "int64") - 128) << 44, "float16")
                [apply(half, k, i, Y, Z) for k, half in enumerate((u, w, s, d))]

    return f


@pytest.mark.parametrize("on", EVERYWHERE)
def test_a_shifted_number_beyond_a_halfs_range_is_infinite(on):
    # LLVM took numbers of few significant bits for exact in a half, and left the rounding to infinity out.
    x = np.arange(256, dtype=np.uint8)
    n = x.astype(np.int64)
    _, whole, wide = run_on(shifted_into_halves(), x, on=on)
    halves = np.stack([(n << 13), (n << 40), (n - 128) << 12, (n - 128) << 44]).astype(np.float64).astype(np.float16)
    assert_same(wide, halves.astype(np.float32), "halves", wide)
    assert_same(whole, meaning(halves, "float16", "uint64"), "whole", whole)
