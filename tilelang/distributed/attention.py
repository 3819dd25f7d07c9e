"""Attention over sequences that are divided among the ranks: keys and values travel (all-gather), or heads do (Ulysses)."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

from tilelang.library import flash_attention

from .collectives import all_to_all
from .host import create_tensor, current, on_rank, symmetric_view
from .overlap import _meeting, _space, _stream


def merged(chunks: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """One attention over the keys of all chunks.  chunks: (result (b, s, h, d), logarithm of the sum (b, h, s)) of each."""
    import torch

    total = torch.logsumexp(torch.stack([lse for _, lse in chunks]), 0)
    out = sum(o.float() * (lse - total).exp().transpose(1, 2)[..., None] for o, lse in chunks)
    return out, total


def gathered_attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> Any:
    """softmax(scale * q k^T) v of this rank's queries over the keys of all ranks, in the order of the ranks.

    q: (b, s, heads, d).  k, v: contiguous symmetric tensors (b, s, kv_heads, d), of this rank's rows of the sequence.  Keys
    and values of other ranks are read by copy engines, in the order of a ring, under the attention over those that are there;
    with causal, a rank reads those of lower ranks only.  Raises not-symmetric, ranks-disagree, and what flash_attention raises.

    Example:
        out = dist.gathered_attention(q, k, v, causal=True)
    """
    import torch

    me, main, side, meet = current(), torch.cuda.current_stream(), _stream(), _meeting()
    for x in (k, v):
        symmetric_view(x, "keys or values of gathered_attention")
    meet()
    side.wait_stream(main)
    order = [(me.rank - n) % me.ranks for n in range(1, me.ranks)]
    peers = [r for r in order if r < me.rank or not causal]
    rows, came = _space((2, me.ranks, *k.shape), k.dtype, False), []
    with torch.cuda.stream(side):
        for r in peers:
            for to, x in zip(rows, (k, v)):
                to[r].copy_(on_rank(x, r))
            came.append((r, side.record_event()))
    chunks = [flash_attention(q, k, v, causal=causal, scale=scale, return_lse=True)]
    for r, event in came:
        main.wait_event(event)
        chunks.append(flash_attention(q, rows[0][r], rows[1][r], scale=scale, return_lse=True))
    main.wait_stream(side)
    meet()
    return merged(chunks)[0].to(q.dtype)


@cache
def _heads(shape: tuple[int, ...], dtype: Any, what: str) -> Any:
    return create_tensor((prod(shape),), dtype, f"{what} of ulysses_attention").view(shape)


def heads_for_rows(x: Any, what: str) -> Any:
    """(b, ranks * s, h / ranks, d): all rows of some heads, for the rows x (b, s, h, d) of all heads."""
    ranks, (b, s, h, d) = current().ranks, x.shape
    chunks = x.view(b, s, ranks, h // ranks, d).permute(2, 0, 1, 3, 4)
    got = all_to_all(chunks, _heads((ranks, b, s, h // ranks, d), x.dtype, what))
    return got.transpose(0, 1).reshape(b, ranks * s, h // ranks, d)


def rows_for_heads(x: Any, what: str) -> Any:
    """The inverse of heads_for_rows."""
    ranks, (b, rows, h, d) = current().ranks, x.shape
    chunks = x.view(b, ranks, rows // ranks, h, d).transpose(0, 1)
    got = all_to_all(chunks, _heads((ranks, b, rows // ranks, h, d), x.dtype, what))
    return got.permute(1, 2, 0, 3, 4).reshape(b, rows // ranks, ranks * h, d)


def ulysses_attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> Any:
    """softmax(scale * q k^T) v of this rank's rows, of a sequence in the order of the ranks, by an all-to-all of heads.

    q: (b, s, heads, d).  k, v: (b, s, kv_heads, d); heads and kv_heads are multiples of the number of ranks.  Each rank
    computes some heads of the whole sequence.  Raises symmetric-memory, ranks-disagree, and what flash_attention raises.

    Example:
        out = dist.ulysses_attention(q, k, v, causal=True)
    """
    mine = (heads_for_rows(x, name) for x, name in ((q, "queries"), (k, "keys"), (v, "values")))
    return rows_for_heads(flash_attention(*mine, causal=causal, scale=scale), "results")
