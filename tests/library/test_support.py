"""The table of what of the library runs where, against what each function accepts and computes."""

import ml_dtypes
import numpy as np
import pytest

from tilelang import cli, library
from tilelang.errors import TileLangError
from tilelang.library.support import MACHINES, SUPPORT, support_rows

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64, "int8": np.int8,
         "uint8": np.uint8, "int32": np.int32, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
N = 64


def ones(*shape, kind="float32"):
    return np.ones(shape, np.float32).astype(TYPES[kind])


def wide(kind):
    """The type of accumulators."""
    return "float64" if kind == "float64" else "float32"


def on(machine):
    """The arguments that run a call on the CPU or on the simulator of a GPU."""
    return {} if machine == "cpu" else {"target": {"kind": "cuda", "arch": machine}, "execution_backend": "simulator"}


def target(machine):
    return None if machine == "cpu" else {"kind": "cuda", "arch": machine}


def halved(kind):
    """Rows of which each group of four columns keeps the first two."""
    return ones(N, N, kind=kind) * (np.arange(N) % 4 < 2).astype(ones(1, kind=kind).dtype)


def metadata(kind):
    """Those of `halved` rows."""
    of_bytes = np.dtype(TYPES[kind]).itemsize == 1
    return np.full((N // 16, N), 0x4444, np.int16) if of_bytes else np.full((N // 8, N), 0x44, np.uint8)


def one_decoded(kind, machine):
    """Weights of zeros leave the rows as they are; one block has the whole step."""
    def zero(*shape):
        return 0 * ones(*shape, kind=kind)

    args = ones(1, 32, kind=kind), zero(1, 2, 32), zero(1, 64, 32), zero(1, 32, 32), zero(1, 64, 32), zero(1, 32, 32)
    caches = [zero(1, 1, 64, 1, 16)] * 2
    return library.llama_decode(*args, *caches, np.array([3], np.int32), ones(1, 8), ones(1, 8), blocks=1, **on(machine))[0]


# (a call, the value of each element of its result)
CALLS = {
    "matmul": (lambda t, m: library.matmul(ones(N, N, kind=t), ones(N, N, kind=t), **on(m)), N),
    "grouped_matmul": (lambda t, m: library.grouped_matmul(ones(N, N, kind=t), ones(2, N, N, kind=t),
                                                           np.array([30, 34], np.int32), **on(m)), N),
    "fused_matmul": (lambda t, m: library.fused_matmul(ones(N, N, kind=t), ones(N, N, kind=t), **on(m)), N),
    "sparse_compress": (lambda t, m: library.sparse_compress(halved(t), **on(m))[0], 1),
    "sparse_matmul": (lambda t, m: library.sparse_matmul(ones(N, N // 2, kind=t), metadata(t), ones(N, N, kind=t), **on(m)),
                      N // 2),
    "linear_cross_entropy": (lambda t, m: library.linear_cross_entropy(
        ones(2, N, kind=t), ones(1, N, kind=t), np.zeros(2, np.int32), target=target(m)), 0),
    "conv2d": (lambda t, m: library.conv2d(ones(1, 2, 2, 16, kind=t), ones(1, 2, 2, 16, kind=t), target=target(m)), N),
    "flash_attention": (lambda t, m: library.flash_attention(*[ones(1, N, 1, 16, kind=t)] * 3, target=target(m)), 1),
    "flash_attention_backward": (lambda t, m: library.flash_attention_backward(
        *[ones(1, N, 1, 16, kind=t)] * 4, np.full((1, 1, N), 16**0.5 + np.log(N), "float64" if t == "float64" else "float32"),
        ones(1, N, 1, 16, kind=t), target=target(m))[0] + 1, 1),  # equal values: weights do not matter
    "flash_decode": (lambda t, m: library.flash_decode(ones(1, 1, 16, kind=t), *[ones(1, N, 1, 16, kind=t)] * 2,
                                                       np.array([N], np.int32), target=target(m)), 1),
    "mla_decode": (lambda t, m: library.mla_decode(ones(1, 1, 80, kind=t), ones(1, N, 80, kind=t), np.array([N], np.int32),
                                                   dim_v=64, target=target(m)), 1),
    "mla_prefill": (lambda t, m: library.mla_prefill(
        0 * ones(1, N, 1, 32, kind=t), ones(1, N, 1, 16, kind=t), ones(1, N, 16, kind=t), ones(1, N, 1, 16, kind=t),
        causal=False, target=target(m)), 1),
    **{name: (lambda t, m, name=name: getattr(library, name)(*[0 * ones(1, N, 1, 16, kind=t)] * 3, target=target(m)) + 1, 1)
       for name in ("linear_attention",)},
    "llama_decode": (lambda t, m: one_decoded(t, m), 1),
    "sparse_mla": (lambda t, m: library.sparse_mla(ones(2, 4, 80, kind=t), ones(N, 80, kind=t), np.ones((2, 9), np.int32),
                                                   dim_v=64, target=target(m)), 1),
    "index_scores": (lambda t, m: library.index_scores(ones(2, 2, 32, kind=t), ones(N, 32, kind=t), ones(2, 2),
                                                       target=target(m)), N),
    "topk_indices": (lambda t, m: library.topk_indices(ones(2, 1, kind=t), 1, target=target(m)) + 1, 1),
    "chunk_state": (lambda t, m: library.chunk_state(*[ones(1, N, 1, 16, kind=t)] * 2, ones(1, 1, 1, N), 0 * ones(1, 1, 1, N),
                                                     target=target(m)), N),
    "chunk_scan": (lambda t, m: library.chunk_scan(0 * ones(1, 1, 1, N, N, kind=t), ones(1, N, 1, 16, kind=t), ones(1, 1, 1, N),
                                                   0 * ones(1, 1, 1, N), ones(1, N, 1, 16, kind=t),
                                                   0 * ones(1, 1, 1, 16, 16, kind=t), ones(1), target=target(m)), 1),
    **{name: (lambda t, m, name=name: getattr(library, name)(*[0 * ones(1, N, 1, N, kind=t)] * 3, 0 * ones(
        1, N, 1, *[N] * (name == "kda"), kind=wide(t)), ones(1, N, 1, kind=wide(t)), target=target(m))[0] + 1, 1)
       for name in ("gated_delta", "kda")},
    "mamba2": (lambda t, m: library.mamba2(ones(1, N, 1, 16, kind=t), *(k * ones(*s, kind=wide(t)) for k, s in (
        (0, (1, N, 1)), (-1, (1,)))), *[ones(1, N, 1, 16, kind=t)] * 2, ones(1, kind=wide(t)), target=target(m))[0], 1),
    "retention": (lambda t, m: library.retention(*[0 * ones(1, N, 1, 16, kind=t)] * 3, -ones(1, kind=wide(t)),
                                                 target=target(m))[0] + 1, 1),
    **{name: (lambda t, m, name=name: getattr(library, name)(0 * ones(2, N, kind=t), target=target(m)) + 1, 1)
       for name in ("rms_norm", "layer_norm", "swiglu")},
    "softmax": (lambda t, m: library.softmax(ones(2, N, kind=t), target=target(m)), 1 / N),
    "cross_entropy": (lambda t, m: library.cross_entropy(ones(2, 1, kind=t), np.zeros(2, np.int32), target=target(m)), 0),
    "flex_attention": (lambda t, m: library.flex_attention(*[ones(1, N, 1, 16, kind=t)] * 3, target=target(m)), 1),
    "dequant_matmul": (lambda t, m: library.dequant_matmul(ones(N, N, kind=t), np.full((N, N // 2), 0x11, np.uint8),
                                                           ones(N, N // 32, kind=t), **on(m)), N)}


def test_every_function_has_its_rows():
    others = "create_block_mask", "decode_plan", "interleave", "mla_plan"
    assert set(SUPPORT) == set(CALLS) == {n for n in library.__all__ if n not in others}
    assert all(len(found) == len(MACHINES) for kinds in SUPPORT.values() for found in kinds.values())


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", CALLS)
def test_the_table_says_what_a_function_accepts(name, kind, machine):
    call, wanted = CALLS[name]
    if not SUPPORT[name].get(kind, ("",) * len(MACHINES))[MACHINES.index(machine)]:
        with pytest.raises(TileLangError) as e:
            call(kind, machine)
        assert e.value.kind in ("matmul-type", "matmul-target", "attention-argument", "ssd-argument", "delta-argument",
                                "decode-target", "training-argument")
    else:
        assert (np.asarray(call(kind, machine)).astype(np.float64) == wanted).all()


@pytest.mark.parametrize("name", SUPPORT)
def test_the_docstring_names_the_types(name):
    text = " ".join(getattr(library, name).__doc__.split())
    for kind in SUPPORT[name]:
        assert kind in text or name in ("grouped_matmul", "fused_matmul") and "ypes are as for matmul" in text, kind


def test_the_table_is_a_command(capsys):
    assert cli.main(["library"]) == 0
    out = capsys.readouterr().out
    for row in support_rows():
        assert row[0] in out and row[1] in out
    assert "sm_90a" in out and "tf32" in out
