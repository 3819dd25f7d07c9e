"""The programs of tests/program/whole_programs.py as a user of torch writes them: name -> function of torch tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

PROGRAMS: dict[str, Callable[..., Any]] = {}


def program(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the torch form of the program with the function's name."""
    PROGRAMS[fn.__name__] = fn
    return fn


# ---- element-wise trees ----------------------------------------------------------------------------------------------


@program
def scaled_sum(a, b):
    return a * 2 + b


@program
def bias_gelu(x, b):
    return F.gelu(x + b)


@program
def silu_gate(a, b):
    return F.silu(a) * b


@program
def horner(x):
    y = x * -0.125 + 0.25
    for c in (0.5, 1.0):
        y = y * x + c
    return y


@program
def choose_and_clamp(x, lo):
    return torch.clamp(torch.where(x > lo, torch.sqrt(torch.abs(x)), -x), -0.5, 1.5)


@program
def integer_bits(a, b):
    return ((a * 3 ^ b) >> 1) & 255


@program
def masks(a, m, n):
    return torch.where(m & ~n, a, 0) + torch.where(m | n, 1.0, 0.0)


@program
def outer_tanh(a, b, c):
    return torch.tanh(a[:, None] * b[None, :] + c)


@program
def rotary(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).half()


@program
def dropout(x, u):
    return torch.where(u < 0.9, x / 0.9, 0)


@program
def mixed_types(a, b):
    return a * b + b


@program
def transposed_difference(x, y):
    return x.T * 3 - y


@program
def dynamic_distance(x, y):
    return torch.exp(-torch.abs(x - y))


# ---- norms -----------------------------------------------------------------------------------------------------------


@program
def rms_norm(x, w):
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


@program
def layer_norm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-5)


@program
def add_rms_norm(x, r, w):
    h = x + r
    return F.rms_norm(h, h.shape[-1:], w, 1e-6), h


@program
def group_norm(x, w, b):
    return F.group_norm(x, 4, w, b)


@program
def unit_rows(x):
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)


@program
def column_statistics(x):
    return x.mean(0), x.var(0, unbiased=False)


@program
def dynamic_rms_norm(x, w):
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


# ---- softmax ---------------------------------------------------------------------------------------------------------


@program
def softmax(x):
    return torch.softmax(x, -1)


@program
def log_softmax(x):
    return torch.log_softmax(x, -1)


@program
def masked_softmax(x, m):
    return torch.softmax(torch.where(m, x * 0.125, -float("inf")), -1)


@program
def column_softmax(x):
    return torch.softmax(x, 0)


@program
def log_sum_exp(x):
    return torch.logsumexp(x, -1)


@program
def capped_softmax(x, t):
    return torch.softmax(torch.tanh(x / 30) * 30 / t, -1)


@program
def dynamic_softmax(x):
    return torch.softmax(x, -1)


# ---- losses ----------------------------------------------------------------------------------------------------------


@program
def cross_entropy(x, t):
    return F.cross_entropy(x, t.long(), reduction="none")


@program
def smoothed_cross_entropy(x, t):
    return F.cross_entropy(x, t.long(), label_smoothing=0.1)


@program
def divergence(p, q):
    lp, lq = torch.log_softmax(p, -1), torch.log_softmax(q, -1)
    return (lp.exp() * (lp - lq)).sum(-1)


@program
def squared_error(a, b):
    return F.mse_loss(a, b)


# ---- reductions, scans, orders ---------------------------------------------------------------------------------------


@program
def best(x):
    values, places = x.max(-1)
    return places.int(), values


@program
def top_five(x):
    values, places = torch.topk(x, 5)
    return values, places.int()


@program
def running_sum(x):
    return torch.cumsum(x, -1)


@program
def drawdown(x):
    return torch.cummax(x.flip(0), 0).values.flip(0) - x


@program
def sorted_rows(x):
    return torch.sort(x, dim=-1, stable=True).values


@program
def questions(x):
    return (x > 1).any(0), (x > -3).all(1), (x > 0).sum()


@program
def middle_axis(x):
    return (x.amin(1) + x.amax(1)) * x.shape[1] + x.sum(1) / 2


# ---- attention -------------------------------------------------------------------------------------------------------


def scores(q, k):
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5


def positions(q, k):
    return torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)


@program
def attention_plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@program
def attention_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@program
def attention_alibi(q, k, v, a):
    i, j = positions(q, k)
    return torch.softmax((scores(q, k).float() - a[:, None, None] * (i - j).abs()), -1).to(v.dtype) @ v


@program
def attention_window(q, k, v):
    i, j = positions(q, k)
    return torch.softmax(torch.where((j <= i) & (j > i - 8), scores(q, k), -float("inf")), -1) @ v


@program
def attention_soft_cap(q, k, v):
    return torch.softmax(torch.tanh(scores(q, k) / 20) * 20, -1) @ v


@program
def attention_sigmoid(q, k, v):
    return torch.sigmoid(scores(q, k) - math.log(q.shape[2])) @ v


@program
def attention_squared_relu(q, k, v):
    return (F.relu(scores(q, k)) ** 2) @ v


@program
def attention_padded(q, k, v, n):
    kept = torch.arange(k.shape[2], device=q.device) < n.clamp_min(1)[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=kept)


@program
def attention_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@program
def attention_dynamic(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@program
def attention_latent(q, qr, c, kr):
    s = torch.einsum("bhqc,bkc->bhqk", q, c) + torch.einsum("bhqr,bkr->bhqk", qr, kr)
    return torch.einsum("bhqk,bkc->bhqc", torch.softmax(s * 0.1, -1), c)


# ---- matmuls ---------------------------------------------------------------------------------------------------------


@program
def linear_relu(x, w, b):
    return F.relu(x @ w + b)


@program
def mlp(x, w1, w2):
    return F.relu(x @ w1) @ w2


@program
def swiglu_mlp(x, g, u, d):
    return (F.silu(x @ g) * (x @ u)) @ d


@program
def norm_matmul_swiglu(x, n, g, u):
    h = F.rms_norm(x, x.shape[-1:], n, 1e-6)
    return F.silu(h @ g) * (h @ u)


@program
def lora(x, w, a, b):
    return x @ w + (x @ a) @ b * 2


@program
def batched_to_rows(a, b):
    return torch.einsum("bmk,bkn->mbn", a, b)


@program
def integer_matmul(a, b):
    return torch._int_mm(a, b)


@program
def dynamic_linear(x, w, b):
    return torch.tanh(x @ w.T + b)


@program
def quantised_matmul(x, w, s):
    q = torch.stack([w & 15, w >> 4], -1).flatten(-2).to(torch.int8)
    return x @ (((q ^ 8) - 8).to(x.dtype) * s.repeat_interleave(16, 0))


@program
def int8_weights(x, w, s):
    return x @ (w.to(x.dtype) * s)


# ---- mixture of experts, sampling, gathers ---------------------------------------------------------------------------


@program
def mixture_of_experts(x, r, w1, w2):
    weights, chosen = torch.topk(x @ r, 2)
    gates = (F.one_hot(chosen, r.shape[1]) * torch.softmax(weights, -1)[:, :, None]).sum(1)
    h = F.relu(torch.einsum("nd,edh->enh", x, w1))
    return torch.einsum("end,ne->nd", torch.einsum("enh,ehd->end", h, w2), gates)


@program
def top_p_sampling(x, u):
    logits, order = torch.sort(x, descending=True, stable=True)
    p = torch.softmax(logits, -1)
    kept = torch.where(torch.cumsum(p, -1) - p < 0.8, p, 0)
    c = torch.cumsum(kept / kept.sum(-1, keepdim=True), -1)
    at = (c < u[:, None]).sum(-1, keepdim=True)
    return torch.gather(order, 1, at.clamp_max(x.shape[1] - 1)).squeeze(-1).int()


@program
def embedding(ids, w, p):
    return F.embedding(ids, w) + p


@program
def gathered_columns(x, i):
    return x[:, i] * 2


# ---- convolutions ----------------------------------------------------------------------------------------------------


@program
def convolution_1d(x, w):
    return F.conv1d(x, w, padding=1)


@program
def convolution_2d(x, w, b):
    return F.relu(F.conv2d(x, w, b, stride=2, padding=1))


@program
def causal_depthwise(x, w):
    return F.conv1d(F.pad(x, (3, 0)), w[:, None], groups=x.shape[1])


# ---- states ----------------------------------------------------------------------------------------------------------


@program
def linear_attention(q, k, v):
    s, out = torch.zeros(q.shape[1], v.shape[1], device=q.device), []
    for i in range(q.shape[0]):
        s = s + k[i][:, None] * v[i]
        out.append(q[i] @ s)
    return torch.stack(out), s


@program
def retention(q, k, v):
    n = torch.arange(q.shape[0], device=q.device)
    d = n[:, None] - n
    return (q @ k.T * torch.where(d >= 0, 0.9 ** d.clamp_min(0).float(), 0)) @ v


@program
def recurrent(x, a, h):
    out = []
    for t in range(x.shape[1]):
        h = torch.tanh(h @ a + x[:, t])
        out.append(h)
    return torch.stack(out, 1)


# ---- a block of a model ----------------------------------------------------------------------------------------------


def _root_mean_square(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


@program
def llama_block(x, n1, wq, wk, wv, wo, n2, wg, wu, wd):
    b, n, d = x.shape
    h = _root_mean_square(x, n1)
    q, k, v = ((h @ w).view(b, n, -1, 16).transpose(1, 2) for w in (wq, wk, wv))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).reshape(b, n, d) @ wo
    h = _root_mean_square(x, n2)
    return x + (F.silu(h @ wg) * (h @ wu)) @ wd
