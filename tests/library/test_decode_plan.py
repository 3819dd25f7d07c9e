"""Plans of decode steps: what blocks compute of sequences of different lengths, and flash_decode with them."""

import importlib

import ml_dtypes
import numpy as np
import pytest
from test_flash_decode import NUMPY, ROUND, SM90, TARGETS, near, normal, reference

from tilelang.errors import TileLangError
from tilelang.library import decode_plan, flash_decode
from tilelang.library.attention.decode_plan import NOTHING, PlanCosts, plan_on_device
from tilelang.library.attention.decode_problem import DecodeSizes
from tilelang.library.attention.form import Tile
from tilelang.library.attention.inputs import running_on
from tilelang.library.attention.tile_cost import machine_of

module = importlib.import_module("tilelang.library.attention.flash_decode")
KEYS, SEQ_Q = 64, 8


def planned(lengths, window=None, on="tile", at_once=33.0, more=66):
    a = np.array(lengths, np.int32)
    return plan_on_device(a, Tile(64, KEYS, 2, 128), SEQ_Q, window, PlanCosts(at_once, 1.0, 2.0, 2.0, 0.7), more,
                          running_on(a, None if on == "cpu" else on))


def pieces_of(plan, lengths, window):
    """Pieces of each sequence, of which it is checked that they cover its tiles once and lie side by side in the workspace."""
    items, divided = plan.items[plan.items[:, 4] != NOTHING], plan.divided[plan.divided[:, 2] > 0]
    assert sorted(set(items[:, 0])) == list(range(len(lengths)))
    places = [s + n for _, first, count in divided for s, n in zip([first] * count, range(count))]
    assert len(set(places)) == len(places) and max(places, default=-1) < plan.slots
    out = []
    for b, length in enumerate(lengths):
        mine = items[items[:, 0] == b]
        mine = mine[np.lexsort((mine[:, 3], mine[:, 2]))]
        begin = 0 if window is None else max(0, length - SEQ_Q - window + 1) // KEYS
        end = max(begin, -(-length // KEYS))
        assert (mine[:, 1] == length).all() and mine[0, 2] == begin and mine[-1, 3] == end
        assert (mine[1:, 2] == mine[:-1, 3]).all()
        named = [tuple(row[1:]) for row in divided if row[0] == b]
        assert named == ([(mine[0, 4], len(mine))] if len(mine) > 1 else [])
        assert (mine[:, 4] == (mine[0, 4] + np.arange(len(mine)) if len(mine) > 1 else -1)).all()
        out.append(mine[:, 3] - mine[:, 2])
    return out


LENGTHS = {"one long": [131072, *[2048] * 31], "equal": [1024] * 64, "one": [0], "few": [1, 0, 5000, 77, 100000],
           "many": [(37 * n) % 9001 for n in range(600)]}


@pytest.mark.parametrize("on", ["tile", "cpu", "simulator"])
def test_pieces_cover_each_sequence_once(on):
    for lengths in LENGTHS.values():
        for window in (None, 4000):
            pieces_of(planned(lengths, window, on), lengths, window)


def test_long_sequences_are_divided_and_equal_ones_stay_whole():
    found = pieces_of(planned(LENGTHS["one long"]), LENGTHS["one long"], None)
    assert len(found[0]) > 8 and {len(x) for x in found[1:]} == {1} and max(found[0]) <= 3 * min(found[0])
    assert {len(x) for x in pieces_of(planned([1024] * 33), [1024] * 33, None)} == {1}
    assert len(pieces_of(planned([65536]), [65536], None)[0]) > 16


def test_large_pieces_come_first_and_the_places_behind_the_last_are_empty():
    lengths = [300, *LENGTHS["one long"]]
    items = planned(lengths).items
    used = int((items[:, 4] != NOTHING).sum())
    size = (items[:, 3] - items[:, 2])[:used]
    large = 2 * size > size.max()
    assert (items[used:, 4] == NOTHING).all() and large[:large.sum()].all() and not large.all()


def attended(on, lengths, seq_q=1, heads=4, kv_heads=2, dim=64, page=16, window=None, dtype="float16", narrow=False,
             again=False):
    rng = np.random.default_rng(0)
    batch, most = len(lengths), max(1, -(-max(lengths) // (page or 1)))
    table, shape = None, (batch, most + 9, kv_heads, dim)
    if page is not None:
        pages = batch * most + 3
        shape, table = (pages, page, kv_heads, dim), rng.permutation(pages)[:batch * most].reshape(batch, most).astype(np.int32)
        for b, n in enumerate(lengths):  # what is beyond a sequence is never read
            table[b, -(-n // page):] = 2**30
    k, v = (normal(rng, shape, dtype).astype(ml_dtypes.float8_e4m3fn if narrow else NUMPY[dtype]) for _ in range(2))
    q, given = normal(rng, (batch, seq_q, heads, dim), dtype), np.array(lengths, np.int32)
    plan = decode_plan(q, k, v, given, block_table=table, window=window, target=TARGETS[on])
    options = {"block_table": table, "window": window, "plan": plan, "return_lse": True, "target": TARGETS[on]}
    got, lse = flash_decode(q, k, v, given, **options)
    for b, n in enumerate(lengths):
        mine = [x[b, :n] if page is None else x[table[b, :-(-n // page)]].reshape(-1, *x.shape[2:])[:n] for x in (k, v)]
        want, logs = reference(q[b], *(x.astype(np.float32) for x in mine), window)
        largest = float(np.abs(mine[1].astype(np.float64)).max(initial=0.0))
        assert near(got[b], want, 3 * ROUND[dtype] * largest + 2.0**-10) and near(lse[b], logs, 2.0**-6)
    if again:
        same = flash_decode(q, k, v, given, **options)
        assert (got.view(np.uint16) == same[0].view(np.uint16)).all() and (lse == same[1]).all()
    return plan


@pytest.mark.parametrize("on", [pytest.param(n, marks=[pytest.mark.slow] * (n == "sm_80")) for n in TARGETS])
def test_pages_and_sequences_of_no_key_and_one(on):
    plan = attended(on, [300, 0, 1, 37], again=True)
    assert on != "sm_90a" or (plan.divided[:, 2] > 0).any()


@pytest.mark.parametrize("on", ["tile", pytest.param("sm_90a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lengths, given", [
    ([130, 5, 400], {"page": None, "heads": 8, "kv_heads": 1}), ([400, 5, 0], {"seq_q": 2, "page": 32, "window": 300}),
    ([260, 5], {"seq_q": 3, "page": 64, "narrow": True, "dtype": "bfloat16", "kv_heads": 1, "dim": 96}),
    ([260, 0], {"seq_q": 9, "page": 64, "narrow": True, "dtype": "bfloat16", "kv_heads": 1})])
def test_results_with_a_plan(on, lengths, given):
    plan = attended(on, lengths, **given)
    assert on == "tile" or (plan.divided[:, 2] > 0).any()


def test_a_plan_of_another_call_is_rejected():
    q, k, n = np.zeros((3, 4, 64), np.float16), np.zeros((3, 100, 2, 64), np.float16), np.array([7, 100, 0], np.int32)
    plan = decode_plan(q, k, k, n)
    with pytest.raises(TileLangError, match="sequences"):
        flash_decode(q[:2], k[:2], k[:2], n[:2], plan=plan)
    with pytest.raises(TileLangError, match="splits and a plan"):
        flash_decode(q, k, k, n, plan=plan, splits=2)
    assert decode_plan(q[:0], k[:0], k[:0], n[:0]) is None


def test_calls_make_a_plan_where_full_tables_take_long():
    m, tile = machine_of(SM90), (Tile(64, 64, 2, 128), module.Caches(2))
    long = DecodeSizes(32, 1, 64, 8, 128, 128, 9999, 64, 2048)
    assert module.plans_itself(m, long, *tile) and not module.plans_itself(m, long._replace(batch=1), *tile)
    assert not module.plans_itself(m, long._replace(width=128), *tile)  # a block for each sequence, without a second launch

