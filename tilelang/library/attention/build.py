"""Compiles the kernels of attention plans, and caches them by their forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tilelang.language as T
from tilelang.jit import JITKernel, compile
from tilelang.target import Target

from ..caches import Cache
from .decode_kernels import decode_attention
from .form import AttentionForm, DecodeForm
from .inputs import UNIT, configs
from .kernels import dense_attention
from .packed_kernels import packed_attention
from .problem import Mask, Sizes
from .split_kv_kernels import partitioned_attention, split_kv_attention

KERNELS: Cache[JITKernel] = Cache(1024)


def attention_kernel(f: AttentionForm, target: Target, backend: str | None) -> JITKernel:
    """The compiled kernel of a form. Sizes and strides that are None in it are given by each call."""
    return KERNELS.made((f, target, backend), lambda: compile(
        _attention(f, target), target=target, execution_backend=backend, pass_configs=configs(target)))


def decode_kernel(f: DecodeForm, target: Target, backend: str | None) -> JITKernel:
    """The compiled kernel of a form of decode steps."""
    # The splits make as many blocks as there are SMs, so a persistent loop would have one tile.
    return KERNELS.made((f, target, backend), lambda: compile(
        decode_attention(_any_cache(f)), target=target, execution_backend=backend,
        pass_configs={**configs(target), "tl.persistent": False}))


def _attention(f: AttentionForm, target: Target) -> Any:
    """The program of a form."""
    sizes = Sizes(*(T.dynamic(name) if n is None else n for name, n in zip(Sizes._fields, f.sizes)))
    f = replace(f, sizes=sizes, strides=tuple(_steps(name, s) for name, s in zip("qkvo", f.strides)))
    if f.layout == "packed":
        # Without wgmma, blocks are not persistent: a block starts when another ends, in any order.
        return packed_attention(f, target.limits.sm_count if target.has_wgmma else 1)
    if f.partition is None:
        return dense_attention(f)
    return partitioned_attention(f) if f.mask == Mask() else split_kv_attention(f)


def _any_cache(f: DecodeForm) -> DecodeForm:
    """The form of one kernel for every batch size, cache and table."""
    batch, pages, width = T.dynamic("batch, pages, width")
    pages = batch if f.sizes.page_size is None else pages
    return replace(f, sizes=f.sizes._replace(batch=batch, pages=pages, width=width),
                   strides=tuple(_steps(name, s) for name, s in zip("kv", f.strides)))


def _steps(name: str, strides: tuple[Any, ...]) -> tuple[Any, ...]:
    """The strides of a tensor. Symbolic strides are declared as multiples of 16 bytes, which TMA and vector loads need."""
    return tuple(T.dynamic(f"{name}_step_{d}") * UNIT if n is None else n for d, n in enumerate(strides))
