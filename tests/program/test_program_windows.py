"""Convolutions and other reductions of windows: what their kernels are, and that they compute what the program says."""

import numpy as np
import pytest
from test_program_lowering import SIMULATED, run

import tilelang
import tilelang.language as T
from tilelang.program import cut
from tilelang.program.lower import lower
from tilelang.target import Target



def computed(fn, shapes):
    """(results on the simulated chip, by definition, the text of the tile programs)."""
    program, args = tilelang.program(fn), [drawn(*s) for s in shapes]
    module = lower(program.graph(**{p.name: a for p, a in zip(program.parameters, args)}), None, Target(SIMULATED))
    got, want = run(module, args, SIMULATED)[0], program.reference(*args)
    assert np.abs(got.astype(float) - want.astype(float)).max() <= 2e-3 * np.abs(want.astype(float)).max()
    return module.source


def drawn(*shape, dtype=np.float16):
    return (np.random.default_rng(0).standard_normal(shape) * 0.3).astype(dtype)


def last(stride=1, padding=1, dilation=1):
    """A convolution with the channels last."""
    def conv(x, w):
        x = T.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
        return T.einsum("nhwcij,oijc->nhwo", T.windows(x, w.shape[1:3], (1, 2), stride, dilation), w)

    return conv


def by(**options):
    return lambda x, w: T.conv2d(x, w, **options)


def scaled(x, w, b, r):
    return T.maximum(T.conv2d(T.maximum(x * 2 + 1, 0), w, padding=1) + b[:, None, None] + r, 0)


GEMMS = {
    "padded": (by(padding=1), (2, 32, 6, 7), (24, 32, 3, 3)),
    "strides": (by(padding=(1, 2), stride=(2, 1), dilation=(1, 2)), (2, 16, 9, 8), (24, 16, 3, 2)),
    "channels last": (last(2, 2, 2), (2, 9, 10, 32), (24, 3, 3, 32)),
    "groups": (by(padding=1, groups=2), (2, 64, 6, 7), (16, 32, 3, 3)),
    "a sequence": (by(padding=2, stride=2), (2, 32, 41), (24, 32, 5)),
    "sliced": (lambda x, w: T.conv2d(x[:, :, 1:, :-1], w), (2, 16, 9, 8), (8, 16, 3, 3)),
    "one axis": (by(padding=(0, 1)), (2, 16, 5, 8), (8, 16, 1, 3)),
    "an epilogue": (scaled, (2, 32, 6, 7), (24, 32, 3, 3), (24,), (2, 24, 6, 7)),
}


@pytest.mark.parametrize("name", GEMMS)
def test_a_convolution_reads_a_matrix_of_windows(name, monkeypatch):
    """As it does at sizes at which kernels that store the channels last pay."""
    found = cut._Cutter.stored_operands

    def for_nothing(self, nest, choice):
        for kernels, cost in found(self, nest, choice):
            windows = any("image" in t.attrs for _, plan in kernels for t in plan.nest.views())
            yield kernels, cost * 1e-6 if windows else cost

    monkeypatch.setattr(cut._Cutter, "stored_operands", for_nothing)
    fn, *shapes = GEMMS[name]
    source = computed(fn, shapes)
    assert "T.im2col_matrix(" in source and "_windows[" in source


@pytest.mark.parametrize("x,w,kernels", [((32, 128, 28, 28), (128, 128, 3, 3), 3), ((32, 64, 56, 56), (64, 64, 1, 1), 1),
                                         ((32, 256, 28, 28), (256, 64, 3, 3), 3), ((64, 3, 224, 224), (768, 3, 16, 16), 2)])
def test_what_a_convolution_reads_is_stored_where_that_costs_less(x, w, kernels):
    """Channels last, and weights in that order; a view of both for one pixel; windows that share nothing as they are."""
    stride, padding, groups = 16 if w[-1] == 16 else 1, int(w[-1] == 3), x[1] // w[1]
    conv = tilelang.program(lambda x, w: T.conv2d(x, w, stride, padding, groups=groups))
    source = conv.tile_source({"x": (x, "float16"), "w": (w, "float16")}, target=SIMULATED)
    assert source.count("@T.prim_func") == kernels and ("im2col" in source) == (w[-1] == 3)


WALKS = {
    "depthwise": (by(padding=1, groups=16, stride=2), (2, 16, 9, 8), (16, 1, 3, 3)),
    "depthwise, channels last": (
        lambda x, w: T.einsum("nhwcij,cij->nhwc", T.windows(T.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), (3, 3), (1, 2)), w),
        (2, 9, 40, 16), (16, 3, 3)),
    "a causal sequence": (lambda x, w: T.silu(T.einsum("nctk,ck->nct", T.windows(T.pad(x, ((0, 0), (0, 0), (3, 0))), 4, 2), w)),
                          (2, 6, 40), (6, 4)),
    "a maximum": (lambda x: T.windows(T.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), -np.inf), (3, 3), (2, 3), 2).max((-1, -2)),
                  (2, 3, 9, 11)),
}


@pytest.mark.parametrize("name", WALKS)
def test_threads_walk_over_small_windows(name):
    fn, *shapes = WALKS[name]
    assert "T.unroll(" in computed(fn, shapes)


def test_weights_that_lie_apart_are_stored_side_by_side():
    """A thread has eight channels: their weights are one load, not eight of nine elements each."""
    program = tilelang.program(WALKS["depthwise, channels last"][0])
    source = program.tile_source({"x": ((32, 56, 56, 256), "float16"), "w": ((256, 3, 3), "float16")}, target=SIMULATED)
    assert source.count("@T.prim_func") == 2 and "T.copy(operand[" in source
