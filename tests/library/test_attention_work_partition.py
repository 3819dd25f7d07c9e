"""Tiles of queries that fill no whole wave of the SMs: blocks divide them by keys."""

import importlib

import numpy as np
import pytest

import tilelang
from tilelang.env import env
from tilelang.library import flash_attention
from tilelang.library.attention.form import AttentionForm, Tile, WorkPartition
from tilelang.library.arrays import compact
from tilelang.library.attention.problem import Mask, Sizes, mask_of
from tilelang.library.attention.kernels import split_kv_attention
from tilelang.library.attention.tile_cost import attention_tile, estimate, machine_of
from tilelang.target import Target

module = importlib.import_module("tilelang.library.attention.flash_attention")
SM90, SM80 = (Target({"kind": "cuda", "arch": a}) for a in ("sm_90a", "sm_80"))
H200 = machine_of(SM90)
CONFIGS = {"tl.enable_fast_math": True, "tl.enable_hopper": True}
FULL = Mask()


def reference(q, k, v, hidden=False):
    """(result, logarithms) in float64 of bhsd arrays.  hidden: keys that a query does not see."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = np.where(hidden, -np.inf, np.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1]**-0.5)
    top = np.maximum(s.max(-1, keepdims=True), -1e9)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return np.einsum("bhij,bhjd->bhid", p / np.where(total == 0, 1.0, total), v), lse


def arrays(batch, seq_q, seq_k, heads, kv_heads, dim=64):
    rng = np.random.default_rng(0)
    shapes = ((batch, heads, seq_q, dim), (batch, kv_heads, seq_k, dim), (batch, kv_heads, seq_k, dim))
    return [rng.standard_normal(s).astype(np.float16) for s in shapes]


# ---- programs --------------------------------------------------------------------------------------------------------------

PARTITIONS = {"one_tile": ((1, 300, 330, 3, 1), Tile(128, 32, 2, 256), WorkPartition(8, 1, 11, 3, 4)),
         "splits_of_two_tiles": ((1, 118, 600, 7, 1), Tile(128, 32, 2, 256), WorkPartition(4, 3, 19, 15, 4)),
         "no_whole_wave": ((2, 70, 250, 2, 1), Tile(64, 32, 2, 128), WorkPartition(0, 8, 8, 3, 132)),
         "keys_that_fill_tiles": ((1, 128, 128, 5, 5), Tile(128, 32, 2, 256), WorkPartition(4, 1, 4, 1, 4))}


@pytest.mark.parametrize("on", ["simulator", "tile"])
@pytest.mark.parametrize("name", PARTITIONS)
def test_every_tile_of_keys_is_counted_once(name, on):
    """What the workspace holds before is never read: NaN."""
    counts, tile, partition = PARTITIONS[name]
    q, k, v = arrays(*counts)
    batch, seq_q, seq_k, heads, kv_heads = counts
    program = split_kv_attention(AttentionForm(Sizes(*counts, 64, 64), tuple(compact(x.shape) for x in (q, k, v, q)), "bhsd",
                                                  "float16", FULL, tile, True, 64**-0.5, partition))
    kernel = tilelang.compile(program, target="cpu", execution_backend="tile") if on == "tile" else tilelang.compile(
        program, target=SM90, execution_backend="simulator", pass_configs={**CONFIGS, "tl.persistent": partition.sms})
    means, sums = (np.full(s, np.nan, np.float32) for s in ((partition.splits, tile.rows, 64), (partition.splits, tile.rows)))
    out, lse = np.full_like(q, np.nan), np.full((batch, heads, seq_q), np.nan, np.float32)
    kernel(q, k, v, 64**-0.5, means, sums, out, lse)
    want, want_lse = reference(q, k, v)
    assert np.abs(out - want).max() < 2.0**-11 and np.abs(lse - want_lse).max() < 2.0**-18


# ---- the choice ------------------------------------------------------------------------------------------------------------


def test_the_last_wave_is_divided():
    sizes, tile = Sizes(4, 8192, 8192, 16, 16, 128, 128), Tile(128, 144, 2, 256)
    _, partition = estimate(H200, sizes, FULL, tile)
    assert partition is not None and (partition.whole, partition.rest, partition.steps, partition.sms) == (31 * 132, 4, 57, 132)
    assert 1 < partition.per_block < 8
    whole, _ = estimate(H200, sizes._replace(seq_q=128, heads=132, batch=1), FULL, tile)  # one wave
    assert attention_tile(H200, sizes, FULL).keys == 144
    assert 31 * whole < estimate(H200, sizes, FULL, tile)[0] < 31.25 * whole


def test_blocks_keep_their_tiles_where_dividing_gains_nothing():
    tile = Tile(128, 128, 2, 256)
    for seq, heads, mask, machine in ((2048, 33, FULL, H200), (512, 32, FULL, H200), (8192, 64, Mask(None, 0), H200),
                                      (8192, 64, FULL, machine_of(SM80))):
        assert estimate(machine, Sizes(1, seq, seq, heads, heads, 128, 128), mask, tile)[1] is None, (seq, heads)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_few_queries_and_many_keys_are_divided(layout):
    q, k, v = arrays(1, 40, 1500, 2, 1)
    sizes = Sizes(1, 40, 1500, 2, 1, 64, 64)
    _, partition = estimate(H200, sizes, FULL, attention_tile(H200, sizes, FULL))
    assert partition is not None and partition.whole == 0

    def stored(x):
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)) if layout == "bshd" else x

    out, lse = flash_attention(*map(stored, (q, k, v)), layout=layout, return_lse=True, target=SM90)
    want, want_lse = reference(q, k, v)
    assert np.abs(stored(out) - want).max() < 2.0**-11 and np.abs(lse - want_lse).max() < 2.0**-18


def test_a_kernel_for_any_sizes_has_whole_tiles():
    module._RUNS.clear()
    q, k, v = arrays(1, 40, 1500, 2, 1)
    with env.using(TILELANG_LIBRARY_DYNAMIC_SHAPES="1"):
        out = flash_attention(q, k, v, layout="bhsd", target=SM90)
    module._RUNS.clear()
    assert np.abs(out - reference(q, k, v)[0]).max() < 2.0**-11


# ---- with a mask -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("seq_q, seq_k, window", [(70, 1500, None), (40, 900, 300), (130, 1400, (500, 20)), (700, 90, None)])
def test_few_queries_with_a_mask_are_divided(layout, seq_q, seq_k, window):
    """Also where queries see nothing (seq_q > seq_k), and where splits of the longest tile see nothing."""
    q, k, v = arrays(1, seq_q, seq_k, 2, 1)
    mask = mask_of(window is None or isinstance(window, int), window, None)
    sizes = Sizes(1, seq_q, seq_k, 2, 1, 64, 64)
    tile = Tile(64, 32, 2, 128)
    tiles = -(-seq_q // 64) * 2
    partition = WorkPartition(0, tiles, 3, 1, 132)

    def stored(x):
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)) if layout == "bshd" else x

    given = [stored(x) for x in (q, k, v)]
    program = split_kv_attention(AttentionForm(sizes, tuple(compact(x.shape) for x in (*given, given[0])), layout, "float16",
                                               mask, tile, True, 64**-0.5, partition))
    kernel = tilelang.compile(program, target=SM90, execution_backend="simulator", pass_configs=CONFIGS)
    means, sums = (np.full(s, np.nan, np.float32) for s in ((partition.splits, tile.rows, 64), (partition.splits, tile.rows)))
    out, lse = np.full_like(given[0], np.nan), np.full((1, 2, seq_q), np.nan, np.float32)
    kernel(*given, 64**-0.5, means, sums, out, lse)
    at, key = np.arange(seq_q)[:, None] + seq_k - seq_q, np.arange(seq_k)
    left, right = (np.inf if n is None else n for n in (mask.left, mask.right))
    hidden = (key > at + right) | (key < at - left)
    want, want_lse = reference(q, k, v, hidden)
    assert np.abs(stored(out) - want).max() < 2.0**-11 * np.abs(v).max()
    some = want_lse > -np.inf
    assert np.all(lse[~some] == -np.inf) and np.abs(lse[some] - want_lse[some]).max() < 2.0**-17


def test_a_masked_call_is_divided_where_tiles_are_few():
    """512 queries behind 8192 keys: 32 tiles of 8 heads, 4 blocks each."""
    chunk, causal = Sizes(1, 512, 8192, 8, 8, 128, 128), Mask(None, 0)
    tile = attention_tile(H200, chunk, causal)
    _, partition = estimate(H200, chunk, causal, tile)
    assert partition is not None and partition.whole == 0 and partition.rest * partition.steps == partition.splits <= 132
    assert estimate(H200, chunk, causal, tile)[0] < 0.4 * estimate(H200, chunk._replace(heads=33), causal, tile)[0]
    for sizes, machine in ((chunk._replace(heads=32), H200), (chunk, machine_of(SM80)), (chunk._replace(seq_k=512), H200)):
        assert estimate(machine, sizes, causal, attention_tile(machine, sizes, causal))[1] is None


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("target", [SM90, None])
def test_one_query_a_head_reads_its_kv_head_once(layout, target):
    """Heads that read one kv head are rows of one tile: seen by the kernel that is made, and by a slice that is given."""
    q, k, v = arrays(2, 1, 700, 6, 2)

    def stored(x):
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)) if layout == "bshd" else x

    module._RUNS.clear()
    out = np.full_like(stored(q), np.nan)
    wide = np.stack([stored(q), stored(q)], axis=2)[:, :, 1]  # rows of another tensor
    _, lse = flash_attention(wide, stored(k), stored(v), causal=True, layout=layout, return_lse=True, target=target, out=out)
    want, want_lse = reference(q, k, v)
    assert np.abs(stored(out) - want).max() < 2.0**-11 and np.abs(lse - want_lse).max() < 2.0**-18
    assert len(module._RUNS) == 1


@pytest.mark.parametrize("seq_q, seq_k", [(5, 300), (16, 40), (9, 4)])
def test_few_queries_of_a_kv_head_are_rows_of_one_tile(seq_q, seq_k):
    q, k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in arrays(2, seq_q, seq_k, 4, 1))
    module._RUNS.clear()
    for out in (None, np.full_like(q, np.nan)):
        got, lse = flash_attention(q, k, v, causal=True, return_lse=True, target=SM90, out=out, scale=0.2)
        back = [x.transpose(0, 2, 1, 3) for x in (q * np.float64(0.2 * 8), k, v)]  # the reference's scale is 1 / 8
        hidden = np.arange(seq_k) > np.arange(seq_q)[:, None] + seq_k - seq_q
        want, want_lse = reference(*back, hidden)
        some = want_lse > -np.inf
        assert np.abs(got.transpose(0, 2, 1, 3) - want).max() < 2.0**-10 * np.abs(v).max() and np.all(lse[~some] == -np.inf)
        assert np.abs(lse[some] - want_lse[some]).max() < 2.0**-16
    assert all(run.run.__qualname__.startswith("_few_queries") for run in module._RUNS.values())
    flash_attention(q[:, :, :1], k, v, causal=True, target=SM90)  # a head of its own: nothing to share
    assert sum(run.run.__qualname__.startswith("_few_queries") for run in module._RUNS.values()) == 2
