"""mla_decode and mla_plan against float64, on the CPU and on the device simulator."""

import importlib

import ml_dtypes
import numpy as np
import pytest

from tilelang.errors import TileLangError
from tilelang.library import mla_decode, mla_plan
from tilelang.library.attention.decode_plan import plan_on_device
from tilelang.library.attention.mla_kernels import PAIR
from tilelang.library.attention.mla_plan import divide, divide_on_device
from tilelang.library.caches import Cache
from tilelang.library.place import Place
from tilelang.target import Target

SM90 = {"kind": "cuda", "arch": "sm_90a"}
ROUND = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
FORMS = {  # lengths, heads, seq_q, (dim_v, rope), page size, dtype, dtype of the cache
    "divided": ([300, 70], 64, 1, (512, 64), None, "float16", "float16"),
    "paged, an empty sequence": ([300, 0, 129], 16, 1, (512, 64), 64, "bfloat16", "bfloat16"),
    "float8, three queries": ([300, 2], 32, 3, (256, 64), 128, "float16", "float8_e4m3fn"),
    "float8, few rows": ([70, 0], 8, 1, (128, 64), 64, "bfloat16", "float8_e4m3fn"),
    "other sizes": ([30, 2], 8, 3, (72, 16), None, "float16", "float16"),
}


def typed(rng, shape, dtype):
    return rng.standard_normal(shape).astype(getattr(ml_dtypes, dtype, None) or dtype)


def in_pages(rng, kv, page):
    """(cache, block table) with the keys of all sequences in shuffled pages."""
    batch, width = kv.shape[0], kv.shape[1] // page
    order = rng.permutation(batch * width)
    cache = np.empty((batch * width, page, kv.shape[2]), kv.dtype)
    cache[order] = kv.reshape(cache.shape)
    return cache, order.reshape(batch, width).astype(np.int32)


def reference(q, k, length, dim_v):
    """(results, logarithms) in float64 of the queries (seq_q, heads, dim) of one sequence."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    out, logs = np.zeros((*q.shape[:2], dim_v)), np.full(q.shape[:2], -np.inf)
    for i in range(q.shape[0]):
        seen = length - q.shape[0] + 1 + i
        if seen > 0:
            s = q[i] @ k[:seen].T * q.shape[-1]**-0.5
            top = s.max(1, keepdims=True)
            p = np.exp(s - top)
            out[i], logs[i] = p @ k[:seen, :dim_v] / p.sum(1, keepdims=True), np.log(p.sum(1)) + top[:, 0]
    return out, logs


@pytest.mark.parametrize("where", [None, SM90, pytest.param({"kind": "hip", "mcpu": "gfx942"}, marks=pytest.mark.slow)],
                         ids=["cpu", "sm_90a", "gfx942"])
@pytest.mark.parametrize("form", FORMS)
def test_results_and_logarithms_are_those_of_float64(form, where):
    lengths, heads, seq_q, (dim_v, rope), page, dtype, kv_dtype = FORMS[form]
    rng = np.random.default_rng(0)
    unit = 0.5 if kv_dtype != dtype else 1.0
    q = typed(rng, (len(lengths), seq_q, heads, dim_v + rope), dtype)
    step = page or 1
    kv = typed(rng, (len(lengths), -(-max(lengths) // step) * step, dim_v + rope), kv_dtype)
    cache, table = (kv, None) if page is None else in_pages(rng, kv, page)
    n = np.array(lengths, np.int32)
    got, logs = mla_decode(q, cache, n, dim_v=dim_v, block_table=table, kv_scale=unit, return_lse=True, target=where)
    largest = float(np.abs(kv.astype(np.float64)).max()) * unit
    for b, length in enumerate(lengths):
        want, want_logs = reference(q[b], kv[b].astype(np.float64) * unit, length, dim_v)
        assert np.abs(got[b].astype(np.float64) - want).max() <= largest * (2 * ROUND[dtype] + 2.0**-12)
        np.testing.assert_allclose(logs[b], want_logs.T, rtol=0, atol=2.0**-12)


def test_few_rows_of_float8_are_planned_where_full_tables_take_long(monkeypatch):
    decode, mla = (importlib.import_module(f"tilelang.library.attention.{n}") for n in ("flash_decode", "mla_decode"))
    made = []
    monkeypatch.setattr(decode, "_LONG", 0.0)
    monkeypatch.setattr(decode, "plan_on_device", lambda *a: made.append(plan_on_device(*a)) or made[-1])
    monkeypatch.setattr(mla, "_RUNS", Cache(4))
    monkeypatch.setitem(FORMS, "float8, few rows", ([700, 0], *FORMS["float8, few rows"][1:]))
    test_results_and_logarithms_are_those_of_float64("float8, few rows", SM90)
    assert (made[0].divided[:, 2] > 0).any()


def test_a_query_for_each_sequence_needs_no_dimension():
    rng = np.random.default_rng(1)
    q, kv, n = typed(rng, (2, 8, 80), "float16"), typed(rng, (2, 40, 80), "float16"), np.array([40, 3], np.int32)
    out = np.empty((2, 8, 64), np.float16)
    got, logs = mla_decode(q, kv, n, dim_v=64, out=out, return_lse=True)
    want, want_logs = mla_decode(q[:, None], kv, n, dim_v=64, return_lse=True)
    assert got is out and np.array_equal(got, want[:, 0]) and np.array_equal(logs, want_logs[:, :, 0])


@pytest.mark.parametrize("splits", [1, 3, 66])
def test_plans_deal_out_every_pair_of_tiles_once_and_evenly(splits):
    rng = np.random.default_rng(splits)
    for batch in (1, 2, 64, 200):
        lengths = rng.integers(0, 9000, batch).astype(np.int32)
        plan = divide(lengths, splits)
        pairs = np.maximum(1, -(-lengths // PAIR))
        ends = np.concatenate([[0], np.cumsum(pairs)])
        flat = ends[plan.begins[:, 0]] + plan.begins[:, 1]
        assert flat[0] == 0 and flat[-1] == pairs.sum() and (np.diff(flat) >= 0).all()
        assert np.diff(flat).max() <= -(-(pairs.sum() + 5 * batch) // splits) + 5
        for s, (first, last) in enumerate(plan.spans):
            touched = [p for p in range(splits) if max(flat[p], ends[s]) < min(flat[p + 1], ends[s + 1])]
            assert touched == list(range(first, last + 1))
        other = divide_on_device(lengths, splits, Place(Target("cpu")))
        assert np.array_equal(other.begins, plan.begins) and np.array_equal(other.spans, plan.spans)


def test_sequences_of_one_length_stay_whole_where_two_fit_into_a_split():
    assert not divide([8192] * 128, 66).divided and not divide([8192] * 64, 66).divided and divide([8192], 66).divided


def test_a_plan_serves_many_calls():
    rng = np.random.default_rng(2)
    q, kv, n = typed(rng, (1, 16, 192), "float16"), typed(rng, (1, 400, 192), "float16"), np.array([400], np.int32)
    plan = mla_plan(n, 16, target=SM90)
    first = mla_decode(q, kv, n, dim_v=128, plan=plan, target=SM90)
    assert plan.divided and np.array_equal(first, mla_decode(q, kv, n, dim_v=128, target=SM90))
    assert mla_plan(n, 16) is None


@pytest.mark.parametrize("change", [dict(dim_v=576), dict(dim_v=500), dict(lengths=np.array([4], np.int64)),
                                    dict(kv_cache=np.zeros((2, 64, 576), np.float16)), dict(q=np.zeros((1, 8, 64), np.float16)),
                                    dict(kv_cache=np.zeros((1, 64, 576), np.float32)),
                                    dict(out=np.zeros((1, 8, 4), np.float16)),
                                    dict(block_table=np.zeros((1, 1), np.int32), kv_cache=np.zeros((1, 48, 576), np.float16)),
                                    dict(scale=-1.0), dict(q=[1])])
def test_arguments_that_do_not_go_together_are_rejected(change):
    keys, lengths = np.zeros((1, 64, 576), np.float16), np.array([4], np.int32)
    call = dict(q=np.zeros((1, 8, 576), np.float16), kv_cache=keys, lengths=lengths)
    with pytest.raises(TileLangError, match=r"error\[attention-(shape|option|argument)\]"):
        mla_decode(**{**call, **change})
