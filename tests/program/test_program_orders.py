"""Sorts and the best elements: stable, NaN last, at odd sizes, for every type, by both interpreters."""

import ml_dtypes
import numpy as np
import pytest
from test_program_lowering import SIMULATED, run

import tilelang
import tilelang.language as T
from tilelang.program.lower import lower
from tilelang.target import Target


def modules(fn, x, target):
    graph = tilelang.program(fn).graph(x)
    return run(lower(graph, None, Target(target)), [x], target)


def numbers(shape, dtype, seed=0):
    """Many equal elements; floats with both zeros, infinities and NaN."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        x = rng.integers(-9 if info.min else 0, 9, shape).astype(dtype)
        x.flat[::5] = rng.choice([info.min, info.max], x.flat[::5].shape)
        return x
    x = (rng.integers(-9, 9, shape) / 4).astype(dtype)
    x.flat[::7] = rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, np.nan]), x.flat[::7].shape).astype(dtype)
    return x


def places(x, descending):
    """The stable order along the last axis, NaN last."""
    wide = x.astype(np.float64)
    wide = np.where(np.isnan(wide), np.nan, -wide if descending else wide)
    return np.argsort(wide, -1, kind="stable")


BF16 = ml_dtypes.bfloat16
SHAPES = [((3, 1), "float32"), ((1, 2), "float32"), ((5, 37), "float32"), ((3, 64), "float16"), ((2, 3, 50), BF16),
          ((2, 65), "int32"), ((1, 300), "uint8"), ((130,), "float32")]


@pytest.mark.parametrize("target", ["cpu", SIMULATED], ids=["cpu", "sm_90a"])
@pytest.mark.parametrize("shape,dtype", SHAPES)
def test_rows_are_sorted(shape, dtype, target):
    x = numbers(shape, dtype)

    def sorts(x):
        return T.sort(x)

    got, order = modules(sorts, x, target)
    want = places(x, False)
    assert (order == want).all()
    np.testing.assert_array_equal(got.astype("float64"), np.take_along_axis(x, want, -1).astype("float64"))


@pytest.mark.parametrize("target", ["cpu", SIMULATED], ids=["cpu", "sm_90a"])
@pytest.mark.parametrize("shape,dtype", SHAPES)
def test_the_best_of_rows(shape, dtype, target):
    x = numbers(shape, dtype, 1)
    k = min(5, shape[-1])

    def best(x):
        return T.topk(x, k)

    got, order = modules(best, x, target)
    want = places(x, True)[..., :k]
    assert (order == want).all()
    np.testing.assert_array_equal(got.astype("float64"), np.take_along_axis(x, want, -1).astype("float64"))
