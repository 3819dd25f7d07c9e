"""The smallest programs for which those of other fields found a fault: serial axes, stencils, long orders, finite masks."""

import linecache
import re

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.program.graph import Graph
from tilelang.program.run import recipe_of
from tilelang.target import of_arch

n = T.dynamic("n")
TARGETS = ["cpu", "simulator"]


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def agree(fn, *arrays, target="cpu", bound=1e-5):
    program = tilelang.program(fn, target=target)
    got, want = program(*arrays), program.reference(*arrays)
    for g, w in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=bound, atol=bound)


def text_of(fn, *arrays, arch="sm_90a"):
    """The text of a program for a GPU."""
    graph = tilelang.program(fn).graph(*arrays)
    assert isinstance(graph, Graph)
    return recipe_of(graph, None, of_arch(arch)).source


# ---- axes that are walked index by index ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_a_sum_follows_an_extreme_along_an_axis_without_tiles(target):
    """Its part for one index is an element, not a sum that was never cleared."""
    agree(lambda x: T.softmax(x.reshape(-1, 3)).reshape(x.shape), normal(4, 6), target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_the_index_of_an_extreme_along_an_axis_without_tiles(target):
    def best(x):
        y = x.reshape(-1, 3)
        return (y * (y.argmax(1)[:, None] + 1) + y.argmin(1)[:, None]).reshape(x.shape)

    agree(best, normal(4, 6), target=target)


@pytest.mark.parametrize("name", ["t", "block", "s0", "state1"])
def test_a_parameter_has_a_name_that_the_text_of_a_loop_uses(name):
    text = f"def f({name}, u):\n    def walk(s, x):\n        s = s * 0.5 + x @ u\n        return s, s + {name}[0]\n" \
           f"    return T.loop(walk, {name}[0], {name})\n"
    linecache.cache[f"<{name}>"] = (len(text), None, text.splitlines(True), f"<{name}>")
    space = {"T": T}
    exec(compile(text, f"<{name}>", "exec"), space)
    agree(space["f"], normal(4, 3, 5), normal(5, 5))


# ---- expressions that would explode -----------------------------------------------------------------------------------


def stencils(u):
    for _ in range(6):
        p = T.pad(u, [(1, 1), (1, 1)])
        u = u + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)
    return u


def butterflies(x):
    h, n = 1, x.shape[-1]
    while h < n:
        y = x.reshape(-1, n // (2 * h), 2, h)
        x = T.stack([y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]], 2).reshape(-1, n)
        h *= 2
    return x


@pytest.mark.parametrize("fn,shape", [(stencils, (5, 7)), (butterflies, (3, 32))])
def test_what_is_read_at_many_places_is_stored(fn, shape):
    agree(fn, normal(*shape))
    assert len(text_of(fn, normal(*shape))) < 8000


def test_a_view_of_elements_is_no_reason_to_store_them():
    def rotated(x, w):
        y = T.rms_norm(x, w)
        return T.concat([y[:, 4:], -y[:, :4]], 1)

    assert text_of(rotated, normal(64, 8), normal(8)).count("@T.prim_func") == 1


def test_a_long_chain_of_reductions_is_planned_in_a_moment():
    """Each step reads the one before twice: what walks all ways through the chain does not end."""
    def balanced(c):
        u, v = T.zeros(c.shape[:1]), T.zeros(c.shape[1:])
        for _ in range(4):
            u = -T.logsumexp(c + v, 1)
            v = -T.logsumexp(c + u[:, None], 0)
        return T.exp(c + u[:, None] + v)

    agree(balanced, normal(6, 5))


def test_two_divided_loops_have_axes_of_their_own():
    def f(piece):
        return T.softmax(piece.sum(1) / T.norm(piece, axis=None)).sum()

    text = text_of(f, normal(1 << 12, 256))
    assert re.search(r"\bpiece2\b", text)
    space = {"__name__": "m"}
    linecache.cache["<pieces>"] = (len(text), None, text.splitlines(True), "<pieces>")
    exec(compile(text, "<pieces>", "exec"), space)


def test_indices_of_a_row_that_is_cut_and_joined_are_those_of_the_row():
    text = text_of(lambda x: T.abs(x.reshape(8, 16, 32)).reshape(8, 512)[:, 0::2], normal(8, 512))
    assert "//" not in text and "%" not in text


def test_pieces_that_differ_in_one_number_are_one_expression():
    def unpacked(w):
        return T.stack([(w >> 2 * k) & 3 for k in range(4)], -1).reshape(w.shape[0], -1)

    w = np.random.default_rng(0).integers(0, 256, (3, 5)).astype(np.uint8)
    agree(unpacked, w)
    assert "if_then_else" not in text_of(unpacked, w)


# ---- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n,k,largest,dtype", [
    (9001, 5, True, "float32"), (9001, 40, False, "int8"), (8192, 3, True, "float16")])
def test_the_first_places_of_a_long_row(n, k, largest, dtype):
    x = np.random.default_rng(0).integers(-50, 50, (2, n)).astype(dtype)  # many are equal
    if dtype != "int8":
        x[0, [3, 8000]] = np.nan
    agree(lambda x: T.topk(x, k, largest=largest), x)


def test_the_order_of_a_row_whose_items_shared_memory_does_not_hold():
    assert "order_of_keys" in text_of(T.argsort, normal(2, 20000))
    assert "order_of_keys" not in text_of(T.argsort, normal(2, 16000))


def test_a_long_row_is_read_by_as_many_threads_as_its_narrowest_elements_fill():
    """Else a row would lie in some of the threads, and its partial results would go through shared memory."""
    for dtype, lanes in ((np.float32, 1024), (np.float16, 2048), (np.int8, 4096)):
        assert f"(1, {lanes})" in text_of(lambda x: x.astype("float32").sum(1), np.ones((256, 1 << 15), dtype))


def test_rows_side_by_side_are_tiles():
    """Not windows, which each thread would walk over by itself."""
    text = text_of(lambda x: T.abs(x.reshape(x.shape[0], -1, 64)).max(axis=-1), normal(64, 4096))
    assert "T.reduce_max" in text and "Pipelined" not in text


def test_a_reduction_of_what_an_output_holds_shares_its_axis():
    def mixture(x, m):
        l = -((x[:, None] - m) ** 2).sum(-1)
        return T.logsumexp(l), T.softmax(l)

    text = text_of(mixture, normal(4096, 8), normal(32, 8))
    assert text.count("T.reduce_max") == 1 and text.count("T.reduce_sum") == 2
    agree(mixture, normal(5, 3), normal(4, 3))


@pytest.mark.parametrize("target", TARGETS)
def test_masks_of_the_least_number(target):
    """Constants whose fold is infinite in float32 stay two: 0 times infinity would be NaN."""
    least = float(np.finfo(np.float32).min)

    def attention(q, k, m):
        s = q @ k.T * 0.25
        return T.softmax(s + (1 - m) * least) @ k, T.softmax(T.where(m > 0, s, least)) @ k

    m = (np.random.default_rng(1).random((5, 7)) > 0.4).astype(np.float32)
    m[2] = 0
    agree(attention, normal(5, 8), normal(7, 8), m, target=target)


# ---- integers, and axes of no element ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_narrow_integers_are_multiplied_in_int32(dtype):
    """By T.gemm, by threads, and where a factor has one row."""
    def f(x, w):
        return x @ w, x[:1] @ w, T.einsum("ij,ij->i", x, x), T.einsum("i,j->ij", x[:, 0], w[0])

    draw = np.random.default_rng(0).integers
    info = np.iinfo(dtype)
    agree(f, draw(info.min, info.max, (5, 16)).astype(dtype), draw(info.min, info.max, (16, 8)).astype(dtype))


def test_a_mean_of_no_rows_that_a_gemm_makes():
    agree(lambda x, w: (T.softmax(x @ w).mean(0), (x @ w).sum(0)), normal(0, 16), normal(16, 8))


def test_packed_bytes_of_a_factor_are_copied_ahead():
    """Several indices of the factor's axis read one byte."""
    def f(x, w, s):
        return x @ T.quantised(w, s, "uint4").T

    draw = np.random.default_rng(0)
    x, w = normal(70, 128, dtype=np.float16), draw.integers(0, 256, (40, 64)).astype(np.uint8)
    scales = draw.random((40, 2)).astype(np.float16)
    assert "T.copy(w[" in text_of(f, x, w, scales)
    agree(f, x, w, scales, target="simulator", bound=2e-3)


def test_a_result_of_one_element_is_not_computed_by_each_block_of_another():
    """They would all store it, and each would read the whole tensor."""
    def f(x: T.Tensor((16, n, 5), "float32")):
        return x.min((0, 1, 2), keepdims=True), x * 1

    agree(f, normal(16, 9, 5), target="simulator")


def test_factors_that_share_no_summed_axis_are_summed_each_by_itself():
    def f(a, b):
        return (a[:, :, None] * b[:, None]).sum((1, 2))

    text = text_of(f, normal(64, 16, 1 << 10), normal(64, 16, 1 << 10))
    assert text.count("T.reduce_sum") == 2 and "16, 16" not in text
    agree(f, normal(3, 4, 5), normal(3, 6, 5), bound=1e-4)


def test_what_is_rolled_is_read_once():
    def rolled(x):
        return T.roll(T.roll(x, 1, 0), -2, 1)

    text = text_of(rolled, normal(64, 64))
    assert len(re.findall(r"\bx\[", text)) == 1
    agree(rolled, normal(5, 7))


@pytest.mark.parametrize("rows", [1, 40, 333])
def test_an_open_axis_is_divided_among_blocks(rows):
    def pooled(x: T.Tensor((n, 24), "float32")):
        return x.sum(0), x.max(0)

    assert "piece" in text_of(pooled)
    agree(pooled, normal(rows, 24), target="simulator", bound=1e-4)


def test_a_tile_with_an_axis_of_one_index_is_read_by_statements_without_it():
    agree(lambda x: (T.cumsum(x, 1), x @ x.T + 1), normal(1, 47))


def test_a_scan_reads_a_tile_that_lacks_an_axis_of_one_index():
    def run(x: T.Tensor((n, 5, 3), "float32")):
        return T.cummin(x.max(1, keepdims=True), 2)

    agree(run, normal(4, 5, 3))
