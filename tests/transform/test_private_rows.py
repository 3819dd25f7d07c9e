"""lower_tile_ops: arrays of a thread get one dimension, addressed row by row."""

import numpy as np
from pass_steps import around

import tilelang.language as T
from tilelang.ir import Alloc, Load, Store, walk
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower


@T.prim_func
def turned(A: T.Tensor((32, 12), "int32"), B: T.Tensor((32, 12), "int32")):
    with T.Kernel(1, threads=32):
        t = T.get_thread_binding()
        x = T.alloc_local((3, 4), "int32")
        for i, j in T.grid(3, 4):
            x[i, j] = A[t, i * 4 + j]
        for i, j in T.grid(3, 4):
            B[t, j * 3 + i] = x[i, j]


def test_a_local_array_of_two_dimensions_becomes_one_of_one():
    before, after = around(turned, "lower_tile_ops")
    shapes = [[x.buffer.shape for x in walk(f.body, Alloc)] for f in (before, after)]
    assert [len(s) for s in shapes[0]] == [2] and [tuple(map(int, s)) for s in shapes[1]] == [(12,)]
    local = [x for x in walk(after.body, Load, Store) if x.buffer.name == "x"]
    assert len(local) == 2 and all(len(x.indices) == 1 for x in local)
    shared = [x for x in walk(after.body, Load, Store) if x.buffer.name in "AB"]
    assert all(len(x.indices) == 2 for x in shared)  # tensors keep their dimensions
    a = np.arange(384, dtype=np.int32).reshape(32, 12)
    out = run_device(lower(turned.func, Target({"kind": "cuda", "arch": "sm_80"})), [a, np.zeros_like(a)]).outputs["B"]
    assert np.array_equal(out, a.reshape(32, 3, 4).transpose(0, 2, 1).reshape(32, 12))


def test_arrays_of_one_dimension_stay():
    @T.prim_func
    def main(A: T.Tensor((32,), "int32"), B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            x = T.alloc_local((1,), "int32")
            x[0] = A[t]
            B[t] = x[0]

    _, after = around(main, "lower_tile_ops")
    assert [tuple(x.buffer.shape) for x in walk(after.body, Alloc)] == [(1,)]
