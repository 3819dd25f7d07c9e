"""What benchmarks/stress.py launches: every library kernel in small sizes, with a float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

LIMIT = {"float16": 6e-4, "bfloat16": 5e-3, "float32": 2e-3, "int32": 0.0}  # relative (Frobenius) error, by result type
BLOCK = 128
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """inputs(device, seed) -> tensors; run(tensors) -> result; reference(tensors) -> float64 result."""

    name: str
    inputs: Callable[[str, int], Tensors]
    run: Callable[[Tensors], torch.Tensor]
    reference: Callable[[Tensors], torch.Tensor]
    limit: float


def _normal(shape: tuple[int, ...], dtype: str, device: str, g: torch.Generator) -> torch.Tensor:
    if dtype == "int8":
        return torch.randint(-9, 10, shape, device=device, generator=g, dtype=torch.int8)
    return torch.randn(shape, device=device, generator=g).to(getattr(torch, dtype))


# ---- products ----------------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x, "relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def _product_inputs(m: int, n: int, k: int, dtype: str, order: str, batch: int, bias: bool, scaling: str, device: str,
                    seed: int) -> Tensors:
    g = torch.Generator(device=device).manual_seed(seed)
    lead = (batch,) if batch else ()
    t = {"a": _normal((*lead, *((m, k) if order[0] == "n" else (k, m))), dtype, device, g),
         "b": _normal((*lead, *((k, n) if order[1] == "n" else (n, k))), dtype, device, g)}
    if bias:
        t["bias"] = _normal((n,), "float32", device, g)
    if scaling:
        shapes = ((1,), (1,)) if scaling == "tensor" else ((m, -(-k // BLOCK)), (-(-n // BLOCK), -(-k // BLOCK)))
        t["scale_a"], t["scale_b"] = (torch.rand(s, device=device, generator=g) + 0.5 for s in shapes)
    return t


def _product(order: str, options: dict[str, Any], t: Tensors) -> torch.Tensor:
    from tilelang.library import matmul

    return matmul(**t, transpose_a=order[0] == "t", transpose_b=order[1] == "t", **options)


def _product_reference(order: str, options: dict[str, Any], t: Tensors) -> torch.Tensor:
    a = t["a"].double().mT if order[0] == "t" else t["a"].double()
    b = t["b"].double().mT if order[1] == "t" else t["b"].double()
    if "scale_a" in t:
        sa, sb = t["scale_a"].double(), t["scale_b"].double()
        if sa.numel() > 1:
            sa = sa.repeat_interleave(BLOCK, 1)[:, :a.shape[1]]
            sb = sb.repeat_interleave(BLOCK, 0)[:b.shape[1]].repeat_interleave(BLOCK, 1)[:, :b.shape[0]].T
        a, b = a * sa, b * sb
    out = a @ b
    return ACTIVATIONS[options.get("activation")](out + t["bias"].double() if "bias" in t else out)


def product(name: str, m: int, n: int, k: int, dtype: str = "float16", order: str = "nt", batch: int = 0,
            bias: bool = False, scaling: str = "", result: str = "", limit: float = 0.0, **options: Any) -> Case:
    result = result or {"int8": "int32", "float8_e4m3fn": "bfloat16"}.get(dtype, dtype)
    return Case(name, partial(_product_inputs, m, n, k, dtype, order, batch, bias, scaling),
                partial(_product, order, options), partial(_product_reference, order, options), limit or LIMIT[result])


def _grouped_inputs(sizes: tuple[int, ...], n: int, k: int, device: str, seed: int) -> Tensors:
    g = torch.Generator(device=device).manual_seed(seed)
    turned = sizes[seed % len(sizes):] + sizes[:seed % len(sizes)]  # the sizes change too
    return {"a": _normal((sum(sizes), k), "float16", device, g), "b": _normal((len(sizes), k, n), "float16", device, g),
            "group_sizes": torch.tensor(turned, dtype=torch.int32, device=device)}


def _grouped(t: Tensors) -> torch.Tensor:
    from tilelang.library import grouped_matmul

    return grouped_matmul(**t)


def _grouped_reference(t: Tensors) -> torch.Tensor:
    parts = t["a"].double().split(t["group_sizes"].tolist())
    return torch.cat([x @ y for x, y in zip(parts, t["b"].double())])


def _dequant_inputs(m: int, n: int, k: int, group: int, table: bool, device: str, seed: int) -> Tensors:
    g = torch.Generator(device=device).manual_seed(seed)
    t = {"a": _normal((m, k), "float16", device, g),
         "w": torch.randint(0, 256, (n, k // 2), device=device, generator=g, dtype=torch.uint8),
         "scales": (torch.rand((n, k // group), device=device, generator=g) + 0.5).half()}
    if table:
        t["lut"] = _normal((16,), "float16", device, g)
    else:
        t["zero_points"] = torch.randint(0, 16, (n, k // group), device=device, generator=g, dtype=torch.uint8)
    return t


def _dequant(t: Tensors) -> torch.Tensor:
    from tilelang.library import dequant_matmul

    return dequant_matmul(**t)


def _dequant_reference(t: Tensors) -> torch.Tensor:
    q = torch.stack((t["w"] & 15, t["w"] >> 4), -1).flatten(1)
    group = q.shape[1] // t["scales"].shape[1]
    scales = t["scales"].double().repeat_interleave(group, 1)
    weights = t["lut"].double()[q.long()] if "lut" in t else q.double() - t["zero_points"].double().repeat_interleave(group, 1)
    return t["a"].double() @ (weights * scales).T


def quantised(name: str, m: int, n: int, k: int, group: int, table: bool = False) -> Case:
    return Case(name, partial(_dequant_inputs, m, n, k, group, table), _dequant, _dequant_reference, LIMIT["float16"])


# ---- attention ---------------------------------------------------------------------------------------------------------


def _attention_inputs(batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, dim: int, dtype: str, device: str,
                      seed: int) -> Tensors:
    g = torch.Generator(device=device).manual_seed(seed)
    return {x: _normal((batch, s, h, dim), dtype, device, g)
            for x, s, h in (("q", seq_q, heads), ("k", seq_k, kv_heads), ("v", seq_k, kv_heads))}


def _packed_inputs(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, device: str, seed: int) -> Tensors:
    g = torch.Generator(device=device).manual_seed(seed)
    turned = torch.tensor((0, *lengths[seed % len(lengths):], *lengths[:seed % len(lengths)]))
    t = {x: _normal((sum(lengths), h, dim), "float16", device, g)
         for x, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
    return {**t, "cu_seqlens_q": turned.cumsum(0).int().to(device)}


def _attend(options: dict[str, Any], t: Tensors) -> torch.Tensor:
    from tilelang.library import flash_attention

    return flash_attention(**t, **options)


def _one_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None) -> torch.Tensor:
    s = q @ k.mT * q.shape[-1]**-0.5
    apart = (torch.arange(q.shape[-2], device=q.device) + k.shape[-2] - q.shape[-2])[:, None] - torch.arange(
        k.shape[-2], device=q.device)
    seen = torch.ones_like(apart, dtype=torch.bool)
    if causal:
        seen &= apart >= 0
    if window is not None:
        seen &= apart.abs() < window
    return torch.nan_to_num(s.masked_fill(~seen, -torch.inf).softmax(-1)) @ v


def _attend_reference(options: dict[str, Any], t: Tensors) -> torch.Tensor:
    """(batch, heads, seq, dim) or packed heads first, turned back."""
    q, k, v = (t[x].double().transpose(-3, -2) for x in "qkv")
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    mask = options.get("causal", False), options.get("window")
    if "cu_seqlens_q" not in t:
        return _one_head(q, k, v, *mask).transpose(-3, -2)
    ends = t["cu_seqlens_q"].tolist()
    parts = [_one_head(*(x[:, a:b] for x in (q, k, v)), *mask) for a, b in zip(ends, ends[1:])]
    return torch.cat(parts, 1).transpose(-3, -2)


def _decode_inputs(lengths: tuple[int, ...], capacity: int, seq_q: int, heads: int, kv_heads: int, dim: int, device: str,
                   seed: int) -> Tensors:
    g = torch.Generator(device=device).manual_seed(seed)
    turned = torch.tensor((*lengths[seed % len(lengths):], *lengths[:seed % len(lengths)]), dtype=torch.int32)
    t = {x: _normal((len(lengths), n, h, dim), "float16", device, g)
         for x, n, h in (("q", seq_q, heads), ("k_cache", capacity, kv_heads), ("v_cache", capacity, kv_heads))}
    return {**t, "lengths": turned.to(device)}


def _decode(t: Tensors) -> torch.Tensor:
    from tilelang.library import flash_decode

    return flash_decode(**t)


def _decode_reference(t: Tensors) -> torch.Tensor:
    q, k, v = (t[x].double().transpose(1, 2) for x in ("q", "k_cache", "v_cache"))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    rows = [_one_head(q[b], k[b, :, :n], v[b, :, :n], True, None) for b, n in enumerate(t["lengths"].tolist())]
    return torch.stack(rows).transpose(1, 2)


def attention(name: str, batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, dim: int, dtype: str = "float16",
              **options: Any) -> Case:
    return Case(name, partial(_attention_inputs, batch, heads, kv_heads, seq_q, seq_k, dim, dtype),
                partial(_attend, options), partial(_attend_reference, options), 2 * LIMIT[dtype])


FP8 = "float8_e4m3fn"
# ---- convolutions, epilogues ---------------------------------------------------------------------------------------------


def _convolution_inputs(stride: int, device: str, seed: int) -> Tensors:
    g = torch.Generator(device=device).manual_seed(seed)
    x, w = _normal((5, 13, 17, 64), "float16", device, g), _normal((96, 3, 3, 64), "float16", device, g) / 24
    return {"x": x, "w": w, "dy": _normal((5, -(-13 // stride), -(-17 // stride), 96), "float16", device, g)}


def _convolution(stride: int, way: str, t: Tensors) -> torch.Tensor:
    from tilelang.library.training.convolution import CONV2D

    options = [stride] * 2, [1, 1], [1, 1], None
    if way == "forward":
        return CONV2D.forward(t["x"], t["w"], *options)[0]
    return CONV2D.backward(t["x"], t["w"], [way == "images", way == "weights"], *options, t["dy"])[way == "weights"]


def _convolution_reference(stride: int, way: str, t: Tensors) -> torch.Tensor:
    x, w, dy = (v.double().permute(0, 3, 1, 2) for v in t.values())
    if way == "forward":
        return torch.nn.functional.conv2d(x, w, None, stride, 1).permute(0, 2, 3, 1)
    wanted = torch.ops.aten.convolution_backward(dy, x, w, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1,
                                                 [way == "images", way == "weights", False])
    return wanted[way == "weights"].permute(0, 2, 3, 1)


def _exact(t: Tensors) -> torch.Tensor:
    from tilelang.library import fused_matmul

    return fused_matmul(t["a"], t["b"], exact=True)


def _pair_inputs(device: str, seed: int) -> Tensors:
    g = torch.Generator(device=device).manual_seed(seed)
    return {name: _normal(shape, "float16", device, g) / 16**0.5 for name, shape in (
        ("a", (300, 264)), ("b", (264, 136)), ("second", (264, 136)))}


def _gated(x: Any, y: Any, i: Any, j: Any) -> Any:
    import tilelang.language as T

    return x / (1 + T.exp(-x)) * y


def _pair(t: Tensors) -> torch.Tensor:
    from tilelang.library import fused_matmul

    return fused_matmul(t["a"], t["b"], _gated, second=t["second"])


def _pair_reference(t: Tensors) -> torch.Tensor:
    a, b, second = (v.double() for v in t.values())
    return torch.nn.functional.silu(a @ b) * (a @ second)


CASES = {c.name: c for c in (
    product("nt", 520, 392, 264), product("nn", 520, 392, 264, order="nn"), product("tn", 520, 392, 264, order="tn"),
    product("tt", 520, 392, 264, order="tt"), product("bf16", 256, 512, 256, "bfloat16"),
    product("many tiles", 2048, 1536, 128), product("long k", 128, 128, 8192), product("odd", 201, 137, 105),
    product("cut in two", 576, 9280, 3008, order="nn"), product("few odd rows", 3, 1001, 1537),
    product("few odd columns", 9001, 5, 517, order="tn"), product("eleven parts", 176, 184, 12592),
    product("tf32", 256, 264, 136, "float32"), product("int8", 256, 264, 144, "int8"),
    product("bias gelu", 300, 264, 136, bias=True, activation="gelu"), product("silu nn", 300, 264, 136, order="nn",
                                                                              bias=True, activation="silu"),
    product("batched", 136, 200, 72, batch=6),
    product("fp8", 256, 384, 512, FP8, scaling="tensor"),
    product("fp8 fast", 256, 384, 512, FP8, scaling="tensor", limit=2e-2, fast_accum=True),
    product("fp8 by block", 256, 384, 512, FP8, scaling="block", limit=6e-3),
    Case("grouped", partial(_grouped_inputs, (70, 0, 200, 30), 136, 200), _grouped, _grouped_reference, LIMIT["float16"]),
    attention("attention", 2, 4, 4, 300, 300, 128), attention("attention causal", 2, 4, 4, 300, 300, 128, causal=True),
    attention("attention bf16", 1, 4, 4, 256, 256, 128, "bfloat16"),
    attention("attention grouped d64", 1, 8, 2, 130, 514, 64, causal=True),
    attention("attention d256", 1, 2, 2, 200, 200, 256), attention("attention window", 1, 4, 2, 500, 500, 64, window=100),
    Case("attention packed", partial(_packed_inputs, (100, 1, 0, 257), 4, 2, 128), partial(_attend, {"causal": True}),
         partial(_attend_reference, {"causal": True}), 2 * LIMIT["float16"]),
    product("tf32 nn", 64, 520, 264, "float32", order="nn"), product("int8 nn", 256, 264, 144, "int8", order="nn"),
    product("few rows by block", 16, 384, 512, FP8, scaling="block", limit=6e-3),
    product("clusters by price", 4184, 536, 408, order="nn"),
    quantised("quantised weights", 16, 256, 512, 64), quantised("look-up table", 100, 256, 512, 128, table=True),
    attention("attention of few tiles", 1, 2, 1, 256, 1536, 128, causal=True),
    attention("attention of few queries", 2, 8, 2, 4, 1024, 64, causal=True),
    Case("decoding", partial(_decode_inputs, (300, 17, 512), 512, 1, 8, 2, 128), _decode, _decode_reference,
         2 * LIMIT["float16"]),
    *(Case(f"convolution {way}{' stride' * (stride > 1)}", partial(_convolution_inputs, stride),
           partial(_convolution, stride, way), partial(_convolution_reference, stride, way), LIMIT["float16"])
      for stride in (1, 2) for way in ("forward", "images", "weights")),
    Case("exact float32", partial(_product_inputs, 260, 136, 200, "float32", "nn", 0, False, ""), _exact, partial(
        _product_reference, "nn", {}), 1e-6),
    Case("two products", _pair_inputs, _pair, _pair_reference, 2 * LIMIT["float16"]),
)}
