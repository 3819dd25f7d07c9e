"""Scans and sorts along axes that no tile holds: open sizes, and rows that are too long."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.program.api import Program, ProgramOptions

n, m = T.dynamic("n m")


def sums(x: T.Tensor((m, n), "float32")):
    return T.cumsum(x, 1)


def drawdown(x: T.Tensor((m, n), "float32")):
    return (T.cummax(x, 1) - x).max(1), T.cumsum(T.softmax(x), 1)


def backwards(x: T.Tensor((n,), "float32")):
    return T.cumsum(x, 0, reverse=True)


def integers(x: T.Tensor((n,), "int32")):
    return T.cumsum(x, 0), x.argmax(0), T.cumprod(T.where(x < 0, -1, 1), 0)


def both(x: T.Tensor((n,), "int32")):
    return T.cumsum(x, 0) + T.cumsum(x, 0, reverse=True)


def long_rows(x: T.Tensor((2, 70000), "float32")):
    return T.cumsum(x, 1)


def check(program, x):
    got, wanted = program(x), program.reference(x)
    for g, w in zip(*(y if isinstance(y, tuple) else (y,) for y in (got, wanted))):
        assert g.shape == w.shape
        assert (g == w).all() if g.dtype.kind == "i" else np.abs(g - w).max(initial=0) <= 2e-5 * np.abs(x).sum()


def drawn(program, sizes):
    rng = np.random.default_rng(5)
    shape = sizes if len(program.parameters[0].shape) == 2 else sizes[1:]
    kind = str(program.parameters[0].dtype)
    return rng.integers(-9, 9, shape).astype("int32") if kind == "int32" else rng.standard_normal(shape).astype("float32")


@pytest.mark.parametrize("fn", [sums, drawdown, backwards, integers, both, long_rows], ids=lambda f: f.__name__)
def test_scans_of_axes_that_no_tile_holds(fn):
    program = Program(fn, ProgramOptions("cpu"), None)
    for sizes in [(2, 70000)] if fn is long_rows else [(3, 5000), (2, 1), (1, 2048), (5, 333)]:
        check(program, drawn(program, sizes))
    assert len(program._runners) == 1


@pytest.mark.parametrize("fn", [drawdown, backwards], ids=lambda f: f.__name__)
def test_on_the_simulator(fn):
    program = Program(fn, ProgramOptions("simulator"), None)
    check(program, drawn(program, (1, 2300)))


def sorted_rows(x: T.Tensor((m, n), "float32")):
    return T.argsort(x, 1)


def sorted_columns(x: T.Tensor((m, n), "float32")):
    return T.argsort(x, 0, descending=True)


def best(x: T.Tensor((2, m, n), "float16")):
    return T.topk(x * 2, 3)


def nucleus(x: T.Tensor((m, n), "float32")):
    p = T.softmax(x)
    p = p.take_along(T.argsort(p, 1, descending=True), 1)
    return T.where(T.cumsum(p, 1) < 0.9, p, 0.0).sum(1)


@pytest.mark.parametrize("fn, target", [(sorted_rows, "cpu"), (sorted_columns, "cpu"), (best, "cpu"), (nucleus, "cpu"),
                                        (sorted_rows, "simulator")], ids=lambda x: getattr(x, "__name__", x))
def test_sorts_of_axes_that_no_tile_holds(fn, target):
    program = Program(fn, ProgramOptions(target), None)
    for sizes in [(3, 4100), (1, 3), (2, 1024)] if target == "cpu" else [(1, 1100)]:
        shape = (2, *sizes) if fn is best else sizes
        x = (np.random.default_rng(1).integers(-99, 99, shape) / 4).astype("float16" if fn is best else "float32")
        got, wanted = program(x), program.reference(x)
        for g, w in zip(*(y if isinstance(y, tuple) else (y,) for y in (got, wanted))):
            assert g.shape == w.shape and np.abs(g - w).max() <= (0 if g.dtype.kind == "i" else 1e-5)
    assert len(program._runners) == 1 and "order_of_keys(" in program.tile_source()


def test_long_columns_of_scans_and_reductions_fit_a_tile_on_the_cpu():
    program = Program(lambda x: (T.cummax(x, 0) - x).max(0), ProgramOptions(), None)
    for n in (300, 2048):
        assert "@T.prim_func" in program.tile_source({"x": ((n, 2048), "float32")}, "cpu")
