"""fused_matmul: the caller's epilogue and reductions on every execution, against float64."""

import ml_dtypes
import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.library import fused_matmul

PLACES = {"cpu": {}, "tile": {"target": "cpu", "execution_backend": "tile"},
          "sm_90a": {"target": {"kind": "cuda", "arch": "sm_90a"}, "execution_backend": "simulator"},
          "sm_80": {"target": {"kind": "cuda", "arch": "sm_80"}, "execution_backend": "simulator"}}
EACH = ["cpu", "tile", "sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)]
FACTOR = 3.0


def normal(*shape, kind=np.float16):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(kind)


@pytest.mark.parametrize("on", EACH)
@pytest.mark.parametrize("m, n, k, kind", [(70, 200, 48, np.float16), (128, 64, 24, np.float64), (33, 40, 100, np.float32)])
def test_epilogue_and_reductions_are_those_of_float64(m, n, k, kind, on):
    a, b, scale, table = normal(m, k, kind=kind), normal(n, k, kind=kind), normal(m, kind=np.float32), normal(m, n, kind=kind)
    c, most, total, largest, shifted = fused_matmul(
        a, b, lambda x, i, j, s, t: x * s[i] + t[i, j] + j, tensors=(scale, table), transpose_b=True, out_dtype="float32",
        reduce=[("rows", "max"), ("all", "sum", lambda x, i, j, s, t: x * x), ("all", "absmax"),
                ("rows", "sum", lambda x, i, j, s, t: x - i)], **PLACES[on])
    want = (a.astype(np.float64) @ b.T.astype(np.float64)) * scale[:, None] + table + np.arange(n)
    unit = 2.0**-8 if kind == np.float32 and on in ("sm_90a", "sm_80") else 2.0**-20
    size = (abs(a.astype(np.float64)) @ abs(b.T.astype(np.float64))) * abs(scale[:, None]) + abs(table) + np.arange(n)
    limit = unit * size
    assert (abs(c - want) <= limit).all() and (abs(most - want.max(1)) <= limit.max(1)).all()
    assert abs(total - (want**2).sum()) <= 4 * unit * (size**2).sum() and abs(largest - abs(want).max()) <= limit.max()
    assert (abs(shifted - (want - np.arange(m)[:, None]).sum(1)) <= 2 * (size + m).sum(1) * unit).all()
    assert (most.shape, total.shape, largest.shape, shifted.shape) == ((m,), (), (), (m,))


def test_a_matrix_is_left_out_and_views_are_copied():
    a, b = normal(24, 40)[::2, ::2], normal(20, 36)
    plain = fused_matmul(a, b)
    (most,) = fused_matmul(a, b, reduce=[("rows", "max")], stored=False)
    assert isinstance(plain, np.ndarray) and (most.astype(np.float16) == plain.max(1)).all()
    eights = a.astype(ml_dtypes.float8_e4m3fn), b.astype(ml_dtypes.float8_e4m3fn)
    assert fused_matmul(*eights, lambda x, i, j: T.max(x, 0.0)).dtype == ml_dtypes.bfloat16
    assert (fused_matmul(np.ones((2, 3), np.int8), np.ones((3, 2), np.int8), reduce=[("all", "max")])[1]) == 3


@pytest.mark.parametrize("on", EACH)
@pytest.mark.parametrize("orders", [(False, True), (True, False)])
def test_float32_keeps_its_precision(orders, on):
    """A sum of tf32 is 2^-11 off; infinities stay what they are."""
    a, b = normal(70, 100, kind=np.float32), normal(100, 72, kind=np.float32)
    a[0, 0] = np.inf
    given = [np.ascontiguousarray(x.T) if t else x for x, t in zip((a, b), orders)]
    c = fused_matmul(*given, transpose_a=orders[0], transpose_b=orders[1], exact=True, **PLACES[on])
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert (abs(c[1:] - x[1:] @ y) <= (2.0**-20 + 100 * 2.0**-24) * (abs(x[1:]) @ abs(y))).all()
    assert np.isinf(c[0]).all()


def test_values_that_a_function_reads_are_part_of_its_kernel(monkeypatch):
    a, b = np.ones((4, 8), np.float32), np.ones((8, 4), np.float32)

    def scaled(x, i, j):
        return x * FACTOR

    assert (fused_matmul(a, b, scaled) == 24).all()
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert (fused_matmul(a, b, scaled) == 16).all()


@pytest.mark.parametrize("on", EACH)
def test_two_products_become_one_matrix(on):
    a, gate, up, s = normal(70, 48), normal(100, 48), normal(48, 100), normal(70, kind=np.float32)
    up = up.T  # in another order than gate
    y, total = fused_matmul(a, gate, lambda x, y, i, j, s: x / (1 + T.exp(-x)) * y * s[i], second=up, tensors=[s],
                            transpose_b=True, reduce=[("rows", "sum")], **PLACES[on])
    g, u = a.astype(np.float64) @ gate.T.astype(np.float64), a.astype(np.float64) @ up.T.astype(np.float64)
    want = g / (1 + np.exp(-g)) * u * s[:, None]
    assert abs(y - want).max() <= 2e-3 * abs(want).max() and abs(total - want.sum(1)).max() <= 1e-4 * abs(want).sum(1).max()


A = np.ones((4, 8), np.float32)
WRONG = {"pair": lambda: fused_matmul(A, A.T, lambda x, y, i, j: x * y, second=A),
         "pair without a function": lambda: fused_matmul(A, A.T, second=A.T),
         "batch": lambda: fused_matmul(A[None], A.T), "how": lambda: fused_matmul(A, A.T, reduce=[("rows", "prod")]),
         "over": lambda: fused_matmul(A, A.T, reduce=[("columns", "max")]),
         "nothing": lambda: fused_matmul(A, A.T, stored=False),
         "exact": lambda: fused_matmul(A.astype(np.float16), A.T.astype(np.float16), exact=True),
         "tensors": lambda: fused_matmul(A, A.T, tensors=[A] * 3), "empty": lambda: fused_matmul(A[:0], A.T)}


@pytest.mark.parametrize("name", WRONG)
def test_what_there_is_no_kernel_for(name):
    with pytest.raises(TileLangError) as e:
        WRONG[name]()
    assert e.value.kind == "matmul-option"
