"""Blocks of models that are written in torch alone: a Llama block, and a block with DeepSeek's latent attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def angles(n, size):
    t = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    return t.cos(), t.sin()


class LlamaBlock(nn.Module):
    def __init__(self, size=64, heads=4, groups=2, hidden=96, length=19):
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, size // heads
        self.q, self.o = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.k, self.v = (nn.Linear(size, groups * self.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, size, bias=False)
        self.first, self.second = RMSNorm(size), RMSNorm(size)
        for name, t in zip(("cos", "sin"), angles(length, self.head)):
            self.register_buffer(name, t)

    def forward(self, x):
        b, n, _ = x.shape
        h = self.first(x)
        q = rotated(self.q(h).view(b, n, self.heads, self.head).transpose(1, 2), self.cos, self.sin)
        k = rotated(self.k(h).view(b, n, self.groups, self.head).transpose(1, 2), self.cos, self.sin)
        v = self.v(h).view(b, n, self.groups, self.head).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, n, -1))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LatentBlock(nn.Module):
    """Multi-head latent attention: keys and values of all heads come from one narrow latent and one rotated key."""

    def __init__(self, size=64, heads=4, latent=24, plain=16, turned=8, length=19):
        super().__init__()
        self.heads, self.plain, self.turned, self.latent = heads, plain, turned, latent
        self.q = nn.Linear(size, heads * (plain + turned), bias=False)
        self.down = nn.Linear(size, latent + turned, bias=False)
        self.up = nn.Linear(latent, heads * 2 * plain, bias=False)
        self.o = nn.Linear(heads * plain, size, bias=False)
        self.first, self.narrow = RMSNorm(size), RMSNorm(latent)
        for name, t in zip(("cos", "sin"), angles(length, turned)):
            self.register_buffer(name, t)

    def forward(self, x):
        b, n, _ = x.shape
        h = self.first(x)
        q = self.q(h).view(b, n, self.heads, -1).transpose(1, 2)
        q, qr = q.split([self.plain, self.turned], -1)
        c, kr = self.down(h).split([self.latent, self.turned], -1)
        k, v = self.up(self.narrow(c)).view(b, n, self.heads, -1).transpose(1, 2).chunk(2, -1)
        qr, kr = rotated(qr, self.cos, self.sin), rotated(kr, self.cos, self.sin).unsqueeze(1)
        s = (q @ k.transpose(-1, -2) + qr @ kr.transpose(-1, -2)) * (self.plain + self.turned) ** -0.5
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        y = torch.softmax(s.float(), -1).to(x.dtype) @ v
        return x + self.o(y.transpose(1, 2).reshape(b, n, -1))


class MixtralBlock(nn.Module):
    """Two of some experts for each token, by a softmax of their scores."""

    def __init__(self, size=64, hidden=48, experts=4, chosen=2):
        super().__init__()
        self.chosen, self.norm, self.router = chosen, RMSNorm(size), nn.Linear(size, experts, bias=False)
        self.gate, self.up = (nn.Parameter(0.1 * torch.randn(experts, size, hidden)) for _ in range(2))
        self.down = nn.Parameter(0.1 * torch.randn(experts, hidden, size))

    def forward(self, x):
        h = self.norm(x).flatten(0, 1)
        weights, experts = torch.topk(F.softmax(self.router(h), -1), self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        up, gate = (torch.einsum("nd,nkdh->nkh", h, w[experts]) for w in (self.up, self.gate))
        return x + torch.einsum("nkh,nkhd,nk->nd", F.silu(gate) * up, self.down[experts], weights).view(x.shape)


class BertLayer(nn.Module):
    """Keys past the end of a sequence have the least number as their bias."""

    def __init__(self, size=64, heads=4, length=19):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(size, size) for _ in range(4))
        self.first, self.second = (nn.LayerNorm(size, eps=1e-12) for _ in range(2))
        self.inner, self.outer = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.register_buffer("mask", (torch.arange(length) < torch.tensor([[length], [7]])).float())

    def forward(self, x):
        b, n, size = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).permute(0, 2, 1, 3) for f in (self.q, self.k, self.v))
        bias = (1 - self.mask[:, None, None, :]) * torch.finfo(torch.float32).min
        weights = F.softmax(q @ k.transpose(-1, -2) / (size // self.heads) ** 0.5 + bias, -1)
        x = self.first(self.o((weights @ v).permute(0, 2, 1, 3).reshape(b, n, size)) + x)
        return self.second(self.outer(F.gelu(self.inner(x))) + x)


class MixerBlock(nn.Module):
    """Tokens are mixed by pooling, as in PoolFormer, channels by a bottleneck with a scale of each, as in ConvNeXt."""

    def __init__(self, size=64):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(size, eps=1e-6), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.scale = nn.Parameter(torch.full((size,), 0.1))
        self.batch = nn.BatchNorm1d(size)
        nn.init.uniform_(self.batch.running_var, 0.5, 1.5)

    def forward(self, x):
        y = self.batch(x.transpose(1, 2))
        y = F.max_pool2d(y[..., None], (3, 1), 1, (1, 0))[..., 0].transpose(1, 2)
        return x + self.scale * self.outer(F.gelu(self.inner(self.norm(F.leaky_relu(y))))) + F.elu(y)
