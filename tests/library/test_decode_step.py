"""A decode step in one launch: both simulators against float64."""

import ml_dtypes
import numpy as np
import pytest

from tilelang.library import decode_step, interleave, llama_decode
from tilelang.simulator import run_tile
from tilelang.errors import TileLangError

SM90 = {"target": {"kind": "cuda", "arch": "sm_90a"}}
HIDDEN, HEADS, DIM, FFN, BLOCKS, EPS = 256, 4, 64, 256, 4, 1e-5


def given(batch, context, layers, kv_heads=1, heads=HEADS, ffn=FFN):
    """The arguments of llama_decode."""
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(ml_dtypes.bfloat16)

    angle = rng.uniform(0, 6, (batch, DIM // 2))
    gate_up = normal(layers, 2 * ffn, HIDDEN, scale=HIDDEN ** -0.5)  # rows of gate, then of up
    return [normal(batch, HIDDEN), normal(layers, 2, HIDDEN),
            normal(layers, (heads + 2 * kv_heads) * DIM, HIDDEN, scale=HIDDEN ** -0.5),
            normal(layers, HIDDEN, heads * DIM, scale=(heads * DIM) ** -0.5), gate_up,
            normal(layers, HIDDEN, ffn, scale=ffn ** -0.5), normal(layers, batch, context, kv_heads, DIM),
            normal(layers, batch, context, kv_heads, DIM), rng.integers(0, context + 1, batch).astype(np.int32),
            np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)]


def exact(x, norms, qkv, o, gate_up, down, keys, values, lengths, cos, sin):
    """The results in float64."""
    h, norms, qkv, o, gate_up, down, keys, values, cos, sin = (
        a.astype(np.float64) for a in (x, norms, qkv, o, gate_up, down, keys, values, cos, sin))
    batch, heads, kv_heads, new = len(x), o.shape[2] // DIM, keys.shape[3], []

    def normed(z, w):
        return z / np.sqrt((z * z).mean(1, keepdims=True) + EPS) * w

    def rotated(z):
        a, b = np.split(z, 2, -1)
        return np.concatenate([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)

    for n in range(len(norms)):
        q, k, v = np.split((normed(h, norms[n, 0]) @ qkv[n].T).reshape(batch, -1, DIM), (heads, heads + kv_heads), 1)
        q, k, mixed = rotated(q), rotated(k), np.zeros((batch, heads, DIM))
        new.append((k, v))
        for r, i in np.ndindex(batch, heads):
            g = i * kv_heads // heads
            score = np.append(keys[n, r, :lengths[r], g] @ q[r, i], k[r, g] @ q[r, i]) / DIM ** 0.5
            p = np.exp(score - score.max())
            mixed[r, i] = p / p.sum() @ np.concatenate([values[n, r, :lengths[r], g], v[r, g][None]])
        h = h + mixed.reshape(batch, -1) @ o[n].T
        gate, up = np.split(normed(h, norms[n, 1]) @ gate_up[n].T, 2, -1)
        h = h + gate / (1 + np.exp(-gate)) * up @ down[n].T
    return h, *(np.stack(a) for a in zip(*new))


def packed(args, blocks=BLOCKS):
    """As llama_decode takes them."""
    return [*args[:4], interleave(*np.split(args[4], 2, 1), blocks), *args[5:]]


def close(found, args):
    for got, want in zip(found, exact(*args)):
        assert abs(got.astype(np.float64) - want).max() <= 0.01 * max(1, abs(want).max())


def by_tiles(args, batch, context, layers, kv_heads=1, launches=1):
    """The results of the reference interpreter."""
    f = decode_step.DecodeForm(batch, HIDDEN, HEADS, kv_heads, DIM, args[5].shape[2], context, layers, BLOCKS, slots=4)
    assert f.fits
    new = np.zeros((layers, batch, kv_heads, DIM), ml_dtypes.bfloat16)
    out = [np.zeros((batch, HIDDEN), ml_dtypes.bfloat16), new, new]
    kept = [np.zeros(shape, ml_dtypes.bfloat16 if kind == "bfloat16" else kind) for shape, kind in (*f.between, *f.kept)]
    for _ in range(launches):
        got = run_tile(decode_step.decode_program(f), [*packed(args), *out, *kept])
        kept[-2:] = got["counts"], got["calls"]
    return got["Y"], got["Kn"], got["Vn"]


@pytest.mark.parametrize("batch, context, layers, kv_heads", [(1, 256, 1, 1), (4, 64, 2, 1), (2, 128, 1, 2)])
def test_a_step_by_tiles(batch, context, layers, kv_heads):
    args = given(batch, context, layers, kv_heads)
    close(by_tiles(args, batch, context, layers, kv_heads), args)


def test_a_step_on_the_device_simulator():
    """Counts of the blocks go on from one launch to the next."""
    args = given(2, 128, 1)
    for _ in range(2):
        close(llama_decode(*packed(args), blocks=BLOCKS, execution_backend="simulator", **SM90), args)


def test_counts_go_on():
    args = given(1, 256, 2)
    close(by_tiles(args, 1, 256, 2, launches=2), args)


def test_an_odd_number_of_chunks():
    args = given(1, 256, 1, ffn=384)
    close(by_tiles(args, 1, 256, 1), args)


@pytest.mark.parametrize("context", [128, 384])
def test_an_odd_number_of_tiles_of_the_context(context):
    args = given(1, context, 1)
    close(by_tiles(args, 1, context, 1), args)


def test_an_empty_context():
    args = given(1, 256, 1)
    args[8][:] = 0
    close(by_tiles(args, 1, 256, 1), args)


def test_work_that_does_not_divide_is_refused():
    args = given(3, 96, 1)
    with pytest.raises(TileLangError, match="does not divide among"):
        llama_decode(*packed(args), blocks=BLOCKS, **SM90)


def test_an_8b_model_has_128_blocks():
    for batch in (1, 2, 4, 8, 16):
        f = decode_step.with_blocks(132, batch=batch, hidden=4096, heads=32, kv_heads=8, dim=128, ffn=14336, context=4096)
        assert f.blocks == 128 and f.widths(2 * f.ffn) == [32] * 7 and f.widths(f.qkv) == [32, 16]
