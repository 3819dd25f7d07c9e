"""A pipelined tile of 2 or 4 rows, as scales have: its versions cannot lie one after another in a swizzle of 8 rows."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T

PLACES = {"cpu": {"target": "cpu"}, **{arch: {"target": {"kind": "cuda", "arch": arch}, "execution_backend": "simulator"}
                                       for arch in ("sm_80", "sm_90a")}}


@pytest.mark.parametrize("on", PLACES)
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_a_pipelined_tile_of_few_rows(on, rows):
    """On sm_90a it was planned as TMA and then had no layout: an internal error."""
    steps, side = 4, 64 // rows

    @T.prim_func
    def scaled(S: T.Tensor((steps * rows, 64), "float16"), A: T.Tensor((16, steps * 64), "float16"),
               C: T.Tensor((64, 16), "float32")):
        with T.Kernel(1, threads=128) as _:
            As = T.alloc_shared((16, 64), "float16")
            Ss = T.alloc_shared((rows, 64), "float16")
            W = T.alloc_fragment((64, 64), "float16")
            Cf = T.alloc_fragment((64, 16), "float32")
            T.clear(Cf)
            for k in T.Pipelined(steps, num_stages=3):
                T.copy(S[k * rows, 0], Ss)
                T.copy(A[0, k * 64], As)
                for i, j in T.Parallel(64, 64):
                    W[i, j] = Ss[j // side, i]
                T.gemm(W, As, Cf, transpose_B=True)
            T.copy(Cf, C)

    rng = np.random.default_rng(0)
    s, a = (rng.integers(-3, 4, x).astype(np.float16) for x in ((steps * rows, 64), (16, steps * 64)))
    c = np.zeros((64, 16), np.float32)
    tilelang.compile(scaled, **PLACES[on])(s, a, c)
    assert np.array_equal(c, s.astype(np.float32).repeat(side, 0).T @ a.astype(np.float32).T)
