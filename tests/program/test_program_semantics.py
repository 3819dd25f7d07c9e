"""What programs mean: types, broadcasting, NaN, empty axes, slices, loops, blocks, values from outside."""

import random

import ml_dtypes
import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.program.graph import Dim
from tilelang.program.tensor import FUNCTIONS

x45 = np.arange(20, dtype=np.float32).reshape(4, 5)


def run(fn, *arrays):
    return tilelang.program(fn).reference(*arrays)


@pytest.mark.parametrize(
    "a, b, result",
    [
        ("float16", "float32", "float32"),
        ("float16", "bfloat16", "float32"),
        ("int8", "int32", "int32"),
        ("int32", "float16", "float16"),
        ("bool", "float32", "float32"),
        ("float32", "float64", "float64"),
        ("bool", "int8", "int8"),
    ],
)
def test_two_tensors_have_the_type_that_holds_both(a, b, result):
    out = tilelang.program(lambda x, y: x + y).graph(*(_described(t) for t in (a, b))).outputs[0]
    assert out.dtype == result


def _described(t, shape=(4,)):
    return np.zeros(shape, ml_dtypes.bfloat16 if t == "bfloat16" else t)


@pytest.mark.parametrize(
    "t, number, result",
    [
        ("float16", 2, "float16"),
        ("float16", 2.5, "float16"),
        ("int32", 2, "int32"),
        ("int32", 2.5, "float32"),
        ("int8", True, "int8"),
        ("bool", 1, "int32"),
        ("bfloat16", 1e30, "bfloat16"),
    ],
)
def test_a_number_takes_the_type_of_the_tensor_beside_it(t, number, result):
    assert tilelang.program(lambda x: x * number).graph(_described(t)).outputs[0].dtype == result


def test_sums_are_wider_than_what_is_summed():
    ones = np.ones((3, 70000), np.float16)
    assert (run(lambda x: x.astype("float32").sum(1), ones) == 70000).all()
    assert (run(lambda x: x.mean(1), ones) == 1).all() and run(lambda x: x.mean(1), ones).dtype == np.float16
    assert (run(lambda x: x.sum(1), np.full((2, 300), 100, np.int8)) == 30000).all()
    assert run(lambda x: (x > 0).sum(), ones) == 210000
    graph = tilelang.program(lambda a, b: a @ b).graph(ones[:, :4], ones[:, :3].T.copy()[:, :2].repeat(2, 0)[:4])
    (einsum,) = [n for n in graph.nodes if n.op == "einsum"]
    assert einsum.dtype == "float16" and einsum.attrs["accum"] == "float32"
    a, b = np.full((2, 1000), 100, np.int8), np.full((1000, 2), 100, np.int8)
    assert (run(lambda a, b: a @ b, a, b) == 10**7).all()


def test_division_and_remainder_follow_python():
    x = np.array([-7, 7, -8], np.int32)
    assert run(lambda x: x // 2, x).tolist() == [-4, 3, -4] and run(lambda x: x % 3, x).tolist() == [2, 1, 1]
    assert run(lambda x: x / 2, x).dtype == np.float32 and run(lambda x: 14 / x, x).tolist() == [-2, 2, -1.75]
    assert run(lambda x: x % 3.0, x.astype(np.float32)).tolist() == [2, 1, 1]


def test_maxima_pass_over_nan():
    x = np.array([[np.nan, 1, 3], [np.nan] * 3], np.float32)
    assert run(lambda x: x.max(1), x).tolist() == [3, -np.inf] and run(lambda x: T.argmax(x), x).tolist() == [2, 0]
    assert run(lambda x: T.max(x, 2), x)[0].tolist() == [2, 2, 3]
    assert np.isnan(run(lambda x: x.sum(1), x)).all() and np.isnan(run(lambda x: T.relu(x), x)[1]).all()
    assert run(lambda x: T.sort(x, descending=True)[1], x).tolist() == [[2, 1, 0], [0, 1, 2]]


def test_reductions_of_no_element_give_the_identity():
    x = np.zeros((3, 0), np.float32)
    assert run(lambda x: x.sum(1), x).tolist() == [0] * 3 and run(lambda x: T.prod(x, 1), x).tolist() == [1] * 3
    assert run(lambda x: x.max(1), x).tolist() == [-np.inf] * 3 and not run(lambda x: T.any(x > 0, 1), x).any()
    assert np.isnan(run(lambda x: x.mean(1), x)).all()


def test_casts_to_integers_truncate_and_saturate():
    x = np.array([-1.9, 1.9, 1e10, np.nan], np.float32)
    assert run(lambda x: x.astype("int32"), x).tolist() == [-1, 1, 2**31 - 1, 0]
    assert run(lambda x: T.cast(x, "int8"), x).tolist() == [-1, 1, 127, 0]


def test_an_explicit_cast_rounds():
    x = np.array([1 + 2**-12], np.float32)
    assert run(lambda x: x.astype("float16").astype("float32") - 1, x) == 0


def test_slices_are_numpys():
    rng = random.Random(3)
    for _ in range(60):
        index = tuple(
            slice(*(rng.choice([None, *range(-6, 7)]) for _ in range(2)), rng.choice([None, 1, 2, -1, -2]))
            if rng.random() < 0.7
            else rng.choice([None, rng.randrange(-4, 4), ...])
            for _ in range(2)
        )
        if index.count(...) > 1 or sum(i is not None and i is not ... for i in index) > 2:
            continue
        assert np.array_equal(run(lambda x, index=index: x[index] + 0, x45), x45[index]), index


def test_einsum_is_numpys():
    a, b = np.random.default_rng(0).standard_normal((2, 3, 4)), np.random.default_rng(1).standard_normal((4, 3, 2))
    for spec in ("abc,cde->abde", "abc,cba->", "abc,cba->b", "abc,cbd->ad", "...c,cde->...de", "abc,cda->bd"):
        got = run(lambda x, y, spec=spec: T.einsum(spec, x, y), a, b)
        assert np.allclose(got, np.einsum(spec, a, b), rtol=1e-12), spec


@pytest.mark.parametrize(
    "a, b",
    [
        ((3, 4), (4, 5)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((2, 1, 3, 4), (5, 4, 6)),
        ((1, 3, 4), (2, 4, 6)),
        ((7, 1, 2), (1, 2, 3)),
    ],
)
def test_matmul_broadcasts_batches_as_numpy(a, b):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(a), rng.standard_normal(b)
    assert np.allclose(run(lambda x, y: x @ y, x, y), x @ y, rtol=1e-12)


def test_named_sizes_are_polynomials():
    n, m = Dim.named("n"), Dim.named("m")
    assert (n + 1) * (n - 1) == n * n - 1 and n * 4 // 2 == n * 2 and n - n == 0 and (n * m * 6) // (m * 3) == n * 2
    assert ((n + 1) // 2).at({"n": 5}) == 3 and ((n + 1) // 2 * m).names == ("m", "n") and str(n % 4) == "n - 4*((n) // (4))"


def test_shapes_of_named_sizes_are_computed_at_the_call():
    @tilelang.program
    def f(x: T.Tensor((T.dynamic("n"), 6), "float32")):
        n = x.shape[0]
        return x.reshape(n * 2, 3), x[::2].sum(1), x[1:] - x[:-1], x.sum() / n, T.concat([x, x]).reshape(-1)

    for n in (2, 5, 8):
        x = np.random.default_rng(n).standard_normal((n, 6)).astype(np.float32)
        a, b, c, d, e = f.reference(x)
        assert (
            np.array_equal(a, x.reshape(-1, 3))
            and np.allclose(b, x[::2].sum(1), atol=1e-5)
            and np.array_equal(c, x[1:] - x[:-1])
        )
        assert np.allclose(d, x.sum() / n, atol=1e-5) and np.array_equal(e, np.concatenate([x, x]).reshape(-1))


def test_a_loop_reads_tensors_from_outside_and_gives_results_along_its_axis():
    def f(x, w):
        scale = T.exp(w)

        def step(state, row):
            total, count = state
            total = total * scale + row
            return (total, count + 1), (total, total.sum())

        return T.loop(step, (T.zeros((5,)), T.full((), 0, "int32")), x)

    (total, count), (all_totals, sums) = _pair(f)
    w, s, rows = np.float32(0.25), np.zeros(5), []
    for row in x45:
        s = s * np.exp(w) + row
        rows.append(s)
    assert np.allclose(total, s) and count == 4 and np.allclose(all_totals, rows) and np.allclose(sums, np.sum(rows, 1))


def _pair(f):
    program = tilelang.program(lambda x, w: (lambda r: (*r[0], *r[1]))(f(x, w)))
    a, b, c, d = program.reference(x45, np.float32(0.25).reshape(()))
    return (a, b), (c, d)


def test_a_tile_program_stands_inside_of_a_program():
    n = T.dynamic("n")

    @T.prim_func
    def doubled(A: T.Tensor((n, 5), "float32"), B: T.Tensor((n, 5), "float32")):
        with T.Kernel(n, threads=32) as i:
            for j in T.Parallel(5):
                B[i, j] = A[i, j] * 2

    assert np.array_equal(run(lambda x: T.tile(doubled, x + 1).sum(1), x45), (x45 + 1).sum(1) * 2)


def test_programs_and_helpers_are_part_of_the_program_that_calls_them():
    @tilelang.program
    def inner(x, k=2):
        return x * k, x + k

    def outer(x):
        a, b = inner(x)
        return sum((a, b, inner(x, 3)[0]))

    assert np.array_equal(run(outer, x45), x45 * 2 + x45 + 2 + x45 * 3)


SCALE = 2.0


def test_a_value_from_outside_that_changes_is_seen(monkeypatch):
    @tilelang.program
    def f(x):
        return x * SCALE

    assert (f.reference(x45) == x45 * 2).all()
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert (f.reference(x45) == x45 * 3).all()


def test_arguments_are_not_changed_and_results_are_not_views():
    x = x45.copy()
    out = run(lambda x: (x, x[0], x.reshape(-1)), x)
    for y in out:
        y[...] = -1
    assert np.array_equal(x, x45)


def test_equal_operations_are_one_node():
    graph = tilelang.program(lambda x: T.exp(x) + T.exp(x)).graph(x45)
    assert [n.op for n in graph.nodes] == ["input", "exp", "add"]


def test_functions_of_the_language_are_unchanged_in_kernels():
    @T.prim_func
    def kernel(X: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                X[i] = T.max(T.exp(X[i]), T.cast(T.abs(X[i]), "float32"))

    assert 'T.max(T.call("exp"' in kernel.script() and T.exp.__name__ == "exp" and T.tile.copy is T.copy


def test_each_name_of_programs_is_found_in_the_language():
    from tilelang.language.whole import ALONE, BOTH

    assert set(FUNCTIONS) - {"tile", "var"} == set(BOTH) | ALONE
    assert T.softmax is FUNCTIONS["softmax"] and tilelang.program.softmax is T.softmax and "softmax" in dir(T)
    assert not [n for n, fn in FUNCTIONS.items() if not (fn.__doc__ or "").strip()]


def test_numbers_of_numpy_stand_on_either_side():
    def f(x):
        return np.float32(2) * x, x - np.float32(1), np.float32(3) ** x, np.float32(1) < x, np.int32(1) + (x > 0)

    x = np.array([0.5, 2], np.float32)
    for got, want in zip(run(f, x), f(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_symbols_of_sizes_are_sizes_inside_of_programs():
    """Those of a program that is called inside of another stand for what its tensors have."""
    n, m = T.dynamic("n"), T.dynamic("m")

    @tilelang.program
    def numbered(z: T.Tensor((m, 6), "float32")):
        return z + T.iota(m)[:, None]

    @tilelang.program
    def f(x: T.Tensor((n, 6), "float32"), y: T.Tensor((m,), "float32")):
        steps = T.loop(lambda s, i: (s + 1, s), T.zeros((m,)), length=n)[1]
        return numbered(x[1:]), round(x[:, :m] * y), (T.iota(n) < m).sum() + n // 2, T.zeros((n - m, 2)), steps, x[n - 1]

    for rows, columns in ((5, 3), (7, 6)):
        x, y = np.ones((rows, 6), np.float32), np.arange(columns, dtype=np.float32)
        got = f(x, y)
        for a, b in zip(got, f.reference(x, y), strict=True):
            np.testing.assert_array_equal(a, b)
        assert got[0][:, 0].tolist() == [*range(1, rows)] and got[2] == columns + rows // 2 and got[4].shape == (rows, columns)
    with pytest.raises(TileLangError, match="n - m"):
        f(np.ones((2, 6), np.float32), np.ones(3, np.float32))
