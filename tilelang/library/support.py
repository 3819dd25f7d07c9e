"""What of the library runs where: the element types that each function takes on each kind of machine."""

from __future__ import annotations

MACHINES = ("cpu", "sm_80", "sm_89", "sm_90a")
_ALL = ("yes",) * 4
_FLOAT32 = ("yes", "tf32", "tf32", "tf32")  # GPUs round operands to tf32
_FLOAT8 = ("yes", "", "yes", "yes")
_ATTENTION = {"float16": _ALL, "bfloat16": _ALL, "float32": _FLOAT32}
_FLASH = {**_ATTENTION, "float64": ("yes", "", "", "")}
_GEMM = {"float16": _ALL, "bfloat16": _ALL, "float32": _FLOAT32, "float64": _ALL, "int8": _ALL, "uint8": _ALL,
         "float8_e4m3fn": _FLOAT8, "float8_e5m2": _FLOAT8}

# function -> element type of its first operand -> "yes", "tf32" or "" (rejected) on each of MACHINES
SUPPORT: dict[str, dict[str, tuple[str, ...]]] = {
    "matmul": _GEMM, "grouped_matmul": _GEMM, "fused_matmul": _GEMM,
    "sparse_matmul": {kind: found for kind, found in _GEMM.items() if kind not in ("float32", "float64")},
    "sparse_compress": {kind: _ALL for kind in _GEMM if kind not in ("float32", "float64")},
    **dict.fromkeys(("linear_cross_entropy", "conv2d"), {**_ATTENTION, "float64": _ALL}),
    **dict.fromkeys(("flex_attention", "flash_decode"), _ATTENTION),
    **dict.fromkeys(("flash_attention", "flash_attention_backward"), _FLASH),
    **{name: {"float16": _ALL, "bfloat16": _ALL} for name in
       ("chunk_scan", "chunk_state", "dequant_matmul", "mla_decode", "sparse_mla")},
    **{name: {"float16": _ALL, "bfloat16": _ALL, "float64": ("yes", "", "", "")} for name in
       ("gated_delta", "kda", "linear_attention", "mamba2", "mla_prefill", "retention")},
    "llama_decode": {"bfloat16": ("", "", "", "yes")},
    "index_scores": {"float16": _ALL, "bfloat16": _ALL, "float8_e4m3fn": _ALL}, "topk_indices": {"float32": _ALL},
    **{name: dict.fromkeys(("float16", "bfloat16", "float32", "float64"), _ALL) for name in
       ("rms_norm", "layer_norm", "softmax", "cross_entropy", "swiglu")}}


def support_rows() -> list[tuple[str, ...]]:
    """(function, element type, what each of MACHINES does with it) for each function and type."""
    return [(name, kind, *(x or "-" for x in found)) for name, kinds in SUPPORT.items() for kind, found in kinds.items()]
