"""Every check of every example, with small sizes for interpreters and the CPU and, where they differ from the check's own,
sizes for a GPU.  run_all.py and the tests read it; a new example is one line here and one in README.md."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Check:
    """A function of an example file.  small, real: its sizes; {} for the defaults of its parameters.

    hopper: the program names operations of sm_90a, which other targets refuse.
    """

    file: str
    function: str
    small: Mapping[str, Any]
    real: Mapping[str, Any] = field(default_factory=dict)
    hopper: bool = False

    @property
    def id(self) -> str:
        """Short, unique with the position of the row."""
        return f"{self.file.split('/')[-1].removesuffix('.py')}-{self.function}"


def load(file: str) -> Any:
    """The module of an example, loaded once; files beside it can be imported by their names, as when it is run."""
    name = "example_" + file.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        for folder in (str((EXAMPLES / file).parent), str(EXAMPLES)):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


CHECKS = [
    Check("elementwise/add.py", "check_add", dict(n=3001)),
    Check("elementwise/add.py", "check_add_any", dict(n=2049, dtype="bfloat16")),
    Check("elementwise/broadcast.py", "check_scale_shift_gate", dict(m=70, n=150)),
    Check("elementwise/broadcast.py", "check_outer_compare", dict(m=70, n=65)),
    Check("gemv/gemv.py", "check", dict(m=37, k=1100)),
    Check("gemm/gemm.py", "check_gemm", dict(m=100, n=72, k=88, trans_b=True), dict(trans_b=True)),
    Check("gemm/gemm.py", "check_gemm", dict(m=72, n=100, k=40, dtype="bfloat16"), dict(dtype="bfloat16")),
    Check("gemm/gemm.py", "check_gemm", dict(m=70, n=50, k=100, trans_b=True, dtype="int8"),
          dict(trans_b=True, dtype="int8")),
    Check("gemm/gemm.py", "check_gemm", dict(m=33, n=40, k=48, trans_a=True, dtype="float32"),
          dict(m=1000, n=1024, k=2000, trans_a=True, dtype="float32")),
    Check("gemm/gemm.py", "check_persistent", dict(m=300, n=200, k=40, workers=3)),
    Check("gemm/gemm.py", "check_batched", dict(batch=3, m=70, n=40, k=48)),
    Check("gemm/gemm.py", "check_strided", dict(m=70, n=50, k=40)),
    Check("gemm/split_k.py", "check_split_k", dict(m=70, n=50, k=200, parts=3)),
    Check("gemm/split_k.py", "check_stream_k", dict(m=100, n=130, k=150, workers=5)),
    Check("gemm/fp8.py", "check_per_tensor", dict(m=40, n=20, k=72, tile=64)),
    Check("gemm/fp8.py", "check_by_block", dict(m=20, n=40, k=136, tile=32)),
    Check("gemm/library.py", "check_layer", dict(m=40, n=72, k=50)),
    Check("gemm/library.py", "check_experts", dict(tokens=50, n=24, k=40, experts=3)),
    Check("gemm/library.py", "check_taken_apart", dict(m=70, n=40, k=50)),
    Check("gemm/int4.py", "check", dict(m=40, n=72, k=100)),
    Check("gemm/sparse.py", "check", dict(m=40, n=72, k=256)),
    Check("gemm/block_scaled.py", "check", dict(m=40, n=72, k=96)),
    Check("convolution/conv2d.py", "check_implicit", dict(n=2, h=7, w=6, c=32, f=40)),
    Check("convolution/conv2d.py", "check_implicit", dict(n=1, h=9, w=8, c=64, f=16, stride=2, pad=2, dilation=2),
          dict(stride=2, dilation=2, pad=2)),
    Check("convolution/conv2d.py", "check_by_hand", dict(n=2, h=7, w=9, c=5, f=20)),
    Check("dequantize_gemm/dequantize.py", "check_int4", dict(m=40, n=70, k=160)),
    Check("dequantize_gemm/dequantize.py", "check_table", dict(m=70, n=40, k=192)),
    Check("dequantize_gemm/narrow.py", "check_ternary", dict(m=40, n=72, k=260)),
    Check("dequantize_gemm/narrow.py", "check_fp4", dict(m=40, n=70, k=160)),
    Check("softmax/softmax.py", "check_whole", dict(m=9, n=100)),
    Check("softmax/softmax.py", "check_whole", dict(m=5, n=130, dtype="float32"), dict(dtype="float32")),
    Check("softmax/softmax.py", "check_online", dict(m=5, n=2500)),
    Check("normalization/rms_norm.py", "check_forward", dict(m=9, n=72)),
    Check("normalization/rms_norm.py", "check_backward", dict(m=37, n=72)),
    Check("normalization/layer_norm.py", "check_forward", dict(m=9, n=72, dtype="bfloat16")),
    Check("normalization/layer_norm.py", "check_backward", dict(m=37, n=72)),
    Check("scan/scan.py", "check_tile", dict(m=9, n=100)),
    Check("scan/scan.py", "check_carried", dict(m=9, n=600)),
    Check("scan/scan.py", "check_two_passes", dict(n=5000)),
    Check("topk/topk.py", "check", dict(m=19, n=40, k=3)),
    Check("cast/fp8_cast.py", "check_per_token", dict(m=13, n=200)),
    Check("cast/fp8_cast.py", "check_per_block", dict(m=40, n=70, group=32)),
    Check("rotary/rotary.py", "check_half", dict(batch=1, seq=19, heads=2, dim=32)),
    Check("rotary/rotary.py", "check_interleaved", dict(batch=1, seq=19, heads=2, dim=32)),
    Check("moe/gating.py", "check_gate", dict(tokens=19, experts=24, k=3)),
    Check("moe/gating.py", "check_places", dict(tokens=500, experts=12, k=3)),
    Check("moe/experts.py", "check", dict(tokens=70, dim=72, hidden=40, experts=5, k=2)),
    Check("dropout/dropout.py", "check_dropout", dict(n=3001)),
    Check("dropout/dropout.py", "check_noise", dict(n=3000)),
    Check("hadamard/hadamard.py", "check", dict(m=5, n=128)),
    Check("hadamard/hadamard.py", "check", dict(m=3, n=64, dtype="float32"), dict(dtype="float32")),
    Check("dynamic/dynamic_gemm.py", "check_gemm", dict(m=70, n=40, k=50)),
    Check("dynamic/dynamic_gemm.py", "check_padded", dict(rows=150, tokens=70, n=40, k=50)),
    Check("macros/generic.py", "check_linear", dict(m=40, n=70, k=40)),
    Check("macros/generic.py", "check_polynomial", dict(n=1000)),
    Check("hopper/gemm_by_hand.py", "check_warp_roles", dict(m=200, n=72, k=328), hopper=True),
    Check("hopper/gemm_by_hand.py", "check_cluster", dict(m=300, n=72, k=328), hopper=True),
    Check("attention/flash_forward.py", "check",
          dict(heads=2, kv_heads=2, seq_q=70, seq_kv=70, dim=32, causal=False, bm=64), dict(kv_heads=32, causal=False)),
    Check("attention/flash_forward.py", "check", dict(heads=4, kv_heads=2, seq_q=70, seq_kv=130, dim=32, bm=64)),
    Check("attention/flash_forward.py", "check",
          dict(heads=1, kv_heads=1, seq_q=150, seq_kv=150, dim=32, window=40, bm=64, stages=1),
          dict(heads=16, kv_heads=2, seq_q=3000, seq_kv=3000, dim=64, window=512)),
    Check("attention/library.py", "check_attention", dict(heads=4, kv_heads=2, seq=70, dim=32)),
    Check("attention/library.py", "check_attention", dict(heads=2, kv_heads=1, seq=70, dim=32, window=20), dict(window=512)),
    Check("attention/library.py", "check_packed", dict(lengths="7,70,1", heads=2, kv_heads=1, dim=32)),
    Check("attention/library.py", "check_decode", dict(lengths="70,3,64", heads=4, kv_heads=2, dim=32, page=16)),
    Check("attention/library.py", "check_latent", dict(lengths="70,3,64", heads=4, dim_v=128)),
    Check("attention/library.py", "check_prefix", dict(heads=2, seq=150, dim=32, prefix=100)),
    Check("attention/flash_varlen.py", "check", dict(lengths="7,70,1", prefix=30, heads=2, kv_heads=1, dim=32)),
    Check("attention/flash_varlen.py", "check", dict(lengths="70,5", prefix=30, heads=2, kv_heads=2, dim=32, causal=False),
          dict(lengths="1000,17,2048", dim=64, causal=False)),
    Check("attention/flash_sink.py", "check", dict(heads=2, kv_heads=1, seq=140, dim=32, window=20)),
    Check("attention/flash_sink.py", "check", dict(heads=1, kv_heads=1, seq=70, dim=32, window=0, dtype="float16"),
          dict(heads=16, kv_heads=2, seq=1000, window=0)),
    Check("attention/flash_score_mod.py", "check", dict(heads=2, seq=70, dim=32)),
    Check("attention/flash_score_mod.py", "check", dict(kind="softcap", heads=1, seq=70, dim=32), dict(kind="softcap")),
    Check("attention/flash_backward.py", "check", dict(heads=2, kv_heads=1, seq=70, dim=32)),
    Check("attention/flash_backward.py", "check", dict(heads=1, kv_heads=1, seq=100, dim=32, causal=False, dtype="bfloat16"),
          dict(heads=8, kv_heads=8, seq=1000, causal=False)),
    Check("attention/flash_backward.py", "check",
          dict(heads=2, kv_heads=1, seq=150, dim=32, window=40, sinks=True, alibi=True, dtype="bfloat16"),
          dict(window=256, sinks=True, alibi=True)),
    Check("attention/flash_varlen_backward.py", "check", dict(lengths="7,70,1", prefix=30, heads=2, kv_heads=1, dim=32)),
    Check("attention/paged_decode.py", "check", dict(lengths="100,1,0,64", heads=4, kv_heads=2, page=32, dim=32, splits=3)),
    Check("attention/mla_decode.py", "check", dict(batch=2, heads=20, seq=100, dim=64, pe=32, splits=3)),
    Check("attention/mla_prefill.py", "check", dict(heads=1, seq=70, dim=32, pe=16, dv=64, stages=1)),
    Check("attention/block_sparse.py", "check", dict(heads=2, seq=200, dim=32)),
    Check("attention/block_sparse.py", "check", dict(heads=1, seq=130, dim=32, causal=False, density=0.3, stages=1),
          dict(seq=2000, dim=64, causal=False)),
    Check("attention/native_sparse.py", "check_selected", dict(heads=16, kv_heads=1, seq=70, dim=32, count=3, size=16)),
    Check("attention/native_sparse.py", "check",
          dict(heads=2, kv_heads=1, seq=48, dim=32, count=2, size=16, window=30)),
    Check("attention/topk_attention.py", "check", dict(heads=16, seq=40, dim=32, topk=12, index_dim=16, index_heads=2)),
    Check("attention/retention.py", "check", dict(batch=1, heads=1, seq=100, dim_k=32, dim_v=64)),
    Check("attention/retention.py", "check_backward", dict(batch=1, heads=2, seq=100, dim_k=32, dim_v=64)),
    Check("attention/mamba2.py", "check", dict(seq=128, heads=2, groups=1, P=32, N=32)),
    Check("attention/mamba2_backward.py", "check", dict(seq=96, heads=2, groups=1, P=16, N=32, chunk=32)),
    Check("attention/gated_delta.py", "check", dict(heads=1, seq=70, dim_k=32, dim_v=32)),
    Check("attention/gated_delta_backward.py", "check", dict(heads=1, seq=40, dim_k=32, dim_v=40, chunk=16)),
    Check("attention/kda.py", "check", dict(heads=1, seq=70, dim_k=32, dim_v=32)),
    Check("attention/kda_backward.py", "check", dict(heads=1, seq=40, dim_k=32, dim_v=40, chunk=16)),
]
