"""Every example of attention and linear attention agrees with its float64 reference, on every execution."""

import importlib
import pathlib
import sys

import pytest

from tilelang.transform import PassContext

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "attention"

# module, id, small sizes (interpreted), real sizes (GPU)
EXAMPLES = [
    ("flash_forward", "mha", dict(heads=2, kv_heads=2, seq_q=70, seq_kv=70, dim=32, causal=False),
     dict(heads=16, kv_heads=16, seq_q=2048, seq_kv=2048, dim=128, causal=False, bm=128)),
    ("flash_forward", "gqa_causal", dict(heads=4, kv_heads=2, seq_q=70, seq_kv=130, dim=32),
     dict(heads=32, kv_heads=8, seq_q=2048, seq_kv=2048, dim=128, bm=128)),
    ("flash_forward", "window", dict(heads=1, kv_heads=1, seq_q=150, seq_kv=150, dim=32, window=40, stages=1),
     dict(heads=8, kv_heads=2, seq_q=3000, seq_kv=3000, dim=64, window=512)),
    ("flash_varlen", "causal", dict(lengths="7,70,1", heads=2, kv_heads=1, dim=32),
     dict(lengths="1000,17,2048,1,400", prefix=300, heads=16, kv_heads=4, dim=128)),
    ("flash_varlen", "full", dict(lengths="70,5", heads=2, kv_heads=2, dim=32, causal=False),
     dict(lengths="1000,17,2048", heads=16, kv_heads=4, dim=64, causal=False)),
    ("flash_sink", "window", dict(heads=2, kv_heads=1, seq=140, dim=32, window=20),
     dict(heads=16, kv_heads=2, seq=2048, dim=64, window=128)),
    ("flash_sink", "no_window", dict(heads=1, kv_heads=1, seq=70, dim=32, window=0, dtype="float16"),
     dict(heads=16, kv_heads=2, seq=1000, dim=64, window=0)),
    ("flash_score_mod", "alibi", dict(heads=2, seq=70, dim=32), dict(heads=16, seq=1024, dim=64)),
    ("flash_score_mod", "softcap", dict(kind="softcap", heads=1, seq=70, dim=32),
     dict(kind="softcap", heads=16, seq=1024, dim=64)),
    ("flash_backward", "causal", dict(heads=2, kv_heads=1, seq=70, dim=32),
     dict(heads=8, kv_heads=2, seq=1024, dim=64)),
    ("flash_backward", "full", dict(heads=1, kv_heads=1, seq=100, dim=32, causal=False, dtype="bfloat16"),
     dict(heads=8, kv_heads=8, seq=1000, dim=128, causal=False)),
    ("paged_decode", "ragged", dict(lengths="100,1,0,64", heads=4, kv_heads=2, page=32, dim=32),
     dict(lengths="4000,1,0,777,64", heads=32, kv_heads=4, page=64, dim=128, splits=8)),
    ("mla_decode", "small", dict(heads=20, seq=100, dim=64, pe=32), dict(batch=4, heads=128, seq=2000, splits=4)),
    ("mla_prefill", "small", dict(heads=1, seq=70, dim=32, pe=16, dv=64), dict(heads=16, seq=1000, stages=2)),
    ("block_sparse", "causal", dict(heads=2, seq=200, dim=32), dict(heads=16, seq=2048, dim=128)),
    ("block_sparse", "full", dict(heads=1, seq=130, dim=32, causal=False, density=0.3, stages=1),
     dict(heads=16, seq=2000, dim=64, causal=False)),
    ("native_sparse", "small", dict(seq=70, dim=32, count=3, size=16),
     dict(heads=64, kv_heads=4, seq=500, dim=128, count=8, size=64)),
    ("topk_attention", "small", dict(seq=70, dim=32, topk=20, index_dim=16, index_heads=2),
     dict(seq=1000, heads=64, dim=256, index_heads=16, index_dim=128, topk=256)),
    ("retention", "small", dict(heads=1, seq=100, dim_k=32, dim_v=64), dict(heads=4, seq=1000, dim_k=128, dim_v=256)),
    ("mamba2", "small", dict(seq=128, heads=2, groups=1, P=32, N=32),
     dict(batch=1, seq=1024, heads=8, groups=2, P=64, N=128)),
    ("gated_delta", "small", dict(heads=1, seq=70, dim_k=32, dim_v=32),
     dict(heads=4, seq=520, dim_k=128, dim_v=128, dtype="float16")),
]
IDS = [f"{module}-{name}" for module, name, _, _ in EXAMPLES]


def check(module, target, sizes):
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    error, bound = importlib.import_module(module).check(target=target, **sizes)
    assert error <= bound
    assert bound > 0


@pytest.mark.parametrize("target", ["tile", "simulator", "cpu"])
@pytest.mark.parametrize("module, name, small, real", EXAMPLES, ids=IDS)
def test_agrees_with_reference(module, name, small, real, target):
    check(module, target, small)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{}, {"tl.enable_hopper": True}], ids=["plain", "hopper"])
@pytest.mark.parametrize("module, name, small, real", EXAMPLES, ids=IDS)
def test_agrees_with_reference_on_gpu(module, name, small, real, config):
    with PassContext(config=config):
        check(module, "cuda", real)
