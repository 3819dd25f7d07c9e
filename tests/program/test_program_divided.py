"""Loops that are divided over blocks and rows: pieces and what combines them compute what the whole loop would."""

from dataclasses import replace

import numpy as np
import pytest
from test_program_lowering import SIMULATED, run

import tilelang
import tilelang.language as T
from tilelang.program.cut import Cut, _Cutter
from tilelang.program.expand import expand
from tilelang.program.lower import assemble
from tilelang.program.nest import nest_of
from tilelang.target import Target


@tilelang.program
def two_passes(x):
    return x.mean(0), x.var(0)


@tilelang.program
def streamed(x):
    return T.softmax(x, axis=0)


@tilelang.program
def extremes(x):
    return (x.min(1) + x.max(1)) * 2 + x.sum(1)


@tilelang.program
def total(x):
    return (x * x).sum()


@tilelang.program
def product(x, w):
    return T.relu(x @ w)


@tilelang.program
def causal(q, k, v):
    s = T.einsum("qd,kd->qk", q, k, dtype="float32")
    s = T.where(T.iota(k.shape[0]) <= T.iota(q.shape[0]).unsqueeze(1) + 40, s, -float("inf"))
    return T.softmax(s).astype("float16") @ v


F16, F32 = "float16", "float32"
CASES = {"two_passes": (two_passes, 3, [((300, 5), F32)]), "streamed": (streamed, 2, [((2900, 9), F32)]),
         "extremes": (extremes, 2, [((2, 301, 33), F32)]), "one_column": (extremes, 2, [((2, 301, 1), F32)]),
         "total": (total, 2, [((30, 700), F32)]), "product": (product, 2, [((9, 300), F16), ((300, 24), F16)]),
         "causal": (causal, 2, [((20, 32), F16), ((515, 32), F16), ((515, 32), F16)])}


def divided(program, arrays):
    """The module of a program in one nest, on a machine that is so slow that only idle processors count."""
    graph = program.graph(*arrays)
    expanded = expand(graph)
    cutter = _Cutter(expanded, Target(SIMULATED), {})
    cutter.rates = replace(cutter.rates, gemm=1e6, other=1e6, memory=1e9, launch=0)
    kernels, _ = cutter.divided(nest_of(cutter.outputs, frozenset()))
    return assemble("divided", expanded.inputs, Cut(kernels, cutter.outputs), Target(SIMULATED), graph.dims)


@pytest.mark.parametrize("name,target", [*((n, "cpu") for n in CASES), ("causal", SIMULATED), ("two_passes", SIMULATED),
                                         ("streamed", SIMULATED)])
def test_pieces_combine_to_the_whole(name, target):
    program, kernels, shapes = CASES[name]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dt) for shape, dt in shapes]
    module = divided(program, arrays)
    assert len(module.steps) == kernels
    want = program.reference(*arrays)
    for got, w in zip(run(module, arrays, target), want if isinstance(want, tuple) else (want,)):
        eps = 2.0**-11 if any(dt == F16 for _, dt in shapes) else 2.0**-23 * 16
        assert np.abs(got.astype(np.float64) - w).max() <= 4 * eps * np.abs(w.astype(np.float64)).max()


def test_open_lengths_are_divided_over_rows_only():
    n, m = T.dynamic("n m")

    @tilelang.program
    def norm(x: T.Tensor((n, m), "float32")):
        return x / x.norm(0, True)

    source = norm.tile_source(target=SIMULATED)
    assert "each of 8 rows has results of its own" in source
    x = np.random.default_rng(0).standard_normal((77, 130)).astype(np.float32)
    assert np.allclose(tilelang.program(norm.fn, target="cpu")(x), x / np.linalg.norm(x, axis=0), atol=1e-6)
