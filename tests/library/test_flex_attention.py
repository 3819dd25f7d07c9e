"""flex_attention against float64: functions of scores, masks by blocks, tensors that they read."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang import errors
from tilelang.library import create_block_mask, flash_attention, flash_attention_backward, flex_attention
from tilelang.library.attention import flex_attention as flex
from tilelang.library.attention.backward import backward_form
from tilelang.library.attention.flex_attention import growing
from tilelang.library.attention.form import ScoreFunctions

TARGETS = {"tile": "tile", "cpu": None, "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
           "sm_80": {"kind": "cuda", "arch": "sm_80"}}


def arrays(seq_q, seq_k, heads=2, kv_heads=1, dim=64, batch=1, dtype=np.float16):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((batch, n, h, dim)).astype(dtype)
            for n, h in ((seq_q, heads), (seq_k, kv_heads), (seq_k, kv_heads))]


def reference(q, k, v, change=lambda s, *_: s, mask=None, tensors=()):
    """(result, logarithms) of bshd arrays; change and mask take arrays of indices."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1]**-0.5
    at = np.ogrid[:s.shape[0], :s.shape[1], :s.shape[2], :s.shape[3]]
    s = change(s, *at, *tensors)
    s = s if mask is None else np.where(mask(*at, *tensors), s, -np.inf)
    top = np.where(np.isinf(s.max(-1, keepdims=True)), 0.0, s.max(-1, keepdims=True))
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return np.einsum("bhqk,bkhd->bqhd", p / np.where(total == 0, 1.0, total), v), lse


def close(got, want, v):
    out, lse = got
    assert np.abs(out.astype(np.float64) - want[0]).max() <= 2.0**-10 * np.abs(v).max() * 1.1
    both = np.where(lse == want[1], 0.0, np.abs(np.nan_to_num(lse, neginf=-1e9) - np.nan_to_num(want[1], neginf=-1e9)))
    assert both.max() <= 2e-5, both.max()


SLOPES = np.array([0.5, 0.125], np.float32)
SCORES = {
    "softcap": (lambda s, b, h, i, j: 30.0 * T.tanh(s / 30.0), lambda s, b, h, i, j: 30.0 * np.tanh(s / 30.0), ()),
    "alibi": (lambda s, b, h, i, j, slopes: s + slopes[h] * T.cast(j - i, "float32"),
              lambda s, b, h, i, j, slopes: s + slopes[h] * (j - i), (SLOPES,)),
    "by index": (lambda s, b, h, i, j: T.if_then_else(i % 7 == j % 7, s + 1.0, s * 2.0),
                 lambda s, b, h, i, j: np.where(i % 7 == j % 7, s + 1.0, s * 2.0), ()),
}


@pytest.mark.parametrize("on", TARGETS)
@pytest.mark.parametrize("name", SCORES)
def test_functions_of_scores(name, on):
    change, exact, tensors = SCORES[name]
    q, k, v = arrays(70, 150)
    got = flex_attention(q, k, v, score_mod=change, tensors=tensors, return_lse=True, target=TARGETS[on])
    close(got, reference(q, k, v, exact, tensors=tensors), v)


MASKS = {
    "causal": (lambda b, h, i, j: i >= j, ()), "window": (lambda b, h, i, j: (i >= j) & (i - j < 70), ()),
    "prefix or causal": (lambda b, h, i, j: (j < 40) | (i >= j), ()), "head": (lambda b, h, i, j: (i >= j) | (h == 1), ()),
    "documents": (lambda b, h, i, j, doc: doc[i] == doc[j], (np.repeat(np.arange(4, dtype=np.int32), 50),)),
    "nothing": (lambda b, h, i, j: i > j + 120, ()),
}


@pytest.mark.parametrize("on", TARGETS)
@pytest.mark.parametrize("name", MASKS)
def test_masks_by_blocks(name, on):
    mask, tensors = MASKS[name]
    q, k, v = arrays(200, 200)
    blocks = create_block_mask(mask, 200, 200, heads=2 if name == "head" else 1, block=(64, 64), tensors=tensors)
    got = flex_attention(q, k, v, block_mask=blocks, return_lse=True, target=TARGETS[on])
    close(got, reference(q, k, v, mask=mask, tensors=tensors), v)


def test_hidden_blocks_are_left_out_and_whole_ones_need_no_mask():
    blocks = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 128), 512, 512, block=(64, 64))
    assert blocks.blocks[0, 0, 5, :5].tolist() == [3, 1, 4, 3, 5]
    assert blocks.density == (1 + 2 + 6 * 3) / 64
    assert create_block_mask(lambda b, h, i, j: i < 0, 100, 100).density == 0.0


def test_a_function_of_scores_under_a_mask_of_wide_blocks():
    """Tiles of 128 queries by two warp groups, and two batches."""
    mask = MASKS["window"][0]
    q, k, v = arrays(300, 300, batch=2, kv_heads=2)
    change, exact, _ = SCORES["softcap"]
    got = flex_attention(q, k, v, score_mod=change, block_mask=create_block_mask(mask, 300, 300), return_lse=True,
                         target=TARGETS["sm_90a"])
    close(got, reference(q, k, v, exact, mask), v)


@pytest.mark.parametrize("on", ["tile", "sm_90a"])
@pytest.mark.parametrize("name", ["window", "nothing", None])
def test_hidden_keys_have_no_weight_where_a_function_bounds_scores(name, on):
    """The maximum is that of the scores before the function, which makes a finite number of -inf."""
    mask = name and MASKS[name][0]
    q, k, v = arrays(200, 200)
    blocks = mask and create_block_mask(mask, 200, 200, block=(64, 64))
    got = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: 2.0 * T.tanh(s / 2.0), block_mask=blocks, return_lse=True,
                         target=TARGETS[on])
    close(got, reference(q, k, v, lambda s, *_: 2.0 * np.tanh(s / 2.0), mask), v)


@pytest.mark.parametrize("score, grows", [
    (lambda s, b, h, i, j: 30.0 * T.tanh(s / 30.0), True), (lambda s, b, h, i, j: s * 2.0 - 1.0, True),
    (lambda s, b, h, i, j: T.max(s, 0.0) + T.exp(s), True), (lambda s, b, h, i, j: -3.0 * T.sigmoid(s * -1.0), True),
    (lambda s, b, h, i, j: T.min(s, -1.0 * s), False), (lambda s, b, h, i, j: -1.0 * s, False),
    (lambda s, b, h, i, j: s * s, False), (lambda s, b, h, i, j: 1.0 / s, False),
    (lambda s, b, h, i, j: s + T.cast(j, "float32"), False), (lambda s, b, h, i, j: T.sin(s), False),
    (lambda s, b, h, i, j: T.if_then_else(i >= j, s, 0.0), False), (lambda s, b, h, i, j: 1.0, False),
    (lambda s, b, h, i, j: s * T.sqrt(2.0), False), (lambda s, b, h, i, j: s / T.sqrt(2.0), False)])
def test_which_functions_of_scores_grow_with_them(score, grows):
    assert (growing(score, 1.0) is not None) == grows


def test_score_and_mask_read_their_own_tensors():
    doc = MASKS["documents"][1][0]
    change, exact, tensors = SCORES["alibi"]
    q, k, v = arrays(200, 200)
    blocks = create_block_mask(MASKS["documents"][0], 200, 200, tensors=(doc,))
    got = flex_attention(q, k, v, score_mod=change, tensors=tensors, block_mask=blocks, return_lse=True)
    want = reference(q, k, v, lambda s, b, h, i, j: exact(s, b, h, i, j, SLOPES), lambda b, h, i, j: doc[i] == doc[j])
    close(got, want, v)


def test_nothing_to_compute():
    q, k, v = arrays(5, 0)
    out, lse = flex_attention(q, k, v, return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_layouts_and_scale():
    q, k, v = arrays(64, 64)
    want = flex_attention(q * np.float16(2), k, v)
    heads_first = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    got = flex_attention(*heads_first, layout="bhsd", scale=2 * 64**-0.5)
    assert np.array_equal(got.swapaxes(1, 2), want)


def test_wrong_arguments_are_named():
    q, k, v = arrays(100, 100)
    with pytest.raises(errors.TileLangError, match="block mask is for 64 queries"):
        flex_attention(q, k, v, block_mask=create_block_mask(lambda b, h, i, j: i >= j, 64, 100))
    with pytest.raises(errors.TileLangError, match="at most 2"):
        flex_attention(q, k, v, tensors=(SLOPES, SLOPES, SLOPES))
    with pytest.raises(errors.TileLangError, match="multiples of 64|a block of"):
        create_block_mask(lambda b, h, i, j: i >= j, 64, 100, block=(32, 64))
    with pytest.raises(errors.TileLangError, match="a block mask of -1 queries"):
        create_block_mask(lambda b, h, i, j: i >= j, -1, 100)
    with pytest.raises(errors.TileLangError, match="score_mod returns a comparison") as e:
        flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: i >= j)
    assert e.value.span.file == __file__  # the line of the function, not one of the library


def test_a_kernel_of_scores_is_not_that_of_a_variable_before_it_changed():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 70, 2, 64)).astype(np.float32)
    factor = 1.0

    def score_mod(score, b, h, i, j):
        return score * factor

    soft = flex_attention(q, k, v, score_mod=score_mod)
    factor = 50.0
    hard = flex_attention(q, k, v, score_mod=score_mod)
    assert np.array_equal(hard, flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score * 50.0))
    assert not np.allclose(soft, hard, atol=0.1)
    factor = 1.0
    assert np.array_equal(flex_attention(q, k, v, score_mod=score_mod), soft)


def test_a_block_mask_is_made_anew_when_a_variable_of_its_function_changes():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 2, 64)).astype(np.float32)
    width = 10

    def mask_mod(b, h, i, j):
        return (i >= j) & (i - j < width)

    narrow = create_block_mask(mask_mod, 100, 100)
    first = flex_attention(q, k, v, block_mask=narrow)
    width = 60
    with pytest.raises(ValueError, match="create_block_mask again"):
        flex_attention(q, k, v, block_mask=narrow)
    wide = flex_attention(q, k, v, block_mask=create_block_mask(mask_mod, 100, 100))
    assert np.allclose(wide, flash_attention(q, k, v, causal=True, window=(59, 0)), atol=1e-5)
    assert not np.allclose(first, wide, atol=0.1)


@pytest.mark.parametrize("rows, keys", [(64, 64), (192, 64), (128, 64), (64, 128)])
def test_gradients_under_masks_of_small_blocks_read_the_list_of_other_blocks(rows, keys):
    """Blocks of 128 queries computed dQ of stored gradients, by the list of the first ones; blocks of 128 keys dK."""
    seq = 2 * max(rows, keys)
    q, k, v = arrays(seq, seq, heads=1, dim=96)
    mask = create_block_mask(lambda b, h, i, j: j <= i, seq, seq, block=(rows, keys))
    number = flex._number(None, ((), ()), mask.key)
    given = None, None, mask.blocks, mask.columns, number, None, "bshd", "cuda -arch=sm_90a"
    out, lse = flex._FUNCTION.forward(q, k, v, *given)
    grad = np.random.default_rng(1).standard_normal(out.shape).astype(np.float16)
    found = flex._FUNCTION.backward(q, k, v, out, lse, *given, grad, None)
    wanted = flash_attention_backward(q, k, v, out, lse, grad, causal=True)
    for x, y in zip(found, wanted):
        assert np.abs(x.astype(np.float64) - y).max() <= 2.0**-8 * np.abs(y).max()


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("block", [(64, 64), (64, 192), (128, 64), (192, 128), (256, 64)])
def test_tiles_of_gradients_divide_the_blocks_of_masks(dim, block):
    """1,392 of 3,136 forms of 16 bits and 192 columns or more did not."""
    steps = 600 * 2 * dim, 2 * dim, dim, 1
    q, k, v = (np.lib.stride_tricks.as_strided(np.zeros(8, np.float16), (2, 600, 2, dim), [2 * s for s in steps])
               for _ in range(3))
    functions = ScoreFunctions(None, lambda *at: at[3] <= at[2], block, (1, 1, 3, 9), (1, 1, 3, 9))
    at, p = flex.flex_problem((q, k, v), (), None, "cuda -arch=sm_90a", scale=None, layout="bshd", with_lse=False)
    f, _ = backward_form(p, flex.machine_of(at.target, at.sms, p.dtype), dict.fromkeys(("q", "out", "grad_out"), q), at, None,
                         functions)
    (rows, keys), tile = block, f.plain.tile
    assert rows % tile.rows == rows % f.query.rows == keys % tile.keys == keys % f.query.keys == 0
    assert not f.lean or rows % f.query.keys == 0
