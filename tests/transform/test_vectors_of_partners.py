"""Elements that iterations access beside each other, in pairs or halves of a row, are vectors for all lanes together."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang
import tilelang.language as T

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "names"))
from everywhere import SM90A, WITH_HOPPER, everywhere


def rotated(form, rows, n, block=4):
    """Y = X cos + (partner of X) sin, with the partner in the same pair, in the pair by one iteration, or in the other half."""
    @T.prim_func
    def main(X: T.Tensor((rows, n), "float16"), C: T.Tensor((n // 2,), "float16"), S: T.Tensor((n // 2,), "float16"),
             Y: T.Tensor((rows, n), "float16")):
        with T.Kernel(T.ceildiv(rows, block), threads=64) as b:
            if form == "flipped":
                for r, d in T.Parallel(block, n):
                    at = b * block + r
                    partner = T.if_then_else(d % 2 == 0, -X[at, d ^ 1], X[at, d ^ 1])
                    Y[at, d] = X[at, d] * C[d // 2] + partner * S[d // 2]
            if form == "pairs":
                for r, d in T.Parallel(block, n // 2):
                    at = b * block + r
                    u = X[at, 2 * d]
                    v = X[at, 2 * d + 1]
                    Y[at, 2 * d] = u * C[d] - v * S[d]
                    Y[at, 2 * d + 1] = v * C[d] + u * S[d]
            if form == "halves":
                for r, d in T.Parallel(block, n // 2):
                    at = b * block + r
                    u = X[at, d]
                    v = X[at, d + n // 2]
                    Y[at, d] = u * C[d] - v * S[d]
                    Y[at, d + n // 2] = v * C[d] + u * S[d]

    return main


@pytest.mark.parametrize("form", ["flipped", "pairs", "halves"])
@pytest.mark.parametrize("rows, n", [(7, 64), (5, 24), (3, 10)])
def test_partners_in_rotary_embeddings_were_loaded_and_stored_one_by_one(form, rows, n):
    rng = np.random.default_rng(0)
    x, c, s = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((rows, n), (n // 2,), (n // 2,)))
    u, v = (x[:, :n // 2], x[:, n // 2:]) if form == "halves" else (x[:, ::2], x[:, 1::2])
    first, second = u * c - v * s, v * c + u * s
    want = np.concatenate([first, second], 1) if form == "halves" else np.stack([first, second], 2).reshape(rows, n)
    program = rotated(form, rows, n)
    assert np.array_equal(everywhere(program, x, c, s, on=WITH_HOPPER)[3], want)
    if n == 64:
        body = tilelang.compile(program, target=SM90A).get_kernel_source().partition("__global__")[2]
        assert not re.search(r"[^&]\bX\[.*\d", re.sub(r"//.*", "", body)) and not re.search(r"(?m)^ *Y\[", body)


def test_stores_of_one_element_keep_their_order():
    @T.prim_func
    def main(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32"), Z: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=16):
            for i in T.Parallel(64):
                Y[i] = X[i]
                Y[i] = X[i] + 1
            for i in T.Parallel(64):
                Z[2 * i] = X[i]
                if X[i] > 0:
                    Z[2 * i + 1] = X[i] * 2

    x = np.arange(-20, 44, dtype=np.float32)
    _, y, z = everywhere(main, x, on=WITH_HOPPER)
    assert np.array_equal(y, x + 1) and np.array_equal(z[::2], x) and np.array_equal(z[1::2], np.where(x > 0, 2 * x, 0))


def test_every_third_element_of_a_row_that_ends_early():
    @T.prim_func
    def main(X: T.Tensor((3, 94), "int32"), Y: T.Tensor((3, 32), "int32")):
        with T.Kernel(3, threads=32) as b:
            for i in T.Parallel(32):
                Y[b, i] = X[b, 3 * i]

    x = np.arange(3 * 94, dtype=np.int32).reshape(3, 94)
    assert np.array_equal(everywhere(main, x, on=WITH_HOPPER)[1], x[:, ::3])
