"""T.cast with a direction of rounding, and without saturation: every 8- and 16-bit number, samples of wider ones."""

import ml_dtypes
import numpy as np
import pytest
from everywhere import cuda_text
from numbers_of import BLOCK, EVERYWHERE, THREADS, every, run_on, wide

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import numpy_dtype

MODES = ("rz", "rp", "rm", "rn")
TO = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
FROM = ("float64", "float32", "bfloat16", "float8_e5m2", "int32", "uint16")


def casts(source, targets, modes, sat):
    N = BLOCK * max(1, len(every(source)) // BLOCK)
    shape = (len(targets), len(modes), N)

    @T.macro
    def store(x, Y, at):
        _ = [T.buffer_store(Y, T.cast(T.cast(x, t, round=m, sat=sat), "float32"), (k, j, at))
             for k, t in enumerate(targets) for j, m in enumerate(modes)]

    @T.prim_func
    def f(X: T.Tensor((N,), source), Y: T.Tensor(shape, "float32")):
        with T.Kernel(N // BLOCK, threads=THREADS) as b:
            for i in T.Parallel(BLOCK):
                store(X[b * BLOCK + i], Y, b * BLOCK + i)

    return f


def numbers(name):
    """The numbers of a float type of at most 16 bits, ascending, in float64; infinities where it has them, no NaN."""
    bits = numpy_dtype(name).itemsize * 8
    x = np.arange(2**bits, dtype=np.uint32).astype(f"u{bits // 8}").view(numpy_dtype(name)).astype(np.float64)
    return np.unique(x[~np.isnan(x)] + 0.0)


def rounded(x, name, mode, sat):
    """The number of the type that a mode asks for, found among all of them.

    Beyond the range: 8-bit floats end at their greatest number with sat, at infinity or NaN without; a direction towards 0
    stops at the greatest number, but an infinite x is beyond every range.
    """
    with np.errstate(invalid="ignore"):
        nearest = x.astype(numpy_dtype(name)).astype(np.float64)  # ml_dtypes rounds once, to nearest even, and never saturates
    all_numbers = numbers(name)
    finite = all_numbers[np.isfinite(all_numbers)]
    least, most = finite[0], finite[-1]
    eight = numpy_dtype(name).itemsize == 1
    beyond = np.inf if np.inf in all_numbers else np.nan
    below = finite[np.clip(np.searchsorted(finite, x, "right") - 1, 0, len(finite) - 1)]
    above = finite[np.clip(np.searchsorted(finite, x, "left"), 0, len(finite) - 1)]
    down = np.where(x < least, -beyond, below)  # the greatest number that x does not exceed
    up = np.where(x > most, beyond, above)
    got = {"rn": nearest, "rp": up, "rm": down, "rz": np.where(x > 0, below, above)}[mode]
    got = np.where(np.isinf(x), np.sign(x) * beyond, got)
    got = np.where(np.isnan(x), np.nan, got)
    if sat and eight:
        got = np.where(np.isnan(x), np.nan, np.where(np.isnan(got) | np.isinf(got), np.where(x > 0, most, least), got))
    return got


@pytest.mark.spec("T.cast", "L4.3:casts")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("sat", (True, False))
@pytest.mark.parametrize("source", FROM)
def test_a_direction_and_what_is_beyond_the_range(source, sat, on):
    f = casts(source, TO, MODES, sat)
    x = np.resize(every(source), BLOCK * max(1, len(every(source)) // BLOCK))
    got = run_on(f, x, on=on)[1]
    for k, name in enumerate(TO):
        for j, mode in enumerate(MODES):
            with np.errstate(all="ignore"):
                want = wide(x) if name == source else rounded(wide(x), name, mode, sat)
            np.testing.assert_array_equal(got[k, j], want.astype(np.float32), f"{source} to {name}, {mode}, sat={sat}")


@pytest.mark.spec("T.cast", "L4.3:casts")
@pytest.mark.parametrize("on", EVERYWHERE)
def test_a_direction_into_integers(on):
    N = BLOCK

    @T.prim_func
    def f(X: T.Tensor((N,), "float32"), Y: T.Tensor((4, N), "int32"), Z: T.Tensor((N,), "float32"),
          W: T.Tensor((N,), "float64")):
        with T.Kernel(1, threads=THREADS):
            for i in T.Parallel(N):
                Y[0, i] = T.cast(X[i], "int32", round="rz")
                Y[1, i] = T.cast(X[i], "int32", round="rp")
                Y[2, i] = T.cast(X[i], "int32", round="rm")
                Y[3, i] = T.cast(X[i], "int32", round="rn", sat=False)
                Z[i] = T.cast(W[i], "float32", round="rm")

    x = (np.random.default_rng(0).integers(-(10**6), 10**6, N) / 4).astype(np.float32)
    w = np.random.default_rng(1).standard_normal(N)
    y, z = (run_on(f, x, np.zeros((4, N), np.int32), np.zeros(N, np.float32), w, on=on)[k] for k in (1, 2))
    for got, of in zip(y, (np.trunc, np.ceil, np.floor, np.rint)):
        assert np.array_equal(got, of(x))
    assert (z <= w).all() and (np.nextafter(z, np.float32(np.inf)) > w).all()


def test_casts_with_options_assemble_for_a_gpu():
    cuda_text(casts("float32", TO[:4], MODES[:3], False), "sm_90a")


@pytest.mark.parametrize("dtype,source,options", [
    ("float16", "float32", {"round": "rs", "rbits": 1}), ("float16", "int64", {"round": "rp"}),
    ("float4_e2m1fn", "float32", {"round": "rz"}), ("float4_e2m1fn", "float32", {"sat": False}),
    ("float8_e8m0fnu", "float32", {"round": "rm"})])
def test_a_conversion_that_there_is_not_is_refused(dtype, source, options):
    with pytest.raises(TileLangError) as e:
        T.cast(T.Var("x", source), dtype, **options)
    assert e.value.kind == "cast-option"


def test_vectors_are_rounded_by_lanes():
    @T.prim_func
    def f(X: T.Tensor((32,), "float32"), Y: T.Tensor((32,), "float16")):
        with T.Kernel(1, threads=1):
            for k in T.serial(8):
                Y[k * 4:k * 4 + 4] = T.cast(X[k * 4:k * 4 + 4], "float16", round="rp")

    x = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    for on in ("tile", "simulator", "cpu"):
        assert np.array_equal(run_on(f, x, on=on)[1], rounded(x.astype(np.float64), "float16", "rp", True).astype(np.float16))
    assert ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max == 448
