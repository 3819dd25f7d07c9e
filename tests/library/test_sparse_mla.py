"""sparse_mla against float64, on the CPU and on simulators of GPUs."""

import ml_dtypes
import numpy as np
import pytest

from tilelang.errors import TileLangError
from tilelang.library import sparse_mla

SM80, SM90 = {"kind": "cuda", "arch": "sm_80"}, {"kind": "cuda", "arch": "sm_90a"}
FORMS = {  # queries, heads, (dim_v, rope), indices, dtype, machine
    "two groups, divided": (3, 64, (512, 64), 300, "float16", SM90),
    "two groups, few heads, a row each": (3, 8, (128, 64), 200, "bfloat16", SM90),
    "other sizes": (3, 20, (40, 16), 70, "float16", SM90),
    "sm_80": (2, 16, (64, 16), 70, "bfloat16", SM80),
    "gfx942, a small tile": (2, 20, (512, 64), 40, "float16", {"kind": "hip", "mcpu": "gfx942"}),
    "gfx942": (2, 16, (64, 16), 70, "bfloat16", {"kind": "hip", "mcpu": "gfx942"}),
    "cpu": (5, 20, (72, 24), 70, "float16", None)}
ROUND = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def reference(q, kv, indices, counts, dim_v):
    q, kv = q.astype(np.float64), kv.astype(np.float64)
    out, logs = np.zeros((*q.shape[:2], dim_v)), np.full(q.shape[:2], -np.inf)
    for i, count in enumerate(counts):
        rows = indices[i, :count]
        rows = rows[rows >= 0]
        if len(rows):
            s = q[i] @ kv[rows].T * q.shape[-1]**-0.5
            top = s.max(1, keepdims=True)
            p = np.exp(s - top)
            out[i], logs[i] = p @ kv[rows, :dim_v] / p.sum(1, keepdims=True), np.log(p.sum(1)) + top[:, 0]
    return out, logs


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("form", [pytest.param(f, marks=[pytest.mark.slow] * f.startswith("gfx942")) for f in FORMS])
def test_results_and_logarithms_are_those_of_float64(form, counted, monkeypatch):
    if form.endswith("a row each"):
        monkeypatch.setattr("tilelang.library.attention.sparse_mla._WHOLE", 0)
    queries, heads, (dim_v, rope), most, dtype, where = FORMS[form]
    rng = np.random.default_rng(0)
    kind = getattr(ml_dtypes, dtype, None) or dtype
    q, kv = (rng.standard_normal(s).astype(kind) for s in ((queries, heads, dim_v + rope), (150, dim_v + rope)))
    indices = rng.integers(-1, 150, (queries, most)).astype(np.int32)
    indices[1] = -1
    counts = rng.integers(0, most + 1, queries).astype(np.int32) if counted else np.full(queries, most)
    got, logs = sparse_mla(q, kv, indices, counts if counted else None, dim_v=dim_v, return_lse=True, target=where)
    want, want_logs = reference(q, kv, indices, counts, dim_v)
    largest = float(np.abs(kv.astype(np.float64)).max())
    assert np.abs(got.astype(np.float64) - want).max() <= largest * (2 * ROUND[dtype] + 2.0**-12)
    np.testing.assert_allclose(logs, want_logs, rtol=0, atol=2.0**-12)


@pytest.mark.parametrize("most", [0, 1])
def test_queries_without_keys_give_nothing(most):
    q, kv = np.ones((2, 4, 80), np.float16), np.ones((9, 80), np.float16)
    got, logs = sparse_mla(q, kv, np.full((2, most), -1, np.int32), dim_v=64, return_lse=True)
    assert not got.any() and np.isneginf(logs).all()


@pytest.mark.parametrize("change", [dict(q=np.zeros((2, 4, 80), np.float32)), dict(kv=np.zeros((9, 64), np.float16)),
                                    dict(indices=np.zeros((2, 3), np.int64)), dict(indices=np.zeros((3, 3), np.int32)),
                                    dict(counts=np.zeros(3, np.int32)), dict(dim_v=80)])
def test_arguments_that_do_not_go_together_are_rejected(change):
    given = dict(q=np.zeros((2, 4, 80), np.float16), kv=np.zeros((9, 80), np.float16), dim_v=64,
                 indices=np.zeros((2, 3), np.int32))
    with pytest.raises(TileLangError, match=r"error\[attention-(argument|shape)\]"):
        sparse_mla(**{**given, **change})
