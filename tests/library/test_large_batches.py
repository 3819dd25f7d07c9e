"""More sequences, matrices or images than a grid has blocks along y or z (65535): computed by several launches."""

import numpy as np
import pytest
import torch

from tilelang.library import (arrays, conv2d, create_block_mask, decode_plan, flash_attention, flash_decode, flex_attention,
                              gated_delta, linear_attention, mamba2, matmul, mla_decode, mla_prefill, retention, sparse_mla)
from tilelang.library import attention_engine as engines
from tilelang.library.attention import (backward, flash_attention as forward, flash_decode as decoding, flex_attention as flex,
                                        mla_decode as latent, sparse_mla as sparse)
from tilelang.library.gemm import matmul as products
from tilelang.library.training import convolution


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.fixture
def few(monkeypatch):
    for room in (backward, forward, products):
        monkeypatch.setattr(room, "MAX_GRID", (8, 8, 3))
    monkeypatch.setattr(convolution, "MAX_GRID", (8, 1, 8))
    for room in (arrays, decoding, engines, flex, latent, sparse):
        monkeypatch.setattr(room, "SEQUENCES", 3)


@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_of_matrices_was_refused_in_the_kernel(few, shared):
    a, b = drawn(7, 9, 20), drawn(7, 20, 11)[0 if shared else slice(None)]
    torch.testing.assert_close(matmul(a, b), a @ b, rtol=1e-4, atol=1e-4)
    out = torch.empty(7, 9, 11)
    assert matmul(a, b, out=out) is out
    torch.testing.assert_close(out, a @ b, rtol=1e-4, atol=1e-4)


def test_attention_over_many_sequences_was_refused_in_the_kernel(few):
    layout, (q, k, v, g), sinks = "bhsd", (drawn(7, 5, 6, 16, seed=n) for n in range(4)), drawn(5)
    x, y = ([t.clone().requires_grad_() for t in (q, k, v, sinks)] for _ in range(2))
    out = flash_attention(*x[:3], causal=True, layout=layout, sinks=x[3])
    one = torch.cat([flash_attention(*(t[n:n + 1] for t in y[:3]), causal=True, layout=layout, sinks=y[3]) for n in range(7)])
    torch.testing.assert_close(out, one)
    torch.testing.assert_close(torch.autograd.grad(out, x, g), torch.autograd.grad(one, y, g), rtol=1e-4, atol=1e-5)


def test_dropout_of_many_sequences_was_refused_in_the_kernel(few):
    """Pieces have other seeds, and backward draws what forward drew: dV of ones is the sum of the kept weights."""
    q, k = (drawn(7, 5, 2, 16, seed=n).requires_grad_() for n in (0, 1))
    v = torch.ones(7, 5, 2, 16, requires_grad=True)
    out = flash_attention(q, k, v, dropout=0.5, seed=3)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), v)[0].sum((1, 3)), out.sum((1, 3)), rtol=1e-4, atol=1e-4)
    assert torch.equal(out, flash_attention(q, k, v, dropout=0.5, seed=3))
    same = flash_attention(*(x[:1].expand(7, -1, -1, -1) for x in (q, k, v)), dropout=0.5, seed=3)
    assert len({tuple(x.flatten().tolist()) for x in same}) == 7


RECURRENT = {  # the function of pieces, tensors of sequences, those of all
    "linear": (lambda q, k, v, x, s: linear_attention(q, k, v, s), 1), "retention": (
        lambda q, k, v, x, s: retention(q, k, v, s, initial=x), 1),
    "delta": (lambda q, k, v, x, s: gated_delta(q, k, v, -v[..., 0].sigmoid(), k[..., 0].sigmoid(), initial=x), 0),
    "mla": (lambda q, k, v, x, s: mla_prefill(torch.cat([q, k], -1), k, k[:, :, 0], v), 0)}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrences_over_many_sequences_were_refused_in_the_kernel(few, name):
    call, shared = RECURRENT[name]
    given = [*(drawn(7, 10, 2, 64, seed=n).double() / 8 for n in range(3)), drawn(7, 2, 64, 64).double()]
    per_head = -drawn(2).double().abs()
    x, y = ([t.clone().requires_grad_() for t in (*given, per_head)] for _ in range(2))

    def first(found):
        return found[0] if isinstance(found, tuple) else found

    out, one = first(call(*x)), torch.cat([first(call(*(t[n:n + 1] for t in y[:4]), y[4])) for n in range(7)])
    torch.testing.assert_close(out, one)
    found, wanted = (torch.autograd.grad(z.cos().sum(), t, allow_unused=True) for z, t in ((out, x), (one, y)))
    for a, b in zip(found, wanted):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-8))
    assert (found[4] is None) != bool(shared)


@pytest.mark.parametrize("engine", [False, True])
def test_functions_of_scores_count_all_sequences(few, engine):
    q, k, v, table = *(drawn(7, 5, 2, 16, seed=n) for n in range(3)), drawn(7)

    def score(s, b, h, i, j, t):
        return s + t[b]

    mask = create_block_mask(lambda b, h, i, j: (i >= j) | (b % 2 == 0), 5, 5, batch=7, device="cpu")
    call = engines.AttentionEngine(engines.Sigmoid(), score) if engine else lambda *x, **more: flex_attention(
        *x, score_mod=score, **more)
    out = call(q, k, v, block_mask=mask, tensors=(table,))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 4 + table[:, None, None, None]
    seen = (torch.ones(5, 5).tril() > 0) | (torch.arange(7) % 2 == 0)[:, None, None, None]
    weights = s.sigmoid() * seen if engine else s.masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", weights, v), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("paged", [False, True])
def test_decoding_many_sequences_was_refused_in_the_kernel(few, paged):
    q, lengths = drawn(7, 2, 16).half(), torch.arange(1, 8, dtype=torch.int32) * 9
    k = drawn(28 if paged else 7, 64, 1, 16).half()
    table = torch.arange(27, -1, -1, dtype=torch.int32).reshape(7, 4)[:, :1].contiguous() if paged else None
    assert decode_plan(q, k, k, lengths, block_table=table) is None
    latent = {"dim_v": 8, "block_table": table, "return_lse": True}
    found = *flash_decode(q, k, k, lengths, block_table=table, return_lse=True), *mla_decode(q, k[:, :, 0], lengths, **latent)
    for n in range(7):
        cut = slice(n, n + 1)
        cache, pages = (k, table[cut]) if paged else (k[cut], None)
        one = (*flash_decode(q[cut], cache, cache, lengths[cut], block_table=pages, return_lse=True),
               *mla_decode(q[cut], cache[:, :, 0], lengths[cut], **latent | {"block_table": pages}))
        assert all(torch.equal(x[cut], y) for x, y in zip(found, one))


def test_more_queries_than_a_grid_has_blocks_choose_their_keys(few):
    q, kv, rows = drawn(7, 2, 32).half(), drawn(20, 32).half(), torch.arange(21, dtype=torch.int32).reshape(7, 3) % 20
    found = sparse_mla(q, kv, rows, dim_v=16, return_lse=True)
    one = [sparse_mla(q[n:n + 1], kv, rows[n:n + 1], dim_v=16, return_lse=True) for n in range(7)]
    assert all(torch.equal(x, torch.cat(y)) for x, y in zip(found, zip(*one)))


def test_images_of_more_tiles_than_a_grid_has_blocks_were_refused(few):
    x, w, g = drawn(40, 5, 5, 16).requires_grad_(), drawn(8, 3, 3, 16).requires_grad_(), drawn(40, 3, 3, 8)
    y = conv2d(x, w)
    wanted = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.autograd.grad(y, (x, w), g), torch.autograd.grad(wanted, (x, w), g), rtol=1e-4, atol=1e-4)


def test_chunks_of_all_groups_of_mamba_stood_along_z_of_the_grid():
    """131,072 tokens of 32 groups were refused; here the blocks that one index of the grid stands for."""
    x, dt, a = drawn(2, 300, 4, 16) / 4, drawn(2, 300, 4).sigmoid(), -drawn(4).abs()
    b, c = drawn(2, 300, 2, 16), drawn(2, 300, 2, 16, seed=1)
    args = (x.half(), dt, a, b.half(), c.half())
    y, _ = mamba2(*args)
    state, rows = np.zeros((2, 4, 16, 16)), []
    x, b, c = (t.double().numpy() for t in (args[0], args[3], args[4]))
    for t in range(300):
        of_head = [np.repeat(m[:, t], 2, axis=1) for m in (b, c)]
        decay = np.exp(a.numpy() * dt[:, t].numpy())[..., None, None]
        state = decay * state + (dt[:, t].numpy()[..., None] * x[:, t])[..., None] * of_head[0][:, :, None]
        rows.append(np.einsum("bhpn,bhn->bhp", state, of_head[1]))
    np.testing.assert_allclose(y.double().numpy(), np.stack(rows, 1), atol=0.1)
