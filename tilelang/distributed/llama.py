"""Blocks of Llama-like models whose heads and MLP are divided among the ranks (tensor parallelism)."""

from __future__ import annotations

from typing import Any

from tilelang.library import flash_attention
from tilelang.library.decode_step import decode
from tilelang.library.place import Place

from .host import agree, create_tensor, current
from .overlap import _space, all_gather_matmul, matmul_reduce_scatter


def llama_decode(x: Any, norms: Any, qkv: Any, o: Any, gate_up: Any, down: Any, keys: Any, values: Any, lengths: Any, cos: Any,
                 sin: Any) -> tuple[Any, Any, Any]:
    """tilelang.library.llama_decode by all ranks together, in one launch on each: the sums behind o and down are exchanged.

    Arguments as there; x, norms, lengths, cos and sin are the same on every rank.  Each rank has its own heads of qkv, o, keys
    and values, its own ffn / ranks rows of gate and up (interleaved), and columns of down.  Returns the rows, the same bits on
    every rank, and the new keys and values of this rank's heads.  Raises ranks-disagree, decode-shape, symmetric-memory.

    Example:
        y, k, v = dist.llama_decode(x, norms, qkv, o, gate_up, down, keys, values, lengths, cos, sin)
    """
    import torch

    me, at = current(), Place.of(x, None)
    agree(f"llama_decode of {[tuple(a.shape) for a in (x, norms, qkv, o, gate_up, down, keys)]}")

    def shared(like: Any, shape: tuple[int, ...], kind: str) -> Any:
        return create_tensor(shape, getattr(torch, kind), "the sums that llama_decode exchanges")

    return decode(at, None, shared, (x, norms, qkv, o, gate_up, down, keys, values, lengths, cos, sin), me.ranks)


def _normed(x: Any, weight: Any, eps: float) -> Any:
    """RMS norm of rows, in a symmetric tensor."""
    y = x.float()
    return _space(tuple(x.shape), x.dtype, True).copy_(y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float())


def _rotated(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def llama_block(x: Any, norms: Any, qkv: Any, o: Any, gate_up: Any, down: Any, cos: Any, sin: Any, *, batch: int, dim: int,
                kv_heads: int, eps: float = 1e-5) -> Any:
    """A block's forward pass of whole sequences: rows are divided among the ranks, and heads and MLP between two GEMMs each.

    x: (rows, hidden), this rank's rows of batch sequences, one behind another.  norms: (2, hidden).  qkv: (hidden, (heads + 2
    kv_heads) dim), of this rank's heads.  o: (heads dim, hidden).  gate_up: (hidden, 2 ffn), columns of gate, then of up.
    down: (ffn, hidden).  cos, sin: (sequence, dim / 2) float32.  kv_heads: of this rank.  Returns this rank's rows.  GEMMs run
    under the gathering of their rows and the scattering of their sums.  Raises what all_gather_matmul and flash_attention
    raise.

    Example:
        x = dist.llama_block(x, norms, qkv, o, gate_up, down, cos, sin, batch=1, dim=128, kv_heads=4)
    """
    import torch

    rows, heads = x.shape[0] * current().ranks, o.shape[0] // dim

    def scattered(y: Any, w: Any) -> Any:
        return x + matmul_reduce_scatter(y, w, torch.empty_like(x))

    p = all_gather_matmul(_normed(x, norms[0], eps), qkv, x.new_empty(rows, qkv.shape[1]))
    q, k, v = p.view(batch, rows // batch, -1, dim).split([heads, kv_heads, kv_heads], 2)
    turn = cos[:, None], sin[:, None]
    mixed = flash_attention(_rotated(q, *turn), _rotated(k, *turn), v.contiguous(), causal=True)
    x = scattered(mixed.view(rows, -1), o)
    gate, up = all_gather_matmul(_normed(x, norms[1], eps), gate_up, x.new_empty(rows, gate_up.shape[1])).chunk(2, -1)
    return scattered(torch.nn.functional.silu(gate) * up, down)
