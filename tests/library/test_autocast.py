"""torch.autocast around functions of the library: operands of products and attention have its type, as torch's own have."""

import pytest
import torch
import torch.nn.functional as F

import tilelang.language as T
from tilelang.library import (conv2d, flash_attention, grouped_matmul, linear_attention, linear_cross_entropy, matmul, rms_norm)
from tilelang.library.attention_engine import AttentionEngine, LinearAttentionEngine, Sigmoid


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_()


def attention(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def convolution(x, w):
    return F.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


CALLS = {
    "products": (lambda a, b: grouped_matmul(a, b, torch.tensor([20], dtype=torch.int32)), lambda a, b: a @ b[0],
                 (drawn(20, 32), drawn(1, 32, 24))),
    "attention": (lambda q, k, v: flash_attention(q, k, v, causal=True), attention,
                  [drawn(1, 20, 2, 32, seed=n) for n in range(3)]),
    "convolution": (lambda x, w: conv2d(x, weight=w), convolution, (drawn(1, 5, 5, 16), drawn(8, 3, 3, 16))),
}


@pytest.mark.parametrize("name", CALLS)
def test_operands_of_autocast_were_left_in_float32(name):
    ours, torchs, args = CALLS[name]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = ours(*args), torchs(*args)
    assert found.dtype == wanted.dtype == torch.bfloat16
    for a, b in zip(torch.autograd.grad(found.sum(), args), torch.autograd.grad(wanted.sum(), args)):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_attention_under_autocast_refused_operands_of_two_types():
    q, k = drawn(1, 20, 2, 32), drawn(1, 20, 2, 32, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(rms_norm(q), k.bfloat16(), k.bfloat16()).dtype == torch.bfloat16
        assert linear_attention(q, k, k, -torch.ones(2)).dtype == torch.bfloat16  # log_decay stays float32


def test_losses_and_out_keep_their_type_under_autocast():
    x, w, labels = drawn(6, 32), drawn(10, 32), torch.arange(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_cross_entropy(x, w, labels).dtype == torch.float32
        assert matmul(x.detach(), w.detach(), transpose_b=True, out=torch.empty(6, 10)).dtype == torch.float32
        sizes = torch.tensor([2, 4], dtype=torch.int32)
        assert grouped_matmul(x, drawn(2, 32, 8), sizes).dtype == torch.bfloat16


def test_a_graph_that_torch_compiled_under_autocast():
    f, q = torch.compile(lambda q: flash_attention(q, q, q), backend="eager", fullgraph=True), drawn(1, 20, 2, 32).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert f(q).dtype == torch.bfloat16
    assert f(q).dtype == torch.float32


def test_a_bias_beside_operands_of_other_types_keeps_its_own():
    a, b = (torch.randint(-9, 9, (16, 16), dtype=torch.int8) for _ in range(2))
    bias = torch.arange(16, dtype=torch.float32) + 1000.3
    plain = matmul(a, b, bias=bias, out_dtype="float32")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(matmul(a, b, bias=bias, out_dtype="float32"), plain)


@pytest.mark.parametrize("engine", [AttentionEngine(), AttentionEngine(Sigmoid()),
                                    LinearAttentionEngine(q_mod=lambda x: T.max(x, 0.0))])
def test_engines_under_autocast_left_operands_in_float32(engine):
    q = drawn(1, 20, 2, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = engine(q, q, q)
    assert found.dtype == torch.bfloat16
    assert torch.autograd.grad(found.sum(), q)[0].dtype == torch.float32
