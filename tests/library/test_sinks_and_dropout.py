"""flash_attention with sinks and dropout, forward and backward, against float64; the words of Philox."""

import numpy as np
import pytest

from tilelang import errors
from tilelang.library import flash_attention, flash_attention_backward
from tilelang.library.attention import dropout

from test_flash_attention_backward import MASKS, ROUND, SM80, SM90, arrays, seen

GPUS = [pytest.param(SM90, marks=pytest.mark.slow, id="sm_90a"), pytest.param(SM80, marks=pytest.mark.slow, id="sm_80")]
everywhere = pytest.mark.parametrize("on", [pytest.param("tile", id="tile"), pytest.param(None, id="cpu"), *GPUS])


def philox(key, counter, rounds):
    """Words of Philox4x32, by the definition in the paper."""
    w, k = [int(x) for x in counter], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(rounds):
        p, q = w[0] * 0xD2511F53, w[2] * 0xCD9E8D57
        w = [(q >> 32) ^ w[1] ^ k[0], q & 0xFFFFFFFF, (p >> 32) ^ w[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return w


def kept(seed, drop, b, heads, seq_q, seq_k):
    """Which weights of a sequence are kept: (heads, seq_q, seq_k)."""
    found = {}
    out = np.empty((heads, seq_q, seq_k), bool)
    for h, i, j in np.ndindex(*out.shape):
        at = i // 16 * 2 + i // 4 % 2, j // 16 * 4 + j // 2 % 4, h
        if at not in found:
            found[at] = [w for n in (0, 1) for w in philox(seed, (at[0], 2 * at[1] + n, h, b), 7)]
        bit = i % 4 * 8 + i // 8 % 2 * 4 + j % 2 * 2 + j // 8 % 2
        out[h, i, j] = sum((w >> bit & 1) << n for n, w in enumerate(found[at])) >= drop
    return out


def test_philox_is_that_of_the_paper():
    assert philox(0, (0, 0, 0, 0), 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123, kat_vectors
    full = 2**32 - 1
    assert philox(2**64 - 1, (full,) * 4, 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def exact(q, k, v, do, mask, sinks=None, keep=1.0, rest=1.0):
    """(result, logarithms, gradients of q, k, v and sinks, errors of these in one rounding) in float64."""
    group, scale = q.shape[2] // k.shape[2], q.shape[-1]**-0.5
    q, k, v, do = (np.asarray(x).astype(np.float64) for x in (q, k, v, do))
    kk, vv = (np.repeat(x, group, 2) for x in (k, v))
    s = np.where(mask, np.einsum("bqhd,bkhd->bhqk", q, kk) * scale, -np.inf)
    more = np.full((*s.shape[:3], 1), -np.inf) if sinks is None else np.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))
    both = np.concatenate([s, more], -1)
    top = np.maximum(both.max(-1, keepdims=True), -1e300)
    e = np.exp(both - top)
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse, p = np.log(total) + top, e / np.where(total == 0, 1, total)
    p, of_sink = p[..., :-1], p[..., -1]
    weights = p * keep * rest
    out = np.einsum("bhqk,bkhd->bqhd", weights, vv)
    dp = np.einsum("bqhd,bkhd->bhqk", do, vv) * keep * rest
    delta = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - delta) * scale
    rough = p * (abs(dp) + abs(delta) + np.einsum("bqhd,bqhd->bhq", abs(out), abs(do))[..., None]) * scale

    def of_keys(x, y):
        return np.einsum("bhqk,bqhd->bkhd", x, y).reshape(*k.shape[:2], k.shape[2], group, y.shape[-1]).sum(3)

    wants = np.einsum("bhqk,bkhd->bqhd", ds, kk), of_keys(ds, q), of_keys(weights, do), -(of_sink * delta[..., 0]).sum((0, 2))
    errs = (np.einsum("bhqk,bkhd->bqhd", rough, abs(kk)), of_keys(rough, abs(q)), of_keys(weights, abs(do)),
            (of_sink * np.einsum("bqhd,bqhd->bhq", abs(out), abs(do))).sum((0, 2)))
    return out, lse[..., 0], wants, errs


def check(on, mask, sinks, drop, deterministic=None, dtype="float16", batch=1, **sizes):
    q, k, v, do = arrays(dtype=dtype, batch=batch, **sizes)
    accum = np.float64 if dtype == "float64" else np.float32
    sinks = np.array([1.5, -40.0, 3.0, 0.0][:q.shape[2]], accum) if sinks else None
    options = {"sinks": sinks, "dropout": drop / 256, "seed": 2**40 + 7, "target": on, **MASKS[mask]}
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    got = flash_attention_backward(q, k, v, out, lse, do, deterministic=deterministic, **options)
    keep = np.stack([kept(2**40 + 7, drop, b, q.shape[2], q.shape[1], k.shape[1]) for b in range(batch)]) if drop else 1.0
    shown = seen(q.shape[1], k.shape[1], **MASKS[mask])
    want, logs, wants, errs = exact(q, k, v, do, shown, sinks, keep, 256 / (256 - drop))
    eps = ROUND[dtype]
    assert np.abs(out - want).max() <= 4 * eps * np.abs(v).max() * 256 / (256 - drop)
    np.testing.assert_allclose(lse, logs, rtol=0, atol=2e-5)
    assert len(got) == (3 if sinks is None else 4)
    for name, g, w, e in zip(("dq", "dk", "dv", "dsinks"), got, wants, errs):
        over = np.abs(g.astype(np.float64) - w) / (8 * eps * (e + np.abs(w)) + 2.0**-20 * eps)
        assert over.max() <= 1, (name, over.max())


@everywhere
@pytest.mark.parametrize("mask", ["full", "causal", "left"])
def test_sinks(mask, on):
    check(on, mask, True, 0, seq_q=50, seq_k=40, dim=16)


@everywhere
@pytest.mark.parametrize("deterministic", [True, False])
def test_dropout(deterministic, on):
    check(on, "causal", False, 70, deterministic, seq_q=40, seq_k=70, dim=16)


def test_both_in_other_types_and_shapes():
    check(None, "window", True, 26, dtype="bfloat16", batch=2, heads=4, kv_heads=2, seq_q=33, seq_k=33, dim=16)
    check(None, "full", True, 26, dtype="float64", seq_q=5, seq_k=9, dim=16)


def test_packed_sequences_draw_the_numbers_of_their_own():
    cu = np.array([0, 40, 40, 75], np.int32)
    q, k, v, do = (x[0] for x in arrays(80, 80, dim=16))
    sinks = np.array([0.5, 2.0], np.float32)
    options = {"sinks": sinks, "dropout": 0.25, "seed": 3, "causal": True}
    out, lse = flash_attention(q, k, v, cu_seqlens_q=cu, return_lse=True, **options)
    got = flash_attention_backward(q, k, v, out, lse, do, cu_seqlens_q=cu, **options)
    total = np.zeros(2)
    for n, (a, b) in enumerate(zip(cu, cu[1:])):
        keep, x = kept(3, 64, n, 2, b - a, b - a)[None], [t[None, a:b] for t in (q, k, v, do)]
        if a == b:
            continue
        want, logs, wants, errs = exact(*x, seen(b - a, b - a, True), sinks, keep, 4 / 3)
        assert np.abs(out[a:b] - want[0]).max() <= 2.0**-8 * np.abs(v).max()
        for g, w, e in zip(got[:3], wants, errs):
            assert (np.abs(g[a:b].astype(np.float64) - w[0]) <= 2.0**-8 * (e[0] + np.abs(w[0])) + 2.0**-30).all()
        total += wants[3]
    np.testing.assert_allclose(got[3], total, rtol=2e-2, atol=2e-2)


def test_queries_without_keys_give_the_sink():
    q, k, v, do = arrays(seq_k=0)
    out, lse = flash_attention(q, k, v, return_lse=True, sinks=np.array([1.0, 2.0], np.float32))
    assert not out.any() and (lse == np.array([[[1.0], [2.0]]])).all()


def test_how_much_is_dropped_and_that_it_looks_independent():
    keep = kept(5, 64, 0, 2, 128, 128)
    assert abs(keep.mean() - 0.75) < 4 * (0.75 * 0.25 / keep.size)**0.5
    for other in (keep[::-1], np.roll(keep, 1, 1), np.roll(keep, 1, 2), np.roll(keep, 8, 1), np.roll(keep, 8, 2),
                  kept(6, 64, 0, 2, 128, 128), kept(5, 64, 1, 2, 128, 128)):
        assert abs((keep == other).mean() - 0.625) < 0.02


def test_wrong_arguments():
    q, k, v, _ = arrays()
    for options, text in (({"dropout": 1.0}, "dropout is a fraction"),
                          ({"dropout": 0.1, "seed": np.zeros(2, np.int64)}, "seed is"),
                          ({"sinks": np.zeros(3, np.float32)}, "sinks are float32")):
        with pytest.raises(errors.TileLangError, match=text):
            flash_attention(q, k, v, **options)
    assert dropout.check_dropout(0.001, None, q) == (0, None)


def test_autograd_of_both():
    import torch

    torch.manual_seed(0)
    given = [torch.randn(1, n, h, 16, dtype=torch.float64, requires_grad=True) for n, h in ((3, 2), (5, 1), (5, 1))]
    given.append(torch.randn(2, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(lambda q, k, v, s: flash_attention(q, k, v, sinks=s, dropout=0.3, seed=1, return_lse=True),
                                    given, fast_mode=True)
    out = flash_attention(*given[:3], dropout=0.5)  # a new seed, which backward knows
    first, = torch.autograd.grad(out.sum(), given[2], retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(out.sum(), given[2])[0])
