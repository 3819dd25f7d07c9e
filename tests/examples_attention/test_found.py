"""Smallest programs of what was wrong when the examples were written."""

import numpy as np
import pytest
from everywhere import call, cuda_text, placed

import tilelang
import tilelang.language as T

@pytest.mark.spec("T.alloc_fragment")
@pytest.mark.parametrize("target", ["tile", "cpu", "simulator"])
def test_guard_of_an_index_read_from_a_fragment_reads_the_register(target):
    """The guard of out[rank[i]] kept the fragment of the tile program: it read past the thread's registers."""
    n, k = 70, 20

    @T.prim_func
    def scatter(r: T.Tensor((n,), "int32"), x: T.Tensor((k,), "float32"), out: T.Tensor((k,), "int32"),
                got: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=128) as _:
            rank = T.alloc_fragment((n,), "int32")
            for i in T.Parallel(n):
                rank[i] = r[i] - 3
            for i in T.Parallel(n):
                out[rank[i]] = i
            for i in T.Parallel(n):
                got[i] = x[rank[i]]

    where = placed(target)
    rng = np.random.default_rng(0)
    r, x = rng.permutation(n).astype(np.int32), rng.standard_normal(k).astype(np.float32)
    out, got = call(where, tilelang.compile(scatter, out_idx=[2, 3], **where), r, x)
    inside = (r >= 3) & (r < k + 3)
    want = np.empty(k, np.int32)
    want[r[inside] - 3] = np.flatnonzero(inside)
    assert np.array_equal(np.asarray(out), want)
    assert np.array_equal(np.asarray(got), np.where(inside, x[np.clip(r - 3, 0, k - 1)], 0))
    if target == "simulator":
        cuda_text(scatter)


@pytest.mark.spec("T.Layout", "T.annotate_layout")
@pytest.mark.parametrize("target", ["tile", "cpu", "simulator"])
def test_guard_of_an_index_read_from_a_padded_shared_tile_reads_where_it_lies(target):
    n = 8

    @T.prim_func
    def gather(where: T.Tensor((n, 32), "int32"), x: T.Tensor((n * 32 - 5,), "float32"), out: T.Tensor((n, 32), "float32")):
        with T.Kernel(1, threads=64) as _:
            S = T.alloc_shared((n, 32), "int32")
            T.annotate_layout({S: T.Layout((n, 32), lambda i, j: i * 36 + (j + i) % 32)})
            T.copy(where, S)
            for i, j in T.Parallel(n, 32):
                out[i, j] = x[S[i, j]]

    place = placed(target)
    rng = np.random.default_rng(0)
    where = rng.permutation(n * 32).reshape(n, 32).astype(np.int32) - 3
    x = rng.standard_normal(n * 32 - 5).astype(np.float32)
    out = call(place, tilelang.compile(gather, out_idx=[2], **place), where, x)
    inside = (where >= 0) & (where < len(x))
    assert np.array_equal(np.asarray(out), np.where(inside, x[np.clip(where, 0, len(x) - 1)], 0))
    if target == "simulator":
        cuda_text(gather)
