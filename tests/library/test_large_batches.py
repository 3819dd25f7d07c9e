"""More sequences, matrices or images than a grid has blocks along y or z (65535): computed by several launches."""

import numpy as np
import pytest
import torch

from tilelang.library import conv2d, flash_attention, mamba2, matmul
from tilelang.library.attention import backward, flash_attention as forward
from tilelang.library.gemm import matmul as products
from tilelang.library.training import convolution


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.fixture
def few(monkeypatch):
    for room in (backward, forward, products):
        monkeypatch.setattr(room, "MAX_GRID", (8, 8, 3))
    monkeypatch.setattr(convolution, "MAX_GRID", (8, 1, 8))


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
