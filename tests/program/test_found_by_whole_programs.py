"""The smallest programs for which random whole-tensor programs found a fault (tests/differential/run.py --family whole)."""

import ml_dtypes
import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.program.run import recipe_of
from tilelang.target import of_arch
from tilelang.transform.pipeline import lower

n = T.dynamic("n")


def both(fn, *arrays, target="cpu"):
    """(compiled, by definition) results, as tuples."""
    program = tilelang.program(fn, target=target)
    return tuple(x if isinstance(x, tuple) else (x,) for x in (program(*arrays), program.reference(*arrays)))


def agree(fn, *arrays, target="cpu", bound=1e-5):
    for got, want in zip(*both(fn, *arrays, target=target), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        g, w = got.astype(np.float64), want.astype(np.float64)
        np.testing.assert_allclose(g, w, rtol=bound, atol=bound * np.abs(w[np.isfinite(w)]).max(initial=1e-30))


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("target", ["cpu", "simulator"])
def test_what_hangs_over_a_tile_adds_nothing_where_minus_infinity_meets_zero(target):
    """exp(x - top) is 0 behind the end of a row, where x is minus infinity: their product is NaN."""
    def mean(x: T.Tensor((n, n), "float32")):
        e = T.exp(x - x.max(1, True))
        return (e * x).sum(1) / e.sum(1)

    def weighted(x, v):
        w = x * T.softmax(x)
        return w @ v / w.sum(-1, True), (T.softmax(x) * T.log(T.softmax(x))).sum(1)

    agree(mean, normal(5, 5), target=target)
    agree(weighted, normal(3, 3), normal(3, 2), target=target, bound=1e-4)


@pytest.mark.parametrize("kind,other", [("uint8", np.int8), ("int8", np.uint8)])
def test_bytes_hold_the_integers_that_the_format_says(kind, other):
    w = np.random.default_rng(0).integers(0, 256, (8, 6)).astype(np.uint8).view(other)
    agree(lambda x, w, s: x @ T.quantised(w, s, kind), normal(4, 8), w, np.ones((8, 1), np.float32))


def test_axes_of_one_element():
    def f(x):
        return T.softmax(x), x.max(1), T.prod(x, -1, True), T.argmax(x), T.cumsum(x), T.argsort(x), T.any(x > 0, 1), x.T @ x

    agree(f, normal(1, 1))
    agree(lambda x: x.max(0), np.full((1, 3), np.nan, np.float32))


def test_axes_of_no_element():
    def f(x):
        joined = T.concat([x.T, T.ones((2, 3))])
        return x.sum(1), x.max(1), T.any(x > 0, 1), T.all(x > 0, 1), x * 2, x @ x.T, joined, T.softmax(x)

    agree(f, normal(3, 0))
    agree(lambda x: (x.mean(0), x.std(1, True)), normal(0, 1), target="cpu")

    def open_size(x: T.Tensor((3, n), "float32")):
        return x.sum(1), x.max(1), T.any(x > 0, 1), T.all(x > 0, 1), T.softmax(x)

    agree(open_size, normal(3, 0))


def test_names_of_the_text_and_of_the_program_do_not_meet():
    def f(n: T.Tensor((n, 4), "float32"), out: T.Tensor((4,), "float32"), bi: T.Tensor((4,), "float32")):
        return n * 2 + out, n.softmax() @ bi

    agree(f, normal(3, 4), normal(4), normal(4))
    agree(lambda x: x * 2, normal(3))


def test_the_greatest_element_of_a_row_of_minus_infinities():
    """Where sums follow a running maximum, it starts from a finite number."""
    def f(x: T.Tensor((2, n), "float32")):
        top = x.max(1)
        return top, T.softmax(x)

    x = normal(2, 5)
    x[1] = -np.inf
    agree(f, x)


def test_factors_of_two_narrow_types_are_multiplied_in_float32():
    agree(lambda a, b: a @ b, normal(2, 3, dtype=ml_dtypes.bfloat16), normal(3, 4, dtype=np.float16))


def test_products_of_integers():
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    agree(lambda a: a @ a.T, x)


def test_a_number_that_an_open_size_does_not_divide():
    def f(x: T.Tensor((2, n, 1), "float32")):
        return x.reshape(2 * x.shape[1], 1)

    agree(f, normal(2, 3, 1))


def test_a_reduction_of_a_tile_that_lies_in_another_order():
    def f(x):
        a = x.max(2)
        return T.exp(a - a.max(1, True)).sum(0, True)

    agree(f, normal(3, 2, 5))


def test_a_loop_is_a_kernel_of_its_own():
    """Something else that reads the same tensors, and has the shape of a state, is not computed with it."""
    def f(x, y, w):
        last, _ = T.loop(lambda s, r: (s + r[0][:, None] * r[1], r[1] @ s), T.zeros((3, 3)), (x, y))
        return x @ w, last

    agree(f, normal(3, 3), normal(3, 3), normal(3, 3))


def test_a_product_that_is_summed_to_one_number():
    agree(lambda x, v: (T.softmax(x) @ v).sum(), normal(2, 2), normal(2, 2))


@pytest.mark.parametrize("target", ["cpu", "simulator"])
def test_a_product_of_slices_ends_with_the_slice(target):
    """Behind the end of a tile's depth stand other elements of the tensor, not zeros."""
    agree(lambda x: x[:, 2:-1] @ x[:, 2:-1].T, normal(2, 7), target=target)
    x, w = normal(2, 7, dtype=np.float16), normal(5, 4, dtype=np.float16)
    agree(lambda x, w: x[:, :3] @ w[1:4], x, w, target=target, bound=2e-3)


def test_an_operand_that_is_converted_to_16_bits_is_rounded():
    x = normal(2, 2)
    agree(lambda x, w: x.astype("float16") @ w.T, x, x, bound=1e-6)


def test_a_kernel_is_given_the_open_sizes_that_it_computes_with():
    def f(x: T.Tensor((T.dynamic("m"), n), "float32")):
        return x.std(0).var(None, keepdims=True)

    agree(f, normal(16, 24))


def test_an_open_size_that_results_alone_have():
    """Along an axis of one element, indices are not read."""
    def f(x: T.Tensor((1, 1), "float32"), i: T.Tensor((1, n), "int32"), y: T.Tensor((3,), "float32")):
        return T.take_along(x, i, 1), y * 2

    agree(f, normal(1, 1), np.zeros((1, 4), np.int32), normal(3))


@pytest.mark.parametrize("target", ["cpu", "simulator"])
def test_rows_that_are_sorted_are_multiplied(target):
    def f(x):
        y = T.sort(x)[0]
        return y @ y.T, T.cumsum(x, reverse=True) @ x.T

    agree(f, normal(2, 5), target=target)


@pytest.mark.parametrize("target", ["cpu", "simulator"])
def test_rows_of_products_that_are_moved_start_inside_of_the_tensor(target):
    agree(lambda x, y: T.roll(x @ y.T, 2, 0), normal(4, 2), normal(4, 2), target=target)
    x = normal(4, 2)
    agree(lambda x, y, z: T.roll(T.einsum("cd,ed,cf->cef", x, y, z), 2, 1), x, x, normal(4, 4), target=target)


def test_the_rows_of_a_matrix_times_its_transpose_are_summed():
    agree(lambda x: (x @ x.T).sum(0), normal(65, 2), target="simulator", bound=1e-4)


def test_an_order_is_read_along_two_axes():
    def f(x):
        values, order = T.topk(x, 2)
        return (T.one_hot(order, 2) * values[:, :, None]).sum(1), values

    agree(f, normal(3, 2))


def test_a_result_without_an_element_and_an_open_size():
    def f(x: T.Tensor((0, n), "float32")):
        return x * 2

    agree(f, normal(0, 3))


def test_a_sum_over_windows_is_not_formed_in_the_loop_of_another():
    def f(x: T.Tensor((2, 2, n), "float32"), w: T.Tensor((2, 2, 3), "float32"), y: T.Tensor((n, n), "float32")):
        return T.conv1d(x, w, padding=1) @ y

    agree(f, normal(2, 2, 5), normal(2, 2, 3), normal(5, 5))


@pytest.mark.parametrize("target", ["cpu", "simulator"])
def test_nan_is_a_number_of_programs(target):
    for _ in range(2):  # the second time from disk
        agree(lambda x: (T.where(x > 0, x, float("nan")), T.full((2,), float("nan"))), normal(5), target=target)


@pytest.mark.parametrize("depth, columns", [(70, 384), (128, 512)])
def test_halves_of_a_float32_operand_did_not_fit_into_shared_memory(depth, columns):
    def f(x: T.Tensor((100, depth), "float32"), w: T.Tensor((depth, columns), "float32")):
        return T.softmax(x @ w)

    for kernel in recipe_of(tilelang.program(f).graph(), None, "sm_90a").functions():
        assert lower(kernel.func, of_arch("sm_90a"))


@pytest.mark.parametrize("target", ["cpu", "simulator"])
def test_a_quotient_that_serves_many_elements_left_the_range_of_its_type(target):
    """x / d was x * (1 / d), infinite for a small d, and x * a / d was x * (a / d), 0 for a small a / d."""
    def tiny(x: T.Tensor((4, 8), "float32")):
        return x / x.sum(1, True)

    def far(x: T.Tensor((4, 8), "float32"), a: T.Tensor((4, 1), "float32"), d: T.Tensor((4, 1), "float32")):
        return x * a / d

    agree(tiny, np.full((4, 8), 2e-40, np.float32), target=target)
    agree(far, *(np.full(s, v, np.float32) for s, v in (((4, 8), 1e30), ((4, 1), 1e-30), ((4, 1), 1e20))), target=target)


@pytest.mark.parametrize("rows", [3, 20])
def test_one_operand_of_two_products_over_different_axes(rows):
    """The halves of a float32 operand lie as each of the products needs them."""
    agree(lambda q, k: (q @ k.T) @ k, normal(rows, 16), normal(rows, 16), target="simulator")
    agree(lambda x: (x @ x.T) @ x, normal(rows, 16), target="simulator")


def test_what_lies_in_a_tile_needs_none_of_its_operands():
    """A tile that the exponentials overwrite was computed again, and counts of statements no longer agreed."""
    agree(lambda s, v: (T.softmax(s) @ v, T.logsumexp(s)), normal(3, 4), normal(4, 5), target="simulator")


@pytest.mark.parametrize("target", ["cpu", "simulator"])
def test_remainders_and_quotients_that_round_down_are_exact(target):
    """1 / 0.1 is rounded to 10, but 1 // 0.1 is 9: 0.1 is greater than a tenth."""
    x, inf = np.array([1, 0.3, 7, -7, np.inf, 5, -5, 1e9, 3, 1e-40, 2.5], np.float32), np.inf
    y = np.array([0.1, 0.1, 0.1, 0.1, 2, inf, -inf, 3, 0, 1, -1], np.float32)
    with np.errstate(all="ignore"):
        for got, want in zip(*both(lambda x, y: (x // y, x % y, x // 2, x % -0.7), x, y, target=target), strict=True):
            np.testing.assert_array_equal(got, want)
        assert want[2] == np.mod(x[2], np.float32(-0.7))
