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
