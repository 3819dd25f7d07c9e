"""Loops with carried state equal their reference: several states, old and new values, split and mixed axes, 16-bit states."""

import numpy as np
import pytest
from test_program_lowering import SIMULATED

import tilelang
import tilelang.language as T
from tilelang.program.api import Program, ProgramOptions
from tilelang.program.lower import lower
from tilelang.target import Target

RNG = np.random.default_rng(3)


def array(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(dtype)


def two_states(x, y):
    """Both states change places; a result reads the old and the new value."""
    def step(s, x):
        a, b = s
        return (b + x, a * 0.5), (a - b, (b + x) * 2)

    (a, b), (old, new) = T.loop(step, (y, y * 2), x)
    return a, b, old, new


def running_extremes(x):
    def step(s, x):
        top, count = s
        return (T.maximum(top, x), count + T.where(x > 0, 1, 0).sum().astype("int32")), top.max()

    (top, count), best = T.loop(step, (T.full((7,), -2.0), T.full((), 0, "int32")), x)
    return top, count, best


def gated(q, k, v, g):
    """Heads and columns are independent, rows of the state are mixed."""
    def step(s, x):
        q, k, v, g = x
        s = s * T.sigmoid(g)[:, None, None] + k[:, :, None] * v[:, None, :]
        return s, T.einsum("hd,hde->he", q, s)

    return T.loop(step, T.zeros((q.shape[1], q.shape[2], v.shape[2])), (q, k, v, g))[1]


def narrow(x, a, h):
    def step(h, x):
        h = T.tanh(h @ a + x)
        return h, h.sum(-1)

    return T.loop(step, h, x, axis=1)


def reversed_rows(x):
    """The new state reads the old one at other places."""
    def step(s, x):
        s = s[::-1] + x
        return s, s

    return T.loop(step, x[0], x)[1]


CASES = [(two_states, (array(5, 3), array(3))), (running_extremes, (array(6, 7),)),
         (gated, (array(9, 2, 5), array(9, 2, 5), array(9, 2, 11), array(9, 2))),
         (narrow, (array(3, 4, 16, dtype="float16"), array(16, 16, dtype="float16"), array(3, 16, dtype="float16"))),
         (reversed_rows, (array(4, 6),)), (reversed_rows, (array(1, 1),))]


@pytest.mark.parametrize("target", ["cpu", "simulator"])
@pytest.mark.parametrize("fn,arrays", CASES, ids=[f"{f.__name__}{len(a[0])}" for f, a in CASES])
def test_loops_equal_their_reference(fn, arrays, target):
    program = Program(fn, ProgramOptions(target), None)
    results, expected = (x if isinstance(x, tuple) else (x,) for x in (program(*arrays), program.reference(*arrays)))
    for got, want in zip(results, expected, strict=True):
        scale = np.abs(want.astype(np.float64)).max() + 1e-6
        eps = 2.0**-8 if str(want.dtype) == "float16" or fn is narrow else 2.0**-20
        assert got.shape == want.shape and np.abs(got.astype(np.float64) - want).max() <= eps * scale


def test_what_no_step_changes_is_loaded_in_front_and_a_new_state_is_computed_once():
    def recurrent(x, a, h):
        def step(h, x):
            h = T.tanh(h @ a + x)
            return h, h

        return T.loop(step, h, x, axis=1)[1]

    text = tilelang.program(recurrent).tile_source(
        {"x": ((64, 512, 64), "float32"), "a": ((64, 64), "float32"), "h": ((64, 64), "float32")}, target=SIMULATED)
    front, _, walk = text.partition("T.Pipelined(")
    assert "T.copy(a[" in front and "T.copy(a[" not in walk and walk.count("T.tanh") == 1 and "T.copy(x[" in walk


def test_the_text_does_not_depend_on_the_order_of_sets():
    def attention(q, k, v):
        def step(s, x):
            q, k, v = x
            s = s + k[:, None] * v
            return s, q @ s

        return T.loop(step, T.zeros((8, 12)), (q, k, v))[1]

    shapes = {"q": ((23, 8), "float32"), "k": ((23, 8), "float32"), "v": ((23, 12), "float32")}
    described = {n: np.empty(*s) for n, s in shapes.items()}
    texts = {lower(tilelang.program(attention).graph(**described), None, Target("c")).source for _ in range(12)}
    assert len(texts) == 1
