"""Calls of tilelang.library that between them reach every form of its kernels: shapes, orders, element types, options.

Arrays are not initialised: nothing is computed, the calls only say which programs the library compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

TYPES = {"bfloat16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
CUDA, ALL = ("sm_80", "sm_90a"), ("sm_80", "sm_90a", "cpu")
CALLS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {}  # name -> (call with a target, targets)


def array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A compact array that starts at a multiple of 64 bytes."""
    kind = np.dtype(TYPES.get(dtype, dtype))
    room = np.empty(int(np.prod(shape)) * kind.itemsize + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start:start + room.nbytes - 64].view(kind).reshape(shape)


def product(name: str, m: int, n: int, k: int, dtype: str = "float16", order: str = "nn", batch: int = 0, bias: str = "",
            scaling: str = "", step: int = 0, other: str = "", on: tuple[str, ...] = CUDA, **options: Any) -> None:
    """step: elements between rows of both operands, where they are not compact.  other: the type of b."""
    lead = (batch,) if batch else ()

    def operand(rows: int, columns: int, dtype: str) -> np.ndarray:
        return array((*lead, rows, step or columns), dtype)[..., :columns]

    def call(target: Any) -> None:
        from tilelang.library import matmul

        a = operand(m, k, dtype) if order[0] == "n" else operand(k, m, dtype)
        b = operand(k, n, other or dtype) if order[1] == "n" else operand(n, k, other or dtype)
        if bias:
            options["bias"] = array((n,), bias)
        if scaling:
            blocks = ((m, -(-k // 128)), (-(-n // 128), -(-k // 128)))
            options["scale_a"], options["scale_b"] = (array(s, "float32") for s in (
                ((1,), (1,)) if scaling == "tensor" else blocks))
        matmul(a, b, transpose_a=order[0] == "t", transpose_b=order[1] == "t", target=target, **options)

    add(f"matmul {name}", call, on)


def add(name: str, call: Callable[[Any], Any], on: tuple[str, ...]) -> None:
    assert name not in CALLS, name
    CALLS[name] = (call, on)


def products() -> None:
    for order in ("nn", "nt", "tn", "tt"):
        product(f"square {order}", 4096, 4096, 4096, order=order)
        product(f"small {order}", 520, 392, 264, order=order, on=ALL)
        product(f"odd {order}", 201, 137, 105, order=order, on=ALL)
        product(f"odd rows {order}", 4001, 3003, 1537, order=order)
        for dtype in ("float32", "int8", "e4m3"):
            product(f"{dtype} {order}", 256, 264, 144, dtype, order, on=ALL if dtype != "e4m3" else ("sm_90a", "cpu"))
            product(f"{dtype} large {order}", 4096, 2048, 2048, dtype, order, on=CUDA if dtype != "e4m3" else ("sm_90a",))
    for name, sizes in {"M0": (4096, 1024, 8192), "M1": (4096, 8192, 8192), "M2": (4096, 28672, 8192), "M5": (8192, 8192, 8192),
                        "M7": (8192, 8192, 28672), "many tiles": (2048, 1536, 128), "long k": (128, 128, 8192),
                        "1000": (1000, 1000, 1000), "1024": (1024, 1024, 1024), "2048": (2048, 2048, 2048),
                        "split": (256, 256, 16384), "few rows": (40, 4096, 4096), "16 rows": (16, 1024, 16384),
                        "8 rows": (8, 4096, 4096), "two waves": (576, 9280, 3008), "parts": (176, 184, 12592),
                        "wide": (64, 28672, 4096), "tall": (16384, 512, 512), "clusters": (4184, 536, 408)}.items():
        for order in ("nn", "nt"):
            product(f"{name} {order}", *sizes, order=order)
        product(f"{name} bfloat16", *sizes, "bfloat16", "nt")
    for m in (1, 2, 3, 5, 8):
        product(f"{m} odd rows", m, 1001, 1537, on=CUDA if m in (2, 5) else ALL)
        product(f"{m} odd columns", 9001, m, 517, order="tn")
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        product(f"bias {activation}", 300, 264, 136, bias="float32", activation=activation, on=ALL)
        product(f"large {activation}", 4096, 4096, 4096, order="nt", bias="float16", activation=activation)
    product("bias bfloat16", 512, 512, 512, "bfloat16", "nt", bias="bfloat16")
    product("split bias gelu", 128, 256, 16384, order="nt", bias="float16", activation="gelu")
    product("batched", 136, 200, 72, batch=6, on=ALL)
    product("batched large", 1024, 1024, 1024, batch=8, order="nt")
    product("batched bfloat16", 512, 256, 1024, "bfloat16", batch=3)
    product("float64", 256, 200, 104, "float64", on=ALL)
    product("float64 relu", 256, 200, 104, "float64", bias="float64", activation="gelu_tanh", on=ALL)
    product("uint8", 256, 264, 144, "uint8", "nt", on=ALL)
    product("float32 result", 512, 384, 256, out_dtype="float32", on=ALL)
    product("bfloat16 result of float32", 512, 384, 256, "float32", "nt", out_dtype="bfloat16")
    product("steps", 512, 384, 256, step=648)
    product("odd steps", 300, 200, 120, step=401, on=ALL)
    for name, more in {"tensor": {"scaling": "tensor"}, "fast": {"scaling": "tensor", "fast_accum": True},
                       "block": {"scaling": "block"}, "plain": {}, "mixed": {"other": "e5m2"},
                       "bias": {"scaling": "tensor", "bias": "float32", "activation": "gelu"}}.items():
        product(f"e4m3 {name}", 256, 384, 512, "e4m3", "nt", on=("sm_90a", "cpu"), **more)
        product(f"e4m3 {name} large", 8192, 8192, 8192, "e4m3", "nt", on=("sm_90a",), **more)
        product(f"e4m3 {name} few rows", 16, 4096, 4096, "e4m3", "nt", on=("sm_90a",), **more)
    product("int8 scaled", 256, 384, 512, "int8", "nt", scaling="tensor", out_dtype="float16", on=ALL)


def grouped(name: str, rows: int, groups: int, n: int, k: int, dtype: str = "float16", on: tuple[str, ...] = CUDA,
            transpose_b: bool = False, bias: bool = False, **options: Any) -> None:
    def call(target: Any) -> None:
        from tilelang.library import grouped_matmul

        if bias:
            options["bias"] = array((n,), "float32")
        grouped_matmul(array((rows, k), dtype), array((groups, n, k) if transpose_b else (groups, k, n), dtype),
                       array((groups,), "int32"), transpose_b=transpose_b, target=target, **options)

    add(f"grouped_matmul {name}", call, on)


def groups() -> None:
    grouped("small", 300, 4, 136, 200, on=ALL)
    grouped("small nt", 300, 4, 136, 200, transpose_b=True, on=ALL)
    grouped("large", 4096, 8, 4096, 4096)
    grouped("large nt", 4096, 8, 4096, 4096, transpose_b=True)
    grouped("many", 512, 64, 1024, 2048, "bfloat16", transpose_b=True)
    grouped("bias silu", 2048, 16, 1024, 512, bias=True, activation="silu")
    grouped("float32", 300, 4, 136, 200, "float32", on=ALL)
    grouped("e4m3", 1024, 8, 512, 1024, "e4m3", transpose_b=True, on=("sm_90a", "cpu"))


def coded(name: str, m: int, n: int, k: int, group: int, kind: str, dtype: str = "float16",
          on: tuple[str, ...] = CUDA) -> None:
    """Weights of four bits.  kind: "zeros", "table" or "" for neither."""
    def call(target: Any) -> None:
        import tilelang.library as library

        a, w, scales = array((m, k), dtype), array((n, k // 2), "uint8"), array((n, k // group), dtype)
        zeros = array((n, k // group), "uint8") if kind == "zeros" else None
        table = array((16,), dtype) if kind == "table" else None
        library.dequant_matmul(a, w, scales, zeros, lut=table, target=target)

    add(f"dequant_matmul {name}", call, on)


def quantised() -> None:
    for kind in ("", "zeros", "table"):
        for m in (1, 16, 100, 4096):
            coded(f"{kind or 'plain'} {m}", m, 4096, 4096, 128, kind)
        coded(f"{kind or 'plain'} small", 16, 256, 512, 64, kind, "bfloat16", ALL)


def attention(name: str, batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, dim: int, dtype: str = "float16",
              dim_v: int = 0, on: tuple[str, ...] = CUDA, layout: str = "bshd", **options: Any) -> None:
    def shaped(seq: int, heads: int, dim: int) -> np.ndarray:
        return array((batch, seq, heads, dim) if layout == "bshd" else (batch, heads, seq, dim), dtype)

    def call(target: Any) -> None:
        from tilelang.library import flash_attention

        flash_attention(shaped(seq_q, heads, dim), shaped(seq_k, kv_heads, dim), shaped(seq_k, kv_heads, dim_v or dim),
                        layout=layout, target=target, **options)

    add(f"flash_attention {name}", call, on)


def packed(name: str, tokens: int, count: int, heads: int, kv_heads: int, dim: int, dtype: str = "float16",
           on: tuple[str, ...] = CUDA, **options: Any) -> None:
    def call(target: Any) -> None:
        from tilelang.library import flash_attention

        q, k, v = (array((tokens, h, dim), dtype) for h in (heads, kv_heads, kv_heads))
        flash_attention(q, k, v, cu_seqlens_q=array((count + 1,), "int32"), target=target, **options)

    add(f"flash_attention packed {name}", call, on)


def gradients(name: str, seq: int, dim: int, causal: bool) -> None:
    def call(target: Any) -> None:
        from tilelang.library import flash_attention_backward

        x, lse = array((1, seq, 1, dim), "float16"), array((1, 1, seq), "float32")
        flash_attention_backward(x, x, x, x, lse, x, causal=causal, deterministic=True, target=target)

    add(f"flash_attention_backward {name}", call, ("sm_90a",))


def attentions() -> None:
    for causal in (False, True):
        tag = " causal" * causal
        gradients(f"any lengths{tag}", 32_768, 128, causal)  # so many queries take the kernel of any lengths
        attention(f"FA{tag}", 1, 32, 32, 8192, 8192, 128, causal=causal)
        attention(f"grouped{tag}", 4, 32, 8, 2048, 2048, 128, "bfloat16", causal=causal)
        attention(f"small{tag}", 2, 4, 4, 300, 300, 128, causal=causal, on=ALL)
        attention(f"d64{tag}", 1, 8, 2, 130, 514, 64, causal=causal, on=ALL)
        attention(f"d256{tag}", 1, 2, 2, 200, 200, 256, causal=causal)
        attention(f"dim_v{tag}", 1, 4, 4, 512, 512, 192, dim_v=128, causal=causal)
        attention(f"few tiles{tag}", 1, 2, 1, 256, 1536, 128, causal=causal)
        attention(f"few queries{tag}", 2, 8, 2, 4, 1024, 64, causal=causal)
        attention(f"bhsd{tag}", 2, 4, 4, 1024, 1024, 64, causal=causal, layout="bhsd")
        attention(f"lse{tag}", 2, 4, 4, 1024, 1024, 128, causal=causal, return_lse=True, on=ALL)
        attention(f"scale{tag}", 2, 4, 4, 1024, 1024, 96, causal=causal, scale=0.25)
        packed(f"small{tag}", 358, 4, 4, 2, 128, causal=causal, on=ALL)
        packed(f"large{tag}", 16384, 8, 32, 8, 128, "bfloat16", causal=causal)
        packed(f"lse{tag}", 358, 4, 4, 2, 64, causal=causal, return_lse=True)
    attention("window", 1, 4, 2, 500, 500, 64, window=100, on=ALL)
    attention("window large", 1, 16, 16, 8192, 8192, 128, window=1024)
    attention("window left", 1, 4, 2, 500, 500, 64, window=(100, None))
    attention("one tile", 1, 1, 1, 64, 64, 32)
    attention("odd", 3, 3, 1, 77, 131, 80, "bfloat16", causal=True, on=ALL)
    packed("window", 358, 4, 4, 2, 128, window=64)


def decoding(name: str, batch: int, capacity: int, heads: int, kv_heads: int, dim: int, seq_q: int = 1, page: int = 0,
             dtype: str = "float16", on: tuple[str, ...] = CUDA, **options: Any) -> None:
    def call(target: Any) -> None:
        from tilelang.library import flash_decode

        pages = -(-capacity // page) if page else 0
        cache = (batch * pages, page, kv_heads, dim) if page else (batch, capacity, kv_heads, dim)
        if page:
            options["block_table"] = array((batch, pages), "int32")
        flash_decode(array((batch, seq_q, heads, dim), dtype), array(cache, dtype), array(cache, dtype),
                     array((batch,), "int32"), target=target, **options)

    add(f"flash_decode {name}", call, on)


def decodings() -> None:
    for page in (0, 16, 64):
        tag = f" paged {page}" if page else ""
        decoding(f"small{tag}", 3, 512, 8, 2, 128, page=page, on=ALL)
        decoding(f"large{tag}", 32, 8192, 32, 8, 128, page=page, dtype="bfloat16")
        decoding(f"one sequence{tag}", 1, 32768, 32, 8, 128, page=page)
        decoding(f"several queries{tag}", 4, 1024, 16, 2, 64, seq_q=3, page=page)
        decoding(f"window{tag}", 4, 2048, 8, 8, 128, page=page, window=256)
        decoding(f"lse{tag}", 3, 512, 8, 2, 64, page=page, return_lse=True)
    decoding("no splits", 3, 512, 8, 2, 128, splits=1)
    decoding("four splits", 3, 512, 8, 2, 128, splits=4, on=ALL)
    decoding("d256", 3, 512, 8, 2, 256)


# ---- functions whose text no digest keeps: name -> call with a target ------------------------------------------------------

OTHERS: dict[str, Callable[[Any], Any]] = {}  # of `others`


def other(function: str, form: str, *args: Any, **options: Any) -> None:
    """args: (shape, type) of arrays, or values that are passed as they are.  The library is imported at the call."""
    def call(target: Any) -> None:
        import tilelang.library as library

        given = [array(*x) if isinstance(x, tuple) and isinstance(x[0], tuple) else x for x in args]
        getattr(library, function)(*given, target=target, **options)

    assert f"{function} {form}" not in OTHERS
    OTHERS[f"{function} {form}"] = call


def recurrences() -> None:
    for function in ("gated_delta", "kda"):
        for seq in (4096, 4):
            for dim in (64, 128):
                for dtype in ("float16", "bfloat16"):
                    key, value, row = ((2, seq, 4, dim), dtype), ((2, seq, 8, 128), dtype), (2, seq, 8)
                    decay = (*row, dim) if function == "kda" else row
                    other(function, f"{seq} {dim} {dtype}", key, key, value, (decay, "float32"), (row, "float32"))
    for length, p, n in ((64, 64, 128), (128, 256, 256), (256, 64, 128), (256, 128, 64)):
        row, x, state = ((1, 8, 4, length), "float32"), ((1, 4 * length, 8, p), "bfloat16"), ((1, 4 * length, 2, n), "bfloat16")
        other("chunk_state", f"{length} {p} {n}", x, state, row, row)
        before = (1, 4, 8, p, n), "bfloat16"
        other("chunk_scan", f"{length} {p} {n}", ((1, 4, 2, length, length), "bfloat16"), x, row, row, state, before)
    for dtype in ("float16", "bfloat16"):
        wide, narrow, heads = ((1, 1000, 4, 128), dtype), ((1, 1000, 4, 64), dtype), ((4,), "float32")
        group = (1, 1000, 1, 128), dtype
        other("mamba2", dtype, narrow, ((1, 1000, 4), "float32"), heads, group, group)
        other("retention", dtype, narrow, narrow, wide, heads)
        other("linear_attention", dtype, narrow, narrow, wide, ((1, 1000, 4), "float32"))


def latent() -> None:
    for name, heads, dim, seq_q, page, dtype, kept in (
            ("128 heads", 128, (512, 64), 1, 0, "bfloat16", "bfloat16"),
            ("paged", 128, (512, 64), 2, 64, "bfloat16", "bfloat16"),
            ("16 heads", 16, (512, 64), 1, 0, "float16", "float16"), ("float8", 64, (512, 64), 1, 64, "float16", "e4m3"),
            ("256", 64, (256, 64), 1, 0, "float16", "float16"), ("small", 8, (64, 16), 3, 0, "float16", "float16")):
        q, cache = (4, seq_q, heads, sum(dim)), (64, page, sum(dim)) if page else (4, 1024, sum(dim))
        table = array((4, 16), "int32") if page else None
        other("mla_decode", name, (q, dtype), (cache, kept), np.full(4, 1024, np.int32), dim_v=dim[0], block_table=table)
    for dim, rope, causal, dynamic in ((128, 64, True, False), (128, 64, False, True), (64, 64, True, False),
                                       (256, 256, True, False)):
        key = (1, 2048, 16, dim), "bfloat16"
        other("mla_prefill", f"{dim} {rope} {causal} {dynamic}", ((1, 2048, 16, dim + rope), "bfloat16"), key,
              ((1, 2048, rope), "bfloat16"), key, causal=causal, dynamic=dynamic)
    for heads, dim_v, rope in ((128, 512, 64), (64, 128, 64), (16, 64, 16)):
        other("sparse_mla", f"{heads} {dim_v} {rope}", ((16, heads, dim_v + rope), "bfloat16"),
              ((4096, dim_v + rope), "bfloat16"), np.zeros((16, 2048), np.int32), dim_v=dim_v)
    for heads, dim, dtype in ((64, 128, "e4m3"), (64, 128, "bfloat16"), (128, 256, "float16"), (8, 32, "bfloat16")):
        name = "float8" if dtype == "e4m3" else dtype
        other("index_scores", f"{heads} {dim} {name}", ((256, heads, dim), dtype), ((4096, dim), dtype),
              ((256, heads), "float32"))
    for n, k in ((100, 1), (5001, 2048), (100_000, 8000), (20_000, 9000)):
        other("topk_indices", f"{n} {k}", ((8, n), "float32"), k)


def flexible() -> None:
    import tilelang.language as T
    from tilelang.library import create_block_mask

    causal = create_block_mask(lambda b, h, q, k: q >= k, 1024, 1024)
    for dim, dtype in ((64, "float16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float32"), (128, "float32")):
        key = (1, 1024, 2, dim), dtype
        for mask in (None, causal):
            other("flex_attention", f"{dim} {dtype}{' causal' * (mask is not None)}", ((1, 1024, 8, dim), dtype), key, key,
                  score_mod=lambda s, b, h, i, j: 30.0 * T.tanh(s / 30.0), block_mask=mask)


def rows() -> None:
    for dtype, n in (("bfloat16", 4096), ("float16", 1000), ("float32", 50_257), ("bfloat16", 32_768)):
        x, vector, form = ((64, n), dtype), ((n,), dtype), f"{n} {dtype}"
        other("rms_norm", form, x, vector)
        other("layer_norm", form, x, vector, vector)
        other("softmax", form, x)
        other("cross_entropy", form, x, ((64,), "int64"), label_smoothing=0.1)
        other("swiglu", form, x, x)
    other("swiglu", "both in one", ((64, 8192), "bfloat16"))


def trained() -> None:
    for dim, dtype in ((64, "float16"), (128, "bfloat16")):
        q, k, lse = ((1, 1024, 8, dim), dtype), ((1, 1024, 2, dim), dtype), ((1, 8, 1024), "float32")
        for deterministic in (False, True):
            other("flash_attention_backward", f"{dim} {dtype} {deterministic}", q, k, k, q, lse, q, causal=True,
                  deterministic=deterministic)
    for stride in (1, 2):
        images, weight = ((4, 28, 28, 64), "bfloat16"), ((128, 3, 3, 64), "bfloat16")
        other("conv2d", f"stride {stride}", images, weight, stride=stride, padding=1)
    x, w = ((512, 1024), "bfloat16"), ((4096, 1024), "bfloat16")
    other("linear_cross_entropy", "bfloat16", x, w, ((512,), "int64"))
    other("fused_matmul", "rows", x, w, transpose_b=True, reduce=[("rows", "absmax")])
    other("sparse_compress", "float16", np.zeros((256, 512), np.float16))
    other("sparse_matmul", "float16", ((256, 256), "float16"), ((64, 256), "uint8"), ((512, 1024), "float16"))


def others() -> dict[str, Callable[[Any], Any]]:
    """Calls by name, made at the first call: they need the library."""
    for family in (recurrences, latent, flexible, rows, trained) if not OTHERS else ():
        family()
    return OTHERS
for _family in (products, groups, quantised, attentions, decodings):
    _family()
