"""Compiles the kernels of attention plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tilelang.language as T
from tilelang.jit import JITKernel

from ..place import Place
from .decode_kernels import decode_attention
from .form import AttentionForm, DecodeForm
from .inputs import UNIT, fast_kernel
from .kernels import dense_attention
from .packed_kernels import packed_attention
from .problem import Sizes
from .split_kv_kernels import split_kv_attention

def attention_kernel(f: AttentionForm, at: Place) -> JITKernel:
    """The compiled kernel of a form. Sizes and strides that are None in it are given by each call."""
    return fast_kernel(at, _attention, f, at.target.limits.sm_count if at.target.has_wgmma else 1)


def decode_kernel(f: DecodeForm, at: Place) -> JITKernel:
    """The compiled kernel of a form of decode steps."""
    # The splits make as many blocks as there are SMs, so a persistent loop would have one tile.
    return fast_kernel(at, _decode, f, persistent=False)


def _attention(f: AttentionForm, sms: int) -> Any:
    """The program of a form. sms: blocks of packed sequences that run at the same time. Without wgmma, blocks are not
    persistent: a block starts when another ends, in any order."""
    sizes = Sizes(*(T.dynamic(name) if n is None else n for name, n in zip(Sizes._fields, f.sizes)))
    f = replace(f, sizes=sizes, strides=tuple(_steps(name, s) for name, s in zip("qkvo", f.strides)))
    if f.layout == "packed":
        return packed_attention(f, sms)
    if f.partition is None:
        return dense_attention(f)
    return split_kv_attention(f)


def _decode(f: DecodeForm) -> Any:
    """The program of a form, for every batch size, cache and table."""
    batch, pages, width = T.dynamic("batch, pages, width")
    pages = batch if f.sizes.page_size is None else pages
    return decode_attention(replace(f, sizes=f.sizes._replace(batch=batch, pages=pages, width=width),
                                    strides=tuple(_steps(name, s) for name, s in zip("kv", f.strides))))


def _steps(name: str, strides: tuple[Any, ...]) -> tuple[Any, ...]:
    """The strides of a tensor. Symbolic strides are declared as multiples of 16 bytes, which TMA and vector loads need."""
    return tuple(T.dynamic(f"{name}_step_{d}") * UNIT if n is None else n for d, n in enumerate(strides))
