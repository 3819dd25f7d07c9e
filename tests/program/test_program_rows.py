"""Long rows, whose lanes have results of their own on a GPU, equal their reference: with NaN, infinities, equal elements."""

import numpy as np
import pytest
from test_program_lowering import SIMULATED, run

import tilelang
import tilelang.language as T
from tilelang.program.lower import lower
from tilelang.target import Target

RNG = np.random.default_rng(5)


def rows(*shape, dtype="float32"):
    """Rows with equal extremes in several places, infinities and, in the last row, minus infinity alone."""
    x = np.round(RNG.standard_normal(shape) * 8) / 8
    x[:, ::301] = -np.inf
    x[-1] = -np.inf if shape[0] > 2 else x[-1]
    return x.astype(dtype)


def with_nan(x):
    x = x.copy()
    x[:, ::97] = np.nan
    return x


def programs(m, dtype="float32"):
    """Programs of any number of rows: no kernel divides a row over blocks."""
    n = T.dynamic("n")

    @tilelang.program(target="simulator")
    def extremes(x: T.Tensor((n, m), dtype)):
        return T.argmax(x), x.max(-1), T.argmin(x * 2)

    @tilelang.program(target="simulator")
    def weighted(x: T.Tensor((n, m), dtype), t: T.Tensor((1,), "float32")):
        return (T.softmax(T.tanh(x / 30) * 30 / t) * T.tanh(x)).sum(-1)

    @tilelang.program(target="simulator")
    def smoothed(x: T.Tensor((n, m), dtype), t: T.Tensor((n,), "int32")):
        logp = T.log_softmax(x)
        return T.take_along(logp, t[:, None]).squeeze(-1) * 0.9 + logp.mean(-1) * 0.1

    return extremes, weighted, smoothed


def in_lanes(program):
    text = program.tile_source(target={"kind": "cuda", "arch": "sm_90a"})
    assert "lanes has a result of its own" in text
    return text


@pytest.mark.parametrize("x", [rows(3, 4100), with_nan(rows(2, 5120)), rows(2, 4352, dtype="float16")],
                         ids=["ragged", "nan", "float16"])
def test_the_first_of_equal_extremes(x):
    extremes, _, _ = programs(x.shape[1], str(x.dtype))
    in_lanes(extremes)
    for got, want in zip(extremes(x), extremes.reference(x), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("m", [4100, 5120])
def test_weights_of_long_rows(m):
    _, weighted, _ = programs(m)
    x, t = rows(2, m), np.array([0.7], "float32")
    in_lanes(weighted)
    got, want = weighted(x, t), weighted.reference(x, t)
    assert np.abs(got - want).max() <= 64 * 2.0**-23 * np.abs(want).max()


def test_reductions_that_need_the_whole_row_first():
    _, _, smoothed = programs(4608)
    in_lanes(smoothed)
    x, t = RNG.standard_normal((2, 4608)).astype("float32"), np.array([4607, 0], "int32")
    got, want = smoothed(x, t), smoothed.reference(x, t)
    assert np.abs(got - want).max() <= 16 * 2.0**-23 * np.abs(want).max()


def test_no_iteration_combines_lanes():
    text = in_lanes(programs(32000)[1])
    assert "(1, 5, 256)" in text and "threads=64" in text


def test_quotients_of_long_rows_by_one_number_are_those_of_their_definition():
    """Two factors stand for the divisor; neither is infinite or 0 where the quotient is an ordinary number."""
    n = T.dynamic("n")

    def f(x: T.Tensor((n, 4096), "float32"), d: T.Tensor((n,), "float32")):
        return T.where(x > x.max(1, True), 0.0, x / d[:, None])

    program = tilelang.program(f, target="simulator")
    rng = np.random.default_rng(2)
    x = rng.standard_normal((10, 4096)).astype(np.float32)
    x[:, :6] = [0.0, -0.0, np.inf, np.nan, 2e-40, 1e38]
    d = np.array([1.6e-39, -3e-42, 0.0, np.inf, 1e-30, -7.0, 1e30, 3e38, 1.0, np.nan], np.float32)
    with np.errstate(all="ignore"):
        wanted = x.astype(np.float64) / d[:, None].astype(np.float64)
        rounded = wanted.astype(np.float32)
        got = program(x, d)
        same = (got == rounded) | np.isnan(got) & np.isnan(rounded) | (
            np.abs(got - wanted) <= 2.0**-23 * np.abs(wanted) + 2.0**-149)
    assert same.all(), (got[~same][:5], wanted[~same][:5])
    assert "scale[i]" in program.tile_source()


def agrees(program, x, loops):
    """The simulated chip computes what the program says, and many such rows are walked over so often.  The text for those."""
    module = lower(program.graph(x), None, Target(SIMULATED))
    np.testing.assert_allclose(run(module, [x], SIMULATED)[0], program.reference(x), rtol=1e-4, atol=1e-8)
    source = program.tile_source({"x": ((2048, x.shape[1]), "float32")}, target=SIMULATED)
    assert source.count("T.Pipelined(") == loops
    return source


def test_a_sum_does_not_wait_for_a_term_that_is_the_same_everywhere():
    """The mean of x - logsumexp(x) is that of x less the logarithm: one pass over a long row."""
    agrees(tilelang.program(lambda x: (x - T.logsumexp(x, -1, True)).mean(1)), rows(2, 20000), 1)


def test_divisors_of_long_rows_are_inverted_in_front_of_loops():
    @tilelang.program
    def least(x):
        p = T.softmax(x)
        p = T.where(p < p.max(-1, keepdims=True) * 0.05, 0, p)
        return p / p.sum(-1, keepdims=True)

    source = agrees(least, RNG.standard_normal((2, 40000)).astype(np.float32) * 4, 4)
    assert not any(" / " in line for line in source.splitlines() if "T.exp2" in line)
