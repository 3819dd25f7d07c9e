"""Indices of types that wrap, and names of one memory whose equal indices are other elements: who touches what."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere

import tilelang.language as T
from tilelang.ir import Evaluate, dtype, rewrite, seq
from tilelang.ir.numbers import keeps_value, wrapped
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES
from tilelang.transform.check.verify_sync import verify_sync
from tilelang.transform.verify_sync.launch import check_launch

N = np.arange(256)
U8 = "uint8"


def moved(index):
    @T.prim_func
    def main(A: T.Tensor((256,), "int32"), B: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((1024,), "int32")
            tx = T.get_thread_binding()
            S[tx] = A[tx]
            B[tx] = S[index(tx)]

    return main


# What each is as a number without end lies apart from the 256 elements that are written.
@pytest.mark.parametrize("index, want", [
    (lambda tx: T.cast(T.cast(tx + 300, U8), "int32"), (N + 300) & 255),
    (lambda tx: T.cast(T.cast(tx, U8) + T.cast(200, U8), "int32") | T.cast(T.cast(tx + 256, U8), "int32"), (N + 200) & 255 | N),
    (lambda tx: T.cast((T.cast(tx, "uint32") - T.cast(1024, "uint32")) % T.cast(251, "uint32"), "int32"),
     (N - 1024).astype(np.uint32) % 251),
    (lambda tx: T.cast(T.cast(tx + 256, "int8"), "int32") + 128, N.astype(np.int8).astype(int) + 128),
    (lambda tx: (T.cast(tx < 128, "int32") + T.cast(tx < 64, "int32")) * 100, ((N < 128) * 1 + (N < 64)) * 100),
])
def test_an_element_that_an_index_wraps_to_is_read_behind_a_barrier(index, want):
    a = (N + 7).astype(np.int32)
    np.testing.assert_array_equal(everywhere(moved(index), a, on=WITH_HOPPER)[1], a[want])


def test_the_verifier_sees_where_an_index_wraps_to():
    passes = [p for p in (*TILE_PASSES, *DEVICE_PASSES) if p is not verify_sync]
    func = moved(lambda tx: T.cast(T.cast(tx + 300, U8), "int32")).func
    launch = run_passes(func, passes, PassContext(Target({"kind": "cuda", "arch": "sm_80"}), verify=True)).body
    assert check_launch(launch)[1] == []
    gone = rewrite(launch, lambda x: seq() if isinstance(x, Evaluate) and x.call.op == "sync_threads" else None)
    assert any("without a barrier in between" in f.message and f.exact for f in check_launch(gone)[1])


def test_a_fragment_is_read_at_the_register_that_an_index_wraps_to():
    @T.prim_func
    def main(A: T.Tensor((512,), "int32"), B: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((512,), "int32")
            T.copy(A, F)
            for i in T.Parallel(256):
                B[i] = F[T.cast(T.cast(i + 256, U8), "int32")]

    a = np.arange(512, dtype=np.int32)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], a[:256])


def test_a_fragment_is_stored_at_the_register_that_an_index_wraps_to():
    @T.prim_func
    def main(A: T.Tensor((256,), "int32"), B: T.Tensor((512,), "int32")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((512,), "int32")
            T.clear(F)
            for i in T.Parallel(512):
                if i < 256:
                    F[T.cast(T.cast(i + 256, U8), "int32")] = A[i]
            T.copy(F, B)

    a = np.arange(256, dtype=np.int32) + 1
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[1], np.append(a, np.zeros(256, np.int32)))


def test_names_of_one_tensor_with_other_strides_are_ordered():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), C: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            U = T.decl_buffer((8, 8), "int32", data=C.data)
            V = T.decl_buffer((8, 8), "int32", data=C.data, strides=(1, 8))
            U[tx // 8, tx % 8] = A[tx]
            B[tx] = V[tx // 8, tx % 8]

    a = np.arange(64, dtype=np.int32)
    np.testing.assert_array_equal(everywhere(main, a, on=WITH_HOPPER)[2], a.reshape(8, 8).T.ravel())


def test_windows_of_one_tensor_that_overlap_are_ordered():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), C: T.Tensor((65,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            W = T.decl_buffer((64, 2), "int32", data=C.data, strides=(1, 1))
            W[tx, 0] = A[tx]
            B[tx] = W[tx, 1]

    a = np.arange(64, dtype=np.int32) + 3
    np.testing.assert_array_equal(everywhere(main, a, np.zeros(65, np.int32), on=WITH_HOPPER)[2], np.append(a[1:], 0))


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_wrapped_is_what_numpy_keeps(name):
    x = np.array([0, 1, -1, 127, 128, 255, 256, 300, -129, 65535, 1 << 31, (1 << 32) + 5, -(1 << 31) - 1])
    np.testing.assert_array_equal(wrapped(x, dtype(name)), x.astype(name))
    assert [wrapped(int(v), dtype(name)) for v in x] == wrapped(x, dtype(name)).tolist()
    for other in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"):
        info = np.iinfo(name), np.iinfo(other)
        assert keeps_value(dtype(name), dtype(other)) == (info[1].min <= info[0].min and info[0].max <= info[1].max)
