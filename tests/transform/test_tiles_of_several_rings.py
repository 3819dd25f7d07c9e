"""Pipelined loops that load one tile, each beside tiles of its own: every loop has versions of it."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

f16, f32 = "float16", "float32"


@pytest.mark.parametrize("how", ["alone", "beside another", "read behind"])
def test_versions_of_a_tile_in_two_rings_were_not_allocated(how):
    @T.prim_func
    def main(A: T.Tensor((64, 128), f16), B: T.Tensor((128, 64), f16), C: T.Tensor((64, 64), f32)):
        with T.Kernel(1, threads=128):
            a, b, d = T.alloc_shared((64, 32), f16), T.alloc_shared((32, 64), f16), T.alloc_shared((64, 32), f16)
            acc = T.alloc_fragment((64, 64), f32)
            T.clear(acc)
            for c in T.Pipelined(4, num_stages=2):
                T.copy(A[0, c * 32], a)
                T.copy(B[c * 32, 0], b)
                T.gemm(a, b, acc)
            for c in T.Pipelined(2, num_stages=2):
                T.copy(B[c * 32, 0], b)
                if how == "beside another":
                    T.copy(A[0, 32 + c * 32], d)
                T.gemm(d if how == "beside another" else a, b, acc)
            if how == "read behind":
                T.gemm(a, b, acc)
            T.copy(acc, C)

    rng = np.random.default_rng(0)
    args = [rng.integers(-2, 3, s).astype(f16) for s in ((64, 128), (128, 64))] + [np.zeros((64, 64), f32)]
    lowered = lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    assert np.array_equal(run_device(lowered, args).outputs["C"], run_tile(main.func, args)["C"])
