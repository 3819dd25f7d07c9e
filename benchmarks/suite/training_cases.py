"""Every function of the library with a gradient, with a formula of torch for it that any type may run.

Sizes are small, odd where the function permits it, and large enough that chunks, tiles and splits are several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import tilelang.language as T
from tilelang.library import (
    conv2d, create_block_mask, cross_entropy, flash_attention, flex_attention, gated_delta, grouped_matmul, kda, layer_norm,
    linear_attention, linear_cross_entropy, mamba2, mla_prefill, retention, rms_norm, softmax, swiglu)
from tilelang.library.attention_engine import AttentionEngine, LinearAttentionEngine, Sigmoid

Tensors = tuple[torch.Tensor, ...]
Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """make: (draw, length) -> the tensors, which all have gradients.  ours, torchs: of them, one result.

    lengths: two of them; the second compiles at most `anew` kernels, which all further lengths share.  fixed: whether the bits
    are the same each time.
    """

    make: Callable[[Draw, int], Tensors]
    ours: Callable[..., torch.Tensor]
    torchs: Callable[..., torch.Tensor]
    lengths: tuple[int, int] = (600, 344)
    anew: int = 0
    fixed: bool = True


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """torch's attention, for (batch, seq, heads, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options).transpose(1, 2)


def scores_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(batch, heads, seq, seq), float32 at least."""
    return wide(torch.einsum("bihd,bjhd->bhij", q, k)) * q.shape[-1]**-0.5


def later(x: torch.Tensor) -> torch.Tensor:
    """Whether a key comes after a query."""
    return torch.ones(x.shape[-2:], device=x.device, dtype=torch.bool).triu(1)


def weighted(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhij,bjhd->bihd", weights.to(v.dtype), v)


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = 2 * torch.tanh(scores_of(q, k) / 2)
    return weighted(s.masked_fill(later(s), -torch.inf).softmax(-1), v)


def soft_cap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 2.0 * T.tanh(score / 2.0)


def not_later(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j <= i


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    i = torch.arange(q.shape[1], device=q.device)
    return attention(q, k, v, attn_mask=(i[:, None] - i).abs() < 200)


def with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    s = scores_of(q, k)
    s = s.masked_fill(later(s), -torch.inf)
    s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1).to(s.dtype)], -1)
    return weighted(s.softmax(-1)[..., :-1], v)


def latent(q: torch.Tensor, k: torch.Tensor, rope: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys = torch.cat([k, rope[:, :, None].expand(*k.shape[:3], -1)], -1)
    return attention(q, keys, v, is_causal=True)


def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """A step at a time.  As in the kernels, the state is float32 and what it is multiplied by has the type of q."""
    state, outs = wide(q).new_zeros(q.shape[0], *q.shape[2:], v.shape[-1]), []
    alpha = decay.exp().reshape(*q.shape[:3], -1, 1)
    for t in range(q.shape[1]):
        state = alpha[:, t] * state
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state.to(q.dtype)))
        state = state + wide(torch.einsum("bhk,bhv->bhkv", k[:, t], u.to(q.dtype)))
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state.to(q.dtype)) * q.shape[-1]**-0.5)
    return torch.stack(outs, 1)


def decayed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Linear attention, a step at a time, with roundings as in delta_rule."""
    state, outs, alpha = wide(q).new_zeros(q.shape[0], *q.shape[2:], v.shape[-1]), [], decay.exp()[..., None, None]
    for t in range(q.shape[1]):
        state = alpha[:, t] * state + wide(k[:, t, :, :, None] * v[:, t, :, None])
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state.to(q.dtype)))
    return torch.stack(outs, 1)


def retained(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_gamma: torch.Tensor) -> torch.Tensor:
    return decayed(q, k, v, log_gamma.expand(q.shape[:3])) * q.shape[-1]**-0.5


def state_space(x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
                d: torch.Tensor) -> torch.Tensor:
    b, c = (z.repeat_interleave(x.shape[2] // z.shape[2], 2) for z in (b, c))
    y = decayed(c, b, (x * dt[..., None]).to(x.dtype), a * dt)
    return y + (x * d[:, None]).to(x.dtype)


def convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), padding=1).permute(0, 2, 3, 1)


def labels(x: torch.Tensor, n: int) -> torch.Tensor:
    t = torch.arange(x.shape[0], device=x.device) * 7919 % n
    return torch.where(t % 17 == 0, -100, t)


def sizes(rows: int, device: Any) -> torch.Tensor:
    """Of three groups, one of them empty: rows / 3 times 1, 0, 2, without a copy from the host."""
    i = torch.arange(3, dtype=torch.int32, device=device)
    return (3 * i * i - 5 * i + 2) // 2 * (rows // 3)


def by_groups(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    n = a.shape[0] // 3
    return torch.cat([a[:n] @ b[0], a[n:] @ b[2] + 0 * b[1].sum()])


def heads(*dims: int, count: int = 4) -> Callable[[Draw, int], Tensors]:
    return lambda draw, s: tuple(draw(2, s, count if k == 0 else min(count, 4), d) for k, d in enumerate(dims))


def normalised(draw: Draw, *shape: int) -> torch.Tensor:
    x = draw(*shape)
    return F.normalize(x.float(), dim=-1).to(x.dtype)


def rows_of(*columns: int) -> Callable[[Draw, int], Tensors]:
    return lambda draw, m: (draw(m, columns[0]), *(draw(n) for n in columns[1:]))


def of_rule(channels: bool) -> Callable[[Draw, int], Tensors]:
    def make(draw: Draw, s: int) -> Tensors:
        decay = -draw(2, s, 2, *([64] if channels else []), kind="uniform") * 0.2
        return (normalised(draw, 2, s, 2, 64), normalised(draw, 2, s, 2, 64), draw(2, s, 2, 64), decay,
                draw(2, s, 2, kind="uniform"))

    return make


CASES: dict[str, Case] = {
    "flash_attention": Case(heads(64, 64, 64), flash_attention, attention, anew=2, fixed=False),
    "flash_attention deterministic": Case(heads(64, 64, 64), lambda q, k, v: flash_attention(
        q, k, v, window=200, deterministic=True), windowed, anew=2),
    "flash_attention causal grouped": Case(
        lambda draw, s: (draw(2, s, 8, 128), draw(2, s, 2, 128), draw(2, s, 2, 128)),
        lambda q, k, v: flash_attention(q, k, v, causal=True), lambda q, k, v: attention(q, k, v, is_causal=True), anew=2,
        fixed=False),
    "flash_attention sinks": Case(
        lambda draw, s: (*heads(64, 64, 64)(draw, s), draw(4, kind="normal")),
        lambda q, k, v, x: flash_attention(q, k, v, causal=True, sinks=x), with_sinks, anew=2, fixed=False),
    "flex_attention": Case(heads(64, 64, 64), lambda q, k, v: flex_attention(
        q, k, v, score_mod=soft_cap, block_mask=masks(q.shape[1], q.device)), capped, anew=2, fixed=False),
    "flex_attention small blocks": Case(heads(96, 96, 96), lambda q, k, v: flex_attention(
        q, k, v, block_mask=masks(q.shape[1], q.device, 64)), lambda q, k, v: attention(q, k, v, is_causal=True), anew=2,
        fixed=False),
    "mla_prefill": Case(lambda draw, s: (draw(2, s, 2, 192), draw(2, s, 2, 128), draw(2, s, 64), draw(2, s, 2, 128)),
                        mla_prefill, latent, anew=2, fixed=False),
    "AttentionEngine": Case(heads(64, 64, 64), lambda q, k, v: SIGMOID(q, k, v),
                            lambda q, k, v: weighted((scores_of(q, k) - 4).sigmoid(), v), anew=2),
    "LinearAttentionEngine": Case(heads(64, 64, 64), lambda q, k, v: RELU(q, k, v, scale=0.05),
                                  lambda q, k, v: decayed(q.relu(), k.relu(), v, wide(q)[..., 0] * 0) * 0.05),
    "linear_attention": Case(lambda draw, s: (*heads(64, 64, 64)(draw, s), -draw(2, s, 4, kind="uniform") * 0.2),
                             linear_attention, decayed),
    "gated_delta": Case(of_rule(False), lambda *x: gated_delta(*x)[0], delta_rule, (200, 130)),
    "kda": Case(of_rule(True), lambda *x: kda(*x)[0], delta_rule, (200, 130)),
    "mamba2": Case(lambda draw, s: (draw(2, s, 4, 64), draw(2, s, 4, kind="uniform") * 0.3 + 0.01,
                                    -draw(4, kind="uniform") - 0.1, draw(2, s, 1, 128), draw(2, s, 1, 128),
                                    draw(4, kind="normal")), lambda *x: mamba2(*x)[0], state_space),
    "retention": Case(lambda draw, s: (*heads(64, 64, 64)(draw, s), -draw(4, kind="uniform") * 0.1 - 0.01),
                      lambda *x: retention(*x)[0], retained),
    "rms_norm": Case(rows_of(1024, 1024), rms_norm, lambda x, w: F.rms_norm(x, (1024,), w, 1e-6)),
    "layer_norm": Case(rows_of(1024, 1024, 1024), layer_norm, lambda x, w, b: F.layer_norm(x, (1024,), w, b)),
    "softmax": Case(rows_of(3000), softmax, lambda x: x.softmax(-1)),
    "cross_entropy": Case(rows_of(3000), lambda x: cross_entropy(x, labels(x, 3000)),
                          lambda x: F.cross_entropy(wide(x), labels(x, 3000))),
    "linear_cross_entropy": Case(lambda draw, m: (draw(m, 256), draw(3000, 256) / 16),
                                 lambda x, w: linear_cross_entropy(x, w, labels(x, 3000)),
                                 lambda x, w: F.cross_entropy(wide(x @ w.t()), labels(x, 3000)), anew=4),
    "swiglu": Case(rows_of(2048), swiglu, lambda x: F.silu(x[:, :1024]) * x[:, 1024:]),
    "grouped_matmul": Case(lambda draw, m: (draw(m, 128), draw(3, 128, 256)),
                           lambda a, b: grouped_matmul(a, b, sizes(a.shape[0], a.device)), by_groups, (600, 345), 3),
    "conv2d": Case(lambda draw, m: (draw(m // 100, 14, 14, 64), draw(128, 3, 3, 64)),
                   lambda x, w: conv2d(x, w, padding=1), convolved, (800, 500))}
SIGMOID, RELU = AttentionEngine(Sigmoid(bias=-4.0)), LinearAttentionEngine(q_mod=lambda x: T.max(x, 0.0),
                                                                           k_mod=lambda x: T.max(x, 0.0))
_MASKS: dict[Any, Any] = {}


def masks(seq: int, device: Any, block: int = 128) -> Any:
    """The mask of not_later, made once for each length: the blocks are listed on the host."""
    return _MASKS[seq, device, block]


def make(case: Case, device: str, length: int, element: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.Tensor]:
    """The tensors of a case.  draw(*shape): of `element`; kind="normal", "uniform": float32."""
    g = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int, kind: str = "") -> torch.Tensor:
        x = (torch.rand if kind == "uniform" else torch.randn)(*shape, device=device, generator=g)
        return x if kind else x.to(element)

    where = torch.empty(0, device=device).device
    for n in (64, 128):
        _MASKS.setdefault((length, where, n), create_block_mask(not_later, length, length, block=(n, n), device=where))
    return [x.detach().requires_grad_() for x in case.make(draw, length)]
