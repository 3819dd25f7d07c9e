"""flash_decode on every execution against float64; its arguments, tiles and splits."""

import importlib
import re

import ml_dtypes
import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.library import flash_decode
from tilelang.library import place
from tilelang.library.attention.decode_kernels import decode_attention
from tilelang.library.attention.flash_decode import decode_splits, decode_tile, is_wide, narrow_tile, several_blocks
from tilelang.library.attention.decode_problem import DecodeSizes
from tilelang.library.attention.form import DecodeForm
from tilelang.library.attention.tile_cost import machine_of, shared_bytes
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

module = importlib.import_module("tilelang.library.attention.flash_decode")
TARGETS = {"tile": "tile", "cpu": None, "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
           "sm_80": {"kind": "cuda", "arch": "sm_80"}}
everywhere = pytest.mark.parametrize("on", TARGETS)
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ROUND = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
SM90 = Target({"kind": "cuda", "arch": "sm_90a"})


def normal(rng, shape, dtype="float16"):
    return rng.standard_normal(shape).astype(np.float32).astype(NUMPY[dtype])


def reference(q, k, v, window=None, scale=None):
    """(result, logarithms) in float64; q (seq_q, heads, dim), k and v (length, kv_heads, …)."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1]**-0.5)
    at, key = np.arange(len(q))[:, None] + len(k) - len(q), np.arange(len(k))[None, :]
    s = np.where((key <= at) & (key > at - (window or 10**9)), s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isinf(top), 0.0, top)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return np.einsum("hqk,khd->qhd", p / np.where(total == 0, 1.0, total), v), lse


def near(got, want, bound):
    got = np.asarray(got).astype(np.float64)
    with np.errstate(invalid="ignore"):
        d = np.where(got == want, 0.0, np.abs(got - want))
    return got.shape == want.shape and bool((d <= bound).all())  # NaN is not


def check(on, lengths, seq_q=1, heads=4, kv_heads=2, dim=64, dim_v=None, page=16, window=None, splits=None, dtype="float16",
          scale=None):
    rng = np.random.default_rng(0)
    batch, most, dim_v = len(lengths), max(1, -(-max(lengths) // (page or 1))), dim_v or dim
    if page is None:
        table, k, v = None, *(normal(rng, (batch, most + 9, kv_heads, d), dtype) for d in (dim, dim_v))
    else:
        pages = batch * most + 3
        k, v = (normal(rng, (pages, page, kv_heads, d), dtype) for d in (dim, dim_v))
        table = rng.permutation(pages)[:batch * most].reshape(batch, most).astype(np.int32)
        for b, n in enumerate(lengths):  # what is beyond a sequence is never read
            table[b, -(-n // page):] = 2**30
    q = normal(rng, (batch, seq_q, heads, dim), dtype)
    got, lse = flash_decode(q, k, v, np.array(lengths, np.int32), block_table=table, window=window, splits=splits,
                            scale=scale, return_lse=True, target=TARGETS[on])
    assert got.dtype == q.dtype and got.shape == (*q.shape[:3], dim_v) and lse.shape == (batch, heads, seq_q)
    for b, n in enumerate(lengths):
        mine = [x[b, :n] if page is None else x[table[b, :-(-n // page)]].reshape(-1, *x.shape[2:])[:n] for x in (k, v)]
        want, want_lse = reference(q[b], *mine, window, scale)
        score = dim * 2.0**-24 * float(np.abs(q[b].astype(float)).max() * dim) * (scale or dim**-0.5)
        largest = float(np.abs(mine[1].astype(np.float64)).max(initial=0.0))
        assert near(got[b], want, largest * (2 * ROUND[dtype] + 2 * score + 2.0**-18 + 2.0**-25 * n))
        assert near(lse[b], want_lse, 2 * score + 2.0**-15)


@everywhere
@pytest.mark.parametrize("splits", [1, 3, None])
def test_pages_and_splits(on, splits):
    check(on, [100, 0, 37, 1, 64], splits=splits)


@everywhere
@pytest.mark.parametrize("splits", [1, 7])
def test_caches_in_one_piece(on, splits):
    check(on, [130, 5], page=None, splits=splits, heads=8, kv_heads=1)


@everywhere
def test_more_splits_than_tiles(on):
    check(on, [20, 70], splits=9)


@everywhere
def test_one_sequence_longer_than_the_others_together(on):
    check(on, [40, 0, 700, 3, 90], splits=2, window=None if on != "sm_80" else 650)


@everywhere
@pytest.mark.parametrize("seq_q, heads, kv_heads", [(3, 8, 2), (20, 8, 1), (2, 4, 4)])
def test_several_queries_and_heads_in_one_tile(on, seq_q, heads, kv_heads):
    check(on, [90, 33, 2], seq_q, heads, kv_heads, splits=2)


@pytest.mark.parametrize("scale", [0.8, 1.1])
def test_parts_that_show_a_query_nothing(scale):
    """Whatever the scale, which kernels read at each call, what the maximum starts from is a number."""
    check("cpu", [70, 33, 5], seq_q=3, splits=5, scale=scale)


@everywhere
@pytest.mark.parametrize("window", [1, 20, 64])
def test_windows(on, window):
    check(on, [90, 33, 200], 2, window=window, splits=2, page=32)


@everywhere
@pytest.mark.parametrize("dim, dim_v, page, dtype", [(128, 128, 64, "bfloat16"), (256, 256, 48, "float16"),
                                                     (72, 40, 16, "float16")])
def test_head_dimensions_pages_and_types(on, dim, dim_v, page, dtype):
    check(on, [100, 65], 1, 4, 1, dim, dim_v, page, dtype=dtype, splits=2)


@everywhere
@pytest.mark.parametrize("dtype, seq_q, dim", [
    ("float16", 3, 64), ("bfloat16", 1, 72), ("bfloat16", 9, 48), ("bfloat16", 17, 64), ("float16", 9, 96)])
def test_caches_of_float8(on, dtype, seq_q, dim):
    rng = np.random.default_rng(2)
    q, lengths = normal(rng, (2, seq_q, 8, dim), dtype), np.array([70, 37], np.int32)
    k, v = (normal(rng, (8, 16, 2, dim)).astype(ml_dtypes.float8_e4m3fn) for _ in range(2))
    table = np.array([[3, 1, 7, 2, 0], [6, 4, 5, -1, -1]], np.int32)
    got = flash_decode(q, k, v, lengths, block_table=table, k_scale=0.5, v_scale=3.0, splits=2, target=TARGETS[on])
    assert got.dtype == q.dtype
    for b, n in enumerate(lengths):
        mine = [x[table[b]].reshape(-1, 2, dim)[:n].astype(np.float32) for x in (k, v)]
        want, _ = reference(q[b], mine[0] * 0.5, mine[1] * 3)
        assert near(got[b], want, 3 * float(np.abs(mine[1]).max()) * 3 * ROUND[dtype])


@pytest.mark.parametrize("seq_q, length", [(9, 400), (17, 600)])
def test_stages_of_float8_come_round(seq_q, length):
    rng = np.random.default_rng(3)
    q, k, v = normal(rng, (1, seq_q, 8, 64), "bfloat16"), *(
        normal(rng, (1, 640, 1, 64)).astype(ml_dtypes.float8_e4m3fn) for _ in range(2))
    got = flash_decode(q, k, v, np.array([length], np.int32), splits=1, target=TARGETS["sm_90a"])
    want, _ = reference(q[0], *(x[0, :length].astype(np.float32) for x in (k, v)))
    assert near(got[0], want, 3 * ROUND["bfloat16"] * float(np.abs(v.astype(np.float32)).max()))


def test_queries_without_a_sequence_dimension_and_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    k, v = (torch.from_numpy(normal(rng, (2, 50, 2, 32))) for _ in range(2))
    q, lengths = torch.from_numpy(normal(rng, (2, 8, 32))), torch.tensor([50, 11], dtype=torch.int32)
    got, lse = flash_decode(q, k, v, lengths, return_lse=True)
    same, lse4 = flash_decode(q[:, None], k, v, lengths, return_lse=True)
    assert torch.equal(got, same[:, 0]) and torch.equal(lse, lse4[..., 0]) and lse.shape == (2, 8)
    room = torch.empty_like(q)
    assert flash_decode(q, k, v, lengths, out=room) is room and torch.equal(room, got)
    wide = torch.cat([q, q], -1)[..., :32]  # rows with gaps
    assert torch.equal(flash_decode(wide, k.transpose(1, 2).contiguous().transpose(1, 2), v, lengths), got)
    assert flash_decode(q[:0], k[:0], v[:0], lengths[:0]).shape == (0, 8, 32)
    with pytest.raises(RuntimeError, match="no gradient"):
        flash_decode(q.requires_grad_(), k, v, lengths)


def test_one_kernel_serves_every_batch_and_cache():
    place.KERNELS.clear()
    check("cpu", [50, 20, 70], splits=2, dim=32)
    check("cpu", [500, 3, 9, 80], splits=5, dim=32)
    assert len(place.KERNELS) == 1


def half(*shape):
    return np.zeros(shape, np.float16)


@pytest.mark.parametrize("text, change", [
    ("are not of a decode step", {"q": half(2, 4)}), ("do not go together", {"q": half(2, 4, 64)}),
    ("no multiple of 2 kv heads", {"q": half(2, 3, 32)}),
    ("q has 3 sequences", {"q": half(3, 4, 32), "lengths": np.zeros(3, np.int32)}),
    ("lengths is int64", {"lengths": np.zeros(2, np.int64)}),
    ("lengths is int32 of shape (3,)", {"lengths": np.zeros(3, np.int32)}),
    ("block_table is int32 of shape (3, 4)", {"block_table": np.zeros((3, 4), np.int32)}),
    ("pages of 24 keys", {"block_table": np.zeros((2, 4), np.int32)}), ("window must be", {"window": 0}),
    ("splits must be", {"splits": 0}), ("positive and finite", {"scale": -1.0}), ("out has shape", {"out": half(2, 4, 16)}),
    ("k_cache is a list", {"k_cache": [1]}),
])
def test_refused_by_name(text, change):
    arguments = dict(q=half(2, 4, 32), k_cache=half(2, 24, 2, 32), v_cache=half(2, 24, 2, 32), lengths=np.zeros(2, np.int32))
    with pytest.raises(tilelang.errors.TileLangError, match=re.escape(text)) as caught:
        flash_decode(**{**arguments, **change})
    assert caught.value.kind.startswith("attention-") and caught.value.hint


def sizes(batch=8, heads=32, kv_heads=8, dim=128, page=64, width=128):
    return DecodeSizes(batch, 1, heads, kv_heads, dim, dim, 4096, page, width)


def test_splits_fill_the_machine():
    m = machine_of(SM90)
    for batch, shared in ((1, True), (4, True), (16, False), (64, False)):  # 8 tiles a sequence, 132 processors
        s = sizes(batch)
        n = decode_splits(m, s, decode_tile(m, s))
        assert (n > 1) == shared and (not shared or batch * 8 * n >= 100), (batch, n)
    s = sizes(1, width=1)
    assert decode_splits(m, s, decode_tile(m, s)) == 1
    long = sizes(64, width=2048)
    assert decode_splits(m, long, decode_tile(m, long)) >= 8


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_89"])
def test_tiles_fit_and_lie_in_one_page_or_have_whole_ones(arch):
    m = machine_of(Target({"kind": "cuda", "arch": arch}))
    for dim in (16, 64, 128, 256):
        for page in (16, 32, 48, 64, 256, None):
            s = sizes(dim=dim, page=page)
            tile = decode_tile(m, s)
            assert shared_bytes(tile, dim, dim) <= m.shared
            for keys in (tile.keys, narrow_tile(m, s).keys):
                assert page is None or page % keys == 0 or keys % page == 0


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("dim, page, narrow, seq_q, planned", [
    (64, 64, False, 1, False), (128, 64, False, 1, True), (128, None, False, 1, False), (128, 16, False, 1, False),
    (256, 64, False, 1, False), (128, 64, True, 1, False), (128, 64, True, 16, True), (128, 64, True, 32, False),
    (96, 64, True, 16, False)])
def test_assembles_without_spills_or_serialised_products(dim, page, narrow, seq_q, planned):
    s = sizes(dim=dim, page=page)._replace(seq_q=seq_q)
    tile, kind = (narrow_tile if narrow else decode_tile)(machine_of(SM90), s), "float8_e4m3fn" if narrow else "float16"
    batch, pages, width = T.dynamic("batch, pages, width")
    steps = T.dynamic("a, b, c, d, e, f")
    strides = tuple((*(16 * x for x in steps[i:i + 3]), 1) for i in (0, 3))
    open_sizes = s._replace(batch=batch, pages=pages if page else batch, width=width)
    wide = narrow and is_wide(machine_of(SM90), s)
    several = several_blocks(machine_of(SM90), s, tile, kind)
    program = decode_attention(DecodeForm(open_sizes, strides, "float16", None, tile, not planned, True, kind, wide=wide,
                                          planned=planned, several=several))
    configs = {"enable_fast_math": True, "enable_hopper": True, "persistent": False,
               "disable_warp_specialized": narrow or several}
    for k in lower(program.func, SM90, {f"tl.{name}": value for name, value in configs.items()}).kernels:
        cubin = nvrtc.compile_cubin(print_kernel(k, fast_math=True), "sm_90a")
        assert cubin.spills == 0 and "C75" not in cubin.log, (k.name, tile, cubin.log)
        if not k.name.endswith("_1") and not narrow:
            loads = "stages of Ks, Vs" if several else "warp groups: 1 loads"
            assert loads in k.launch.plan.pipeline_report, k.launch.plan.report


def test_causal_attention_of_few_queries_in_groups_is_a_decode_step():
    from tilelang.library import flash_attention

    g = np.random.default_rng(3)
    q, k, v = (g.standard_normal(s).astype(np.float16) for s in ((1, 2, 2, 40), (1, 40, 1, 40), (1, 40, 1, 40)))
    found = flash_attention(q, k, v, causal=True, target=TARGETS["sm_90a"])
    for i in range(2):
        seen = slice(0, 39 + i)
        s = np.einsum("hd,kd->hk", q[0, i].astype(float), k[0, seen, 0].astype(float)) * 40**-0.5
        p = np.exp(s - s.max(1, keepdims=True))
        wanted = p / p.sum(1, keepdims=True) @ v[0, seen, 0].astype(float)
        np.testing.assert_allclose(found[0, i].astype(float), wanted, atol=4 * ROUND["float16"])
