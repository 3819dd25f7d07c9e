"""Kernels written in the language, with functions that take torch tensors and NumPy arrays.

    from tilelang.library import flash_attention, matmul
    out = flash_attention(q, k, v, causal=True)
    c = matmul(a, b, bias=bias, activation="relu")

Modules are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any as _Any

from tilelang.errors import named_arguments as _named_arguments, register as _register

from .arguments import explained as _explained, under_autocast as _under_autocast

_register("library-option", TypeError, "an argument that a function of the library does not take",
          expected="the arguments of the function")
_register("library-argument", TypeError, "an argument that is of another kind than a function of the library takes",
          "see the shapes and types in the docstring of the function", expected="tensors and numbers as it names them")

# public function -> module that defines it
_NAMES = {
    "chunk_scan": "recurrent.ssd",
    "chunk_state": "recurrent.ssd",
    "conv2d": "training.convolution",
    "create_block_mask": "attention.flex_attention",
    "cross_entropy": "training.softmax",
    "decode_plan": "attention.flash_decode",
    "dequant_matmul": "quantised.dequant_matmul",
    "flash_attention": "attention.flash_attention",
    "flash_attention_backward": "attention.backward",
    "flash_decode": "attention.flash_decode",
    "flex_attention": "attention.flex_attention",
    "fused_matmul": "gemm.fused",
    "gated_delta": "recurrent.delta",
    "grouped_matmul": "gemm.grouped",
    "index_scores": "attention.sparse_index",
    "interleave": "decode_step",
    "kda": "recurrent.delta",
    "layer_norm": "training.norms",
    "linear_attention": "recurrent.decays",
    "linear_cross_entropy": "training.linear_entropy",
    "mamba2": "recurrent.mamba",
    "matmul": "gemm.matmul",
    "llama_decode": "decode_step",
    "mla_decode": "attention.mla_decode",
    "mla_plan": "attention.mla_decode",
    "mla_prefill": "attention.mla_prefill",
    "retention": "recurrent.mamba",
    "rms_norm": "training.norms",
    "softmax": "training.softmax",
    "sparse_compress": "gemm.sparse",
    "sparse_matmul": "gemm.sparse",
    "sparse_mla": "attention.sparse_mla",
    "swiglu": "training.swiglu",
    "topk_indices": "attention.topk",
}


def __getattr__(name: str) -> _Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    fn = getattr(_import_module(f"{__name__}.{_NAMES[name]}"), name)
    value = globals()[name] = _named_arguments("library-option", room=__name__, explain=_explained)(_under_autocast(fn))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})


__all__ = sorted(_NAMES)
