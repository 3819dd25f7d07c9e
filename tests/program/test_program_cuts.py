"""Which kernels programs become where what is fused would wait, be computed again, or lie apart in memory."""

import re

import numpy as np
import pytest
from test_program_lowering import SIMULATED, run

import tilelang
import tilelang.language as T
from tilelang.program.lower import lower
from tilelang.target import Target

HEADS, ROWS = (4, 16, 2048, 128), (8192, 4096)


class _Like:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype


def kernels(fn, *arrays, target=SIMULATED):
    """The kernels that a program becomes for arrays of (shape, dtype): name -> text."""
    program = tilelang.program(fn)
    source = lower(program.graph(*(_Like(*a) for a in arrays)), None, Target(target)).source
    return dict(re.findall(r"@T\.prim_func\ndef (\w+)(.*?)(?=\n\n\n|\Z)", source, re.S))


def rotated_attention(q, k, v, c, s):
    n, h = q.shape[2], q.shape[3] // 2

    def rotated(t):
        a, b = t[..., :h], t[..., h:]
        return T.concat([a * c - b * s, b * c + a * s], -1).astype(t.dtype)

    x = T.einsum("bhqd,bhkd->bhqk", rotated(q), rotated(k)) * (2 * h) ** -0.5
    return T.softmax(T.where(T.iota(n) <= T.iota(n)[:, None], x, -float("inf"))) @ v


def test_rotated_keys_are_stored_not_rotated_by_each_block():
    """They needed twice the shared memory of a block, and were rotated again for each tile of queries."""
    tables = [((2048, 64), "float32")] * 2
    first, second = kernels(rotated_attention, *[(HEADS, "bfloat16")] * 3, *tables).values()
    assert "T.gemm" not in first and second.count("T.gemm") == 2 and "right[" not in second


def test_keys_are_divided_by_their_length_once():
    def attend(q, k, v):
        def unit(t):
            return t / T.maximum(T.sqrt((t * t).sum(-1, keepdims=True)), 1e-12)

        return T.softmax(T.einsum("bhqd,bhkd->bhqk", unit(q), unit(k)) * 10.0) @ v

    first, second = kernels(attend, *[(HEADS, "bfloat16")] * 3).values()
    assert "T.gemm" not in first and "k: " not in second and "sum: " not in first + second


def test_a_norm_in_two_walks_stands_in_front_of_a_gemm():
    def layer(x, g, b, w):
        return T.gelu(T.layer_norm(x, g, b) @ w)

    found = kernels(layer, ((8192, 2048), "float16"), *[((2048,), "float16")] * 2, ((2048, 4096), "float16"))
    assert ["T.gemm" in text for text in found.values()] == [False, True]


def test_results_of_both_directions_have_kernels_of_their_own():
    """One kernel would read each tile of one of them a column at a time."""
    found = kernels(lambda x: (T.any(x > 1, 0), T.all(x > -3, 1)), ((4096, 4096), "float32"))
    assert not any("> 1.0" in text and "> -3.0" in text for text in found.values())


def test_columns_are_summed_by_neighbours_whatever_else_has_the_axis():
    def back(x, w, dy):
        a, g = x.astype("float32"), (dy * w).astype("float32")
        r = T.rsqrt((a * a).mean(-1, keepdims=True) + 1e-6)
        n = a * r
        return (r * (g - n * (g * n).mean(-1, keepdims=True))).astype(x.dtype), (dy.astype("float32") * n).sum(0)

    rows = (16384, 2048), "bfloat16"
    first, second, third = kernels(back, rows, ((2048,), "bfloat16"), rows).values()
    assert "sum: " in first and "out0: " in first  # one walk gives both
    assert re.search(r"dy\[piece .*, bi \* 256 \+ i\]", second) and "part_sum: " in third


def test_a_scale_with_an_axis_of_one_index_joins_its_kernel():
    def quantise(x):
        m = T.abs(x).max(-1, keepdims=True) / 127
        return T.clamp(T.round(x / m), -127, 127).astype("int8"), m

    (text,) = kernels(quantise, (ROWS, "float32")).values()
    assert "out1[bi, 0] = " in text


def test_each_thread_walks_over_its_window():
    (text,) = kernels(lambda x: T.windows(x, (3, 3), (2, 3), 2).max((-1, -2)), ((32, 64, 112, 112), "float16")).values()
    assert "T.reduce_max" not in text and "T.max(" in text


def test_three_factors_are_a_gemm_of_a_product():
    found = kernels(lambda a, w, b: T.einsum("bi,oij,bj->bo", a, w, b), ((4096, 128), "bfloat16"), ((64, 128, 128), "bfloat16"),
                    ((4096, 128), "bfloat16"))
    assert sum("T.gemm(left, " in text for text in found.values()) == 1


def test_names_of_a_stored_factor_are_not_those_of_tensors_and_sizes(monkeypatch):
    """Its loops would hide a size or a parameter that is called like them."""
    monkeypatch.setattr("tilelang.program.cut.EXACT", {"": 1.0, "halves": 1e6, "stored": 1.0})
    j = T.dynamic("j")

    @tilelang.program
    def linear(i: T.Tensor((j, 40), "float32"), w: T.Tensor((1100, 40), "float32")):
        return i @ w.T

    module = lower(linear.graph(_Like((70, 40), "float32"), _Like((1100, 40), "float32")), None, Target(SIMULATED))
    first = module.source[:module.source.index("linear_1")]
    assert "high[" in first and len(module.functions()) == 2
    assert not re.search(r"for .*\b[ij]\b.* in ", first)


TRIANGLE = "ikc,jkc->ijc"
OUTER = "sic,sjd->ijcd"


@pytest.mark.parametrize("spec, shape, count", [(TRIANGLE, (384, 384, 128), 3), (OUTER, (256, 128, 32), 2)])
def test_what_tiles_read_and_store_is_brought_side_by_side(spec, shape, count):
    found = kernels(lambda a, b: T.einsum(spec, a, b), *[(shape, "bfloat16")] * 2)
    (gemm,) = (text for text in found.values() if "T.gemm" in text)
    assert len(found) == count and "result" in gemm and not re.search(r"T\.copy\([^)]*, [lm]\]", gemm)


@pytest.mark.parametrize("spec, shape", [(TRIANGLE, (40, 33, 6)), (OUTER, (33, 9, 8))])
def test_orders_of_factors_and_results_compute_the_same(spec, shape, monkeypatch):
    monkeypatch.setattr("tilelang.program.cut._Cutter.wasted", lambda self, plan, last, t: 1e6 if any(
        plan.uses[a].size == 1 for a in last) else 1.0)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float16) for _ in range(2))
    program = tilelang.program(lambda a, b: T.einsum(spec, a, b))
    module = lower(program.graph(a, b), None, Target(SIMULATED))
    assert "result" in module.source
    (got,) = run(module, (a, b), SIMULATED)
    want = np.einsum(spec, a.astype(np.float64), b.astype(np.float64))
    assert np.abs(got - want).max() < 2 ** -10 * np.abs(want).max()


def test_weights_that_are_only_converted_are_stored_where_many_blocks_read_them():
    found = kernels(lambda x, w: x @ w.astype(x.dtype), ((4096, 4096), "bfloat16"), ((4096, 4096), "int8"))
    assert len(found) == 2
    assert len(kernels(lambda x, w: x @ w.astype(x.dtype), ((16, 4096), "bfloat16"), ((4096, 4096), "int8"))) <= 2
