"""Loops that are divided over blocks and rows, and axes that are joined: kernels compute what the whole loop would."""

from dataclasses import replace

import numpy as np
import pytest
from test_program_lowering import SIMULATED, run

import tilelang
import tilelang.language as T
from tilelang.program.cut import Cut, _Cutter
from tilelang.program.expand import expand
from tilelang.program.lower import assemble, lower
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
def split_k(x, w):
    return T.relu(x @ w)


@tilelang.program
def causal(q, k, v):
    s = T.einsum("qd,kd->qk", q, k, dtype="float32")
    s = T.where(T.iota(k.shape[0]) <= T.iota(q.shape[0]).unsqueeze(1) + 40, s, -float("inf"))
    return T.softmax(s).astype("float16") @ v


F16, F32 = "float16", "float32"
CASES = {"two_passes": (two_passes, 3, [((300, 5), F32)]), "streamed": (streamed, 2, [((2900, 9), F32)]),
         "extremes": (extremes, 2, [((2, 301, 33), F32)]), "one_column": (extremes, 2, [((2, 301, 1), F32)]),
         "total": (total, 2, [((30, 700), F32)]), "split": (split_k, 2, [((9, 300), F16), ((300, 24), F16)]),
         "causal": (causal, 2, [((20, 32), F16), ((515, 32), F16), ((515, 32), F16)])}


def divided(program, arrays):
    """The module of a program in one nest, on a machine that is so slow that only idle processors count."""
    graph = program.graph(*arrays)
    expanded = expand(graph)
    cutter = _Cutter(expanded, Target(SIMULATED), {})
    cutter.chip = replace(cutter.chip, clock=10.0, memory=1e9, start=0)
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


CONVOLUTIONS = {
    "1d": (lambda x, w: T.conv1d(x, w, padding=1), ((2, 6, 33), (8, 6, 3)), F32, "w_joined = T.view(w, (8, 18))"),
    "2d": (lambda x, w: T.relu(T.conv2d(x, w, stride=2, padding=1)), ((2, 5, 13, 11), (6, 5, 3, 3)), F16,
           "out_joined = T.view(out, (2, 6, 42))"),
    "dilated": (lambda x, w: T.conv2d(x, w, dilation=2), ((1, 3, 9, 20), (16, 3, 3, 2)), F16, "w_joined = T.view(w, (16, 18))"),
    "groups": (lambda x, w: T.conv1d(x, w, groups=2), ((2, 6, 20), (8, 3, 5)), F32, ""),
    "swapped": (lambda x, w: T.einsum("oicu,nctu->nto", w.reshape(8, 1, 6, 3), T.windows(x, 3, 2)), ((2, 6, 33), (8, 6, 3)),
                F32, "T.view(w, (8, 18))"),
    "taps": (lambda x, w: T.einsum("nxyuv,vou->noxy", T.windows(x, (3, 3), (1, 2)), w), ((2, 8, 9), (3, 5, 3)), F32,
             "= step // 3"),  # neither factor has the taps side by side: they are counted one by one
    "one": (lambda x, w: T.conv2d(x, w), ((1, 1, 1, 1), (1, 1, 1, 1)), F32, ""),
}


@pytest.mark.parametrize("name,target", [*((n, "cpu") for n in CONVOLUTIONS), ("1d", SIMULATED), ("2d", SIMULATED)])
def test_sums_over_windows_are_one_gemm(name, target):
    fn, shapes, dt, said = CONVOLUTIONS[name]
    program = tilelang.program(fn)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(dt) for s in shapes)
    module = lower(program.graph(x, w), None, Target(SIMULATED))
    assert len(module.steps) == 1 and said in module.source
    (got,) = run(module, (x, w), target)
    want = program.reference(x, w).astype(np.float64)
    assert np.abs(got - want).max() <= 4 * (2.0**-11 if dt == F16 else 2.0**-21) * np.abs(want).max()


def test_float32_gemms_keep_their_type_on_tensor_cores():
    """tf32 operands would leave an error of 2**-11; GEMMs of halves leave less than 2**-20."""
    @tilelang.program
    def multiplied(a, b):
        return a @ b

    rng = np.random.default_rng(0)
    a, b = (rng.random(s).astype(np.float32) + 1 for s in ((32, 64), (64, 32)))
    module = lower(multiplied.graph(a, b), None, Target(SIMULATED))
    assert module.source.count("T.gemm(") == 3
    (got,) = run(module, (a, b), SIMULATED)
    want = a.astype(np.float64) @ b
    assert (np.abs(got - want) <= 2.0**-20 * want).all()


def test_a_tile_in_front_of_a_tensor_is_not_counted_from_its_end():
    program = tilelang.program(lambda x: T.roll(x.max(-1, keepdims=True), 2, 0))
    x = np.random.default_rng(0).standard_normal((7, 70)).astype(F16)
    for target in ("cpu", SIMULATED):
        (got,) = run(lower(program.graph(x), None, Target(target)), (x,), target)
        assert (got == np.roll(x.max(-1, keepdims=True), 2, 0)).all()
