"""flash_attention on every execution against float64; its arguments; its tiles."""

import importlib
import inspect
import itertools
import math
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import tilelang
from tilelang.env import env
from tilelang.library import flash_attention
from tilelang.library import place
from tilelang.library.attention import build
from tilelang.library.attention.form import Tile

module = importlib.import_module("tilelang.library.attention.flash_attention")

ROUND = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
TARGETS = {"tile": "tile", "cpu": None, "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
           "sm_80": {"kind": "cuda", "arch": "sm_80"}}
everywhere = pytest.mark.parametrize("on", TARGETS)


def normal(rng, shape, dtype="float16"):
    return rng.standard_normal(shape).astype(np.float32).astype(NUMPY[dtype])


def limits(causal, window):
    left, right = (None, None) if window is None else (window - 1, window - 1) if isinstance(window, int) else window
    return left, 0 if causal else right


def reference(q, k, v, causal=False, window=None, scale=None):
    """(result, logarithms) in float64 of bshd arrays, by the definition."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1]**-0.5 if scale is None else scale)
    left, right = limits(causal, window)
    at, key = np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], np.arange(k.shape[1])[None, :]
    sees = np.ones(s.shape[2:], bool) if right is None else key <= at + right
    sees = sees if left is None else sees & (key >= at - left)
    s = np.where(sees, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isinf(top), 0.0, top)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return np.einsum("bhqk,bkhd->bqhd", p / np.where(total == 0, 1.0, total), v), lse


def bound(q, k, v, dtype, scale=None, tf32=False):
    """What the docstring of flash_attention promises. tf32: float32 on a GPU."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    d = q.shape[-1]
    longest = math.sqrt((q**2).sum(-1).max(initial=0.0) * (k**2).sum(-1).max(initial=0.0))
    score = d * 2.0**-24 * longest * (d**-0.5 if scale is None else scale)
    if tf32:
        score = 2.0**-8 * longest * (d**-0.5 if scale is None else scale)
        return float(np.abs(v).max(initial=0.0)) * (2.0**-8 + score), score + 2.0**-18 * 8
    small = 2.0**-25 * k.shape[1] if dtype == "float16" else 0.0
    return float(np.abs(v).max(initial=0.0)) * (2 * ROUND[dtype] + 2 * score + 2.0**-18 + small), 2 * score + 2.0**-18 * 8


def distance(got, want):
    """Largest difference; infinite where only one is infinite or NaN, and for other shapes."""
    got = np.asarray(got).astype(np.float64)
    if got.shape != want.shape:
        return math.inf
    with np.errstate(invalid="ignore"):
        d = np.where(got == want, 0.0, np.abs(got - want))
    return float(np.where(np.isnan(d), np.inf, d).max(initial=0.0))


def check(on, batch=1, seq_q=65, seq_k=130, heads=2, kv_heads=1, dim=64, dim_v=None, causal=False, window=None, dtype="float16",
          layout="bshd", scale=None, spread=1.0):
    rng = np.random.default_rng(0)
    q = (normal(rng, (batch, seq_q, heads, dim), dtype) * NUMPY[dtype](spread)).astype(NUMPY[dtype])
    k, v = normal(rng, (batch, seq_k, kv_heads, dim), dtype), normal(rng, (batch, seq_k, kv_heads, dim_v or dim), dtype)

    def turned(x):
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)) if layout == "bhsd" else x

    got, lse = flash_attention(*map(turned, (q, k, v)), causal=causal, window=window, return_lse=True, layout=layout,
                               scale=scale, target=TARGETS[on])
    want, want_lse = reference(q, k, v, causal, window, scale)
    allowed, allowed_lse = bound(q, k, v, dtype, scale, dtype == "float32" and on.startswith("sm_"))
    assert got.dtype == q.dtype and lse.dtype == np.float32
    assert distance(turned(got), want) <= allowed
    assert distance(lse, want_lse) <= allowed_lse


@everywhere
@pytest.mark.parametrize("dim", [64, 128])
def test_float32_was_refused_everywhere(on, dim):
    check(on, seq_q=70, seq_k=100, dim=dim, causal=True, dtype="float32")


# ---- results ---------------------------------------------------------------------------------------------------------------

LENGTHS = (1, 7, 65, 130, 257)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_q, seq_k", list(itertools.product(LENGTHS, LENGTHS)))
def test_ragged_lengths(seq_q, seq_k, causal):
    check("cpu", 2, seq_q, seq_k, causal=causal)


@everywhere
@pytest.mark.parametrize("seq_q, seq_k", [(1, 257), (130, 65), (257, 130)])
def test_lengths_that_no_tile_divides(on, seq_q, seq_k):
    check(on, 1, seq_q, seq_k, causal=True)


@everywhere
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 1), (8, 1)])
def test_grouped_queries(on, heads, kv_heads):
    check(on, 2, 33, 70, heads, kv_heads, causal=True)


@everywhere
@pytest.mark.parametrize("window, causal", [(1, True), (16, True), (100, True), (16, False), ((None, 3), False),
                                            ((20, None), False), ((5, 40), True)])
def test_windows(on, window, causal):
    check(on, 1, 130, 200, window=window, causal=causal)


@pytest.mark.parametrize("on, scale", [("cpu", 0.8), ("cpu", 1.1), ("sm_90a", 1.1)])
def test_rows_whose_first_tiles_show_them_nothing(on, scale):
    """What their maximum starts from, times the scale, is finite; contracted to one rounding, it does not turn 0 to NaN."""
    check(on, 1, 130, 200, 1, 1, window=5, scale=scale)


@everywhere
@pytest.mark.parametrize("dim, dim_v, dtype", [(128, 128, "bfloat16"), (256, 256, "float16"), (80, 48, "float16"),
                                               (16, 240, "bfloat16"), (192, 128, "float16"), (112, 72, "bfloat16")])
def test_head_dimensions_and_types(on, dim, dim_v, dtype):
    check(on, 1, 70, 90, 1, 1, dim, dim_v, causal=True, dtype=dtype)


@everywhere
def test_heads_before_sequences(on):
    check(on, 2, 65, 70, 4, 2, causal=True, layout="bhsd")


@everywhere
def test_scores_that_rise_by_far_are_rescaled(on, monkeypatch):
    """Large scores of either sign: maxima move by hundreds of powers of two, weights underflow."""
    monkeypatch.setattr(build, "attention_tile", lambda *_, **__: Tile(64, 32, 2, 128))
    check(on, 1, 64, 200, 1, 1, spread=40.0, scale=0.5)


@everywhere
def test_rows_that_rise_a_little_each_step(on, monkeypatch):
    """Scores grow by 3 powers of two from one tile of keys to the next."""
    monkeypatch.setattr(build, "attention_tile", lambda *_, **__: Tile(64, 16, 2, 128))
    rng = np.random.default_rng(1)
    q, k, v = (normal(rng, (1, n, 1, 16)) for n in (64, 160, 160))
    q[..., 0], k[..., 0] = 4.0, (np.arange(160) // 16 * 3 * math.log(2))[None, :, None]
    got, lse = flash_attention(q, k, v, scale=0.25, return_lse=True, target=TARGETS[on])
    want, want_lse = reference(q, k, v, scale=0.25)
    allowed, allowed_lse = bound(q, k, v, "float16", 0.25)
    assert distance(got, want) <= allowed and distance(lse, want_lse) <= allowed_lse


@everywhere
def test_not_a_number_is_not_hidden(on):
    rng = np.random.default_rng(2)
    q, k, v = (normal(rng, (1, 70, 1, 64)) for _ in range(3))
    q[0, 3], k[0, 60, 0, 5], v[0, 50, 0, 7] = np.nan, np.nan, np.nan
    got, lse = flash_attention(q, k, v, causal=True, return_lse=True, target=TARGETS[on])
    assert np.isnan(got[0, 3]).all() and np.isnan(lse[0, 0, 3])
    assert np.isnan(got[0, 60:]).all() and np.isnan(got[0, 50:, 0, 7]).all()
    assert np.isfinite(lse[0, 0, :3]).all() and np.isfinite(lse[0, 0, 4:60]).all()


# ---- packed ----------------------------------------------------------------------------------------------------------------


def packed(on, len_q, len_k, heads=2, kv_heads=1, dim=64, beyond=0, **options):
    rng = np.random.default_rng(3)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (len_q, len_k))
    q = normal(rng, (cu_q[-1] + beyond, heads, dim))
    k, v = (normal(rng, (cu_k[-1] + beyond, kv_heads, dim)) for _ in range(2))
    got, lse = flash_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, target=TARGETS[on], **options)
    assert got.shape == q.shape and lse.shape == (heads, len(q))
    for s in range(len(len_q)):
        at, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        parts = q[None, at], k[None, keys], v[None, keys]
        want, want_lse = reference(*parts, **options)
        allowed, allowed_lse = bound(*parts, "float16")
        assert distance(got[None, at], want) <= allowed and distance(lse[None, :, at], want_lse) <= allowed_lse


PACKINGS = {"causal": dict(len_q=[37, 200, 1, 128], len_k=[67, 200, 31, 128], causal=True),
            "window": dict(len_q=[5, 1], len_k=[70, 300], window=16),
            "empty": dict(len_q=[0, 130, 0, 1, 65, 0], len_k=[10, 130, 0, 257, 0, 7], beyond=40),
            "one": dict(len_q=[70], len_k=[33], causal=True)}


@everywhere
@pytest.mark.parametrize("name", PACKINGS)
def test_packed_sequences(on, name):
    packed(on, **PACKINGS[name])


def test_packed_keys_as_queries():
    rng = np.random.default_rng(4)
    q, k, v = (normal(rng, (90, 2, 32)) for _ in range(3))
    cu = np.array([0, 50, 90], np.int32)
    both = flash_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    assert np.array_equal(flash_attention(q, k, v, cu_seqlens_q=cu, causal=True), both)


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_every_row_of_a_packed_call_has_one_tile(rows, monkeypatch):
    monkeypatch.setattr(build, "attention_tile", lambda *_, **__: Tile(rows, 16, 1, 128))
    packed("cpu", [rows, 0, 1, rows + 1, 2 * rows, rows - 1], [3, 5, 0, 1, 7, 20], 1, 1, 16)


# ---- errors -----


def zeros(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("kind, text, args, options", [
    ("argument", "q is a list", ([1], zeros(1, 4, 1, 16), zeros(1, 4, 1, 16)), {}),
    ("argument", "elements of int32", (zeros(1, 4, 1, 16, dtype=np.int32),) * 3, {}),
    ("shape", "expected 4 dimensions", (zeros(4, 1, 16),) * 3, {}),
    ("shape", "do not go together", (zeros(1, 4, 1, 16), zeros(1, 4, 1, 16), zeros(1, 5, 1, 16)), {}),
    ("shape", "no multiple of 2 kv heads", (zeros(1, 4, 3, 16), zeros(1, 4, 2, 16), zeros(1, 4, 2, 16)), {}),
    ("shape", "multiple of 8 up to 256, found 264", (zeros(1, 4, 1, 264),) * 3, {}),
    ("shape", "`out` is no tensor of shape (1, 4, 1, 20)", (zeros(1, 4, 1, 20),) * 3, {"out": zeros(1, 4, 1, 32)}),
    ("shape", "up to 256, found 272", (zeros(1, 4, 1, 272),) * 3, {}),
    ("shape", "k is bfloat16", (zeros(1, 4, 1, 16), zeros(1, 4, 1, 16, dtype=ml_dtypes.bfloat16), zeros(1, 4, 1, 16)), {}),
    ("shape", "out has shape", (zeros(1, 4, 1, 16),) * 3, {"out": zeros(1, 5, 1, 16)}),
    ("shape", "not contiguous", (zeros(1, 4, 1, 16),) * 3, {"out": zeros(1, 4, 1, 32)[..., ::2]}),
    ("shape", "cu_seqlens_q is int64", (zeros(4, 1, 16),) * 3, {"cu_seqlens_q": np.array([0, 4])}),
    ("shape", "cu_seqlens_k is int32 of shape (3,)", (zeros(4, 1, 16),) * 3,
     {"cu_seqlens_q": np.array([0, 4], np.int32), "cu_seqlens_k": np.array([0, 2, 4], np.int32)}),
    ("shape", "cu_seqlens_k is not given", (zeros(4, 1, 16), zeros(5, 1, 16), zeros(5, 1, 16)),
     {"cu_seqlens_q": np.array([0, 4], np.int32)}),
    ("option", "without cu_seqlens_q", (zeros(1, 4, 1, 16),) * 3, {"cu_seqlens_k": np.array([0, 4], np.int32)}),
    ("option", "layout must be one of", (zeros(1, 4, 1, 16),) * 3, {"layout": "sbhd"}),
    ("option", "a window of 0 keys", (zeros(1, 4, 1, 16),) * 3, {"window": 0}),
    ("option", "negative side", (zeros(1, 4, 1, 16),) * 3, {"window": (-1, 3)}),
    ("option", "an int or (left, right)", (zeros(1, 4, 1, 16),) * 3, {"window": 2.5}),
    *(("option", "positive and finite", (zeros(1, 4, 1, 16),) * 3, {"scale": x}) for x in (0.0, -1.0, math.inf, math.nan)),
])
def test_refused_by_name(kind, text, args, options):
    for _ in range(2):  # what is remembered of a call must not let the next one pass
        with pytest.raises(tilelang.errors.TileLangError, match=re.escape(text)) as caught:
            flash_attention(*args, **options)
        assert caught.value.kind == f"attention-{kind}" and caught.value.hint


def test_the_result_lies_in_the_queries_or_apart():
    """Of a strided array too, and whatever the call before had for `out`."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 70, 6, 16)).astype(np.float16)
    q, k, v = x[:, :, :2], x[:, :, 2:4], x[:, :, 4:]
    want = flash_attention(q, k, v)
    assert np.array_equal(flash_attention(q, k, v, out=np.zeros_like(want)), want)
    for out, name in ((k, "k"), (v, "v"), (x[:, :, 1:3], "q")):
        with pytest.raises(tilelang.errors.TileLangError, match=f"out and {name} have memory in common"):
            flash_attention(q, k, v, out=out)
    assert np.array_equal(flash_attention(q, k, v, out=q), want) and np.array_equal(q, want)


def test_tensors_that_require_a_gradient_and_mixed_arrays():
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 4, 1, 16, dtype=torch.float16, requires_grad=True)
    with torch.no_grad():
        assert not flash_attention(q, q, q).any()
    with pytest.raises(tilelang.errors.TileLangError, match="all of one kind; k is a ndarray"):
        flash_attention(q.detach(), zeros(1, 4, 1, 16), zeros(1, 4, 1, 16))


# ---- arrays ----------------------------------------------------------------------------------------------------------------


def test_slices_of_one_array():
    rng = np.random.default_rng(5)
    qkv = normal(rng, (2, 60, 3, 4, 32))
    q, k, v = (qkv[:, :, i] for i in range(3))
    assert np.array_equal(flash_attention(q, k, v), flash_attention(*(x.copy() for x in (q, k, v))))


@pytest.mark.parametrize("odd", ["rows", "step", "address"])
def test_arrays_a_kernel_cannot_read_in_place_are_copied(odd):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(6)
    q, k, v = (torch.from_numpy(normal(rng, (1, 60, 2, 32))) for _ in range(3))
    want = flash_attention(q, k, v)
    if odd == "rows":
        k = k.transpose(1, 3).contiguous().transpose(1, 3)
    elif odd == "step":
        k = torch.cat([k, k[..., :5]], -1)[..., :32]
    else:
        k = torch.cat([k.flatten()[:1], k.flatten()])[1:].view(k.shape)
    assert torch.equal(flash_attention(q, k, v), want)


def test_torch_tensors_and_out():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 50, 64).bfloat16() for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    room = torch.empty_like(q)
    got, lse = flash_attention(q, k, v, causal=True, layout="bhsd", out=room, return_lse=True)
    assert got is room and lse.shape == (2, 4, 50) and lse.dtype == torch.float32
    assert float((got.float() - want).abs().max()) <= bound(*(x.float().numpy() for x in (q, k, v)), "bfloat16")[0]


def test_no_keys_no_queries():
    rng = np.random.default_rng(7)
    q, none = normal(rng, (2, 5, 2, 32)), np.zeros((2, 0, 2, 32), np.float16)
    got, lse = flash_attention(q, none, none, return_lse=True)
    assert not got.any() and (lse == -np.inf).all()
    assert flash_attention(none, q, q).shape == (2, 0, 2, 32)
    cu = np.zeros(3, np.int32)
    assert flash_attention(none[0], none[0], none[0], cu_seqlens_q=cu).shape == (0, 2, 32)


def test_one_kernel_serves_any_shape_and_scale_where_shapes_are_dynamic():
    rng = np.random.default_rng(8)
    made = []
    place.KERNELS.clear()
    module._RUNS.clear()
    with env.using(TILELANG_LIBRARY_DYNAMIC_SHAPES="1"):
        for batch, length, scale in ((2, 70, 0.1), (3, 80, 0.1), (4, 200, 0.3), (5, 90, 0.2), (1, 100, 0.1)):
            qkv = normal(rng, (batch, length, 3, 2, 32))
            q, k, v = (qkv[:, :, i] for i in range(3))
            got = flash_attention(q, k, v, causal=True, scale=scale)
            assert distance(got, reference(q, k, v, True, scale=scale)[0]) <= bound(q, k, v, "float16", scale)[0]
            made.append(len(place.KERNELS))
    module._RUNS.clear()
    assert made == [1, 1, 1, 1, 2]  # a batch of one sequence has a kernel of its own: its stride is no symbol


@pytest.mark.parametrize("first", ["from tilelang.library import flash_attention",
                                   "from tilelang.library.attention.flash_attention import flash_attention",
                                   "import tilelang.library.attention.flash_attention, tilelang.library"])
def test_the_name_means_the_function_however_it_is_imported(first):
    code = f"{first}\nimport tilelang.library, types; assert isinstance(tilelang.library.flash_attention, types.FunctionType)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert inspect.unwrap(tilelang.library.flash_attention) is module.flash_attention
    assert "flash_attention" in dir(tilelang.library)
    with pytest.raises(AttributeError, match="nothing"):
        _ = tilelang.library.nothing


@pytest.mark.parametrize("scale", [[1, 2], "x", float("nan"), -1.0])
def test_a_scale_that_is_no_number_is_named(scale):
    q = np.zeros((1, 8, 1, 64), np.float16)
    with pytest.raises(ValueError, match=re.escape(f"scale must be positive and finite, found {scale}")):
        flash_attention(q, q, q, scale=scale)
