"""Masks of scores: however their conditions are written, tiles that they hide are skipped.  Scores are computed once."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T

INF = float("inf")
MASKS = {
    "or_equal": lambda s, i, j: T.where((i > j) | (j == i), s, -INF),
    "number_first": lambda s, i, j: T.where(i < j, -INF, s),
    "not": lambda s, i, j: T.where(~(j > i) & ~(i - j >= 40), s + 1, -INF),
    "absolute": lambda s, i, j: T.where(T.abs(i - j) < 30, s * 2, -INF),
    "not_absolute": lambda s, i, j: T.where(30 < T.abs(j - i), -INF, s),
    "blocks": lambda s, i, j: T.where(i // 16 >= j // 16, s, -INF),
    "diagonal_blocks": lambda s, i, j: T.where(i // 64 == j // 64, s, -INF),
    "prefix": lambda s, i, j: T.where((j <= i) | (j < 50), s, -INF),
    "two_bands": lambda s, i, j: T.where((j <= i) & ((j > i - 20) | (j > i - 30)), s - T.abs(i - j) * 0.5, -INF),
    "twice": lambda s, i, j: T.where(i < j, -INF, T.where(i - j > 25, -INF, s)),
}


def attention(mask):
    @tilelang.program
    def masked(q, k, v):
        s = q @ k.T * 0.25
        return T.softmax(mask(s, T.iota(q.shape[0])[:, None], T.iota(k.shape[0]))) @ v

    return masked


@pytest.mark.parametrize("name", MASKS)
def test_tiles_that_a_mask_hides_are_skipped(name):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((300, 16)).astype(np.float32) for _ in range(3))
    program = attention(MASKS[name])
    np.testing.assert_allclose(program(q, k, v), program.reference(q, k, v), rtol=2e-5, atol=2e-6)
    text = program.tile_source({n: (x.shape, "float16") for n, x in zip("qkv", (q, k, v))}, {"kind": "cuda", "arch": "sm_90a"})
    assert text.count("@T.prim_func") == 1 and "Pipelined(T.min(" in text, text


def test_a_condition_of_floats_stays_as_it_is():
    """Not (x < 0) holds for NaN, x >= 0 does not."""
    x = np.array([-1, 0, 1, np.nan], np.float32)
    program = tilelang.program(lambda x: (T.where(x < 0, 0, x), T.where(~(x < 0), x, 0), T.where((x > 1) | (x == 1), 1, x)))
    for got, want in zip(program(x), program.reference(x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_scores_are_computed_once():
    biased = attention(lambda s, i, j: s - T.abs(i - j) * 0.5)
    text = biased.tile_source({n: ((512, 64), "float16") for n in "qkv"}, {"kind": "cuda", "arch": "sm_90a"})
    assert text.count("T.abs(T.cast(") == 1 and "T.exp2(" in text


@pytest.mark.parametrize("f", [lambda i, j: T.abs(i - j), lambda i, j: T.minimum(i * 3 - j, 7), lambda i, j: 5 - i - 2 * j,
                               lambda i, j: T.maximum(T.abs(j - i), j) * (i - j), lambda i, j: (i << 20) - j])
def test_sums_of_indices_as_floats(f):
    program = tilelang.program(lambda x: x + f(T.iota(9)[:, None], T.iota(17)).astype("float32"))
    x = np.zeros((9, 17), np.float32)
    np.testing.assert_array_equal(program(x), program.reference(x))
