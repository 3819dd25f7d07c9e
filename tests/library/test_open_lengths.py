"""Attention of several lengths: the second length makes a kernel that all others share."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.library import create_block_mask, flash_attention, flash_attention_backward, flex_attention, place
from tilelang.library.attention.build import _attention
from tilelang.library.attention.form import AttentionForm, Tile
from tilelang.library.attention.problem import Mask, Sizes
from tilelang.library.attention_engine import AttentionEngine, Sigmoid

LENGTHS = (64, 72, 130)


@pytest.fixture
def made(monkeypatch):
    """The programs that are compiled."""
    found, real = [], place.Place._compiled
    monkeypatch.setattr(place.Place, "_compiled", lambda at, *args: found.append(args) or real(at, *args))
    return found


def arrays(seq, heads, seed=0, batch=1):
    return np.random.default_rng(seed).standard_normal((4, batch, seq, heads, 16)).astype(np.float32)


def softmax(s, seen):
    s = np.where(seen, s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def near(got, want):
    return np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 0)}], ids=["all", "causal", "window"])
def test_two_kernels_of_each_direction_answer_all_lengths(made, options):
    for n in LENGTHS:
        q, k, v, do = arrays(n, 3)  # a number of heads that no other test of the process has
        behind = np.arange(n)[:, None] - np.arange(n)
        seen = (behind >= 0) & (behind <= options.get("window", (n, 0))[0]) if options else behind > -n
        out, lse = flash_attention(q, k, v, return_lse=True, **options)
        dq, dk, dv = flash_attention_backward(q, k, v, out, lse, do, **options)
        p = softmax(np.einsum("bqhd,bkhd->bhqk", q, k) / 4, seen)
        dp = np.einsum("bqhd,bkhd->bhqk", do, v)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / 4
        for got, w, text, x in ((out, p, "bhqk,bkhd->bqhd", v), (dq, ds, "bhqk,bkhd->bqhd", k), (dk, ds, "bhqk,bqhd->bkhd", q),
                                (dv, p, "bhqk,bqhd->bkhd", do)):
            assert near(got, np.einsum(text, w, x))
    assert len(made) == 4


def test_functions_and_masks_of_any_length(made):
    import torch

    def slopes(s, b, h, i, j, x):
        return s + x[j]

    def causal(b, h, i, j):
        return i >= j

    for n in LENGTHS:
        q, k, v, do = (torch.from_numpy(x).requires_grad_() for x in arrays(n, 5))
        bias, mask = torch.linspace(-1, 1, n), create_block_mask(causal, n, n, block=(64, 64), device="cpu")
        out = flex_attention(q, k, v, score_mod=slopes, block_mask=mask, tensors=(bias,))
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4 + bias
        want = torch.einsum("bhqk,bkhd->bqhd", s.masked_fill(torch.ones(n, n).triu(1) > 0, -torch.inf).softmax(-1), v)
        for g, w in zip((out, *torch.autograd.grad(out, (q, k, v), do)), (want, *torch.autograd.grad(want, (q, k, v), do))):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
    assert len(made) == 4


def test_descriptions_of_any_length(made):
    import torch

    engine = AttentionEngine(Sigmoid(-1.0), lambda s, b, h, i, j: 2.0 * T.tanh(s))
    for n in LENGTHS:
        q, k, v, do = (torch.from_numpy(x).requires_grad_() for x in arrays(n, 2))
        out = engine(q, k, v)
        s = 2 * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k) / 4)
        want = torch.einsum("bhqk,bkhd->bqhd", (s - 1).sigmoid(), v)
        for g, w in zip((out, *torch.autograd.grad(out, (q, k, v), do)), (want, *torch.autograd.grad(want, (q, k, v), do))):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
    assert len(made) == 4


@pytest.mark.parametrize("mask", [Mask(None, 0), Mask(40, 0)], ids=str)
def test_persistent_blocks_of_masks_compute_every_tile_of_any_length(mask):
    form = AttentionForm(Sizes(None, None, None, 2, 1, 32, 32), ((None, None, None, 1),) * 4, "bshd", "float16", mask,
                         Tile(64, 32, 2, 128), True, 32**-0.5)
    kernel = tilelang.compile(_attention(form, 3), target={"kind": "cuda", "arch": "sm_90a"}, execution_backend="simulator",
                              pass_configs={"tl.enable_fast_math": True, "tl.enable_hopper": True, "tl.persistent": 3})
    assert "serpentine" in str(kernel.report_data["kernels"])
    for batch, seq_q, seq_k in ((1, 30, 50), (2, 190, 170)):
        q, k, v = arrays(max(seq_q, seq_k), 2, batch=batch)[:3].astype(np.float16)
        q, k, v = q[:, :seq_q], k[:, :seq_k, :1], v[:, :seq_k, :1]
        q, k, v = (np.concatenate((x, x[..., ::-1]), -1) for x in (q, k, v))
        out, lse = np.full_like(q, np.nan), np.full((batch, 2, seq_q), np.nan, np.float32)
        kernel(q, k, v, 32**-0.5, out, lse)
        behind = np.arange(seq_q)[:, None] + seq_k - seq_q - np.arange(seq_k)
        seen = (behind >= -mask.right) & (behind <= (seq_k if mask.left is None else mask.left))
        s = np.einsum("bqhd,bkd->bhqk", q.astype(float), k[:, :, 0].astype(float)) * 32**-0.5
        e = np.where(seen, np.exp(s), 0.0)
        want = np.einsum("bhqk,bkd->bqhd", e / np.maximum(e.sum(-1, keepdims=True), 1e-30), v[:, :, 0].astype(float))
        assert np.abs(out - want).max() < 2.0**-9


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (30, 0)}], ids=str)
def test_tma_stores_gradients_of_scores_of_any_length(monkeypatch, options):
    """Not threads, whose barriers cost 0.15 of the rate."""
    reports, real = [], place.Place._compiled

    def compiled(at, *args):
        reports.append(str(real(at, *args).report_data["kernels"]))
        return lambda *given: None

    monkeypatch.setattr(place.Place, "_compiled", compiled)
    for n in (130, 200):
        x, lse = np.zeros((1, n, 7, 128), np.float16), np.zeros((1, 7, n), np.float32)
        flash_attention_backward(x, x, x, x, lse, x, target={"kind": "cuda", "arch": "sm_90a"}, **options)
    assert "pairs" in reports[1] and "written by all threads" not in reports[1]
