"""A decode step over ranks: each has some heads and some of the MLP; the sums behind O and down are exchanged."""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import test_decode_step as one

from tilelang.library import decode_step
from tilelang.simulator import run_device_ranks, run_tile_ranks
from tilelang.target import Target
from tilelang.transform.pipeline import lower

HALF = ml_dtypes.bfloat16


def shares(args, ranks):
    """The arguments of each rank."""
    x, norms, qkv, o, gate_up, down, keys, values, *rest = args
    kv_heads, heads = keys.shape[3], o.shape[2] // one.DIM

    def share(a, axis, r):
        return np.split(a, ranks, axis)[r]

    q, k, v = np.split(qkv, (heads * one.DIM, (heads + kv_heads) * one.DIM), 1)
    gate, up = np.split(gate_up, 2, 1)
    return [[x, norms, np.concatenate([share(a, 1, r) for a in (q, k, v)], 1), share(o, 2, r),
             decode_step.interleave(share(gate, 1, r), share(up, 1, r), one.BLOCKS), share(down, 2, r), share(keys, 3, r),
             share(values, 3, r), *rest] for r in range(ranks)]


def made(args, ranks, batch, context, layers):
    """(the program, the arguments of each rank)."""
    heads, kv_heads = args[3].shape[2] // one.DIM, args[6].shape[3]
    f = decode_step.DecodeForm(batch, one.HIDDEN, heads // ranks, kv_heads // ranks, one.DIM, args[5].shape[2] // ranks,
                               context, layers, one.BLOCKS, slots=4, ranks=ranks)
    assert f.fits
    new = np.zeros((layers, batch, kv_heads // ranks, one.DIM), HALF)
    out = [np.zeros((batch, one.HIDDEN), HALF), new, new]
    kept = [np.zeros(shape, HALF if kind == "bfloat16" else kind) for shape, kind in (*f.between, *f.kept)]
    return decode_step.decode_program(f), [[*given, *out, *kept] for given in shares(args, ranks)]


def check(got, args):
    one.close((got[0]["Y"], *(np.concatenate([g[name] for g in got], 2) for name in ("Kn", "Vn"))), args)
    assert all(np.array_equal(g["Y"], got[0]["Y"]) for g in got)


@pytest.mark.parametrize("ranks, layers, seed", [(2, 2, None), (4, 1, 1)])
def test_ranks_by_tiles(ranks, layers, seed):
    args = one.given(1, 256, layers, kv_heads=4, heads=16, ffn=1024)
    program, given = made(args, ranks, 1, 256, layers)
    check(run_tile_ranks(program, given, seed=seed), args)


def test_ranks_on_the_device_simulator():
    args = one.given(1, 256, 1, kv_heads=2, heads=8, ffn=512)
    program, given = made(args, 2, 1, 256, 1)
    lowered = lower(program.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    check([r.outputs for r in run_device_ranks(lowered, given, seed=1)], args)
