"""Attention with a function of the scores and a mask by blocks: the kernel of flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from .form import LOG2E, AttentionForm
from .kernels import absorb, finish, reset, working_set

ScoreMod = Callable[..., Any]
MOST_TENSORS = 2


@dataclass(frozen=True)
class FlexForm:
    """The parameters that a kernel of flex_attention is compiled for.

    plain: sizes, strides, tile and scale. score, mask: the caller's functions. block: rows and keys of a block of the mask;
    None without a mask. lists: the shape of the mask's lists. tensors: (shape, element type) of the tensors that the functions
    read. uses: which of them score reads, and which mask.
    """

    plain: AttentionForm
    score: ScoreMod | None
    mask: ScoreMod | None
    block: tuple[int, int] | None
    lists: tuple[int, ...]
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    uses: tuple[tuple[int, ...], tuple[int, ...]]


def flex_kernel(form: FlexForm) -> Any:
    """The kernel with the parameters (Q, K, V, Blocks, X0, X1, O, LSE).

    Blocks[b, h, r]: as BlockMask.blocks. A block of keys is processed in `steps` tiles. Keys behind the last one are hidden.
    """
    f, (masks, mask_heads) = form.plain, form.lists[:2]
    batch, seq_q, seq_k, heads = f.sizes[:4]
    rows, keys = f.tile.rows, f.tile.keys
    across, along = form.block or (rows, keys)
    steps = along // keys
    c = LOG2E if form.score else f.exponent_scale(f.scale)  # changed scores carry the scale
    types = (*form.tensors, *(((1,), "float32"),) * MOST_TENSORS)

    @T.prim_func
    def flex_attention(Q: f.q, K: f.k, V: f.v, Blocks: T.Tensor(form.lists, "int32"), X0: T.Tensor(*types[0]),
                       X1: T.Tensor(*types[1]), O: f.o, LSE: f.lse):
        with T.Kernel(T.ceildiv(seq_q, rows), heads, batch, threads=f.tile.threads) as (bx, h, b):
            Qs, Ks, Vs, S, P, acc, state = working_set(f)
            top, before, factor, total, more = state
            changing, masking = ([(X0, X1)[n] for n in numbers] for numbers in form.uses)
            row = bx * rows
            at = (b if masks > 1 else 0, h if mask_heads > 1 else 0, row // across)
            T.copy(f.rows(Q, b, h, row, rows), Qs)
            reset(acc, top, total, c)
            count = T.ceildiv(seq_k, keys) if form.block is None else Blocks[(*at, 0)] * steps
            whole = 0 if form.block is None else Blocks[(*at, 1)]
            for k in T.Pipelined(count, num_stages=f.tile.stages):
                key = k * keys if form.block is None else Blocks[(*at, k // steps + 2)] * along + k % steps * keys
                T.copy(f.rows(K, b, h // f.group, key, keys), Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                if form.score is not None:
                    for i, j in T.Parallel(rows, keys):
                        S[i, j] = form.score(S[i, j] * f.scale, b, h, row + i, key + j, *changing)
                if form.block is None:
                    for i, j in T.Parallel(rows, keys):
                        S[i, j] = T.if_then_else(key + j < seq_k, S[i, j], -T.infinity("float32"))
                else:
                    if k >= whole * steps:
                        for i, j in T.Parallel(rows, keys):
                            sees = T.And(key + j < seq_k, form.mask(b, h, row + i, key + j, *masking))
                            S[i, j] = T.if_then_else(sees, S[i, j], -T.infinity("float32"))
                T.copy(f.rows(V, b, h // f.group, key, keys), Vs)
                absorb(S, P, acc, state, c)
                T.gemm(P, Vs, acc)
            finish(acc, top, total, factor, c)
            T.copy(acc, f.rows(O, b, h, row, rows))
            if f.with_lse:
                T.copy(total, LSE[b, h, row:row + rows])

    return flex_attention
