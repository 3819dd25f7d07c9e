"""sparse_matmul and sparse_compress on every execution, against the dense product in float64."""

import ml_dtypes
import numpy as np
import pytest

from tilelang.errors import TileLangError
from tilelang.library import sparse_compress, sparse_matmul
from tilelang.target.wgmma import expand

PLACES = {"cpu": {}, "tile": {"target": "cpu", "execution_backend": "tile"},
          "sm_90a": {"target": {"kind": "cuda", "arch": "sm_90a"}, "execution_backend": "simulator"},
          "sm_80": {"target": {"kind": "cuda", "arch": "sm_80"}, "execution_backend": "simulator"}}
RNG = np.random.default_rng(3)


def sparse(m, k, kind, kept=2):
    """Integers with at most `kept` values in each four."""
    x = RNG.integers(-3, 4, (m, k // 4, 4))
    return np.where(RNG.random(x.shape).argsort(-1) < kept, x, 0).reshape(m, k).astype(kind)


@pytest.mark.parametrize("on,m,n,k,kind,transpose_b", [
    ("cpu", 70, 40, 192, np.float16, False), ("tile", 16, 24, 64, ml_dtypes.bfloat16, True),
    ("tile", 16, 24, 64, np.int8, False), ("sm_90a", 200, 136, 192, np.float16, True),
    ("sm_90a", 64, 72, 128, ml_dtypes.bfloat16, False),
    ("sm_90a", 80, 40, 256, np.int8, True), ("sm_90a", 33, 17, 64, ml_dtypes.float8_e4m3fn, True),
    ("sm_80", 40, 24, 128, np.uint8, True)])
def test_products_are_those_of_the_dense_matrix(on, m, n, k, kind, transpose_b):
    a, b = sparse(m, k, kind), RNG.integers(0, 4, (n, k) if transpose_b else (k, n)).astype(kind)
    values, metadata = sparse_compress(a, **PLACES[on])
    columns = 16 if a.dtype.itemsize == 1 else 8
    assert (values.shape, metadata.shape, values.dtype) == ((m, k // 2), (k // columns, -(-m // 16) * 16), a.dtype)
    c = sparse_matmul(values, metadata, b, transpose_b=transpose_b, out_dtype="int32" if a.dtype.kind in "iu" else "float32",
                      **PLACES[on])
    wide = b.astype(np.float64)
    np.testing.assert_array_equal(c.astype(np.float64), a.astype(np.float64) @ (wide.T if transpose_b else wide))


def test_the_compressed_form_is_the_matrix():
    a = sparse(20, 128, np.float16)
    a[3, 4:8], a[5, 60:64] = [0, np.nan, 0, -1], [np.inf, 0, 0, 0]
    values, metadata = sparse_compress(a)
    codes = (metadata.T[:20, :, None] >> np.array([0, 4]) & 15).reshape(20, -1)
    assert ((codes & 3) < codes >> 2).all()
    np.testing.assert_array_equal(expand(values, codes), a)


def test_up_to_eight_columns_had_no_tile():
    a, b = sparse(16, 64, np.float16), np.arange(64, dtype=np.float16).reshape(1, 64) % 5
    found = sparse_matmul(*sparse_compress(a), b, transpose_b=True, target="cuda -arch=sm_90a", execution_backend="simulator")
    np.testing.assert_array_equal(found, a @ b.T)


@pytest.mark.parametrize("call,kind,text", [
    (lambda: sparse_compress(np.ones((4, 64), np.float16)), "matmul-option", "more than two values"),
    (lambda: sparse_compress(np.zeros((4, 72), np.float16)), "matmul-shape", "multiple of 64"),
    (lambda: sparse_compress(np.zeros((4, 64), np.float32)), "matmul-type", "float32"),
    (lambda: sparse_matmul(np.ones((4, 32), np.float16), np.full((8, 4), 0x44, np.uint8), np.ones((64, 8), np.float16)),
     "matmul-shape", "(8, 16)"),
    (lambda: sparse_matmul(np.ones((4, 32), np.float16), np.full((8, 16), 0x44, np.uint8), np.ones((32, 8), np.float16)),
     "matmul-shape", "k = 64 of values, 32 of b"),
    (lambda: sparse_matmul(np.ones((4, 32), np.float16), np.full((8, 16), 0x44, np.int16), np.ones((64, 8), np.float16)),
     "matmul-type", "int16"),
    (lambda: sparse_matmul(np.ones((4, 32), np.float16), np.full((8, 16), 0x44, np.uint8), np.ones((64, 8), np.int8)),
     "matmul-type", "int8")])
def test_wrong_calls_are_named(call, kind, text):
    with pytest.raises(TileLangError) as e:
        call()
    assert e.value.kind == kind and text in str(e.value)


def test_metadata_of_another_type_are_named_before_their_shape():
    values, metadata = sparse_compress(np.eye(64, dtype=np.int8))
    with pytest.raises(TypeError, match="metadata of uint8"):
        sparse_matmul(values, metadata.view(np.uint8), np.ones((64, 8), np.int8))
