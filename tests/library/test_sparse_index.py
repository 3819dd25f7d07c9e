"""index_scores and topk_indices against float64 and a sort, on the CPU and on simulators of GPUs."""

import ml_dtypes
import numpy as np
import pytest

from tilelang.errors import TileLangError
from tilelang.library import index_scores, topk_indices
from tilelang.library.attention import sparse_index, topk

MACHINES = {"cpu": None, "sm_80": {"kind": "cuda", "arch": "sm_80"}, "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
            "gfx942": {"kind": "hip", "mcpu": "gfx942"}}
EACH = ["cpu", "sm_80", "sm_90a", pytest.param("gfx942", marks=pytest.mark.slow)]


@pytest.mark.parametrize("where", EACH)
@pytest.mark.parametrize("dtype, heads, dim, pieces", [("float8_e4m3fn", 64, 128, 1), ("bfloat16", 8, 32, 2),
                                                       ("bfloat16", 24, 32, 1), ("float8_e4m3fn", 5, 32, 3),
                                                       ("bfloat16", 33, 32, 1)])
def test_scores_are_those_of_float64(dtype, heads, dim, pieces, where, monkeypatch):
    monkeypatch.setattr(sparse_index, "_pieces", lambda *_: pieces)
    rng = np.random.default_rng(0)
    queries, keys = 5, 300
    q, k = (rng.standard_normal(s).astype(getattr(ml_dtypes, dtype)) for s in ((queries, heads, dim), (keys, dim)))
    w, unit, scale = (rng.standard_normal((queries, heads)), rng.random(keys) + 0.5, rng.random((queries, heads)) + 0.5)
    w, unit, scale = (x.astype(np.float32) for x in (w, unit, scale))
    ends = np.array([300, 0, 129, 7, 400], np.int32)
    got = index_scores(q, k, w, scale, unit, ends, target=MACHINES[where])
    products = np.einsum("ihd,jd->ihj", q.astype(np.float64), k.astype(np.float64))
    size = np.einsum("ihd,jd->ihj", np.abs(q.astype(np.float64)), np.abs(k.astype(np.float64)))
    weights = w.astype(np.float64) * scale
    pairs = (np.maximum(products, 0), weights), (size, np.abs(weights))
    want, terms = (np.einsum("ihj,ih->ij", x, y) * unit for x, y in pairs)
    hidden = np.arange(keys) >= ends[:, None]
    assert np.isneginf(got[hidden]).all()
    unit_of_sums = 2.0**-13 if dtype == "float8_e4m3fn" and where == "sm_90a" else 2.0**-20  # float8 MMAs keep 14 bits
    assert (np.abs(got - want) <= unit_of_sums * terms + 2.0**-20)[~hidden].all()


@pytest.mark.parametrize("where", ["cpu", "sm_90a"])
@pytest.mark.parametrize("k", [1, 20, 2048])
def test_indices_are_the_first_of_the_largest(k, where):
    rng = np.random.default_rng(0)
    x = np.round(rng.standard_normal((5, 5001)) * 50).astype(np.float32) / 50
    x[4] = np.float32(1) + np.arange(5001, dtype=np.float32) * 2.0**-23  # differ in the lowest bits alone
    x[3, ::7] = -np.inf
    ends = np.array([5001, 10, 0, 4500, 9000], np.int32)
    assert_first_of_the_largest(topk_indices(x, k, ends, target=MACHINES[where]), x, k, ends)


def assert_first_of_the_largest(got, x, k, ends):
    for row, indices, end in zip(x, got, ends):
        want = np.sort(np.argsort(-row[:end], kind="stable")[:k])
        assert np.array_equal(indices[:len(want)], want) and (indices[len(want):] == -1).all()


@pytest.mark.parametrize("where, n, k, few", [("cpu", 100_000, 8000, 0), ("cpu", 20_000, 9000, 0), ("cpu", 16_385, 1, 0),
                                              ("sm_90a", 34_000, 300, 0), ("cpu", 100_000, 8000, 4),
                                              ("sm_90a", 20_001, 300, 4)])
def test_long_rows_are_cut_into_chunks(where, n, k, few, monkeypatch):
    """few: up to so many rows a round, all blocks look for the k-th largest of a row together."""
    monkeypatch.setattr(topk, "FEW_ROWS", few)
    rng = np.random.default_rng(1)
    x = np.round(rng.standard_normal((3, n)) * 200).astype(np.float32) / 200  # many ties, on both sides of a cut
    ends = np.array([n, n - 700, 12], np.int32)
    assert_first_of_the_largest(topk_indices(x, k, ends, target=MACHINES[where]), x, k, ends)


@pytest.mark.parametrize("where", ["cpu", "sm_90a", EACH[-1]])
def test_zeros_of_both_signs_are_equal_scores(where):
    x = np.array([[-0.0, 0.0, 1.0], [0.0, -0.0, -1.0], [-0.0, -1e-45, 0.0]], np.float32)
    assert topk_indices(x, 2, target=MACHINES[where]).tolist() == [[0, 2], [0, 1], [0, 2]]


@pytest.mark.parametrize("change", [dict(q=np.zeros((5, 8, 32), np.float32)), dict(k=np.zeros((9, 48), np.float16)),
                                    dict(q=np.zeros((5, 6, 32), np.float16)), dict(weights=np.zeros((5, 7), np.float32)),
                                    dict(ends=np.zeros(5, np.int64))])
def test_arguments_that_do_not_go_together_are_rejected(change):
    given = dict(q=np.zeros((5, 8, 32), np.float16), k=np.zeros((9, 32), np.float16), weights=np.zeros((5, 8), np.float32))
    with pytest.raises(TileLangError, match=r"error\[attention-(argument|shape)\]"):
        index_scores(**{**given, **change})


@pytest.mark.parametrize("scores, k, ends", [(np.zeros((2, 9)), 2, None), (np.zeros((2, 9), np.float32), 0, None),
                                             (np.zeros((2, 9), np.float32), 2, np.zeros(3, np.int32))])
def test_scores_without_a_meaning_are_rejected(scores, k, ends):
    with pytest.raises(TileLangError, match=r"error\[attention-(argument|shape|option)\]"):
        topk_indices(scores, k, ends)
