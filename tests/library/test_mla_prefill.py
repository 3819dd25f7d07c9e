"""mla_prefill against float64, on the CPU and on the device simulator."""

import numpy as np
import pytest

from tilelang.errors import TileLangError
from tilelang.library import mla_prefill
from tilelang.library.autograd import define

SM90 = {"kind": "cuda", "arch": "sm_90a"}


def inputs(seq_q, seq_k, heads=2, dim=128, rope=64, dim_v=128):
    """q, and k and v as slices of one projection's result, and the rotary keys."""
    rng = np.random.default_rng(seq_q)
    both = rng.standard_normal((1, seq_k, heads, dim + dim_v)).astype(np.float16)
    q, r = (rng.standard_normal(s).astype(np.float16) for s in ((1, seq_q, heads, dim + rope), (1, seq_k, rope)))
    return q, both[..., :dim], r, both[..., dim:]


@pytest.mark.parametrize("where", [None, SM90, pytest.param({"kind": "hip", "mcpu": "gfx942"}, marks=pytest.mark.slow)],
                         ids=["cpu", "sm_90a", "gfx942"])
@pytest.mark.parametrize("seq_q, seq_k, causal", [(200, 200, True), (70, 300, True), (130, 260, False), (20, 10, True)])
def test_results_and_logarithms_are_those_of_float64(seq_q, seq_k, causal, where):
    q, k, r, v = inputs(seq_q, seq_k, **({"dim": 40, "rope": 24, "dim_v": 72} if seq_q == 20 else {}))
    got, logs = mla_prefill(q, k, r, v, causal=causal, return_lse=True, dynamic=seq_q == 70, target=where)
    for h in range(q.shape[2]):
        s = q[0, :, h].astype(np.float64) @ np.concatenate([k[0, :, h], r[0]], -1).astype(np.float64).T * q.shape[3]**-0.5
        if causal:
            s[np.arange(seq_k)[None] > np.arange(seq_q)[:, None] + seq_k - seq_q] = -np.inf
        top = np.maximum(s.max(1, keepdims=True), -1e30)
        p = np.exp(s - top)
        total = p.sum(1, keepdims=True)
        want = p @ v[0, :, h].astype(np.float64) / np.where(total == 0, 1, total)
        assert np.abs(got[0, :, h] - want).max() <= np.abs(v).max() * 2.0**-9
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(logs[0, h], np.log(total[:, 0]) + top[:, 0], rtol=0, atol=2.0**-12)


@pytest.mark.parametrize("change", [dict(k_rope=np.zeros((1, 8, 32), np.float16)), dict(v=np.zeros((1, 7, 2, 128), np.float16)),
                                    dict(q=np.zeros((1, 8, 2, 192), np.float32)), dict(q=np.zeros((8, 2, 192), np.float16)),
                                    dict(scale=0.0)])
def test_arguments_that_do_not_go_together_are_rejected(change):
    q, k, r, v = inputs(8, 8)
    with pytest.raises(TileLangError, match=r"error\[attention-(shape|option|argument)\]"):
        mla_prefill(**{**dict(q=q, k=k, k_rope=r, v=v), **change})


def tensors(dtype, seq_q=9, seq_k=12, heads=2, dim=16, rope=16, dim_v=32):
    import torch

    torch.manual_seed(0)
    return [torch.randn(1, *shape, dtype=dtype, requires_grad=True)
            for shape in ((seq_q, heads, dim + rope), (seq_k, heads, dim), (seq_k, rope), (seq_k, heads, dim_v))]


def formulas(q, k, r, v, causal=True):
    """Attention by torch's formulas in float64."""
    import torch

    q, k, r, v = (x.double() for x in (q, k, r, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, torch.cat([k, r[:, :, None].expand(-1, -1, k.shape[2], -1)], -1)) * q.shape[3]**-0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1 + s.shape[3] - s.shape[2]), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_keys_that_all_heads_share(causal):
    import torch

    given = tensors(torch.float16, 70, 100, 3, *((128, 64, 128) if causal else (40, 24, 72)))
    out = mla_prefill(*given, causal=causal)
    got = torch.autograd.grad(out, given, torch.ones_like(out))
    want = torch.autograd.grad(formulas(*given, causal), given, torch.ones_like(out).double())
    for g, w in zip(got, want):
        assert g.shape == w.shape and g.dtype == torch.float16
        assert (g - w).abs().max() <= 2.0**-8 * w.abs().max()


def test_gradcheck_opcheck_and_whole_graphs():
    import torch

    given = tensors(torch.float64, 3, 5)
    assert torch.autograd.gradcheck(lambda *x: mla_prefill(*x, return_lse=True), given, fast_mode=True)
    define("mla_prefill")
    torch.library.opcheck(torch.ops.tilelang_library.mla_prefill.default, (*given, True, None, False, None))
    torch._dynamo.reset()
    model = torch.compile(lambda *x: (mla_prefill(2 * x[0], *x[1:])**2).sum(), fullgraph=True, dynamic=True,
                          backend="aot_eager")
    for seq in (5, 7):
        given = tensors(torch.float64, seq, seq)
        found = torch.autograd.grad(model(*given), given)
        torch.testing.assert_close(found, torch.autograd.grad((formulas(2 * given[0], *given[1:])**2).sum(), given))
